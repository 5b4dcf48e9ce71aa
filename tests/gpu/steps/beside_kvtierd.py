"""How much longer an engine's steps take while a real kvtierd copies for another engine at full rate.

As in `interference`; here daemons copy, each with settings of its own: in large chunks, paced (as while an
engine computes), paced by smaller chunks, and the first two again with fragments of 8 KiB.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from tests.gpu.parts.bench import MIB, Bench
from tests.gpu.parts.child import Child
from tests.gpu.parts.interfering import LARGE, OPEN_S, SMALL, Copying, Measuring, opened
from tests.gpu.parts.submitting import D2H, H2D

USUAL, PACED, PACED_MORE = "dma by kvtierd", "dma by kvtierd, paced", "dma by kvtierd, paced by 4 MiB"
SMALL_USUAL, SMALL_PACED = "dma by kvtierd, small fragments", "dma by kvtierd, paced, small fragments"
ALWAYS, NEVER = {"workers__gpu_pacing": "always"}, {"workers__gpu_pacing": "never"}
DAEMONS: dict[str, tuple[int, dict[str, str]]] = {
    USUAL: (LARGE, NEVER),
    PACED: (LARGE, ALWAYS),
    PACED_MORE: (LARGE, ALWAYS | {"workers__gpu_paced_chunk": "4MiB"}),
    SMALL_USUAL: (SMALL, NEVER),
    SMALL_PACED: (SMALL, ALWAYS),
}
"""Bytes of a fragment, and settings."""
PLAN = (
    # the most telling first
    Copying(USUAL),
    Copying(PACED),
    Copying(PACED_MORE),
    Copying(SMALL_USUAL, "both", SMALL),
    Copying(SMALL_PACED, "both", SMALL),
    Copying(USUAL, H2D),
    Copying(PACED, H2D),
    Copying(SMALL_USUAL, H2D, SMALL),
    Copying(USUAL, D2H),
    Copying(PACED, D2H),
)


def run(bench: Bench) -> None:
    with ExitStack() as stack:
        engine = stack.enter_context(Child("tests.gpu.children.engine"))
        engine.tell("open", where=bench.pick("cuda", "none"))
        opening = {who: stack.enter_context(Child("tests.gpu.children.kvtierd_copier")) for who in DAEMONS}
        for who, child in opening.items():
            fragment_bytes, settings = DAEMONS[who]
            sizes: dict[str, Any] = {"region_bytes": bench.pick(512 * MIB, 2 * MIB)}
            child.tell("open", settings=settings, fragment_bytes=bench.pick(fragment_bytes, 4_096), **sizes)
        bench.row(workload=engine.answer(OPEN_S)["workload"])
        copiers = {who: child for who, child in opening.items() if opened(bench, child, who)}
        for child in copiers.values():
            stack.callback(child.ask, "close")
        Measuring(bench, engine, copiers).all(PLAN)
