"""The GPUs that this process sees, each with its primary context, which is also the engine's."""

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from kvtier_kernels import cuda

from kvtier.errors import KvtierError, Reason

_Made = TypeVar("_Made")


class Gpu:
    """One GPU. Its context is retained until the process ends, because queued writes need it."""

    def __init__(self, driver: cuda.Driver, ordinal: int) -> None:
        self.driver = driver
        self.info: cuda.DeviceInfo = next(info for info in driver.devices() if info.ordinal == ordinal)
        self.context: cuda.Context = driver.retain_primary(ordinal)
        self.name = self.info.name
        """`GPU-` and its UUID."""


class OnePerGpu(Generic[_Made]):
    """Makes one object of a kind for each GPU, when it is first asked for. For any thread."""

    def __init__(self, make: Callable[[Gpu], _Made]) -> None:
        self._make = make
        self._made: weakref.WeakKeyDictionary[Gpu, _Made] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def __call__(self, gpu: Gpu) -> _Made:
        with self._lock:
            if gpu not in self._made:
                self._made[gpu] = self._make(gpu)
            return self._made[gpu]


_gpus: dict[tuple[str, int], Gpu] = {}
_lock = threading.Lock()


def _after_fork_in_child() -> None:
    """Forgets the GPUs: CUDA does not survive a fork. The parent's objects are left alone."""
    global _gpus, _lock
    _gpus, _lock = {}, threading.Lock()


os.register_at_fork(after_in_child=_after_fork_in_child)


@contextlib.contextmanager
def driver_errors(field: str, value: object) -> Iterator[None]:
    """Turns a failed call of the driver into KvtierError DEVICE_UNAVAILABLE."""
    try:
        yield
    except (cuda.CudaError, cuda.CudaUnavailableError) as error:
        raise KvtierError(Reason.DEVICE_UNAVAILABLE, str(error), field=field, value=value) from error


def gpu_of(address: int, ordinal: int | None) -> Gpu:
    """Returns the GPU to whose memory the address belongs.

    `ordinal` is the device to ask through, or None if a context is current in this thread. Raises
    KvtierError.
    """
    with driver_errors("address", hex(address)):
        driver = cuda.load()
        if driver.current_context():
            info = driver.pointer_info(address)
        elif ordinal is None:
            message = "no CUDA context is current in this thread: call from the engine's, or name the ordinal"
            raise KvtierError(Reason.DEVICE_MEMORY_INVALID, message, field="ordinal", value=None)
        else:
            info = pointer_info(_gpu(driver, ordinal), address)
        if not info.is_device:
            message = "this is no memory of a GPU: share host memory as a SharedBuffer"
            raise KvtierError(Reason.DEVICE_MEMORY_INVALID, message, field="address", value=hex(address))
        return _gpu(driver, info.ordinal)


def pointer_info(gpu: Gpu, address: int) -> cuda.PointerInfo:
    """Returns what the driver knows about an address. Raises CudaError."""
    with gpu.context:
        return gpu.driver.pointer_info(address)


def _gpu(driver: cuda.Driver, ordinal: int) -> Gpu:
    with _lock:
        key = (driver.path, ordinal)
        if key not in _gpus:
            _gpus[key] = Gpu(driver, ordinal)
        return _gpus[key]
