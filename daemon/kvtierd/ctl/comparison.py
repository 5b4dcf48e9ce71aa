"""Why two hosts share nothing through a store: the namespaces of one beside those of the other, field by
field. Hosts share blocks of a namespace if its digest is the same on both."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import BinaryIO, Final

from google.protobuf.json_format import ParseDict, ParseError
from kvtier.v1.admin_pb2 import ListNamespacesResponse
from rich.console import Group, RenderableType
from rich.text import Text

from kvtierd.ctl.terminal import facts
from kvtierd.ctl.text import count

FILE_BYTES_MAX: Final = 64 << 20
NAMESPACES_MAX: Final = 1_000
"""Of another host. A daemon's answer has fewer."""
SHOWN_MAX: Final = 200
"""Characters of a value."""
BLOCK_BYTES: Final = ".block_bytes"
SALT: Final = "salt"
"""It is told by no daemon; only that it must be what differs."""


@dataclass(frozen=True, slots=True)
class FieldDifference:
    """A field in which two namespaces differ; a side that has none has ""."""

    field: str
    here: str
    there: str


@dataclass(frozen=True, slots=True)
class ComparedNamespace:
    """A namespace of this host, and the one of the other host that is most like it."""

    namespace_digest: str
    model: str
    shared: bool
    """The other host has it, too."""
    nearest_digest: str
    """Of the other host's namespace with the fewest differences; empty if that host has none."""
    nearest_model: str
    differences: tuple[FieldDifference, ...]


@dataclass(frozen=True, slots=True)
class _Known:
    digest: str
    model: str
    values: Mapping[str, str]


def read_namespaces(file: BinaryIO) -> ListNamespacesResponse:
    """What `kvtierctl namespaces --json` has printed on another host. Raises ValueError, which says what is
    wrong, if it is anything else."""
    data = file.read(FILE_BYTES_MAX + 1)
    if len(data) > FILE_BYTES_MAX:
        raise ValueError(f"it has more than {FILE_BYTES_MAX >> 20} MiB")
    try:
        plain = json.loads(data)
        if not isinstance(plain, dict) or "namespaces" not in plain:
            raise ValueError("there are no namespaces in it")
        return ParseDict(plain, ListNamespacesResponse(), ignore_unknown_fields=True, max_recursion_depth=10)
    except (ParseError, ValueError, RecursionError) as error:
        raise ValueError(_printable(str(error))) from None


def compared(here: ListNamespacesResponse, there: ListNamespacesResponse) -> list[ComparedNamespace]:
    """Each namespace of this host that engines have told of since its daemon started, beside what the other
    host has."""
    others = _known(there)[:NAMESPACES_MAX]
    return [_beside(mine, others) for mine in _known(here)]


def _beside(mine: _Known, others: list[_Known]) -> ComparedNamespace:
    for other in others:
        if other.digest == mine.digest:
            return ComparedNamespace(mine.digest, mine.model, True, other.digest, mine.model, ())
    found = [(list(_differences(mine, other)), other) for other in others]
    if not found:
        return ComparedNamespace(mine.digest, mine.model, False, "", "", ())
    differences, nearest = min(found, key=lambda each: len(each[0]))
    return ComparedNamespace(
        mine.digest, mine.model, False, nearest.digest, nearest.model, tuple(differences)
    )


def _differences(mine: _Known, other: _Known) -> Iterator[FieldDifference]:
    unequal = False
    for name in {**mine.values, **other.values}:
        if name.endswith(BLOCK_BYTES) and not (name in mine.values and name in other.values):
            continue  # a daemon lists groups that it has something of; how many there are is told beside
        here, there = mine.values.get(name, ""), other.values.get(name, "")
        if here != there:
            unequal = True
            yield FieldDifference(_printable(name), _printable(here), _printable(there))
    if not unequal:
        # Everything else that a digest is made of is among the values.
        yield FieldDifference(SALT, "", "")


def _known(response: ListNamespacesResponse) -> list[_Known]:
    """Namespaces of which more is known than the digest."""
    by_digest: dict[str, dict[str, str]] = {}
    models: dict[str, str] = {}
    for each in response.namespaces:
        if not each.model:
            continue
        models[each.namespace_digest] = each.model
        values = by_digest.setdefault(each.namespace_digest, {})
        values["tenant of the daemon"] = each.tenant
        values["world_size"] = str(each.world_size)
        values[f"groups[{each.group}]{BLOCK_BYTES}"] = str(each.block_bytes)
        values |= {field.name: field.value for field in each.fields}
    return [
        _Known(_printable(digest), _printable(models[digest]), values) for digest, values in by_digest.items()
    ]


def _printable(text: str) -> str:
    """What another host says, as one line without control characters."""
    cut = text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}…"
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in cut)


# --- for people, and for programs ---


def comparison_json(found: list[ComparedNamespace]) -> str:
    """A JSON list with an object for each namespace of this host."""
    return json.dumps([asdict(each) for each in found], indent=2)


def comparison_page(found: list[ComparedNamespace], there: ListNamespacesResponse) -> RenderableType:
    """What `kvtierctl namespaces --compare` prints."""
    if not found:
        return "no engine has attached here since the daemon started, so there is nothing to compare"
    parts: list[RenderableType] = []
    for each in found:
        title = Text.assemble((f"namespace {each.namespace_digest}", "bold"), f"  {each.model}")
        if each.shared:
            rows: list[tuple[str, RenderableType]] = [("shared", "the other host has it, too")]
        elif not each.nearest_digest:
            rows = [("apart", "no engine has attached on the other host since its daemon started")]
        else:
            nearest = f"{each.nearest_digest}, {each.nearest_model}"
            rows = [("apart", f"the nearest one there is {nearest}; it differs in")]
            rows += [(f"{one.field}:", _sides(one)) for one in each.differences]
        parts += [facts(title, rows), Text("")]
    if there.left_out:
        parts.append(f"{count(there.left_out, 'more group')} did not fit into the other daemon's answer")
        return Group(*parts)
    return Group(*parts[:-1])


def _sides(one: FieldDifference) -> str:
    if one.field == SALT and not one.here and not one.there:
        return "all that is told is the same, so it is the salt, which is not told"
    return f"{one.here or '(nothing)'} here, {one.there or '(nothing)'} there"
