"""Driver calls on chunks: physical memory that is shared by descriptor and mapped into reserved addresses."""

import os
from ctypes import byref, c_int, c_size_t

from kvtier_kernels.cuda import abi
from kvtier_kernels.cuda.library import Library


class ChunkCalls:
    """Calls on chunks. A context must be current in the calling thread. Every method raises CudaError.

    A chunk's memory lives as long as a handle of it or a mapping exists, in any process.
    """

    library: Library

    def chunk_create(self, n: int, ordinal: int, exportable: bool = True) -> int:
        """A handle of n new bytes on a GPU; n is a multiple of `chunk_granularity`. The caller releases the
        handle."""
        handle = abi.CUhandle()
        self.library.call("cuMemCreate", byref(handle), n, byref(_properties(ordinal, exportable)), 0)
        return handle.value

    def chunk_of(self, ptr: int) -> int:
        """A new handle of the chunk that is mapped at an address. The caller releases it. Raises CudaError
        INVALID_VALUE for memory that is not made of chunks."""
        handle = abi.CUhandle()
        self.library.call("cuMemRetainAllocationHandle", byref(handle), ptr)
        return handle.value

    def chunk_release(self, handle: int) -> None:
        """Releases a handle. Mappings of the chunk stay."""
        self.library.call("cuMemRelease", handle)

    def chunk_export(self, handle: int) -> int:
        """A new descriptor of the chunk (close-on-exec). The caller closes it. Raises CudaError if the chunk
        was not made exportable."""
        fd = c_int(-1)
        self.library.call("cuMemExportToShareableHandle", byref(fd), handle, abi.HANDLE_TYPE_POSIX_FD, 0)
        os.set_inheritable(fd.value, False)
        return fd.value

    def chunk_import(self, fd: int) -> int:
        """A handle of the chunk behind a descriptor, which may be closed at once. The caller releases the
        handle."""
        handle = abi.CUhandle()
        self.library.call("cuMemImportFromShareableHandle", byref(handle), fd, abi.HANDLE_TYPE_POSIX_FD)
        return handle.value

    def chunk_granularity(self, ordinal: int) -> int:
        """Sizes and addresses of chunks on this GPU are multiples of this number of bytes."""
        granularity = c_size_t()
        self.library.call(
            "cuMemGetAllocationGranularity",
            byref(granularity),
            byref(_properties(ordinal, exportable=True)),
            abi.GRANULARITY_MINIMUM,
        )
        return granularity.value

    def reserve(self, n: int, alignment: int = 0) -> int:
        """Reserves n bytes of addresses, without memory behind them. The caller releases them with
        `unreserve`."""
        ptr = abi.CUdeviceptr()
        self.library.call("cuMemAddressReserve", byref(ptr), n, alignment, 0, 0)
        return ptr.value

    def unreserve(self, ptr: int, n: int) -> None:
        """Releases a whole reservation, after everything in it was unmapped."""
        self.library.call("cuMemAddressFree", ptr, n)

    def map_chunk(self, ptr: int, n: int, handle: int, offset: int = 0) -> None:
        """Maps n bytes of a chunk at reserved addresses. They are not accessible before `allow_access`."""
        self.library.call("cuMemMap", ptr, n, offset, handle, 0)

    def unmap(self, ptr: int, n: int) -> None:
        """Unmaps whole mappings. No copy on them may be under way."""
        self.library.call("cuMemUnmap", ptr, n)

    def allow_access(self, ptr: int, n: int, ordinal: int) -> None:
        """Lets a GPU read and write mapped addresses."""
        location = abi.CUmemLocation(abi.LOCATION_TYPE_DEVICE, ordinal)
        access = abi.CUmemAccessDesc(location, abi.ACCESS_READ_WRITE)
        self.library.call("cuMemSetAccess", ptr, n, byref(access), 1)


def _properties(ordinal: int, exportable: bool) -> abi.CUmemAllocationProp:
    return abi.CUmemAllocationProp(
        type=abi.ALLOCATION_TYPE_PINNED,
        requested_handle_types=abi.HANDLE_TYPE_POSIX_FD if exportable else abi.HANDLE_TYPE_NONE,
        location=abi.CUmemLocation(abi.LOCATION_TYPE_DEVICE, ordinal),
    )
