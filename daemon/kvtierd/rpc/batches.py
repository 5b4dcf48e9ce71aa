"""Several messages of the session stream in one, because gRPC spends more time on a message than most
take."""

from collections.abc import Iterable, Iterator

from kvtier.v1 import cache_pb2

BATCHES = "batches"
"""The feature of a client that sends several requests in one message, and takes several replies and events in
one."""
UNANSWERED = "unanswered"
"""The feature of a client that gives requests whose answer does not matter to it no id."""
REQUESTS_MAX = 64
"""Requests of one batch. While they are answered, nobody else is."""
BATCH_BYTES_MAX = 256 << 10
"""About how many bytes of replies and events one batch has; a larger one is sent by itself."""


def in_batches(responses: Iterable[cache_pb2.AttachResponse]) -> Iterator[cache_pb2.AttachResponse]:
    """The same replies and events, in the same order, in fewer messages."""
    batch: list[cache_pb2.AttachResponse] = []
    size_bytes = 0
    for response in responses:
        own_bytes = response.ByteSize()
        if batch and size_bytes + own_bytes > BATCH_BYTES_MAX:
            yield _joined(batch)
            batch, size_bytes = [], 0
        batch.append(response)
        size_bytes += own_bytes
    if batch:
        yield _joined(batch)


def _joined(batch: list[cache_pb2.AttachResponse]) -> cache_pb2.AttachResponse:
    if len(batch) == 1:
        return batch[0]
    return cache_pb2.AttachResponse(batch=cache_pb2.ResponseBatch(responses=batch))
