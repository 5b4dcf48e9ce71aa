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

    The first reference of a process makes the context (about 500 MiB of the GPU's memory), the last release
    destroys it with everything made in it. An engine's process has one already (CUDA's runtime uses the
    primary context), so a reference there costs nothing; it must not be held longer than needed all the same.

    A context is current per thread, in a stack: `with context:` pushes and pops it; `make_current` replaces
    the top of the stack and is meant for threads that serve one GPU all their life. Any number of threads may
    use one Context.

    Between `push` and `pop` the thread's calls leave alone the CUDA graphs that other threads are capturing.
    Otherwise the driver refuses many of them meanwhile (a query of an event, a registration), and the capture
    that they came into is lost: an engine would not start because of us.
    """

    def __init__(self, library: Library, ordinal: int) -> None:
        """Takes the reference. Raises CudaError: OUT_OF_MEMORY where there is no room for a context."""
        handle = c_void_p()
        library.call("cuDevicePrimaryCtxRetain", byref(handle), ordinal)
        self._library = library
        self.ordinal = ordinal
        self.handle: int = handle.value or 0
        self._released = False

    def push(self) -> None:
        """Makes it current in this thread until `pop`."""
        self._library.call("cuCtxPushCurrent_v2", self.handle)
        try:
            _modes_before().append(self._exchange_capture_mode(CAPTURE_MODE_RELAXED))
        except CudaError:
            self._pop_current()
            raise

    def pop(self) -> None:
        """Makes current again what was before `push`."""
        try:
            self._exchange_capture_mode(_modes_before().pop())
        finally:
            self._pop_current()

    def make_current(self) -> None:
        """Makes it current in this thread for good."""
        self._library.call("cuCtxSetCurrent", self.handle)

    def release(self) -> None:
        """Gives the reference back; a second call does nothing. Nothing made in the context may be used after
        it unless someone else holds a reference."""
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
        """Sets the thread's mode; the one before."""
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
