"""Requests that have to be refused, at any moment, without a trace."""

from __future__ import annotations

import numpy as np
from kvtierd.core.errors import Reason
from kvtierd.core.ids import Epoch, LeaseId, SessionId, Ticket
from kvtierd.core.stimuli import BlockQuery, LookupBlocks, Signals, Stimulus, SubmitLoad, SubmitStore

from tests.simulation.engine import BLOCKS, Engine, as_hashes
from tests.simulation.world import World

NOT_NOW = (Reason.DRAINING, Reason.INSTANCE_INCOMPLETE)
BUSY = (Reason.QUEUE_FULL, Reason.WORD_INDEX_RANGE, *NOT_NOW)
FAR_TICKET = Ticket(1 << 50)
GOOD = Signals(FAR_TICKET, 0, False)
NO_LEASE = LeaseId(1 << 40)
STRANGER = SessionId(1 << 40)

Case = tuple[Stimulus, tuple[Reason, ...]]


def ask_nonsense(world: World, engine: Engine) -> None:
    """One request that no daemon may accept; the reasons depend on what else is the matter."""
    assert engine.scheduler is not None
    keys = engine.run(0, 0, world.random.randint(1, 4))
    cases = _lookups(engine, engine.scheduler, as_hashes(keys))
    cases += _hellos(engine, engine.scheduler)
    cases += _stores(engine, engine.scheduler, as_hashes(keys))
    cases += _loads(world, engine, engine.scheduler)
    stimulus, reasons = world.random.choice(cases)
    world.refused(stimulus, *reasons)


def _lookups(engine: Engine, scheduler: SessionId, hashes: np.ndarray) -> list[Case]:
    def lookup(session: SessionId, epoch: Epoch, keys: np.ndarray) -> Stimulus:
        return LookupBlocks(session, epoch, (BlockQuery(0, keys),), True)

    cases: list[Case] = [
        (lookup(STRANGER, engine.epoch, hashes), (Reason.NOT_ATTACHED,)),
        (lookup(scheduler, Epoch(engine.epoch + 1), hashes), (Reason.WRONG_EPOCH,)),
        (lookup(scheduler, engine.epoch, np.zeros((17, 32), np.uint8)), (Reason.TOO_MANY_BLOCKS,)),
        (lookup(scheduler, engine.epoch, np.zeros((1, 31), np.uint8)), (Reason.MALFORMED,)),
    ]
    others = [session for session in engine.sessions.values() if session != scheduler]
    return cases + [(lookup(other, engine.epoch, hashes), (Reason.ROLE,)) for other in others[:1]]


def _hellos(engine: Engine, scheduler: SessionId) -> list[Case]:
    process = next(iter(engine.sessions))
    return [
        (engine.hello(process, STRANGER), (Reason.SESSION_EXISTS, Reason.DRAINING)),
        (engine.hello(process, scheduler), (Reason.SECOND_HELLO, Reason.DRAINING)),
    ]


def _stores(engine: Engine, scheduler: SessionId, hashes: np.ndarray) -> list[Case]:
    def store(signals: Signals, ids: np.ndarray, group: int = 0) -> Stimulus:
        return SubmitStore(scheduler, engine.epoch, signals, group, hashes, ids)

    ids = np.arange(len(hashes), dtype=np.uint32)
    taken = [pending.part_word for pending in engine.pending.values()]
    cases: list[Case] = [
        (store(GOOD, ids, group=99), (Reason.UNKNOWN_GROUP, *NOT_NOW)),
        (store(Signals(FAR_TICKET, 9, False), ids), (Reason.WORD_INDEX_RANGE, *NOT_NOW)),
        (store(Signals(FAR_TICKET, 0, True, 9, 1), ids), (Reason.WORD_INDEX_RANGE, *NOT_NOW)),
        (store(Signals(Ticket(0), 0, False), ids), (Reason.TICKET_ORDER, *NOT_NOW)),
        (store(Signals(Ticket(1 << 56), 0, False), ids), (Reason.TICKET_ORDER, *NOT_NOW)),
        (store(GOOD, ids + BLOCKS), (Reason.BLOCK_ID_RANGE, *BUSY)),
        (store(GOOD, ids[1:]), (Reason.COUNT_MISMATCH, *BUSY)),
    ]
    return cases + [(store(Signals(FAR_TICKET, word, False), ids), BUSY) for word in taken[:1]]


def _loads(world: World, engine: Engine, scheduler: SessionId) -> list[Case]:
    def load(lease: LeaseId, ids: np.ndarray, group: int = 0) -> Stimulus:
        return SubmitLoad(scheduler, engine.epoch, GOOD, group, lease, 0, ids, False)

    one = np.zeros(1, np.uint32)
    cases: list[Case] = [(load(NO_LEASE, one), (Reason.UNKNOWN_LEASE, *BUSY))]
    for other in world.engines:
        if other is not engine:
            cases += [
                (load(held.lease, one), (Reason.FOREIGN, Reason.UNKNOWN_LEASE, *BUSY))
                for held in other.leases[:1]
            ]
    for held in engine.leases[:1]:
        too_many = np.arange(len(held.hashes) + 1, dtype=np.uint32)
        twice = np.zeros(2, np.uint32)
        cases += [
            (
                load(held.lease, too_many, held.group),
                (Reason.COUNT_MISMATCH, Reason.TOO_MANY_BLOCKS, Reason.LEASE_EXPIRED, *BUSY),
            ),
            (load(held.lease, twice, held.group), (Reason.BLOCK_ID_DUPLICATE, Reason.LEASE_EXPIRED, *BUSY)),
            (
                load(held.lease, one + BLOCKS, held.group),
                (Reason.BLOCK_ID_RANGE, Reason.LEASE_EXPIRED, *BUSY),
            ),
        ]
        if len(engine.kind.sizes) > 1:
            cases.append(
                (load(held.lease, one, 1 - held.group), (Reason.UNKNOWN_GROUP, Reason.LEASE_EXPIRED, *BUSY))
            )
    return cases
