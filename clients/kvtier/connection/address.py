"""Where the daemon is: its gRPC socket, and the side socket beside it."""

import os
import pwd
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvtier.errors import KvtierError, Reason

SOCKET_VARIABLES = ("KVTIER_SOCKET", "KVTIER_SERVER_SOCKET")
"""Variables that name the socket. The daemon reads them too; the second is its longer name."""
DAEMON_USER_VARIABLE = "KVTIER_DAEMON_USER"
"""The variable that names the user whom the daemon runs as, where the socket's place does not show it."""
SOCKET_NAME = "kvtierd.sock"
SOCKET_PATH_BYTES_MAX = 107
"""The longest path of a Unix socket: `sun_path` without its final zero."""


@dataclass(frozen=True, slots=True)
class Address:
    """One daemon on this host."""

    socket: Path
    """The gRPC socket."""
    daemon_user: int | None = None
    """The uid that the daemon must have, besides root's and our own; None: see `kvtier.connection.trust`."""

    @property
    def side_socket(self) -> Path:
        """The side socket beside it: that of kvtierd.sock is kvtierd.side.sock."""
        return self.socket.with_name(f"{self.socket.name.removesuffix('.sock')}.side.sock")

    @property
    def target(self) -> str:
        """The target for a gRPC channel."""
        return f"unix:{self.socket}"


def default_socket(environ: Mapping[str, str] = os.environ, uid: int | None = None) -> Path:
    """Returns the path that KVTIER_SOCKET names; else kvtier/kvtierd.sock in XDG_RUNTIME_DIR; else
    /tmp/kvtier-UID/kvtierd.sock.

    KVTIER_SERVER_SOCKET, the daemon's longer name for the variable, counts as well. Raises KvtierError if
    both are set to different sockets.
    """
    named = {name: environ[name] for name in SOCKET_VARIABLES if environ.get(name)}
    paths = {path_of(text) for text in named.values()}
    if len(paths) > 1:
        told = " and ".join(f"{name} says {text!r}" for name, text in named.items())
        message = f"{told}, and both mean the daemon's socket: unset one of them"
        raise KvtierError(Reason.MALFORMED, message, field="socket")
    if paths:
        return paths.pop()
    base = environ.get("XDG_RUNTIME_DIR", "")
    if base and Path(base).is_absolute():
        return Path(base) / "kvtier" / SOCKET_NAME
    return Path(f"/tmp/kvtier-{os.getuid() if uid is None else uid}") / SOCKET_NAME


def path_of(text: str) -> Path:
    """Returns the absolute path of what a user wrote, which may be relative, or begin with `~` or `unix:`."""
    return Path(os.path.abspath(os.path.expanduser(text.removeprefix("unix://").removeprefix("unix:"))))


def resolve(socket: str | os.PathLike[str] | None) -> Address:
    """Returns the address that the caller named, or the default one (see `default_socket`), with the user
    that KVTIER_DAEMON_USER names. Raises KvtierError for a path that is too long for a socket, and for a user
    who does not exist."""
    path = default_socket() if socket is None else path_of(os.fspath(socket))
    address = Address(path, _uid_of(os.environ.get(DAEMON_USER_VARIABLE, "")))
    side = address.side_socket
    if (length := len(os.fsencode(side))) > SOCKET_PATH_BYTES_MAX:
        raise KvtierError(
            Reason.MALFORMED,
            f"the side socket beside it, {side}, would have a path of {length} bytes, and that of a Unix "
            f"socket has at most {SOCKET_PATH_BYTES_MAX}: use a shorter path",
            field="socket",
            value=address.socket,
        )
    return address


def _uid_of(user: str) -> int | None:
    if not user:
        return None
    if user.isascii() and user.isdigit():
        return int(user)
    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        message = "there is no such user here: name the user whom kvtierd runs as, or that user's number"
        raise KvtierError(Reason.MALFORMED, message, field=DAEMON_USER_VARIABLE, value=user) from None
