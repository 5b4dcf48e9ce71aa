"""Which requests ask again: they were told to wait, and ask about the same blocks. Clients can say so
(`LookupBlocks.again`), but not all of them do."""

from collections.abc import Sequence

from kvtierd.core.stimuli import BlockQuery

WAITING_MAX = 1_024
"""Requests of one instance that are remembered as waiting, the latest ones."""
WAITING_S = 60.0
"""For so long."""

RequestName = tuple[int, bytes]
"""What requests of one instance are told apart by."""


class Waiting:
    """The requests of one instance that were told to wait."""

    __slots__ = ("_since_s",)

    def __init__(self) -> None:
        self._since_s: dict[RequestName, float] = {}

    def asks_again(self, queries: Sequence[BlockQuery], now_s: float) -> bool:
        """Whether a request about these blocks was told to wait a short time ago."""
        if not self._since_s:
            return False
        since_s = self._since_s.get(name_of(queries))
        return since_s is not None and now_s - since_s < WAITING_S

    def told(self, queries: Sequence[BlockQuery], now_s: float, *, to_wait: bool) -> None:
        """A request got its answer."""
        if to_wait:
            name = name_of(queries)
            self._since_s.pop(name, None)
            self._since_s[name] = now_s
            if len(self._since_s) > WAITING_MAX:
                del self._since_s[next(iter(self._since_s))]
        elif self._since_s:
            self._since_s.pop(name_of(queries), None)


def name_of(queries: Sequence[BlockQuery]) -> RequestName:
    """A hash stands for all blocks before it, so the last one of the first group stands for the request,
    wherever its queries begin."""
    first = queries[0]
    return first.group, first.hashes[-1:].tobytes()
