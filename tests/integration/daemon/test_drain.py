"""Admin.Drain and `kvtierctl drain`: a planned end loses nothing, and can be called off."""

import json

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kvtier.v1 import admin_pb2, types_pb2

from tests.integration.daemon.commands import admin, kvtierctl
from tests.integration.daemon.conftest import Connect, Start
from tests.integration.daemon.raw import RawSession, Refused, hashes
from tests.support.process import DEADLINE_S, Daemon, until

GATED = {"gate": types_pb2.GATE_DOORBELL, "doorbell": 0, "doorbell_value": 1}
LONG_MS = int(DEADLINE_S * 1000)


def drained(daemon: Daemon, *, for_restart: bool = False, timeout_ms: int = 0) -> admin_pb2.DrainProgress:
    """The last message of a drain."""
    request = admin_pb2.DrainRequest(for_restart=for_restart, timeout_ms=timeout_ms)
    with admin(daemon) as stub:
        *_, last = stub.Drain(request, timeout=DEADLINE_S)
    return last


def health(daemon: Daemon) -> int:
    with grpc.insecure_channel(f"unix:{daemon.socket}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return int(stub.Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S).status)


class TestDrain:
    def test_nothing_new_is_taken_and_everybody_is_told(self, daemon: Daemon, session: RawSession) -> None:
        session.store(hashes(2), [0, 1])
        lease = session.lookup(hashes(2), lease=True).lease_id
        last = drained(daemon)
        assert (last.state, last.transfers_active, last.kept_blocks) == ("drained", 0, 2)
        assert last.kept_bytes == daemon.status().pool.used_bytes > 0
        assert (last.pid, last.pool_path) == (daemon.pid, str(daemon.pool))
        assert session.lookup(hashes(2)).answers[0].hits == 0, "a miss costs an engine nothing"
        for call in (
            {"store": session.store_request(hashes(1, seed=8), [2])},
            {"load": session.load_request(lease, [3, 4])},
        ):
            with pytest.raises(Refused) as refused:
                session.attached.call(**call)
            assert refused.value.reason == "DRAINING"
        assert daemon.status().state == "draining"
        assert daemon.metrics()["kvtier_draining"] == 1
        assert health(daemon) == health_pb2.HealthCheckResponse.NOT_SERVING

    def test_a_newcomer_is_refused_and_comes_in_when_it_is_over(
        self, daemon: Daemon, session: RawSession, connect: Connect
    ) -> None:
        session.store(hashes(1), [0])
        drained(daemon)
        with pytest.raises(Refused) as refused:
            connect().attach(instance="newcomer")
        assert refused.value.reason == "DRAINING"
        with admin(daemon) as stub:
            assert stub.Resume(admin_pb2.ResumeRequest(), timeout=DEADLINE_S).was_draining
            assert not stub.Resume(admin_pb2.ResumeRequest(), timeout=DEADLINE_S).was_draining
        assert connect().ready(instance="newcomer").lookup(hashes(1)).answers[0].hits == 1
        assert session.lookup(hashes(1)).answers[0].hits == 1, "sessions that were there go on"
        assert session.store(hashes(1, seed=3), [1]).state == types_pb2.TRANSFER_STATE_DONE
        assert daemon.status().state == "serving"
        assert health(daemon) == health_pb2.HealthCheckResponse.SERVING

    def test_what_runs_is_waited_for_and_its_block_is_kept(self, start: Start, connect: Connect) -> None:
        daemon, session = start(), connect().ready()
        session.fill(1)
        session.attached.call(store=session.store_request(hashes(1), [0], **GATED))
        with admin(daemon) as stub:
            progress = iter(
                stub.Drain(
                    admin_pb2.DrainRequest(for_restart=True, timeout_ms=LONG_MS), timeout=2 * DEADLINE_S
                )
            )
            first = next(progress)
            assert (first.state, first.transfers_active, first.kept_blocks) == ("waiting", 1, 0)
            session.ring(0, 1)
            *_, last = progress
        assert (last.state, last.transfers_active, last.kept_blocks) == ("stopping", 0, 1)
        assert session.attached.event("transfer").state == types_pb2.TRANSFER_STATE_DONE
        assert session.attached.goodbye() == "DRAINING"
        assert daemon.wait() == 0
        stored = session.block(0)
        session.close()
        again = start()
        assert again.status().pool.recovered_blocks == 1
        heir = connect().ready()
        assert heir.load(hashes(1), [5]).state == types_pb2.TRANSFER_STATE_DONE
        assert heir.block(5) == stored

    def test_when_the_time_is_up_nothing_is_stopped_and_it_can_be_tried_again(
        self, daemon: Daemon, session: RawSession
    ) -> None:
        session.attached.call(store=session.store_request(hashes(1), [0], **GATED))
        assert drained(daemon, for_restart=True, timeout_ms=100).state == "late"
        assert daemon.status().state == "draining"
        session.ring(0, 1)
        assert drained(daemon, for_restart=True, timeout_ms=LONG_MS).state == "stopping"
        assert daemon.wait() == 0

    def test_a_watcher_hears_that_somebody_resumed_it(self, daemon: Daemon, session: RawSession) -> None:
        session.attached.call(store=session.store_request(hashes(1), [0], **GATED))
        with admin(daemon) as stub:
            progress = iter(
                stub.Drain(admin_pb2.DrainRequest(for_restart=True, timeout_ms=LONG_MS), timeout=DEADLINE_S)
            )
            assert next(progress).state == "waiting"
            stub.Resume(admin_pb2.ResumeRequest(), timeout=DEADLINE_S)
            *_, last = progress
        assert last.state == "serving"
        session.ring(0, 1)
        assert session.wait(1).state == types_pb2.TRANSFER_STATE_DONE

    def test_who_goes_away_stops_nothing(self, daemon: Daemon, session: RawSession) -> None:
        session.attached.call(store=session.store_request(hashes(1), [0], **GATED))
        with admin(daemon) as stub:
            call = stub.Drain(
                admin_pb2.DrainRequest(for_restart=True, timeout_ms=LONG_MS), timeout=DEADLINE_S
            )
            assert next(iter(call)).state == "waiting"
            watched = daemon.sockets()
            call.cancel()
        # The daemon must know before the store ends: what is answered after the connection is gone shows it.
        until(lambda: daemon.sockets() < watched, "its connection is gone")
        assert daemon.status().transfers_active == 1
        session.ring(0, 1)
        until(lambda: daemon.status().transfers_active == 0, "the store has ended")
        assert daemon.process.poll() is None
        assert daemon.status().state == "draining"

    def test_an_anonymous_pool_is_not_thrown_away(self, start: Start, connect: Connect) -> None:
        daemon = start(pool__persistent="false", pool__path=None)
        session = connect().ready()
        said = kvtierctl(daemon, "drain", "--for-restart")
        assert said.returncode == 69
        assert "pool.persistent" in said.stderr
        assert daemon.status().state == "serving"
        assert session.store(hashes(1), [0]).state == types_pb2.TRANSFER_STATE_DONE


class TestCommand:
    def test_for_a_restart_it_says_what_is_kept_and_how_to_start_again(
        self, start: Start, connect: Connect
    ) -> None:
        daemon, session = start(), connect().ready()
        session.store(hashes(3), [0, 1, 2])
        said = kvtierctl(daemon, "drain", "--for-restart")
        assert (said.returncode, said.stderr) == (0, "")
        assert not daemon.socket.exists(), "another may start at once"
        for part in (
            f"pid {daemon.pid}",
            "3 blocks",
            str(daemon.pool),
            f"kvtierd serve --server-socket={daemon.socket}",
        ):
            assert part in said.stdout
        assert daemon.wait() == 0
        session.close()
        assert start().status().pool.recovered_blocks == 3

    def test_it_drains_and_resumes(self, daemon: Daemon, session: RawSession) -> None:
        session.store(hashes(1), [0])
        said = kvtierctl(daemon, "drain")
        assert said.returncode == 0
        assert "1 block" in said.stdout
        assert "kvtierctl resume" in said.stdout
        assert "draining" in kvtierctl(daemon, "status").stdout
        assert kvtierctl(daemon, "resume").stdout == "serving again\n"
        assert session.lookup(hashes(1)).answers[0].hits == 1

    def test_programs_get_one_json_object_and_a_status_that_says_not_yet(
        self, daemon: Daemon, session: RawSession
    ) -> None:
        session.attached.call(store=session.store_request(hashes(1), [0], **GATED))
        said = kvtierctl(daemon, "drain", "--for-restart", "--timeout=0.2", "--json")
        assert said.returncode == 75
        found = json.loads(said.stdout)
        assert (found["state"], found["transfers_active"]) == ("late", 1)
        assert said.stderr == "waiting for 1 transfer\n"
        people = kvtierctl(daemon, "drain", "--timeout=0")
        assert people.returncode == 75
        assert "1 transfer still active" in people.stdout

    def test_without_a_daemon_it_says_so(self, daemon: Daemon) -> None:
        daemon.stop()
        for command in (("drain", "--for-restart"), ("resume",)):
            said = kvtierctl(daemon, *command)
            assert said.returncode == 69
            assert "no daemon" in said.stderr
