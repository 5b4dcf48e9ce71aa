"""One GPU that is ready for two lanes."""

import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kvtier_kernels import PoolRecords, cuda

from kvtierd.core.errors import Reason, Refusal
from kvtierd.memory import numa
from kvtierd.wire import worker_pb2 as wire
from kvtierd.workers.channel.status import StatusPage, StatusWord
from kvtierd.workers.copy.device import Area, DeviceUnusableError
from kvtierd.workers.copy.gpu.copying import Batches, Cheapest, Descriptors, GpuCopier, Rows
from kvtierd.workers.copy.gpu.fatal import context_guard
from kvtierd.workers.copy.gpu.imports import OUT_OF_MEMORY, GpuChunk, Imports
from kvtierd.workers.copy.gpu.pacing import ChunkPace
from kvtierd.workers.copy.gpu.registration import PoolRegistration
from kvtierd.workers.copy.gpu.sealing import Sealer
from kvtierd.workers.copy.memory import Chunk, MappedMemory
from kvtierd.workers.lane_chunks import LaneChunks
from kvtierd.workers.log import logger

_log = logger(__name__)

REGISTER_RETRY_S = 0.05

OVERLAP_VERSION = 13_010
"""From CUDA 13.1 on the overlap flag has batches copied by copy engines, where they might take
multiprocessors from the engine's kernels (rapidsai/cudf#23674); drivers before ignore it."""

REGISTER_REST_S = 0.25
"""Between two areas of 256 MiB while an engine computes. An area takes about 25 ms, and registering may stop
an engine's kernels for a moment (RTAS 2024)."""

REGISTER_FAILURES_MAX = 3
"""After so many failures in the background, the pool is registered only as it is used."""

NOT_VISIBLE = (100, 101)
"""CUDA_ERROR_NO_DEVICE and CUDA_ERROR_INVALID_DEVICE: with which cuInit fails if CUDA_VISIBLE_DEVICES names
a GPU that is not there."""

SHOW_IT = (
    "let the daemon see the engine's GPU (CUDA_VISIBLE_DEVICES; in a container NVIDIA_VISIBLE_DEVICES, or "
    "its request for GPUs) and start it again; nvidia-smi -L lists those that are there"
)

EXCLUSIVE = (
    "the GPU lets no second process in: its compute mode is EXCLUSIVE_PROCESS or PROHIBITED. Set it to "
    "DEFAULT (nvidia-smi -c DEFAULT); or, if an MPS server is to serve the daemon too, start the daemon with "
    "the server's CUDA_MPS_PIPE_DIRECTORY"
)

LOCK_DEADLINE_S_MAX = 5.0
"""How long to wait for another GPU's worker to finish registering an area, which takes about 25 ms."""


@dataclass(frozen=True, slots=True)
class GpuOptions:
    copy_method: str
    """auto, batch, loop or rows."""
    seal_threads: int
    copy_deadline_s: float
    chunks: LaneChunks


class GpuDevice:
    """Context, streams, imports, registration and sealing of one GPU.

    None of these is ever released. The end of the process does that, even when it comes suddenly.
    """

    def __init__(
        self,
        name: str,
        pool: mmap.mmap,
        pool_fd: int,
        records: PoolRecords,
        status: StatusPage,
        options: GpuOptions,
        fault: Callable[[], None] | None,
    ) -> None:
        """Makes the primary context, and makes it current in this thread. `pool_fd` has to stay open as long
        as this object lives. Raises DeviceUnusableError, whose refusal says what to change."""
        self._register_failures = 0
        self._status = status
        # With this the driver loads kernels only when they are needed, which is never, and saves GPU memory.
        os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")
        with _unusable(name):
            driver = cuda.load()
            self._gpu = _find(driver, name)
            self._context = driver.retain_primary(self._gpu.ordinal)
            self._context.make_current()
            self._node = numa.node_of_gpu(self._gpu.pci_bus_id)
            lock_deadline_s = min(LOCK_DEADLINE_S_MAX, options.copy_deadline_s / 2)
            self._registration = PoolRegistration(driver, pool, pool_fd, records, status, lock_deadline_s)
            self._header = (0, self._registration.areas[0][0])
            self._imports = Imports(driver, self._gpu, self._beat)
            self._sealer = Sealer(pool, records, options.seal_threads, self._stay_near)
            least, greatest = driver.stream_priority_range()
            self._pace = ChunkPace(options.chunks)
            streams = [driver.stream_create(greatest), driver.stream_create(least)]
            self.load, self.store = (
                GpuCopier(
                    driver,
                    stream,
                    descriptors_of(
                        driver,
                        options.copy_method,
                        self._registration,
                        stream,
                        to_device=sealer is None,
                    ),
                    records,
                    self._registration,
                    sealer,
                    fault,
                    self._pace,
                    options.chunks.flights,
                )
                for stream, sealer in zip(streams, (None, self._sealer), strict=True)
            )
        _log.info(
            "GPU ready",
            device=name,
            product=self._gpu.product,
            driver=driver.version_text,
            copies=self.load.how,
            numa_node=self._node,
            pacing=options.chunks.pacing.value,
        )

    def enter_thread(self) -> None:
        with context_guard():
            self._context.make_current()
        self._stay_near()

    def engine_stepped(self) -> None:
        self._pace.stepped()

    def start(self, on_room: Callable[[], None]) -> None:
        self._sealer.start(on_room)

    def stop(self) -> None:
        self._sealer.stop()

    def join(self, timeout_s: float) -> bool:
        return self._sealer.join(timeout_s)

    def map_memory(
        self, message: wire.MapMemory, fds: Sequence[int], chunks: Sequence[Chunk]
    ) -> tuple[MappedMemory, int]:
        if fds:
            raise Refusal(
                Reason.DEVICE_MEMORY_INVALID,
                f"host memory for a session whose words name {self._gpu.name}: send ranges of that GPU's "
                'memory, or name the device "cpu"',
                field="ranges",
                value=0,
            )
        return self._imports.map(message, [chunk for chunk in chunks if isinstance(chunk, GpuChunk)])

    def import_chunk(self, fd: int, size_bytes: int) -> Chunk:
        return self._imports.chunk(fd, size_bytes)

    def pool_areas(self, start: int, end: int) -> Iterable[Area]:
        if start == 0:  # the pool's header is mapped as well, although no copy touches it
            yield self._header
        for area in self._registration.nearest_first(self._node, start, end):
            if self._register_failures >= REGISTER_FAILURES_MAX:
                return
            yield area

    def pool_area_mapped(self, area: Area) -> None:
        if area == self._header:
            return
        try:
            # Tries are rare, so that lanes, which try all the time, come first, here and on other GPUs.
            while not self._registration.register(area):
                time.sleep(REGISTER_RETRY_S)
            if self._pace.paced:
                time.sleep(REGISTER_REST_S)
        except (cuda.CudaError, OSError) as error:
            self._register_failures += 1
            _log.warning("a part of the pool is registered when it is used", why=str(error))

    def _beat(self) -> None:
        """Called between two steps of something long: if the main thread does it, that counts as coming
        round."""
        if threading.current_thread() is threading.main_thread():
            self._status.enter(StatusWord.HEARTBEAT)

    def _stay_near(self) -> None:
        numa.stay_near(self._node)


def _find(driver: cuda.Driver, name: str) -> cuda.DeviceInfo:
    try:
        gpu = driver.device(name)
    except LookupError as error:
        raise _refusal(Reason.DEVICE_UNKNOWN, f"{error}: {SHOW_IT}", name) from None
    if gpu.is_mig:
        raise _refusal(
            Reason.DEVICE_UNAVAILABLE,
            "it is a MIG instance, whose memory CUDA does not share between processes: use a whole GPU, "
            "or let the engine copy into host memory",
            name,
        )
    return gpu


def descriptors_of(
    driver: cuda.Driver, method: str, pool: PoolRegistration, stream: int, *, to_device: bool
) -> Descriptors:
    """Returns how copies in one direction get to the driver. `method` is that of `GpuOptions`. Raises
    CudaUnavailableError if the driver cannot do what was asked for."""
    if method == "rows":
        return Rows(cuda.Copies(driver, cuda.CopyMethod.LOOP), pool, stream, to_device)
    copies = cuda.Copies(
        driver,
        cuda.CopyMethod.LOOP if method == "loop" else None,
        prefer_overlap=driver.version >= OVERLAP_VERSION,
    )
    if method == "batch" and copies.method is cuda.CopyMethod.LOOP:
        raise cuda.CudaUnavailableError(
            f"the driver supports CUDA {driver.version_text}, which has no batched copies: set "
            "workers.gpu_copy_method to auto"
        )
    kind = Cheapest if method == "auto" else Batches
    return kind(copies, pool, stream, to_device)


@contextmanager
def _unusable(name: str) -> Iterator[None]:
    """Turns errors of the driver into reasons not to serve this device."""
    try:
        yield
    except cuda.CudaUnavailableError as error:
        if error.code in NOT_VISIBLE:
            message = f"there is no {name} here, or it is a MIG instance, which shares no memory: {SHOW_IT}"
            raise _refusal(Reason.DEVICE_UNKNOWN, f"{message} ({error})", name) from None
        raise _refusal(Reason.DEVICE_UNAVAILABLE, str(error), name) from None
    except cuda.CudaError as error:
        if error.code == OUT_OF_MEMORY:
            raise _refusal(
                Reason.DEVICE_OUT_OF_MEMORY,
                "the GPU has no room for the daemon's context (about 500 MiB): lower the engine's "
                f"gpu_memory_utilization ({error})",
                name,
            ) from None
        if error.code == cuda.DEVICE_UNAVAILABLE:
            raise _refusal(Reason.DEVICE_UNAVAILABLE, f"{EXCLUSIVE} ({error})", name) from None
        raise _refusal(Reason.DEVICE_UNAVAILABLE, f"the GPU cannot be used: {error}", name) from None


def _refusal(reason: Reason, message: str, name: str) -> DeviceUnusableError:
    return DeviceUnusableError(Refusal(reason, message, field="device", value=name))
