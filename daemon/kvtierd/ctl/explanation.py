"""The pages that `kvtierctl explain` prints for people."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import groupby

from google.protobuf.message import Message
from kvtier.v1 import admin_pb2
from rich.console import Group, RenderableType
from rich.text import Text

from kvtierd.ctl.terminal import facts, indented
from kvtierd.ctl.text import count, duration

VERDICT_STYLES = {
    admin_pb2.VERDICT_READABLE: "green",
    admin_pb2.VERDICT_ON_DISK: "green",
    admin_pb2.VERDICT_BEING_WRITTEN: "yellow",
    admin_pb2.VERDICT_CORRUPT: "bold red",
}


UNKNOWN = (admin_pb2.VERDICT_ELSEWHERE, admin_pb2.VERDICT_NEVER_STORED)
LOADABLE = (admin_pb2.VERDICT_READABLE, admin_pb2.VERDICT_ON_DISK)

Numbered = tuple[int, admin_pb2.Explanation]
"""An explanation of one block of a prompt, and which block that is; the first is 1."""


def relevance(explanation: admin_pb2.Explanation, used: Collection[str]) -> int:
    """What comes first: 0 is a namespace in which the block is or was known, 1 one that an attached engine
    uses (`used`: their digests), 2 any other."""
    if explanation.verdict not in UNKNOWN:
        return 0
    return 1 if explanation.namespace_digest in used else 2


def known(responses: Iterable[admin_pb2.ExplainResponse]) -> bool:
    """Whether any of these blocks is or was known in any namespace."""
    return any(relevance(each, ()) == 0 for response in responses for each in response.explanations)


def explained(
    responses: Sequence[admin_pb2.ExplainResponse], used: Collection[str] | None = None
) -> RenderableType:
    """What became of one block, or of each block of a prompt, for people. With `used`, the digests of
    namespaces that attached engines use, what is not about one of these or about a block that is known is
    only counted."""
    places: dict[tuple[str, int], list[Numbered]] = {}
    for number, response in enumerate(responses, 1):
        for each in response.explanations:
            places.setdefault((each.namespace_digest, each.group), []).append((number, each))
    ranks = {
        place: 0 if used is None else min(relevance(each, used) for _, each in found)
        for place, found in places.items()
    }
    told = [places[place] for place in sorted(places, key=lambda place: ranks[place]) if ranks[place] < 2]
    parts = [part for found in told for part in _place(found, len(responses))]
    last = responses[-1]
    if rest := len(places) - len(told):
        if not told:
            ago = duration(last.remembered_s or last.uptime_s)
            parts.append(f"never stored, as far as this daemon remembers: not in the last {ago}")
        parts.append(
            f"not known in {count(rest, 'group')} of namespaces that no attached engine uses; "
            "--namespace DIGEST tells about one of them (`kvtierctl namespaces`)"
        )
    if left_out := max(response.left_out for response in responses):
        parts.append(
            f"{count(left_out, 'more group')} did not fit into the daemon's answer; "
            "--namespace DIGEST asks about one namespace, and --group N about one group"
        )
    if parts:
        return Group(*parts)
    if last.known_namespaces:
        return "no namespace that was asked about has such a group; `kvtierctl namespaces` lists all groups"
    ago = duration(last.uptime_s)
    return facts(
        f"no engine has attached since the daemon started {ago} ago, and nothing is stored",
        (
            ("engines", "`kvtierctl engines` lists the engines that are attached, and what each still lacks"),
            ("status", "`kvtierctl status` says what the pool holds, and how the daemon started"),
        ),
    )


def block_sizes(namespaces: Iterable[admin_pb2.NamespaceStatus]) -> str:
    """Says how large blocks are, for a prompt of which none is known; "" if nobody knows it."""
    sizes = sorted({each.block_tokens for each in namespaces if each.block_tokens})
    if not sizes:
        return ""
    return (
        f"no block of this prompt is known: were its hashes made with the right --block-tokens? Blocks here "
        f"have {' or '.join(f'{size:,}' for size in sizes)} tokens"
    )


def _place(found: Sequence[Numbered], blocks: int) -> Iterator[RenderableType]:
    """What became of blocks in one group of a namespace. Neighbours to which the same happened are one
    entry, with the time of the first."""
    _, first = found[0]
    title = Text(
        f"namespace {first.namespace_digest}  {first.model or 'of an earlier daemon'}  group {first.group}",
        "bold",
    )
    if blocks > 1:
        loadable = sum(each.verdict in LOADABLE for _, each in found)
        title.append(f": {loadable:,} of {count(blocks, 'block')} can be loaded")
    yield title
    for _, same in groupby(found, lambda each: _fate(each[1])):
        run = list(same)
        (begin, each), (end, _) = run[0], run[-1]
        which = f"block {begin:,}: " if begin == end else f"blocks {begin:,} to {end:,}: "
        text = f"{which if blocks > 1 else ''}{each.text}"
        yield indented(Text(text, VERDICT_STYLES.get(each.verdict, "")))
        for other in each.elsewhere:
            name = f"{other.namespace_digest}, group {other.group}"
            if not other.differences:
                yield indented(Text(f"in {name}: what it was made of is not known any more"))
                continue
            differences = [Text(f"{each.field}: {_values(each)}") for each in other.differences]
            yield indented(Group(f"in {name}, which differs in", indented(Group(*differences))))


def _fate(each: admin_pb2.Explanation) -> Message:
    """What happened to a block, without the time."""
    fate = admin_pb2.Explanation()
    fate.CopyFrom(each)
    fate.ClearField("text")
    fate.ClearField("age_s")
    return fate


def _values(difference: admin_pb2.Difference) -> str:
    if not difference.here and not difference.there:
        return "(not shown)"
    return f"{difference.here or 'none'} here, {difference.there or 'none'} there"
