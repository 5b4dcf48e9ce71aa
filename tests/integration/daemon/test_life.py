"""How the daemon and its clients begin and end, with and without warning."""

import json
import multiprocessing
import os
import signal
import stat
import time
from multiprocessing.connection import Connection
from pathlib import Path

import grpc
import numpy as np
import pytest
from kvtier.v1 import cache_pb2, side_pb2, types_pb2
from kvtier_kernels import PoolRecords
from kvtierd.ctl.status import page
from kvtierd.ctl.terminal import plain

from tests.integration.daemon.conftest import Connect, Start
from tests.integration.daemon.looks import maps_of_clients
from tests.integration.daemon.raw import RawSession, Refused, hashes, memfd
from tests.support.process import DEADLINE_S, Daemon, readable, refused_start, until

GATED = {"gate": types_pb2.GATE_DOORBELL, "doorbell": 0, "doorbell_value": 1}


class TestStart:
    def test_it_says_what_its_user_needs(self, daemon: Daemon) -> None:
        size = "66 MiB (64 MiB for blocks and their slot tables, 2 MiB for the file's header)"
        for part in (str(daemon.socket), str(daemon.pool), size, "cold", "KvtierConnector", "/metrics"):
            assert part in daemon.greeting
        assert any(size in line for line in plain(page(daemon.status())).splitlines())

    def test_sockets_and_pool_are_private(self, daemon: Daemon) -> None:
        for path in (daemon.socket, daemon.side_socket, daemon.pool):
            assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0

    def test_a_second_owner_of_the_sockets_is_refused_and_the_first_goes_on(
        self, daemon: Daemon, session: RawSession, shm_dir: Path
    ) -> None:
        status, said = refused_start(daemon.socket.parent, shm_dir / "another")
        assert status == 69
        assert "already running" in said
        assert f"pid {daemon.pid}" in said
        assert str(daemon.socket) in said
        assert session.store(hashes(1), [0]).state == types_pb2.TRANSFER_STATE_DONE
        assert not (shm_dir / "another").exists()

    def test_a_second_owner_of_the_pool_is_refused(self, daemon: Daemon, tmp_path: Path) -> None:
        tmp_path.chmod(0o700)
        status, said = refused_start(tmp_path, daemon.pool, "--pool-lock-timeout-s=0")
        assert status == 69
        assert str(daemon.pool) in said
        assert str(daemon.pid) in said
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize(
        ("flag", "status", "parts"),
        [
            ("--pool-size=8000TiB", 78, ["pool.size", "8000 TiB", "file system"]),
            ("--pool-size=100KiB", 78, ["pool.size", "100KiB", "at least"]),
            ("--server-group=nosuchgroup", 78, ["server.group", "nosuchgroup"]),
            ("--metrics-listen=127.0.0.1:99999", 78, ["metrics.listen"]),
            ("--metrics-listen=192.0.2.1:9470", 78, ["metrics.listen", "192.0.2.1:9470"]),
        ],
    )
    def test_what_cannot_be_is_refused_by_name_and_leaves_nothing(
        self, socket_dir: Path, shm_dir: Path, flag: str, status: int, parts: list[str]
    ) -> None:
        found, said = refused_start(socket_dir, shm_dir / "pool", flag)
        assert found == status, said
        for part in parts:
            assert part in said
        assert list(socket_dir.iterdir()) == []

    def test_an_unknown_key_of_the_file_is_refused(self, socket_dir: Path, shm_dir: Path) -> None:
        file = shm_dir / "kvtierd.toml"
        file.write_text("[pool]\nsizzle = 3\n")
        status, said = refused_start(socket_dir, shm_dir / "pool", f"--config={file}")
        assert status == 78
        assert "pool.sizzle" in said
        assert "pool.size" in said


class TestStop:
    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_a_signal_ends_it_with_a_goodbye_and_nothing_left(
        self, daemon: Daemon, session: RawSession, number: signal.Signals
    ) -> None:
        daemon.process.send_signal(number)
        assert session.attached.goodbye() == "DRAINING"
        assert daemon.wait() == 0
        assert session.attached.ended.wait(DEADLINE_S)
        assert session.attached.status is grpc.StatusCode.OK
        assert session.side.is_closed()
        assert [path.name for path in daemon.socket.parent.iterdir() if "log" not in path.name] == []
        assert daemon.pool.exists()

    def test_draining_lets_transfers_finish_and_refuses_new_ones(
        self, daemon: Daemon, session: RawSession
    ) -> None:
        keys = hashes(1)
        running = session.store_request(keys, [0], **GATED)
        session.attached.call(store=running)
        daemon.terminate()
        until(lambda: daemon.status().state == "draining", "draining")
        with pytest.raises(Refused) as refused:
            session.attached.call(store=session.store_request(hashes(1, seed=8), [1]))
        assert refused.value.reason == "DRAINING"
        session.ring(0, 1)
        event = session.attached.event("transfer")
        assert (event.ticket, event.state) == (running.signals.ticket, types_pb2.TRANSFER_STATE_DONE)
        assert session.attached.goodbye() == "DRAINING"
        assert daemon.wait() == 0

    def test_a_transfer_that_never_ends_does_not_keep_it(self, start: Start, connect: Connect) -> None:
        daemon = start(server__drain_s=0.2)
        daemon.may_complain = True
        session = connect().ready()
        session.attached.call(store=session.store_request(hashes(1), [0], **GATED))
        assert daemon.stop() == 0

    def test_a_pool_changed_behind_its_back_poisons_it_and_the_next_one_is_warm(
        self, start: Start, connect: Connect
    ) -> None:
        daemon, session = start(), connect().ready()
        daemon.may_complain = True
        session.store(hashes(2), [0, 1])
        take_free_slots_away(daemon.pool)
        with pytest.raises(Refused) as refused:
            session.attached.call(store=session.store_request(hashes(1, seed=2), [2]))
        assert refused.value.reason == "INTERNAL"
        assert session.attached.goodbye() == "INTERNAL"
        assert daemon.wait() == 70
        assert "internal error" in daemon.log()
        session.close()
        start()
        assert connect().ready().lookup(hashes(2)).answers[0].hits == 2


def take_free_slots_away(pool: Path) -> None:
    """What no process of ours does: marks the free slots of extents in use as being written."""
    memory = np.asarray(np.memmap(pool, np.uint8, "r+"))
    records = PoolRecords(memory)
    taken = set(records.scan()["slots"].tolist())
    for extent in range(records.extents):
        if (info := records.extent_info(extent)) is not None:
            _, stride, count, offset = info
            slots = np.array([(offset + i * stride) // 4096 for i in range(count)], np.uint32)
            free = slots[[slot not in taken for slot in slots.tolist()]]
            keys = np.zeros((len(free), 32), np.uint8)
            records.open(free, 1, 1, 1, bytes(16), 0, 0, 1, keys, 1)


class TestRestart:
    def test_a_killed_daemon_comes_back_warm_with_every_byte(self, start: Start, connect: Connect) -> None:
        first = start()
        session = connect().ready()
        session.fill(1)
        keys = hashes(8)
        stored = [session.block(block_id) for block_id in range(8)]
        assert session.store(keys, list(range(8))).state == types_pb2.TRANSFER_STATE_DONE
        boot = first.status().boot_nonce
        first.kill()
        session.close()

        second = start()
        assert "warm: 8 blocks" in second.greeting
        status = second.status()
        assert status.boot_nonce != boot
        assert (status.pool.start, status.pool.recovered_blocks, status.blocks.ready) == ("warm", 8, 8)
        again = connect().ready()
        assert again.load(keys, list(range(10, 18))).state == types_pb2.TRANSFER_STATE_DONE
        assert [again.block(block_id) for block_id in range(10, 18)] == stored

    def test_a_block_not_committed_before_the_kill_is_a_miss(self, start: Start, connect: Connect) -> None:
        first = start()
        session = connect().ready()
        done, open_ = hashes(1, seed=1), hashes(1, seed=2)
        session.store(done, [0])
        session.attached.call(store=session.store_request(open_, [1], **GATED))
        first.kill()
        session.close()
        start()
        again = connect().ready()
        assert again.lookup(done).answers[0].hits == 1
        assert again.lookup(open_).answers[0].hits == 0

    def test_a_stopped_daemon_comes_back_warm(self, start: Start, connect: Connect, tmp_path: Path) -> None:
        first = start(disk__paths=tmp_path, disk__size="8MiB")
        session = connect().ready()
        session.store(hashes(3), [0, 1, 2])
        assert first.stop() == 0
        told = [json.loads(line) for line in first.log().splitlines()]
        ends = {
            (each["message"], each["why"])
            for each in told
            if each["message"].endswith(("worker ended", "worker lost"))
        }
        assert ends == {(f"{kind} worker ended", "exited with status 0") for kind in ("copy", "disk")}
        session.close()
        assert start().status().pool.recovered_blocks == 3

    def test_a_corrupted_block_is_a_miss_after_a_restart_and_never_served(
        self, start: Start, connect: Connect
    ) -> None:
        first = start()
        session = connect().ready()
        session.fill(1)
        keys = hashes(1)
        session.store(keys, [0])
        stored = session.block(0)
        first.stop()
        session.close()
        _flip_one_byte_of(first.pool, stored)
        second = start(integrity__sample_bytes_per_s=0)  # which would find it first
        again = connect().ready()
        assert again.load(keys, [3]).state == types_pb2.TRANSFER_STATE_FAILED
        assert again.lookup(keys).answers[0].hits == 0
        assert second.status().counters.integrity_failures == 1
        assert second.metrics()["kvtier_integrity_failures_total.restart.host"] == 1


def _flip_one_byte_of(pool: Path, data: bytes) -> None:
    content = pool.read_bytes()
    at = content.index(data[:4096])
    with pool.open("r+b") as file:
        file.seek(at + 100)
        file.write(bytes([content[at + 100] ^ 1]))


def _client(socket_path: Path, ready: Connection, submit: bool) -> None:
    session = RawSession(socket_path).ready()
    session.lookup(hashes(1), lease=True)
    if submit:
        session.attached.call(store=session.store_request(hashes(4, seed=3), [0, 1, 2, 3], **GATED))
    ready.send(os.getpid())
    time.sleep(DEADLINE_S)


def _forking_client(socket_path: Path, ready: Connection) -> None:
    session = RawSession(socket_path)
    session.attach()
    fork = os.fork()
    if fork == 0:
        time.sleep(DEADLINE_S)
        os._exit(0)
    ready.send(fork)
    time.sleep(DEADLINE_S)


@pytest.mark.faults
class TestClientDeath:
    @pytest.mark.parametrize("submit", [False, True], ids=["idle", "mid-transfer"])
    def test_everything_of_a_killed_client_goes_at_once(
        self, daemon: Daemon, connect: Connect, submit: bool
    ) -> None:
        survivor = connect().ready(instance="survivor")
        survivor.store(hashes(1), [0])
        mapped = daemon.metrics()["kvtier_client_mapped_bytes"]
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        client = context.Process(target=_client, args=(daemon.socket, there, submit))
        client.start()
        try:
            assert here.poll(DEADLINE_S)
            metrics = daemon.metrics()
            assert metrics["kvtier_sessions"] == 2
            assert metrics["kvtier_client_mapped_bytes"] == 2 * mapped
            assert metrics["kvtier_leases"] == 1
            assert metrics["kvtier_blocks.writing"] == (4 if submit else 0)
        finally:
            client.kill()
            client.join(DEADLINE_S)
        until(lambda: daemon.metrics()["kvtier_client_mapped_bytes"] == mapped, "unmapped")
        metrics = daemon.metrics()
        assert metrics["kvtier_sessions"] == 1
        assert metrics["kvtier_leases"] == 0
        assert metrics["kvtier_transfers_active"] == 0
        assert metrics["kvtier_blocks.writing"] == 0
        assert survivor.lookup(hashes(1)).answers[0].hits == 1

    def test_a_fork_that_outlives_the_client_does_not_keep_its_session(self, daemon: Daemon) -> None:
        """The fork holds both sockets open; it is the process that counts."""
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        client = context.Process(target=_forking_client, args=(daemon.socket, there))
        client.start()
        try:
            assert here.poll(DEADLINE_S)
            fork = here.recv()
            try:
                client.kill()
                until(lambda: not daemon.status().instances, "instance gone")
            finally:
                os.kill(fork, signal.SIGKILL)
        finally:
            client.kill()
            client.join(DEADLINE_S)

    def test_a_stopped_client_loses_its_leases_then_its_session(self, start: Start) -> None:
        # The client says nothing by itself, and may stand still for a while before it is stopped.
        daemon = start(limits__lease_ttl_s=0.4, server__heartbeat_interval_s=0.1, server__session_silence_s=5)
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        client = context.Process(target=_client, args=(daemon.socket, there, True))
        client.start()
        try:
            assert here.poll(DEADLINE_S)
            assert client.pid is not None
            os.kill(client.pid, signal.SIGSTOP)
            until(lambda: daemon.metrics()["kvtier_leases"] == 0, "leases expired")
            until(lambda: daemon.metrics()["kvtier_client_mapped_bytes"] == 0, "session dropped")
            assert daemon.metrics()["kvtier_sessions"] == 0
        finally:
            client.kill()
            client.join(DEADLINE_S)

    @pytest.mark.parametrize("part", ["side socket", "stream"])
    def test_losing_half_of_a_session_ends_all_of_it(
        self, daemon: Daemon, session: RawSession, part: str
    ) -> None:
        session.attached.call(store=session.store_request(hashes(1), [0], **GATED))
        if part == "side socket":
            session.side.close()
            assert session.attached.goodbye() == "EPOCH_ENDED"
        else:
            session.attached.close()
            until(session.side.is_closed, "side socket closed")
        until(lambda: not daemon.status().instances, "instance gone")
        status = daemon.status()
        assert (status.blocks.writing, status.transfers_active) == (0, 0)

    def test_an_instance_can_come_back_at_once(self, session: RawSession, connect: Connect) -> None:
        session.store(hashes(1), [0])
        session.close()
        again = connect()
        until(lambda: _attaches(again), "attached again")
        assert again.epoch != session.epoch
        assert again.lookup(hashes(1)).answers[0].hits == 0, "not registered yet: lookups miss"
        again.register_words()
        again.register_memory()
        assert again.lookup(hashes(1)).answers[0].hits == 1


def _attaches(session: RawSession) -> bool:
    try:
        session.attach()
    except Refused as refused:
        if refused.reason != "SESSION_EXISTS":
            raise
        return False
    return True


@pytest.mark.faults
class TestWorkerDeath:
    def test_a_killed_worker_is_replaced_and_clients_register_again(
        self, daemon: Daemon, session: RawSession
    ) -> None:
        keys = hashes(1)
        session.store(keys, [0])
        stored = session.block(0)
        session.attached.event("transfer")
        lost = session.store_request(hashes(1, seed=4), [1], **GATED)
        assert not readable(session.worker_pidfd, 0)
        session.attached.call(store=lost)
        daemon.may_complain = True
        os.kill(session.worker_pid, signal.SIGKILL)
        assert session.wait(lost.signals.ticket).state == types_pb2.TRANSFER_STATE_FAILED
        assert readable(session.worker_pidfd, 0), "the fence a client can see for itself"
        until(lambda: daemon.metrics()["kvtier_worker_live.cpu"] == 1, "a new worker")
        assert daemon.status().workers[0].respawns == 1
        session.register_words()
        session.register_memory()
        session.load(keys, [6])
        assert session.block(6) == stored
        assert daemon.metrics()["kvtier_worker_respawns_total.cpu"] == 1


@pytest.mark.faults
class TestMappings:
    """Nothing of a client stays mapped, whenever it goes."""

    @pytest.mark.parametrize("kind", ["words", "memory"])
    def test_a_client_that_goes_while_it_is_being_mapped(
        self, daemon: Daemon, connect: Connect, kind: str
    ) -> None:
        session = connect()
        session.attach()
        worker_pid = daemon.status().workers[0].pid
        if kind == "memory":
            session.register_words()
        os.kill(worker_pid, signal.SIGSTOP)
        try:
            fd = memfd(1 << 20)
            words = side_pb2.RegisterWords(doorbells=1, parts=1)
            body = {"register_words": words} if kind == "words" else {"register_memory": session.places()}
            session.side.send(side_pb2.SideRequest(id=99, **body).SerializeToString(), [fd])
            until(lambda: daemon.descriptors_of_clients() == 1, "the request has arrived")
            os.close(fd)
            session.close()
            until(lambda: daemon.descriptors_of_clients() == 0, "the front has let go")
        finally:
            os.kill(worker_pid, signal.SIGCONT)
        until(lambda: maps_of_clients(worker_pid) == 0 and not daemon.status().instances, "unmapped")
        connect().ready().store(hashes(1), [0])
        assert daemon.status().workers[0].pid == worker_pid, "by the same worker"

    def test_memory_taken_back_is_unmapped_before_the_answer(
        self, daemon: Daemon, session: RawSession
    ) -> None:
        running = session.store_request(hashes(1), [0], **GATED)
        session.attached.call(store=running)
        assert maps_of_clients(session.worker_pid) == 2
        session.side.call(unregister_memory=side_pb2.UnregisterMemory(registration_id=session.registration))
        assert maps_of_clients(session.worker_pid) == 0
        assert session.wait(running.signals.ticket).state == types_pb2.TRANSFER_STATE_CANCELLED
        assert daemon.metrics()["kvtier_client_mapped_bytes"] == 0
        with pytest.raises(Refused) as refused:
            session.attached.call(store=session.store_request(hashes(1), [0]))
        assert refused.value.reason == "INSTANCE_INCOMPLETE"


class TestQuiet:
    def test_a_daemon_that_was_stopped_does_not_blame_its_clients(
        self, start: Start, connect: Connect
    ) -> None:
        # More than this test may be kept waiting itself before the daemon stands still, and less than that
        # takes.
        daemon = start(limits__lease_ttl_s=4, server__heartbeat_interval_s=0.5, server__session_silence_s=4)
        session = connect().ready()
        session.store(hashes(1), [0])
        lease = session.lookup(hashes(1), lease=True).lease_id
        daemon.process.send_signal(signal.SIGSTOP)
        for _ in range(10):
            session.attached.post(heartbeat=cache_pb2.Heartbeat())
            time.sleep(0.5)
        daemon.process.send_signal(signal.SIGCONT)
        request = session.load_request(lease, [5])
        session.attached.call(load=request)
        assert session.wait(request.signals.ticket).state == types_pb2.TRANSFER_STATE_DONE

    def test_heartbeats_keep_a_session_and_its_leases(self, start: Start, connect: Connect) -> None:
        daemon = start(limits__lease_ttl_s=3, server__heartbeat_interval_s=0.1, server__session_silence_s=3)
        session = connect().ready()
        session.store(hashes(1), [0])
        session.lookup(hashes(1), lease=True)
        since_s = time.monotonic()
        while time.monotonic() - since_s < 4.5:  # far more than one of them lasts; a pause of 2 s is none
            session.attached.call(heartbeat=cache_pb2.Heartbeat())
            time.sleep(0.1)
        status = daemon.status()
        assert (status.leases, len(status.instances)) == (1, 1)

    def test_a_connection_that_says_nothing_is_closed(self, start: Start, connect: Connect) -> None:
        start(server__hello_deadline_s=0.3)
        silent = connect()
        silent.side.open()
        until(silent.side.is_closed, "closed")

    def test_hashes_are_not_in_the_log(self, daemon: Daemon, session: RawSession) -> None:
        keys = hashes(2)
        session.store(keys, [0, 1])
        session.load(keys, [2, 3])
        daemon.stop()
        log = daemon.log()
        assert '"session attached"' in log
        for start in (0, 32):
            assert keys[start : start + 32].hex() not in log
            assert repr(keys[start : start + 8])[2:-1] not in log
