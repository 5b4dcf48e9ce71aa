"""Logs of the programs that tests start: wanted when a test has failed, and gone with its folder."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

LINES_SHOWN = 60
_kept: weakref.WeakKeyDictionary[Any, tuple[str, Callable[[Any], str]]] = weakref.WeakKeyDictionary()


def keep_log(owner: Any, title: str, read: Callable[[Any], str]) -> None:
    """As long as `owner` exists, `read(owner)` is shown if a test fails. It must not refer to the owner by
    itself."""
    _kept[owner] = title, read


def kept_logs() -> dict[str, str]:
    """The ends of the logs of all programs that this process has started and still knows, by title."""
    return {
        title: "".join(read(owner).splitlines(True)[-LINES_SHOWN:])
        for owner, (title, read) in list(_kept.items())
    }
