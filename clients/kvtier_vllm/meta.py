"""What the scheduler's side and the workers' side tell each other in each step. Plain values: they are
pickled."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtier import PartRef
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvtier_vllm.model.adapter_loads import AdapterId, AdapterLoad

LOAD_DOORBELL = 0
"""The doorbell that is rung with the step's number when the step's new blocks may be written."""
STORE_DOORBELL = 1
"""The doorbell that is rung with the step's number when what the step computes is in place."""
DOORBELLS = 2


@dataclass(frozen=True, slots=True)
class Weights:
    """Under which weights an engine's blocks are stored. If this changes, its workers attach anew."""

    life: int = 0
    """The life of the engine's instance, another one for each change; 0 as it was started."""
    private: bool = False
    """Whether the namespace is this engine's alone, because nobody knows which weights these are."""
    revision: str = ""
    """The name of the weights, if they were given one since the engine started."""
    heeded: int = 0
    """How many changes each worker had told of so far, to which this is the answer."""


AS_STARTED = Weights()


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """A load that workers follow, and report once as finished; or the next part of a load that has a rest."""

    request: str
    parts: tuple[PartRef | None, ...]
    """One part for each transfer. None means that it was refused; the request fails when the others
    are over."""
    block_ids: tuple[tuple[int, ...], ...]
    """The blocks that each transfer writes."""
    blocks_tell: bool = True
    """Whether a failure is reported by its blocks, so that what was loaded before them stays; else all of it
    counts as failed. vLLM knows blocks of one group only."""
    goes_on: bool = False
    """Whether this continues a load that an earlier order has begun. Ignored if that was reported."""
    rest: tuple[int, ...] = ()
    """Blocks that later orders of the same request will load; the request is not reported before them."""


@dataclass(frozen=True, slots=True)
class StoreOrder:
    """A store that workers follow: the requests' blocks are being read until its part is over."""

    requests: tuple[str, ...]
    part: PartRef
    block_ids: tuple[int, ...]
    """The blocks that it reads. Only a worker knows whether it copies blocks out itself, and needs them for
    that; they cost a few bytes each, once."""
    adapter: AdapterId | None = None
    """The adapter with which all of it was computed; None: without any."""


@dataclass(frozen=True, slots=True)
class AuditLoad:
    """Stored blocks, one of each group, that are loaded beside what a request computes (see `auditing`)."""

    ticket: int
    parts: tuple[PartRef | None, ...]
    """One part for each transfer; None means that it was refused."""
    block_ids: tuple[int, ...]
    """The block that each transfer writes."""


@dataclass(frozen=True, slots=True)
class AuditCompare:
    """Blocks that this step or an earlier one has computed, to be compared with what was stored, once that is
    loaded."""

    ticket: int
    blocks: tuple[tuple[int, int, int], ...]
    """For each comparison the group, the block that was loaded, and the block that was computed."""


@dataclass(slots=True)
class Orders:
    """What the workers have to do in one step."""

    loads: list[LoadOrder] = field(default_factory=list)
    stores: list[StoreOrder] = field(default_factory=list)
    revoke: list[PartRef] = field(default_factory=list)
    """Parts that nobody waits for any more: failed, refused, or of an aborted request."""
    fence: list[PartRef] = field(default_factory=list)
    """Stores whose blocks are given to other requests in this step. They are withdrawn before
    anything else."""
    held: list[str] = field(default_factory=list)
    """Finished requests whose blocks vLLM keeps until they are reported as sent."""
    audits: list[AuditLoad] = field(default_factory=list)
    """Each audit is reported once by every worker, when nothing can land in its blocks any more."""
    compares: list[AuditCompare] = field(default_factory=list)
    audits_dropped: list[int] = field(default_factory=list)
    """Tickets of audits that nobody waits for any more."""
    distrusted: list[str] = field(default_factory=list)
    """Requests whose loads must fail, because by an audit this engine computes other blocks than
    are stored."""

    @property
    def any(self) -> bool:
        """Whether there is anything to do."""
        return bool(
            self.loads
            or self.stores
            or self.revoke
            or self.fence
            or self.held
            or self.audits
            or self.compares
            or self.audits_dropped
            or self.distrusted
        )


@dataclass(slots=True)
class KvtierMetadata(KVConnectorMetadata):
    """What the workers are told in one step."""

    step: int
    """Rises by one with every step."""
    work: int = 0
    """The number of steps so far, including this one, that compute or load anything. Engines also make steps
    that do neither, as long as stores run."""
    weights: Weights = AS_STARTED
    orders: Orders | None = None
    """None, as in most steps, if there is nothing to do."""
    stopped: bool = False
    """Whether the scheduler's side was disabled. Workers end what has not started, and report what
    is open."""


@dataclass(frozen=True, slots=True)
class AuditResult:
    """What one worker has found in one audit."""

    ticket: int
    differences: tuple[tuple[int, float, str], ...] = ()
    """For each group its number, the relative error, and where it is worst. Empty if nothing was compared."""


@dataclass(frozen=True, slots=True)
class WeightsChange:
    """What one worker has been told of its weights."""

    revision: str
    """The name of the weights, or an empty text."""
    work: int
    """`KvtierMetadata.work` of the last step before the change."""
    count: int
    """How many times the weights have changed."""


@dataclass(slots=True)
class WorkerReport(KVConnectorWorkerMetadata):
    """What workers tell the scheduler's side after a step, beside what vLLM has a place for."""

    audits: list[AuditResult] = field(default_factory=list)
    weights: list[WeightsChange] = field(default_factory=list)
    """One for each worker whose weights have changed, in each step until it is answered."""
    adapters: list[AdapterLoad] = field(default_factory=list)
    """Each load of an adapter, reported once by every worker."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """Joins the reports of several workers."""
        assert isinstance(other, WorkerReport)
        return WorkerReport(
            self.audits + other.audits, self.weights + other.weights, self.adapters + other.adapters
        )
