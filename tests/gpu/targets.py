"""DESIGN's targets for GPUs, and how far a record is from each."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tests.gpu.record import Record, Row

KIB, MIB = 1 << 10, 1 << 20
H2D, D2H, BOTH = "h2d", "d2h", "both"
BESIDE = "a process beside"


@dataclass(frozen=True)
class Target:
    """One figure that DESIGN asks for; `measured` is None where the record does not have it."""

    what: str
    measured: Callable[[Record], float | None]
    at_least: float | None = None
    at_most: float | None = None
    unit: str = ""

    def verdict(self, value: float) -> str:
        """Met, or by how much it is missed."""
        if self.at_least is not None:
            short = self.at_least - value
            return "met" if short <= 0 else f"missed by {short:.3g} {self.unit}".rstrip()
        assert self.at_most is not None
        over = value - self.at_most
        return "met" if over <= 0 else f"missed by {over:.3g} {self.unit}".rstrip()

    def text(self) -> str:
        return f"≥ {self.at_least:g}" if self.at_least is not None else f"≤ {self.at_most:g}"


def _median(values: Iterable[float]) -> float | None:
    known = list(values)
    return statistics.median(known) if known else None


def _lowest(rows: list[Row], name: str) -> float | None:
    return min((float(row[name]) for row in rows if name in row), default=None)


def usual_batches(record: Record, way: str, least: int = 1_024) -> list[Row]:
    """Batched copies as the daemon makes them: `least` and more of them, told the usual order, without the
    hint."""
    usual = {H2D: "any", D2H: "stream"}[way]
    rows = record.rows("batches", way=way, order=usual, overlap_hint=False)
    return [row for row in rows if row["fragments"] >= least]


def large_fragments(way: str) -> Callable[[Record], float | None]:
    """The lowest ratio of fragments of 512 KiB and more."""
    return lambda record: _lowest(
        [row for row in usual_batches(record, way) if row["fragment_bytes"] >= 512 * KIB], "ratio"
    )


def small_fragments(way: str) -> Callable[[Record], float | None]:
    """Fragments of 64 KiB, scattered blocks of 32 planes, as the daemon copies them."""
    return lambda record: _lowest(
        record.rows("shapes", shape="rows", way=way, planes=32, fragment_bytes=64 * KIB), "ratio"
    )


def coalesced(way: str) -> Callable[[Record], float | None]:
    """Fragments of 64 KiB in runs of 4 that planning joins."""
    return lambda record: _lowest(
        record.rows("shapes", way=way, planes=1, fragment_bytes=64 * KIB, run_blocks=4), "ratio"
    )


def both_ways(record: Record) -> float | None:
    """Gigabytes per second, the better of 512 KiB and 2 MiB."""
    rows = [row for row in record.rows("batches", way=BOTH) if row["fragment_bytes"] >= 512 * KIB]
    return max((float(row["gb_per_s"]) for row in rows), default=None)


def through_daemon(what: str, fragment_bytes: int) -> Callable[[Record], float | None]:
    """Through kvtierd, once the pool is registered: the median of the sizes of transfers."""
    return lambda record: _median(
        row["ratio"]
        for row in record.rows("end_to_end", what=what, fragment_bytes=fragment_bytes, turn="again")
    )


def interference(workload: str, who: str) -> Callable[[Record], float | None]:
    """The worst p99 of a step under DMA by another process, over the idle p99."""
    return lambda record: max(
        (
            float(row["x_p99"])
            for step in ("interference", "beside_kvtierd")
            for row in record.rows(step, workload=workload, copies=f"dma by {who}")
            if not row["overlap_hint"] and row["fragment_bytes"] >= 512 * KIB
        ),
        default=None,
    )


def released(record: Record) -> float | None:
    """The longest time from an engine's death to its memory being free, in seconds."""
    return max(
        (float(row["released_ms"]) / 1e3 for row in record.rows("exporter_kill") if "released_ms" in row),
        default=None,
    )


def first_load(record: Record) -> float | None:
    """From the daemon's kill -9 to the first load of its successor, in seconds."""
    rows = record.rows("end_to_end", what="restart", when="first load")
    return max((float(row["seconds"]) for row in rows), default=None)


def changed_after_death(record: Record) -> float | None:
    """Kills after which the target of a killed worker's copies was seen to change."""
    rows = [row for row in record.rows("worker_kill") if "changed_words" in row]
    return float(sum(bool(row["changed_words"]) for row in rows)) if rows else None


def context_ratio(record: Record) -> float | None:
    """A copy worker's share of the GPU's memory over that of an engine's bare torch context."""
    ours = _lowest(record.rows("versions", process="two streams and a registered page"), "context_mib")
    torch = _lowest(record.rows("versions", process="torch"), "context_mib")
    return ours / torch if ours is not None and torch else None


TARGETS = (
    Target("batched copies ≥ 512 KiB to the device, ÷ ceiling", large_fragments(H2D), at_least=0.97),
    Target("batched copies ≥ 512 KiB to the host, ÷ ceiling", large_fragments(D2H), at_least=0.97),
    Target("both ways at once, ≥ 512 KiB", both_ways, at_least=83.4, unit="GB/s"),
    Target("32 planes of 64 KiB to the device, ÷ ceiling", small_fragments(H2D), at_least=0.90),
    Target("32 planes of 64 KiB to the host, ÷ ceiling", small_fragments(D2H), at_least=0.90),
    Target("64 KiB in runs of 4 to the device, ÷ ceiling", coalesced(H2D), at_least=0.90),
    Target("64 KiB in runs of 4 to the host, ÷ ceiling", coalesced(D2H), at_least=0.90),
    Target(
        "load through kvtierd, 2 MiB fragments, ÷ ceiling", through_daemon("load", 2 * MIB), at_least=0.97
    ),
    Target(
        "store through kvtierd, 2 MiB fragments, ÷ ceiling", through_daemon("store", 2 * MIB), at_least=0.97
    ),
    Target("load through kvtierd, 512 KiB, ÷ ceiling", through_daemon("load", 512 * KIB), at_least=0.97),
    Target("store through kvtierd, 512 KiB, ÷ ceiling", through_daemon("store", 512 * KIB), at_least=0.97),
    Target("load through kvtierd, 64 KiB, ÷ ceiling", through_daemon("load", 64 * KIB), at_least=0.90),
    Target("store through kvtierd, 64 KiB, ÷ ceiling", through_daemon("store", 64 * KIB), at_least=0.90),
    Target("decode step p99 under DMA, ÷ idle", interference("decode", BESIDE), at_most=1.02),
    Target(
        "decode step p99 under kvtierd, paced, ÷ idle", interference("decode", "kvtierd, paced"), at_most=1.02
    ),
    Target("matrix product p99 under DMA, ÷ idle", interference("gemm", BESIDE), at_most=1.02),
    Target(
        "matrix product p99 under kvtierd, paced, ÷ idle",
        interference("gemm", "kvtierd, paced"),
        at_most=1.02,
    ),
    Target("kills of a worker after which memory changed", changed_after_death, at_most=0),
    Target("dead engine's memory released", released, at_most=1.0, unit="s"),
    Target("kill -9 of the daemon to the first load", first_load, at_most=5.0, unit="s"),
    Target("a copy worker's context ÷ torch's", context_ratio, at_most=1.0),
)
