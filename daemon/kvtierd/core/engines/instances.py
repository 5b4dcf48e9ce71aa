"""Instances: how processes attach, register and end, and how workers come and go."""

from collections import Counter
from collections.abc import Iterable
from functools import partial

from kvtierd.core import stimuli
from kvtierd.core.actions import Attached, InstanceView, ReleaseSession, SessionEnded
from kvtierd.core.blocks.namespaces import NamespaceAbout, layout_fingerprint, namespace_digest, tag_of
from kvtierd.core.engines.hello import check_hello, check_prefill, shards_of
from kvtierd.core.errors import Reason, Refusal
from kvtierd.core.ids import Epoch, Fingerprint, Rank, SessionId
from kvtierd.core.maintenance.sampling import Sampler
from kvtierd.core.state.audits import Mismatch
from kvtierd.core.state.core_state import CoreState
from kvtierd.core.state.entities import GroupPlan, Instance, Session, WorkerMapping, WorkerRecord
from kvtierd.core.state.transitions import Event, MappingState, WorkerState
from kvtierd.core.tier import Tier
from kvtierd.core.transfers.fencing import Fencing
from kvtierd.core.transfers.leases import Leases
from kvtierd.core.transfers.transfers import Transfers


class Instances:
    def __init__(
        self,
        core: CoreState,
        leases: Leases,
        transfers: Transfers,
        fencing: Fencing,
        sampler: Sampler,
        tier: Tier,
    ) -> None:
        self._core = core
        self._blocks = core.blocks
        self._leases = leases
        self._transfers = transfers
        self._fencing = fencing
        self._sampler = sampler
        self._tier = tier

    # --- attaching ---

    def attach(self, stimulus: stimuli.AttachSession) -> Attached:
        """A process joins the instance of its owner and name. The first process of an instance begins an
        epoch."""
        core = self._core
        if core.draining:
            raise Refusal(Reason.DRAINING, "the daemon is being stopped: attach when it is back")
        if stimulus.session in core.sessions:
            raise Refusal(
                Reason.SECOND_HELLO, "a session says hello once", field="session", value=stimulus.session
            )
        instance = core.names.get((stimulus.owner, stimulus.instance))
        check_hello(stimulus, instance, self._blocks.geometry)
        fingerprint = (
            layout_fingerprint(stimulus.groups) if stimuli.SessionRole.RANK in stimulus.role else None
        )
        tag, ranks = tag_of(stimulus.owner.tenant), {} if instance is None else instance.ranks
        self._blocks.domains.require_room((tag, sizes) for sizes in _sizes(stimulus, ranks))

        if instance is None:
            instance = Instance(
                name=stimulus.instance,
                owner=stimulus.owner,
                number=core.number_for(stimulus.owner, stimulus.instance),
                epoch=Epoch(next(core.epoch_ids)),
                world_size=stimulus.world_size,
                namespace_fields=stimulus.namespace_fields,
                namespace_facts=dict(stimulus.namespace_facts),
                hash_bytes=stimulus.hash_bytes,
                model=stimulus.model,
                alive_at_s=core.now_s,
                held=core.lease_budget.new_holder(tag),
                tally=core.tenants.come(tag, stimulus.owner.tenant),
            )
            core.names[instance.owner, instance.name] = core.instances[instance.epoch] = instance
        session = Session(
            session=stimulus.session,
            instance=instance,
            schedules=stimuli.SessionRole.SCHEDULER in stimulus.role,
            holds_rank=stimuli.SessionRole.RANK in stimulus.role,
            rank=stimulus.rank,
            fingerprint=fingerprint,
            groups=stimulus.groups,
        )
        core.sessions[session.session] = instance.sessions[session.session] = session
        if session.schedules:
            instance.scheduler = session
            instance.alive_at_s = core.now_s
            instance.prefill_tokens_per_s = stimulus.prefill_tokens_per_s
        if session.holds_rank:
            instance.ranks[session.rank] = session
            if len(instance.ranks) == instance.world_size:
                self._settle(instance)
        view = self._tell(instance, but=session.session)
        return Attached(instance.epoch, fingerprint, view)

    def _settle(self, instance: Instance) -> None:
        """All ranks have attached, so the namespace is known."""
        ranks = [instance.ranks[Rank(rank)] for rank in range(instance.world_size)]
        fingerprints: list[Fingerprint] = []
        for session in ranks:
            assert session.fingerprint is not None
            fingerprints.append(session.fingerprint)
        tenant = instance.owner.tenant
        digest = namespace_digest(tenant, instance.namespace_fields, instance.world_size, fingerprints)
        plans = []
        for group, sizes in enumerate(shards_of(session.groups for session in ranks)):
            space = self._blocks.spaces.of(digest, group)
            domain = self._blocks.domains.of(tag_of(tenant), sizes)
            self._blocks.spaces.users[space] += 1
            domain.users += 1
            geometry = ranks[0].groups[group]
            plans.append(
                GroupPlan(
                    space=space,
                    domain=domain,
                    block_tokens=geometry.block_tokens,
                    replicated=geometry.replicated,
                )
            )
        self._blocks.spaces.about[digest] = NamespaceAbout(
            tenant,
            instance.model,
            instance.namespace_fields,
            instance.hash_bytes,
            instance.world_size,
            tuple(fingerprints),
            ranks[0].groups,
        )
        instance.digest = digest
        instance.plans = tuple(plans)
        if (feed := self._core.feed) is not None:
            feed.follow(digest, self._blocks.spaces.about[digest], tuple(plan.space for plan in plans))

    # --- registering ---

    def register_words(self, stimulus: stimuli.RegisterWords) -> InstanceView:
        """A worker has mapped the session's words."""
        refusal = partial(Refusal, field="session", value=stimulus.session)
        session, worker = self._registering(stimulus)
        if session.mapping is not None:
            raise refusal(Reason.ALREADY_REGISTERED, "words are registered once: unregister the memory first")
        if stimulus.session in worker.mappings:
            raise refusal(
                Reason.ALREADY_REGISTERED,
                "the copy worker is still releasing what this session had registered: try again",
            )
        if stimulus.doorbells < 0 or stimulus.parts < 1:
            raise Refusal(
                Reason.MAPPING_INVALID,
                "a rank needs at least one part word",
                field="parts",
                value=f"{stimulus.doorbells} doorbells, {stimulus.parts} parts",
            )
        mapping = WorkerMapping(
            worker=worker, session=session, doorbells=stimulus.doorbells, part_words=stimulus.parts
        )
        worker.mappings[session.session] = mapping
        session.instance.mappings[mapping] = None
        session.mapping = mapping
        return self.view(session.instance)

    def register_memory(self, stimulus: stimuli.RegisterMemory) -> InstanceView:
        """The worker that has the session's words has mapped the rank's memory as well. The last rank makes
        the instance LIVE."""
        session, worker = self._registering(stimulus)
        mapping = session.mapping
        if mapping is None or mapping.worker is not worker:
            raise Refusal(
                Reason.NOT_ATTACHED,
                "register the shared words with the same copy worker before the memory",
                field="worker",
                value=stimulus.worker,
            )
        if mapping.registration is not None:
            raise Refusal(
                Reason.ALREADY_REGISTERED,
                "unregister the memory first, or attach again",
                field="registration",
                value=mapping.registration,
            )
        if len(stimulus.num_blocks) != len(session.groups) or min(stimulus.num_blocks) < 1:
            raise Refusal(
                Reason.LAYOUT_INVALID,
                f"each of the {len(session.groups)} groups has at least one block",
                field="num_blocks",
                value=stimulus.num_blocks,
            )
        mapping.registration = stimulus.registration
        mapping.num_blocks = stimulus.num_blocks
        mapping.mapped_bytes = stimulus.mapped_bytes
        session.lost = False
        instance = session.instance
        if not self._missing(instance):
            self._complete(instance)
        return self._tell(instance)

    def _registering(
        self, stimulus: stimuli.RegisterWords | stimuli.RegisterMemory
    ) -> tuple[Session, WorkerRecord]:
        session = self._core.session(stimulus.session)
        if not session.holds_rank:
            raise Refusal(
                Reason.ROLE,
                "only a session that holds a rank registers words and memory",
                field="session",
                value=stimulus.session,
            )
        worker = self._core.workers.get(stimulus.worker)
        if worker is None or worker.state is not WorkerState.LIVE or worker.serves_disk:
            raise Refusal(
                Reason.WORKER_UNAVAILABLE,
                "the copy worker was lost: register again with its successor",
                field="worker",
                value=stimulus.worker,
            )
        return session, worker

    def _complete(self, instance: Instance) -> None:
        mappings = [session.mapping for session in instance.ranks.values()]
        words = [mapping for mapping in mappings if mapping is not None]
        instance.part_words = min(mapping.part_words for mapping in words)
        instance.doorbells = min(mapping.doorbells for mapping in words)
        for group, plan in enumerate(instance.plans):
            plan.num_blocks = min(mapping.num_blocks[group] for mapping in words)
            of_device: Counter[str] = Counter()
            for mapping in words:
                of_device[mapping.worker.device] += plan.domain.sizes[plan.shard(mapping.session.rank)]
            plan.device_bytes = tuple(of_device.items())
        self._core.step(instance, Event.COMPLETE)

    def unregister_memory(self, stimulus: stimuli.UnregisterMemory) -> None:
        """The worker lets go of the session's memory and words, and the epoch's transfers are cancelled."""
        session = self._core.session(stimulus.session)
        if session.mapping is None:
            raise Refusal(
                Reason.NOT_ATTACHED,
                "this session has nothing registered",
                field="session",
                value=stimulus.session,
            )
        instance = session.instance
        self._release(session)
        if instance.live:
            self._core.step(instance, Event.BREAK)
        why = Refusal(Reason.CANCELLED, f"rank {session.rank} took its memory back")
        for transfer in list(instance.transfers.values()):
            self._transfers.cancel(transfer, why)
        self._tell(instance)

    def _release(self, session: Session) -> None:
        mapping = session.mapping
        assert mapping is not None
        self._core.step(mapping, Event.RELEASE)
        self._blocks.actions.append(ReleaseSession(mapping.worker.worker, session.session))
        session.mapping = None

    # --- ending ---

    def renew(self, stimulus: stimuli.RenewSession) -> None:
        """The scheduler's heartbeat renews its instance's leases. Heartbeats of other sessions only prove
        that they are attached."""
        session = self._core.session(stimulus.session)
        check_prefill(stimulus.prefill_tokens_per_s)
        if session.schedules:
            session.instance.alive_at_s = self._core.now_s
            if stimulus.prefill_tokens_per_s:
                session.instance.prefill_tokens_per_s = stimulus.prefill_tokens_per_s
            self._take_audits(session.instance, stimulus.audits)
            tally = self._core.tally
            tally.lookups += stimulus.index_lookups
            tally.index_lookups += stimulus.index_lookups
            tally.lookup_hashes += stimulus.index_hashes
            session.instance.tally.lookup_hashes += stimulus.index_hashes
            self._core.shadow.spared(session.instance.plans, stimulus.index_hashes)
            absent = min(stimulus.index_lookups, stimulus.index_hashes)  # the first of each prefix
            tally.missed_absent += absent
            tally.missed_beyond += stimulus.index_hashes - absent

    def _take_audits(self, instance: Instance, reports: Iterable[stimuli.AuditReport]) -> None:
        for report in reports:
            instance.audits += 1
            self._core.tally.audits += 1
            if not report.matched:
                instance.audit_mismatches += 1
                self._core.tally.audit_mismatches += 1
                if instance.digest is not None:
                    found = Mismatch(self._blocks.now, instance.name, report)
                    self._core.mismatches.add(instance.digest, found)

    def end_session(self, stimulus: stimuli.EndSession) -> None:
        """Ends the epoch. Does nothing for a session that is unknown or whose epoch has ended before."""
        session = self._core.sessions.get(stimulus.session)
        if session is None or session.instance.over:
            return
        core, instance = self._core, session.instance
        who = f"rank {session.rank}" if session.holds_rank else "the scheduler"
        why = Refusal(
            Reason.EPOCH_ENDED,
            f"{who} of this instance has ended ({stimulus.why}): attach again",
            field="epoch",
            value=instance.epoch,
        )
        core.step(instance, Event.END)
        core.tally.ended_epochs += 1
        del core.names[instance.owner, instance.name]
        core.tenants.go(tag_of(instance.owner.tenant))
        self._leases.drop_all(instance)
        for transfer in instance.transfers.values():
            self._transfers.abandon(transfer, why)
        for each in instance.sessions.values():
            if each.mapping is not None:
                self._release(each)
        for each in instance.sessions.values():
            if each is not session:
                core.notify(each.session, SessionEnded(why))
        core.may_be_over(instance)

    def session_released(self, stimulus: stimuli.SessionReleased) -> None:
        """A worker holds nothing of a session any more. The message is only counted if nobody asked for the
        release, or if the worker is lost."""
        worker = self._core.workers.get(stimulus.worker)
        mapping = None if worker is None else worker.mappings.get(stimulus.session)
        if mapping is None or mapping.state is not MappingState.RELEASING:
            self._core.tally.late_messages += 1
            return
        self._fencing.mapping_released(mapping)
        self._gone(mapping, Event.RELEASED)

    def _gone(self, mapping: WorkerMapping, event: Event) -> None:
        self._core.step(mapping, event)
        assert not mapping.parts
        instance = mapping.session.instance
        del mapping.worker.mappings[mapping.session.session], instance.mappings[mapping]
        self._core.may_be_over(instance)

    # --- workers ---

    def worker_live(self, stimulus: stimuli.WorkerLive) -> None:
        assert stimulus.worker not in self._core.workers, f"worker {stimulus.worker} came up twice"
        worker = WorkerRecord(worker=stimulus.worker, device=stimulus.device)
        self._core.workers[stimulus.worker] = worker
        self._tier.worker_live(worker)

    def worker_lost(self, stimulus: stimuli.WorkerLost) -> None:
        """The worker's parts cannot succeed, and its ranks have to register again. Nothing is fenced before
        it has exited."""
        core = self._core
        worker = core.workers.get(stimulus.worker)
        if worker is None or worker.state is not WorkerState.LIVE:
            core.tally.late_messages += 1
            return
        core.step(worker, Event.LOSE)
        why = Refusal(
            Reason.WORKER_LOST,
            f"the copy worker was lost: {stimulus.why}",
            field="worker",
            value=worker.worker,
        )
        self._sampler.worker_lost(worker)
        self._tier.worker_lost(worker, stimulus.why)
        broken: dict[Instance, None] = {}
        for mapping in worker.mappings.values():
            core.step(mapping, Event.LOSE)
        for mapping in worker.mappings.values():
            self._fencing.parts_lost(mapping, why)
            session = mapping.session
            if session.mapping is mapping:
                session.mapping = None
                session.lost = True
                broken[session.instance] = None
        for instance in broken:
            if instance.live:
                core.step(instance, Event.BREAK)
            self._tell(instance)

    def worker_exited(self, stimulus: stimuli.WorkerExited) -> None:
        """The worker's process is gone, which is the fence of everything that it had."""
        core = self._core
        worker = core.workers.get(stimulus.worker)
        if worker is None:
            core.tally.late_messages += 1
            return
        if worker.state is WorkerState.LIVE:
            self.worker_lost(stimuli.WorkerLost(stimulus.worker, "its process is gone"))
        core.step(worker, Event.EXIT)
        for mapping in list(worker.mappings.values()):
            self._fencing.parts_exited(mapping)
            self._gone(mapping, Event.EXIT)
        self._tier.worker_exited(worker)
        del core.workers[stimulus.worker]

    # --- views ---

    def tell_all(self) -> None:
        """Tells every session what its instance is like now."""
        for instance in self._core.instances.values():
            self._tell(instance)

    def view(self, instance: Instance) -> InstanceView:
        missing = self._missing(instance)
        lost = [rank for rank, session in instance.ranks.items() if session.lost]
        longest = 0 if self._tier.keeps_evicted else self._core.lease_budget.prefix_tokens(instance.plans)
        return InstanceView(not missing, missing, instance.digest, tuple(sorted(lost)), longest)

    @staticmethod
    def _missing(instance: Instance) -> tuple[Rank, ...]:
        """Ranks that have not attached, or not registered with a worker that lives."""
        ranks = (Rank(rank) for rank in range(instance.world_size))
        return tuple(
            rank for rank in ranks if rank not in instance.ranks or not instance.ranks[rank].registered
        )

    def _tell(self, instance: Instance, but: SessionId | None = None) -> InstanceView:
        view = self.view(instance)
        for session in instance.sessions:
            if session != but:
                self._core.notify(session, view)
        return view


def _sizes(stimulus: stimuli.AttachSession, ranks: dict[Rank, Session]) -> list[tuple[int, ...]]:
    """The slot sizes of each group if this hello brings the last rank, else nothing; `ranks` have attached
    already."""
    if stimuli.SessionRole.RANK not in stimulus.role or len(ranks) + 1 < stimulus.world_size:
        return []
    groups = {rank: session.groups for rank, session in ranks.items()} | {stimulus.rank: stimulus.groups}
    return shards_of(groups[Rank(rank)] for rank in range(stimulus.world_size))
