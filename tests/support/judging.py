"""Whether what engines answered is right: the same tokens as an engine that caches nothing, and the same log
probabilities, as far as two right engines agree about them.

How far that is, another engine tells (the control), which caches prefixes by itself and has no connector: the
same tokens in other batches and pieces round otherwise. Where the two likeliest tokens are nearer to each
other than that, either is right, and what follows it cannot be compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Outcome = Mapping[str, Any]
"""Of one request, as `workload_engine` tells it."""
SLACK = 5.0
"""So many times as large as the control's may differences be: both are the largest of thousands, a few steps
of bfloat16 each. One wrong block made one of 25 times the control's."""
SAME = 1e-5
"""A difference of log probabilities that is none: some steps between neighbours among numbers of four bytes.
For a control that is exact, as it is where kernels compute each row alike in every batch."""
TIES_MORE = 2
"""Near ties that may fall otherwise beyond twice as many as the control's."""


@dataclass
class Verdict:
    """What was found out about the answers of one or more engines, against those of the oracle."""

    requests: int = 0
    tokens: int = 0
    """Compared."""
    differences: list[float] = field(default_factory=list)
    """Of log probabilities: the largest of each position."""
    ties: list[tuple[str, float]] = field(default_factory=list)
    """First tokens that differ: where, and how much likelier the oracle's own is than the other."""
    wrong: list[str] = field(default_factory=list)
    """What no rounding explains: answers that are missing or too short."""
    worst: tuple[float, str] = (0.0, "")
    """The largest difference, and where."""

    @property
    def largest(self) -> float:
        return max(self.differences, default=0.0)

    def quantile(self, part: float) -> float:
        """0.5 is the median."""
        if not self.differences:
            return 0.0
        ordered = sorted(self.differences)
        return ordered[min(len(ordered) - 1, int(part * len(ordered)))]

    def text(self) -> str:
        """In one line, for people."""
        spread = ", ".join(f"{part:.1%} {self.quantile(part):.2g}" for part in (0.5, 0.9, 0.99, 0.999))
        where = f" ({self.worst[1]})" if self.worst[1] else ""
        margins = f", margins {[f'{margin:.2g}' for _, margin in self.ties[:8]]}" if self.ties else ""
        return (
            f"{self.requests:,} requests, {self.tokens:,} tokens: differences of log probabilities {spread},"
            f" largest {self.largest:.2g}{where}; {len(self.ties)} tokens differ{margins}"
        )


def compare(oracle: Mapping[str, Outcome], found: Mapping[str, Outcome]) -> Verdict:
    """Every answer in `found`, those of aborted requests as far as they came, against the oracle's."""
    verdict = Verdict()
    for name, outcome in found.items():
        verdict.requests += 1
        right = oracle[name]
        assert right["prompt"] == outcome["prompt"], name
        wanted = right["answers"]["0"]
        if not outcome["aborted"]:
            _complete(verdict, name, right, outcome)
        for index, answer in outcome["answers"].items():
            _compare_answer(verdict, f"{name}.{index}", wanted, answer)
        if outcome["prompt_logprobs"] and right["prompt_logprobs"]:
            pairs = zip(right["prompt_logprobs"], outcome["prompt_logprobs"], strict=True)
            for position, (one, other) in enumerate(pairs):
                _compare_position(verdict, f"{name}, token {position} of its prompt", one, other)
    return verdict


def mistakes(judged: Verdict, control: Verdict) -> list[str]:
    """What is not right about the judged engines' answers; nothing if all is."""
    bound = max(SLACK * control.largest, SAME)
    told = list(judged.wrong)
    if judged.largest > bound:
        told.append(
            f"a log probability differs by {judged.largest:.3g} in {judged.worst[1]}; {bound:.3g} may be"
        )
    told += [
        f"another token in {where}, though the oracle's is likelier by {margin:.3g}; {bound:.3g} may be"
        for where, margin in judged.ties
        if margin > bound
    ]
    allowed = 2 * len(control.ties) + TIES_MORE
    if len(judged.ties) > allowed:
        told.append(f"{len(judged.ties)} near ties fell otherwise; by the control {allowed} may")
    # Much of it a little wrong: no single difference would tell.
    for part in (0.5, 0.9):
        limit = max(SLACK * control.quantile(part), SAME)
        if judged.quantile(part) > limit:
            told.append(f"{part:.0%} of the differences: {judged.quantile(part):.3g}; {limit:.3g} may be")
    return told


def _complete(verdict: Verdict, name: str, right: Outcome, outcome: Outcome) -> None:
    lengths = {index: len(answer["tokens"]) for index, answer in outcome["answers"].items()}
    wanted = {str(index): outcome["max_tokens"] for index in range(outcome["wanted_answers"])}
    if lengths != wanted:
        verdict.wrong.append(f"{name}: answers of {lengths} tokens instead of {wanted}")
    reasons = {answer["finish_reason"] for answer in outcome["answers"].values()}
    if reasons != {"length"}:
        verdict.wrong.append(f"{name}: ended with {reasons}")
    if bool(outcome["prompt_logprobs"]) != outcome["wants_prompt_logprobs"]:
        verdict.wrong.append(f"{name}: log probabilities of the prompt missing, or too many")
    elif outcome["prompt_logprobs"] and len(outcome["prompt_logprobs"]) != len(right["prompt"]):
        verdict.wrong.append(f"{name}: log probabilities of {len(outcome['prompt_logprobs'])} prompt tokens")


def _compare_answer(verdict: Verdict, where: str, right: Outcome, answer: Outcome) -> None:
    for position, token in enumerate(answer["tokens"]):
        if position >= len(right["tokens"]):
            verdict.wrong.append(f"{where}: more tokens than were asked for")
            return
        verdict.tokens += 1
        at = f"{where}, token {position}"
        _compare_position(verdict, at, right["logprobs"][position], answer["logprobs"][position])
        own = right["tokens"][position]
        if token != own:
            verdict.ties.append((at, _margin(right, answer, position)))
            return


def _margin(right: Outcome, answer: Outcome, position: int) -> float:
    """How much likelier the oracle's own token is than the other one. Of the other one the oracle tells only
    if it is among its likeliest; more tokens than these may be equally likely, so else the judged engine says
    how likely it is."""
    likely = right["logprobs"][position]
    own, other = (str(each["tokens"][position]) for each in (right, answer))
    if other in likely:
        return float(likely[own] - likely[other])
    at_least = likely[own] - min(likely.values())
    told = answer["logprobs"][position].get(other)
    return math.inf if told is None else max(at_least, _distance(likely[own], told))


def _compare_position(
    verdict: Verdict, where: str, one: Mapping[str, float] | None, other: Mapping[str, float] | None
) -> None:
    """Log probabilities by token. Of a prompt's first token there are none."""
    if one is None or other is None:
        if one is not other:
            verdict.wrong.append(f"{where}: no log probability")
        return
    common = one.keys() & other.keys()
    difference = max((_distance(one[token], other[token]) for token in common), default=math.inf)
    verdict.differences.append(difference)
    if difference > verdict.worst[0]:
        verdict.worst = (difference, where)


def _distance(one: float, other: float) -> float:
    if one == other:
        return 0.0
    distance = abs(one - other)
    return math.inf if math.isnan(distance) else distance
