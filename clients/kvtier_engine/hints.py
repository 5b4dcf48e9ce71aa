"""KV hints: what an orchestrator asks an engine to do with the blocks of one request.

Requests of vLLM (from 0.32) and SGLang (from 0.5.23) carry them in an envelope of versioned actions, and say
nothing about what the actions mean. Here is what kvtier makes of them. Each action is answered: it is
accepted, clipped (less is done than was asked for) or refused (nothing is done). A hint never costs a request
anything, and never gets it more than the engine's settings allow.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from kvtier_engine.settings import is_number

PROTOCOL_MAJOR = "0"
ACTION_MAJOR = "1"
ACTIONS_MAX = 64
"""An envelope with more actions is refused as a whole."""
DIRECTIVES_MAX = 128
"""The most directives of one `kv.retain`."""
SECONDS_MAX = 30 * 24 * 3600.0
"""The longest duration that is taken for a number of seconds."""
PRIORITY_MAX = 100
SHOWN_CHARACTERS_MAX = 64
"""How much of a client's text is repeated in an answer."""


class HintVerdict(enum.StrEnum):
    """What became of an action."""

    ACCEPTED = "accepted"
    CLIPPED = "clipped"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of one action."""

    action_id: str
    action_type: str
    verdict: HintVerdict
    reason: str = ""
    """What is not done, and why; empty if all is."""

    def to_json(self) -> dict[str, str]:
        """Returns it as the client gets it."""
        told = {"action_id": self.action_id, "action_type": self.action_type, "answer": str(self.verdict)}
        return told | ({"reason": self.reason} if self.reason else {})


@dataclass(frozen=True, slots=True)
class Hold:
    """Blocks of a prefix are not to be evicted for a time."""

    seconds: float
    """Counted from when the request is over."""
    end_tokens: int | None = None
    """Where the prefix ends; None for all of the request, with what it generates."""


@dataclass(frozen=True, slots=True)
class Hints:
    """What is to be done for one request."""

    holds: tuple[Hold, ...] = ()
    cool_from_tokens: int | None = None
    """The blocks that the request makes from there on are the first to be evicted; None: none of them."""
    prefetch: bool = False
    """Whether its blocks are to be brought into host memory before it is its turn."""
    answers: tuple[Answer, ...] = ()
    """One for each action, in their order."""


NONE = Hints()


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """What hints may get in an engine."""

    hold_s_max: float
    """The longest hold. 0: none."""
    hold_s_max_name: str
    """The setting that says so."""
    load: bool
    """Whether blocks may be loaded for the request, also from disks and stores."""
    output: bool = True
    """Whether blocks of generated tokens can be held or cooled."""


class _Refused(Exception):
    """Nothing can be made of an action. The message says why, and what to write instead."""


@dataclass(slots=True)
class _Found:
    """What the actions that were read so far have come to."""

    prompt_tokens: int
    allowed: Allowed
    holds: list[Hold] = field(default_factory=list)
    cool_from_tokens: int | None = None
    prefetch: bool = False
    clipped: list[str] = field(default_factory=list)
    """Why the action that is being read is not done as a whole."""

    def hold(self, end_tokens: int | None, seconds: float | None) -> None:
        most = self.allowed.hold_s_max
        if not most:
            raise _Refused(f"this engine holds nothing for requests ({self.allowed.hold_s_max_name} is 0)")
        if seconds is None or seconds > most:
            self._clip(f"held for {most:g} s, which is {self.allowed.hold_s_max_name}")
        if not self.allowed.output and (end_tokens is None or end_tokens > self.prompt_tokens):
            self._clip("of the prompt only, not of generated tokens")
            end_tokens = self.prompt_tokens
        least = most if seconds is None else min(seconds, most)
        if least:
            self.holds.append(Hold(least, end_tokens))

    def cool(self, start_tokens: int) -> None:
        if not self.allowed.output and start_tokens >= self.prompt_tokens:
            raise _Refused("blocks of generated tokens cannot be released on their own in this engine")
        known = self.cool_from_tokens
        self.cool_from_tokens = start_tokens if known is None else min(known, start_tokens)

    def _clip(self, reason: str) -> None:
        if reason not in self.clipped:
            self.clipped.append(reason)


def read(envelope: Any, prompt_tokens: int, allowed: Allowed) -> Hints:
    """Returns what to do for a request.

    envelope: vLLM's or SGLang's KvHintsEnvelope, the same as a JSON object, or None.
    prompt_tokens: how long the request's prompt is.
    """
    if envelope is None:
        return NONE
    try:
        version, actions = str(_get(envelope, "protocol_version")), list(_get(envelope, "actions"))
        named = [
            (str(_get(each, "action_id")), str(_get(each, "action_type")), each)
            for each in actions[: ACTIONS_MAX + 1]
        ]
    except Exception as error:
        return Hints(
            answers=(Answer("", "", HintVerdict.REFUSED, f"not an envelope of hints: {_shown(error)}"),)
        )
    if len(named) > ACTIONS_MAX:
        reason = f"{len(actions)} actions: at most {ACTIONS_MAX} are read"
        return Hints(answers=(Answer("", "", HintVerdict.REFUSED, reason),))
    if version.split(".")[0] != PROTOCOL_MAJOR:
        reason = f"protocol_version {_shown(version)} is not known: write 0.1"
        return Hints(answers=tuple(_answer(each, HintVerdict.REFUSED, reason) for each in named))
    found = _Found(prompt_tokens, allowed)
    answers = tuple(_answer(each, *_read_action(found, each[2])) for each in named)
    return Hints(tuple(found.holds), found.cool_from_tokens, found.prefetch, answers)


def _get(structure: Any, name: str) -> Any:
    return structure[name] if isinstance(structure, Mapping) else getattr(structure, name)


def _answer(named: tuple[str, str, Any], verdict: HintVerdict, reason: str) -> Answer:
    action_id, action_type, _ = named
    return Answer(action_id[:SHOWN_CHARACTERS_MAX], action_type[:SHOWN_CHARACTERS_MAX], verdict, reason)


def _read_action(found: _Found, action: Any) -> tuple[HintVerdict, str]:
    found.clipped = []
    try:
        action_type = _get(action, "action_type")
        reader = _READERS.get(action_type)
        if reader is None:
            raise _Refused(_why_not(action_type))
        version = str(_get(action, "action_version"))
        if version.split(".")[0] != ACTION_MAJOR:
            raise _Refused(f"action_version {_shown(version)} is not known: write 1.0")
        payload = _get(action, "payload")
        if not isinstance(payload, Mapping):
            raise _Refused(f"payload {_shown(payload)}: write an object")
        reader(found, payload)
    except _Refused as error:
        return HintVerdict.REFUSED, str(error)
    except Exception as error:
        return HintVerdict.REFUSED, f"cannot be read: {_shown(error)}"
    return (HintVerdict.CLIPPED, "; ".join(found.clipped)) if found.clipped else (HintVerdict.ACCEPTED, "")


def _pin(found: _Found, payload: Mapping[str, Any]) -> None:
    _check_fields(payload, ("duration", "end"))
    found.hold(_end(payload, 0), _duration(payload))


def _demote(found: _Found, payload: Mapping[str, Any]) -> None:
    if "session_id" in payload:
        raise _Refused("session_id: kvtier knows requests and no sessions; send the hint with the last one")
    _check_fields(payload, ("start",))
    found.cool(_start(payload))


def _prefetch(found: _Found, payload: Mapping[str, Any]) -> None:
    _check_fields(payload, ())
    if not found.allowed.load:
        raise _Refused("nothing is loaded from disks or stores for this request")
    found.prefetch = True


def _retain(found: _Found, payload: Mapping[str, Any]) -> None:
    _check_fields(payload, ("scope", "directives"))
    directives = payload.get("directives")
    if not isinstance(directives, Sequence) or isinstance(directives, str):
        raise _Refused(f"directives {_shown(directives)}: write a list")
    if len(directives) > DIRECTIVES_MAX:
        raise _Refused(f"{len(directives)} directives: at most {DIRECTIVES_MAX} are read")
    if not directives:
        return
    wishes = [_directive(found, each) for each in directives]  # all of them or none
    reasons = []
    for wish in wishes:
        try:
            wish()
        except _Refused as error:
            reasons.append(str(error))
    if len(reasons) == len(wishes):
        raise _Refused(reasons[0])
    found.clipped += dict.fromkeys(reasons)


def _directive(found: _Found, directive: Any) -> Callable[[], None]:
    if not isinstance(directive, Mapping):
        raise _Refused(f"directive {_shown(directive)}: write an object")
    _check_fields(directive, ("start", "end", "priority", "duration", "covers_output"))
    priority = directive.get("priority")
    if not _is_whole(priority) or not 0 <= priority <= PRIORITY_MAX:
        raise _Refused(f"priority {_shown(priority)}: write a whole number from 0 to {PRIORITY_MAX}")
    output = directive.get("covers_output", False)
    if not isinstance(output, bool):
        raise _Refused(f"covers_output {_shown(output)}: write true or false")
    if output and ("start" in directive or "end" in directive):
        raise _Refused("covers_output goes with neither start nor end")
    start = found.prompt_tokens if output else _start(directive)
    end, seconds = _end(directive, start), _duration(directive)
    if not priority:
        return lambda: found.cool(start)
    # A block is of use only with those before it, so these are held too.
    return lambda: found.hold(end, seconds)


_READERS: dict[str, Callable[[_Found, Mapping[str, Any]], None]] = {
    "kv.pin": _pin,
    "kv.retain": _retain,
    "kv.demote": _demote,
    "kv.prefetch": _prefetch,
}


def _why_not(action_type: str) -> str:
    if action_type in ("kv.fetch", "kv.share"):
        return "kvtier takes no blocks from another engine's endpoint: hosts share through a store"
    return f"unknown action_type: there are {', '.join(_READERS)}"


def _check_fields(payload: Mapping[str, Any], known: Sequence[str]) -> None:
    # A field that is not known may say that something else is meant.
    for name in payload:
        if name not in known:
            there_are = f"there are {', '.join(known)}" if known else "there are none"
            raise _Refused(f"unknown field {_shown(name)}: {there_are}")


def _start(payload: Mapping[str, Any]) -> int:
    start = payload.get("start", 0)
    if not _is_whole(start) or start < 0:
        raise _Refused(f"start {_shown(start)}: write a whole number of tokens that is not negative")
    return int(start)


def _end(payload: Mapping[str, Any], start: int) -> int | None:
    end = payload.get("end")
    if end is not None and (not _is_whole(end) or end <= start):
        raise _Refused(f"end {_shown(end)}: write null or a whole number of tokens greater than {start}")
    return None if end is None else int(end)


def _duration(payload: Mapping[str, Any]) -> float | None:
    duration = payload.get("duration")
    if duration is not None and not is_number(duration, SECONDS_MAX):
        raise _Refused(f"duration {_shown(duration)}: write null or seconds from 0 to {SECONDS_MAX:.0f}")
    return None if duration is None else float(duration)


def _is_whole(value: Any) -> TypeGuard[int | float]:
    if isinstance(value, float):  # JSON has no other numbers for some clients
        return value.is_integer() and abs(value) < math.ldexp(1, 53)
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: object) -> str:
    text = str(value) if isinstance(value, Exception) else repr(value)
    return text if len(text) <= SHOWN_CHARACTERS_MAX else text[:SHOWN_CHARACTERS_MAX] + "…"
