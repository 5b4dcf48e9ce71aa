"""Stores and loads: bandwidth of large transfers for every shape of model, and p99 of small ones."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from functools import partial
from typing import Any

import numpy as np

from tests.benchmarks.peers.driver import MODELS, Peer, PeerRefused, PeerShape
from tests.benchmarks.peers.machine import is_noisy, spread
from tests.benchmarks.peers.running import Running

LARGE_BYTES = 256 << 20
SMALL_BLOCKS = 16
"""Of the smallest model: 8 MiB, and one chunk of LMCache's."""
REPETITIONS_MIN, REPETITIONS_MAX = 5, 9
SHAPE_S = 40.0
"""After so long, a shape is repeated no more often than REPETITIONS_MIN."""
SMALL_TIMES = 120
SEED = 50_000


def blocks_of(shape: PeerShape, size: int) -> int:
    """As many blocks as come nearest to so many bytes, in whole chunks of 16."""
    return max(16, round(size / shape.block_bytes / 16) * 16)


def measure(running: Running, shapes: tuple[PeerShape, ...], most: int) -> list[dict[str, Any]]:
    """Each repetition stores content that nobody has seen, and loads it back byte for byte, one peer after
    another; the caches are emptied in between. The first repetition only warms up. Repeated up to `most`
    times, until the spread of all is small or time is up."""
    rows = []
    for number, shape in enumerate(shapes):
        blocks = blocks_of(shape, LARGE_BYTES)
        size = blocks * shape.block_bytes
        running.each(0, f"register {shape.title}", partial(_register, running, shape=shape, blocks=blocks))
        taken: dict[tuple[str, str], list[float]] = defaultdict(list)
        ends_s = time.monotonic() + SHAPE_S
        for turn in range(most + 1):
            seed = SEED + 100 * number + turn
            once = partial(_once, running, blocks=blocks, seed=seed, turn=turn, taken=taken)
            running.each(turn, shape.title, once)
            enough = turn >= min(REPETITIONS_MIN, most)
            if enough and (time.monotonic() > ends_s or not any(map(is_noisy, taken.values()))):
                break
        for (name, what), seconds in taken.items():
            if name not in running.failed:
                rows.append(_row(name, shape, what, size, seconds))
        running.progress(f"{shape.title}, {size >> 20} MiB: " + _said(rows, shape))
    return rows


def measure_small(running: Running, times: int) -> list[dict[str, Any]]:
    """Stores and loads of 8 MiB, peers in turns of 20."""
    shape = MODELS[0]
    running.each(0, "register", partial(_register, running, shape=shape, blocks=SMALL_BLOCKS))
    taken: dict[tuple[str, str], list[float]] = defaultdict(list)
    for turn in range(max(1, times // 20)):
        running.each(turn, "8 MiB at a time", partial(_many, running, turn=turn, taken=taken))
    return [
        {
            "peer": name,
            "what": what,
            "bytes": SMALL_BLOCKS * shape.block_bytes,
            "p50_ms": float(np.percentile(seconds, 50)) * 1e3,
            "p99_ms": float(np.percentile(seconds, 99)) * 1e3,
            "samples": len(seconds),
        }
        for (name, what), seconds in taken.items()
        if name not in running.failed
    ]


def _register(running: Running, peer: Peer, shape: PeerShape, blocks: int) -> None:
    running.register(peer, shape, blocks).call("clear")


def _once(
    running: Running, peer: Peer, blocks: int, seed: int, turn: int, taken: dict[tuple[str, str], list[float]]
) -> None:
    engine = running.engine(peer)
    stored = engine.call("store", seed=seed, blocks=blocks)
    # A peer whose answer comes before the blocks can be found is not faster for that.
    store_s = stored["seconds"] + stored["late_s"]
    loaded = engine.call("load", seed=seed, blocks=blocks)
    if loaded["wrong"]:
        raise PeerRefused(f"{loaded['wrong']} blocks were loaded with wrong bytes")
    engine.call("clear")
    if turn:
        taken[peer.name, "store"].append(store_s)
        taken[peer.name, "load"].append(loaded["seconds"])


def _many(running: Running, peer: Peer, turn: int, taken: dict[tuple[str, str], list[float]]) -> None:
    engine = running.engine(peer)
    for number in range(20):
        seed = SEED + 10_000 + 20 * turn + number
        stored = engine.call("store", seed=seed, blocks=SMALL_BLOCKS)
        loaded = engine.call("load", seed=seed, blocks=SMALL_BLOCKS)
        if loaded["wrong"]:
            raise PeerRefused(f"{loaded['wrong']} blocks were loaded with wrong bytes")
        if turn or number > 3:
            taken[peer.name, "store"].append(stored["seconds"] + stored["late_s"])
            taken[peer.name, "load"].append(loaded["seconds"])
    engine.call("clear")


def _row(name: str, shape: PeerShape, what: str, size: int, seconds: list[float]) -> dict[str, Any]:
    return {
        "peer": name,
        "shape": shape.name,
        "title": shape.title,
        "what": what,
        "bytes": size,
        "gb_per_s": size / statistics.median(seconds) / 1e9,
        "samples_s": seconds,
        "spread": min(spread(seconds), 9.99),
        "noisy": is_noisy(seconds),
    }


def _said(rows: list[dict[str, Any]], shape: PeerShape) -> str:
    by_peer: dict[str, dict[str, float]] = defaultdict(dict)
    for row in rows:
        if row["shape"] == shape.name:
            by_peer[row["peer"]][row["what"]] = row["gb_per_s"]
    return "; ".join(
        f"{name} {one.get('store', 0):.1f}/{one.get('load', 0):.1f} GB/s" for name, one in by_peer.items()
    )
