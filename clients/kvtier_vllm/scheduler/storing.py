"""Decides which blocks of running requests to store, and follows the stores that were submitted."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvtier import Chain, Client, Doorbell, Outcome, PartRef, StoreResult, Transfer, TransferState

from kvtier_vllm.groups import Groups, GroupShape
from kvtier_vllm.meta import STORE_DOORBELL, StoreOrder
from kvtier_vllm.model.adapter_loads import AdapterId, adapter_of
from kvtier_vllm.scheduler.holding import BlockHolds
from kvtier_vllm.scheduler.known import KNOWN_MAX, KnownBlocks, Sightings
from kvtier_vllm.scheduler.retaining import PLAIN, Kept

if TYPE_CHECKING:
    from kvtier_vllm.scheduler.events import BlockEvents

GONE_MAX = 256
"""The most blocks that one submission may find to be gone from the daemon, in one place each; what is behind
them waits for the next step. Each costs a look at the index page, which takes some microseconds."""
TRANSFERS_MAX = 256
"""The most stores in flight. Further blocks wait, and go with later ones of their request."""
BLOCKS_MAX = 2_048
"""The most blocks of one store, far below what the daemon takes."""
PAUSE_MIN_S, PAUSE_MAX_S = 0.02, 0.5
"""How long nothing is stored after a store was refused: twice as long after each further one, until one
succeeds. A pool that is full for a moment must not cost a short request all that it still has to store."""
FAILURES_MAX = 8
"""The most failures of one request; with more, nothing of it is stored any more."""
PENDING_S = 0.05
"""After so long the daemon is asked again for blocks that another store was still writing, which may have
failed."""
SEND_BLOCKS, SEND_STEPS = 32, 4
"""Stores are sent together, because each message costs the engine's process a few hundred microseconds: when
they have so many blocks, or when the first of them is so many steps old. That makes no difference to a prompt
of some length, and a small one to generated text."""


class Made:
    """The blocks that the daemon has because of one request, by group, from some token on."""

    def __init__(self, shapes: Sequence[GroupShape], from_tokens: int = 0) -> None:
        self._first = [-(-from_tokens // shape.block_tokens) for shape in shapes]
        self._blocks: list[dict[int, bytes]] = [{} for _ in shapes]

    def add(self, group: int, index: int, block_hash: bytes) -> None:
        """Adds block `index` of the request, if it counts."""
        if index >= self._first[group]:
            self._blocks[group][index] = block_hash

    def first(self, group: int) -> int | None:
        """Returns the request's first such block in this group, or None without one."""
        return min(self._blocks[group], default=None)

    def in_order(self) -> Iterator[tuple[int, list[bytes]]]:
        """Yields each group that has some, and their hashes, in the order of the request."""
        for group, blocks in enumerate(self._blocks):
            if blocks:
                yield group, [blocks[index] for index in sorted(blocks)]


@dataclass(slots=True, eq=False)
class StoreState:
    """The stores of one request."""

    request: Any
    """vLLM's request."""
    next_block: list[int]
    """For each group, the block below which all were submitted, or need not be."""
    failures: int = 0
    sighted: list[int] = field(default_factory=list)
    """For each group, the block below which all were counted as seen by this request. Empty: none."""
    open: dict[int, PartRef] = field(default_factory=dict)
    """By number, the parts of stores that may still read the request's blocks."""
    kept: Kept = PLAIN
    """How the daemon is to keep its blocks."""
    made: Made | None = None
    """What it has made; None if nobody needs to know."""
    under_way: int = 0
    """How many stores have not been reported as ended, including those that the request was parted from."""


@dataclass(slots=True, eq=False)
class _Share:
    """The part of a store that belongs to one request."""

    name: str
    request: StoreState
    origin: StoreState
    """The request that it was planned for, from which `request` may be parted."""
    hashes: list[bytes]
    indexes: list[int]
    """The request's block for each hash."""
    sources: Sequence[int]
    chains: list[Chain]
    given_up: bool = False
    """Whether its request has lost blocks that it reads, so that it must not succeed."""


@dataclass(slots=True, eq=False)
class _Store:
    """One store. It is for all requests of a step that have blocks of one group to store, want them kept
    alike, and compute with the same adapter."""

    transfer: Transfer
    group: int
    kept: Kept
    shares: list[_Share]
    sources: tuple[int, ...]


@dataclass(slots=True)
class StoreCounters:
    """Totals since the engine started."""

    blocks: int = 0
    transfers: int = 0
    refused: int = 0
    withdrawn: int = 0
    """Stores withdrawn because vLLM gave blocks of theirs to other requests."""


class Storer:
    """Plans and submits stores, and keeps account of them: one for each group and step, with blocks of all
    requests that have some, because a transfer costs both sides much more than its blocks do.

    What a store reads must stay as it is until its part is over. Blocks of full attention stay with their
    request as long as it runs. Blocks that leave it earlier are held from the beginning, so that vLLM does
    not give them to others, if it has enough of them; if not, `withdraw` ends the stores whose blocks are
    given away, before anything is written there. When a request is over, `keep` holds what its stores still
    read.
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
        """threshold: after how many requests with the same block it is stored.
        events: is told what the daemon holds.
        holds_at_once: whether stores of any group must hold what they read from the beginning, because
            `withdraw` would be too late.
        """
        most = KNOWN_MAX // len(groups.shapes)
        self.known = tuple(KnownBlocks(clock, most) for _ in groups.shapes)
        """Known blocks, by group."""
        self.counters = StoreCounters()
        self.holds = holds
        self._sightings = None if threshold <= 1 else tuple(Sightings(threshold, most) for _ in groups.shapes)
        self._events = events
        self._holds_at_once = holds_at_once
        self._groups = groups
        self._clock = clock
        self._numbers = itertools.count(1)
        self._stores: dict[int, _Store] = {}
        """Stores by numbers of our own, because tickets begin anew with each client."""
        self.planned: dict[tuple[int, bool, float, AdapterId | None], list[_Share]] = {}
        """What the next `submit` is to store, by group, how it is kept, and its adapter."""
        self._planned_hashes: tuple[set[bytes], ...] = tuple(set() for _ in groups.shapes)
        """Their hashes, by group."""
        self._planned_blocks = 0
        self._readers: dict[int, list[int]] = {}
        """The stores that read a block which may leave its request; several if requests share it."""
        self.unsent_blocks = self._unsent_since = 0
        """How many blocks may still wait to be sent, and since which step."""
        self._pause_s = PAUSE_MIN_S
        self._paused_until_s = 0.0
        self._pending: deque[tuple[float, StoreState, int, int]] = deque()
        """What to submit again, and when: a request's blocks in a group, from this one on."""

    @property
    def has_room(self) -> bool:
        """Whether more may be planned now."""
        return len(self._stores) < TRANSFERS_MAX and self._clock() >= self._paused_until_s

    @property
    def busy(self) -> bool:
        """Whether there are stores whose end is not known, of this engine or of others. Without any, `poll`
        finds nothing, and no request can have lost blocks that are read."""
        return bool(self._stores or self._pending)

    @property
    def watches(self) -> bool:
        """Whether stores read blocks that may leave their requests."""
        return bool(self._readers)

    def new_state(self, request: Any) -> StoreState:
        """Returns the state of a request that has stored nothing."""
        return StoreState(request, [0] * len(self.known))

    def loaded(self, request: Any, group: int, indexes: Sequence[int], hashes: Sequence[bytes]) -> None:
        """Takes note that the daemon has been seen to hold these blocks of a request."""
        self.known[group].seen(hashes)
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
        """Has the next `submit` store what is new among the first `len(block_ids)` blocks of a request in a
        group. The id 0 stands for a block that the request no longer has."""
        if request.failures > FAILURES_MAX:
            request.next_block[group] = len(block_ids)
            return
        first = request.next_block[group]
        end = len(block_ids)
        if end > first + 1:  # a request that decodes fills one block at a time
            end = min(end, first + self._most(client))
        end, indexes = self._new(client, group, hashes, first, end, request.kept)
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
                # Behind a window, what comes before a block may never have been stored.
                () if self._groups.shapes[group].window_blocks else hashes,
            )

    def plan_one(
        self, name: str, request: StoreState, group: int, block_hash: bytes, index: int, block_id: int
    ) -> None:
        """Has the next `submit` store one block of a request, if it is new."""
        if request.failures > FAILURES_MAX or self.known[group].covers(block_hash, request.kept):
            return
        if self._sightings is not None:
            # Each block is handed off once, except for preempted requests.
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
        prompt: Sequence[bytes] = (),
    ) -> None:
        """`prompt`: the hashes of all blocks of the request in this group, if they are known."""
        holds = self.holds if self._holds_at_once else None
        if holds is not None and not holds.has_room(len(sources), self._planned_blocks):
            request.next_block[group] = min(request.next_block[group], indexes[0])
            return
        # What another request of this step stores as well need not be stored twice.
        taken = self._planned_hashes[group]
        if not taken.isdisjoint(hashes):
            news = [place for place, one in enumerate(hashes) if one not in taken]
            if not news:
                return
            hashes = [hashes[place] for place in news]
            indexes, sources = [indexes[place] for place in news], [sources[place] for place in news]
        taken.update(hashes)
        self._planned_blocks += len(hashes)
        chains = _chains(indexes, prompt)
        share = _Share(name, request, request, hashes, indexes, sources, chains)
        adapter = adapter_of(request.request)
        kept = request.kept
        # Of plain values, because these are hashed without calls of Python.
        self.planned.setdefault((group, kept.on_disks, kept.ttl_s, adapter), []).append(share)

    def submit(self, client: Client, step: int) -> list[StoreOrder]:
        """Submits what was planned: blocks that are full, and computed when the store doorbell says `step`.
        Returns what the workers are to follow."""
        planned, self.planned = self.planned, {}
        for taken in self._planned_hashes:
            taken.clear()
        self._planned_blocks = 0
        orders = []
        for (group, _, _, adapter), shares in planned.items():
            kept = shares[0].request.kept
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
        chains = [chain for share in shares for chain in share.chains]
        transfer = client.store(
            hashes,
            sources,
            group=group,
            doorbell=doorbell,
            retention=kept.retention,
            lazily=True,
            chains=chains,
        )
        self.counters.transfers += 1
        store = _Store(transfer, group, kept, shares, sources)
        part = transfer.part
        if part is None:  # refused at once
            self._refused(store)
            return None
        number = next(self._numbers)
        self._stores[number] = store
        self._unsent_since = self._unsent_since if self.unsent_blocks else step
        self.unsent_blocks += len(sources)
        for share in shares:
            share.request.open[number] = part
            share.request.under_way += 1
        leave = bool(self._groups.shapes[group].window_blocks)
        if self.holds is not None and (self._holds_at_once or (leave and self.holds.can_spare(len(sources)))):
            self.holds.hold(number, sources)
        elif leave:
            for block in sources:
                self._readers.setdefault(block, []).append(number)
        return StoreOrder(tuple(share.name for share in shares), part, sources, adapter)

    def _most(self, client: Client) -> int:
        """Returns the most blocks of one store."""
        return min(BLOCKS_MAX, client.transfer_blocks_max or BLOCKS_MAX)

    def send(self, client: Client, step: int) -> None:
        """Sends stores that have waited long enough for others, or are enough by themselves. Called once per
        step, after its stores."""
        if self.unsent_blocks >= SEND_BLOCKS or step - self._unsent_since >= SEND_STEPS:
            client.flush()
            self.unsent_blocks = 0

    def poll(self) -> list[PartRef]:
        """Takes in what the daemon reported. Returns the parts of stores that did not end well: a worker that
        has not seen them start would wait for them in vain."""
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
        while self._pending and self._pending[0][0] <= self._clock():
            _, request, group, first = self._pending.popleft()
            request.next_block[group] = min(request.next_block[group], first)
        return failed

    def withdraw(self, block_ids: Iterable[int]) -> list[PartRef]:
        """Withdraws the stores that read these blocks, which vLLM has given to others. Returns the parts that
        may still read them. They are over before anything is written there, and what they have read is never
        served."""
        readers = self._readers
        numbers = {number for block in block_ids for number in readers.get(block, ())}
        return [part for number in numbers if (part := self._withdraw(number)) is not None]

    def overdue(self, step: int, *, everything: bool = False) -> list[PartRef]:
        """Returns the parts that have held blocks for too long, to be withdrawn in this step, and lets go of
        those that were returned in an earlier one. Called once per step. With `everything`, no part may hold
        blocks any more."""
        if self.holds is None:
            return []
        numbers = self.holds.overdue(step, everything=everything)
        stores = [self._stores[number] for number in numbers if number in self._stores]
        return [store.transfer.part for store in stores if store.transfer.part is not None]

    def forget_open(self, request: StoreState) -> list[PartRef]:
        """Starts a request over that loses its blocks. Returns the parts that may still read them, and must
        not. What becomes of those stores no longer counts against it."""
        opened = list(request.open.items())
        parts: list[PartRef] = []
        for number, part in opened:
            if self.holds is not None and number in self.holds:  # the store goes on, and holds what it reads
                if number in self._stores:
                    self._part(request, self._stores[number])
            elif number not in self._stores:  # the daemon that it was submitted to is gone
                parts.append(part)
            else:
                self._withdraw(number)
                parts.append(part)
        request.open.clear()
        request.next_block = [0] * len(self.known)
        return parts

    def keep(self, request: StoreState) -> bool:
        """Holds what the open stores of a request that is over read. Returns False if that is not possible:
        then vLLM must not give the blocks to others until the workers say so."""
        if self.holds is None:
            return not request.open
        for number in request.open:
            store = self._stores.get(number)
            # A store that is not there any more has no daemon, and is revoked before anything is written.
            if store is not None and number not in self.holds:
                self.holds.hold(number, store.sources)
        return True

    def settle(self, wait_s: float) -> list[PartRef]:
        """Gives all held blocks back if nobody else uses a block: waits up to `wait_s` seconds for the stores
        that hold some. Returns the parts of those that have not ended, to be withdrawn in the next step
        before anything is written. Their blocks are released now, except for models whose blocks are zeroed
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
        """Forgets what the daemon holds, because it is another one, or has restarted."""
        for known in self.known:
            known.clear()
        self._pending.clear()
        self._pause_s, self._paused_until_s = PAUSE_MIN_S, 0.0

    def _new(
        self, client: Client, group: int, hashes: Sequence[bytes], first: int, end: int, kept: Kept
    ) -> tuple[int, list[int]]:
        """Returns up to where it has looked, `end` or before, and which blocks from `first` on are to be
        stored: those that are not known to be kept like this, or, by the daemon's index page, were evicted
        since."""
        known, gone, index = self.known[group], 0, first
        new: list[int] = []
        while index < end:
            if not known.covers(hashes[index], kept):
                new.append(index)
                index += 1
                continue
            if gone == GONE_MAX:
                return index, new
            run = client.known_run(hashes, index, end, group=group, counted=False)
            there = end if run is None else index + run
            new += [each for each in range(index + 1, there) if not known.covers(hashes[each], kept)]
            index = there
            if index < end:
                known.forget(hashes[index])
                gone += 1
                new.append(index)
                index += 1
        return end, new

    def _sight(
        self, sightings: Sightings, request: StoreState, group: int, hashes: Sequence[bytes], end: int
    ) -> None:
        """Counts each block once for the request, however often it is submitted."""
        request.sighted = request.sighted or [0] * len(self.known)
        sightings.add(hashes[request.sighted[group] : end])
        request.sighted[group] = max(request.sighted[group], end)

    def _withdraw(self, number: int) -> PartRef | None:
        """Gives up a store whose part must be withdrawn before anything is written. Nothing of it counts any
        more, and once it has ended, its requests try again to store what they still have: until then the
        daemon takes those blocks for blocks that are being stored. Returns the part."""
        store = self._stores[number]
        for share in store.shares:
            share.request.open.pop(number, None)
            share.request, share.given_up = self.new_state(share.origin.request), True
        self._forget_reader(number, store)
        self.counters.withdrawn += 1
        return store.transfer.part

    def _part(self, request: StoreState, store: _Store) -> None:
        """Parts the request from this store."""
        for share in store.shares:
            if share.request is request:
                share.request, share.given_up = self.new_state(share.origin.request), True

    def _try_again(self, share: _Share, group: int, position: int) -> None:
        """Has the share's blocks from this one on submitted again, if its request still has them."""
        next_block = share.origin.next_block
        next_block[group] = min(next_block[group], share.indexes[position])

    def _read_no_more(self, number: int, store: _Store, *, fenced: bool) -> None:
        """Notes that a store reads no more. One that is not fenced is revoked in this step before anybody
        writes, because its daemon is gone."""
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
        blocks = len(store.sources)
        made = any(share.origin.made is not None for share in store.shares)
        if outcome.done and outcome.succeeded.count(1) == blocks and not made and self._events is None:
            # The usual case, in which nobody needs to know which block belongs to whom.
            self.known[store.group].add([one for share in store.shares for one in share.hashes], store.kept)
            self.counters.blocks += blocks
            self._pause_s = PAUSE_MIN_S
            return
        results = store.transfer.results
        if results is None or len(results) != len(store.sources):
            self._refused(store)
            return
        first, failed = 0, False
        held: list[bytes] = []
        for share in store.shares:
            end = first + len(share.hashes)
            good, first_bad, first_pending = _judged(results[first:end], outcome.succeeded[first:end])
            if share.origin.made is not None:
                for place in good:
                    if results[first + place] is StoreResult.ACCEPTED:
                        share.origin.made.add(store.group, share.indexes[place], share.hashes[place])
            hashes = share.hashes if len(good) == end - first else [share.hashes[one] for one in good]
            held += hashes
            if self._events is not None:
                indexes = [share.indexes[one] for one in good]
                self._events.held(share.origin.request, store.group, indexes, hashes)
            if first_bad is not None:
                failed |= not share.given_up
                self._failed(share, store.group, first_bad)
            if first_pending is not None:
                again_s = self._clock() + PENDING_S
                self._pending.append((again_s, share.origin, store.group, share.indexes[first_pending]))
            first = end
        self.known[store.group].add(held, store.kept)
        self.counters.blocks += len(held)
        if failed:
            self._pause()
        elif outcome.done:
            self._pause_s = PAUSE_MIN_S

    def _refused(self, store: _Store) -> None:
        """Handles a store of which nothing was stored."""
        for share in store.shares:
            self._failed(share, store.group, 0)
        if not all(share.given_up for share in store.shares):
            self._pause()

    def _failed(self, share: _Share, group: int, position: int) -> None:
        """Has what was not stored tried again with its request's next blocks, which need it. That a store was
        given up does not count against its request."""
        share.origin.failures += not share.given_up
        self._try_again(share, group, position)

    def _pause(self) -> None:
        self.counters.refused += 1
        self._paused_until_s = self._clock() + self._pause_s
        self._pause_s = min(2 * self._pause_s, PAUSE_MAX_S)


def _judged(results: Sequence[StoreResult], succeeded: bytes) -> tuple[list[int], int | None, int | None]:
    """Returns which blocks of a share the daemon holds, the first that it has no room for now or has lost,
    and the first that another store is writing. Those that it does not want are none of these."""
    if succeeded.count(1) == len(results):  # the usual case
        return list(range(len(results))), None, None
    good: list[int] = []
    first_bad: int | None = None
    first_pending: int | None = None
    for place, result in enumerate(results):
        if (place < len(succeeded) and succeeded[place] == 1) or result is StoreResult.EXISTS:
            good.append(place)
        elif result is StoreResult.PENDING:
            first_pending = place if first_pending is None else first_pending
        elif result is not StoreResult.UNWANTED and first_bad is None:
            first_bad = place
    return good, first_bad, first_pending


def _chains(indexes: Sequence[int], prompt: Sequence[bytes]) -> list[Chain]:
    """Returns how blocks of a request belong together: one chain for each run of indexes without a gap, after
    the block of the prompt that comes before it."""
    if len(indexes) == 1:
        first = indexes[0]
        return [Chain(1, prompt[first - 1] if 0 < first <= len(prompt) else b"")]
    chains = []
    start = 0
    for place in range(1, len(indexes) + 1):
        if place == len(indexes) or indexes[place] != indexes[place - 1] + 1:
            first = indexes[start]
            chains.append(Chain(place - start, prompt[first - 1] if 0 < first <= len(prompt) else b""))
            start = place
    return chains


def _in_pieces(shares: list[_Share], most: int) -> Iterator[list[_Share]]:
    """Yields the shares in pieces of at most `most` blocks, which no share exceeds."""
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
