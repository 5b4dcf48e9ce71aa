"""Tells people that a connection is lost, that it works again, or that memory cannot be registered."""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

from kvtier.connection.steps import NotRegisteredError
from kvtier.status import ClientStatus

log = logging.getLogger("kvtier")


class ConnectionReports:
    """Reports each change once. Used by the session's thread; never called with the lock held."""

    def __init__(
        self,
        socket: Path,
        on_ready: Callable[[ClientStatus], None] | None,
        hand_over: Callable[[Callable[[], None]], None],
    ) -> None:
        """`on_ready` is called instead of the log when the client becomes ready. `hand_over` makes that call
        in the thread or loop that the owner wants."""
        self._socket = socket
        self._on_ready = on_ready
        self._hand_over = hand_over
        self._not_registered = ""
        self._works = False
        """Whether the last change that was reported was `ready`, not `lost`."""
        self._warned = False

    def not_registered(self, error: NotRegisteredError) -> None:
        """Reports that memory is not registered, if the reason will not go away by itself."""
        why = str(error)
        if error.lasting and why != self._not_registered:
            self._not_registered = why
            self._warn(why)

    def lost(self, why: str, told_before: str) -> None:
        """Reports why there is no session. `told_before` is the reason that was last reported."""
        if self._works or why != told_before:
            self._works, self._warned = False, True
            self._warn(why)

    def ready(self, status: ClientStatus) -> None:
        """Reports that the client is ready."""
        warned = self._warned
        self._works, self._warned = True, False
        if self._on_ready is not None:
            self._hand_over(partial(self._tell_owner, self._on_ready, status))
        elif warned:
            log.info("kvtier %s: attached to kvtierd %s", self._socket, status.daemon_version)

    def _tell_owner(self, on_ready: Callable[[ClientStatus], None], status: ClientStatus) -> None:
        try:
            on_ready(status)
        except Exception:
            log.exception("kvtier: on_ready failed")

    def _warn(self, why: str) -> None:
        log.warning("kvtier %s: %s; without it every lookup misses", self._socket, why)
