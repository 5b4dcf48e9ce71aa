"""What can be configured, where from, and how it is refused."""

import os
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from kvtierd.cli import commands as cli
from kvtierd.config import daemon as config
from kvtierd.config import settings
from kvtierd.config.daemon import Config
from kvtierd.config.settings import ConfigError
from kvtierd.core.stimuli import CoreDisks, CoreIntegrity, Verify, WriteMode


def load(file: Path | None = None, flags: dict[str, object] | None = None, **environ: str) -> Config:
    return config.load(file, flags, environ).config


def refused(file: Path | None = None, flags: dict[str, object] | None = None, **environ: str) -> ConfigError:
    with pytest.raises(ConfigError) as error:
        load(file, flags, **environ)
    return error.value


@pytest.fixture(autouse=True)
def no_system_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(config, "DEFAULT_FILE", tmp_path / "no-such.toml")


def test_the_embedded_default_needs_no_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1")
    found = load()
    assert found.server.socket_path == Path("/run/user/1/kvtier/kvtierd.sock")
    assert found.server.side_socket_path == Path("/run/user/1/kvtier/kvtierd.side.sock")
    assert found.pool.file == Path(f"/dev/shm/kvtier-{os.getuid()}/pool")
    assert found.pool.size == 1 << 30
    assert found.metrics.listen == "127.0.0.1:9470"


def test_without_a_runtime_directory_sockets_go_below_tmp() -> None:
    assert settings.runtime_directory({}, uid=7) == Path("/tmp/kvtier-7")
    assert settings.runtime_directory({"XDG_RUNTIME_DIR": "relative"}, uid=7) == Path("/tmp/kvtier-7")


def test_flags_beat_the_environment_which_beats_the_file(tmp_path: Path) -> None:
    file = tmp_path / "kvtierd.toml"
    file.write_text('[pool]\nsize = "2GiB"\n[server]\ndrain_s = 3\n[limits]\ntransfers_max = 5\n')
    given_environment = {"KVTIER_POOL_SIZE": "3GiB", "KVTIER_SERVER_DRAIN_S": "4"}
    found = load(file, {"pool.size": "4GiB"}, **given_environment)
    assert (found.pool.size, found.server.drain_s, found.limits.transfers_max) == (4 << 30, 4.0, 5)


def test_the_file_can_be_named_by_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "kvtierd.toml"
    file.write_text('[pool]\nsize = "2GiB"\n')
    assert load(KVTIER_CONFIG=str(file)).pool.size == 2 << 30


def test_every_setting_can_come_from_all_three_places() -> None:
    declared = list(settings.declared(Config))
    assert len({item.key for item in declared}) == len(declared) > 20
    for item in declared:
        assert item.sentence.endswith("."), item.key
        assert item.envs[-1] == "KVTIER_" + item.key.replace(".", "_").upper()
        assert item.flags[-1] == "--" + item.key.replace(".", "-").replace("_", "-")
    by_flag = [flag for item in declared for flag in item.flags]
    assert len(set(by_flag)) == len(by_flag), "no short name is another setting's"
    assert [item.key for item in declared if len(item.flags) > 1] == ["server.socket"]


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ('[pool]\nsiez = "1GiB"\n', "pool.size"),
        ('[pol]\nsize = "1GiB"\n', "pool"),
        ("[limits]\nlease_ttl = 3\n", "limits.lease_ttl_s"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(
    tmp_path: Path, text: str, nearest: str
) -> None:
    file = tmp_path / "kvtierd.toml"
    file.write_text(text)
    error = refused(file)
    assert str(file) in str(error)
    assert error.message.endswith(f"the nearest known one is {nearest}")


def test_a_misspelt_variable_of_ours_is_refused_and_other_variables_are_not() -> None:
    error = refused(KVTIER_POOL_SIZ="1GiB")
    assert error.field == "KVTIER_POOL_SIZ"
    assert error.message.endswith("KVTIER_POOL_SIZE")
    assert load(KVTIE="1", PATH="/bin").pool.size == 1 << 30


@pytest.mark.parametrize(
    ("key", "raw", "advice"),
    [
        ("pool.size", "lots", "64GiB"),
        ("pool.size", "-1GiB", "64GiB"),
        ("pool.size", "1MiB", "at least"),
        ("pool.size", str(2**63), "8 EiB"),
        ("pool.extent_size", "3MiB", "power of two"),
        ("pool.persistent", "maybe", "true or false"),
        ("pool.path", "relative/pool", "absolute"),
        ("pool.lock_timeout_s", "soon", "seconds"),
        ("limits.leased_fraction_max", "1.5", "up to 1"),
        ("limits.transfers_max", "0", "from 1"),
        ("limits.transfers_max", "many", "whole number"),
        ("limits.transfer_blocks_max", "8193", "to 8192"),
        ("metrics.listen", "9470", "host:port"),
        ("metrics.listen", "localhost:99999", "host:port"),
        ("log.level", "loud", "debug"),
        ("pool.size", "1" * 400 + ".5GiB", "8 EiB"),
        ("pool.lock_timeout_s", "9" * 400, "seconds"),
        ("pool.lock_timeout_s", "nan", "seconds"),
        ("pool.path", "/dev/shm/a\0b", "printable"),
        ("pool.path", "~no-such-user-here/pool", "no such user"),
        ("server.socket", "/" + "x" * 104 + "/kvtierd.sock", "shorter"),
        ("server.heartbeat_interval_s", "9", "lease_ttl_s"),
        ("server.session_silence_s", "1", "heartbeat_interval_s"),
        ("server.message_bytes_max", "64KiB", "limits"),
        ("server.message_bytes_max", "257MiB", "at most 256MiB"),
    ],
)
def test_a_bad_value_is_refused_with_field_value_source_and_advice(key: str, raw: str, advice: str) -> None:
    error = refused(flags={key: raw})
    assert error.field == key
    assert advice in error.message
    assert str(error).startswith(f"{key} = ")
    assert f"--{key}".replace(".", "-").replace("_", "-") in str(error)


@pytest.mark.parametrize("text", ["[pool\n", "pool = 3\n", "[pool]\nsize = true\n", "[pool]\nsize = 1.5\n"])
def test_a_broken_file_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "kvtierd.toml"
    file.write_text(text)
    assert str(file) in str(refused(file))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    assert "cannot be read" in refused(tmp_path / "missing.toml").message


def test_an_anonymous_pool_has_no_file() -> None:
    assert load(flags={"pool.persistent": "false"}).pool.file is None
    assert refused(flags={"pool.persistent": "false", "pool.path": "/dev/shm/x"}).field == "pool.path"


@given(st.integers(0, 2**63 - 1))
def test_a_size_survives_being_written_and_read(value: int) -> None:
    assert settings.size(settings.format_size(value)) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("64GiB", 64 << 30),
        ("1.5 gib", 3 << 29),
        ("10MB", 10_000_000),
        ("4096", 4096),
        ("1TiB", 1 << 40),
        ("7B", 7),
    ],
)
def test_sizes_are_written_as_people_write_them(text: str, value: int) -> None:
    assert settings.size(text) == value


def test_what_show_prints_is_what_the_file_would_say(tmp_path: Path) -> None:
    loaded = config.load(None, {"pool.size": "3GiB", "server.group": 'a"b', "pool.persistent": "false"}, {})
    file = tmp_path / "shown.toml"
    file.write_text(config.show(loaded))
    again = config.load(file, None, {})
    assert again.config == loaded.config
    assert "(--pool-size)" in config.show(loaded)
    assert str(file) in config.show(again)


def test_show_prints_what_a_store_is_told_but_for_its_secrets(tmp_path: Path) -> None:
    options = "endpoint=https://minio:9000,region=x,access_key_id=AKIA,secret_access_key=hidden"
    loaded = config.load(None, {"store.url": "s3://kv/a", "store.options": options}, {})
    text = config.show(loaded)
    assert 'options = { "endpoint" = "https://minio:9000", "region" = "x" }' in text
    assert "(--store-options; not shown: access_key_id, secret_access_key)" in text
    assert "AKIA" not in text
    assert "hidden" not in text
    file = tmp_path / "shown.toml"
    file.write_text(text)
    again = config.load(file, None, {}).config.store
    assert dict(again.options) == {"endpoint": "https://minio:9000", "region": "x"}


class TestCommands:
    def test_check_accepts_a_sound_configuration(self) -> None:
        result = CliRunner().invoke(cli.main, ["config", "check", "--pool-size", "2GiB"])
        assert result.exit_code == 0
        assert result.output.startswith("nothing is wrong with the configuration (")
        assert "1 setting given" in result.output
        assert "kvtierctl doctor" in result.output

    def test_check_names_what_is_wrong_and_exits_with_78(self) -> None:
        result = CliRunner().invoke(cli.main, ["config", "check", "--pool-size", "2GoB"])
        assert result.exit_code == 78
        assert "pool.size = '2GoB' (from --pool-size)" in result.output

    @pytest.mark.parametrize("command", [["serve"], ["config", "check"], ["config", "show"]])
    def test_help_has_every_flag_below_its_section(self, command: list[str]) -> None:
        said = CliRunner().invoke(cli.main, [*command, "--help"], terminal_width=100).output
        places = [
            said.index(f"\n{name.capitalize()}:\n") for name, _ in settings.section_sentences(config.Config)
        ]
        assert places == sorted(places)
        ends = [*places[1:], len(said)]
        for (name, sentence), first, last in zip(
            settings.section_sentences(config.Config), places, ends, strict=True
        ):
            part = " ".join(said[first:last].split())
            assert sentence in part
            mine = [item for item in settings.declared(config.Config) if item.section == name]
            assert [item.flag for item in mine] == re.findall(r"(?<=\s)--[a-z-]+(?= [A-Z])", part)
            assert all(item.sentence in part for item in mine)
        head = said[: places[0]]
        assert "KVTIER_POOL_SIZE" in head or command != ["serve"]
        assert "--config" in head

    def test_every_section_has_one_line_for_people(self) -> None:
        for name, sentence in settings.section_sentences(config.Config):
            assert sentence.endswith("."), name
            assert "(" not in sentence.split()[0], name
            assert f"# {sentence}\n[{name}]\n" in config.show(config.load(environ={}))

    def test_show_says_where_a_value_came_from(self) -> None:
        result = CliRunner().invoke(cli.main, ["config", "show"], env={"KVTIER_LOG_LEVEL": "debug"})
        assert result.exit_code == 0
        assert 'level = "debug"' in result.output
        assert "(environment KVTIER_LOG_LEVEL)" in result.output

    def test_serve_refuses_a_bad_configuration_before_it_touches_anything(self) -> None:
        result = CliRunner().invoke(cli.main, ["serve", "--pool-extent-size", "5MiB"])
        assert result.exit_code == 78
        assert "pool.extent_size" in result.output


class TestIntegrity:
    def test_the_default_is_the_core_s_own(self) -> None:
        assert load().integrity.to_core() == CoreIntegrity()

    def test_everything_reaches_the_core(self) -> None:
        found = load(
            KVTIER_INTEGRITY_VERIFY="always",
            KVTIER_INTEGRITY_SAMPLE_BYTES_PER_S="0",
            KVTIER_INTEGRITY_REMEMBERED_BLOCKS="5",
        )
        assert found.integrity.to_core() == CoreIntegrity(Verify.ALWAYS, 0, 5)

    def test_anything_else_is_refused_by_name(self) -> None:
        error = refused(KVTIER_INTEGRITY_VERIFY="never")
        assert (error.field, "restart, always" in error.message) == ("integrity.verify", True)


def disks(**changed: object) -> dict[str, object]:
    """Flags of a disk tier that can be used, with changes."""
    return {
        "disk.paths": "/a:/b",
        "disk.size": "1GiB",
        **{f"disk.{key}": raw for key, raw in changed.items()},
    }


class TestDisks:
    def test_without_a_configuration_there_are_none_and_the_policy_is_the_core_s(self) -> None:
        assert load().disk.paths == ()
        assert load().disk.to_core() == CoreDisks()

    def test_paths_are_a_list_in_the_file_and_separated_by_colons_elsewhere(self, tmp_path: Path) -> None:
        file = tmp_path / "kvtierd.toml"
        file.write_text('[disk]\npaths = ["/mnt/a:b", "/mnt/c/"]\nsize = "2TiB"\n')
        assert load(file).disk.paths == (Path("/mnt/a:b"), Path("/mnt/c"))
        assert load(file, KVTIER_DISK_PATHS="/x:/y").disk.paths == (Path("/x"), Path("/y"))
        assert load(file, KVTIER_DISK_PATHS="").disk.paths == (), "an empty text switches the tier off"
        assert load(flags=disks()).disk.paths == (Path("/a"), Path("/b"))

    def test_show_prints_them_as_the_file_would_say_them(self, tmp_path: Path) -> None:
        loaded = config.load(None, disks(paths=["/a:b", "/c"]), {})
        file = tmp_path / "shown.toml"
        file.write_text(config.show(loaded))
        assert 'paths = ["/a:b", "/c"]' in file.read_text()
        assert config.load(file, None, {}).config == loaded.config

    def test_everything_of_the_policy_reaches_the_core(self) -> None:
        flags = disks(
            write_mode="on-reuse",
            write_queue_size="2MiB",
            read_queue_size="3MiB",
            slow_deadline_s="4",
            errors_max="5",
            probe_after_s="6",
            recompute_if_faster="false",
        )
        assert load(flags=flags).disk.to_core() == CoreDisks(
            mode=WriteMode.ON_REUSE,
            write_queue_bytes=2 << 20,
            read_queue_bytes=3 << 20,
            slow_deadline_s=4.0,
            errors_max=5,
            probe_after_s=6.0,
            recompute_if_faster=False,
        )

    @pytest.mark.parametrize(
        ("name", "raw", "advice"),
        [
            ("paths", "/a:relative", "absolute"),
            ("paths", "/a:", "empty"),
            ("paths", "/a:/b/../a", "/a is named twice"),
            ("paths", ["/a", "/a"], "each directory once"),
            ("paths", ["/a", 3], "as text"),
            ("paths", 3, "as text"),
            ("paths", [f"/{number}" for number in range(17)], "at most 16"),
            ("size", "0", "how many bytes"),
            ("size", "3MiB", "at least 4MiB"),
            ("size", "17TiB", "at most 16TiB"),
            ("extent_size", "3MiB", "power of two"),
            ("extent_size", "2GiB", "power of two"),
            ("extent_size", "512MiB", "at least 1026MiB"),
            ("write_mode", "never", "back, through, on-reuse"),
            ("threads", "9", "to 8"),
            ("queue_depth", "0", "from 1"),
            ("write_queue_size", "4KiB", "at least 1MiB"),
            ("read_queue_size", "0", "at least 1MiB"),
            ("slow_deadline_s", "31", "disk.deadline_s (30)"),
        ],
    )
    def test_what_cannot_be_used_is_refused_by_name(self, name: str, raw: object, advice: str) -> None:
        error = refused(flags=disks(**{name: raw}))
        field = "disk.size" if advice.startswith("at least 1026") else f"disk.{name}"
        assert (error.field, advice in error.message) == (field, True), str(error)

    def test_the_fault_hook_of_tests_is_no_misspelt_setting(self) -> None:
        assert load(KVTIER_DISK_FAULTS="/tmp/faults.json") == load()
        assert refused(KVTIER_DISK_FAULT="x").field == "KVTIER_DISK_FAULT"
