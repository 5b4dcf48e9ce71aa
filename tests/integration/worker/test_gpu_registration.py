"""The pool's registration with the driver: on first use, in the background, by one process at a time."""

import asyncio
import fcntl

from kvtierd.core.actions import Direction
from kvtierd.core.stimuli import PartOutcome, WorkerExited, WorkerLost
from kvtierd.workers.channel.status import StatusWord
from kvtierd.workers.copy.gpu.device import REGISTER_REST_S
from kvtierd.workers.lane_chunks import LaneChunks, Pacing
from kvtierd.workers.supervisor.handles import SupervisorLimits

from tests.integration.worker.conftest import StartRig
from tests.integration.worker.devices import GPU_13, GPU_ROWS, Gpu, on
from tests.integration.worker.rig import Layout, Rig, until

pytestmark = on(GPU_13)

MIB = 1 << 20
LAYOUT = Layout(num_blocks=8, fragments=(MIB, MIB))

TWO_AREAS = 290 * MIB
"""16 extents, which are registered at one go, and one."""

REGISTERS = "cuMemHostRegister_v2"


def extents_bytes(rig: Rig) -> int:
    return rig.pool.geometry.extents * rig.pool.geometry.extent_bytes


def registered_bytes(rig: Rig) -> int:
    return rig.supervisor.status_word(rig.worker, StatusWord.REGISTERED_BYTES)


async def registered(rig: Rig, size: int) -> None:
    await until(lambda: registered_bytes(rig) == size, f"{size} bytes to be registered")


async def test_an_idle_worker_registers_the_whole_pool(start_rig: StartRig, gpu: Gpu) -> None:
    rig = await start_rig(pool_bytes=TWO_AREAS)
    await registered(rig, extents_bytes(rig))
    assert gpu.fake.calls(REGISTERS, rig.pid) == 2
    await rig.store(await rig.client(LAYOUT), [0, 1])
    assert gpu.fake.calls(REGISTERS, rig.pid) == 2


async def test_while_an_engine_computes_the_pool_is_registered_with_rests(
    start_rig: StartRig, gpu: Gpu
) -> None:
    """Registering may stop an engine's kernels for a moment."""
    rig = await start_rig(pool_bytes=TWO_AREAS, chunks=LaneChunks(pacing=Pacing.ALWAYS))
    await until(lambda: gpu.fake.calls(REGISTERS, rig.pid) == 1)
    began_s = asyncio.get_running_loop().time()
    await registered(rig, extents_bytes(rig))
    assert asyncio.get_running_loop().time() - began_s > REGISTER_REST_S / 2


async def test_a_worker_that_is_killed_has_the_longer_to_end_the_more_it_has_registered(
    start_rig: StartRig, gpu: Gpu
) -> None:
    limits = SupervisorLimits(unpin_bytes_per_s=1 * MIB)
    rig = await start_rig(pool_bytes=TWO_AREAS, limits=limits)
    await registered(rig, extents_bytes(rig))
    [handle] = rig.supervisor.workers.values()
    rig.supervisor.lives.lose(handle, "a test")
    assert handle.end_s == limits.kill_deadline_s + extents_bytes(rig) / MIB
    await until(lambda: rig.seen(WorkerExited), "its end does not wait for that")


async def test_a_copy_has_registered_what_it_needs(start_rig: StartRig, gpu: Gpu) -> None:
    """Where the background could not register it."""
    rig = await start_rig(pool_bytes=TWO_AREAS, environment={"FAKE_CUDA_FAIL": f"{REGISTERS}:1:2"})
    client = await rig.client(LAYOUT)
    await until(lambda: gpu.fake.calls(REGISTERS, rig.pid) == 2)
    assert registered_bytes(rig) < extents_bytes(rig)
    slots = [rig.open(1, LAYOUT.slot_bytes) for _ in range(120)]  # in both areas
    for slot in (slots[0], slots[-1]):
        part, _ = rig.post(client, Direction.STORE, [1], slot)
        assert (await rig.finished(part)).outcome == PartOutcome.DONE
    await registered(rig, extents_bytes(rig))


@on(GPU_13, GPU_ROWS)
async def test_no_copy_spans_two_registrations(start_rig: StartRig, gpu: Gpu) -> None:
    """Slots on both sides of the border between two areas, equally far from each other, as rows would be."""
    rig = await start_rig(pool_bytes=TWO_AREAS)
    client = await rig.client(LAYOUT)
    client.fill(1)
    slots = rig.open(120, LAYOUT.slot_bytes)
    border = 2 * MIB + 256 * MIB
    behind = int((slots.astype(int) * 4096 >= border).argmax())
    assert 0 < behind < len(slots) - 4
    around = slots[behind - 4 : behind + 4]
    part, _ = rig.post(client, Direction.STORE, range(8), around)
    assert (await rig.finished(part)).outcome == PartOutcome.DONE
    rig.commit(around)
    kept = [client.block(block) for block in range(8)]
    assert [rig.slot(int(slot), LAYOUT.slot_bytes) for slot in around] == kept
    client.fill(2)
    part, _ = rig.post(client, Direction.LOAD, range(8), around, verify=True)
    assert (await rig.finished(part)).outcome == PartOutcome.DONE
    assert [client.block(block) for block in range(8)] == kept
    assert gpu.fake.refusals() == []


async def test_a_part_of_the_pool_that_cannot_be_registered_fails_what_needs_it(
    start_rig: StartRig, gpu: Gpu
) -> None:
    rig = await start_rig(environment={"FAKE_CUDA_FAIL": f"{REGISTERS}:*:2"})
    client = await rig.client(LAYOUT)
    part, _ = rig.post(client, Direction.STORE, [0], rig.open(1, LAYOUT.slot_bytes))
    finished = await rig.finished(part)
    assert finished.outcome == PartOutcome.FAILED
    assert "registered" in finished.message
    gpu.fake.lift(rig.pid)
    await rig.store(client, [0])


async def test_two_workers_register_one_after_the_other(
    start_rig: StartRig, gpu: Gpu, other_gpu: Gpu
) -> None:
    limits = SupervisorLimits(copy_deadline_s=60.0)
    rig = await start_rig(limits=limits, environment={"FAKE_CUDA_HANG": f"{REGISTERS}:1"})
    await until(lambda: gpu.fake.calls(REGISTERS, rig.pid) == 1, "the first to begin")
    del rig.environment["FAKE_CUDA_HANG"]
    await rig.supervisor.lives.worker_for(other_gpu.name)
    second = rig.beside(other_gpu)
    await asyncio.sleep(0.5)
    assert gpu.fake.calls(REGISTERS, second.pid) == 0
    gpu.fake.lift(rig.pid)
    for each in (rig, second):
        await each.store(await each.client(LAYOUT), [0])
        await registered(each, extents_bytes(rig))
    assert gpu.fake.refusals() == []


async def test_a_worker_that_hangs_in_registering_is_killed_and_the_others_go_on(
    start_rig: StartRig, gpu: Gpu, other_gpu: Gpu
) -> None:
    rig = await start_rig(limits=SupervisorLimits(copy_deadline_s=8.0), worker=False)
    # The other one first, so that it is asked at once: its background cannot register the pool.
    rig.environment["FAKE_CUDA_FAIL"] = f"{REGISTERS}:1:2"
    await rig.supervisor.lives.worker_for(other_gpu.name)
    healthy = rig.beside(other_gpu)
    await until(lambda: gpu.fake.calls(REGISTERS, healthy.pid) == 1, "the other to have tried")
    client = await healthy.client(LAYOUT)
    slots = healthy.open(1, LAYOUT.slot_bytes)
    del rig.environment["FAKE_CUDA_FAIL"]
    rig.environment["FAKE_CUDA_HANG"] = f"{REGISTERS}:1"
    await rig.supervisor.lives.worker_for(rig.device)
    await until(lambda: gpu.fake.calls(REGISTERS, rig.pid) == 1, "the one to begin")
    part, _ = healthy.post(client, Direction.STORE, [0], slots)
    # It waits for less time than would make it look stuck itself.
    finished = await healthy.finished(part)
    assert finished.outcome == PartOutcome.FAILED
    assert "another GPU's worker has been registering" in finished.message
    await until(lambda: rig.seen(WorkerLost))
    assert "registering the pool" in rig.seen(WorkerLost)[0].why
    part, _ = healthy.post(client, Direction.STORE, [0], slots)
    assert (await healthy.finished(part)).outcome == PartOutcome.DONE


async def test_the_background_goes_on_however_long_others_have_been_registering(
    start_rig: StartRig, gpu: Gpu
) -> None:
    """With eight GPUs that is no rarity; the pool is to be ready before it is needed all the same."""
    rig = await start_rig(limits=SupervisorLimits(copy_deadline_s=3.0), worker=False)
    fcntl.lockf(rig.pool.fd, fcntl.LOCK_EX)
    await rig.supervisor.lives.worker_for(rig.device)
    await asyncio.sleep(5)  # several times what a lane would wait
    assert registered_bytes(rig) == 0
    fcntl.lockf(rig.pool.fd, fcntl.LOCK_UN)
    await registered(rig, extents_bytes(rig))
    assert rig.seen(WorkerLost) == []
