"""Batched copies between device memory and registered host memory."""

from collections.abc import Callable
from ctypes import byref, c_size_t
from enum import Enum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvtier_kernels import copy_loop, copy_rows_loop
from kvtier_kernels.cuda import abi
from kvtier_kernels.cuda.driver import Driver
from kvtier_kernels.cuda.errors import SUCCESS, CudaUnavailableError
from kvtier_kernels.cuda.library import Library, version_text

U64 = NDArray[np.uint64]

DESCRIPTORS_PER_CALL: Final = 4096
"""More in one call (51,828) crashed driver 580.159, and hung it when repeated (vllm-project/vllm#49276)."""


class CopyMethod(Enum):
    """How a batch is passed to the driver."""

    BATCH_V2 = "batch-13.0"
    """cuMemcpyBatchAsync as of CUDA 13.0."""
    BATCH = "batch-12.8"
    """cuMemcpyBatchAsync as of CUDA 12.8, which newer drivers have as well."""
    LOOP = "loop"
    """One cuMemcpyAsync per descriptor, in native code."""


_BATCH_FORMS: Final = (
    (CopyMethod.BATCH_V2, abi.VERSION_BATCH_V2, abi.BATCH_V2_PROTOTYPE),
    (CopyMethod.BATCH, abi.VERSION_BATCH, abi.BATCH_PROTOTYPE),
)
"""The preferred one comes first."""

_BATCH_SYMBOL: Final = {CopyMethod.BATCH_V2: "cuMemcpyBatchAsync_v2", CopyMethod.BATCH: "cuMemcpyBatchAsync"}
_UNKNOWN_INDEX: Final = (1 << 64) - 1


class Copies:
    """Passes batches of descriptors to a stream, in as few calls as possible. One for each lane: two threads
    must not use it at once.

    Arrays are uint64 of shape (n,), C-contiguous, and are read only during the call. The caller has to check
    device addresses: a wrong one corrupts memory or loses the context. Targets of one call must not overlap.
    A context must be current. Raises ValueError before anything is submitted, and CudaError when part of the
    batch may be in flight: the caller then still records an event and waits for it.
    """

    def __init__(
        self, driver: Driver, method: CopyMethod | None = None, *, prefer_overlap: bool = False
    ) -> None:
        """`method` None chooses by the driver's version; a method that the driver does not have raises
        CudaUnavailableError. `prefer_overlap` hints that copies should overlap with computation (only for
        batch methods)."""
        self._library = driver.library
        self.method, self.reason, self._batch = _choose(self._library, method)
        self._overlap = prefer_overlap
        self._to_device = _attributes(abi.SRC_ACCESS_ORDER_ANY, prefer_overlap)
        self._to_host = _attributes(abi.SRC_ACCESS_ORDER_STREAM, prefer_overlap)
        self._first_index = c_size_t(0)
        self._loop_address = self._library.address("cuMemcpyAsync")
        self._rows_address = self._library.address("cuMemcpy2DAsync_v2")

    def describe(self) -> str:
        """The method and why it was chosen, for the log."""
        hint = ", to overlap with kernels" if self._overlap and self._batch is not None else ""
        return f"copies by {self.method.value}{hint} ({self.reason})"

    def to_device(self, device: U64, host: U64, sizes: U64, stream: int) -> None:
        """Copies sizes[i] bytes from host[i] to device[i]. From now on the host memory may be read at any
        time, even before earlier work of the stream is done (order ANY), so it must be stable already."""
        self._copy(device, host, sizes, stream, self._to_device)

    def to_host(self, host: U64, device: U64, sizes: U64, stream: int) -> None:
        """Copies sizes[i] bytes from device[i] to host[i], in the stream's order."""
        self._copy(host, device, sizes, stream, self._to_host)

    def rows_to_device(
        self, device: U64, host: U64, width: U64, rows: U64, device_pitch: U64, host_pitch: U64, stream: int
    ) -> None:
        """Copies rows[i] runs of width[i] bytes, host_pitch[i] apart in host memory and device_pitch[i] apart
        in device memory, by cuMemcpy2DAsync with one call for each descriptor, whatever the method."""
        self._copy_rows((device, host, width, rows, device_pitch, host_pitch), True, stream)

    def rows_to_host(
        self, device: U64, host: U64, width: U64, rows: U64, device_pitch: U64, host_pitch: U64, stream: int
    ) -> None:
        """As `rows_to_device`, in the other direction."""
        self._copy_rows((device, host, width, rows, device_pitch, host_pitch), False, stream)

    def _copy(self, dst: U64, src: U64, sizes: U64, stream: int, attributes: abi.CUmemcpyAttributes) -> None:
        n = _checked_length(stream, dst=dst, src=src, sizes=sizes)
        if self._batch is None:
            code, done = copy_loop(self._loop_address, dst, src, sizes, stream)
            if code != SUCCESS:
                raise self._library.error("cuMemcpyAsync", code, more=f"descriptor {done} of {n}")
            return
        # Offsets instead of slices, because an array object per call would cost more than all the rest.
        dst_address, src_address, sizes_address = dst.ctypes.data, src.ctypes.data, sizes.ctypes.data
        fail_index = c_size_t(_UNKNOWN_INDEX)
        more = (byref(fail_index),) if self.method is CopyMethod.BATCH else ()
        for first in range(0, n, DESCRIPTORS_PER_CALL):
            count = min(DESCRIPTORS_PER_CALL, n - first)
            code = self._batch(
                dst_address + 8 * first,
                src_address + 8 * first,
                sizes_address + 8 * first,
                count,
                byref(attributes),
                byref(self._first_index),
                1,
                *more,
                stream,
            )
            if code != SUCCESS:
                where = f"descriptors {first} to {first + count - 1} of {n}"
                if fail_index.value < count:
                    where += f", at {first + fail_index.value}"
                raise self._library.error(_BATCH_SYMBOL[self.method], code, more=where)

    def _copy_rows(self, arrays: tuple[U64, U64, U64, U64, U64, U64], to_device: bool, stream: int) -> None:
        names = ("device", "host", "width", "rows", "device_pitch", "host_pitch")
        n = _checked_length(stream, **dict(zip(names, arrays, strict=True)))
        code, done = copy_rows_loop(self._rows_address, *arrays, to_device, stream)
        if code != SUCCESS:
            raise self._library.error("cuMemcpy2DAsync_v2", code, more=f"descriptor {done} of {n}")


def _choose(library: Library, wanted: CopyMethod | None) -> tuple[CopyMethod, str, Callable[..., int] | None]:
    """The method, why it was chosen, and its function (None for the loop)."""
    if wanted is CopyMethod.LOOP:
        return wanted, "as asked for", None
    has = f"the driver supports CUDA {version_text(library.version)}"
    for method, version, prototype in _BATCH_FORMS:
        if wanted in (None, method):
            function = library.versioned("cuMemcpyBatchAsync", version, prototype)
            if function is not None:
                return method, has if wanted is None else "as asked for", function
    if wanted is not None:
        raise CudaUnavailableError(
            f"copy method {wanted.value!r} needs a newer driver: {has}; "
            "let the method be chosen by the driver's version"
        )
    lacks = (
        "whose cuMemcpyBatchAsync is not to be found"
        if library.version >= abi.VERSION_BATCH
        else "without batches"
    )
    return CopyMethod.LOOP, f"{has}, {lacks}", None


def _attributes(order: int, prefer_overlap: bool) -> abi.CUmemcpyAttributes:
    # The location hints are left empty, because the driver reads them for managed memory only.
    flags = abi.MEMCPY_FLAG_PREFER_OVERLAP if prefer_overlap else 0
    return abi.CUmemcpyAttributes(src_access_order=order, flags=flags)


def _checked_length(stream: int, **arrays: U64) -> int:
    if stream == 0:
        raise ValueError("stream is 0, the NULL stream: batched copies need a stream of their own")
    n = -1
    for name, array in arrays.items():
        if array.dtype != np.uint64 or array.ndim != 1 or not array.flags.c_contiguous:
            raise ValueError(
                f"{name} is {array.dtype} of shape {array.shape}, "
                "must be a contiguous array of uint64 of shape (n,)"
            )
        if n >= 0 and len(array) != n:
            raise ValueError(f"{name} has {len(array)} elements, the arrays before it have {n}")
        n = len(array)
    return n
