"""How much longer an engine's steps take while somebody copies at full rate.

One process computes: a large matrix product (bound by arithmetic), or a decode-like step in a CUDA graph
(bound by memory). Others copy 512 KiB fragments in random order, two batches in flight: a process like the
copy worker by DMA (with the prefer-overlap hint and without), a process by a kernel of its own on 12 thread
blocks, or the engine's own process by the same kernel on another stream. `x_p50`, `x_p99` and `x_max` are
ratios to the median of the idle measurements around them in the same run; `idle` is measured several times,
which shows what such a ratio means.
"""

from __future__ import annotations

import importlib.util
import statistics
from contextlib import ExitStack
from typing import Any

from tests.gpu.parts.bench import MIB, Bench
from tests.gpu.parts.child import Child, ChildError
from tests.gpu.parts.loops import D2H, H2D
from tests.gpu.parts.workloads import DECODE, GEMM

BOTH = (H2D, D2H)
WAYS = {H2D: (H2D,), D2H: (D2H,), "both": BOTH}
FRAGMENT_BYTES = 512 << 10
OPEN_S = 60.0
PLAN = (
    # who copies, how, in which directions; the most telling first
    ("process", "dma", "both", False),
    ("process", "kernel", "both", False),
    ("process", "dma", H2D, False),
    ("process", "dma", D2H, False),
    ("engine", "kernel", "both", False),
    ("process", "dma", "both", True),
    ("process", "kernel", H2D, False),
    ("process", "kernel", D2H, False),
    ("engine", "kernel", H2D, False),
    ("engine", "kernel", D2H, False),
    ("process", "dma", H2D, True),
    ("process", "dma", D2H, True),
)
IDLE_EVERY = 4
"""So many measurements between two of the idle engine."""


def run(bench: Bench) -> None:
    with ExitStack() as stack:
        engine = stack.enter_context(Child("tests.gpu.children.engine"))
        opened = engine.ask("open", where=bench.pick("cuda", "none"), timeout_s=OPEN_S)
        bench.row(workload=opened["workload"])
        copiers = open_copiers(bench, stack, engine)
        Measuring(bench, engine, copiers).all()


def open_copiers(bench: Bench, stack: ExitStack, engine: Child) -> dict[tuple[str, str], Child]:
    """Those who can copy here: by who and how. What cannot is said in a row."""
    sizes: dict[str, Any] = {
        "region_bytes": bench.pick(512 * MIB, 2 * MIB),
        "fragment_bytes": bench.pick(FRAGMENT_BYTES, 4_096),
        "directions": list(BOTH),
    }
    dma = stack.enter_context(Child("tests.gpu.children.copier"))
    dma.ask("open", timeout_s=OPEN_S, **sizes)
    copiers = {("process", "dma"): dma}
    if bench.fake:
        bench.row(left_out="copies by kernels", why="no kernels run on the fake driver")
        return copiers
    if importlib.util.find_spec("triton") is None:
        bench.row(left_out="copies by kernels", why="Triton is not installed")
        return copiers
    beside = stack.enter_context(Child("tests.gpu.children.kernel_copier"))
    for who, child, question in (("process", beside, "open"), ("engine", engine, "open_kernels")):
        try:
            child.ask(question, timeout_s=OPEN_S, **sizes)
        except ChildError as error:  # the rest is worth measuring without it
            bench.row(left_out=f"copies by a kernel of the {who}", why=str(error)[-400:])
        else:
            copiers[who, "kernel"] = child
    return copiers


class Measuring:
    """Measures each workload idle and with every way of copying."""

    def __init__(self, bench: Bench, engine: Child, copiers: dict[tuple[str, str], Child]) -> None:
        self._bench = bench
        self._engine = engine
        self._copiers = copiers
        self._idle: dict[str, list[dict[str, Any]]] = {GEMM: [], DECODE: []}
        self._seconds = bench.pick(2.0, 0.05)

    def all(self) -> None:
        plan = [case for case in PLAN if case[:2] in self._copiers]
        for index, (who, how, way, overlap) in enumerate(plan):
            if index % IDLE_EVERY == 0:
                self.idle()
            if self._bench.left_s() < 4 * self._seconds + 2:
                self._bench.row(left_out=f"{len(plan) - index} ways of copying", why="no time was left")
                break
            for workload in (DECODE, GEMM):
                self.with_copies(workload, who, how, way, overlap)
        self.idle()

    def idle(self) -> None:
        for workload, known in self._idle.items():
            steps = self._measure(workload)
            known.append(steps)
            self._bench.row(
                workload=workload, copies="idle", way="-", overlap_hint=False, gb_per_s=0.0, **steps
            )

    def with_copies(self, workload: str, who: str, how: str, way: str, overlap: bool) -> None:
        copier = self._copiers[who, how]
        started: dict[str, Any] = {"directions": list(WAYS[way]), "prefer_overlap": overlap}
        started["fragment_bytes"] = self._bench.pick(FRAGMENT_BYTES, 4_096)
        copier.ask("start", **started)
        try:
            steps = self._measure(workload)
        finally:
            rate = copier.ask("stop")["gb_per_s"]
        idle = self._idle[workload]
        ratios = {
            f"x_{name}": steps[f"{name}_us"] / statistics.median(known[f"{name}_us"] for known in idle)
            for name in ("p50", "p99", "max")
        }
        copies = f"{how} by {'a process beside' if who == 'process' else 'the engine itself'}"
        self._bench.row(
            workload=workload, copies=copies, way=way, overlap_hint=overlap, gb_per_s=rate, **steps, **ratios
        )

    def _measure(self, workload: str) -> dict[str, Any]:
        return self._engine.ask("measure", workload=workload, seconds=self._seconds).fields
