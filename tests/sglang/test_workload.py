"""Random requests to an engine whose daemon is killed, stopped and restarted all the time: every request is
answered, and every answer is the one of an engine that caches nothing."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.sglang.engine import Answer, Engine, with_linker
from tests.sglang.trouble import Trouble
from tests.support.daemon import DaemonHost, until
from tests.support.judging import compare, mistakes

pytestmark = [pytest.mark.sglang, pytest.mark.faults, pytest.mark.timeout(1_800)]
LONG = os.environ.get("KVTIER_WORKLOAD") == "long"
REQUESTS = 1_050 if LONG else 240
SEED = int(os.environ.get("KVTIER_SEED", "20261128"))
SIDE_BY_SIDE = 8
FLUSHES = 1 / 60
"""So many for each request."""
FAMILIES = 14
TOKENS_MAX = 1_500


@dataclass(frozen=True)
class Ask:
    """One request."""

    name: str
    prompt: list[int]
    max_tokens: int
    salt: str
    abort_after_s: float | None


def asks(seed: int) -> Iterator[Ask]:
    """Prompts share beginnings of many lengths, and some go on where another one ended."""
    chance = random.Random(f"{seed} requests")
    families = [
        [chance.randrange(2, 1_000) for _ in range(chance.randrange(100, 1_200))] for _ in range(FAMILIES)
    ]
    before: list[list[int]] = []
    for number in range(REQUESTS):
        if before and chance.random() < 0.35:
            base = chance.choice(before[-20:])
        else:
            family = chance.choice(families)
            base = family[: chance.randrange(8, len(family) + 1)]
        own = [chance.randrange(2, 1_000) for _ in range(chance.randrange(1, 40))]
        before.append((base + own)[:TOKENS_MAX])
        yield Ask(
            f"request-{number}",
            before[-1],
            chance.choice((1, 2, 4, 8, 16)),
            chance.choice(("", "", "", "red")),
            chance.random() / 2 if chance.random() < 0.08 else None,
        )


def run(engine: Engine, todo: list[Ask], *, aborts: bool, flushes: float = 0.0) -> dict[str, Answer]:
    """Asks all of it, some side by side. Returns the answers by name."""
    chance = random.Random(SEED)
    left, under_way, answers = list(reversed(todo)), dict[int, str](), dict[str, Answer]()

    def take(numbers: set[int]) -> None:
        for number in numbers:
            answers[under_way.pop(number)] = Answer.of(engine.answer_of(number))

    while left or under_way:
        while left and len(under_way) < SIDE_BY_SIDE:
            ask = left.pop()
            abort = ask.abort_after_s if aborts else None
            number = engine.ask(ask.prompt, ask.max_tokens, name=ask.name, salt=ask.salt, abort_after_s=abort)
            under_way[number] = ask.name
            if chance.random() < flushes:
                while under_way:
                    take(engine.wait_any(set(under_way)))
                # A request may be answered before its last batch is put away.
                until(engine.flush, "the engine is idle")
        if under_way:
            take(engine.wait_any(set(under_way)))
    return answers


def outcomes(todo: list[Ask], answers: dict[str, Answer]) -> dict[str, dict[str, Any]]:
    """For the judge."""
    return {
        ask.name: {
            "prompt": ask.prompt,
            "max_tokens": ask.max_tokens,
            "wanted_answers": 1,
            "wants_prompt_logprobs": False,
            "prompt_logprobs": [],
            "aborted": answers[ask.name].reason == "abort",
            "answers": {
                "0": {
                    "tokens": answers[ask.name].tokens,
                    "logprobs": answers[ask.name].logprobs,
                    "finish_reason": answers[ask.name].reason,
                }
            },
        }
        for ask in todo
    }


def test_whatever_happens_to_the_daemon_every_answer_is_right(
    host: DaemonHost, model: Path, tmp_path: Path
) -> None:
    todo = list(asks(SEED))
    print(f"again: KVTIER_SEED={SEED}")
    with Engine(model, tmp_path / "judged.log", **with_linker(host.socket)) as engine:
        trouble = Trouble(host, SEED)
        try:
            judged = run(engine, todo, aborts=True, flushes=FLUSHES)
        finally:
            trouble.end()
        until(engine.flush, "nothing is left under way")
        [state] = engine.call("state")["state"]

    def alone(name: str, **arguments: Any) -> dict[str, Answer]:
        with Engine(model, tmp_path / f"{name}.log", **arguments) as engine:
            return run(engine, todo, aborts=False)

    with ThreadPoolExecutor() as beside:
        first = beside.submit(alone, "oracle", disable_radix_cache=True)
        # With room for as much as the daemon has: a hit holds what was computed in another way, a token at a
        # time for example, and that rounds otherwise.
        second = beside.submit(alone, "control", max_total_tokens=1 << 16)
        oracle, control = first.result(), second.result()

    wanted = {ask.name for ask in todo if ask.abort_after_s is not None}
    assert {name for name, answer in judged.items() if answer.reason != "length"} <= wanted
    assert not any(answer.message for name, answer in judged.items() if answer.reason == "length")
    right = outcomes(todo, oracle)
    verdict = compare(right, outcomes(todo, judged))
    of_control = compare(right, outcomes(todo, control))
    print(f"judged:  {verdict.text()}\ncontrol: {of_control.text()}\ntrouble: {dict(trouble.made)}")
    assert mistakes(verdict, of_control) == []
    restored = sum(answer.restored for answer in judged.values())
    assert restored > sum(len(ask.prompt) for ask in todo) / 20, "little came from kvtier"
    assert sum(trouble.made.values()) >= REQUESTS / 60
    print(f"{restored:,} tokens restored; {state.get('memory_usage')}")
