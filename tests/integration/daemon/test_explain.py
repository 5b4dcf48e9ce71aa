"""`kvtierctl explain` and Admin.Explain of a running daemon: why a hash misses, and what it is not asked."""

import itertools
import json

import grpc
import pytest
from kvtier.v1 import admin_pb2, types_pb2

from tests.integration.daemon.commands import admin, explain, kvtierctl, verdict
from tests.integration.daemon.conftest import Connect, Start
from tests.integration.daemon.raw import RawSession, hashes
from tests.support.process import DEADLINE_S, Daemon, until

GATED = {"gate": types_pb2.GATE_DOORBELL, "doorbell": 0, "doorbell_value": 1}


def test_a_block_s_life_is_explained(daemon: Daemon, session: RawSession) -> None:
    [first, second, third] = [hashes(1, seed=seed) for seed in (1, 2, 3)]
    assert verdict(daemon, first) == "NEVER_STORED"
    gated = session.store_request(first, [0], **GATED)
    session.attached.call(store=gated)
    assert verdict(daemon, first) == "BEING_WRITTEN"
    session.ring(0, 1)
    assert session.attached.event("transfer").state == types_pb2.TRANSFER_STATE_DONE
    assert verdict(daemon, first) == "READABLE"

    late = session.store_request(second, [1], **(GATED | {"doorbell": 1}))
    session.attached.call(store=late)
    session.attached.call(cancel={"session": session.ref(), "tickets": [late.signals.ticket]})
    assert session.attached.event("transfer").state == types_pb2.TRANSFER_STATE_CANCELLED
    [ended] = explain(daemon, second)
    assert (ended.verdict, ended.reason) == (admin_pb2.VERDICT_STORE_ENDED, types_pb2.REASON_CANCELLED)
    assert "was cancelled" in ended.text
    assert verdict(daemon, third) == "NEVER_STORED"


def test_an_evicted_block_says_so(start: Start, connect: Connect) -> None:
    daemon = start(pool__size="4MiB")
    session = connect().ready()
    keys = [hashes(8, seed=seed) for seed in range(60)]
    for each in keys:
        assert session.store(each, list(range(8))).state == types_pb2.TRANSFER_STATE_DONE
        if daemon.status().counters.evicted_blocks:
            break
    [found] = explain(daemon, keys[0][-32:])
    assert found.verdict == admin_pb2.VERDICT_EVICTED
    assert found.HasField("age_s")


def test_a_block_of_another_namespace_names_what_differs(
    daemon: Daemon, session: RawSession, connect: Connect
) -> None:
    key = hashes(1)
    session.store(key, [0])
    namespace = types_pb2.Namespace(
        model="test/model", kv_dtype="float8", hash_scheme="test:1", hash_bytes=32, salt="secret"
    )
    other = connect().ready(instance="other", namespace=namespace)
    view = next(each for each in daemon.status().instances if each.instance == "other")
    [found] = explain(daemon, key, namespace=view.namespace_digest[:8])
    assert found.verdict == admin_pb2.VERDICT_ELSEWHERE
    [place] = found.elsewhere
    differing = {each.field: (each.here, each.there) for each in place.differences}
    assert differing["namespace.kv_dtype"][0] == "float8"
    assert differing["namespace.salt"] == ("", "")
    told = kvtierctl(daemon, "explain", key.hex(), f"--namespace={view.namespace_digest}")
    assert told.returncode == 0
    assert "namespace.kv_dtype: float8 here" in told.stdout
    assert "secret" not in told.stdout
    other.close()


def test_the_command_answers_people_and_programs(daemon: Daemon, session: RawSession) -> None:
    key = hashes(1)
    session.store(key, [0])
    told = kvtierctl(daemon, "explain", key.hex())
    assert (told.returncode, "readable now" in told.stdout) == (0, True), told
    found = json.loads(kvtierctl(daemon, "explain", key.hex(), "--json").stdout)
    assert [each["text"] for each in found["explanations"]] == ["readable now"]
    digest = found["explanations"][0]["namespace_digest"]
    for command in (["explain", key.hex()], ["clear", "--yes"]):
        wrong = kvtierctl(daemon, *command, "--namespace=zzz")
        assert (wrong.returncode, "no engine has attached with such a namespace" in wrong.stderr) == (
            69,
            True,
        )
        assert f"{digest} (tiny)" in wrong.stderr
        assert "namespace=zzz" in wrong.stderr


def test_a_whole_prompt_is_summed_up(daemon: Daemon, session: RawSession) -> None:
    session.store(hashes(3), [0, 1, 2])
    stored = [hashes(3)[at : at + 32].hex() for at in range(0, 96, 32)]
    told = kvtierctl(daemon, "explain", "-", stdin="\n".join([*stored, "ab" * 32]))
    assert (told.returncode, "group 0: 3 of 4 blocks can be loaded" in told.stdout) == (0, True), told
    assert "blocks 1 to 3: readable now" in told.stdout
    assert "block 4: never stored" in told.stdout
    wrong = kvtierctl(daemon, "explain", "-", stdin="\n".join(["ab" * 32, "cd" * 32]))
    assert (wrong.returncode, "right --block-tokens? Blocks here have " in wrong.stdout) == (0, True), wrong


class TestNothingIsThere:
    """A daemon to which no engine has ever attached."""

    def test_people_are_told_what_is_so_and_where_to_look(self, daemon: Daemon) -> None:
        told = kvtierctl(daemon, "explain", "ab" * 32)
        assert (told.returncode, told.stderr) == (0, "")
        assert "no engine has attached since the daemon started" in told.stdout
        assert "nothing is stored" in told.stdout
        assert "kvtierctl engines" in told.stdout
        group = kvtierctl(daemon, "explain", "ab" * 32, "--group=3")
        assert (group.returncode, "no engine has attached" in group.stdout) == (0, True)

    def test_programs_are_told_the_same(self, daemon: Daemon) -> None:
        told = kvtierctl(daemon, "explain", "ab" * 32, "--json")
        found = json.loads(told.stdout)
        assert (told.returncode, told.stderr) == (0, "")
        assert (found["explanations"], found["known_namespaces"]) == ([], 0)

    def test_hashes_of_a_whole_prompt_are_answered_once(self, daemon: Daemon) -> None:
        prompt = "\n".join(f"{number:064x}" for number in range(50))
        told = kvtierctl(daemon, "explain", "-", stdin=prompt)
        assert (told.returncode, told.stdout.count("no engine has attached")) == (0, 1)
        assert len(json.loads(kvtierctl(daemon, "explain", "-", "--json", stdin=prompt).stdout)) == 50

    def test_a_prompt_without_a_full_block(self, daemon: Daemon) -> None:
        told = kvtierctl(daemon, "explain", "-", stdin="")
        assert (told.returncode, "no hash on standard input" in told.stdout) == (0, True)
        assert json.loads(kvtierctl(daemon, "explain", "-", "--json", stdin="").stdout) == []

    def test_a_namespace_is_unknown(self, daemon: Daemon) -> None:
        told = kvtierctl(daemon, "explain", "ab" * 32, "--namespace=ffff", "--json")
        assert (told.returncode, told.stdout) == (69, "")
        assert "no engine has attached since the daemon started" in told.stderr
        assert "namespace=ffff" in told.stderr


def test_a_namespace_is_asked_about_by_how_it_begins(
    daemon: Daemon, session: RawSession, connect: Connect
) -> None:
    session.store(hashes(1), [0])
    for number in range(16):  # of 17 digests two begin with the same digit
        namespace = types_pb2.Namespace(
            model=f"m{number}", kv_dtype="float16", hash_scheme="test:1", hash_bytes=32
        )
        connect().ready(instance=f"other-{number}", namespace=namespace)
    known = sorted({each.namespace_digest for each in daemon.status().instances})
    first = next(one[0] for one, other in itertools.pairwise(known) if one[0] == other[0])
    expected = [digest for digest in known if digest.startswith(first)]
    told = kvtierctl(daemon, "explain", hashes(1).hex(), f"--namespace={first.upper()}")
    assert told.returncode == 0
    assert all(f"namespace {digest}" in told.stdout for digest in expected)
    assert told.stdout.count("\nnamespace ") + 1 == len(expected)
    wrong_length = kvtierctl(daemon, "explain", "ab" * 31)
    assert wrong_length.returncode == 2
    assert f"hash '{'ab' * 31}' has 31 bytes, and those of the 17 namespaces have 32" in wrong_length.stderr
    no_group = kvtierctl(daemon, "explain", "ab" * 32, "--group=77")
    assert (no_group.returncode, "has such a group" in no_group.stdout) == (0, True)


@pytest.mark.parametrize(
    ("request_fields", "status"),
    [
        ({"hash": b""}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"hash": bytes(33)}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"hash": bytes(31)}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"hash": bytes(32), "namespace": "x" * 10_000}, grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
def test_bad_questions_are_refused(
    daemon: Daemon, session: RawSession, request_fields: dict[str, object], status: grpc.StatusCode
) -> None:
    with admin(daemon) as stub, pytest.raises(grpc.RpcError) as refused:
        stub.Explain(admin_pb2.ExplainRequest(**request_fields), timeout=DEADLINE_S)  # type: ignore[arg-type]
    assert refused.value.code() is status
    assert explain(daemon, hashes(1), group=77) == []


def test_status_says_what_sampling_does(start: Start, connect: Connect) -> None:
    daemon = start(integrity__sample_bytes_per_s="1MiB")
    session = connect().ready()
    session.store(hashes(4), [0, 1, 2, 3])
    until(lambda: daemon.status().integrity.sampled_slots >= 4, "sampling has read something")
    status = daemon.status()
    assert status.integrity.verify == "restart"
    expected_s = status.pool.used_bytes / (1 << 20)
    assert status.integrity.expected_detection_s == pytest.approx(expected_s)
    told = kvtierctl(daemon, "status")
    assert "(1 MiB/s are read at most" in told.stdout
    assert daemon.metrics()["kvtier_sampled_bytes_total"] >= status.integrity.sampled_bytes > 0
