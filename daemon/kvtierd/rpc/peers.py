"""Who connects: the kernel names the process at the other end of a side connection, and the operator's rules
say what it may do."""

import errno
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtierd.config.people import UID_TENANT, People, TenantRule, tenant_of

SO_PEERPIDFD = 77
SO_PEERGROUPS = 59
GETSOCKOPT_BYTES_MAX = 1_024
"""The largest buffer that Python's getsockopt takes."""
UID_MAP_FILE = Path("/proc/self/uid_map")
EVERY_UID = ["0", "0", "4294967295"]
"""The map of the host's own user namespace, in which every user has a number."""
OVERFLOW_UID_FILE = Path("/proc/sys/kernel/overflowuid")


@dataclass(frozen=True, slots=True)
class PeerProcess:
    """The process at the other end of a side connection, as the kernel reports it."""

    pid: int
    """0 if it is of a pid namespace that is not seen from here."""
    uid: int
    gid: int
    pidfd: int
    """Readable when the process is gone. The session owns it."""
    tenant: str
    """Whose blocks it may use."""
    operator: bool
    """Whether it may change what concerns everybody: drain, clear, reload."""

    def __str__(self) -> str:
        return f"uid {self.uid}, pid {self.pid or 'of another pid namespace'}"


@dataclass(frozen=True, slots=True)
class PeerRules:
    """Who may connect, and as what."""

    gid: int | None = None
    """A group whose members may connect, besides this process's user and root."""
    tenants: Sequence[TenantRule] = ()
    operators: Sequence[People] = ()
    """Operators besides this process's user."""

    @property
    def only_operators(self) -> bool:
        """Whether everybody who may connect at all is an operator."""
        return self.gid is None and any(each.include(0, ()) for each in self.operators)

    def admit(self, sock: socket.socket) -> PeerProcess:
        """The process that has connected. Raises PermissionError if it may not, OSError if it is gone
        already."""
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid, uid, gid = struct.unpack("iII", raw)
        groups = groups_of(sock, gid)
        if uid not in (0, os.geteuid()) and self.gid not in groups:
            raise PermissionError(f"uid {uid} (pid {pid}) is neither this daemon's user nor in its group")
        tenant = tenant_of(self.tenants, uid, groups)
        unnamed = uid == unnamed_uid()
        if unnamed and tenant.startswith(UID_TENANT):
            raise PermissionError(
                f"uid {uid} stands for every user of other user namespaces (pid {pid}): run kvtierd in the "
                "host's user namespace, or give the engine's group a tenant (server.tenants); if it is "
                "kvtierd's own user, run kvtierd as another one"
            )
        operator = not unnamed and (
            uid == os.geteuid() or any(each.include(uid, groups) for each in self.operators)
        )
        return PeerProcess(pid, uid, gid, pidfd_of(sock, pid), tenant, operator)


def groups_of(sock: socket.socket, gid: int) -> set[int]:
    """All groups of the process that connected, or only its first one, `gid`, if it has more than 256
    others."""
    try:
        raw = sock.getsockopt(socket.SOL_SOCKET, SO_PEERGROUPS, GETSOCKOPT_BYTES_MAX)
    except OSError:
        return {gid}
    return {gid, *struct.unpack(f"{len(raw) // 4}I", raw)}


def pidfd_of(sock: socket.socket, pid: int) -> int:
    """A pidfd of the process that connected, not inheritable. Raises OSError if it is gone."""
    try:
        return sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError as error:
        if pid == 0 and error.errno != errno.ENOPROTOOPT:
            raise
        if pid == 0:
            raise PermissionError(
                "a process of another pid namespace (a container) connected, and kernels before 6.5 cannot "
                "name it: upgrade the kernel, or run kvtierd in the host's pid namespace (hostPID)"
            ) from None
        return os.pidfd_open(pid)  # kernels before 6.5; the peer is alive as long as its end is open


def unnamed_uid() -> int | None:
    """The number that stands for all users who have none in this process's user namespace; None if everybody
    has one."""
    try:
        if UID_MAP_FILE.read_text().split() == EVERY_UID:
            return None
        return int(OVERFLOW_UID_FILE.read_text())
    except (OSError, ValueError):
        return None
