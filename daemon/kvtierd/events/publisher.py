"""The event loop's side of publishing: it hands news to the thread, and never waits for it."""

import asyncio
from collections.abc import Callable, Sequence

from kvtierd.cache import EventsSnapshot
from kvtierd.core.actions import BlockNews
from kvtierd.core.ids import NamespaceDigest
from kvtierd.core.stimuli import ShowBlocks, Stimulus, TellAgain
from kvtierd.events.options import EventOptions
from kvtierd.events.serving import Behind, EventServer
from kvtierd.logs import logger

QUEUED_HASHES_MAX = 1 << 22
"""Hashes that may wait for the thread, 128 MiB of them. If it is that far behind, everything is told anew."""

log = logger(__name__)


class EventPublisher:
    """Publishes news of blocks. For use on the event loop."""

    def __init__(
        self,
        options: EventOptions,
        post: Callable[[Stimulus], object],
        loop: asyncio.AbstractEventLoop,
        *,
        queued_max: int = QUEUED_HASHES_MAX,
    ) -> None:
        """Binds the sockets, and starts the thread. `post` gives a stimulus to the core. Raises zmq.ZMQError
        if a socket cannot be bound."""
        self._options = options
        self._post = post
        self._loop = loop
        self._queued_max = queued_max
        self._put = 0
        self._behind = False
        self._resets = 0
        self._server = EventServer(options, self._ask, self._caught_up)

    def tell(self, news: Sequence[BlockNews]) -> None:
        """Publishes all of this, in this order. If the thread is too far behind, drops it, and has everything
        told anew as soon as the thread has caught up."""
        if self._behind:
            return
        count = sum(len(each.hashes) for each in news)
        # A single tick may bring more than that, for example when a disk has been recovered.
        if self._put > self._server.taken and self._put + count - self._server.taken > self._queued_max:
            self._behind = True
            self._resets += 1
            log.warning("KV events could not be published fast enough: all blocks are told of anew")
            self._server.put(Behind())
            return
        self._put += count
        self._server.put(news)

    def status(self) -> EventsSnapshot:
        server = self._server
        return EventsSnapshot(
            endpoint=self._options.endpoint,
            replay_endpoint=self._options.replay_endpoint,
            alive=server.alive,
            streams=server.streams,
            batches=server.counts["batches"],
            stored_blocks=server.counts["stored"],
            removed_blocks=server.counts["removed"],
            resets=self._resets,
            replays=server.counts["replays"],
            replays_refused=server.counts["refused"],
            replays_forgotten=server.forgotten,
            shown=server.counts["shown"],
            kept_batches=server.kept_batches,
            kept_bytes=server.kept_bytes,
        )

    def close(self) -> None:
        """Publishes what was told, and closes the sockets. Takes seconds at most."""
        self._server.close()

    # --- called on the thread ---

    def _ask(self, namespace: NamespaceDigest) -> None:
        self._on_loop(lambda: self._post(ShowBlocks(namespace)))

    def _caught_up(self) -> None:
        self._on_loop(self._tell_again)

    def _on_loop(self, do: Callable[[], object]) -> None:
        try:
            self._loop.call_soon_threadsafe(do)
        except RuntimeError:  # the loop has been closed, so the daemon is ending
            pass

    def _tell_again(self) -> None:
        self._behind = False
        self._post(TellAgain())
