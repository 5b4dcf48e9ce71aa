"""Why kvtier loses a figure where it does, as far as that was measured, and what winning it would take."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple


class Reason(NamedTuple):
    """Why figures of one kind are lost."""

    figures: str
    """A regular expression of their rows' names."""
    profile: str
    """What the time goes into."""
    would_take: str


NOT_KNOWN = "Not known: nobody has profiled it yet."
REASONS = (
    Reason(
        r"lookup_(1|64|1024)_p\d+_us",
        "Of about 500 µs, 300 are gRPC's, and most of the rest is Python on both sides. Each lookup also"
        " leases what it found, and gives it back. Mooncake sends one message between two C++ programs, which"
        " asks whether keys exist, and holds nothing that has to be given back.",
        "A transport of our own beside gRPC, which would save a real engine 2 to 3 % of the time to its first"
        " token at most. What its scheduler asks most, whether a block is missing, needs no message as it"
        " is.",
    ),
    Reason(
        "restored_2944_ttft_ms",
        "These tokens end with a block. kvtier does not load that one, and the engine computes all its"
        " tokens (32 here). LMCache loads it, and has one token computed.",
        "Loading the last block too. The result would no longer be, bit for bit, what the engine's own cache"
        " gives, because how many tokens are computed at once decides the last bits.",
    ),
    Reason(
        r"store_\w+_whole_gb_per_s",
        "Some repetitions take two to five times as long as the others: the copying thread needs that much"
        " more processor time for the same bytes, without a page fault and without waiting for a core. The"
        " engine's own writing of the content, right before, is as much slower, and the load right after is"
        " not. Peers have such repetitions too. The cause is not known.",
        "To know the cause, which needs a machine that lets its processors' counters be read.",
    ),
    Reason(
        r"daemon_kill_serving_s",
        "The interpreter and the imports of kvtierd take about half a second; then it checks the records of"
        " what the pool holds. Mooncake's servers are C++ programs, and begin with nothing.",
        "A front in another language than Python.",
    ),
)


def reasons_of(rows: Iterable[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """Returns, for what is lost in these rows: which figures, why, and what it would take. Figures that are
    lost for one reason are told together."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row["verdict"] == "lost":
            known = next((each for each in REASONS if re.fullmatch(each.figures, row["name"])), None)
            why = (NOT_KNOWN, "") if known is None else (known.profile, known.would_take)
            found.setdefault(why, []).append(row["title"])
    return [("; ".join(titles), *why) for why, titles in found.items()]
