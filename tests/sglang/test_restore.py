"""What one SGLang has computed, another one restores bit by bit, also with several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.sglang.engine import PAGE, Answer, Engine, with_linker
from tests.support.daemon import DaemonHost, until

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]
PROMPT = [(7 * i * i + 11 * i) % 1000 for i in range(900)]
WHOLE = (len(PROMPT) - 1) // PAGE * PAGE
"""Tokens of it that can be restored."""


def same(one: Answer, other: Answer) -> bool:
    """Bit for bit."""
    return (one.tokens, one.logprobs, one.reason) == (other.tokens, other.logprobs, other.reason)


def stored(host: DaemonHost, blocks: int) -> None:
    until(lambda: host.metrics()["kvtier_store_blocks_total.host"] >= blocks, "the pages are stored")


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_another_engine_restores_what_a_killed_one_has_computed(
    host: DaemonHost, model: Path, tmp_path: Path, ranks: int
) -> None:
    arguments: dict[str, Any] = with_linker(host.socket) | {"tp_size": ranks}
    with Engine(model, tmp_path / "first.log", **arguments) as first:
        cold, local = first.generate(PROMPT), first.generate(PROMPT)
        assert (cold.restored, local.computed_before) == (0, WHOLE)
        stored(host, ranks * WHOLE // PAGE)
    with Engine(model, tmp_path / "second.log", **arguments) as second:
        restored = second.generate(PROMPT)
        assert (restored.computed_before, restored.restored) == (0, WHOLE)
        assert same(restored, local)
        assert second.flush()
        assert same(second.generate(PROMPT), local)
        assert second.generate(PROMPT, salt="other").restored == 0
        check_hints(host, second, ranks)


def check_hints(host: DaemonHost, engine: Engine, ranks: int) -> None:
    """Pages of one request are held; one that runs beside it is none the worse."""
    action = {
        "action_id": "one",
        "action_type": "kv.pin",
        "action_version": "1.0",
        "payload": {"duration": 600},
    }
    hints = {"protocol_version": "0.1", "message_id": "m", "actions": [action]}
    hinted = engine.ask([1, *PROMPT[: 4 * PAGE]], 20, hints=hints)
    plain = engine.ask([2, *PROMPT[: 4 * PAGE]], 20)
    told = Answer.of(engine.answer_of(hinted))
    [[found]] = told.hinted or [[None]]
    assert (found["action_id"], found["answer"]) == ("one", "clipped")
    assert (
        found["reason"] == "held for 300 s, which is max_pin_s; of the prompt only, not of generated tokens"
    )
    other = Answer.of(engine.answer_of(plain))
    assert len(told.tokens) == len(other.tokens) == 20
    assert not any(other.hinted or ())
    until(lambda: host.status().held_blocks == 4 * ranks, "the pages of the prompt are held")
    known = engine.generate(PROMPT, hints=hints)
    assert [each["answer"] for each in (known.hinted or [[]])[0]] == ["clipped"]
    until(
        lambda: host.status().held_blocks == ranks * (4 + WHOLE // PAGE), "and those that were stored before"
    )
