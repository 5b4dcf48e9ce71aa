"""The GPU that an engine computes on, and its KV cache there.

It imports torch only on first use, because the API server imports the connector's module too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from kvtier import KvtierError

from kvtier_vllm.config import ConnectorConfig
from kvtier_vllm.worker.kv_memory import NotShareable

if TYPE_CHECKING:
    import torch

# The first release that calls unregister_kv_caches and restore_kv_caches.
SLEEP_HOOKS_VLLM = (0, 33)
# The first release known to ignore a layout that its attention backend does not support, with a warning.
LAYOUT_WISH_VLLM = (0, 32)


class EngineGpu(Protocol):
    """The GPU that the engine enqueues its work on. Called from the thread that runs the model."""

    def stream(self) -> int:
        """Returns the driver's handle of the stream on which the engine computes now."""

    def mark(self) -> Callable[[], None]:
        """Marks this moment of the engine's stream. Returns a function that waits, in any thread, until
        everything that was enqueued before has run."""


class CudaGpu:
    """The current device of this process, through torch."""

    def stream(self) -> int:
        """Returns the driver's handle of the stream on which torch computes now."""
        import torch

        return int(torch.cuda.current_stream().cuda_stream)

    def mark(self) -> Callable[[], None]:
        """Records an event on that stream, and returns a function that waits for it."""
        import torch

        event = torch.cuda.Event(blocking=True)
        event.record()
        wait: Callable[[], None] = event.synchronize
        return wait


def engine_gpu() -> EngineGpu | None:
    """Returns the GPU that this process computes on, or None on a CPU. Else raises NotShareable."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return None
    if current_platform.is_cuda():
        return CudaGpu()
    raise NotShareable(
        f"KV caches on {current_platform.device_name!r} devices are not supported: CPUs and NVIDIA GPUs are"
    )


class GpuKVMemory:
    """A worker's KV cache where it lies on its GPU: the storages of its tensors, one after another.

    From vLLM 0.29 on there is one storage. This object keeps them alive, and the engine hands out their
    blocks by id, so torch does not free them during a copy, and needs to know nothing about streams. What
    must not be reused during a copy are blocks, and the connector holds those until each part's fence.
    """

    def __init__(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Raises NotShareable unless all of it is memory of one GPU."""
        from kvtier.cuda import DeviceMemory

        if not kv_caches:
            raise NotShareable("the engine has no KV cache")
        storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in kv_caches.values()}
        try:
            self.device_memory = DeviceMemory.join([DeviceMemory.of(tensor) for tensor in storages.values()])
        except KvtierError as error:
            raise NotShareable(f"the KV cache is not on one GPU: {error}") from error

    @property
    def size_bytes(self) -> int:
        """The size of all storages."""
        return self.device_memory.size_bytes

    def offset_of(self, name: str, tensor: torch.Tensor) -> int:
        """Returns the bytes from the start of the first storage, as if all followed one another, to the
        tensor's first element. Raises NotShareable for a tensor that lies elsewhere."""
        try:
            return self.device_memory.offset_of(tensor)
        except KvtierError as error:
            raise NotShareable(f"{name} lies outside the KV cache that was registered") from error

    def check(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Raises NotShareable if a tensor lies elsewhere."""
        for name, tensor in kv_caches.items():
            self.offset_of(name, tensor)


def refuse_sleep_mode(vllm_config: Any, vllm_version: tuple[int, int]) -> None:
    """Raises NotShareable for an engine on a GPU that may take its memory back without telling, so that a
    later copy would touch memory that is not the engine's."""
    if vllm_config.model_config.enable_sleep_mode and vllm_version < SLEEP_HOOKS_VLLM:
        raise NotShareable(
            f"sleep mode is on, and vLLM {vllm_version[0]}.{vllm_version[1]} does not tell connectors of it; "
            "turn --enable-sleep-mode off, or use vLLM 0.33"
        )


def required_layout(config: ConnectorConfig, vllm_version: tuple[int, int]) -> str | None:
    """Returns the layout to ask the engine for, a name of vLLM's KVCacheLayout, or None to leave it alone."""
    from vllm.platforms import current_platform

    if config.contiguous_blocks and vllm_version >= LAYOUT_WISH_VLLM and current_platform.is_cuda():
        return "BLHNC"  # of the layouts with blocks outermost, the one that most attention backends support
    return None
