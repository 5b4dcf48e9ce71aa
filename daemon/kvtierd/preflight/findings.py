"""What a check says: a name, a verdict, what was found, and what to do about it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from kvtierd.config.daemon import Config, Loaded
from kvtierd.config.settings import Given, format_size

EXIT_CONFIG = 78
"""Somebody has to change the configuration, or the host (sysexits.h EX_CONFIG)."""
EXIT_UNAVAILABLE = 69
"""What the daemon needs is in use just now: another try may succeed (sysexits.h EX_UNAVAILABLE)."""


class Verdict(Enum):
    OK = "ok"
    WARNING = "warning"
    """The daemon starts, and would do better, or more of what is configured, otherwise."""
    FAILURE = "failure"
    """The daemon does not start."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    name: str
    verdict: Verdict
    found: str
    remedy: str = ""
    """What to change, where something is to be changed."""
    field: str = ""
    """The setting that it is about, if it is about one."""
    value: object = None
    """What that setting holds, as a person would write it."""
    passing: bool = False
    """It may be over by itself: somebody uses now what the daemon needs."""
    holder: bool = False
    """It may be over as soon as the pool's owner before us is gone."""


@dataclass(frozen=True, slots=True)
class RunningDaemon:
    """A daemon that listens at the configured socket."""

    pid: int | None
    """None: it cannot be seen from here, as in another container."""


@dataclass(frozen=True, slots=True)
class Situation:
    """What is to be looked at."""

    loaded: Loaded
    daemon: RunningDaemon | None
    """Who listens at the configured socket."""
    may_run: bool
    """That daemon is no obstacle: it is what somebody asks about. Otherwise another is to be started."""

    @property
    def config(self) -> Config:
        return self.loaded.config

    def is_of_daemon(self, pids: Sequence[int]) -> bool:
        """Whether something in use is in use by the very daemon that was asked about."""
        daemon = self.daemon
        if not self.may_run or daemon is None:
            return False
        return daemon.pid is None or not pids or daemon.pid in pids


class NotReadyError(Exception):
    """The daemon cannot start: says every reason, each with its setting, its value and what to do."""

    def __init__(self, failures: Sequence[Finding], given: Mapping[str, Given]) -> None:
        self.failures = tuple(failures)
        texts = [sentence(each, given) for each in failures]
        if len(texts) > 1:
            texts.insert(0, f"it cannot start, for {len(texts)} reasons:")
        super().__init__("\n  ".join(texts))

    @property
    def status(self) -> int:
        """For the process to end with."""
        return EXIT_UNAVAILABLE if all(each.passing for each in self.failures) else EXIT_CONFIG


def sentence(finding: Finding, given: Mapping[str, Given]) -> str:
    """One line: `pool.path = '/x/pool' (from --pool-path): there is no such folder; create it`."""
    head = finding.name
    if finding.field:
        source = given[finding.field].source if finding.field in given else "default"
        head = f"{finding.field} = {str(finding.value)!r} (from {source})"
    return f"{head}: {finding.found}{f'; {finding.remedy}' if finding.remedy else ''}"


def in_use_by(pids: Sequence[int], names: Mapping[int, str]) -> str:
    """`in use by pid 7 (kvtierd, which serves at /run/k.sock) and pid 8`."""
    if not pids:
        return "in use by a process that cannot be seen from here (of another container or user?)"
    told = [f"pid {pid}{f' ({names[pid]})' if names.get(pid) else ''}" for pid in pids]
    return f"in use by {' and '.join(told)}"


def size_value(size_bytes: int) -> Any:
    """A size as somebody would write it."""
    return format_size(size_bytes)
