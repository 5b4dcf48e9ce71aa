"""Makes stimuli of clients' messages. Every message is checked completely before the core sees it.

Pure functions. Hashes stay one numpy array; where they have 32 bytes, it is a view of the message's own
bytes.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from kvtier.v1 import cache_pb2, side_pb2, types_pb2

from kvtierd.cache import DeviceRange
from kvtierd.core.errors import Reason, Refusal
from kvtierd.core.ids import HASH_BYTES_MAX, LeaseId, SessionId, Ticket
from kvtierd.core.stimuli import (
    NO_RETENTION,
    AuditReport,
    CancelTransfers,
    CoreLimits,
    LookupBlocks,
    PrefetchBlocks,
    ReleaseLeases,
    RenewSession,
    RetentionRequest,
    Signals,
    SubmitLoad,
    SubmitStore,
    TouchBlocks,
)
from kvtierd.rpc.memory_check import GroupPlace, PlanePlace
from kvtierd.rpc.queries import Caller, hashes_of, queries_of, touched_of

TICKET_MAX = 2**56 - 1
PREFILL_TOKENS_PER_S_MIN, PREFILL_TOKENS_PER_S_MAX = 1e-3, 1e9
"""The speeds that are believed of an engine; the core divides by them."""
INDEX_TOLD_MAX = 1_000_000_000
"""The most lookups, and the most hashes, that one heartbeat may report."""
AUDITS_MAX = 16
AUDIT_ERROR_MAX = 1e6
AUDIT_DETAIL_BYTES_MAX = 512
WAIT_TIMEOUT_MS_MAX = 60_000
WAIT_TICKETS_MAX = 256
"""So many that an answer about the largest transfers is below 4 MiB, which gRPC clients accept by default."""


def lookup_of(request: cache_pb2.LookupRequest, caller: Caller, limits: CoreLimits) -> LookupBlocks:
    queries = queries_of(request.queries, request.hashes, caller, limits)
    return LookupBlocks(caller.session, caller.epoch, queries, request.lease, request.host_only)


def touch_of(request: cache_pb2.TouchRequest, caller: Caller, limits: CoreLimits) -> TouchBlocks:
    if request.cold and request.hold_ms:
        raise Refusal(
            Reason.MALFORMED, "blocks that are to go first are not held: send one of the two", field="cold"
        )
    queries = touched_of(request.queries, request.hashes, caller, limits)
    return TouchBlocks(caller.session, caller.epoch, queries, request.hold_ms, request.cold)


def prefetch_of(request: cache_pb2.PrefetchRequest, caller: Caller, limits: CoreLimits) -> PrefetchBlocks:
    queries = queries_of(request.queries, request.hashes, caller, limits)
    return PrefetchBlocks(caller.session, caller.epoch, queries)


def renew_of(heartbeat: cache_pb2.Heartbeat, session: SessionId) -> RenewSession:
    """Raises Refusal MALFORMED, and then the session is not renewed."""
    for field in ("index_lookups", "index_hashes"):
        value: int = getattr(heartbeat, field)
        if value > INDEX_TOLD_MAX:
            raise Refusal(
                Reason.MALFORMED, f"at most {INDEX_TOLD_MAX} in one heartbeat", field=field, value=value
            )
    if len(heartbeat.audits) > AUDITS_MAX:
        message = f"at most {AUDITS_MAX} in one heartbeat"
        raise Refusal(Reason.MALFORMED, message, field="audits", value=len(heartbeat.audits))
    return RenewSession(
        session,
        prefill_rate(heartbeat.prefill_tokens_per_s),
        heartbeat.index_lookups,
        heartbeat.index_hashes,
        tuple(map(_audit_of, heartbeat.audits)),
    )


def _audit_of(audit: cache_pb2.Audit) -> AuditReport:
    """Raises Refusal MALFORMED."""
    for field in ("error", "threshold"):
        value: float = getattr(audit, field)
        if not 0 <= value <= AUDIT_ERROR_MAX:  # written so that NaN is refused too
            message = f"between 0 and {AUDIT_ERROR_MAX:,.0f}"
            raise Refusal(Reason.MALFORMED, message, field=f"audits.{field}", value=value)
    if not 1 <= len(audit.block_hash) <= HASH_BYTES_MAX:
        message = f"a block hash has 1 to {HASH_BYTES_MAX} bytes"
        raise Refusal(Reason.MALFORMED, message, field="audits.block_hash", value=len(audit.block_hash))
    if len(audit.detail.encode()) > AUDIT_DETAIL_BYTES_MAX or not audit.detail.isprintable():
        message = f"at most {AUDIT_DETAIL_BYTES_MAX} bytes, all printable"
        raise Refusal(Reason.MALFORMED, message, field="audits.detail", value=ascii(audit.detail))
    return AuditReport(
        audit.matched, audit.error, audit.threshold, audit.group, audit.block_hash, audit.detail
    )


def prefill_rate(tokens_per_s: float) -> float:
    """The speed that Hello and Heartbeat carry; 0 if it is not known. Raises Refusal MALFORMED for one that
    no engine can have."""
    # Written so that NaN is refused too.
    if tokens_per_s == 0 or PREFILL_TOKENS_PER_S_MIN <= tokens_per_s <= PREFILL_TOKENS_PER_S_MAX:
        return tokens_per_s
    raise Refusal(
        Reason.MALFORMED,
        f"0 if it is not known, else between {PREFILL_TOKENS_PER_S_MIN:g} and {PREFILL_TOKENS_PER_S_MAX:g}",
        field="prefill_tokens_per_s",
        value=tokens_per_s,
    )


def store_of(request: cache_pb2.StoreRequest, caller: Caller, limits: CoreLimits) -> SubmitStore:
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
    wishes = wishes_of(request.retention) if request.HasField("retention") else NO_RETENTION
    return SubmitStore(caller.session, caller.epoch, signals, request.group, hashes, block_ids, wishes)


def wishes_of(retention: cache_pb2.Retention) -> RetentionRequest:
    """Raises Refusal MALFORMED if blocks are to be held longer than they live."""
    if 0 < retention.ttl_ms < retention.hold_ms:
        raise Refusal(
            Reason.MALFORMED,
            f"blocks that are dropped after {retention.ttl_ms} ms cannot be held longer: make ttl_ms longer, "
            "or 0",
            field="retention.hold_ms",
            value=retention.hold_ms,
        )
    return RetentionRequest(retention.hold_ms, retention.ttl_ms, retention.host_only)


def load_of(request: cache_pb2.LoadRequest, caller: Caller, limits: CoreLimits) -> SubmitLoad:
    return SubmitLoad(
        session=caller.session,
        epoch=caller.epoch,
        signals=_signals(request.signals),
        group=request.group,
        lease=LeaseId(request.lease_id),
        first=request.first,
        block_ids=_block_ids(request.block_ids, limits),
        keep_lease=request.keep_lease,
    )


def release_of(request: cache_pb2.ReleaseRequest, caller: Caller, limits: CoreLimits) -> ReleaseLeases:
    leases = _bounded(request.lease_ids, limits.leases_max, "lease_ids")
    return ReleaseLeases(caller.session, caller.epoch, tuple(LeaseId(lease) for lease in leases))


def cancel_of(request: cache_pb2.CancelRequest, caller: Caller, limits: CoreLimits) -> CancelTransfers:
    tickets = _bounded(request.tickets, limits.terminal_kept + limits.transfers_max, "tickets")
    return CancelTransfers(caller.session, caller.epoch, tuple(Ticket(ticket) for ticket in tickets))


def waited_for(request: cache_pb2.WaitRequest) -> tuple[Ticket, ...]:
    return tuple(Ticket(ticket) for ticket in _bounded(request.tickets, WAIT_TICKETS_MAX, "tickets"))


def wait_timeout_s(request: cache_pb2.WaitRequest) -> float:
    if request.timeout_ms > WAIT_TIMEOUT_MS_MAX:
        raise Refusal(
            Reason.DEADLINE,
            f"wait at most {WAIT_TIMEOUT_MS_MAX} ms at a time",
            field="timeout_ms",
            value=request.timeout_ms,
        )
    return request.timeout_ms / 1000


def places_of(request: side_pb2.RegisterMemory) -> tuple[GroupPlace, ...]:
    return tuple(
        GroupPlace(
            group=group.group,
            num_blocks=group.num_blocks,
            planes=tuple(PlanePlace(plane.base_offset, plane.block_stride_bytes) for plane in group.planes),
        )
        for group in request.groups
    )


def ranges_of(request: side_pb2.RegisterMemory) -> tuple[DeviceRange, ...]:
    """Raises Refusal for a range that belongs neither to an allocation nor to chunks."""
    return tuple(_range_of(f"ranges[{index}]", part) for index, part in enumerate(request.ranges))


def _range_of(field: str, part: side_pb2.DeviceRange) -> DeviceRange:
    if part.HasField("ipc"):
        return DeviceRange(part.bytes, part.ipc.offset, part.ipc.handle, part.ipc.buffer_id)
    if part.HasField("chunks") and part.chunks.count:
        return DeviceRange(part.bytes, part.chunks.offset, chunks=part.chunks.count)
    raise Refusal(
        Reason.DEVICE_MEMORY_INVALID,
        "a range has an IPC handle, or takes one chunk at least",
        field=f"{field}.source",
        value=part.WhichOneof("source") or "none",
    )


def _signals(signals: cache_pb2.Signals) -> Signals:
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
    return Signals(
        ticket=Ticket(signals.ticket),
        part_word=signals.part_word,
        gated=signals.gate == types_pb2.GATE_DOORBELL,
        doorbell=signals.doorbell,
        doorbell_value=signals.doorbell_value,
    )


def _block_ids(ids: Sequence[int], limits: CoreLimits) -> npt.NDArray[np.uint32]:
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
