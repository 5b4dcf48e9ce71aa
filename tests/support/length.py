"""How long campaigns of faults are. KVTIER_FAULTS is `short` (`make test`), `full` (`make test-full`) or
`long` (`make test-faults`)."""

from __future__ import annotations

import os

FORM = os.environ.get("KVTIER_FAULTS", "short")
assert FORM in ("short", "full", "long"), f"KVTIER_FAULTS={FORM}"
LONG = FORM == "long"
FULL_SHARE = 8
"""`make test-full` runs this part of the long form."""


def rounds(short: int, long: int) -> int:
    """How many rounds a campaign has that has so many in its short and in its long form."""
    return {"short": short, "full": max(short, long // FULL_SHARE), "long": long}[FORM]
