"""Engines with several groups that overlay the same bytes: looked up together, loaded group by group."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import kvtier.aio
import numpy as np
import pytest
from kvtier import HIT, MISS, Client, Group, GroupKind, GroupQuery, KvtierError, Namespace, Plane, Reason

from tests.support.daemon import DaemonHost, until
from tests.support.plain_client import BLOCK_BYTES, NAMESPACE, READY_S, Cache, block_hashes, content

BLOCKS = 32
WINDOW = 2
FULL, SLIDING = GroupQuery(0), GroupQuery(1, window_blocks=WINDOW)
BOTH = [FULL, SLIDING]
PREFIX = block_hashes("hybrid", range(6))


class Engine:
    """Block b of either group lies at the same place: a block is of one group at a time."""

    def __init__(self, host: DaemonHost, namespace: Namespace) -> None:
        self.cache = Cache(BLOCKS)
        planes = (Plane(fragment_bytes=BLOCK_BYTES, base_offset=0, block_stride_bytes=BLOCK_BYTES),)
        groups = [
            Group(block_tokens=16, num_blocks=BLOCKS, planes=planes),
            Group(
                block_tokens=16,
                num_blocks=BLOCKS,
                planes=planes,
                kind=GroupKind.SLIDING_WINDOW,
                window_tokens=32,
            ),
        ]
        self.options: dict[str, Any] = {
            "instance": namespace.tenant,
            "namespace": namespace,
            "groups": groups,
            "memory": self.cache.memory,
            "socket": host.socket,
        }
        self.client = Client(**self.options)
        assert self.client.wait_ready(60)

    @property
    def blocks(self) -> np.ndarray:
        """Of the engine, by number."""
        return self.cache.memory.array.reshape(BLOCKS, BLOCK_BYTES)

    def close(self) -> None:
        self.client.close()
        self.cache.close()

    def store(self, group: int, hashes: list[bytes], first: int) -> None:
        """From blocks `first` and following; what a block has follows from its hash and group."""
        ids = [*range(first, first + len(hashes))]
        for block, block_hash in zip(ids, hashes, strict=True):
            self.blocks[block] = content(block_hash) + np.uint8(group)
        assert self.client.store(hashes, ids, group=group).wait(60).done


@pytest.fixture
def engine(shared_host: DaemonHost, request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = Engine(shared_host, dataclasses.replace(NAMESPACE, tenant=request.node.name))
    yield engine
    engine.close()


def test_each_group_is_loaded_under_its_own_lease(engine: Engine) -> None:
    engine.store(0, PREFIX, 0)
    engine.store(1, PREFIX[2:5], 8)
    client = engine.client
    found = client.lookup(PREFIX, BOTH, lease=True, timeout_s=READY_S)
    assert [group.hits for group in found.groups] == [5, 5]
    assert [list(group.states) for group in found.groups] == [[HIT] * 5, [MISS] * 3 + [HIT] * 2]
    assert [(lease.first, lease.blocks) for lease in found.leases] == [(0, 5), (3, 2)]
    engine.blocks[:] = 0
    loads = [
        client.load(found, [20, 21, 22, 23, 24], group=0),
        client.load(found, [28, 29], group=1),
    ]
    assert all(load.wait(60).done for load in loads)
    for index in range(5):
        assert (engine.blocks[20 + index] == content(PREFIX[index])).all()
    for index in (3, 4):
        assert (engine.blocks[25 + index] == content(PREFIX[index]) + np.uint8(1)).all()
    assert not engine.blocks[:20].any()


def test_leases_that_are_not_loaded_are_given_back_together(shared_host: DaemonHost, engine: Engine) -> None:
    engine.store(0, PREFIX, 0)
    engine.store(1, PREFIX, 8)
    with engine.client.lookup(PREFIX, BOTH, lease=True, timeout_s=READY_S) as found:
        assert shared_host.status().leases == len(found.leases) == 2
    until(lambda: shared_host.status().leases == 0, "both are given back")
    call = engine.client.start_lookup(PREFIX, BOTH, lease=True)
    call.abandon().release()
    until(lambda: shared_host.status().leases == 0, "so is what nobody waited for")


def test_coarser_blocks_go_by_the_last_hash_of_theirs(shared_host: DaemonHost, engine: Engine) -> None:
    engine.store(0, PREFIX, 0)
    engine.store(1, [PREFIX[1], PREFIX[3]], 8)
    # Not this engine's true geometry: the hashes alone are looked at.
    answer = engine.client.lookup(PREFIX, [GroupQuery(1, window_blocks=1, hash_stride=2)], timeout_s=READY_S)
    assert [group.hits for group in answer.groups] == [2]
    before = shared_host.status().counters
    engine.client.start_prefetch(PREFIX, BOTH).wait(60)
    engine.client.touch(PREFIX, BOTH)
    assert engine.client.lookup(PREFIX, [FULL], timeout_s=READY_S).groups[0].hits == 6
    assert shared_host.status().counters.lookups == before.lookups + 1


async def test_the_async_client_asks_together_too(shared_host: DaemonHost, namespace: Namespace) -> None:
    engine = Engine(shared_host, namespace)
    try:
        engine.store(0, PREFIX, 0)
        engine.store(1, PREFIX, 8)
        engine.client.close()
        async with kvtier.aio.Client(**engine.options) as client:
            assert await client.wait_ready(60)
            found = await client.lookup(PREFIX, BOTH, lease=True, timeout_s=READY_S)
            assert [lease.blocks for lease in found.leases] == [6, 2]
            outcome = await client.load(found, [30, 31], group=1).wait(60)
            assert outcome.done
            assert (engine.blocks[31] == content(PREFIX[5]) + np.uint8(1)).all()
            found.release()
            client.touch(PREFIX, BOTH)
            assert (await client.start_prefetch(PREFIX, BOTH).wait(60)).answered
    finally:
        engine.close()


def test_what_makes_no_sense_is_named_before_it_is_sent(engine: Engine) -> None:
    for queries in ([], [FULL, FULL], [GroupQuery(2)]):
        with pytest.raises(KvtierError) as error:
            engine.client.lookup(PREFIX, queries)
        assert error.value.reason is Reason.UNKNOWN_GROUP
    with pytest.raises(KvtierError, match="hash_stride"):
        GroupQuery(0, hash_stride=0)
