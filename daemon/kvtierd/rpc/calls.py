"""What each call does, for the stream and for the unary services: convert, ask the façade, convert back."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from kvtier.v1 import cache_pb2, types_pb2

from kvtierd.cache import Cache
from kvtierd.core import stimuli
from kvtierd.core.actions import LookupReply, SubmitReply
from kvtierd.core.errors import Reason, Refusal
from kvtierd.core.ids import LeaseId, Ticket
from kvtierd.logs import logger
from kvtierd.rpc import replies
from kvtierd.rpc.queries import Caller, hashes_of, queries_of
from kvtierd.rpc.recording import Recording

CHAINS_NAMED = 8
"""Chains whose lengths an error names."""
TELL_EVERY_S = 60.0
"""Time between two lines of the log about leases that are too small."""
TICKET_MAX = 2**56 - 1
WAIT_TIMEOUT_MS_MAX = 60_000
WAIT_TICKETS_MAX = 256
"""So many that an answer about the largest transfers is below 4 MiB, which gRPC clients accept by default."""

log = logger(__name__)


class Calls:
    """The calls of `kvtier.v1.Cache`, except for Attach. All of them raise Refusal, and then nothing has
    changed."""

    def __init__(
        self, cache: Cache, limits: stimuli.CoreLimits, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._cache = cache
        self._limits = limits
        self._clock = clock
        self._told_s = -TELL_EVERY_S
        """When the log last said that leases are too small."""
        self.recording: Recording | None = None
        """Is told of lookups and stores that were answered."""
        self.by_body: dict[str, tuple[str, Callable[[Any, Caller], Any]]] = {
            "lookup": ("lookup", self.lookup),
            "touch": ("touch", self.touch),
            "prefetch": ("prefetch", self.prefetch),
            "store": ("submit", self.store),
            "load": ("submit", self.load),
            "release": ("release", self.release),
            "cancel": ("cancel", self.cancel),
        }
        """By a request's field in AttachRequest: the reply's field in AttachResponse, and the call."""

    def lookup(self, request: cache_pb2.LookupRequest, caller: Caller) -> cache_pb2.LookupResponse:
        stimulus = lookup_of(request, caller, self._limits)
        reply = self._cache.handle(stimulus)
        assert isinstance(reply, LookupReply)
        if reply.lease_refused is not None:
            self._tell(caller, reply.lease_refused)
        if self.recording is not None:
            self.recording.lookup(stimulus, reply)
        return replies.lookup_reply(stimulus.queries, reply)

    def _tell(self, caller: Caller, refused: Refusal) -> None:
        """Logs that blocks were there but not leased, at most once every `TELL_EVERY_S`. The core counts all
        of them."""
        now_s = self._clock()
        if now_s - self._told_s >= TELL_EVERY_S:
            self._told_s = now_s
            log.warning(
                "a lookup found more than it could lease", epoch=int(caller.epoch), why=refused.message
            )

    def touch(self, request: cache_pb2.TouchRequest, caller: Caller) -> cache_pb2.TouchResponse:
        self._cache.handle(touch_of(request, caller, self._limits))
        return cache_pb2.TouchResponse()

    def prefetch(self, request: cache_pb2.PrefetchRequest, caller: Caller) -> cache_pb2.PrefetchResponse:
        stimulus = prefetch_of(request, caller, self._limits)
        reply = self._cache.handle(stimulus)
        assert isinstance(reply, LookupReply)
        if self.recording is not None:
            self.recording.lookup(stimulus, reply)
        return replies.prefetch_reply(stimulus.queries, reply)

    def store(self, request: cache_pb2.StoreRequest, caller: Caller) -> cache_pb2.SubmitResponse:
        stimulus = store_of(request, caller, self._limits)
        reply = self._cache.handle(stimulus)
        assert isinstance(reply, SubmitReply)
        if self.recording is not None:
            self.recording.store(stimulus)
        return replies.submit_reply(self._cache.boot_nonce, reply)

    def load(self, request: cache_pb2.LoadRequest, caller: Caller) -> cache_pb2.SubmitResponse:
        reply = self._cache.handle(load_of(request, caller, self._limits))
        assert isinstance(reply, SubmitReply)
        return replies.submit_reply(self._cache.boot_nonce, reply)

    def release(self, request: cache_pb2.ReleaseRequest, caller: Caller) -> cache_pb2.ReleaseResponse:
        self.give_back(request.lease_ids, caller)
        return cache_pb2.ReleaseResponse()

    def give_back(self, lease_ids: Sequence[int], caller: Caller) -> None:
        """Gives leases back. Raises Refusal."""
        self._cache.handle(release_of(lease_ids, caller, self._limits))

    def cancel(self, request: cache_pb2.CancelRequest, caller: Caller) -> cache_pb2.CancelResponse:
        self._cache.handle(cancel_of(request, caller, self._limits))
        return cache_pb2.CancelResponse()

    async def wait(self, request: cache_pb2.WaitRequest, caller: Caller) -> cache_pb2.WaitResponse:
        tickets = tuple(map(Ticket, _bounded(request.tickets, WAIT_TICKETS_MAX, "tickets")))
        timeout_s = wait_timeout_s(request)
        ended = await self._cache.wait(caller.session, caller.epoch, tickets, timeout_s)
        events = [
            cache_pb2.TransferEvent(ticket=ticket, state=types_pb2.TRANSFER_STATE_ACTIVE)
            if event is None
            else replies.transfer_event(self._cache.boot_nonce, event)
            for ticket, event in zip(tickets, ended, strict=True)
        ]
        return cache_pb2.WaitResponse(transfers=events)


# --- stimuli from messages: pure, and each message is checked whole before the core sees one ---


def lookup_of(
    request: cache_pb2.LookupRequest, caller: Caller, limits: stimuli.CoreLimits
) -> stimuli.LookupBlocks:
    queries = queries_of(request.queries, request.hashes, caller, limits)
    return stimuli.LookupBlocks(
        caller.session, caller.epoch, queries, request.lease, request.host_only, request.again
    )


def touch_of(
    request: cache_pb2.TouchRequest, caller: Caller, limits: stimuli.CoreLimits
) -> stimuli.TouchBlocks:
    if request.cold and request.hold_ms:
        raise Refusal(
            Reason.MALFORMED, "blocks that are to go first are not held: send one of the two", field="cold"
        )
    queries = queries_of(request.queries, request.hashes, caller, limits, touched=True)
    return stimuli.TouchBlocks(caller.session, caller.epoch, queries, request.hold_ms, request.cold)


def prefetch_of(
    request: cache_pb2.PrefetchRequest, caller: Caller, limits: stimuli.CoreLimits
) -> stimuli.PrefetchBlocks:
    queries = queries_of(request.queries, request.hashes, caller, limits)
    return stimuli.PrefetchBlocks(caller.session, caller.epoch, queries)


def store_of(
    request: cache_pb2.StoreRequest, caller: Caller, limits: stimuli.CoreLimits
) -> stimuli.SubmitStore:
    hashes = hashes_of(request.hashes, caller.hash_bytes, "hashes", limits.transfer_blocks_max)
    block_ids = _block_ids(request.block_ids, limits)
    if len(block_ids) != len(hashes):
        raise Refusal(
            Reason.COUNT_MISMATCH,
            f"one block id for each of the {len(hashes)} hashes",
            field="block_ids",
            value=len(block_ids),
        )
    signals = _signals(request.signals)
    retention = retention_of(request.retention) if request.HasField("retention") else stimuli.NO_RETENTION
    chains = _chains(request.chains, len(hashes), caller.hash_bytes) if request.chains else ()
    return stimuli.SubmitStore(
        caller.session, caller.epoch, signals, request.group, hashes, block_ids, retention, chains
    )


def _chains(
    chains: Sequence[cache_pb2.Chain], blocks: int, hash_bytes: int
) -> tuple[stimuli.SubmittedChain, ...]:
    """Raises Refusal COUNT_MISMATCH or HASH_LENGTH."""
    # Their number first: otherwise a message full of chains would keep the loop busy.
    counts = [chain.blocks for chain in chains] if len(chains) <= blocks else []
    if not all(counts) or sum(counts) != blocks or not counts:
        raise Refusal(
            Reason.COUNT_MISMATCH,
            f"together, the chains have the {blocks} blocks of the store, and each has one at least",
            field="chains",
            value=", ".join(str(chain.blocks) for chain in chains[:CHAINS_NAMED]),
        )
    found = []
    for number, chain in enumerate(chains):
        previous = None
        if chain.previous_hash:
            field = f"chains[{number}].previous_hash"
            previous = hashes_of(chain.previous_hash, hash_bytes, field, 1)
        found.append(stimuli.SubmittedChain(chain.blocks, previous))
    return tuple(found)


def retention_of(retention: cache_pb2.Retention) -> stimuli.RetentionRequest:
    """Raises Refusal MALFORMED if blocks are to be held longer than they live."""
    if 0 < retention.ttl_ms < retention.hold_ms:
        raise Refusal(
            Reason.MALFORMED,
            f"blocks that are dropped after {retention.ttl_ms} ms cannot be held longer: make ttl_ms longer, "
            "or 0",
            field="retention.hold_ms",
            value=retention.hold_ms,
        )
    return stimuli.RetentionRequest(retention.hold_ms, retention.ttl_ms, retention.host_only)


def load_of(request: cache_pb2.LoadRequest, caller: Caller, limits: stimuli.CoreLimits) -> stimuli.SubmitLoad:
    return stimuli.SubmitLoad(
        session=caller.session,
        epoch=caller.epoch,
        signals=_signals(request.signals),
        group=request.group,
        lease=LeaseId(request.lease_id),
        first=request.first,
        block_ids=_block_ids(request.block_ids, limits),
        keep_lease=request.keep_lease,
    )


def release_of(lease_ids: Sequence[int], caller: Caller, limits: stimuli.CoreLimits) -> stimuli.ReleaseLeases:
    leases = _bounded(lease_ids, limits.leases_max, "lease_ids")
    return stimuli.ReleaseLeases(caller.session, caller.epoch, tuple(LeaseId(lease) for lease in leases))


def cancel_of(
    request: cache_pb2.CancelRequest, caller: Caller, limits: stimuli.CoreLimits
) -> stimuli.CancelTransfers:
    tickets = _bounded(request.tickets, limits.terminal_kept + limits.transfers_max, "tickets")
    return stimuli.CancelTransfers(caller.session, caller.epoch, tuple(Ticket(ticket) for ticket in tickets))


def wait_timeout_s(request: cache_pb2.WaitRequest) -> float:
    if request.timeout_ms > WAIT_TIMEOUT_MS_MAX:
        raise Refusal(
            Reason.DEADLINE,
            f"wait at most {WAIT_TIMEOUT_MS_MAX} ms at a time",
            field="timeout_ms",
            value=request.timeout_ms,
        )
    return request.timeout_ms / 1000


def _signals(signals: cache_pb2.Signals) -> stimuli.Signals:
    if not 0 < signals.ticket <= TICKET_MAX:
        raise Refusal(
            Reason.TICKET_ORDER,
            "tickets are above zero, below 2^56 and strictly increasing",
            field="signals.ticket",
            value=signals.ticket,
        )
    if signals.gate not in (types_pb2.GATE_NONE, types_pb2.GATE_DOORBELL):
        raise Refusal(
            Reason.MODE_UNSUPPORTED,
            "use GATE_NONE or GATE_DOORBELL",
            field="signals.gate",
            value=signals.gate,
        )
    return stimuli.Signals(
        ticket=Ticket(signals.ticket),
        part_word=signals.part_word,
        gated=signals.gate == types_pb2.GATE_DOORBELL,
        doorbell=signals.doorbell,
        doorbell_value=signals.doorbell_value,
    )


def _block_ids(ids: Sequence[int], limits: stimuli.CoreLimits) -> npt.NDArray[np.uint32]:
    bounded = _bounded(ids, limits.transfer_blocks_max, "block_ids")
    return np.fromiter(bounded, np.uint32, len(bounded))


def _bounded(values: Sequence[int], count_max: int, field: str) -> Sequence[int]:
    if len(values) > count_max:
        raise Refusal(
            Reason.TOO_MANY_BLOCKS,
            f"at most {count_max} in one call: split it",
            field=field,
            value=len(values),
        )
    return values
