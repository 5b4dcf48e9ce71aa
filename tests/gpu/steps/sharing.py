"""Which processes may open an engine's memory: between PID namespaces, with equal PIDs, between users.

`legacy` (a handle of cuIpcGetMemHandle) and `chunk` (a descriptor) are "ok", or what the driver answered.
Nobody documents it, and reports disagree. A row with `why` could not be tried; namespaces and other users
take root. On the fake driver the processes only pretend to be elsewhere.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from tests.gpu.parts.bench import KIB, MIB, Bench
from tests.gpu.parts.child import Child, ChildError
from tests.gpu.parts.device import open_device

ASK_S = 30.0


@dataclass(frozen=True)
class Place:
    """Where a process is: in a PID namespace of its own, with this PID there, or as another user."""

    pid: int = 0
    """0: in our own namespace."""
    user: int = 0
    """0: as this user."""

    def command(self) -> tuple[str, ...]:
        """Words before the process's command."""
        words: tuple[str, ...] = ()
        if self.user:
            user = str(self.user)
            words = ("setpriv", "--reuid", user, "--regid", user, "--clear-groups")
        if self.pid:
            # The next process of the namespace gets the PID after the last one.
            shell = f'echo {self.pid - 1} > /proc/sys/kernel/ns_last_pid; {shlex.join(words)} "$@" & wait'
            words = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", shell, "sh")
        return words

    def pretence(self) -> dict[str, str]:
        """What makes the fake driver take a process for one there."""
        if not self.pid:
            return {}
        return {"FAKE_CUDA_PID_NAMESPACE": "1", "FAKE_CUDA_SHOWN_PID": str(self.pid)}


HERE = Place()
CASES: dict[str, tuple[Place, Place]] = {
    "one namespace, one user": (HERE, HERE),
    "two namespaces": (Place(pid=500), Place(pid=700)),
    "two namespaces, equal PIDs": (Place(pid=500), Place(pid=500)),
    "engine in a namespace, daemon on the host": (Place(pid=500), HERE),
    "engine is root, daemon 10001": (HERE, Place(user=10001)),
    "engine 10002, daemon 10001": (Place(user=10002), Place(user=10001)),
    "both 10001": (Place(user=10001), Place(user=10001)),
    "pods: namespaces, root and 10001": (Place(pid=500), Place(pid=700, user=10001)),
}
"""Where the engine is, and where the daemon's worker."""


def run(bench: Bench) -> None:
    with open_device():
        pass  # or it says why there is none
    for case, places in CASES.items():
        if bench.fake and any(place.user for place in places):
            continue  # nobody can pretend to be another user
        try:
            bench.row(case=case, **tried(bench, *places))
        except (ChildError, OSError) as error:
            bench.row(case=case, why=str(error).strip()[-300:])


def tried(bench: Bench, engine: Place, daemon: Place) -> dict[str, str]:
    n = bench.pick(2 * MIB, 64 * KIB)
    with (
        child(bench, "tests.gpu.children.owner", engine) as owner,
        child(bench, "tests.gpu.children.importer", daemon) as importer,
    ):
        [handle] = owner.ask("legacy", timeout_s=ASK_S, bytes=n, count=1)["handles"]
        legacy = importer.ask("legacy", timeout_s=ASK_S, handle=handle)["said"]
        owner.ask("chunks", timeout_s=ASK_S, bytes=n, count=1)
        fetched = owner.ask("fetch", timeout_s=ASK_S, first=0, count=1)
        try:
            chunk = importer.ask("chunk", fetched.fds, timeout_s=ASK_S)["said"]
        finally:
            close(fetched.fds)
    return {"legacy": legacy, "chunk": chunk}


def child(bench: Bench, module: str, place: Place) -> Child:
    if bench.fake:
        return Child(module, place.pretence())
    return Child(module, wrap=place.command())


def close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
