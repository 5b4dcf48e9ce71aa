"""Where the daemon is: its gRPC socket, and the side socket beside it."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SOCKET_VARIABLE = "KVTIER_SOCKET"
SOCKET_NAME = "kvtierd.sock"


@dataclass(frozen=True, slots=True)
class Address:
    """One daemon on this host."""

    socket: Path
    """The gRPC socket."""

    @property
    def side_socket(self) -> Path:
        """kvtierd.sock has kvtierd.side.sock beside it."""
        return self.socket.with_name(f"{self.socket.name.removesuffix('.sock')}.side.sock")

    @property
    def target(self) -> str:
        """What a gRPC channel is given."""
        return f"unix:{self.socket}"


def default_socket(environ: Mapping[str, str] = os.environ, uid: int | None = None) -> Path:
    """KVTIER_SOCKET; else kvtier/kvtierd.sock in XDG_RUNTIME_DIR; else /tmp/kvtier-UID/kvtierd.sock."""
    if given := environ.get(SOCKET_VARIABLE):
        return Path(given)
    base = environ.get("XDG_RUNTIME_DIR", "")
    if base and Path(base).is_absolute():
        return Path(base) / "kvtier" / SOCKET_NAME
    return Path(f"/tmp/kvtier-{os.getuid() if uid is None else uid}") / SOCKET_NAME


def resolve(socket: str | os.PathLike[str] | None) -> Address:
    """The address a caller named, or the default one. A path in gRPC's form `unix:PATH` is understood."""
    if socket is None:
        return Address(default_socket())
    return Address(Path(os.fspath(socket).removeprefix("unix://").removeprefix("unix:")).absolute())
