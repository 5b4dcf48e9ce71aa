"""The state machine: one stimulus in, a reply and actions out."""

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from kvtierd.core import stimuli
from kvtierd.core.actions import Action, FreeSlots, Reply, TransferEnded
from kvtierd.core.blocks.blocks import STAMPS_PER_S, Blocks
from kvtierd.core.blocks.namespaces import NamespaceAbout
from kvtierd.core.blocks.recovery import recover
from kvtierd.core.blocks.slots import PoolGeometry
from kvtierd.core.blocks.table import U8, BlockTable
from kvtierd.core.blocks.tenants import Tenants, TenantShare
from kvtierd.core.disk.tier import DiskTier
from kvtierd.core.engines.instances import Instances
from kvtierd.core.errors import Reason, Refusal
from kvtierd.core.ids import Epoch, Hashes, SessionId, SpaceId, TenantTag, Ticket
from kvtierd.core.maintenance.clearing import BlockClearing
from kvtierd.core.maintenance.explain import Explained, PlaceStatus, explain, places
from kvtierd.core.maintenance.finding import find, space_of
from kvtierd.core.maintenance.sampling import Sampler, expected_detection_s
from kvtierd.core.state.core_state import Clock, CoreState, wrong_epoch
from kvtierd.core.state.entities import GroupPlan, Instance
from kvtierd.core.state.tenants_status import tenants_status
from kvtierd.core.state.transitions import WorkerState
from kvtierd.core.status import BlockCounts, CoreStatus, InstanceStatus, WorkerStatus
from kvtierd.core.tier import NoTier, Tier
from kvtierd.core.transfers.fencing import Fencing
from kvtierd.core.transfers.leases import Leases
from kvtierd.core.transfers.lookups import Lookups
from kvtierd.core.transfers.transfers import Transfers


class Machine:
    """Makes every decision about the cache of one host, and performs none.

    It has one caller, who performs the actions in order before the next stimulus. A Refusal means that
    nothing has changed. Any other exception is a bug, and the machine must not be used any more.
    """

    def __init__(
        self,
        table: BlockTable,
        clock: Clock,
        limits: stimuli.CoreLimits,
        geometry: PoolGeometry,
        *,
        populated: int | None = None,
        first_epoch: int = 1,
        integrity: stimuli.CoreIntegrity | None = None,
        disks: Sequence[tuple[BlockTable, PoolGeometry]] = (),
        disk_policy: stimuli.CoreDisks | None = None,
        store: tuple[BlockTable, PoolGeometry] | None = None,
        store_policy: stimuli.CoreDisks | None = None,
        randomness: np.random.Generator | None = None,
        shares: Mapping[str, TenantShare] | None = None,
        policy: stimuli.PoolPolicy | None = None,
        told_of: Callable[[TenantTag], bool] | None = None,
    ) -> None:
        """`table` is empty, and belongs to the machine from now on. `clock` gives monotonic seconds.
        `populated`: how many extents, from the first on, have memory already, before any `PoolPopulated`;
        None for all.

        `first_epoch` is where epochs are counted from. No earlier daemon may have issued it or any later one,
        because clients outlive daemons and tell by the epoch alone whether their leases and parts still mean
        anything.

        `disks` has, for each disk in the order of their ids, an empty table of its own and the geometry of
        its slab file. `store` has the same for a store that other hosts use as well; its id follows those of
        the disks. None of them is used before its `DiskRecovered`. `randomness` chooses what is sampled.
        `shares` has what is configured for tenants, by name. `policy` says which blocks of the host go first;
        None: as the table does it. `told_of` says whether TellOfBlocks tells of a tenant's blocks; None: of
        nobody's.
        """
        self._clock = clock
        blocks = Blocks(table, geometry, integrity, populated=populated)
        self.core = CoreState(
            blocks,
            limits,
            disk_policy=disk_policy or stimuli.CoreDisks(),
            disk_shelves=disks,
            store_policy=store_policy or stimuli.CoreDisks(),
            store_shelf=store,
            tenants=Tenants(shares or {}),
            told_of=told_of,
            epoch_ids=itertools.count(first_epoch),
        )
        """For the validator and for tests to look at; nobody else changes anything in it."""
        self._of_disks = of_disks = DiskTier(self.core)
        self.tier: Tier = of_disks if self.core.below else NoTier()
        """What is below the host, for its tests."""
        self._every_lookup = False
        if policy is not None:
            self._keep_by(policy)
        self._leases = Leases(self.core)
        self.lookups = Lookups(self.core, self._leases, self.tier)
        """For tests to look at."""
        self._transfers = Transfers(self.core, self._leases, self.tier)
        self._clearing = BlockClearing(self.core)
        self._fencing = Fencing(self.core, self._transfers, self.tier)
        self._sampler = Sampler(
            self.core, blocks.integrity.sample_bytes_per_s, randomness or np.random.default_rng(0)
        )
        self._instances = Instances(
            self.core, self._leases, self._transfers, self._fencing, self._sampler, self.tier
        )
        self._handlers: dict[type[Any], Callable[[Any], Reply]] = {
            stimuli.AttachSession: self._instances.attach,
            stimuli.RegisterWords: self._instances.register_words,
            stimuli.RegisterMemory: self._instances.register_memory,
            stimuli.UnregisterMemory: self._instances.unregister_memory,
            stimuli.EndSession: self._instances.end_session,
            stimuli.RenewSession: self._instances.renew,
            stimuli.LookupBlocks: self.lookups.lookup,
            stimuli.TouchBlocks: self.lookups.touch,
            stimuli.PrefetchBlocks: self.lookups.prefetch,
            stimuli.SubmitStore: self._transfers.submit_store,
            stimuli.SubmitLoad: self._transfers.submit_load,
            stimuli.ReleaseLeases: self._leases.release,
            stimuli.CancelTransfers: self._transfers.cancel_tickets,
            stimuli.PublishPage: self._publish_page,
            stimuli.PartFinished: self._fencing.part_finished,
            stimuli.SlotsChecked: self._sampler.checked,
            stimuli.DiskJobFinished: self._disk_job_finished,
            stimuli.PackFound: of_disks.pack_found,
            stimuli.StartScrub: of_disks.start_scrub,
            stimuli.ClearBlocks: self._clearing.clear,
            stimuli.SessionReleased: self._instances.session_released,
            stimuli.WorkerLive: self._instances.worker_live,
            stimuli.WorkerLost: self._instances.worker_lost,
            stimuli.WorkerExited: self._instances.worker_exited,
            stimuli.Recovered: self._recovered,
            stimuli.PoolPopulated: self._populated,
            stimuli.DiskRecovered: of_disks.recovered,
            stimuli.SlotsProven: self._slots_proven,
            stimuli.Drain: self._drain,
            stimuli.Resume: self._resume,
            stimuli.Reconfigure: self._reconfigure,
            stimuli.ShowLookups: self._show_lookups,
            stimuli.ShowBlocks: self._show_blocks,
            stimuli.TellAgain: self._tell_again,
            stimuli.Tick: self._tick,
        }

    def handle(self, stimulus: stimuli.Stimulus) -> tuple[Reply, list[Action]]:
        """Decides. Returns the reply, and the actions to perform, in order. Raises Refusal, and then nothing
        has changed."""
        self.core.begin(self._clock())
        reply = self._handlers[type(stimulus)](stimulus)
        return reply, self.core.blocks.actions

    # --- the pool ---

    def _recovered(self, stimulus: stimuli.Recovered) -> None:
        core = self.core
        assert not core.recovered, "recovery comes once"
        assert not core.instances, "recovery comes before any session"
        core.recovered = True
        recover(core.blocks, stimulus)
        core.shadow.begin()
        self.tier.host_recovered()

    def _populated(self, stimulus: stimuli.PoolPopulated) -> None:
        slots = self.core.blocks.slots
        slots.populated(stimulus.extents)
        self.core.shadow.resize()
        if stimulus.complete and slots.extents_coming:
            slots.no_more()
            self._instances.tell_all()  # they were told what fits the pool as it was to be

    def _slots_proven(self, stimulus: stimuli.SlotsProven) -> None:
        """Frees those of the slots that are quarantined."""
        freed = self.core.blocks.slots.release_quarantined(stimulus.slots)
        if len(freed):
            self.core.blocks.actions.append(FreeSlots(freed))

    # --- disks ---

    def _disk_job_finished(self, stimulus: stimuli.DiskJobFinished) -> None:
        if self._of_disks.job_finished(stimulus):
            self.lookups.ahead.go_on()

    # --- time ---

    def _drain(self, stimulus: stimuli.Drain) -> None:
        self.core.draining = True

    def _resume(self, stimulus: stimuli.Resume) -> None:
        self.core.draining = False

    def _reconfigure(self, stimulus: stimuli.Reconfigure) -> None:
        rate = stimulus.sample_bytes_per_s
        self._sampler.bytes_per_s = rate
        blocks = self.core.blocks
        blocks.integrity = replace(blocks.integrity, sample_bytes_per_s=rate)
        self.tier.reconfigure(stimulus.disks, stimulus.store)
        self._keep_by(stimulus.policy)

    def _keep_by(self, policy: stimuli.PoolPolicy) -> None:
        core, ranked = self.core, self.core.blocks.ranks
        core.blocks.keep_by(policy)
        for disk in core.below.all:
            disk.blocks.keep_by(policy)
        if core.blocks.ranks != ranked:
            core.shadow.begin()
        self._spare_lookups()

    def _show_lookups(self, stimulus: stimuli.ShowLookups) -> None:
        self._every_lookup = stimulus.every
        self._spare_lookups()

    def _spare_lookups(self) -> None:
        # What is learnt of reuse is learnt from lookups, also from those that find nothing.
        self.core.pages.spare(not (self.core.blocks.ranks or self._every_lookup))

    def _tick(self, stimulus: stimuli.Tick) -> None:
        self._leases.expire()
        self.core.retention.tick()
        self._transfers.cancel_overdue()
        self._sampler.tick()
        self.tier.tick()
        self.lookups.ahead.go_on()
        self.core.pages.tick()
        self.core.shadow.tick(self.core.now_s)
        if self.core.feed is not None:
            self.core.feed.tick()

    # --- index pages ---

    def _publish_page(self, stimulus: stimuli.PublishPage) -> None:
        space = self._indexed(stimulus.session, stimulus.group).space
        assert space not in self.core.pages, "a space has one page"
        self.core.pages.publish(space, stimulus.page)

    def _indexed(self, session: SessionId, group: int) -> GroupPlan:
        refusal = partial(Refusal, field="session", value=session)
        found = self.core.session(session)
        if not found.schedules:
            raise refusal(Reason.ROLE, "only the instance's scheduler session reads index pages")
        if not found.instance.plans:
            raise refusal(
                Reason.INSTANCE_INCOMPLETE,
                "the namespace is known once all ranks have attached: wait until the instance is ready",
            )
        return self.core.plan(found.instance, group)

    # --- news for routers ---

    def _show_blocks(self, stimulus: stimuli.ShowBlocks) -> None:
        assert self.core.feed is not None, "nobody is told of any blocks"
        self.core.feed.show(stimulus.namespace)

    def _tell_again(self, stimulus: stimuli.TellAgain) -> None:
        assert self.core.feed is not None, "nobody is told of any blocks"
        self.core.feed.again()

    # --- questions, which change nothing ---

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits for a tick: nothing is held or under way, and there are no disks."""
        core = self.core
        waits = core.leases or core.transfers or core.pages.filling or core.below
        return not (waits or (core.feed is not None and core.feed.busy))

    def transfer(self, session: SessionId, epoch: Epoch, ticket: Ticket) -> TransferEnded | None:
        """How a transfer of the session's instance ended; None while it is active.

        Raises Refusal NOT_ATTACHED, EPOCH_ENDED, WRONG_EPOCH, or UNKNOWN_TRANSFER for one that was never
        accepted or ended too long ago.
        """
        instance = self.core.session(session).instance
        if epoch != instance.epoch:
            raise wrong_epoch(epoch, instance)
        if ticket in instance.transfers:
            return None
        ended = instance.ended.get(ticket)
        if ended is None:
            raise Refusal(
                Reason.UNKNOWN_TRANSFER,
                f"no transfer with this ticket was accepted, or it ended more than "
                f"{self.core.limits.terminal_kept} transfers ago",
                field="tickets",
                value=ticket,
            )
        return ended

    def page_wanted(self, session: SessionId, group: int) -> tuple[SpaceId, int | None]:
        """The space whose index page an instance's scheduler may read, and for how many blocks that page
        should have room; None instead if the space has a page already. Raises Refusal ROLE,
        INSTANCE_INCOMPLETE or UNKNOWN_GROUP."""
        plan, pages = self._indexed(session, group), self.core.pages
        return plan.space, None if plan.space in pages else pages.blocks_max(plan)

    def plan_of(self, session: SessionId, group: int) -> GroupPlan:
        """Where the blocks of one group of a scheduler's instance live. Raises Refusal ROLE,
        INSTANCE_INCOMPLETE or UNKNOWN_GROUP."""
        return self._indexed(session, group)

    def explain(
        self, key: bytes, namespace: str = "", group: int | None = None, tenant: str | None = None
    ) -> Explained:
        """Says why the block of a hash can be read or not, for each namespace whose hexadecimal digest begins
        with `namespace`. With `tenant`, only its namespaces exist. Takes time for each namespace and group
        that it searches. Raises Refusal."""
        return explain(self.core, key, namespace, group, max(0, int(self._clock() * STAMPS_PER_S)), tenant)

    def space_of(self, namespace: str, group: int, tenant: str) -> tuple[SpaceId, NamespaceAbout]:
        """One group of the namespace of this tenant that has this hexadecimal digest, and what is known of
        the namespace. Raises Refusal NAMESPACE_INVALID or UNKNOWN_GROUP."""
        return space_of(self.core, namespace, group, tenant)

    def find(self, space: SpaceId, hashes: Hashes) -> U8:
        """Where the block of each hash can be read now: NOWHERE, ON_HOST or ON_DISK. Holds, promotes and
        counts nothing."""
        return find(self.core, self.tier, space, hashes)

    def clearable(self, namespace: str) -> tuple[SpaceId, ...]:
        """The spaces of the one namespace whose hexadecimal digest begins with `namespace`, or all spaces if
        it is empty. Raises Refusal NAMESPACE_INVALID."""
        return self._clearing.spaces(namespace)

    def keys(self, space: SpaceId) -> Hashes:
        """The hashes of all blocks of a space, in whatever state and tier. It searches the tables as a
        whole."""
        return self._clearing.keys(space)

    def namespaces(self, namespace: str = "", tenant: str | None = None) -> tuple[PlaceStatus, ...]:
        """How many blocks there are of each namespace whose hexadecimal digest begins with `namespace`, and
        who uses it; with `tenant`, only of its own. Takes microseconds for each."""
        return places(self.core, namespace, tenant)

    def status(self) -> CoreStatus:
        """A picture of everything. Takes time for each instance, worker and slot size, but not for each
        block."""
        core, slots = self.core, self.core.blocks.slots
        table = core.blocks.table.stats()
        sizes = core.blocks.sizes()
        used_bytes = sum(size.used_bytes for size in sizes)
        slots_drawn_from = sum(size.slots for size in sizes)
        integrity = core.blocks.integrity
        instances = tuple(_instance_status(instance) for instance in core.instances.values())
        return CoreStatus(
            leases=len(core.leases),
            leased_blocks=sum(instance.leased_blocks for instance in instances),
            lease_oldest_s=self._leases.oldest_s(self._clock()),
            transfers_active=len(core.transfers),
            blocks=BlockCounts(table["writing"], table["ready"], table["evicting"], table["capacity"]),
            used_bytes=used_bytes,
            extents=slots.extents,
            extents_free=slots.extents_free,
            quarantined_slots=len(slots.quarantined),
            corrupt_slots=len(slots.corrupt),
            integrity=integrity,
            held_blocks=core.retention.held.total(),
            held_bytes=core.retention.held_bytes,
            expected_detection_s=expected_detection_s(
                used_bytes, slots_drawn_from, integrity.sample_bytes_per_s
            ),
            sizes=sizes,
            instances=instances,
            workers=tuple(
                WorkerStatus(
                    worker=worker.worker,
                    device=worker.device,
                    lost=worker.state is WorkerState.LOST,
                    sessions=len(worker.mappings),
                    parts_open=sum(len(mapping.parts) for mapping in worker.mappings.values()),
                    mapped_bytes=sum(mapping.mapped_bytes for mapping in worker.mappings.values()),
                )
                for worker in core.workers.values()
            ),
            counters=copy.copy(core.tally),
            draining=core.draining,
            shadow=core.shadow.status(),
            disks=tuple(disk.status(self._clock()) for disk in core.below.all),
            tenants=tenants_status(core),
        )


def _instance_status(instance: Instance) -> InstanceStatus:
    return InstanceStatus(
        name=instance.name,
        owner=instance.owner,
        number=instance.number,
        epoch=instance.epoch,
        ready=instance.live,
        world_size=instance.world_size,
        model=instance.model,
        namespace=instance.digest,
        sessions=tuple(instance.sessions),
        mapped_bytes=sum(mapping.mapped_bytes for mapping in instance.mappings),
        leases=len(instance.leases),
        leased_blocks=instance.leased_blocks,
        leased_bytes=instance.leased_bytes,
        transfers_active=len(instance.transfers),
        fencing=instance.over,
        audits=instance.audits,
        audit_mismatches=instance.audit_mismatches,
    )
