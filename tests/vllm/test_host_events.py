"""The daemon's KV events, read with vLLM's own classes, and as vLLM itself writes them."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from kvtierd.core.actions import BlockNews, NewsKind
from kvtierd.core.blocks.namespaces import NamespaceAbout
from kvtierd.core.ids import DiskId, NamespaceDigest
from kvtierd.core.stimuli import GroupGeometry
from kvtierd.events.encoding import KINDS, BatchEncoder, EventForm
from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    MEDIUM_STORAGE,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
)
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash
from vllm.v1.kv_cache_interface import KVCacheSpecKind

pytestmark = pytest.mark.vllm

NAMESPACE = NamespaceDigest(bytes(16))
WINDOW = 64
ABOUT = NamespaceAbout(
    "tenant",
    "model",
    b"",
    32,
    1,
    (),
    (GroupGeometry(1, 16, 0, ((4096, "kv"),)), GroupGeometry(2, 32, WINDOW, ((4096, "kv"),))),
)
HASHES = np.random.default_rng(1).integers(0, 256, (3, 32), dtype=np.uint8)
NEWS = (
    BlockNews(NewsKind.STORED, NAMESPACE, HASHES),
    BlockNews(NewsKind.STORED, NAMESPACE, HASHES[:1], group=1, disk=DiskId(0)),
    BlockNews(NewsKind.REMOVED, NAMESPACE, HASHES[1:]),
)


def expected() -> list[object]:
    """What vLLM would have made of it."""
    told = [maybe_convert_block_hash(BlockHash(each.tobytes())) for each in HASHES]
    full, window = KVCacheSpecKind("full_attention"), KVCacheSpecKind("sliding_window")
    ours = {"locality": "LOCAL", "ownership": "kvtier"}
    return [
        BlockStored(told, None, [], 16, None, MEDIUM_CPU, None, None, 0, full.value, None, **ours),
        BlockStored(
            told[:1], None, [], 32, None, MEDIUM_STORAGE, None, None, 1, window.value, WINDOW, **ours
        ),
        BlockRemoved(told[1:], MEDIUM_CPU, 0, **ours),
    ]


@pytest.mark.parametrize("whole", [False, True])
def test_vllm_reads_what_it_would_write(whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", str(int(not whole)))
    [payload] = BatchEncoder(EventForm(whole_hashes=whole)).batches(NEWS, ABOUT, 12.5)
    read = msgspec.msgpack.decode(payload, type=KVEventBatch)
    assert (read.ts, read.events) == (12.5, expected())
    written = msgspec.msgpack.encode(KVEventBatch(ts=12.5, events=expected()))
    assert msgspec.msgpack.decode(payload) == msgspec.msgpack.decode(written)


def test_vllm_reads_that_everything_is_gone_and_that_nothing_has_happened() -> None:
    encoder = BatchEncoder(EventForm())
    assert msgspec.msgpack.decode(encoder.cleared(1.0), type=KVEventBatch).events == [AllBlocksCleared()]
    assert msgspec.msgpack.decode(encoder.empty(1.0), type=KVEventBatch).events == []


def test_arrays_have_vllms_fields_in_their_order() -> None:
    """As it wrote events until June 2026."""
    [payload] = BatchEncoder(EventForm(positional=True)).batches(NEWS, ABOUT, 12.5)
    _, [stored, _, removed], _ = msgspec.msgpack.decode(payload)
    names = [each.name for each in msgspec.structs.fields(BlockStored)]
    values = dict(zip(names, stored[1:], strict=False))
    assert (values["block_size"], values["medium"], values["group_idx"]) == (16, "CPU", 0)
    assert (values["locality"], values["ownership"]) == ("LOCAL", "kvtier")
    names = [each.name for each in msgspec.structs.fields(BlockRemoved)]
    assert dict(zip(names, removed[1:], strict=False))["ownership"] == "kvtier"


def test_kinds_are_vllms() -> None:
    assert set(KINDS.values()) <= {kind.value for kind in KVCacheSpecKind}
