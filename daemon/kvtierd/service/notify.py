"""Tells a service manager how the daemon is, by the notify protocol of systemd, sd_notify(3).

This is our own code, because it is a datagram with a few lines of text. `sdnotify` on PyPI (0.3.2, of 2017)
waits when the socket is full, and the event loop with it, and knows neither WATCHDOG_PID nor what systemd has
added since. `systemd-python` and `cysystemd` need libsystemd, and the former a compiler too.
"""

import os
import socket
import time
from collections.abc import MutableMapping

from kvtierd.logs import logger

log = logger(__name__)

EXTENSION_S = 60.0
"""How much longer each step of a start asks for; no step is silent for longer."""
VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")


class Notifier:
    """Tells the service manager that started this process, if there is one. It never waits and never raises.

    If the socket has no room, or nobody is at it because the manager is starting again, the message goes with
    the next one. For use in one thread.
    """

    watchdog_s: float | None
    """The daemon is killed if it was not `alive` for so long; None if nobody watches."""

    def __init__(self, environ: MutableMapping[str, str] = os.environ) -> None:
        """Takes the protocol's variables out of `environ`, so that no worker speaks for the daemon."""
        address, watchdog_us, watchdog_pid = (environ.pop(name, "") for name in VARIABLES)
        if environ.get("SYSTEMD_EXEC_PID", str(os.getpid())) != str(os.getpid()):
            address = ""  # this process was not started as a service, but by an engine
        self.watchdog_s = None
        self._socket: socket.socket | None = None
        self._unsent: dict[str, str] = {}
        self._told_broken = False
        if not address:
            return
        if address[0] not in "/@":
            log.warning("NOTIFY_SOCKET is no Unix socket: the service manager hears nothing", value=address)
            return
        self._address = f"\0{address[1:]}" if address[0] == "@" else address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        if watchdog_us.isdigit() and int(watchdog_us) and watchdog_pid in ("", str(os.getpid())):
            self.watchdog_s = int(watchdog_us) / 1e6

    @property
    def is_heard(self) -> bool:
        """Whether there is a service manager."""
        return self._socket is not None

    def ready(self, status: str) -> None:
        """Says that the daemon can be used; also after `reloading`."""
        self._tell(READY="1", STATUS=status)

    def status(self, status: str) -> None:
        """Says in one line what the daemon is doing."""
        self._tell(STATUS=status)

    def starting(self, status: str, longer_s: float) -> None:
        """Says that the start goes on, and asks for `longer_s` seconds more than the unit allows."""
        self._tell(STATUS=status, EXTEND_TIMEOUT_USEC=str(round(longer_s * 1e6)))

    def reloading(self) -> None:
        """Says that the configuration is being read again; `ready` follows."""
        self._tell(RELOADING="1", MONOTONIC_USEC=str(time.monotonic_ns() // 1000))

    def stopping(self, status: str, longer_s: float) -> None:
        """Says that the daemon is stopping, and asks for `longer_s` seconds to do so."""
        self._tell(STOPPING="1", STATUS=status, EXTEND_TIMEOUT_USEC=str(round(longer_s * 1e6)))

    def alive(self) -> None:
        """Keeps the watchdog quiet for another `watchdog_s` seconds."""
        self._tell(WATCHDOG="1")

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _tell(self, **assignments: str) -> None:
        if self._socket is None:
            return
        self._unsent |= {name: " ".join(value.split()) for name, value in assignments.items()}
        message = "\n".join(f"{name}={value}" for name, value in self._unsent.items())
        try:
            self._socket.sendto(message.encode(errors="replace"), self._address)
        except OSError as error:
            self._unsent.pop("WATCHDOG", None)  # sent later, it would not be true
            if not self._told_broken:
                self._told_broken = True
                log.warning("the service manager cannot be told anything just now", error=str(error))
        else:
            self._unsent.clear()
            self._told_broken = False
