"""The loops over a driver's own copy calls: every descriptor once, in order, up to the first one refused."""

import ctypes
import re
import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from kvtier_kernels import DevicePlan, copy_loop, copy_rows_loop

U64 = npt.NDArray[np.uint64]
STREAM = 0xABCDEF


def u64(*values: int) -> U64:
    return np.array(values, np.uint64)


class Memcpy2D(ctypes.Structure):
    """CUDA_MEMCPY2D_v2 as cuda.h has it."""

    _fields_ = (
        ("srcXInBytes", ctypes.c_size_t),
        ("srcY", ctypes.c_size_t),
        ("srcMemoryType", ctypes.c_int),
        ("srcHost", ctypes.c_void_p),
        ("srcDevice", ctypes.c_uint64),
        ("srcArray", ctypes.c_void_p),
        ("srcPitch", ctypes.c_size_t),
        ("dstXInBytes", ctypes.c_size_t),
        ("dstY", ctypes.c_size_t),
        ("dstMemoryType", ctypes.c_int),
        ("dstHost", ctypes.c_void_p),
        ("dstDevice", ctypes.c_uint64),
        ("dstArray", ctypes.c_void_p),
        ("dstPitch", ctypes.c_size_t),
        ("WidthInBytes", ctypes.c_size_t),
        ("Height", ctypes.c_size_t),
    )

    def given(self) -> dict[str, int]:
        """The members that are not zero."""
        values = {name: getattr(self, name) for name, _ in self._fields_}
        return {name: value for name, value in values.items() if value}


COPY = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
COPY_2D = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Memcpy2D), ctypes.c_void_p)


@dataclass
class DriverCalls:
    """C functions that write down what they were called with, and refuse one call."""

    refuse_at: int = -1
    code: int = 719
    calls: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.copy = COPY(lambda *arguments: self._called(arguments))
        self.copy_2d = COPY_2D(lambda copy, stream: self._called((copy.contents.given(), stream)))

    def _called(self, call: Any) -> int:
        if len(self.calls) == self.refuse_at:
            return self.code
        self.calls.append(call)
        return 0

    def address(self, function: Any) -> int:
        address = ctypes.cast(function, ctypes.c_void_p).value
        assert address is not None
        return address


def test_every_copy_is_submitted_once_and_in_order() -> None:
    driver = DriverCalls()
    result = copy_loop(driver.address(driver.copy), u64(5, 3), u64(2**63, 7), u64(100, 1), STREAM)
    assert result == (0, 2)
    assert driver.calls == [(5, 2**63, 100, STREAM), (3, 7, 1, STREAM)]


def test_the_first_copy_that_is_refused_ends_the_loop() -> None:
    driver = DriverCalls(refuse_at=1)
    numbers = u64(1, 2, 3)
    assert copy_loop(driver.address(driver.copy), numbers, numbers, numbers, STREAM) == (719, 1)
    assert driver.calls == [(1, 1, 1, STREAM)]


@pytest.mark.parametrize("to_device", [True, False])
def test_rows_reach_the_driver_in_its_own_structure(to_device: bool) -> None:
    driver = DriverCalls()
    columns = u64(1 << 40, 9), u64(1 << 33, 8), u64(64, 7), u64(3, 1), u64(1000, 7), u64(128, 7)
    assert copy_rows_loop(driver.address(driver.copy_2d), *columns, to_device, STREAM) == (0, 2)
    device, host = ("dst", "src") if to_device else ("src", "dst")
    assert ctypes.sizeof(Memcpy2D) == 128
    assert driver.calls == [
        (
            {
                f"{device}MemoryType": 2,
                f"{device}Device": d,
                f"{device}Pitch": device_pitch,
                f"{host}MemoryType": 1,
                f"{host}Host": h,
                f"{host}Pitch": host_pitch,
                "WidthInBytes": width,
                "Height": rows,
            },
            STREAM,
        )
        for d, h, width, rows, device_pitch, host_pitch in zip(
            *(column.tolist() for column in columns), strict=True
        )
    ]


def test_the_first_rows_that_are_refused_end_the_loop() -> None:
    driver = DriverCalls(refuse_at=2, code=1)
    plan = DevicePlan(u64(1 << 40, 1 << 41), u64(100, 100), u64(100, 100), 8)
    blocks = np.array([0, 2, 5, 7], np.uint32)
    rows = plan.describe_rows(blocks, 1 << 33, 1 << 20, 1 + blocks)
    assert copy_rows_loop(driver.address(driver.copy_2d), *rows, True, STREAM) == (1, 2)
    assert len(driver.calls) == 2


def test_other_threads_run_while_a_driver_call_blocks() -> None:
    entered, finish = threading.Event(), threading.Event()

    def blocks(*_: Any) -> int:
        entered.set()
        return 0 if finish.wait(60) else 1

    function = COPY(blocks)
    result: list[tuple[int, int]] = []
    numbers = u64(1)
    address = DriverCalls().address(function)
    thread = threading.Thread(
        target=lambda: result.append(copy_loop(address, numbers, numbers, numbers, STREAM))
    )
    thread.start()
    assert entered.wait(60)
    finish.set()
    thread.join(60)
    assert result == [(0, 1)]


@pytest.mark.parametrize("name", ["src", "sizes"])
def test_arrays_of_different_lengths_call_nothing(name: str) -> None:
    driver = DriverCalls()
    arrays = {"dst": u64(1, 2), "src": u64(1, 2), "sizes": u64(1, 2)} | {name: u64(1)}
    with pytest.raises(ValueError, match=f"{name} has 1 rows; expected 2, one for each of dst"):
        copy_loop(driver.address(driver.copy), **arrays, stream=STREAM)
    assert driver.calls == []


def test_columns_of_different_lengths_call_nothing() -> None:
    driver = DriverCalls()
    numbers = u64(1, 2)
    with pytest.raises(ValueError, match="host_pitch has 1 rows; expected 2, one for each of device"):
        copy_rows_loop(
            driver.address(driver.copy_2d),
            numbers,
            numbers,
            numbers,
            numbers,
            numbers,
            u64(1),
            to_device=True,
            stream=STREAM,
        )
    assert driver.calls == []


def test_there_is_no_function_at_address_zero() -> None:
    with pytest.raises(ValueError, match=re.escape("function_address is 0: there is no function")):
        copy_loop(0, u64(), u64(), u64(), STREAM)
    none = u64()
    with pytest.raises(ValueError, match=re.escape("function_address is 0: there is no function")):
        copy_rows_loop(0, none, none, none, none, none, none, to_device=True, stream=STREAM)
