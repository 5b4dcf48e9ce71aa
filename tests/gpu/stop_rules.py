"""What a measurement would change in the design, or in how it is deployed, decided before it is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.gpu.record import DONE, SKIPPED, Record
from tests.gpu.targets import H2D, KIB

SLICE_US = 1_000.0
"""The time slice of a GPU's multiprocessors, and of two contexts' turns on a copy engine."""
WAITS_US = SLICE_US / 2
"""An engine's small copy that takes so long has waited for a turn, and not for a chunk of 4 MiB (80 µs)."""
SMALL_FRAGMENT = 28 * KIB
"""Smaller ones are said to be slow in batches to the device (vllm-project/vllm#42212)."""
FASTER, SLOWER = 1.2, 1.05


@dataclass(frozen=True)
class Finding:
    """What the record says to one rule."""

    holds: bool
    """Whether the rule applies, so that something has to change."""
    why: str


@dataclass(frozen=True)
class StopRule:
    """One condition and its consequence; `judge` returns None where the record does not tell."""

    what: str
    then: str
    judge: Callable[[Record], Finding | None]

    def row(self, record: Record) -> str:
        """A line of the report's table."""
        finding = self.judge(record)
        if finding is None:
            return f"| {self.what} | not measured | – | |"
        verdict = "fake driver" if record.fake else "**yes**" if finding.holds else "no"
        return f"| {self.what} | {verdict} | {finding.why} | {self.then} |"


def _opened(kind: str, *cases: str) -> Callable[[Record], Finding | None]:
    """Holds if one of these cases of `sharing` is refused."""

    def judge(record: Record) -> Finding | None:
        rows = [row for row in record.rows("sharing") if row["case"] in cases and kind in row]
        refused = [f"{row['case']}: {row[kind]}" for row in rows if row[kind] != "ok"]
        return (
            Finding(bool(refused), "; ".join(refused) or f"open in each case tried ({len(rows)})")
            if rows
            else None
        )

    return judge


def _waits(record: Record) -> dict[tuple[str, str, int], float]:
    """Microseconds that calls take longer beside another process's kernels, by way, shape and KiB."""
    idle: dict[tuple[str, str, int], float] = {}
    beside: dict[tuple[str, str, int], float] = {}
    for row in record.rows("slices", kind="calls"):
        if "p50_us" not in row:
            continue
        known = idle if row["beside"] == "idle" else beside
        known[row["way"], row["shape"], row["fragment_kib"]] = float(row["p50_us"])
    return {call: took - idle[call] for call, took in beside.items() if call in idle}


def calls_wait(record: Record) -> Finding | None:
    """Batches of large fragments beside another process's kernels, over idle."""
    waits = {
        call: us
        for call, us in _waits(record).items()
        if call[1] == "batch" and call[2] * KIB > SMALL_FRAGMENT
    }
    if not waits:
        return None
    way, shape, kib = worst = max(waits, key=lambda call: waits[call])
    return Finding(
        waits[worst] >= SLICE_US, f"{shape} {way} of {kib} KiB: {waits[worst]:.0f} µs more than idle"
    )


def small_calls_wait(record: Record) -> Finding | None:
    """Small fragments to the device beside another process's kernels: in batches, and in other shapes."""
    waits = {
        call: us for call, us in _waits(record).items() if call[0] == H2D and call[2] * KIB <= SMALL_FRAGMENT
    }
    slow = sorted({f"{shape} of {kib} KiB" for (_, shape, kib), us in waits.items() if us >= SLICE_US})
    fast = sorted({f"{shape} of {kib} KiB" for (_, shape, kib), us in waits.items() if us < SLICE_US})
    if not waits:
        return None
    why = f"waited: {', '.join(slow) or 'none'}; did not: {', '.join(fast) or 'none'}"
    return Finding(any(one.startswith("batch ") for one in slow), why)


def _small_copy(record: Record, chunk_mib: int, flights: int) -> float | None:
    rows = record.rows("slices", kind="small copy", chunk_mib=chunk_mib, flights=flights, fragment_kib=512)
    return max((float(row["p99_us"]) for row in rows), default=None)


def pacing_helps(record: Record) -> Finding | None:
    """An engine's small copies beside large chunks and beside paced ones."""
    large, small = _small_copy(record, 32, 2), _small_copy(record, 4, 1)
    if large is None or small is None:
        return None
    why = f"p99 {large:.0f} µs beside 32 MiB × 2, {small:.0f} µs beside 4 MiB × 1"
    return Finding(large >= WAITS_US and small < large / 2, why)


def pacing_is_vain(record: Record) -> Finding | None:
    """Whether large chunks make nobody wait, or small ones do as well."""
    large, small = _small_copy(record, 32, 2), _small_copy(record, 4, 1)
    if large is None or small is None:
        return None
    return Finding(large < WAITS_US or small >= large / 2, f"p99 {large:.0f} µs and {small:.0f} µs")


def small_fragments_crawl(record: Record) -> Finding | None:
    """The same small fragments to the device, in batches and by other ways."""
    rows = [
        row
        for row in record.rows("shapes", way=H2D, run_blocks=1)
        if row["fragment_bytes"] < SMALL_FRAGMENT and row["planes"] > 1
    ]
    batches = {row["fragment_bytes"]: float(row["gb_per_s"]) for row in rows if row["shape"] == "batch"}
    faster = {
        (row["shape"], row["fragment_bytes"]): float(row["gb_per_s"]) / batches[row["fragment_bytes"]]
        for row in rows
        if row["shape"] != "batch" and batches.get(row["fragment_bytes"])
    }
    if not faster:
        return None
    shape, size = max(faster, key=lambda each: faster[each])
    ratio = faster[shape, size]
    return Finding(ratio >= FASTER, f"{size >> 10} KiB by {shape}: {ratio:.2f} times as fast as in batches")


def overlap_hint_hurts(record: Record) -> Finding | None:
    """The overlap flag against none, in an engine's steps."""

    def worst(hint: bool) -> float | None:
        rows = record.rows("interference", copies="dma by a process beside", overlap_hint=hint)
        return max((row["x_p99"] for row in rows if row["fragment_bytes"] >= 512 * KIB), default=None)

    with_it, without = worst(True), worst(False)
    if with_it is None or without is None:
        return None
    return Finding(with_it > SLOWER * without, f"p99 × {with_it:.3f} with it, × {without:.3f} without")


def bytes_are_wrong(record: Record) -> Finding | None:
    """Steps that check bytes or deaths, and the suite."""
    checked = ("suite", "soak", "worker_kill", "exporter_kill", "end_to_end")
    states = [step for step in record.steps if step.name in checked and step.state != SKIPPED]
    wrong = [f"{step.name} {step.state}" for step in states if step.state != DONE]
    wrong += [
        f"{row['wrong_blocks']} wrong blocks" for row in record.rows("end_to_end") if row.get("wrong_blocks")
    ]
    return Finding(bool(wrong), "; ".join(wrong) or f"{len(states)} steps passed") if states else None


RULES = (
    StopRule(
        "Something that checks bytes or deaths fails",
        "Stop: find out why before anything else is measured.",
        bytes_are_wrong,
    ),
    StopRule(
        "A handle of cuMemAlloc is refused where nothing separates the processes",
        "The data plane does not stand as it is: descriptors only.",
        _opened("legacy", "one namespace, one user", "both 10001"),
    ),
    StopRule(
        "Such a handle is refused across PID namespaces",
        "Deployment's defaults change (hostPID, or descriptors); the data plane stands.",
        _opened("legacy", "two namespaces", "engine in a namespace, daemon on the host"),
    ),
    StopRule(
        "Such a handle is refused between equal PIDs, or between users",
        "Deployment's defaults change (one user, or descriptors); the data plane stands.",
        _opened(
            "legacy",
            "two namespaces, equal PIDs",
            "engine is root, daemon 10001",
            "engine 10002, daemon 10001",
            "pods: namespaces, root and 10001",
        ),
    ),
    StopRule(
        "A descriptor is refused anywhere",
        "What the documentation recommends instead of handles changes.",
        _opened(
            "chunk",
            "two namespaces",
            "two namespaces, equal PIDs",
            "engine is root, daemon 10001",
            "pods: namespaces, root and 10001",
        ),
    ),
    StopRule(
        "Batches wait for a time slice beside another process's kernels (1 ms)",
        "The boundary between engine and daemon is in the wrong place: rethink.",
        calls_wait,
    ),
    StopRule(
        "Batches of small fragments to the device wait for such a slice, which they take from the engine",
        "`auto` hands them over in a shape that does not.",
        small_calls_wait,
    ),
    StopRule(
        "An engine's small copies wait beside large chunks, and not beside paced ones",
        "Pace while engines compute: workers.gpu_pacing stays `stepping`.",
        pacing_helps,
    ),
    StopRule(
        "Pacing is in vain",
        "workers.gpu_pacing becomes `never`; find what else makes steps longer.",
        pacing_is_vain,
    ),
    StopRule(
        "Small fragments to the device are slow in batches, and not otherwise",
        "`auto` chooses by the size of fragments.",
        small_fragments_crawl,
    ),
    StopRule(
        "The overlap flag makes an engine's steps longer",
        "Batches go without the flag, whatever the driver.",
        overlap_hint_hurts,
    ),
)


def table(record: Record) -> str:
    """All rules and what the record says to them."""
    lines = [
        "## What would change the design",
        "",
        "| if | so it is | measured | then |",
        "|---|---|---|---|",
    ]
    return "\n".join([*lines, *(rule.row(record) for rule in RULES)])
