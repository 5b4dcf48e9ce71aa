"""Driver calls on memory: the process's own, host memory, and memory shared by legacy handles."""

from ctypes import addressof, byref, c_int, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Final

from kvtier_kernels.cuda import abi
from kvtier_kernels.cuda.errors import INVALID_VALUE, CudaError
from kvtier_kernels.cuda.library import Library


@dataclass(frozen=True)
class PointerInfo:
    """What the driver knows about an address."""

    is_device: bool
    """False for host memory, whether the driver knows it or not; then the other fields are 0."""
    ordinal: int = 0
    buffer_id: int = 0
    """The id of the allocation. No two allocations of a process ever have the same."""
    base: int = 0
    """Start of the allocation, or of the chunk's mapping, in which the address lies."""
    size: int = 0
    is_legacy_ipc_capable: bool = False
    allowed_handle_types: int = 0
    """HANDLE_TYPE_* bits by which a chunk can be exported."""


_ATTRIBUTES: Final = (
    abi.POINTER_ATTRIBUTE_MEMORY_TYPE,
    abi.POINTER_ATTRIBUTE_BUFFER_ID,
    abi.POINTER_ATTRIBUTE_DEVICE_ORDINAL,
    abi.POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
    abi.POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES,
)


_MAPPING: Final = (abi.POINTER_ATTRIBUTE_MAPPING_BASE_ADDR, abi.POINTER_ATTRIBUTE_MAPPING_SIZE)


class MemoryCalls:
    """Calls on memory. A context must be current in the calling thread. Every method raises CudaError."""

    library: Library

    def memory_info(self) -> tuple[int, int]:
        """Free and total bytes of the current GPU."""
        free, total = c_size_t(), c_size_t()
        self.library.call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value, total.value

    def alloc(self, n: int) -> int:
        """Allocates n bytes. The caller frees the returned address."""
        ptr = abi.CUdeviceptr()
        self.library.call("cuMemAlloc_v2", byref(ptr), n)
        return ptr.value

    def free(self, ptr: int) -> None:
        """Frees what `alloc` returned, after all work on this GPU that is under way."""
        self.library.call("cuMemFree_v2", ptr)

    def pointer_info(self, ptr: int) -> PointerInfo:
        """What the driver knows about any address, host memory included."""
        values = _attributes(self.library, ptr, _ATTRIBUTES)
        if values[abi.POINTER_ATTRIBUTE_MEMORY_TYPE] != abi.MEMORYTYPE_DEVICE:
            return PointerInfo(is_device=False)
        is_legacy = bool(values[abi.POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE])
        handle_types = values[abi.POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES]
        base, size = self._mapping(ptr) if handle_types and not is_legacy else self._allocation(ptr)
        return PointerInfo(
            is_device=True,
            ordinal=values[abi.POINTER_ATTRIBUTE_DEVICE_ORDINAL],
            buffer_id=values[abi.POINTER_ATTRIBUTE_BUFFER_ID],
            base=base,
            size=size,
            is_legacy_ipc_capable=is_legacy,
            allowed_handle_types=handle_types,
        )

    def _mapping(self, ptr: int) -> tuple[int, int]:
        """Base and bytes of the mapping of a chunk. (Of these, cuMemGetAddressRange is said to answer the
        whole reservation. It is asked only where a driver does not know the attributes.)"""
        try:
            found = _attributes(self.library, ptr, _MAPPING)
        except CudaError as error:
            if error.code != INVALID_VALUE:
                raise
            return self._allocation(ptr)
        base, size = found[abi.POINTER_ATTRIBUTE_MAPPING_BASE_ADDR], found[abi.POINTER_ATTRIBUTE_MAPPING_SIZE]
        return (base, size) if size else self._allocation(ptr)

    def _allocation(self, ptr: int) -> tuple[int, int]:
        """Base and bytes of an allocation of cuMemAlloc. (Of these, the attributes may tell of a larger block
        that several share.)"""
        base, size = abi.CUdeviceptr(), c_size_t()
        self.library.call("cuMemGetAddressRange_v2", byref(base), byref(size), ptr)
        return base.value, size.value

    # ---- memory of other processes

    def ipc_export(self, ptr: int) -> bytes:
        """A handle of 64 bytes for the whole allocation that begins at `ptr`, its `pointer_info().base`. For
        an address inside it, send the offset along. Handles of freed allocations can come again with equal
        bytes, so send the buffer id as well. Nothing has to be released."""
        handle = abi.CUipcMemHandle()
        self.library.call("cuIpcGetMemHandle", byref(handle), ptr)
        return bytes(handle)

    def ipc_open(self, handle: bytes) -> int:
        """Maps another process's allocation and returns its base. If it is opened again in the same context,
        the driver counts that and returns the same address. An open handle keeps the memory allocated after
        its owner's death. Raises ValueError unless `handle` has 64 bytes."""
        if len(handle) != abi.IPC_HANDLE_BYTES:
            raise ValueError(f"handle has {len(handle)} bytes, must have {abi.IPC_HANDLE_BYTES}")
        ptr = abi.CUdeviceptr()
        by_value = abi.CUipcMemHandle.from_buffer_copy(handle)
        self.library.call("cuIpcOpenMemHandle_v2", byref(ptr), by_value, abi.IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
        return ptr.value

    def ipc_close(self, ptr: int) -> None:
        """Undoes one `ipc_open`. No copy on the memory may be under way. It may wait long for a peer's
        work."""
        self.library.call("cuIpcCloseMemHandle", ptr)

    # ---- host memory

    def host_register(self, address: int, n: int) -> None:
        """Pins n bytes of host memory for direct copies, for all contexts, readable and writable by GPUs. The
        memory must stay mapped until `host_unregister`. Copies must not span two registrations. Takes about
        0.1 s per GB."""
        flags = abi.MEMHOSTREGISTER_PORTABLE | abi.MEMHOSTREGISTER_DEVICEMAP
        self.library.call("cuMemHostRegister_v2", address, n, flags)

    def host_unregister(self, address: int) -> None:
        """Undoes the `host_register` of exactly this address. No copy may be under way."""
        self.library.call("cuMemHostUnregister", address)

    def host_device_pointer(self, address: int) -> int:
        """The device address of registered host memory, for any address inside it."""
        ptr = abi.CUdeviceptr()
        self.library.call("cuMemHostGetDevicePointer_v2", byref(ptr), address, 0)
        return ptr.value


def _attributes(library: Library, ptr: int, wanted: tuple[int, ...]) -> dict[int, int]:
    """The wanted attributes of an address; all 0 for memory that the driver does not know."""
    n = len(wanted)
    # The driver writes 1, 4 or 8 bytes, depending on the attribute's type; the rest stays 0.
    values = (c_uint64 * n)()
    targets = (c_void_p * n)(*(addressof(values) + 8 * i for i in range(n)))
    library.call("cuPointerGetAttributes", n, (c_int * n)(*wanted), targets, ptr)
    return dict(zip(wanted, values, strict=True))
