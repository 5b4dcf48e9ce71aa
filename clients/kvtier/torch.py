"""KV caches that are torch tensors: where their blocks lie, and how they are shared.

    import hashlib

    import torch
    from kvtier import Client, Namespace
    from kvtier.torch import SharedTensors

    # Keys and values of two layers, in blocks of 16 tokens, 8 heads of 64 values.
    shapes = {name: (128, 2, 16, 8, 64) for name in ("layer 0", "layer 1")}
    with SharedTensors.allocate(shapes, torch.bfloat16, block_tokens=16) as cache:
        namespace = Namespace(model="mine", kv_dtype="bfloat16", hash_scheme="sha256")
        with Client(
            instance="mine", namespace=namespace, groups=cache.groups, memory=cache.memory
        ) as client:
            if not client.wait_ready(timeout_s=30):
                raise SystemExit(client.status.why)
            for name in cache:
                cache[name][5] = 1
            block_hash = hashlib.sha256(b"the tokens of block 5, and all before").digest()
            stored = client.store([block_hash], [5]).wait(timeout_s=30)
            with client.lookup([block_hash], lease=True, timeout_s=30) as hit:
                loaded = client.load(hit, [7]).wait(timeout_s=30)
            print(stored.done, loaded.done, bool((cache["layer 1"][7] == 1).all()))  # True True True

On a CPU the tensors have to be made here, because other processes can map only memory that was made for it.
On a GPU `SharedTensors.of` takes the tensors that an engine has. Nothing is copied in either case: the daemon
reads and writes the tensors' own memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Self

import torch

from kvtier.errors import KvtierError, Reason
from kvtier.layout import Group, GroupKind, Plane
from kvtier.memory import SharedBuffer

if TYPE_CHECKING:
    from kvtier.cuda import DeviceMemory
    from kvtier.memory import Memory

ALIGN_BYTES = 4_096
"""Tensors that are allocated here begin at multiples of it."""


class SharedTensors:
    """Tensors by name, which together are one KV cache group."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        memory: SharedBuffer | DeviceMemory,
        block_tokens: int,
        *,
        block_dim: int = 0,
        kind: GroupKind = GroupKind.FULL_ATTENTION,
        window_tokens: int = 0,
    ) -> None:
        """Use `allocate` or `of`."""
        self._tensors = dict(tensors)
        self._memory = memory
        planes, num_blocks = _planes(self._tensors, memory, block_dim)
        self.groups: tuple[Group, ...] = (
            Group(
                block_tokens=block_tokens,
                num_blocks=num_blocks,
                planes=planes,
                kind=kind,
                window_tokens=window_tokens,
            ),
        )
        """What to give to a client as `groups`."""

    @classmethod
    def allocate(
        cls,
        shapes: Mapping[str, Sequence[int]],
        dtype: torch.dtype,
        *,
        block_tokens: int,
        device: str | torch.device = "cpu",
        block_dim: int = 0,
        kind: GroupKind = GroupKind.FULL_ATTENTION,
        window_tokens: int = 0,
    ) -> Self:
        """Makes tensors of zeros.

        shapes: for each name the tensor's shape.
        dtype: that of all tensors.
        block_tokens: tokens of one block.
        device: "cpu", or a GPU of this process, "cuda:0" for example.
        block_dim: which dimension numbers the blocks. Those before it may be anything: with shapes (2,
            blocks, tokens, heads, values) it is 1.
        kind, window_tokens: those of the Group.

        Raises KvtierError for tensors whose blocks cannot be copied, and OSError without memory.
        """
        target = torch.device(device)
        if target.type != "cpu":
            made = {
                name: torch.zeros(tuple(shape), dtype=dtype, device=target) for name, shape in shapes.items()
            }
            return cls.of(
                made, block_tokens=block_tokens, block_dim=block_dim, kind=kind, window_tokens=window_tokens
            )
        sizes = [math.prod(shape) * dtype.itemsize for shape in shapes.values()]
        starts = [0, *itertools.accumulate(-(-size // ALIGN_BYTES) * ALIGN_BYTES for size in sizes)]
        buffer = SharedBuffer.create(max(1, starts[-1]), "kvtier-tensors")
        whole = torch.from_numpy(buffer.array)
        tensors = {
            name: whole[start : start + size].view(dtype).view(tuple(shape))
            for (name, shape), size, start in zip(shapes.items(), sizes, starts, strict=False)
        }
        try:
            return cls(
                tensors, buffer, block_tokens, block_dim=block_dim, kind=kind, window_tokens=window_tokens
            )
        except KvtierError:
            del whole, tensors
            buffer.close()
            raise

    @classmethod
    def of(
        cls,
        tensors: Mapping[str, torch.Tensor],
        *,
        block_tokens: int,
        block_dim: int = 0,
        kind: GroupKind = GroupKind.FULL_ATTENTION,
        window_tokens: int = 0,
    ) -> Self:
        """Shares tensors that are on one GPU. They stay allocated as long as this object lives. The arguments
        are those of `allocate`. Raises KvtierError for tensors that are elsewhere, or whose blocks cannot be
        copied."""
        from kvtier.cuda import DeviceMemory

        storages: dict[int, torch.Tensor] = {}
        for name, tensor in tensors.items():
            if tensor.device.type != "cuda":
                message = "memory of the host is shared only if it was made by SharedTensors.allocate"
                raise KvtierError(
                    Reason.MAPPING_INVALID, message, field=f"tensors[{name!r}].device", value=tensor.device
                )
            storages.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        memory = DeviceMemory.join([DeviceMemory.of(tensor) for tensor in storages.values()])
        return cls(tensors, memory, block_tokens, block_dim=block_dim, kind=kind, window_tokens=window_tokens)

    @property
    def memory(self) -> Memory:
        """What to give to a client as `memory`."""
        return self._memory

    @property
    def num_blocks(self) -> int:
        """How many blocks there are; block ids are below it."""
        return self.groups[0].num_blocks

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def close(self) -> None:
        """Gives the memory back, once the clients are closed. That of the host stays while tensors are held
        elsewhere."""
        self._tensors.clear()
        if isinstance(self._memory, SharedBuffer):
            self._memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def plane_of(name: str, tensor: torch.Tensor, num_blocks: int, base_offset: int, content: str = "") -> Plane:
    """Returns the plane of one tensor whose first dimension numbers the blocks, or equal parts of blocks.

    name: what the tensor holds; it becomes part of the plane's description, and so do shape, order and dtype.
    num_blocks: how many blocks there are; the first dimension is a multiple of it.
    base_offset: where the tensor's first element lies in the memory, in bytes.
    content: what shape and dtype do not say.

    Raises KvtierError LAYOUT_INVALID for a tensor that does not keep a block contiguous.
    """
    shape, item = tuple(tensor.shape), tensor.element_size()
    strides = [stride * item for stride in tensor.stride()]
    if len(shape) < 2 or shape[0] == 0 or shape[0] % num_blocks:
        message = f"its first dimension is not a multiple of the {num_blocks} blocks"
        raise KvtierError(Reason.LAYOUT_INVALID, message, field=f"{name}.shape", value=shape)
    split = shape[0] // num_blocks
    inner = [*zip(shape[1:], strides[1:], strict=True)]
    if split > 1:
        inner.append((split, strides[0]))
    fragment_bytes = item
    for size, stride in sorted(inner, key=lambda dimension: dimension[1]):
        if size == 1:
            continue
        if stride != fragment_bytes:
            message = f"with shape {shape} a block is not contiguous"
            raise KvtierError(
                Reason.LAYOUT_INVALID, message, field=f"{name}.stride", value=tuple(tensor.stride())
            )
        fragment_bytes *= size
    block_stride_bytes = strides[0] * split
    if block_stride_bytes < fragment_bytes:
        message = f"blocks of {fragment_bytes} bytes overlap"
        raise KvtierError(Reason.LAYOUT_INVALID, message, field=f"{name}.stride", value=block_stride_bytes)
    geometry = ",".join(map(str, shape[1:]))
    order = ",".join(str(stride // item) for stride in strides[1:])
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Plane(
        base_offset=base_offset,
        block_stride_bytes=block_stride_bytes,
        fragment_bytes=fragment_bytes,
        description=f"{name} {dtype} [{split}x{geometry}] strides [{order}]{content}",
    )


def _planes(
    tensors: Mapping[str, torch.Tensor], memory: SharedBuffer | DeviceMemory, block_dim: int
) -> tuple[tuple[Plane, ...], int]:
    """The planes of all tensors, and how many blocks these have."""
    if not tensors:
        raise KvtierError(Reason.LAYOUT_INVALID, "give at least one", field="tensors", value=0)
    counts = {name: tensor.shape[block_dim] for name, tensor in tensors.items() if tensor.dim() > block_dim}
    if len(counts) < len(tensors) or len(set(counts.values())) != 1:
        message = "all tensors have the same number of blocks"
        raise KvtierError(Reason.LAYOUT_INVALID, message, field="block_dim", value=f"{block_dim}: {counts}")
    planes = []
    for name, tensor in tensors.items():
        for index in itertools.product(*map(range, tensor.shape[:block_dim])):
            part = tensor[index] if index else tensor
            label = name + "".join(f"[{number}]" for number in index)
            planes.append(plane_of(label, part, part.shape[0], _offset(memory, part)))
    return tuple(planes), next(iter(counts.values()))


def _offset(memory: SharedBuffer | DeviceMemory, tensor: torch.Tensor) -> int:
    if isinstance(memory, SharedBuffer):
        return int(tensor.data_ptr()) - int(memory.array.ctypes.data)
    return memory.offset_of(tensor)
