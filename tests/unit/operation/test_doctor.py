"""What `kvtierctl doctor` finds on a host, and what it says to change."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner
from kvtierd import ctl
from kvtierd.config import Config, PoolConfig, ServerConfig
from kvtierd.disk_config import DiskConfig
from kvtierd.doctor import Finding, Verdict, examine

PLENTY = 1 << 60


def findings(config: Config) -> dict[str, Finding]:
    return {finding.about: finding for finding in examine(config)}


@pytest.fixture
def config(shm_dir: Path, socket_dir: Path) -> Config:
    """One that this host can have."""
    return Config(
        server=ServerConfig(socket=socket_dir / "kvtierd.sock"),
        pool=PoolConfig(path=shm_dir / "pool", size=64 << 20),
    )


def with_pool(config: Config, **changes: object) -> Config:
    return dataclasses.replace(config, pool=dataclasses.replace(config.pool, **changes))  # type: ignore[arg-type]


def test_a_host_that_will_do_has_no_failure(config: Config) -> None:
    found = findings(config)
    assert [each for each in found.values() if each.verdict is Verdict.FAIL] == []
    assert {"kernel", "pool", "memory", "memlock", "open files", "GPUs", "NUMA"} <= found.keys()
    assert not (config.pool.path or Path()).exists(), "nothing was made"


def test_all_that_is_not_well_comes_with_advice(config: Config, tmp_path: Path) -> None:
    broken = dataclasses.replace(
        with_pool(config, path=tmp_path / "pool"),
        server=ServerConfig(group="no-such-group"),
        disk=DiskConfig(paths=(tmp_path,), size=PLENTY),
    )
    bad = [each for each in examine(broken) if each.verdict is not Verdict.OK]
    assert len(bad) >= 3
    assert all(each.advice for each in bad)


@pytest.mark.parametrize(
    ("release", "verdict", "said"),
    [
        ("5.10.0-28-amd64", Verdict.WARN, "Linux 5.14 or later"),
        ("5.14.0-503.el9.x86_64", Verdict.WARN, "containers of their own, upgrade to Linux 6.5 or later"),
        ("6.5.0", Verdict.OK, ""),
        ("7.0.1", Verdict.OK, ""),
    ],
)
def test_a_kernel_that_is_too_old_is_told_which_one_is_needed(
    release: str, verdict: Verdict, said: str, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = os.uname()
    monkeypatch.setattr(os, "uname", lambda: os.uname_result((*here[:2], release, *here[3:])))
    found = findings(config)["kernel"]
    assert (found.verdict, said in found.advice) == (verdict, True)


def test_a_pool_on_a_disk_is_refused(config: Config, tmp_path: Path) -> None:
    found = findings(with_pool(config, path=tmp_path / "pool"))["pool"]
    assert found.verdict is Verdict.FAIL
    assert "tmpfs or hugetlbfs" in found.advice


def test_a_pool_larger_than_its_tmpfs_is_told_how_to_remount_it(config: Config) -> None:
    found = findings(with_pool(config, size=PLENTY))
    assert found["pool"].verdict is Verdict.FAIL
    assert f"mount -o remount,size={(1 << 30) + 1}G /dev/shm" in found["pool"].advice
    assert found["memory"].verdict is Verdict.FAIL


def test_a_pool_that_is_there_already_needs_no_more_room(config: Config) -> None:
    path = config.pool.path
    assert path is not None
    path.write_bytes(bytes(1 << 20))
    found = findings(with_pool(config, size=1 << 20))
    assert found["pool"].verdict is Verdict.OK
    assert "memory" not in found


def test_a_folder_that_others_can_write_is_no_place_for_a_pool(config: Config, shm_dir: Path) -> None:
    shm_dir.chmod(0o777)
    found = findings(config)["pool's folder"]
    assert found.verdict is Verdict.FAIL
    assert found.advice == f"chmod go-w {shm_dir}"


def test_an_anonymous_pool_is_warned_of(config: Config) -> None:
    assert findings(with_pool(config, path=None, persistent=False))["pool"].verdict is Verdict.WARN


def test_a_group_that_does_not_exist_is_named(config: Config) -> None:
    found = findings(dataclasses.replace(config, server=ServerConfig(group="no-such-group")))["socket group"]
    assert (found.verdict, found.found) == (Verdict.FAIL, "there is no group no-such-group")


def test_a_disk_without_room_and_one_in_memory(config: Config, tmp_path: Path, shm_dir: Path) -> None:
    disks = DiskConfig(paths=(tmp_path, shm_dir), size=PLENTY)
    found = findings(dataclasses.replace(config, disk=disks))
    assert found[f"disk {tmp_path}"].verdict is Verdict.FAIL
    assert found[f"disk {shm_dir}"].verdict is Verdict.WARN


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="there is a driver")
def test_without_a_driver_engines_on_cpus_are_served(config: Config) -> None:
    assert findings(config)["GPUs"].verdict is Verdict.OK


class TestCommand:
    def test_programs_get_a_list(self, config: Config) -> None:
        environ = {
            "KVTIER_CONFIG": "",
            "KVTIER_POOL_PATH": str(config.pool.path),
            "KVTIER_POOL_SIZE": "64MiB",
        }
        result = CliRunner().invoke(ctl.main, ["doctor", "--json"], env=environ)
        found = {each["about"]: each for each in json.loads(result.output)}
        assert result.exit_code == 0
        assert found["pool"]["verdict"] == "ok"

    def test_a_failure_is_its_status(self, tmp_path: Path) -> None:
        environ = {"KVTIER_POOL_PATH": str(tmp_path / "pool")}
        result = CliRunner().invoke(ctl.main, ["doctor"], env=environ)
        assert result.exit_code == 1
        assert "FAIL  pool: " in result.output

    def test_a_configuration_that_cannot_be_used_is_another(self) -> None:
        result = CliRunner().invoke(ctl.main, ["doctor"], env={"KVTIER_POOL_SIZE": "much"})
        assert result.exit_code == 78
        assert "pool.size" in result.output
