"""The settings of KV events, and what is looked at before a start."""

from __future__ import annotations

import socket
from importlib import util
from pathlib import Path

import pytest
from kvtierd.config import daemon as config
from kvtierd.config.daemon import Config
from kvtierd.config.descriptors import EVENT_SUBSCRIBERS, descriptors_wanted
from kvtierd.config.events import stays_on_host
from kvtierd.config.settings import ConfigError
from kvtierd.core.blocks.namespaces import NamespaceAbout
from kvtierd.core.ids import NamespaceDigest
from kvtierd.preflight import Finding, Verdict, examine
from kvtierd.preflight import events as preflight
from kvtierd.preflight.events import check_events

UNIX = "ipc:///run/kvtier/events"
ABOUT = NamespaceAbout("tenant", "org/a {host}", b"", 32, 1, (), ())


@pytest.fixture(autouse=True)
def no_system_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(config, "DEFAULT_FILE", tmp_path / "no-such.toml")


def load(**flags: object) -> Config:
    return config.load(None, {f"events.{name}": value for name, value in flags.items()}, {}).config


def findings(*, may_run: bool = False, **flags: object) -> list[Finding]:
    loaded = config.load(
        None, {f"events.{name}": value for name, value in {"tenants": "*", **flags}.items()}, {}
    )
    return examine(loaded, may_run=may_run, checks=[check_events])


def test_by_default_nothing_is_published() -> None:
    assert not load().events.on
    assert findings() == []


def test_a_daemon_that_publishes_wants_more_files() -> None:
    wanted = descriptors_wanted(load(endpoint=UNIX, tenants="*"))
    assert wanted == descriptors_wanted(load()) + EVENT_SUBSCRIBERS


@pytest.mark.parametrize("endpoint", [UNIX, "tcp://127.0.0.1:5557", "tcp://[::1]:5557"])
def test_these_stay_on_the_host(endpoint: str) -> None:
    assert stays_on_host(endpoint)
    assert load(endpoint=endpoint, tenants="a").events.endpoint == endpoint


@pytest.mark.parametrize("endpoint", ["tcp://*:5557", "tcp://10.0.0.7:5557", "tcp://[::]:5557"])
def test_others_take_a_word_more(endpoint: str) -> None:
    for place in ({"endpoint": endpoint}, {"endpoint": UNIX, "replay_endpoint": endpoint}):
        with pytest.raises(ConfigError) as raised:
            load(tenants="a", **place)
        [error] = raised.value.all
        assert error.field == f"events.{list(place)[-1]}"
        assert "set events.insecure" in error.message
        assert load(tenants="a", insecure=True, **place).events.on


@pytest.mark.parametrize(
    "endpoint",
    ["5557", "tcp://127.0.0.1", "tcp://127.0.0.1:0", "tcp://127.0.0.1:65536", "tcp://localhost:5557",
     "tcp://eth0:5557", "ipc://events", "ipc://@events", f"ipc:///{'a' * 107}", "inproc://events"],
)  # fmt: skip
def test_these_are_no_endpoints(endpoint: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load(endpoint=endpoint, tenants="a")
    assert raised.value.field == "events.endpoint"


def test_tenants_have_to_agree() -> None:
    with pytest.raises(ConfigError, match=r"events\.tenants.*or \* for all"):
        load(endpoint=UNIX)
    found = load(endpoint=UNIX, tenants="research, uid:1000").events
    assert found.tenants == ("research", "uid:1000")
    assert not found.everybody
    assert load(endpoint=UNIX, tenants="*").events.everybody


def test_replays_have_an_endpoint_of_their_own() -> None:
    with pytest.raises(ConfigError, match=r"events\.replay_endpoint.*write another one"):
        load(endpoint=UNIX, replay_endpoint=UNIX, tenants="*")
    with pytest.raises(ConfigError, match=r"set events\.endpoint as well"):
        load(replay_endpoint=UNIX)


def test_what_topics_are_made_of() -> None:
    for topic in ("", "kv@{pod}"):
        with pytest.raises(ConfigError, match=r"\{host\}, \{model\}, \{namespace\}"):
            load(endpoint=UNIX, tenants="*", topic=topic)
    options = load(endpoint=UNIX, tenants="*", host="node-7").events.options(store=None)
    namespace = NamespaceDigest(bytes(range(16)))
    topic = options.topic_of(namespace, ABOUT).decode()
    assert topic == f"kvtier@node-7@org/a {{host}}@{namespace.hex()}", "a model's name stays as it is"
    unnamed = load(endpoint=UNIX, tenants="*").events.options(store=None)
    assert f"@{socket.gethostname()}@" in unnamed.topic_of(namespace, ABOUT).decode()


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "find_spec", lambda name: (name != "zmq" and util.find_spec(name)) or None)
    [finding] = findings(endpoint=UNIX)
    assert (finding.verdict, finding.field) == (Verdict.FAILURE, "events.endpoint")
    assert "without pyzmq" in finding.found
    assert "pip install 'pyzmq>=26,<28'" in finding.remedy


def test_the_versions_are_those_of_the_extra() -> None:
    project = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    assert all(f'    "{package}",' in project for package in preflight.LIBRARIES.values())


def test_places_that_cannot_be_bound(tmp_path: Path) -> None:
    [finding] = findings(endpoint=f"ipc://{tmp_path}/none/events")
    assert (finding.verdict, finding.field) == (Verdict.FAILURE, "events.endpoint")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        fine, finding = findings(endpoint=f"ipc://{tmp_path}/events", replay_endpoint=endpoint)
        assert fine.verdict is Verdict.OK
        assert (finding.verdict, finding.field) == (Verdict.FAILURE, "events.replay_endpoint")
        assert "in use by" in finding.found
        assert finding.holder, "a start waits for it"


def test_a_port_that_others_reach_is_a_warning() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    [finding] = findings(endpoint=f"tcp://*:{port}", insecure=True)
    assert finding.verdict is Verdict.WARNING
    assert finding.field == "events.insecure"
