"""Kills a front and its copy worker at random moments, with SIGKILL, in any order, and lets a successor open
the pool.

    python -m tests.faults.pool.random_kills FOLDER ROUNDS SEED

The pool lives through all rounds. The worker holds the descriptor that it inherited from the front: while it
lives, no successor may own the pool. Prints one JSON object; exit status 1 if anything was not as it must be.
"""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from kvtierd.memory.errors import PoolLocked
from kvtierd.memory.host_pool import HostPool

from tests.faults.pool.blocks import Block, commit_block, found_blocks, open_block, u32, write_shard

MIB = 1 << 20
SIZE = 4 * MIB
SLOT_BYTES = 30_000
WORLD = 2
KEYS = 12
RUN_MS_MAX = 40


def open_pool(path: Path, lock_timeout_s: float = 10) -> HostPool:
    return HostPool.open(path, SIZE, MIB, lock_timeout_s=lock_timeout_s)


def fork(body: Callable[[], None]) -> int:
    gc.collect()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            body()
            status = 0
        except BrokenPipeError:
            status = 0  # the other side was killed first
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return pid


def worker(pool: HostPool, requests: int, replies: int) -> None:
    """A copy worker: for each "key version slot slot generation generation", write both shards and answer."""
    with os.fdopen(requests) as lines:
        for line in lines:
            key, version, first, second, *generations = (int(field) for field in line.split())
            block = Block(key, version, WORLD, 20_000 + key)
            for shard, slot in enumerate((first, second)):
                write_shard(
                    pool.array, pool.records, block, shard, slot, np.array([generations[shard]], np.uint64)
                )
            try:
                os.write(replies, b".")
            except BrokenPipeError:
                break
    signal.pause()  # the front is gone: stay, holding the lock, until killed


@dataclass
class Front:
    """Stores, evicts and tells, until it is killed."""

    path: Path
    story: int
    seed: int

    def run(self) -> None:
        pool = open_pool(self.path)
        tell = self.story
        requests, to_worker = os.pipe()
        from_worker, replies = os.pipe()

        def body() -> None:
            for fd in (to_worker, from_worker, tell):
                os.close(fd)
            worker(pool, requests, replies)

        pid = fork(body)
        for fd in (requests, replies):
            os.close(fd)
        os.write(tell, f"worker {pid} 0\n".encode())
        writer = pool.register_writer(pid)
        where = {key: slots for key, (slots, _) in blocks_at(pool).items()}
        version = {key: block.version for key, block in found_blocks(pool).items()}
        if not pool.recovered.extents:
            pool.records.format_extent(0, SLOT_BYTES)
        slots = pool.geometry.slots_of(0, SLOT_BYTES).tolist()
        chance = random.Random(self.seed)
        clock = pool.recovered.clock
        for transfer in range(1, 1 << 40):
            taken = {slot for pair in where.values() for slot in pair}
            free = [slot for slot in slots if slot not in taken]
            key = chance.randrange(KEYS)
            if len(free) < 2 or chance.random() < 0.2:
                if key in where:
                    os.write(tell, f"evicting {key} {version[key]}\n".encode())
                    pool.records.free(u32(*where.pop(key)))
                    os.write(tell, f"evicted {key} {version[key]}\n".encode())
                continue
            block = Block(key, (version.get(key, 0) + 1) % 10, WORLD, 20_000 + key)
            pair = chance.sample(free, 2)
            generations = open_block(pool, writer, block, pair, transfer)
            numbers = " ".join(str(int(generation[0])) for generation in generations)
            os.write(to_worker, f"{key} {block.version} {pair[0]} {pair[1]} {numbers}\n".encode())
            if os.read(from_worker, 1) != b".":
                return  # the worker was killed
            clock += 1
            commit_block(pool, pair, clock)
            os.write(tell, f"committed {key} {block.version}\n".encode())
            if key in where:
                pool.records.free(u32(*where[key]))  # the older copy, no longer needed
            where[key], version[key] = pair, block.version


def blocks_at(pool: HostPool) -> dict[int, tuple[list[int], int]]:
    """Slots and place of each recovered block, by key."""
    at = {}
    for i, block_hash in enumerate(pool.recovered.hashes):
        key = int(block_hash[:8].view(np.uint64)[0])
        at[key] = (pool.recovered.slots[WORLD * i : WORLD * (i + 1)].tolist(), i)
    return at


def refusal(path: Path) -> PoolLocked | None:
    try:
        open_pool(path, lock_timeout_s=0.01).close()
    except PoolLocked as locked:
        return locked
    return None


def leave_quarantine(pool: HostPool) -> None:
    """A killed worker may give up the lock a moment before it is gone; then its slots are free as well."""
    deadline_s = time.monotonic() + 30
    while pool.quarantined_slots:
        assert time.monotonic() < deadline_s, "slots of a killed worker stay in quarantine"
        time.sleep(0.001)
        pool.retry_quarantine()
    busy = set(pool.records.scan()["slots"].tolist())
    assert busy == set(pool.recovered.slots.tolist())


def campaign(path: Path, rounds: int, seed: int) -> dict[str, int]:
    chance = random.Random(seed)
    open_pool(path).close()
    known: dict[int, int] = {}
    totals = {"rounds": 0, "committed": 0, "wanted": 0, "locked": 0, "discarded": 0, "quarantined": 0}
    for _ in range(rounds):
        read_end, write_end = os.pipe()
        front = fork(Front(path, write_end, chance.randrange(1 << 30)).run)
        os.close(write_end)
        story = os.fdopen(read_end)
        worker_pid = int(story.readline().split()[1])
        worker_fd = os.pidfd_open(worker_pid)
        try:
            time.sleep(chance.uniform(0, RUN_MS_MAX) / 1000)
            if chance.random() < 0.5:
                os.kill(front, signal.SIGKILL)
                _, status = os.waitpid(front, 0)
                locked = refusal(path)
                assert locked is not None, "a successor owns the pool while the old worker can write"
                assert worker_pid in locked.pids, f"{locked} names not the worker {worker_pid}"
                totals["locked"] += 1
                signal.pidfd_send_signal(worker_fd, signal.SIGKILL)
            else:
                signal.pidfd_send_signal(worker_fd, signal.SIGKILL)
                time.sleep(chance.uniform(0, 2) / 1000)
                os.kill(front, signal.SIGKILL)
                _, status = os.waitpid(front, 0)
            assert status in (0, signal.SIGKILL), f"the front ended with status {status}"
        except BaseException:
            with suppress(ProcessLookupError):
                os.kill(front, signal.SIGKILL)
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(worker_fd, signal.SIGKILL)
            raise
        finally:
            os.close(worker_fd)
        maybe: set[int] = set()
        for line in story:
            if not line.endswith("\n"):
                break  # never: a write of one line to a pipe is atomic
            what, *numbers = line.split()
            key, version = map(int, numbers)
            if what == "committed":
                known[key] = version
                totals["committed"] += 1
                maybe.discard(key)
            elif what == "evicting":
                maybe.add(key)
            else:
                known.pop(key, None)
                maybe.discard(key)
        story.close()
        with open_pool(path) as pool:
            assert pool.start.warm, pool.start.cold_reason
            found = found_blocks(pool)
            for key, version in known.items():
                if key in maybe:
                    continue
                totals["wanted"] += 1
                assert key in found, f"block {key} was committed and is lost"
                # A copy may have been committed without its having been told any more; never an older one.
                assert found[key].version in (version, (version + 1) % 10), f"block {key}: an older copy won"
            totals["discarded"] += pool.start.discarded_slots
            totals["quarantined"] += pool.start.quarantined_slots
            leave_quarantine(pool)
            known = {key: block.version for key, block in found.items()}
        totals["rounds"] += 1
    return totals


def main() -> int:
    folder, rounds, seed = sys.argv[1:4]
    print(json.dumps(campaign(Path(folder) / "pool", int(rounds), int(seed))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
