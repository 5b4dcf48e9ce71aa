"""Admin.Explain: the core's verdict on one hash in words, and how namespaces differ."""

import struct
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import islice, zip_longest

from kvtier.v1 import admin_pb2, types_pb2

from kvtierd.core.blocks.namespaces import NamespaceAbout
from kvtierd.core.errors import Reason
from kvtierd.core.maintenance.explain import (
    ELSEWHERE_MAX,
    BlockVerdict,
    Explained,
    Explanation,
    Place,
)
from kvtierd.core.stimuli import GroupGeometry
from kvtierd.rpc.fitting import as_many_as_fit
from kvtierd.rpc.hello import NAMESPACE_PREFIX, identity_of

DIFFERENCES_MAX = 16
"""Differences of two namespaces that are named; layouts of many planes differ in many places."""
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


async def explain_response(explained: Explained, uptime_s: float) -> admin_pb2.ExplainResponse:
    """The answer for people. It gives way to the event loop between two explanations."""
    explanations = await as_many_as_fit(
        explained.explanations, lambda each: explanation_message(each, explained.remembered_s or uptime_s)
    )
    return admin_pb2.ExplainResponse(
        explanations=explanations,
        left_out=len(explained.explanations) - len(explanations),
        remembered_blocks=explained.remembered_blocks,
        remembered_s=explained.remembered_s or 0.0,
        uptime_s=uptime_s,
        known_namespaces=explained.known_namespaces,
    )


def explanation_message(each: Explanation, back_s: float) -> admin_pb2.Explanation:
    """`back_s`: how far back what is remembered reaches."""
    place = each.place
    message = admin_pb2.Explanation(
        namespace_digest=place.namespace.hex(),
        model=place.about.model if place.about else "",
        group=place.group,
        verdict=admin_pb2.Verdict.Value(f"VERDICT_{each.verdict.name}"),
        reason=types_pb2.Reason.ValueType(int(each.reason or 0)),
        text=_text(each, back_s) + _audited(each),
        elsewhere=[_elsewhere(place, other) for other in each.elsewhere],
    )
    if each.age_s is not None:
        message.age_s = each.age_s
    return message


def _text(each: Explanation, back_s: float) -> str:
    ago = "" if each.age_s is None else f" {each.age_s:.0f} s ago"
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
            return "on a disk or in the store only: a lookup is told to ask again, and has it promoted"
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
        case BlockVerdict.UNWANTED:
            return (
                f"its store was refused{ago}: it was not worth the room of what would have had to go, or "
                "what comes before it was not there (pool.policy)"
            )
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
    sides = _compared(mine.group, mine.about, other.group, other.about)
    unequal = ((name, here, there) for name, here, there in sides if here != there)
    return [
        admin_pb2.Difference(field=name)
        if name.removeprefix("namespace.") in SECRET
        else admin_pb2.Difference(field=name, here=here, there=there)
        for name, here, there in islice(unequal, DIFFERENCES_MAX)
    ]


def _compared(
    group: int, here: NamespaceAbout, other_group: int, there: NamespaceAbout
) -> Iterator[tuple[str, str, str]]:
    """What goes into digests, by the names that clients know, with the values of both sides; "" where one has
    none. Parts that are long are left out where they are equal."""
    yield "group", str(group), str(other_group)
    yield "tenant", here.tenant, there.tenant
    if here.fields != there.fields:
        yield from _paired(_fields(here.fields), _fields(there.fields))
    yield "world_size", str(here.world_size), str(there.world_size)
    yield "groups", str(len(here.groups)), str(len(there.groups))
    for index, (mine, other) in enumerate(zip_longest(here.groups, there.groups)):
        if mine != other:
            yield from _layouts(f"groups[{index}]", mine, other)
    fingerprints = zip_longest(here.fingerprints, there.fingerprints, fillvalue=b"")
    for rank, (own, others) in enumerate(fingerprints):
        yield f"layout of rank {rank}", own.hex(), others.hex()


def _layouts(
    name: str, here: GroupGeometry | None, there: GroupGeometry | None
) -> Iterator[tuple[str, str, str]]:
    yield from _paired(dict(_layout(name, here)), dict(_layout(name, there)))
    planes = zip_longest(here.planes if here else (), there.planes if there else (), fillvalue=("", ""))
    for number, (mine, other) in enumerate(planes):
        if mine != other:
            yield f"{name}.planes[{number}].fragment_bytes", str(mine[0]), str(other[0])
            yield f"{name}.planes[{number}].description", mine[1], other[1]


def _layout(name: str, geometry: GroupGeometry | None) -> Iterator[tuple[str, str]]:
    if geometry is None:
        return
    yield f"{name}.kind", types_pb2.GroupKind.Name(types_pb2.GroupKind.ValueType(geometry.kind))
    yield f"{name}.block_tokens", str(geometry.block_tokens)
    yield f"{name}.window_tokens", str(geometry.window_tokens)
    yield f"{name}.replicated", str(geometry.replicated).lower()
    yield f"{name}.planes", str(len(geometry.planes))


def _paired(here: Mapping[str, str], there: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    for name in {**here, **there}:
        yield name, here.get(name, ""), there.get(name, "")


def fields_of(about: NamespaceAbout) -> Iterator[tuple[str, str]]:
    """What engines have said about their namespace, by name, without secret fields. Of its layout that is
    what is short; planes are in the fingerprints. So two namespaces of one tenant and as many ranks for which
    this is the same differ in secret fields alone."""
    for name, value in _fields(about.fields).items():
        field = name.removeprefix("namespace.")
        if field not in SECRET:
            yield field, value
    for index, geometry in enumerate(about.groups):
        yield from _layout(f"groups[{index}]", geometry)
    for rank, fingerprint in enumerate(about.fingerprints):
        yield f"layout of rank {rank}", fingerprint.hex()


@lru_cache(maxsize=2 * ELSEWHERE_MAX)
def _fields(data: bytes) -> Mapping[str, str]:
    """The fields of a namespace by name, read from the bytes that `hello.namespace_fields` wrote. One answer
    asks again and again for those of the same few namespaces."""
    return dict(_read_fields(data))


def _read_fields(data: bytes) -> Iterator[tuple[str, str]]:
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
