"""Every function of the driver that the binding uses, failing: each ends as a CudaError naming it."""

import mmap
import os
from collections.abc import Callable

import numpy as np
import pytest
from kvtier_kernels.cuda import Copies, CopyMethod, CudaError, CudaUnavailableError, abi, load
from kvtier_kernels.cuda.errors import ANSWERS_UNKNOWN_TO_BAD_INPUT

from tests.unit.cuda.conftest import Gpu

PAGE = 4096


class Things:
    """One of everything that calls are made on."""

    def __init__(self, gpu: Gpu, shared: bool = True) -> None:
        driver = self.driver = gpu.driver
        self.context = gpu.context
        self.map = mmap.mmap(-1, PAGE)
        self.host = np.frombuffer(self.map, np.uint8).ctypes.data
        driver.host_register(self.host, PAGE)
        self.device = driver.alloc(PAGE)
        self.handle = driver.ipc_export(self.device) if shared else bytes(64)
        self.n = driver.chunk_granularity(0)
        self.chunk = driver.chunk_create(self.n, 0)
        self.fd = driver.chunk_export(self.chunk) if shared else -1
        self.range = driver.reserve(self.n)
        self.stream, self.event = driver.stream_create(), driver.event_create()
        self.array = np.array([self.device], np.uint64)
        self.host_array = np.array([self.host], np.uint64)
        self.ones = np.array([1], np.uint64)

    def batch(self, method: CopyMethod) -> None:
        Copies(self.driver, method).to_host(self.host_array, self.array, self.ones, self.stream)

    def rows(self) -> None:
        Copies(self.driver).rows_to_host(
            self.array, self.host_array, self.ones, self.ones, self.ones, self.ones, self.stream
        )


CALLS: dict[str, Callable[[Things], object]] = {
    "cuDeviceGetCount": lambda t: t.driver.devices(),
    "cuDeviceGet": lambda t: t.driver.devices(),
    "cuDeviceGetName": lambda t: t.driver.devices(),
    "cuDeviceGetUuid": lambda t: t.driver.devices(),
    "cuDeviceGetUuid_v2": lambda t: t.driver.devices(),
    "cuDeviceGetPCIBusId": lambda t: t.driver.devices(),
    "cuDeviceTotalMem_v2": lambda t: t.driver.devices(),
    "cuDevicePrimaryCtxRetain": lambda t: t.driver.retain_primary(0),
    "cuDevicePrimaryCtxRelease_v2": lambda t: t.driver.retain_primary(0).release(),
    "cuCtxGetCurrent": lambda t: t.driver.current_context(),
    "cuCtxSetCurrent": lambda t: t.context.make_current(),
    "cuCtxPushCurrent_v2": lambda t: t.context.push(),
    "cuCtxPopCurrent_v2": lambda t: t.context.__exit__(None, None, None),
    "cuThreadExchangeStreamCaptureMode": lambda t: t.context.push(),
    "cuCtxGetStreamPriorityRange": lambda t: t.driver.stream_priority_range(),
    "cuMemGetInfo_v2": lambda t: t.driver.memory_info(),
    "cuMemAlloc_v2": lambda t: t.driver.alloc(PAGE),
    "cuMemFree_v2": lambda t: t.driver.free(t.device),
    "cuMemGetAddressRange_v2": lambda t: t.driver.pointer_info(t.device),
    "cuPointerGetAttributes": lambda t: t.driver.pointer_info(t.device),
    "cuMemHostRegister_v2": lambda t: t.driver.host_register(t.host, PAGE),
    "cuMemHostUnregister": lambda t: t.driver.host_unregister(t.host),
    "cuMemHostGetDevicePointer_v2": lambda t: t.driver.host_device_pointer(t.host),
    "cuIpcGetMemHandle": lambda t: t.driver.ipc_export(t.device),
    "cuIpcOpenMemHandle_v2": lambda t: t.driver.ipc_open(t.handle),
    "cuIpcCloseMemHandle": lambda t: t.driver.ipc_close(t.device),
    "cuMemCreate": lambda t: t.driver.chunk_create(t.n, 0),
    "cuMemRelease": lambda t: t.driver.chunk_release(t.chunk),
    "cuMemRetainAllocationHandle": lambda t: t.driver.chunk_of(t.range),
    "cuMemExportToShareableHandle": lambda t: t.driver.chunk_export(t.chunk),
    "cuMemImportFromShareableHandle": lambda t: t.driver.chunk_import(t.fd),
    "cuMemGetAllocationGranularity": lambda t: t.driver.chunk_granularity(0),
    "cuMemAddressReserve": lambda t: t.driver.reserve(t.n),
    "cuMemAddressFree": lambda t: t.driver.unreserve(t.range, t.n),
    "cuMemMap": lambda t: t.driver.map_chunk(t.range, t.n, t.chunk),
    "cuMemUnmap": lambda t: t.driver.unmap(t.range, t.n),
    "cuMemSetAccess": lambda t: t.driver.allow_access(t.range, t.n, 0),
    "cuStreamCreateWithPriority": lambda t: t.driver.stream_create(),
    "cuStreamDestroy_v2": lambda t: t.driver.stream_destroy(t.stream),
    "cuStreamSynchronize": lambda t: t.driver.stream_synchronize(t.stream),
    "cuStreamQuery": lambda t: t.driver.stream_is_done(t.stream),
    "cuStreamWriteValue64_v2": lambda t: t.driver.write_value(t.stream, t.device, 1),
    "cuEventCreate": lambda t: t.driver.event_create(),
    "cuEventDestroy_v2": lambda t: t.driver.event_destroy(t.event),
    "cuEventQuery": lambda t: t.driver.event_is_done(t.event),
    "cuEventRecord": lambda t: t.driver.event_record(t.event, t.stream),
    "cuEventSynchronize": lambda t: t.driver.event_synchronize(t.event),
    "cuMemcpyDtoH_v2": lambda t: t.driver.copy_to_host(t.host, t.device, 1),
    "cuMemcpyHtoD_v2": lambda t: t.driver.copy_to_device(t.device, t.host, 1),
    "cuMemcpyAsync": lambda t: t.driver.copy_async(t.device, t.host, 1, t.stream),
    "cuMemcpy2DAsync_v2": lambda t: t.rows(),
    "cuMemcpyBatchAsync_v2": lambda t: t.batch(CopyMethod.BATCH_V2),
    "cuMemcpyBatchAsync": lambda t: t.batch(CopyMethod.BATCH),
}
LOADING = {"cuInit", "cuDriverGetVersion", "cuGetErrorName", "cuGetProcAddress_v2"}


def test_no_function_is_left_out():
    assert set(CALLS) | LOADING == set(abi.PROTOTYPES) | {"cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2"}


def test_every_function_that_fails_raises_its_name_and_code(gpu: Gpu) -> None:
    things = Things(gpu)
    for symbol, call in CALLS.items():
        gpu.fail(symbol, 304)
        with pytest.raises(CudaError) as failed:
            call(things)
        error = failed.value
        # The fake knows both forms of a function by their common name, so the one called first has failed.
        assert error.call.removesuffix("_v2") == symbol.removesuffix("_v2")
        assert (error.code, error.name, error.sticky) == (304, "CUDA_ERROR_OPERATING_SYSTEM", False)
        assert error.call in str(error)
        gpu.fake.lift(os.getpid())


def test_a_lost_context_is_seen_by_every_call_that_needs_it(gpu: Gpu) -> None:
    things = Things(gpu)
    gpu.fail("cuStreamQuery", 700)
    with pytest.raises(CudaError):
        things.driver.stream_is_done(things.stream)
    for symbol in ("cuMemAlloc_v2", "cuEventQuery", "cuMemcpyBatchAsync_v2", "cuMemHostRegister_v2"):
        with pytest.raises(CudaError) as lost:
            CALLS[symbol](things)
        assert lost.value.code == 700
        assert lost.value.sticky


def test_unknown_in_answer_to_what_a_peer_sent_is_no_lost_context(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some drivers answer so to a descriptor that is none; nobody else's copies may suffer from it."""
    functions = gpu.driver.library._functions
    for symbol in ANSWERS_UNKNOWN_TO_BAD_INPUT:
        monkeypatch.setitem(functions, symbol, lambda *arguments: 999)
    things = Things(gpu, shared=False)
    for symbol in ANSWERS_UNKNOWN_TO_BAD_INPUT:
        with pytest.raises(CudaError, match=symbol) as refused:
            CALLS[symbol](things)
        assert (refused.value.code, refused.value.sticky) == (999, False)
    things.driver.free(things.device)


@pytest.mark.parametrize("symbol", sorted(ANSWERS_UNKNOWN_TO_BAD_INPUT))
def test_unknown_with_a_lost_context_is_one(gpu: Gpu, symbol: str) -> None:
    things = Things(gpu)
    gpu.fail(symbol, 999)
    with pytest.raises(CudaError, match=symbol) as lost:
        CALLS[symbol](things)
    assert lost.value.sticky


def test_unknown_from_a_copy_is_taken_for_a_lost_context(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    things = Things(gpu)
    monkeypatch.setitem(gpu.driver.library._functions, "cuEventSynchronize", lambda event: 999)
    with pytest.raises(CudaError) as lost:
        things.driver.event_synchronize(things.event)
    assert lost.value.sticky


def test_a_driver_whose_start_fails_says_so_and_can_be_tried_again(gpu: Gpu) -> None:
    said = gpu.child_without_driver(
        "try: load()\nexcept CudaUnavailableError as error: print(error)\nprint(load().version)\n",
        fail="cuInit:1:802",
    )
    assert "cuInit" in said
    assert "nvidia-fabricmanager" in said
    assert said.split()[-1] == "13000"


def test_without_the_batch_function_copies_loop(gpu: Gpu) -> None:
    """A driver may refuse to resolve what its version promises."""
    gpu.fail("cuGetProcAddress_v2", 1, n=0)
    copies = Copies(gpu.driver)
    assert copies.method is CopyMethod.LOOP
    assert "cuMemcpyBatchAsync is not to be found" in copies.describe()
    with pytest.raises(CudaUnavailableError):
        Copies(gpu.driver, CopyMethod.BATCH)


def test_a_context_lost_while_the_batch_function_is_looked_up_is_no_reason_to_loop(gpu: Gpu) -> None:
    gpu.fail("cuGetProcAddress_v2", 719)
    with pytest.raises(CudaError, match=r"cuGetProcAddress_v2\(cuMemcpyBatchAsync, …, 13000\)") as lost:
        Copies(gpu.driver)
    assert lost.value.sticky


def test_loading_from_many_threads_gives_one_driver(gpu: Gpu) -> None:
    said = gpu.child_without_driver(
        "import threading\n"
        "drivers = []\n"
        "threads = [threading.Thread(target=lambda: drivers.append(load())) for _ in range(8)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]\n"
        "print(len(drivers), len(set(map(id, drivers))))\n"
    )
    assert said.split() == ["8", "1"]
    assert load(gpu.driver.path) is gpu.driver
