"""Handles with which another process can map memory of this one.

The driver is asked for each range which kind it takes: legacy handles for memory of cuMemAlloc, descriptors
of the physical chunks for memory of cuMemCreate. Nothing is remembered from one export to the next.
"""

import os
import threading
from collections.abc import Iterator, Sequence

from kvtier_kernels.cuda import CudaError, PointerInfo

from kvtier.cuda.gpu import Gpu, driver_errors
from kvtier.errors import KvtierError, NotExportableError, Reason
from kvtier.memory import ChunkPacket
from kvtier.v1 import side_pb2

PACKET_CHUNKS_MAX = 64
CHUNKS_MAX = 65_536
"""The most chunks of one client that the daemon takes."""
POSIX_FD, FABRIC = 1, 8
"""Bits of CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES."""

_MIRROR = "or copy through kvtier.cuda.MirrorMemory"


class DeviceExport:
    """One export of a GPU's memory, for one registration, as kvtier.memory.Export describes it."""

    def __init__(self, gpu: Gpu, ranges: Sequence[tuple[int, int]]) -> None:
        """`ranges` are pairs of address and size in bytes. Raises KvtierError."""
        if gpu.info.is_mig:
            raise NotExportableError(
                f"a MIG instance shares no memory between processes: give the engine a whole GPU, {_MIRROR}",
                field="device",
                value=gpu.name,
            )
        self._gpu = gpu
        self._ranges: list[side_pb2.DeviceRange] = []
        self._walks: list[tuple[side_pb2.DeviceRange, int]] = []
        self._chunks = 0
        self._lock = threading.Lock()  # of the two below; never held during a driver's call
        self._fds: list[int] = []
        self._closed = False
        for address, size_bytes in ranges:
            self._ranges.append(self._range(address, size_bytes))
        self._walk = self._walk_all()

    def next_packet(self) -> ChunkPacket | None:
        """Returns the next 1 to 64 chunks, or None after the last, and closes those before."""
        self._close_fds()
        sizes, fds = [], []
        try:
            for size, fd in self._walk:
                self._adopt(fd)
                sizes.append(size)
                fds.append(fd)
                if len(fds) == PACKET_CHUNKS_MAX:
                    break
        except CudaError as error:
            raise _chunk_error(error) from error
        return ChunkPacket(sizes, tuple(fds)) if fds else None

    def ranges(self) -> list[side_pb2.DeviceRange]:
        """Returns the ranges for RegisterMemory, once `next_packet` has returned None."""
        return self._ranges

    def close(self) -> None:
        """Closes all open descriptors, without waiting for a `next_packet` that runs."""
        with self._lock:
            self._closed = True
        self._close_fds()

    def _range(self, address: int, size_bytes: int) -> side_pb2.DeviceRange:
        info = self._info(address)
        exported = side_pb2.DeviceRange(bytes=size_bytes)
        if info.is_legacy_ipc_capable:
            if address + size_bytes > info.base + info.size:
                message = f"its allocation ends after {info.base + info.size - address} bytes"
                raise KvtierError(Reason.DEVICE_MEMORY_INVALID, message, field="size_bytes", value=size_bytes)
            exported.ipc.CopyFrom(
                side_pb2.CudaIpc(
                    handle=self._legacy_handle(info.base),
                    offset=address - info.base,
                    buffer_id=info.buffer_id,
                )
            )
        elif info.allowed_handle_types & POSIX_FD:
            exported.chunks.CopyFrom(side_pb2.CudaChunks(offset=address - info.base))
            self._walks.append((exported, address))
        else:
            raise _wrong_kind(info)
        return exported

    def _info(self, address: int) -> PointerInfo:
        with driver_errors("address", hex(address)), self._gpu.context:
            info = self._gpu.driver.pointer_info(address)
        if not info.is_device:
            message = "there is no memory of a GPU any more: release_memory must come before it is freed"
            raise NotExportableError(message, field="address", value=hex(address))
        return info

    def _legacy_handle(self, address: int) -> bytes:
        """`address` is the allocation's first, as the driver's documentation demands."""
        try:
            with self._gpu.context:
                return self._gpu.driver.ipc_export(address)
        except CudaError as error:
            raise NotExportableError(
                f"cuIpcGetMemHandle was refused ({error.name}): allow CUDA IPC here (in a container: the "
                "host's IPC namespace, and a sandbox or seccomp profile that lets it pass; WSL and vGPU have "
                f"none), {_MIRROR}",
                value=hex(address),
            ) from error

    def _walk_all(self) -> Iterator[tuple[int, int]]:
        """Yields (bytes, descriptor) of every chunk, which are exported one at a time."""
        for exported, first in self._walks:
            address, end = first, first + exported.bytes
            while address < end:
                info = self._info(address)
                if self._chunks == CHUNKS_MAX:
                    message = f"made of more than {CHUNKS_MAX} chunks: use larger ones"
                    raise KvtierError(
                        Reason.DEVICE_MEMORY_INVALID, message, field="memory", value=exported.bytes
                    )
                yield info.size, self._export_chunk(info.base)
                self._chunks += 1
                exported.chunks.count += 1
                address = info.base + info.size

    def _export_chunk(self, address: int) -> int:
        driver = self._gpu.driver
        with self._gpu.context:
            chunk = driver.chunk_of(address)
            try:
                return driver.chunk_export(chunk)
            finally:
                driver.chunk_release(chunk)

    def _adopt(self, fd: int) -> None:
        with self._lock:
            if not self._closed:
                self._fds.append(fd)
                return
        os.close(fd)
        raise KvtierError(Reason.CANCELLED, "the export was given up", field="memory")

    def _close_fds(self) -> None:
        with self._lock:
            fds, self._fds = self._fds, []
        for fd in fds:
            os.close(fd)


def _wrong_kind(info: PointerInfo) -> NotExportableError:
    if info.allowed_handle_types & FABRIC:
        found, change = "fabric handles only", "allow CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR as well"
    else:
        found = "no handles at all"
        change = (
            "allocate it with cudaMalloc (torch: PYTORCH_CUDA_ALLOC_CONF without "
            "expandable_segments:True and backend:cudaMallocAsync; vLLM: without sleep mode's allocator), or "
            "with CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR requested"
        )
    return NotExportableError(
        f"this memory was allocated for {found}: {change}, {_MIRROR}", value=hex(info.base)
    )


def _chunk_error(error: CudaError) -> NotExportableError:
    return NotExportableError(
        f"a chunk of this memory cannot be exported ({error}): request "
        "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR when it is created, allow more open files (ulimit -n), "
        f"{_MIRROR}"
    )
