"""Checks a Hello completely, and makes the core's stimulus of it. Pure functions."""

import hashlib
import itertools
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvtier.v1 import cache_pb2, types_pb2

from kvtierd.core.errors import Reason, Refusal
from kvtierd.core.ids import HASH_BYTES_MAX, Rank, SessionId
from kvtierd.core.stimuli import AttachSession, GroupGeometry, Owner, SessionRole
from kvtierd.rpc.batches import BATCHES, UNANSWERED
from kvtierd.rpc.contract import PROTOCOL_VERSIONS
from kvtierd.rpc.heartbeats import prefill_rate
from kvtierd.rpc.peers import PeerProcess

FEATURES = frozenset({"index-page", "joint-lookup", "retention", BATCHES, UNANSWERED})
HASH_BYTES_MIN = 8
WORLD_SIZE_MAX = 1_024
TEXT_BYTES_MAX = 1_024
SETTINGS_MAX = 256
SETTING_NAME_BYTES_MAX = 128
SETTINGS_BYTES_MAX = 32 << 10
"""Bytes of all names and values of one kind in a Hello, because what is kept of every engine needs a
bound."""
GROUPS_MAX = 64
PLANES_MAX = 4_096
"""Planes of all groups together."""
OFFERS_MAX = 256
"""Protocol versions in one Hello, and features in one Hello."""
SLOT_BYTES_MAX = 2**32 - 1
"""Bytes of all planes of one group together, which a slot record holds in 32 bits."""
SECRET_BYTES_MAX = 1_024

_ROLES = {
    types_pb2.ROLE_SCHEDULER: SessionRole.SCHEDULER,
    types_pb2.ROLE_RANK: SessionRole.RANK,
    types_pb2.ROLE_SCHEDULER_AND_RANK: SessionRole.SCHEDULER | SessionRole.RANK,
}
NAMESPACE_PREFIX = b"kvtier-namespace-1"

_REQUIRED = ("model", "kv_dtype", "hash_scheme")


@dataclass(frozen=True, slots=True)
class Greeting:
    """A Hello that has passed all checks."""

    attach: AttachSession
    protocol_version: int
    features: tuple[str, ...]
    client: str
    configuration: tuple[tuple[str, str], ...] = ()
    """Settings of the engine that are not in its namespace, for people."""


def choose_version(offered: Sequence[int]) -> int:
    """The highest version that both sides speak. Raises Refusal VERSION_UNSUPPORTED."""
    common = {version for version in PROTOCOL_VERSIONS if version in offered[:OFFERS_MAX]}
    if not common:
        raise Refusal(
            Reason.VERSION_UNSUPPORTED,
            f"this daemon speaks {list(PROTOCOL_VERSIONS)}: use a client that does, or another daemon",
            field="protocol_versions",
            value=list(offered[:16]),
        )
    return max(common)


def greeting_of(hello: cache_pb2.Hello, session: SessionId, peer: PeerProcess) -> Greeting:
    """Converts a Hello that `peer` has sent. Raises Refusal for the first thing in it that is wrong."""
    version = choose_version(hello.protocol_versions)
    role = _ROLES.get(hello.role)
    if role is None:
        raise Refusal(Reason.ROLE, "say scheduler, rank or both", field="role", value=hello.role)
    if len(hello.features) > OFFERS_MAX:
        raise Refusal(
            Reason.MALFORMED, f"at most {OFFERS_MAX} features", field="features", value=len(hello.features)
        )
    _check_text("instance", hello.instance, Reason.MALFORMED, required=True, shown=True)
    _check_text("client", hello.client, Reason.MALFORMED, shown=True)
    if not 1 <= hello.world_size <= WORLD_SIZE_MAX:
        raise Refusal(
            Reason.MALFORMED, f"between 1 and {WORLD_SIZE_MAX}", field="world_size", value=hello.world_size
        )
    holds_rank = bool(role & SessionRole.RANK)
    if holds_rank and hello.rank >= hello.world_size:
        raise Refusal(
            Reason.MALFORMED,
            f"ranks of this instance are 0 to {hello.world_size - 1}",
            field="rank",
            value=hello.rank,
        )
    if role == SessionRole.SCHEDULER | SessionRole.RANK and hello.world_size != 1:
        raise Refusal(
            Reason.ROLE,
            "scheduler and rank in one session is for a world size of 1: attach them as two sessions",
            field="world_size",
            value=hello.world_size,
        )
    return Greeting(
        attach=AttachSession(
            session=session,
            instance=hello.instance,
            role=role,
            rank=Rank(hello.rank if holds_rank else 0),
            world_size=hello.world_size,
            namespace_fields=namespace_fields(hello.namespace),
            namespace_facts=tuple(namespace_facts(hello.namespace)),
            hash_bytes=hello.namespace.hash_bytes,
            model=hello.namespace.model,
            groups=_groups(hello.groups, holds_rank),
            prefill_tokens_per_s=prefill_rate(hello.prefill_tokens_per_s),
            owner=_owner(hello.secret, peer),
        ),
        protocol_version=version,
        features=tuple(feature for feature in hello.features if feature in FEATURES),
        client=hello.client,
        configuration=_settings("configuration", hello.configuration, Reason.MALFORMED),
    )


def _owner(secret: bytes, peer: PeerProcess) -> Owner:
    if len(secret) > SECRET_BYTES_MAX:
        raise Refusal(
            Reason.MALFORMED,
            f"at most {SECRET_BYTES_MAX} bytes",
            field="secret",
            value=f"{len(secret)} bytes",
        )
    digest = hashlib.sha256(b"kvtier secret 1\0" + secret).digest() if secret else b""
    return Owner(peer.tenant, peer.uid, digest)


def namespace_fields(namespace: types_pb2.Namespace) -> bytes:
    """The canonical bytes of a namespace: number, length and content of each field that is not empty, by
    number.

    This is our own form, not protobuf's, because it goes into digests that outlive the daemon. Raises Refusal
    NAMESPACE_INVALID.
    """
    if not HASH_BYTES_MIN <= namespace.hash_bytes <= HASH_BYTES_MAX:
        raise Refusal(
            Reason.NAMESPACE_INVALID,
            f"between {HASH_BYTES_MIN} and {HASH_BYTES_MAX}",
            field="namespace.hash_bytes",
            value=namespace.hash_bytes,
        )
    parts = [NAMESPACE_PREFIX]
    for field in sorted(types_pb2.Namespace.DESCRIPTOR.fields, key=lambda field: field.number):
        value = getattr(namespace, field.name)
        if isinstance(value, str):
            _check_text(
                f"namespace.{field.name}",
                value,
                Reason.NAMESPACE_INVALID,
                required=field.name in _REQUIRED,
                shown=field.name == "model",
            )
            content = value.encode()
        elif field.name == "identity":
            settings = _settings("namespace.identity", value, Reason.NAMESPACE_INVALID)
            content = b"".join(map(_counted, itertools.chain.from_iterable(settings)))
        else:
            content = struct.pack("<Q", value) if value else b""
        if not content:  # an empty field is left out, so that fields added later do not change old digests
            continue
        parts.append(struct.pack("<IQ", field.number, len(content)) + content)
    return b"".join(parts)


def namespace_facts(namespace: types_pb2.Namespace) -> Iterator[tuple[str, str]]:
    """Fields of a namespace by name, for messages to people, with the most telling ones first. The salt is
    left out, because it may be a secret."""
    for setting in namespace.identity:
        yield f"namespace.identity[{setting.name}]", setting.value
    for field in types_pb2.Namespace.DESCRIPTOR.fields:
        if field.name not in ("identity", "salt"):
            yield f"namespace.{field.name}", str(getattr(namespace, field.name))


def identity_of(content: bytes) -> Iterator[tuple[str, str]]:
    """The settings that `namespace_fields` wrote for the field `identity`."""
    texts, offset = [], 0
    while offset < len(content):
        (length,) = struct.unpack_from("<I", content, offset)
        texts.append(content[offset + 4 : offset + 4 + length].decode())
        offset += 4 + length
    return zip(texts[::2], texts[1::2], strict=True)


def _counted(text: str) -> bytes:
    content = text.encode()
    return struct.pack("<I", len(content)) + content


def _settings(
    field: str, settings: Sequence[types_pb2.Setting], reason: Reason
) -> tuple[tuple[str, str], ...]:
    if len(settings) > SETTINGS_MAX:
        raise Refusal(reason, f"at most {SETTINGS_MAX} settings", field=field, value=len(settings))
    before = ""
    for setting in settings:
        name = setting.name
        if not 1 <= len(name.encode()) <= SETTING_NAME_BYTES_MAX or not name.isprintable():
            message = f"names have 1 to {SETTING_NAME_BYTES_MAX} bytes, all printable"
            raise Refusal(reason, message, field=field, value=ascii(name))
        if name <= before:
            raise Refusal(reason, "sorted by name, no name twice", field=field, value=name)
        _check_text(f"{field}[{name}]", setting.value, reason, shown=True)
        before = name
    size = sum(len(setting.name.encode()) + len(setting.value.encode()) for setting in settings)
    if size > SETTINGS_BYTES_MAX:
        message = f"names and values have at most {SETTINGS_BYTES_MAX:,} bytes"
        raise Refusal(reason, message, field=field, value=size)
    return tuple((setting.name, setting.value) for setting in settings)


def _groups(groups: Sequence[types_pb2.Group], holds_rank: bool) -> tuple[GroupGeometry, ...]:
    if not holds_rank:
        if groups:
            raise Refusal(
                Reason.LAYOUT_INVALID, "a scheduler holds no planes: leave groups empty", field="groups"
            )
        return ()
    if not 1 <= len(groups) <= GROUPS_MAX:
        raise Refusal(
            Reason.LAYOUT_INVALID,
            f"a rank names between 1 and {GROUPS_MAX} groups",
            field="groups",
            value=len(groups),
        )
    planes = sum(len(group.planes) for group in groups)
    if planes > PLANES_MAX:
        raise Refusal(
            Reason.LAYOUT_INVALID,
            f"a rank has at most {PLANES_MAX} planes in all its groups",
            field="groups",
            value=f"{planes} planes",
        )
    return tuple(_group(f"groups[{index}]", index, group) for index, group in enumerate(groups))


def _group(field: str, index: int, group: types_pb2.Group) -> GroupGeometry:
    def refuse(name: str, value: object, message: str) -> Refusal:
        return Refusal(Reason.LAYOUT_INVALID, message, field=f"{field}.{name}", value=value)

    if group.group != index:
        raise refuse("group", group.group, "groups are numbered from 0, in order")
    if group.kind not in types_pb2.GroupKind.values() or group.kind == types_pb2.GROUP_KIND_UNSPECIFIED:
        raise refuse("kind", group.kind, "say what kind of group it is")
    if group.block_tokens == 0:
        raise refuse("block_tokens", 0, "a block has at least one token")
    if (group.kind == types_pb2.GROUP_KIND_SLIDING_WINDOW) != (group.window_tokens > 0):
        raise refuse(
            "window_tokens", group.window_tokens, "more than 0 for a sliding window, 0 for other kinds"
        )
    if not group.planes:
        raise refuse("planes", 0, "a group has at least one plane")
    for number, plane in enumerate(group.planes):
        if plane.fragment_bytes == 0:
            raise refuse(f"planes[{number}].fragment_bytes", 0, "a plane has at least one byte in a block")
        _check_text(f"{field}.planes[{number}].description", plane.description, Reason.LAYOUT_INVALID)
    geometry = GroupGeometry(
        kind=group.kind,
        block_tokens=group.block_tokens,
        window_tokens=group.window_tokens,
        planes=tuple((plane.fragment_bytes, plane.description) for plane in group.planes),
        replicated=group.replicated,
    )
    if geometry.slot_bytes > SLOT_BYTES_MAX:
        raise Refusal(
            Reason.SLOT_TOO_LARGE,
            f"one block of this group has {geometry.slot_bytes} bytes; at most {SLOT_BYTES_MAX} are possible",
            field=f"{field}.planes",
            value=geometry.slot_bytes,
        )
    return geometry


def _check_text(
    field: str, value: str, reason: Reason, *, required: bool = False, shown: bool = False
) -> None:
    """`shown`: the text goes into logs and onto terminals, where control characters do harm."""
    if required and not value:
        raise Refusal(reason, "must not be empty", field=field)
    if (size := len(value.encode())) > TEXT_BYTES_MAX:
        # Its length and not the text, which may be a salt.
        raise Refusal(reason, f"at most {TEXT_BYTES_MAX} bytes", field=field, value=f"{size} bytes")
    if shown and not value.isprintable():
        raise Refusal(reason, "only printable characters", field=field, value=ascii(value))
