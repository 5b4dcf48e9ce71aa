"""What the next requests in the queue need is promoted before it is their turn: while all slots of the engine
are taken, vLLM asks about no request."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from kvtier import Client

from kvtier_vllm.scheduler.question import Question

PREFETCHES_MAX = 8
"""Requests in the queue whose blocks are promoted ahead of their turn: the next ones, and not the whole
queue, which could push each other's blocks out again."""


class Ahead:
    """Requests that vLLM has not asked about yet, in their order."""

    def __init__(self, question: Question, loadable: Callable[[Any, Sequence[bytes]], int]) -> None:
        """`loadable`: units of a request, with its hashes, that may be loaded."""
        self._question = question
        self._loadable = loadable
        self._unasked: dict[str, tuple[Any, Sequence[bytes]]] = {}
        self._prefetched: set[str] = set()
        """Of them."""

    def __len__(self) -> int:
        return len(self._unasked)

    def arrived(self, request: Any, hashes: Sequence[bytes]) -> None:
        """A new request, which vLLM asks about when it is its turn."""
        self._unasked[request.request_id] = request, hashes

    def asked(self, request_id: str) -> None:
        """It is its turn, or it is over. Idempotent."""
        self._unasked.pop(request_id, None)
        self._prefetched.discard(request_id)

    def prefetch(self, client: Client) -> None:
        """Has what the next ones need promoted."""
        for request_id, (request, hashes) in itertools.islice(self._unasked.items(), PREFETCHES_MAX):
            if request_id in self._prefetched:
                continue
            units = self._loadable(request, hashes)
            known = self._question.known(client, hashes, 0, units)
            if known == 0:
                continue  # nothing yet: another engine may be storing it
            self._prefetched.add(request_id)
            self._question.prefetch(client, hashes, units if known is None else known)
