"""Chunks: physical memory shared by descriptor, mapped into reservations."""

import fcntl
import os

import numpy as np
import pytest
from kvtier_kernels.cuda import HANDLE_TYPE_POSIX_FD, CudaError

from tests.unit.cuda.conftest import Gpu, random_bytes


def test_chunks_are_mapped_one_after_another_and_read_by_another_process(gpu_of_version: Gpu) -> None:
    driver = gpu_of_version.driver
    n = driver.chunk_granularity(0)
    chunks = [driver.chunk_create(n, 0) for _ in range(3)]
    ptr = driver.reserve(3 * n)
    for index, chunk in enumerate(chunks):
        driver.map_chunk(ptr + index * n, n, chunk)
    driver.allow_access(ptr, 3 * n, 0)
    there, back = random_bytes(3 * n), np.zeros(3 * n, np.uint8)
    driver.copy_to_device(ptr, there.ctypes.data, 3 * n)

    fds = [driver.chunk_export(chunk) for chunk in chunks]
    gpu_of_version.child(
        "import os, numpy as np\n"
        "n, fds = int(sys.argv[1]), [int(fd) for fd in sys.argv[2:]]\n"
        "ptr = driver.reserve(len(fds) * n)\n"
        "for index, fd in enumerate(fds):\n"
        "    chunk = driver.chunk_import(fd)\n"
        "    os.close(fd)\n"
        "    driver.map_chunk(ptr + index * n, n, chunk)\n"
        "    driver.chunk_release(chunk)\n"
        "driver.allow_access(ptr, len(fds) * n, 0)\n"
        "data = np.zeros(len(fds) * n, np.uint8)\n"
        "driver.copy_to_host(data.ctypes.data, ptr, data.size)\n"
        "data ^= 0xFF\n"
        "driver.copy_to_device(ptr, data.ctypes.data, data.size)\n"
        "for index in range(len(fds)):\n"
        "    driver.unmap(ptr + index * n, n)\n"
        "driver.unreserve(ptr, len(fds) * n)\n",
        n,
        *fds,
        pass_fds=tuple(fds),
    )
    driver.copy_to_host(back.ctypes.data, ptr, back.size)
    assert (back == there ^ 0xFF).all()

    for fd in fds:
        os.close(fd)
    for index, chunk in enumerate(chunks):
        driver.unmap(ptr + index * n, n)
        driver.chunk_release(chunk)
    driver.unreserve(ptr, 3 * n)


def test_a_chunk_is_found_again_from_its_address(gpu_of_version: Gpu) -> None:
    driver = gpu_of_version.driver
    n = driver.chunk_granularity(0)
    chunk, ptr = driver.chunk_create(n, 0), driver.reserve(n)
    driver.map_chunk(ptr, n, chunk)
    driver.allow_access(ptr, n, 0)
    again = driver.chunk_of(ptr + n // 2)
    os.close(driver.chunk_export(again))
    driver.chunk_release(again)
    info = driver.pointer_info(ptr + 1)
    assert (info.is_device, info.base, info.size) == (True, ptr, n)
    assert not info.is_legacy_ipc_capable
    assert info.allowed_handle_types & HANDLE_TYPE_POSIX_FD
    with pytest.raises(CudaError, match="cuIpcGetMemHandle"):
        driver.ipc_export(ptr)
    driver.unmap(ptr, n)
    driver.unreserve(ptr, n)
    driver.chunk_release(chunk)


def test_a_chunk_made_for_this_process_only_cannot_be_exported(gpu: Gpu) -> None:
    driver = gpu.driver
    n = driver.chunk_granularity(0)
    chunk = driver.chunk_create(n, 0, exportable=False)
    with pytest.raises(CudaError, match="cuMemExportToShareableHandle") as refused:
        driver.chunk_export(chunk)
    assert not refused.value.sticky
    driver.chunk_release(chunk)


def test_an_exported_descriptor_does_not_leak_into_programs_that_are_started(gpu: Gpu) -> None:
    chunk = gpu.driver.chunk_create(gpu.driver.chunk_granularity(0), 0)
    fd = gpu.driver.chunk_export(chunk)
    assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    os.close(fd)
    gpu.driver.chunk_release(chunk)


@pytest.mark.parametrize("path", ["/dev/null", "/proc/self/exe"])
def test_a_descriptor_of_something_else_is_refused(gpu: Gpu, path: str) -> None:
    with open(path, "rb") as other, pytest.raises(CudaError, match="cuMemImportFromShareableHandle"):
        gpu.driver.chunk_import(other.fileno())


def test_a_descriptor_that_is_not_open_is_refused(gpu: Gpu) -> None:
    with pytest.raises(CudaError, match="cuMemImportFromShareableHandle"):
        gpu.driver.chunk_import(999)


def test_legacy_memory_has_no_chunk(gpu: Gpu) -> None:
    ptr = gpu.driver.alloc(1 << 20)
    with pytest.raises(CudaError, match="cuMemRetainAllocationHandle") as refused:
        gpu.driver.chunk_of(ptr)
    assert refused.value.code == 1
    gpu.driver.free(ptr)


def test_addresses_without_access_cannot_be_copied(gpu: Gpu) -> None:
    driver = gpu.driver
    n = driver.chunk_granularity(0)
    chunk, ptr = driver.chunk_create(n, 0), driver.reserve(n)
    driver.map_chunk(ptr, n, chunk)
    back = np.zeros(n, np.uint8)
    with pytest.raises(CudaError):
        driver.copy_to_host(back.ctypes.data, ptr, n)


def test_a_chunk_is_told_from_its_neighbour_and_a_driver_that_cannot_is_asked_otherwise(gpu: Gpu) -> None:
    driver, n = gpu.driver, gpu.driver.chunk_granularity(0)
    reserved = driver.reserve(2 * n)
    for index in range(2):
        chunk = driver.chunk_create(n, 0)
        driver.map_chunk(reserved + index * n, n, chunk)
        driver.chunk_release(chunk)
    info = driver.pointer_info(reserved + n + 5)
    assert (info.base, info.size) == (reserved + n, n)
    gpu.fail("cuPointerGetAttributes", 1, n=2)  # the call after the one that tells what kind of memory it is
    older = driver.pointer_info(reserved + n + 5)
    assert (older.base, older.size) == (reserved, 2 * n), "what cuMemGetAddressRange answers"
    gpu.fail("cuPointerGetAttributes", 700, n=2)
    with pytest.raises(CudaError):
        driver.pointer_info(reserved)
