"""What a user may write into kv_connector_extra_config, and what the error says otherwise."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from kvtier_engine.settings import SettingsError
from kvtier_vllm import hashes
from kvtier_vllm.config import ConnectorConfig


def test_nothing_needs_to_be_set() -> None:
    assert ConnectorConfig.parse({}) == ConnectorConfig()


def test_everything_can_be_set() -> None:
    given = {
        "socket": "/run/kvtierd.sock",
        "tenant": "a",
        "salt": "s",
        "weights_revision": "v7",
        "store": False,
        "load": False,
        "store_tokens": "prompt",
        "max_store_tokens": 4096,
        "store_threshold": 2,
        "priority": "low",
        "pin_s": 60,
        "max_pin_s": 600.0,
        "ttl_s": 3600,
        "tiers": ("host",),
        "max_load_tokens": 8192,
        "min_load_tokens": 256,
        "lookup_budget_ms": 0.5,
        "load_start_deadline_s": 3,
        "pending_wait_s": 0,
        "pending_poll_s": 0.05,
        "prefill_tokens_per_s": 20_000,
        "share": "mirror",
        "contiguous_blocks": True,
    }
    parsed = ConnectorConfig.parse(given)
    assert {name: getattr(parsed, name) for name in given} == given


def test_tiers_come_as_json_has_them() -> None:
    assert ConnectorConfig.parse({"tiers": ["host"]}) == ConnectorConfig(tiers=("host",))
    assert ConnectorConfig.parse({"tiers": ["host", "disk"]}) == ConnectorConfig()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"sokcet": "x"}, "unknown setting 'sokcet'; the nearest one is 'socket'"),
        ({"lookup_budget": 1}, "'lookup_budget_ms'"),
        ({"socket": 7}, "socket=7: write text"),
        ({"store": "yes"}, "store='yes': write true or false"),
        ({"lookup_budget_ms": True}, "lookup_budget_ms=True: write a number"),
        ({"lookup_budget_ms": -1}, "lookup_budget_ms=-1: write a number"),
        ({"load_start_deadline_s": float("nan")}, "load_start_deadline_s=nan: write a number"),
        ({"prefill_tokens_per_s": -1}, "prefill_tokens_per_s=-1: write a number that is not negative"),
        ({"prefill_tokens_per_s": 2e9}, "and at most 1e+09"),
        ({"prefill_tokens_per_s": float("inf")}, "prefill_tokens_per_s=inf: write a number"),
        ({"pending_wait_s": "long"}, "pending_wait_s='long': write a number"),
        ({"share": "ipc"}, "share='ipc': write one of auto, export, mirror"),
        ({"store_tokens": "output"}, "store_tokens='output': write one of all, prompt"),
        ({"max_store_tokens": -1}, "max_store_tokens=-1: write a whole number, at least 0"),
        ({"max_load_tokens": 1.5}, "max_load_tokens=1.5: write a whole number"),
        ({"min_load_tokens": True}, "min_load_tokens=True: write a whole number"),
        ({"store_threshold": 0}, "store_threshold=0: write a whole number, at least 1"),
        ({"priority": "urgent"}, "priority='urgent': write one of low, normal, high"),
        ({"pin_s": -1}, "pin_s=-1: write a number that is not negative, and at most 1e+09"),
        ({"max_pin_s": float("nan")}, "max_pin_s=nan: write a number"),
        ({"ttl_s": True}, "ttl_s=True: write a number"),
        ({"tiers": ["disk"]}, """tiers=['disk']: write ["host", "disk"] or ["host"]"""),
        ({"tiers": "host"}, "tiers='host': write"),
        ({"tiers": ["host", "tape"]}, "tiers=['host', 'tape']: write"),
        ({"share": True}, "share=True: write one of auto, export, mirror"),
        ({"contiguous_blocks": 1}, "contiguous_blocks=1: write true or false"),
        ({"Socket": "/x"}, "the nearest one is 'socket' (given: '/x')"),
        ({"socket": "/" + "x" * 98}, "109 bytes, and that of a Unix socket has at most 107"),
    ],
)
def test_a_mistake_is_named_with_what_to_write(given: dict[str, object], told: str) -> None:
    with pytest.raises(SettingsError) as error:
        ConnectorConfig.parse(given)
    assert told in str(error.value)


def test_all_mistakes_are_told_at_once() -> None:
    with pytest.raises(SettingsError) as error:
        ConnectorConfig.parse({"sokcet": "/x", "store": "yes", "tenant": "t", "tiers": []})
    for told in ("'sokcet'; the nearest one is 'socket' (given: '/x')", "store='yes'", "tiers=[]"):
        assert told in str(error.value)
    assert "tenant" not in str(error.value)


def test_two_variables_that_name_different_sockets_are_refused_unless_one_is_set_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVTIER_SOCKET", "/none/a.sock")
    monkeypatch.setenv("KVTIER_SERVER_SOCKET", "/none/b.sock")
    with pytest.raises(SettingsError, match=r"/none/a\.sock.*/none/b\.sock"):
        ConnectorConfig.parse({})
    assert ConnectorConfig.parse({"socket": "/none/c.sock"}).socket == "/none/c.sock"


def test_a_user_of_the_daemon_who_does_not_exist_is_refused_by_that_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVTIER_DAEMON_USER", "nobody-of-that-name")
    with pytest.raises(
        SettingsError, match="KVTIER_DAEMON_USER='nobody-of-that-name': there is no such user"
    ):
        ConnectorConfig.parse({"socket": "/none/c.sock"})


def file_of(folder: Path, content: bytes, mode: int = 0o600) -> str:
    file = folder / "salt"
    file.write_bytes(content)
    file.chmod(mode)
    return str(file)


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o440, 0o640])
@pytest.mark.parametrize(
    ("content", "salt"),
    [(b"grain", "grain"), (b"grain\n", "grain"), (b" g\n\n", " g\n"), (b"s" * 1_024, "s" * 1_024)],
)
def test_a_salt_may_come_from_a_file(tmp_path: Path, content: bytes, salt: str, mode: int) -> None:
    parsed = ConnectorConfig.parse({"salt_file": file_of(tmp_path, content, mode)})
    assert parsed.salt == salt
    assert "grain" not in repr(parsed)


@pytest.mark.parametrize(
    ("content", "mode", "told"),
    [
        (b"", 0o600, "the file is empty: write the salt into it"),
        (b"\n", 0o600, "the file is empty"),
        (b"grain", 0o644, "others may read or change it (mode 0644): `chmod 400` it"),
        (b"grain", 0o620, "others may read or change it (mode 0620)"),
        (b"grain", 0o602, "others may read or change it (mode 0602)"),
        (b"grain\xff", 0o600, "it is not UTF-8"),
        (b"g" * 1_025, 0o600, "a salt has at most 1,024 bytes"),
        (b"g" * 9_999, 0o600, "a salt has at most 1,024 bytes"),
    ],
)
def test_a_file_that_is_no_safe_salt_is_refused(tmp_path: Path, content: bytes, mode: int, told: str) -> None:
    file = file_of(tmp_path, content, mode)
    with pytest.raises(SettingsError) as refused:
        ConnectorConfig.parse({"salt_file": file})
    assert f"kv_connector_extra_config: salt_file={file!r}: {told}" in str(refused.value)
    assert "grain" not in str(refused.value)


def test_a_salt_in_a_place_that_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path, told in (
        (tmp_path, "it is not a file"),
        (tmp_path / "pipe", "it is not a file"),
        (tmp_path / "none", "cannot be opened (No such file or directory)"),
        ("salt", "write an absolute path"),
    ):
        with pytest.raises(SettingsError) as refused:
            ConnectorConfig.parse({"salt_file": str(path)})
        assert told in str(refused.value)


def test_two_salts_are_one_too_many(tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as refused:
        ConnectorConfig.parse({"salt": "grain", "salt_file": file_of(tmp_path, b"x")})
    assert "there is a salt as well: leave one of the two out" in str(refused.value)
    assert "grain" not in str(refused.value)


def test_hashes_take_a_request_s_salt_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tokens").write_text("1 2 3 4")
    printed = []
    for salt in (["--cache-salt=s"], [f"--cache-salt-file={file_of(tmp_path, b's')}"], []):
        assert hashes.main([str(tmp_path / "tokens"), "--block-tokens=2", *salt]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] != printed[2]
