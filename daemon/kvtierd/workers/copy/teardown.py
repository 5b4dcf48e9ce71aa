"""Unmaps what released sessions had mapped, in a thread of its own: the driver may take long, and neither the
lanes nor the main thread should wait."""

import logging
import os
import queue
import threading
from collections.abc import Callable

from kvtierd.workers.copy.device import Device
from kvtierd.workers.copy.sessions import MappedSession
from kvtierd.workers.log import logger

_log = logger(__name__)

TEARDOWN_DIED_STATUS = 71


class Teardown:
    """Takes fenced sessions, one after another. It is never stopped: what it has not reached when the process
    ends is unmapped by that end.

    No session comes twice, so no more sessions wait here than there are.
    """

    def __init__(self, device: Device, unmapped: Callable[[MappedSession], None]) -> None:
        """`unmapped(session)` is called from the thread when nothing of the session is mapped any more."""
        self._device = device
        self._unmapped = unmapped
        self._sessions: queue.SimpleQueue[MappedSession] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="teardown", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def add(self, session: MappedSession) -> None:
        """Takes a session of which nothing can run any more. From any thread."""
        self._sessions.put(session)

    def _serve(self) -> None:
        try:
            self._device.enter_thread()
            while True:
                session = self._sessions.get()
                session.unmap()
                self._unmapped(session)
        except BaseException:
            # Otherwise a dead engine's memory would be held as long as this process lives.
            _log.critical("a session's memory cannot be let go of: the worker ends", exc_info=True)
            logging.shutdown()
            os._exit(TEARDOWN_DIED_STATUS)
