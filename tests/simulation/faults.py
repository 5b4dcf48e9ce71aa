"""Everything that can go wrong, at any moment."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import numpy as np
from kvtierd.core.actions import ClearReply
from kvtierd.core.blocks.table import BlockFlag, BlockState
from kvtierd.core.errors import Reason
from kvtierd.core.ids import Ticket
from kvtierd.core.state.transitions import MappingState, TransferJobState
from kvtierd.core.stimuli import (
    CancelTransfers,
    ClearBlocks,
    DiskJobFinished,
    Drain,
    PartFinished,
    PoolPolicy,
    PoolPopulated,
    Reconfigure,
    Resume,
    SessionReleased,
    SlotsChecked,
    SlotsProven,
    Tick,
    UnregisterMemory,
    Verify,
    WorkerLost,
    WriteMode,
)

from tests.simulation.engine import (
    REVOKED,
    SCHEDULER,
)
from tests.simulation.worker import Told
from tests.simulation.world import DISK_POLICY, LIMITS, SAMPLED_BYTES_PER_S, World


def engine_dies(world: World) -> None:
    engine = world.some_engine(lambda engine: bool(engine.sessions))
    if engine is not None:
        world.end_engine(engine)


def cancel(world: World) -> None:
    engine = world.some_engine(lambda engine: bool(engine.pending))
    if engine is None:
        return
    ticket = world.random.choice(list(engine.pending))
    scheduler = engine.scheduler
    assert scheduler is not None
    world.note("cancel", world.machine.core.sessions[scheduler].instance.transfers[Ticket(ticket)])
    world.do(CancelTransfers(scheduler, engine.epoch, (Ticket(ticket), Ticket(1 << 55))))


def client_revokes(world: World) -> None:
    """By compare-and-swap on one rank's word; the daemon hears of it from the worker."""
    engine = world.some_engine(lambda engine: bool(engine.pending))
    if engine is None:
        return
    pending = world.random.choice(list(engine.pending.values()))
    rank = world.random.randrange(engine.kind.world)
    ticket, state = engine.words[rank][pending.part_word]
    armed = ticket < pending.ticket
    world.faults["client revokes", "armed" if armed else f"word in state {state}"] += 1
    if armed:
        engine.words[rank][pending.part_word] = (pending.ticket, REVOKED)


def clear(world: World) -> None:
    """An operator drops a namespace, or all; what is held stays, and everything is accounted for."""
    core = world.machine.core
    spaces = world.machine.clearable("")
    for space in spaces if world.random.random() < 0.3 else spaces and [world.random.choice(spaces)]:
        keys = world.machine.keys(space)
        reply = world.do(ClearBlocks(space, keys))
        assert isinstance(reply, ClearReply)
        world.outcomes["blocks cleared"] += reply.cleared_blocks
        world.outcomes["held when cleared"] += reply.held_blocks
        world.outcomes["under way when cleared"] += reply.under_way_blocks
        stay = reply.held_blocks + reply.under_way_blocks
        assert reply.cleared_blocks + stay == len(keys), "a block was forgotten, or counted twice"
        assert len(world.machine.keys(space)) == stay, "what was cleared is there, or what was held is not"
        entries = core.blocks.table.entries_of(space)
        unpinned = entries[core.blocks.table.pins(entries) == 0]
        states, flags = core.blocks.table.states(unpinned), core.blocks.table.flags(unpinned)
        below = BlockFlag.QUEUED | BlockFlag.CLEAN | BlockFlag.STORE_QUEUED | BlockFlag.STORE_CLEAN
        left = unpinned[(states == BlockState.READY) & (flags & below == 0)]
        # Evicted and stored again while a disk is still writing it, it is under way, too.
        hashes, idle = core.blocks.table.hashes(left), np.ones(len(left), np.bool_)
        for disk, own in (each for level in core.below.levels for each in level.by_disk(hashes)):
            _, on_disk = disk.blocks.table.lookup(space, np.ascontiguousarray(hashes[own]))
            idle[own] &= on_disk != BlockState.WRITING
        assert not idle.any(), "a block that nothing holds has stayed"


def time_jumps(world: World) -> None:
    jump = world.random.choice((5.0, 11.0, 25.0, 60.0))
    world.now_s += jump
    core = world.machine.core
    for transfer in core.transfers.values():
        if transfer.deadline_s <= world.now_s:
            world.note("deadline", transfer)
    if core.leases:
        world.faults["time jumps", f"{jump:g} s, leases held"] += 1
    world.do(Tick())
    assert not core.leases or jump <= LIMITS.lease_ttl_s, "a lease outlived its instance's silence"
    overdue = [transfer for transfer in core.transfers.values() if transfer.deadline_s <= world.now_s]
    assert all(transfer.state is TransferJobState.CLOSING for transfer in overdue), "a deadline passed unseen"


def pool_grows(world: World) -> None:
    """Or finds no more memory, until the next daemon asks for it again."""
    slots = world.machine.core.blocks.slots
    if not slots.extents_coming:
        return
    short = world.random.random() < 0.2
    if not short:
        world.pool.populated += world.random.randint(1, slots.extents_coming)
    complete = short or world.pool.populated == world.pool.geometry.extents
    world.faults["pool grows", "no more memory" if short else "all of it" if complete else "more memory"] += 1
    world.do(PoolPopulated(world.pool.populated, complete))


def tick(world: World) -> None:
    world.do(Tick())


def worker_lost(world: World) -> None:
    workers = [worker for worker in world.current if worker is not None]
    if not workers:
        return
    worker = world.random.choice(workers)
    sudden = world.random.random() < 0.3
    for mapping in world.machine.core.workers[worker.worker].mappings.values():
        world.faults["worker lost", f"mapping {mapping.state.name}"] += 1
        for part in mapping.parts.values():
            world.note("worker lost", part.transfer)
            world.faults["worker lost", f"part {worker.phase(part.part)}"] += 1
    world.current[worker.device] = None
    worker.lost = True
    world.lost.append(worker)
    if sudden:
        world.faults["worker exits", "without being lost"] += 1
        world.exit_worker(worker)
    else:
        world.do(WorkerLost(worker.worker, "stuck"))


def worker_exits(world: World) -> None:
    if world.lost:
        worker = world.random.choice(world.lost)
        copying = bool(worker.started)
        world.faults["worker exits", "while copying" if copying else "not copying"] += 1
        world.exit_worker(worker)


def told_again(world: World) -> None:
    if world.told:
        _repeat(world, world.random.choice(world.told))


def _repeat(world: World, message: Told | DiskJobFinished) -> None:
    if isinstance(message, SlotsChecked):
        check = world.machine.core.check
        assert check is None or check.check != message.check, "it has been answered"
    if isinstance(message, SessionReleased):
        worker = world.machine.core.workers.get(message.worker)
        mapping = None if worker is None else worker.mappings.get(message.session)
        if mapping is not None:
            return  # it would be believed: the channel between front and worker says things once
    world.late(message, "told again")


def part_is_silent(world: World) -> None:
    """A worker lets go of a session without having said how its parts ended."""
    for worker in world.current:
        if worker is None:
            continue
        for session, mapping in world.machine.core.workers[worker.worker].mappings.items():
            if mapping.state is MappingState.RELEASING and mapping.parts:
                worker.read_all()
                silent = [m for m in worker.outbox if isinstance(m, PartFinished) and m.part in mapping.parts]
                others = [m for m in worker.outbox if m not in silent]
                worker.outbox = deque(others)
                world.faults["part is silent", "session released"] += 1
                while SessionReleased(worker.worker, session) in worker.outbox:
                    world.deliver(worker)
                for message in silent:
                    world.late(message, "after its session's release")
                return


def takes_memory_back(world: World) -> None:
    engine = world.some_engine(lambda engine: bool(engine.sessions))
    if engine is None:
        return
    process, session = world.random.choice(list(engine.sessions.items()))
    known = world.machine.core.sessions[session]
    if process == SCHEDULER or known.mapping is None:
        world.refused(UnregisterMemory(session), Reason.NOT_ATTACHED)
        return
    world.faults["takes memory back", known.instance.state.name] += 1
    for transfer in known.instance.transfers.values():
        world.note("takes memory back", transfer)
    world.do(UnregisterMemory(session))


def record_rots(world: World) -> None:
    if world.pool.rot(world.random, "record"):
        world.faults["record rots", "READY"] += 1


def data_rots(world: World) -> None:
    """While the daemon runs: only one that verifies always is sure to notice before a load."""
    if world.verify is Verify.ALWAYS and world.pool.rot(world.random, "data"):
        world.faults["data rots", "while every load is verified"] += 1


def drain(world: World) -> None:
    if world.draining and world.random.random() < 0.5:
        world.faults["drain", "resumed"] += 1
        world.draining = False
        world.do(Resume())
    elif world.draining:
        world.restart()
    elif world.random.random() < 0.1:
        world.draining = True
        world.faults["drain", "transfers open" if world.machine.core.transfers else "idle"] += 1
        world.do(Drain())


def other_policy(world: World) -> None:
    """A reload has the pool go by another policy, where the table can."""
    policy = world.random.choice(list(PoolPolicy))
    if not world.ranks:
        policy = PoolPolicy.LRU
    world.faults["policy", policy.value] += 1
    world.do(
        Reconfigure(
            world.random.choice((0, SAMPLED_BYTES_PER_S)),
            replace(DISK_POLICY, mode=world.random.choice(list(WriteMode))),
            policy,
            replace(DISK_POLICY, mode=world.random.choice(list(WriteMode))),
        )
    )


def daemon_dies(world: World) -> None:
    if world.random.random() < 0.3:
        world.restart()
    else:
        world.crash_after = world.random.randrange(6)


def writers_proven(world: World) -> None:
    if world.quarantined:
        some = world.random.sample(sorted(world.quarantined), world.random.randint(1, len(world.quarantined)))
        world.zombies = []
        world.faults["writers proven gone", "all" if len(some) == len(world.quarantined) else "some"] += 1
        world.quarantined -= set(some)
        world.do(SlotsProven(np.array([*some, *some[:1]], np.uint32)))
