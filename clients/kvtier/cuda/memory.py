"""Memory of a GPU that a client shares."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from kvtier.cuda.doorbells import GpuDoorbells
from kvtier.cuda.export import DeviceExport
from kvtier.cuda.gpu import Gpu, driver_errors, gpu_of, pointer_info
from kvtier.errors import KvtierError, Reason
from kvtier.memory import Ring


@dataclass(frozen=True, slots=True)
class AddressRange:
    """A contiguous range of addresses of a GPU."""

    address: int
    size_bytes: int

    @property
    def end(self) -> int:
        """The first address behind the range."""
        return self.address + self.size_bytes


class DeviceMemory:
    """One or more ranges of one GPU's memory, which stays allocated as long as it is shared.

    What lies behind the addresses is looked up at each registration and may have changed in between, as in an
    engine that sleeps and wakes. Any thread may use it.
    """

    def __init__(self, address: int, size_bytes: int, *, ordinal: int | None = None) -> None:
        """`address` may be any address inside an allocation, or one that chunks are mapped to (cuMemMap).
        `ordinal` is needed only in a thread without a CUDA context.

        Raises KvtierError if this is no memory of a GPU, or if there is no driver.
        """
        self._init(_checked(address, size_bytes, ordinal), owners=())

    def _init(self, found: tuple[Gpu, tuple[AddressRange, ...]], owners: tuple[object, ...]) -> None:
        self._gpu, self._ranges = found
        self._owners = owners
        self._starts = [0, *itertools.accumulate(part.size_bytes for part in self._ranges)]

    @classmethod
    def of(cls, tensor: Any) -> Self:
        """Makes one of the whole storage behind a torch tensor, or of the memory of an object with
        `__cuda_array_interface__`, or with `data_ptr()` and `nbytes`. Keeps the object alive. Raises
        KvtierError."""
        address, size_bytes = _extent(tensor)
        made = cls.__new__(cls)
        ordinal = getattr(getattr(tensor, "device", None), "index", None)
        made._init(_checked(address, size_bytes, ordinal), owners=(tensor,))
        return made

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """Makes one of several memories, in order. Raises KvtierError unless all are of one GPU."""
        if not parts:
            raise KvtierError(Reason.MAPPING_INVALID, "join at least one", field="parts", value=0)
        for index, part in enumerate(parts):
            if part._gpu is not parts[0]._gpu:
                message = f"a client's memory is on one GPU, here {parts[0].device}"
                raise KvtierError(
                    Reason.DEVICE_MEMORY_INVALID, message, field=f"parts[{index}]", value=part.device
                )
        made = cls.__new__(cls)
        ranges = tuple(itertools.chain.from_iterable(part._ranges for part in parts))
        owners = tuple(itertools.chain.from_iterable(part._owners for part in parts))
        made._init((parts[0]._gpu, ranges), owners)
        return made

    @property
    def device(self) -> str:
        """`GPU-` and its UUID in lower case."""
        return self._gpu.name

    @property
    def size_bytes(self) -> int:
        """The size of all ranges together."""
        return self._starts[-1]

    @property
    def range_bytes(self) -> tuple[int, ...]:
        """The size of each range. A plane lies in one of them as a whole."""
        return tuple(part.size_bytes for part in self._ranges)

    @property
    def gpu(self) -> Gpu:
        """The GPU, for the other modules of this package."""
        return self._gpu

    def offset_of(self, place: Any) -> int:
        """Returns where an address, or the first element of a tensor, lies in this memory, as a plane's
        `base_offset` counts. Raises KvtierError if it lies elsewhere."""
        address = place if isinstance(place, int) else _address(place)
        for start, part in zip(self._starts, self._ranges, strict=False):
            if part.address <= address < part.end:
                return start + address - part.address
        message = "lies outside this memory"
        raise KvtierError(Reason.PLANE_BEYOND_MAPPING, message, field="address", value=hex(address))

    def addresses_of(self, offsets: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """Returns the addresses of these offsets, which must be inside the memory."""
        indexes = np.searchsorted(np.array(self._starts[1:], np.uint64), offsets, side="right")
        starts = np.array(self._starts[:-1], np.uint64)[indexes]
        addresses = np.array([part.address for part in self._ranges], np.uint64)[indexes]
        return addresses + (offsets - starts)

    def check(self) -> None:
        """Raises NotExportableError, which says what to change, if other processes cannot map this memory."""
        export = self.export()
        try:
            export.next_packet()
        finally:
            export.close()

    def export(self) -> DeviceExport:
        """Makes the handles for one registration. Raises KvtierError, for example NotExportableError."""
        return DeviceExport(self._gpu, [(part.address, part.size_bytes) for part in self._ranges])

    def stream_doorbells(self, ring: Ring) -> GpuDoorbells:
        """Returns what lets streams of this GPU ring doorbells."""
        return GpuDoorbells(self._gpu, ring)

    def __repr__(self) -> str:
        return f"<DeviceMemory {self.size_bytes} bytes in {len(self._ranges)} ranges on {self.device}>"


def _checked(address: int, size_bytes: int, ordinal: int | None) -> tuple[Gpu, tuple[AddressRange, ...]]:
    if size_bytes <= 0:
        message = "must be more than 0"
        raise KvtierError(Reason.DEVICE_MEMORY_INVALID, message, field="size_bytes", value=size_bytes)
    gpu = gpu_of(address, ordinal)
    last = address + size_bytes - 1
    with driver_errors("size_bytes", size_bytes):
        info = pointer_info(gpu, last)
    if not info.is_device or info.ordinal != gpu.info.ordinal:
        message = f"{size_bytes} bytes from {address:#x} on are not all memory of {gpu.name}"
        raise KvtierError(Reason.DEVICE_MEMORY_INVALID, message, field="size_bytes", value=size_bytes)
    return gpu, (AddressRange(address, size_bytes),)


def _address(tensor: Any) -> int:
    if (interface := getattr(tensor, "__cuda_array_interface__", None)) is not None:
        return int(interface["data"][0])
    if callable(data_ptr := getattr(tensor, "data_ptr", None)):
        return int(data_ptr())
    raise _unknown(tensor)


def _extent(tensor: Any) -> tuple[int, int]:
    """Returns the address and the size in bytes."""
    if callable(storage_of := getattr(tensor, "untyped_storage", None)):
        storage = storage_of()
        return int(storage.data_ptr()), int(storage.nbytes())
    if (interface := getattr(tensor, "__cuda_array_interface__", None)) is not None:
        return int(interface["data"][0]), _interface_bytes(interface)
    if callable(getattr(tensor, "data_ptr", None)) and hasattr(tensor, "nbytes"):
        return _address(tensor), int(tensor.nbytes)
    raise _unknown(tensor)


def _interface_bytes(interface: dict[str, Any]) -> int:
    shape: Sequence[int] = interface["shape"]
    item_bytes = int(np.dtype(interface["typestr"]).itemsize)
    strides: Sequence[int] | None = interface.get("strides")
    if strides is None:
        return math.prod(int(count) for count in shape) * item_bytes
    if min(strides, default=0) < 0 or 0 in shape:
        message = "an array that is empty or runs backwards cannot be shared: give the one it is a view of"
        raise KvtierError(Reason.DEVICE_MEMORY_INVALID, message, field="strides", value=strides)
    return (
        sum(int(count - 1) * int(stride) for count, stride in zip(shape, strides, strict=True)) + item_bytes
    )


def _unknown(tensor: object) -> KvtierError:
    message = "has neither untyped_storage(), __cuda_array_interface__, nor data_ptr() and nbytes"
    return KvtierError(Reason.DEVICE_MEMORY_INVALID, message, field="tensor", value=type(tensor).__name__)
