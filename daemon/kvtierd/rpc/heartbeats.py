"""What a heartbeat tells, checked whole before the core sees any of it. Pure functions."""

from kvtier.v1 import cache_pb2

from kvtierd.core.errors import Reason, Refusal
from kvtierd.core.ids import HASH_BYTES_MAX, SessionId
from kvtierd.core.stimuli import AuditReport, RenewSession

PREFILL_TOKENS_PER_S_MIN, PREFILL_TOKENS_PER_S_MAX = 1e-3, 1e9
"""The speeds that are believed of an engine; the core divides by them."""
INDEX_TOLD_MAX = 1_000_000_000
"""The most lookups, and the most hashes, that one heartbeat may report."""
AUDITS_MAX = 16
AUDIT_ERROR_MAX = 1e6
AUDIT_DETAIL_BYTES_MAX = 512


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
