"""How much longer an engine's steps take while somebody copies at full rate.

One process computes: a large matrix product (bound by arithmetic), or a decode-like step in a CUDA graph
(bound by memory) with small copies of its own before and behind it. Others copy fragments in random order,
two batches in flight: a process like the copy worker by DMA (`shape`: how fragments get to the driver), a
real kvtierd that is stored to and loaded from (in large chunks, or paced), a process by a kernel of its own
on 12 thread blocks, or the engine's own process by the same kernel on another stream. `x_p50`, `x_p99` and
`x_max` are ratios to the median of the idle measurements around them in the same run; `idle` is measured
several times, which shows what such a ratio means.
"""

from __future__ import annotations

import importlib.util
import statistics
from contextlib import ExitStack
from typing import Any

from tests.gpu.parts.bench import MIB, Bench
from tests.gpu.parts.child import Child, ChildError
from tests.gpu.parts.submitting import BATCH, D2H, H2D, HINT, ROWS, STREAM
from tests.gpu.parts.workloads import DECODE, GEMM

BOTH = (H2D, D2H)
WAYS = {H2D: (H2D,), D2H: (D2H,), "both": BOTH}
LARGE, MEDIUM, SMALL = 512 << 10, 64 << 10, 8 << 10
"""Bytes of a fragment."""
OPEN_S = 60.0
PROCESS, KVTIERD, PACED, ENGINE = "process", "kvtierd", "paced", "engine"
DMA, KERNEL = "dma", "kernel"
NAMES = {
    PROCESS: "a process beside",
    KVTIERD: "kvtierd",
    PACED: "kvtierd, paced",
    ENGINE: "the engine itself",
}
PACING = {KVTIERD: "never", PACED: "always"}
PLAN = (
    # who copies, how, in which directions, in which shape, fragments of which size; the most telling first
    (PROCESS, DMA, "both", BATCH, LARGE),
    (KVTIERD, DMA, "both", BATCH, LARGE),
    (PACED, DMA, "both", BATCH, LARGE),
    (PROCESS, DMA, "both", BATCH, SMALL),
    (PROCESS, DMA, "both", ROWS, SMALL),
    (PROCESS, DMA, "both", STREAM, SMALL),
    (PROCESS, KERNEL, "both", BATCH, LARGE),
    (PROCESS, DMA, "both", BATCH, MEDIUM),
    (PROCESS, DMA, H2D, BATCH, LARGE),
    (PROCESS, DMA, D2H, BATCH, LARGE),
    (PROCESS, DMA, H2D, BATCH, SMALL),
    (PROCESS, DMA, H2D, ROWS, SMALL),
    (ENGINE, KERNEL, "both", BATCH, LARGE),
    (PROCESS, DMA, "both", HINT, LARGE),
    (KVTIERD, DMA, H2D, BATCH, LARGE),
    (KVTIERD, DMA, D2H, BATCH, LARGE),
    (PACED, DMA, H2D, BATCH, LARGE),
    (PACED, DMA, D2H, BATCH, LARGE),
    (PROCESS, KERNEL, H2D, BATCH, LARGE),
    (PROCESS, KERNEL, D2H, BATCH, LARGE),
    (ENGINE, KERNEL, H2D, BATCH, LARGE),
    (ENGINE, KERNEL, D2H, BATCH, LARGE),
)
IDLE_EVERY = 4
"""So many measurements between two of the idle engine."""


def run(bench: Bench) -> None:
    sizes: dict[str, Any] = {
        "region_bytes": bench.pick(512 * MIB, 2 * MIB),
        "fragment_bytes": bench.pick(LARGE, 4_096),
        "directions": list(BOTH),
    }
    with ExitStack() as stack:
        engine = stack.enter_context(Child("tests.gpu.children.engine"))
        engine.tell("open", where=bench.pick("cuda", "none"))
        children = {
            (PROCESS, DMA): "copier",
            (KVTIERD, DMA): "kvtierd_copier",
            (PACED, DMA): "kvtierd_copier",
        }
        with_kernels = kernels_here(bench)
        if with_kernels:
            children[PROCESS, KERNEL] = "kernel_copier"
        # All at once: loading libraries takes most of their time.
        opening = {
            name: stack.enter_context(Child(f"tests.gpu.children.{m}")) for name, m in children.items()
        }
        for (who, _), child in opening.items():
            child.tell("open", pacing=PACING.get(who, ""), **sizes)
        bench.row(workload=engine.answer(OPEN_S)["workload"])
        copiers = {name: child for name, child in opening.items() if opened(bench, child, *name)}
        if with_kernels:
            engine.tell("open_kernels", **sizes)
            if opened(bench, engine, ENGINE, KERNEL):
                copiers[ENGINE, KERNEL] = engine
        for who in PACING:
            if (who, DMA) in copiers:
                stack.callback(copiers[who, DMA].ask, "close")
        Measuring(bench, engine, copiers).all()


def kernels_here(bench: Bench) -> bool:
    """Whether copy kernels can run; if not, a row says why."""
    if bench.fake:
        bench.row(left_out="copies by kernels", why="no kernels run on the fake driver")
    elif importlib.util.find_spec("triton") is None:
        bench.row(left_out="copies by kernels", why="Triton is not installed")
    else:
        return True
    return False


def opened(bench: Bench, child: Child, who: str, how: str) -> bool:
    """Whether the child can copy; if not, a row says why, and the rest is measured without it."""
    try:
        child.answer(OPEN_S)
    except ChildError as error:
        bench.row(left_out=f"{how} by {NAMES[who]}", why=str(error)[-400:])
        return False
    return True


class Measuring:
    """Measures each workload idle and with every way of copying."""

    def __init__(self, bench: Bench, engine: Child, copiers: dict[tuple[str, str], Child]) -> None:
        self._bench = bench
        self._engine = engine
        self._copiers = copiers
        self._idle: dict[str, list[dict[str, Any]]] = {GEMM: [], DECODE: []}
        self._seconds = bench.pick(1.5, 0.05)

    def all(self) -> None:
        plan = [case for case in PLAN if case[:2] in self._copiers]
        for index, (who, how, way, shape, fragment_bytes) in enumerate(plan):
            if index % IDLE_EVERY == 0:
                self.idle()
            if self._bench.left_s() < 4 * self._seconds + 2:
                self._bench.row(left_out=f"{len(plan) - index} ways of copying", why="no time was left")
                break
            try:
                for workload in (DECODE, GEMM):
                    self.with_copies(workload, who, how, way, shape, fragment_bytes)
            except ChildError as error:  # the other ways are worth measuring without it
                self._bench.row(left_out=f"{how} by {NAMES[who]}, {way}", why=str(error)[-400:])
        self.idle()

    def idle(self) -> None:
        for workload, known in self._idle.items():
            steps = self._measure(workload)
            known.append(steps)
            self._bench.row(
                workload=workload,
                copies="idle",
                way="-",
                shape="-",
                overlap_hint=False,
                fragment_bytes=0,
                gb_per_s=0.0,
                **steps,
            )

    def with_copies(
        self, workload: str, who: str, how: str, way: str, shape: str, fragment_bytes: int
    ) -> None:
        copier = self._copiers[who, how]
        started: dict[str, Any] = {"directions": list(WAYS[way]), "shape": shape}
        started["fragment_bytes"] = self._bench.pick(fragment_bytes, 4_096)
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
        copies = f"{how} by {NAMES[who]}"
        self._bench.row(
            workload=workload,
            copies=copies,
            way=way,
            shape=shape,
            overlap_hint=shape == HINT,
            fragment_bytes=fragment_bytes,
            gb_per_s=rate,
            **steps,
            **ratios,
        )

    def _measure(self, workload: str) -> dict[str, Any]:
        return self._engine.ask("measure", workload=workload, seconds=self._seconds).fields
