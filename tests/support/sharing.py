"""How several pytest processes share the tests: by file, beginning with files that take long.

A file's tests run in one process, in their order, so they may share daemons and engines. Files whose tests
all start what they need, and take long, are shared test by test.
"""

from __future__ import annotations

from xdist.scheduler import LoadFileScheduling

STORY = tuple(
    f"tests/vllm/test_{name}.py"
    for name in ("failures", "kill_campaign", "log", "processes", "resets", "restarts", "restore")
)
"""Files that share the engines of a session (tests/vllm/conftest.py). All of them run in one process, so that
these engines are started once."""
FIRST = (
    "tests/simulation/",
    *STORY,
    *(f"tests/vllm/test_{name}.py" for name in ("workload", "audits", "weights", "rounds", "hybrid")),
    *(f"tests/vllm/test_{name}.py" for name in ("simulation", "example_program", "api_server")),
    *(f"tests/integration/daemon/test_{name}.py" for name in ("life", "disks", "interrupts", "hostile")),
    "tests/security/test_remote.py",
    "tests/integration/client/test_life.py",
    "tests/integration/client/test_gpu.py",
    "tests/faults/gpu/test_every_call_fails.py",
    "tests/integration/worker/test_gpu_faults.py",
    "tests/integration/worker/test_copies.py",
    "tests/faults/disk/test_crash_points.py",
    "tests/faults/test_daemon_kills.py",
    "tests/faults/test_planned_restarts.py",
)
"""Files, or the beginnings of their paths, that are handed out before all others, in this order, because what
takes longest must not begin last."""
BY_TEST = ("tests/simulation/",)
"""Files that are shared test by test."""


def rank(nodeid: str) -> int:
    """Returns a test's place in the order."""
    return next((place for place, begin in enumerate(FIRST) if nodeid.startswith(begin)), len(FIRST))


class Sharing(LoadFileScheduling):
    """Hands out files as this module says."""

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith(BY_TEST):
            return nodeid
        file = nodeid.split("::", 1)[0]
        return STORY[0] if file in STORY else file
