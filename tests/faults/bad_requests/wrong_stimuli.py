"""Stimuli that conversion would never make: wrong dtypes, shapes and numbers, straight at the façade; and
what a side connection would ask of it at the wrong moment."""

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
from kvtierd.core.errors import Reason
from kvtierd.core.ids import Epoch, LeaseId, RegistrationId, SessionId, Ticket, WorkerId
from kvtierd.core.stimuli import (
    BlockQuery,
    CancelTransfers,
    LookupBlocks,
    PrefetchBlocks,
    RegisterMemory,
    RegisterWords,
    ReleaseLeases,
    RenewSession,
    Signals,
    Stimulus,
    SubmitLoad,
    SubmitStore,
    TouchBlocks,
    UnregisterMemory,
)

from tests.faults.bad_requests.front import LIMITS
from tests.faults.bad_requests.guest import BLOCKS, Guest

STRANGER = SessionId(1 << 60)
NO_WORKER = WorkerId(1 << 60)
BUSY = (Reason.QUEUE_FULL,)
Case = tuple[Stimulus, tuple[Reason, ...]]


def wrong_stimulus(guest: Guest, chance: Random) -> Case:
    """One, and why it is to be refused."""
    make: Callable[[Guest, Random], Case] = chance.choice((_asked, _hashes, _ids, _numbers, _registered))
    return make(guest, chance)


def _signals(guest: Guest, **changes: Any) -> Signals:
    last = guest.front.machine.core.instances[Epoch(guest.epoch)].last_ticket
    options = {"ticket": Ticket(last + 1), "part_word": guest.free_word(), "gated": False}
    return Signals(**options | changes)


def _rows(count: int) -> np.ndarray:
    return np.zeros((count, 32), np.uint8)


def _asked(guest: Guest, chance: Random) -> Case:
    """By somebody who is not there, or not in charge."""
    session, epoch = guest.scheduler.id, Epoch(guest.epoch)
    reasons: tuple[Reason, ...]
    match chance.randrange(3):
        case 0:
            session, reasons = SessionId(chance.choice((STRANGER, 0, -1, 1 << 80))), (Reason.NOT_ATTACHED,)
        case 1:
            epoch = Epoch(chance.choice((0, -1, guest.epoch + 1, guest.epoch - (1 << 64), 1 << 80)))
            reasons = (Reason.WRONG_EPOCH,)
        case _ if guest.kind.apart:
            session, reasons = guest.connections[0].id, (Reason.ROLE,)
        case _:
            return RenewSession(STRANGER), (Reason.NOT_ATTACHED,)
    ids = np.zeros(1, np.uint32)
    hashes = _rows(1)
    asked: list[Stimulus] = [
        LookupBlocks(session, epoch, (BlockQuery(0, hashes),), True),
        LookupBlocks(session, epoch, (BlockQuery(0, hashes, 1),), True),
        PrefetchBlocks(session, epoch, (BlockQuery(0, hashes),)),
        PrefetchBlocks(session, epoch, (BlockQuery(0, hashes, exact=True),)),
        TouchBlocks(session, epoch, (BlockQuery(0, hashes),)),
        TouchBlocks(session, epoch, (BlockQuery(0, hashes, exact=True),)),
        SubmitStore(session, epoch, _signals(guest), 0, hashes, ids),
        SubmitLoad(session, epoch, _signals(guest), 0, LeaseId(1), 0, ids, True),
        ReleaseLeases(session, epoch, (LeaseId(1),)),
        CancelTransfers(session, epoch, (Ticket(1),)),
    ]
    return chance.choice(asked), reasons


def _hashes(guest: Guest, chance: Random) -> Case:
    wrong: Any = chance.choice(
        (
            np.zeros((2, 31), np.uint8),
            np.zeros((2, 33), np.uint8),
            np.zeros((2, 32), np.int8),
            np.zeros((2, 32), np.uint16),
            np.zeros((2, 4), np.uint64),
            np.zeros((2, 32), np.float64),
            np.zeros((2, 32), object),
            np.zeros(64, np.uint8),
            np.zeros((2, 2, 16), np.uint8),
            np.zeros((0,), np.uint8),
            np.zeros((), np.uint8),
            np.zeros((4, 32), np.uint8)[::2],
            np.zeros((32, 4), np.uint8).T,
            np.zeros((4, 64), np.uint8)[:, :32],
            np.zeros((2, 32), np.uint8)[::-1],
        )
    )
    session, epoch = guest.scheduler.id, Epoch(guest.epoch)
    window, exact = chance.choice(((0, False), (1, False), (0, True)))
    queries = (BlockQuery(0, wrong, window, exact),)
    match chance.randrange(4):
        case 0:
            return LookupBlocks(session, epoch, queries, True), (Reason.MALFORMED,)
        case 1:
            return TouchBlocks(session, epoch, queries), (Reason.MALFORMED,)
        case 2:
            return PrefetchBlocks(session, epoch, queries), (Reason.MALFORMED,)
        case _:
            ids = np.zeros(2, np.uint32)
            return SubmitStore(session, epoch, _signals(guest), 0, wrong, ids), (Reason.MALFORMED, *BUSY)


def _ids(guest: Guest, chance: Random) -> Case:
    wrong: Any = chance.choice(
        (
            np.zeros(2, np.int32),
            np.zeros(2, np.uint64),
            np.zeros(2, np.uint8),
            np.zeros(2, np.float32),
            np.zeros(2, object),
            np.zeros((2, 1), np.uint32),
            np.zeros((1, 2), np.uint32),
            np.zeros((), np.uint32),
        )
    )
    session, epoch = guest.scheduler.id, Epoch(guest.epoch)
    if chance.random() < 0.5 or not guest.leases:
        return SubmitStore(session, epoch, _signals(guest), 0, _rows(2), wrong), (Reason.MALFORMED, *BUSY)
    held = chance.choice(guest.leases)
    stimulus = SubmitLoad(session, epoch, _signals(guest), held.group, LeaseId(held.lease), 0, wrong, False)
    return stimulus, (Reason.MALFORMED, *BUSY)


def _numbers(guest: Guest, chance: Random) -> Case:
    """Below zero, and beyond 64 bits."""
    session, epoch = guest.scheduler.id, Epoch(guest.epoch)
    ids, hashes = np.zeros(1, np.uint32), _rows(1)
    odd = chance.choice((-1, -(1 << 63), 1 << 64, 1 << 80))
    match chance.randrange(7):
        case 0:
            signals = _signals(guest, ticket=Ticket(odd))
            return SubmitStore(session, epoch, signals, 0, hashes, ids), (Reason.TICKET_ORDER,)
        case 1:
            signals = _signals(guest, part_word=odd)
            return SubmitStore(session, epoch, signals, 0, hashes, ids), (Reason.WORD_INDEX_RANGE,)
        case 2:
            signals = _signals(guest, gated=True, doorbell=odd)
            return SubmitStore(session, epoch, signals, 0, hashes, ids), (Reason.WORD_INDEX_RANGE,)
        case 3:
            return SubmitStore(session, epoch, _signals(guest), odd, hashes, ids), (Reason.UNKNOWN_GROUP,)
        case 4:
            lookup = LookupBlocks(session, epoch, (BlockQuery(odd, hashes),), True)
            return lookup, (Reason.UNKNOWN_GROUP,)
        case 5 if guest.leases:
            held = chance.choice(guest.leases)
            lease = LeaseId(held.lease)
            load = SubmitLoad(session, epoch, _signals(guest), held.group, lease, odd, ids, False)
            return load, (Reason.COUNT_MISMATCH, *BUSY)
        case _:
            load = SubmitLoad(session, epoch, _signals(guest), 0, LeaseId(odd), 0, ids, False)
            return load, (Reason.UNKNOWN_LEASE, *BUSY)


def _registered(guest: Guest, chance: Random) -> Case:
    """Memory and words at the wrong moment, or from the wrong session."""
    session, worker = guest.connections[0].id, next(iter(guest.front.workers.workers))
    counts = (BLOCKS,) * len(guest.kind.fragments)
    registration = RegistrationId(1)
    cases: list[Case] = [
        (RegisterWords(STRANGER, worker, 1, 1), (Reason.NOT_ATTACHED,)),
        (RegisterWords(session, NO_WORKER, 1, 1), (Reason.WORKER_UNAVAILABLE,)),
        (RegisterWords(session, worker, 1, 1), (Reason.ALREADY_REGISTERED,)),
        (RegisterMemory(STRANGER, worker, registration, counts, 1), (Reason.NOT_ATTACHED,)),
        (RegisterMemory(session, NO_WORKER, registration, counts, 1), (Reason.WORKER_UNAVAILABLE,)),
        (RegisterMemory(session, worker, registration, counts, 1), (Reason.ALREADY_REGISTERED,)),
        (UnregisterMemory(STRANGER), (Reason.NOT_ATTACHED,)),
        (RenewSession(STRANGER), (Reason.NOT_ATTACHED,)),
    ]
    if guest.kind.apart:
        scheduler = guest.scheduler.id
        cases += [
            (RegisterWords(scheduler, worker, 1, 1), (Reason.ROLE,)),
            (RegisterMemory(scheduler, worker, registration, counts, 1), (Reason.ROLE,)),
            (UnregisterMemory(scheduler), (Reason.NOT_ATTACHED,)),
        ]
    return chance.choice(cases)


assert LIMITS.lookup_hashes_max > 4
