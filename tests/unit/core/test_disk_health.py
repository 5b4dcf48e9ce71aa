"""Disks that fail, are slow, lose their workers, and come back; and scrubs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from kvtierd.core.actions import PostDiskJob, QuarantineSlots
from kvtierd.core.errors import Reason
from kvtierd.core.ids import DiskId
from kvtierd.core.stimuli import DiskJobFinished, DiskRecovered, RegisterWords, StartScrub, Tick

from tests.unit.core.disk import CHECK, READ, WRITE, DiskHost, nothing
from tests.unit.core.host import NONE

MISS, PENDING, HIT = 0, 1, 2
Make = Callable[..., DiskHost]


def passes(host: DiskHost, seconds: float) -> None:
    host.now_s += seconds
    host.do(Tick())


def failing(host: DiskHost) -> None:
    """Three writes in a row fail."""
    one = host.instance("unlucky", fields=b"unlucky")
    for number in range(3):
        one.stored(500 + number)
        host.disk.fail(host.disk.open_jobs(WRITE)[0])
    assert host.disk.status.state == "failing"


class TestErrors:
    def test_in_a_row_make_a_disk_fail(self, disk_host: DiskHost) -> None:
        one = disk_host.instance()
        disk_host.stored_on_disk(one, 1)
        failing(disk_host)
        status = disk_host.disk.status
        assert status.counters.errors == 3
        assert status.why == "3 errors in a row: input/output error"
        one.stored(2)
        assert disk_host.disk.jobs == [], "it is not written"
        for number in range(100, 164, 8):
            one.stored(*range(number, number + 8))
        assert one.lookup(1).states.tolist() == [MISS], "it is not looked up"

    def test_with_successes_between_them_do_not(self, disk_host: DiskHost) -> None:
        one = disk_host.instance()
        for number in range(8):
            one.stored(number)
            [job] = disk_host.disk.open_jobs(WRITE)
            disk_host.disk.fail(job) if number % 2 else disk_host.disk.finish(job)
        assert disk_host.disk.status.state == "live"
        assert disk_host.disk.status.counters.errors == 4

    def test_of_blocks_that_had_gone_are_none(self, disk_host: DiskHost) -> None:
        one = disk_host.instance()
        for number in range(5):
            one.stored(number)
            disk_host.disk.fail(disk_host.disk.open_jobs(WRITE)[0], error="")
        assert disk_host.disk.status.counters.errors == 0
        assert disk_host.disk.status.state == "live"

    def test_are_jobs_that_took_too_long_as_well(self, disk_host: DiskHost) -> None:
        one = disk_host.instance()
        for number in range(3):
            one.stored(number)
            disk_host.disk.finish(disk_host.disk.open_jobs(WRITE)[0], busy_s=11.0)
        assert disk_host.disk.status.state == "failing"
        assert disk_host.disk.holds(one, 0, 1, 2) == [0, 1, 2]


class TestSlowJobs:
    def test_that_do_not_end_make_a_disk_fail(self, disk_host: DiskHost) -> None:
        one = disk_host.instance()
        for number in range(3):
            one.stored(number)
        passes(disk_host, 10.1)
        assert disk_host.disk.status.state == "failing"
        assert disk_host.disk.status.counters.errors == 3
        passes(disk_host, 10.1)
        assert disk_host.disk.status.counters.errors == 3, "each counts once"

    def test_that_wait_for_their_turn_do_not(self, disk_host: DiskHost) -> None:
        one = disk_host.instance()
        for number in range(6):
            one.stored(number)
        for _ in range(5):
            passes(disk_host, 4.0)
            disk_host.disk.finish(disk_host.disk.open_jobs()[0])
        passes(disk_host, 4.0)
        assert disk_host.disk.status.state == "live"
        assert disk_host.disk.status.counters.errors == 0


class TestProbe:
    def test_decides_after_a_while(self, disk_host: DiskHost) -> None:
        one = disk_host.instance()
        disk_host.stored_on_disk(one, 1)
        failing(disk_host)
        passes(disk_host, 29.0)
        assert disk_host.disk.open_jobs() == []
        passes(disk_host, 2.0)
        [job] = disk_host.disk.jobs
        assert (job.kind, len(job.disk_slots), len(job.host_slots)) == (CHECK, 1, 0)
        passes(disk_host, 40.0)
        assert disk_host.of(PostDiskJob) == [], "one at a time"
        disk_host.disk.finish(job.job)
        assert disk_host.disk.status.state == "live"
        one.stored(2)
        assert len(disk_host.disk.jobs) == 1

    def test_that_fails_is_tried_again_with_another_block(self, disk_host: DiskHost) -> None:
        one = disk_host.instance()
        disk_host.stored_on_disk(one, 1, 2)
        failing(disk_host)
        passes(disk_host, 31.0)
        [first] = disk_host.disk.jobs
        disk_host.disk.fail(first.job)
        assert disk_host.disk.status.state == "failing"
        passes(disk_host, 31.0)
        [second] = disk_host.disk.jobs
        assert second.disk_slots[0] != first.disk_slots[0]
        disk_host.disk.finish(second.job)
        assert disk_host.disk.status.state == "live"

    def test_that_finds_a_block_corrupt_has_shown_that_the_disk_works(self, disk_host: DiskHost) -> None:
        one = disk_host.instance()
        disk_host.stored_on_disk(one, 1)
        failing(disk_host)
        passes(disk_host, 31.0)
        disk_host.disk.finish(disk_host.disk.open_jobs()[0], corrupt=[0])
        assert len(disk_host.of(QuarantineSlots)) == 1
        assert disk_host.disk.status.state == "live"
        assert disk_host.disk.holds(one, 1) == []

    def test_of_a_disk_that_holds_nothing_is_one_more_try(self, disk_host: DiskHost) -> None:
        one = disk_host.instance()
        failing(disk_host)
        passes(disk_host, 31.0)
        assert disk_host.disk.status.state == "live"
        one.stored(1)
        disk_host.disk.fail(disk_host.disk.open_jobs()[0])
        assert disk_host.disk.status.state == "failing"

    def test_makes_what_could_not_be_read_readable_again(self, make_disk_host: Make) -> None:
        host = make_disk_host(policy={"errors_max": 1})
        one = host.instance()
        host.stored_on_disk(one, 1, 2)
        host.evict_all(one)
        one.lookup(1)
        host.disk.fail(host.disk.open_jobs(READ)[0])
        assert host.disk.status.state == "failing"
        passes(host, 31.0)
        host.disk.finish(host.disk.open_jobs(CHECK)[0])
        assert one.lookup(1).states.tolist() == [PENDING]


class TestWorkers:
    def test_that_are_lost_leave_the_disk_off_and_its_blocks_known(self, disk_host: DiskHost) -> None:
        one = disk_host.instance()
        disk_host.stored_on_disk(one, 1)
        disk_host.disk.lose()
        status = disk_host.disk.status
        assert (status.state, status.why, status.blocks) == ("off", "its worker was lost: stuck", 1)
        disk_host.disk.exit()
        disk_host.disk.live()
        assert disk_host.disk.status.state == "live"
        assert disk_host.disk.holds(one, 1) == [1]

    def test_leave_writes_under_way_to_end_with_their_process(self, disk_host: DiskHost) -> None:
        one = disk_host.instance()
        one.stored(1)
        lost = disk_host.disk.worker
        [job] = disk_host.disk.open_jobs()
        disk_host.disk.lose()
        disk_host.disk.live()
        disk_host.do(DiskJobFinished(lost, job, NONE, NONE))  # type: ignore[arg-type]
        assert disk_host.counters.late_messages == 1
        assert disk_host.disk.status.writing_bytes == 4096
        disk_host.disk.exit(lost)
        assert disk_host.disk.status.writing_bytes == 0
        assert disk_host.disk.holds(one, 1) == []
        disk_host.do(Tick())
        assert len(disk_host.disk.jobs) == 1, "it is written by the next one"

    def test_lost_with_jobs_count_as_errors(self, disk_host: DiskHost) -> None:
        one = disk_host.instance()
        for number in range(3):
            one.stored(number)
            disk_host.disk.lose()
            disk_host.disk.exit()
            disk_host.disk.live()
        assert disk_host.disk.status.state == "failing"

    def test_lost_before_the_slab_was_scanned_leave_it_to_the_next(self, make_disk_host: Make) -> None:
        host = make_disk_host(start=False)
        host.disk.live()
        host.disk.exit()
        host.disk.start()
        assert host.disk.status.state == "live"

    def test_lost_just_before_the_scan_is_told_leave_the_disk_off(self, make_disk_host: Make) -> None:
        host = make_disk_host(start=False)
        host.disk.live()
        host.disk.exit()
        host.do(DiskRecovered(DiskId(0), nothing()))
        assert host.disk.status.state == "off"
        host.disk.live()
        assert host.disk.status.state == "live"

    def test_of_disks_serve_no_rank(self, disk_host: DiskHost) -> None:
        one = disk_host.instance(worker=None)
        stimulus = RegisterWords(one.sessions[0], disk_host.disk.worker, 2, 16)
        assert disk_host.reason(stimulus) is Reason.WORKER_UNAVAILABLE


class TestMessages:
    def test_about_jobs_that_are_over_are_only_counted(self, disk_host: DiskHost) -> None:
        one = disk_host.instance()
        one.stored(1)
        [job] = disk_host.disk.open_jobs()
        disk_host.disk.finish(job)
        disk_host.do(DiskJobFinished(disk_host.disk.worker, job, NONE, NONE))  # type: ignore[arg-type]
        assert disk_host.counters.late_messages == 1
        assert disk_host.disk.status.counters.written_blocks == 1

    def test_show_how_fast_a_disk_is(self, disk_host: DiskHost) -> None:
        one = disk_host.instance()
        one.stored(1)
        disk_host.disk.finish(disk_host.disk.open_jobs()[0], bytes=1 << 20, busy_s=0.5)
        assert disk_host.disk.status.write_bytes_per_s == 2 << 20
        assert disk_host.disk.status.read_bytes_per_s == 0
        disk_host.now_s += 61.0
        assert disk_host.disk.status.write_bytes_per_s == 0, "that is long ago"


class TestScrub:
    @pytest.fixture
    def filled(self, make_disk_host: Make) -> DiskHost:
        """30 blocks in three extents."""
        host = make_disk_host(policy={"job_bytes": 5 * 4096})
        host.stored_on_disk(host.instance(), *range(30))
        return host

    def test_looks_at_every_block_once_one_job_at_a_time(self, filled: DiskHost) -> None:
        filled.do(StartScrub(DiskId(0)))
        seen: list[int] = []
        while filled.disk.open_jobs():
            [job] = filled.disk.jobs
            assert job.kind is CHECK
            assert len(job.disk_slots) <= 5
            seen += job.disk_slots.tolist()
            assert filled.disk.status.scrubbing
            filled.disk.finish(job.job)
        assert seen == sorted(set(seen)), "in the order in which they lie there"
        assert len(seen) == 30
        status = filled.disk.status
        assert (status.scrub_blocks, status.scrubbed_blocks, status.scrubbing) == (30, 30, False)

    def test_leaves_recency_alone(self, filled: DiskHost) -> None:
        table = filled.disk.core.blocks.table
        before = table.victims(0, 30)
        filled.do(StartScrub(DiskId(0)))
        filled.disk.finish_all()
        assert np.array_equal(table.victims(0, 30), before)

    def test_condemns_what_does_not_match(self, filled: DiskHost) -> None:
        filled.do(StartScrub(DiskId(0)))
        [job] = filled.disk.jobs
        filled.disk.finish(job.job, corrupt=[1, 2])
        [aside] = filled.of(QuarantineSlots)
        assert sorted(aside.slots) == sorted(job.disk_slots[1:3])
        filled.disk.finish_all()
        assert filled.counters.corrupt_on_disk == 2
        assert filled.disk.status.blocks == 28
        assert filled.disk.status.scrubbed_blocks == 30

    def test_says_nothing_of_a_slot_that_was_given_away_meanwhile(self, filled: DiskHost) -> None:
        filled.do(StartScrub(DiskId(0)))
        [job] = filled.disk.jobs
        one = filled.instance("another")
        filled.now_s += 1.0
        for number in range(100, 160, 4):
            one.stored(*range(number, number + 4))
            for write in filled.disk.open_jobs(WRITE):
                filled.disk.finish(write)
        filled.disk.finish(job.job, corrupt=range(5))
        assert filled.of(QuarantineSlots) == []
        assert filled.counters.corrupt_on_disk == 0

    def test_goes_on_when_the_disk_is_back(self, filled: DiskHost) -> None:
        filled.do(StartScrub(DiskId(0)))
        filled.disk.exit()
        filled.disk.live()
        filled.do(Tick())
        assert len(filled.disk.jobs) == 1
        filled.disk.finish_all()
        status = filled.disk.status
        assert not status.scrubbing
        assert status.scrub_blocks == status.scrubbed_blocks == 25, "what the lost worker had is left out"

    def test_of_nothing_is_over_at_once(self, disk_host: DiskHost) -> None:
        disk_host.do(StartScrub(DiskId(0)))
        assert not disk_host.disk.status.scrubbing

    def test_is_refused_where_it_makes_no_sense(self, filled: DiskHost) -> None:
        assert filled.reason(StartScrub(DiskId(1))) is Reason.MODE_UNSUPPORTED
        filled.do(StartScrub(DiskId(0)))
        assert filled.reason(StartScrub(DiskId(0))) is Reason.QUEUE_FULL
        filled.disk.lose()
        assert filled.reason(StartScrub(DiskId(0))) is Reason.WORKER_UNAVAILABLE
