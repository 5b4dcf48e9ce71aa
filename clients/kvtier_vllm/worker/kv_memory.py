"""Puts an engine's KV cache on a CPU into memory that another process can map, without copying it.

vLLM allocates all KV caches of a worker with one `torch.zeros(n, dtype=int8)` inside the context that a
connector returns from `get_mem_pool_context()`. `SharedKVMemory.allocation_context()` is such a context: it
answers exactly this call with a tensor over a sealed memfd, and leaves every other call alone.

It imports torch only on first use, because the API server imports the connector's module too.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import mmap
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from kvtier.memory import populate

if TYPE_CHECKING:
    import torch


class NotShareable(Exception):
    """The KV cache cannot be shared with the daemon. The message says why, in one sentence."""


class KVMemory(Protocol):
    """The memory of a worker's KV cache, on whatever device. Planes are described by offsets in it."""

    @property
    def size_bytes(self) -> int:
        """The size; offsets are below it."""

    def check(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Raises NotShareable unless every tensor lies in it."""

    def offset_of(self, name: str, tensor: torch.Tensor) -> int:
        """Returns the offset of the tensor's first element. Raises NotShareable, with `name`, if it is
        elsewhere."""


class SharedKVMemory:
    """One memfd of `size_bytes` zeros, allocated and mapped here, for one worker's KV cache.

    It is sealed against shrinking and growing, so SIGBUS cannot kill a process that maps it, and against
    further seals, so nobody can forbid writing later. The descriptor is close-on-exec and belongs to this
    object. The mapping lives as long as a tensor over it does.
    """

    def __init__(self, size_bytes: int) -> None:
        """Allocates the memory. `size_bytes` must be more than 0, and is rounded up to whole pages. Raises
        NotShareable if that fails."""
        if size_bytes <= 0:
            raise NotShareable(f"the KV cache has {size_bytes} bytes")
        self._kv_bytes = size_bytes
        page = mmap.PAGESIZE
        self.size_bytes = -(-size_bytes // page) * page
        """The size of the mapping: whole pages, at least the KV cache."""
        try:
            self._fd = os.memfd_create("kvtier-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise NotShareable(f"memfd_create failed: {error.strerror}") from error
        try:
            os.ftruncate(self._fd, self.size_bytes)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, seals)
            self._mapping = mmap.mmap(self._fd, self.size_bytes, mmap.MAP_SHARED)
        except OSError as error:
            os.close(self._fd)
            what = f"sharing {self.size_bytes} bytes of memory failed: {error.strerror}"
            raise NotShareable(what) from error
        with contextlib.suppress(OSError):
            # This may have no effect: many kernels give shared memory no transparent huge pages.
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
        try:
            # The daemon takes no memory for others, so all of it is allocated before it is shared.
            populate(self._mapping, 0, self.size_bytes)
        except OSError as error:
            self._mapping.close()
            os.close(self._fd)
            raise NotShareable(f"the KV cache cannot be allocated: {error.strerror}") from error
        self._address: int | None = None

    @property
    def is_sparse(self) -> bool:
        """False."""
        return False

    def fileno(self) -> int:
        """Returns the memfd, to be passed to the daemon. It stays open until `close`."""
        return self._fd

    @contextlib.contextmanager
    def allocation_context(self) -> Iterator[None]:
        """Answers the first `torch.zeros(kv_bytes, dtype=int8)` inside the `with` from this memory.

        The call is recognised by its exact size, which only the KV allocation has. A runner that allocates in
        some other way keeps its own memory, which `check` then reports. May be entered once.
        """
        import torch
        from torch.overrides import TorchFunctionMode

        memory = self

        class _Answer(TorchFunctionMode):
            def __torch_function__(
                self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
            ) -> Any:
                options = kwargs or {}
                if func is torch.zeros and memory._address is None and memory._is_kv_request(args, options):
                    tensor = torch.frombuffer(memory._mapping, dtype=torch.int8, count=memory._kv_bytes)
                    memory._address = tensor.data_ptr()
                    return tensor
                return func(*args, **options)

        with _Answer():
            yield

    def _is_kv_request(self, args: tuple[Any, ...], options: Mapping[str, Any]) -> bool:
        import torch

        size = args[0] if len(args) == 1 else args
        if not isinstance(size, int):
            try:
                size = math.prod(size)
            except TypeError:
                return False
        device = options.get("device")
        return (
            size == self._kv_bytes
            and options.get("dtype") is torch.int8
            and torch.device(device if device is not None else "cpu").type == "cpu"
            and not options.keys() - {"dtype", "device"}
        )

    def check(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Raises NotShareable unless the storage of every tensor lies wholly inside the mapping."""
        if not kv_caches:
            raise NotShareable("the engine has no KV cache")
        for name, tensor in kv_caches.items():
            self.offset_of(name, tensor)

    def offset_of(self, name: str, tensor: torch.Tensor) -> int:
        """Returns the bytes from the start of the mapping to the tensor's first element. Raises NotShareable
        if the tensor's storage is not in the mapping; `name` is for the message."""
        if tensor.device.type != "cpu":
            raise NotShareable(f"{name} is on {tensor.device}, and the engine computes on a CPU")
        if self._address is None:
            raise NotShareable("the engine did not allocate its KV cache through the connector's memory")
        storage = tensor.untyped_storage()
        start = storage.data_ptr() - self._address
        if start < 0 or start + storage.nbytes() > self.size_bytes:
            raise NotShareable(f"{name} lies outside the connector's memory")
        return int(tensor.data_ptr()) - self._address

    def close(self) -> None:
        """Closes the descriptor. The mapping goes when the last tensor over it does. Safe to call again."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
