"""Values on the command lines of this package."""

from __future__ import annotations

import argparse
import math
import re

_SIZES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:iB|B)?", re.IGNORECASE)


def size(text: str) -> int:
    """Bytes, as the daemon's settings are written: 320KiB, 16TiB. Raises ArgumentTypeError."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise argparse.ArgumentTypeError(f"{text}: write a size such as 320KiB or 16TiB")
    return int(float(found[1]) * _SIZES[found[2].upper()])


def fraction(text: str) -> float:
    """10% or 0.1. Raises ArgumentTypeError."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text}: write a part such as 10% or 0.1")
    return value


def count(text: str) -> int:
    """A number from 1 on. Raises ArgumentTypeError."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: write a whole number from 1 on")
    return int(text)


def positive(text: str) -> float:
    """A number above 0. Raises ArgumentTypeError."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: write a number above 0")
    return value


def price(text: str) -> float:
    """A number from 0 on. Raises ArgumentTypeError."""
    return 0.0 if text in ("0", "0.0") else positive(text)
