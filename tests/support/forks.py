"""Programs as forks of a process that has imported what they need, which is most of what their start costs.

A process has one such parent, and the parent one module that it has imported; it starts no thread and only
forks. A fork has an environment, pipes, limits and an end of its own, as a program that was executed has.
What forks share is the seed of `hash()`, and the command line that /proc shows.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from tests.support.leaks import FORKED


def _of_python(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that an interpreter reads when it starts, and a fork therefore does not."""
    return {name: value for name, value in environment.items() if name.startswith("PYTHON")}


_context = multiprocessing.get_context("forkserver")
_imported: list[str] = []
_environment = _of_python(os.environ)
_interpreter = sys.executable
START_S = 60.0
"""For a fork to begin; it takes milliseconds."""


def use(module: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process forks from one that has imported `module`, a program with such an environment. The
    first to ask decides. What has other variables of the interpreter's, or while `sys.executable` is another,
    has to be executed: a fork would not heed them, and if the forks' parent started with them, every later
    fork would."""
    if _of_python(environment) != _environment or sys.executable != _interpreter:
        return False
    if not _imported:
        _imported.append(module)
        _context.set_forkserver_preload(_imported)
    return _imported == [module]


class Fork:
    """What `subprocess.Popen` offers, of a fork that runs `main()` with such arguments and environment. It
    reads `stdin`, if it has one, and writes to `stdout`; its standard error is added to the file `errors`."""

    def __init__(
        self,
        main: Callable[[], object],
        arguments: Sequence[str],
        environment: Mapping[str, str],
        errors: Path,
        *,
        session: bool = False,
        stdin: bool = False,
    ) -> None:
        """`session`: it leads a session and a process group of its own."""
        read_in, write_in = _context.Pipe(duplex=False)
        read_out, write_out = _context.Pipe(duplex=False)
        place = (os.getcwd(), resource.getrlimit(resource.RLIMIT_NOFILE))
        ready, begun = _context.Pipe(duplex=False)
        start = (
            main,
            list(arguments),
            dict(environment),
            read_in,
            write_out,
            str(errors),
            place,
            session,
            begun,
        )
        with read_in, write_in, read_out, write_out, ready:
            self._process = _context.Process(
                target=_become, args=start, daemon=True, name=multiprocessing.current_process().name
            )
            with begun:
                self._process.start()
            # Readable as soon as it is what it says to be, or has ended.
            assert ready.poll(START_S), f"a fork has not become what it is to be within {START_S} s"
            self.stdin: IO[str] | None = os.fdopen(os.dup(write_in.fileno()), "w") if stdin else None
            self.stdout: IO[str] | None = os.fdopen(os.dup(read_out.fileno()))

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit status, minus a signal's number; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status. Raises TimeoutExpired."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(FORKED, timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Does nothing once it has ended."""
        if self._process.exitcode is None:
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:
                pass  # it has ended just now

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for pipe in (self.stdin, self.stdout):
            if pipe is not None:
                pipe.close()
        self.wait()


def _become(
    main: Callable[[], object],
    arguments: list[str],
    environment: dict[str, str],
    stdin: Connection,
    stdout: Connection,
    errors: str,
    place: tuple[str, tuple[int, int]],
    session: bool,
    begun: Connection,
) -> None:
    """In the fork."""
    Path("/proc/self/comm").write_text(FORKED)  # or it would be taken for its parent
    os.chdir(place[0])
    resource.setrlimit(resource.RLIMIT_NOFILE, place[1])
    if session:
        os.setsid()
    file = os.open(errors, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    for number, descriptor in enumerate((stdin.fileno(), stdout.fileno(), file)):
        os.dup2(descriptor, number)
    stdin.close()
    stdout.close()
    os.close(file)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.argv[1:] = arguments
    os.environ.clear()
    os.environ.update(environment)
    begun.close()
    main()
