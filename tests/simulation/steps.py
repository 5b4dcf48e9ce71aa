"""What happens next: the weights of everything that can."""

from __future__ import annotations

from collections.abc import Callable

from kvtierd.core.actions import (
    Attached,
)
from kvtierd.core.errors import Reason, Refusal
from kvtierd.core.ids import Rank, RegistrationId, SessionId, WorkerId
from kvtierd.core.stimuli import (
    EndSession,
    RegisterMemory,
    RegisterWords,
    SessionReleased,
    Tick,
    WorkerLive,
)

from tests.simulation import disk_faults, faults, uses
from tests.simulation.engine import (
    BLOCKS,
    DOORBELLS,
    KINDS,
    PART_WORDS,
    Engine,
)
from tests.simulation.nonsense import ask_nonsense
from tests.simulation.together import lookup_together
from tests.simulation.worker import FakeWorker
from tests.simulation.world import DEVICES, ENGINES, Crash, World


def attach(world: World, engine: Engine) -> None:
    """One of the engine's processes says hello."""
    process = world.random.choice(engine.missing())
    session = SessionId(next(world.sessions))
    world.of_session[session] = engine
    reply = world.try_(engine.hello(process, session))
    if isinstance(reply, Refusal):
        assert reply.reason is Reason.DRAINING, reply
        assert world.draining
        return
    assert isinstance(reply, Attached)
    assert not engine.sessions or engine.epoch == reply.epoch, "two epochs in one life"
    engine.epoch, engine.view = reply.epoch, reply.instance
    engine.sessions[process] = session


def unregistered(engine: Engine) -> list[Rank]:
    """Ranks that have attached and are to register."""
    return (
        [] if engine.view is None else [rank for rank in engine.view.missing_ranks if rank in engine.sessions]
    )


def register(world: World, engine: Engine) -> None:
    """A rank registers its words, or after them its memory."""
    rank = world.random.choice(unregistered(engine))
    session = engine.sessions[rank]
    worker = world.current[rank % DEVICES]
    if worker is None:
        dead = WorkerId(10_000 if not world.lost else world.lost[0].worker)
        world.refused(RegisterWords(session, dead, DOORBELLS, PART_WORDS), Reason.WORKER_UNAVAILABLE)
    elif world.machine.core.sessions[session].mapping is None:
        reply = world.try_(RegisterWords(session, worker.worker, DOORBELLS, PART_WORDS))
        if isinstance(reply, Refusal):
            assert reply.reason is Reason.ALREADY_REGISTERED, reply
            told = SessionReleased(worker.worker, session) in worker.outbox
            assert session in worker.mapped or told, "refused although the worker has let go"
        else:
            worker.mapped[session] = (engine, rank)
    else:
        counts = tuple(BLOCKS for _ in engine.kind.sizes)
        registration = RegistrationId(next(world.registrations))
        world.do(RegisterMemory(session, worker.worker, registration, counts, 1 << 20))


def step(world: World) -> None:
    """One thing happens, most often for the better."""
    world.now_s += world.random.random() * 0.05
    try:
        world.random.choices(list(STEPS), list(STEPS.values()))[0](world)
    except Crash:
        world.restart(crash=True)


def quiesce(world: World) -> None:
    """All engines end, all workers answer: then nothing may be left."""
    try:
        for engine in list(world.engines):
            world.end_engine(engine)
        while world.dying:
            world.do(EndSession(world.dying.pop(), "told to"))
        for worker in list(world.lost):
            world.exit_worker(worker)
        for lost in list(world.lost_disk_workers):
            disk_faults.exit_worker(world, lost)
        of_disks = [worker for worker in world.disk_workers if worker is not None]
        while not all(worker.idle() for worker in of_disks):  # the end of one's job lets another's begin
            for disk_worker in of_disks:
                disk_worker.hangs = False
                disk_worker.step(world.random, world.faults, 0.0)
                world.deliver_disk(disk_worker)
            if any(disk.finds for disk in world.machine.core.below.all):
                # What a store has found is answered once it is well, which takes time.
                world.now_s += 1.0
                world.do(Tick())
        for living in [worker for worker in world.current if worker is not None]:
            while not living.idle():
                living.step(world.random, world.faults, 0.0)
                world.deliver(living)
    except Crash:
        world.restart(crash=True)
        return
    world.idle()
    world.all_can_go()


def engine_step(world: World) -> None:
    if world.dying and world.random.random() < 0.3:
        session = world.dying.pop(world.random.randrange(len(world.dying)))
        world.do(EndSession(session, "told to"))
        return
    there = {engine.kind for engine in world.engines}
    free = [kind for kind in KINDS if kind not in there]
    if free and (not world.engines or (world.random.random() < 0.1 and len(world.engines) < ENGINES)):
        world.engines.append(Engine(world.random.choice(free)))
    engine = world.random.choice(world.engines)
    if engine.ended:
        world.engines.remove(engine)
        return
    forming = [attach] * bool(engine.missing()) + [register] * bool(unregistered(engine))
    if forming and world.random.random() < 0.8:
        world.random.choice(forming)(world, engine)
    elif engine.scheduler is not None:
        world.random.choices(list(USES), list(USES.values()))[0](world, engine)


def worker_step(world: World) -> None:
    for zombie in world.zombies:
        zombie.step(world.random, world.faults, 0.0)
    everyone = [worker for worker in world.current if worker is not None] + world.lost
    if not everyone or (None in world.current and world.random.random() < 0.2):
        _respawn(world)
        return
    worker = world.random.choice(everyone)
    for _ in range(world.random.randint(1, 4)):
        worker.step(world.random, world.faults, world.fault_rate)
    if world.random.random() < 0.7:
        world.deliver(worker)


def _respawn(world: World) -> None:
    for device, worker in enumerate(world.current):
        if worker is None:
            name = WorkerId(next(world.worker_ids))
            world.current[device] = FakeWorker(name, device, world.pool)
            world.do(WorkerLive(name, "cpu"))
            return


USES: dict[Callable[[World, Engine], None], float] = {
    uses.lookup: 16,
    lookup_together: 4,
    uses.store: 20,
    uses.load: 24,
    uses.ring: 16,
    uses.release: 2,
    uses.touch: 2,
    uses.prefetch: 2,
    uses.renew: 3,
    uses.open_page: 1,
    uses.wait: 1,
    uses.explain: 2,
    ask_nonsense: 3,
}
STEPS: dict[Callable[[World], None], float] = {
    engine_step: 32,
    worker_step: 64,
    disk_faults.worker_step: 60,
    faults.tick: 5,
    faults.pool_grows: 0.3,
    faults.engine_dies: 0.3,
    faults.cancel: 1.5,
    faults.client_revokes: 1.5,
    faults.time_jumps: 0.5,
    faults.worker_lost: 0.25,
    faults.worker_exits: 0.5,
    faults.told_again: 0.5,
    faults.part_is_silent: 0.5,
    faults.takes_memory_back: 0.4,
    faults.record_rots: 0.3,
    faults.data_rots: 0.3,
    faults.drain: 0.5,
    faults.clear: 0.2,
    faults.other_policy: 0.2,
    faults.daemon_dies: 0.1,
    faults.writers_proven: 0.3,
    disk_faults.worker_lost: 0.15,
    disk_faults.worker_exits: 1.0,
    disk_faults.worker_hangs: 0.2,
    disk_faults.breaks: 0.3,
    disk_faults.rots: 0.5,
    disk_faults.scrub: 0.3,
}
