"""What one recording keeps of lookups and stores until it is sent. Engines never wait for it: what finds no
room is dropped and counted."""

import secrets
import time
from collections.abc import Callable, Iterator

from kvtier.v1 import admin_pb2
from kvtier_kernels import EventLog

from kvtierd.core.actions import LookupReply
from kvtierd.core.errors import Refusal
from kvtierd.core.ids import HASH_BYTES_MAX, Hashes, SessionId, SpaceId
from kvtierd.core.state.entities import GroupPlan
from kvtierd.core.stimuli import LookupBlocks, PrefetchBlocks, SubmitStore

KEPT_BYTES_MAX = 4 << 20
"""What may wait to be sent, as it is sent: half a million hashes."""
BATCH_BYTES_MAX = 256 << 10
"""An event that alone has more is sent by itself. While a message is made, nobody else is served."""
SESSIONS_MAX = 4_096
"""Groups of sessions whose places are known without asking the core."""
LOOKUP, STORE = admin_pb2.RECORDED_KIND_LOOKUP, admin_pb2.RECORDED_KIND_STORE
STORE_BEHIND, STORE_LOOSE = admin_pb2.RECORDED_KIND_STORE_BEHIND, admin_pb2.RECORDED_KIND_STORE_LOOSE


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
        self._log = EventLog(kept_bytes_max, secrets.token_bytes(HASH_BYTES_MAX))
        self._dropped_events = self._dropped_blocks = 0
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
            if not (query.exact or query.window_blocks) and len(hashes):
                self._add(LOOKUP, stimulus.session, query.group, found.hits, len(queries), hashes)

    def store(self, stimulus: SubmitStore) -> None:
        """A store was accepted, perhaps not of all its blocks."""
        session, group, hashes = stimulus.session, stimulus.group, stimulus.hashes
        if not stimulus.chains and len(hashes):
            self._add(STORE_LOOSE, session, group, 0, 0, hashes)
        first = 0
        for part, chain in enumerate(stimulus.chains):
            blocks = hashes[first : first + chain.blocks]
            first += chain.blocks
            kind = STORE if chain.previous is None else STORE_BEHIND
            self._add(kind, session, group, 0, part, blocks, chain.previous)

    def _add(
        self,
        kind: int,
        session: SessionId,
        group: int,
        hits: int,
        part: int,
        hashes: Hashes,
        behind: Hashes | None = None,
    ) -> None:
        place = self._place_of.get((session, group)) or self._place(session, group)
        if not place:
            return
        time_us = int((self._clock() - self._began_s) * 1e6)
        if not self._log.add(kind, time_us, place, hits, part, hashes, behind):
            self._dropped_events += 1
            self._dropped_blocks += len(hashes) + (0 if behind is None else len(behind))

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
        return self._log.size_bytes >= BATCH_BYTES_MAX

    def batches(self) -> Iterator[admin_pb2.RecordBatch]:
        """What is there now, in as few messages as there should be; one at least."""
        left_bytes = self._log.size_bytes
        while True:
            events, hashes = self._log.take(BATCH_BYTES_MAX)
            new_places, self._new_places = self._new_places, []
            yield admin_pb2.RecordBatch(
                places=new_places,
                events=events,
                hashes=hashes,
                dropped_events=self._dropped_events,
                dropped_blocks=self._dropped_blocks,
            )
            left_bytes -= len(events) + len(hashes)
            if left_bytes <= 0:
                return
