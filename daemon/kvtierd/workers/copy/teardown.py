"""Lets go of what released sessions had mapped, in a thread of its own: the driver may take long over it, and
neither the lanes nor the main thread wait."""

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
    """Takes fenced sessions, one after another. It is never ended: what it has not reached when the process
    ends, the end of the process lets go of.

    No session comes twice, so what waits here is bounded by the sessions there are.
    """

    def __init__(self, device: Device, unmapped: Callable[[MappedSession], None]) -> None:
        """`unmapped(session)` is called from the thread when nothing of a session is mapped any more."""
        self._device = device
        self._unmapped = unmapped
        self._sessions: queue.SimpleQueue[MappedSession] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="teardown", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def add(self, session: MappedSession) -> None:
        """A session of which nothing can run any more. From any thread."""
        self._sessions.put(session)

    def _serve(self) -> None:
        try:
            self._device.enter_thread()
            while True:
                session = self._sessions.get()
                session.unmap()
                self._unmapped(session)
        except BaseException:
            # A dead engine's memory would be held for as long as we live.
            _log.critical("a session's memory cannot be let go of: the worker ends", exc_info=True)
            logging.shutdown()
            os._exit(TEARDOWN_DIED_STATUS)
