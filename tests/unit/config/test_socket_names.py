"""One flag and one variable for the socket of kvtierd, kvtierctl and clients; longer names still count."""

import os
import tomllib
from pathlib import Path

import kvtier
import pytest
from click.testing import CliRunner, Result
from kvtier.connection.address import resolve
from kvtierd.cli import commands as cli
from kvtierd.config import daemon as config
from kvtierd.ctl import commands as ctl

NAMES = ("KVTIER_SOCKET", "KVTIER_SERVER_SOCKET")


@pytest.fixture(autouse=True)
def nothing_configured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(config, "DEFAULT_FILE", tmp_path / "no-such.toml")
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def kvtierd(*arguments: str, **environ: str) -> Result:
    return CliRunner().invoke(cli.main, arguments, env=environ)


def socket_of(result: Result) -> str:
    """Where a daemon with this configuration would listen, as `config show` says."""
    assert result.exit_code == 0, result.output
    return str(tomllib.loads(result.output)["server"]["socket"])


def kvtierctl(*arguments: str, **environ: str) -> Result:
    """Of a command that finds no daemon: where it looked is in what it says."""
    return CliRunner().invoke(ctl.main, arguments, env=environ)


@pytest.mark.parametrize(
    "arguments",
    [
        ("config", "show", "--socket", "/none/a.sock"),
        ("config", "show", "--server-socket", "/none/a.sock"),
        ("--socket", "/none/a.sock", "config", "show"),
        ("config", "--socket=/none/a.sock", "show"),
        ("--server-socket=/none/a.sock", "config", "show"),
        ("--socket", "/none/a.sock", "config", "show", "--server-socket", "unix:/none/../none/a.sock"),
    ],
)
def test_the_daemon_takes_the_flag_in_any_place_and_by_both_names(arguments: tuple[str, ...]) -> None:
    assert socket_of(kvtierd(*arguments, KVTIER_SOCKET="/none/other.sock")) == "/none/a.sock"


@pytest.mark.parametrize(
    "arguments",
    [
        ("status", "--socket", "/none/a.sock"),
        ("status", "--server-socket", "/none/a.sock"),
        ("--socket", "/none/a.sock", "status"),
        ("--server-socket", "/none/a.sock", "status"),
        ("--socket", "unix:/none/a.sock", "status", "--json"),
        ("--socket", "/none/a.sock", "status", "--socket", "/none/a.sock"),
        ("--socket", "/none/a.sock", "explain", "aa"),
        ("--socket", "/none/a.sock", "drain", "--for-restart"),
    ],
)
def test_kvtierctl_takes_it_before_and_after_the_subcommand(arguments: tuple[str, ...]) -> None:
    found = kvtierctl(*arguments, KVTIER_SOCKET="/none/other.sock")
    assert (found.exit_code, "/none/a.sock" in found.output) == (69, True), found.output


def test_every_command_of_kvtierctl_that_asks_a_daemon_has_it() -> None:
    without = {
        name
        for name, command in ctl.main.commands.items()
        if not {"--socket", "--server-socket"} <= {each for option in command.params for each in option.opts}
    }
    assert without == {"completion", "remote", "simulate"}


@pytest.mark.parametrize("name", NAMES)
def test_the_variable_is_the_same_for_all_three(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert socket_of(kvtierd("config", "show", **{name: "/none/a.sock"})) == "/none/a.sock"
    assert "/none/a.sock" in kvtierctl("status", **{name: "/none/a.sock"}).output
    monkeypatch.setenv(name, "/none/a.sock")
    assert resolve(None).socket == Path("/none/a.sock")
    assert kvtier.default_socket() == Path("/none/a.sock")


def test_kvtierctl_needs_no_sound_configuration_where_the_variable_names_the_socket() -> None:
    found = kvtierctl("status", KVTIER_SOCKET="/none/a.sock", KVTIER_POOL_SIZE="lots")
    assert (found.exit_code, "/none/a.sock" in found.output) == (69, True)
    assert kvtierctl("status", KVTIER_POOL_SIZE="lots").exit_code == 78


def test_kvtierctl_warns_of_a_variable_that_is_none_of_ours() -> None:
    found = kvtierctl("status", "--socket=/none/a.sock", KVTIER_SOKET="/none/b.sock")
    assert found.exit_code == 69
    warning, _ = found.stderr.splitlines()
    assert warning.startswith("kvtierctl: warning: KVTIER_SOKET = '/none/b.sock': unknown variable")
    assert warning.endswith("is KVTIER_SOCKET")
    assert "warning" not in kvtierctl("status", KVTIER_SOCKET="/none/a.sock", KVTIER_SEED="1").output


def test_two_names_that_differ_are_refused_with_both_values(monkeypatch: pytest.MonkeyPatch) -> None:
    both = {"KVTIER_SOCKET": "/none/a.sock", "KVTIER_SERVER_SOCKET": "/none/b.sock"}
    for found, status in (
        (kvtierd("config", "check", "--socket=/none/a.sock", "--server-socket=/none/b.sock"), 78),
        (kvtierd("--socket=/none/a.sock", "config", "check", "--socket=/none/b.sock"), 2),
        (kvtierd("--socket=/none/a.sock", "config", "check", "--server-socket=/none/b.sock"), 2),
        (kvtierd("config", "check", **both), 78),
        (kvtierctl("--socket=/none/a.sock", "status", "--socket=/none/b.sock"), 2),
        (kvtierctl("status", "--socket=/none/a.sock", "--server-socket=/none/b.sock"), 2),
        (kvtierctl("status", "--server-socket=/none/b.sock", "--socket=/none/a.sock"), 2),
        (kvtierctl("status", **both), 78),
    ):
        assert found.exit_code == status, found.output
        assert "/none/a.sock" in found.output
        assert "/none/b.sock" in found.output
    for name, value in both.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(kvtier.KvtierError, match=r"/none/a\.sock.*/none/b\.sock"):
        resolve(None)


def test_two_names_for_one_place_agree_and_an_empty_variable_says_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for first, second in (("k.sock", f"unix:{tmp_path}/k.sock"), ("", f"{tmp_path}/./k.sock")):
        given = {"KVTIER_SOCKET": first, "KVTIER_SERVER_SOCKET": second}
        assert socket_of(kvtierd("config", "show", **given)) == f"{tmp_path}/k.sock"
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        assert resolve(None).socket == tmp_path / "k.sock"


def test_flags_stand_over_variables_which_stand_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "kvtierd.toml"
    file.write_text('[server]\nsocket = "/none/file.sock"\n')
    show = ("config", "show", f"--config={file}")
    assert socket_of(kvtierd(*show)) == "/none/file.sock"
    assert socket_of(kvtierd(*show, KVTIER_SOCKET="/none/a.sock")) == "/none/a.sock"
    assert socket_of(kvtierd(*show, "--socket=/none/f.sock", KVTIER_SOCKET="/none/a.sock")) == "/none/f.sock"
    # An engine that starts a daemon names its socket so, whatever its own environment says.
    flag = "--server-socket=/none/f.sock"
    assert socket_of(kvtierd(*show, flag, KVTIER_SOCKET="/none/a.sock")) == "/none/f.sock"


def test_relative_paths_are_relative_to_the_shell_and_refused_in_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert socket_of(kvtierd("config", "show", "--socket=run/k.sock")) == f"{tmp_path}/run/k.sock"
    assert socket_of(kvtierd("config", "show", KVTIER_SOCKET="run/k.sock")) == f"{tmp_path}/run/k.sock"
    monkeypatch.setenv("KVTIER_SOCKET", "run/k.sock")
    assert resolve(None) == resolve("run/k.sock") == resolve(tmp_path / "run" / "k.sock")
    file = tmp_path / "kvtierd.toml"
    file.write_text('[server]\nsocket = "run/k.sock"\n')
    found = kvtierd("config", "check", f"--config={file}", KVTIER_SOCKET="")
    assert found.exit_code == 0, "the variable stands over it"
    monkeypatch.delenv("KVTIER_SOCKET")
    found = kvtierd("config", "check", f"--config={file}")
    assert (found.exit_code, "absolute path" in found.output) == (78, True)


def test_a_path_that_is_too_long_is_refused_with_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    long = "/" + "x" * 90 + "/kvtierd.sock"  # 104 bytes: the side socket beside it has 109
    fits = "/" + "x" * 88 + "/kvtierd.sock"
    for found in (
        kvtierd("config", "check", f"--socket={long}"),
        kvtierd("config", "check", KVTIER_SOCKET=long),
        kvtierctl("status", f"--socket={long}"),
        kvtierctl("status", KVTIER_SOCKET=long),
    ):
        assert found.exit_code in (2, 78)
        assert "109 bytes" in found.output
        assert "at most 107" in found.output
    with pytest.raises(kvtier.KvtierError, match=r"109 bytes.*at most 107"):
        resolve(long)
    assert kvtierd("config", "check", f"--socket={fits}").exit_code == 0
    assert len(os.fsencode(resolve(fits).side_socket)) == 107


def test_help_tells_the_one_name_only() -> None:
    for found in (kvtierd("serve", "--help"), kvtierctl("status", "--help")):
        assert "--socket" in found.output
        assert "--server-socket" not in found.output
        assert "KVTIER_SOCKET" in found.output
