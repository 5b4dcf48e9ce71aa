"""Processes attach, register and become a ready instance; what does not fit is refused and named."""

from __future__ import annotations

from typing import Any

import pytest
from kvtierd.core.actions import InstanceView
from kvtierd.core.blocks.namespaces import layout_fingerprint
from kvtierd.core.errors import Reason, Refusal
from kvtierd.core.ids import RegistrationId, SessionId, WorkerId
from kvtierd.core.stimuli import Drain, GroupGeometry, RegisterMemory, RegisterWords, SessionRole

from tests.unit.core.host import GEOMETRY, SCHEDULER, Host


def group(tokens: int = 16, slot_bytes: int = 4096) -> GroupGeometry:
    return GroupGeometry(1, tokens, 0, ((slot_bytes, "kv"),))


def test_the_first_session_forms_an_epoch_and_the_others_join_it(host: Host) -> None:
    pair = host.instance(sizes=((4096, 4096),), together=False, worker=None)
    again = host.instance("another", worker=None)
    assert len({pair.epoch, again.epoch}) == 2
    instances = {host.machine.core.sessions[session].instance.epoch for session in pair.sessions.values()}
    assert instances == {pair.epoch}


def test_an_instance_is_ready_when_every_rank_has_registered_words_and_memory(host: Host) -> None:
    pair = host.instance(sizes=((4096, 4096),), worker=None)
    worker = host.worker()
    view = pair.register(0, worker)
    assert (view.ready, view.missing_ranks) == (False, (1,))
    assert host.told(pair.sessions[1], InstanceView) == [view]
    view = pair.register(1, worker)
    assert (view.ready, view.missing_ranks) == (True, ())
    assert host.told(pair.sessions[0], InstanceView) == [view]


def test_the_namespace_is_known_once_all_ranks_have_attached(host: Host) -> None:
    pair = host.instance(sizes=((4096, 8192),), processes=(0,))
    assert pair.attach(1).instance.namespace is not None
    twin = host.instance("twin", sizes=((4096, 8192),), processes=())
    assert twin.attach(1).instance.namespace is None
    assert twin.attach(0).instance.namespace == host.machine.status().instances[0].namespace


@pytest.mark.parametrize(
    "other",
    [{"fields": b"other"}, {"sizes": ((8192,),)}, {"sizes": ((4096, 4096),)}],
    ids=["namespace", "layout", "world size"],
)
def test_different_engines_have_different_namespaces(host: Host, other: dict[str, Any]) -> None:
    host.instance("one", worker=None)
    host.instance("two", worker=None, **other)
    assert len({instance.namespace for instance in host.machine.status().instances}) == 2


def test_a_reply_tells_the_fingerprint_of_the_ranks_layout(host: Host) -> None:
    one = host.instance(together=False, processes=())
    reply = one.attach(0)
    assert reply.fingerprint == layout_fingerprint(one.hello(0).groups)
    assert one.attach(SCHEDULER).fingerprint is None


def test_the_first_field_that_differs_is_named_with_both_values(host: Host) -> None:
    facts = (
        ("namespace.identity[a]", "1"),
        ("namespace.identity[b]", "x" * 300 + "1"),
        ("namespace.model", "m"),
    )
    one = host.instance(sizes=((4096, 4096),), together=False, processes=())
    one.attach(0, namespace_facts=facts)

    def refusal(name: str, value: str | None) -> Refusal:
        other = tuple((key, value if key == name else said) for key, said in facts)
        other = tuple((key, said) for key, said in other if said is not None)
        found = host.refused(one.hello(1, namespace_fields=b"another", namespace_facts=other))
        assert (found.reason, found.field) == (Reason.FINGERPRINT_MISMATCH, name)
        return found

    assert "this process says '2', the others of its instance '1'" in str(
        refusal("namespace.identity[a]", "2")
    )
    assert "this process says nothing of it" in str(refusal("namespace.identity[a]", None))
    assert "…xxx" in str(refusal("namespace.identity[b]", "x" * 300 + "2"))
    assert "xxx2'" in str(refusal("namespace.identity[b]", "x" * 300 + "2"))
    assert len(str(refusal("namespace.model", "y" * 1_000))) < 500


@pytest.mark.parametrize(
    ("changes", "reason", "field"),
    [
        ({"world_size": 3}, Reason.FINGERPRINT_MISMATCH, "world_size"),
        ({"namespace_fields": b"x"}, Reason.FINGERPRINT_MISMATCH, "namespace.salt"),
        ({"hash_bytes": 16}, Reason.FINGERPRINT_MISMATCH, "namespace.hash_bytes"),
        ({"model": "x"}, Reason.FINGERPRINT_MISMATCH, "namespace.model"),
        ({"groups": (group(tokens=32),)}, Reason.FINGERPRINT_MISMATCH, "groups[0].block_tokens"),
        ({"groups": (group(), group())}, Reason.FINGERPRINT_MISMATCH, "groups"),
        ({"rank": 0}, Reason.SESSION_EXISTS, "rank"),
        ({"role": SessionRole.SCHEDULER, "groups": ()}, Reason.SESSION_EXISTS, "role"),
        ({"rank": 2}, Reason.MALFORMED, "rank"),
        ({"world_size": 0}, Reason.MALFORMED, "world_size"),
        ({"role": SessionRole(0)}, Reason.MALFORMED, "role"),
        ({"hash_bytes": 33}, Reason.MALFORMED, "namespace.hash_bytes"),
        ({"groups": ()}, Reason.LAYOUT_INVALID, "groups"),
        ({"groups": (GroupGeometry(1, 16, 0, ()),)}, Reason.LAYOUT_INVALID, "groups[0]"),
        ({"groups": (group(tokens=0),)}, Reason.LAYOUT_INVALID, "groups[0]"),
        ({"groups": (group(slot_bytes=1 << 16),)}, Reason.SLOT_TOO_LARGE, "groups[0]"),
        ({"role": SessionRole.SCHEDULER}, Reason.LAYOUT_INVALID, "groups"),
    ],
)  # fmt: skip
def test_a_process_that_does_not_fit_is_refused(
    host: Host, changes: dict[str, Any], reason: Reason, field: str
) -> None:
    half = host.instance(sizes=((4096, 4096),), processes=(0,))
    refusal = host.refused(half.hello(1, **changes))
    assert (refusal.reason, refusal.field) == (reason, field)
    assert half.attach(1).epoch == half.epoch, "the sound one still fits"


def test_a_mismatch_names_both_values(host: Host) -> None:
    half = host.instance(sizes=((4096, 4096),), processes=(0,))
    refusal = host.refused(half.hello(1, world_size=3))
    assert "3" in refusal.message
    assert "2" in refusal.message


def test_a_session_says_hello_once(host: Host) -> None:
    one = host.instance(worker=None)
    assert host.reason(one.hello(0, session=one.scheduler, instance="other")) is Reason.SECOND_HELLO


def test_a_slot_that_just_fits_an_extent_is_welcome(host: Host) -> None:
    one = host.instance(sizes=((GEOMETRY.slot_bytes_max,),))
    one.stored(1)


def test_a_draining_daemon_takes_no_new_sessions(host: Host) -> None:
    one = host.instance(worker=None)
    host.do(Drain())
    assert host.reason(one.hello(0, instance="new")) is Reason.DRAINING


class TestRegistering:
    def test_words_come_before_memory_and_from_the_same_worker(self, host: Host) -> None:
        one = host.instance(worker=None)
        first, second = host.worker(), host.worker()
        memory = RegisterMemory(one.scheduler, first, RegistrationId(1), (8,), 0)
        assert host.reason(memory) is Reason.NOT_ATTACHED
        host.do(RegisterWords(one.scheduler, second, 2, 4))
        assert host.reason(memory) is Reason.NOT_ATTACHED

    def test_nothing_is_registered_twice(self, host: Host) -> None:
        one = host.instance()
        assert one.worker is not None
        worker = WorkerId(int(one.worker))
        assert host.reason(RegisterWords(one.scheduler, worker, 2, 4)) is Reason.ALREADY_REGISTERED
        memory = RegisterMemory(one.scheduler, worker, RegistrationId(9), (8,), 0)
        assert host.reason(memory) is Reason.ALREADY_REGISTERED

    def test_every_group_needs_blocks_and_every_rank_a_part_word(self, host: Host) -> None:
        one = host.instance(worker=None)
        worker = host.worker()
        assert host.reason(RegisterWords(one.scheduler, worker, 2, 0)) is Reason.MAPPING_INVALID
        host.do(RegisterWords(one.scheduler, worker, 0, 1))
        for counts in ((), (0,), (8, 8)):
            stimulus = RegisterMemory(one.scheduler, worker, RegistrationId(1), counts, 0)
            assert host.reason(stimulus) is Reason.LAYOUT_INVALID

    def test_a_scheduler_has_nothing_to_register(self, host: Host) -> None:
        one = host.instance(together=False, worker=None)
        worker = host.worker()
        assert host.reason(RegisterWords(one.sessions[SCHEDULER], worker, 2, 4)) is Reason.ROLE

    def test_a_worker_must_live(self, host: Host) -> None:
        one = host.instance(worker=None)
        assert host.reason(RegisterWords(one.scheduler, WorkerId(99), 2, 4)) is Reason.WORKER_UNAVAILABLE

    def test_a_session_must_be_attached(self, host: Host) -> None:
        stimulus = RegisterWords(SessionId(99), host.worker(), 2, 4)
        assert host.reason(stimulus) is Reason.NOT_ATTACHED
