"""The engine that is killed: at random it stores, loads, cancels and revokes, and says on stdout what it saw.

    python -m tests.faults.gpu.victim SOCKET NUMBER SEED KIND BELL     (KIND legacy|chunks, BELL host|stream)

    READY              its client is ready for the first time
    STARTED            a part of its is being copied
    STORED BATCH       this batch of its own is committed
    LOADED BLOCKS      so many blocks were loaded, every byte right
    ENDED HOW          a transfer ended early: CANCELLED, REVOKED, FAILED or REFUSED
It ends by itself, with a message, only when something is wrong.
"""

from __future__ import annotations

import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from kvtier import Doorbell, Lookup, PartState, Transfer

from tests.faults.campaigns.content import hashes_of, wrong_blocks
from tests.faults.gpu.engine import WIPED, GpuEngine

AREAS = 4
BATCH = 32
"""Half a mebibyte: at the speed that the campaign sets, some milliseconds."""
FENCE_S = 60.0
STEP_S = 0.001
READY_S = 1.0
REFUSED_S = 0.02


def family_of(number: int) -> str:
    """Whose hashes the engine with this number stores."""
    return f"gpu-engine-{number}"


@dataclass
class Job:
    """What goes on in one area."""

    transfer: Transfer
    hashes: list[bytes]
    blocks: slice
    """The part of the area that the transfer may touch."""
    batch: int | None
    """Of a store."""
    ring_s: float | None
    """When the engine's work is queued and the doorbell rung after it (None: it was, or never will be)."""
    end_s: float | None
    """When it is cancelled or revoked, unless it is over."""
    submitted_s: float
    how: str = "FAILED"
    started: bool = False


class Victim:
    """One life."""

    def __init__(self, engine: GpuEngine, number: int, chance: random.Random) -> None:
        self.engine = engine
        self.number = number
        self.chance = chance
        self.jobs: list[Job | None] = [None] * AREAS
        self.rung = [0] * AREAS
        self.batches = 0

    def step(self) -> None:
        for index, job in enumerate(self.jobs):
            if job is None:
                self.begin(index)
            else:
                self.go_on(index, job)

    # --- beginning

    def area(self, index: int, blocks: int = BATCH) -> slice:
        return slice(index * BATCH, index * BATCH + blocks)

    def begin(self, index: int) -> None:
        engine = self.engine
        assert (engine.read(self.area(index)) == WIPED).all(), (
            f"area {index}: something landed after its fence"
        )
        if self.chance.random() < 0.5:
            batch, self.batches = self.batches, self.batches + 1
            hashes = hashes_of(family_of(self.number), BATCH, first=batch * BATCH)
            doorbell = self.next_doorbell(index)
            self.follow(
                index,
                engine.client.store(hashes, range(*self.bounds(index)), doorbell=doorbell),
                hashes,
                batch,
            )
        else:
            self.begin_load(index)

    def begin_load(self, index: int) -> None:
        """Of its own blocks, or of others', who may be dead for long."""
        whose = self.number if self.chance.random() < 0.5 else self.chance.randrange(self.number + 1)
        batch = self.chance.randrange(max(1, self.batches) if whose == self.number else 8)
        hashes = hashes_of(family_of(whose), BATCH, first=batch * BATCH)
        found: Lookup = self.engine.client.lookup(hashes, lease=True)
        if not found.hits:
            return
        start, _ = self.bounds(index)
        doorbell = self.next_doorbell(index)
        transfer = self.engine.client.load(found, range(start, start + found.hits), doorbell=doorbell)
        self.follow(index, transfer, hashes[: found.hits], None)

    def bounds(self, index: int) -> tuple[int, int]:
        return index * BATCH, (index + 1) * BATCH

    def next_doorbell(self, index: int) -> Doorbell:
        self.rung[index] += 1
        return Doorbell(index, self.rung[index])

    def follow(self, index: int, transfer: Transfer, hashes: list[bytes], batch: int | None) -> None:
        now_s = time.monotonic()
        dice = self.chance.random()
        ring_s = None if dice < 0.1 else now_s + self.chance.random() * 0.004
        end_s = now_s + self.chance.random() * 0.02 if dice < 0.3 else None
        blocks = self.area(index, len(hashes))
        self.jobs[index] = Job(transfer, hashes, blocks, batch, ring_s, end_s, submitted_s=now_s)

    # --- going on

    def go_on(self, index: int, job: Job) -> None:
        now_s = time.monotonic()
        part = job.transfer.part
        state = self.engine.client.part_state(part) if part is not None else PartState.ARMED
        if state is PartState.STARTED and not job.started:
            job.started = True
            print("STARTED", flush=True)
        if job.ring_s is not None and now_s >= job.ring_s:
            job.ring_s = None
            if job.batch is None:
                self.engine.wipe(job.blocks)
            else:
                self.engine.fill(job.blocks, job.hashes)
            self.engine.ring(index, self.rung[index])
        if job.end_s is not None and now_s >= job.end_s:
            job.end_s = None
            job.how = "REVOKED" if self.chance.random() < 0.5 else "CANCELLED"
            if job.how == "REVOKED":
                job.transfer.revoke()
            else:
                job.transfer.cancel()
        outcome = job.transfer.outcome
        if outcome.fenced or state.over:
            self.end(index, job)
        else:
            assert now_s < job.submitted_s + FENCE_S, f"no fence: {job}, {self.engine.client.status}"

    def end(self, index: int, job: Job) -> None:
        """The blocks are ours again: looked at, and wiped, whatever the daemon still has to say."""
        self.engine.settle()
        part = job.transfer.part
        copied = part is not None and self.engine.client.part_state(part) is PartState.DONE
        if job.batch is None and (job.transfer.outcome.done or copied):
            wrong = wrong_blocks(self.engine.read(job.blocks), job.hashes)
            assert not wrong, f"wrong bytes in blocks {wrong}: {job}"
            print("LOADED", len(job.hashes), flush=True)
        self.engine.wipe(self.area(index))
        self.engine.settle()
        if job.batch is not None and (copied or job.transfer.outcome.done):
            if job.transfer.wait(FENCE_S).done:
                print("STORED", job.batch, flush=True)
        elif job.batch is not None or not copied:
            print("ENDED", "REFUSED" if job.transfer.outcome.refused else job.how, flush=True)
            if job.transfer.outcome.refused:
                time.sleep(REFUSED_S)  # nobody is there to serve it
        self.jobs[index] = None


def main() -> None:
    socket, number, seed, kind, bell = sys.argv[1:]
    blocks = AREAS * BATCH
    name, stream = family_of(int(number)), bell == "stream"
    engine = GpuEngine(Path(socket), name, blocks, chunked=kind == "chunks", by_stream=stream)
    while not engine.client.wait_ready(READY_S):
        pass  # for as long as it takes: the daemon may be dead, or its worker
    print("READY", flush=True)
    victim = Victim(engine, int(number), random.Random(int(seed)))
    while True:
        if not engine.client.ready and not any(victim.jobs):
            engine.client.wait_ready(READY_S)
        victim.step()
        time.sleep(STEP_S)


if __name__ == "__main__":
    main()
