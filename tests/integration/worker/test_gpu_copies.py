"""Copies that take their time, as a GPU's do: what overtakes what, and how they end early."""

import asyncio

import numpy as np
from kvtier_kernels import PART_DONE, PART_FAILED, PART_REVOKED, PART_STARTED
from kvtierd.core.actions import Direction
from kvtierd.core.stimuli import PartFinished, PartOutcome, SessionReleased
from kvtierd.workers.copy.gpu.pacing import STEPPING_S
from kvtierd.workers.lane_chunks import LaneChunks, Pacing
from kvtierd.workers.supervisor.handles import SupervisorLimits

from tests.integration.worker.conftest import StartRig
from tests.integration.worker.devices import GPU_12, GPU_13, GPU_LOOP, GPU_ROWS, Gpu, on
from tests.integration.worker.rig import Client, Layout, Rig, until

pytestmark = on(GPU_13)

MIB = 1 << 20
BIG = Layout(num_blocks=96, fragments=(MIB,))
"""16 blocks a chunk of a store, 32 of a load."""

SLOW = {"FAKE_CUDA_BANDWIDTH": str(64 * MIB)}
"""Bytes per second in each direction: a store's chunk takes a quarter of a second, a load's half of one."""

POOL = 194 * MIB

BATCH, LANDING = "cuMemcpyBatchAsync_v2", "cuEventSynchronize"

PATIENT = SupervisorLimits(copy_deadline_s=60.0)
"""Where a copy is held for as long as a test needs, however slow the machine: nobody takes it for a hang."""


def hold(rig: Rig, gpu: Gpu) -> None:
    """The next chunk to land waits for `release`, and so does all of its lane once two are on their way."""
    gpu.fake.hang(LANDING, 1, rig.pid)


def release(rig: Rig, gpu: Gpu) -> None:
    gpu.fake.lift(rig.pid)


async def filled(rig: Rig, blocks: int) -> np.ndarray:
    """Slots with random blocks of the size of BIG's, made without a copy."""
    slots = rig.open(blocks, BIG.slot_bytes)
    random = np.random.default_rng(4)
    for slot in slots:
        start = int(slot) * 4096
        rig.pool.array[start : start + BIG.slot_bytes] = random.integers(0, 256, BIG.slot_bytes, np.uint8)
    rig.commit(slots)
    return slots


async def test_two_chunks_are_on_their_way_and_no_more(start_rig: StartRig, gpu: Gpu) -> None:
    rig = await start_rig(environment=SLOW, pool_bytes=POOL)
    client = await rig.client(BIG)
    part, ticket = rig.post(client, Direction.STORE, range(80), rig.open(80, BIG.slot_bytes))
    await until(lambda: client.part_state(ticket) == PART_STARTED)
    seen = []
    while not rig.is_over(part):
        landed, submitted = gpu.fake.calls(LANDING, rig.pid), gpu.fake.calls(BATCH, rig.pid)
        if gpu.fake.calls(LANDING, rig.pid) == landed:  # else some time has passed between the two looks
            seen.append((submitted, submitted - landed))
        await asyncio.sleep(0.01)
    assert (await rig.finished(part)).outcome == PartOutcome.DONE
    # While the oldest is waited for, that is one call more than have landed.
    assert max((ahead for _, ahead in seen), default=0) <= 2
    last = gpu.fake.calls(BATCH, rig.pid)
    assert {ahead for submitted, ahead in seen if 0 < submitted < last} <= {1, 2}


async def submissions(rig: Rig, gpu: Gpu, client: Client, *, doorbell: int | None = None) -> int:
    """Stores 24 blocks; returns with how many submissions to the driver."""
    before = gpu.fake.calls(BATCH, rig.pid)
    gate = None if doorbell is None else (doorbell, 1)
    part, _ = rig.post(client, Direction.STORE, range(24), rig.open(24, BIG.slot_bytes), gate=gate)
    if doorbell is not None:
        client.ring(doorbell, 1)
    assert (await rig.finished(part)).outcome == PartOutcome.DONE
    return gpu.fake.calls(BATCH, rig.pid) - before


async def test_chunks_are_small_while_an_engine_computes(start_rig: StartRig, gpu: Gpu) -> None:
    rig = await start_rig(pool_bytes=POOL)
    client = await rig.client(BIG)
    assert await submissions(rig, gpu, client) == 2
    assert await submissions(rig, gpu, client, doorbell=0) == 3, "after a step of the engine"
    assert await submissions(rig, gpu, client) == 3, "and a moment later still"
    await asyncio.sleep(STEPPING_S)
    assert await submissions(rig, gpu, client) == 2


async def test_the_chunks_can_be_chosen(start_rig: StartRig, gpu: Gpu) -> None:
    chunks = LaneChunks(store_bytes=8 * MIB, flights=4, pacing=Pacing.NEVER)
    rig = await start_rig(pool_bytes=POOL, chunks=chunks, limits=PATIENT)
    client = await rig.client(BIG)
    assert await submissions(rig, gpu, client, doorbell=0) == 3
    hold(rig, gpu)
    before = gpu.fake.calls(BATCH, rig.pid)
    part, _ = rig.post(client, Direction.STORE, range(64), rig.open(64, BIG.slot_bytes))
    await until(lambda: gpu.fake.calls(BATCH, rig.pid) == before + 4, "four are under way")
    release(rig, gpu)
    assert (await rig.finished(part)).outcome == PartOutcome.DONE


async def test_a_paced_lane_has_one_chunk_under_way(start_rig: StartRig, gpu: Gpu) -> None:
    chunks = LaneChunks(pacing=Pacing.ALWAYS, paced_bytes=2 * MIB)
    rig = await start_rig(pool_bytes=POOL, chunks=chunks, limits=PATIENT)
    client = await rig.client(BIG)
    hold(rig, gpu)
    part, _ = rig.post(client, Direction.STORE, range(8), rig.open(8, BIG.slot_bytes))
    await until(lambda: gpu.fake.calls(LANDING, rig.pid) == 1, "the first is waited for")
    assert gpu.fake.calls(BATCH, rig.pid) == 1
    release(rig, gpu)
    assert (await rig.finished(part)).outcome == PartOutcome.DONE
    assert gpu.fake.calls(BATCH, rig.pid) == 4


async def test_a_withdrawn_store_stores_nothing(start_rig: StartRig, gpu: Gpu) -> None:
    rig = await start_rig(environment=SLOW, pool_bytes=POOL, limits=PATIENT)
    client = await rig.client(BIG)
    hold(rig, gpu)
    part, ticket = rig.post(client, Direction.STORE, range(64), rig.open(64, BIG.slot_bytes))
    await until(lambda: client.part_state(ticket) == PART_STARTED)
    assert client.withdraw(ticket)
    release(rig, gpu)
    finished = await rig.finished(part)
    assert (finished.outcome, finished.failed.tolist()) == (PartOutcome.REVOKED, [])
    assert client.part_state(ticket) == PART_REVOKED


async def test_a_queued_part_is_revoked_while_another_copies(start_rig: StartRig, gpu: Gpu) -> None:
    rig = await start_rig(environment=SLOW, pool_bytes=POOL, limits=PATIENT)
    client = await rig.client(BIG)
    slots = await filled(rig, 48)
    hold(rig, gpu)
    first, started = rig.post(client, Direction.LOAD, range(40), slots[:40])
    second, ticket = rig.post(client, Direction.LOAD, range(40, 44), slots[40:44])
    third, asked = rig.post(client, Direction.LOAD, range(44, 48), slots[44:])
    await until(lambda: client.part_state(started) == PART_STARTED)
    before = client.block(44)
    rig.supervisor.orders.revoke(rig.worker, third)
    assert (await rig.finished(third)).outcome == PartOutcome.REVOKED
    assert not rig.is_over(first)
    assert client.part_state(asked) == PART_REVOKED
    release(rig, gpu)
    for part in (first, second):
        assert (await rig.finished(part)).outcome == PartOutcome.DONE
    assert client.block(44) == before
    assert client.part_state(ticket) == PART_DONE


async def test_release_in_the_middle_of_a_load_is_its_fence(start_rig: StartRig, gpu: Gpu) -> None:
    rig = await start_rig(environment=SLOW, pool_bytes=POOL, limits=PATIENT)
    client = await rig.client(BIG)
    slots = await filled(rig, 96)
    hold(rig, gpu)
    part, ticket = rig.post(client, Direction.LOAD, range(96), slots)
    queued, _ = rig.post(client, Direction.LOAD, range(1), slots[:1])
    await until(lambda: client.block(0) == rig.slot(int(slots[0]), BIG.slot_bytes), "bytes to arrive")
    rig.supervisor.orders.release_session(rig.worker, client.session)
    assert (await rig.finished(queued)).outcome == PartOutcome.REVOKED  # so the worker knows
    release(rig, gpu)
    await until(lambda: client.part_state(ticket) == PART_FAILED)
    client.fill(5)  # from here on its memory is its own
    after = client.memory.copy()
    await rig.released(client.session)
    assert (await rig.finished(part)).outcome == PartOutcome.FAILED
    assert [type(event) for event in rig.events[-2:]] == [PartFinished, SessionReleased]
    assert rig.mapped() == []
    await asyncio.sleep(0.5)
    assert np.array_equal(client.memory, after)


async def test_release_in_the_middle_of_a_store_leaves_its_rest_undone(start_rig: StartRig, gpu: Gpu) -> None:
    rig = await start_rig(environment=SLOW, pool_bytes=POOL, limits=PATIENT)
    client = await rig.client(BIG)
    client.fill(6)
    slots = rig.open(97, BIG.slot_bytes)
    hold(rig, gpu)
    part, ticket = rig.post(client, Direction.STORE, range(96), slots[:96])
    queued, _ = rig.post(client, Direction.STORE, range(1), slots[96:])
    await until(lambda: client.part_state(ticket) == PART_STARTED)
    rig.supervisor.orders.release_session(rig.worker, client.session)
    assert (await rig.finished(queued)).outcome == PartOutcome.REVOKED  # so the worker knows
    release(rig, gpu)
    await rig.released(client.session)
    assert (await rig.finished(part)).outcome == PartOutcome.FAILED
    assert [type(event) for event in rig.events[-2:]] == [PartFinished, SessionReleased]
    assert client.part_state(ticket) == PART_FAILED
    assert gpu.fake.calls(BATCH, rig.pid) <= 3  # of six
    assert rig.mapped() == []


async def test_sessions_take_turns(start_rig: StartRig, gpu: Gpu) -> None:
    """A session's small load does not wait for all that another has asked for before."""
    rig = await start_rig(environment=SLOW, pool_bytes=POOL, limits=PATIENT)
    large, small = await rig.client(BIG), await rig.client(BIG)
    slots = await filled(rig, 97)
    hold(rig, gpu)
    parts = [rig.post(large, Direction.LOAD, range(96), slots[:96]) for _ in range(2)]
    (first, ticket), (last, _) = parts
    await until(lambda: large.part_state(ticket) == PART_STARTED)
    quick, _ = rig.post(small, Direction.LOAD, [0], slots[96:])
    await rig.client()  # is answered after that has been queued
    release(rig, gpu)
    assert (await rig.finished(quick)).outcome == PartOutcome.DONE
    rig.supervisor.orders.release_session(rig.worker, large.session)
    await rig.released(large.session)
    assert rig.is_over(first)
    ended = [event.part for event in rig.seen(PartFinished)]
    assert ended.index(quick) < ended.index(last)


async def test_a_load_takes_the_link_from_a_store_that_has_begun(start_rig: StartRig, gpu: Gpu) -> None:
    rig = await start_rig(environment=SLOW, pool_bytes=POOL, limits=PATIENT)
    client = await rig.client(BIG)
    slots = await filled(rig, 40)
    hold(rig, gpu)
    store, ticket = rig.post(client, Direction.STORE, range(40, 64), rig.open(24, BIG.slot_bytes))
    await until(lambda: gpu.fake.calls(LANDING, rig.pid) == 1, "the store to be held, and nothing else")
    assert client.part_state(ticket) == PART_STARTED
    load, _ = rig.post(client, Direction.LOAD, range(4), slots[:4])
    assert (await rig.finished(load)).outcome == PartOutcome.DONE
    assert not rig.is_over(store)
    release(rig, gpu)
    assert (await rig.finished(store)).outcome == PartOutcome.DONE


async def test_blocks_are_the_engines_again_before_they_are_sealed(start_rig: StartRig) -> None:
    """Word DONE, then checksums, then the report that lets the core commit: at the report all is in place."""
    rig = await start_rig(pool_bytes=POOL)
    client = await rig.client(BIG)
    client.fill(7)
    slots = rig.open(64, BIG.slot_bytes)
    generations = rig.pool.records.generations(slots)
    part, ticket = rig.post(client, Direction.STORE, range(64), slots)
    await until(lambda: client.part_state(ticket) == PART_DONE)
    kept = [client.block(block) for block in range(64)]
    client.fill(8)  # what the engine writes next
    assert (await rig.finished(part)).outcome == PartOutcome.DONE
    rig.commit(slots)
    assert rig.pool.records.verify_data(slots, generations).all()
    assert [rig.slot(int(slot), BIG.slot_bytes) for slot in slots] == kept


@on(GPU_13, GPU_12, GPU_LOOP, GPU_ROWS)
async def test_every_method_copies_runs_of_any_order(start_rig: StartRig, gpu: Gpu) -> None:
    """Many small fragments, blocks up, down and shuffled: nothing that the driver refuses, no byte wrong."""
    rig = await start_rig(pool_bytes=98 * MIB)
    layout = Layout(num_blocks=1_000, fragments=(2_048, 1_024, 1_024))
    client = await rig.client(layout)
    random = np.random.default_rng(9)
    for order in (list(range(1_000)), list(range(999, -1, -1)), random.permutation(1_000).tolist()):
        client.fill(10)
        blocks = [client.block(block) for block in order]
        slots = await rig.store(client, order)
        assert [rig.slot(int(slot), layout.slot_bytes) for slot in slots] == blocks
        client.fill(11)
        part, _ = rig.post(client, Direction.LOAD, order[::-1], slots, verify=True)
        assert (await rig.finished(part)).outcome == PartOutcome.DONE
        assert [client.block(block) for block in order[::-1]] == blocks
    assert gpu.fake.refusals() == []
