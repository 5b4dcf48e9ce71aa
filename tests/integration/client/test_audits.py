"""What an engine tells of its audits reaches people: counters, `kvtierctl`, and a log that names what
differs."""

from __future__ import annotations

import dataclasses

import pytest
from kvtier import KvtierError, Namespace, Reason
from kvtierd.ctl.lists import engines
from kvtierd.ctl.status import page
from kvtierd.ctl.terminal import plain as text_of

from tests.integration.client.conftest import Connect
from tests.integration.daemon.commands import kvtierctl
from tests.support.daemon import DaemonHost, until
from tests.support.plain_client import PlainClient, block_hashes


def report(plain: PlainClient, *, matched: bool, error: float = 0.5) -> bytes:
    [block] = block_hashes("audited", [1])
    plain.client.report_audit(matched=matched, error=error, threshold=0.2, block_hash=block, detail="layer 3")
    return block


def test_an_audit_that_matches_is_counted(host: DaemonHost, connect_to: Connect) -> None:
    plain = connect_to(host)
    report(plain, matched=True, error=0.01)
    until(lambda: host.status().counters.audits == 1, "the daemon has heard of it")
    status = host.status()
    assert status.counters.audit_mismatches == 0
    assert [(each.audits, each.audit_mismatches) for each in status.instances] == [(1, 0)]
    assert "1 blocks computed by engines" in text_of(page(status))
    assert "quarantined" not in text_of(engines(status))


def test_a_mismatch_is_told_to_people(host: DaemonHost, connect_to: Connect, namespace: Namespace) -> None:
    sound = PlainClient(host.socket, "sound", namespace, configuration=(("a", "1"), ("b", "2")))
    other = PlainClient(host.socket, "other", namespace, configuration=(("a", "1"), ("b", "3")))
    with sound, other:
        sound.ready()
        other.ready()
        block = report(other, matched=False)
        until(lambda: host.status().counters.audit_mismatches == 1, "the daemon has heard of it")
        status = host.status()
        shown = text_of(engines(status))
        assert "quarantined" in next(line for line in shown.splitlines() if " other " in line)
        assert "quarantined" not in next(line for line in shown.splitlines() if " sound " in line)
        line = next(line for line in host.daemon.log().splitlines() if "an audit found" in line)
        for part in ('"instance": "other"', block.hex()[:16], "layer 3", "b is '2' there and '3' here"):
            assert part in line
        assert "a is" not in line
        said = kvtierctl(host.daemon, "explain", block.hex()).stdout
        assert "other found" in said
        assert "neither loads nor stores here" in said


def test_what_makes_no_sense_is_refused_by_the_client(host: DaemonHost, connect_to: Connect) -> None:
    client = connect_to(host).client
    with pytest.raises(KvtierError) as caught:
        client.report_audit(matched=True, error=float("nan"), threshold=0.1, block_hash=b"h" * 32)
    assert (caught.value.reason, caught.value.field) == (Reason.MALFORMED, "error")
    with pytest.raises(KvtierError) as caught:
        client.report_audit(matched=True, error=0.0, threshold=0.1, block_hash=b"h")
    assert caught.value.field == "block_hash"


def test_the_first_setting_that_differs_is_named_to_the_clients_user(
    host: DaemonHost, connect_to: Connect, namespace: Namespace
) -> None:
    """Two processes of one instance, of two ranks."""
    said = dataclasses.replace(namespace, identity=(("max_model_len", "512"), ("rope", "long")))
    mine = dataclasses.replace(namespace, identity=(("max_model_len", "1024"), ("rope", "long")))
    connect_to(host, "engine", said)
    refused = connect_to(host, "engine", mine, ready=False)
    until(lambda: bool(refused.client.status.last_error), "the second is refused")
    error = refused.client.status.last_error
    assert "namespace.identity[max_model_len]" in error
    assert "this process says '1024', the others of its instance '512'" in error
    shown = kvtierctl(host.daemon, "namespaces", "--fields").stdout
    assert "  identity[max_model_len] = 512" in shown
