"""What is looked at before a daemon starts, what each check says, and what to change."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from click.testing import CliRunner
from kvtierd.config.daemon import Config, Loaded, MetricsConfig, PoolConfig, ServerConfig
from kvtierd.config.disk import DiskConfig
from kvtierd.config.settings import Given
from kvtierd.ctl import commands as ctl
from kvtierd.memory.host_pool import HostPool
from kvtierd.preflight import (
    OF_DOCTOR,
    Finding,
    NotReadyError,
    Verdict,
    asking,
    disks,
    examine,
    host,
    listening,
    places,
    pool,
    probe,
    require,
)

from tests.support.fake_cuda import FakeCuda

PLENTY = 1 << 50
NOBODY = 65_534
MIB = 1 << 20

GIVEN = {"metrics.listen": Given("", "--metrics-listen")}
"""Somebody has chosen the metrics port."""


def findings(
    config: Config, *, may_run: bool = True, given: Mapping[str, Given] = GIVEN
) -> dict[str, Finding]:
    return {finding.name: finding for finding in examine(Loaded(config, given, None), may_run=may_run)}


def failures(config: Config) -> list[Finding]:
    return [each for each in findings(config).values() if each.verdict is Verdict.FAILURE]


@pytest.fixture
def config(shm_dir: Path, socket_dir: Path) -> Config:
    """One that this host can have."""
    return Config(
        server=ServerConfig(socket=socket_dir / "kvtierd.sock"),
        pool=PoolConfig(path=shm_dir / "pool", size=64 * MIB),
        metrics=MetricsConfig(listen="127.0.0.1:0"),
    )


def with_pool(config: Config, **changes: object) -> Config:
    return dataclasses.replace(config, pool=dataclasses.replace(config.pool, **changes))  # type: ignore[arg-type]


def with_disks(config: Config, *paths: Path, size: int = 16 * MIB) -> Config:
    return dataclasses.replace(config, disk=DiskConfig(paths=paths, size=size))


@contextlib.contextmanager
def somebody_else() -> Iterator[None]:
    """Inside, this process may do what an ordinary user may. Root becomes one; others are one."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


class TestEncryption:
    @pytest.fixture
    def keys(self, tmp_path: Path) -> Path:
        folder = tmp_path / "keys"
        folder.mkdir(mode=0o700)
        (folder / "default").write_text("0f" * 32)
        (folder / "default").chmod(0o400)
        return folder

    def encrypted(self, config: Config, keys: Path | None, *paths: Path) -> Finding:
        disk = DiskConfig(paths=paths, size=16 * MIB, encryption_keys=keys)
        return findings(dataclasses.replace(config, disk=disk))["disk encryption"]

    def test_it_says_whether_disks_are_encrypted(self, config: Config, tmp_path: Path, keys: Path) -> None:
        off = self.encrypted(config, None, tmp_path)
        assert (off.verdict, off.found) == (Verdict.OK, "off: disks hold blocks as they are")
        on = self.encrypted(config, keys, tmp_path)
        assert on.verdict is Verdict.OK
        assert "AES-256-GCM" in on.found
        assert self.encrypted(config, keys).verdict is Verdict.WARNING, "there is no disk"

    def test_keys_that_cannot_be_used_are_a_failure_with_a_remedy(
        self, config: Config, tmp_path: Path, keys: Path
    ) -> None:
        keys.chmod(0o750)
        found = self.encrypted(config, keys, tmp_path)
        assert (found.verdict, found.field, found.value) == (
            Verdict.FAILURE,
            "disk.encryption_keys",
            keys,
        )
        assert f"chmod 700 {keys}" in found.remedy
        assert NotReadyError([found], {}).status == 78

    def test_without_the_library_it_says_how_to_get_it(
        self, config: Config, tmp_path: Path, keys: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("kvtierd.preflight.encryption.import_module", missing)
        disk = DiskConfig(paths=(tmp_path,), size=16 * MIB, encryption_keys=keys)
        [found] = [
            each
            for each in examine(Loaded(dataclasses.replace(config, disk=disk), GIVEN, None), may_run=True)
            if each.verdict is Verdict.FAILURE
        ]
        assert "pip install 'cryptography>=47'" in found.remedy


def missing(name: str) -> None:
    raise ImportError(name)


class TestHost:
    def test_a_host_that_will_do_has_no_failure(self, config: Config) -> None:
        found = findings(config)
        assert failures(config) == []
        assert {"kernel", "pool folder", "pool room", "memory", "memlock", "open files", "GPUs"} <= set(found)
        assert not (config.pool.path or Path()).exists(), "nothing was made"

    def test_all_that_is_not_well_comes_with_a_remedy(self, config: Config, tmp_path: Path) -> None:
        broken = with_disks(with_pool(config, path=tmp_path / "pool"), tmp_path, size=PLENTY >> 8)
        broken = dataclasses.replace(broken, server=ServerConfig(group="no-such-group"))
        bad = [each for each in findings(broken).values() if each.verdict is not Verdict.OK]
        assert len(bad) >= 3
        assert all(each.remedy for each in bad)

    @pytest.mark.parametrize(
        ("release", "verdict", "said"),
        [
            ("5.10.0-28-amd64", Verdict.WARNING, "Linux 5.14 or later"),
            (
                "5.14.0-503.el9.x86_64",
                Verdict.WARNING,
                "containers of their own, upgrade to Linux 6.5",
            ),
            ("6.5.0", Verdict.OK, ""),
            ("7.0.1", Verdict.OK, ""),
        ],
    )
    def test_a_kernel_that_is_too_old_is_told_which_one_is_needed(
        self, release: str, verdict: Verdict, said: str, config: Config, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        here = os.uname()
        monkeypatch.setattr(os, "uname", lambda: os.uname_result((*here[:2], release, *here[3:])))
        found = findings(config)["kernel"]
        assert (found.verdict, said in found.remedy) == (verdict, True)

    def test_too_few_open_files_for_all_sessions(self, config: Config) -> None:
        many = dataclasses.replace(config, server=dataclasses.replace(config.server, sessions_max=65_536))
        found = findings(many)["open files"]
        assert (found.verdict, found.field) == (Verdict.WARNING, "server.sessions_max")
        assert findings(config)["open files"].verdict is Verdict.OK

    def test_where_gpus_are_the_pid_namespace_is_looked_at(
        self, config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(host, "_gpu_nodes", lambda: ["/dev/nvidiactl"])
        monkeypatch.setattr(host, "ask", lambda _: [{"unreadable": [], "cuda": 13_000}])
        (tmp_path / "self/ns").mkdir(parents=True)
        namespace = tmp_path / "self/ns/pid"
        namespace.touch()
        monkeypatch.setattr(host, "PROC", tmp_path)
        apart = findings(config)["CUDA IPC"]
        assert apart.verdict is Verdict.WARNING
        assert "hostPID" in apart.remedy
        assert "expandable_segments:True" in apart.remedy
        monkeypatch.setattr(host, "INITIAL_PID_NAMESPACE", namespace.stat().st_ino)
        assert findings(config)["CUDA IPC"].verdict is Verdict.OK

    @pytest.mark.parametrize(("mode", "closed"), [(0, 0), (2, 2), (3, 2)])
    def test_gpus_that_let_no_second_process_in_are_named(
        self,
        config: Config,
        mode: int,
        closed: int,
        make_fake_cuda: Callable[..., FakeCuda],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        fake = make_fake_cuda(devices=2, compute_mode=mode)
        for name, value in fake.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(host, "_gpu_nodes", lambda: ["/dev/null"])
        found = {
            each.name: each for each in examine(Loaded(config, GIVEN, None), may_run=True, checks=OF_DOCTOR)
        }
        assert found["GPUs"].found == "driver for CUDA 13.0"
        assert "compute mode" not in findings(config), "a start does not initialise the driver"
        assert ("compute mode" in found) == bool(closed)
        if closed:
            assert found["compute mode"].found == "no second process may use GPU 0, 1"
            assert "nvidia-smi -c DEFAULT" in found["compute mode"].remedy

    @pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="there is a driver")
    def test_without_a_driver_engines_on_cpus_are_served(self, config: Config) -> None:
        assert findings(config)["GPUs"].verdict is Verdict.OK


class TestPool:
    def test_one_on_a_disk_is_warned_of(self, config: Config, disk_dir: Path) -> None:
        found = findings(with_pool(config, path=disk_dir / "pool"))["pool file system"]
        assert found.verdict is Verdict.WARNING
        assert "tmpfs or hugetlbfs" in found.remedy
        larger = findings(with_pool(config, path=disk_dir / "pool", size=PLENTY))
        assert "huge pages" not in larger, "a disk has none"
        assert larger["pool room"].remedy == "lower pool.size, or set pool.path to a larger one"

    def test_one_larger_than_its_tmpfs_is_told_how_to_remount_it(
        self, config: Config, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        found = findings(with_pool(config, size=PLENTY))
        assert found["pool room"].verdict is Verdict.FAILURE
        assert (
            found["pool room"].remedy
            == "lower pool.size: there is no memory for it, which no remount changes"
        )
        assert found["memory"].verdict is Verdict.FAILURE
        monkeypatch.setattr(pool, "meminfo", lambda name: 2 * PLENTY)
        found = findings(with_pool(config, size=PLENTY))
        assert found["pool room"].verdict is Verdict.FAILURE
        assert "mount -o remount,size=1048577G /dev/shm" in found["pool room"].remedy

    def test_a_folder_as_its_socket_is_not_to_be_removed(self, config: Config, socket_dir: Path) -> None:
        (socket_dir / "k.sock").mkdir(0o700)
        found = findings(dataclasses.replace(config, server=ServerConfig(socket=socket_dir / "k.sock")))
        assert found["socket file"].remedy == f"name a file in it, {socket_dir}/k.sock/kvtierd.sock"

    def test_a_process_that_listens_and_does_not_answer_is_no_daemon_that_runs(
        self, config: Config, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(listening, "ANSWER_S", 0.2)
        with socket.socket(socket.AF_UNIX) as silent:
            silent.bind(str(config.server.socket_path))
            silent.listen()
            for may_run in (True, False):
                found = findings(config, may_run=may_run)["daemon"]
                assert found.verdict is Verdict.FAILURE
                assert (
                    f"pid {os.getpid()} listens at {config.server.socket_path}, but does not" in found.found
                )

    def test_one_that_is_there_already_needs_no_more_room(self, config: Config) -> None:
        path = config.pool.path
        assert path is not None
        path.write_bytes(b"KVTIERP1".ljust(1 << 20, b"\0"))
        path.chmod(0o600)
        found = findings(with_pool(config, size=1 << 20))
        assert found["pool room"].verdict is Verdict.OK
        assert "memory" not in found

    @pytest.mark.parametrize(
        ("changes", "remedy"),
        [
            ({"size": 80 * MIB}, "set pool.size as it was, or to 64MiB to keep them"),
            (
                {"extent_size": 2 * MIB},
                "set pool.size as it was, or to 64MiB, and leave pool.extent_size out,",
            ),
        ],
    )
    def test_another_size_than_that_of_the_file_is_a_cold_start(
        self, config: Config, changes: dict[str, int], remedy: str
    ) -> None:
        with HostPool.open(config.pool.path, config.pool.size, lock_timeout_s=1):
            held = findings(with_pool(config, **changes), may_run=False)["pool file"]
            assert held.verdict is Verdict.FAILURE, "who holds it comes first"
        assert findings(config)["pool file"].verdict is Verdict.OK
        found = findings(with_pool(config, **changes))["pool file"]
        assert found.verdict is Verdict.WARNING
        assert "the next start is cold, and drops the blocks" in found.found
        assert found.remedy.startswith(remedy)

    def test_the_rest_that_is_too_small_for_an_extent_takes_no_memory(self, config: Config) -> None:
        found = findings(with_pool(config, size=66 * MIB, extent_size=16 * MIB))
        assert found["memory"].found.endswith("the pool takes 66 MiB more")
        found = findings(with_pool(config, size=80 * MIB, extent_size=16 * MIB))
        assert found["memory"].found.endswith("the pool takes 66 MiB more")

    def test_a_folder_that_others_can_write_is_no_place_for_it(self, config: Config, shm_dir: Path) -> None:
        shm_dir.chmod(0o777)
        found = findings(config)["pool folder"]
        assert (found.verdict, found.field) == (Verdict.FAILURE, "pool.path")
        assert found.remedy == f"chmod go-w {shm_dir}"

    def test_everybodys_folder_is_none_either(self, config: Config) -> None:
        found = findings(with_pool(config, path=Path("/dev/shm/pool")))["pool folder"]
        assert (found.verdict, "/dev/shm/kvtier" in found.remedy) == (Verdict.FAILURE, True)

    def test_a_folder_that_cannot_be_made(self, config: Config, shm_dir: Path) -> None:
        (shm_dir / "file").touch()
        found = findings(with_pool(config, path=shm_dir / "file" / "below" / "pool"))["pool folder"]
        assert found.verdict is Verdict.FAILURE
        shm_dir.chmod(0o555)
        with somebody_else():
            found = findings(with_pool(config, path=shm_dir / "missing" / "pool"))["pool folder"]
        assert found.verdict is Verdict.FAILURE
        assert "install -d" in found.remedy

    @pytest.mark.parametrize("wrong", ["mode", "folder", "link", "content", "fifo", "links"])
    def test_a_file_that_is_no_pool_of_ours(self, config: Config, shm_dir: Path, wrong: str) -> None:
        path = config.pool.path
        assert path is not None
        match wrong:
            case "folder":
                path.mkdir()
            case "link":
                path.symlink_to(shm_dir / "elsewhere")
            case "fifo":
                os.mkfifo(path, 0o600)
            case _:
                path.write_bytes(b"a letter" if wrong == "content" else b"")
                path.chmod(0o644 if wrong == "mode" else 0o600)
        if wrong == "links":
            os.link(path, shm_dir / "again")
        found = findings(config)["pool file"]
        assert (found.verdict, found.field, found.value) == (Verdict.FAILURE, "pool.path", path)
        assert found.remedy

    def test_a_file_that_somebody_is_making_a_pool_is_in_use(self, config: Config) -> None:
        path = config.pool.path
        assert path is not None
        path.write_bytes(bytes(4 << 20))
        path.chmod(0o600)
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            found = findings(config)["pool file"]
        assert (found.verdict, found.passing, found.holder) == (Verdict.FAILURE, True, True)
        assert findings(config)["pool file"].found == "the file holds something that is not a pool"

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
    def test_a_file_of_another_user(self, config: Config) -> None:
        path = config.pool.path
        assert path is not None
        path.touch(0o600)
        os.chown(path, NOBODY, -1)
        found = findings(config)["pool file"]
        assert (found.verdict, f"uid {NOBODY}" in found.found) == (Verdict.FAILURE, True)

    def test_an_anonymous_one_is_warned_of(self, config: Config) -> None:
        found = findings(with_pool(config, path=None, persistent=False))["pool"]
        assert (found.verdict, found.field) == (Verdict.WARNING, "pool.persistent")


class TestListening:
    def test_a_group_that_does_not_exist_is_named(self, config: Config) -> None:
        found = findings(dataclasses.replace(config, server=ServerConfig(group="no-such-group")))
        assert found["socket group"].verdict is Verdict.FAILURE
        assert (found["socket group"].field, found["socket group"].value) == ("server.group", "no-such-group")

    def test_what_is_in_the_way_of_a_socket(self, config: Config, socket_dir: Path) -> None:
        (socket_dir / "kvtierd.side.sock").touch()
        found = findings(config)["socket file"]
        assert (found.verdict, found.field) == (Verdict.FAILURE, "server.socket")

    def test_a_socket_that_nobody_listens_at_is_not(self, config: Config, socket_dir: Path) -> None:
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(socket_dir / "kvtierd.sock"))
        assert failures(config) == []

    def test_who_listens_is_named_and_no_obstacle_for_who_asks_about_it(self, config: Config) -> None:
        other = grpc.server(ThreadPoolExecutor(1))
        other.add_insecure_port(f"unix:{config.server.socket_path}")
        other.start()
        try:
            assert findings(config, may_run=True)["daemon"].verdict is Verdict.OK
            found = findings(config, may_run=False)["daemon"]
        finally:
            other.stop(None).wait()
        assert (found.verdict, f"pid {os.getpid()}" in found.found) == (Verdict.FAILURE, True)

    def test_a_port_that_is_taken_is_told_with_its_owner(self, config: Config) -> None:
        with socket.create_server(("127.0.0.1", 0)) as other:
            listen = f"127.0.0.1:{other.getsockname()[1]}"
            taken = dataclasses.replace(
                config,
                metrics=MetricsConfig(listen=listen),
                server=dataclasses.replace(config.server, health_listen=listen),
            )
            found = failures(taken)
        assert {each.field for each in found} == {"metrics.listen", "server.health_listen"}
        assert any(f"pid {os.getpid()}" in each.found for each in found)
        [remedy] = [each.remedy for each in found if each.field == "metrics.listen"]
        assert "--metrics-listen, KVTIER_METRICS_LISTEN" in remedy

    @pytest.mark.parametrize("may_run", [True, False])
    def test_a_taken_metrics_port_that_nobody_chose_is_no_obstacle(
        self, config: Config, may_run: bool
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as other:
            port = other.getsockname()[1]
            taken = dataclasses.replace(config, metrics=MetricsConfig(listen=f"127.0.0.1:{port}"))
            found = findings(taken, may_run=may_run, given={})["metrics port"]
        assert found.verdict is Verdict.WARNING
        assert f"port {port} is in use by pid {os.getpid()}" in found.found
        for way in ("--metrics-listen", "KVTIER_METRICS_LISTEN", 'metrics.listen = "127.0.0.1:PORT"'):
            assert way in found.remedy

    def test_a_port_whose_user_cannot_be_seen_is_not_that_of_a_daemon_that_can(
        self, config: Config, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(listening, "port_owners", lambda port: [])
        daemon = grpc.server(ThreadPoolExecutor(1))
        daemon.add_insecure_port(f"unix:{config.server.socket_path}")
        daemon.start()
        try:
            with socket.create_server(("127.0.0.1", 0)) as other:
                metrics = MetricsConfig(listen=f"127.0.0.1:{other.getsockname()[1]}")
                found = findings(dataclasses.replace(config, metrics=metrics), given={})
        finally:
            daemon.stop(None).wait()
        assert found["daemon"].verdict is Verdict.OK
        assert found["metrics port"].verdict is Verdict.WARNING

    def test_two_that_want_one_port(self, config: Config) -> None:
        with socket.create_server(("127.0.0.1", 0)) as other:
            listen = f"127.0.0.1:{other.getsockname()[1]}"
        server = dataclasses.replace(config.server, health_listen=listen)
        same = dataclasses.replace(config, metrics=MetricsConfig(listen=listen), server=server)
        assert [each.field for each in failures(same)] == ["server.health_listen"]

    @pytest.mark.parametrize("listen", ["192.0.2.1:9470", "no-such-host.invalid:9470", "[::zz]:9470"])
    def test_an_address_that_cannot_be_bound(self, config: Config, listen: str) -> None:
        found = failures(dataclasses.replace(config, metrics=MetricsConfig(listen=listen)))
        assert [(each.field, each.value) for each in found] == [("metrics.listen", listen)]

    def test_a_port_of_roots(self, config: Config) -> None:
        least = int(Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text())
        if least < 100:
            pytest.skip("ports below 1024 are everybody's here")
        with somebody_else():
            found = findings(dataclasses.replace(config, metrics=MetricsConfig(listen="127.0.0.1:99")))
        assert found["metrics port"].verdict is Verdict.FAILURE
        assert "1024" in found["metrics port"].remedy


class TestDisks:
    def test_one_without_room_and_one_in_memory(self, config: Config, tmp_path: Path, shm_dir: Path) -> None:
        found = findings(with_disks(config, tmp_path, size=PLENTY >> 8))["disk room"]
        assert (found.verdict, found.field) == (Verdict.FAILURE, "disk.size")
        assert findings(with_disks(config, shm_dir))[f"disk {shm_dir}"].verdict is Verdict.WARNING

    def test_two_of_one_disk_need_room_together(self, config: Config, tmp_path: Path) -> None:
        one, two = tmp_path / "1", tmp_path / "2"
        one.mkdir()
        two.mkdir()
        room = os.statvfs(tmp_path)
        most = int(room.f_bavail * room.f_frsize * 0.7)
        assert "disk room" not in findings(with_disks(config, one, size=most))
        found = findings(with_disks(config, one, two, size=most))
        assert found["disk room"].verdict is Verdict.FAILURE
        assert found[f"disk {two}"].verdict is Verdict.WARNING
        assert "same file system" in found[f"disk {two}"].found

    def test_what_is_no_folder(self, config: Config, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        for path in (tmp_path / "missing", tmp_path / "file", tmp_path / "file" / "below"):
            found = findings(with_disks(config, path))[f"disk {path}"]
            assert (found.verdict, found.field, found.value) == (Verdict.FAILURE, "disk.paths", path)

    def test_one_folder_by_two_names(self, config: Config, tmp_path: Path) -> None:
        (tmp_path / "a").mkdir()
        (tmp_path / "b").symlink_to(tmp_path / "a")
        found = findings(with_disks(config, tmp_path / "a", tmp_path / "b"))[f"disk {tmp_path / 'b'}"]
        assert (found.verdict, "same folder" in found.found) == (Verdict.FAILURE, True)

    def test_one_that_cannot_be_written(
        self, config: Config, socket_dir: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Here and not in a process of its own: another user may not be allowed to run this Python.
        monkeypatch.setattr(disks, "ask", lambda questions: [probe.disk(path) for _, path in questions])
        disk = socket_dir / "disk"
        disk.mkdir(0o555)
        socket_dir.chmod(0o755)
        with somebody_else():
            found = findings(with_disks(config, disk))[f"disk {disk}"]
        assert found.verdict is Verdict.FAILURE
        assert "written" in found.found

    def test_something_else_of_the_slabs_name(self, config: Config, tmp_path: Path) -> None:
        slab = tmp_path / "kvtier.slab"
        slab.write_bytes(b"a letter")
        slab.chmod(0o600)
        assert findings(with_disks(config, tmp_path))[f"disk {tmp_path}"].verdict is Verdict.FAILURE
        slab.write_bytes(b"KVTIERP1")
        assert findings(with_disks(config, tmp_path))[f"disk {tmp_path}"].verdict is not Verdict.FAILURE

    def test_one_that_does_not_answer_is_given_up(
        self, config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asleep = tmp_path / "asleep.py"
        asleep.write_text("import time\ntime.sleep(3600)\n")
        monkeypatch.setattr(asking, "PROBE", asleep)
        monkeypatch.setattr(asking, "DEADLINE_S", 0.1)
        found = findings(with_disks(config, tmp_path))[f"disk {tmp_path}"]
        assert (found.verdict, "does not answer" in found.found) == (Verdict.WARNING, True)

    def test_looking_leaves_nothing(self, config: Config, tmp_path: Path) -> None:
        findings(with_disks(config, tmp_path))
        assert list(tmp_path.iterdir()) == []


def test_a_place_where_nothing_is_mounted_is_known_from_fstab(tmp_path: Path) -> None:
    table = tmp_path / "fstab"
    away = tmp_path / "a disk"
    table.write_text(
        f"# a comment\n\nUUID=1 / ext4 defaults 0 1\nUUID=2 {away} ext4\n".replace("a disk", "a\\040disk")
    )
    assert places.not_mounted(away / "kvtier", table) == away
    assert places.not_mounted(tmp_path / "kvtier", table) is None
    assert places.not_mounted(Path("/proc/self"), table) is None
    assert places.not_mounted(away, tmp_path / "no such table") is None


def test_every_failure_is_told_at_once_with_setting_value_source_and_remedy(
    config: Config, tmp_path: Path
) -> None:
    broken = with_disks(config, tmp_path / "missing")
    broken = dataclasses.replace(broken, metrics=MetricsConfig(listen="192.0.2.1:1"))
    given = {"metrics.listen": Given("192.0.2.1:1", "--metrics-listen")}
    with pytest.raises(NotReadyError) as refused:
        require(Loaded(broken, given, None))
    head, *lines = str(refused.value).splitlines()
    assert "2 reasons" in head
    assert lines[0].startswith(f"  disk.paths = '{tmp_path / 'missing'}' (from default): the folder does not")
    assert lines[1].startswith("  metrics.listen = '192.0.2.1:1' (from --metrics-listen): cannot be bound: ")
    assert all("; " in line for line in lines)
    assert refused.value.status == 78


class TestCommand:
    @pytest.fixture
    def environ(self, config: Config) -> dict[str, str]:
        return {
            "KVTIER_CONFIG": "",
            "KVTIER_SERVER_SOCKET": str(config.server.socket),
            "KVTIER_POOL_PATH": str(config.pool.path),
            "KVTIER_POOL_SIZE": "64MiB",
            "KVTIER_METRICS_LISTEN": "127.0.0.1:0",
        }

    def test_programs_get_a_list(self, environ: dict[str, str]) -> None:
        result = CliRunner().invoke(ctl.main, ["doctor", "--json"], env=environ)
        found = {each["name"]: each for each in json.loads(result.output)}
        assert result.exit_code == 0
        assert found["pool room"]["verdict"] == "ok"

    def test_flags_are_those_of_the_daemon(self, environ: dict[str, str], tmp_path: Path) -> None:
        file = tmp_path / "kvtierd.toml"
        file.write_text(f'[disk]\npaths = ["{tmp_path}/missing"]\nsize = "64MiB"\n')
        line = ["doctor", f"--config={file}", "--pool-size=1PiB"]
        result = CliRunner().invoke(ctl.main, line, env=environ)
        assert result.exit_code == 1
        assert f"FAILURE  disk {tmp_path / 'missing'} (disk.paths = " in result.output
        assert "FAILURE  pool room (pool.size = 1024TiB)" in result.output
        result = CliRunner().invoke(ctl.main, ["doctor", "--pool-siz=1GiB"], env=environ)
        assert (result.exit_code, "the nearest known one is --pool-size" in result.stderr) == (2, True)
        assert result.stderr.startswith("kvtierctl: ")

    def test_a_failure_is_its_status(self, environ: dict[str, str], tmp_path: Path) -> None:
        environ["KVTIER_DISK_PATHS"] = str(tmp_path / "missing")
        environ["KVTIER_DISK_SIZE"] = "64MiB"
        result = CliRunner().invoke(ctl.main, ["doctor"], env=environ)
        assert result.exit_code == 1
        assert f"FAILURE  disk {tmp_path / 'missing'} (disk.paths = " in result.output

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can look as another user")
    def test_root_looks_as_the_user_whose_the_pools_folder_is(
        self, environ: dict[str, str], shm_dir: Path, socket_dir: Path
    ) -> None:
        for folder in (shm_dir, socket_dir):
            os.chown(folder, NOBODY, -1)
        said = CliRunner().invoke(ctl.main, ["doctor"], env=environ)
        assert (said.exit_code, f"(uid {NOBODY})" in said.output) == (0, True), said.output
        said = CliRunner().invoke(ctl.main, ["doctor", "--user=root"], env=environ)
        assert (said.exit_code, "FAILURE  pool folder" in said.output) == (1, True)
        assert (os.geteuid(), os.getegid()) == (0, 0)
        said = CliRunner().invoke(ctl.main, ["doctor", "--user=no-such-user"], env=environ)
        assert said.exit_code == 2

    def test_a_configuration_that_cannot_be_used_is_another(self) -> None:
        result = CliRunner().invoke(ctl.main, ["doctor"], env={"KVTIER_POOL_SIZE": "much"})
        assert result.exit_code == 78
        assert "pool.size" in result.output
