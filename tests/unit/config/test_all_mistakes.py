"""Everything that is wrong with a configuration is told at once: its name, value and place."""

import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from kvtierd.cli import commands as cli
from kvtierd.config import daemon as config
from kvtierd.config import settings
from kvtierd.config.settings import ConfigError

REPO = Path(__file__).resolve().parents[3]
ROOTS = ("clients", "daemon", "kernels", "tests", "tools")


@pytest.fixture(autouse=True)
def nothing_configured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(config, "DEFAULT_FILE", tmp_path / "no-such.toml")


def check(*arguments: str, **environ: str) -> Result:
    return CliRunner().invoke(cli.main, ["config", "check", *arguments], env=environ)


def refused(
    file: Path | None = None, flags: dict[str, object] | None = None, **environ: str
) -> tuple[ConfigError, ...]:
    with pytest.raises(ConfigError) as error:
        config.load(file, flags, environ)
    return error.value.all


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("KVTIER_POLL_SIZE", "KVTIER_POOL_SIZE"),
        ("KVTIER_POOLSIZE", "KVTIER_POOL_SIZE"),
        ("KVTIER_pool_size", "KVTIER_POOL_SIZE"),
        ("KVTIER_SOKET", "KVTIER_SOCKET"),
        ("KVTIER_SERVER_SOKET", "KVTIER_SERVER_SOCKET"),
        ("KVTIER_CONFIG_FILE", "KVTIER_CONFIG"),
        ("KVTIER_DISKS_PATHS", "KVTIER_DISK_PATHS"),
        ("KVTIER_METRIC_LISTEN", "KVTIER_METRICS_LISTEN"),
        ("KVTIER_CUDA_LIB", "KVTIER_CUDA_LIBRARY"),
        ("KVTIER_INTEGRITY_SAMPLE_BYTES", "KVTIER_INTEGRITY_SAMPLE_BYTES_PER_S"),
    ],
)
def test_a_variable_that_is_none_of_ours_is_refused_with_the_nearest_one(name: str, near: str) -> None:
    found = check(**{name: "64Gi"})
    assert found.exit_code == 78
    assert f"{name} = '64Gi'" in found.output
    assert found.output.rstrip().endswith(f"is {near}")


def test_variables_that_this_repository_reads_may_be_there() -> None:
    """Whoever tests or builds in a shell may start a daemon in it."""
    files = [file for root in ROOTS for kind in ("*.py", "*.sh") for file in (REPO / root).rglob(kind)]
    text = "\n".join(file.read_text() for file in files)
    read = re.compile(
        r"(?:environ(?:ment)?(?:\[|\.get\()|setenv\(|VARIABLE(?:: Final)? = )\"(KVTIER_\w+)\""
        r"|\$\{(KVTIER_\w+):"
    )
    names = {first or second for first, second in read.findall(text)}
    assert {"KVTIER_VENV", "KVTIER_SEED", "KVTIER_CUDA_LIBRARY", "KVTIER_TEST_WORKER_FAULT"} <= names
    known = {env for item in settings.declared(config.Config) for env in item.envs} | {"KVTIER_CONFIG"}
    environ = dict.fromkeys(names - known, "x")
    assert len(environ) > 12
    config.load(None, None, environ)


def test_what_kubernetes_tells_of_a_service_called_kvtier_is_no_mistake() -> None:
    environ = {
        "KVTIER_SERVICE_HOST": "10.0.0.1",
        "KVTIER_SERVICE_PORT": "9470",
        "KVTIER_SERVICE_PORT_METRICS": "9470",
        "KVTIER_PORT": "tcp://10.0.0.1:9470",
        "KVTIER_PORT_9470_TCP": "tcp://10.0.0.1:9470",
        "KVTIER_PORT_9470_TCP_PROTO": "tcp",
        "KVTIER_PORT_9470_TCP_ADDR": "10.0.0.1",
        "KVTIER_METRICS_SERVICE_HOST": "10.0.0.1",
        "KVTIER_METRICS_PORT": "tcp://10.0.0.1:9470",
        "KVTIER_METRICS_PORT_9470_TCP_PORT": "9470",
    }
    config.load(None, None, environ)
    assert refused(KVTIER_METRICS_PORT="9470")[0].field == "KVTIER_METRICS_PORT"


def test_file_environment_and_flags_are_told_together(tmp_path: Path) -> None:
    file = tmp_path / "kvtierd.toml"
    file.write_text(
        'size = "1GiB"\n[pol]\npath = "/a"\n[pool]\ndrain_s = 3\nsize = true\n[limits]\n'
        "lease_ttl = 3\nleased_fraction_max = 25\n"
    )
    found = check(
        f"--config={file}",
        "--pool-pth",
        "/dev/shm/x",
        "--pool-lock-timeout-s=soon",
        "--log-level=loud",
        "left over",
        KVTIER_POLL_SIZE="3Gi",
        KVTIER_SERVER_DRAIN_S="10s",
        KVTIER_METRICS_LISTEN="9470",
    )
    assert found.exit_code == 78
    for line in (
        f"size = '1GiB': unknown setting in {file}; the nearest known one is pool.size or disk.size",
        f"pol = {{'path': '/a'}}: unknown section in {file}; the nearest known one is pool",
        f"pool.drain_s = 3: unknown setting in {file}; the nearest known one is server.drain_s",
        f"limits.lease_ttl = 3: unknown setting in {file}; the nearest known one is limits.lease_ttl_s",
        "KVTIER_POLL_SIZE = '3Gi': unknown variable in the environment; the nearest known one is "
        "KVTIER_POOL_SIZE",
        "--pool-pth = '/dev/shm/x': unknown flag in the command line; the nearest known one is --pool-path",
        "argument = 'left over': is not understood",
        "server.drain_s = '10s' (from environment KVTIER_SERVER_DRAIN_S): write a number of seconds "
        "from 0 to 1000000, without a unit",
        f"pool.size = True (from {file}): write a number of bytes, or a number with a unit: 64Gi or 64GiB",
        "pool.lock_timeout_s = 'soon' (from --pool-lock-timeout-s): write a number of seconds",
        f"limits.leased_fraction_max = 25 (from {file}): write a number above 0 and up to 1, e.g. 0.25",
        "metrics.listen = '9470' (from environment KVTIER_METRICS_LISTEN): write host:port",
        "log.level = 'loud' (from --log-level): write one of debug, info, warning, error",
    ):
        assert f"\n  {line}" in found.output, found.output
    assert "kvtierd: 13 things are wrong" in found.output
    assert found.output.count("\n") == 14


def test_what_follows_from_another_mistake_is_not_told(tmp_path: Path) -> None:
    broken = refused(flags={"disk.paths": "/a", "disk.size": "much", "server.session_silence_s": "1"})
    assert [each.field for each in broken] == ["disk.size", "server.session_silence_s"]
    file = tmp_path / "kvtierd.toml"
    file.write_text("[disk\n")
    told = refused(file, {"disk.paths": "/a"}, KVTIER_POOL_SIZ="1")
    assert [each.field for each in told] == ["config", "KVTIER_POOL_SIZ"]
    assert str(file) in str(told[0])


def test_all_that_is_wrong_with_disks_is_told_in_one_round() -> None:
    told = refused(flags={"disk.paths": "relative", "disk.write_queue_size": "1"})
    assert [each.field for each in told] == ["disk.paths", "disk.size", "disk.write_queue_size"]
    told = refused(flags={"disk.paths": "/a", "disk.size": "1MiB", "disk.extent_size": "3MiB"})
    assert [each.field for each in told] == ["disk.extent_size", "disk.size"]
    told = refused(flags={"pool.size": "1MiB", "pool.extent_size": "3MiB"})
    assert [each.field for each in told] == ["pool.extent_size", "pool.size"]


def test_values_that_do_not_go_together_are_all_told_as_they_were_given() -> None:
    told = refused(
        flags={"pool.size": "1M", "server.session_silence_s": "1"}, KVTIER_SERVER_HEARTBEAT_INTERVAL_S="9.0"
    )
    assert [(each.field, each.value, each.source) for each in told] == [
        ("pool.size", "1M", "--pool-size"),
        ("server.heartbeat_interval_s", "9.0", "environment KVTIER_SERVER_HEARTBEAT_INTERVAL_S"),
        ("server.session_silence_s", "1", "--server-session-silence-s"),
    ]


def test_only_flags_that_there_are_not_are_a_wrong_command_line() -> None:
    for arguments in (("--pool-siz", "1GiB"), ("--pool-siz=1GiB",)):
        found = CliRunner().invoke(cli.main, ["serve", *arguments])
        assert found.exit_code == 2
        assert "--pool-siz = '1GiB'" in found.output
        assert found.output.rstrip().endswith("is --pool-size")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("64Gi", 64 << 30),
        ("64gi", 64 << 30),
        ("64 GiB", 64 << 30),
        ("64G", 64 * 10**9),
        ("64g", 64 * 10**9),
        ("64 gb", 64 * 10**9),
        ("512Mi", 512 << 20),
        ("1.5Ti", 3 << 39),
        ("8k", 8_000),
        ("1P", 10**15),
    ],
)
def test_sizes_are_understood_as_kubernetes_writes_them(text: str, value: int) -> None:
    assert settings.size(text) == value
    assert settings.size(settings.format_size(value)) == value


@pytest.mark.parametrize("text", ["", "G", "64X", "64Gib/s", "1e9", "64,5G", "-1G", "64i", "٣G", True, 1.5])
def test_other_forms_are_refused_with_those_that_there_are(text: object) -> None:
    with pytest.raises(ValueError, match=r"64Gi or 64GiB .* 64G, 64g or 64GB"):
        settings.size(text)


def test_show_tells_how_sizes_are_written_and_how_one_was_given() -> None:
    found = CliRunner().invoke(
        cli.main, ["config", "show", "--pool-size=64g"], env={"KVTIER_DISK_SIZE": "1Ti"}
    )
    assert "64Gi or 64GiB is 64 x 2^30 bytes; 64G, 64g or 64GB is 64 x 10^9" in found.output
    assert "(--pool-size: '64g', 59.6 GiB)\nsize = \"64GB\"" in found.output
    assert "(environment KVTIER_DISK_SIZE: '1Ti', 1 TiB)\nsize = \"1TiB\"" in found.output
