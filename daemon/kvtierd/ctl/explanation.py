"""The page that `kvtierctl explain` prints for people."""

from collections.abc import Collection

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


def relevance(explanation: admin_pb2.Explanation, used: Collection[str]) -> int:
    """What comes first: 0 is a namespace in which the block is or was known, 1 one that an attached engine
    uses (`used`: their digests), 2 any other."""
    if explanation.verdict not in UNKNOWN:
        return 0
    return 1 if explanation.namespace_digest in used else 2


def explained(response: admin_pb2.ExplainResponse, used: Collection[str] | None = None) -> RenderableType:
    """An explanation for people. With `used`, the digests of namespaces that attached engines use, what is
    not about one of these or about a block that is known is only counted."""
    parts: list[RenderableType] = []
    told = [each for each in response.explanations if used is None or relevance(each, used) < 2]
    for each in told:
        name = (
            f"namespace {each.namespace_digest}  {each.model or 'of an earlier daemon'}  group {each.group}"
        )
        parts += [Text(name, "bold"), indented(Text(each.text, VERDICT_STYLES.get(each.verdict, "")))]
        for other in each.elsewhere:
            name = f"{other.namespace_digest}, group {other.group}"
            if not other.differences:
                parts.append(indented(Text(f"in {name}: what it was made of is not known any more")))
                continue
            differences = [Text(f"{each.field}: {_values(each)}") for each in other.differences]
            parts.append(indented(Group(f"in {name}, which differs in", indented(Group(*differences)))))
    if rest := len(response.explanations) - len(told):
        parts.append(
            f"not known in {count(rest, 'group')} of namespaces that no attached engine uses; "
            "--namespace DIGEST tells about one of them (`kvtierctl namespaces`)"
        )
    if parts:
        return Group(*parts)
    if response.known_namespaces:
        return "no namespace that was asked about has such a group; `kvtierctl namespaces` lists all groups"
    ago = duration(response.uptime_s)
    return facts(
        f"no engine has attached since the daemon started {ago} ago, and nothing is stored",
        (
            ("engines", "`kvtierctl engines` lists the engines that are attached, and what each still lacks"),
            ("status", "`kvtierctl status` says what the pool holds, and how the daemon started"),
        ),
    )


def _values(difference: admin_pb2.Difference) -> str:
    if not difference.here and not difference.there:
        return "(not shown)"
    return f"{difference.here or 'none'} here, {difference.there or 'none'} there"
