"""Kills a process at every step that it persists, one step after another, and looks at what is recovered each
time.

    python -m tests.faults.pool.crash_points store|recover|create FOLDER

Prints one JSON object; exit status 1, and which step, if anything was not as it must be. Each try is a fork
of this process, which has one thread, so that hundreds of steps take a second.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

from kvtier_kernels import PoolRecords, format_pool
from kvtierd.memory import host_pool, pool_file
from kvtierd.memory.host_pool import HostPool

from tests.faults.pool.blocks import Block, commit_block, found_blocks, open_block, u32, write_shard

MIB = 1 << 20
SIZE = 4 * MIB
SMALL, LARGE = 200_000, 300_000
A = Block(1, 1, 2, 9000)
B = Block(2, 1, 2, 9000)
C = Block(3, 1, 2, 150_000)
B_AGAIN = Block(2, 2, 2, 9000)
SINGLE = Block(4, 1, 1, 290_000)
LATER = Block(5, 1, 1, 64)
STEPS_MAX = 1000


def open_pool(path: Path) -> HostPool:
    return HostPool.open(path, SIZE, MIB, lock_timeout_s=5)


class Story:
    """What the parent has been told, in order; told before the next thing is done."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe

    def tell(self, what: str, block: Block) -> None:
        os.write(self._pipe, f"{what} {block.key} {block.version}\n".encode())


def act(pool: HostPool, story: Story) -> None:
    """The scripted sequence: stores, a second copy, evictions, slots and an extent used again."""
    writer = pool.register_writer(os.getpid())
    transfer = iter(range(1, 100))
    clock = iter(range(1, 100))

    def store(block: Block, slots: list[int]) -> None:
        generations = open_block(pool, writer, block, slots, next(transfer))
        for shard, slot in enumerate(slots):
            write_shard(pool.array, pool.records, block, shard, slot, generations[shard])
        commit_block(pool, slots, next(clock))
        story.tell("committed", block)

    def evict(block: Block, slots: list[int]) -> None:
        story.tell("evicting", block)
        pool.records.free(u32(*slots))
        story.tell("evicted", block)

    pool.records.format_extent(0, SMALL)
    s = pool.geometry.slots_of(0, SMALL).tolist()
    assert len(s) == 5
    store(A, [s[0], s[1]])
    store(B, [s[2], s[3]])
    evict(A, [s[0], s[1]])
    store(C, [s[1], s[0]])
    evict(C, [s[1], s[0]])
    store(B_AGAIN, [s[4], s[0]])
    evict(B, [s[2], s[3]])
    pool.records.format_extent(1, LARGE)
    t = pool.geometry.slots_of(1, LARGE).tolist()
    store(SINGLE, [t[1]])
    evict(SINGLE, [t[1]])
    pool.records.format_extent(1, 64)
    u = pool.geometry.slots_of(1, 64).tolist()
    store(LATER, [u[100]])


def check(story: list[tuple[str, int, int]], found: dict[int, Block]) -> int:
    """Compare what was told with what was found. Returns how many blocks had to be there."""
    committed: dict[int, int] = {}
    may_be_gone: set[tuple[int, int]] = set()
    must_be_gone: set[tuple[int, int]] = set()
    for what, key, version in story:
        if what == "committed":
            committed[key] = max(version, committed.get(key, 0))
        else:
            (may_be_gone if what == "evicting" else must_be_gone).add((key, version))
    wanted = 0
    for key, version in committed.items():
        if (key, version) in may_be_gone:
            continue
        wanted += 1
        assert key in found, f"block {key} was committed and is lost"
        # A later copy may have been committed without its having been told any more; never an older one.
        assert found[key].version >= version, f"block {key}: an older copy won"
    for block in found.values():
        assert (block.key, block.version) not in must_be_gone, f"block {block.key} came back"
    return wanted


def run_child(body: Callable[[Story], None]) -> tuple[list[tuple[str, int, int]], bool]:
    """Fork; returns what the child told, and whether it was killed. A child that fails otherwise fails the
    campaign.
    """
    read_end, write_end = os.pipe()
    gc.collect()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(read_end)
            body(Story(write_end))
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(write_end)
    with os.fdopen(read_end) as lines:
        told = [line.split() for line in lines]
    _, status = os.waitpid(pid, 0)
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert killed or status == 0, f"the child ended with status {status}"
    return [(what, int(key), int(version)) for what, key, version in told], killed


def fresh(path: Path) -> None:
    path.unlink(missing_ok=True)
    open_pool(path).close()


def campaign_store(path: Path) -> dict[str, int]:
    """Killed anywhere in the scripted sequence."""
    wanted = recovered = 0
    for step in range(1, STEPS_MAX):
        fresh(path)

        def body(story: Story, step: int = step) -> None:
            pool = open_pool(path)
            pool.records = PoolRecords(pool.array, step)
            act(pool, story)

        told, killed = run_child(body)
        with open_pool(path) as pool:
            assert pool.start.warm, pool.start.cold_reason
            assert pool.start.quarantined_slots == 0, "the writer is proved gone"
            found = found_blocks(pool)
            wanted += check(told, found)
            recovered += len(found)
            use_every_free_slot(pool)
        if not killed:
            assert sorted(found) == [B.key, LATER.key]
            return {"points": step - 1, "wanted": wanted, "recovered": recovered}
    raise AssertionError(f"more than {STEPS_MAX} steps")


def use_every_free_slot(pool: HostPool) -> None:
    """What is called free can be stored to, and an extent without blocks can be given another slot size."""
    busy = set(pool.recovered.slots.tolist())
    for extent in pool.recovered.extents:
        slots = [
            s for s in pool.geometry.slots_of(extent.extent, extent.slot_bytes).tolist() if s not in busy
        ]
        writer = pool.register_writer(os.getpid())
        for slot in slots[:8]:
            open_block(pool, writer, LATER, [slot], 1000 + slot)
        pool.records.free(u32(*slots))
        if len(slots) == len(pool.geometry.slots_of(extent.extent, extent.slot_bytes)):
            pool.records.format_extent(extent.extent, 12345)


def campaign_recover(path: Path) -> dict[str, int]:
    """Killed anywhere in a recovery that has something to free; the next one finds the same blocks."""

    def prepare() -> None:
        fresh(path)
        with open_pool(path) as pool:
            pool.records.format_extent(0, SMALL)
            s = pool.geometry.slots_of(0, SMALL).tolist()
            writer = pool.register_writer(os.getpid())
            for transfer, (block, slots) in enumerate([(A, s[0:2]), (Block(1, 2, 2, 9000), s[2:4])]):
                generations = open_block(pool, writer, block, slots, transfer)
                for shard, slot in enumerate(slots):
                    write_shard(pool.array, pool.records, block, shard, slot, generations[shard])
                commit_block(pool, slots, 10 + transfer)
            pool.records.format_extent(1, LARGE)
            t = pool.geometry.slots_of(1, LARGE).tolist()
            open_block(pool, 50_000, SINGLE, [t[0]], 9)  # a writer that the table does not know
            half = open_block(pool, writer, Block(9, 1, 2, 100), t[1:3], 10)
            write_shard(pool.array, pool.records, Block(9, 1, 2, 100), 0, t[1], half[0])
            commit_block(pool, t[1:2], 99)

    for step in range(1, STEPS_MAX):
        prepare()

        def body(story: Story, step: int = step) -> None:
            vars(host_pool)["PoolRecords"] = partial(PoolRecords, crash_after=step)
            open_pool(path)

        _, killed = run_child(body)
        with open_pool(path) as pool:
            found = found_blocks(pool)
            assert {key: block.version for key, block in found.items()} == {A.key: 2}
            # This process, alive, wrote the other half; nobody knows 50,000: its slot has other memory.
            assert pool.start.quarantined_slots == 1
        if not killed:
            return {"points": step - 1, "wanted": step, "recovered": step}
    raise AssertionError(f"more than {STEPS_MAX} steps")


def campaign_create(path: Path) -> dict[str, int]:
    """Killed anywhere while the pool is made: recognised, remade, usable. Also over an older pool of another
    size.
    """
    remade = 0
    for step in range(1, STEPS_MAX):
        path.unlink(missing_ok=True)
        HostPool.open(path, 7 * MIB, MIB, lock_timeout_s=5).close()

        def body(story: Story, step: int = step) -> None:
            vars(pool_file)["format_pool"] = partial(format_pool, crash_after=step)
            open_pool(path)

        _, killed = run_child(body)
        with open_pool(path) as pool:
            if pool.start.warm:
                assert pool.start.recovered_blocks == 0
            else:
                assert "interrupted while it created" in pool.start.cold_reason, pool.start.cold_reason
                remade += 1
            pool.records.format_extent(0, SMALL)
        if not killed:
            return {"points": step - 1, "wanted": remade, "recovered": remade}
    raise AssertionError(f"more than {STEPS_MAX} steps")


CAMPAIGNS = {"store": campaign_store, "recover": campaign_recover, "create": campaign_create}


def main() -> int:
    name, folder = sys.argv[1:3]
    print(json.dumps(CAMPAIGNS[name](Path(folder) / "pool")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
