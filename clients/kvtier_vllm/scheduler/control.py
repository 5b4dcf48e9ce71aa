"""What is stored and loaded of a request: the engine's settings, narrowed by the request's own wishes.

A request states its wishes in vLLM's `kv_transfer_params`, under the key "kvtier", beside those of other
connectors: `{"kvtier": {"store": false, "max_load_tokens": 4096}}`. It may ask for less than the engine's
settings allow, never for more, except to have its blocks held, within the engine's bound. It never fails
because of what it asks for.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from kvtier.retention import SECONDS_MAX
from kvtier_engine import hints
from kvtier_engine.hints import Allowed, Hints, HintVerdict, Hold
from kvtier_engine.settings import is_number

from kvtier_vllm.config import TIERS_EXPECTED, ConnectorConfig, are_tiers
from kvtier_vllm.scheduler.retaining import ANYHOW, DISK, PRIORITIES, Keeping, Kept

PARAMS_KEY = "kvtier"
"""The key in `kv_transfer_params` for what is meant for this connector."""
ANSWERS_KEY = "kvtier_kv_hints"
"""The key in the `kv_transfer_params` of a request's output for what became of its KV hints."""
WARNED_MAX = 64
"""The most mistakes that are warned of, each once. There is a limit because clients choose their text."""
SHOWN_CHARACTERS_MAX = 64
"""How much of a name or value is shown in a warning."""

_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True, slots=True)
class Control:
    """What holds for one request. Tokens count from its beginning."""

    store: bool
    load: bool
    store_end_tokens: int | None
    """Blocks that end later are not stored; None: all are."""
    load_end_tokens: int | None
    """Blocks that end later are not loaded; None: all are."""
    keeping: Keeping = ANYHOW
    """How its blocks are kept."""
    prefetch: bool = False
    """Whether its blocks are brought into host memory as soon as it arrives."""
    answers: tuple[hints.Answer, ...] = ()
    """What became of the KV hints that it came with."""


class Controls:
    """Reads the wishes of requests. Called from the scheduler's thread."""

    def __init__(self, config: ConnectorConfig, log: logging.Logger) -> None:
        self._config = config
        self._log = log
        self._warned: set[str] = set()
        self.answered = dict.fromkeys(HintVerdict, 0)
        """How many KV hints were answered, by answer."""
        self._usual: Control | None = None
        """What holds for requests that wish for nothing, if that does not depend on their prompts."""

    def of(self, request: Any) -> Control:
        """Returns what holds for a request of vLLM. Unknown names and unusable values are ignored, with one
        warning for each kind of mistake."""
        wishes = self._wishes(getattr(request, "kv_transfer_params", None))
        config = self._config
        hinted = getattr(request, "kv_hints", None) is not None  # from vLLM 0.32 on
        if not wishes and not hinted and config.store_tokens != "prompt":
            if self._usual is None:
                self._usual = self._made(request, wishes)
            return self._usual
        return self._made(request, wishes)

    def answers(self, request: Any) -> dict[str, Any] | None:
        """Returns what the client of a request that is over is told, and counts it: what became of its KV
        hints. None if it came with none."""
        answers = self.of(request).answers
        for answer in answers:
            self.answered[answer.verdict] += 1
        return {ANSWERS_KEY: [answer.to_json() for answer in answers]} if answers else None

    def _made(self, request: Any, wishes: Mapping[str, Any]) -> Control:
        config = self._config
        store_end = _least(config.max_store_tokens or None, wishes.get("max_store_tokens"))
        if "prompt" in (config.store_tokens, wishes.get("store_tokens")):
            store_end = _least(store_end, request.num_prompt_tokens)
        load = config.load and wishes.get("load", True)
        given = self._hints(request, wishes, load=load)
        return Control(
            store=config.store and wishes.get("store", True),
            load=load,
            store_end_tokens=store_end,
            load_end_tokens=_least(config.max_load_tokens or None, wishes.get("max_load_tokens")),
            keeping=self._keeping(wishes, given),
            prefetch=given.prefetch,
            answers=given.answers,
        )

    def _hints(self, request: Any, wishes: Mapping[str, Any], *, load: bool) -> Hints:
        envelope = getattr(request, "kv_hints", None)
        if envelope is None:
            envelope = wishes.get("kv_hints")
        if envelope is None:
            return hints.NONE
        most = max(self._config.pin_s, self._config.max_pin_s)
        lower = load and self._reads_disks(wishes)
        allowed = Allowed(hold_s_max=most, hold_s_max_name="max_pin_s", load=lower)
        return hints.read(envelope, request.num_prompt_tokens, allowed)

    def _reads_disks(self, wishes: Mapping[str, Any]) -> bool:
        return DISK in self._config.tiers and DISK in wishes.get("tiers", self._config.tiers)

    def _keeping(self, wishes: Mapping[str, Any], given: Hints) -> Keeping:
        """What a hint says goes before what the request itself wishes for."""
        config = self._config
        ttl_s = _least(config.ttl_s or None, wishes.get("ttl_s") or None)
        on_disks = self._reads_disks(wishes)
        cool_from = given.cool_from_tokens
        if cool_from is None and wishes.get("priority", config.priority) == "low":
            cool_from = 0
        hold_s = self._hold_s(wishes)
        return Keeping(
            kept=Kept(on_disks, math.inf if ttl_s is None else ttl_s),
            host_only=not on_disks,
            holds=given.holds or ((Hold(hold_s),) if hold_s else ()),
            cool_from_tokens=cool_from,
        )

    def _hold_s(self, wishes: Mapping[str, Any]) -> float:
        """Returns how long to hold. No bound is below what the engine holds anyway, which a request that asks
        for nothing gets."""
        config = self._config
        most = max(config.pin_s, config.max_pin_s)
        if "pin_s" in wishes:
            return min(float(wishes["pin_s"]), most)
        priority = wishes.get("priority", config.priority)
        if priority == "high":
            return most if "priority" in wishes else config.pin_s or most
        return 0.0 if priority == "low" else config.pin_s

    def _wishes(self, params: object) -> dict[str, Any]:
        if not isinstance(params, Mapping) or params.get(PARAMS_KEY) is None:
            return {}
        given = params[PARAMS_KEY]
        if not isinstance(given, Mapping):
            self._warn(PARAMS_KEY, f"{_shown(given)} is left out: write an object")
            return {}
        good: dict[str, Any] = {}
        for name, value in given.items():
            if name not in _FIELDS:
                self._warn(
                    f"{PARAMS_KEY}.{_shown(name)}", f"is unknown and left out: there are {', '.join(_FIELDS)}"
                )
            elif not _usable(name, value):
                self._warn(f"{PARAMS_KEY}.{name}", f"{_shown(value)} is left out: write {_FIELDS[name]}")
            else:
                good[name] = value
        return good

    def _warn(self, name: str, text: str) -> None:
        if name in self._warned or len(self._warned) >= WARNED_MAX:
            return
        self._warned.add(name)
        self._log.warning("kvtier: kv_transfer_params of a request: %s %s", name, text)


_FIELDS = {
    "store": "true or false",
    "load": "true or false",
    "store_tokens": 'one of "all", "prompt"',
    "max_store_tokens": "a whole number that is not negative",
    "max_load_tokens": "a whole number that is not negative",
    "priority": f"one of {', '.join(PRIORITIES)}",
    "pin_s": f"a number of seconds from 0 to {SECONDS_MAX:g}",
    "ttl_s": f"a number of seconds from 0 to {SECONDS_MAX:g}",
    "tiers": TIERS_EXPECTED,
    "kv_hints": "an envelope of KV hints, as an object",
}
"""What a request may ask for, and how it is written. A cap of 0 means none of its tokens."""


def _usable(name: str, value: object) -> bool:
    if name in ("store", "load"):
        return isinstance(value, bool)
    if name == "store_tokens":
        return value in ("all", "prompt")
    if name == "priority":
        return value in PRIORITIES
    if name in ("pin_s", "ttl_s"):
        return is_number(value, SECONDS_MAX)
    if name == "tiers":
        return are_tiers(value)
    if name == "kv_hints":
        return isinstance(value, Mapping)
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _least(*bounds: _Number | None) -> _Number | None:
    return min((bound for bound in bounds if bound is not None), default=None)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS_MAX else text[:SHOWN_CHARACTERS_MAX] + "…"
