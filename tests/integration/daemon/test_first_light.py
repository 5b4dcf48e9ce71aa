"""One block's way through a real daemon, by nothing but the protocol."""

import json
import subprocess
import sys

import grpc
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from kvtier.v1 import cache_pb2, side_pb2, types_pb2
from kvtier_kernels import PART_DONE

from tests.integration.daemon.conftest import Connect, Start
from tests.integration.daemon.raw import DOORBELLS, PARTS, RawSession, hashes
from tests.integration.daemon.shared import connect as connect
from tests.integration.daemon.shared import daemon as daemon
from tests.integration.daemon.shared import shared_daemon as shared_daemon
from tests.support.process import DEADLINE_S, Daemon

ACCEPTED, EXISTS, HIT, MISS = b"\0", b"\1", b"\2", b"\0"


def test_what_is_stored_is_found_and_loaded_back_byte_for_byte(session: RawSession) -> None:
    keys = hashes(5)
    stored = [session.block(block_id) for block_id in (3, 1, 4, 15, 9)]

    assert session.lookup(keys).answers[0].states == MISS
    event = session.store(keys, [3, 1, 4, 15, 9])
    assert event.state == types_pb2.TRANSFER_STATE_DONE
    assert event.succeeded == b"\1" * 5
    assert session.attached.event("transfer") == event, "the submitter is told without asking"

    session.fill(2)
    found = session.lookup(keys + hashes(1, seed=9), lease=True)
    assert found.answers[0].hits == 5
    assert found.answers[0].states == HIT * 5 + MISS
    request = session.load_request(found.lease_id, [20, 21, 22, 23, 24])
    session.attached.call(load=request)
    assert session.wait(request.signals.ticket).state == types_pb2.TRANSFER_STATE_DONE
    assert [session.block(block_id) for block_id in range(20, 25)] == stored
    word = DOORBELLS + request.signals.part_word
    assert session.words.part_state(word, request.signals.ticket) == PART_DONE


def test_a_load_touches_only_its_target_blocks(session: RawSession) -> None:
    keys = hashes(2)
    session.store(keys, [0, 1])
    session.fill(3)
    before = session.memory.copy()
    session.load(keys, [7, 30])
    changed = {
        block
        for plane, old in zip(session.planes(), session.planes(before), strict=True)
        for block in np.flatnonzero((plane != old).any(axis=1)).tolist()
    }
    assert changed == {7, 30}


def test_the_unary_calls_do_what_the_stream_does(session: RawSession) -> None:
    keys = hashes(2)
    stored = [session.block(0), session.block(1)]
    ref, stub = session.ref(), session.stub

    store = session.store_request(keys, [0, 1])
    store.session.CopyFrom(ref)
    assert stub.Store(store, timeout=DEADLINE_S).results == ACCEPTED * 2
    wait = cache_pb2.WaitRequest(session=ref, tickets=[store.signals.ticket], timeout_ms=20_000)
    assert stub.Wait(wait, timeout=DEADLINE_S).transfers[0].state == types_pb2.TRANSFER_STATE_DONE

    session.fill(4)
    lookup = session.lookup_request(keys, session=ref, lease=True)
    lease = stub.Lookup(lookup, timeout=DEADLINE_S).lease_id
    load = session.load_request(lease, [5, 6])
    load.session.CopyFrom(ref)
    stub.Load(load, timeout=DEADLINE_S)
    wait.tickets[0] = load.signals.ticket
    assert stub.Wait(wait, timeout=DEADLINE_S).transfers[0].state == types_pb2.TRANSFER_STATE_DONE
    assert [session.block(5), session.block(6)] == stored

    lease = stub.Lookup(lookup, timeout=DEADLINE_S).lease_id
    for _ in range(2):
        stub.Release(cache_pb2.ReleaseRequest(session=ref, lease_ids=[lease]), timeout=DEADLINE_S)
    stub.Cancel(cache_pb2.CancelRequest(session=ref, tickets=[store.signals.ticket]), timeout=DEADLINE_S)


def test_a_block_is_stored_once(session: RawSession) -> None:
    keys = hashes(3)
    session.store(keys, [0, 1, 2])
    request = session.store_request(keys + hashes(1, seed=5), [0, 1, 2, 3])
    assert session.attached.call(store=request).submit.results == EXISTS * 3 + ACCEPTED


def test_a_gated_store_waits_for_the_doorbell(session: RawSession) -> None:
    keys = hashes(1)
    gate = {"gate": types_pb2.GATE_DOORBELL, "doorbell": 2, "doorbell_value": 7}
    request = session.store_request(keys, [0], **gate)
    session.attached.call(store=request)
    assert session.wait(request.signals.ticket, timeout_ms=300).state == types_pb2.TRANSFER_STATE_ACTIVE
    session.ring(2, 6)
    assert session.wait(request.signals.ticket, timeout_ms=100).state == types_pb2.TRANSFER_STATE_ACTIVE
    assert session.lookup(keys).answers[0].states == b"\1", "pending"
    session.fill(5)  # the engine finishes the block, then rings
    session.ring(2, 7)
    assert session.wait(request.signals.ticket).state == types_pb2.TRANSFER_STATE_DONE
    written = session.block(0)
    session.load(keys, [9])
    assert session.block(9) == written


def test_a_revoked_part_ends_its_transfer_without_a_copy(session: RawSession) -> None:
    gate = {"gate": types_pb2.GATE_DOORBELL, "doorbell": 0, "doorbell_value": 1}
    request = session.store_request(hashes(1), [0], **gate)
    session.attached.call(store=request)
    assert session.words.try_revoke(DOORBELLS + request.signals.part_word, request.signals.ticket)
    session.ring(0, 1)
    assert session.wait(request.signals.ticket).state != types_pb2.TRANSFER_STATE_DONE
    assert session.lookup(hashes(1)).answers[0].states == MISS


def test_a_cancelled_transfer_ends(session: RawSession) -> None:
    gate = {"gate": types_pb2.GATE_DOORBELL, "doorbell": 0, "doorbell_value": 1}
    request = session.store_request(hashes(1), [0], **gate)
    session.attached.call(store=request)
    session.attached.call(cancel=cache_pb2.CancelRequest(tickets=[request.signals.ticket]))
    event = session.wait(request.signals.ticket)
    assert event.state == types_pb2.TRANSFER_STATE_CANCELLED
    assert event.error.reason == types_pb2.REASON_CANCELLED


def test_many_transfers_at_once_keep_their_bytes_apart(session: RawSession) -> None:
    keys = hashes(session.num_blocks)
    stored = [session.block(block_id) for block_id in range(session.num_blocks)]
    tickets = []
    for block_id in range(session.num_blocks):
        request = session.store_request(keys[block_id * 32 : (block_id + 1) * 32], [block_id])
        session.attached.post(store=request)
        tickets.append(request.signals.ticket)
    assert len(tickets) <= PARTS
    for ticket in tickets:
        assert session.wait(ticket).state == types_pb2.TRANSFER_STATE_DONE
    session.fill(6)
    session.load(keys, list(reversed(range(session.num_blocks))))
    assert [session.block(session.num_blocks - 1 - i) for i in range(session.num_blocks)] == stored


def test_two_instances_of_one_namespace_share_blocks(session: RawSession, connect: Connect) -> None:
    keys = hashes(2)
    session.store(keys, [0, 1])
    other = connect().ready(instance="another engine")
    other.load(keys, [3, 4])
    assert (other.block(3), other.block(4)) == (session.block(0), session.block(1))


def test_a_scheduler_and_a_rank_may_be_two_processes(daemon: Daemon, connect: Connect) -> None:
    scheduler, rank = connect(), connect()
    welcome = scheduler.attach(role=types_pb2.ROLE_SCHEDULER, groups=[])
    assert list(welcome.instance.missing_ranks) == [0]
    rank.attach(role=types_pb2.ROLE_RANK)
    assert rank.epoch == scheduler.epoch
    rank.register_words()
    rank.register_memory()
    rank.fill(1)
    while not (event := scheduler.attached.event("instance")).ready:
        pass
    assert len(bytes.fromhex(event.namespace_digest)) == 16
    keys = hashes(1)
    assert scheduler.store(keys, [5]).state == types_pb2.TRANSFER_STATE_DONE
    stored = rank.block(5)
    scheduler.load(keys, [6])
    assert rank.block(6) == stored
    rank.close()
    assert scheduler.attached.goodbye() == "EPOCH_ENDED"


def test_hashes_may_be_shorter(daemon: Daemon, connect: Connect) -> None:
    session = connect()
    namespace = session.hello().namespace
    namespace.hash_bytes = 8
    session.ready(namespace=namespace)
    session.fill(1)
    keys = b"abcdefgh" + b"ijklmnop"
    session.store(keys, [0, 1])
    assert session.lookup(b"abcdefgh").answers[0].hits == 1
    assert session.lookup(b"ijklmnop" + b"abcdefgx").answers[0].states == HIT + MISS


def test_memory_can_be_taken_back_and_registered_again(session: RawSession) -> None:
    keys = hashes(1)
    session.store(keys, [0])
    stored = session.block(0)
    session.side.call(unregister_memory=side_pb2.UnregisterMemory(registration_id=session.registration))
    session.register_words()
    session.register_memory()
    session.load(keys, [2])
    assert session.block(2) == stored


def test_the_daemon_is_healthy_and_describes_itself(daemon: Daemon) -> None:
    with grpc.insecure_channel(f"unix:{daemon.socket}") as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", "kvtier.v1.Cache", "kvtier.v1.Admin"):
            answer = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=DEADLINE_S)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        answer = next(reflection.ServerReflectionInfo(asked, timeout=DEADLINE_S))
        names = {service.name for service in answer.list_services_response.service}
    assert names >= {"kvtier.v1.Cache", "kvtier.v1.Admin", "grpc.health.v1.Health"}


def test_status_and_metrics_tell_one_story(start: Start, connect: Connect) -> None:
    daemon = start()
    session = connect().ready()
    keys = hashes(4)
    session.store(keys, [0, 1, 2, 3])
    session.lookup(keys, lease=True)
    status, metrics = daemon.status(), daemon.metrics()
    block_bytes = sum(session.fragments)
    assert status.pid == daemon.pid
    assert status.state == "serving"
    assert status.counters.stored_blocks == metrics["kvtier_store_blocks_total.host"] == 4
    assert status.counters.stored_bytes == metrics["kvtier_store_bytes_total.host"] == 4 * block_bytes
    assert metrics["kvtier_copy_bytes_total.store"] == 4 * block_bytes
    assert status.counters.lookup_hits == metrics["kvtier_lookup_hits_total.host"] == 4
    assert (status.leases, status.leased_blocks) == (1, 4)
    assert metrics["kvtier_client_mapped_bytes"] == len(session.memory)
    assert metrics["kvtier_rpc_seconds_count.lookup"] == 1
    (instance,) = status.instances
    assert instance.ready
    assert instance.mapped_bytes == len(session.memory)
    assert instance.sessions[0].client == "raw test client"
    assert status.workers[0].pid == session.worker_pid


def test_kvtierctl_shows_it(daemon: Daemon, session: RawSession) -> None:
    command = [sys.executable, "-m", "kvtierd.ctl", "status", f"--socket={daemon.socket}"]
    text = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True).stdout
    assert "raw test client" in text
    assert str(daemon.pool) in text
    done = subprocess.run(
        [*command, "--json"], capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    assert json.loads(done.stdout)["pid"] == daemon.pid
