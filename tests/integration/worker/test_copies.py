"""Bytes go where they belong, or the block is reported as failed."""

import time

import numpy as np
import pytest
from kvtier_kernels import PART_ARMED, PART_DONE, PART_FAILED, PART_REVOKED, PART_STARTED
from kvtierd.core.actions import Direction
from kvtierd.core.ids import RegistrationId, SessionId
from kvtierd.core.stimuli import PartFinished, PartOutcome, Signals
from kvtierd.workers.channel.packets import PACKET_BYTES_MAX

from tests.integration.worker.conftest import StartRig
from tests.integration.worker.devices import ALL, GPU_ROWS, on
from tests.integration.worker.rig import PARTS, Client, Layout, Rig, until

pytestmark = on(*ALL, GPU_ROWS)

SLOW_S = 1.0
"""What a chunk takes at least, where slots are taken away from under it."""
TRIES = 20
"""Until what has to come within SLOW_S of the post does: a busy machine may be late, which shows nothing."""


async def test_a_store_puts_every_byte_and_its_checksum_in_place(rig: Rig) -> None:
    client = await rig.client()
    client.fill(1)
    blocks = [5, 0, 63, 17, 18, 19]
    slots = rig.open(len(blocks), client.layout.slot_bytes)
    generations = rig.pool.records.generations(slots)
    part, ticket = rig.post(client, Direction.STORE, blocks, slots)
    finished = await rig.finished(part)
    assert (finished.outcome, finished.message, len(finished.failed)) == (PartOutcome.DONE, "", 0)
    assert client.part_state(ticket) == PART_DONE
    for block, slot in zip(blocks, slots, strict=True):
        assert rig.slot(slot, client.layout.slot_bytes) == client.block(block)
    rig.commit(slots)
    assert rig.pool.records.verify_data(slots, generations).all()
    totals = rig.supervisor.totals[Direction.STORE]
    assert totals.copied_bytes == len(blocks) * client.layout.slot_bytes
    assert totals.outcomes == {"DONE": 1}


@pytest.mark.parametrize("verify", [False, True])
async def test_a_load_puts_every_byte_in_place_and_touches_no_other(rig: Rig, verify: bool) -> None:
    writer = await rig.client()
    writer.fill(2)
    slots = await rig.store(writer, [1, 2, 3, 4])
    reader = await rig.client()
    reader.fill(3)
    before = reader.memory.copy()
    part, ticket = rig.post(reader, Direction.LOAD, [60, 10, 33, 0], slots, verify=verify)
    assert (await rig.finished(part)).outcome == PartOutcome.DONE
    assert reader.part_state(ticket) == PART_DONE
    for source, target in zip([1, 2, 3, 4], [60, 10, 33, 0], strict=True):
        assert reader.block(target) == writer.block(source)
        for base, stride, size in zip(
            reader.layout.bases, reader.layout.strides, reader.layout.fragments, strict=True
        ):
            place = base + target * stride
            before[place : place + size] = reader.memory[place : place + size]
    assert np.array_equal(before, reader.memory)


async def test_the_largest_part_takes_one_packet(start_rig: StartRig) -> None:
    rig = await start_rig(pool_bytes=98 << 20)
    layout = Layout(num_blocks=8_192, fragments=(1_024, 2_048))
    client = await rig.client(layout)
    client.fill(4)
    order = np.random.default_rng(5).permutation(8_192).tolist()
    slots = await rig.store(client, order)
    expected = client.memory.copy()
    client.cache.write(np.zeros_like(expected))
    part, _ = rig.post(client, Direction.LOAD, order, slots, verify=True)
    assert (await rig.finished(part)).outcome == PartOutcome.DONE
    for plane, (base, stride) in enumerate(zip(layout.bases, layout.strides, strict=True)):
        for block in range(0, 8_192, 97):
            place = slice(base + block * stride, base + block * stride + layout.fragments[plane])
            assert np.array_equal(client.memory[place], expected[place])
    many = np.zeros(PACKET_BYTES_MAX // 16, np.uint32)
    with pytest.raises(ValueError, match="too large for one packet"):
        rig.post(client, Direction.LOAD, many.tolist(), many, generations=many.astype(np.uint64))


async def test_a_part_without_blocks_is_done_at_once(rig: Rig) -> None:
    client = await rig.client()
    for direction in Direction:
        part, ticket = rig.post(client, direction, [], np.empty(0, np.uint32))
        assert (await rig.finished(part)).outcome == PartOutcome.DONE
        assert client.part_state(ticket) == PART_DONE


async def test_a_block_whose_bytes_rotted_is_not_loaded_and_the_others_are(rig: Rig) -> None:
    client = await rig.client()
    client.fill(6)
    slots = await rig.store(client, [0, 1, 2])
    rig.pool.array[slots[1] * 4096 + 4_500] ^= 0x40
    sources = [client.block(block) for block in (0, 1, 2)]
    untouched = client.block(11)
    part, ticket = rig.post(client, Direction.LOAD, [10, 11, 12], slots, verify=True)
    finished = await rig.finished(part)
    assert (finished.outcome, finished.corrupt) == (PartOutcome.FAILED, True)
    assert finished.failed.tolist() == [1]
    assert client.part_state(ticket) == PART_FAILED
    assert [client.block(10), client.block(11), client.block(12)] == [sources[0], untouched, sources[2]]


async def test_a_slot_that_was_given_away_is_not_loaded(rig: Rig) -> None:
    client = await rig.client()
    client.fill(7)
    slots = await rig.store(client, [0, 1])
    generations = rig.pool.records.generations(slots)
    rig.pool.records.free(slots[:1])
    sources = [client.block(0), client.block(1)]
    untouched = client.block(20)
    part, _ = rig.post(client, Direction.LOAD, [20, 21], slots, generations=generations)
    finished = await rig.finished(part)
    assert (finished.outcome, finished.corrupt) == (PartOutcome.FAILED, True)
    assert finished.failed.tolist() == [0]
    assert [client.block(20), client.block(21)] == [untouched, sources[1]]


async def load_and_give_away(rig: Rig, client: Client, seed: int) -> tuple[PartFinished, int, bool]:
    """Of two slots the second is given away once its bytes have arrived: how the part ended, its state just
    before, and whether that was in time."""
    client.fill(seed)
    slots = await rig.store(client, [0, 1])
    generations = rig.pool.records.generations(slots)
    posted_s = time.monotonic()
    part, ticket = rig.post(client, Direction.LOAD, [20, 21], slots, generations=generations)
    await until(lambda: client.block(21) == client.block(1), "the bytes to arrive")
    state = client.part_state(ticket)
    rig.pool.records.free(slots[1:])
    in_time = time.monotonic() - posted_s < SLOW_S
    return await rig.finished(part), state, in_time


async def test_a_slot_given_away_during_the_copy_fails_the_load(start_rig: StartRig) -> None:
    rig = await start_rig(fault=f"slow-copy:{SLOW_S * 1_000:.0f}")
    client = await rig.client()
    for seed in range(TRIES):
        finished, state, in_time = await load_and_give_away(rig, client, seed)
        if in_time:
            break
    assert in_time, f"late {TRIES} times"
    assert state == PART_STARTED
    assert (finished.outcome, finished.corrupt) == (PartOutcome.FAILED, True)
    assert finished.failed.tolist() == [1]


async def store_and_take_back(rig: Rig, client: Client) -> tuple[PartFinished, int, bool]:
    """The slots are taken back once the store has started: how it ended, its state then, and whether that was
    in time."""
    slots = rig.open(2, client.layout.slot_bytes)
    posted_s = time.monotonic()
    part, ticket = rig.post(client, Direction.STORE, [0, 1], slots)
    await until(lambda: client.part_state(ticket) != PART_ARMED)
    rig.pool.records.free(slots)
    in_time = time.monotonic() - posted_s < SLOW_S
    finished = await rig.finished(part)
    return finished, client.part_state(ticket), in_time


async def test_a_slot_taken_back_during_the_copy_fails_the_store(start_rig: StartRig) -> None:
    rig = await start_rig(fault=f"slow-copy:{SLOW_S * 1_000:.0f}")
    client = await rig.client()
    for _ in range(TRIES):
        finished, state, in_time = await store_and_take_back(rig, client)
        if in_time:
            break
    assert in_time, f"late {TRIES} times"
    assert finished.outcome == PartOutcome.FAILED
    assert finished.failed.tolist() in ([], [0, 1])  # none named is all of them
    assert state == PART_FAILED


async def test_a_store_into_a_slot_that_is_not_open_fails_and_writes_nothing(rig: Rig) -> None:
    client = await rig.client()
    client.fill(9)
    slots = rig.open(3, client.layout.slot_bytes)
    generations = rig.pool.records.generations(slots)
    generations[1] += 1
    part, _ = rig.post(client, Direction.STORE, [0, 1, 2], slots, generations=generations)
    finished = await rig.finished(part)
    assert (finished.outcome, finished.corrupt) == (PartOutcome.FAILED, False)
    assert finished.failed.tolist() == [1]
    size = client.layout.slot_bytes
    assert rig.slot(slots[1], size) == bytes(size)
    assert rig.slot(slots[2], size) == client.block(2)


async def test_slots_of_another_size_than_the_ranks_blocks_are_not_touched(rig: Rig) -> None:
    """No front posts such a part; if one did, a store would write into the next slot, a load read from it."""
    client = await rig.client()
    client.fill(11)
    before = client.memory.copy()
    small = client.layout.slot_bytes - 4096
    slots = rig.open(3, small)
    part, _ = rig.post(client, Direction.STORE, [0], slots[1:2])
    assert (await rig.finished(part)).outcome == PartOutcome.FAILED
    assert [rig.slot(slot, small) for slot in slots] == [bytes(small)] * 3
    rig.commit(slots)
    part, _ = rig.post(client, Direction.LOAD, [7], slots[:1])
    assert (await rig.finished(part)).outcome == PartOutcome.FAILED
    assert np.array_equal(client.memory, before)


async def test_block_ids_beyond_the_cache_fail_the_part_and_the_worker_lives(rig: Rig) -> None:
    client = await rig.client()
    slots = await rig.store(client, [0, 1])
    part, ticket = rig.post(client, Direction.LOAD, [0, client.layout.num_blocks], slots)
    finished = await rig.finished(part)
    assert finished.outcome == PartOutcome.FAILED
    assert "block_ids" in finished.message
    assert client.part_state(ticket) == PART_FAILED
    await rig.store(client, [3])


async def test_a_part_that_makes_no_sense_fails_unstarted(rig: Rig) -> None:
    client = await rig.client()
    slots = await rig.store(client, [0])
    part, ticket = rig.post(client, Direction.LOAD, [1], slots, registration=RegistrationId(99))
    finished = await rig.finished(part)
    assert finished.outcome == PartOutcome.FAILED
    assert "registration=99" in finished.message
    assert client.part_state(ticket) == PART_REVOKED

    for fields, message in (
        ({"session": SessionId(12345)}, "session=12345"),
        ({"signals": Signals(ticket, PARTS, False)}, f"part_word={PARTS}"),
        ({"signals": Signals(ticket, 0, True, 77, 1)}, "doorbell=77"),
        ({"group": 1}, "group=1"),
    ):
        part, _ = rig.post(client, Direction.LOAD, [1], slots, **fields)
        finished = await rig.finished(part)
        assert finished.outcome == PartOutcome.FAILED
        assert message in finished.message


async def test_a_scribbled_part_word_hurts_nobody_else(rig: Rig) -> None:
    client = await rig.client()
    client.fill(10)
    slots = await rig.store(client, [0, 1])
    for word in range(client.words.count):
        client.words.store(word, 0xFFFF_FFFF_FFFF_FFFF)
    part, _ = rig.post(client, Direction.LOAD, [5, 6], slots)
    finished = await rig.finished(part)
    assert finished.outcome == PartOutcome.REVOKED
    assert "overwritten" in finished.message
    other = await rig.client()
    part, _ = rig.post(other, Direction.LOAD, [5, 6], slots)
    assert (await rig.finished(part)).outcome == PartOutcome.DONE
    assert other.block(5) == client.block(0)
