"""A second process of a step or test: it answers one JSON message at a time, over a socket that also carries
descriptors. It ends when its parent does.

    with Child("tests.gpu.children.exporter") as exporter:
        answer = exporter.ask("export", n=4096)
"""

from __future__ import annotations

import array
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, Self

MESSAGE_BYTES = 160 << 10
DESCRIPTORS = 64
ASK_S = 60.0
END_S = 10.0


class ChildError(Exception):
    """The child said that it failed, died, or did not answer in time."""


@dataclass
class Answer:
    """What a child said; the descriptors belong to the caller."""

    fields: dict[str, Any]
    fds: list[int] = field(default_factory=list)

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]


class Child:
    """One such process. `kill` is SIGKILL; leaving the `with` ends it in any case."""

    def __init__(
        self, module: str, environment: Mapping[str, str] | None = None, wrap: Sequence[str] = ()
    ) -> None:
        """`wrap`: words before its command, which run it. Its `pid` is then theirs."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [*wrap, sys.executable, "-m", "tests.gpu.children", module, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=None if environment is None else {**os.environ, **environment},
            )
        self.pid = self.process.pid
        self.pidfd = os.pidfd_open(self.pid)
        self._socket = ours

    def tell(self, what: str, fds: Sequence[int] = (), **fields: object) -> None:
        """Sends a question whose answer is fetched later, by `answer`."""
        try:
            _send(self._socket, {"what": what, **fields}, fds)
        except OSError as error:
            raise ChildError(f"{what}: the child is gone ({error})") from error

    def answer(self, timeout_s: float = ASK_S) -> Answer:
        """The next answer. Raises ChildError."""
        self._socket.settimeout(timeout_s)
        try:
            received = _receive(self._socket)
        except (TimeoutError, BlockingIOError) as error:
            raise ChildError(f"no answer within {timeout_s} s") from error
        except OSError as error:
            raise ChildError(f"the child is gone ({error})") from error
        if received is None:
            raise ChildError(f"the child ended with status {self.process.wait(END_S)}")
        if "error" in received.fields:
            raise ChildError(str(received.fields["error"]))
        return received

    def ask(self, what: str, fds: Sequence[int] = (), timeout_s: float = ASK_S, **fields: object) -> Answer:
        self.tell(what, fds, **fields)
        return self.answer(timeout_s)

    def kill(self) -> float:
        """SIGKILL; returns once the pidfd says that it is dead, with the seconds that took."""
        begin = time.perf_counter()
        signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        if not poll.poll(ASK_S * 1_000):
            raise ChildError(f"the child was still there {ASK_S} s after SIGKILL")
        return time.perf_counter() - begin

    def close(self) -> None:
        """Lets it end by itself for a moment, then kills it."""
        if self.pidfd < 0:
            return
        self._socket.close()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(END_S)
        os.close(self.pidfd)
        self.pidfd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


Handler = Callable[[dict[str, Any], list[int]], "dict[str, Any] | tuple[dict[str, Any], list[int]] | None"]


def serve(socket_fd: int, handlers: Mapping[str, Handler]) -> NoReturn:
    """The child's side: answers until the parent is gone, then exits, without running what is left of the
    interpreter's end: a wedged driver must not keep it."""
    with socket.socket(fileno=socket_fd) as channel:
        while (question := _receive(channel)) is not None:
            what = question.fields.pop("what")
            try:
                answer = handlers[what](question.fields, question.fds)
            except Exception:
                sys.stderr.write(traceback.format_exc())
                answer = {"error": f"{what}: {traceback.format_exc(limit=-3)}"[-4_000:]}
            fields, fds = answer if isinstance(answer, tuple) else (answer or {}, [])
            try:
                _send(channel, fields, fds)
            except BrokenPipeError:
                break
            for fd in fds:
                os.close(fd)
    os._exit(0)


def main(module: str, socket_fd: int) -> NoReturn:
    """Imports `module`, calls its `handlers()`, and serves them."""
    serve(socket_fd, importlib.import_module(module).handlers())


def _send(channel: socket.socket, fields: dict[str, Any], fds: Sequence[int]) -> None:
    data = json.dumps(fields).encode()
    if len(data) > MESSAGE_BYTES:
        raise ValueError(f"a message of {len(data)} bytes; at most {MESSAGE_BYTES}")
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    channel.sendmsg([data], ancillary)


def _receive(channel: socket.socket) -> Answer | None:
    data, fds, _, _ = socket.recv_fds(channel, MESSAGE_BYTES, DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
    return Answer(json.loads(data), list(fds)) if data else None
