"""A GPU that fails, hangs, or cannot be had: the damage ends with its own worker."""

import asyncio

import pytest
from kvtier_kernels import PART_FAILED, PART_STARTED
from kvtierd.core.actions import Direction
from kvtierd.core.errors import Reason, Refusal
from kvtierd.core.ids import PartId, Ticket
from kvtierd.core.stimuli import PartOutcome, WorkerExited, WorkerLive, WorkerLost
from kvtierd.workers.supervisor.handles import SupervisorLimits

from tests.integration.worker.conftest import StartRig
from tests.integration.worker.devices import GPU_12, GPU_13, GPU_BATCHES, GPU_LOOP, GPU_ROWS, Gpu, Mode, on
from tests.integration.worker.rig import Client, Layout, Rig, until

pytestmark = [on(GPU_13), pytest.mark.faults]

BATCH = "cuMemcpyBatchAsync_v2"
CALLS = {
    GPU_13: BATCH,
    GPU_12: "cuMemcpyBatchAsync",
    GPU_LOOP: "cuMemcpyAsync",
    GPU_ROWS: "cuMemcpy2DAsync_v2",
}
LAUNCH_FAILED = 719
INVALID_VALUE = 1
LOST = "exited with status 76"


def store(rig: Rig, client: Client) -> tuple[PartId, Ticket]:
    """Posts a store of one block."""
    return rig.post(client, Direction.STORE, [0], rig.open(1, client.layout.slot_bytes))


async def replaced(rig: Rig) -> None:
    """Checks that there is a new worker, announced after the end of the first, and that it works."""
    await rig.successor()
    kinds = (WorkerLive, WorkerLost, WorkerExited)
    told = [type(event) for event in rig.events if isinstance(event, kinds)]
    assert told == [WorkerLive, WorkerLost, WorkerExited, WorkerLive]
    assert rig.supervisor.devices.respawns[rig.device] == 1
    await rig.store(await rig.client(), [0])


@on(GPU_13, GPU_12, GPU_LOOP, GPU_ROWS)
async def test_a_lost_context_ends_the_worker_with_the_part_as_it_stands(
    start_rig: StartRig, gpu: Gpu, mode: Mode
) -> None:
    rig = await start_rig()
    client = await rig.client()
    gpu.fake.arm(CALLS[mode], 1, LAUNCH_FAILED, rig.pid)
    part, ticket = store(rig, client)
    await until(lambda: rig.seen(WorkerExited))
    assert LOST in rig.seen(WorkerLost)[0].why
    assert client.part_state(ticket) == PART_STARTED  # its end is the fence
    assert not rig.is_over(part)
    await replaced(rig)


@pytest.mark.parametrize(
    ("call", "code"),
    [("cuEventSynchronize", 700), ("cuEventRecord", 710), ("cuEventSynchronize", INVALID_VALUE)],
)
async def test_a_copy_of_which_nobody_knows_whether_it_landed_ends_the_worker(
    rig: Rig, gpu: Gpu, call: str, code: int
) -> None:
    client = await rig.client()
    gpu.fake.arm(call, 1, code, rig.pid)
    part, ticket = store(rig, client)
    await until(lambda: rig.seen(WorkerExited))
    assert LOST in rig.seen(WorkerLost)[0].why
    assert client.part_state(ticket) == PART_STARTED
    assert not rig.is_over(part)
    await replaced(rig)


async def test_a_context_lost_while_memory_is_let_go_of_ends_the_worker(rig: Rig, gpu: Gpu) -> None:
    client = await rig.client()
    gpu.fake.arm("cuIpcCloseMemHandle", 1, LAUNCH_FAILED, rig.pid)
    rig.supervisor.orders.release_session(rig.worker, client.session)
    await until(lambda: rig.seen(WorkerExited))
    assert LOST in rig.seen(WorkerLost)[0].why
    await replaced(rig)


async def test_a_context_lost_while_memory_is_taken_refuses_it(rig: Rig, gpu: Gpu) -> None:
    client = rig.new_client()
    await rig.map_words(client)
    gpu.fake.arm("cuIpcOpenMemHandle_v2", 1, LAUNCH_FAILED, rig.pid)
    with pytest.raises(Refusal) as refusal:
        await rig.map_memory(client)
    assert refusal.value.reason == Reason.WORKER_UNAVAILABLE
    await replaced(rig)


@on(GPU_13, GPU_12, GPU_LOOP, GPU_ROWS)
@pytest.mark.parametrize("direction", list(Direction))
async def test_a_copy_that_the_driver_refuses_fails_its_part_and_nothing_else(
    rig: Rig, gpu: Gpu, mode: Mode, direction: Direction
) -> None:
    client = await rig.client()
    slots = (
        await rig.store(client, [5]) if direction is Direction.LOAD else rig.open(1, client.layout.slot_bytes)
    )
    # Small fragments to the device never go in batches.
    call = "cuMemcpy2DAsync_v2" if direction is Direction.LOAD else CALLS[mode]
    gpu.fake.arm(call, 1, INVALID_VALUE, rig.pid)
    part, ticket = rig.post(client, direction, [0], slots)
    finished = await rig.finished(part)
    assert finished.outcome == PartOutcome.FAILED
    assert "CUDA_ERROR_INVALID_VALUE" in finished.message
    assert client.part_state(ticket) == PART_FAILED
    await rig.store(client, [1])
    assert rig.seen(WorkerLost) == []


async def test_other_gpus_do_not_notice(start_rig: StartRig, gpu: Gpu, other_gpu: Gpu) -> None:
    rig = await start_rig(limits=SupervisorLimits(copy_deadline_s=60.0))
    await rig.supervisor.lives.worker_for(other_gpu.name)
    healthy = rig.beside(other_gpu)
    client = await healthy.client(Layout(num_blocks=40, fragments=(1 << 20,)))
    # Its copy takes as long as all that happens to the other.
    gpu.fake.hang("cuEventSynchronize", 1, healthy.pid)
    part, ticket = healthy.post(client, Direction.STORE, range(40), rig.open(40, 1 << 20))
    await until(lambda: client.part_state(ticket) == PART_STARTED)
    victim = await rig.client()
    gpu.fake.arm(BATCH, 1, LAUNCH_FAILED, rig.pid)
    store(rig, victim)
    await until(lambda: rig.seen(WorkerExited))
    assert not healthy.is_over(part)
    gpu.fake.lift(healthy.pid)
    assert (await healthy.finished(part)).outcome == PartOutcome.DONE
    assert len(rig.seen(WorkerLost)) == 1


async def test_memory_that_the_driver_does_not_let_go_of_kills_only_its_worker(
    start_rig: StartRig, gpu: Gpu, other_gpu: Gpu
) -> None:
    rig = await start_rig(limits=SupervisorLimits(release_deadline_s=6.0))
    await rig.supervisor.lives.worker_for(other_gpu.name)
    healthy = rig.beside(other_gpu)
    client, other = await rig.client(), await rig.client()
    gpu.fake.hang("cuIpcCloseMemHandle", 1, rig.pid)
    rig.supervisor.orders.release_session(rig.worker, client.session)
    await until(lambda: gpu.fake.calls("cuIpcCloseMemHandle", rig.pid) == 1)
    await rig.store(other, [0])  # neither its lanes
    await rig.client()  # nor new sessions wait
    await until(lambda: rig.seen(WorkerExited))
    assert "has not released a session" in rig.seen(WorkerLost)[0].why
    await healthy.store(await healthy.client(), [0])
    assert len(rig.seen(WorkerLost)) == 1


@pytest.mark.parametrize("call", [BATCH, "cuEventSynchronize"])
async def test_a_copy_that_hangs_in_the_driver_kills_its_worker(
    start_rig: StartRig, gpu: Gpu, call: str
) -> None:
    rig = await start_rig(limits=SupervisorLimits(copy_deadline_s=4.0))
    client = await rig.client()
    await rig.store(client, [1])
    gpu.fake.hang(call, 1, rig.pid)
    part, ticket = store(rig, client)
    await until(lambda: rig.seen(WorkerExited))
    assert "store lane has been inside one copy call" in rig.seen(WorkerLost)[0].why
    assert client.part_state(ticket) == PART_STARTED
    assert not rig.is_over(part)
    await replaced(rig)
    # Batches hang some drivers.
    [handle] = rig.supervisor.workers.values()
    assert handle.kind.arguments["--copy-method"] == "loop"
    batches, single = gpu.fake.calls(BATCH, handle.pid), gpu.fake.calls("cuMemcpyAsync", handle.pid)
    assert (batches, single > 0) == (0, True)


@on(GPU_BATCHES)
async def test_batches_that_were_asked_for_are_kept_after_a_hang(start_rig: StartRig, gpu: Gpu) -> None:
    rig = await start_rig(limits=SupervisorLimits(copy_deadline_s=4.0))
    client = await rig.client()
    gpu.fake.hang(BATCH, 1, rig.pid)
    store(rig, client)
    await until(lambda: rig.seen(WorkerExited))
    await replaced(rig)
    [handle] = rig.supervisor.workers.values()
    assert gpu.fake.calls(BATCH, handle.pid) > 0


async def test_memory_that_the_driver_does_not_open_kills_its_worker(start_rig: StartRig, gpu: Gpu) -> None:
    rig = await start_rig(limits=SupervisorLimits(gpu_map_deadline_s=4.0))
    client = rig.new_client()
    await rig.map_words(client)
    gpu.fake.hang("cuIpcOpenMemHandle_v2", 1, rig.pid)
    with pytest.raises(Refusal) as refusal:
        await rig.map_memory(client)
    assert refusal.value.reason == Reason.WORKER_UNAVAILABLE
    await replaced(rig)


UNUSABLE = [
    ({"FAKE_CUDA_CONTEXT_FAIL": "2"}, Reason.DEVICE_OUT_OF_MEMORY, "gpu_memory_utilization"),
    ({"FAKE_CUDA_CONTEXT_FAIL": "999"}, Reason.DEVICE_UNAVAILABLE, "CUDA_ERROR_UNKNOWN"),
    ({"FAKE_CUDA_VERSION": "11080"}, Reason.DEVICE_UNAVAILABLE, "update the driver"),
    ({"KVTIER_CUDA_LIBRARY": "/nowhere/libcuda.so.1"}, Reason.DEVICE_UNAVAILABLE, "/nowhere/libcuda.so.1"),
    ({"CUDA_VISIBLE_DEVICES": "1"}, Reason.DEVICE_UNKNOWN, "000000000001"),
    ({"CUDA_VISIBLE_DEVICES": "7"}, Reason.DEVICE_UNKNOWN, "nvidia-smi -L"),
    ({"CUDA_VISIBLE_DEVICES": "1"}, Reason.DEVICE_UNKNOWN, "let the daemon see the engine's GPU"),
]


@pytest.mark.parametrize(
    ("environment", "reason", "said"), UNUSABLE, ids=[next(iter(case[0])) for case in UNUSABLE]
)
async def test_a_gpu_that_cannot_be_served_is_refused_with_what_to_do_and_tried_again_when_asked(
    start_rig: StartRig, environment: dict[str, str], reason: Reason, said: str
) -> None:
    rig = await start_rig(worker=False)
    sound = dict(rig.environment)
    rig.environment.update(environment)
    for _ in range(2):
        with pytest.raises(Refusal) as refusal:
            await rig.supervisor.lives.worker_for(rig.device)
        assert refusal.value.reason == reason
        assert said in refusal.value.message
        await until(lambda: not rig.supervisor.workers)
    assert rig.events == []
    rig.environment.clear()
    rig.environment.update(sound)
    await rig.supervisor.lives.worker_for(rig.device)
    await rig.store(await rig.client(), [0])


async def test_a_slice_of_a_gpu_is_refused(start_rig: StartRig) -> None:
    rig = await start_rig(worker=False, environment={"FAKE_CUDA_MIG": "1"})
    with pytest.raises(Refusal, match="MIG") as refusal:
        await rig.supervisor.lives.worker_for(rig.device.replace("-8000-", "-8100-"))
    assert refusal.value.reason == Reason.DEVICE_UNKNOWN


@on(Mode("gpu-batch", 12_040, "batch"))
async def test_a_method_that_the_driver_has_not_is_refused(start_rig: StartRig) -> None:
    rig = await start_rig(worker=False)
    with pytest.raises(Refusal, match="gpu_copy_method") as refusal:
        await rig.supervisor.lives.worker_for(rig.device)
    assert refusal.value.reason == Reason.DEVICE_UNAVAILABLE


async def test_a_worker_that_no_session_uses_ends_and_frees_its_context(
    start_rig: StartRig, gpu: Gpu
) -> None:
    rig = await start_rig(limits=SupervisorLimits(gpu_idle_s=0.5), worker=False)
    ours = gpu.fake.hbm_used(contexts=True)
    await rig.supervisor.lives.worker_for(rig.device)
    client = await rig.client()
    assert gpu.fake.hbm_used(contexts=True) > ours
    await asyncio.sleep(1.0)
    await rig.store(client, [0])  # it is used, if only by what is mapped
    rig.supervisor.orders.release_session(rig.worker, client.session)
    await until(lambda: rig.seen(WorkerExited))
    client.cache.close()
    assert gpu.fake.hbm_used(contexts=True) == ours
    rig.clients.clear()
    await rig.supervisor.lives.worker_for(rig.device)
    assert rig.supervisor.devices.respawns[rig.device] == 0
    await rig.store(await rig.client(), [0])
