"""Loads and stores of the linker, with a cache of plain tensors and a real daemon that is in trouble."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from kvtier import Client, GroupQuery, Namespace
from kvtier_sglang.loads import Loads
from kvtier_sglang.lookups import HeldLookups
from kvtier_sglang.pools import PagePool
from kvtier_sglang.staging import Staging
from kvtier_sglang.stores import STORE_TIMEOUT_S, Stores

from tests.support.daemon import DaemonHost, until

pytestmark = [pytest.mark.sglang, pytest.mark.faults, pytest.mark.timeout(120)]
PAGE_TOKENS, PAGES, STAGED = 16, 64, 8
LAYERS = 3
PATIENCE_S = 20.0


def hashes_of(name: str, count: int) -> list[bytes]:
    return [hashlib.sha256(f"{name}/{number}".encode()).digest() for number in range(count)]


@dataclass
class Cache:
    """One rank's cache, and its way to the daemon."""

    buffers: list[torch.Tensor]
    pool: PagePool
    staging: Staging
    client: Client
    lookups: HeldLookups
    loads: Loads
    stores: Stores

    def has_all_its_room(self) -> bool:
        self.loads.reap()
        self.stores.go_on(self.client)
        return self.staging.pools[0].free == STAGED

    def fill(self, pages: list[int], seed: int) -> torch.Tensor:
        """Writes random bytes to these pages. Returns what all buffers have there."""
        generator = torch.Generator().manual_seed(seed)
        for buffer in self.buffers:
            rows = buffer.view(-1, PAGE_TOKENS, *buffer.shape[1:])
            rows[pages] = torch.rand(rows[pages].shape, generator=generator).to(buffer.dtype)
        return self.content(pages)

    def content(self, pages: list[int]) -> torch.Tensor:
        return torch.stack(
            [buffer.view(-1, PAGE_TOKENS, *buffer.shape[1:])[pages] for buffer in self.buffers]
        )

    def store(self, hashes: list[bytes], pages: list[int]) -> bool:
        """Stores a node, and waits for its result."""
        self.stores.add(self.client, [(0, hashes, pages)])

        def over() -> bool:
            self.stores.go_on(self.client)
            return self.stores.completed > 0

        until(over, "the store has ended")
        return self.stores.take_result()

    def load(self, hashes: list[bytes], pages: list[int], patience_s: float = PATIENCE_S) -> bool:
        deadline_s = time.monotonic() + patience_s
        return self.loads.load(self.client, "request", hashes, [pages], deadline_s)


@pytest.fixture
def cache(host: DaemonHost) -> Iterator[Cache]:
    buffers = [torch.zeros(PAGES * PAGE_TOKENS, 2, 64, dtype=torch.bfloat16) for _ in range(2 * LAYERS)]
    pool = PagePool("kv", [(f"part {index}", buffer) for index, buffer in enumerate(buffers)], PAGE_TOKENS)
    staging = Staging([pool], STAGED * pool.page_bytes)
    assert staging.pools[0].pages == STAGED
    namespace = Namespace(model="parts", kv_dtype="bfloat16", hash_scheme="sha256")
    with Client(
        instance="parts",
        namespace=namespace,
        groups=staging.groups,
        memory=staging.memory,
        socket=host.socket,
    ) as client:
        assert client.wait_ready(30), client.status.why
        lookups = HeldLookups([GroupQuery(0)], time.monotonic)
        yield Cache(
            buffers,
            pool,
            staging,
            client,
            lookups,
            Loads(staging, lookups, time.monotonic),
            Stores(staging, time.monotonic),
        )
    staging.close()


def test_more_pages_than_the_staging_memory_has_are_stored_and_loaded(cache: Cache) -> None:
    count = 5 * STAGED + 3
    pages, hashes = list(range(1, 1 + count)), hashes_of("many", count)
    wanted = cache.fill(pages, 1)
    assert cache.store(hashes, pages)
    others = list(reversed(range(PAGES - count, PAGES)))
    cache.fill(list(range(PAGES)), 2)
    assert cache.lookups.readable(cache.client, "request", hashes) == count
    assert cache.load(hashes, others)
    assert torch.equal(cache.content(others), wanted)
    assert cache.has_all_its_room()


def test_a_load_that_hangs_leaves_slots_alone_and_costs_nothing_for_long(
    cache: Cache, host: DaemonHost
) -> None:
    pages, hashes = [1, 2, 3, 4], hashes_of("hanging", 4)
    wanted = cache.fill(pages, 3)
    assert cache.store(hashes, pages)
    assert cache.lookups.readable(cache.client, "request", hashes) == len(pages)
    host.freeze_workers()
    before = cache.fill(pages, 4)
    began_s = time.monotonic()
    assert not cache.load(hashes, pages, patience_s=0.3)
    assert time.monotonic() - began_s < 10
    host.thaw()
    until(cache.has_all_its_room, "nothing can land any more")
    assert torch.equal(cache.content(pages), before), "nobody else has written there"
    assert cache.load(hashes, pages)
    assert torch.equal(cache.content(pages), wanted)


def test_a_store_that_hangs_is_rolled_back_and_its_room_comes_back(
    cache: Cache, host: DaemonHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier_sglang.stores.STORE_TIMEOUT_S", 0.3)
    host.freeze_workers()
    assert not cache.store(hashes_of("late", 3), [1, 2, 3])
    host.thaw()
    until(cache.has_all_its_room, "there is room again")
    monkeypatch.undo()
    assert cache.store(hashes_of("late", 3), [1, 2, 3])


def test_without_a_daemon_nothing_is_found_stored_or_waited_for(cache: Cache, host: DaemonHost) -> None:
    pages, hashes = [1, 2], hashes_of("gone", 2)
    cache.fill(pages, 5)
    assert cache.store(hashes, pages)
    host.kill9()
    until(lambda: cache.client.ready_epoch is None, "it is noticed")
    began_s = time.monotonic()
    assert cache.lookups.readable(cache.client, "request", hashes) == 0
    assert not cache.load(hashes, pages)
    cache.stores.add(cache.client, [(0, hashes, pages)])
    assert not cache.stores.take_result()
    assert time.monotonic() - began_s < 5
    host.start()
    assert cache.client.wait_ready(30)
    assert cache.load(hashes, pages)


def test_the_lease_of_a_request_that_is_not_asked_for_ends(cache: Cache, host: DaemonHost) -> None:
    now_s = 0.0
    lookups = HeldLookups([GroupQuery(0)], lambda: now_s)
    pages, hashes = [1, 2], hashes_of("leased", 2)
    assert cache.store(hashes, pages)
    assert lookups.readable(cache.client, "one", hashes) == 2
    assert lookups.readable(cache.client, "one", hashes) == 2, "answered from the lease"
    until(lambda: host.metrics()["kvtier_leases"] == 1, "one lease is held")
    now_s = 60.0
    lookups.expire()
    until(lambda: host.metrics()["kvtier_leases"] == 0, "it has ended")


def test_slots_that_are_no_pages_are_refused(cache: Cache) -> None:
    page = torch.arange(PAGE_TOKENS)
    assert cache.pool.pages_of(torch.cat([page + 32, page])) == [2, 0]
    for wrong in (page + 1, page[:-1], page.flip(0), page + PAGES * PAGE_TOKENS):
        with pytest.raises(ValueError):
            cache.pool.pages_of(wrong)


def test_each_node_has_one_result_in_its_turn(cache: Cache, host: DaemonHost) -> None:
    host.freeze_workers()
    cache.stores.add(cache.client, [(0, hashes_of("slow", 2), [1, 2])])
    cache.stores.refuse()
    cache.stores.skip()
    assert (cache.stores.begun, cache.stores.completed) == (3, 0), "the first one is not over"
    host.thaw()

    def over() -> bool:
        cache.stores.go_on(cache.client)
        return cache.stores.completed == 3

    until(over, "all have results")
    assert [cache.stores.take_result() for _ in range(3)] == [True, False, True]


def test_a_node_is_stored_when_it_has_been_computed_and_keeps_no_other_from_it(cache: Cache) -> None:
    late, soon = hashes_of("late", 2), hashes_of("soon", 2)
    computed = False
    cache.stores.add(cache.client, [(0, late, [1, 2])], lambda: computed)
    cache.stores.add(cache.client, [(0, soon, [3, 4])])
    until(lambda: cache.client.known_run(soon, counted=False) == 2, "the other one is stored")
    cache.stores.go_on(cache.client)
    assert cache.client.known_run(late, counted=False) == 0
    assert cache.stores.completed == 0, "results come in the order of the nodes"
    wanted = cache.fill([1, 2], 9)
    computed = True

    def over() -> bool:
        cache.stores.go_on(cache.client)
        return cache.stores.completed == 2

    until(over, "both have ended")
    assert cache.stores.take_result()
    assert cache.stores.take_result()
    assert cache.lookups.readable(cache.client, "request", late) == 2
    assert cache.load(late, [5, 6])
    assert torch.equal(cache.content([5, 6]), wanted)
    assert cache.has_all_its_room()


def test_a_node_that_is_never_computed_is_given_up(cache: Cache) -> None:
    now_s = 0.0
    stores = Stores(cache.staging, lambda: now_s)
    stores.add(cache.client, [(0, hashes_of("never", 2), [1, 2])], lambda: False)
    stores.go_on(cache.client)
    assert stores.completed == 0
    now_s = STORE_TIMEOUT_S + 1
    stores.go_on(cache.client)
    assert stores.completed == 1
    assert not stores.take_result()
    assert cache.has_all_its_room()
