"""How several pytest processes share the tests: by file, those that take long first.

A file's tests run in one process, in their order: they may share daemons and engines. Files whose tests all
start what they need, and take long, are shared test by test.
"""

from __future__ import annotations

from xdist.scheduler import LoadFileScheduling

FIRST = ("tests/simulation/", "tests/vllm/test_workload.py")
"""Files, or the beginnings of their paths, in the order in which they are handed out, before all others. What
takes longest must not begin last."""
BY_TEST = ("tests/simulation/",)
"""Files that are shared test by test."""
STORY = ("tests/vllm/test_restore.py",)
"""Files that share the engines of a session (tests/vllm/conftest.py): all in one process, which starts them
once."""


def rank(nodeid: str) -> int:
    """Where in the order a test is."""
    return next((place for place, begin in enumerate(FIRST) if nodeid.startswith(begin)), len(FIRST))


class Sharing(LoadFileScheduling):
    """Hands out files as this module says."""

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith(BY_TEST):
            return nodeid
        file = nodeid.split("::", 1)[0]
        return STORY[0] if file in STORY else file
