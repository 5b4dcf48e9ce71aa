"""What kvtier has to know of a request, and SGLang does not tell it: a linker only hears a request's id.

So the wrapper's `match`, which has the request, is wrapped here: it runs for each request before any of its
pages is looked up or stored.
"""

from __future__ import annotations

import functools
from array import array
from typing import Any

from sglang.srt.managers.schedule_batch import MM_PAD_SHIFT_VALUE
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinkerWrapper
from sglang.srt.mem_cache.utils import get_storage_hash_str

from kvtier_sglang.media import text_tokens

ANSWERS_KEY = "kvtier_kv_hints"
"""The key in the `meta_info` of a request's output for what became of its KV hints."""


def listen(linker: type[Any]) -> None:
    """Has linkers of this class told of requests with KV hints, by their method `hinted`, and asked what of a
    request may be looked up, by their method `text_of`. Raises AttributeError if this SGLang has no such
    place."""
    call = UnifiedCacheLinkerWrapper.match
    if hasattr(call, "_kvtier"):
        return

    @functools.wraps(call)
    def match(wrapper: Any, key: Any, req: Any, result: Any) -> Any:
        if not isinstance(wrapper.cache_linker, linker):
            return call(wrapper, key, req, result)
        envelope, told = getattr(req, "kv_hints", None), req.customized_info
        if envelope is not None and ANSWERS_KEY not in (told or ()):
            page = wrapper.cache.page_size
            answers = wrapper.cache_linker.hinted(
                envelope, len(req.origin_input_ids), lambda: _hashes(key, page)
            )
            # One element, because SGLang reads a value for each generated token.
            req.customized_info = (told or {}) | {ANSWERS_KEY: [[each.to_json() for each in answers]]}
        return call(wrapper, wrapper.cache_linker.text_of(key, req), req, result)

    match._kvtier = True  # type: ignore[attr-defined]
    UnifiedCacheLinkerWrapper.match = match


def text_of(key: Any, req: Any) -> Any:
    """Returns the part of a request's RadixKey that may be looked up."""
    tokens = array("q", key.raw_token_ids())
    count = text_tokens(tokens, MM_PAD_SHIFT_VALUE, getattr(req, "multimodal_inputs", None) is not None)
    return key if count == len(tokens) else key[:count]


def _hashes(key: Any, page: int) -> list[bytes]:
    tokens = len(key) // page * page
    if not tokens:
        return []
    return [bytes.fromhex(each) for each in get_storage_hash_str(key[:tokens], None, page_size=page)]
