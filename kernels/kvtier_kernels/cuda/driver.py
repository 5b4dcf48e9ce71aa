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
    """The driver's calls, made by `load`. Handles, addresses and descriptors are plain integers.

    Threads: every method may be called from any thread, and releases the GIL while it runs. Calls on memory,
    chunks, streams, events and copies need a context that is current in the calling thread (otherwise
    CudaError INVALID_CONTEXT); calls on devices, `retain_primary` and `current_context` do not.

    Lifetime: garbage collection releases nothing. Where a method says so, its caller has to release what it
    gets; the end of the process, or of the context, releases everything. A Driver lives as long as the
    process. CUDA does not survive a fork, so load it in the process that uses it.

    Errors: every method raises CudaError. A failure of earlier asynchronous work may show in any of them.
    """

    def __init__(self, library: Library) -> None:
        self.library = library
        """For the other modules of this package."""
        self.path = library.path
        """The library as it was asked for."""
        self.version = library.version
        """The CUDA version that the driver supports, as 13000 for 13.0."""

    @property
    def version_text(self) -> str:
        return version_text(self.library.version)

    def devices(self) -> list[DeviceInfo]:
        """The visible GPUs. Makes no context."""
        return visible_devices(self.library)

    def device(self, text: str) -> DeviceInfo:
        """The visible GPU with this name, or UUID as text. Raises LookupError, which names the visible
        ones."""
        return find_device(self.devices(), text)

    def retain_primary(self, ordinal: int) -> Context:
        """A reference to the GPU's primary context, which is made if this process has none. The caller
        releases it."""
        return Context(self.library, ordinal)

    def current_context(self) -> int:
        """Handle of the context that is current in this thread; 0 if none is."""
        handle = c_void_p()
        self.library.call("cuCtxGetCurrent", byref(handle))
        return handle.value or 0

    def describe(self) -> str:
        """One line for the log."""
        return f"CUDA driver {self.version_text} ({self.library.file})"


_loaded: dict[str, Driver] = {}
_loading = threading.Lock()


def load(path: str | None = None) -> Driver:
    """The driver in the library at `path`, by default the one that KVTIER_CUDA_LIBRARY names, or else
    libcuda.so.1.

    The first call loads and initialises it (cuInit, up to seconds; no context is made). Later calls with the
    same path return the same Driver. Raises CudaUnavailableError; a later call tries again.
    """
    chosen = library_path(path)
    with _loading:
        driver = _loaded.get(chosen)
        if driver is None:
            driver = _loaded[chosen] = Driver(Library(chosen))
        return driver
