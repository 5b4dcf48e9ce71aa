"""A kvtier client that is made in the background: finding out a namespace may read all of a model's
weights."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kvtier import Client, ClientOptions

POLL_S = 0.02


class Link:
    """Makes one client in a thread of its own, and owns it. No call waits for the daemon unless it says so.

    A client connects from the moment it is made, and then others may submit transfers that concern it. So it
    is made under the lock under which it is asked for: who finds none here knows that there is none, and that
    no transfer of it can have begun.
    """

    def __init__(
        self, find_options: Callable[[], ClientOptions], on_refused: Callable[[Exception], None]
    ) -> None:
        """Starts at once. `find_options` runs in the thread; what it raises, or the client's own refusal,
        goes to `on_refused`, also there."""
        self._find_options = find_options
        self._on_refused = on_refused
        self._lock = threading.Lock()
        self._client: Client | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kvtier-link", daemon=True)
        self._thread.start()

    @property
    def client(self) -> Client | None:
        """None until it is made, and if it cannot be."""
        if self._client is not None:  # as in nearly every step of an engine, several times
            return self._client
        with self._lock:
            return self._client

    def wait_ready(self, timeout_s: float) -> bool:
        """Waits until the client works, at most `timeout_s`; not at all for a daemon that is not there."""
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
        """Closes the client; one that is not made yet never will be. True if no copy touches our memory any
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
