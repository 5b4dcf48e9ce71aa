"""Swap space for engines that preempt by swapping: blocks go to the host and come back, bit for bit.

    import time

    from kvtier import Client, Group, Namespace, Plane, SharedBuffer
    from kvtier.swap import CanSwap, Swapped, SwapSpace, SwapState

    def settle(space: SwapSpace, swapped: Swapped, leaving: SwapState) -> SwapState:
        deadline_s = time.monotonic() + 30
        while space.poll(swapped) is leaving and time.monotonic() < deadline_s:
            time.sleep(0.001)  # an engine does not wait: it polls once a step
        return swapped.state

    block_bytes, num_blocks = 65_536, 64
    with SharedBuffer.create(num_blocks * block_bytes) as memory:  # the engine's KV cache
        plane = Plane(fragment_bytes=block_bytes, base_offset=0, block_stride_bytes=block_bytes)
        group = Group(block_tokens=16, num_blocks=num_blocks, planes=(plane,))
        namespace = Namespace(model="demo", kv_dtype="bfloat16", hash_scheme="none")
        with Client(instance="swapping", namespace=namespace, groups=[group], memory=memory) as client:
            if not client.wait_ready(timeout_s=30):
                raise SystemExit(client.status.why)
            space = SwapSpace(client, blocks=32)
            memory.array[7 * block_bytes : 13 * block_bytes] = 7
            sequences = {"a": [7, 8, 9], "b": [7, 8, 12]}  # blocks 7 and 8 are shared by a fork
            if space.can_swap_out({7, 8, 9, 12}) is CanSwap.OK:
                swapped = space.swap_out(sequences)
                print(settle(space, swapped, SwapState.GOING_OUT))  # SwapState.OUT
                memory.array[:] = 0  # the four blocks are free for other sequences
                if space.can_swap_in(swapped, free_blocks=30, all_blocks=num_blocks) is CanSwap.OK:
                    tables = space.swap_in(swapped, [20, 21, 22, 23])
                    print(settle(space, swapped, SwapState.COMING_IN), tables)
                    # SwapState.IN {'a': [20, 21, 22], 'b': [20, 21, 23]}
                    print(bool((memory.array[20 * block_bytes : 24 * block_bytes] == 7).all()))  # True

The blocks are private: their keys are random, so nobody else ever finds them, and a lease keeps them on the
host. Everything happens to a group of sequences as a whole or not at all. What the daemon loses (it was
killed without a persistent pool, say) is LOST, as `poll` tells: the engine computes it anew. Nothing here
waits.
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from kvtier.client import Client, LookupCall, Transfer
from kvtier.errors import KvtierError, Reason
from kvtier.lookups import Lookup
from kvtier.queries import LookupMode
from kvtier.transfers import TransferState
from kvtier.words import Doorbell

WATERMARK = 0.01
"""The share of an engine's blocks that a group must leave free when it is swapped in."""
RENEW_S = 120.0
"""A lease that is older is exchanged for a new one, because the daemon ends leases after some time."""
ANSWER_DEADLINE_S = 5.0
"""A lookup that has not been answered after this time is sent again."""
SWAPPED_MAX = 4_096
"""The most groups that are out at the same time; each holds a lease."""


class CanSwap(Enum):
    """Whether a group of sequences can be swapped now."""

    OK = "ok"
    LATER = "later"
    NEVER = "never"
    """It would not fit even if it were alone."""


class SwapState(Enum):
    """The state of one group of sequences."""

    GOING_OUT = "going out"
    """Its blocks are being read, and still belong to the engine."""
    OUT = "out"
    """It is on the host, and its blocks may be used again."""
    COMING_IN = "coming in"
    """Its new blocks are being written."""
    IN = "in"
    """It is in its new blocks, and no longer on the host."""
    KEPT = "kept"
    """It could not go out: it is still where it was, and nothing of it is on the host."""
    LOST = "lost"
    """The host does not have it any more, so it has to be computed again."""


@dataclass(slots=True, eq=False)
class Swapped:
    """One group of sequences; its `SwapSpace` keeps it up to date."""

    sequences: dict[str, list[int]]
    """The swap blocks of each sequence, in order. Their numbers mean something only within the space."""
    block_map: dict[int, int]
    """The swap block of each device block, as they were swapped out."""
    keys: dict[int, bytes] = field(repr=False)
    """The key of each swap block, which nobody else has."""
    counts: Counter[int]
    """How many of the sequences share each swap block."""
    state: SwapState = SwapState.GOING_OUT
    error: KvtierError | None = None
    """Why it was kept or lost, or, if it is OUT again, why the last attempt to bring it in failed."""
    targets: dict[int, int] = field(default_factory=dict)
    """The device block of each swap block, from `swap_in` on."""
    _transfer: Transfer | None = None
    _lease: Lookup | None = None
    """The lease of the blocks in `_leased`, in this order."""
    _leased: tuple[int, ...] = ()
    _leased_s: float = 0.0
    _call: LookupCall | None = None
    _called: tuple[int, ...] = ()
    _called_s: float = 0.0

    @property
    def blocks(self) -> tuple[int, ...]:
        """Its swap blocks, each once."""
        return tuple(self.counts)


class SwapSpace:
    """Room on the host for some private blocks of one KV cache group. For one caller at a time."""

    def __init__(
        self,
        client: Client,
        blocks: int,
        *,
        watermark: float = WATERMARK,
        group: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """client: submits and holds a rank. Without one, if the daemon is killed during a load, it could not
            see when the last copy has landed.
        blocks: the number of blocks, at most what the daemon leases to one instance, by default a quarter of
            its pool.
        watermark: the share of an engine's blocks that `can_swap_in` leaves free, from 0 to less than 1.

        Raises KvtierError for a client without a rank, and for numbers out of range.
        """
        if not client.role.holds_rank:
            message = "a client without a rank cannot tell when a load of a killed daemon has landed"
            raise KvtierError(Reason.ROLE, message, field="client", value=client.role.name)
        if blocks < 1:
            raise KvtierError(Reason.MALFORMED, "at least one", field="blocks", value=blocks)
        if not 0 <= watermark < 1:
            raise KvtierError(Reason.MALFORMED, "from 0 to less than 1", field="watermark", value=watermark)
        self._client = client
        self._group = group
        self._watermark = watermark
        self._clock = clock
        self._all = blocks
        self._free = list(range(blocks - 1, -1, -1))
        self._swapped: dict[Swapped, None] = {}

    @property
    def free_blocks(self) -> int:
        """The number of swap blocks that hold nothing."""
        return len(self._free)

    # --- out ---

    def can_swap_out(self, device_blocks: Collection[int]) -> CanSwap:
        """Returns whether the host has room for these blocks now. A block that is named twice counts once."""
        wanted = len(set(device_blocks))
        if wanted > self._all:
            return CanSwap.NEVER
        room = wanted <= len(self._free) and len(self._swapped) < SWAPPED_MAX and self._client.ready
        return CanSwap.OK if room else CanSwap.LATER

    def swap_out(
        self, sequences: Mapping[str, Sequence[int]], *, doorbell: Doorbell | None = None
    ) -> Swapped:
        """Sends a group of sequences to the host. A device block that several of them share is sent once.

        The blocks must not change until `poll` returns OUT or KEPT. With `doorbell`, nothing is read before
        it has rung. Raises KvtierError, and changes nothing, for sequences without blocks, and if
        `can_swap_out` does not return OK.
        """
        device_blocks = list(dict.fromkeys(block for blocks in sequences.values() for block in blocks))
        if not device_blocks:
            raise KvtierError(Reason.MALFORMED, "a group has at least one block", field="sequences", value=0)
        if (can := self.can_swap_out(device_blocks)) is not CanSwap.OK:
            raise KvtierError(
                Reason.QUEUE_FULL,
                f"{len(device_blocks)} blocks cannot be swapped out: {can.value}",
                field="sequences",
                value=f"{len(self._free)} of {self._all} blocks are free",
            )
        block_map = {block: self._free.pop() for block in device_blocks}
        tables = {name: [block_map[block] for block in blocks] for name, blocks in sequences.items()}
        hash_bytes = self._client.namespace.hash_bytes
        swapped = Swapped(
            sequences=tables,
            block_map=block_map,
            keys={block: os.urandom(hash_bytes) for block in block_map.values()},
            counts=Counter(block for blocks in tables.values() for block in set(blocks)),
        )
        swapped._transfer = self._client.store(
            [swapped.keys[block] for block in block_map.values()],
            list(block_map),
            group=self._group,
            doorbell=doorbell,
        )
        self._swapped[swapped] = None
        return swapped

    # --- in ---

    def can_swap_in(
        self, swapped: Swapped, *, free_blocks: int, all_blocks: int, lookahead: int = 0
    ) -> CanSwap:
        """Returns whether an engine with `all_blocks` device blocks, of which `free_blocks` are free, has
        room for the group and `lookahead` more blocks, above the watermark."""
        wanted = len(swapped.counts) + lookahead
        if swapped.state is SwapState.LOST or wanted > all_blocks:
            return CanSwap.NEVER
        enough = free_blocks - wanted >= int(self._watermark * all_blocks)
        return CanSwap.OK if enough and swapped.state is SwapState.OUT else CanSwap.LATER

    def swap_in(self, swapped: Swapped, device_blocks: Sequence[int]) -> dict[str, list[int]]:
        """Brings a group that is OUT back to these device blocks, one for each of `swapped.blocks`. Returns
        the block table of each sequence.

        The blocks belong to the transfer until `poll` returns IN, LOST, or OUT, after which it may be tried
        again; unless it is IN, their content is unknown. Raises KvtierError, and changes nothing, if the
        group is not OUT or the number of blocks is wrong.
        """
        if swapped.state is not SwapState.OUT:
            raise KvtierError(
                Reason.MALFORMED, "only what is out can come in", field="swapped", value=swapped.state.value
            )
        if len(set(device_blocks)) != len(swapped.counts) or len(device_blocks) != len(swapped.counts):
            raise KvtierError(
                Reason.COUNT_MISMATCH,
                f"the group has {len(swapped.counts)} blocks: name as many, each once",
                field="device_blocks",
                value=len(device_blocks),
            )
        swapped.targets = dict(zip(swapped.blocks, device_blocks, strict=True))
        swapped.state, swapped.error, swapped._transfer = SwapState.COMING_IN, None, None
        self.poll(swapped)
        return {
            name: [swapped.targets[block] for block in table] for name, table in swapped.sequences.items()
        }

    # --- while it is out ---

    def drop(self, swapped: Swapped, sequence: str) -> None:
        """Drops one sequence of a group that is OUT, because it has ended: blocks that no other sequence has
        are free again. After the last sequence the group is forgotten, and its state is IN. Raises
        KvtierError if the group is not OUT, or does not have the sequence."""
        if sequence not in swapped.sequences:
            raise KvtierError(Reason.MALFORMED, "no sequence of this group", field="sequence", value=sequence)
        if swapped.state is not SwapState.OUT:
            raise KvtierError(
                Reason.MALFORMED, "only of what is out", field="swapped", value=swapped.state.value
            )
        for block in set(swapped.sequences.pop(sequence)):
            swapped.counts[block] -= 1
            if not swapped.counts[block]:
                del swapped.counts[block], swapped.keys[block]
                self._free.append(block)
        if not swapped.sequences:
            self._end(swapped, SwapState.IN)

    def discard(self, swapped: Swapped) -> None:
        """Drops all sequences of a group that is OUT, and so the group."""
        for sequence in list(swapped.sequences):
            self.drop(swapped, sequence)

    def tick(self) -> None:
        """Polls every group, which also renews leases. Call it every few seconds while any is out."""
        for swapped in list(self._swapped):
            self.poll(swapped)

    def poll(self, swapped: Swapped) -> SwapState:
        """Moves a group on if it can be, and returns its state. Never waits."""
        match swapped.state:
            case SwapState.GOING_OUT:
                self._go_out(swapped)
            case SwapState.OUT:
                if self._needs_lease(swapped):
                    self._hold(swapped)
            case SwapState.COMING_IN:
                self._come_in(swapped)
        return swapped.state

    # --- inside ---

    def _go_out(self, swapped: Swapped) -> None:
        assert swapped._transfer is not None
        outcome = swapped._transfer.outcome
        if outcome.state is TransferState.ACTIVE:
            return
        # A copy out may still run without harm: its blocks stay the engine's, and nothing of it is kept.
        if not outcome.done or not all(outcome.succeeded) or len(outcome.succeeded) != len(swapped.keys):
            self._end(swapped, SwapState.KEPT, outcome.error)
        elif self._hold(swapped):
            swapped.state, swapped._transfer = SwapState.OUT, None

    def _come_in(self, swapped: Swapped) -> None:
        if swapped._transfer is None:
            if self._needs_lease(swapped) and not self._hold(swapped):
                return
            assert swapped._lease is not None
            targets = [swapped.targets[block] for block in swapped._leased]
            swapped._transfer = self._client.load(swapped._lease, targets, group=self._group, keep_lease=True)
        outcome = swapped._transfer.outcome
        if outcome.state is TransferState.ACTIVE or not outcome.fenced:
            return
        swapped._transfer = None
        if outcome.done:
            self._end(swapped, SwapState.IN)
            return
        # A block whose bytes have changed is a miss from now on, so the next lookup finds that it is lost.
        swapped.state, swapped.error = SwapState.OUT, outcome.error
        self._release(swapped)

    def _needs_lease(self, swapped: Swapped) -> bool:
        lease = swapped._lease.lease if swapped._lease is not None else None
        return (
            lease is None
            or lease.epoch != self._client.epoch
            or swapped._leased != swapped.blocks
            or (swapped.state is SwapState.OUT and self._clock() - swapped._leased_s > RENEW_S)
        )

    def _hold(self, swapped: Swapped) -> bool:
        """Leases all of a group's blocks anew. Returns whether that is done; if not, the answer is on its
        way, cannot be had now, or the group has ended."""
        now_s = self._clock()
        if swapped._call is None:
            if not self._client.ready:
                error = KvtierError(Reason.NOT_ATTACHED, "the daemon does not answer: try again later")
                self._unanswered(swapped, error)
                return False
            # Give the old lease back first, on the same stream: leases are bounded, and blocks that lose one
            # become the most recent of all.
            self._release(swapped)
            swapped._called, swapped._called_s = swapped.blocks, now_s
            keys = [swapped.keys[block] for block in swapped._called]
            swapped._call = self._client.start_lookup(
                keys, group=self._group, mode=LookupMode.EXACT, lease=True
            )
        answer = swapped._call.poll()
        if answer is None:
            if now_s - swapped._called_s <= ANSWER_DEADLINE_S:
                return False
            answer = swapped._call.abandon()
        swapped._call = None
        if not answer.answered:
            self._unanswered(swapped, answer.error)
            return False
        if swapped._called != swapped.blocks:  # a sequence has ended meanwhile, so this is asked again
            answer.release()
            return False
        if answer.unleased > 0 and answer.hits + answer.unleased == len(swapped._called):
            answer.release()  # all are there, but they cannot all be held just now
            self._unanswered(swapped, answer.error)
            return False
        if answer.hits < len(swapped._called) or answer.lease is None:
            answer.release()
            lost = SwapState.KEPT if swapped.state is SwapState.GOING_OUT else SwapState.LOST
            self._end(swapped, lost, answer.error)
            return False
        swapped._lease, swapped._leased, swapped._leased_s = answer, swapped._called, now_s
        return True

    def _unanswered(self, swapped: Swapped, error: KvtierError | None) -> None:
        """Handles a daemon that does not say whether it has the blocks: nobody waits for it."""
        if swapped.state is SwapState.GOING_OUT:
            self._end(swapped, SwapState.KEPT, error)
        elif swapped.state is SwapState.COMING_IN:
            swapped.state, swapped.error = SwapState.OUT, error

    def _release(self, swapped: Swapped) -> None:
        lease, swapped._lease = swapped._lease, None
        if lease is not None:
            lease.release()

    def _end(self, swapped: Swapped, state: SwapState, error: KvtierError | None = None) -> None:
        """Ends a group: nothing of it is on the host any more, or will be found there."""
        swapped.state, swapped.error = state, error
        if swapped._call is not None:
            swapped._call.abandon().release()
            swapped._call = None
        self._release(swapped)
        self._free.extend(swapped.counts)
        swapped.counts.clear()
        swapped.keys.clear()
        del self._swapped[swapped]
