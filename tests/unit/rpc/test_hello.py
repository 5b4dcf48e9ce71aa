"""A Hello is refused whole, with the field at fault; a sound one becomes exactly what the core is told."""

import math
import struct
from collections.abc import Callable
from typing import Any

import pytest
from kvtier.v1 import cache_pb2, types_pb2
from kvtierd.core.errors import Reason, Refusal
from kvtierd.core.ids import SessionId
from kvtierd.core.stimuli import GroupGeometry, SessionRole
from kvtierd.rpc.hello import greeting_of, identity_of, namespace_fields
from kvtierd.rpc.peers import PeerProcess

PEER = PeerProcess(1, 1000, 1000, -1, "uid:1000", operator=False)


def namespace(**changes: object) -> types_pb2.Namespace:
    fields: dict[str, Any] = {"model": "m", "kv_dtype": "bfloat16", "hash_scheme": "test:1", "hash_bytes": 32}
    return types_pb2.Namespace(**(fields | changes))


def hello() -> cache_pb2.Hello:
    return cache_pb2.Hello(
        protocol_versions=[1, 99],
        features=["time travel", "joint-lookup"],
        token=b"t" * 16,
        instance="engine",
        role=types_pb2.ROLE_RANK,
        rank=1,
        world_size=2,
        namespace=namespace(),
        client="test 1",
        groups=[
            types_pb2.Group(
                group=0,
                kind=types_pb2.GROUP_KIND_FULL_ATTENTION,
                block_tokens=16,
                planes=[types_pb2.PlaneGeometry(fragment_bytes=64, description="k")] * 2,
            )
        ],
    )


def test_a_sound_hello() -> None:
    greeting = greeting_of(hello(), SessionId(5), PEER)
    assert (greeting.protocol_version, greeting.features, greeting.client) == (1, ("joint-lookup",), "test 1")
    attach = greeting.attach
    assert (attach.session, attach.instance, attach.role, attach.rank) == (5, "engine", SessionRole.RANK, 1)
    assert attach.groups == (GroupGeometry(1, 16, 0, ((64, "k"), (64, "k"))),)
    assert attach.groups[0].slot_bytes == 128


def change(field: str, value: object) -> Callable[[cache_pb2.Hello], None]:
    def apply(message: cache_pb2.Hello) -> None:
        *path, last = field.split(".")
        target: Any = message
        for step in path:
            name, _, index = step.partition("[")
            target = getattr(target, name)
            if index:
                target = target[int(index[:-1])]
        if isinstance(value, list):
            del getattr(target, last)[:]
            getattr(target, last).extend(value)
        else:
            setattr(target, last, value)

    return apply


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("protocol_versions", [2, 3], Reason.VERSION_UNSUPPORTED),
        ("protocol_versions", [], Reason.VERSION_UNSUPPORTED),
        ("role", 0, Reason.ROLE),
        ("role", 9, Reason.ROLE),
        ("instance", "", Reason.MALFORMED),
        ("instance", "x" * 1025, Reason.MALFORMED),
        ("client", "x" * 1025, Reason.MALFORMED),
        ("client", "a\nb", Reason.MALFORMED),
        ("instance", "\x1b[2J", Reason.MALFORMED),
        ("namespace.model", "a\x07", Reason.NAMESPACE_INVALID),
        ("features", ["x"] * 257, Reason.MALFORMED),
        ("groups", [types_pb2.Group(planes=[types_pb2.PlaneGeometry()] * 2_049)] * 2, Reason.LAYOUT_INVALID),
        ("world_size", 0, Reason.MALFORMED),
        ("world_size", 5000, Reason.MALFORMED),
        ("rank", 2, Reason.MALFORMED),
        ("prefill_tokens_per_s", -1.0, Reason.MALFORMED),
        ("prefill_tokens_per_s", math.nan, Reason.MALFORMED),
        ("prefill_tokens_per_s", math.inf, Reason.MALFORMED),
        ("prefill_tokens_per_s", 1e-300, Reason.MALFORMED),
        ("prefill_tokens_per_s", 1.1e9, Reason.MALFORMED),
        ("namespace.model", "", Reason.NAMESPACE_INVALID),
        ("namespace.kv_dtype", "", Reason.NAMESPACE_INVALID),
        ("namespace.hash_scheme", "", Reason.NAMESPACE_INVALID),
        ("namespace.hash_bytes", 7, Reason.NAMESPACE_INVALID),
        ("namespace.hash_bytes", 33, Reason.NAMESPACE_INVALID),
        ("namespace.salt", "x" * 1025, Reason.NAMESPACE_INVALID),
        ("groups", [], Reason.LAYOUT_INVALID),
        ("groups[0].group", 1, Reason.LAYOUT_INVALID),
        ("groups[0].kind", 0, Reason.LAYOUT_INVALID),
        ("groups[0].kind", 77, Reason.LAYOUT_INVALID),
        ("groups[0].block_tokens", 0, Reason.LAYOUT_INVALID),
        ("groups[0].window_tokens", 3, Reason.LAYOUT_INVALID),
        ("groups[0].kind", types_pb2.GROUP_KIND_SLIDING_WINDOW, Reason.LAYOUT_INVALID),
        ("groups[0].planes", [], Reason.LAYOUT_INVALID),
        ("groups[0].planes[1].fragment_bytes", 0, Reason.LAYOUT_INVALID),
        ("groups[0].planes[1].fragment_bytes", 2**64 - 1, Reason.SLOT_TOO_LARGE),
        ("groups[0].planes[0].description", "x" * 1025, Reason.LAYOUT_INVALID),
    ],
)
def test_one_wrong_field_is_refused(field: str, value: object, reason: Reason) -> None:
    message = hello()
    change(field, value)(message)
    with pytest.raises(Refusal) as refusal:
        greeting_of(message, SessionId(1), PEER)
    assert refusal.value.reason is reason
    if field not in ("groups[0].kind", "groups[0].planes[1].fragment_bytes"):
        assert refusal.value.field == field


def test_a_salt_that_is_too_long_is_not_told() -> None:
    message = hello()
    message.namespace.salt = "secret" * 200
    with pytest.raises(Refusal) as refusal:
        greeting_of(message, SessionId(1), PEER)
    assert (refusal.value.field, refusal.value.value) == ("namespace.salt", "1200 bytes")
    assert "secret" not in str(refusal.value)


@pytest.mark.parametrize("rate", [0.0, -0.0, 1e-3, 25_000.0, 1e9])
def test_a_prefill_rate_goes_to_the_core(rate: float) -> None:
    message = hello()
    message.prefill_tokens_per_s = rate
    assert greeting_of(message, SessionId(1), PEER).attach.prefill_tokens_per_s == rate


def test_a_scheduler_brings_no_layout_and_no_rank() -> None:
    message = hello()
    message.role = types_pb2.ROLE_SCHEDULER
    with pytest.raises(Refusal) as refusal:
        greeting_of(message, SessionId(1), PEER)
    assert refusal.value.reason is Reason.LAYOUT_INVALID
    del message.groups[:]
    attach = greeting_of(message, SessionId(1), PEER).attach
    assert (attach.role, attach.rank, attach.groups) == (SessionRole.SCHEDULER, 0, ())


def test_both_roles_in_one_are_for_a_world_of_one() -> None:
    message = hello()
    message.role = types_pb2.ROLE_SCHEDULER_AND_RANK
    with pytest.raises(Refusal) as refusal:
        greeting_of(message, SessionId(1), PEER)
    assert refusal.value.reason is Reason.ROLE
    message.world_size, message.rank = 1, 0
    assert greeting_of(message, SessionId(1), PEER).attach.role == SessionRole.SCHEDULER | SessionRole.RANK


class TestNamespaceFields:
    def test_every_field_tells_namespaces_apart(self) -> None:
        seen = {namespace_fields(namespace())}
        for field in types_pb2.Namespace.DESCRIPTOR.fields:
            number = isinstance(getattr(namespace(), field.name), int)
            value: object = (16 if field.name == "hash_bytes" else 7) if number else "other"
            if field.name == "identity":
                value = [types_pb2.Setting(name="other", value="x")]
            seen.add(namespace_fields(namespace(**{field.name: value})))
        assert len(seen) == len(types_pb2.Namespace.DESCRIPTOR.fields) + 1

    def test_text_cannot_slip_from_one_field_into_the_next(self) -> None:
        assert namespace_fields(namespace(tenant="ab", salt="c")) != namespace_fields(
            namespace(tenant="a", salt="bc")
        )
        assert namespace_fields(namespace(tenant="ab")) != namespace_fields(namespace(salt="ab"))

    def test_settings_are_told_apart_and_found_again(self) -> None:
        def fields(*settings: tuple[str, str]) -> bytes:
            given = [types_pb2.Setting(name=name, value=value) for name, value in settings]
            return namespace_fields(namespace(identity=given))

        several = (("a", "b"), ("aé", ""), ("b", "c" * 1_024))
        content = fields(*several)
        assert len({content, fields(("a", "b")), fields(("ab", "")), fields(("a", "")), fields()}) == 5
        start = content.index(struct.pack("<I", 12)) + 12
        assert tuple(identity_of(content[start:])) == several

    @pytest.mark.parametrize(
        ("settings", "field"),
        [
            ([("a", "1"), ("a", "2")], "namespace.identity"),
            ([("b", "1"), ("a", "2")], "namespace.identity"),
            ([("", "1")], "namespace.identity"),
            ([("n" * 129, "1")], "namespace.identity"),
            ([("a\n", "1")], "namespace.identity"),
            ([("a", "v" * 1_025)], "namespace.identity[a]"),
            ([("a", "\x1b[31m")], "namespace.identity[a]"),
            ([(f"{number:04}", "") for number in range(257)], "namespace.identity"),
            ([(f"{number:04}", "x" * 1_000) for number in range(40)], "namespace.identity"),
        ],
    )
    def test_settings_that_make_no_sense_are_refused_by_name(
        self, settings: list[tuple[str, str]], field: str
    ) -> None:
        given = [types_pb2.Setting(name=name, value=value) for name, value in settings]
        with pytest.raises(Refusal) as caught:
            namespace_fields(namespace(identity=given))
        assert (caught.value.reason, caught.value.field) == (Reason.NAMESPACE_INVALID, field)

    def test_the_bytes_are_what_pools_of_earlier_versions_hold(self) -> None:
        found = namespace_fields(namespace(hash_bytes=8, tenant="t"))
        expected = b"kvtier-namespace-1"
        for number, content in (
            (1, b"m"),
            (3, b"bfloat16"),
            (6, b"test:1"),
            (7, b"\x08" + bytes(7)),
            (8, b"t"),
        ):
            expected += number.to_bytes(4, "little") + len(content).to_bytes(8, "little") + content
        assert found == expected
