"""Blocks are checked before loads, and at random. One that fails its check is a miss, and its slot is set
aside."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from kvtier_kernels import BlockTable as NativeTable
from kvtierd.core.actions import CheckSlots, FreeSlots, QuarantineSlots
from kvtierd.core.blocks.slots import PoolGeometry
from kvtierd.core.ids import PAGE_BYTES, CheckId, WorkerId
from kvtierd.core.machine import Machine
from kvtierd.core.maintenance.sampling import SLOTS_MAX, expected_detection_s
from kvtierd.core.state.transitions import TABLE, CheckState, Event
from kvtierd.core.stimuli import (
    CoreDisks,
    CoreIntegrity,
    CoreLimits,
    Drain,
    PartOutcome,
    PoolPolicy,
    Reconfigure,
    ReleaseLeases,
    SlotsChecked,
    Tick,
    Verify,
    WorkerExited,
    WorkerLost,
)

from tests.unit.core.host import GEOMETRY, NONE, Host, Instance, keys
from tests.unit.core.recovering import SMALL, digest_of, recovered

ALWAYS = CoreIntegrity(Verify.ALWAYS, sample_bytes_per_s=0)
SAMPLING = CoreIntegrity(sample_bytes_per_s=4096 * 10)
Make = Callable[..., Host]


@pytest.fixture
def make(table: Any) -> Make:
    """A host with an integrity of its own."""

    def make_one(integrity: CoreIntegrity, geometry: PoolGeometry = GEOMETRY) -> Host:
        host = Host(table, geometry=geometry)
        pages = (geometry.first_extent_offset + geometry.capacity_bytes) // PAGE_BYTES
        host.machine = Machine(
            table(256, pages), lambda: host.now_s, CoreLimits(), geometry, integrity=integrity
        )
        return host

    return make_one


class TestVerifyAlways:
    def test_every_load_verifies_every_block_again(self, make: Make) -> None:
        one = make(ALWAYS).instance()
        one.stored(1, 2)
        for _ in range(2):
            load = one.load(one.lease(1, 2), [0, 1])
            assert load.posts[0].verify is not None
            assert load.posts[0].verify.tolist() == [1, 1]
            load.finish()

    def test_recovered_blocks_are_verified_after_their_first_load_too(self, make: Make, table: Any) -> None:
        host = make(ALWAYS)
        host.do(recovered([(digest_of(table), 0, 1)], [(0, 1, [SMALL[0]])]))
        one = host.instance()
        one.load(one.lease(1), [0]).finish()
        assert one.load(one.lease(1), [0]).posts[0].verify is not None

    def test_by_default_what_this_daemon_stored_is_checked_by_record_only(self, host: Host) -> None:
        one = host.instance()
        one.stored(1)
        assert one.load(one.lease(1), [0]).posts[0].verify is None


class TestWhoFoundIt:
    def test_a_load(self, make: Make) -> None:
        host = make(ALWAYS)
        one = host.instance()
        one.stored(1)
        one.load(one.lease(1), [0]).part(0, PartOutcome.FAILED, corrupt=True)
        assert (host.counters.corrupt_on_load, host.counters.integrity_failures) == (1, 1)

    @pytest.mark.parametrize("integrity", [ALWAYS, CoreIntegrity()])
    def test_the_first_load_after_a_restart(self, make: Make, table: Any, integrity: CoreIntegrity) -> None:
        host = make(integrity)
        host.do(recovered([(digest_of(table), 0, 1)], [(0, 1, [SMALL[0]]), (0, 2, [SMALL[1]])]))
        one = host.instance()
        one.load(one.lease(2), [0]).finish()
        one.load(one.lease(1), [0]).part(0, PartOutcome.FAILED, corrupt=True)
        one.load(one.lease(2), [0]).part(0, PartOutcome.FAILED, corrupt=True)  # it was sound at first
        assert (host.counters.corrupt_after_restart, host.counters.corrupt_on_load) == (1, 1)


def tick(host: Host, after_s: float = 0.1) -> list[CheckSlots]:
    """Time passes; what is asked for then."""
    host.now_s += after_s
    host.do(Tick())
    return host.of(CheckSlots)


def checked(host: Host, check: CheckSlots, *corrupt: int, looked_at: int | None = None) -> None:
    count = len(check.slots) if looked_at is None else looked_at
    host.do(SlotsChecked(check.worker, check.check, count, np.array(corrupt, np.uint32)))


def first_check(host: Host) -> CheckSlots:
    tick(host)
    [check] = tick(host)
    return check


class TestSampling:
    def test_only_ready_blocks_are_looked_at_each_once(self, make: Make) -> None:
        host = make(CoreIntegrity(sample_bytes_per_s=1 << 30))
        one = host.instance()
        assert tick(host) == tick(host) == [], "there is nothing to look at"
        one.stored(1, 2, 3)
        running = one.store(4, 5)
        [check] = tick(host)
        [load] = one.load(one.lease(1, 2, 3), [8, 9, 10]).posts
        assert sorted(check.slots.tolist()) == sorted(load.slots.tolist())
        assert not set(check.slots.tolist()) & set(running.posts[0].slots.tolist())

    def test_no_more_than_the_rate_allows_and_one_request_at_a_time(self, make: Make) -> None:
        host = make(SAMPLING)
        host.instance().stored(*range(13))
        check = first_check(host)
        assert len(check.slots) == 1
        assert tick(host, 60) == [], "the first has not been answered"
        checked(host, check)
        [check] = tick(host)
        assert len(check.slots) <= 10, "a second's worth is made up for, no more"

    def test_the_rate_can_be_changed_while_it_runs(self, make: Make) -> None:
        host = make(CoreIntegrity(sample_bytes_per_s=0))
        host.instance().stored(*range(13))
        assert tick(host) == tick(host) == []
        host.do(Reconfigure(1 << 30, CoreDisks(), PoolPolicy.LRU, CoreDisks()))
        [check] = tick(host)
        assert len(check.slots) == 13
        assert host.machine.status().integrity.sample_bytes_per_s == 1 << 30
        checked(host, check)
        host.do(Reconfigure(0, CoreDisks(), PoolPolicy.LRU, CoreDisks()))
        assert tick(host, 60) == tick(host, 60) == []

    def test_a_slot_larger_than_the_rate_is_paid_for_afterwards(self, make: Make) -> None:
        host = make(CoreIntegrity(sample_bytes_per_s=100))
        host.instance().stored(1)
        check = first_check(host)
        assert len(check.slots) == 1
        checked(host, check)
        assert tick(host, 40) == []
        assert tick(host, 2) != []

    def test_what_a_busy_worker_left_out_is_not_counted(self, make: Make) -> None:
        host = make(CoreIntegrity(sample_bytes_per_s=1 << 30))
        host.instance().stored(1, 2, 3)
        check = first_check(host)
        checked(host, check, looked_at=2)
        assert (host.counters.sampled_slots, host.counters.sampled_bytes) == (2, 2 * 4096)

    def test_every_slot_is_as_likely_as_any_other(self, make: Make) -> None:
        """Slots of two sizes: those of 4 KiB lie 14 to an extent, those of 12 KiB 4 to an extent."""
        host = make(CoreIntegrity(sample_bytes_per_s=4096 * 20))
        small, large = host.instance(), host.instance("large", sizes=((12288,),), fields=b"large")
        small.stored(*range(20))
        large.stored(*range(6))
        seen: Counter[int] = Counter()
        for _ in range(1500):
            for check in tick(host):
                seen.update(check.slots.tolist())
                checked(host, check)
        assert len(seen) == 26
        mean = seen.total() / 26
        assert all(0.7 * mean < count < 1.3 * mean for count in seen.values()), seen

    def test_off_asks_for_nothing(self, make: Make) -> None:
        host = make(CoreIntegrity(sample_bytes_per_s=0))
        host.instance().stored(1)
        assert tick(host) == tick(host, 100) == []
        assert host.machine.status().expected_detection_s is None

    def test_a_daemon_that_drains_asks_for_nothing(self, make: Make) -> None:
        host = make(SAMPLING)
        host.instance().stored(1)
        host.do(Drain())
        assert tick(host) == tick(host, 100) == []

    def test_a_lost_worker_is_waited_for_no_more(self, make: Make) -> None:
        host = make(SAMPLING)
        one = host.instance()
        one.stored(1)
        check = first_check(host)
        host.do(WorkerLost(check.worker, "killed"))
        assert tick(host, 1) == [], "there is no other"
        host.do(WorkerExited(check.worker))
        worker = host.worker()
        [again] = tick(host, 1)
        assert (again.worker, again.check) == (worker, check.check + 1)
        checked(host, check, 0)
        assert host.counters.late_messages == 1
        assert one.host.counters.integrity_failures == 0

    def test_answers_nobody_asked_for_are_only_counted(self, make: Make) -> None:
        host = make(SAMPLING)
        host.instance().stored(1)
        check = first_check(host)
        host.do(SlotsChecked(WorkerId(99), check.check, 1, np.zeros(1, np.uint32)))
        host.do(SlotsChecked(check.worker, CheckId(99), 1, np.zeros(1, np.uint32)))
        assert host.counters.late_messages == 2
        checked(host, check, 0, 7)
        assert host.counters.corrupt_in_sample == 1, "a position beyond what was asked about is left out"

    def test_the_same_seed_chooses_the_same_slots(self, make: Make) -> None:
        stories = []
        for _ in range(2):
            host = make(SAMPLING)
            host.instance().stored(*range(13))
            story = []
            for _ in range(20):
                for check in tick(host):
                    story += check.slots.tolist()
                    checked(host, check)
            stories.append(story)
        assert stories[0] == stories[1]
        assert len(set(stories[0])) > 4

    def test_the_time_to_find_rot_follows_from_bytes_and_rate_and_from_what_can_be_asked_for(self) -> None:
        assert expected_detection_s(1 << 30, 1 << 14, 1 << 26) == 16
        assert expected_detection_s(1 << 30, 1 << 18, 1 << 40) == (1 << 18) / (SLOTS_MAX * 10)
        assert expected_detection_s(0, 0, 1) == 0

    def test_a_pool_that_is_nearly_empty_promises_no_more_than_draws_can_keep(self) -> None:
        """One block among many free slots: it is found when a draw meets it, however high the rate."""
        geometry = PoolGeometry(16, 1 << 26, 2 << 20)
        pages = (geometry.first_extent_offset + geometry.capacity_bytes) // PAGE_BYTES
        host = Host(NativeTable, geometry=geometry)
        integrity = CoreIntegrity(sample_bytes_per_s=1 << 30)
        table = NativeTable(1 << 18, pages)
        host.machine = Machine(table, lambda: host.now_s, CoreLimits(), geometry, integrity=integrity)
        core = host.machine.core
        one = host.instance()
        one.stored(1)
        core.blocks.slots.assign_free(4096, 200_000)
        promised_s = host.machine.status().expected_detection_s
        assert promised_s is not None
        assert promised_s > 2
        met = 0
        for _ in range(600):
            host.now_s += 0.1
            _, actions = host.machine.handle(Tick())
            for action in actions:
                assert isinstance(action, CheckSlots)
                met += len(action.slots)
                host.machine.handle(SlotsChecked(action.worker, action.check, len(action.slots), NONE))
        assert 60 / met < 2 * promised_s


class TestWhatSamplingFinds:
    @pytest.fixture
    def one(self, make: Make) -> Instance:
        return make(CoreIntegrity(sample_bytes_per_s=1 << 30)).instance()

    def find(self, one: Instance) -> tuple[CheckSlots, int]:
        """Block 1 is stored and chosen."""
        one.stored(1)
        check = first_check(one.host)
        [slot] = check.slots.tolist()
        return check, slot

    def test_is_a_miss_at_once_and_its_slot_is_set_aside(self, one: Instance) -> None:
        host = one.host
        check, slot = self.find(one)
        checked(host, check, 0)
        assert one.hits(1) == []
        assert [action.slots.tolist() for action in host.of(QuarantineSlots)] == [[slot]]
        assert host.of(FreeSlots) == []
        status = host.machine.status()
        assert (status.corrupt_slots, status.used_bytes, status.counters.corrupt_in_sample) == (1, 0, 1)
        assert one.store(1).posts[0].slots.tolist() != [slot]

    def test_waits_for_its_pins(self, one: Instance) -> None:
        host = one.host
        one.stored(1)
        held = one.lease(1)
        check = first_check(host)
        checked(host, check, 0)
        assert (one.hits(1), host.of(QuarantineSlots)) == ([], [])
        load = one.load(held, [5], keep_lease=True)
        assert load.posts[0].verify is not None, "whoever still loads it shall see it fail"
        load.part(0, PartOutcome.FAILED, corrupt=True)
        assert host.counters.integrity_failures == 1, "one block, whoever notices"
        host.do(ReleaseLeases(one.scheduler, one.epoch, (held,)))
        assert len(host.of(QuarantineSlots)) == 1

    def test_spares_the_other_shards_slots(self, make: Make) -> None:
        host = make(CoreIntegrity(sample_bytes_per_s=4096 * 10))
        pair = host.instance(sizes=((4096, 8192),))
        pair.stored(1)
        check = first_check(host)
        checked(host, check, 0)
        assert host.of(QuarantineSlots)[0].slots.tolist() == check.slots[:1].tolist()
        assert len(host.of(FreeSlots)[0].slots) == 1
        assert pair.hits(1) == []

    def test_is_nothing_if_the_slot_was_given_away_meanwhile(self, make: Make) -> None:
        host = make(CoreIntegrity(sample_bytes_per_s=1 << 30), PoolGeometry(1, 1 << 15, 2 << 20))
        one = host.instance()
        one.stored(*range(6))
        check = first_check(host)
        one.stored(*range(10, 16))  # takes the place of all of them
        checked(host, check, *range(len(check.slots)))
        assert one.hits(*range(10, 16)) == list(range(10, 16))
        assert host.counters.integrity_failures == 0

    def test_is_not_met_a_second_time(self, one: Instance) -> None:
        check, _ = self.find(one)
        checked(one.host, check, 0)
        assert tick(one.host, 5) == []


def test_what_an_earlier_daemon_has_set_aside_is_not_handed_out(host: Host) -> None:
    found = recovered([], [], extents=[(e, 4096) for e in range(4)])
    fields = {name: getattr(found, name) for name in found.__slots__} | {"corrupt": SMALL[:3]}
    host.do(type(found)(**fields))
    one = host.instance()
    load = one.store(*range(54))
    assert load.results == [0] * 53 + [3]
    assert not set(load.posts[0].slots.tolist()) & set(SMALL[:3].tolist())
    assert host.machine.status().corrupt_slots == 3


def test_an_extent_with_a_corrupt_slot_keeps_its_slot_size(make: Make) -> None:
    host = make(ALWAYS, PoolGeometry(1, 1 << 16, 2 << 20))
    one = host.instance()
    one.stored(1)
    one.load(one.lease(1), [0]).part(0, PartOutcome.FAILED, corrupt=True)
    large = host.instance("large", sizes=((8192,),), fields=b"large")
    host.now_s += 60
    assert large.store(1).results == [3]
    assert one.store(*range(14)).results == [0] * 13 + [3]


def test_checks_end_in_every_way_the_table_knows(make: Make) -> None:
    host = make(SAMPLING)
    host.instance().stored(1)
    check = first_check(host)
    checked(host, check)
    [check] = tick(host, 1)
    host.do(WorkerLost(check.worker, "killed"))
    counts = host.machine.core.transitions.counts
    assert [counts[pair] for pair in TABLE if pair[0] is CheckState.OPEN] == [1, 1]
    assert counts[CheckState.OPEN, Event.LOSE] == 1


def test_slots_are_found_by_extent_and_position() -> None:
    extents = np.array([0, 3, 1])
    sizes = np.array([4096, 12288, 5000])
    counts = np.array([GEOMETRY.slots_per_extent(size) for size in sizes.tolist()])
    positions = counts - 1
    wanted = [GEOMETRY.slots_of(e, s)[-1] for e, s in zip(extents.tolist(), sizes.tolist(), strict=True)]
    assert GEOMETRY.slots_at(extents, sizes, counts, positions).tolist() == wanted


def test_a_large_pool_is_sampled_at_its_rate() -> None:
    """What is asked for in ten seconds at a pool that is a tenth full is what the rate says, within a few
    per cent."""
    geometry = PoolGeometry(64, 1 << 22, 2 << 20)
    host = Host(NativeTable, geometry=geometry)
    pages = (geometry.first_extent_offset + geometry.capacity_bytes) // PAGE_BYTES
    table = NativeTable(1 << 17, pages)
    rate = 4 << 20
    host.machine = Machine(
        table, lambda: host.now_s, CoreLimits(), geometry, integrity=CoreIntegrity(sample_bytes_per_s=rate)
    )
    one = host.instance()
    for first in range(0, 6400, 64):
        one.submit(one.store_of(*range(64), hashes=keys(*range(first, first + 64)))).finish()
    host.now_s += 0.1
    host.machine.handle(Tick())
    asked = 0
    for _ in range(100):
        host.now_s += 0.1
        _, actions = host.machine.handle(Tick())
        for action in actions:
            assert isinstance(action, CheckSlots)
            asked += 4096 * len(action.slots)
            host.machine.handle(SlotsChecked(action.worker, action.check, len(action.slots), NONE))
    assert 0.9 * rate * 10 < asked <= rate * 10.2
