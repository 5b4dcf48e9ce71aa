"""Admin.Explain: the core's verdict on one hash in words, and how namespaces differ. Pure functions."""

import struct
from collections.abc import Iterator

from kvtier.v1 import admin_pb2, types_pb2

from kvtierd.core.blocks.namespaces import NamespaceAbout
from kvtierd.core.errors import Reason
from kvtierd.core.maintenance.explain import BlockVerdict, Explained, Explanation, Place
from kvtierd.core.stimuli import GroupGeometry
from kvtierd.rpc.hello import NAMESPACE_PREFIX, identity_of

DIFFERENCES_MAX = 16
"""Differences of two namespaces that are named; layouts of many planes differ in many places."""
ELSEWHERE_MAX = 8
SECRET = ("salt",)
"""Fields whose values are not shown."""

_WHY_ENDED = {
    Reason.CANCELLED: "was cancelled",
    Reason.REVOKED: "was revoked by its engine before it started, or withdrawn",
    Reason.GATE_DEADLINE: "waited too long for the engine's doorbell",
    Reason.DEADLINE: "took too long and was cancelled",
    Reason.WORKER_LOST: "lost its copy worker",
    Reason.EPOCH_ENDED: "ended with its engine",
    Reason.COPY_FAILED: "failed while it was copied",
}


def explain_response(explained: Explained, uptime_s: float) -> admin_pb2.ExplainResponse:
    return admin_pb2.ExplainResponse(
        explanations=[_explanation(each, explained, uptime_s) for each in explained.explanations],
        remembered_blocks=explained.remembered_blocks,
        remembered_s=explained.remembered_s or 0.0,
        uptime_s=uptime_s,
        known_namespaces=explained.known_namespaces,
    )


def _explanation(each: Explanation, explained: Explained, uptime_s: float) -> admin_pb2.Explanation:
    place = each.place
    message = admin_pb2.Explanation(
        namespace_digest=place.namespace.hex(),
        model=place.about.model if place.about else "",
        group=place.group,
        verdict=admin_pb2.Verdict.Value(f"VERDICT_{each.verdict.name}"),
        reason=types_pb2.Reason.ValueType(int(each.reason or 0)),
        text=_text(each, explained, uptime_s) + _audited(each),
        elsewhere=[_elsewhere(place, other) for other in each.elsewhere[:ELSEWHERE_MAX]],
    )
    if each.age_s is not None:
        message.age_s = each.age_s
    return message


def _text(each: Explanation, explained: Explained, uptime_s: float) -> str:
    ago = "" if each.age_s is None else f" {each.age_s:.0f} s ago"
    back_s = uptime_s if explained.remembered_s is None else explained.remembered_s
    match each.verdict:
        case BlockVerdict.READABLE if each.cut is not None:
            return (
                f"readable now; but {each.cut.at} s ago a lookup here found {each.cut.readable} blocks and "
                f"could lease {each.cut.leased} of them: what leases and loads hold at once is limited "
                "(limits.leased_fraction_max of pool.size)"
            )
        case BlockVerdict.READABLE:
            return "readable now"
        case BlockVerdict.ON_DISK:
            return "on a disk only: a lookup is told to ask again, and has it promoted"
        case BlockVerdict.BEING_WRITTEN:
            return "being written: ask again"
        case BlockVerdict.EVICTED:
            return f"evicted{ago} to make room"
        case BlockVerdict.CLEARED:
            return f"cleared{ago} by an operator"
        case BlockVerdict.EXPIRED:
            return f"dropped{ago}: the time that its engine gave it was over"
        case BlockVerdict.STORE_ENDED:
            how = _WHY_ENDED.get(each.reason, "failed") if each.reason is not None else "failed"
            return f"its store {how}{ago}"
        case BlockVerdict.REFUSED:
            return f"its store was refused{ago}: everything in the pool was held or being written"
        case BlockVerdict.CORRUPT:
            return f"corrupt: it did not match its record or checksum, found{ago or ' a moment ago'}"
        case BlockVerdict.ELSEWHERE:
            return f"not stored in this namespace in the last {back_s:.0f} s, but in another"
        case BlockVerdict.NEVER_STORED:
            return f"never stored, as far as this daemon remembers: not in the last {back_s:.0f} s"


def _audited(each: Explanation) -> str:
    found = each.mismatch
    if found is None:
        return ""
    return (
        f". In this namespace {found.engine} found {found.at} s ago that block "
        f"{found.report.block_hash.hex()[:16]} is not what it computes (relative error "
        f"{found.report.error:.3g}, {found.report.detail}): it neither loads nor stores here any more"
    )


def _elsewhere(mine: Place, other: Place) -> admin_pb2.Elsewhere:
    return admin_pb2.Elsewhere(
        namespace_digest=other.namespace.hex(),
        model=other.about.model if other.about else "",
        group=other.group,
        differences=differences(mine, other),
    )


# --- what differs ---


def differences(mine: Place, other: Place) -> list[admin_pb2.Difference]:
    """The first few fields in which two places differ; empty if one of them is known by its digest only."""
    if mine.about is None or other.about is None:
        return []
    here, there = dict(_facts(mine.group, mine.about)), dict(_facts(other.group, other.about))
    names = [name for name in {**here, **there} if here.get(name, "") != there.get(name, "")]
    return [
        admin_pb2.Difference(field=name)
        if name.removeprefix("namespace.") in SECRET
        else admin_pb2.Difference(field=name, here=here.get(name, ""), there=there.get(name, ""))
        for name in names[:DIFFERENCES_MAX]
    ]


def _facts(group: int, about: NamespaceAbout) -> Iterator[tuple[str, str]]:
    """Everything that goes into a digest, by the names that clients know."""
    yield "group", str(group)
    yield "tenant", about.tenant
    yield from _fields(about.fields)
    yield "world_size", str(about.world_size)
    yield "groups", str(len(about.groups))
    for index, geometry in enumerate(about.groups):
        yield from _layout(f"groups[{index}]", geometry)
    for rank, fingerprint in enumerate(about.fingerprints):
        yield f"layout of rank {rank}", fingerprint.hex()


def _layout(name: str, geometry: GroupGeometry) -> Iterator[tuple[str, str]]:
    yield f"{name}.kind", types_pb2.GroupKind.Name(types_pb2.GroupKind.ValueType(geometry.kind))
    yield f"{name}.block_tokens", str(geometry.block_tokens)
    yield f"{name}.window_tokens", str(geometry.window_tokens)
    yield f"{name}.replicated", str(geometry.replicated).lower()
    yield f"{name}.planes", str(len(geometry.planes))
    for number, (fragment_bytes, description) in enumerate(geometry.planes):
        yield f"{name}.planes[{number}].fragment_bytes", str(fragment_bytes)
        yield f"{name}.planes[{number}].description", description


def fields_of(about: NamespaceAbout) -> Iterator[tuple[str, str]]:
    """What engines have said about their namespace, by name, without secret fields."""
    for name, value in _fields(about.fields):
        field = name.removeprefix("namespace.")
        if field not in SECRET:
            yield field, value


def _fields(data: bytes) -> Iterator[tuple[str, str]]:
    """The fields of a namespace, read from the bytes that `hello.namespace_fields` wrote."""
    known = types_pb2.Namespace.DESCRIPTOR.fields_by_number
    offset = len(NAMESPACE_PREFIX)
    while offset < len(data):
        number, length = struct.unpack_from("<IQ", data, offset)
        offset += struct.calcsize("<IQ")
        content = data[offset : offset + length]
        offset += length
        field = known[number]
        if field.name == "identity":
            yield from ((f"namespace.identity[{name}]", value) for name, value in identity_of(content))
            continue
        is_text = field.type == field.TYPE_STRING
        yield f"namespace.{field.name}", content.decode() if is_text else str(struct.unpack("<Q", content)[0])
