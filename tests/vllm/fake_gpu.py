"""The GPU of an engine, played by the fake driver: memory at real addresses, and one stream that lags behind.

`FakeEngineGpu` is what `kvtier_vllm.worker.gpu.CudaGpu` is on a real one. Torch sees its memory as a
CPU tensor.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from kvtier_kernels.cuda import Context, Driver, load

from tests.support.fake_cuda import FakeCuda
from tests.vllm.mini_engine import LAYERS, Digests, MiniEngine

STAGING_BYTES = 1 << 20
GATE_BYTES = 4096


class FakeEngineGpu:
    """The first GPU that the driver shows, its context current in the thread that made this."""

    def __init__(self) -> None:
        self.driver: Driver = load()
        self.context: Context = self.driver.retain_primary(0)
        self.context.make_current()
        self._stream = self.driver.stream_create()
        self._events: list[int] = []

    def stream(self) -> int:
        """See kvtier_vllm.worker.gpu.EngineGpu."""
        return self._stream

    def mark(self) -> Callable[[], None]:
        """See kvtier_vllm.worker.gpu.EngineGpu."""
        event = self.driver.event_create()
        self._events.append(event)
        self.driver.event_record(event, self._stream)

        def wait() -> None:  # like torch's event it makes no context current
            self.driver.event_synchronize(event)

        return wait

    def synchronize(self) -> None:
        """Waits for everything that was enqueued."""
        self.driver.stream_synchronize(self._stream)


def alloc(gpu: FakeEngineGpu, size_bytes: int) -> int:
    """As cudaMalloc: one allocation, its address."""
    return gpu.driver.alloc(size_bytes)


def alloc_chunks(gpu: FakeEngineGpu, size_bytes: int, *, exportable: bool, chunks: int) -> int:
    """As vLLM's allocator for sleep mode, or torch's expandable segments: addresses with chunks behind."""
    granularity = gpu.driver.chunk_granularity(0)
    chunk_bytes = -(-size_bytes // chunks // granularity) * granularity
    address = gpu.driver.reserve(chunk_bytes * chunks)
    for index in range(chunks):
        handle = gpu.driver.chunk_create(chunk_bytes, 0, exportable=exportable)
        gpu.driver.map_chunk(address + index * chunk_bytes, chunk_bytes, handle)
        gpu.driver.chunk_release(handle)
    gpu.driver.allow_access(address, chunk_bytes * chunks, 0)
    return address


class Gate:
    """Where a stream of this process waits until the test opens it, as if a forward pass ran so long."""

    def __init__(self, fake: FakeCuda, gpu: FakeEngineGpu) -> None:
        """Open."""
        self._address = alloc(gpu, GATE_BYTES)
        self._word = fake.view(self._address, 8).view(np.uint64)
        self._word[0] = 0
        self._wait = fake.raw.cuStreamWaitValue64_v2
        self._wait.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint32]
        self._passed = 0

    def shut(self) -> None:
        """For streams that come from now on."""
        self._passed += 1

    def open(self) -> None:
        self._word[0] = self._passed

    def wait(self, stream: int) -> None:
        """The stream comes to the gate."""
        code = self._wait(stream, self._address, self._passed, 0)
        assert code == 0, f"cuStreamWaitValue64: {code}"


def tensor_at(address: int, size_bytes: int) -> Any:
    """Device memory as torch sees a KV cache before it is cut into layers."""
    import torch

    memory = (ctypes.c_int8 * size_bytes).from_address(address)
    return torch.frombuffer(memory, dtype=torch.int8)


@contextlib.contextmanager
def kv_cache_on(
    gpu: FakeEngineGpu, allocate: Callable[[FakeEngineGpu, int], int] = alloc
) -> Iterator[list[tuple[int, int]]]:
    """Answers every allocation of a KV cache inside the `with` from GPU memory; yields their addresses and
    bytes."""
    import torch
    from torch.overrides import TorchFunctionMode

    made: list[tuple[int, int]] = []

    class _Answer(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            options = kwargs or {}
            if func is not torch.zeros or options.get("dtype") is not torch.int8:
                return func(*args, **options)
            size = args[0] if isinstance(args[0], int) else math.prod(args[0])
            address = allocate(gpu, size)
            made.append((address, size))
            tensor = tensor_at(address, size)
            return tensor.zero_()

    with _Answer():
        yield made


class LaggingEngine(MiniEngine):
    """A mini engine whose steps are enqueued on a stream, as on a GPU: what a step computes is there some
    time after `wait_for_save`, and a load's target blocks are zeroed some time after the step began."""

    def __init__(self, config: Any, blocks: int, gpu: FakeEngineGpu, lag: Callable[[int], None]) -> None:
        """`lag(stream)` makes a stream rest for a while."""
        super().__init__(config, blocks)
        self._gpu = gpu
        self._lag = lag
        # Page aligned: registered memory is.
        self._staging_memory = np.zeros(STAGING_BYTES + 4096, np.uint8)
        start = -self._staging_memory.ctypes.data % 4096
        self._staging = self._staging_memory[start : start + STAGING_BYTES]
        self._used = 0
        gpu.driver.host_register(self._staging.ctypes.data, STAGING_BYTES)

    def forget(self) -> None:
        """See MiniEngine."""
        self._gpu.synchronize()
        super().forget()

    def close(self) -> None:
        """See MiniEngine."""
        self._gpu.synchronize()
        super().close()
        self._gpu.driver.host_unregister(self._staging.ctypes.data)

    def _prepare_blocks(self, meta: Any) -> None:
        self._gpu.synchronize()
        self._used = 0
        loads = [] if meta is None or meta.orders is None else meta.orders.loads
        if loads:
            self._lag(self._gpu.stream())
        for order in loads:
            for block in order.block_ids[0]:
                for layer in range(LAYERS):
                    self._enqueue(layer, block, np.zeros_like(self.pages[layer][block]))

    def _check(self, name: str, table: Any, digests: Digests) -> None:
        self._gpu.synchronize()
        super()._check(name, table, digests)

    def _write(self, table: Any, digests: Digests, first: int) -> None:
        blocks, offsets = self._at(table, first, len(digests))
        self._lag(self._gpu.stream())
        for layer, pages in enumerate(self.pages):
            for block in np.unique(blocks):
                page = pages[block].copy()
                mine = blocks == block
                page[:, offsets[mine], :] = (digests[first:][mine] + np.uint64(layer))[None, :, None]
                self._enqueue(layer, int(block), page)

    def _enqueue(self, layer: int, block: int, page: Any) -> None:
        staged = self._staging[self._used : self._used + page.nbytes]
        self._used += page.nbytes
        assert len(staged) == page.nbytes, f"a step writes more than {STAGING_BYTES // page.nbytes} pages"
        staged[:] = page.reshape(-1).view(np.uint8)
        target = self.pages[layer][block].ctypes.data
        self._gpu.driver.copy_async(target, staged.ctypes.data, page.nbytes, self._gpu.stream())
