"""The first hour at a GPU that is lent for minutes at a time: four calls, each of at most ten minutes.

What decides most comes first, and each call leaves its results behind. `README.md` says how to make them.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.gpu.plan import MATRIX


@dataclass(frozen=True)
class Call:
    """One run of `run.py --call`."""

    title: str
    steps: tuple[str, ...] = ()
    suite: bool = False


DECIDE = ("sharing", "slices", "versions", "soak", "worker_kill", "exporter_kill")
CALLS = {
    1: Call("environment and decisions", DECIDE),
    2: Call("correctness", suite=True),
    3: Call("figures", tuple(step.name for step in MATRIX if step.name not in DECIDE)),
    4: Call(
        "reruns of what decides",
        ("slices", "interference", "beside_kvtierd", "batches", "shapes", "pipeline", "registration"),
    ),
}
