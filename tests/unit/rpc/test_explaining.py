"""A verdict in words, and the fields in which two namespaces differ."""

import asyncio
import struct
from dataclasses import replace
from unittest.mock import Mock

import pytest
from kvtier.v1 import admin_pb2, types_pb2
from kvtierd.core.blocks.namespaces import NamespaceAbout, layout_fingerprint
from kvtierd.core.errors import Reason
from kvtierd.core.ids import NamespaceDigest
from kvtierd.core.maintenance.explain import BlockVerdict, Explained, Explanation, Place, PlaceStatus
from kvtierd.core.stimuli import GroupGeometry
from kvtierd.rpc import explaining
from kvtierd.rpc.explaining import DIFFERENCES_MAX, differences, explain_response
from kvtierd.rpc.fitting import ANSWER_BYTES_MAX
from kvtierd.rpc.hello import namespace_fields
from kvtierd.rpc.status import namespaces_response

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


def answered(explained: Explained, uptime_s: float) -> admin_pb2.ExplainResponse:
    return asyncio.run(explain_response(explained, uptime_s))


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
    [message] = answered(Explained((each,), 3, None, 1), 60.0).explanations
    assert admin_pb2.Verdict.Name(message.verdict) == f"VERDICT_{verdict.name}"
    assert (message.namespace_digest, message.model, message.age_s) == ("aa" * 16, "m", 7.4)
    assert message.reason == types_pb2.REASON_DEADLINE
    assert message.text
    assert message.elsewhere[0].namespace_digest == "bb" * 16


def test_the_limits_of_memory_are_said() -> None:
    each = Explanation(place(about()), BlockVerdict.NEVER_STORED, None, None, ())
    whole = answered(Explained((each,), 3, None, 1), 60.0)
    assert "in the last 60 s" in whole.explanations[0].text
    assert not whole.explanations[0].HasField("age_s")
    part = answered(Explained((each,), 3, 8.0, 1), 60.0)
    assert "in the last 8 s" in part.explanations[0].text
    assert (part.remembered_blocks, part.remembered_s) == (3, 8.0)


def test_why_a_store_ended_is_said() -> None:
    each = Explanation(place(about()), BlockVerdict.STORE_ENDED, 2.0, Reason.WORKER_LOST, ())
    [message] = answered(Explained((each,), 0, None, 1), 1.0).explanations
    assert message.text == "its store lost its copy worker 2 s ago"


def test_numbers_of_namespaces_are_read_as_they_are_written() -> None:
    assert struct.pack("<Q", 3) in about(generation=3).fields


def many_explanations(count: int, groups: Groups = GROUPS) -> tuple[Explanation, ...]:
    """Of places that all differ from one that is named with each of them."""
    there = (place(about(groups, kv_dtype="float16"), THERE),)
    mine = place(about(tenant="t" * 1_000))
    return (Explanation(mine, BlockVerdict.ELSEWHERE, None, None, there),) * count


async def test_others_run_between_two_explanations() -> None:
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    running = asyncio.create_task(other())
    await explain_response(Explained(many_explanations(50), 0, None, 1), 1.0)
    running.cancel()
    assert turns >= 50


async def test_an_answer_ends_where_a_message_is_full_and_says_how_much_is_missing() -> None:
    wanted = Explained(many_explanations(4_000), 0, None, 1)
    answer = await explain_response(wanted, 1.0)
    assert len(answer.explanations) + answer.left_out == 4_000
    assert 0 < answer.left_out < 4_000
    assert ANSWER_BYTES_MAX <= answer.ByteSize() < 1.01 * ANSWER_BYTES_MAX
    assert (await explain_response(Explained(wanted.explanations[:9], 0, None, 1), 1.0)).left_out == 0


def test_planes_that_are_equal_are_not_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    rendered = Mock(wraps=explaining._layout)
    monkeypatch.setattr(explaining, "_layout", rendered)
    planes = tuple((64, f"plane {i}") for i in range(500))
    same, changed = GroupGeometry(1, 16, 0, planes), GroupGeometry(1, 16, 0, (*planes[:-1], (64, "last")))
    found = named(about((same, same)), about((same, changed)))
    assert [call.args for call in rendered.mock_calls] == [("groups[1]", same), ("groups[1]", changed)]
    assert list(found) == ["groups[1].planes[499].description", "layout of rank 0"]


def status_of(digest: bytes, group: int, fields: int) -> PlaceStatus:
    settings = [types_pb2.Setting(name=f"{number:04}", value="v" * 900) for number in range(fields)]
    whole = about(GROUPS * 2, identity=settings)
    return PlaceStatus(place(whole, NamespaceDigest(digest * 16), group), 1, 2, ("engine",))


async def test_fields_of_a_namespace_are_told_with_its_first_group() -> None:
    found = [status_of(digest, group, 1) for digest in (b"a", b"b") for group in (1, 0)]
    answer = await namespaces_response(found)
    assert [bool(each.fields) for each in answer.namespaces] == [True, False, True, False]
    assert (answer.left_out, len({each.namespace_digest for each in answer.namespaces})) == (0, 2)


async def test_namespaces_that_do_not_fit_are_counted() -> None:
    answer = await namespaces_response([status_of(bytes([n]), 0, 30) for n in range(200)])
    assert len(answer.namespaces) + answer.left_out == 200
    assert 0 < answer.left_out < 200
    assert answer.ByteSize() < 1.02 * ANSWER_BYTES_MAX
