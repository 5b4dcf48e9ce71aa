"""A kvtier client that is made in the background, because finding out a namespace may mean to read all of a
model's weights."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kvtier import Client, ClientOptions

POLL_S = 0.02


class Link:
    """Makes one client in a thread of its own, and owns it. No call waits for the daemon unless it says so.

    A client connects from the moment it is made, and then others may submit transfers that concern it. So it
    is made under the same lock as it is asked for: if `client` is None, there is no client yet, and no
    transfer of it can have begun.
    """

    def __init__(
        self, find_options: Callable[[], ClientOptions], on_refused: Callable[[Exception], None]
    ) -> None:
        """Starts the thread. `find_options` runs in it; `on_refused` is called there with what it raises, or
        with the client's own refusal."""
        self._find_options = find_options
        self._on_refused = on_refused
        self._lock = threading.Lock()
        self._client: Client | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kvtier-link", daemon=True)
        self._thread.start()

    @property
    def client(self) -> Client | None:
        """The client; None until it is made, and if it cannot be made."""
        if self._client is not None:  # the usual case, asked several times in each step
            return self._client
        with self._lock:
            return self._client

    def wait_ready(self, timeout_s: float) -> bool:
        """Waits at most `timeout_s` seconds until the client is ready, and returns whether it is. Does not
        wait for a daemon that is not there."""
        deadline_s = time.monotonic() + timeout_s
        self._thread.join(timeout_s)
        client = self.client
        while client is not None and time.monotonic() < deadline_s:
            if client.wait_ready(POLL_S):
                return True
            if client.status.last_error:
                break
        return False

    def close(self, timeout_s: float) -> bool:
        """Closes the client, or keeps it from being made. Returns True if no copy touches our memory any
        more."""
        with self._lock:
            self._closed = True
            client = self._client
        return client is None or client.close(timeout_s)

    def _run(self) -> None:
        try:
            options = self._find_options()
            with self._lock:
                if not self._closed:
                    self._client = Client(**options)
        except Exception as error:
            self._on_refused(error)
