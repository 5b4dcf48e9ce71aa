"""What an orchestrator asks for with KV hints, what becomes of it, and what it is told."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtier_engine.hints import ACTIONS_MAX, DIRECTIVES_MAX, NONE, Allowed, Hints, HintVerdict, Hold, read

PROMPT = 100
ALL = Allowed(hold_s_max=300, hold_s_max_name="max_pin_s", load=True)
NOTHING = Allowed(hold_s_max=0, hold_s_max_name="max_pin_s", load=False)
PROMPTS_ONLY = Allowed(hold_s_max=300, hold_s_max_name="max_pin_s", load=True, output=False)


def action(kind: str, payload: Any, version: str = "1.0", name: str = "a") -> dict[str, Any]:
    return {"action_id": name, "action_type": kind, "action_version": version, "payload": payload}


def envelope(*actions: Any, version: str = "0.1") -> dict[str, Any]:
    return {"protocol_version": version, "message_id": "m", "actions": list(actions)}


def one(kind: str, payload: Any, allowed: Allowed = ALL, **rest: Any) -> tuple[Hints, HintVerdict, str]:
    """Reads one action; returns what it comes to, and its answer."""
    hints = read(envelope(action(kind, payload, **rest)), PROMPT, allowed)
    [answer] = hints.answers
    return hints, answer.verdict, answer.reason


def test_no_envelope_asks_for_nothing() -> None:
    assert read(None, PROMPT, ALL) == NONE
    assert read(envelope(), PROMPT, ALL) == NONE


def test_structures_and_json_objects_say_the_same() -> None:
    given = action("kv.pin", {"duration": 7})
    structure = SimpleNamespace(protocol_version="0.1", message_id="m", actions=[SimpleNamespace(**given)])
    assert read(structure, PROMPT, ALL) == read(envelope(given), PROMPT, ALL)
    assert read(structure, PROMPT, ALL).holds == (Hold(7),)


def test_a_pin_is_held_as_long_as_the_engine_allows() -> None:
    for payload, holds, verdict in (
        ({"duration": 60}, (Hold(60),), HintVerdict.ACCEPTED),
        ({"duration": 60.5, "end": 50}, (Hold(60.5, 50),), HintVerdict.ACCEPTED),
        ({"duration": 0}, (), HintVerdict.ACCEPTED),
        ({"duration": 301}, (Hold(300),), HintVerdict.CLIPPED),
        ({}, (Hold(300),), HintVerdict.CLIPPED),
        ({"duration": None, "end": None}, (Hold(300),), HintVerdict.CLIPPED),
    ):
        hints, answer, reason = one("kv.pin", payload)
        assert (hints.holds, answer) == (holds, verdict), payload
        assert (reason == "held for 300 s, which is max_pin_s") == (verdict is HintVerdict.CLIPPED)
    hints, answer, reason = one("kv.pin", {"duration": 1}, NOTHING)
    assert (hints.holds, answer) == ((), HintVerdict.REFUSED)
    assert reason == "this engine holds nothing for requests (max_pin_s is 0)"


def test_directives_hold_the_head_and_release_the_tail() -> None:
    directives = [
        {"start": 0, "end": 40, "priority": 90, "duration": 250},
        {"start": 40, "end": 80, "priority": 1, "duration": 20},
        {"start": 80, "priority": 0},
    ]
    hints, answer, _ = one("kv.retain", {"scope": "alice", "directives": directives})
    assert answer is HintVerdict.ACCEPTED
    assert hints.holds == (Hold(250, 40), Hold(20, 80))
    assert hints.cool_from_tokens == 80
    hints, answer, _ = one("kv.retain", {"directives": [{"covers_output": True, "priority": 0}]})
    assert (answer, hints.cool_from_tokens) == (HintVerdict.ACCEPTED, PROMPT)
    hints, answer, _ = one(
        "kv.retain", {"directives": [{"covers_output": True, "priority": 5, "duration": 1}]}
    )
    assert (answer, hints.holds) == (HintVerdict.ACCEPTED, (Hold(1),))
    assert one("kv.retain", {"directives": []})[1] is HintVerdict.ACCEPTED


def test_where_nothing_may_be_held_the_rest_of_the_directives_is_done() -> None:
    directives = [{"end": 40, "priority": 9}, {"start": 40, "priority": 0}]
    hints, answer, reason = one("kv.retain", {"directives": directives}, NOTHING)
    assert (answer, hints.holds, hints.cool_from_tokens) == (HintVerdict.CLIPPED, (), 40)
    assert "max_pin_s is 0" in reason
    assert one("kv.retain", {"directives": directives[:1]}, NOTHING)[1] is HintVerdict.REFUSED


def test_an_engine_that_does_not_know_generated_tokens_says_so() -> None:
    hints, answer, reason = one("kv.pin", {"duration": 9}, PROMPTS_ONLY)
    assert (hints.holds, answer) == ((Hold(9, PROMPT),), HintVerdict.CLIPPED)
    assert reason == "of the prompt only, not of generated tokens"
    assert one("kv.pin", {"duration": 9, "end": PROMPT}, PROMPTS_ONLY)[1] is HintVerdict.ACCEPTED
    tail = {"directives": [{"covers_output": True, "priority": 0}]}
    assert one("kv.retain", tail, PROMPTS_ONLY)[1] is HintVerdict.REFUSED


def test_demote_and_prefetch() -> None:
    hints, answer, _ = one("kv.demote", {})
    assert (hints.cool_from_tokens, answer) == (0, HintVerdict.ACCEPTED)
    assert one("kv.demote", {"start": 30})[0].cool_from_tokens == 30
    _, answer, reason = one("kv.demote", {"session_id": "s"})
    assert (answer, "no sessions" in reason) == (HintVerdict.REFUSED, True)
    hints, answer, _ = one("kv.prefetch", {})
    assert (hints.prefetch, answer) == (True, HintVerdict.ACCEPTED)
    assert one("kv.prefetch", {}, NOTHING)[:2] == (
        Hints(answers=read(envelope(action("kv.prefetch", {})), PROMPT, NOTHING).answers),
        HintVerdict.REFUSED,
    )


@pytest.mark.parametrize(
    ("kind", "payload", "told"),
    [
        ("kv.fetch", {"source_control_endpoint": "tcp://a:1", "block_hashes": [1]}, "share through a store"),
        ("kv.evict", {}, "unknown action_type: there are kv.pin, kv.retain, kv.demote, kv.prefetch"),
        ("kv.pin", {"ttl": 7}, "unknown field 'ttl': there are duration, end"),
        ("kv.pin", {"duration": -1}, "duration -1: write null or seconds from 0 to 2592000"),
        ("kv.pin", {"duration": float("nan")}, "duration nan"),
        ("kv.pin", {"duration": True}, "duration True"),
        ("kv.pin", {"duration": "7"}, "duration '7'"),
        ("kv.pin", {"duration": 10**400}, "duration 1000"),
        ("kv.pin", {"end": 0}, "end 0: write null or a whole number of tokens greater than 0"),
        ("kv.pin", {"end": 2.5}, "end 2.5"),
        ("kv.pin", [], "payload []: write an object"),
        ("kv.demote", {"start": -1}, "start -1: write a whole number of tokens that is not negative"),
        ("kv.demote", {"start": float("inf")}, "start inf"),
        ("kv.prefetch", {"hashes": []}, "unknown field 'hashes': there are none"),
        ("kv.retain", {}, "directives None: write a list"),
        ("kv.retain", {"directives": "x"}, "directives 'x': write a list"),
        ("kv.retain", {"directives": [7]}, "directive 7: write an object"),
        ("kv.retain", {"directives": [{}]}, "priority None: write a whole number from 0 to 100"),
        ("kv.retain", {"directives": [{"priority": 101}]}, "priority 101"),
        ("kv.retain", {"directives": [{"priority": 1, "start": 9, "end": 9}]}, "end 9"),
        ("kv.retain", {"directives": [{"priority": 1, "covers_output": 1}]}, "covers_output 1"),
        (
            "kv.retain",
            {"directives": [{"priority": 1, "covers_output": True, "end": 9}]},
            "neither start nor",
        ),
        ("kv.retain", {"directives": [{"priority": 1, "block": 9}]}, "unknown field 'block'"),
        ("kv.retain", {"directives": [{"priority": 1}] * (DIRECTIVES_MAX + 1)}, "at most 128"),
        ("kv.pin", None, "payload None"),
        ([], {}, "cannot be read"),
    ],
)
def test_what_cannot_be_done_is_refused_with_what_to_write_instead(
    kind: Any, payload: Any, told: str
) -> None:
    hints, answer, reason = one(kind, payload)
    assert answer is HintVerdict.REFUSED
    assert told in reason
    assert len(reason) < 250
    assert (hints.holds, hints.cool_from_tokens, hints.prefetch) == ((), None, False)


def test_one_wrong_directive_has_none_of_its_action_done_and_no_other_action_undone() -> None:
    wrong = action("kv.retain", {"directives": [{"priority": 1, "duration": 5}, {"priority": -1}]}, name="w")
    hints = read(envelope(wrong, action("kv.pin", {"duration": 7}, name="r")), PROMPT, ALL)
    assert hints.holds == (Hold(7),)
    assert [(each.action_id, each.verdict) for each in hints.answers] == [
        ("w", HintVerdict.REFUSED),
        ("r", HintVerdict.ACCEPTED),
    ]


def test_versions_of_the_same_major_number_are_read() -> None:
    pin = {"duration": 7}
    assert one("kv.pin", pin, version="1.9")[1] is HintVerdict.ACCEPTED
    assert one("kv.pin", pin, version="2.0")[2] == "action_version '2.0' is not known: write 1.0"
    for version, holds in (("0.2", (Hold(7),)), ("1.0", ())):
        hints = read(envelope(action("kv.pin", pin), version=version), PROMPT, ALL)
        assert hints.holds == holds


def test_what_is_no_envelope_is_answered_once() -> None:
    for wrong in (7, {}, {"protocol_version": "0.1"}, envelope(7), envelope({}), {"actions": 7}):
        hints = read(wrong, PROMPT, ALL)
        [answer] = hints.answers
        assert answer.verdict is HintVerdict.REFUSED
        assert "not an envelope of hints" in answer.reason
    many = read(envelope(*[action("kv.pin", {})] * (ACTIONS_MAX + 1)), PROMPT, ALL)
    assert [each.reason for each in many.answers] == ["65 actions: at most 64 are read"]
    assert not many.holds


def test_an_answer_is_told_as_json_and_no_longer_than_it_need_be() -> None:
    hints = read(envelope(action("kv.pin", {"duration": 7}, name="i" * 500)), PROMPT, ALL)
    told = [each.to_json() for each in hints.answers]
    assert told == [{"action_id": "i" * 64, "action_type": "kv.pin", "answer": "accepted"}]
    assert json.loads(json.dumps(told)) == told


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
_PAYLOADS = st.dictionaries(
    st.sampled_from(["duration", "end", "start", "scope", "directives", "session_id", "x"]), _JSON, max_size=3
)
_KINDS = st.sampled_from(["kv.pin", "kv.retain", "kv.demote", "kv.prefetch", "kv.fetch"]) | st.text(
    max_size=8
)


@given(
    st.lists(st.builds(action, _KINDS, _PAYLOADS | _JSON, st.sampled_from(["1.0", "2.0"])), max_size=6),
    st.sampled_from([ALL, NOTHING, PROMPTS_ONLY]),
)
def test_whatever_is_sent_each_action_has_an_answer_and_nothing_is_beyond_the_bounds(
    actions: list[dict[str, Any]], allowed: Allowed
) -> None:
    hints = read(envelope(*actions), PROMPT, allowed)
    assert len(hints.answers) == len(actions)
    for answer in hints.answers:
        assert (answer.verdict is HintVerdict.ACCEPTED) == (not answer.reason)
    for hold in hints.holds:
        assert 0 < hold.seconds <= allowed.hold_s_max
        assert hold.end_tokens is None or hold.end_tokens > 0
    assert hints.cool_from_tokens is None or hints.cool_from_tokens >= 0
    if all(answer.verdict is HintVerdict.REFUSED for answer in hints.answers):
        assert (hints.holds, hints.cool_from_tokens, hints.prefetch) == ((), None, False)
