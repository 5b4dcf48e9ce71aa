"""The real connector in an engine that takes the fake driver's GPU for its own.

vLLM's CPU build computes; its KV cache lies in the GPU's memory, which is at real addresses. Everything else
is what an engine on a GPU does: export, import by the GPU's copy worker, doorbells rung by a stream.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from kvtier_vllm.connector import KvtierConnector
from kvtier_vllm.worker.gpu import EngineGpu

from tests.vllm.fake_gpu import FakeEngineGpu, alloc, alloc_chunks, kv_cache_on

_gpu: FakeEngineGpu | None = None


def this_process_gpu() -> FakeEngineGpu:
    """One for each process: a context is its."""
    global _gpu
    if _gpu is None:
        _gpu = FakeEngineGpu()
    return _gpu


class FakeGpuConnector(KvtierConnector):
    """See the module."""

    def _engine_gpu(self) -> EngineGpu | None:
        return this_process_gpu()

    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        """vLLM's own allocation, answered by the GPU; the connector leaves it alone."""
        assert super().get_mem_pool_context() is None
        return kv_cache_on(this_process_gpu(), self._allocate)

    def _allocate(self, gpu: FakeEngineGpu, size_bytes: int) -> int:
        return alloc(gpu, size_bytes)


class ChunkedGpuConnector(FakeGpuConnector):
    """Its memory is made of chunks that other processes can import."""

    def _allocate(self, gpu: FakeEngineGpu, size_bytes: int) -> int:
        return alloc_chunks(gpu, size_bytes, exportable=True, chunks=3)


class PrivateGpuConnector(FakeGpuConnector):
    """Its memory is made of chunks that no other process can import, as vLLM's is in sleep mode."""

    def _allocate(self, gpu: FakeEngineGpu, size_bytes: int) -> int:
        return alloc_chunks(gpu, size_bytes, exportable=False, chunks=1)
