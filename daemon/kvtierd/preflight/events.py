"""Whether KV events can be published: the libraries for that, the folders of their sockets, their ports."""

import errno
import socket
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from kvtierd.config.events import UNIX, stays_on_host
from kvtierd.preflight.findings import Finding, Situation, Verdict, in_use_by
from kvtierd.preflight.processes import described, port_owners

LIBRARIES = {"zmq": "pyzmq>=26,<28", "msgspec": "msgspec>=0.19,<1"}
NAME = "events"


def check_events(situation: Situation) -> Iterator[Finding]:
    """Checks that what is configured for KV events has its libraries, and can be bound."""
    events = situation.config.events
    if not events.on:
        return
    missing = [package for module, package in LIBRARIES.items() if find_spec(module) is None]
    if missing:
        names = " and ".join(package.partition(">")[0] for package in missing)
        found = f"KV events cannot be published without {names}"
        wanted = " ".join(f"'{package}'" for package in missing)
        remedy = f"install it where the daemon is (pip install {wanted}), or leave the setting empty"
        yield Finding(NAME, Verdict.FAILURE, found, remedy, "events.endpoint", events.endpoint)
        return
    for field in ("endpoint", "replay_endpoint"):
        value = getattr(events, field)
        if value:
            yield _check(situation, f"events.{field}", value)


def _check(situation: Situation, field: str, value: str) -> Finding:
    def failure(found: str, remedy: str, *, holder: bool = False) -> Finding:
        return Finding(NAME, Verdict.FAILURE, found, remedy, field, value, passing=holder, holder=holder)

    if value.startswith(UNIX):
        folder = Path(value.removeprefix(UNIX)).parent
        if not folder.is_dir():
            return failure(
                f"there is no folder {folder}", "make it, for the daemon's user, or name another one"
            )
    elif (taken := _taken(value)) is not None:
        pids = port_owners(int(value.rpartition(":")[2]))
        if not situation.is_of_daemon(pids):
            who = in_use_by(pids, described(pids)) if taken == errno.EADDRINUSE else f"refused ({taken})"
            remedy = "end that process, or choose another address or port"
            return failure(f"it cannot be bound: {who}", remedy, holder=taken == errno.EADDRINUSE)
    if stays_on_host(value):
        return Finding(NAME, Verdict.OK, value)
    return Finding(
        NAME,
        Verdict.WARNING,
        f"whoever reaches {value} learns which blocks are there, and anybody on the way reads along",
        "let only routers in, by a private network or a firewall",
        "events.insecure",
        "true",
    )


def _taken(value: str) -> int | None:
    """Why a TCP address cannot be bound, as an error number; None if it can be."""
    host, _, port = value.removeprefix("tcp://").rpartition(":")
    host = "::" if host == "*" else host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, int(port)))
    except OSError as error:
        return error.errno
    return None
