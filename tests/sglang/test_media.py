"""What of a prompt with images is looked for."""

from __future__ import annotations

from array import array

import pytest
from kvtier_sglang.media import text_tokens

pytestmark = pytest.mark.sglang
MEDIA = 1_000_000


@pytest.mark.parametrize(
    ("tokens", "has_media", "count"),
    [
        ([], False, 0),
        ([], True, 0),
        ([5, 6, 7], False, 3),
        ([5, 6, 7], True, 0),
        ([5, 6, MEDIA + 2**62, MEDIA + 3, 8], True, 2),
        ([5, 6, MEDIA, 8], False, 2),
        ([MEDIA - 1, 7], False, 2),
        ([MEDIA + 1, 7], True, 0),
    ],
)
def test_only_text_before_the_first_image_counts(tokens: list[int], has_media: bool, count: int) -> None:
    assert text_tokens(array("q", tokens), MEDIA, has_media) == count
