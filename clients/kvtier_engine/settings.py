"""Reads what a user has set for one engine, and says what is wrong with it."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvtier.connection.address import resolve
from kvtier.errors import KvtierError

from kvtier_engine.salts import read_salt


class SettingsError(ValueError):
    """A setting that cannot be used. The message names it, what was found, and what to write instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What the types and defaults of settings do not say."""

    most: Mapping[str, float] = field(default_factory=dict)
    """The largest numbers that are allowed; others are unlimited."""
    least: Mapping[str, int] = field(default_factory=dict)
    """The smallest whole numbers that are allowed, where that is not 0."""
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The values that are allowed."""
    others: Mapping[str, tuple[str, Callable[[object], bool]]] = field(default_factory=dict)
    """For settings of no simple type: what is expected, for people, and whether a value is that."""


def read_settings(kind: type[Any], given: Mapping[str, Any], where: str, rules: Rules) -> dict[str, Any]:
    """Returns the settings that were given, with the content of `salt_file` as `salt`.

    kind: a dataclass, of which every field has a default and is a setting. `socket`, `salt` and `salt_file`
        must be among them.
    where: what the user calls the settings, for messages.

    Raises SettingsError, which names every key and value that cannot be used.
    """
    fields = {each.name: each.default for each in dataclasses.fields(kind)}
    wrong = [_mistake(name, value, fields, rules) for name, value in given.items()]
    settings = dict(given)
    if not any(wrong):
        try:
            resolve(settings.get("socket") or None)
        except KvtierError as error:
            wrong.append(f"{error.field}={error.value!r}: {error.message}")
        if file := settings.get("salt_file"):
            try:
                if settings.get("salt"):
                    raise ValueError("there is a salt as well: leave one of the two out")
                settings["salt"] = read_salt(file)
            except ValueError as error:
                wrong.append(f"salt_file={file!r}: {error}")
    told = [f"{where}: {mistake}" for mistake in wrong if mistake]
    if told:
        raise SettingsError("; ".join(told))
    return settings


def is_number(value: object, most: float = math.inf) -> bool:
    """Returns whether this is a finite number from 0 to `most`."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return 0 <= value <= most and value < math.inf  # NaN is not


def _mistake(name: str, value: object, fields: Mapping[str, object], rules: Rules) -> str:
    """Returns what is wrong with a setting, and what to write; an empty text if nothing is."""
    if name not in fields:
        nearest = max(fields, key=lambda known: difflib.SequenceMatcher(None, known, name.lower()).ratio())
        return f"unknown setting {name!r}; the nearest one is {nearest!r} (given: {value!r})"
    default = fields[name]
    if name in rules.others:
        expected, is_good = rules.others[name]
        good = is_good(value)
    elif isinstance(default, bool):
        expected, good = "true or false", isinstance(value, bool)
    elif name in rules.choices:
        expected, good = f"one of {', '.join(rules.choices[name])}", value in rules.choices[name]
    elif isinstance(default, str):
        expected, good = "text", isinstance(value, str)
    elif isinstance(default, int):
        least = rules.least.get(name, 0)
        expected = f"a whole number, at least {least}"
        good = isinstance(value, int) and not isinstance(value, bool) and value >= least
    else:
        expected, most = "a number that is not negative", rules.most.get(name, math.inf)
        if name in rules.most:
            expected += f", and at most {most:g}"
        good = is_number(value, most)
    return "" if good else f"{name}={value!r}: write {expected}"
