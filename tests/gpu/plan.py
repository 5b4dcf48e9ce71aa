"""The matrix: what is measured, in which order, and how long each step may take.

The order is that of worth: a run that is cut short has measured what decides most. Numbers are those of the
research note that asked for the measurements.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """One module of `tests.gpu.steps`."""

    name: str
    number: str
    title: str
    deadline_s: float
    """It is killed then, and keeps the rows it has written."""
    worth_s: float
    """With less time left than this it is not begun."""
    needs: frozenset[str] = frozenset()
    """Python packages without which nothing of it can run. A step that only measures less without a package
    names none, and says in its rows what it left out."""
    stands_in: bool = False
    """On the fake driver something else stands in for those packages."""


PROBE = Step("probe", "-", "What this machine can do", 60, 5)
MATRIX = (
    Step("sharing", "s", "Which processes may open an engine's memory", 90, 15),
    Step("slices", "b", "Calls and small copies beside another process", 120, 25, frozenset({"torch"}), True),
    Step("versions", "0", "Versions, NUMA, link, and what a context costs", 60, 10),
    Step("ceiling", "1", "The ceiling: one large pinned copy", 60, 10),
    Step(
        "interference",
        "7",
        "An engine's steps while another process copies",
        150,
        45,
        frozenset({"torch"}),
        stands_in=True,
    ),
    Step(
        "beside_kvtierd",
        "k",
        "An engine's steps while kvtierd copies",
        120,
        30,
        frozenset({"torch"}),
        stands_in=True,
    ),
    Step("worker_kill", "8a", "SIGKILL of a copy worker in the middle of its copies", 60, 15),
    Step("exporter_kill", "8b", "SIGKILL of an engine in the middle of copies of its memory", 45, 10),
    Step("end_to_end", "e", "Store and load through kvtierd", 90, 25),
    Step("batches", "3", "Batched copies by fragment size and count", 75, 15),
    Step("shapes", "4", "Loop, 2D rows and coalesced runs", 45, 10),
    Step("pipeline", "c", "Chunk sizes and flights in flight", 40, 10),
    Step("handles", "6", "Opening handles, and doorbells against events", 45, 10),
    Step("registration", "2", "Registering host memory", 60, 10),
    Step("thread_blocks", "5", "Kernel copies by thread blocks", 45, 15, frozenset({"torch", "triton"})),
    Step("soak", "9", "Batches of 4,096 descriptors, one after another, checked", 45, 8),
)
BY_NAME = {step.name: step for step in (PROBE, *MATRIX)}
