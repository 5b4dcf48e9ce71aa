"""An engine's steps, idle and while somebody copies: measured in turn, so that ratios are of one moment."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.gpu.parts.bench import Bench
from tests.gpu.parts.child import Child, ChildError
from tests.gpu.parts.submitting import BATCH, D2H, H2D, HINT
from tests.gpu.parts.workloads import DECODE, GEMM

BOTH = (H2D, D2H)
WAYS = {H2D: (H2D,), D2H: (D2H,), "both": BOTH}
LARGE, MEDIUM, SMALL = 512 << 10, 64 << 10, 8 << 10
"""Bytes of a fragment."""
OPEN_S = 60.0
IDLE_EVERY = 4
"""So many measurements between two of the idle engine."""


@dataclass(frozen=True)
class Copying:
    """One way of copying beside the engine's steps."""

    who: str
    """As the rows name it, after what copies."""
    way: str = "both"
    fragment_bytes: int = LARGE
    shape: str = BATCH


def opened(bench: Bench, child: Child, who: str) -> bool:
    """Whether the child can copy; if not, a row says why, and the rest is measured without it."""
    try:
        child.answer(OPEN_S)
    except ChildError as error:
        bench.row(left_out=who, why=str(error)[-400:])
        return False
    return True


class Measuring:
    """Measures each workload idle and with every way of copying."""

    def __init__(self, bench: Bench, engine: Child, copiers: Mapping[str, Child]) -> None:
        """`copiers` by `Copying.who`; those that are not among them are left out."""
        self._bench = bench
        self._engine = engine
        self._copiers = copiers
        self._idle: dict[str, list[dict[str, Any]]] = {GEMM: [], DECODE: []}
        self._seconds = bench.pick(1.5, 0.05)

    def all(self, plan: Sequence[Copying]) -> None:
        plan = [case for case in plan if case.who in self._copiers]
        for index, case in enumerate(plan):
            if index % IDLE_EVERY == 0:
                self.idle()
            if self._bench.left_s() < 4 * self._seconds + 2:
                self._bench.row(left_out=f"{len(plan) - index} ways of copying", why="no time was left")
                break
            try:
                for workload in (DECODE, GEMM):
                    self.with_copies(workload, case)
            except ChildError as error:  # the other ways are worth measuring without it
                self._bench.row(left_out=f"{case.who}, {case.way}", why=str(error)[-400:])
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

    def with_copies(self, workload: str, case: Copying) -> None:
        copier = self._copiers[case.who]
        started: dict[str, Any] = {"directions": list(WAYS[case.way]), "shape": case.shape}
        started["fragment_bytes"] = self._bench.pick(case.fragment_bytes, 4_096)
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
        self._bench.row(
            workload=workload,
            copies=case.who,
            way=case.way,
            shape=case.shape,
            overlap_hint=case.shape == HINT,
            fragment_bytes=case.fragment_bytes,
            gb_per_s=rate,
            **steps,
            **ratios,
        )

    def _measure(self, workload: str) -> dict[str, Any]:
        return self._engine.ask("measure", workload=workload, seconds=self._seconds).fields
