"""What the blocks of an engine must hold."""

from __future__ import annotations

import random

from tests.gpu.parts.child import Answer


def shuffled(count: int, *, of: int = 64) -> list[int]:
    return random.sample(range(of), count)


def right(answer: Answer, hits: int) -> bool:
    """Whether all of it was loaded, with the right bytes, and nothing else was touched."""
    assert answer.fields["hits"] == hits, answer.fields
    assert answer["done"], answer["said"]
    assert answer["wrong"] == []
    assert answer["touched"] == 0
    return True
