"""The rows that kvtier means to win, each beside the best of the peers in the same run."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

NOT_COMPARED = ("memcpy", "none", "prefix")
"""A limit, and engines without a cache below them."""
GAVE_UP = float("inf")
SAME_S = 0.010
"""Times of faults that differ by less are the same: they are polled, through a message each."""


@dataclass(frozen=True)
class ComparedRow:
    """One figure of kvtier's, and the best peer's."""

    name: str
    """With its unit, for programs."""
    title: str
    unit: str
    ours: float | None
    best: float | None
    """None if no peer has one."""
    best_peer: str
    lower_wins: bool
    verdict: str
    """won, lost, equal, or alone if there is nothing to compare with."""
    noisy: bool = False


def compared(results: dict[str, Any]) -> list[dict[str, Any]]:
    """All rows that the results have figures for, as JSON."""
    return [asdict(row) for row in _rows(results)]


def _rows(results: dict[str, Any]) -> Iterator[ComparedRow]:
    yield from _lookups(results.get("lookups") or {})
    yield from _copies(results.get("copies") or [])
    yield from _replay(results.get("replay") or {})
    yield from _faults(results.get("faults") or {})


def row(
    name: str,
    title: str,
    unit: str,
    figures: Iterable[tuple[str, float | None]],
    *,
    lower_wins: bool = True,
    same: float = 0.0,
    noisy: Collection[str] = (),
) -> Iterator[ComparedRow]:
    """The row of these figures by peer, None for a peer that gave none; nothing if kvtier has none. `noisy`:
    peers whose figures are."""
    by_peer = {peer: value for peer, value in figures if peer not in NOT_COMPARED}
    if "kvtier" not in by_peer:
        return
    ours = by_peer.pop("kvtier")
    known = {peer: value for peer, value in by_peer.items() if value is not None}
    if not known:
        yield ComparedRow(name, title, unit, ours, None, "", lower_wins, "alone", "kvtier" in noisy)
        return
    best_peer = min(known, key=lambda peer: known[peer] if lower_wins else -known[peer])
    best = known[best_peer]
    verdict = "lost"
    if ours is not None:
        gain = best - ours if lower_wins else ours - best
        verdict = "equal" if abs(gain) <= same else "won" if gain > 0 else "lost"
    uncertain = "kvtier" in noisy or best_peer in noisy
    yield ComparedRow(name, title, unit, ours, best, best_peer, lower_wins, verdict, uncertain)


def _lookups(lookups: dict[str, Any]) -> Iterator[ComparedRow]:
    sweep = lookups.get("sweep", [])
    levels = sorted({each["entries"] for each in sweep})
    if not levels:
        return
    level = levels[-1]
    for hashes in sorted({each["hashes"] for each in sweep}):
        mine = [each for each in sweep if each["entries"] == level and each["hashes"] == hashes]
        for percentile in ("p50", "p99"):
            yield from row(
                f"lookup_{hashes}_{percentile}_us",
                f"lookup of {hashes:,} hashes, {percentile}, given back",
                "µs",
                [(each["peer"], each[f"{percentile}_us"]) for each in mine],
            )


def _copies(copies: list[dict[str, Any]]) -> Iterator[ComparedRow]:
    for shape in dict.fromkeys(each["shape"] for each in copies):
        for what in ("store", "load"):
            mine = [each for each in copies if each["shape"] == shape and each["what"] == what]
            if mine:
                yield from row(
                    f"{what}_{shape}_gb_per_s",
                    f"{what} of {mine[0]['bytes'] >> 20} MiB, {mine[0]['title']}",
                    "GB/s",
                    [(each["peer"], each["gb_per_s"]) for each in mine],
                    lower_wins=False,
                    noisy=[each["peer"] for each in mine if each["noisy"]],
                )


def _replay(replay: dict[str, Any]) -> Iterator[ComparedRow]:
    for restored in replay.get("restored", []):
        yield from row(
            f"restored_{restored['tokens']}_ttft_ms",
            f"time to first token, {restored['tokens']:,} tokens restored, median",
            "ms",
            [(each["mode"], each["restored_ms"]) for each in restored["rows"]],
            noisy=[each["mode"] for each in restored["rows"] if each["noisy"]],
        )
    for trace in replay.get("traces", []):
        yield from row(
            f"trace_{trace['workload'].replace(' ', '_')}_ttft_ms",
            f"time to first token, trace “{trace['workload']}”, mean",
            "ms",
            [(each["mode"], each["mean_ttft_ms"]) for each in trace["rows"]],
            noisy=["kvtier"] if trace["noisy"] else [],
        )


def _faults(faults: dict[str, Any]) -> Iterator[ComparedRow]:
    if kills := faults.get("engine_kill"):
        yield from row(
            "engine_kill_reclaim_s",
            "after an engine's SIGKILL: nothing of it is held any more",
            "s",
            [(each["peer"], each["seconds"]) for each in kills],
            same=SAME_S,
        )
    if kills := faults.get("daemon_kill"):
        yield from row(
            "daemon_kill_kept_share",
            "after the server's SIGKILL and a start: part of the blocks that is loaded",
            "",
            [(each["peer"], each["kept_share"]) for each in kills],
            lower_wins=False,
        )
        yield from row(
            "daemon_kill_serving_s",
            "from the server's SIGKILL until it serves again",
            "s",
            [(each["peer"], each["serving_s"]) for each in kills],
            same=SAME_S,
        )
    for when in dict.fromkeys(each["when"] for each in faults.get("flips", [])):
        mine = [each for each in faults["flips"] if each["when"] == when]
        yield from row(
            f"corrupt_served_{when.replace(' ', '_').replace(chr(39), '')}",
            f"prompts of {mine[0]['flipped']} with a flipped byte that are served wrong, {when}",
            "",
            [(each["peer"], float(each["served"])) for each in mine],
        )
