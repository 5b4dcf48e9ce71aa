"""What a random workload asks of its engines, all of it made from one seed.

Prompts share beginnings of many lengths, some with a cache salt; conversations go on with what was answered;
requests differ in priority, number of answers and what they want to know; some are aborted.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from tests.vllm.rig import BLOCK, prompt

SALTS = ("", "", "", "", "", "", "red", "blue")
"""Most prompts have none."""
OUTPUT_TOKENS = (1, 1, 2, 3, 4, 6, 8, 8, 12, 16, 24, 40)
FAMILIES = 28
"""Beginnings that prompts share."""
TURNS_MAX = 4
LOGPROBS = 3
"""Of each token: what is likeliest, so that the second one tells how near a tie was."""


@dataclass(frozen=True)
class Ask:
    """One request."""

    name: str
    prompt: list[int]
    """Its own tokens."""
    after: str = ""
    """The turn before, whose prompt and answer its own tokens follow. It is asked when that one is over."""
    whole: bool = False
    """Its own tokens are all of the prompt; it only comes after the turn before."""
    max_tokens: int = 1
    answers: int = 1
    """How many, each for itself, of the same prompt (vLLM's `n`). All are greedy, so all are equal."""
    salt: str = ""
    priority: int = 0
    prompt_logprobs: bool = False
    abort_after_steps: int = -1
    """So many steps after it was asked it is aborted, if it is not over. Below 0: it is not."""

    def as_json(self) -> dict[str, Any]:
        """For an engine's process."""
        return asdict(self)


def shared_prefixes(seed: int) -> list[list[int]]:
    """Beginnings of prompts, the same for all engines of a workload. Half of them begin like another one."""
    chance = random.Random(f"{seed} prefixes")
    prefixes: list[list[int]] = []
    for number in range(FAMILIES):
        begin: list[int] = []
        if prefixes and number % 2:
            other = prefixes[number - 1]
            begin = other[: chance.randrange(len(other))]
        length = chance.randrange(BLOCK // 2, 5 * BLOCK)
        prefixes.append(begin + prompt(length, seed=seed % 1_009 + 31 * number))
    return prefixes


def asks(seed: int, engine: str, count: int) -> Iterator[Ask]:
    """The requests of one engine, in their order. A turn comes some requests after the one before it."""
    chance = random.Random(f"{seed} requests of {engine}")
    prefixes = shared_prefixes(seed)
    open_turns: list[tuple[int, Ask, int]] = []
    """When the next turn is due, the last one, and how many have been."""
    for number in range(count):
        name = f"{engine}{number}"
        due = next((turn for turn in open_turns if turn[0] <= number), None)
        own = prompt(chance.randrange(1, 2 * BLOCK), seed=chance.randrange(2_000))
        if due is not None:
            open_turns.remove(due)
            _, before, turns = due
            ask = _any_ask(chance, name, own, before.salt, after=before.name)
        else:
            prefix, turns = chance.choice(prefixes), 0
            if chance.random() < 0.15:
                own = []
            ask = _any_ask(chance, name, prefix + own, chance.choice(SALTS))
        if turns + 1 < TURNS_MAX and chance.random() < 0.3:
            open_turns.append((number + chance.randrange(4, 30), ask, turns + 1))
        yield ask


def _any_ask(chance: random.Random, name: str, tokens: list[int], salt: str, after: str = "") -> Ask:
    return Ask(
        name,
        tokens,
        after,
        max_tokens=chance.choice(OUTPUT_TOKENS),
        answers=chance.choice((2, 3)) if chance.random() < 0.07 else 1,
        salt=salt,
        priority=chance.choice((0, 0, 0, 1, 2, -1)),
        prompt_logprobs=chance.random() < 0.07,
        abort_after_steps=chance.randrange(30) if chance.random() < 0.08 else -1,
    )
