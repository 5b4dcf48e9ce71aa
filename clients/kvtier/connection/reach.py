"""Why a socket cannot be used: gRPC tells all of these reasons as one, UNAVAILABLE.

Nothing is said to who listens there; a connection is made and closed.
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

SET_GROUP = (
    "have kvtierd started with server.group (--server-group, KVTIER_SERVER_GROUP) set to a group that you "
    "are in"
)


class Reach(Enum):
    """What a socket's path leads to."""

    LISTENS = "listens"
    """Somebody accepts connections there."""
    MISSING = "missing"
    """There is no such file."""
    NOBODY = "nobody"
    """A socket that nobody listens at: whoever made it has ended."""
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
    """Of MISSING and NOBODY: what is the matter with the path, to be read behind it. Of the others a sentence
    without a full stop; empty if somebody listens."""

    @property
    def text(self) -> str:
        """One sentence without a full stop, and what to do about it, but not how to start a daemon: not
        everybody who asks can."""
        if self.reach in (Reach.MISSING, Reach.NOBODY):
            return f"no daemon listens at {self.path}, which {self.detail}"
        return self.detail


def look(path: Path, kind: socket.SocketKind = socket.SOCK_STREAM) -> Found:
    """Looks at a socket of the daemon, and never waits. `kind`: SOCK_STREAM for gRPC's, SOCK_SEQPACKET for
    the side socket."""
    with socket.socket(socket.AF_UNIX, kind | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(os.fspath(path))
        except BlockingIOError:
            pass  # more are waiting to be accepted than there is room for
        except OSError as error:
            return explain(path, error)
    return Found(path, Reach.LISTENS)


def explain(path: Path, error: OSError) -> Found:
    """What an error of connecting to a path means."""
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
        pass  # it has changed meanwhile
    return Found(path, Reach.OTHER, f"{path} cannot be used: {error.strerror or error}")


def _not_a_socket(path: Path, mode: int) -> Found:
    kind = "a folder" if stat.S_ISDIR(mode) else "a file" if stat.S_ISREG(mode) else "something else"
    return Found(
        path, Reach.NOT_A_SOCKET, f"{path} is {kind}, not a socket: name the socket that kvtierd tells"
    )


def _missing(path: Path) -> str:
    if path.is_symlink():
        return f"is a link to {os.readlink(path)}, which does not exist"
    folder = next((each for each in reversed(path.parents) if not each.exists()), None)
    return "does not exist" + (f", nor does the folder {folder}" if folder else "")


def _not_permitted(path: Path) -> str:
    """Which of folders and socket it is, whose that is, who we are, and what to change."""
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
    """Those on the way to a path, from the root: as it is written, and where links lead."""
    plain = path.absolute()
    real = Path(os.path.realpath(plain))
    return iter(dict.fromkeys((*reversed(plain.parents), *reversed(real.parents))))


def _told(what: Path, group_bit: int, remedy: str) -> str:
    """Whose it is, who we are, and what to change. `group_bit`: what its group needs of its mode; `remedy`:
    what to do where it has not got that."""
    found = what.stat()
    owner, group, us = _user(found.st_uid), _group(found.st_gid), _user(os.geteuid())
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
    """A user or a group, which may have no name here: of a container, for one."""

    number: int
    name: str
    named: bool = True

    def __str__(self) -> str:
        return f"{self.name} ({self.number})" if self.named else self.name


def _user(uid: int) -> _Account:
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
    """Whether the lists of users and groups say so."""
    try:
        return user in grp.getgrgid(gid).gr_mem or pwd.getpwnam(user).pw_gid == gid
    except KeyError:
        return False
