"""Copy workers: take packets in order, copy in two visible steps, and go on copying after the front has lost
them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import numpy as np
from kvtierd.core.actions import CheckSlots, Direction, PostPart, ReleaseSession, RevokePart
from kvtierd.core.ids import PartId, SessionId, WorkerId
from kvtierd.core.stimuli import PartFinished, PartOutcome, SessionReleased, SlotsChecked

from tests.simulation.engine import DONE, FAILED, REVOKED, STARTED, Engine
from tests.simulation.pool import READY, TORN, WRITING, FakePool

NONE = np.empty(0, np.uint32)

Told = PartFinished | SessionReleased | SlotsChecked


@dataclass(slots=True, eq=False)
class Job:
    """One part, as the worker has it."""

    post: PostPart
    generations: list[int]
    engine: Engine
    rank: int

    @property
    def word(self) -> tuple[int, int]:
        return self.engine.words[self.rank][self.post.signals.part_word]

    @word.setter
    def word(self, word: tuple[int, int]) -> None:
        self.engine.words[self.rank][self.post.signals.part_word] = word


class FakeWorker:
    """One copy worker process. The pool and the engines' memory hold it to its promises, and the core to its
    own."""

    def __init__(self, worker: WorkerId, device: int, pool: FakePool) -> None:
        self.worker = worker
        self.device = device
        self.pool = pool
        self.lost = False
        self.mapped: dict[SessionId, tuple[Engine, int]] = {}
        self.inbox: deque[tuple[PostPart | CheckSlots, list[int]] | RevokePart | ReleaseSession] = deque()
        self.queued: list[Job] = []
        self.started: list[Job] = []
        self.checks: list[tuple[CheckSlots, list[int], list[bool]]] = []
        """Begun: with what was seen of each slot so far."""
        self.outbox: deque[Told] = deque()

    def idle(self) -> bool:
        return not (self.inbox or self.queued or self.started or self.checks or self.outbox)

    def become_zombie(self, quarantined: set[int]) -> None:
        """Its front is dead. It copies on to slots that no later daemon may touch before it is proved
        gone."""
        self.inbox.clear()
        self.checks.clear()
        self.outbox.clear()
        for jobs in (self.queued, self.started):
            jobs[:] = [
                job
                for job in jobs
                if job.post.direction is Direction.STORE and quarantined.issuperset(job.post.slots.tolist())
            ]

    def phase(self, part: PartId) -> str:
        """Where a part is, for the coverage of faults."""
        if any(job.post.part == part for job in self.started):
            return "started"
        if any(isinstance(item, PartFinished) and item.part == part for item in self.outbox):
            return "finished, not told"
        return "waiting"

    # --- steps ---

    def step(self, random: Random, faults: Counter[tuple[str, str]], fault_rate: float) -> None:
        """Does one thing, if there is anything to do."""
        can: list[Callable[[], None]] = []
        if self.inbox:
            can.append(self._take)
        if self.queued:
            can.append(lambda: self._start(random.choice(self.queued), random, faults, fault_rate))
        if self.started and random.random() < 0.5:  # copies take time
            can.append(lambda: self._finish(random.choice(self.started), random, faults, fault_rate))
        if self.checks and not self.started:
            can.append(lambda: self._check(random, faults))
        if can:
            random.choice(can)()

    def read_all(self) -> None:
        while self.inbox:
            self._take()

    def _take(self) -> None:
        item = self.inbox.popleft()
        if isinstance(item, RevokePart):
            for job in [job for job in self.queued if job.post.part == item.part]:
                self._revoke(job)
        elif isinstance(item, ReleaseSession):
            for job in [job for job in self.queued if job.post.session == item.session]:
                self._revoke(job)
            for job in [job for job in self.started if job.post.session == item.session]:
                self._copy(job, set())
            assert item.session in self.mapped, "a session is released that was never mapped, or twice"
            del self.mapped[item.session]
            self.outbox.append(SessionReleased(self.worker, item.session))
        else:
            post, generations = item
            if isinstance(post, CheckSlots):
                seen = [
                    self.pool.is_rotten(number, generation)
                    for number, generation in zip(post.slots.tolist(), generations, strict=True)
                ]
                self.checks.append((post, generations, seen))
                return
            engine, rank = self.mapped[post.session]
            self.queued.append(Job(post, generations, engine, rank))

    def _check(self, random: Random, faults: Counter[tuple[str, str]]) -> None:
        """Reads the generations again, and answers; sometimes its lanes were busy."""
        check, generations, seen = self.checks.pop()
        looked_at = len(seen) if random.random() < 0.8 else random.randrange(len(seen) + 1)
        numbers = check.slots.tolist()
        corrupt = []
        for i in range(looked_at):
            if not self.pool.holds(numbers[i], generations[i]):
                faults["check", "slot given away meanwhile"] += 1
            elif seen[i]:
                corrupt.append(i)
        if looked_at < len(seen):
            faults["check", "lanes busy"] += 1
        self.outbox.append(SlotsChecked(self.worker, check.check, looked_at, np.array(corrupt, np.uint32)))

    def _start(self, job: Job, random: Random, faults: Counter[tuple[str, str]], fault_rate: float) -> None:
        signals = job.post.signals
        ticket, state = job.word
        if (ticket, state) == (signals.ticket, REVOKED):
            self._revoke(job)
            return
        assert ticket < signals.ticket, f"a part word is used by two transfers at once: {job.word}, {signals}"
        if signals.gated and job.engine.doorbells[job.rank][signals.doorbell] < signals.doorbell_value:
            if random.random() < max(fault_rate, 0.05):
                faults["gate never rings", "engine ended" if job.engine.ended else "engine lives"] += 1
                self.queued.remove(job)
                job.word = (signals.ticket, REVOKED)
                self._tell(job, PartOutcome.GATE_DEADLINE, NONE)
            return
        job.word = (signals.ticket, STARTED)
        self.queued.remove(job)
        self.started.append(job)
        self._check_slots(job)
        for slot, block in zip(job.post.slots.tolist(), job.post.block_ids.tolist(), strict=True):
            if job.post.direction is Direction.STORE:
                self.pool.slots[slot].content = TORN
            else:
                job.engine.memory[job.rank][job.post.group][block] = TORN

    def _finish(self, job: Job, random: Random, faults: Counter[tuple[str, str]], fault_rate: float) -> None:
        broken: set[int] = set()
        if random.random() < fault_rate:
            count = len(job.post.slots)
            broken = {i for i in range(count) if random.random() < 0.5} or set(range(count))
            if broken:
                faults["copy fails", job.post.direction.name.lower()] += 1
        self._copy(job, broken)

    # --- what a part comes to ---

    def _check_slots(self, job: Job) -> None:
        """Whatever the core has done meanwhile, it has not given these slots to anybody else."""
        wanted = WRITING if job.post.direction is Direction.STORE else READY
        for number, generation in zip(job.post.slots.tolist(), job.generations, strict=True):
            slot = self.pool.slots[number]
            assert (slot.state, slot.generation) == (wanted, generation), (
                f"slot {number} of an open {job.post.direction.name} is in state {slot.state}, generation "
                f"{slot.generation}; expected {wanted}, {generation}"
            )

    def _copy(self, job: Job, broken: set[int]) -> None:
        self.started.remove(job)
        self._check_slots(job)
        post = job.post
        memory = job.engine.memory[job.rank][post.group]
        corrupt = {
            i
            for i, number in enumerate(post.slots.tolist())
            if post.direction is Direction.LOAD
            and self._is_corrupt(number, post.verify is not None and post.verify[i])
        }
        # A worker that finds bad records names these and nothing else.
        failed = corrupt or broken
        for i, (number, block) in enumerate(zip(post.slots.tolist(), post.block_ids.tolist(), strict=True)):
            if i in failed:
                continue
            if post.direction is Direction.STORE:
                slot = self.pool.slots[number]
                slot.content = slot.sum = memory[block]
            else:
                memory[block] = self.pool.slots[number].content
        job.word = (post.signals.ticket, FAILED if failed else DONE)
        outcome = PartOutcome.FAILED if failed else PartOutcome.DONE
        positions = NONE if len(failed) == len(post.slots) else np.array(sorted(failed), np.uint32)
        self._tell(job, outcome, positions, corrupt=bool(corrupt))

    def _is_corrupt(self, number: int, verify: bool) -> bool:
        rot = self.pool.slots[number].rot
        return rot == "record" or (rot == "data" and verify)

    def _revoke(self, job: Job) -> None:
        self.queued.remove(job)
        ticket, state = job.word
        assert ticket < job.post.signals.ticket or (ticket, state) == (job.post.signals.ticket, REVOKED)
        job.word = (job.post.signals.ticket, REVOKED)
        self._tell(job, PartOutcome.REVOKED, NONE)

    def _tell(self, job: Job, outcome: PartOutcome, failed: np.ndarray, *, corrupt: bool = False) -> None:
        self.outbox.append(PartFinished(self.worker, job.post.part, outcome, failed, corrupt))
