"""Joins several messages of the session stream into one, because gRPC takes longer for a message than the
daemon takes for most requests."""

from collections.abc import Iterable, Iterator

from kvtier.v1 import cache_pb2

MESSAGES_MAX = 64
"""The most messages that a daemon takes in one batch."""
BATCH_BYTES_MAX = 64 << 10
"""The approximate size of a batch. A message that is larger is sent by itself."""


def in_batches(requests: Iterable[cache_pb2.AttachRequest]) -> Iterator[cache_pb2.AttachRequest]:
    """Yields the same requests, in their order, in fewer messages."""
    batch: list[cache_pb2.AttachRequest] = []
    size_bytes = 0
    for request in requests:
        own_bytes = request.ByteSize()
        if batch and (len(batch) == MESSAGES_MAX or size_bytes + own_bytes > BATCH_BYTES_MAX):
            yield _joined(batch)
            batch, size_bytes = [], 0
        batch.append(request)
        size_bytes += own_bytes
    if batch:
        yield _joined(batch)


def _joined(batch: list[cache_pb2.AttachRequest]) -> cache_pb2.AttachRequest:
    if len(batch) == 1:
        return batch[0]
    joined = cache_pb2.AttachRequest()
    joined.batch.requests.extend(batch)
    return joined
