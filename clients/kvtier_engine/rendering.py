"""Renders values of settings as text: equal texts exactly for equal values, in every process. Nothing here
knows which engine it is."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

TEXT_BYTES_MAX = 1_024


class Unnameable(Exception):
    """This value has no text that is the same in every process."""


def text_of(value: Any) -> str:
    """Returns a value as text, or its digest if that is too long for a namespace's field.
    Raises Unnameable."""
    text = _text(value)
    return text if len(text.encode()) <= TEXT_BYTES_MAX and text.isprintable() else digest_of(value)


def digest_of(value: Any) -> str:
    """Returns a digest of a setting's value, for values that must not be shown. Raises Unnameable."""
    return f"sha256:{hashlib.sha256(_text(value).encode()).hexdigest()}"


def _content_of(name: str) -> str:
    """Returns the digest of a file's content if `name` is one, because the content counts as well."""
    if not ("/" in name or "." in name) or not os.path.isfile(name):
        return ""
    try:
        with open(name, "rb") as file:
            return f" sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
    except OSError as error:
        raise Unnameable(f"a file that cannot be read ({error.strerror})") from error


def _text(value: Any) -> str:
    plain = _plain(value)
    return plain if isinstance(plain, str) else json.dumps(plain, sort_keys=True)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return value + _content_of(value)
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, PurePath):
        return _plain(str(value))
    if isinstance(value, Mapping):
        return {str(_plain(key)): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, (set, frozenset)):
        return sorted((_plain(each) for each in value), key=repr)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if type(value).__module__ == "torch":  # a dtype or a device
        return str(value)
    raise Unnameable(f"a {type(value).__module__}.{type(value).__qualname__}")
