"""A verdict in words, and the fields in which two namespaces differ."""

import struct
from dataclasses import replace

import pytest
from kvtier.v1 import admin_pb2, types_pb2
from kvtierd.core.blocks.namespaces import NamespaceAbout, layout_fingerprint
from kvtierd.core.errors import Reason
from kvtierd.core.ids import NamespaceDigest
from kvtierd.core.maintenance.explain import BlockVerdict, Explained, Explanation, Place
from kvtierd.core.stimuli import GroupGeometry
from kvtierd.rpc.explaining import DIFFERENCES_MAX, differences, explain_response
from kvtierd.rpc.hello import namespace_fields

HERE, THERE = NamespaceDigest(b"\xaa" * 16), NamespaceDigest(b"\xbb" * 16)
GROUPS = (GroupGeometry(1, 16, 0, ((64, "k"), (64, "v"))),)


Groups = tuple[GroupGeometry, ...]


def about(groups: Groups = GROUPS, world_size: int = 1, **fields: object) -> NamespaceAbout:
    given = {"model": "m", "kv_dtype": "bfloat16", "hash_scheme": "test:1", "hash_bytes": 32} | fields
    message = types_pb2.Namespace(**given)  # type: ignore[arg-type]
    fingerprints = (layout_fingerprint(groups),) * world_size
    return NamespaceAbout(
        "tenant", message.model, namespace_fields(message), 32, world_size, fingerprints, groups
    )


def place(about: NamespaceAbout | None, digest: NamespaceDigest = HERE, group: int = 0) -> Place:
    return Place(digest, group, about)


def named(mine: NamespaceAbout, other: NamespaceAbout) -> dict[str, tuple[str, str]]:
    found = differences(place(mine), place(other, THERE))
    return {each.field: (each.here, each.there) for each in found}


def test_a_dtype_is_named_with_both_values() -> None:
    assert named(about(), about(kv_dtype="float16")) == {"namespace.kv_dtype": ("bfloat16", "float16")}


def test_a_field_that_only_one_has_is_named() -> None:
    assert named(about(), about(tenant="t", generation=3)) == {
        "namespace.tenant": ("", "t"),
        "namespace.generation": ("", "3"),
    }


def test_a_salt_is_named_and_not_shown() -> None:
    assert named(about(salt="one"), about(salt="other")) == {"namespace.salt": ("", "")}


def test_settings_are_named_one_by_one() -> None:
    def with_settings(**values: str) -> NamespaceAbout:
        return about(identity=[types_pb2.Setting(name=name, value=values[name]) for name in sorted(values)])

    assert named(with_settings(a="1", b="2"), with_settings(a="1", b="3", c="4")) == {
        "namespace.identity[b]": ("2", "3"),
        "namespace.identity[c]": ("", "4"),
    }


def test_layouts_are_compared_plane_by_plane() -> None:
    other = (GroupGeometry(1, 32, 0, ((64, "k"), (128, "v"))),)
    found = named(about(), about(other))
    assert found["groups[0].block_tokens"] == ("16", "32")
    assert found["groups[0].planes[1].fragment_bytes"] == ("64", "128")
    assert "groups[0].planes[0].fragment_bytes" not in found


def test_ranks_and_their_layouts_are_named() -> None:
    assert named(about(), about(world_size=2))["world_size"] == ("1", "2")
    other = replace(about(world_size=2), fingerprints=(layout_fingerprint(GROUPS), layout_fingerprint(())))
    assert list(named(about(world_size=2), other)) == ["layout of rank 1"]


def test_groups_of_one_namespace_differ_in_their_number() -> None:
    found = differences(place(about()), place(about(), group=1))
    assert [(each.field, each.here, each.there) for each in found] == [("group", "0", "1")]


def test_many_differences_are_cut_short() -> None:
    wide = (GroupGeometry(1, 16, 0, tuple((64, f"plane {i}") for i in range(500))),)
    assert len(named(about(), about(wide))) == DIFFERENCES_MAX


def test_nothing_is_made_up_about_a_namespace_of_which_only_the_digest_is_known() -> None:
    assert differences(place(about()), place(None, THERE)) == []


@pytest.mark.parametrize("verdict", list(BlockVerdict))
def test_every_verdict_has_its_number_and_its_words(verdict: BlockVerdict) -> None:
    each = Explanation(place(about()), verdict, 7.4, Reason.DEADLINE, (place(None, THERE),))
    [message] = explain_response(Explained((each,), 3, None, 1), 60.0).explanations
    assert admin_pb2.Verdict.Name(message.verdict) == f"VERDICT_{verdict.name}"
    assert (message.namespace_digest, message.model, message.age_s) == ("aa" * 16, "m", 7.4)
    assert message.reason == types_pb2.REASON_DEADLINE
    assert message.text
    assert message.elsewhere[0].namespace_digest == "bb" * 16


def test_the_limits_of_memory_are_said() -> None:
    each = Explanation(place(about()), BlockVerdict.NEVER_STORED, None, None, ())
    whole = explain_response(Explained((each,), 3, None, 1), 60.0)
    assert "in the last 60 s" in whole.explanations[0].text
    assert not whole.explanations[0].HasField("age_s")
    part = explain_response(Explained((each,), 3, 8.0, 1), 60.0)
    assert "in the last 8 s" in part.explanations[0].text
    assert (part.remembered_blocks, part.remembered_s) == (3, 8.0)


def test_why_a_store_ended_is_said() -> None:
    each = Explanation(place(about()), BlockVerdict.STORE_ENDED, 2.0, Reason.WORKER_LOST, ())
    [message] = explain_response(Explained((each,), 0, None, 1), 1.0).explanations
    assert message.text == "its store lost its copy worker 2 s ago"


def test_numbers_of_namespaces_are_read_as_they_are_written() -> None:
    assert struct.pack("<Q", 3) in about(generation=3).fields
