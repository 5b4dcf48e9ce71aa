"""Memory calls of the binding: own memory, host memory, other processes' memory by handle."""

import mmap

import numpy as np
import pytest
from kvtier_kernels.cuda import CudaError, PointerInfo

from tests.unit.cuda.conftest import HBM_BYTES, Gpu, random_bytes

MIB = 1 << 20


def test_bytes_copied_to_the_device_come_back(gpu_of_version: Gpu) -> None:
    driver = gpu_of_version.driver
    there, back = random_bytes(MIB + 17), np.zeros(MIB + 17, np.uint8)
    ptr = driver.alloc(2 * MIB)
    driver.copy_to_device(ptr + 5, there.ctypes.data, there.size)
    driver.copy_to_host(back.ctypes.data, ptr + 5, back.size)
    assert (there == back).all()
    driver.free(ptr)


def test_memory_that_is_not_there_is_an_error_with_name_and_size(gpu: Gpu) -> None:
    with pytest.raises(CudaError) as refused:
        gpu.driver.alloc(HBM_BYTES * 2)
    error = refused.value
    assert (error.call, error.code, error.name) == ("cuMemAlloc_v2", 2, "CUDA_ERROR_OUT_OF_MEMORY")
    assert str(HBM_BYTES * 2) in str(error)
    assert not error.sticky


def test_free_memory_falls_and_rises(gpu: Gpu) -> None:
    free_before, total = gpu.driver.memory_info()
    assert total == HBM_BYTES == gpu.device.total_bytes
    ptr = gpu.driver.alloc(8 * MIB)
    assert gpu.driver.memory_info() == (free_before - 8 * MIB, total)
    gpu.driver.free(ptr)
    assert gpu.driver.memory_info() == (free_before, total)


def test_freeing_twice_is_refused(gpu: Gpu) -> None:
    ptr = gpu.driver.alloc(MIB)
    gpu.driver.free(ptr)
    with pytest.raises(CudaError, match="cuMemFree_v2"):
        gpu.driver.free(ptr)


def test_a_pointer_into_an_allocation_tells_all_of_it(gpu_of_version: Gpu) -> None:
    driver = gpu_of_version.driver
    ptr, other = driver.alloc(3 * MIB), driver.alloc(MIB)
    info = driver.pointer_info(ptr + 12345)
    assert (info.is_device, info.ordinal, info.base, info.size) == (True, 0, ptr, 3 * MIB)
    assert info.is_legacy_ipc_capable
    assert info.buffer_id != driver.pointer_info(other).buffer_id
    assert info == driver.pointer_info(ptr)
    driver.free(ptr)
    driver.free(other)


def test_an_allocation_at_the_address_of_an_old_one_has_another_buffer_id(gpu: Gpu) -> None:
    seen = set()
    for _ in range(20):
        ptr = gpu.driver.alloc(MIB)
        seen.add(gpu.driver.pointer_info(ptr).buffer_id)
        gpu.driver.free(ptr)
    assert len(seen) == 20


def test_host_memory_is_no_device_memory(gpu: Gpu) -> None:
    memory = mmap.mmap(-1, MIB)
    address = np.frombuffer(memory, np.uint8).ctypes.data
    assert gpu.driver.pointer_info(address) == PointerInfo(is_device=False)
    gpu.driver.host_register(address, MIB)
    assert gpu.driver.pointer_info(address) == PointerInfo(is_device=False)
    assert gpu.driver.host_device_pointer(address) != 0
    gpu.driver.host_unregister(address)
    assert gpu.driver.pointer_info(0) == PointerInfo(is_device=False)


def test_registering_twice_and_unregistering_twice_are_refused_by_name(gpu: Gpu) -> None:
    memory = mmap.mmap(-1, MIB)
    address = np.frombuffer(memory, np.uint8).ctypes.data
    gpu.driver.host_register(address, MIB)
    with pytest.raises(CudaError) as twice:
        gpu.driver.host_register(address, MIB)
    assert twice.value.code == 712
    assert twice.value.name == "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"
    assert not twice.value.sticky
    gpu.driver.host_unregister(address)
    with pytest.raises(CudaError) as gone:
        gpu.driver.host_unregister(address)
    assert gone.value.code == 713
    with pytest.raises(CudaError):
        gpu.driver.host_device_pointer(address)


def test_another_process_reads_and_writes_by_handle(gpu_of_version: Gpu) -> None:
    driver = gpu_of_version.driver
    there, back = random_bytes(MIB), np.zeros(MIB, np.uint8)
    ptr = driver.alloc(MIB)
    driver.copy_to_device(ptr, there.ctypes.data, MIB)
    handle = driver.ipc_export(ptr)
    assert len(handle) == 64
    with pytest.raises(CudaError):
        driver.ipc_export(ptr + 100)
    gpu_of_version.child(
        "import numpy as np\n"
        "n = int(sys.argv[2])\n"
        "base = driver.ipc_open(bytes.fromhex(sys.argv[1]))\n"
        "assert driver.ipc_open(bytes.fromhex(sys.argv[1])) == base\n"
        "info = driver.pointer_info(base + 7)\n"
        "assert (info.base, info.size, info.is_device) == (base, n, True), info\n"
        "data = np.zeros(n, np.uint8)\n"
        "driver.copy_to_host(data.ctypes.data, base, n)\n"
        "data ^= 0xFF\n"
        "driver.copy_to_device(base, data.ctypes.data, n)\n"
        "driver.ipc_close(base)\n"
        "driver.ipc_close(base)\n",
        handle.hex(),
        MIB,
    )
    driver.copy_to_host(back.ctypes.data, ptr, MIB)
    assert (back == there ^ 0xFF).all()
    assert not gpu_of_version.fake.open_imports()
    driver.free(ptr)


def test_closing_more_often_than_opening_is_refused(gpu: Gpu) -> None:
    ptr = gpu.driver.alloc(MIB)
    said = gpu.child(
        "base = driver.ipc_open(bytes.fromhex(sys.argv[1]))\n"
        "driver.ipc_close(base)\n"
        "try: driver.ipc_close(base)\n"
        "except CudaError as error: print(error.call, error.sticky)\n",
        gpu.driver.ipc_export(ptr).hex(),
    )
    assert said.split() == ["cuIpcCloseMemHandle", "False"]
    gpu.driver.free(ptr)


def test_the_exporter_cannot_open_its_own_handle(gpu: Gpu) -> None:
    ptr = gpu.driver.alloc(MIB)
    with pytest.raises(CudaError, match="cuIpcOpenMemHandle_v2") as refused:
        gpu.driver.ipc_open(gpu.driver.ipc_export(ptr))
    assert not refused.value.sticky
    gpu.driver.free(ptr)


def test_a_handle_of_nothing_is_refused(gpu: Gpu) -> None:
    with pytest.raises(CudaError, match="cuIpcOpenMemHandle_v2") as refused:
        gpu.driver.ipc_open(bytes(range(64)))
    assert not refused.value.sticky


@pytest.mark.parametrize("n", [0, 63, 65])
def test_a_handle_of_another_length_never_reaches_the_driver(gpu: Gpu, n: int) -> None:
    with pytest.raises(ValueError, match=f"handle has {n} bytes, must have 64"):
        gpu.driver.ipc_open(bytes(n))


def test_a_handle_with_zero_bytes_in_it_arrives_whole(gpu: Gpu) -> None:
    """As a C string it would end at the first of them."""
    ptr = gpu.driver.alloc(MIB)
    handle = gpu.driver.ipc_export(ptr)
    assert 0 in handle, "the fake's handles are expected to have some"
    gpu.child("driver.ipc_close(driver.ipc_open(bytes.fromhex(sys.argv[1])))", handle.hex())
    gpu.driver.free(ptr)
