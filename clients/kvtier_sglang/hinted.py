"""KV hints of requests, which SGLang carries as far as the scheduler's request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvtier import Client, GroupQuery
from kvtier_engine.hints import Allowed, Answer, Hints, read

from kvtier_sglang.wishes import Wishes

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
