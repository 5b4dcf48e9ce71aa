"""The leases of one epoch, from the lookup that got them to the release or the load that ends them."""

from collections import deque
from enum import Enum

RELEASES_MAX = 65_536
"""Leases that wait to be released; more are left to expire."""
RELEASE_BATCH = 4_096


class _State(Enum):
    HELD = 0
    LOADING = 1
    """Named by a load that is not accepted yet, and will consume it."""
    RELEASE = 2
    """The same, and to be released if that load is refused."""


class LeaseTracker:
    """Which leases are ours, and which are to be given back."""

    def __init__(self) -> None:
        self._states: dict[int, _State] = {}
        self._releases: deque[int] = deque()

    def __len__(self) -> int:
        """Leases held or being loaded."""
        return len(self._states)

    def add(self, lease_id: int) -> None:
        """The daemon has granted it."""
        self._states[lease_id] = _State.HELD

    def held(self, lease_id: int) -> bool:
        """Whether a load may name it."""
        return self._states.get(lease_id) is _State.HELD

    def load(self, lease_id: int) -> None:
        """A load that will consume it was submitted."""
        self._states[lease_id] = _State.LOADING

    def consumed(self, lease_id: int) -> None:
        """That load was accepted."""
        self._states.pop(lease_id, None)

    def refused(self, lease_id: int) -> None:
        """That load was refused: the lease is ours again, unless it was released in the meantime."""
        state = self._states.get(lease_id)
        if state is not None:
            self._states[lease_id] = _State.HELD
        if state is _State.RELEASE:
            self.release(lease_id)

    def release(self, lease_id: int) -> None:
        """Gives it back, now or when the load that names it is refused. Idempotent."""
        state = self._states.get(lease_id)
        if state is _State.LOADING:
            self._states[lease_id] = _State.RELEASE
        elif state is _State.HELD:
            del self._states[lease_id]
            if len(self._releases) < RELEASES_MAX:
                self._releases.append(lease_id)

    @property
    def has_releases(self) -> bool:
        """Whether `take_releases` has something."""
        return bool(self._releases)

    def take_releases(self) -> list[int]:
        """Up to RELEASE_BATCH leases to tell the daemon of."""
        return [self._releases.popleft() for _ in range(min(len(self._releases), RELEASE_BATCH))]
