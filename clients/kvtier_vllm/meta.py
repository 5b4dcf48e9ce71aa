"""What the scheduler's side tells the workers' side, once per step. Plain values: they are pickled."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtier import PartRef
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvtier_vllm.model.adapter_loads import AdapterId, AdapterLoad

LOAD_DOORBELL = 0
"""Rung with the step's number when the step's new blocks may be written."""
STORE_DOORBELL = 1
"""Rung with the step's number when what the step computes is in place."""
DOORBELLS = 2


@dataclass(frozen=True, slots=True)
class Weights:
    """What an engine's blocks are stored under, as far as its weights go. Another value means that workers
    attach anew."""

    life: int = 0
    """Of the engine's instance: another one for each change. 0: as it was started."""
    private: bool = False
    """A namespace that nobody else has: nobody knows which weights these are."""
    revision: str = ""
    """Their name, if they have been given one since the engine started."""
    heeded: int = 0
    """Changes that each worker has told of so far, and that this is the answer to."""


AS_STARTED = Weights()


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """A load to follow, and to report once as finished; or more of one that has a rest."""

    request: str
    parts: tuple[PartRef | None, ...]
    """One for each transfer. None: it was refused; the request is reported as failed, when the others are
    over."""
    block_ids: tuple[tuple[int, ...], ...]
    """Where each goes."""
    blocks_tell: bool = True
    """A failure is told by its blocks, and what was loaded before them stays; else all of it counts as
    failed. vLLM knows blocks of one group only."""
    goes_on: bool = False
    """It is more of a load that an earlier order has begun; of one that was reported already, nothing."""
    rest: tuple[int, ...] = ()
    """Blocks that are to be loaded by later orders of the same request: it is not reported before them."""


@dataclass(frozen=True, slots=True)
class StoreOrder:
    """A store to follow: the requests' blocks are being read until its part is over."""

    requests: tuple[str, ...]
    part: PartRef
    block_ids: tuple[int, ...]
    """What it reads. A worker that copies its blocks out itself needs it, and only the worker knows that it
    does; a few bytes a block, once."""
    adapter: AdapterId | None = None
    """All of it was computed with this one; None: without any."""


@dataclass(frozen=True, slots=True)
class AuditLoad:
    """Stored blocks to be loaded beside what a request computes (see `auditing`), one of each group."""

    ticket: int
    parts: tuple[PartRef | None, ...]
    """None: it was refused."""
    block_ids: tuple[int, ...]
    """Where each goes."""


@dataclass(frozen=True, slots=True)
class AuditCompare:
    """What this step, or one before it, has computed is to be compared with what was stored, once that is
    loaded."""

    ticket: int
    blocks: tuple[tuple[int, int, int], ...]
    """Group, block that was loaded, block that was computed."""


@dataclass(slots=True)
class Orders:
    """What the workers have to do in one step."""

    loads: list[LoadOrder] = field(default_factory=list)
    stores: list[StoreOrder] = field(default_factory=list)
    revoke: list[PartRef] = field(default_factory=list)
    """Parts nobody waits for any more: they failed or were refused, or their request was aborted."""
    fence: list[PartRef] = field(default_factory=list)
    """Stores whose blocks are given to others in this step: withdrawn before anything of it happens."""
    held: list[str] = field(default_factory=list)
    """Finished requests whose blocks vLLM keeps until they are reported as sent."""
    audits: list[AuditLoad] = field(default_factory=list)
    """Each is reported once by every worker, when nothing can land in its blocks any more."""
    compares: list[AuditCompare] = field(default_factory=list)
    audits_dropped: list[int] = field(default_factory=list)
    """Tickets of audits nobody waits for any more."""
    distrusted: list[str] = field(default_factory=list)
    """Requests whose loads are to fail, whatever becomes of them: an audit has found that what is stored is
    not what this engine computes."""

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
    """One step."""

    step: int
    """Rises by one with every step."""
    work: int = 0
    """Steps so far, with this one, that compute or load anything. Engines take others, too, as long as stores
    run."""
    weights: Weights = AS_STARTED
    orders: Orders | None = None
    """None, as in most steps: nothing."""
    stopped: bool = False
    """The scheduler's side was disabled: end what has not started, report what is open."""


@dataclass(frozen=True, slots=True)
class AuditResult:
    """What one worker has found in one audit."""

    ticket: int
    differences: tuple[tuple[int, float, str], ...] = ()
    """For each group: its number, the relative error, and where it is worst. Empty: nothing was compared."""


@dataclass(frozen=True, slots=True)
class WeightsChange:
    """What one worker has been told of its weights."""

    revision: str
    """Their name, or nothing."""
    work: int
    """As `KvtierMetadata.work` of the last step before, with the weights of then."""
    count: int
    """So many times they have changed."""


@dataclass(slots=True)
class WorkerReport(KVConnectorWorkerMetadata):
    """What workers tell the scheduler's side after a step, beside what vLLM has words for."""

    audits: list[AuditResult] = field(default_factory=list)
    weights: list[WeightsChange] = field(default_factory=list)
    """One for each worker whose weights have changed, in each step until it is answered."""
    adapters: list[AdapterLoad] = field(default_factory=list)
    """Each once by every worker."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """Of several workers."""
        assert isinstance(other, WorkerReport)
        return WorkerReport(
            self.audits + other.audits, self.weights + other.weights, self.adapters + other.adapters
        )
