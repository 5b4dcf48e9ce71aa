"""Bits flipped in the pool file under a running daemon that verifies always: no engine is given one."""

import mmap
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest
from kvtier.v1 import admin_pb2, admin_pb2_grpc
from kvtier_kernels import PoolRecords
from kvtierd.core.ids import PAGE_BYTES

from tests.faults.campaigns.content import BLOCK_BYTES, compare, hashes_of
from tests.faults.campaigns.engine import PlainEngine
from tests.support.length import rounds
from tests.support.process import Daemon, until

ROUNDS = rounds(2, 18)
SEED = int(os.environ.get("KVTIER_SEED", "0")) or random.SystemRandom().randrange(1, 2**32)
DEADLINE_S = 60.0
BATCH = 128
FLIPPED = 32
"""Blocks of each batch."""
RECORD_BYTES = 128

pytestmark = [pytest.mark.faults, pytest.mark.timeout(ROUNDS * 30 + 60)]


class PoolFile:
    """The pool as somebody sees it who ought not to write to it."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self._mapping = mapping

    def slots(self) -> dict[bytes, int]:
        """Slot of every READY block by its hash; blocks here have one shard."""
        records = PoolRecords(np.frombuffer(self._mapping, np.uint8))
        found = records.scan()
        rows = np.flatnonzero(found["intact"]).tolist()
        return {found["hashes"][row].tobytes(): int(found["slots"][row]) for row in rows}

    def record_offset(self, slot: int) -> int:
        """Where the record of a slot is."""
        records = PoolRecords(np.frombuffer(self._mapping, np.uint8))
        extent = (slot * PAGE_BYTES - (2 << 20)) // records.extent_bytes
        info = records.extent_info(extent)
        assert info is not None
        _, stride, _, first = info
        index = (slot * PAGE_BYTES - first) // stride
        start = (2 << 20) + extent * records.extent_bytes
        return start + PAGE_BYTES + index * RECORD_BYTES

    def flip(self, offset: int, bit: int) -> None:
        self._mapping[offset] ^= 1 << bit


@contextmanager
def opened(pool: Path) -> Iterator[PoolFile]:
    with pool.open("r+b") as file:
        mapping = mmap.mmap(file.fileno(), 0)
        yield PoolFile(mapping)
        del mapping


def explain(daemon: Daemon, block_hash: bytes) -> admin_pb2.Explanation:
    with grpc.insecure_channel(f"unix:{daemon.socket}") as channel:
        request = admin_pb2.ExplainRequest(hash=block_hash)
        response = admin_pb2_grpc.AdminStub(channel).Explain(request, timeout=DEADLINE_S)
    [explanation] = response.explanations
    return explanation


def flip_somewhere(pool: PoolFile, slot: int, chance: random.Random) -> str:
    """One bit of a block's data, of its record, or of the state and generation in its record's word."""
    what = chance.choice(("data", "data", "record", "word"))
    record = pool.record_offset(slot)
    if what == "data":
        offset = slot * PAGE_BYTES + chance.randrange(BLOCK_BYTES)
    elif what == "record":
        offset = record + chance.choice((*range(8, 82), *range(88, 112)))
    else:
        offset = record + chance.choice((0, 3, 4, 5, 6, 7))
    pool.flip(offset, chance.randrange(8))
    return what


def test_every_corrupted_block_that_is_loaded_is_refused_counted_and_explained(
    start: Callable[..., Daemon], proved: Callable[[str], None], count: Counter[str]
) -> None:
    print(f"KVTIER_SEED={SEED}, {ROUNDS} rounds")
    chance = random.Random(SEED)
    settings = {"integrity__verify": "always", "integrity__sample_bytes_per_s": 0}
    daemon = start(pool__size="130MiB", pool__extent_size="4MiB", **settings)
    daemon.may_complain = True
    refused = 0
    kinds: Counter[str] = Counter()
    blocks = list(range(BATCH))
    with PlainEngine(daemon.socket, "trusting", num_blocks=BATCH) as engine, opened(daemon.pool) as pool:
        engine.wait_ready()
        for number in range(ROUNDS):
            hashes = hashes_of(f"flips/{number}", BATCH)
            engine.fill(blocks, hashes)
            assert engine.store(hashes, blocks).wait(DEADLINE_S).done
            slots = pool.slots()
            bad = set(chance.sample(blocks, FLIPPED))
            flipped = {i: flip_somewhere(pool, slots[hashes[i]], chance) for i in bad}
            kinds.update(flipped.values())

            engine.wipe(blocks)
            found = engine.lookup(hashes, lease=True)
            assert found.hits == BATCH, "nobody has looked at the data yet"
            outcome = engine.client.load(found, blocks).wait(DEADLINE_S)
            assert not outcome.done
            given = [i for i in blocks if outcome.succeeded[i]]
            assert given == [i for i in blocks if i not in bad], "sound blocks are refused, or others loaded"
            compare(engine.read(given), [hashes[i] for i in given], count)
            refused += len(bad)
            count["corruptions_refused"] += len(bad)

            status = daemon.status()
            assert status.counters.integrity_failures == refused
            assert (status.integrity.found_on_load, status.integrity.corrupt_slots) == (refused, refused)
            for i in chance.sample(sorted(bad), 4):
                assert engine.lookup([hashes[i]]).hits == 0
                assert explain(daemon, hashes[i]).verdict == admin_pb2.VERDICT_CORRUPT
            assert not {slots[hashes[i]] for i in bad} & set(pool.slots().values())

            again = [hashes[i] for i in sorted(bad)]  # stored anew, elsewhere, they are what they were
            engine.fill(blocks[:FLIPPED], again)
            assert engine.store(again, blocks[:FLIPPED]).wait(DEADLINE_S).done
            assert not {slots[key] for key in again} & set(pool.slots().values()), "a bad slot is used again"
            assert explain(daemon, again[0]).verdict == admin_pb2.VERDICT_READABLE
    proved(f"{refused} blocks with a flipped bit ({dict(kinds)}), all refused, counted and explained")


def test_sampling_finds_what_nobody_loads_and_it_is_never_served(
    start: Callable[..., Daemon], proved: Callable[[str], None], count: Counter[str]
) -> None:
    """Without verify=always: a block that sampling has found is a miss before anybody asks for it."""
    chance = random.Random(SEED)
    daemon = start(pool__size="130MiB", pool__extent_size="4MiB", integrity__sample_bytes_per_s="1GiB")
    daemon.may_complain = True
    blocks = list(range(BATCH))
    hashes = hashes_of("sampled", BATCH)
    with PlainEngine(daemon.socket, "lucky", num_blocks=BATCH) as engine, opened(daemon.pool) as pool:
        engine.wait_ready()
        engine.fill(blocks, hashes)
        assert engine.store(hashes, blocks).wait(DEADLINE_S).done
        slots = pool.slots()
        bad = sorted(chance.sample(blocks, FLIPPED))
        for i in bad:
            flip_somewhere(pool, slots[hashes[i]], chance)
        until(lambda: daemon.status().integrity.found_in_sample == len(bad), "sampling has found all of them")
        engine.wipe(blocks)
        rest = [i for i in blocks if i not in bad]
        for i in bad:
            assert engine.lookup([hashes[i]]).hits == 0
            assert explain(daemon, hashes[i]).verdict == admin_pb2.VERDICT_CORRUPT
        sound = [hashes[i] for i in rest]
        found = engine.lookup(sound, lease=True)
        assert found.hits == len(rest)
        assert engine.load(found, rest).wait(DEADLINE_S).done
        compare(engine.read(rest), sound, count)
        status = daemon.status()
        assert status.counters.integrity_failures == len(bad)
        assert status.integrity.corrupt_slots == len(bad)
        count["corruptions_found_by_sampling"] += len(bad)
        assert daemon.metrics()["kvtier_integrity_failures_total.sample.host"] == len(bad)

    daemon.kill()
    second = start(pool__size="130MiB", pool__extent_size="4MiB", integrity__sample_bytes_per_s="1GiB")
    assert second.status().pool.recovered_blocks == len(rest)
    assert second.status().integrity.corrupt_slots == len(bad), "a warm start keeps what was set aside"
    proved(f"{len(bad)} rotten blocks found by sampling before a load could be given them")
