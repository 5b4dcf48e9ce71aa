"""KV hints of requests, which SGLang carries as far as the scheduler's request.

A linker only hears a request's id. So the wrapper's `match`, which has the request, is wrapped here: it runs
for each request before any of its pages is looked up or stored.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from kvtier import Client, GroupQuery
from kvtier_engine.hints import Allowed, Answer, Hints, read
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinkerWrapper
from sglang.srt.mem_cache.utils import get_storage_hash_str

from kvtier_sglang.wishes import Wishes

ANSWERS_KEY = "kvtier_kv_hints"
"""The key in the `meta_info` of a request's output for what became of its KV hints."""


Pages = Callable[[], list[bytes]]
"""Returns the hashes of a request's pages, from its beginning."""


class HintedRequests:
    """Does what is asked for requests of one engine process."""

    def __init__(
        self, allowed: Allowed, queries: Sequence[GroupQuery], page_tokens: int, wishes: Wishes
    ) -> None:
        self._allowed, self._queries = allowed, queries
        self._page_tokens = page_tokens
        self._wishes = wishes

    def take(self, client: Client | None, envelope: Any, prompt_tokens: int, pages: Pages) -> list[Answer]:
        """Does what an envelope asks for, as far as the daemon can be told, and returns the answers."""
        hints = read(envelope, prompt_tokens, self._allowed)
        if client is not None and (hints.holds or hints.prefetch or hints.cool_from_tokens is not None):
            self._do(client, hints, pages())
        return list(hints.answers)

    def _do(self, client: Client, hints: Hints, hashes: list[bytes]) -> None:
        known = client.known_run(hashes, counted=False) or 0
        if hints.prefetch and hashes:
            client.start_prefetch(hashes, self._queries)
        for hold in hints.holds:
            end = None if hold.end_tokens is None else -(-hold.end_tokens // self._page_tokens)
            held = hashes[:end]
            if held:
                client.touch(held, self._queries, hold_s=hold.seconds)
                self._wishes.hold(held[known:], hold.seconds)
        if hints.cool_from_tokens is not None:
            first = -(-hints.cool_from_tokens // self._page_tokens)
            self._wishes.cool(hashes[max(first, known) :])


def listen(linker: type[Any]) -> None:
    """Has linkers of this class told of requests with hints, by their method `hinted`. Raises AttributeError
    if this SGLang has no such place."""
    call = UnifiedCacheLinkerWrapper.match
    if hasattr(call, "_kvtier"):
        return

    @functools.wraps(call)
    def match(wrapper: Any, key: Any, req: Any, result: Any) -> Any:
        envelope = getattr(req, "kv_hints", None)
        told = req.customized_info
        if (
            envelope is not None
            and isinstance(wrapper.cache_linker, linker)
            and ANSWERS_KEY not in (told or ())
        ):
            page = wrapper.cache.page_size
            answers = wrapper.cache_linker.hinted(
                envelope, len(req.origin_input_ids), lambda: _hashes(key, page)
            )
            # One element, because SGLang reads a value for each generated token.
            req.customized_info = (told or {}) | {ANSWERS_KEY: [[each.to_json() for each in answers]]}
        return call(wrapper, key, req, result)

    match._kvtier = True  # type: ignore[attr-defined]
    UnifiedCacheLinkerWrapper.match = match


def _hashes(key: Any, page: int) -> list[bytes]:
    tokens = len(key) // page * page
    if not tokens:
        return []
    return [bytes.fromhex(each) for each in get_storage_hash_str(key[:tokens], None, page_size=page)]
