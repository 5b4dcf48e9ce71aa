"""Who may be the daemon.

Whoever listens at the socket is told salts and block hashes, and gets the memory that a client registers, to
read and to write. So a client finds out who listens before it says anything.

Trusted are root, this process's own user, the user that KVTIER_DAEMON_USER names, and the owner of a folder
that nobody but these can have put in its place: /run/kvtier is the daemon's, because root has made it so,
while a folder in /tmp may be anybody's.
"""

import grp
import os
import pwd
import socket
import stat
import struct
from pathlib import Path

from kvtier.connection.address import DAEMON_USER_VARIABLE, Address
from kvtier.connection.reach import explain, folders_to, user_of
from kvtier.errors import ConnectionLostError

CREDENTIALS = struct.Struct("=iII")
"""What SO_PEERCRED returns: pid, uid and gid of who began to listen."""
OVERFLOW_UID_FILE = Path("/proc/sys/kernel/overflowuid")
OVERFLOW_UID = 65534
BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def require_daemon(connected: socket.socket, path: Path, daemon_user: int | None) -> int:
    """Raises ConnectionLostError, which says what to do, unless a trusted user listens at the other end of a
    socket that is connected to `path`. Sends nothing. Returns the process that listens; 0: it is not visible
    from here."""
    pid, uid, _ = CREDENTIALS.unpack(
        connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    )
    trusted = trusted_by_place(path) if daemon_user is None else {0, os.geteuid(), daemon_user}
    if uid not in trusted:
        raise _untrusted(path, f"a process of user {user_of(uid)} listens there", str(user_of(uid)))
    return int(pid)


def require_listener(address: Address) -> None:
    """Connects to gRPC's socket, which gRPC itself does out of sight, and raises ConnectionLostError unless a
    trusted user listens there. Never waits, and sends nothing.

    It holds for the connection that gRPC makes next, too: only trusted users can exchange the socket. If the
    daemon's user was named, whoever may write to the folders on the way could as well.
    """
    with socket.socket(
        socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
    ) as probe:
        try:
            probe.connect(os.fspath(address.socket))
        except BlockingIOError:
            raise ConnectionLostError(f"the daemon at {address.socket} is too busy to accept us") from None
        except OSError as error:
            raise ConnectionLostError(explain(address.socket, error).text) from None
        require_daemon(probe, address.socket, address.daemon_user)


def trusted_by_place(path: Path) -> set[int]:
    """Returns the users who may listen at a socket, because nobody else could have made it there. Raises
    ConnectionLostError if somebody else could."""
    trusted = {0, os.geteuid()}
    try:
        for place in (*folders_to(path), path):
            above, found = place.parent.lstat(), place.lstat()
            if stat.S_ISLNK(above.st_mode):
                above = place.parent.stat()
            if place == place.parent:
                trusted.add(found.st_uid)  # whoever owns the root owns everything
            elif above.st_mode & BY_OTHERS == 0 or _is_own_group(above):
                trusted.add(found.st_uid)  # the owner of the folder above has put it there
            elif not above.st_mode & stat.S_ISVTX:
                mode = f"{stat.S_IMODE(above.st_mode):04o}"
                told = (
                    f"others can exchange what is in {place.parent} (mode {mode}; chmod go-w {place.parent})"
                )
                raise _untrusted(path, told)
            elif found.st_uid not in trusted - ({_overflow_uid()} - {os.geteuid()}):
                owner = user_of(found.st_uid)
                raise _untrusted(path, f"{place} belongs to user {owner}", str(owner))
    except OSError as error:
        raise ConnectionLostError(explain(path, error).text) from None
    return trusted


def _untrusted(path: Path, why: str, user: str = "USER") -> ConnectionLostError:
    whose = "and that is neither root nor you" if user != "USER" else "so anybody may be listening"
    return ConnectionLostError(
        f"nothing was said to the daemon at {path}: {why}, {whose}; name another socket, or, if your daemon "
        f"runs as such a user, name that user: {DAEMON_USER_VARIABLE}={user.split(' ')[0]}"
    )


def _is_own_group(folder: os.stat_result) -> bool:
    """Whether nobody but the folder's owner can write to it, although its group can: many systems give each
    user a group of the same name."""
    if folder.st_mode & stat.S_IWOTH:
        return False
    try:
        owner, group = pwd.getpwuid(folder.st_uid), grp.getgrgid(folder.st_gid)
    except KeyError:
        return False
    return (owner.pw_name, owner.pw_gid) == (group.gr_name, group.gr_gid) and not (
        set(group.gr_mem) - {owner.pw_name}
    )


def _overflow_uid() -> int:
    """The user that stands for all users whom a user namespace does not know: never one in particular."""
    try:
        return int(OVERFLOW_UID_FILE.read_text())
    except (OSError, ValueError):
        return OVERFLOW_UID
