"""Processes and workers die: what ends, what waits for a fence, and what is told to whom."""

from __future__ import annotations

import numpy as np
import pytest
from kvtierd.core.actions import (
    FreeSlots,
    InstanceView,
    ReleaseSession,
    RevokePart,
    SessionEnded,
    TransferEnd,
    TransferEnded,
)
from kvtierd.core.errors import Reason
from kvtierd.core.ids import WorkerId
from kvtierd.core.stimuli import (
    EndSession,
    PartOutcome,
    RegisterWords,
    RenewSession,
    SessionReleased,
    UnregisterMemory,
    WorkerExited,
    WorkerLost,
)

from tests.unit.core.host import SCHEDULER, Host, Instance, finished, released


class TestAProcessDies:
    def test_its_epoch_ends_for_all_processes_of_the_instance(self, host: Host) -> None:
        pair = host.instance(sizes=((4096, 4096),), together=False)
        host.do(EndSession(pair.sessions[1], "killed"))
        for process in (0, SCHEDULER):
            [ended] = host.told(pair.sessions[process], SessionEnded)
            assert ended.why.reason is Reason.EPOCH_ENDED
        assert host.told(pair.sessions[1], SessionEnded) == []
        assert {release.session for release in host.of(ReleaseSession)} == {
            pair.sessions[0],
            pair.sessions[1],
        }
        assert host.reason(RenewSession(pair.scheduler)) is Reason.EPOCH_ENDED
        assert host.counters.ended_epochs == 1

    def test_the_name_is_free_at_once(self, host: Host) -> None:
        one = host.instance()
        host.do(EndSession(one.scheduler, "killed"))
        again = host.instance()
        assert again.epoch != one.epoch
        assert host.reason(one.lookup_of(np.zeros((1, 32), np.uint8))) is Reason.EPOCH_ENDED

    def test_nothing_of_it_is_committed_even_if_the_copies_were_good(self, host: Host) -> None:
        one = host.instance()
        running = one.store(1, 2)
        host.do(EndSession(one.scheduler, "killed"))
        assert host.of(FreeSlots) == [], "they may still be written"
        again = host.instance("again")
        assert again.store(1).results == [2], "pending, until the worker has ended it"
        host.do(finished(running.posts[0].worker, running.posts[0].part))
        assert len(host.of(FreeSlots)[0].slots) == 2
        assert host.told(one.scheduler, TransferEnded) == []
        assert again.hits(1, 2) == []
        assert host.counters.cancelled_transfers == 1

    def test_ready_blocks_stay(self, host: Host) -> None:
        one = host.instance()
        one.stored(1)
        host.do(EndSession(one.scheduler, "killed"))
        host.do(released(one))
        assert host.machine.status().instances == ()
        assert host.instance("again").hits(1) == [1]

    def test_it_is_over_when_every_worker_has_let_go(self, host: Host) -> None:
        pair = host.instance(sizes=((4096, 4096),))
        host.do(EndSession(pair.sessions[0], "killed"))
        host.do(released(pair, 0))
        assert [instance.fencing for instance in host.machine.status().instances] == [True]
        host.do(released(pair, 1))
        assert host.machine.status().instances == ()
        assert host.reason(RenewSession(pair.sessions[1])) is Reason.NOT_ATTACHED

    def test_an_instance_that_never_registered_is_over_at_once(self, host: Host) -> None:
        one = host.instance(worker=None)
        host.do(EndSession(one.scheduler, "killed"))
        assert host.of(ReleaseSession) == []
        assert host.machine.status().instances == ()

    def test_ending_twice_or_a_stranger_is_nothing(self, host: Host) -> None:
        pair = host.instance(sizes=((4096, 4096),))
        host.do(EndSession(pair.sessions[0], "killed"))
        for session in (*pair.sessions.values(), pair.sessions[0]):
            host.do(EndSession(session, "again"))
            assert host.actions == []
        assert host.counters.ended_epochs == 1


class TestAWorkerIsLost:
    def test_its_transfers_wait_for_its_exit(self, host: Host) -> None:
        one = host.instance()
        running = one.store(1)
        worker = running.posts[0].worker
        host.do(WorkerLost(worker, "stuck"))
        assert running.ended() is None
        assert host.of(FreeSlots) == []
        host.do(finished(worker, running.posts[0].part))
        assert running.ended() is None, "what a lost worker says does not count"
        host.do(WorkerExited(worker))
        ended = running.ended()
        assert ended is not None
        assert ended.error is not None
        assert (ended.end, ended.error.reason) == (TransferEnd.FAILED, Reason.WORKER_LOST)
        assert len(host.of(FreeSlots)[0].slots) == 1
        assert host.counters.late_messages == 1

    def test_other_ranks_are_called_off_and_other_instances_untouched(self, host: Host) -> None:
        pair = host.instance(sizes=((4096, 4096),), worker=None)
        workers = [host.worker(), host.worker()]
        for rank, worker in enumerate(workers):
            pair.register(rank, worker)
        other = host.instance("other", worker=workers[1])
        running, untouched = pair.store(1), other.store(2)
        host.do(WorkerLost(workers[0], "stuck"))
        assert [revoke.part for revoke in host.of(RevokePart)] == [running.posts[1].part]
        assert untouched.finish().end is TransferEnd.DONE
        assert host.machine.status().instances[1].ready

    def test_its_ranks_register_again_and_the_instance_goes_on(self, host: Host) -> None:
        pair = host.instance(sizes=((4096, 4096),), together=False)
        pair.stored(1)
        lease = pair.lease(1)
        assert isinstance(pair.worker, int)
        host.do(WorkerLost(WorkerId(pair.worker), "stuck"))
        [view] = host.told(pair.scheduler, InstanceView)
        assert (view.ready, view.missing_ranks, view.reregister_ranks) == (False, (0, 1), (0, 1))
        assert host.reason(pair.store_of(2)) is Reason.INSTANCE_INCOMPLETE
        assert (
            host.reason(RegisterWords(pair.sessions[0], WorkerId(pair.worker), 2, 4))
            is Reason.WORKER_UNAVAILABLE
        )
        successor = host.worker()
        view = pair.register(0, successor)
        assert (view.missing_ranks, view.reregister_ranks) == ((1,), (1,))
        assert pair.register(1, successor).ready
        assert pair.load(lease, [0]).finish().end is TransferEnd.DONE, (
            "the epoch and its leases have survived"
        )

    def test_its_exit_fences_sessions_that_it_was_releasing(self, host: Host) -> None:
        one = host.instance()
        running = one.store(1)
        host.do(EndSession(one.scheduler, "killed"))
        host.do(WorkerLost(running.posts[0].worker, "stuck"))
        host.do(released(one))
        assert host.machine.status().instances, "what a lost worker says does not count"
        host.do(WorkerExited(running.posts[0].worker))
        assert host.machine.status().instances == ()
        assert host.machine.status().blocks.writing == 0

    def test_an_exit_without_warning_is_both_at_once(self, host: Host) -> None:
        one = host.instance()
        running = one.store(1)
        host.do(WorkerExited(running.posts[0].worker))
        ended = running.ended()
        assert ended is not None
        assert ended.end is TransferEnd.FAILED
        assert host.machine.status().workers == ()

    def test_a_load_on_it_holds_its_blocks_until_the_exit(self, host: Host) -> None:
        one = host.instance()
        one.stored(1)
        load = one.load(one.lease(1), [0])
        host.do(WorkerLost(load.posts[0].worker, "stuck"))
        assert host.machine.core.blocks.table.dump()["pins"].tolist() == [1]
        host.do(WorkerExited(load.posts[0].worker))
        assert host.machine.core.blocks.table.dump()["pins"].tolist() == [0]

    def test_news_of_unknown_workers_only_count(self, host: Host) -> None:
        host.do(WorkerLost(WorkerId(9), "?"))
        host.do(WorkerExited(WorkerId(9)))
        assert host.counters.late_messages == 2


class TestMemoryIsTakenBack:
    def test_running_transfers_are_called_off_on_every_rank(self, host: Host) -> None:
        pair = host.instance(sizes=((4096, 4096),))
        running = pair.store(1)
        host.do(UnregisterMemory(pair.sessions[0]))
        assert [release.session for release in host.of(ReleaseSession)] == [pair.sessions[0]]
        assert [revoke.part for revoke in host.of(RevokePart)] == [running.posts[1].part]
        assert host.told(pair.sessions[1], InstanceView)[0].missing_ranks == (0,)
        running.part(0, PartOutcome.REVOKED)
        ended = running.part(1, PartOutcome.REVOKED)
        assert ended is not None
        assert ended.error is not None
        assert ended.error.reason is Reason.CANCELLED

    def test_it_can_be_registered_again_after_the_release(self, host: Host) -> None:
        one = host.instance()
        assert isinstance(one.worker, int)
        host.do(UnregisterMemory(one.scheduler))
        words = RegisterWords(one.scheduler, WorkerId(one.worker), 2, 4)
        assert host.reason(words) is Reason.ALREADY_REGISTERED
        host.do(released(one))
        assert one.register(0).ready

    def test_a_release_fences_parts_of_which_nothing_was_said(self, host: Host) -> None:
        one = host.instance()
        running = one.store(1)
        host.do(UnregisterMemory(one.scheduler))
        host.do(released(one))
        ended = running.ended()
        assert ended is not None
        assert ended.end is TransferEnd.CANCELLED
        assert len(host.of(FreeSlots)[0].slots) == 1

    def test_an_unasked_release_is_only_counted(self, host: Host) -> None:
        one = host.instance()
        host.do(released(one))
        host.do(SessionReleased(WorkerId(999), one.scheduler))
        assert host.counters.late_messages == 2
        assert one.store(1).finish().end is TransferEnd.DONE

    def test_there_must_be_some(self, host: Host) -> None:
        assert host.reason(UnregisterMemory(host.instance(worker=None).scheduler)) is Reason.NOT_ATTACHED


@pytest.mark.parametrize("direction", ["store", "load"])
def test_an_instance_that_dies_while_a_worker_is_lost_leaves_nothing(host: Host, direction: str) -> None:
    one: Instance = host.instance()
    one.stored(1)
    running = one.store(2) if direction == "store" else one.load(one.lease(1), [0])
    host.do(WorkerLost(running.posts[0].worker, "stuck"))
    host.do(EndSession(one.scheduler, "killed"))
    assert host.of(ReleaseSession) == [], "a lost worker takes no orders"
    assert len(host.machine.status().instances) == 1
    host.do(WorkerExited(running.posts[0].worker))
    status = host.machine.status()
    assert (status.instances, status.transfers_active, status.blocks.writing) == ((), 0, 0)
