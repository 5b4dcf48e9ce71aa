"""Finds out who uses a socket or a port, as far as /proc shows it to this user."""

import os
import socket
import struct
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

PROC = Path("/proc")
SIDE_SUFFIX = ".side.sock"
WORKER, DISK_WORKER = "kvtierd.workers.copy", "kvtierd.workers.disk"
STORE_WORKER = "kvtierd.workers.store"
"""The names of copy workers, disks' workers and the store's worker in their command lines."""
LISTENING = "0A"
"""The state of a listening socket in /proc/net/tcp."""
LOOKING_S = 2.0
"""How long to look for the owner of a port, because a host may have very many processes and open files."""


def listener(path: Path) -> int | None:
    """The pid of the process that listens at a Unix socket, 0 if it cannot be seen from here, None if there
    is none.

    The listener sees a connection come and go, as from a client that changes its mind.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(str(path))
        except BlockingIOError:
            return 0  # so many connections wait for it that there is no room for one more
        except OSError:
            return None
        credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        return int(struct.unpack("3i", credentials)[0])


def described(pids: Iterable[int]) -> dict[int, str]:
    """Describes processes for people: a daemon by the socket at which it serves, any other by its name."""
    return {pid: _described(pid) for pid in pids}


def _described(pid: int) -> str:
    inodes = _socket_inodes(pid)
    paths = [path for inode, path in _unix_sockets(pid) if inode in inodes]
    served = [path for path in paths if path.endswith(".sock") and not path.endswith(SIDE_SUFFIX)]
    if served and any(path.endswith(SIDE_SUFFIX) for path in paths):
        return f"kvtierd, which serves at {served[0]}"
    try:
        arguments = (PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
        if WORKER in arguments:
            return "a copy worker of kvtierd"
        if DISK_WORKER in arguments:
            return "a disk's worker of kvtierd"
        if STORE_WORKER in arguments:
            return "the store's worker of kvtierd"
        return (PROC / str(pid) / "comm").read_text().strip()
    except OSError:
        return ""


def port_owners(port: int) -> list[int]:
    """Processes that listen at a TCP port, whatever the address, as far as they are found in LOOKING_S."""
    inodes = {inode for name in ("tcp", "tcp6") for inode in _listening(name, port)}
    deadline_s = time.monotonic() + LOOKING_S
    found: list[int] = []
    for pid in map(int, filter(str.isdigit, os.listdir(PROC))) if inodes else ():
        if inodes & _socket_inodes(pid):
            found.append(pid)
        if time.monotonic() > deadline_s:
            break
    return found


def _listening(name: str, port: int) -> Iterator[str]:
    try:
        lines = (PROC / "net" / name).read_text().splitlines()[1:]
    except OSError:
        return
    for fields in map(str.split, lines):
        if fields[3] == LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
            yield fields[9]


def _unix_sockets(pid: int) -> Iterator[tuple[str, str]]:
    try:
        lines = (PROC / str(pid) / "net/unix").read_text().splitlines()[1:]
    except OSError:
        return
    for line in lines:
        fields = line.split(maxsplit=7)
        if len(fields) == 8:
            yield fields[6], fields[7]


def _socket_inodes(pid: int) -> set[str]:
    found = set()
    try:
        for entry in (PROC / str(pid) / "fd").iterdir():
            target = os.readlink(entry)
            if target.startswith("socket:["):
                found.add(target[len("socket:[") : -1])
    except OSError:
        pass  # the process has just ended, or belongs to another user
    return found
