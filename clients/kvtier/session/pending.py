"""Requests that a session has sent, and that are not answered yet."""

from dataclasses import dataclass
from threading import Event

from kvtier.errors import KvtierError
from kvtier.lookups import LookupRecord
from kvtier.transfers import TransferRecord


@dataclass(slots=True, eq=False)
class HelloRecord:
    """A Hello that was sent."""

    event: Event
    welcomed: bool = False
    error: KvtierError | None = None


class HeartbeatSent:
    """Stands for a heartbeat that was sent."""


@dataclass(slots=True, eq=False)
class Submitted:
    """A store or load that the daemon has not accepted yet."""

    record: TransferRecord
    ticket: int
    lease_id: int = 0
    """The lease that it consumes when it is accepted."""


Pending = HelloRecord | LookupRecord | Submitted | HeartbeatSent
