"""Two hosts that do not share are told why: `kvtierctl namespaces --compare`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kvtier import Namespace

from tests.integration.daemon.commands import kvtierctl
from tests.integration.stores.conftest import Connect
from tests.support import plain_client
from tests.support.daemon import DaemonHost
from tests.support.hosts import NewHost, several_hosts
from tests.support.plain_client import NAMESPACE

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]


@pytest.fixture
def hosts(new_host: NewHost, tmp_path: Path) -> tuple[DaemonHost, DaemonHost]:
    """Two hosts of one store."""
    url = tmp_path.joinpath("shared").as_uri()
    return new_host(store__url=url), new_host(store__url=url)


def listed(host: DaemonHost) -> str:
    return kvtierctl(host.daemon, "namespaces", "--json").stdout


def compare(here: DaemonHost, there: DaemonHost, *flags: str) -> str:
    """What `here` says of what `there` has listed."""
    told = kvtierctl(here.daemon, "namespaces", "--compare=-", *flags, stdin=listed(there))
    assert told.returncode == 0, told.stderr
    return told.stdout


def only(here: DaemonHost, there: DaemonHost) -> dict[str, Any]:
    [found] = json.loads(compare(here, there, "--json"))
    return dict(found)


def changed(**fields: Any) -> Namespace:
    return dataclasses.replace(NAMESPACE, **fields)


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (changed(kv_dtype="int8"), ("kv_dtype", "int8", "uint8")),
        (changed(model="tests/another"), ("model", "tests/another", "tests/plain")),
        (changed(salt="a secret of some length"), ("salt", "", "")),
    ],
)
def test_a_field_that_differs_is_named_with_both_values(
    hosts: tuple[DaemonHost, DaemonHost],
    connect_to: Connect,
    other: Namespace,
    difference: tuple[str, str, str],
) -> None:
    here, there = hosts
    connect_to(here, namespace=other)
    connect_to(there)
    found = only(here, there)
    assert not found["shared"]
    assert [tuple(each.values()) for each in found["differences"]] == [difference]
    assert found["nearest_model"] == NAMESPACE.model
    page = compare(here, there)
    name, mine, others = difference
    assert ("it is the salt" if name == "salt" else f"{name}: {mine} here, {others} there") in " ".join(
        page.split()
    )
    assert "secret" not in page + listed(here) + listed(there)


def test_a_layout_that_differs_is_named(
    hosts: tuple[DaemonHost, DaemonHost], connect_to: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = hosts
    connect_to(there)
    usual = plain_client.group()
    monkeypatch.setattr(plain_client, "group", lambda _: dataclasses.replace(usual, block_tokens=32))
    connect_to(here)
    found = {each["field"]: (each["here"], each["there"]) for each in only(here, there)["differences"]}
    assert found.pop("groups[0].block_tokens") == ("32", "16")
    assert list(found) == ["layout of rank 0"]


def test_a_tenant_that_differs_is_named(new_host: NewHost, connect_to: Connect) -> None:
    here, there = (new_host(server__tenants=f"*={tenant}") for tenant in ("research", "production"))
    for host in (here, there):
        connect_to(host)
    [difference] = only(here, there)["differences"]
    assert difference == {"field": "tenant of the daemon", "here": "research", "there": "production"}


def test_the_nearest_of_several_is_chosen_and_what_is_shared_is_said(
    hosts: tuple[DaemonHost, DaemonHost], connect_to: Connect
) -> None:
    here, there = hosts
    assert "no engine has attached here" in compare(here, there)
    connect_to(here)
    assert "no engine has attached on the other host" in compare(here, there)
    connect_to(there, "far", namespace=changed(model="x", kv_dtype="y", hash_scheme="z"))
    connect_to(there, "near", namespace=changed(model="near"))
    found = only(here, there)
    assert (found["nearest_model"], len(found["differences"])) == ("near", 1)
    connect_to(there, "same")
    found = only(here, there)
    assert (found["shared"], found["differences"]) == (True, [])
    assert "the other host has it, too" in compare(here, there)


@pytest.mark.parametrize(
    "said", ["", "{}", "[]", "7", '{"namespaces": 7}', '{"namespaces": [{"model": []}]}', "[" * 100_000, "\0"]
)
def test_what_is_no_list_of_another_host_is_refused(shared: DaemonHost, said: str) -> None:
    told = kvtierctl(shared.daemon, "namespaces", "--compare=-", stdin=said)
    assert told.returncode == 2
    assert "--compare" in told.stderr
    assert "Traceback" not in told.stderr


@pytest.fixture(scope="module")
def shared() -> Iterator[DaemonHost]:
    """A host that nothing attaches to."""
    with several_hosts() as make:
        yield make()


def test_what_another_host_says_cannot_write_to_the_terminal(
    hosts: tuple[DaemonHost, DaemonHost], connect_to: Connect
) -> None:
    here, there = hosts
    connect_to(here)
    connect_to(there)
    told = json.loads(listed(there))
    told["namespaces"][0]["namespace_digest"] = "ab\x1b[2J" + "x" * 5_000
    told["namespaces"][0]["fields"].append({"name": "\x1b[31mred", "value": "a\nb\r" + "y" * 5_000})
    page = kvtierctl(here.daemon, "namespaces", "--compare=-", stdin=json.dumps(told)).stdout
    assert "red" in page
    assert "\x1b" not in page
    assert "\r" not in page
    assert max(map(len, page.splitlines())) < 1_000
