"""What a client says about its engine: the namespace, and where the blocks of each group lie in memory.

Values are checked when they are made, so that a mistake is reported where it was made and not by the daemon.
"""

import bisect
import dataclasses
import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial

from kvtier.errors import KvtierError, Reason
from kvtier.v1 import side_pb2, types_pb2

HASH_BYTES_MIN, HASH_BYTES_MAX = 8, 32
TEXT_BYTES_MAX = 1_024
SETTINGS_MAX = 256
SETTING_NAME_BYTES_MAX = 128
SETTINGS_BYTES_MAX = 32 << 10
BLOCKS_MAX = 2**32 - 1
OFFSET_MAX = 2**63 - 1


def _refuse(reason: Reason, field: str, value: object, message: str) -> KvtierError:
    return KvtierError(reason, message, field=field, value=value)


def check_text(field: str, value: str, reason: Reason, *, required: bool = False) -> None:
    """Raises KvtierError if the text is too long, or empty where it must not be."""
    if required and not value:
        raise _refuse(reason, field, value, "must not be empty")
    if len(value.encode()) > TEXT_BYTES_MAX:
        raise _refuse(reason, field, value, f"must be at most {TEXT_BYTES_MAX} bytes of UTF-8")


Settings = tuple[tuple[str, str], ...]
"""Names and values, sorted by name, no name twice: at most 256, names of 1 to 128 bytes, values of at most
1,024, and 32 KiB of all together."""


def check_settings(field: str, settings: Settings, reason: Reason) -> None:
    """Raises KvtierError unless these are valid `Settings`."""
    if len(settings) > SETTINGS_MAX:
        raise _refuse(reason, field, len(settings), f"has at most {SETTINGS_MAX} settings")
    before = ""
    for name, value in settings:
        if not 1 <= len(name.encode()) <= SETTING_NAME_BYTES_MAX:
            raise _refuse(reason, field, name, f"names have 1 to {SETTING_NAME_BYTES_MAX} bytes of UTF-8")
        if name <= before:
            raise _refuse(reason, field, name, f"is sorted by name, no name twice; before it is {before!r}")
        check_text(f"{field}[{name}]", value, reason)
        before = name
    size = sum(len(text.encode()) for setting in settings for text in setting)
    if size > SETTINGS_BYTES_MAX:
        raise _refuse(reason, field, size, f"names and values have at most {SETTINGS_BYTES_MAX:,} bytes")


def settings_to_proto(settings: Settings) -> list[types_pb2.Setting]:
    """Returns the settings as messages."""
    return [types_pb2.Setting(name=name, value=value) for name, value in settings]


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """What makes two engines' KV blocks interchangeable. Every field is compared byte for byte, and an empty
    field means "not applicable", never "any".

    The fields are those of kvtier.v1.Namespace. Texts have at most 1,024 bytes of UTF-8. Raises KvtierError,
    naming the field, for a value that is not allowed.
    """

    model: str
    """Identity of the model, e.g. a hub name."""
    kv_dtype: str
    """dtype of the KV cache as it is stored, e.g. "bfloat16"."""
    hash_scheme: str
    """How block hashes are made, e.g. "sha256"."""
    hash_bytes: int = 32
    """Bytes of one block hash, 8 to 32."""
    weights_revision: str = ""
    """The commit on the hub, or a digest of the weights. It changes with every change of the weights."""
    kv_scales: str = ""
    """The identity of static KV quantisation scales."""
    parallelism: str = ""
    """How the engine's parallelism shapes the blocks that one rank holds."""
    tenant: str = ""
    """The tenant; blocks are never shared between tenants."""
    salt: str = ""
    """Free text, e.g. a deployment's secret."""
    generation: int = 0
    """A number of 64 bits that an engine raises after it has changed its weights in place, or reset its
    cache."""
    adapter: str = ""
    """The LoRA or other adapter, where the block hash does not cover it."""
    identity: Settings = ()
    """Everything else that decides a block's bytes, by name. If two processes of one engine differ here, the
    daemon names the first setting in which they do."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            name = f"namespace.{field.name}"
            if isinstance(value, str):
                required = field.name in ("model", "kv_dtype", "hash_scheme")
                check_text(name, value, Reason.NAMESPACE_INVALID, required=required)
        check_settings("namespace.identity", self.identity, Reason.NAMESPACE_INVALID)
        if not HASH_BYTES_MIN <= self.hash_bytes <= HASH_BYTES_MAX:
            raise _refuse(
                Reason.NAMESPACE_INVALID,
                "namespace.hash_bytes",
                self.hash_bytes,
                f"must be between {HASH_BYTES_MIN} and {HASH_BYTES_MAX}",
            )
        if not 0 <= self.generation < 2**64:
            raise _refuse(
                Reason.NAMESPACE_INVALID, "namespace.generation", self.generation, "must fit 64 bits"
            )

    def to_proto(self) -> types_pb2.Namespace:
        """Returns the namespace as it is sent in Hello."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if self.identity:
            # A daemon that does not know the field `identity` would let engines that differ in it share
            # blocks.
            text = "".join(f"{len(name)} {name} {len(value)} {value} " for name, value in self.identity)
            digest = hashlib.sha256(text.encode()).hexdigest()[:32]
            fields["weights_revision"] = f"{self.weights_revision} identity:{digest}".lstrip()
        return types_pb2.Namespace(**fields | {"identity": settings_to_proto(self.identity)})


class GroupKind(IntEnum):
    """How lookup and eviction treat the blocks of a group. The numbers are those of kvtier.v1.GroupKind."""

    FULL_ATTENTION = 1
    SLIDING_WINDOW = 2
    MAMBA = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Plane:
    """One strided array of an engine's cache: the fragment of block b begins at byte `base_offset + b *
    block_stride_bytes` and has `fragment_bytes` bytes."""

    fragment_bytes: int
    """Bytes this plane contributes to one block, contiguous."""
    base_offset: int
    """Bytes from the start of the mapping to block 0."""
    block_stride_bytes: int
    """Bytes from one block's fragment to the next block's, at least `fragment_bytes`."""
    description: str = ""
    """What the plane holds. Part of the layout fingerprint: equal descriptions mean interchangeable bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Layers that share one block table, as one rank holds them."""

    block_tokens: int
    """Tokens of one block, which has one hash."""
    num_blocks: int
    """The number of blocks in the engine's cache; block ids are below it."""
    planes: tuple[Plane, ...]
    """The planes, in the order in which their fragments lie in a slot."""
    kind: GroupKind = GroupKind.FULL_ATTENTION
    window_tokens: int = 0
    """Tokens of a sliding window; 0 for other kinds."""
    replicated: bool = False
    """Whether every rank of the instance holds the same bytes (MLA under tensor parallelism). A block is then
    stored once, by a rank that the daemon picks, and loaded by all. All ranks must say so, with the same
    planes."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of this rank over all planes."""
        return sum(plane.fragment_bytes for plane in self.planes)

    def to_proto(self, index: int) -> types_pb2.Group:
        """Returns the geometry as it is sent in Hello."""
        return types_pb2.Group(
            group=index,
            kind=types_pb2.GroupKind.ValueType(int(self.kind)),
            block_tokens=self.block_tokens,
            window_tokens=self.window_tokens,
            replicated=self.replicated,
            planes=[
                types_pb2.PlaneGeometry(fragment_bytes=plane.fragment_bytes, description=plane.description)
                for plane in self.planes
            ],
        )

    def place_to_proto(self, index: int) -> side_pb2.GroupMemory:
        """Returns the place in memory as it is sent in RegisterMemory."""
        return side_pb2.GroupMemory(
            group=index,
            num_blocks=self.num_blocks,
            planes=[
                side_pb2.Plane(base_offset=plane.base_offset, block_stride_bytes=plane.block_stride_bytes)
                for plane in self.planes
            ],
        )


def check_layout(groups: Sequence[Group], mapping_bytes: int, range_bytes: Sequence[int] = ()) -> None:
    """Raises KvtierError unless every byte of every block of every group lies inside the mapping.

    `range_bytes` gives the sizes of the ranges that the mapping consists of, one after another; each plane
    must lie in one of them as a whole.
    """
    if not groups:
        raise _refuse(Reason.LAYOUT_INVALID, "groups", 0, "a rank holds at least one group")
    if mapping_bytes <= 0:
        raise _refuse(Reason.MAPPING_INVALID, "memory.size_bytes", mapping_bytes, "must be more than 0")
    for index, group in enumerate(groups):
        _check_group(f"groups[{index}]", group, mapping_bytes)
    if len(range_bytes) > 1:
        _check_ranges(groups, list(itertools.accumulate(range_bytes)))


def _check_ranges(groups: Sequence[Group], ends: Sequence[int]) -> None:
    for number, group in enumerate(groups):
        for index, plane in enumerate(group.planes):
            end = plane.base_offset + (group.num_blocks - 1) * plane.block_stride_bytes + plane.fragment_bytes
            limit = ends[bisect.bisect_right(ends, plane.base_offset)]
            if end > limit:
                raise _refuse(
                    Reason.PLANE_BEYOND_MAPPING,
                    f"groups[{number}].planes[{index}].base_offset",
                    plane.base_offset,
                    f"its last block ends at byte {end}, the range of memory that it begins in at {limit}",
                )


def _check_group(name: str, group: Group, mapping_bytes: int) -> None:
    invalid = partial(_refuse, Reason.LAYOUT_INVALID)
    if group.block_tokens <= 0:
        raise invalid(f"{name}.block_tokens", group.block_tokens, "a block has at least one token")
    if (group.kind == GroupKind.SLIDING_WINDOW) != (group.window_tokens > 0):
        raise invalid(
            f"{name}.window_tokens",
            group.window_tokens,
            "must be more than 0 for a sliding window, and 0 for other kinds",
        )
    if not 0 < group.num_blocks <= BLOCKS_MAX:
        raise invalid(f"{name}.num_blocks", group.num_blocks, f"must be between 1 and {BLOCKS_MAX}")
    if not group.planes:
        raise invalid(f"{name}.planes", 0, "a group has at least one plane")
    for index, plane in enumerate(group.planes):
        _check_plane(f"{name}.planes[{index}]", plane, group.num_blocks, mapping_bytes)


def _check_plane(name: str, plane: Plane, num_blocks: int, mapping_bytes: int) -> None:
    check_text(f"{name}.description", plane.description, Reason.LAYOUT_INVALID)
    invalid = partial(_refuse, Reason.LAYOUT_INVALID)
    fragment, stride, base = plane.fragment_bytes, plane.block_stride_bytes, plane.base_offset
    if fragment <= 0:
        raise invalid(f"{name}.fragment_bytes", fragment, "must be more than 0")
    if base < 0:
        raise invalid(f"{name}.base_offset", base, "must not be negative")
    if stride < (fragment if num_blocks > 1 else 0):
        raise invalid(
            f"{name}.block_stride_bytes",
            stride,
            f"blocks would overlap: a block has {fragment} bytes in this plane",
        )
    end = base + (num_blocks - 1) * stride + fragment
    if end > OFFSET_MAX:
        raise _refuse(
            Reason.STRIDE_OVERFLOW,
            f"{name}.block_stride_bytes",
            stride,
            f"offset and stride of {num_blocks} blocks pass the largest offset there is",
        )
    if end > mapping_bytes:
        raise _refuse(
            Reason.PLANE_BEYOND_MAPPING,
            f"{name}.base_offset",
            base,
            f"its last block ends at byte {end}, the mapping at {mapping_bytes}",
        )
