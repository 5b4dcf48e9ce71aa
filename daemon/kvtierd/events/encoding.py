"""Events as vLLM has them: a batch is MessagePack of [time, [event, ...], rank]. Nobody has a rank here.
No object is made for a block."""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvtierd.core.actions import BlockNews, NewsKind
from kvtierd.core.blocks.namespaces import NamespaceAbout
from kvtierd.core.ids import DiskId, Hashes

HASHES_PER_BATCH = 4_096
"""The most that one batch tells of."""
OWNERSHIP = "kvtier"
HOST, DISK, STORE = "CPU", "STORAGE", "EXTERNAL"
KINDS = {1: "full_attention", 2: "sliding_window", 3: "mamba"}
"""vLLM's names of GroupKind."""
_UINT64, _BINARY = 0xCF, 0xC4
_INT_BYTES = 8

_Fields = Sequence[tuple[str, Any] | tuple[str, Any, Any]]
_OF_REMOVED: _Fields = (
    ("block_hashes", msgspec.Raw),
    ("medium", str),
    ("group_idx", int | None, None),
    ("locality", str | None, None),
    ("ownership", str | None, None),
)
_OF_STORED: _Fields = (
    ("block_hashes", msgspec.Raw),
    ("parent_block_hash", None),
    ("token_ids", list[int]),
    ("block_size", int),
    ("lora_id", None),
    ("medium", str),
    ("lora_name", None),
    ("extra_keys", None, None),
    ("group_idx", int | None, None),
    ("kv_cache_spec_kind", str | None, None),
    ("kv_cache_spec_sliding_window", int | None, None),
    ("locality", str | None, None),
    ("ownership", str | None, None),
)


@dataclass(frozen=True, slots=True)
class EventForm:
    """How events are written."""

    whole_hashes: bool = False
    """A hash is all its bytes, and not the integer of its last 64 bits."""
    positional: bool = False
    """An event is an array, and not a map."""
    store: DiskId | None = None
    """Which of what is below the host is a store that other hosts use as well."""


class BatchEncoder:
    """Makes batches of news."""

    def __init__(self, form: EventForm) -> None:
        self._form = form
        self._encode = msgspec.msgpack.Encoder().encode
        self._stored = _event("BlockStored", _OF_STORED, positional=form.positional)
        self._removed = _event("BlockRemoved", _OF_REMOVED, positional=form.positional)
        self._cleared = _event("AllBlocksCleared", (), positional=form.positional)

    def cleared(self, now_s: float) -> bytes:
        """A batch that says that nothing is there any more."""
        return self._encode([now_s, [self._cleared()], None])

    def empty(self, now_s: float) -> bytes:
        """A batch that says nothing."""
        return self._encode([now_s, [], None])

    def batches(self, news: Sequence[BlockNews], about: NamespaceAbout, now_s: float) -> Iterator[bytes]:
        """Yields batches of news of one namespace, STORED, REMOVED or SHOWN, in their order."""
        events: list[Any] = []
        room = HASHES_PER_BATCH
        for each in news:
            first = 0
            while first < len(each.hashes):
                piece = each.hashes[first : first + room]
                events.append(self._event(each, piece, about))
                first += len(piece)
                room -= len(piece)
                if room == 0:
                    yield self._encode([now_s, events, None])
                    events, room = [], HASHES_PER_BATCH
        if events:
            yield self._encode([now_s, events, None])

    def _event(self, news: BlockNews, hashes: Hashes, about: NamespaceAbout) -> Any:
        packed = packed_hashes(hashes, about.hash_bytes, whole=self._form.whole_hashes)
        medium, locality = self._medium(news.disk)
        if news.kind is NewsKind.REMOVED:
            return self._removed(
                block_hashes=packed,
                medium=medium,
                group_idx=news.group,
                locality=locality,
                ownership=OWNERSHIP,
            )
        group = about.groups[news.group]
        return self._stored(
            block_hashes=packed,
            parent_block_hash=None,
            token_ids=[],
            block_size=group.block_tokens,
            lora_id=None,
            medium=medium,
            lora_name=None,
            group_idx=news.group,
            kv_cache_spec_kind=KINDS.get(group.kind),
            kv_cache_spec_sliding_window=group.window_tokens or None,
            locality=locality,
            ownership=OWNERSHIP,
        )

    def _medium(self, disk: DiskId | None) -> tuple[str, str]:
        if disk is None:
            return HOST, "LOCAL"
        return (STORE, "REMOTE") if disk == self._form.store else (DISK, "LOCAL")


def packed_hashes(hashes: Hashes, hash_bytes: int, *, whole: bool) -> msgspec.Raw:
    """A MessagePack array of hashes, which have `hash_bytes` bytes each: all of these, or the integer of the
    last 8 (big endian), as vLLM's default is."""
    count = len(hashes)
    head = b"\xdd" + struct.pack(">I", count)
    if whole:
        rows: npt.NDArray[np.uint8] = np.empty((count, 2 + hash_bytes), np.uint8)
        rows[:, 0], rows[:, 1] = _BINARY, hash_bytes
        rows[:, 2:] = hashes[:, :hash_bytes]
    else:
        rows = np.empty((count, 1 + _INT_BYTES), np.uint8)
        rows[:, 0] = _UINT64
        rows[:, 1:] = hashes[:, hash_bytes - _INT_BYTES : hash_bytes]
    return msgspec.Raw(head + rows.tobytes())


def _event(name: str, fields: _Fields, *, positional: bool) -> type[msgspec.Struct]:
    return msgspec.defstruct(name, fields, tag=name, omit_defaults=True, array_like=positional, gc=False)
