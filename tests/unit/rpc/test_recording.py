"""What a recording keeps until it is sent: within its bounds, and nothing that names anybody."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kvtier.v1 import admin_pb2
from kvtier_kernels import EventLog
from kvtierd.core.actions import GroupHits, LookupReply
from kvtierd.core.errors import Reason, Refusal
from kvtierd.core.ids import Epoch, Hashes, SessionId, Ticket
from kvtierd.core.stimuli import BlockQuery, LookupBlocks, Signals, SubmitStore, SubmittedChain
from kvtierd.rpc.recording import BATCH_BYTES_MAX, Recording

LOOKUP, STORE = admin_pb2.RECORDED_KIND_LOOKUP, admin_pb2.RECORDED_KIND_STORE
BEHIND, LOOSE = admin_pb2.RECORDED_KIND_STORE_BEHIND, admin_pb2.RECORDED_KIND_STORE_LOOSE
EPOCH = Epoch(1)


def keys(*numbers: int) -> Hashes:
    rows = np.zeros((len(numbers), 32), np.uint8)
    rows[:, 0] = numbers
    return rows


def plan_of(session: SessionId, group: int) -> Any:
    """Sessions 1 and 2 are of one tenant and model, 3 is of another; 9 is not complete."""
    if session == 9:
        raise Refusal(Reason.INSTANCE_INCOMPLETE, "not yet")
    tenant = 70 if session < 3 else 80
    domain = SimpleNamespace(tenant=tenant, block_bytes=4_096 * (group + 1))
    return SimpleNamespace(space=tenant + group, block_tokens=16, domain=domain)


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def recording(clock: Clock) -> Recording:
    return Recording(plan_of, clock)


def lookup(
    recording: Recording, *queries: BlockQuery, session: int = 1, again: bool = False, hits: int = 0
) -> None:
    stimulus = LookupBlocks(SessionId(session), EPOCH, queries, lease=True, again=again)
    groups = tuple(GroupHits(hits, np.zeros(0, np.uint8)) for _ in queries)
    reply = LookupReply(groups, again=again)
    recording.lookup(stimulus, reply)


def store(recording: Recording, hashes: Hashes, *chains: SubmittedChain) -> None:
    ids = np.arange(len(hashes), dtype=np.uint32)
    signals = Signals(Ticket(1), 0, gated=False)
    recording.store(SubmitStore(SessionId(1), EPOCH, signals, 0, hashes, ids, chains=chains))


def columns(batch: admin_pb2.RecordBatch) -> tuple[list[int], ...]:
    """Kinds, times, places, numbers of hashes, hits and parts."""
    [*found] = np.frombuffer(batch.events, "<u8").reshape(-1, 6).T.tolist()
    return tuple(found)


def names(batch: admin_pb2.RecordBatch) -> list[int]:
    """The hashes of a batch, numbered by first appearance."""
    known: dict[int, int] = {}
    return [known.setdefault(each, len(known)) for each in np.frombuffer(batch.hashes, np.uint64).tolist()]


def test_any_byte_of_a_hash_makes_another_one_and_each_recording_others(clock: Clock) -> None:
    hashes = np.zeros((33, 32), np.uint8)
    hashes[np.arange(32), np.arange(32)] = 1
    seen = []
    for _ in range(2):
        recording = Recording(plan_of, clock)
        lookup(recording, BlockQuery(0, hashes))
        [batch] = recording.batches()
        assert names(batch) == list(range(33))
        seen += np.frombuffer(batch.hashes, np.uint64)[:32].tolist()
    assert len(set(seen)) > 32


def test_lookups_come_with_time_place_and_hits(recording: Recording, clock: Clock) -> None:
    clock.now_s += 1.5
    lookup(recording, BlockQuery(0, keys(1, 2, 3)), hits=2)
    lookup(recording, BlockQuery(0, keys(1)), session=2)
    clock.now_s += 1.0
    lookup(recording, BlockQuery(1, keys(4)), BlockQuery(0, keys(5, 6)), session=3)
    [batch] = recording.batches()
    assert columns(batch) == (
        [LOOKUP] * 4,
        [1_500_000, 1_500_000, 2_500_000, 2_500_000],
        [1, 1, 2, 3],
        [3, 1, 1, 2],
        [2, 0, 0, 0],
        [1, 1, 2, 2],
    )
    assert names(batch) == [0, 1, 2, 0, 3, 4, 5]
    places = [
        (each.number, each.tenant, each.group, each.block_tokens, each.block_bytes) for each in batch.places
    ]
    assert places == [(1, 1, 0, 16, 4_096), (2, 2, 1, 16, 8_192), (3, 2, 0, 16, 4_096)]
    [after] = recording.batches()
    assert (after.events, list(after.places)) == (b"", [])


def test_what_is_no_use_of_a_prefix_is_left_out(recording: Recording) -> None:
    lookup(recording, BlockQuery(0, keys(1)), again=True)
    lookup(recording, BlockQuery(0, keys(1), exact=True))
    lookup(recording, BlockQuery(0, keys(1), window_blocks=1))
    lookup(recording, BlockQuery(0, keys()))
    lookup(recording, BlockQuery(0, keys(1)), session=9)
    [batch] = recording.batches()
    assert (batch.events, batch.dropped_events) == (b"", 0)


def test_stores_come_chain_by_chain(recording: Recording) -> None:
    store(recording, keys(1, 2, 3), SubmittedChain(2), SubmittedChain(1, keys(7)))
    store(recording, keys(8, 9))
    [batch] = recording.batches()
    kinds, _, _, counts, _, parts = columns(batch)
    assert (kinds, parts, counts) == ([STORE, BEHIND, LOOSE], [0, 1, 0], [2, 2, 2])
    assert names(batch) == list(range(6))


def test_what_finds_no_room_is_dropped_and_counted_until_there_is_room_again(clock: Clock) -> None:
    recording = Recording(plan_of, clock, kept_bytes_max=3 * EventLog.bytes_of(2) + EventLog.bytes_of(1))
    for _ in range(5):
        lookup(recording, BlockQuery(0, keys(1, 2)))
    [batch] = recording.batches()
    assert (len(columns(batch)[0]), batch.dropped_events, batch.dropped_blocks) == (3, 2, 4)
    lookup(recording, BlockQuery(0, keys(1)))
    [batch] = recording.batches()
    assert (len(columns(batch)[0]), batch.dropped_events, batch.dropped_blocks) == (1, 2, 4)


def test_messages_are_bounded(recording: Recording) -> None:
    hashes = np.zeros((1_024, 32), np.uint8)
    assert not recording.has_message()
    for _ in range(200):
        lookup(recording, BlockQuery(0, hashes))
    assert recording.has_message()
    batches = list(recording.batches())
    assert sum(len(columns(batch)[0]) for batch in batches) == 200
    assert max(len(batch.hashes) for batch in batches) <= BATCH_BYTES_MAX + 8 * len(hashes)
    assert not recording.has_message()
