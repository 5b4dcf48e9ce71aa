"""What a client knows about itself: for logs, health checks, and the question why nothing ever hits."""

from dataclasses import dataclass
from enum import Enum


class ClientState(Enum):
    """Where a client stands. It moves by itself, in the background."""

    CONNECTING = "connecting"
    """No session: the daemon is not there, not reachable, or refuses us. Tried again, with backoff, for ever.
    """
    ATTACHED = "attached"
    """In session, but not all ranks of the instance are registered: lookups miss, submits are refused."""
    READY = "ready"
    """Everything works."""
    UNRESPONSIVE = "unresponsive"
    """In session, but the daemon owes an answer for too long: treated as if it were not there until it
    speaks."""
    CLOSED = "closed"
    """By `close`."""


@dataclass(slots=True)
class Counters:
    """Since the client was made."""

    epochs: int = 0
    """Attachments that the daemon has welcomed."""
    epochs_lost: int = 0
    registrations: int = 0
    lookups: int = 0
    lookups_unanswered: int = 0
    """Counted as misses: no daemon, not ready, or no answer in time."""
    lookups_local: int = 0
    """Not among `lookups`: the daemon's index had none of the blocks, so it was not asked."""
    blocks_hit: int = 0
    stores: int = 0
    loads: int = 0
    submits_refused: int = 0
    transfers_done: int = 0
    transfers_failed: int = 0
    """Failed or cancelled, as far as the daemon reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientStatus:
    """A snapshot."""

    state: ClientState
    why: str
    """Why it is not READY, in one sentence; empty if it is."""
    last_error: str
    """The last thing that went wrong with the connection or a request; empty if nothing ever did."""
    epoch: int | None
    daemon_pid: int | None
    daemon_version: str
    features: frozenset[str]
    """What the daemon can do beside the protocol, as of the last session; empty before the first."""
    pool_bytes: int
    """Size of the daemon's pool as of the last session; 0 before the first, and if the daemon does not say.
    """
    prefix_tokens_max: int
    """Tokens of the longest prefix that the pool can hold; 0: not known, or longer ones can be kept on disks.
    """
    boot_nonce: int
    layout_fingerprint: str
    """Hex, empty for a scheduler. Ranks share blocks only under equal fingerprints and namespaces."""
    namespace_digest: str
    """Hex, empty until the instance was ready once."""
    missing_ranks: tuple[int, ...]
    transfers_active: int
    leases: int
    stream_doorbells: str
    """How `ring_on` rings, and why not better; empty for a client whose memory is on no GPU."""
    counters: Counters
