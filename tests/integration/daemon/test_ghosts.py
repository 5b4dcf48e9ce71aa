"""What earlier crashes leave behind is cleared away at the start; what still lives is not."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.daemon.conftest import Connect, Start
from tests.integration.daemon.raw import RawSession, hashes
from tests.support.process import DEADLINE_S, Daemon, refused_start, until

pytestmark = pytest.mark.faults


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.startswith("log-")}


def test_sockets_and_lock_of_a_killed_daemon_are_in_nobodys_way(
    start: Start, connect: Connect, socket_dir: Path
) -> None:
    first = start()
    left = {"kvtierd.sock", "kvtierd.side.sock", "kvtierd.sock.lock"}
    first.kill()
    assert names(socket_dir) == left, "the premise of this test"
    second = start()
    session = connect().ready()
    session.store(hashes(2), [0, 1])
    second.kill()
    session.close()
    third = start()
    assert connect().ready().lookup(hashes(2)).answers[0].hits == 2
    assert third.stop() == 0
    assert names(socket_dir) == set()


@pytest.mark.parametrize("magic", [b"KVTIERP0", b""], ids=["being made", "created"])
def test_a_pool_that_was_never_finished_is_made_anew_and_said_to_be(
    start: Start, connect: Connect, shm_dir: Path, magic: bytes
) -> None:
    pool = shm_dir / "pool"
    pool.write_bytes(magic.ljust(1 << 20, b"\0") if magic else b"")
    pool.chmod(0o600)
    daemon = start()
    found = daemon.status().pool
    assert (found.start, found.recovered_blocks) == ("cold", 0)
    assert ("interrupted" if magic else "no pool yet") in found.cold_reason
    session = connect().ready()
    session.store(hashes(1), [0])
    daemon.kill()
    session.close()
    assert start().status().pool.recovered_blocks == 1


def test_a_daemon_killed_while_it_makes_its_pool_leaves_one_that_the_next_one_makes(
    start: Start, socket_dir: Path, shm_dir: Path
) -> None:
    pool = shm_dir / "pool"
    command = [sys.executable, "-m", "kvtierd.cli", "serve", f"--server-socket={socket_dir / 'kvtierd.sock'}"]
    command += [f"--pool-path={pool}", "--pool-size=514MiB", "--metrics-listen=off"]

    def killed_in_time() -> bool:
        """Making it takes a fraction of a second: one that was done before the kill leaves nothing."""
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as victim:
            until(lambda: pool.exists() and pool.stat().st_size > 514 << 20 - 1, "its memory is populated")
            victim.send_signal(signal.SIGKILL)
            victim.wait(DEADLINE_S)
        with pool.open("rb") as made:
            if made.read(8) == b"KVTIERP0":
                return True
        pool.unlink()
        return False

    until(killed_in_time, "one was killed while it made its pool")
    found = start(pool__size="514MiB", pool__extent_size=None).status().pool
    assert (found.start, found.capacity_bytes) == ("cold", 512 << 20)
    assert "interrupted while it created" in found.cold_reason


def test_a_copy_worker_that_has_not_ended_keeps_the_pool_and_is_named(
    start: Start, connect: Connect, socket_dir: Path
) -> None:
    """It could still write: a successor waits for it, and says for whom."""
    first = start()
    session = connect().ready()
    session.fill(1)
    session.store(hashes(3), [0, 1, 2])
    stored = [session.block(block) for block in range(3)]
    [worker] = first.status().workers
    os.kill(worker.pid, signal.SIGSTOP)
    try:
        first.kill()
        before = names(socket_dir)
        status, said = refused_start(socket_dir, first.pool, "--pool-lock-timeout-s=0.3")
        assert status == 69
        assert str(worker.pid) in said
        assert str(first.pool) in said
        assert names(socket_dir) == before, "who is refused touches nothing"
    finally:
        os.kill(worker.pid, signal.SIGCONT)
    session.close()
    second = start()
    assert second.status().pool.recovered_blocks == 3
    assert second.status().pool.quarantined_slots == 0
    again = connect().ready()
    again.load(hashes(3), [4, 5, 6])
    assert [again.block(block) for block in (4, 5, 6)] == stored


def test_status_says_what_a_warm_start_has_found(start: Start, connect: Connect) -> None:
    first = start()
    session = connect().ready()
    session.store(hashes(3), [0, 1, 2])
    _leave_one_open(session)
    used = first.status().pool.used_bytes
    first.kill()
    session.close()
    second = start()
    pool = second.status().pool
    assert (pool.start, pool.recovered_blocks) == ("warm", 3)
    assert 0 < pool.recovered_bytes < used
    assert pool.discarded_slots == 1, "the one that was being written; its writer is gone"
    assert (pool.quarantined_slots, pool.recovery_s > 0) == (0, True)
    said = _kvtierctl_status(second)
    assert "warm: 3 blocks" in said
    assert "1 slot discarded" in said


def _leave_one_open(session: RawSession) -> None:
    from kvtier.v1 import types_pb2

    gate = {"gate": types_pb2.GATE_DOORBELL, "doorbell": 0, "doorbell_value": 1}
    session.attached.call(store=session.store_request(hashes(1, seed=9), [9], **gate))


def _kvtierctl_status(daemon: Daemon) -> str:
    command = [sys.executable, "-m", "kvtierd.ctl", "status", f"--socket={daemon.socket}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True).stdout
