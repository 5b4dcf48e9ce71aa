"""Who may be the daemon.

Whoever listens at the socket is told salts and block hashes, and gets the memory that a client registers, to
read and to write. So a client finds out who listens before it says anything.

Trusted are root, this process's own user, the user that KVTIER_DAEMON_USER names, and the owner of a folder
that nobody but these can have put in its place: /run/kvtier is the daemon's, because root has made it so,
while a folder in /tmp may be anybody's.
"""

import errno
import grp
import os
import pwd
import socket
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

from kvtier.connection.address import DAEMON_USER_VARIABLE, Address
from kvtier.connection.reach import explain, user_of
from kvtier.errors import ConnectionLostError

CREDENTIALS = struct.Struct("=iII")
"""What SO_PEERCRED returns: pid, uid and gid of who began to listen."""
OVERFLOW_UID_FILE = Path("/proc/sys/kernel/overflowuid")
OVERFLOW_UID = 65534
LINKS_MAX = 40
"""The kernel follows as many links on one path."""
BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def require_daemon(connected: socket.socket, path: Path, daemon_user: int | None) -> int:
    """Raises ConnectionLostError, which says what to do, unless a trusted user listens at the other end of a
    socket that is connected to `path`. Sends nothing. Returns the process that listens; 0: it is not visible
    from here."""
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    pid, uid, _ = CREDENTIALS.unpack(credentials)
    trusted = trusted_by_place(path) if daemon_user is None else {0, os.geteuid(), daemon_user}
    if uid not in trusted:
        raise _of_stranger(path, f"a process of user {user_of(uid)} listens there", uid)
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
        for place in _way_to(path):
            above, found = place.parent.lstat(), place.lstat()
            if place == place.parent:
                trusted.add(found.st_uid)  # whoever owns the root owns everything
            elif above.st_mode & BY_OTHERS == 0 or _is_own_group(above):
                trusted.add(found.st_uid)  # the owner of the folder above has put it there
            elif not above.st_mode & stat.S_ISVTX:
                folder, mode = place.parent, f"{stat.S_IMODE(above.st_mode):04o}"
                raise _refused(
                    path,
                    f"users besides its owner can exchange what is in {folder} (mode {mode}), so any of them "
                    f"may be listening; chmod go-w {folder}, name another socket, or name the user whom your "
                    f"daemon runs as: {DAEMON_USER_VARIABLE}=USER",
                )
            elif found.st_uid not in trusted - ({_overflow_uid()} - {os.geteuid()}):
                whose = f"{place} belongs to user {user_of(found.st_uid)}"
                raise _of_stranger(path, whose, found.st_uid)
    except OSError as error:
        raise ConnectionLostError(explain(path, error).text) from None
    return trusted


def _way_to(path: Path) -> Iterator[Path]:
    """Yields the root, and every folder, link and file that leads to a path. The folder above each is no link
    itself. Raises OSError."""
    place, rest, links = Path("/"), list(path.absolute().parts[1:]), 0
    yield place
    while rest:
        name = rest.pop(0)
        if name == "..":
            place = place.parent
            continue
        place /= name
        yield place
        if place.is_symlink():
            if (links := links + 1) > LINKS_MAX:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
            target = place.readlink()
            place = Path("/") if target.is_absolute() else place.parent
            rest[:0] = [part for part in target.parts if part != "/"]


def _of_stranger(path: Path, whose: str, uid: int) -> ConnectionLostError:
    user = user_of(uid)
    return _refused(
        path,
        f"{whose}, whom this process has no reason to trust; name another socket, or, if your daemon runs as "
        f"that user, set {DAEMON_USER_VARIABLE}={user.name}",
    )


def _refused(path: Path, why: str) -> ConnectionLostError:
    return ConnectionLostError(f"nothing was said to the daemon at {path}: {why}")


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
