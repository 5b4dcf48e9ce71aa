"""What the binding and the copy worker take for granted of a driver: asked of the real one, and of the fake
one too, so that a difference between them is found here and not in the data plane."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import time
from collections.abc import Iterator

import numpy as np
import pytest
from kvtier_kernels import PAGE_BYTES, DevicePlan, xxh3_64
from kvtier_kernels.cuda import Copies, CopyMethod, CudaError

from tests.gpu.conftest import Place, places
from tests.gpu.parts.child import Child, ChildError
from tests.gpu.parts.content import random_bytes
from tests.gpu.parts.device import Device
from tests.gpu.parts.fragments import blocks_in_runs
from tests.gpu.parts.host import HostMemory

MIB = 1 << 20
REGION_BYTES = 8 * MIB
WAIT_S = 30.0
ALREADY_REGISTERED, NOT_REGISTERED = 712, 713

pytestmark = pytest.mark.parametrize("place", places(real=("driver",), fake=("driver",)), indirect=True)


@pytest.fixture
def host(device: Device) -> Iterator[HostMemory]:
    """Registered, of random content."""
    with HostMemory(REGION_BYTES) as memory:
        yield memory.fill().register(device.driver)


def test_gpus_have_the_names_that_nvidia_smi_gives_them(place: Place, device: Device) -> None:
    names = [info.name for info in device.driver.devices()]
    assert device.info.name in names
    if place.real and shutil.which("nvidia-smi"):
        listed = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=WAIT_S, check=True
        )
        assert f"UUID: {device.info.name}" in listed.stdout


@pytest.mark.parametrize("method", [None, CopyMethod.BATCH, CopyMethod.LOOP], ids=["usual", "12.8", "loop"])
def test_ten_thousand_scattered_fragments_arrive_and_nothing_else_is_touched(
    device: Device, host: HostMemory, method: CopyMethod | None
) -> None:
    """Of any size and any alignment, both ways."""
    copies, stream, rng = Copies(device.driver, method), device.stream(), np.random.default_rng()
    address = device.alloc(REGION_BYTES)
    before = random_bytes(REGION_BYTES)
    device.write(address, before)
    count, room = 10_000, REGION_BYTES // 10_000
    sizes = rng.integers(1, room, count).astype(np.uint64)
    source = (rng.permutation(count) * room + rng.integers(0, 7, count)).astype(np.uint64)
    target = (rng.permutation(count) * room + rng.integers(0, 7, count)).astype(np.uint64)
    fits = (source + sizes <= REGION_BYTES) & (target + sizes <= np.uint64(REGION_BYTES))
    # A fragment may reach into the next place's first bytes: shortened, so that no two targets overlap.
    sizes = np.minimum(sizes, np.uint64(room - 8))[fits]
    source, target = source[fits], target[fits]
    expected = before.copy()
    for n, where, to in zip(sizes.tolist(), source.tolist(), target.tolist(), strict=True):
        expected[to : to + n] = host.array[where : where + n]
    copies.to_device(target + np.uint64(address), source + np.uint64(host.address), sizes, stream)
    device.driver.stream_synchronize(stream)
    assert np.array_equal(device.read(address, REGION_BYTES), expected)

    back = host.fill().array.copy()
    for n, where, to in zip(sizes.tolist(), source.tolist(), target.tolist(), strict=True):
        back[where : where + n] = expected[to : to + n]
    copies.to_host(source + np.uint64(host.address), target + np.uint64(address), sizes, stream)
    device.driver.stream_synchronize(stream)
    assert np.array_equal(host.array, back)


@pytest.mark.parametrize("run_blocks", [1, 4])
@pytest.mark.parametrize("rows", [False, True], ids=["batch", "rows"])
def test_planned_blocks_go_to_slots_and_back(
    device: Device, host: HostMemory, rows: bool, run_blocks: int
) -> None:
    planes, fragment, num_blocks, count = 8, 4_096, 128, 32
    address = device.alloc(planes * fragment * num_blocks)
    device.write(address, random_bytes(planes * fragment * num_blocks))
    bases = np.uint64(address) + np.arange(planes, dtype=np.uint64) * np.uint64(num_blocks * fragment)
    same = np.full(planes, fragment, np.uint64)
    plan = DevicePlan(bases, same, same, num_blocks)
    rng, stream, copies = np.random.default_rng(), device.stream(), Copies(device.driver)
    ids = blocks_in_runs(num_blocks, count, run_blocks, rng)
    pages = plan.slot_bytes // PAGE_BYTES
    slots = (1 + pages * blocks_in_runs(host.n // plan.slot_bytes - 1, count, run_blocks, rng)).astype(
        np.uint32
    )

    def move(to_device: bool) -> None:
        if rows:
            device_at, host_at, width, n, device_pitch, host_pitch = plan.describe_rows(
                ids, host.address, host.n, slots, to_device
            )
            call = copies.rows_to_device if to_device else copies.rows_to_host
            call(device_at, host_at, width, n, device_pitch, host_pitch, stream)
        else:
            on_device, in_host, sizes = plan.describe(ids, host.address, host.n, slots, to_device)
            if to_device:
                copies.to_device(on_device, in_host, sizes, stream)
            else:
                copies.to_host(in_host, on_device, sizes, stream)
        device.driver.stream_synchronize(stream)

    before = device.read(address, planes * fragment * num_blocks).reshape(planes, num_blocks, fragment)
    untouched = host.array.copy()
    move(to_device=False)
    for block, slot in zip(ids.tolist(), slots.tolist(), strict=True):
        place = slice(slot * PAGE_BYTES, slot * PAGE_BYTES + plan.slot_bytes)
        assert np.array_equal(host.array[place], before[:, block].reshape(-1))
        untouched[place] = host.array[place]
    assert np.array_equal(host.array, untouched)

    host.fill()
    move(to_device=True)
    after = device.read(address, planes * fragment * num_blocks).reshape(planes, num_blocks, fragment)
    for block, slot in zip(ids.tolist(), slots.tolist(), strict=True):
        place = slice(slot * PAGE_BYTES, slot * PAGE_BYTES + plan.slot_bytes)
        assert np.array_equal(after[:, block].reshape(-1), host.array[place])
    others = np.delete(np.arange(num_blocks), ids)
    assert np.array_equal(after[:, others], before[:, others])


def test_what_an_address_is(device: Device, host: HostMemory) -> None:
    driver = device.driver
    address = device.alloc(3 * MIB)
    inside = driver.pointer_info(address + MIB + 7)
    assert (inside.is_device, inside.ordinal, inside.base) == (True, device.info.ordinal, address)
    assert inside.size >= 3 * MIB
    assert inside.is_legacy_ipc_capable
    assert inside.buffer_id != driver.pointer_info(device.alloc(MIB)).buffer_id
    assert not driver.pointer_info(host.address).is_device
    assert not driver.pointer_info(random_bytes(64).ctypes.data).is_device


def test_what_an_address_of_chunks_is(device: Device) -> None:
    driver, ordinal = device.driver, device.info.ordinal
    n = driver.chunk_granularity(ordinal)
    address = driver.reserve(n)
    chunk = driver.chunk_create(n, ordinal)
    driver.map_chunk(address, n, chunk)
    driver.allow_access(address, n, ordinal)
    info = driver.pointer_info(address + 5)
    assert (info.is_device, info.is_legacy_ipc_capable, info.allowed_handle_types & 1) == (True, False, 1)
    with pytest.raises(CudaError) as refused:
        driver.ipc_export(address)
    assert not refused.value.sticky
    driver.unmap(address, n)
    driver.chunk_release(chunk)
    driver.unreserve(address, n)


def test_a_freed_allocation_that_comes_back_has_another_buffer_id(device: Device) -> None:
    """Its handle may have the same bytes: what the daemon tells the two apart by is this number."""
    driver = device.driver
    seen = set()
    for _ in range(20):
        address = driver.alloc(4 * MIB)
        seen.add(driver.pointer_info(address).buffer_id)
        driver.free(address)
    assert len(seen) == 20


def test_mistakes_are_refused_and_cost_nothing_but_themselves(device: Device, host: HostMemory) -> None:
    driver = device.driver
    address = device.alloc(MIB)
    handle = driver.ipc_export(address)
    for call, codes in (
        (lambda: driver.host_register(host.address, host.n), {ALREADY_REGISTERED}),
        (lambda: driver.host_unregister(host.address + PAGE_BYTES), {1, NOT_REGISTERED}),
        (lambda: driver.ipc_open(handle), None),  # its own; what a driver calls it differs
        (lambda: driver.ipc_open(bytes(64)), None),
        (lambda: driver.ipc_close(address), None),
        (lambda: driver.free(address + 1), {1}),
    ):
        with pytest.raises(CudaError) as refused:
            call()
        assert codes is None or refused.value.code in codes, str(refused.value)
        assert not refused.value.sticky
    content = random_bytes(MIB)
    device.write(address, content)
    assert np.array_equal(device.read(address, MIB), content)


def test_a_doorbell_is_written_after_what_the_stream_did_before(device: Device, host: HostMemory) -> None:
    """And what was copied before it is in memory when it is seen."""
    driver, stream, copies = device.driver, device.stream(), Copies(device.driver)
    address = device.alloc(REGION_BYTES)
    sizes = np.array([REGION_BYTES], np.uint64)
    with HostMemory(PAGE_BYTES, "4k") as page:
        page.register(driver)
        word = ctypes.c_uint64.from_address(page.address)
        where = driver.host_device_pointer(page.address)
        for turn in range(1, 21):
            content = random_bytes(REGION_BYTES)
            device.write(address, content)
            copies.to_host(np.array([host.address], np.uint64), np.array([address], np.uint64), sizes, stream)
            driver.write_value(stream, where, turn)
            end = time.monotonic() + WAIT_S
            while word.value != turn:
                assert time.monotonic() < end, f"the word still says {word.value}"
            assert np.array_equal(host.array, content)


def test_the_handle_of_a_dead_process_opens_nothing(device: Device) -> None:
    with Child("tests.gpu.children.owner") as owner:
        [handle] = owner.ask("legacy", bytes=MIB, count=1)["handles"]
        owner.kill()
    with pytest.raises(CudaError) as refused:
        device.driver.ipc_open(bytes.fromhex(handle))
    assert not refused.value.sticky


def test_what_another_process_writes_is_seen(device: Device) -> None:
    n = 2 * MIB
    address, content = device.alloc(n), random_bytes(n)
    device.write(address, content)
    with Child("tests.gpu.children.reader") as reader:
        handle = device.driver.ipc_export(address).hex()
        assert reader.ask("read", handle=handle, bytes=n)["xxh3"] == xxh3_64(content)
        with pytest.raises(ChildError):
            reader.ask("read", handle="00" * 64, bytes=n)
        assert reader.ask("read", handle=handle, bytes=n)["xxh3"] == xxh3_64(content)
