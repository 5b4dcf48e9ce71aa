"""The driver's functions called as they are, so that these tests depend on nothing but the fake."""

from __future__ import annotations

import ctypes
import mmap
import os
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p
from pathlib import Path
from typing import Any

HANDLE_BYTES = 64
STREAM, DURING_CALL, ANY = 1, 2, 3


class Failed(Exception):
    """A driver function returned another code than 0."""

    def __init__(self, name: str, code: int) -> None:
        super().__init__(f"{name}: {code}")
        self.code = code


class Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * HANDLE_BYTES),)


class Properties(ctypes.Structure):
    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location_type", c_int),
        ("location_id", c_int),
        ("more", c_uint64 * 2),
    )


class Access(ctypes.Structure):
    _fields_ = (("location_type", c_int), ("location_id", c_int), ("flags", c_int))


class Attributes(ctypes.Structure):
    _fields_ = (("order", c_int), ("hints", c_int * 4), ("flags", ctypes.c_uint))


class Copy2D(ctypes.Structure):
    _fields_ = (
        ("source_x", c_size_t),
        ("source_y", c_size_t),
        ("source_type", c_int),
        ("source_host", c_void_p),
        ("source_device", c_uint64),
        ("source_array", c_void_p),
        ("source_pitch", c_size_t),
        ("destination_x", c_size_t),
        ("destination_y", c_size_t),
        ("destination_type", c_int),
        ("destination_host", c_void_p),
        ("destination_device", c_uint64),
        ("destination_array", c_void_p),
        ("destination_pitch", c_size_t),
        ("width", c_size_t),
        ("height", c_size_t),
    )


class Raw:
    """One process's use of a library. `call` raises Failed."""

    def __init__(self, library: Path | str) -> None:
        self.library = ctypes.CDLL(str(library))

    def code(self, name: str, *arguments: Any) -> int:
        return int(self.library[name](*arguments))

    def call(self, name: str, *arguments: Any) -> None:
        code = self.code(name, *arguments)
        if code:
            raise Failed(name, code)

    def start(self, device: int = 0) -> Raw:
        """A context that is current in this thread."""
        self.call("cuInit", 0)
        context = c_void_p()
        self.call("cuDevicePrimaryCtxRetain", byref(context), device)
        self.call("cuCtxPushCurrent_v2", context)
        return self

    # --- memory

    def memory_info(self) -> tuple[int, int]:
        free, total = c_size_t(), c_size_t()
        self.call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value, total.value

    def alloc(self, size: int) -> int:
        address = c_uint64()
        self.call("cuMemAlloc_v2", byref(address), c_size_t(size))
        return address.value

    def free(self, address: int) -> None:
        self.call("cuMemFree_v2", c_uint64(address))

    def attribute(self, which: int, address: int) -> int:
        value = c_uint64()
        self.call("cuPointerGetAttribute", byref(value), which, c_uint64(address))
        return value.value

    def write(self, address: int, data: bytes) -> None:
        """From pageable memory, at once."""
        self.call("cuMemcpyHtoD_v2", c_uint64(address), ctypes.c_char_p(data), c_size_t(len(data)))

    def read(self, address: int, size: int) -> bytes:
        data = ctypes.create_string_buffer(size)
        self.call("cuMemcpyDtoH_v2", data, c_uint64(address), c_size_t(size))
        return data.raw

    def export(self, address: int) -> bytes:
        handle = Handle()
        self.call("cuIpcGetMemHandle", byref(handle), c_uint64(address))
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        address = c_uint64()
        self.call("cuIpcOpenMemHandle_v2", byref(address), Handle.from_buffer_copy(handle), 1)
        return address.value

    def close(self, address: int) -> None:
        self.call("cuIpcCloseMemHandle", c_uint64(address))

    # --- chunks

    def create(
        self, size: int, device: int = 0, exportable: bool = True, handle_types: int | None = None
    ) -> int:
        handle = c_uint64()
        properties = Properties(1, int(exportable) if handle_types is None else handle_types, 1, device)
        self.call("cuMemCreate", byref(handle), c_size_t(size), byref(properties), c_uint64(0))
        return handle.value

    def release(self, handle: int) -> None:
        self.call("cuMemRelease", c_uint64(handle))

    def export_chunk(self, handle: int) -> int:
        descriptor = c_int()
        self.call("cuMemExportToShareableHandle", byref(descriptor), c_uint64(handle), 1, c_uint64(0))
        return descriptor.value

    def import_chunk(self, descriptor: int) -> int:
        handle = c_uint64()
        self.call("cuMemImportFromShareableHandle", byref(handle), c_void_p(descriptor), 1)
        return handle.value

    def import_path(self, path: str) -> int:
        """By a path of another process's descriptor."""
        descriptor = os.open(path, os.O_RDWR)
        try:
            return self.import_chunk(descriptor)
        finally:
            os.close(descriptor)

    def reserve(self, size: int) -> int:
        address = c_uint64()
        self.call(
            "cuMemAddressReserve", byref(address), c_size_t(size), c_size_t(0), c_uint64(0), c_uint64(0)
        )
        return address.value

    def unreserve(self, address: int, size: int) -> None:
        self.call("cuMemAddressFree", c_uint64(address), c_size_t(size))

    def map(self, address: int, size: int, handle: int) -> None:
        self.call("cuMemMap", c_uint64(address), c_size_t(size), c_size_t(0), c_uint64(handle), c_uint64(0))

    def unmap(self, address: int, size: int) -> None:
        self.call("cuMemUnmap", c_uint64(address), c_size_t(size))

    def allow(self, address: int, size: int, flags: int = 3, device: int = 0) -> None:
        access = Access(1, device, flags)
        self.call("cuMemSetAccess", c_uint64(address), c_size_t(size), byref(access), c_size_t(1))

    def mapped(self, size: int, chunk: int) -> tuple[int, int]:
        """A chunk of its own (address, handle)."""
        handle = self.create(chunk)
        address = self.reserve(size)
        self.map(address, chunk, handle)
        self.allow(address, chunk)
        return address, handle

    # --- host memory, streams and events

    def register(self, address: int, size: int) -> None:
        self.call("cuMemHostRegister_v2", c_void_p(address), c_size_t(size), 3)

    def unregister(self, address: int) -> None:
        self.call("cuMemHostUnregister", c_void_p(address))

    def stream(self) -> int:
        stream = c_void_p()
        self.call("cuStreamCreateWithPriority", byref(stream), 1, 0)
        assert stream.value is not None
        return stream.value

    def synchronize(self, stream: int) -> None:
        self.call("cuStreamSynchronize", c_void_p(stream))

    def delay(self, stream: int, seconds: float) -> None:
        self.call("fake_cuda_delay", c_void_p(stream), c_uint64(round(seconds * 1e6)))

    def event(self) -> int:
        event = c_void_p()
        self.call("cuEventCreate", byref(event), 3)
        assert event.value is not None
        return event.value

    def record(self, event: int, stream: int) -> None:
        self.call("cuEventRecord", c_void_p(event), c_void_p(stream))

    def is_done(self, event: int) -> bool:
        code = self.code("cuEventQuery", c_void_p(event))
        assert code in (0, 600), code
        return code == 0

    def write_value(self, stream: int, address: int, value: int) -> None:
        self.call("cuStreamWriteValue64_v2", c_void_p(stream), c_uint64(address), c_uint64(value), 0)

    # --- captures

    def begin_capture(self, stream: int, mode: int) -> None:
        self.call("cuStreamBeginCapture_v2", c_void_p(stream), mode)

    def end_capture(self, stream: int) -> None:
        self.call("cuStreamEndCapture", c_void_p(stream), None)

    def thread_mode(self, mode: int) -> None:
        """This thread's: 0 global, 1 thread-local, 2 relaxed."""
        self.call("cuThreadExchangeStreamCaptureMode", byref(c_int(mode)))

    # --- copies

    def copy_steadily(self, size: int, chunk: int, flights: int) -> None:
        """Copies so many bytes to the device, in chunks, with so many of them under way."""
        memory = mmap.mmap(-1, chunk)
        host = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.register(host, chunk)
        address, stream = self.alloc(chunk), self.stream()
        events = [self.event() for _ in range(flights)]
        for number in range(size // chunk):
            event = events[number % flights]
            self.call("cuEventSynchronize", c_void_p(event))
            self.copy(address, host, chunk, stream)
            self.record(event, stream)
        self.synchronize(stream)

    def copy(self, destination: int, source: int, size: int, stream: int) -> None:
        self.call("cuMemcpyAsync", c_uint64(destination), c_uint64(source), c_size_t(size), c_void_p(stream))

    def batch(self, copies: list[tuple[int, int, int]], order: int, stream: int, old: bool = False) -> int:
        """(destination, source, size) each; the code. `old`: in the form of 12.8."""
        count = len(copies)
        destinations = (c_uint64 * count)(*(one[0] for one in copies))
        sources = (c_uint64 * count)(*(one[1] for one in copies))
        sizes = (c_size_t * count)(*(one[2] for one in copies))
        first = (c_size_t * 1)(0)
        attributes = Attributes(order)
        fail_index = c_size_t()
        shared = (destinations, sources, sizes, c_size_t(count), byref(attributes), first, c_size_t(1))
        if old:
            return self.code("cuMemcpyBatchAsync", *shared, byref(fail_index), c_void_p(stream))
        return self.code("cuMemcpyBatchAsync_v2", *shared, c_void_p(stream))
