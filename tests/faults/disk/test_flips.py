"""Bits flipped in slab files, and files cut short: whatever was spoilt is a miss, everything else is right,
and the disk goes on."""

import mmap
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from kvtier import Client
from kvtier_kernels import PoolRecords
from kvtierd.core.ids import PAGE_BYTES

from tests.faults.campaigns.content import BLOCK_BYTES
from tests.faults.campaigns.tier import BATCH, Owner, Tier, disks_live, owner_engine, until, wait_live
from tests.support.length import rounds
from tests.support.process import DEADLINE_S, Daemon

ROUNDS = rounds(1, 10)
SEED = int(os.environ.get("KVTIER_SEED", "0")) or random.SystemRandom().randrange(1, 2**32)
BATCHES = 5
FLIPPED = 10
"""Blocks of each batch."""
RECORD_BYTES = 128
EXTENT_BYTES = 1 << 20
FIRST_EXTENT = 2 << 20

pytestmark = [pytest.mark.faults, pytest.mark.timeout(ROUNDS * 60 + 400)]


class SlabFile:
    """A slab as somebody sees it who ought not to write to it."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self._mapping = mapping

    def _records(self) -> PoolRecords:
        return PoolRecords(np.frombuffer(self._mapping, np.uint8))

    def slots(self) -> dict[bytes, int]:
        """Slot of every block whose record the file says to be READY, by its hash."""
        found = self._records().scan()
        rows = np.flatnonzero(found["intact"]).tolist()
        return {found["hashes"][row].tobytes(): int(found["slots"][row]) for row in rows}

    def record_offset(self, slot: int) -> int:
        extent = (slot * PAGE_BYTES - FIRST_EXTENT) // EXTENT_BYTES
        info = self._records().extent_info(extent)
        assert info is not None
        _, stride, _, first = info
        index = (slot * PAGE_BYTES - first) // stride
        return FIRST_EXTENT + extent * EXTENT_BYTES + PAGE_BYTES + index * RECORD_BYTES

    def flip(self, offset: int, bit: int) -> None:
        self._mapping[offset] ^= 1 << bit

    def spoil(self, slot: int, what: str, chance: random.Random) -> None:
        """One bit of a block's data, of its record, or of the state and generation in its record's word."""
        if what == "data":
            offset = slot * PAGE_BYTES + chance.randrange(BLOCK_BYTES)
        elif what == "record":
            offset = self.record_offset(slot) + chance.choice((*range(8, 82), *range(88, 112)))
        else:
            offset = self.record_offset(slot) + chance.choice((0, 3, 4, 5, 6, 7))
        self.flip(offset, chance.randrange(8))


@contextmanager
def opened(path: Path) -> Iterator[SlabFile]:
    with path.open("r+b") as file:
        mapping = mmap.mmap(file.fileno(), 0)
        yield SlabFile(mapping)
        mapping.flush()


def refused(owner: Owner, bad: list[bytes], *, found_first: bool) -> None:
    """Each of them was READY on the disk, is asked for until it is neither a hit nor on its way, and is a
    miss: at once, or when it was read (`found_first`)."""
    client = owner.engine.client
    for value in bad:
        until(partial(is_miss, client, value), "it is a miss")
        owner.count["disk_corruptions_refused"] += 1
    owner.count["disk_corruptions_found_by_reading"] += len(bad) * found_first


def is_miss(client: Client, value: bytes) -> bool:
    found = client.lookup([value], timeout_s=DEADLINE_S)
    assert found.hits == 0, "a spoilt block is given to an engine"
    return found.answered and found.states == b"\0"


def fill_disk(owner: Owner, daemon: Daemon) -> list[list[bytes]]:
    batches = [owner.settle(daemon) for _ in range(BATCHES)]
    until(lambda: not any(disk.writing_bytes for disk in daemon.status().disks), "all is written")
    return batches


def test_every_block_spoilt_on_a_disk_is_refused(proved: Callable[[str], None], count: Counter[str]) -> None:
    """In turn under a running daemon, which finds out by reading, and between two, by reading or before."""
    print(f"KVTIER_SEED={SEED}, {ROUNDS} rounds")
    chance = random.Random(SEED)
    with Tier(size="66MiB") as tier:
        daemon = tier.start_tier(integrity__verify="always")
        with owner_engine(daemon.socket) as engine:
            engine.wait_ready()
            owner = Owner(engine, count)
            for number in range(ROUNDS):
                batches = fill_disk(owner, daemon)
                running = number % 2 == 1
                chosen = [value for batch in batches for value in chance.sample(batch, FLIPPED)]
                spoil = ("data",) if running else ("data", "record", "word")
                kinds = {value: chance.choice(spoil) for value in chosen}
                daemon.kill()
                tier.lose_pool()  # so that every block comes from the disk
                if running:
                    daemon = tier.start_tier(integrity__verify="always")
                    wait_live(daemon)
                with opened(tier.slab()) as slab:
                    slots = slab.slots()
                    for value, what in kinds.items():
                        slab.spoil(slots[value], what, chance)
                if not running:
                    daemon = tier.start_tier(integrity__verify="always")
                    wait_live(daemon)
                engine.wait_ready()
                bad = [value for value, what in kinds.items() if what == "data"]
                refused(owner, bad, found_first=True)
                refused(owner, [value for value in chosen if kinds[value] != "data"], found_first=False)
                status = daemon.status()
                assert status.disks[0].corrupt_blocks == len(bad), "each is counted"
                assert status.counters.integrity_failures == len(bad), "none has come as far as an engine"
                for batch in batches:
                    sound = [value for value in batch if value not in kinds]
                    assert owner.load(sound, complete=True) == len(sound)
                again = sorted(chosen)[:BATCH]  # stored anew, elsewhere, they are what they were
                engine.fill(list(range(len(again))), again)
                assert engine.store(again, range(len(again))).wait(DEADLINE_S).done
                assert owner.load(again, complete=True) == len(again)
                assert disks_live(daemon)
        assert daemon.stop() == 0
    proved(
        f"{count['disk_corruptions_refused']} blocks with a bit flipped on a disk were refused,"
        f" {count['disk_corruptions_found_by_reading']} of them when they were read, the others because their"
        f" records did not fit; {count['blocks_compared']} sound ones compared, {count['wrong_bytes']} wrong"
        f" bytes (KVTIER_SEED={SEED})"
    )


def test_a_slab_cut_short_under_a_running_daemon_costs_what_it_held(count: Counter[str]) -> None:
    chance = random.Random(SEED)
    with Tier(size="18MiB") as tier:
        daemon = tier.start_tier()
        with owner_engine(daemon.socket) as engine:
            engine.wait_ready()
            owner = Owner(engine, count)
            batches = fill_disk(owner, daemon)
            daemon.kill()
            tier.lose_pool()
            daemon = tier.start_tier()
            wait_live(daemon)
            engine.wait_ready()
            length = tier.slab().stat().st_size
            os.truncate(tier.slab(), chance.randrange(FIRST_EXTENT, FIRST_EXTENT + 2 * EXTENT_BYTES))
            count["disk_truncations"] += 1
            for _ in range(3):
                for hashes in batches:
                    owner.load(hashes, complete=False)  # right or not there: `compare` says so
            mine = owner.next_batch()
            engine.fill(list(range(BATCH)), mine)
            assert engine.store(mine, range(BATCH)).wait(DEADLINE_S).done, "the host serves on"
            owner.load(mine, complete=False)
            daemon.kill()
            daemon = tier.start_tier()
            wait_live(daemon)
            engine.wait_ready()
            disk = daemon.status().disks[0]
            assert "cut or extended" in disk.cold_reason
            assert tier.slab().stat().st_size == length
            owner.settled.clear()
            for _ in range(2):
                owner.settle(daemon)
            for hashes in [*batches, *owner.settled]:
                owner.load(hashes, complete=hashes in owner.settled)
        assert daemon.stop() == 0
