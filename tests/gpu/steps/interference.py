"""How much longer an engine's steps take while somebody copies at full rate.

One process computes: a large matrix product (bound by arithmetic), or a decode-like step in a CUDA graph
(bound by memory) with small copies of its own before and behind it. Others copy fragments in random order,
two batches in flight: a process like the copy worker by DMA (`shape`: how fragments get to the driver), a
process by a kernel of its own on 12 thread blocks, or the engine's own process by the same kernel on another
stream. `x_p50`, `x_p99` and `x_max` are ratios to the median of the idle measurements around them in the same
run; `idle` is measured several times, which shows what such a ratio means.
"""

from __future__ import annotations

import importlib.util
from contextlib import ExitStack
from typing import Any

from tests.gpu.parts.bench import MIB, Bench
from tests.gpu.parts.child import Child
from tests.gpu.parts.interfering import (
    BOTH,
    LARGE,
    MEDIUM,
    OPEN_S,
    SMALL,
    Copying,
    Measuring,
    opened,
)
from tests.gpu.parts.submitting import BATCH, D2H, H2D, HINT, ROWS, STREAM

DMA, KERNEL, ENGINE = "dma by a process beside", "kernel by a process beside", "kernel by the engine itself"
PLAN = (
    # the most telling first
    Copying(DMA),
    Copying(DMA, "both", SMALL, BATCH),
    Copying(DMA, "both", SMALL, ROWS),
    Copying(KERNEL),
    Copying(DMA, "both", MEDIUM),
    Copying(DMA, H2D),
    Copying(DMA, D2H),
    Copying(DMA, H2D, SMALL, BATCH),
    Copying(DMA, H2D, SMALL, ROWS),
    Copying(ENGINE),
    Copying(DMA, "both", LARGE, HINT),
    Copying(DMA, "both", SMALL, STREAM),
    Copying(KERNEL, H2D),
    Copying(KERNEL, D2H),
    Copying(ENGINE, H2D),
    Copying(ENGINE, D2H),
)


def run(bench: Bench) -> None:
    sizes: dict[str, Any] = {
        "region_bytes": bench.pick(512 * MIB, 2 * MIB),
        "fragment_bytes": bench.pick(LARGE, 4_096),
        "directions": list(BOTH),
    }
    with ExitStack() as stack:
        engine = stack.enter_context(Child("tests.gpu.children.engine"))
        engine.tell("open", where=bench.pick("cuda", "none"))
        children = {DMA: "copier"}
        with_kernels = kernels_here(bench)
        if with_kernels:
            children[KERNEL] = "kernel_copier"
        # All at once: loading libraries takes most of their time.
        opening = {
            name: stack.enter_context(Child(f"tests.gpu.children.{m}")) for name, m in children.items()
        }
        for child in opening.values():
            child.tell("open", **sizes)
        bench.row(workload=engine.answer(OPEN_S)["workload"])
        copiers = {name: child for name, child in opening.items() if opened(bench, child, name)}
        if with_kernels:
            engine.tell("open_kernels", **sizes)
            if opened(bench, engine, ENGINE):
                copiers[ENGINE] = engine
        Measuring(bench, engine, copiers).all(PLAN)


def kernels_here(bench: Bench) -> bool:
    """Whether copy kernels can run; if not, a row says why."""
    if bench.fake:
        bench.row(left_out="copies by kernels", why="no kernels run on the fake driver")
    elif importlib.util.find_spec("triton") is None:
        bench.row(left_out="copies by kernels", why="Triton is not installed")
    else:
        return True
    return False
