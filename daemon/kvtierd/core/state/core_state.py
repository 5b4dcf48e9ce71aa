"""Everything that the core knows besides blocks, in one place that its packages share."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field

from kvtierd.core.actions import InstanceView, Notify, SessionEnded, TransferEnded
from kvtierd.core.blocks.blocks import STAMPS_PER_S, Blocks
from kvtierd.core.blocks.eviction import Eviction
from kvtierd.core.blocks.lease_budget import LeaseBudget
from kvtierd.core.blocks.retention import BlockRetention
from kvtierd.core.blocks.slots import PoolGeometry
from kvtierd.core.blocks.table import BlockTable
from kvtierd.core.blocks.tenants import Tenants
from kvtierd.core.errors import Reason, Refusal
from kvtierd.core.ids import Epoch, LeaseId, PartId, SessionId, TenantTag, TransferNumber, WorkerId
from kvtierd.core.state import entities
from kvtierd.core.state.audits import Mismatches
from kvtierd.core.state.below import Below
from kvtierd.core.state.disks import Level
from kvtierd.core.state.feed import BlockFeed
from kvtierd.core.state.pages import IndexPages
from kvtierd.core.state.size_shadow import SizeShadow
from kvtierd.core.state.transitions import Entity, Event, Transitions
from kvtierd.core.status import Tally
from kvtierd.core.stimuli import CoreDisks, CoreLimits, Owner

Clock = Callable[[], float]
"""Returns monotonic seconds."""


@dataclass(slots=True)
class UnderWay:
    """Transfers that have not ended."""

    transfers: int = 0
    blocks: int = 0

    def add(self, blocks: int) -> None:
        self.transfers += 1
        self.blocks += blocks

    def remove(self, blocks: int) -> bool:
        """Undoes an `add`. True if none is left."""
        self.transfers -= 1
        self.blocks -= blocks
        return self.transfers == 0


NOTHING_UNDER_WAY = UnderWay()


@dataclass(slots=True, eq=False)
class CoreState:
    """The state of the core: its entities by id, its limits, and what finds room for blocks."""

    blocks: Blocks
    """The host's blocks."""
    limits: CoreLimits
    disk_policy: CoreDisks = field(default_factory=CoreDisks)
    disk_shelves: InitVar[Sequence[tuple[BlockTable, PoolGeometry]]] = ()
    """For each disk an empty table of its own, and where its slots lie."""
    store_policy: CoreDisks = field(default_factory=CoreDisks)
    store_shelf: InitVar[tuple[BlockTable, PoolGeometry] | None] = None
    """The same for the store; None without one."""
    tenants: Tenants = field(default_factory=lambda: Tenants({}))
    below: Below = field(init=False)
    pages: IndexPages = field(init=False)
    told_of: InitVar[Callable[[TenantTag], bool] | None] = None
    """Whether blocks of a tenant are told of to routers; None if nobody is told of any."""
    feed: BlockFeed | None = field(init=False)
    shadow: SizeShadow = field(init=False)
    tally: Tally = field(default_factory=Tally)
    transitions: Transitions = field(default_factory=Transitions)
    eviction: Eviction = field(init=False)
    retention: BlockRetention = field(init=False)
    lease_budget: LeaseBudget = field(init=False)
    now_s: float = 0.0
    """The time of the stimulus that is being handled."""
    draining: bool = False
    recovered: bool = False
    workers: dict[WorkerId, entities.WorkerRecord] = field(default_factory=dict)
    sessions: dict[SessionId, entities.Session] = field(default_factory=dict)
    """Sessions, kept until their instance is GONE."""
    instances: dict[Epoch, entities.Instance] = field(default_factory=dict)
    """All instances that are not GONE."""
    names: dict[tuple[Owner, str], entities.Instance] = field(default_factory=dict)
    """Instances that have not ended, by owner and name."""
    leases: dict[LeaseId, entities.LeaseGrant] = field(default_factory=dict)
    transfers: dict[TransferNumber, entities.TransferJob] = field(default_factory=dict)
    """Transfers that are ACTIVE or CLOSING."""
    under_way: defaultdict[str, UnderWay] = field(default_factory=lambda: defaultdict(UnderWay))
    """How much of the transfers is of each tenant."""
    deadlines: dict[TransferNumber, entities.TransferJob] = field(default_factory=dict)
    """Those of the transfers that have not been asked to end, oldest first."""
    parts: dict[PartId, entities.TransferPart] = field(default_factory=dict)
    """Parts that are open."""
    mismatches: Mismatches = field(default_factory=Mismatches)
    check: entities.Check | None = None
    """The check that is under way, if any."""
    epoch_ids: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))
    lease_ids: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))
    transfer_ids: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))
    part_ids: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))

    def __post_init__(
        self,
        disk_shelves: Sequence[tuple[BlockTable, PoolGeometry]],
        store_shelf: tuple[BlockTable, PoolGeometry] | None,
        told_of: Callable[[TenantTag], bool] | None,
    ) -> None:
        self.retention = BlockRetention(self.blocks, self.tally, self.limits)
        self.eviction = Eviction(self.blocks, self.tally, self.tenants, self.retention)
        self.lease_budget = LeaseBudget(
            self.blocks.table, self.blocks.slots, self.limits.leased_fraction_max, self.tenants
        )
        levels = []
        if disk_shelves:
            levels.append(Level(self.blocks, self.disk_policy, disk_shelves, self.tenants))
        if store_shelf is not None:
            first = len(disk_shelves)
            levels.append(
                Level(self.blocks, self.store_policy, [store_shelf], self.tenants, first=first, shared=True)
            )
        self.below = Below(self.blocks, self.tally, levels)
        self.pages = IndexPages(self.blocks, self.below)
        self.feed = None if told_of is None else BlockFeed(self.blocks, self.below, told_of)
        self.shadow = SizeShadow(self.blocks)

    def begin(self, now_s: float) -> None:
        """Starts a stimulus: sets the time, and empties the list of actions."""
        self.now_s = now_s
        self.blocks.now = max(0, int(now_s * STAMPS_PER_S))
        self.blocks.actions = []
        self.below.begin()

    def step(self, entity: Entity, event: Event) -> None:
        self.transitions.step(entity, event)

    def notify(self, session: SessionId, event: TransferEnded | InstanceView | SessionEnded) -> None:
        self.blocks.actions.append(Notify(session, event))

    # --- who may ask ---

    def session(self, session: SessionId) -> entities.Session:
        """A session whose epoch has not ended. Raises Refusal NOT_ATTACHED or EPOCH_ENDED."""
        found = self.sessions.get(session)
        if found is None:
            raise Refusal(
                Reason.NOT_ATTACHED,
                "this session is not attached: attach first",
                field="session",
                value=session,
            )
        if found.instance.over:
            raise Refusal(
                Reason.EPOCH_ENDED,
                "another process of this instance has ended, and the epoch with it: attach again",
                field="epoch",
                value=found.instance.epoch,
            )
        return found

    def submitter(self, session: SessionId, epoch: Epoch) -> entities.Instance:
        """The instance for which this session schedules. Raises Refusal NOT_ATTACHED, EPOCH_ENDED,
        WRONG_EPOCH or ROLE."""
        found = self.session(session)
        instance = found.instance
        if epoch != instance.epoch:
            raise wrong_epoch(epoch, instance)
        if not found.schedules:
            raise Refusal(
                Reason.ROLE,
                "only the instance's scheduler session looks up, submits, releases and cancels",
                field="session",
                value=session,
            )
        return instance

    def plan(self, instance: entities.Instance, group: int) -> entities.GroupPlan:
        """The plan of one group of a LIVE instance. Raises Refusal UNKNOWN_GROUP."""
        if not 0 <= group < len(instance.plans):
            raise Refusal(
                Reason.UNKNOWN_GROUP,
                f"this instance has groups 0 to {len(instance.plans) - 1}",
                field="group",
                value=group,
            )
        return instance.plans[group]

    def number_for(self, owner: Owner, name: str) -> int:
        """The number of a new instance of this owner and name: that of an ending one with the same, or else
        the lowest from 1 that no instance has."""
        taken = {instance.number for instance in self.instances.values()}
        for instance in self.instances.values():
            if (instance.owner, instance.name) == (owner, name):
                return instance.number
        return next(number for number in itertools.count(1) if number not in taken)

    def may_be_over(self, instance: entities.Instance) -> None:
        """Forgets an ended instance once no worker holds anything of it."""
        if not instance.over or instance.mappings:
            return
        assert not instance.transfers, "a transfer outlived all mappings"
        self.step(instance, Event.FENCED)
        del self.instances[instance.epoch]
        for session in instance.sessions:
            del self.sessions[session]
        for plan in instance.plans:
            if self.blocks.spaces.leave(plan.space):
                self.pages.retire(plan.space)
            plan.domain.users -= 1
            self.blocks.domains.forget_idle(plan.domain)


def wrong_epoch(epoch: Epoch, instance: entities.Instance) -> Refusal:
    return Refusal(
        Reason.WRONG_EPOCH,
        f"the instance's epoch is {instance.epoch}: this belongs to one that is over",
        field="epoch",
        value=epoch,
    )
