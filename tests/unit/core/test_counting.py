"""What is counted of lookups, evictions, leases and transfers, for those who watch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from kvtierd.core.stimuli import Drain, ReleaseLeases, RenewSession, Tick

from tests.unit.core.host import Host

Make = Callable[..., Host]


def misses(host: Host) -> dict[str, int]:
    """By reason, those that there are."""
    counters = host.counters
    names = ("absent", "pending", "beyond", "recompute", "draining", "not_ready")
    found = {name: getattr(counters, f"missed_{name}") for name in names}
    assert sum(found.values()) + counters.lookup_hits == counters.lookup_hashes
    return {name: count for name, count in found.items() if count}


class TestMisses:
    def test_a_prefix_ends_at_what_is_absent_and_the_rest_is_behind_it(self, host: Host) -> None:
        one = host.instance()
        one.stored(1, 2, 4)
        one.lookup(1, 2, 3, 4, 5)
        assert misses(host) == {"absent": 1, "beyond": 2}

    def test_or_at_what_is_being_stored(self, host: Host) -> None:
        one = host.instance()
        one.stored(1)
        one.store(2)
        one.lookup(1, 2, 3)
        assert misses(host) == {"pending": 1, "beyond": 1}

    def test_a_prefix_that_hits_wholly_has_none(self, host: Host) -> None:
        one = host.instance()
        one.stored(1, 2)
        one.lookup(1, 2)
        one.lookup()
        assert misses(host) == {}

    def test_single_blocks_have_each_their_own_reason(self, host: Host) -> None:
        one = host.instance()
        one.stored(1)
        one.store(3)
        one.lookup(1, 2, 3, 4, exact=True)
        assert misses(host) == {"absent": 2, "pending": 1}

    def test_what_clients_saw_in_the_index_page_was_absent(self, host: Host) -> None:
        one = host.instance()
        host.do(RenewSession(one.scheduler, index_lookups=3, index_hashes=10))
        assert misses(host) == {"absent": 3, "beyond": 7}
        host.do(RenewSession(one.scheduler, index_lookups=5, index_hashes=2))
        assert misses(host) == {"absent": 5, "beyond": 7}

    def test_while_it_drains_everything_misses_for_that_reason(self, host: Host) -> None:
        one = host.instance()
        one.stored(1)
        host.do(Drain())
        one.lookup(1, 2)
        assert misses(host) == {"draining": 2}

    def test_and_while_ranks_are_missing_for_that_one(self, host: Host) -> None:
        two = host.instance(worker=None)
        two.lookup(1, 2)
        assert misses(host) == {"not_ready": 2}


class TestAges:
    def test_a_lease_is_as_old_as_the_time_since_it_was_granted(self, host: Host) -> None:
        one = host.instance()
        one.stored(1, 2)
        first = one.lease(1)
        host.now_s += 3
        one.lease(2)
        host.now_s += 4
        assert host.machine.status().lease_oldest_s == pytest.approx(7)
        host.do(ReleaseLeases(one.scheduler, one.epoch, (first,)))
        assert host.machine.status().lease_oldest_s == pytest.approx(4)
        assert (host.counters.ended_leases, host.counters.lease_held_s) == (1, pytest.approx(7))

    def test_one_that_is_loaded_has_ended(self, host: Host) -> None:
        one = host.instance()
        one.stored(1)
        lease = one.lease(1)
        host.now_s += 2
        one.load(lease, [0]).finish()
        assert host.machine.status().lease_oldest_s == 0
        assert (host.counters.ended_leases, host.counters.lease_held_s) == (1, pytest.approx(2))

    def test_evicted_blocks_are_as_old_as_the_time_since_they_were_used(self, host: Host) -> None:
        one = host.instance()
        number = 0
        one.stored(number)
        host.now_s += 100
        host.do(Tick())
        while host.counters.evicted_blocks == 0:
            number += 1
            assert number < 1_000
            one.stored(number)
        assert host.counters.evicted_blocks == 1
        assert host.counters.evicted_age_s == pytest.approx(100, abs=1)

    def test_a_transfer_takes_from_its_being_accepted_to_its_end(self, host: Host) -> None:
        one = host.instance()
        store = one.store(1)
        host.now_s += 5
        store.finish()
        load = one.load(one.lease(1), [0])
        host.now_s += 0.5
        load.finish()
        counters = host.counters
        assert (counters.store_transfers, counters.store_transfer_s) == (1, pytest.approx(5))
        assert (counters.load_transfers, counters.load_transfer_s) == (1, pytest.approx(0.5))
