"""Which blocks of running requests to store, and what became of those that were submitted."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvtier import Client, Doorbell, Outcome, PartRef, StoreResult, Transfer, TransferState

from kvtier_vllm.groups import Groups
from kvtier_vllm.meta import STORE_DOORBELL, StoreOrder
from kvtier_vllm.model.adapter_loads import AdapterId, adapter_of
from kvtier_vllm.scheduler.holding import BlockHolds
from kvtier_vllm.scheduler.known import KNOWN_MAX, KnownBlocks, Sightings
from kvtier_vllm.scheduler.retaining import PLAIN, Kept

if TYPE_CHECKING:
    from kvtier_vllm.scheduler.events import BlockEvents

GONE_MAX = 256
"""Blocks that one submission may find to be gone from the daemon, in one place each; what is behind them goes
with the next step. Each costs a look at the index page, some microseconds."""
TRANSFERS_MAX = 256
"""Stores in flight. Beyond it blocks wait, and go with later ones of their request."""
BLOCKS_MAX = 2_048
"""Of one store, far below what the daemon takes."""
PAUSE_S = 0.5
"""Without stores, after one was refused."""
FAILURES_MAX = 3
"""Of one request; then it is left alone."""
SEND_BLOCKS, SEND_STEPS = 32, 4
"""Stores are sent together, because each message costs the engine's process a few hundred microseconds: when
they have so many blocks, or the first of them is so many steps old. That makes no difference to a prompt of
some length, and to what is generated a small one."""


class Made:
    """Blocks that the daemon has because of one request, by group."""

    def __init__(self, groups: int) -> None:
        self._blocks: list[dict[int, bytes]] = [{} for _ in range(groups)]

    def add(self, group: int, index: int, block_hash: bytes) -> None:
        """Block `index` of the request."""
        self._blocks[group][index] = block_hash

    def first(self, group: int) -> int | None:
        """Its first block in this group; None: it has made none there."""
        return min(self._blocks[group], default=None)

    def in_order(self) -> Iterator[tuple[int, list[bytes]]]:
        """Each group that has some, and their hashes, in the order of the request."""
        for group, blocks in enumerate(self._blocks):
            if blocks:
                yield group, [blocks[index] for index in sorted(blocks)]


@dataclass(slots=True, eq=False)
class StoreState:
    """One request, as far as its stores go."""

    request: Any
    """vLLM's."""
    next_block: list[int]
    """Of each group: blocks below it were submitted, or need not be."""
    failures: int = 0
    sighted: list[int] = field(default_factory=list)
    """Of each group: blocks below it were counted as seen by this request. Empty: none."""
    open: dict[int, PartRef] = field(default_factory=dict)
    """By number: parts of stores that may still read the request's blocks, as far as the scheduler knows."""
    kept: Kept = PLAIN
    """How the daemon is to keep its blocks."""
    made: Made | None = None
    """None: nobody wants to know."""
    under_way: int = 0
    """Stores whose end the daemon has not reported, also those that it was parted from."""


@dataclass(slots=True, eq=False)
class _Share:
    """What a store has of one request."""

    name: str
    request: StoreState
    origin: StoreState
    """What it was planned for, which `request` may be parted from."""
    hashes: list[bytes]
    indexes: list[int]
    """Block of the request for each hash."""
    sources: Sequence[int]
    given_up: bool = False
    """Its request has lost blocks that it reads: it is not to succeed."""


@dataclass(slots=True, eq=False)
class _Store:
    """Of all requests of a step that have blocks of one group to store, want them kept alike, and compute
    with the same adapter."""

    transfer: Transfer
    group: int
    kept: Kept
    shares: list[_Share]
    sources: tuple[int, ...]


@dataclass(slots=True)
class StoreCounters:
    """Since the engine started."""

    blocks: int = 0
    transfers: int = 0
    refused: int = 0
    withdrawn: int = 0
    """Because vLLM gave blocks of theirs to others."""


class Storer:
    """Plans and submits stores, and keeps account of them: one for each group and step, whose blocks are of
    all requests that have some, because each transfer costs both sides much more than its blocks.

    What a store reads must stay as it is until its part is over. Blocks of full attention stay with their
    request as long as it runs; for those that leave it before there are two ways: `withdraw` ends stores
    whose blocks are given to others, before anything is written there; with `holds_at_once` vLLM does not
    give them to others at all. When a request is over, `keep` holds what its stores still read.
    """

    def __init__(
        self,
        groups: Groups,
        holds: BlockHolds | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        threshold: int = 1,
        events: BlockEvents | None = None,
        holds_at_once: bool = False,
    ) -> None:
        """`threshold`: a block is stored when so many requests have had it. `events`: is told what the daemon
        holds. `holds_at_once`: stores hold what they read from the beginning, not only when its request is
        over."""
        most = KNOWN_MAX // len(groups.shapes)
        self.known = tuple(KnownBlocks(clock, most) for _ in groups.shapes)
        """By group."""
        self.counters = StoreCounters()
        self.holds = holds
        self._sightings = None if threshold <= 1 else tuple(Sightings(threshold, most) for _ in groups.shapes)
        self._events = events
        self._holds_at_once = holds_at_once
        self._groups = groups
        self._clock = clock
        self._numbers = itertools.count(1)
        self._stores: dict[int, _Store] = {}
        """By numbers of our own: tickets begin anew with each client."""
        self._planned: dict[tuple[int, Kept, AdapterId | None], list[_Share]] = {}
        """By group, how it is kept, and the adapter that it is computed with, what the next `submit` is to
        store."""
        self._planned_hashes: set[tuple[int, bytes]] = set()
        self._planned_blocks = 0
        self._readers: dict[int, list[int]] = {}
        """Numbers of the stores that read a block which may leave its request. Several do if requests share
        it."""
        self._unsent_blocks = self._unsent_since = 0
        """Of stores that may still wait to be sent; since which step."""
        self._paused_until_s = 0.0

    @property
    def has_room(self) -> bool:
        """Whether `plan` is worth calling now."""
        return len(self._stores) < TRANSFERS_MAX and self._clock() >= self._paused_until_s

    @property
    def busy(self) -> bool:
        """Whether there are stores of which it is not known how they ended: else `poll` finds nothing, and no
        request has lost blocks that are read."""
        return bool(self._stores)

    @property
    def has_plans(self) -> bool:
        """Whether `submit` is worth calling now."""
        return bool(self._planned)

    @property
    def watches(self) -> bool:
        """Whether `withdraw` is worth calling now."""
        return bool(self._readers)

    def new_state(self, request: Any) -> StoreState:
        """Of a request that has stored nothing."""
        return StoreState(request, [0] * len(self.known))

    def loaded(self, request: Any, group: int, indexes: Sequence[int], hashes: Sequence[bytes]) -> None:
        """The daemon has been seen to hold these blocks of a request."""
        self.known[group].seen(hashes)
        self._announce(request, group, indexes, hashes)

    def _announce(self, request: Any, group: int, indexes: Sequence[int], hashes: Sequence[bytes]) -> None:
        if self._events is not None:
            self._events.held(request, group, indexes, hashes)

    def plan(
        self,
        client: Client,
        name: str,
        request: StoreState,
        hashes: Sequence[bytes],
        block_ids: Sequence[int],
        group: int = 0,
    ) -> None:
        """What is new among the first `len(block_ids)` blocks of a request in a group is stored by the next
        `submit`; 0 is a block that it has no more."""
        if request.failures > FAILURES_MAX:
            request.next_block[group] = len(block_ids)
            return
        first = request.next_block[group]
        end = min(len(block_ids), first + self._most(client))
        known = self.known[group]
        end = self._forget_gone(client, group, hashes, first, end, request.kept)
        indexes = [index for index in range(first, end) if not known.covers(hashes[index], request.kept)]
        if self._groups.shapes[group].window_blocks:
            indexes = [index for index in indexes if block_ids[index]]
        if self._sightings is not None:
            self._sight(self._sightings[group], request, group, hashes, end)
            indexes = [index for index in indexes if self._sightings[group].enough(hashes[index])]
        request.next_block[group] = end
        if indexes:
            self._plan(
                name,
                request,
                group,
                [hashes[index] for index in indexes],
                indexes,
                [block_ids[index] for index in indexes],
            )

    def plan_one(
        self, name: str, request: StoreState, group: int, block_hash: bytes, index: int, block_id: int
    ) -> None:
        """Likewise of one block, if it is new."""
        if request.failures > FAILURES_MAX or self.known[group].covers(block_hash, request.kept):
            return
        if self._sightings is not None:
            # Each is handed off once, but for preempted requests.
            self._sightings[group].add([block_hash])
            if not self._sightings[group].enough(block_hash):
                return
        self._plan(name, request, group, [block_hash], [index], [block_id])

    def _plan(
        self,
        name: str,
        request: StoreState,
        group: int,
        hashes: list[bytes],
        indexes: list[int],
        sources: list[int],
    ) -> None:
        holds = self.holds if self._holds_at_once else None
        if holds is not None and not holds.has_room(len(sources), self._planned_blocks):
            request.next_block[group] = min(request.next_block[group], indexes[0])
            return
        # What another request of this step has as well need not be told twice.
        news = [place for place, one in enumerate(hashes) if (group, one) not in self._planned_hashes]
        if not news:
            return
        if len(news) < len(hashes):
            hashes = [hashes[place] for place in news]
            indexes, sources = [indexes[place] for place in news], [sources[place] for place in news]
        self._planned_hashes.update((group, one) for one in hashes)
        self._planned_blocks += len(hashes)
        share = _Share(name, request, request, hashes, indexes, sources)
        adapter = adapter_of(request.request)
        self._planned.setdefault((group, request.kept, adapter), []).append(share)

    def submit(self, client: Client, step: int) -> list[StoreOrder]:
        """Submits what was planned: blocks that are full, and computed when the store doorbell says `step`.
        Returns what the workers are to follow."""
        planned, self._planned = self._planned, {}
        self._planned_hashes.clear()
        self._planned_blocks = 0
        orders = []
        for (group, kept, adapter), shares in planned.items():
            for some in _in_pieces(shares, self._most(client)):
                order = self._submit(client, group, kept, adapter, some, step)
                if order is not None:
                    orders.append(order)
        return orders

    def _submit(
        self,
        client: Client,
        group: int,
        kept: Kept,
        adapter: AdapterId | None,
        shares: list[_Share],
        step: int,
    ) -> StoreOrder | None:
        hashes = [one for share in shares for one in share.hashes]
        sources = tuple(block for share in shares for block in share.sources)
        doorbell = Doorbell(STORE_DOORBELL, step)
        transfer = client.store(
            hashes, sources, group=group, doorbell=doorbell, retention=kept.retention, lazily=True
        )
        self.counters.transfers += 1
        store = _Store(transfer, group, kept, shares, sources)
        part = transfer.part
        if part is None:  # refused at once
            self._refused(store)
            return None
        number = next(self._numbers)
        self._stores[number] = store
        self._unsent_since = self._unsent_since if self._unsent_blocks else step
        self._unsent_blocks += len(sources)
        for share in shares:
            share.request.open[number] = part
            share.request.under_way += 1
        if self._holds_at_once and self.holds is not None:
            self.holds.hold(number, sources)
        elif self._groups.shapes[group].window_blocks:
            for block in sources:
                self._readers.setdefault(block, []).append(number)
        return StoreOrder(tuple(share.name for share in shares), part, sources, adapter)

    def _most(self, client: Client) -> int:
        """Blocks of one store."""
        return min(BLOCKS_MAX, client.transfer_blocks_max or BLOCKS_MAX)

    @property
    def has_unsent(self) -> bool:
        """Whether `send` is worth calling now."""
        return self._unsent_blocks > 0

    def send(self, client: Client, step: int) -> None:
        """Has stores sent that have waited long enough for others, or are enough themselves. Once per step,
        after its stores."""
        if self._unsent_blocks >= SEND_BLOCKS or step - self._unsent_since >= SEND_STEPS:
            client.flush()
            self._unsent_blocks = 0

    def poll(self) -> list[PartRef]:
        """Takes in what the daemon reported. Returns the parts of stores that ended otherwise than well: a
        worker that has not seen them start would wait for them in vain."""
        failed: list[PartRef] = []
        for number, store in list(self._stores.items()):
            outcome = store.transfer.outcome
            if outcome.state is TransferState.ACTIVE:
                continue
            del self._stores[number]
            self._read_no_more(number, store, fenced=outcome.fenced)
            for share in store.shares:
                share.origin.under_way -= 1
                if outcome.fenced:
                    share.request.open.pop(number, None)
            if not outcome.done and store.transfer.part is not None:
                failed.append(store.transfer.part)
            self._account(store, outcome)
        return failed

    def withdraw(self, block_ids: Iterable[int]) -> list[PartRef]:
        """vLLM has given these blocks to somebody: returns the parts that may still read them. They are over
        before anything is written there, and what they have read is never served."""
        readers = self._readers
        numbers = {number for block in block_ids for number in readers.get(block, ())}
        return [part for number in numbers if (part := self._withdraw(number)) is not None]

    def overdue(self, step: int, *, everything: bool = False) -> list[PartRef]:
        """Parts that have held blocks for too long: to be withdrawn in this step. Lets go of those that were
        in an earlier one. Once per step. `everything`: no part may hold blocks any more."""
        if self.holds is None:
            return []
        numbers = self.holds.overdue(step, everything=everything)
        stores = [self._stores[number] for number in numbers if number in self._stores]
        return [store.transfer.part for store in stores if store.transfer.part is not None]

    def forget_open(self, request: StoreState) -> list[PartRef]:
        """The request loses its blocks: returns the parts that may still read them and must not. What becomes
        of those stores is no longer held against it, and it starts over."""
        opened = list(request.open.items())
        parts: list[PartRef] = []
        for number, part in opened:
            if number not in self._stores:  # the daemon that it was submitted to is gone
                parts.append(part)
            elif self._holds_at_once:  # it goes on, and has what it reads
                self._part(request, self._stores[number])
            else:
                self._withdraw(number)
                parts.append(part)
        request.open.clear()
        request.next_block = [0] * len(self.known)
        return [] if self._holds_at_once else parts

    def keep(self, request: StoreState) -> bool:
        """The request is over: from now on what its open stores read is held. False: it cannot be, and vLLM
        must not give the blocks to others until the workers say so."""
        if self.holds is None:
            return not request.open
        for number in request.open:
            store = self._stores.get(number)
            # What is not there any more has no daemon, and is revoked before anything is written.
            if store is not None and number not in self.holds:
                self.holds.hold(number, store.sources)
        return True

    def settle(self, wait_s: float) -> list[PartRef]:
        """Nothing is to be held any more, if nobody else uses a block: waits up to `wait_s` for the stores
        that hold some. Returns the parts of those that have not ended, to be withdrawn in the next step
        before anything is written; their blocks are released now, but for models whose blocks are zeroed
        earlier than that."""
        holds, deadline_s = self.holds, self._clock() + wait_s
        if holds is None or not holds.are_all:
            return []
        failed = self.poll()
        for store in [store for number, store in self._stores.items() if number in holds]:
            store.transfer.wait(max(0.0, deadline_s - self._clock()))
        failed += self.poll()
        if self._holds_at_once:
            return failed
        left = [number for number in holds.release_all() if number in self._stores]
        return failed + [part for number in left if (part := self._withdraw(number)) is not None]

    def start_over(self) -> None:
        """Another daemon, or the same after a restart: nothing is known of what it holds."""
        for known in self.known:
            known.clear()
        self._paused_until_s = 0.0

    def _forget_gone(
        self, client: Client, group: int, hashes: Sequence[bytes], first: int, end: int, kept: Kept
    ) -> int:
        """Forgets the blocks from `first` on that the daemon has evicted since they were known to be there,
        as its index page has it. Returns up to where it has looked: `end`, or before."""
        known, gone, index = self.known[group], 0, first
        while index < end:
            if not known.covers(hashes[index], kept):
                index += 1
                continue
            if gone == GONE_MAX:
                return index
            run = client.known_run(hashes, index, end, group=group, counted=False)
            if run is None:
                return end
            index += run
            if index < end:
                known.forget(hashes[index])
                gone += 1
                index += 1
        return end

    def _sight(
        self, sightings: Sightings, request: StoreState, group: int, hashes: Sequence[bytes], end: int
    ) -> None:
        """Counts each block once for the request, however often it is submitted."""
        request.sighted = request.sighted or [0] * len(self.known)
        sightings.add(hashes[request.sighted[group] : end])
        request.sighted[group] = max(request.sighted[group], end)

    def _withdraw(self, number: int) -> PartRef | None:
        """Its part is to be withdrawn before anything is written: nothing of it counts any more, and what its
        requests have left of it is tried again."""
        store = self._stores[number]
        for share in store.shares:
            share.request.open.pop(number, None)
            self._try_again(share, store.group, 0)
            share.request, share.given_up = self.new_state(share.origin.request), True
        self._forget_reader(number, store)
        self.counters.withdrawn += 1
        return store.transfer.part

    def _part(self, request: StoreState, store: _Store) -> None:
        """The request has nothing to do with this store any more."""
        for share in store.shares:
            if share.request is request:
                share.request, share.given_up = self.new_state(share.origin.request), True

    def _try_again(self, share: _Share, group: int, position: int) -> None:
        next_block = share.request.next_block
        next_block[group] = min(next_block[group], share.indexes[position])

    def _read_no_more(self, number: int, store: _Store, *, fenced: bool) -> None:
        """What is not fenced is revoked in this step, before anybody writes: the daemon is gone."""
        self._forget_reader(number, store)
        if self.holds is not None:
            if fenced:
                self.holds.release(number)
            else:
                self.holds.end(number)

    def _forget_reader(self, number: int, store: _Store) -> None:
        for block in store.sources if self._readers else ():
            numbers = self._readers.get(block, [])
            if number in numbers:
                numbers.remove(number)
                if not numbers:
                    del self._readers[block]

    def _account(self, store: _Store, outcome: Outcome) -> None:
        results = store.transfer.results
        if results is None or len(results) != len(store.sources):
            self._refused(store)
            return
        first, failed = 0, False
        for share in store.shares:
            end = first + len(share.hashes)
            good, first_bad = _judged(results[first:end], outcome.succeeded[first:end])
            if share.origin.made is not None:
                for place in good:
                    if results[first + place] is StoreResult.ACCEPTED:
                        share.origin.made.add(store.group, share.indexes[place], share.hashes[place])
            indexes, hashes = [share.indexes[one] for one in good], [share.hashes[one] for one in good]
            self.known[store.group].add(hashes, store.kept)
            self._announce(share.origin.request, store.group, indexes, hashes)
            self.counters.blocks += len(good)
            if first_bad is not None and not share.given_up:
                self._failed(share, store.group, first_bad)
                failed = True
            first = end
        if failed:
            self._pause()

    def _refused(self, store: _Store) -> None:
        """Nothing of it was stored."""
        left = [share for share in store.shares if not share.given_up]
        for share in left:
            self._failed(share, store.group, 0)
        if left:
            self._pause()

    def _failed(self, share: _Share, group: int, position: int) -> None:
        """What was not stored is tried again with its request's next blocks: without it they are of no
        use."""
        share.request.failures += 1
        self._try_again(share, group, position)

    def _pause(self) -> None:
        self.counters.refused += 1
        self._paused_until_s = self._clock() + PAUSE_S


def _judged(results: Sequence[StoreResult], succeeded: bytes) -> tuple[list[int], int | None]:
    """Which blocks of a share the daemon holds, and the first that it has refused or lost."""
    if succeeded.count(1) == len(results):  # as most often
        return list(range(len(results))), None
    good: list[int] = []
    first_bad: int | None = None
    for place, result in enumerate(results):
        if (place < len(succeeded) and succeeded[place] == 1) or result is StoreResult.EXISTS:
            good.append(place)
        elif result is not StoreResult.PENDING and first_bad is None:
            first_bad = place
    return good, first_bad


def _in_pieces(shares: list[_Share], most: int) -> Iterator[list[_Share]]:
    """Of at most so many blocks, which no share exceeds."""
    piece: list[_Share] = []
    blocks = 0
    for share in shares:
        if piece and blocks + len(share.hashes) > most:
            yield piece
            piece, blocks = [], 0
        piece.append(share)
        blocks += len(share.hashes)
    if piece:
        yield piece
