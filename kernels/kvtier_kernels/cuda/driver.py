"""The CUDA driver of this process."""

import threading
from ctypes import byref, c_void_p

from kvtier_kernels.cuda.chunks import ChunkCalls
from kvtier_kernels.cuda.contexts import Context
from kvtier_kernels.cuda.devices import DeviceInfo, find_device, visible_devices
from kvtier_kernels.cuda.library import Library, library_path, version_text
from kvtier_kernels.cuda.memory import MemoryCalls
from kvtier_kernels.cuda.streams import StreamCalls


class Driver(MemoryCalls, ChunkCalls, StreamCalls):
    """The driver's calls, by `load`. Handles, addresses and descriptors are plain integers.

    Threads: every method may be called from any thread and releases the GIL while it runs. What works on
    memory, chunks, streams, events and copies needs a context current in the calling thread (CudaError
    INVALID_CONTEXT otherwise); devices, `retain_primary` and `current_context` do not. Lifetime: nothing is
    released by garbage collection. Whoever gets something from a method that says so releases it; the end of
    the process, or of the context, releases all. A Driver itself lives as long as the process. Processes:
    CUDA does not survive a fork. Load it in the process that uses it. Errors: CudaError from every method; an
    asynchronous failure of earlier work may surface in any of them.
    """

    def __init__(self, library: Library) -> None:
        self._library = library

    @property
    def path(self) -> str:
        """The library as it was asked for."""
        return self._library.path

    @property
    def version(self) -> int:
        """The CUDA version that the driver supports: 13000 is 13.0."""
        return self._library.version

    @property
    def version_text(self) -> str:
        return version_text(self._library.version)

    @property
    def library(self) -> Library:
        """For the other modules of this package."""
        return self._library

    def devices(self) -> list[DeviceInfo]:
        """The visible GPUs. Makes no context."""
        return visible_devices(self._library)

    def device(self, text: str) -> DeviceInfo:
        """The visible GPU with this name, or UUID as text. LookupError names the visible ones."""
        return find_device(self.devices(), text)

    def retain_primary(self, ordinal: int) -> Context:
        """A reference to the GPU's primary context, made if this process has none; the caller releases it."""
        return Context(self._library, ordinal)

    def current_context(self) -> int:
        """Handle of the context that is current in this thread; 0 if none is."""
        handle = c_void_p()
        self._library.call("cuCtxGetCurrent", byref(handle))
        return handle.value or 0

    def describe(self) -> str:
        """One line for the log."""
        return f"CUDA driver {self.version_text} ({self._library.file})"


_loaded: dict[str, Driver] = {}
_loading = threading.Lock()


def load(path: str | None = None) -> Driver:
    """The driver in the library at `path`, by default what KVTIER_CUDA_LIBRARY names, else libcuda.so.1.

    Loads and initialises it the first time (cuInit, up to seconds; no context is made); later calls with the
    same path return the same Driver. Raises CudaUnavailableError; a later call tries again.
    """
    chosen = library_path(path)
    with _loading:
        driver = _loaded.get(chosen)
        if driver is None:
            driver = _loaded[chosen] = Driver(Library(chosen))
        return driver
