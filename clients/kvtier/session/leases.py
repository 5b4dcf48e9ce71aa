"""The leases of one epoch, from the lookup that was granted them to their release or load."""

from collections import deque
from enum import Enum

RELEASES_MAX = 65_536
"""The most leases that wait to be released; further ones expire."""
RELEASE_BATCH = 4_096


class _State(Enum):
    HELD = 0
    LOADING = 1
    """A load that will consume the lease was sent, and not accepted yet."""
    RELEASE = 2
    """As LOADING, but the lease is released if that load is refused."""


class LeaseTracker:
    """Keeps track of which leases this client has, and which are to be given back."""

    def __init__(self) -> None:
        self._states: dict[int, _State] = {}
        self._releases: deque[int] = deque()

    def __len__(self) -> int:
        """Returns the number of leases that are held or being loaded."""
        return len(self._states)

    def add(self, lease_id: int) -> None:
        """Notes that the daemon has granted the lease."""
        self._states[lease_id] = _State.HELD

    def held(self, lease_id: int) -> bool:
        """Returns whether a load may use the lease."""
        return self._states.get(lease_id) is _State.HELD

    def load(self, lease_id: int) -> None:
        """Notes that a load was submitted which will consume the lease."""
        self._states[lease_id] = _State.LOADING

    def consumed(self, lease_id: int) -> None:
        """Notes that this load was accepted."""
        self._states.pop(lease_id, None)

    def refused(self, lease_id: int) -> None:
        """Notes that this load was refused: the lease is ours again, unless it was released meanwhile."""
        state = self._states.get(lease_id)
        if state is not None:
            self._states[lease_id] = _State.HELD
        if state is _State.RELEASE:
            self.release(lease_id)

    def release(self, lease_id: int) -> None:
        """Gives the lease back, now or when the load that uses it is refused. Safe to call twice."""
        state = self._states.get(lease_id)
        if state is _State.LOADING:
            self._states[lease_id] = _State.RELEASE
        elif state is _State.HELD:
            del self._states[lease_id]
            if len(self._releases) < RELEASES_MAX:
                self._releases.append(lease_id)

    @property
    def has_releases(self) -> bool:
        """Whether there are leases to release."""
        return bool(self._releases)

    def take_releases(self) -> list[int]:
        """Takes up to RELEASE_BATCH leases that the daemon is to release."""
        return [self._releases.popleft() for _ in range(min(len(self._releases), RELEASE_BATCH))]
