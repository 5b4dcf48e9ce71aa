"""The primary context of a GPU."""

import threading
from ctypes import byref, c_int, c_void_p
from types import TracebackType
from typing import Self

from kvtier_kernels.cuda.abi import CAPTURE_MODE_RELAXED
from kvtier_kernels.cuda.errors import CudaError
from kvtier_kernels.cuda.library import Library


class Context:
    """One reference to the primary context of a GPU, which the driver counts per process.

    The first reference of a process makes the context (about 500 MiB of the GPU's memory), and the last
    release destroys it with everything made in it. An engine's process has one already, because CUDA's
    runtime uses the primary context, so a reference there costs nothing. It must still be released as soon as
    it is not needed any more.

    Each thread has a stack of current contexts: `with context:` pushes and pops, and `make_current` replaces
    the top, for threads that serve one GPU all their life. Any number of threads may use one Context.

    Between `push` and `pop`, the thread's calls do not disturb CUDA graphs that other threads are capturing.
    Otherwise the driver refuses many calls during a capture (a query of an event, a registration), and the
    capture is lost: an engine would not start because of us.
    """

    def __init__(self, library: Library, ordinal: int) -> None:
        """Takes the reference. Raises CudaError, with OUT_OF_MEMORY if there is no room for a context."""
        handle = c_void_p()
        library.call("cuDevicePrimaryCtxRetain", byref(handle), ordinal)
        self._library = library
        self.ordinal = ordinal
        self.handle: int = handle.value or 0
        self._released = False

    def push(self) -> None:
        """Makes the context current in this thread until `pop`."""
        self._library.call("cuCtxPushCurrent_v2", self.handle)
        try:
            _modes_before().append(self._exchange_capture_mode(CAPTURE_MODE_RELAXED))
        except CudaError:
            self._pop_current()
            raise

    def pop(self) -> None:
        """Makes the context current again that was current before `push`."""
        try:
            self._exchange_capture_mode(_modes_before().pop())
        finally:
            self._pop_current()

    def make_current(self) -> None:
        """Makes the context current in this thread for good."""
        self._library.call("cuCtxSetCurrent", self.handle)

    def release(self) -> None:
        """Gives the reference back. A second call does nothing. Nothing that was made in the context may be
        used afterwards, unless someone else holds a reference."""
        if self._released:
            return
        self._released = True
        self._library.call("cuDevicePrimaryCtxRelease_v2", self.ordinal)

    def __enter__(self) -> Self:
        self.push()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.pop()

    def _pop_current(self) -> None:
        self._library.call("cuCtxPopCurrent_v2", byref(c_void_p()))

    def _exchange_capture_mode(self, mode: int) -> int:
        """Sets the thread's capture mode, and returns the one before."""
        exchanged = c_int(mode)
        self._library.call("cuThreadExchangeStreamCaptureMode", byref(exchanged))
        return exchanged.value


def _modes_before() -> list[int]:
    """The capture modes to which the pops of this thread return."""
    stack: list[int] | None = getattr(_thread, "modes", None)
    if stack is None:
        stack = _thread.modes = []
    return stack


_thread = threading.local()
