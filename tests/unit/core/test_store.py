"""A store that hosts share: what its worker is told to look for, what becomes of what it finds, and what is
forgotten."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kvtierd.core.actions import DiskJobKind, OpenSlots, PostDiskJob, UnwatchSpace, WatchSpace
from kvtierd.core.errors import Reason
from kvtierd.core.ids import DiskId, SpaceId, TenantTag
from kvtierd.core.stimuli import Drain, EndSession, PackFound, StartScrub, Tick, WorkerLost, WriteMode

from tests.unit.core.host import Instance, keys
from tests.unit.core.store import StoreHost

THEIRS = (1, 2, 3, 4, 5)
"""What another host has put there."""


@pytest.fixture
def host(table: Any) -> StoreHost:
    return StoreHost(table)


@pytest.fixture
def one(host: StoreHost) -> Instance:
    """A live instance, whose space is watched."""
    one = host.instance()
    host.watched()
    return one


def space_of(host: StoreHost) -> SpaceId:
    [instance] = host.machine.core.instances.values()
    return instance.plans[0].space


class TestWatching:
    def test_the_spaces_of_live_instances_are_watched_once(self, host: StoreHost) -> None:
        assert host.watched() == []
        host.instance()
        [told] = host.watched()
        assert isinstance(told, WatchSpace)
        assert (told.space, told.group, told.worker) == (space_of(host), 0, host.disk.worker)
        assert told.sizes == (4096,)
        assert host.watched() == []

    def test_another_worker_is_told_anew(self, host: StoreHost, one: Instance) -> None:
        host.disk.exit()
        assert host.watched() == []
        host.disk.live()
        [told] = host.watched()
        assert told.worker == host.disk.worker

    def test_what_nobody_uses_is_watched_no_longer(self, host: StoreHost, one: Instance) -> None:
        space = space_of(host)
        for session in list(host.machine.core.sessions):
            host.do(EndSession(session, "over"))
        assert host.watched() == [UnwatchSpace(host.disk.worker, space)]

    def test_tenants_that_do_not_share_are_not_looked_for(self, table: Any) -> None:
        host = StoreHost(table, policy={"tenants": frozenset({TenantTag(1)})})
        one = host.instance()
        [instance] = host.machine.core.instances.values()
        assert instance.plans[0].domain.tenant != 1
        assert host.watched() == []
        one.stored(*THEIRS)
        assert host.store.open_jobs() == [], "nor is what they store put there"


class TestFinds:
    def test_what_others_have_put_there_can_be_brought_up(self, host: StoreHost, one: Instance) -> None:
        answer = host.found(space_of(host), keys(*THEIRS))
        assert answer.positions.tolist() == [0, 1, 2, 3, 4]
        [opened] = host.of(OpenSlots)
        assert opened.disk == 0
        assert one.hits(*THEIRS) == [], "nothing is there before its worker has said so"
        host.disk.finish_all()
        one.lookup(*THEIRS)
        host.disk.finish_all()
        assert one.hits(*THEIRS) == list(THEIRS)

    def test_only_what_is_not_known_is_wanted(self, host: StoreHost, one: Instance) -> None:
        space = space_of(host)
        assert host.adopted(space, keys(1, 2)) == [0, 1]
        assert host.adopted(space, keys(1, 2)) == []
        assert host.adopted(space, keys(2, 3, 1, 4)) == [1, 3]

    def test_what_is_stored_here_and_known_there_is_not_put_again(
        self, host: StoreHost, one: Instance
    ) -> None:
        host.adopted(space_of(host), keys(1, 2))
        one.stored(1, 2, 3)
        [job] = host.disk.open_jobs(DiskJobKind.WRITE)
        assert len(host.disk.core.jobs[job].entries) == 1  # type: ignore[index]

    def test_what_does_not_fit_its_slots_is_not_there(self, host: StoreHost, one: Instance) -> None:
        host.found(space_of(host), keys(*THEIRS))
        [job] = host.disk.open_jobs()
        host.disk.finish(job, failed=[1])
        one.lookup(*THEIRS)
        host.disk.finish_all()
        assert one.hits(*THEIRS) == [1]

    def test_of_a_space_that_is_not_watched_nothing_is_wanted(self, host: StoreHost, one: Instance) -> None:
        assert host.adopted(SpaceId(99), keys(*THEIRS)) == []

    def test_while_draining_nothing_is_wanted(self, host: StoreHost, one: Instance) -> None:
        host.do(Drain())
        assert host.adopted(space_of(host), keys(*THEIRS)) == []

    def test_of_a_pack_with_more_blocks_than_there_is_room_for_the_first_are_kept(
        self, host: StoreHost, one: Instance
    ) -> None:
        wanted = host.adopted(space_of(host), keys(*range(100, 200)))
        assert wanted == list(range(56)), "56 slots"

    def test_while_the_store_is_left_alone_the_answer_waits(self, host: StoreHost, one: Instance) -> None:
        """The worker tells of each pack once."""
        space = space_of(host)
        host.adopted(space, keys(9))
        for _ in range(3):
            one.lookup(9)
            host.disk.fail(host.disk.open_jobs(DiskJobKind.READ)[0], "no answer in 10 s")
        host.do(PackFound(host.disk.worker, 77, space, keys(*THEIRS)))
        assert host.actions == []
        host.watched()
        assert host.of(PostDiskJob) == [], "it is left alone still"
        host.now_s += 31
        host.do(Tick())
        host.disk.finish(host.disk.open_jobs(DiskJobKind.CHECK)[0])
        host.do(Tick())
        [answer] = host.of(PostDiskJob)
        assert (answer.pack, answer.positions.tolist()) == (77, [0, 1, 2, 3, 4])
        host.do(Tick())
        assert host.of(PostDiskJob) == [], "once"

    def test_an_answer_that_waits_goes_with_its_worker(self, host: StoreHost, one: Instance) -> None:
        host.adopted(space_of(host), keys(9))
        for _ in range(3):
            one.lookup(9)
            host.disk.fail(host.disk.open_jobs(DiskJobKind.READ)[0], "no answer in 10 s")
        host.do(PackFound(host.disk.worker, 77, space_of(host), keys(*THEIRS)))
        host.disk.exit()
        host.disk.live()
        host.now_s += 31
        for _ in range(2):
            host.do(Tick())
            assert [job.pack for job in host.of(PostDiskJob) if job.pack] == []

    def test_a_worker_that_is_lost_tells_nothing(self, host: StoreHost, one: Instance) -> None:
        space, lost = space_of(host), host.disk.worker
        host.do(WorkerLost(lost, "stuck"))
        before = host.machine.status().counters.late_messages
        host.do(PackFound(lost, 1, space, keys(*THEIRS)))
        assert host.machine.status().counters.late_messages == before + 1
        assert host.actions == []


class TestForgetting:
    @pytest.fixture
    def known(self, host: StoreHost, one: Instance) -> Instance:
        host.adopted(space_of(host), keys(*THEIRS))
        return one

    def blocks(self, host: StoreHost) -> int:
        return host.disk.status.blocks

    def test_what_is_gone_is_forgotten_and_the_store_is_well(self, host: StoreHost, known: Instance) -> None:
        known.lookup(*THEIRS)
        [job] = host.disk.open_jobs(DiskJobKind.READ)
        host.disk.finish(job, gone=[2, 3])
        assert known.hits(*THEIRS) == [1, 2, 5]
        assert self.blocks(host) == 3
        assert (host.disk.core.tally.errors, host.disk.status.state) == (0, "live")

    def test_what_does_not_match_is_forgotten_and_its_slot_used_again(
        self, host: StoreHost, known: Instance
    ) -> None:
        known.lookup(*THEIRS)
        [job] = host.disk.open_jobs(DiskJobKind.READ)
        host.disk.finish(job, corrupt=[0])
        assert known.hits(*THEIRS) == [2, 3, 4, 5]
        status = host.disk.status
        assert (status.blocks, status.corrupt_slots, status.counters.corrupt_blocks) == (4, 0, 1)
        assert host.adopted(space_of(host), keys(1)) == [0], "another pack may have it as it should be"

    def test_what_could_not_be_read_is_tried_again(self, host: StoreHost, known: Instance) -> None:
        known.lookup(*THEIRS)
        [job] = host.disk.open_jobs(DiskJobKind.READ)
        host.disk.fail(job, "no answer in 10 s")
        assert host.disk.core.tally.errors == 1
        known.lookup(*THEIRS)
        [job] = host.disk.open_jobs(DiskJobKind.READ)
        host.disk.finish(job)
        assert known.hits(*THEIRS) == list(THEIRS)

    def test_after_errors_it_is_left_alone_and_one_read_decides(
        self, host: StoreHost, known: Instance
    ) -> None:
        for _ in range(3):
            known.lookup(*THEIRS)
            [job] = host.disk.open_jobs(DiskJobKind.READ)
            host.disk.fail(job, "no answer in 10 s")
        assert host.disk.status.state == "failing"
        assert known.lookup(*THEIRS).states.tolist()[:1] == [0]
        host.now_s += 31
        host.watched()
        [probe] = host.disk.open_jobs(DiskJobKind.CHECK)
        host.disk.finish(probe)
        assert host.disk.status.state == "live"

    def test_a_probe_of_what_is_gone_forgets_it_and_the_store_is_well(
        self, host: StoreHost, known: Instance
    ) -> None:
        for _ in range(3):
            known.lookup(*THEIRS)
            [job] = host.disk.open_jobs(DiskJobKind.READ)
            host.disk.fail(job, "no answer in 10 s")
        host.now_s += 31
        host.watched()
        [probe] = host.disk.open_jobs(DiskJobKind.CHECK)
        host.disk.finish(probe, gone=[0])
        assert (host.disk.status.state, self.blocks(host)) == ("live", 4)

    def test_with_its_worker_goes_what_only_that_knew(self, host: StoreHost, known: Instance) -> None:
        known.lookup(*THEIRS)
        host.disk.lose()
        assert self.blocks(host) == 5
        host.disk.exit()
        assert self.blocks(host) == 0
        assert known.lookup(*THEIRS).states.tolist()[:1] == [0]

    def test_what_is_still_on_the_host_is_put_again(self, table: Any) -> None:
        host = StoreHost(table, mode=WriteMode.ON_REUSE)
        one = host.instance()
        host.watched()
        one.stored(1, 2)
        assert host.disk.open_jobs() == []
        one.lookup(1, 2)
        host.disk.finish_all()
        assert self.blocks(host) == 2
        host.disk.exit()
        host.disk.live()
        one.lookup(1, 2)
        assert self.blocks(host) == 0


class TestPuts:
    def test_a_pack_has_blocks_of_one_space(self, host: StoreHost, one: Instance) -> None:
        other = host.instance("another", fields=b"other")
        host.disk.exit()
        one.stored(1, 2)
        other.stored(3)
        host.disk.live()
        host.watched()
        jobs = [host.disk.core.jobs[job] for job in host.disk.open_jobs(DiskJobKind.WRITE)]  # type: ignore[index]
        table = host.disk.core.blocks.table
        assert all(len(np.unique(table.spaces(job.entries))) == 1 for job in jobs)

    def test_what_failed_is_put_again_without_being_pressed(self, host: StoreHost, one: Instance) -> None:
        one.stored(1, 2)
        host.disk.fail(host.disk.open_jobs(DiskJobKind.WRITE)[0], "no answer in 10 s")
        assert host.disk.open_jobs() == [], "not at once"
        host.do(Tick())
        host.disk.finish_all()
        assert host.disk.holds(one, 1, 2) == [1, 2]

    def test_it_is_not_scrubbed(self, host: StoreHost) -> None:
        refused = host.refused(StartScrub(DiskId(0)))
        assert refused.reason is Reason.MODE_UNSUPPORTED
        assert "when it is read" in refused.message


class TestRefusals:
    """The store answers, and takes nothing: it is full, or forbids it."""

    WHY = "InternalError: no room"

    @pytest.fixture
    def refusing(self, host: StoreHost, one: Instance) -> Instance:
        """A host that knows of THEIRS, and whose last three writes were refused."""
        host.adopted(space_of(host), keys(*THEIRS))
        for number in range(3):
            one.stored(100 + number)
            self.refuse(host)
        return one

    def refuse(self, host: StoreHost) -> None:
        [job] = host.disk.open_jobs(DiskJobKind.WRITE)
        host.disk.fail(job, self.WHY, refused=True)

    def writes(self, host: StoreHost) -> list[int]:
        """How many blocks each write that is under way has."""
        jobs = host.disk.core.jobs
        return [len(jobs[job].entries) for job in host.disk.open_jobs(DiskJobKind.WRITE)]  # type: ignore[index]

    def test_in_a_row_end_writes_and_nothing_else(self, host: StoreHost, refusing: Instance) -> None:
        status = host.disk.status
        assert (status.state, status.counters.errors) == ("refusing", 3)
        assert status.why == f"3 writes in a row were refused: {self.WHY}"
        refusing.stored(200)
        host.do(Tick())
        assert self.writes(host) == []
        refusing.lookup(*THEIRS)
        host.disk.finish_all()
        assert refusing.hits(*THEIRS) == list(THEIRS)
        assert host.disk.status.state == "refusing", "a read says nothing about writes"

    def test_after_a_while_one_block_decides(self, host: StoreHost, refusing: Instance) -> None:
        host.now_s += 31
        host.do(Tick())
        assert self.writes(host) == [1]
        host.do(Tick())
        assert self.writes(host) == [1], "one at a time"
        self.refuse(host)
        host.do(Tick())
        assert self.writes(host) == [], "and then not for a while"
        host.now_s += 31
        host.do(Tick())
        host.disk.finish(host.disk.open_jobs(DiskJobKind.WRITE)[0])
        assert host.disk.status.state == "live"
        host.do(Tick())
        host.disk.finish_all()
        assert host.disk.holds(refusing, 100, 101, 102) == [100, 101, 102]

    def test_with_success_between_them_are_no_trouble(self, host: StoreHost, one: Instance) -> None:
        for number in range(6):
            one.stored(100 + number)
            [job] = host.disk.open_jobs(DiskJobKind.WRITE)
            if number % 2:
                host.disk.finish(job)
            else:
                host.disk.fail(job, self.WHY, refused=True)
        assert (host.disk.status.state, host.disk.core.tally.errors) == ("live", 3)

    def test_do_not_hide_that_nothing_answers(self, host: StoreHost, refusing: Instance) -> None:
        for _ in range(3):
            refusing.lookup(*THEIRS)
            host.disk.fail(host.disk.open_jobs(DiskJobKind.READ)[0], "no answer in 10 s")
        assert host.disk.status.state == "failing"


class TestTrial:
    """A store that has not answered yet, or not the last time, is given one job at a time."""

    @pytest.fixture
    def host(self, table: Any) -> StoreHost:
        """A store that has not answered yet, and takes two blocks at once."""
        host = StoreHost(table, policy={"job_bytes": 2 * 4096})
        host.store.core.answered = False
        return host

    def writes(self, host: StoreHost) -> list[int]:
        """How many blocks each write that is under way has."""
        jobs = host.disk.core.jobs
        return [len(jobs[job].entries) for job in host.disk.open_jobs(DiskJobKind.WRITE)]  # type: ignore[index]

    def test_one_job_shows_whether_it_takes_any(self, host: StoreHost, one: Instance) -> None:
        one.stored(1, 2, 3, 4, 5)
        assert self.writes(host) == [2]
        one.stored(6)
        host.do(Tick())
        assert self.writes(host) == [2], "one at a time"
        host.disk.finish(host.disk.open_jobs(DiskJobKind.WRITE)[0])
        assert self.writes(host) == [2, 2], "as soon as it has taken that"
        host.disk.finish_all()
        assert host.disk.holds(one, 1, 2, 3, 4, 5, 6) == [1, 2, 3, 4, 5, 6]

    def test_an_error_puts_it_on_trial_again(self, host: StoreHost, one: Instance) -> None:
        host.store.core.answered = True
        one.stored(1, 2, 3, 4)
        for job in host.disk.open_jobs(DiskJobKind.WRITE):
            host.disk.fail(job, "no answer in 10 s")
        host.do(Tick())
        assert self.writes(host) == [2]

    def test_so_does_another_worker(self, host: StoreHost, one: Instance) -> None:
        host.store.core.answered = True
        host.disk.exit()
        host.disk.live()
        one.stored(1, 2, 3, 4)
        assert self.writes(host) == [2]

    def test_what_others_have_put_there_shows_that_it_answers(self, host: StoreHost, one: Instance) -> None:
        host.adopted(space_of(host), keys(*THEIRS))
        one.stored(101, 102, 103, 104)
        assert self.writes(host) == [2, 2]

    def test_disks_of_this_host_are_trusted(self, table: Any) -> None:
        host = StoreHost(table, disks=1, policy={"job_bytes": 4096})
        host.disks[0].core.answered = False
        host.instance().stored(1, 2)
        jobs = host.disks[0].core.jobs.values()
        assert [len(job.entries) for job in jobs] == [1, 1]


class TestCompression:
    """A store may have blocks in fewer bytes than they have here."""

    def test_what_it_saves_is_counted(self, host: StoreHost, one: Instance) -> None:
        one.stored(1, 2)
        [job] = host.store.open_jobs(DiskJobKind.WRITE)
        host.store.finish(job, bytes=8192, saved_bytes=3000)
        host.evict_host(one)
        one.lookup(1, 2)
        [job] = host.store.open_jobs(DiskJobKind.READ)
        host.store.finish(job, bytes=8192, saved_bytes=2000)
        counters = host.store.status.counters
        assert (counters.written_bytes, counters.written_saved_bytes) == (8192, 3000)
        assert (counters.read_bytes, counters.read_saved_bytes) == (8192, 2000)

    def test_no_job_saves_more_than_it_moves(self, host: StoreHost, one: Instance) -> None:
        one.stored(1, 2)
        [job] = host.store.open_jobs(DiskJobKind.WRITE)
        host.store.finish(job, failed=[1], saved_bytes=1 << 60)
        counters = host.store.status.counters
        assert counters.written_bytes == counters.written_saved_bytes == 4096

    def test_only_what_goes_there_counts_against_the_limit(self, table: Any) -> None:
        """`store.write_bytes_per_s` is for a network, or for who pays for it."""
        host = StoreHost(table, policy={"write_bytes_per_s": 4 * 4096})
        one = host.instance()
        one.stored(*range(4))
        for job in host.store.open_jobs(DiskJobKind.WRITE):
            host.store.finish(job)
        assert host.store.status.write_budget_bytes == 0
        host.now_s += 1.0
        one.stored(*range(10, 14))
        for job in host.store.open_jobs(DiskJobKind.WRITE):
            count = host.store.core.jobs[job].slots.size  # type: ignore[index]
            host.store.finish(job, saved_bytes=count * 1024)
        assert host.store.status.write_budget_bytes == 4 * 1024
