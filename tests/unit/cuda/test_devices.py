"""Devices by UUID, contexts by thread."""

import ctypes
import threading

import pytest
from kvtier_kernels.cuda import CudaError, device_name, load

from tests.unit.cuda.conftest import Gpu


def test_devices_are_found_by_name_whatever_the_spelling(gpu_of_version: Gpu) -> None:
    driver, device = gpu_of_version.driver, gpu_of_version.device
    assert device.name == device_name(device.uuid)
    assert device.name.startswith("GPU-")
    for text in (
        device.name,
        device.name.lower(),
        device.name.removeprefix("GPU-").upper(),
        f" {device.name} ",
    ):
        assert driver.device(text) == device
    assert not device.is_mig
    assert device.product
    assert device.pci_bus_id == device.pci_bus_id.lower()
    assert device.pci_bus_id.count(":") == 2


def test_a_device_that_is_not_there_is_refused_with_those_that_are(gpu: Gpu) -> None:
    wanted = device_name(bytes(16))
    with pytest.raises(LookupError) as refused:
        gpu.driver.device(wanted)
    assert wanted in str(refused.value)
    assert gpu.device.name in str(refused.value)


def test_the_driver_is_loaded_once(gpu: Gpu) -> None:
    assert load(gpu.driver.path) is gpu.driver


def test_the_driver_describes_itself(gpu_of_version: Gpu, version: int) -> None:
    assert gpu_of_version.driver.version == version
    said = gpu_of_version.driver.describe()
    assert gpu_of_version.driver.path in said
    assert {13000: "13.0", 12080: "12.8", 12040: "12.4"}[version] in said


def test_listing_devices_makes_no_context(gpu: Gpu) -> None:
    used = gpu.fake.hbm_used()
    gpu.child("context.release(); context.pop\nassert driver.devices()")
    assert gpu.fake.hbm_used() == used


def test_a_context_is_current_inside_the_with_only(gpu: Gpu) -> None:
    driver = gpu.driver
    seen = []

    def other_thread() -> None:
        seen.append(driver.current_context())
        with gpu.context:
            seen.append(driver.current_context())
            with gpu.context:
                seen.append(driver.current_context())
            seen.append(driver.current_context())
        seen.append(driver.current_context())
        gpu.context.make_current()
        seen.append(driver.current_context())

    thread = threading.Thread(target=other_thread)
    thread.start()
    thread.join(60)
    handle = gpu.context.handle
    assert handle != 0
    assert seen == [0, handle, handle, handle, 0, handle]
    assert driver.current_context() == handle


def test_without_a_context_every_call_that_needs_one_says_so(gpu: Gpu) -> None:
    errors = []

    def other_thread() -> None:
        for call in (lambda: gpu.driver.alloc(4096), gpu.driver.memory_info, gpu.driver.stream_create):
            try:
                call()
            except CudaError as error:
                errors.append((error.code, error.name, error.sticky))

    thread = threading.Thread(target=other_thread)
    thread.start()
    thread.join(60)
    assert errors == [(201, "CUDA_ERROR_INVALID_CONTEXT", False)] * 3


def test_a_context_is_there_until_its_last_reference_is_released(gpu: Gpu) -> None:
    more = gpu.driver.retain_primary(0)
    assert more.handle == gpu.context.handle
    more.release()
    more.release()
    gpu.driver.free(gpu.driver.alloc(4096))


def test_leaving_by_an_exception_pops_the_context(gpu: Gpu) -> None:
    def other_thread() -> None:
        with pytest.raises(ZeroDivisionError), gpu.context:
            _ = 1 // 0
        done.append(gpu.driver.current_context())

    done: list[int] = []
    thread = threading.Thread(target=other_thread)
    thread.start()
    thread.join(60)
    assert done == [0]


def test_an_ordinal_that_is_not_there_has_no_context(gpu: Gpu) -> None:
    with pytest.raises(CudaError) as refused:
        gpu.driver.retain_primary(77)
    assert refused.value.name == "CUDA_ERROR_INVALID_DEVICE"
    assert refused.value.arguments.endswith("77")


def capture_mode(gpu: Gpu) -> int:
    """Of this thread. 0: while any thread captures, its calls are refused and spoil the capture."""
    mode = ctypes.c_int(2)
    exchange = gpu.fake.raw.cuThreadExchangeStreamCaptureMode
    assert exchange(ctypes.byref(mode)) == 0
    before = mode.value
    assert exchange(ctypes.byref(mode)) == 0
    return before


def test_calls_inside_a_context_leave_captured_graphs_alone_and_the_thread_as_before(gpu: Gpu) -> None:
    seen = []

    def other_thread() -> None:
        seen.append(capture_mode(gpu))
        with gpu.context:
            seen.append(capture_mode(gpu))
            with gpu.context:
                seen.append(capture_mode(gpu))
            seen.append(capture_mode(gpu))
        seen.append(capture_mode(gpu))

    thread = threading.Thread(target=other_thread)
    thread.start()
    thread.join(60)
    assert seen == [0, 2, 2, 2, 0]


@pytest.mark.parametrize("failing", ["cuThreadExchangeStreamCaptureMode", "cuCtxPushCurrent_v2"])
def test_a_push_that_fails_leaves_the_thread_as_it_was(gpu: Gpu, failing: str) -> None:
    gpu.context.pop()
    gpu.fail(failing, 304)
    with pytest.raises(CudaError, match=failing), gpu.context:
        pytest.fail("it was not pushed")
    assert gpu.driver.current_context() == 0
    assert capture_mode(gpu) == 0
    gpu.context.push()
