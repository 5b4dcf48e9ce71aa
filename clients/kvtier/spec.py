"""Who attaches, in which role, and with which memory: what a session says of itself, checked when made."""

import copy
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Required, Self, TypedDict

from kvtier import layout
from kvtier.errors import KvtierError, Reason
from kvtier.memory import CPU, Memory, device_of, fd_of, is_sparse, on_device, range_bytes_of
from kvtier.status import ClientStatus
from kvtier.v1 import cache_pb2, side_pb2, types_pb2
from kvtier.words import DOORBELLS_DEFAULT, PARTS_DEFAULT

PROTOCOL_VERSION = 1
FEATURES = ("index-page", "joint-lookup", "retention", "batches", "unanswered")
"""The features that this client requires of a daemon, as named in Hello and Welcome."""
WORLD_SIZE_MAX = 1_024
RANGES_MAX = 4_096
SECRET_BYTES_MAX = 1_024
PREFILL_TOKENS_PER_S_MIN, PREFILL_TOKENS_PER_S_MAX = 1e-3, 1e9


class Role(Enum):
    """What one client is for. The numbers are those of kvtier.v1.Role."""

    SCHEDULER = 1
    """Looks up, and submits stores and loads, for the whole instance."""
    RANK = 2
    """Owns one rank's share of the engine's KV cache."""
    BOTH = 3
    """Both, for an instance of a single process, whose world size is 1."""

    @property
    def submits(self) -> bool:
        """Whether this client looks up, stores and loads."""
        return self is not Role.RANK

    @property
    def holds_rank(self) -> bool:
        """Whether this client has memory and shared words."""
        return self is not Role.SCHEDULER


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachSpec:
    """One client's place in its instance. Raises KvtierError, naming the field, if it makes no sense."""

    instance: str
    """The name of the engine instance: the same for all its processes, unique among those of its user."""
    namespace: layout.Namespace
    role: Role = Role.BOTH
    rank: int = 0
    world_size: int = 1
    groups: tuple[layout.Group, ...] = ()
    """What the rank holds; empty for a scheduler."""
    memory: Memory | None = None
    """The rank's KV cache; None for a scheduler, and for a rank that has taken it back (`with_memory`)."""
    doorbells: int = DOORBELLS_DEFAULT
    parts: int = PARTS_DEFAULT
    """Part words, which bound the transfers in flight. The same number in every client of an instance."""
    program: str = ""
    """The program and its version, for people."""
    prefill_tokens_per_s: float = 0.0
    """Tokens of a prompt that the engine computes in a second; 0: not known."""
    configuration: layout.Settings = ()
    """The engine's settings that are neither in the namespace nor the default, for people."""
    secret: bytes = field(default=b"", repr=False)
    """What only the processes of the instance know."""

    def __post_init__(self) -> None:
        layout.check_text("instance", self.instance, Reason.MALFORMED, required=True)
        layout.check_text("program", self.program, Reason.MALFORMED)
        check_prefill_rate(self.prefill_tokens_per_s)
        layout.check_settings("configuration", self.configuration, Reason.MALFORMED)
        if len(self.secret) > SECRET_BYTES_MAX:
            message = f"at most {SECRET_BYTES_MAX:,} bytes"
            raise KvtierError(Reason.MALFORMED, message, field="secret", value=f"{len(self.secret)} bytes")
        if not 1 <= self.world_size <= WORLD_SIZE_MAX:
            message = f"must be between 1 and {WORLD_SIZE_MAX}"
            raise KvtierError(Reason.MALFORMED, message, field="world_size", value=self.world_size)
        if self.role is Role.BOTH and self.world_size != 1:
            message = "a client that is scheduler and rank at once is for a world size of 1: use two clients"
            raise KvtierError(Reason.ROLE, message, field="world_size", value=self.world_size)
        if not 0 <= self.rank < self.world_size:
            message = f"ranks of this instance are 0 to {self.world_size - 1}"
            raise KvtierError(Reason.MALFORMED, message, field="rank", value=self.rank)
        if not self.role.holds_rank:
            if self.groups or self.memory is not None:
                message = "a scheduler holds no memory: leave groups and memory out"
                raise KvtierError(Reason.LAYOUT_INVALID, message, field="groups", value=len(self.groups))
            return
        if self.memory is None:
            message = "a rank shares its KV cache: give a SharedBuffer, or a kvtier.cuda.DeviceMemory"
            raise KvtierError(Reason.MAPPING_INVALID, message, field="memory", value=None)
        check_memory(self.memory, self.groups)

    def with_memory(self, memory: Memory | None) -> Self:
        """Returns the same rank with other memory, or with none for now. Raises KvtierError if the memory
        does not fit the groups."""
        if memory is not None:
            check_memory(memory, self.groups)
        other = copy.copy(self)
        object.__setattr__(other, "memory", memory)
        return other

    @property
    def device(self) -> str:
        """The device that the memory is on: "cpu", or `GPU-` and a UUID."""
        return CPU if self.memory is None else device_of(self.memory)

    def block_ids_max(self, group: int) -> int:
        """Block ids are below it, as far as this client knows. Raises KvtierError UNKNOWN_GROUP."""
        if not self.role.holds_rank:
            if not 0 <= group < 2**32:
                raise KvtierError(Reason.UNKNOWN_GROUP, "must be at least 0", field="group", value=group)
            return 2**32
        if not 0 <= group < len(self.groups):
            message = f"this client has the groups 0 to {len(self.groups) - 1}"
            raise KvtierError(Reason.UNKNOWN_GROUP, message, field="group", value=group)
        return self.groups[group].num_blocks

    def hello(self, token: bytes, prefill_tokens_per_s: float) -> cache_pb2.Hello:
        """Returns the first message of the session stream. The rate is the one that is known by now."""
        return cache_pb2.Hello(
            protocol_versions=[PROTOCOL_VERSION],
            features=FEATURES,
            token=token,
            instance=self.instance,
            role=types_pb2.Role.ValueType(self.role.value),
            rank=self.rank,
            world_size=self.world_size,
            namespace=self.namespace.to_proto(),
            groups=[group.to_proto(index) for index, group in enumerate(self.groups)],
            client=self.program,
            prefill_tokens_per_s=prefill_tokens_per_s,
            configuration=layout.settings_to_proto(self.configuration),
            secret=self.secret,
        )

    def register_memory(self, ranges: Sequence[side_pb2.DeviceRange] = ()) -> side_pb2.RegisterMemory:
        """Returns the request that says where the rank's blocks lie. `ranges`: the memory, if it is on
        a GPU."""
        assert self.memory is not None
        return side_pb2.RegisterMemory(
            mapping_bytes=self.memory.size_bytes,
            groups=[group.place_to_proto(index) for index, group in enumerate(self.groups)],
            ranges=ranges,
            sparse=is_sparse(self.memory),
        )


class ClientOptions(TypedDict, total=False):
    """The keyword arguments of `kvtier.Client` and `kvtier.aio.Client`, to be passed as `Client(**options)`.
    `help(kvtier.Client)` says what each means, and its default."""

    instance: Required[str]
    namespace: Required[layout.Namespace]
    role: Role
    rank: int
    world_size: int
    groups: Sequence[layout.Group]
    memory: Memory | None
    socket: str | os.PathLike[str] | None
    doorbells: int
    parts: int
    program: str
    prefill_tokens_per_s: float
    configuration: layout.Settings
    secret: bytes
    on_ready: Callable[[ClientStatus], None] | None


def check_prefill_rate(tokens_per_s: float) -> None:
    """Raises KvtierError MALFORMED unless the rate is 0 or from 0.001 to 1e9."""
    # The condition is written so that NaN is refused too.
    if not (tokens_per_s == 0 or PREFILL_TOKENS_PER_S_MIN <= tokens_per_s <= PREFILL_TOKENS_PER_S_MAX):
        least, most = PREFILL_TOKENS_PER_S_MIN, PREFILL_TOKENS_PER_S_MAX
        message = f"0 if it is not known, else between {least:g} and {most:g}"
        raise KvtierError(Reason.MALFORMED, message, field="prefill_tokens_per_s", value=tokens_per_s)


def check_memory(memory: Memory, groups: Sequence[layout.Group]) -> None:
    """Raises KvtierError unless the memory is there and every block lies inside it."""
    ranges = range_bytes_of(memory)
    if not 1 <= len(ranges) <= RANGES_MAX:
        message = f"memory has between 1 and {RANGES_MAX} ranges: join fewer, larger ones"
        raise KvtierError(Reason.MAPPING_INVALID, message, field="memory.range_bytes", value=len(ranges))
    if not on_device(memory):
        size_bytes = os.fstat(fd_of(memory)).st_size
        if memory.size_bytes > size_bytes:
            message = f"the descriptor has {size_bytes} bytes"
            raise KvtierError(
                Reason.MAPPING_INVALID, message, field="memory.size_bytes", value=memory.size_bytes
            )
    layout.check_layout(groups, memory.size_bytes, ranges)
