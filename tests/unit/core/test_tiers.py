"""What every tier below the host has to keep (`kvtierd.core.tier.Tier`).

A new tier gets a class and an entry in `tests/unit/core/tiers.py`, and has to pass this file as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from kvtierd.core.blocks.table import BlockState
from kvtierd.core.ids import NO_ENTRY
from kvtierd.core.state.entities import GroupPlan
from kvtierd.core.stimuli import CoreDisks, CoreLimits, WorkerExited, WorkerLive, WorkerLost
from kvtierd.core.tier import Tier

from tests.unit.core.host import NONE, Instance, keys
from tests.unit.core.tiers import KINDS, TierKind

BELOW = tuple(range(1, 9))
"""What was stored, and then evicted from the host."""
NEVER = (900, 901)
WRITING, READY = int(BlockState.WRITING), int(BlockState.READY)


class Place:
    """A host above a tier that was given `BELOW`."""

    def __init__(self, kind: TierKind) -> None:
        self.kind = kind
        self.host = kind.host
        self.one: Instance = self.host.instance()
        self.one.stored(*BELOW)
        self.kind.arrive()
        self.evict_all()
        assert self.one.hits(*BELOW) == []

    def evict_all(self, first: int = 10_000) -> None:
        """From the host, by other blocks, which the tier is not there to keep."""
        self.kind.exit_workers()
        self.one.fill_pool(first)
        self.kind.start_workers()

    @property
    def tier(self) -> Tier:
        return self.host.machine.tier

    @property
    def plan(self) -> GroupPlan:
        [instance] = self.host.machine.core.instances.values()
        return instance.plans[0]

    @contextmanager
    def stimulus(self) -> Iterator[Tier]:
        """Between the beginning and the end of one."""
        core = self.host.machine.core
        core.begin(self.host.now_s)
        yield self.tier
        self.host.validate()
        self.host.actions = core.blocks.actions

    def found(self, *numbers: int) -> list[int]:
        """Which of these the tier can bring up now."""
        with self.stimulus() as tier:
            copies = tier.find(self.plan.space, keys(*numbers))
        assert copies.dtype == np.uint32
        assert copies.shape == (len(numbers),)
        return [number for number, copy in zip(numbers, copies, strict=True) if copy != NO_ENTRY]

    def bring_up(self, *numbers: int, in_order: bool = False) -> list[int]:
        """Has those brought up that the tier has; which of them come."""
        hashes = keys(*self.found(*numbers))
        with self.stimulus() as tier:
            copies = tier.find(self.plan.space, hashes)
            coming = tier.bring_up(self.plan, hashes, copies, in_order=in_order)
        assert coming.dtype == np.bool_
        assert coming.shape == (len(hashes),)
        return [number for number, comes in zip(self.found(*numbers), coming, strict=True) if comes]

    def entries(self, state: int, *numbers: int) -> np.ndarray:
        """On the host."""
        entries, states = self.host.machine.core.blocks.table.lookup(self.plan.space, keys(*numbers))
        chosen: np.ndarray = entries[states == state]
        return chosen

    def on_host(self, state: int, *numbers: int) -> list[int]:
        return [number for number in numbers if len(self.entries(state, number))]

    def picture(self) -> Any:
        core = self.host.machine.core
        dump = {name: array.tolist() for name, array in core.blocks.table.dump().items()}
        return dump, repr(self.host.machine.status()), core.blocks.actions


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest, table: Any) -> Callable[..., Place]:
    return lambda **options: Place(KINDS[request.param](table, **options))


@pytest.fixture
def place(make: Callable[..., Place]) -> Place:
    return make()


class TestQuestions:
    def test_the_right_tier_is_asked(self, place: Place) -> None:
        assert isinstance(place.tier, place.kind.tier)
        assert place.tier.keeps_evicted is place.kind.keeps

    def test_it_finds_what_was_stored_if_it_keeps_it_and_nothing_else(self, place: Place) -> None:
        assert place.tier.reads is place.kind.keeps
        assert place.found(*BELOW, *NEVER) == (list(BELOW) if place.kind.keeps else [])
        assert place.found() == []

    def test_it_finds_nothing_while_it_says_that_it_reads_nothing(self, place: Place) -> None:
        place.kind.exit_workers()
        assert not place.tier.reads
        assert place.found(*BELOW) == []
        assert place.bring_up(*BELOW) == []

    def test_they_change_nothing(self, place: Place) -> None:
        [instance] = place.host.machine.core.instances.values()
        instance.prefill_tokens_per_s = 1.0
        place.one.stored(50)
        with place.stimulus() as tier:
            before = place.picture()
            found = keys(*BELOW) if place.kind.keeps else keys()
            tier.find(place.plan.space, keys(*BELOW, *NEVER))
            copies = tier.find(place.plan.space, found)
            tier.in_time(place.entries(READY, 50))
            assert tier.load_loses(instance, [(place.plan, 1)], 16) is False, "nothing was measured"
            if len(found):
                assert tier.bringing_up_loses(instance, [(place.plan, found, copies)], 128) is False
            assert place.picture() == before

    def test_what_is_being_stored_comes_in_time(self, place: Place) -> None:
        place.one.store(60, 61)
        with place.stimulus() as tier:
            assert tier.in_time(place.entries(WRITING, 60, 61)).tolist() == [True, True]
            assert tier.in_time(NONE).tolist() == []


class TestBringingUp:
    def test_what_comes_is_being_written_and_readable_afterwards(self, place: Place) -> None:
        coming = place.bring_up(*BELOW)
        assert coming == (list(BELOW) if place.kind.keeps else [])
        assert place.on_host(WRITING, *BELOW) == coming
        with place.stimulus() as tier:
            assert tier.in_time(place.entries(WRITING, *BELOW)).all()
        place.kind.arrive()
        assert place.on_host(READY, *BELOW) == coming
        assert place.found(*BELOW) == coming, "and it keeps what it has brought up"

    def test_in_order_nothing_begins_before_what_is_in_front_of_it(self, make: Callable[..., Place]) -> None:
        place = make(queue_blocks=2)
        coming = place.bring_up(*BELOW, in_order=True)
        assert coming == (list(BELOW) if place.kind.keeps else []), "the others when the queue has room"
        begun = place.on_host(WRITING, *BELOW)
        assert begun == list(BELOW[: len(begun)])
        assert 0 < len(begun) < len(BELOW) or not place.kind.keeps

    def test_takes_nothing_that_is_held_or_being_written(self, make: Callable[..., Place]) -> None:
        place = make(limits=CoreLimits(leased_fraction_max=1.0))
        stored, written = tuple(range(100, 140)), tuple(range(200, 214))
        for first in range(100, 140, 8):
            place.one.stored(*range(first, first + 8))
        assert place.one.lookup(*stored, lease=True).hits == 40
        place.one.store(*written)
        coming = place.bring_up(*BELOW)
        assert coming == (list(BELOW[:2]) if place.kind.keeps else []), "56 slots, of which 54 are taken"
        assert place.on_host(READY, *stored) == list(stored)
        assert place.on_host(WRITING, *written) == list(written)
        assert place.on_host(WRITING, *BELOW) == coming

    def test_what_its_process_does_not_finish_is_late_and_goes_with_it(self, place: Place) -> None:
        coming = place.bring_up(*BELOW)
        place.kind.lose_workers()
        assert place.on_host(WRITING, *BELOW) == coming, "it may still be writing"
        with place.stimulus() as tier:
            assert not tier.in_time(place.entries(WRITING, *BELOW)).any()
        place.kind.exit_workers()
        assert place.on_host(WRITING, *BELOW) == place.on_host(READY, *BELOW) == []

    def test_of_nothing_is_nothing(self, place: Place) -> None:
        with place.stimulus() as tier:
            before = place.picture()
            assert tier.bring_up(place.plan, keys(), NONE, in_order=True).tolist() == []
            assert place.picture() == before


class TestTold:
    def test_of_no_blocks_nothing_happens(self, place: Place) -> None:
        with place.stimulus() as tier:
            before = place.picture()
            tier.stored(place.plan, NONE)
            tier.found(place.plan.domain, NONE)
            assert place.picture() == before

    def test_of_others_workers_nothing_happens(self, place: Place) -> None:
        worker = place.host.worker()
        found = place.found(*BELOW)
        coming = place.bring_up(*BELOW[:2])
        place.host.do(WorkerLost(worker, "stuck"))
        place.host.do(WorkerExited(worker))
        place.host.do(WorkerLive(worker, "cpu"))
        assert place.on_host(WRITING, *BELOW) == coming
        assert place.found(*BELOW) == found

    def test_of_another_policy_it_goes_on_with_what_it_has(self, place: Place) -> None:
        found = place.found(*BELOW)
        with place.stimulus() as tier:
            tier.reconfigure(CoreDisks(errors_max=1), CoreDisks(errors_max=1))
            tier.tick()
        assert place.found(*BELOW) == found

    def test_of_blocks_that_are_stored_and_evicted_again_it_still_has_them(self, place: Place) -> None:
        place.one.stored(*BELOW)
        place.kind.arrive()
        place.evict_all(20_000)
        assert place.found(*BELOW) == (list(BELOW) if place.kind.keeps else [])
