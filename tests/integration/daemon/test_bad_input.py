"""Everything wrong that a client can send: refused with a structured reason, and nothing has changed."""

import os
import signal
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from kvtier.v1 import cache_pb2, side_pb2, types_pb2
from kvtierd.rpc.connections import OPERATORS_MAX

from tests.integration.daemon.conftest import Connect, Start
from tests.integration.daemon.looks import nothing_changes, refusal
from tests.integration.daemon.raw import DOORBELLS, PARTS, RawSession, Refused, SideSocket, hashes, memfd
from tests.integration.daemon.shared import connect as connect
from tests.integration.daemon.shared import daemon as daemon
from tests.integration.daemon.shared import shared_daemon as shared_daemon
from tests.support.process import DEADLINE_S, Daemon, until


def status_of(call: Callable[[], Any]) -> tuple[grpc.StatusCode, types_pb2.Error]:
    """The status of a refused unary call, and the error in its trailing metadata."""
    with pytest.raises(grpc.RpcError) as error:
        call()
    failed: Any = error.value
    found = types_pb2.Error()
    for key, value in failed.trailing_metadata() or ():
        if key == "kvtier-error-bin":
            found.ParseFromString(value)
    return failed.code(), found


class TestOnTheStream:
    @pytest.mark.parametrize(
        ("change", "reason", "field"),
        [
            (lambda r: setattr(r, "hashes", b"x" * 33), "HASH_LENGTH", "hashes"),
            (lambda r: r.block_ids.append(3), "COUNT_MISMATCH", "block_ids"),
            (lambda r: r.block_ids.__setitem__(1, 32), "BLOCK_ID_RANGE", None),
            (lambda r: r.block_ids.__setitem__(1, 2**32 - 1), "BLOCK_ID_RANGE", None),
            (lambda r: setattr(r, "group", 1), "UNKNOWN_GROUP", None),
            (lambda r: setattr(r.signals, "ticket", 0), "TICKET_ORDER", "signals.ticket"),
            (lambda r: setattr(r.signals, "ticket", 2**56), "TICKET_ORDER", "signals.ticket"),
            (lambda r: setattr(r.signals, "part_word", PARTS), "WORD_INDEX_RANGE", None),
            (lambda r: setattr(r.signals, "gate", 5), "MODE_UNSUPPORTED", "signals.gate"),
            (
                lambda r: r.signals.MergeFrom(
                    cache_pb2.Signals(gate=types_pb2.GATE_DOORBELL, doorbell=DOORBELLS)
                ),
                "WORD_INDEX_RANGE",
                None,
            ),
        ],
        ids=lambda value: value if isinstance(value, str) else None,
    )
    def test_a_store_with_one_thing_wrong(
        self,
        daemon: Daemon,
        session: RawSession,
        change: Callable[[Any], None],
        reason: str,
        field: str | None,
    ) -> None:
        request = session.store_request(hashes(2), [0, 1])
        change(request)
        with nothing_changes(daemon), refusal(reason, field):
            session.attached.call(store=request)
        assert session.store(hashes(2), [0, 1]).state == types_pb2.TRANSFER_STATE_DONE, "it still works"

    def test_a_ticket_of_the_past(self, daemon: Daemon, session: RawSession) -> None:
        session.store(hashes(1), [0], ticket=50)
        for ticket in (50, 49):
            with nothing_changes(daemon), refusal("TICKET_ORDER"):
                session.attached.call(store=session.store_request(hashes(1, seed=2), [0], ticket=ticket))

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"block_ids": [1, 1]}, "BLOCK_ID_DUPLICATE"),
            ({"block_ids": [0, 32]}, "BLOCK_ID_RANGE"),
            ({"block_ids": [0, 1, 2]}, "COUNT_MISMATCH"),
            ({"block_ids": [0, 1], "first": 1}, "COUNT_MISMATCH"),
            ({"block_ids": [0], "first": 2**32 - 1}, "COUNT_MISMATCH"),
            ({"lease": 999, "block_ids": [0]}, "UNKNOWN_LEASE"),
        ],
        ids=str,
    )
    def test_a_load_with_one_thing_wrong(
        self, daemon: Daemon, session: RawSession, changes: dict[str, Any], reason: str
    ) -> None:
        keys = hashes(2)
        session.store(keys, [0, 1])
        lease = session.lookup(keys, lease=True).lease_id
        request = session.load_request(changes.pop("lease", lease), **changes)
        with nothing_changes(daemon), refusal(reason):
            session.attached.call(load=request)
        session.attached.call(load=session.load_request(lease, [5, 6]))

    def test_an_expired_lease(self, start: Start, connect: Connect) -> None:
        daemon = start(limits__lease_ttl_s=0.3, server__heartbeat_interval_s=0.1)
        session = connect().ready()
        session.store(hashes(1), [0])
        lease = session.lookup(hashes(1), lease=True).lease_id
        until(lambda: daemon.status().leases == 0, "expired")
        with nothing_changes(daemon), refusal("LEASE_EXPIRED"):
            session.attached.call(load=session.load_request(lease, [0]))

    def test_a_released_lease(self, daemon: Daemon, session: RawSession) -> None:
        session.store(hashes(1), [0])
        lease = session.lookup(hashes(1), lease=True).lease_id
        session.attached.call(release=cache_pb2.ReleaseRequest(lease_ids=[lease]))
        with nothing_changes(daemon), pytest.raises(Refused) as refused:
            session.attached.call(load=session.load_request(lease, [0]))
        assert refused.value.reason in ("UNKNOWN_LEASE", "LEASE_EXPIRED")

    def test_the_lease_of_another_instance(
        self, daemon: Daemon, session: RawSession, connect: Connect
    ) -> None:
        session.store(hashes(1), [0])
        lease = session.lookup(hashes(1), lease=True).lease_id
        thief = connect().ready(instance="thief")
        with nothing_changes(daemon), pytest.raises(Refused) as refused:
            thief.attached.call(load=thief.load_request(lease, [0]))
        assert refused.value.reason in ("FOREIGN", "UNKNOWN_LEASE")
        thief.attached.call(release=cache_pb2.ReleaseRequest(lease_ids=[lease]))
        session.attached.call(load=session.load_request(lease, [3]))

    @pytest.mark.parametrize(
        "field", ["model", "weights_revision", "kv_dtype", "tenant", "salt", "hash_scheme"]
    )
    def test_another_namespace_finds_nothing(self, session: RawSession, connect: Connect, field: str) -> None:
        session.store(hashes(2), [0, 1])
        other = connect()
        namespace = other.hello().namespace
        setattr(namespace, field, "other")
        other.ready(instance="other", namespace=namespace)
        found = other.lookup(hashes(2), lease=True)
        assert (found.answers[0].hits, found.lease_id) == (0, 0)

    def test_a_salt_that_is_too_long_is_not_told(self, connect: Connect) -> None:
        other = connect()
        namespace = other.hello().namespace
        namespace.salt = "hush" * 300
        with pytest.raises(Refused) as refused:
            other.ready(instance="other", namespace=namespace)
        assert refused.value.reason == "NAMESPACE_INVALID"
        assert "hush" not in str(refused.value.error)
        assert "1200 bytes" in str(refused.value.error)

    def test_another_layout_finds_nothing(self, session: RawSession, connect: Connect) -> None:
        session.store(hashes(2), [0, 1])
        other = connect(fragments=(8192, 4096)).ready(instance="other")
        assert other.lookup(hashes(2)).answers[0].hits == 0

    def test_an_epoch_that_is_over(self, daemon: Daemon, session: RawSession) -> None:
        request = session.lookup_request(hashes(1), session=session.ref(epoch=session.epoch + 1))
        with nothing_changes(daemon), refusal("WRONG_EPOCH"):
            session.attached.call(lookup=request)

    def test_a_token_of_somebody_else(self, daemon: Daemon, session: RawSession) -> None:
        request = session.lookup_request(hashes(1), session=session.ref(token=b"x" * 16))
        with nothing_changes(daemon), refusal("FOREIGN", "session.token"):
            session.attached.call(lookup=request)

    def test_a_window_of_nothing(self, daemon: Daemon, session: RawSession) -> None:
        query = cache_pb2.GroupQuery(mode=cache_pb2.LOOKUP_MODE_SUFFIX, hashes=hashes(1))
        with nothing_changes(daemon), refusal("MODE_UNSUPPORTED", "queries[0].window_blocks"):
            session.attached.call(lookup=cache_pb2.LookupRequest(queries=[query]))

    @pytest.mark.parametrize("mode", [cache_pb2.LOOKUP_MODE_UNSPECIFIED, 9])
    def test_a_mode_of_another_version(self, daemon: Daemon, session: RawSession, mode: Any) -> None:
        request = cache_pb2.LookupRequest(queries=[cache_pb2.GroupQuery(mode=mode, hashes=hashes(1))])
        with nothing_changes(daemon), refusal("MODE_UNSUPPORTED", "queries[0].mode"):
            session.attached.call(lookup=request)

    def test_too_many_hashes(self, start: Start, connect: Connect) -> None:
        daemon = start(limits__lookup_hashes_max=10)
        session = connect().ready()
        with nothing_changes(daemon), refusal("TOO_MANY_BLOCKS", "queries[0].hashes"):
            session.lookup(hashes(11))

    def test_an_unknown_transfer(self, daemon: Daemon, session: RawSession) -> None:
        with nothing_changes(daemon), refusal("UNKNOWN_TRANSFER"):
            session.wait(77)

    def test_a_wait_without_end(self, daemon: Daemon, session: RawSession) -> None:
        with nothing_changes(daemon), refusal("DEADLINE", "timeout_ms"):
            session.wait(1, timeout_ms=60_001)

    def test_a_request_without_an_id_or_a_body(self, daemon: Daemon, session: RawSession) -> None:
        with nothing_changes(daemon):
            with refusal("MALFORMED", "body"):
                session.attached.call()
            session.attached._outgoing.put(cache_pb2.AttachRequest(lookup=session.lookup_request(hashes(1))))
            assert session.attached.event("error").field == "id"

    def test_a_second_hello(self, daemon: Daemon, session: RawSession) -> None:
        with nothing_changes(daemon), refusal("SECOND_HELLO"):
            session.attached.call(hello=session.hello())

    def test_an_oversized_message_ends_the_stream_with_a_reason(
        self, daemon: Daemon, session: RawSession, connect: Connect
    ) -> None:
        request = session.lookup_request(bytes(32 * 140_000))
        session.attached.post(lookup=request)
        assert session.attached.goodbye() == "MALFORMED"
        connect().ready().store(hashes(1), [0])

    def test_a_stream_cut_mid_submission_leaves_no_trace(self, daemon: Daemon, session: RawSession) -> None:
        for number in range(20):
            keys = hashes(1, seed=number)
            gate = {"gate": types_pb2.GATE_DOORBELL, "doorbell": 0, "doorbell_value": 1}
            session.attached.post(store=session.store_request(keys, [number], **gate))
        session.attached.close()
        until(lambda: not daemon.status().instances, "instance gone")
        status = daemon.status()
        assert (status.blocks.writing, status.blocks.ready, status.transfers_active) == (0, 0, 0)
        assert status.pool.used_bytes == 0


class TestHello:
    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"token": b"nobody's"}, "UNKNOWN_TOKEN"),
            ({"protocol_versions": [2]}, "VERSION_UNSUPPORTED"),
            ({"role": types_pb2.ROLE_UNSPECIFIED}, "ROLE"),
            ({"world_size": 0}, "MALFORMED"),
            ({"groups": []}, "LAYOUT_INVALID"),
            ({"namespace": types_pb2.Namespace(model="m", hash_bytes=99)}, "NAMESPACE_INVALID"),
        ],
        ids=str,
    )
    def test_a_refused_hello_may_be_followed_by_a_better_one(
        self, daemon: Daemon, connect: Connect, changes: dict[str, Any], reason: str
    ) -> None:
        session = connect()
        with nothing_changes(daemon), refusal(reason):
            session.attach(**changes)
        assert session.attached.goodbye() == reason
        session.ready()

    def test_a_stream_begins_with_hello(self, daemon: Daemon, session: RawSession, connect: Connect) -> None:
        rude = connect()
        with nothing_changes(daemon):
            with pytest.raises(Refused):
                rude.attach()  # puts a proper one in the way: the instance is there already
            assert rude.attached.goodbye()
        stranger = type(rude.attached)(rude.stub)
        with refusal("NOT_ATTACHED", "body"):
            stranger.call(lookup=session.lookup_request(hashes(1)))
        assert stranger.goodbye() == "NOT_ATTACHED"
        stranger.close()

    def test_a_second_stream_of_one_session(self, daemon: Daemon, session: RawSession) -> None:
        second = type(session.attached)(session.stub)
        with nothing_changes(daemon), refusal("SECOND_HELLO"):
            second.call(hello=session.hello())
        second.close()
        assert session.lookup(hashes(1)).answers[0].hits == 0

    def test_a_second_live_session_for_one_rank(
        self, daemon: Daemon, session: RawSession, connect: Connect
    ) -> None:
        with nothing_changes(daemon), refusal("SESSION_EXISTS"):
            connect().attach()
        assert session.store(hashes(1), [0]).state == types_pb2.TRANSFER_STATE_DONE

    def test_a_pool_too_small_for_one_block(self, daemon: Daemon, connect: Connect) -> None:
        huge = connect(fragments=(1 << 20, 1 << 20))
        with nothing_changes(daemon), refusal("SLOT_TOO_LARGE"):
            huge.attach()


class TestUnary:
    def test_status_and_detail_of_a_refusal(self, daemon: Daemon, session: RawSession) -> None:
        request = session.lookup_request(b"x" * 31, session=session.ref())
        with nothing_changes(daemon):
            code, error = status_of(lambda: session.stub.Lookup(request, timeout=DEADLINE_S))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert (error.reason, error.field) == (types_pb2.REASON_HASH_LENGTH, "queries[0].hashes")

    @pytest.mark.parametrize("token", [b"", b"x" * 16])
    def test_an_unknown_token(self, daemon: Daemon, session: RawSession, token: bytes) -> None:
        request = session.lookup_request(hashes(1), session=session.ref(token=token))
        with nothing_changes(daemon):
            code, error = status_of(lambda: session.stub.Lookup(request, timeout=DEADLINE_S))
        assert code is grpc.StatusCode.UNAUTHENTICATED
        assert error.reason == types_pb2.REASON_UNKNOWN_TOKEN

    def test_a_session_without_hello(self, daemon: Daemon, connect: Connect) -> None:
        session = connect()
        session.token = session.side.open()
        request = session.lookup_request(hashes(1), session=session.ref())
        code, error = status_of(lambda: session.stub.Lookup(request, timeout=DEADLINE_S))
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert error.reason == types_pb2.REASON_NOT_ATTACHED

    def test_no_epoch(self, daemon: Daemon, session: RawSession) -> None:
        request = session.lookup_request(hashes(1), session=session.ref(epoch=0))
        with nothing_changes(daemon):
            code, error = status_of(lambda: session.stub.Lookup(request, timeout=DEADLINE_S))
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert error.reason == types_pb2.REASON_WRONG_EPOCH

    def test_an_oversized_message(self, daemon: Daemon, session: RawSession) -> None:
        request = session.lookup_request(bytes(32 * 140_000), session=session.ref())
        with nothing_changes(daemon):
            code, error = status_of(lambda: session.stub.Lookup(request, timeout=DEADLINE_S))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert error.reason == types_pb2.REASON_MALFORMED
        assert "message_bytes_max" in error.message

    def test_a_message_beyond_all_measure(self, daemon: Daemon, session: RawSession) -> None:
        request = session.lookup_request(bytes(17 << 20), session=session.ref())
        with nothing_changes(daemon):
            code, _ = status_of(lambda: session.stub.Lookup(request, timeout=DEADLINE_S))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED


class TestMemory:
    """RegisterMemory, with a session that has said Hello and registered its words."""

    @pytest.fixture
    def attached(self, daemon: Daemon, connect: Connect) -> RawSession:
        session = connect()
        session.attach()
        session.register_words()
        return session

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            (lambda r: setattr(r.groups[0].planes[1], "block_stride_bytes", 2**63), "STRIDE_OVERFLOW"),
            (lambda r: setattr(r.groups[0].planes[1], "base_offset", 2**64 - 1), "STRIDE_OVERFLOW"),
            (lambda r: setattr(r.groups[0], "num_blocks", 33), "PLANE_BEYOND_MAPPING"),
            (lambda r: setattr(r.groups[0].planes[1], "base_offset", 4096 * 32 + 1), "PLANE_BEYOND_MAPPING"),
            (lambda r: setattr(r, "mapping_bytes", r.mapping_bytes - 1), "PLANE_BEYOND_MAPPING"),
            (lambda r: setattr(r, "mapping_bytes", r.mapping_bytes + 1), "MAPPING_INVALID"),
            (lambda r: setattr(r, "mapping_bytes", 0), "MAPPING_INVALID"),
            (lambda r: setattr(r.groups[0].planes[0], "block_stride_bytes", 4095), "LAYOUT_INVALID"),
            (lambda r: setattr(r.groups[0], "num_blocks", 0), "LAYOUT_INVALID"),
            (lambda r: setattr(r.groups[0], "group", 1), "UNKNOWN_GROUP"),
            (lambda r: r.groups.add(), "UNKNOWN_GROUP"),
            (lambda r: r.groups[0].planes.pop(), "COUNT_MISMATCH"),
        ],
        ids=lambda value: value if isinstance(value, str) else None,
    )
    def test_planes_that_do_not_fit(
        self, daemon: Daemon, attached: RawSession, change: Callable[[Any], None], reason: str
    ) -> None:
        request = attached.places()
        fd = memfd(request.mapping_bytes)
        change(request)
        try:
            with nothing_changes(daemon), refusal(reason):
                attached.side.call([fd], register_memory=request)
        finally:
            os.close(fd)
        assert daemon.descriptors_of_clients() == 0
        attached.register_memory()

    def test_a_mapping_that_could_shrink(self, daemon: Daemon, attached: RawSession) -> None:
        request = attached.places()
        fd = memfd(request.mapping_bytes, seal=False)
        with nothing_changes(daemon), refusal("MAPPING_NOT_SEALED"):
            attached.side.call([fd], register_memory=request)
        os.close(fd)

    def test_memory_that_nobody_has_paid_for(self, daemon: Daemon, attached: RawSession) -> None:
        request = attached.places()
        for size in (request.mapping_bytes, 1 << 40):
            fd = memfd(size, sparse=True)
            with nothing_changes(daemon), refusal("MAPPING_INVALID", "descriptor.allocated_bytes"):
                attached.side.call([fd], register_memory=request)
            os.close(fd)
        assert daemon.descriptors_of_clients() == 0

    def test_what_is_no_memory_at_all(self, daemon: Daemon, attached: RawSession) -> None:
        reading, writing = os.pipe()
        with nothing_changes(daemon), refusal("MAPPING_INVALID"):
            attached.side.call([reading], register_memory=attached.places())
        os.close(reading)
        os.close(writing)

    @pytest.mark.parametrize("count", [0, 2])
    def test_too_few_or_too_many_descriptors(self, daemon: Daemon, attached: RawSession, count: int) -> None:
        fds = [memfd(4096) for _ in range(count)]
        with nothing_changes(daemon), refusal("MALFORMED", "descriptors"):
            attached.side.call(fds, register_memory=attached.places())
        assert daemon.descriptors_of_clients() == 0
        for fd in fds:
            os.close(fd)

    def test_registering_twice(self, daemon: Daemon, attached: RawSession) -> None:
        attached.register_memory()
        with nothing_changes(daemon), refusal("ALREADY_REGISTERED"):
            attached.register_memory()
        with nothing_changes(daemon), refusal("ALREADY_REGISTERED"):
            attached.register_words()

    def test_unregistering_what_is_not_there(self, daemon: Daemon, attached: RawSession) -> None:
        with nothing_changes(daemon), refusal("NOT_ATTACHED"):
            attached.side.call(unregister_memory=side_pb2.UnregisterMemory(registration_id=5))


class TestSideSocket:
    def test_words_that_do_not_fit(self, daemon: Daemon, connect: Connect) -> None:
        session = connect()
        session.attach()
        fd = memfd(8 * 9)
        with nothing_changes(daemon), refusal("MAPPING_INVALID"):
            session.side.call([fd], register_words=side_pb2.RegisterWords(doorbells=2, parts=8))
        with nothing_changes(daemon), refusal("WORD_INDEX_RANGE"):
            session.side.call([fd], register_words=side_pb2.RegisterWords(doorbells=2, parts=2**32 - 1))
        os.close(fd)

    def test_words_that_nobody_has_paid_for(self, daemon: Daemon, connect: Connect) -> None:
        session = connect()
        session.attach()
        fd = memfd(1 << 20, sparse=True)
        with nothing_changes(daemon), refusal("MAPPING_INVALID", "descriptor.allocated_bytes"):
            session.side.call([fd], register_words=side_pb2.RegisterWords(doorbells=2, parts=8))
        os.close(fd)

    def test_everything_has_its_order(self, daemon: Daemon, connect: Connect) -> None:
        session = connect()
        with nothing_changes(daemon), refusal("NOT_ATTACHED"):
            session.register_words()
        session.token = session.side.open()
        with nothing_changes(daemon), refusal("NOT_ATTACHED"):
            session.register_words()
        with nothing_changes(daemon), refusal("NOT_ATTACHED"):
            session.register_memory()
        with nothing_changes(daemon), refusal("SECOND_HELLO"):
            session.side.open()
        session.attach()
        with nothing_changes(daemon), refusal("NOT_ATTACHED"):
            session.register_memory()
        session.register_words()
        session.register_memory()

    def test_a_scheduler_registers_nothing(self, daemon: Daemon, connect: Connect) -> None:
        session = connect()
        session.attach(role=types_pb2.ROLE_SCHEDULER, groups=[])
        with nothing_changes(daemon), refusal("ROLE"):
            session.register_words()

    def test_a_version_of_the_future(self, daemon: Daemon, connect: Connect) -> None:
        session = connect()
        with refusal("VERSION_UNSUPPORTED"):
            session.side.call(open=side_pb2.SideOpen(protocol_versions=[7]))
        session.ready()

    def test_garbage_is_answered_and_an_empty_request_too(self, daemon: Daemon, session: RawSession) -> None:
        with nothing_changes(daemon):
            session.side.send(b"\xff" * 100)
            assert session.side.receive()[0].error.reason == types_pb2.REASON_MALFORMED
            with refusal("MALFORMED", "body"):
                session.side.call()
        session.store(hashes(1), [0])

    def test_a_packet_beyond_all_measure_ends_the_session(self, daemon: Daemon, connect: Connect) -> None:
        session = connect().ready()
        session.side.socket.setsockopt(1, 7, 1 << 21)
        try:
            session.side.send(b"x" * 200_000)
        except OSError:
            pytest.skip("this kernel's send buffers do not let such a packet out")
        assert session.attached.goodbye() == "EPOCH_ENDED"

    def test_requests_without_end_close_the_connection(self, daemon: Daemon) -> None:
        side = SideSocket(daemon.side_socket)
        daemon.process.send_signal(signal.SIGSTOP)
        try:
            for number in range(40):
                side.send(side_pb2.SideRequest(id=number + 1).SerializeToString())
        finally:
            daemon.process.send_signal(signal.SIGCONT)
        until(lambda: _drained(side), "closed")
        side.close()

    def test_refused_registrations_leave_no_descriptor_behind(self, daemon: Daemon, connect: Connect) -> None:
        session = connect()
        session.attach()
        fd = memfd(4096, seal=False)
        for _ in range(50):
            with pytest.raises(Refused):
                session.side.call([fd], register_words=side_pb2.RegisterWords(doorbells=1, parts=1))
        os.close(fd)
        assert daemon.descriptors_of_clients() == 0

    def test_sessions_that_come_and_go_leave_no_descriptor_behind(
        self, daemon: Daemon, connect: Connect
    ) -> None:
        connect().ready().close()
        until(lambda: not daemon.status().instances, "gone")
        before = daemon.sockets()
        for _ in range(5):
            connect().ready().close()
            until(lambda: not daemon.status().instances, "gone")
        until(lambda: daemon.sockets() <= before, "descriptors closed")

    def test_sessions_are_bounded(self, start: Start, connect: Connect) -> None:
        start(server__sessions_max=2)
        first, second, third = connect(), connect(), connect()
        first.side.open()
        second.side.open()
        with pytest.raises(Refused, match="sessions_max") as refused:
            third.attach()  # an operator could ask Admin on this connection, but no engine attaches
        assert refused.value.reason == "QUEUE_FULL"
        operators = [connect() for _ in range(OPERATORS_MAX)]
        response, _ = operators[-1].side.receive()
        assert response.error.reason == types_pb2.REASON_QUEUE_FULL
        assert "sessions_max" in response.error.message
        for each in (first, third, *operators):
            each.close()
        until(lambda: _attaches(connect()), "room again")


def _drained(side: SideSocket) -> bool:
    try:
        while True:
            side.receive()
    except OSError:
        return True


def _attaches(session: RawSession) -> bool:
    try:
        return bool(session.attach())
    except (Refused, OSError, AssertionError):
        return False
