"""Streams of batches, and the latest batches of all of them, which are kept for replays."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from kvtierd.core.blocks.namespaces import NamespaceAbout
from kvtierd.core.ids import NamespaceDigest


@dataclass(slots=True, eq=False)
class EventStream:
    """The batches of one namespace."""

    topic: bytes
    namespace: NamespaceDigest
    about: NamespaceAbout
    following: int
    """The number that its next batch gets."""
    kept_from: int
    """It has all batches from this number on."""
    published_s: float = 0.0
    """When the latest was published."""


@dataclass(frozen=True, slots=True, eq=False)
class KeptBatch:
    stream: EventStream
    number: int
    payload: bytes


class ReplayRing:
    """The latest batches of all streams together, at most so many and of so many bytes."""

    def __init__(self, batches_max: int, bytes_max: int) -> None:
        self._batches_max = batches_max
        self._bytes_max = bytes_max
        self._kept: deque[KeptBatch] = deque()
        self.kept_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def append(self, stream: EventStream, payload: bytes) -> KeptBatch:
        """Gives a batch the next number of its stream, and keeps it."""
        batch = KeptBatch(stream, stream.following, payload)
        stream.following += 1
        self._kept.append(batch)
        self.kept_bytes += len(payload)
        while len(self._kept) > self._batches_max or self.kept_bytes > self._bytes_max:
            dropped = self._kept.popleft()
            dropped.stream.kept_from = dropped.number + 1
            self.kept_bytes -= len(dropped.payload)
        return batch

    def since(self, stream: EventStream, number: int) -> Iterator[KeptBatch]:
        """The batches of a stream from a number on, all of which have to be kept."""
        assert stream.kept_from <= number <= stream.following
        return (batch for batch in self._kept if batch.stream is stream and batch.number >= number)
