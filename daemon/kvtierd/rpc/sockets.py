"""One owner for each socket: its private directory, its lock file, and binding it. `release` undoes
everything."""

import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK_DEADLINE_S = 5.0
"""How long to try again when the lock file keeps being replaced. A running daemon is not waited for."""


class SocketError(Exception):
    """The sockets cannot be created; the message says why and what to do."""


class AlreadyRunning(SocketError):
    """Another daemon owns the socket."""

    def __init__(self, socket_path: Path, pid: int | None) -> None:
        who = f"pid {pid}" if pid else "another process"
        super().__init__(
            f"already running: {who} owns {socket_path}; stop it, or give this one another socket "
            "(--socket) and pool (--pool-path)"
        )
        self.pid = pid


class OwnedSockets:
    """Holds the lock of a gRPC socket and its side socket from its creation until `release`."""

    def __init__(self, grpc_path: Path, side_path: Path, lock_path: Path, gid: int | None = None) -> None:
        """Makes the directory (0700) if it is missing, takes the lock, and removes socket files that were
        left behind.

        `gid` is a group that may use the sockets too. Raises AlreadyRunning or SocketError, and then leaves
        nothing behind.
        """
        self.grpc_path, self.side_path, self._lock_path, self._gid = grpc_path, side_path, lock_path, gid
        make_private_directory(grpc_path.parent, gid)
        self._lock_fd = self._lock()
        try:
            for path in (grpc_path, side_path):
                _remove_stale(path)
        except BaseException:
            self._unlock()
            raise

    @contextmanager
    def binding(self) -> Iterator[None]:
        """Socket files made in this context belong to this user alone (0600) from the moment they exist."""
        before = os.umask(0o177)
        try:
            yield
        finally:
            os.umask(before)

    def bind_side(self) -> socket.socket:
        """The side socket, listening and non-blocking. The caller closes it."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            with self.binding():
                listener.bind(os.fspath(self.side_path))
            listener.listen(128)
        except OSError as error:
            listener.close()
            raise SocketError(f"{self.side_path} cannot be bound: {error}") from error
        return listener

    def open_to_group(self) -> None:
        """Lets the group use both sockets, if there is one. Call it when both are bound."""
        if self._gid is not None:
            for path in (self.grpc_path, self.side_path):
                os.chown(path, -1, self._gid)
                os.chmod(path, 0o660)

    def release(self) -> None:
        """Removes the socket files and the lock."""
        for path in (self.grpc_path, self.side_path):
            path.unlink(missing_ok=True)
        self._unlock()

    def _lock(self) -> int:
        deadline_s = time.monotonic() + LOCK_DEADLINE_S
        while time.monotonic() < deadline_s:
            try:
                fd = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            except OSError as error:
                raise SocketError(f"{self._lock_path} cannot be opened: {error}") from error
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pid = _pid_in(fd)
                os.close(fd)
                raise AlreadyRunning(self.grpc_path, pid) from None
            if _is_still(self._lock_path, fd):
                try:
                    os.ftruncate(fd, 0)
                    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
                except OSError as error:
                    os.close(fd)
                    raise SocketError(f"{self._lock_path} cannot be written: {error}") from error
                return fd
            os.close(fd)  # its owner removed it while ending, so there is a new lock file, or none
        raise SocketError(f"{self._lock_path} is being replaced all the time; is something removing it?")

    def _unlock(self) -> None:
        # It is removed while locked, so that whoever has opened it sees that the path names another file.
        self._lock_path.unlink(missing_ok=True)
        os.close(self._lock_fd)


def make_private_directory(path: Path, gid: int | None = None) -> None:
    """Makes a directory of our own (0700, or 0750 for a group), or checks that one is safe for sockets.

    It is safe if it is a real directory, belongs to us or root, and nobody else can write to it. Raises
    SocketError.
    """
    mode = 0o700 if gid is None else 0o750
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=mode)
        if gid is not None:
            os.chown(path, -1, gid)
            os.chmod(path, mode)
        return
    except FileExistsError:
        pass
    except OSError as error:
        raise SocketError(f"{path} cannot be made: {error}") from error
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise SocketError(f"{path} is not a directory: remove it, or use another place")
    if found.st_uid not in (0, os.geteuid()):
        raise SocketError(f"{path} belongs to uid {found.st_uid}, not to this user: use another place")
    if found.st_mode & 0o022:
        raise SocketError(
            f"{path} can be written by others (mode {stat.S_IMODE(found.st_mode):04o}): "
            f"chmod {mode:o} it, or use another place"
        )


def _remove_stale(path: Path) -> None:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise SocketError(f"{path} is in the way and no socket: remove it, or use another path")
    path.unlink()


def _is_still(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(fd))
    except FileNotFoundError:
        return False


def _pid_in(fd: int) -> int | None:
    text = os.pread(fd, 32, 0).strip()
    return int(text) if text.isdigit() else None
