"""What a client knows about itself, for logs, health checks, and to find out why nothing ever hits."""

from dataclasses import dataclass
from enum import Enum


class ClientState(Enum):
    """The state of a client, which changes by itself in the background."""

    CONNECTING = "connecting"
    """There is no session: the daemon is not there, cannot be reached, or refuses us. The client tries again
    for ever, with growing pauses."""
    ATTACHED = "attached"
    """There is a session, but not all ranks of the instance have registered: all lookups miss."""
    READY = "ready"
    """Lookups, stores and loads work."""
    UNRESPONSIVE = "unresponsive"
    """The daemon has owed an answer for too long: it is treated as absent until it answers."""
    CLOSED = "closed"
    """The client was closed."""


@dataclass(slots=True)
class Counters:
    """What has happened since the client was made."""

    epochs: int = 0
    """Sessions that the daemon has welcomed."""
    epochs_lost: int = 0
    registrations: int = 0
    lookups: int = 0
    lookups_unanswered: int = 0
    """Lookups that were counted as misses without an answer: no daemon, not ready, or no answer in time."""
    lookups_local: int = 0
    """Lookups that were not sent, as the index had none of the blocks. Not in `lookups`."""
    blocks_hit: int = 0
    stores: int = 0
    loads: int = 0
    submits_refused: int = 0
    transfers_done: int = 0
    transfers_failed: int = 0
    """Transfers that failed or were cancelled, as far as the daemon reported it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientStatus:
    """A snapshot of a client's state."""

    state: ClientState
    why: str
    """Why it is not READY, in one sentence; empty if it is."""
    last_error: str
    """The last thing that went wrong with the connection or a request; empty if nothing ever did."""
    epoch: int | None
    daemon_pid: int | None
    daemon_version: str
    features: frozenset[str]
    """The daemon's features as of the last session; empty before the first."""
    pool_bytes: int
    """The size of the daemon's pool as of the last session; 0 before the first, or if it is not told."""
    prefix_tokens_max: int
    """How many tokens of a prefix fit the pool; 0 if not known, or if disks can keep longer ones."""
    boot_nonce: int
    layout_fingerprint: str
    """In hexadecimal; empty for a scheduler. Ranks share only if it and the namespace are equal."""
    namespace_digest: str
    """In hexadecimal; empty until the instance was ready once."""
    missing_ranks: tuple[int, ...]
    transfers_active: int
    leases: int
    stream_doorbells: str
    """How `ring_on` rings, and why not in a better way; empty for a client whose memory is on no GPU."""
    counters: Counters
