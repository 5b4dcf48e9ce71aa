"""The same stimuli with the native block table and with the plain-Python one: the same replies and actions.

Hypothesis chooses the stimuli; nothing is performed. Both machines are validated after each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kvtier_kernels import BlockTable as NativeTable
from kvtierd.core.actions import (
    Action,
    LookupReply,
    Notify,
    PostDiskJob,
    PostPart,
    ReleaseSession,
    Reply,
    TransferEnded,
)
from kvtierd.core.errors import Refusal
from kvtierd.core.ids import DiskId, LeaseId, PartId, SessionId, Ticket, WorkerId
from kvtierd.core.stimuli import (
    BlockQuery,
    CancelTransfers,
    ClearBlocks,
    CoreLimits,
    DiskJobFinished,
    EndSession,
    LookupBlocks,
    PartOutcome,
    PrefetchBlocks,
    ReleaseLeases,
    RetentionRequest,
    SessionReleased,
    StartScrub,
    Stimulus,
    Tick,
    TouchBlocks,
    UnregisterMemory,
    WorkerExited,
    WorkerLost,
    WriteMode,
)

from tests.oracles.block_table import BlockTable as OracleTable
from tests.unit.core.disk import DiskHost
from tests.unit.core.host import Instance, finished, keys

LIMITS = CoreLimits(transfers_max=3, leases_max=3, leased_fraction_max=0.5, terminal_kept=3)
HIT = 2
ASKS = ("look up", "prefetch", "touch")
SHAPES: tuple[Any, ...] = (((4096,),), ((4096, 4096),), ((8192, 4096), (12288, 12288)))
RETENTIONS = st.builds(
    RetentionRequest,
    st.sampled_from([0, 0, 1_000, 1 << 40]),
    st.sampled_from([0, 0, 2_000, 100_000]),
    st.booleans(),
)
HOW = st.sampled_from([(0, False), (0, True), (1, False), (60_000, False)])
"""Of a touch: milliseconds to hold, and whether it cools."""
RUNS = st.builds(
    lambda first, length: list(range(first, first + length)), st.integers(0, 40), st.integers(0, 24)
)


def plain(value: Any) -> Any:
    """Something that compares by value, arrays and refusals included."""
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.shape, value.tolist())
    if isinstance(value, Refusal):
        return (value.reason, value.field, value.value)
    if is_dataclass(value) and not isinstance(value, type):
        return (type(value).__name__, [plain(getattr(value, each.name)) for each in fields(value)])
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value


POLICY = {"job_bytes": 1 << 14, "write_queue_bytes": 1 << 16, "read_queue_bytes": 1 << 16}


class Twins(DiskHost):
    """Two machines that are told the same."""

    def __init__(self, disks: int, mode: WriteMode) -> None:
        options: dict[str, Any] = {"disks": disks, "mode": mode, "policy": POLICY, "limits": LIMITS}
        super().__init__(NativeTable, start=False, **options)
        self.other = DiskHost(OracleTable, start=False, **options)
        for disk in self.disks:
            disk.start()

    def do(self, stimulus: Stimulus) -> Reply:
        self.other.now_s = self.now_s
        reply = self._answer(super().do, stimulus)
        mirrored = self._answer(self.other.do, stimulus)
        assert plain(reply) == plain(mirrored)
        if isinstance(reply, Refusal):
            self.actions = []
            raise reply
        assert plain(self.actions) == plain(self.other.actions)
        return reply

    @staticmethod
    def _answer(do: Callable[[Stimulus], Reply], stimulus: Stimulus) -> Reply | Refusal:
        try:
            return do(stimulus)
        except Refusal as refusal:
            return refusal


class Lockstep(RuleBasedStateMachine):
    @initialize(disks=st.sampled_from([0, 1, 1, 2]), mode=st.sampled_from(WriteMode))
    def start(self, disks: int, mode: WriteMode) -> None:
        self.host = Twins(disks, mode)
        self.disk_jobs: list[PostDiskJob] = []
        self.lost_disks: list[int] = []
        self.engines: list[Instance] = []
        self.parts: dict[PartId, PostPart] = {}
        self.releases: list[ReleaseSession] = []
        self.workers: list[WorkerId] = []
        self.lost: list[WorkerId] = []
        self.leases: list[tuple[Instance, LeaseId, int]] = []
        self.tickets: list[tuple[Instance, Ticket]] = []

    def take(self, actions: list[Action]) -> None:
        """Remembers what workers have been told."""
        for action in actions:
            if isinstance(action, PostPart):
                self.parts[action.part] = action
            elif isinstance(action, PostDiskJob):
                self.disk_jobs.append(action)
            elif isinstance(action, ReleaseSession):
                self.releases.append(action)
            elif isinstance(action, Notify) and isinstance(action.event, TransferEnded):
                self.tickets = [pair for pair in self.tickets if pair[1] != action.event.ticket]

    def do(self, stimulus: Stimulus) -> Reply | Refusal:
        try:
            reply = self.host.do(stimulus)
        except Refusal as refusal:
            return refusal
        self.take(self.host.actions)
        return reply

    @precondition(lambda self: len(self.engines) < 3)
    @rule(shape=st.sampled_from(SHAPES), shared=st.booleans())
    def start_an_engine(self, shape: Any, shared: bool) -> None:
        worker = self.workers[-1] if self.workers and shared else self.host.worker()
        if worker not in self.workers:
            self.workers.append(worker)
        self.engines.append(Instance(self.host, f"engine {next(self.host.ids)}", sizes=shape, worker=worker))

    @precondition(lambda self: self.engines)
    @rule(run=RUNS, data=st.data(), lease=st.booleans(), exact=st.booleans())
    def look_up(self, run: list[int], data: st.DataObject, lease: bool, exact: bool) -> None:
        engine = data.draw(st.sampled_from(self.engines))
        group = data.draw(st.integers(0, len(engine.sizes)))
        reply = self.do(engine.lookup_of(keys(*run), lease=lease, exact=exact, group=group))
        if isinstance(reply, LookupReply) and reply.groups[0].lease is not None:
            self.leases.append((engine, reply.groups[0].lease, group))

    @precondition(lambda self: self.engines)
    @rule(
        run=RUNS, data=st.data(), lease=st.booleans(), ask=st.sampled_from(["look up", "prefetch", "touch"])
    )
    def ask_several_groups(self, run: list[int], data: st.DataObject, lease: bool, ask: str) -> None:
        engine = data.draw(st.sampled_from(self.engines))
        windows = [data.draw(st.integers(0, 3)) for _ in engine.sizes]
        queries = tuple(BlockQuery(group, keys(*run), window) for group, window in enumerate(windows))
        if ask == "touch":
            self.do(TouchBlocks(engine.scheduler, engine.epoch, queries, *data.draw(HOW)))
            return
        if ask == "prefetch":
            self.do(PrefetchBlocks(engine.scheduler, engine.epoch, queries))
            return
        host_only = data.draw(st.booleans())
        reply = self.do(LookupBlocks(engine.scheduler, engine.epoch, queries, lease, host_only))
        assert isinstance(reply, LookupReply)
        for query, answer in zip(queries, reply.groups, strict=True):
            window = query.window_blocks
            assert answer.hits == reply.groups[0].hits
            needed = answer.states[: answer.hits][-window if window else None :]
            assert (needed == HIT).all()
            if answer.lease is not None:
                self.leases.append((engine, answer.lease, query.group))

    @precondition(lambda self: self.engines)
    @rule(run=RUNS, data=st.data(), retention=RETENTIONS)
    def store(self, run: list[int], data: st.DataObject, retention: RetentionRequest) -> None:
        engine = data.draw(st.sampled_from(self.engines))
        group = data.draw(st.integers(0, len(engine.sizes) - 1))
        stimulus = engine.store_of(*run, group=group, retention=retention)
        if not isinstance(self.do(stimulus), Refusal):
            self.tickets.append((engine, stimulus.signals.ticket))

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), first=st.integers(0, 4), count=st.integers(0, 8), keep=st.booleans())
    def load(self, data: st.DataObject, first: int, count: int, keep: bool) -> None:
        engine, lease, group = data.draw(st.sampled_from(self.leases))
        stimulus = engine.load_of(lease, range(count), first=first, keep_lease=keep, group=group)
        if not isinstance(self.do(stimulus), Refusal):
            self.tickets.append((engine, stimulus.signals.ticket))

    @precondition(lambda self: self.engines)
    @rule(data=st.data(), run=RUNS, exact=st.booleans(), how=HOW)
    def touch(self, data: st.DataObject, run: list[int], exact: bool, how: tuple[int, bool]) -> None:
        engine = data.draw(st.sampled_from(self.engines))
        group = data.draw(st.integers(0, len(engine.sizes) - 1))
        queries = (BlockQuery(group, keys(*run), exact=exact),)
        self.do(TouchBlocks(engine.scheduler, engine.epoch, queries, *how))

    @precondition(lambda self: self.engines)
    @rule(data=st.data(), run=RUNS, exact=st.booleans())
    def prefetch(self, data: st.DataObject, run: list[int], exact: bool) -> None:
        engine = data.draw(st.sampled_from(self.engines))
        group = data.draw(st.integers(0, len(engine.sizes) - 1))
        queries = (BlockQuery(group, keys(*run), exact=exact),)
        self.do(PrefetchBlocks(engine.scheduler, engine.epoch, queries))

    @precondition(lambda self: self.disk_jobs)
    @rule(
        data=st.data(),
        failed=st.lists(st.integers(0, 5), max_size=2, unique=True),
        corrupt=st.booleans(),
        error=st.sampled_from(["", "", "", "input/output error"]),
    )
    def end_a_disk_job(self, data: st.DataObject, failed: list[int], corrupt: bool, error: str) -> None:
        job = self.disk_jobs.pop(data.draw(st.integers(0, len(self.disk_jobs) - 1)))
        bad = np.array([position for position in failed if position < len(job.disk_slots)], np.uint32)
        none = np.empty(0, np.uint32)
        bad, worse = (none, bad) if corrupt else (bad, none)
        self.do(DiskJobFinished(job.worker, job.job, bad, worse, error, bytes=4096, busy_s=0.01))

    @precondition(lambda self: self.host.disks)
    @rule(data=st.data(), ends=st.booleans())
    def replace_a_disk_worker(self, data: st.DataObject, ends: bool) -> None:
        disk = self.host.disks[data.draw(st.integers(0, len(self.host.disks) - 1))]
        lost = disk.worker
        self.do(WorkerLost(lost, "stuck"))
        if ends:
            self.do(WorkerExited(lost))
        else:
            self.lost.append(lost)
        disk.live()

    @precondition(lambda self: self.host.disks)
    @rule(data=st.data())
    def scrub(self, data: st.DataObject) -> None:
        self.do(StartScrub(DiskId(data.draw(st.integers(0, len(self.host.disks))))))

    @precondition(lambda self: self.engines)
    @rule(data=st.data(), run=RUNS)
    def clear(self, data: st.DataObject, run: list[int]) -> None:
        engine = data.draw(st.sampled_from(self.engines))
        instance = self.host.machine.core.instances.get(engine.epoch)
        if instance is not None:
            for plan in instance.plans:
                self.do(ClearBlocks(plan.space, keys(*run)))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        engine, lease, _ = data.draw(st.sampled_from(self.leases))
        self.do(ReleaseLeases(engine.scheduler, engine.epoch, (lease,)))

    @precondition(lambda self: self.parts)
    @rule(
        data=st.data(),
        outcome=st.sampled_from([PartOutcome.DONE] * 4 + list(PartOutcome)),
        failed=st.lists(st.integers(0, 5), max_size=2, unique=True),
        corrupt=st.booleans(),
    )
    def end_a_part(self, data: st.DataObject, outcome: PartOutcome, failed: list[int], corrupt: bool) -> None:
        post = self.parts.pop(data.draw(st.sampled_from(sorted(self.parts))))
        failed = failed if outcome is PartOutcome.FAILED else []
        self.do(
            finished(
                post.worker, post.part, outcome, failed, corrupt=corrupt and outcome is PartOutcome.FAILED
            )
        )

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        engine, ticket = data.draw(st.sampled_from(self.tickets))
        self.do(CancelTransfers(engine.scheduler, engine.epoch, (ticket,)))

    @precondition(lambda self: self.engines)
    @rule(data=st.data(), dies=st.booleans())
    def leave(self, data: st.DataObject, dies: bool) -> None:
        engine = data.draw(st.sampled_from(self.engines))
        session = data.draw(st.sampled_from(sorted(engine.sessions.values())))
        self.do(EndSession(SessionId(session), "died") if dies else UnregisterMemory(SessionId(session)))
        self.engines.remove(engine)

    @precondition(lambda self: self.releases)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        release = self.releases.pop(data.draw(st.integers(0, len(self.releases) - 1)))
        self.do(SessionReleased(release.worker, release.session))

    @precondition(lambda self: self.workers)
    @rule()
    def lose_a_worker(self) -> None:
        worker = self.workers.pop()
        self.lost.append(worker)
        self.do(WorkerLost(worker, "stuck"))

    @precondition(lambda self: self.lost)
    @rule()
    def end_a_worker(self) -> None:
        self.do(WorkerExited(self.lost.pop()))

    @rule(seconds=st.sampled_from([0.1, 11.0, 130.0, 700.0]))
    def wait(self, seconds: float) -> None:
        self.host.now_s += seconds
        self.do(Tick())

    @invariant()
    def pictures_agree(self) -> None:
        mine, other = self.host.machine.status(), self.host.other.machine.status()
        assert plain(mine) == plain(other)
        seen, seen_by_other = (
            host.machine.core.shadow.native.stats() | {"bytes": 0} for host in (self.host, self.host.other)
        )
        assert seen == seen_by_other


Lockstep.TestCase.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
TestLockstep = Lockstep.TestCase
