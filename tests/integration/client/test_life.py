"""Daemons absent, killed, stopped, restarted, or without their copy worker: misses meanwhile, hits
afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from kvtier import ClientState, Doorbell, PartState, Reason, TransferState
from kvtier.session import state
from kvtier.session.state import SILENCE_S

from tests.integration.client.conftest import Connect
from tests.support.daemon import DaemonHost, until
from tests.support.plain_client import PlainClient, block_hashes

pytestmark = pytest.mark.faults
HASHES = block_hashes("sequence", range(20))
CALLS = 400
BUDGET_S = 0.5


@pytest.fixture
def connect(idle_host: DaemonHost, connect_to: Connect) -> Connect:
    return partial(connect_to, idle_host)


def kill9(host: DaemonHost, plain: PlainClient) -> None:
    """Returns when the client has noticed: its next `ready` is that of another session then."""
    host.kill9()
    until(lambda: not plain.client.ready, "the client has noticed")


def test_without_a_daemon_everything_misses_at_once_and_closing_is_quick(connect: Connect) -> None:
    plain = connect(ready=False)
    started_s = time.monotonic()
    for _ in range(CALLS):
        assert not plain.client.lookup(HASHES, timeout_s=BUDGET_S).answered
        assert plain.client.store(HASHES, range(20)).wait(BUDGET_S).throttled
    assert time.monotonic() - started_s < CALLS * BUDGET_S / 10
    assert not plain.client.wait_ready(0.1)
    until(lambda: "no daemon listens" in plain.client.status.why, "it says why")
    assert plain.client.close()


def test_a_client_made_before_its_daemon_finds_it(idle_host: DaemonHost, connect: Connect) -> None:
    plain = connect(ready=False)
    idle_host.start()
    plain.ready()
    assert plain.store(HASHES).done


def test_after_kill_nine_and_restart_the_client_attaches_again_and_hits(
    host: DaemonHost, connect: Connect
) -> None:
    plain = connect()
    assert plain.store(HASHES).done
    old = plain.client.status
    for _ in range(3):
        host.kill9()
        answer = plain.client.lookup(HASHES, timeout_s=BUDGET_S)
        assert not answer.answered
        until(lambda: plain.client.epoch is None, "the client has noticed")
        host.start()
        plain.ready()
        assert plain.load(HASHES) == 20
    new = plain.client.status
    assert new.boot_nonce != old.boot_nonce
    assert new.counters.epochs == old.counters.epochs + 3


def test_a_transfer_that_waited_for_its_doorbell_is_over_when_the_daemon_dies(
    host: DaemonHost, connect: Connect
) -> None:
    plain = connect()
    transfer = plain.client.store(HASHES, range(20), doorbell=Doorbell(0, 5))
    until(lambda: transfer.results is not None, "it was accepted")
    host.kill9()
    outcome = transfer.wait(60)
    assert (outcome.state, outcome.fenced) == (TransferState.FAILED, True)
    assert outcome.error is not None
    assert outcome.error.reason is Reason.EPOCH_ENDED
    host.start()
    plain.ready()
    plain.client.ring(0, 5)
    assert plain.lookup(HASHES).hits == 0


def test_doorbells_that_rang_before_a_restart_still_count_after_it(
    host: DaemonHost, connect: Connect
) -> None:
    plain = connect()
    plain.client.ring(2, 7)
    kill9(host, plain)
    host.start()
    plain.ready()
    assert plain.client.store(HASHES, range(20), doorbell=Doorbell(2, 7)).wait(60).done


def test_transfers_under_way_when_the_daemon_dies_end_fenced(host: DaemonHost, connect: Connect) -> None:
    plain = connect()
    for boot in range(4):
        transfers = [
            plain.client.store(block_hashes(f"{boot}/{number}", range(60)), range(60)) for number in range(8)
        ]
        if boot % 2:
            until(lambda: transfers[0].results is not None, "the first was accepted")  # noqa: B023
        kill9(host, plain)
        for transfer in transfers:
            outcome = transfer.wait(60)
            assert outcome.state is not TransferState.ACTIVE
            assert outcome.fenced
        host.start()
        plain.ready()
    assert plain.store(HASHES).done
    assert plain.load(HASHES) == 20


def test_a_stopped_daemon_costs_one_budget_and_is_used_again_when_it_goes_on(
    host: DaemonHost, connect: Connect
) -> None:
    plain = connect()
    assert plain.store(HASHES).done
    assert plain.known_run(HASHES) == 20, "nothing waits for the daemon that would give it up after a while"
    epoch = plain.client.epoch
    host.freeze()
    started_s = time.monotonic()
    for _ in range(CALLS):
        assert not plain.client.lookup(HASHES, lease=True, timeout_s=BUDGET_S).answered
    assert plain.client.status.state is ClientState.UNRESPONSIVE
    for _ in range(CALLS):
        assert plain.client.store(HASHES, range(20)).wait(BUDGET_S).throttled
    assert time.monotonic() - started_s < CALLS * BUDGET_S / 10
    host.thaw()
    plain.ready()
    assert plain.client.epoch == epoch, "nothing was lost"
    assert plain.load(HASHES) == 20
    until(lambda: host.status().leases == 0, "the lease that came late is released")


def test_a_daemon_that_stops_while_nobody_asks_is_noticed_by_its_heartbeats(
    host: DaemonHost, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "SILENCE_S", SILENCE_S)
    plain = connect()
    assert plain.known_run(HASHES) == 0, "nothing waits for the daemon that would give it up after a while"
    host.freeze()
    until(lambda: plain.client.status.state is ClientState.UNRESPONSIVE, "the silence is noticed")
    assert "does not answer" in plain.client.status.why
    host.thaw()
    plain.ready()


def test_what_has_not_started_in_a_stopped_daemon_can_be_revoked(host: DaemonHost, connect: Connect) -> None:
    plain = connect()
    transfer = plain.client.store(HASHES, range(20), doorbell=Doorbell(0, 1))
    until(lambda: transfer.results is not None, "it was accepted")
    host.freeze(workers=True)
    assert transfer.wait(0.1).state is TransferState.ACTIVE
    assert transfer.revoke()
    plain.client.ring(0, 1)
    host.thaw()
    assert transfer.wait(60).state is not TransferState.DONE
    plain.ready()
    assert plain.lookup(HASHES).hits == 0


def test_a_client_of_a_stopped_daemon_closes_in_time(host: DaemonHost, connect: Connect) -> None:
    plain = connect()
    host.freeze(workers=True)
    assert plain.client.close(20)
    host.thaw()
    until(lambda: not host.status().instances, "the session is gone")


def test_a_client_that_comes_to_a_stopped_daemon_misses_until_it_goes_on(
    host: DaemonHost, connect: Connect
) -> None:
    host.freeze()
    plain, other = connect("one", ready=False), connect("two", ready=False)
    assert not plain.client.wait_ready(0.3)
    assert not plain.client.lookup(HASHES).answered
    assert other.client.close(20)
    host.thaw()
    plain.ready()
    assert plain.store(HASHES).done


def test_a_client_that_was_stopped_for_too_long_attaches_again_by_itself(
    socket_dir: Path, shm_dir: Path
) -> None:
    host = DaemonHost(
        socket_dir, shm_dir / "pool", server__session_silence_s="1", server__heartbeat_interval_s="0.2"
    )
    host.start()
    client = subprocess.Popen(
        [sys.executable, "-m", "tests.support.plain_client", str(host.socket), "sleepy"],
        stdout=subprocess.DEVNULL,
    )
    try:
        until(lambda: host.status().counters.stored_blocks > 0, "it stores")
        client.send_signal(signal.SIGSTOP)
        until(lambda: not host.status().instances, "the daemon has given it up")
        stored = host.status().counters.stored_blocks
        client.send_signal(signal.SIGCONT)
        until(lambda: host.status().counters.stored_blocks > stored, "it stores again")
    finally:
        client.kill()
        client.wait(60)
        host.stop()


def test_a_lost_copy_worker_is_registered_with_again(host: DaemonHost, connect: Connect) -> None:
    plain = connect()
    assert plain.store(HASHES).done
    for number in range(3):
        before = plain.client.status
        waiting = plain.client.store(block_hashes("x", [number]), [50], doorbell=Doorbell(0, number + 1))
        until(lambda: waiting.results is not None, "it was accepted")  # noqa: B023
        host.kill_worker()
        outcome = waiting.wait(60)
        assert (outcome.state, outcome.fenced) == (TransferState.FAILED, True)
        until(
            lambda: plain.client.status.counters.registrations > before.counters.registrations,  # noqa: B023
            "it has registered again",
        )
        plain.ready()
        assert plain.client.epoch == before.epoch, "the session goes on"
        plain.client.ring(0, number + 1)
        assert plain.load(HASHES) == 20


def test_the_child_of_a_fork_has_no_client_and_does_the_parent_no_harm(
    host: DaemonHost, connect: Connect
) -> None:
    plain = connect()
    assert plain.store(HASHES).done
    transfer = plain.client.store(block_hashes("late", range(4)), range(4), doorbell=Doorbell(0, 1))
    assert transfer.part is not None
    child = os.fork()
    if not child:
        missed = not plain.client.lookup(HASHES).answered and plain.client.status.state is ClientState.CLOSED
        plain.client.close()
        os._exit(0 if missed else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert plain.client.part_state(transfer.part) is PartState.ARMED
    plain.client.ring(0, 1)
    assert transfer.wait(60).done
    assert plain.load(HASHES) == 20
    assert len(host.status().instances) == 1


@pytest.mark.parametrize("ending", ["pass", "raise SystemExit(0)", "import os; os._exit(0)"])
def test_a_program_that_forgets_to_close_ends_all_the_same(host: DaemonHost, ending: str) -> None:
    program = f"""
import sys
from pathlib import Path
from tests.support.plain_client import PlainClient, block_hashes
plain = PlainClient(Path(sys.argv[1]), "forgetful").ready()
assert plain.store(block_hashes("f", range(4))).done
{ending}
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(host.socket)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    until(lambda: not host.status().instances, "its session is gone")
