"""Requests with images, sounds or videos.

Where such an input stands in a prompt, SGLang has numbers beyond any vocabulary, which it makes of 64 bits of
a hash of what its processor made of the input. They do not say everything on which the pages depend: two
blank images of other shapes have the same hash, and their tokens other positions. So nothing is loaded from
the first of these numbers on.
"""

from __future__ import annotations

from array import array

import torch


def text_tokens(tokens: array[int], first_media: int, has_media: bool) -> int:
    """Returns how many tokens at the beginning of a prompt are text.

    tokens: the prompt, as 64-bit numbers.
    first_media: the least number that stands for a part of an image, a sound or a video.
    has_media: whether the request has some. If it has and none is found among the tokens, nothing counts as
        text, because it may be anywhere.
    """
    if tokens:
        found = (torch.frombuffer(tokens, dtype=torch.int64) >= first_media).nonzero()
        if len(found):
            return int(found[0])
    return 0 if has_media else len(tokens)
