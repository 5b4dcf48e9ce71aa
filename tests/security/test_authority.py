"""What concerns everybody is for operators; and whoever looks sees what is their own."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from kvtier.v1 import admin_pb2, admin_pb2_grpc, types_pb2

from tests.integration.daemon.raw import RawSession, hashes
from tests.security.caller import Caller
from tests.security.conftest import As, Start
from tests.security.people import ATTACKER, VICTIM, being, kvtierctl
from tests.support.process import DEADLINE_S, Daemon, until

ORDERS: dict[str, Any] = {
    "Drain": admin_pb2.DrainRequest(for_restart=True),
    "Resume": admin_pb2.ResumeRequest(),
    "Scrub": admin_pb2.ScrubRequest(),
    "Clear": admin_pb2.ClearRequest(),
    "Reload": admin_pb2.ReloadRequest(),
    "Record": admin_pb2.RecordRequest(),
}
VIEWS = {"Status", "Explain", "ListNamespaces"}


@pytest.fixture
def callers(daemon: Daemon, connect: As) -> Iterator[dict[str, Caller]]:
    found = {"root": Caller(daemon, connect(0)), "nobody": Caller(daemon, None)}
    found |= {"victim": Caller(daemon, connect(VICTIM)), "attacker": Caller(daemon, connect(ATTACKER))}
    yield found
    for each in found.values():
        each.close()


@pytest.fixture
def victim(daemon: Daemon, connect: As) -> RawSession:
    session = connect(VICTIM).ready(instance="victims")
    session.fill(1)
    assert session.store(hashes(4), [0, 1, 2, 3]).state == types_pb2.TRANSFER_STATE_DONE
    return session


def test_every_call_is_an_order_or_a_view() -> None:
    methods = set(admin_pb2.DESCRIPTOR.services_by_name["Admin"].methods_by_name)
    assert methods == set(ORDERS) | VIEWS


@pytest.mark.parametrize("who", ["attacker", "nobody"])
def test_orders_are_for_operators(
    daemon: Daemon, callers: dict[str, Caller], victim: RawSession, who: str
) -> None:
    for name, request in ORDERS.items():
        assert callers[who].refused(name, request) is grpc.StatusCode.PERMISSION_DENIED, name
    status = callers["root"].status()
    assert (status.state, status.blocks.ready) == ("serving", 4)
    assert victim.lookup(hashes(4)).answers[0].hits == 4
    assert daemon.process.poll() is None
    assert callers["root"].call("Clear", admin_pb2.ClearRequest()).cleared_blocks == 4, "the control"


def test_a_token_is_not_guessed(daemon: Daemon, connect: As) -> None:
    session = connect(ATTACKER)
    session.token = b"0" * 16
    caller = Caller(daemon, session)
    assert caller.refused("Clear", admin_pb2.ClearRequest()) is grpc.StatusCode.UNAUTHENTICATED
    caller.close()


def test_orders_are_noted_with_who_gave_them(daemon: Daemon, callers: dict[str, Caller]) -> None:
    callers["root"].call("Resume", admin_pb2.ResumeRequest())
    callers["attacker"].refused("Clear", admin_pb2.ClearRequest())
    until(lambda: '"call": "Clear"' in daemon.log(), "the refused call is in the log")
    lines = [line for line in daemon.log().splitlines() if "an operator's call" in line]
    assert ["Resume" in lines[0], "uid 0, pid" in lines[0]] == [True, True]
    assert ["refused" in lines[1], f"uid {ATTACKER}, pid" in lines[1]] == [True, True]


def test_whoever_looks_sees_what_is_their_own(
    daemon: Daemon, callers: dict[str, Caller], victim: RawSession
) -> None:
    key = hashes(4)[:32]
    for who in ("root", "victim"):
        assert [each.instance for each in callers[who].status().instances] == ["victims"], who
        assert [each.tenant for each in callers[who].namespaces()] == [f"uid:{VICTIM}"], who
        [only] = callers[who].explain(key)
        assert only.verdict == admin_pb2.VERDICT_READABLE, who
    for who in ("attacker", "nobody"):
        status = callers[who].status()
        assert not status.instances, who
        assert status.pool.capacity_bytes, "what is nobody's own is seen by all"
        assert not callers[who].namespaces(), who
        assert not callers[who].explain(key), who


def test_a_block_of_another_tenant_is_not_even_elsewhere(
    daemon: Daemon, callers: dict[str, Caller], victim: RawSession, connect: As
) -> None:
    connect(ATTACKER).ready(instance="attackers")
    key = hashes(4)[:32]
    [only] = callers["attacker"].explain(key)
    assert (only.verdict, list(only.elsewhere)) == (admin_pb2.VERDICT_NEVER_STORED, [])
    verdicts = {each.verdict: each for each in callers["root"].explain(key)}
    [other] = verdicts[admin_pb2.VERDICT_ELSEWHERE].elsewhere
    [difference] = other.differences
    assert (difference.field, difference.here, difference.there) == (
        "tenant",
        f"uid:{ATTACKER}",
        f"uid:{VICTIM}",
    )
    error = callers["attacker"].refused(
        "Explain", admin_pb2.ExplainRequest(hash=key, namespace=other.namespace_digest)
    )
    assert error is grpc.StatusCode.INVALID_ARGUMENT


def test_the_command_line_is_told_the_same(daemon: Daemon, victim: RawSession, tmp_path: Path) -> None:
    record = ["record", str(tmp_path / "records")]
    for command in (["clear", "--yes"], ["drain"], ["resume"], ["reload"], ["scrub"], record):
        said = kvtierctl(ATTACKER, daemon.socket, *command)
        assert said.returncode == 69, said
        assert f"is for operators, and the caller is uid {ATTACKER}" in said.stderr
        assert "server.operators" in said.stderr
    assert not list(tmp_path.iterdir())
    seen = kvtierctl(ATTACKER, daemon.socket, "engines")
    assert (seen.returncode, seen.stdout) == (0, "no engine is attached\n")
    assert "victims" in kvtierctl(VICTIM, daemon.socket, "engines").stdout
    assert "victims" in kvtierctl(0, daemon.socket, "engines").stdout
    assert kvtierctl(0, daemon.socket, "drain").returncode == 0
    assert kvtierctl(0, daemon.socket, "resume").returncode == 0


def test_operators_can_be_named(start: Start) -> None:
    daemon = start(server__operators=f"uid:{ATTACKER}")
    assert kvtierctl(ATTACKER, daemon.socket, "resume").returncode == 0
    assert kvtierctl(VICTIM, daemon.socket, "resume").returncode == 69
    assert kvtierctl(0, daemon.socket, "resume").returncode == 0, "the daemon's own user always is one"


def test_engines_cannot_lock_operators_out(start: Start, connect: As) -> None:
    daemon = start(server__sessions_max=4)
    for uid in (VICTIM, VICTIM, ATTACKER, ATTACKER + 1):
        connect(uid).side.open()
    answer, _ = connect(ATTACKER + 2).side.receive()
    assert answer.error.reason == types_pb2.REASON_QUEUE_FULL
    assert kvtierctl(0, daemon.socket, "drain").returncode == 0
    assert kvtierctl(0, daemon.socket, "resume").returncode == 0


def test_where_everybody_is_an_operator_no_token_is_needed(start: Start) -> None:
    daemon = start(server__group=None)
    with grpc.insecure_channel(f"unix:{daemon.socket}") as channel:
        admin_pb2_grpc.AdminStub(channel).Clear(admin_pb2.ClearRequest(), timeout=DEADLINE_S)
    with being(VICTIM), pytest.raises(PermissionError):
        RawSession(daemon.socket)
