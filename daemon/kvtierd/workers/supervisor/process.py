"""One worker process as the front sees it: how it is started, watched and killed."""

import asyncio
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

from kvtierd.workers.channel.packets import PacketChannel, packet_socketpair
from kvtierd.workers.channel.status import StatusPage, create_status_fd
from kvtierd.workers.signals import held_back
from kvtierd.workers.supervisor.kinds import WorkerKind

EXITED_WELL = "exited with status 0"

_WORKER_ENVIRONMENT = {
    # The worker does no linear algebra, and a thread pool for it would cost memory and start-up time.
    "OPENBLAS_NUM_THREADS": "1",
}


class WorkerProcess:
    """A worker that is started by exec, never by a fork of the front, which has threads.

    `on_exit()` is called in a callback of the loop once the process is gone with all its threads: none of its
    copies can land any more, and it holds neither the pool nor any client's memory. The object owns the
    pidfd, the channel and the status page until `close`.
    """

    def __init__(
        self,
        *,
        pool_fd: int,
        pool_bytes: int,
        kind: WorkerKind,
        environment: Mapping[str, str] | None,
        log_level: str,
        log_format: str,
        on_packet: Callable[[bytes, list[int]], None],
        on_closed: Callable[[str], None],
        on_exit: Callable[[], None],
    ) -> None:
        """Starts the process. Raises OSError or ValueError if that fails, and leaves nothing behind."""
        self._loop = asyncio.get_running_loop()
        status_fd = create_status_fd()
        try:
            self.status = StatusPage(status_fd)
            ours, theirs = packet_socketpair()
            arguments: dict[str, object] = {
                "--pool-fd": pool_fd,
                "--pool-bytes": pool_bytes,
                "--channel-fd": theirs.fileno(),
                "--status-fd": status_fd,
                "--log-level": log_level,
                "--log-format": log_format,
                **kind.arguments,
            }
            fds = (pool_fd, theirs.fileno(), status_fd, *kind.fds)
            try:
                own = {**kind.environment, **(environment or {})}
                self._popen = _start(kind.module, arguments, fds, own)
            except BaseException:
                ours.close()
                raise
            finally:
                theirs.close()
        finally:
            os.close(status_fd)
        try:
            self.pidfd = os.pidfd_open(self._popen.pid)
        except BaseException:
            # Without a pidfd nobody could prove that the process has ended.
            self._popen.kill()
            self._popen.wait()
            ours.close()
            raise
        self.pid = self._popen.pid
        self.channel = PacketChannel(ours, on_packet, on_closed)
        self._on_exit = on_exit
        self._loop.add_reader(self.pidfd, self._gone)

    def kill(self) -> None:
        """Sends SIGKILL. Does nothing if the process is gone."""
        try:
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def ended(self) -> str | None:
        """How the process ended, in words, or None if it has not."""
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        if not poll.poll(0):
            return None
        status = self._popen.wait()
        if status < 0:
            return f"killed by {signal.Signals(-status).name}"
        return f"exited with status {status}" if status else EXITED_WELL

    def _gone(self) -> None:
        self._loop.remove_reader(self.pidfd)
        self._on_exit()

    def close(self) -> None:
        """Releases everything. Only after the process has ended."""
        self._popen.wait()
        self._loop.remove_reader(self.pidfd)
        self.channel.close()
        os.close(self.pidfd)


def _start(
    module: str, arguments: Mapping[str, object], fds: Sequence[int], environment: Mapping[str, str]
) -> "subprocess.Popen[bytes]":
    # -P: nothing in the working directory can shadow a module.
    command = [sys.executable, "-P", "-m", module]
    for name, value in arguments.items():
        command += [name] if value is None else [name, str(value)]
    with held_back():
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            pass_fds=fds,
            env={**os.environ, **_WORKER_ENVIRONMENT, **environment},
        )
