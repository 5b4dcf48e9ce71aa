"""Lookups that hit, with what they hold given back: by hashes, by entries, and by callers."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np

from tests.benchmarks.peers.driver import SMALL, Peer, PeerRefused
from tests.benchmarks.peers.engine_process import PeerProcess
from tests.benchmarks.peers.running import Running

HASHES = (1, 64, 1_024, 8_192)
TIMES = {1: 1_000, 64: 800, 1_024: 400, 8_192: 120}
"""Lookups of each size at the last level; a quarter at the others."""
PROMPT_BLOCKS = 10_000
"""Of each prompt that is stored, so that 8,192 hashes are a part of one."""
LEVELS = (10_000, 100_000)
"""Rows are compared at the last."""
LARGE = 1_000_000
LARGEST = 4_000_000
FILL_DEADLINE_S = 40.0
CALLERS = (1, 4, 16, 64)
CALLERS_HASHES = 64
ROUNDS = 4
SEED = 1_000


def measure(
    running: Running, levels: tuple[int, ...], callers: tuple[int, ...], part: float
) -> dict[str, Any]:
    """The sweep over hashes at each level of entries, then over callers at the last level. `part` of the
    usual number of lookups is made."""
    rows: list[dict[str, Any]] = []
    filled: dict[str, int] = defaultdict(int)
    running.each(0, "register", lambda peer: _register(running, peer))
    for level in levels:
        fill = partial(_fill, running, entries=level, filled=filled)
        running.each(0, f"fill with {level:,} entries", fill)
        samples: dict[tuple[str, int], list[float]] = defaultdict(list)
        for turn in range(ROUNDS):
            for hashes in HASHES:
                if hashes > level:
                    continue
                times = max(4, int(TIMES[hashes] * part * (1 if level == levels[-1] else 0.25)) // ROUNDS)
                take = partial(
                    _take, running, hashes=hashes, times=times, level=level, filled=filled, samples=samples
                )
                running.each(turn, f"{hashes:,} hashes", take)
        for (name, hashes), taken in samples.items():
            if not taken or name in running.failed:
                continue
            rows.append({"peer": name, "entries": level, "hashes": hashes, **percentiles(taken)})
        running.progress(f"lookups with {level:,} entries: " + _said(rows, level))
    fans: list[dict[str, Any]] = []
    for turn, number in enumerate(callers):
        running.each(turn, f"{number} callers", partial(_fan, running, callers=number, fans=fans))
    return {"sweep": rows, "callers": fans, "filled": dict(filled)}


def measure_large(running: Running, entries: int, part: float) -> list[dict[str, Any]]:
    """One peer alone with as many entries as it can store in FILL_DEADLINE_S."""
    rows: list[dict[str, Any]] = []
    filled: dict[str, int] = defaultdict(int)

    def one(peer: Peer) -> None:
        _register(running, peer)
        _fill(running, peer, entries, filled)
        for hashes in HASHES:
            times = max(4, int(TIMES[hashes] * part * 0.25))
            taken = _lookups(running.engine(peer), peer, hashes, times, filled[peer.name])
            if taken:
                rows.append(
                    {"peer": peer.name, "entries": filled[peer.name], "hashes": hashes, **percentiles(taken)}
                )

    running.each(0, f"{entries:,} entries", one)
    return rows


def percentiles(taken_us: list[float]) -> dict[str, float]:
    """p50 and p99 of samples in µs, and how many there are."""
    return {
        "p50_us": float(np.percentile(taken_us, 50)),
        "p99_us": float(np.percentile(taken_us, 99)),
        "samples": len(taken_us),
    }


def _register(running: Running, peer: Peer) -> None:
    running.register(peer, SMALL, PROMPT_BLOCKS)


def _fill(running: Running, peer: Peer, entries: int, filled: dict[str, int]) -> None:
    """Stores prompts until so many blocks are there, or time is up; then loads one back, to be sure."""
    engine, spent_s, seed = running.engine(peer), 0.0, 0
    usable = PROMPT_BLOCKS // peer.granularity_blocks * peer.granularity_blocks
    while filled[peer.name] < entries and spent_s < FILL_DEADLINE_S:
        seed = SEED + filled[peer.name] // PROMPT_BLOCKS
        spent_s += engine.call("store", seed=seed, blocks=usable)["seconds"]
        filled[peer.name] += PROMPT_BLOCKS
    if filled[peer.name] < entries:
        running.progress(f"{peer.title}: {filled[peer.name]:,} of {entries:,} entries in {spent_s:.0f} s")
    answer = engine.call("load", seed=seed or SEED, blocks=1_024)
    if answer["wrong"]:
        raise PeerRefused(f"{answer['wrong']} blocks were loaded with wrong bytes")


def _take(
    running: Running,
    peer: Peer,
    hashes: int,
    times: int,
    level: int,
    filled: dict[str, int],
    samples: dict[tuple[str, int], list[float]],
) -> None:
    entries = min(level, filled[peer.name])
    samples[peer.name, hashes] += _lookups(running.engine(peer), peer, hashes, times, entries)


def _lookups(engine: PeerProcess, peer: Peer, hashes: int, times: int, entries: int) -> list[float]:
    if hashes % peer.granularity_blocks or hashes > entries:
        return []  # it cannot find as little as that
    prompts = max(1, entries // PROMPT_BLOCKS)
    seeds = [SEED + number for number in range(min(prompts, 20))]
    taken: list[float] = engine.call("lookups", seeds=seeds, blocks=hashes, times=times)
    return taken


def _fan(running: Running, peer: Peer, callers: int, fans: list[dict[str, Any]]) -> None:
    server = running.server(peer)
    assert server is not None, "memcpy has no lookups"
    answer = running.engine(peer, "callers").call(
        "fan_out",
        address=server.address,
        shape=asdict(SMALL),
        seeds=[SEED],
        blocks=CALLERS_HASHES,
        callers=callers,
    )
    row = {
        "peer": peer.name,
        "callers": callers,
        "lookups_per_s": answer["lookups_per_s"],
        **percentiles(answer["us"]),
    }
    running.progress(
        f"{callers} callers of {CALLERS_HASHES} hashes, {peer.title}: {row['lookups_per_s']:,.0f} lookups/s,"
        f" p99 {row['p99_us'] / 1e3:,.1f} ms"
    )
    fans.append(row)


def _said(rows: list[dict[str, Any]], level: int) -> str:
    mine = [row for row in rows if row["entries"] == level and row["hashes"] == 1_024]
    return "; ".join(f"{row['peer']} {row['p50_us']:,.0f} µs for 1,024" for row in mine)
