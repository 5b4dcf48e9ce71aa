"""One attachment to the daemon: what its Welcome said, and what has changed since."""

from kvtier.session.index import Index
from kvtier.session.leases import LeaseTracker
from kvtier.spec import AttachSpec
from kvtier.transfers import PartWords, TransferRecord
from kvtier.v1 import cache_pb2

HEARTBEAT_MIN_S, HEARTBEAT_MAX_S = 0.05, 60.0
MESSAGE_REST_BYTES = 1_024
"""More than a message holds besides hashes and block ids. A larger one than the daemon takes would end the
stream."""
BLOCK_ID_BYTES = 5
"""The most that a 32-bit number takes in protobuf's encoding."""


class Attachment:
    """What is known from Welcome until the connection is lost. All of it belongs to one epoch."""

    def __init__(self, spec: AttachSpec, welcome: cache_pb2.Welcome, first_ticket: int, now_s: float) -> None:
        self._spec = spec
        self.welcome = welcome
        self.epoch: int = welcome.epoch
        """The instance's epoch."""
        self.instance = welcome.instance
        self.ready: bool = welcome.instance.ready
        """Whether the instance is ready."""
        self.words = PartWords(spec.parts, first_ticket)
        self.leases = LeaseTracker()
        self.transfers: dict[int, TransferRecord] = {}
        """The transfers in flight, by ticket."""
        self.heartbeat_pending = False
        self.next_heartbeat_s = now_s + self.heartbeat_interval_s
        """When `heartbeat_due` must be asked again."""
        self.index = Index(welcome.boot_nonce, spec.namespace.hash_bytes)
        self.index_wanted = spec.role.submits
        """Whether the index pages were not asked for yet, whatever the answer is."""
        self.registration: int | None = None
        """The daemon's number of the memory that is registered, as far as this client was told."""
        self.registered = not spec.role.holds_rank
        """Whether this client has nothing left to register."""
        limits, hash_bytes = welcome.limits, spec.namespace.hash_bytes
        self.lookup_hashes_max = self._fitting(limits.lookup_hashes_max, hash_bytes)
        """The number of hashes that fit one lookup."""
        self.transfer_blocks_max = self._fitting(limits.transfer_blocks_max, hash_bytes + BLOCK_ID_BYTES)
        """The number of blocks that fit one store or load."""
        self._stale_requests = False

    @property
    def heartbeat_interval_s(self) -> float:
        """The interval that the daemon asks for, kept within bounds."""
        asked_s = self.welcome.limits.heartbeat_interval_ms / 1_000
        return min(max(asked_s, HEARTBEAT_MIN_S), HEARTBEAT_MAX_S)

    def heartbeat_due(self, now_s: float) -> bool:
        """Returns whether to send a heartbeat now, and schedules the next. False while one is unanswered."""
        if now_s < self.next_heartbeat_s:
            return False
        self.next_heartbeat_s = now_s + self.heartbeat_interval_s
        due = not self.heartbeat_pending
        self.heartbeat_pending = True
        return due

    # --- index pages ---

    @property
    def wants_index(self) -> bool:
        """Whether to ask for the index pages now: once, when the instance is ready, and so its namespace is
        known."""
        return self.index_wanted and self.ready

    # --- registration ---

    def register(self, registration: int) -> None:
        """Notes that words and memory are registered. Instance events sent earlier may still ask for it."""
        self.registration = registration
        self.registered = True
        self._stale_requests = self._spec.rank in self.instance.reregister_ranks

    def withdraw(self) -> None:
        """Notes that the memory is wanted back: for those who submit, nothing is registered any more."""
        self.registered = False

    def unregister(self) -> None:
        """Notes that the daemon has given up words and memory."""
        self.registration = None
        self.registered = False

    def on_instance(self, event: cache_pb2.InstanceEvent) -> None:
        """Takes over the instance's state. The copy worker of this rank may have been lost."""
        self.instance, self.ready = event, event.ready
        if not self._spec.role.holds_rank:
            return
        if self._spec.rank not in event.reregister_ranks:
            self._stale_requests = False
        elif not self._stale_requests:
            self.registered = False

    # --- limits ---

    def _fitting(self, count_max: int, item_bytes: int) -> int:
        room_bytes = self.welcome.limits.message_bytes_max - MESSAGE_REST_BYTES
        return max(0, min(count_max, room_bytes // item_bytes))
