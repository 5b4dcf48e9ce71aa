"""Promotes what the next requests in the queue need before it is their turn, because vLLM asks about no
request while all slots of the engine are taken."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from kvtier import Client

from kvtier_vllm.scheduler.question import Question

PREFETCHES_MAX = 8
"""For how many requests in the queue blocks are promoted ahead: the next ones, and not the whole queue, whose
blocks could push each other out again."""


class Ahead:
    """Requests that vLLM has not asked about yet, in their order."""

    def __init__(self, question: Question, loadable: Callable[[Any, Sequence[bytes]], int]) -> None:
        """`loadable` returns how many units of a request, with these hashes, may be loaded."""
        self._question = question
        self._loadable = loadable
        self._unasked: dict[str, tuple[Any, Sequence[bytes]]] = {}
        self._prefetched: set[str] = set()
        """Those of them whose blocks were promoted."""

    def __len__(self) -> int:
        return len(self._unasked)

    def arrived(self, request: Any, hashes: Sequence[bytes]) -> None:
        """Adds a new request, which vLLM asks about when it is its turn."""
        self._unasked[request.request_id] = request, hashes

    def asked(self, request_id: str) -> None:
        """Removes a request, because it is its turn or it is over. Safe to call twice."""
        self._unasked.pop(request_id, None)
        self._prefetched.discard(request_id)

    def prefetch_now(self, client: Client, request_id: str) -> None:
        """Has what a request needs promoted, whatever its place in the queue."""
        request, hashes = self._unasked[request_id]
        self._prefetched.add(request_id)
        self._question.prefetch(client, hashes, self._loadable(request, hashes))

    def prefetch(self, client: Client) -> None:
        """Has what the next requests need promoted."""
        for request_id, (request, hashes) in itertools.islice(self._unasked.items(), PREFETCHES_MAX):
            if request_id in self._prefetched:
                continue
            units = self._loadable(request, hashes)
            known = self._question.known(client, hashes, 0, units, counted=False)
            if known == 0:
                continue  # nothing yet: another engine may be storing it
            self._prefetched.add(request_id)
            self._question.prefetch(client, hashes, units if known is None else known)
