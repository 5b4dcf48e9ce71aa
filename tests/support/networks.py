"""Network namespaces that reach one address of this machine and nothing else, as hosts reach a server."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Self

SERVER = "10.213.{}.1"
"""What the server may listen on; the third number tells tests apart that run at the same time."""


class NoNetworksError(Exception):
    """This machine does not let us make namespaces. The text says why."""


@dataclass(frozen=True)
class HostNetwork:
    """The network of one host."""

    name: str
    link: str
    """The end of its cable, in our namespace."""

    @property
    def wrap(self) -> list[str]:
        """What is put before a command, so that it runs there."""
        return ["ip", "netns", "exec", self.name]

    def cut(self) -> None:
        """Nothing comes through any more, and nobody is told."""
        _ip("link", "set", self.link, "down")

    def mend(self) -> None:
        _ip("link", "set", self.link, "up")


class Networks:
    """A bridge with a server's address, and hosts that are connected to it."""

    def __init__(self, stack: ExitStack, number: int) -> None:
        self._stack = stack
        self._number = number
        self._hosts = 0
        self.address = SERVER.format(number)
        self._bridge = f"kvt{number}br"
        _ip("link", "add", self._bridge, "type", "bridge")
        stack.callback(_ip, "link", "del", self._bridge)
        _ip("addr", "add", f"{self.address}/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")

    @classmethod
    @contextmanager
    def made(cls) -> Iterator[Self]:
        """Networks that are gone afterwards. Raises NoNetworksError."""
        with ExitStack() as stack:
            yield cls(stack, os.getpid() % 250 + 1)

    def host(self) -> HostNetwork:
        """One more host."""
        self._hosts += 1
        name, link, inside = (f"kvt{self._number}{kind}{self._hosts}" for kind in "hlu")
        _ip("netns", "add", name)
        self._stack.callback(_ip, "netns", "del", name)
        _ip("link", "add", link, "type", "veth", "peer", "name", inside)
        _ip("link", "set", inside, "netns", name)
        _ip("link", "set", link, "master", self._bridge, "up")
        within = ["-n", name]
        _ip(*within, "addr", "add", f"{SERVER.format(self._number)[:-1]}{self._hosts + 1}/24", "dev", inside)
        for device in (inside, "lo"):
            _ip(*within, "link", "set", device, "up")
        return HostNetwork(name, link)


def _ip(*arguments: str) -> None:
    try:
        ended = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=30, check=False)
    except FileNotFoundError:
        raise NoNetworksError("there is no program `ip` (Debian: iproute2)") from None
    if ended.returncode:
        raise NoNetworksError(f"ip {' '.join(arguments)}: {ended.stderr.strip()}")
