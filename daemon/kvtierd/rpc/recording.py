"""What one recording keeps of lookups and stores until it is sent. Engines never wait for it: what finds no
room is dropped and counted."""

import secrets
import time
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np
import numpy.typing as npt
from kvtier.v1 import admin_pb2

from kvtierd.core.actions import LookupReply
from kvtierd.core.errors import Refusal
from kvtierd.core.ids import HASH_BYTES_MAX, Hashes, SessionId, SpaceId
from kvtierd.core.state.entities import GroupPlan
from kvtierd.core.stimuli import LookupBlocks, PrefetchBlocks, SubmitStore

KEPT_BYTES_MAX = 8 << 20
"""What may wait to be sent."""
EVENT_BYTES = 256
"""About what an event takes besides its hashes."""
BATCH_BYTES_MAX = 256 << 10
"""An event that alone has more is sent by itself. While a message is made, nobody else is served."""
SESSIONS_MAX = 4_096
"""Groups of sessions whose places are known without asking the core."""
LOOKUP, STORE = admin_pb2.RECORDED_KIND_LOOKUP, admin_pb2.RECORDED_KIND_STORE
STORE_BEHIND, STORE_LOOSE = admin_pb2.RECORDED_KIND_STORE_BEHIND, admin_pb2.RECORDED_KIND_STORE_LOOSE


_Event = tuple[int, float, int, int, int, int]
"""Kind, when, place, number of hashes, hits, part: what RecordBatch has columns of."""
COLUMNS = 6
HALF_WORD = np.uint64(32)
MIXED_ROWS = 512
COUNT: Final = 3
"""Where the number of hashes is in an event."""


class Recording:
    """Events from when it is made."""

    def __init__(
        self,
        plan_of: Callable[[SessionId, int], GroupPlan],
        clock: Callable[[], float] = time.monotonic,
        kept_bytes_max: int = KEPT_BYTES_MAX,
    ) -> None:
        """`plan_of` gives one group of a session, or raises Refusal."""
        self._plan_of = plan_of
        self._clock = clock
        self._began_s = clock()
        self._kept_bytes_max = kept_bytes_max
        self._kept_bytes = 0
        self._events: list[_Event] = []
        self._rows = np.empty((kept_bytes_max // HASH_BYTES_MAX, HASH_BYTES_MAX), np.uint8)
        """Hashes of the events. They are copied, because otherwise the messages that they came with would
        stay in memory as long, which costs more."""
        self._rows_kept = 0
        self._dropped_events = self._dropped_blocks = 0
        self._factors = np.frombuffer(secrets.token_bytes(HASH_BYTES_MAX), np.uint64) | np.uint64(1)
        """Of the words of a hash."""
        self._place_of: dict[tuple[SessionId, int], int] = {}
        self._places: dict[SpaceId, int] = {}
        self._tenants: dict[int, int] = {}
        self._new_places: list[admin_pb2.RecordedPlace] = []

    def lookup(self, stimulus: LookupBlocks | PrefetchBlocks, reply: LookupReply) -> None:
        """A lookup or prefetch was answered. It counts unless it asks again, or for blocks by themselves."""
        if reply.again:
            return
        queries = stimulus.queries
        for query, found in zip(queries, reply.groups, strict=True):
            hashes = query.hashes
            if not (query.exact or query.window_blocks) and (count := len(hashes)):
                self._add(LOOKUP, stimulus.session, query.group, count, found.hits, len(queries), hashes)

    def store(self, stimulus: SubmitStore) -> None:
        """A store was accepted, perhaps not of all its blocks."""
        session, group, hashes = stimulus.session, stimulus.group, stimulus.hashes
        if not stimulus.chains and len(hashes):
            self._add(STORE_LOOSE, session, group, len(hashes), 0, 0, hashes)
        first = 0
        for part, chain in enumerate(stimulus.chains):
            blocks = hashes[first : first + chain.blocks]
            first += chain.blocks
            if chain.previous is None:
                self._add(STORE, session, group, len(blocks), 0, part, blocks)
            else:
                blocks = np.concatenate((chain.previous, blocks))
                self._add(STORE_BEHIND, session, group, len(blocks), 0, part, blocks)

    def _add(
        self, kind: int, session: SessionId, group: int, count: int, hits: int, part: int, hashes: Hashes
    ) -> None:
        kept_bytes = self._kept_bytes + EVENT_BYTES + HASH_BYTES_MAX * count
        if kept_bytes > self._kept_bytes_max:
            self._dropped_events += 1
            self._dropped_blocks += count
            return
        place = self._place_of.get((session, group)) or self._place(session, group)
        if place:
            self._kept_bytes = kept_bytes
            end = self._rows_kept + count
            self._rows[self._rows_kept : end] = hashes
            self._rows_kept = end
            self._events.append((kind, self._clock(), place, count, hits, part))

    def _place(self, session: SessionId, group: int) -> int:
        """The number of a session's group; 0 if its ranks are not complete, so that nothing is there yet."""
        try:
            plan = self._plan_of(session, group)
        except Refusal:
            return 0
        number = self._places.get(plan.space)
        if number is None:
            number = self._places[plan.space] = len(self._places) + 1
            self._new_places.append(
                admin_pb2.RecordedPlace(
                    number=number,
                    tenant=self._tenants.setdefault(plan.domain.tenant, len(self._tenants) + 1),
                    group=group,
                    block_tokens=plan.block_tokens,
                    block_bytes=plan.domain.block_bytes,
                )
            )
        if len(self._place_of) >= SESSIONS_MAX:
            self._place_of.clear()
        self._place_of[session, group] = number
        return number

    def has_message(self) -> bool:
        """Whether there is enough for a message."""
        return self._kept_bytes >= BATCH_BYTES_MAX

    def batches(self) -> Iterator[admin_pb2.RecordBatch]:
        """What is there now, in as few messages as there should be; one at least."""
        events, self._events = self._events, []
        words = self._mixed(self._rows[: self._rows_kept].view(np.uint64))
        self._rows_kept = self._kept_bytes = 0
        first = first_word = 0
        while True:
            end, end_word, size_bytes = first, first_word, 0
            while end < len(events) and size_bytes < BATCH_BYTES_MAX:
                end_word += events[end][COUNT]
                size_bytes += EVENT_BYTES + HASH_BYTES_MAX * events[end][COUNT]
                end += 1
            yield self._batch(events[first:end], words[first_word:end_word].tobytes())
            if end == len(events):
                return
            first, first_word = end, end_word

    def _mixed(self, rows: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """Eight bytes for each hash. In small pieces, because large arrays would be given back to the system
        each time, and had from it again."""
        mixed = np.empty(len(rows), np.uint64)
        for first in range(0, len(rows), MIXED_ROWS):
            piece = rows[first : first + MIXED_ROWS]
            np.matmul(piece ^ piece >> HALF_WORD, self._factors, out=mixed[first : first + MIXED_ROWS])
        return mixed

    def _batch(self, events: list[_Event], hashes: bytes) -> admin_pb2.RecordBatch:
        columns = zip(*events, strict=True) if events else [()] * COLUMNS
        kinds, times_s, places, counts, hits, parts = columns
        times_us = ((np.array(times_s) - self._began_s) * 1e6).astype(np.uint64).tolist()
        new_places, self._new_places = self._new_places, []
        return admin_pb2.RecordBatch(
            places=new_places,
            kinds=kinds,
            times_us=times_us,
            place_of=places,
            hash_count=counts,
            hits=hits,
            parts=parts,
            hashes=hashes,
            dropped_events=self._dropped_events,
            dropped_blocks=self._dropped_blocks,
        )
