"""Doorbells that an engine's stream rings: the GPU writes into the words page, or, where that does not work,
a thread of ours watches an event."""

import logging
import mmap
import threading
import time
from typing import Any

from kvtier_kernels import SharedWords
from kvtier_kernels.cuda import CudaError

from kvtier.cuda.events import EventRings
from kvtier.cuda.gpu import Gpu, OnePerGpu, driver_errors
from kvtier.errors import KvtierError, Reason
from kvtier.memory import Ring, SharedBuffer

log = logging.getLogger("kvtier")

PAGES_MAX = 4_096
"""The most pages that a process ever exposes to one GPU. They stay mapped, each with 4 KiB pinned, and every
registration takes one."""
TEST_DEADLINE_S = 2.0
TEST_POLL_S = 0.000_2
TEST_VALUE = 0x6B76_7469_6572_0001


class StreamWrites:
    """Pages of host memory that streams of one GPU write to. There is one of these per GPU and process."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._lock = threading.Lock()
        self._pages = 0
        self._tested = False
        self.why_not = ""
        """Why streams cannot write, or not any more; empty if they can, as far as is known."""

    def expose(self, buffer: SharedBuffer, size_bytes: int) -> int | None:
        """Lets the GPU write the first `size_bytes` of a buffer, and returns their address there; None if it
        cannot."""
        with self._lock:
            try:
                if not self._tested:
                    self._test()
                    self._tested = True
            except OSError:  # there is no descriptor or memory for the test just now
                return None
            if not self.why_not and self._pages >= PAGES_MAX:
                self._give_up(f"{PAGES_MAX} registrations have used up the pages that may stay mapped")
            if self.why_not:
                return None
            try:
                with self._gpu.context:
                    return self._map(buffer, size_bytes)
            except CudaError as error:
                self._give_up(str(error))
                return None
            except ValueError:  # the buffer is closed, as its client is
                return None

    def write(self, stream: int, address: int, value: int) -> None:
        """Queues the write on the stream. Raises CudaError."""
        with self._gpu.context:
            self._gpu.driver.write_value(stream, address, value)

    def _map(self, buffer: SharedBuffer, size_bytes: int) -> int:
        driver = self._gpu.driver
        address = buffer.keep_mapped()  # a queued write lands there even after the client is gone
        self._pages += 1
        driver.host_register(address, -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        return driver.host_device_pointer(address)

    def _test(self) -> None:
        """Has a stream of ours write a word, and checks that it arrives."""
        buffer = SharedBuffer.create(mmap.PAGESIZE, "kvtier-doorbell-test")
        driver = self._gpu.driver
        try:
            with self._gpu.context:
                address = self._map(buffer, 8)
                words = SharedWords(buffer.array, 1)
                stream = driver.stream_create()
                driver.write_value(stream, address, TEST_VALUE)
                deadline_s = time.monotonic() + TEST_DEADLINE_S
                while not (done := driver.stream_is_done(stream)) and time.monotonic() < deadline_s:
                    time.sleep(TEST_POLL_S)
                if done:
                    driver.stream_destroy(stream)
                if not done or words.load(0) != TEST_VALUE:
                    self._give_up("the word that a stream was asked to write as a test did not arrive")
        except CudaError as error:
            self._give_up(str(error))
        finally:
            buffer.close()

    def _give_up(self, why: str) -> None:
        self.why_not = why
        log.warning(
            "kvtier: streams of %s ring no doorbells by themselves, a thread does it for them, later: %s",
            self._gpu.name,
            why,
        )


_writes_of = OnePerGpu(StreamWrites)


class GpuDoorbells:
    """The doorbells of one client, as kvtier.memory.StreamDoorbells describes them."""

    def __init__(self, gpu: Gpu, ring: Ring) -> None:
        self._writes = _writes_of(gpu)
        self._events = EventRings(gpu, ring)
        self._refusal_logged = False

    @property
    def mode(self) -> str:
        """How doorbells are rung: "stream writes", or that a thread watches events, and why."""
        why_not = self._writes.why_not
        return f"events, watched by a thread: {why_not}" if why_not else "stream writes"

    def expose(self, buffer: SharedBuffer, size_bytes: int) -> int | None:
        """Lets the GPU write the first `size_bytes` of a buffer, and returns their address there; None if it
        cannot."""
        return self._writes.expose(buffer, size_bytes)

    def ring_on(self, stream: Any, address: int | None, doorbell: int, value: int) -> None:
        """Has `stream` write `value` to the address, or a thread ring after an event. Raises KvtierError if
        the driver refuses both."""
        handle = _handle(stream)
        if address is not None:
            try:
                self._writes.write(handle, address, value)
            except CudaError as error:
                if not self._refusal_logged:
                    self._refusal_logged = True
                    log.warning("kvtier: a stream took no write to a doorbell, an event is used: %s", error)
            else:
                return
        with driver_errors("stream", hex(handle)):
            self._events.ring_after(handle, doorbell, value)

    def close(self) -> None:
        """Ends the ringing by a thread. What streams were asked to write, they still write."""
        self._events.close()


def _handle(stream: Any) -> int:
    """Returns the CUstream of a number, a torch stream, or an object with `__cuda_stream__`."""
    if isinstance(stream, int):
        return stream
    if (handle := getattr(stream, "cuda_stream", None)) is not None:
        return int(handle)
    if callable(protocol := getattr(stream, "__cuda_stream__", None)):
        return int(protocol()[1])
    message = "give a CUstream as a number, a torch.cuda.Stream, or an object with __cuda_stream__"
    raise KvtierError(Reason.DEVICE_MEMORY_INVALID, message, field="stream", value=type(stream).__name__)
