"""Finds out why a socket cannot be used. gRPC reports all of these reasons as UNAVAILABLE.

A connection is made and closed; no message is sent to whoever listens.
"""

import errno
import grp
import os
import pwd
import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from kvtier.connection.address import SOCKET_NAME

SET_GROUP = (
    "have kvtierd started with server.group (--server-group, KVTIER_SERVER_GROUP) set to a group that you "
    "are in"
)


class Reach(Enum):
    """What a socket's path leads to."""

    LISTENS = "listens"
    """A process accepts connections there."""
    MISSING = "missing"
    """There is no such file."""
    NOBODY = "nobody"
    """There is a socket, but the process that made it has ended."""
    NOT_PERMITTED = "not permitted"
    """This process may not use the socket, or may not pass a folder on the way to it."""
    NOT_A_SOCKET = "not a socket"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Found:
    """What was found at a path."""

    path: Path
    reach: Reach
    detail: str = ""
    """Of MISSING and NOBODY, what is wrong with the path, as a clause that follows the path. Of the others a
    sentence without a full stop, or nothing if somebody listens."""

    @property
    def text(self) -> str:
        """One sentence without a full stop that says what was found and what to do. It does not say how to
        start a daemon, because not everybody who asks can."""
        if self.reach in (Reach.MISSING, Reach.NOBODY):
            other = "; KVTIER_SOCKET or the setting `socket` names another one"
            hint = other if self.reach is Reach.MISSING else ""
            return f"no daemon listens at {self.path}, which {self.detail}{hint}"
        return self.detail


def look(path: Path, kind: socket.SocketKind = socket.SOCK_STREAM) -> Found:
    """Tries to connect to a socket of the daemon. Never waits. `kind` is SOCK_STREAM for gRPC's socket and
    SOCK_SEQPACKET for the side socket."""
    with socket.socket(socket.AF_UNIX, kind | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(os.fspath(path))
        except BlockingIOError:
            pass  # the queue of connections to be accepted is full
        except OSError as error:
            return explain(path, error)
    return Found(path, Reach.LISTENS)


def explain(path: Path, error: OSError) -> Found:
    """Returns what an error on connecting to a path means."""
    try:
        if not stat.S_ISSOCK(mode := path.stat().st_mode):
            return _not_a_socket(path, mode)
        match error.errno:
            case errno.ECONNREFUSED:
                return Found(path, Reach.NOBODY, "was left behind by a daemon that has ended")
            case errno.EPROTOTYPE:
                return Found(path, Reach.NOT_A_SOCKET, f"{path} is a socket of another kind, not kvtierd's")
    except OSError as of_path:
        error = of_path
    try:
        match error.errno:
            case errno.ENOENT | errno.ENOTDIR:
                return Found(path, Reach.MISSING, _missing(path))
            case errno.EACCES | errno.EPERM:
                return Found(path, Reach.NOT_PERMITTED, _not_permitted(path))
    except OSError:
        pass  # the path has changed meanwhile
    return Found(path, Reach.OTHER, f"{path} cannot be used: {error.strerror or error}")


def _not_a_socket(path: Path, mode: int) -> Found:
    kind = "a folder" if stat.S_ISDIR(mode) else "a file" if stat.S_ISREG(mode) else "something else"
    name = "socket that kvtierd tells"
    if stat.S_ISDIR(mode):
        name = f"socket in it, {_socket_in(path) or path / SOCKET_NAME}"
    return Found(path, Reach.NOT_A_SOCKET, f"{path} is {kind}, not a socket: name the {name}")


def _missing(path: Path) -> str:
    if path.is_symlink():
        return f"is a link to {os.readlink(path)}, which does not exist"
    folder = next((each for each in reversed(path.parents) if not each.exists()), None)
    if folder is None and (other := _socket_in(path.parent)) is not None:
        return f"does not exist, while {other} does"
    return "does not exist" + (f", nor does the folder {folder}" if folder else "")


def _socket_in(folder: Path) -> Path | None:
    sockets = (each for each in sorted(folder.glob("*.sock")) if not each.name.endswith(".side.sock"))
    return next(sockets, None)


def _not_permitted(path: Path) -> str:
    """Says which folder or socket it is, whose that is, who we are, and what to change."""
    beginning = f"you may not use the socket {path}"
    for folder in _folders(path):
        if not os.access(folder, os.X_OK, effective_ids=True):
            if folder == path.absolute().parent:
                remedy = f"{SET_GROUP}, and open the folder to it (chgrp GROUP {folder}; chmod g+x {folder})"
            else:
                remedy = f"have kvtierd put its socket elsewhere (--socket), or chmod +x {folder}"
            told = _told(folder, stat.S_IXGRP, remedy)
            return f"{beginning}: the folder {folder} on the way to it {told}"
    if not os.access(path, os.W_OK, effective_ids=True):
        return f"{beginning}: it {_told(path, stat.S_IWGRP, SET_GROUP)}"
    return (
        f"{beginning}, although its mode allows it: a security module, such as SELinux or AppArmor, forbids "
        "it (see the kernel's log)"
    )


def _folders(path: Path) -> Iterator[Path]:
    """Yields the folders on the way to a path, from the root: as it is written, then where links lead."""
    plain = path.absolute()
    real = Path(os.path.realpath(plain))
    return iter(dict.fromkeys((*reversed(plain.parents), *reversed(real.parents))))


def _told(what: Path, group_bit: int, remedy: str) -> str:
    """Says whose a file is, who we are, and what to change. `group_bit` is the permission that its group
    needs, `remedy` what to do if the group does not have it."""
    found = what.stat()
    owner, group, us = user_of(found.st_uid), _group(found.st_gid), user_of(os.geteuid())
    mode = stat.S_IMODE(found.st_mode)
    ours = dict.fromkeys((os.getegid(), *os.getgroups()))
    advice = _how_to_join(us, group) if mode & group_bit and found.st_gid not in ours else remedy
    groups = f"{'group' if len(ours) == 1 else 'groups'} {', '.join(str(_group(gid)) for gid in ours)}"
    return (
        f"belongs to user {owner} and group {group}, with mode {mode:04o}, and you are user {us} in "
        f"{groups}; {advice}, or run this as user {owner.name}"
    )


def _how_to_join(user: "_Account", group: "_Account") -> str:
    if not (user.named and group.named):
        return f"give this process the group {group.number} (in a container: --group-add, supplementalGroups)"
    if _is_member(user.name, group.number):
        return "you have joined that group since this process began: log in again, or start it anew"
    return f"join that group (as root: usermod -aG {group.name} {user.name}; then log in again)"


@dataclass(frozen=True, slots=True)
class _Account:
    """A user or a group. It may have no name here, as one of a container does."""

    number: int
    name: str
    named: bool = True

    def __str__(self) -> str:
        return f"{self.name} ({self.number})" if self.named else self.name


def user_of(uid: int) -> _Account:
    try:
        return _Account(uid, pwd.getpwuid(uid).pw_name)
    except KeyError:
        return _Account(uid, str(uid), named=False)


def _group(gid: int) -> _Account:
    try:
        return _Account(gid, grp.getgrgid(gid).gr_name)
    except KeyError:
        return _Account(gid, str(gid), named=False)


def _is_member(user: str, gid: int) -> bool:
    """Whether the user is in the group, according to the lists of users and groups."""
    try:
        return user in grp.getgrgid(gid).gr_mem or pwd.getpwnam(user).pw_gid == gid
    except KeyError:
        return False
