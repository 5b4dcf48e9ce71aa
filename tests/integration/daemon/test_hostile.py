"""Clients that mean harm, and hosts that run out of things: the daemon serves on, and grows no larger."""

import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from kvtier.v1 import cache_pb2, side_pb2, types_pb2
from kvtierd.rpc.connections import OPERATORS_MAX

from tests.integration.daemon.conftest import Connect, Start
from tests.integration.daemon.raw import RawSession, Refused, hashes
from tests.support.process import DEADLINE_S, Daemon, until

SCRAPERS = 64
CHURN = 120
START_MOMENTS_S = (0.05, 0.2, 0.35, 0.5, 0.65, 0.8, 1.0, 1.3)


def threads(daemon: Daemon) -> int:
    return len(os.listdir(f"/proc/{daemon.pid}/task"))


def metrics_address(daemon: Daemon) -> tuple[str, int]:
    url = urllib.parse.urlparse(daemon.metrics_url)
    assert url.hostname is not None
    assert url.port is not None
    return url.hostname, url.port


@pytest.fixture
def sockets() -> Iterator[list[socket.socket]]:
    """Closed at the end."""
    opened: list[socket.socket] = []
    yield opened
    for one in opened:
        one.close()


class TestMessages:
    def test_a_wait_for_too_many_transfers_is_refused_and_the_stream_goes_on(
        self, session: RawSession
    ) -> None:
        session.store(hashes(1), [0])
        with pytest.raises(Refused) as refused:
            session.attached.call(wait=cache_pb2.WaitRequest(tickets=[1] * 257, timeout_ms=1000))
        error = refused.value.error
        assert (refused.value.reason, error.field, error.value) == ("TOO_MANY_BLOCKS", "tickets", "257")
        most = session.attached.call(wait=cache_pb2.WaitRequest(tickets=[1] * 256)).wait
        assert {event.state for event in most.transfers} == {types_pb2.TRANSFER_STATE_DONE}

    def test_the_largest_answer_to_a_wait_fits_a_client_as_grpc_makes_it(
        self, daemon: Daemon, session: RawSession
    ) -> None:
        store = session.store_request(hashes(1) * 8_192, [0] * 8_192)
        session.attached.call(store=store)
        ticket = store.signals.ticket
        session.wait(ticket)
        with grpc.insecure_channel(f"unix:{daemon.socket}") as channel:
            request = cache_pb2.WaitRequest(session=session.ref(), tickets=[ticket] * 256)
            call = channel.unary_unary(
                "/kvtier.v1.Cache/Wait",
                request_serializer=cache_pb2.WaitRequest.SerializeToString,
                response_deserializer=cache_pb2.WaitResponse.FromString,
            )
            found = call(request, timeout=DEADLINE_S)
        assert [len(event.succeeded) for event in found.transfers] == [8_192] * 256

    @pytest.mark.parametrize("name", ["instance", "client"])
    def test_names_that_would_write_to_a_terminal(self, daemon: Daemon, connect: Connect, name: str) -> None:
        with pytest.raises(Refused) as refused:
            connect().attach(**{name: "a\x1b[2Jb"})
        assert (refused.value.reason, refused.value.error.field) == ("MALFORMED", name)
        assert "\x1b" not in refused.value.error.value
        assert len(daemon.status().instances) == 0


class TestCrowds:
    def test_engines_that_come_and_go_under_ever_new_names_leave_nothing(
        self, daemon: Daemon, connect: Connect
    ) -> None:
        def one(number: int) -> None:
            session = connect(fragments=(64 + number * 32,), num_blocks=4)
            namespace = types_pb2.Namespace(
                model=f"model-{number}", kv_dtype="u8", hash_scheme="t", hash_bytes=32, tenant=str(number)
            )
            session.ready(instance=f"engine-{number}", namespace=namespace)
            assert session.store(hashes(4, seed=number), range(4)).state == types_pb2.TRANSFER_STATE_DONE
            assert session.lookup(hashes(4, seed=number), lease=True).lease_id
            session.close()

        one(0)
        until(lambda: daemon.status().instances == [], "the first is gone")
        before = daemon.sockets(), threads(daemon)
        for number in range(1, CHURN):
            one(number)
        until(lambda: daemon.status().instances == [], "all are gone")
        status = daemon.status()
        assert (status.leases, status.transfers_active, status.blocks.writing) == (0, 0, 0)
        until(lambda: daemon.sockets() <= before[0] + 2, "their sockets are closed")
        until(lambda: threads(daemon) <= before[1] + 4, "so are gRPC's threads, which come when it is busy")

    def test_slow_scrapers_give_way_to_others(self, daemon: Daemon, sockets: list[socket.socket]) -> None:
        daemon.metrics()
        before = threads(daemon)
        for _ in range(SCRAPERS):
            slow = socket.create_connection(metrics_address(daemon), DEADLINE_S)
            slow.sendall(b"GET /metr")
            sockets.append(slow)
        assert daemon.metrics()["kvtier_uptime_seconds"] > 0
        assert sockets[0].recv(1) == b"", "the oldest was closed"
        assert threads(daemon) < before + SCRAPERS // 2

    def test_without_descriptors_it_waits_and_goes_on(
        self, daemon: Daemon, session: RawSession, connect: Connect, sockets: list[socket.socket]
    ) -> None:
        daemon.may_complain = True
        used = len(os.listdir(f"/proc/{daemon.pid}/fd"))
        limits = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (used + 3, limits[1]))
        for _ in range(8):
            sockets.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            sockets[-1].connect(str(daemon.side_socket))
        until(lambda: "Too many open files" in daemon.log(), "it has none left")
        session.store(hashes(2), [0, 1])
        assert session.load(hashes(2), [2, 3]).state == types_pb2.TRANSFER_STATE_DONE
        while sockets:
            sockets.pop().close()
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, limits)
        assert connect().ready(instance="later").lookup(hashes(2)).answers[0].hits == 2
        assert daemon.stop() == 0

    def test_connections_that_say_nothing_are_few_for_each_user_and_closed(
        self, start: Start, connect: Connect, sockets: list[socket.socket]
    ) -> None:
        daemon = start(server__sessions_max=40, server__hello_deadline_s=1)
        for _ in range(11 + OPERATORS_MAX):
            sockets.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            sockets[-1].connect(str(daemon.side_socket))
        sockets[-1].settimeout(DEADLINE_S)
        refused = side_pb2.SideResponse.FromString(sockets[-1].recv(1 << 16)).error
        assert refused.reason == types_pb2.REASON_QUEUE_FULL
        assert f"{10 + OPERATORS_MAX} of them of uid {os.getuid()}" in refused.message
        assert "at most 20 and 10 may" in refused.message
        sockets[0].settimeout(DEADLINE_S)
        while sockets[0].recv(1 << 16):
            pass
        until(lambda: daemon.sockets() < 20, "the others are closed, too")
        assert connect().ready()

    def test_connections_to_grpc_are_bounded_and_those_that_say_nothing_are_closed(
        self, start: Start, connect: Connect, sockets: list[socket.socket]
    ) -> None:
        daemon = start(server__sessions_max=8, server__hello_deadline_s=1)
        session = connect().ready()
        before = daemon.sockets()
        for _ in range(100):
            sockets.append(socket.socket(socket.AF_UNIX))
            sockets[-1].settimeout(DEADLINE_S)
            sockets[-1].connect(str(daemon.socket))
            assert daemon.sockets() <= before + 2 * 8 + 8, "some are closed a moment after they are accepted"
        until(lambda: daemon.sockets() <= before, "all of them are closed")
        assert session.store(hashes(2), [0, 1]).state == types_pb2.TRANSFER_STATE_DONE
        assert connect().ready(instance="later").lookup(hashes(2)).answers[0].hits == 2

    def test_it_may_have_as_many_descriptors_as_its_sessions_need(self, start: Start) -> None:
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        few = min(len(list(Path("/proc/self/fd").iterdir())) + 64, before[0])  # enough for this process
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, before[1]))
        try:
            daemon = start(server__sessions_max=100)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        soft, _ = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
        assert soft >= min(few + 4 * 100, before[1])


def serve(run: Path, pool: Path, stderr: int | None = None) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "kvtierd.cli", "serve", f"--server-socket={run / 'kvtierd.sock'}"]
    command += [f"--pool-path={pool}", "--pool-size=66MiB", "--metrics-listen=127.0.0.1:0"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr)


class TestStart:
    @pytest.mark.parametrize("after_s", START_MOMENTS_S)
    def test_it_can_be_told_to_stop_at_any_moment_of_its_start(
        self, socket_dir: Path, shm_dir: Path, after_s: float
    ) -> None:
        process = serve(socket_dir, shm_dir / "pool", subprocess.PIPE)
        time.sleep(after_s)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=DEADLINE_S)
        assert process.returncode in (0, 128 + signal.SIGTERM, -signal.SIGTERM), said
        assert b"Traceback" not in said
        assert [path.name for path in socket_dir.iterdir() if path.suffix == ".sock"] == []
        # What was left can be used by the next one.
        with Daemon(socket_dir, shm_dir / "pool", pool__extent_size=None).process as after:
            after.terminate()
            assert after.wait(DEADLINE_S) == 0

    def test_a_log_that_nobody_reads_stops_nothing(
        self, socket_dir: Path, shm_dir: Path, connect: Connect
    ) -> None:
        reader, writer = os.pipe()
        process = serve(socket_dir, shm_dir / "pool", writer)
        try:
            assert process.stdout is not None
            while b"vLLM" not in process.stdout.readline():
                pass
            os.set_blocking(writer, False)
            try:
                while os.write(writer, b"x" * 4096):
                    pass
            except BlockingIOError:
                os.set_blocking(writer, True)
            for number in range(4):  # two lines of log each
                session = connect(num_blocks=4).ready(instance=f"engine-{number}")
                assert session.store(hashes(1, seed=number), [0]).state == types_pb2.TRANSFER_STATE_DONE
                session.close()
            process.terminate()
            assert process.wait(DEADLINE_S) == 0
            assert select.select([reader], [], [], 0)[0]
        finally:
            process.kill()
            process.communicate()
            os.close(reader)
            os.close(writer)
