"""The flag for vLLM that the daemon prints names its socket where an engine would not find it by itself."""

import json
import shlex
from pathlib import Path

import pytest
from kvtier_vllm.config import ConnectorConfig
from kvtierd.config import daemon as config
from kvtierd.service import greeting

UID = 4711


@pytest.fixture
def logins(socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where systemd would make runtime directories; there is none of this user's yet."""
    monkeypatch.setattr(greeting, "RUN_USER", socket_dir / "run-user")
    monkeypatch.setattr("os.getuid", lambda: UID)
    for name in ("XDG_RUNTIME_DIR", "KVTIER_SOCKET", "KVTIER_SERVER_SOCKET"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(config, "DEFAULT_FILE", socket_dir / "no-such.toml")
    return socket_dir / "run-user"


def named(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, **flags: str) -> str:
    """The socket in what is printed by a daemon with this environment; empty if it leaves it out."""
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    given = {f"--{name}": value for name, value in flags.items()}
    printed = greeting.vllm_flag(config.load(None, given, environ).config)
    option, value = shlex.split(printed)
    assert option == "--kv-transfer-config"
    found = json.loads(value)
    assert found.pop("kv_connector") == "KvtierConnector"
    return ConnectorConfig.parse(found.get("kv_connector_extra_config", {})).socket


def test_without_a_runtime_directory_the_default_is_found_by_every_engine(
    logins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert named({}, monkeypatch) == ""


def test_the_runtime_directory_of_logins_is_found_by_them(
    logins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = logins / str(UID)
    mine.mkdir(parents=True)
    assert named({"XDG_RUNTIME_DIR": str(mine)}, monkeypatch) == ""


def test_a_service_s_default_is_not_that_of_a_login(logins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (logins / str(UID)).mkdir(parents=True)
    assert named({}, monkeypatch) == f"/tmp/kvtier-{UID}/kvtierd.sock"


def test_a_runtime_directory_that_only_this_process_has_is_named(
    logins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert named({"XDG_RUNTIME_DIR": "/x"}, monkeypatch) == "/x/kvtier/kvtierd.sock"


@pytest.mark.parametrize("path", ["/a/b.sock", "/a b/it's.sock", '/a"b/$HOME.sock'])
def test_any_other_socket_is_named_whatever_is_in_its_path(
    path: str, logins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert named({"KVTIER_SOCKET": path}, monkeypatch) == path
    assert named({}, monkeypatch, socket=path) == path


def test_engines_of_other_users_look_elsewhere(logins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"KVTIER_SERVER_GROUP": "kvtier"}
    assert named(given, monkeypatch) == f"/tmp/kvtier-{UID}/kvtierd.sock"
