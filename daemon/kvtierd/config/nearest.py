"""Finds the known name that is most like an unknown one, for error messages."""

import difflib
from collections.abc import Collection, Iterable

CLEAR_RATIO = 0.85
"""The ratio of difflib from which a setting's name is taken for a misspelling, whatever its section is."""

ALIKE_RATIO = 0.6
"""The ratio of difflib from which two words are alike."""


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name that is most like `name`, ignoring case. `known` is not empty."""

    def likeness(candidate: str) -> float:
        return difflib.SequenceMatcher(None, candidate.lower(), name.lower()).ratio()

    return max(known, key=likeness)


def nearest_keys(key: str, known: Collection[str]) -> list[str]:
    """The settings (`pool.size`) that a key is most like. A name that is right, or nearly so, but in another
    section or in none, is found as well; if several sections have it, all of them are returned."""
    section, dot, name = key.rpartition(".")
    tails = {each: each.partition(".")[2] for each in known}
    if any(each.partition(".")[0] == section for each in known):
        near = nearest(key, known)
        if difflib.SequenceMatcher(None, tails[near], name).ratio() >= CLEAR_RATIO:
            return [near]
    tail = nearest(name, tails.values())
    if difflib.SequenceMatcher(None, tail, name.lower()).ratio() < CLEAR_RATIO:
        return [nearest(key.replace("_", ".") if not dot else key, known)]
    found = [each for each in known if tails[each] == tail]
    return found if not dot else [nearest(key, found)]


def nearest_sections(section: str, names: Iterable[str], known: Collection[str]) -> list[str]:
    """The sections that an unknown one is most like, by its own name, or else by the settings in it."""
    every = dict.fromkeys(key.partition(".")[0] for key in known)
    near = nearest(section, every)
    if difflib.SequenceMatcher(None, near, section.lower()).ratio() >= ALIKE_RATIO:
        return [near]
    meant = (key for name in names for key in nearest_keys(name, known))
    return list(dict.fromkeys(key.partition(".")[0] for key in meant)) or [near]
