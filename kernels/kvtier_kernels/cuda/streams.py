"""Driver calls on streams and events, and single copies."""

from ctypes import byref, c_int, c_void_p

from kvtier_kernels.cuda import abi
from kvtier_kernels.cuda.errors import NOT_READY, SUCCESS
from kvtier_kernels.cuda.library import Library


class StreamCalls:
    """Calls on streams and events. A context must be current in the calling thread. Every method raises
    CudaError.

    Several threads may use a stream or an event. When it is destroyed, none may be using it.
    """

    library: Library

    def stream_create(self, priority: int = 0) -> int:
        """A stream that does not synchronise with the NULL stream. A lower number means a higher priority
        (see `stream_priority_range`; the driver clamps it). The caller destroys the stream."""
        stream = c_void_p()
        self.library.call("cuStreamCreateWithPriority", byref(stream), abi.STREAM_NON_BLOCKING, priority)
        return stream.value or 0

    def stream_destroy(self, stream: int) -> None:
        """Returns at once. The stream goes when its work is done."""
        self.library.call("cuStreamDestroy_v2", stream)

    def stream_synchronize(self, stream: int) -> None:
        """Waits for all of the stream's work, without a deadline: the process's watchdog is the deadline."""
        self.library.call("cuStreamSynchronize", stream)

    def stream_is_done(self, stream: int) -> bool:
        return self._is_done("cuStreamQuery", stream)

    def stream_priority_range(self) -> tuple[int, int]:
        """(least, greatest), for example (0, -5)."""
        least, greatest = c_int(), c_int()
        self.library.call("cuCtxGetStreamPriorityRange", byref(least), byref(greatest))
        return least.value, greatest.value

    def event_create(self) -> int:
        """An event without time stamps, whose waiters sleep instead of spinning. The caller destroys it."""
        event = c_void_p()
        self.library.call("cuEventCreate", byref(event), abi.EVENT_BLOCKING_SYNC | abi.EVENT_DISABLE_TIMING)
        return event.value or 0

    def event_record(self, event: int, stream: int) -> None:
        """Makes the event done once everything is done that the stream holds now. Forgets an earlier
        recording."""
        self.library.call("cuEventRecord", event, stream)

    def event_is_done(self, event: int) -> bool:
        """Whether the event is done; also True for one that was never recorded."""
        return self._is_done("cuEventQuery", event)

    def event_synchronize(self, event: int) -> None:
        """Sleeps until the event is done, without a deadline: the process's watchdog is the deadline."""
        self.library.call("cuEventSynchronize", event)

    def event_destroy(self, event: int) -> None:
        self.library.call("cuEventDestroy_v2", event)

    def write_value(self, stream: int, device_address: int, value: int) -> None:
        """Has the stream write 64 aligned bits when everything before is done and visible. `device_address`
        may be that of registered host memory (`host_device_pointer`)."""
        self.library.call("cuStreamWriteValue64_v2", stream, device_address, value, 0)

    def copy_to_host(self, host_address: int, ptr: int, n: int) -> None:
        """Copies device memory to host memory of any kind. The copy is done when it returns."""
        self.library.call("cuMemcpyDtoH_v2", host_address, ptr, n)

    def copy_to_device(self, ptr: int, host_address: int, n: int) -> None:
        """Copies host memory of any kind to device memory. The copy is done when it returns."""
        self.library.call("cuMemcpyHtoD_v2", ptr, host_address, n)
        # For pageable memory, the call returns when the bytes are staged, before the last have landed.
        self.library.call("cuStreamSynchronize", 0)

    def copy_async(self, dst: int, src: int, n: int, stream: int) -> None:
        """Copies between any two of device memory and registered host memory, in the stream's order."""
        self.library.call("cuMemcpyAsync", dst, src, n, stream)

    def _is_done(self, call: str, handle: int) -> bool:
        code = self.library.result(call, handle)
        if code not in (SUCCESS, NOT_READY):
            raise self.library.error(call, code, (handle,))
        return code == SUCCESS
