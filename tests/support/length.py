"""How long campaigns and simulations are. KVTIER_LENGTH is `short` (`make test`), `full` (`make test-full`)
or `long` (`make test-faults`)."""

from __future__ import annotations

import os
from typing import Any

import pytest

FORM = os.environ.get("KVTIER_LENGTH", "short")
assert FORM in ("short", "full", "long"), f"KVTIER_LENGTH={FORM}"
LONG = FORM == "long"
FULL_SHARE = 4
"""`make test-full` runs this part of the long form."""


def rounds(short: int, long: int) -> int:
    """How many rounds a campaign has that has so many in its short and in its long form."""
    return {"short": short, "full": max(short, long // FULL_SHARE), "long": long}[FORM]


def repeats(seeds: range) -> list[Any]:
    """The seeds as parameters of a test. `make test` runs the first one only."""
    return [pytest.param(seed, marks=[pytest.mark.long] * (seed != seeds[0])) for seed in seeds]
