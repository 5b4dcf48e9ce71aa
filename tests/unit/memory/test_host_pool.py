"""Opening a pool: warm or cold and why, who may, and what is refused with nothing changed."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from kvtierd.memory import host_pool as host_pool_module
from kvtierd.memory.errors import PoolLocked, PoolRefused, PoolTooLarge
from kvtierd.memory.host_pool import HostPool
from kvtierd.memory.pool_file import (
    HEADER_AREA_BYTES,
    default_extent_bytes,
    geometry_for,
    map_pool,
)
from kvtierd.memory.populating import populate_range

from tests.unit.memory.plain_pool import MIB, SPACE, hashes, read_header, u64

SIZE = 6 * MIB
KEY = hashes(1)


@contextmanager
def opened(path: Path | None, size: int = SIZE, extent_bytes: int | None = MIB) -> Iterator[HostPool]:
    with HostPool.open(path, size, extent_bytes, lock_timeout_s=10) as pool:
        yield pool


@pytest.fixture
def path(shm_dir: Path) -> Path:
    return shm_dir / "pool"


@pytest.fixture
def filled(path: Path) -> Path:
    """A pool with one block."""
    with opened(path) as pool:
        pool.records.format_extent(0, 4096)
        slots = pool.geometry.slots_of(0, 4096)[:1]
        writer = pool.register_writer(os.getpid())
        pool.records.open(slots, writer, pool.boot_nonce, 1, SPACE, 0, 0, 1, KEY, 4096)
        pool.records.commit(slots, u64(5))
    return path


def cold_reason(path: Path, size: int = SIZE, extent_bytes: int | None = MIB) -> str:
    with opened(path, size, extent_bytes) as pool:
        assert not pool.start.warm
        assert pool.start.recovered_blocks == 0
        assert pool.recovered.extents == ()
        assert not pool.array[pool.geometry.first_extent_offset :].any()
        reason = pool.start.cold_reason
    with opened(path, size, extent_bytes) as pool:
        assert pool.start.warm, "the pool that was made is good"
    return reason


# --- warm and cold -----------------------------------------------------------------------------------------


def test_a_new_pool_is_private_allocated_and_cold(path: Path) -> None:
    with opened(path) as pool:
        assert pool.start.cold_reason == "there was no pool yet"
        assert not pool.start.warm
        assert pool.geometry.extents == 4
        assert len(pool.array) == 6 * MIB
        assert pool.boot_nonce != 0
        found = path.stat()
        assert found.st_mode & 0o777 == 0o600
        assert found.st_blocks * 512 >= found.st_size == SIZE


def test_a_pool_is_found_again_warm_with_its_blocks(filled: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), opened(filled) as pool:
        assert pool.start.warm
        assert pool.start.cold_reason == ""
        assert (pool.start.recovered_blocks, pool.start.recovered_bytes) == (1, 4096)
        assert np.array_equal(pool.recovered.hashes, KEY)
        assert pool.recovered.clock == 5
    assert "warm start, 1 blocks" in caplog.text


def test_every_boot_has_its_own_nonce_and_is_counted(path: Path) -> None:
    nonces = []
    for boots in (1, 2, 3):
        with opened(path) as pool:
            nonces.append(pool.boot_nonce)
            assert (pool.records.boots, read_header(pool.array).boot_nonce) == (boots, pool.boot_nonce)
    assert len(set(nonces)) == 3


def test_no_preference_for_extents_keeps_those_of_the_pool_found(filled: Path) -> None:
    with opened(filled, extent_bytes=None) as pool:
        assert pool.start.warm
        assert pool.geometry.extent_bytes == MIB


def test_a_pool_without_a_path_lives_in_memory(shm_dir: Path) -> None:
    with opened(None) as pool:
        assert pool.start.cold_reason == "the pool is not persistent"
        assert len(pool.array) == os.fstat(pool.fd).st_size == SIZE
    assert list(shm_dir.iterdir()) == []


def test_another_size_or_extent_is_a_cold_start_that_names_both(filled: Path) -> None:
    assert cold_reason(filled, size=7 * MIB) == (
        "pool.size changed: the pool has 4 extents of 1.0 MiB, 7.0 MiB would be 5"
    )
    assert cold_reason(filled, size=7 * MIB, extent_bytes=2 * MIB) == (
        "pool.extent_bytes changed from 1048576 to 2097152"
    )


def test_a_size_that_has_no_room_for_the_old_extents_is_a_cold_start(filled: Path) -> None:
    with opened(filled, size=66 * MIB, extent_bytes=64 * MIB):
        pass
    assert "pool.size changed" in cold_reason(filled, size=SIZE, extent_bytes=None)


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def test_a_pool_of_another_format_is_a_cold_start(filled: Path) -> None:
    overwrite(filled, 7, b"2")
    assert cold_reason(filled) == "the pool has format '2', this daemon reads format '1'"


def test_a_damaged_header_is_a_cold_start(filled: Path) -> None:
    overwrite(filled, 33, b"\1")
    assert cold_reason(filled) == "the pool's header is damaged: its checksum does not fit"


def test_a_truncated_pool_is_a_cold_start(filled: Path) -> None:
    os.truncate(filled, 5 * MIB)
    assert "was cut or extended: 5242880 bytes" in cold_reason(filled)
    os.truncate(filled, 20)
    assert cold_reason(filled) == "there was no pool yet"


def test_a_half_made_pool_is_recognised(filled: Path) -> None:
    overwrite(filled, 0, b"KVTIERP0")
    assert cold_reason(filled) == "an earlier start was interrupted while it created the pool"


def test_a_pool_made_by_another_configuration_is_a_cold_start(
    filled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtierd.memory.pool_file.config_digest", lambda geometry: b"another digest.."[:16])
    assert cold_reason(filled) == "the configuration that the pool was made with differs from this one"


# --- refused, with nothing changed -------------------------------------------------------------------------


def assert_refused(path: Path, match: str, error: type[Exception] = PoolRefused, size: int = SIZE) -> None:
    with pytest.raises(error, match=match) as caught:
        HostPool.open(path, size, MIB, lock_timeout_s=0.05)
    assert str(path) in str(caught.value) or str(path.parent) in str(caught.value)


def test_a_file_that_is_no_pool_is_never_overwritten(path: Path) -> None:
    path.write_bytes(b"somebody's thesis" * 1000)
    path.chmod(0o600)
    assert_refused(path, "holds something that is not a pool")
    assert path.read_bytes() == b"somebody's thesis" * 1000


@pytest.mark.parametrize("length", [1, HEADER_AREA_BYTES])
def test_what_a_start_left_that_was_killed_before_its_first_byte(path: Path, length: int) -> None:
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, length)
    path.chmod(0o600)
    assert cold_reason(path) == "there was no pool yet"


def test_zeros_of_somebody_else_are_never_overwritten(path: Path) -> None:
    path.write_bytes(bytes(HEADER_AREA_BYTES + 1))
    path.chmod(0o600)
    assert_refused(path, "holds something that is not a pool")


def test_a_symbolic_link_is_refused(filled: Path) -> None:
    link = filled.with_name("link")
    link.symlink_to(filled)
    assert_refused(link, "symbolic link")


def test_a_hard_link_is_refused(filled: Path) -> None:
    os.link(filled, filled.with_name("other"))
    assert_refused(filled, "2 hard links")


def test_a_pool_that_others_can_open_is_refused(filled: Path) -> None:
    filled.chmod(0o660)
    assert_refused(filled, "mode 0660")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_pool_of_another_user_is_refused(filled: Path) -> None:
    os.chown(filled, 12345, -1)
    assert_refused(filled, "belongs to uid 12345")


def test_a_folder_a_pipe_and_a_missing_folder_are_refused(shm_dir: Path) -> None:
    assert_refused(shm_dir, "it is a folder")
    os.mkfifo(shm_dir / "pipe", 0o600)
    assert_refused(shm_dir / "pipe", "not a regular file")
    assert_refused(shm_dir / "missing" / "pool", "its folder does not exist")


def test_a_pool_larger_than_its_file_system_names_both_sizes_and_keeps_the_old_one(filled: Path) -> None:
    before = filled.read_bytes()
    system = os.statvfs(filled)
    size = system.f_blocks * system.f_frsize + SIZE
    assert_refused(
        filled, r"a pool of .* GiB does not fit .*: .* free of .*Lower pool.size", PoolTooLarge, size
    )
    assert filled.read_bytes() == before


def test_a_pool_too_large_leaves_no_file_behind(path: Path) -> None:
    system = os.statvfs(path.parent)
    assert_refused(path, "does not fit", PoolTooLarge, system.f_blocks * system.f_frsize + SIZE)
    assert not path.exists()


def test_space_that_runs_out_while_the_pool_is_made_is_told_and_remade_later(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr("kvtierd.memory.pool_file.os.posix_fallocate", full)
        assert_refused(path, "the space ran out while it was made", PoolTooLarge)
    with opened(path) as pool:
        assert not pool.start.warm


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.ENOMEM])
def test_holes_that_cannot_be_filled_are_told_and_the_pool_is_kept(
    filled: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(number, os.strerror(number))

    last = SIZE - MIB
    subprocess.run(["fallocate", "-p", "-o", str(last), "-l", str(MIB), str(filled)], check=True)
    before = filled.read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr("kvtierd.memory.pool_file.os.posix_fallocate", full)
        told = rf"pool.path {filled}: 1.0 MiB of the pool's 6.0 MiB have no memory.*Free as much in"
        assert_refused(filled, told, PoolTooLarge)
    assert filled.read_bytes() == before
    with opened(filled) as pool:
        assert pool.start.warm


@pytest.mark.parametrize(
    ("size", "extent_bytes", "match"),
    [
        (2 * MIB, MIB, r"pool.size is 2.0 MiB; expected at least 3.0 MiB"),
        (1 << 60, MIB, r"a pool is at most 16384.0 GiB"),
        (SIZE, 3 * MIB, r"pool.extent_bytes is 3145728; expected a power of two"),
        (SIZE, 4096, r"pool.extent_bytes is 4096; expected a power of two"),
    ],
)
def test_sizes_out_of_range_are_named(path: Path, size: int, extent_bytes: int, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        HostPool.open(path, size, extent_bytes, lock_timeout_s=0.05)
    assert not path.exists()


@pytest.mark.parametrize("size", [3 * MIB, 64 * MIB, 1 << 30, 64 << 30, 1 << 40])
def test_the_default_extent_fits_the_pool(size: int) -> None:
    geometry = geometry_for(size, default_extent_bytes(size))
    assert 1 <= geometry.extents < 5000


# --- the lock -----------------------------------------------------------------------------------------------

HOLD = """
import sys
from pathlib import Path
from kvtierd.memory.host_pool import HostPool
pool = HostPool.open(Path(sys.argv[1]), int(sys.argv[2]), lock_timeout_s=5)
print("open", flush=True)
sys.stdin.read()
"""


@contextmanager
def holder(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the pool open until its standard input is closed."""
    command = [sys.executable, "-c", HOLD, str(path), str(SIZE)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        try:
            yield process
        finally:
            process.kill()


def test_a_second_owner_is_refused_and_told_who_has_it(path: Path) -> None:
    with holder(path) as process:
        with pytest.raises(PoolLocked, match=f"{path} is in use by process {process.pid}") as caught:
            HostPool.open(path, SIZE, lock_timeout_s=0.05)
        assert caught.value.pid == process.pid
        assert caught.value.path == path


def test_a_successor_waits_for_the_owner_to_go(path: Path) -> None:
    with holder(path) as process:
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(PoolLocked):
            HostPool.open(path, SIZE, lock_timeout_s=0.1)
        process.send_signal(signal.SIGCONT)
        assert process.stdin is not None
        process.stdin.close()  # it is on its way out
        with HostPool.open(path, SIZE, lock_timeout_s=30) as pool:
            assert pool.start.warm


def test_a_holder_that_wrote_no_header_is_found_in_the_list_of_locks(path: Path) -> None:
    path.touch(mode=0o600)
    with path.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(PoolLocked) as caught:
            HostPool.open(path, SIZE, lock_timeout_s=0.05)
    assert caught.value.pids == (os.getpid(),)


def test_closing_gives_the_pool_up_but_a_mapping_keeps_it(path: Path) -> None:
    with opened(path) as pool:
        mapping = pool.array
    with pytest.raises(PoolLocked):
        HostPool.open(path, SIZE, lock_timeout_s=0.05)
    del mapping
    with opened(path):
        pass


# --- populating, quarantine ---------------------------------------------------------------------------------


def test_populating_fills_holes_and_touches_no_byte(path: Path) -> None:
    with path.open("w+b") as file:
        file.truncate(4 * MIB)
        sparse = map_pool(file.fileno(), 4 * MIB)
        sparse[-1] = 7
        before = sparse.copy()
        populate_range(file.fileno(), sparse, 0, threads=2)
        assert os.fstat(file.fileno()).st_blocks * 512 == 4 * MIB
        assert np.array_equal(sparse, before)


def test_slots_of_a_living_writer_wait_in_quarantine_until_it_is_gone(filled: Path) -> None:
    # A writer that closed its descriptor but still lives: a device may still copy for it.
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as writer:
        with opened(filled) as pool:
            slots = pool.geometry.slots_of(0, 4096)[3:5]
            number = pool.register_writer(writer.pid)
            pool.records.open(slots, number, pool.boot_nonce, 2, SPACE, 0, 0, 1, hashes(2, 3), 4096)
        with opened(filled) as pool:
            assert pool.start.quarantined_slots == pool.quarantined_slots == 2
            assert pool.recovered.quarantined.tolist() == slots.tolist()
            assert pool.register_writer(os.getpid()) != number, "its id is still taken"
            assert pool.retry_quarantine().tolist() == []
            writer.kill()
            writer.wait()
            assert pool.retry_quarantine().tolist() == slots.tolist()
            assert pool.retry_quarantine().tolist() == []
            assert pool.quarantined_slots == 0
            assert len(pool.records.scan()["slots"]) == 1


def test_slots_of_a_writer_that_is_gone_are_free_at_once(filled: Path) -> None:
    writer = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        with opened(filled) as pool:
            slots = pool.geometry.slots_of(0, 4096)[3:5]
            number = pool.register_writer(writer.pid)
            pool.records.open(slots, number, pool.boot_nonce, 2, SPACE, 0, 0, 1, hashes(2, 3), 4096)
    finally:
        writer.communicate()
    with opened(filled) as pool:
        assert (pool.start.quarantined_slots, pool.start.discarded_slots, pool.start.recovered_blocks) == (
            0,
            2,
            1,
        )


def test_slots_that_were_set_aside_stay_so_until_a_cold_start(filled: Path) -> None:
    with opened(filled) as pool:
        [bad] = pool.recovered.slots.tolist()
        pool.set_aside(pool.recovered.slots)
    for _ in range(2):
        with opened(filled) as pool:
            assert (pool.start.recovered_blocks, pool.start.discarded_slots) == (0, 0)
            assert pool.recovered.corrupt.tolist() == [bad]
            assert pool.quarantined_slots == 0, "nobody's end is waited for"
            assert pool.retry_quarantine().tolist() == []
    assert cold_reason(filled, SIZE + MIB)
    with opened(filled, SIZE + MIB) as pool:
        assert len(pool.recovered.corrupt) == 0


def test_a_slot_is_set_aside_whatever_its_record_says(filled: Path) -> None:
    with opened(filled) as pool:
        slots = pool.recovered.slots
        record = pool.geometry.first_extent_offset + 4096
        pool.array[record : record + 8] = 0xFF  # state, writer and generation
        pool.set_aside(slots)
    with opened(filled) as pool:
        assert pool.recovered.corrupt.tolist() == slots.tolist()


def test_a_failed_opening_keeps_neither_lock_nor_descriptor(
    filled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = []

    def broken(*_: object) -> None:
        failures.append("recovery failed")
        raise RuntimeError

    descriptors = set(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patched:
        patched.setattr(host_pool_module, "recover", broken)
        with suppress(RuntimeError):  # pytest.raises would keep the frames, and what they hold, alive
            HostPool.open(filled, SIZE, MIB, lock_timeout_s=0.05)
    assert failures
    assert set(os.listdir("/proc/self/fd")) == descriptors
    with opened(filled) as pool:
        assert pool.start.recovered_blocks == 1
