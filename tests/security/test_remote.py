"""The port for other hosts lets in whom its authority vouches for, shows each caller its own tenant, changes
nothing, and harms no engine."""

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kvtier.v1 import admin_pb2, cache_pb2, remote_pb2, types_pb2
from kvtierd.config.descriptors import REMOTE_CONNECTIONS
from kvtierd.rpc.contract import ERROR_METADATA
from kvtierd.rpc.remote import CALLS_PER_TENANT, FIND_HASHES_MAX, HANDSHAKE_S

from tests.integration.daemon.raw import RawSession, hashes
from tests.security.conftest import As, Start
from tests.security.people import ATTACKER, VICTIM
from tests.security.remote import FOUND, NOT_LET_IN, ROUTER, Remote, RemoteClient, port_of
from tests.support.certificates import HOST, CertificateAuthority, CertificateFolder, Issued
from tests.support.process import DEADLINE_S, refused_start, until


def refusal(call: Callable[[], Any]) -> tuple[str, str]:
    """The reason for which a call is refused, and the text."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    metadata: Any = caught.value.trailing_metadata()
    details = dict(metadata or ())
    error = types_pb2.Error.FromString(details[ERROR_METADATA])
    return types_pb2.Reason.Name(error.reason).removeprefix("REASON_"), str(caught.value.details())


@pytest.fixture
def remote(start: Start, certificates: Path) -> Remote:
    return Remote(start, certificates)


@pytest.fixture
def router(remote: Remote) -> Iterator[RemoteClient]:
    client = remote.as_client(remote.router)
    yield client
    client.close()


@pytest.fixture
def victim(remote: Remote, connect: As) -> RawSession:
    """Eight blocks of the tenant that the router is of."""
    session = connect(VICTIM).ready(instance="victims")
    session.fill(1)
    assert session.store(hashes(8), list(range(8))).state == types_pb2.TRANSFER_STATE_DONE
    return session


# --- who is let in ---


def test_only_those_whom_the_authority_vouches_for_are_let_in(remote: Remote) -> None:
    other = CertificateAuthority()  # of the same name
    issue = remote.authority.issue
    assert remote.status_for(remote.router) is FOUND, "the control"
    assert remote.status_for(None) is NOT_LET_IN
    assert remote.status_for(other.issue("anything", uris=(ROUTER,))) is NOT_LET_IN
    assert remote.status_for(issue("anything", uris=(ROUTER,), from_days=-2, to_days=-1)) is NOT_LET_IN
    assert remote.status_for(issue("anything", uris=(ROUTER,), from_days=1, to_days=2)) is NOT_LET_IN
    stolen = Issued(remote.router.certificate, other.issue("anything").key)
    with pytest.raises(grpc.RpcError):
        remote.as_client(stolen).stub.Status(admin_pb2.StatusRequest(), timeout=2)
    plain = RemoteClient(grpc.insecure_channel(f"{HOST}:{remote.port}"))
    assert plain.outcome() is NOT_LET_IN
    plain.close()
    assert remote.status_for(remote.router) is FOUND
    assert remote.daemon.complaints() == []


def test_a_client_notices_that_it_talks_to_somebody_else(remote: Remote) -> None:
    client = remote.as_client(remote.router, CertificateAuthority().pem)
    assert client.outcome() is NOT_LET_IN
    client.close()


def test_a_certificate_without_a_rule_sees_nothing_and_is_told_why(remote: Remote) -> None:
    other_name = remote.authority.issue(ROUTER, dns=("other.tests",))  # the common name counts for nothing
    for own, name in ((remote.authority.issue("stranger"), "stranger"), (other_name, "other.tests")):
        client = remote.as_client(own)
        calls: list[Callable[[], Any]] = [
            partial(client.stub.Status, admin_pb2.StatusRequest(), timeout=DEADLINE_S),
            partial(client.stub.ListNamespaces, admin_pb2.ListNamespacesRequest(), timeout=DEADLINE_S),
            partial(client.stub.Find, remote_pb2.FindRequest(), timeout=DEADLINE_S),
        ]
        for call in calls:
            reason, text = refusal(call)
            assert (reason, f"add cert:{name}=TENANT to server.tenants" in text) == ("FOREIGN", True), text
        client.close()


# --- what is served there ---


def test_nothing_else_is_served_there(remote: Remote, router: RemoteClient) -> None:
    assert router.outcome() is FOUND
    services = [
        cache_pb2.DESCRIPTOR.services_by_name["Cache"],
        admin_pb2.DESCRIPTOR.services_by_name["Admin"],
    ]
    names = [f"/{each.full_name}/{method}" for each in services for method in each.methods_by_name]
    names += [
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo" for version in ("v1", "v1alpha")
    ]
    assert len(names) > 15
    for name in names:
        call: Any = router.channel.stream_stream(name)
        with pytest.raises(grpc.RpcError) as caught:
            list(call(iter([b""]), timeout=DEADLINE_S))
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED, name
    health = health_pb2_grpc.HealthStub(router.channel)
    answer = health.Check(health_pb2.HealthCheckRequest(service="kvtier.v1.Remote"), timeout=DEADLINE_S)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_the_daemons_own_addresses_stay_on_its_host(
    remote: Remote, router: RemoteClient, victim: RawSession
) -> None:
    there = router.stub.Status(admin_pb2.StatusRequest(), timeout=DEADLINE_S)
    here = remote.daemon.status()
    for name in ("pid", "socket", "metrics_url"):
        assert getattr(here, name), "the control"
        assert not getattr(there, name)
    assert there.pool.capacity_bytes == here.pool.capacity_bytes


def test_each_certificate_sees_its_own_tenant(
    remote: Remote, router: RemoteClient, victim: RawSession, connect: As
) -> None:
    attackers = connect(ATTACKER).ready(instance="attackers")
    attackers.fill(2)
    keys = hashes(8)
    assert attackers.store(keys[: 3 * 32], [0, 1, 2]).state == types_pb2.TRANSFER_STATE_DONE
    spy = remote.as_client(remote.authority.issue("anything", dns=("spy.tests",)))
    seen = {}
    for client, tenant, instance, blocks in (
        (router, VICTIM, "victims", 8),
        (spy, ATTACKER, "attackers", 3),
    ):
        status = client.stub.Status(admin_pb2.StatusRequest(), timeout=DEADLINE_S)
        assert [each.instance for each in status.instances] == [instance]
        [namespace] = client.namespaces()
        assert (namespace.tenant, namespace.host_blocks) == (f"uid:{tenant}", blocks)
        seen[client] = namespace.namespace_digest
        assert client.find(namespace.namespace_digest, keys).leading_blocks == blocks
    for client, digest in ((router, seen[spy]), (spy, seen[router])):
        reason, text = refusal(partial(client.find, digest, keys))
        assert reason == "NAMESPACE_INVALID"
        assert seen[client] in text, "its own are named"
        assert text.replace(f"={digest}", "").count(digest) == 0
        unknown = refusal(partial(client.find, "0" * 32, keys))
        assert unknown[0] == reason
        assert unknown[1].replace("0" * 32, "") == text.replace(digest, ""), "as if there were no such"
    spy.close()


# --- find ---


def test_find_says_where_blocks_are(remote: Remote, router: RemoteClient, victim: RawSession) -> None:
    [namespace] = router.namespaces()
    digest, keys = namespace.namespace_digest, hashes(8)
    found = router.find(digest, keys + hashes(2, seed=9))
    assert (found.leading_blocks, found.leading_host_blocks, list(found.places)) == (8, 8, [1] * 8 + [0] * 2)
    gap = router.find(digest.upper(), keys[:64] + hashes(1, seed=9) + keys[64:])
    assert (gap.leading_blocks, list(gap.places)) == (2, [1, 1, 0, 1, 1, 1, 1, 1, 1])
    assert router.find(digest, b"").leading_blocks == 0
    many = hashes(5_000, seed=3)
    assert router.find(digest, keys + many).leading_blocks == 8


def test_find_is_refused_what_it_cannot_be_asked(
    remote: Remote, router: RemoteClient, victim: RawSession
) -> None:
    [namespace] = router.namespaces()
    digest = namespace.namespace_digest
    for name, call in {
        "HASH_LENGTH": lambda: router.find(digest, b"x" * 33),
        "UNKNOWN_GROUP": lambda: router.find(digest, hashes(1), group=7),
        "NAMESPACE_INVALID": lambda: router.find("nonsense", hashes(1)),
        "TOO_MANY_BLOCKS": lambda: router.find(digest, bytes(32 * (FIND_HASHES_MAX + 1))),
        "MALFORMED": lambda: router.find(digest, bytes(32 * (FIND_HASHES_MAX + 1_000))),
    }.items():
        assert refusal(call)[0] == name
    with pytest.raises(grpc.RpcError) as caught:
        router.find(digest, bytes(4 << 20))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert router.find(digest, hashes(8)).leading_blocks == 8


def test_find_takes_no_lease_and_counts_as_no_lookup(
    remote: Remote, router: RemoteClient, victim: RawSession
) -> None:
    [namespace] = router.namespaces()
    before = remote.daemon.status()
    for _ in range(20):
        router.find(namespace.namespace_digest, hashes(8))
    after = remote.daemon.status()
    assert (after.leases, after.leased_blocks) == (0, 0)
    assert after.counters == before.counters


@pytest.mark.parametrize("asks", ["find", "lookup"])
def test_what_is_evicted_does_not_depend_on_find(
    remote: Remote, router: RemoteClient, connect: As, asks: str
) -> None:
    """A pool that is filled twice over: the first blocks are evicted although they were found again and
    again. A lookup in place of Find keeps them, which is the control."""
    session = connect(VICTIM)
    session.fragments, session.num_blocks = (65_536,), 64
    session.ready(instance="victims")
    session.fill(1)
    first = hashes(8)
    assert session.store(first, list(range(8))).state == types_pb2.TRANSFER_STATE_DONE
    [namespace] = router.namespaces()
    room = remote.daemon.status().pool.capacity_bytes // 65_536
    for number in range(0, 2 * room, 64):
        keys = hashes(64, seed=100 + number)
        assert session.store(keys, list(range(64))).state == types_pb2.TRANSFER_STATE_DONE
        if asks == "find":
            router.find(namespace.namespace_digest, first)
        else:
            session.lookup(first)
    left = router.find(namespace.namespace_digest, first).leading_blocks
    assert left == (0 if asks == "find" else 8)


def test_while_the_daemon_drains_nothing_is_found(
    remote: Remote, router: RemoteClient, victim: RawSession
) -> None:
    [namespace] = router.namespaces()
    assert router.find(namespace.namespace_digest, hashes(8)).leading_blocks == 8
    command = [sys.executable, "-m", "kvtierd.ctl", "drain", f"--socket={remote.daemon.socket}"]
    subprocess.run(command, check=True, capture_output=True, timeout=DEADLINE_S)
    assert router.find(namespace.namespace_digest, hashes(8)).leading_blocks == 0
    answer = router.stub.Status(admin_pb2.StatusRequest(), timeout=DEADLINE_S)
    assert answer.state == "draining"


# --- rotation ---


def served(port: int) -> str:
    """The serial number of the certificate that a new connection is shown."""
    command = f"openssl s_client -connect {HOST}:{port} </dev/null 2>/dev/null | openssl x509 -noout -serial"
    done = subprocess.run(
        command, shell=True, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    return done.stdout.strip()


def test_a_new_certificate_is_used_without_a_restart(remote: Remote, router: RemoteClient) -> None:
    before = served(remote.port)
    assert before.startswith("serial=")
    assert router.outcome() is FOUND
    remote.files.put(remote.authority.issue("kvtierd", dns=(HOST,)), remote.authority.pem)
    assert served(remote.port) != before
    assert router.outcome() is FOUND, "a connection that there is stays"
    assert remote.status_for(remote.router) is FOUND


def test_an_authority_that_is_exchanged_lets_its_clients_in_no_more(remote: Remote) -> None:
    assert remote.status_for(remote.router) is FOUND
    other = CertificateAuthority()
    remote.files.put(remote.own, other.pem)
    assert remote.status_for(remote.router) is NOT_LET_IN
    assert remote.status_for(other.issue("anything", uris=(ROUTER,))) is FOUND


def test_files_that_cannot_be_used_change_nothing_and_are_complained_of_once(remote: Remote) -> None:
    before = served(remote.port)
    good = remote.authority.issue("kvtierd", dns=(HOST,))
    kinds = (
        (Issued(b"", b""), 0o600),
        (Issued(good.certificate, remote.own.key), 0o600),
        (good, 0o644),
    )
    for told, (broken, mode) in enumerate(kinds, 1):
        remote.files.put(broken, remote.authority.pem, key_mode=mode)
        for _ in range(3):
            assert remote.status_for(remote.router) is FOUND
        assert served(remote.port) == before
        complaints = [line for line in remote.daemon.complaints() if "a new file cannot be used" in line]
        assert len(complaints) == told, complaints
    assert "chmod 0600" in complaints[-1]
    (remote.files.folder / "..data").unlink()
    assert remote.status_for(remote.router) is FOUND
    (remote.files.folder / "..data").symlink_to("..1")
    remote.files.put(good, remote.authority.pem)
    assert served(remote.port) != before


# --- those who only want to disturb ---


@pytest.mark.long
def test_handshakes_that_do_not_end_and_crowds_are_bounded_and_harm_no_engine(
    remote: Remote, victim: RawSession
) -> None:
    crowd = []
    begun_s = time.monotonic()
    for _ in range(REMOTE_CONNECTIONS + 40):
        each = socket.create_connection((HOST, remote.port), timeout=DEADLINE_S)
        with contextlib.suppress(OSError):  # it is closed already
            each.send(b"\x16\x03\x01\x02\x00")
        crowd.append(each)

    def closed() -> int:
        found = 0
        for each in crowd:
            each.setblocking(False)
            try:
                found += each.recv(1, socket.MSG_PEEK) == b""
            except BlockingIOError:
                pass
            except OSError:
                found += 1
        return found

    until(lambda: closed() >= 40, "those beyond the limit are closed")
    assert victim.load(hashes(8), list(range(8))).state == types_pb2.TRANSFER_STATE_DONE
    assert remote.daemon.sockets() < REMOTE_CONNECTIONS + 60
    until(lambda: closed() == len(crowd), "handshakes have a deadline")
    assert time.monotonic() - begun_s > HANDSHAKE_S / 2, "the control: they were waited for"
    until(lambda: remote.status_for(remote.router) is FOUND, "there is room again")
    for each in crowd:
        each.close()


def test_calls_at_once_of_one_tenant_are_bounded_and_engines_are_served(
    remote: Remote, victim: RawSession
) -> None:
    """Callers that never pause, on many connections: each is answered or refused, and lookups go on."""
    clients = [remote.as_client(remote.router) for _ in range(12)]
    [namespace] = clients[0].namespaces()
    keys, stop = hashes(8192, seed=5), threading.Event()
    outcomes: list[grpc.StatusCode] = []

    def ask(client: RemoteClient) -> None:
        while not stop.is_set():
            try:
                client.find(namespace.namespace_digest, keys)
                outcomes.append(FOUND)
            except grpc.RpcError as error:
                outcomes.append(error.code())

    threads = [threading.Thread(target=ask, args=(client,)) for client in clients for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(50):
        assert victim.lookup(hashes(8)).answers[0].hits == 8
    until(lambda: set(outcomes) == {FOUND, grpc.StatusCode.RESOURCE_EXHAUSTED}, "some are refused")
    stop.set()
    for thread in threads:
        thread.join(DEADLINE_S)
    for client in clients:
        client.close()
    assert len(threads) > CALLS_PER_TENANT
    assert remote.status_for(remote.router) is FOUND


# --- without TLS, and what is refused at the start ---


def test_without_tls_it_warns_and_shows_what_a_rule_says(
    start: Start, certificates: Path, connect: As
) -> None:
    daemon = start(
        remote__listen="127.0.0.1:0", remote__insecure="true", server__tenants=f"anonymous=uid:{VICTIM}"
    )
    assert any("the remote port has no TLS" in line for line in daemon.complaints())
    assert "without TLS" in daemon.greeting
    connect(VICTIM).ready(instance="victims")
    connect(ATTACKER).ready(instance="attackers")
    client = RemoteClient(grpc.insecure_channel(f"{HOST}:{port_of(daemon)}"))
    assert [each.tenant for each in client.namespaces()] == [f"uid:{VICTIM}"]
    client.close()


def test_without_tls_and_without_a_rule_nothing_is_seen(start: Start) -> None:
    daemon = start(remote__listen="127.0.0.1:0", remote__insecure="true", server__tenants="*=everybody")
    client = RemoteClient(grpc.insecure_channel(f"{HOST}:{port_of(daemon)}"))
    reason, text = refusal(lambda: client.stub.Status(admin_pb2.StatusRequest(), timeout=DEADLINE_S))
    assert (reason, "anonymous=TENANT" in text) == ("FOREIGN", True)
    client.close()


def test_a_daemon_without_what_tls_takes_does_not_start(
    socket_dir: Path, shm_dir: Path, certificates: Path
) -> None:
    authority = CertificateAuthority()
    files = CertificateFolder(certificates)
    given = [
        f"--remote-{key.partition('__')[2].replace('_', '-')}={value}"
        for key, value in files.settings.items()
    ]
    listen = "--remote-listen=127.0.0.1:0"
    status, said = refused_start(socket_dir, shm_dir / "pool", listen)
    assert status == 78
    for name in ("certificate", "key", "client_ca"):
        assert f"remote.{name} = ''" in said
    assert "remote.insecure" in said
    for own, mode, why in (
        (authority.issue("kvtierd"), 0o644, "may be read or written by others"),
        (Issued(authority.issue("one").certificate, authority.issue("two").key), 0o600, "does not belong to"),
        (Issued(b"nothing", b"nothing"), 0o600, "holds no certificate in PEM"),
    ):
        files.put(own, authority.pem, key_mode=mode)
        status, said = refused_start(socket_dir, shm_dir / "pool", listen, *given)
        assert status == 78, said
        assert why in said, said
