"""The result of a check: its name, its verdict, what was found, and what to do about it."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from kvtierd.config.daemon import Config, Loaded
from kvtierd.config.settings import Given

EXIT_CONFIG = 78
"""The exit status if somebody has to change the configuration or the host (sysexits.h EX_CONFIG)."""
EXIT_UNAVAILABLE = 69
"""The exit status if what the daemon needs is in use just now: another try may succeed (EX_UNAVAILABLE)."""


class Verdict(Enum):
    OK = "ok"
    WARNING = "warning"
    """The daemon starts, but works less well than it could, or without something that is configured."""
    FAILURE = "failure"
    """The daemon does not start."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    name: str
    verdict: Verdict
    found: str
    remedy: str = ""
    """What to change; empty if nothing has to be changed."""
    field: str = ""
    """The setting that the finding is about; empty if it is about none."""
    value: object = None
    """The value of that setting, as a person would write it."""
    passing: bool = False
    """Whether it may pass by itself, because another process is using what the daemon needs."""
    holder: bool = False
    """Whether it may pass as soon as the pool's previous owner is gone."""


@dataclass(frozen=True, slots=True)
class RunningDaemon:
    """A daemon that listens at the configured socket."""

    pid: int | None
    """Its process id; None if it cannot be seen from here, as in another container."""


@dataclass(frozen=True, slots=True)
class Situation:
    """What the checks look at."""

    loaded: Loaded
    daemon: RunningDaemon | None
    """The daemon that listens at the configured socket; None if there is none."""
    may_run: bool
    """Whether the question is about that daemon, so that it is no obstacle. Otherwise another one is to
    start."""

    @property
    def config(self) -> Config:
        return self.loaded.config

    def is_of_daemon(self, pids: Sequence[int]) -> bool:
        """Whether processes that use something are those of the daemon that the question is about."""
        daemon = self.daemon
        if not self.may_run or daemon is None:
            return False
        if daemon.pid is None or daemon.pid in pids:
            return True
        # Nobody is seen to use it. So it is the daemon's only if what that one uses cannot be seen.
        return not pids and not os.access(f"/proc/{daemon.pid}/fd", os.R_OK)


class NotReadyError(Exception):
    """The daemon cannot start. The text says every reason, each with its setting, its value and what to
    do."""

    def __init__(self, failures: Sequence[Finding], given: Mapping[str, Given]) -> None:
        self.failures = tuple(failures)
        texts = [sentence(each, given) for each in failures]
        if len(texts) > 1:
            texts.insert(0, f"it cannot start, for {len(texts)} reasons:")
        super().__init__("\n  ".join(texts))

    @property
    def status(self) -> int:
        """The exit status of a process that ends because of this error."""
        return EXIT_UNAVAILABLE if all(each.passing for each in self.failures) else EXIT_CONFIG


def sentence(finding: Finding, given: Mapping[str, Given]) -> str:
    """A finding in one line: `pool.path = '/x/pool' (from --pool-path): there is no such folder; create
    it`."""
    head = finding.name
    if finding.field:
        source = given[finding.field].source if finding.field in given else "default"
        head = f"{finding.field} = {str(finding.value)!r} (from {source})"
    return f"{head}: {finding.found}{f'; {finding.remedy}' if finding.remedy else ''}"


def in_use_by(pids: Sequence[int], names: Mapping[int, str]) -> str:
    """Names the processes that use something: `in use by pid 7 (kvtierd, which serves at /run/k.sock) and pid
    8`."""
    if not pids:
        return "in use by a process that cannot be seen from here (of another container or user?)"
    told = [f"pid {pid}{f' ({names[pid]})' if names.get(pid) else ''}" for pid in pids]
    return f"in use by {' and '.join(told)}"
