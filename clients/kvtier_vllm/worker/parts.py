"""One part of a transfer, as a worker of the engine follows it."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier import Client, KvtierError, PartRef, PartState


@dataclass(slots=True, eq=False)
class TrackedPart:
    """A part, and the client with which it was taken up."""

    client: Client | None
    ref: PartRef
    block_ids: tuple[int, ...]
    """The engine's blocks that it reads or writes."""
    since_s: float

    def state(self) -> PartState:
        """Returns its state; `state().over` is the fence."""
        if self.client is None:
            return PartState.LOST
        try:
            return self.client.part_state(self.ref)
        except KvtierError:  # the reference makes no sense, so nothing can have started under it
            return PartState.LOST

    def revoke(self) -> PartState:
        """Ends it if it has not started, a store even then. Returns its state afterwards."""
        if self.client is None:
            return PartState.LOST
        try:
            return self.client.revoke(self.ref)
        except KvtierError:
            return PartState.LOST
