"""The slab file: what is refused, what is kept, what is never overwritten."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from kvtier_kernels import PoolRecords, format_pool, xxh3_64
from kvtierd.core.errors import Reason, Refusal
from kvtierd.memory.pool_file import config_digest, file_bytes
from kvtierd.tiers.disk import slab as slab_module
from kvtierd.tiers.disk.image import DiskImage, disk_geometry
from kvtierd.tiers.disk.slab import SLAB_NAME, ExtentHeaders, Slab, load

MIB = 1 << 20
SIZE = 6 * MIB


def open_slab(
    folder: Path, size_bytes: int = SIZE, *, create: bool = True, lock_timeout_s: float = 0.1
) -> Slab:
    return Slab.open(folder, size_bytes, MIB, create=create, lock_timeout_s=lock_timeout_s)


def header_page(size_bytes: int = SIZE) -> bytes:
    geometry = disk_geometry(size_bytes, MIB)
    image = np.zeros(file_bytes(geometry), np.uint8)
    format_pool(image, MIB, geometry.extents, config_digest(geometry))
    return image[:4096].tobytes()


def make(folder: Path) -> Path:
    """A slab that nobody has open."""
    slab = open_slab(folder)
    assert slab.make(header_page(), lambda: None)
    os.close(slab.fd)
    return slab.path


def refusal(folder: Path, **arguments: object) -> Refusal:
    with pytest.raises(Refusal) as caught:
        open_slab(folder, **arguments)  # type: ignore[arg-type]
    assert caught.value.reason is Reason.DEVICE_UNAVAILABLE
    return caught.value


class TestRefused:
    def test_a_directory_that_is_not_there(self, tmp_path: Path):
        refused = refusal(tmp_path / "nowhere")
        assert (refused.field, refused.value) == ("disk.paths", str(tmp_path / "nowhere"))
        assert "create it" in refused.message

    def test_a_file_for_a_directory(self, tmp_path: Path):
        (tmp_path / "file").touch()
        assert "is not a directory" in refusal(tmp_path / "file").message

    def test_a_path_through_a_file(self, tmp_path: Path):
        (tmp_path / "file").touch()
        assert "ENOTDIR" in refusal(tmp_path / "file" / "more").message

    @pytest.mark.parametrize("mode", [0o640, 0o604, 0o666])
    def test_a_file_that_others_may_read_or_write(self, tmp_path: Path, mode: int):
        make(tmp_path).chmod(mode)
        message = refusal(tmp_path).message
        assert f"{mode:04o}" in message
        assert "chmod 600" in message

    def test_a_file_of_somebody_else(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        make(tmp_path)
        monkeypatch.setattr("kvtierd.memory.pool_file.os.geteuid", lambda: 4711)
        assert "this daemon runs as 4711" in refusal(tmp_path).message

    def test_a_symbolic_link(self, tmp_path: Path):
        (tmp_path / SLAB_NAME).symlink_to(tmp_path / "elsewhere")
        assert "symbolic link" in refusal(tmp_path).message
        assert not (tmp_path / "elsewhere").exists()

    def test_a_file_with_another_name(self, tmp_path: Path):
        os.link(make(tmp_path), tmp_path / "second")
        assert "hard links" in refusal(tmp_path).message

    def test_a_pipe(self, tmp_path: Path):
        os.mkfifo(tmp_path / SLAB_NAME, 0o600)
        assert "not a regular file" in refusal(tmp_path).message

    def test_a_slab_that_another_has_locked(self, tmp_path: Path):
        with make(tmp_path).open("r+b") as other:
            fcntl.flock(other, fcntl.LOCK_EX)
            message = refusal(tmp_path).message
        assert f"process {os.getpid()}" in message
        assert "disk.paths of its own" in message
        os.close(open_slab(tmp_path).fd)

    @pytest.mark.parametrize("content", [b"my thesis", b"\0" * 5000 + b"!", b"KVTIERX1" * 1000])
    def test_a_file_that_is_no_slab_is_never_overwritten(self, tmp_path: Path, content: bytes):
        path = tmp_path / SLAB_NAME
        path.write_bytes(content)
        path.chmod(0o600)
        refused = refusal(tmp_path)
        assert "is not a slab" in refused.message
        assert path.read_bytes() == content

    def test_a_later_worker_makes_no_file(self, tmp_path: Path):
        assert "it is gone" in refusal(tmp_path, create=False).message
        assert list(tmp_path.iterdir()) == []

    def test_more_than_fits_with_both_sizes_and_no_trace(self, tmp_path: Path):
        system = os.statvfs(tmp_path)
        size = system.f_blocks * system.f_frsize + (1 << 40)
        slab = Slab.open(tmp_path, size, 1 << 30, create=True)
        with pytest.raises(Refusal) as caught:
            slab.make(header_page(), lambda: None)
        os.close(slab.fd)
        assert caught.value.field == "disk.size"
        for part in (" free of ", "does not fit", "Lower disk.size"):
            assert part in caught.value.message
        assert list(tmp_path.iterdir()) == []

    def test_more_than_fits_leaves_an_older_slab_as_it_is(self, tmp_path: Path):
        before = make(tmp_path).read_bytes()
        slab = Slab.open(tmp_path, 1 << 43, 1 << 30, create=True)
        with pytest.raises(Refusal):
            slab.make(header_page(), lambda: None)
        os.close(slab.fd)
        assert slab.path.read_bytes() == before

    @pytest.mark.parametrize(
        ("size", "extent", "field"), [(SIZE, 3 << 20, "disk.extent_size"), (MIB, MIB, "disk.size")]
    )
    def test_sizes_out_of_range(self, tmp_path: Path, size: int, extent: int, field: str):
        with pytest.raises(ValueError, match=field):
            Slab.open(tmp_path, size, extent, create=True)


class TestKept:
    def test_what_was_made_is_kept_at_its_full_length(self, tmp_path: Path):
        path = make(tmp_path)
        assert path.stat().st_size == file_bytes(disk_geometry(SIZE, MIB)) == SIZE
        assert path.stat().st_blocks * 512 >= SIZE
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.read_bytes() == header_page().ljust(SIZE, b"\0")
        slab = open_slab(tmp_path)
        assert slab.reason_to_remake() == ""
        assert slab.allocate()
        os.close(slab.fd)

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            (lambda path: os.truncate(path, SIZE - 4096), "was cut or extended"),
            (lambda path: os.truncate(path, 4096), "was cut or extended"),
            (lambda path: os.truncate(path, 10), "there was no slab yet"),
            (lambda path: os.truncate(path, 0), "there was no slab yet"),
            (lambda path: patch(path, 0, b"KVTIERP0"), "interrupted while it created the slab"),
            (lambda path: patch(path, 0, b"KVTIERP7"), "the slab has format '7'"),
            (lambda path: patch(path, 24, b"\x01"), "the slab's header is damaged"),
            (lambda path: patch_header(path, 40, b"another config.."), "differs from this one"),
        ],
    )
    def test_another_file_is_a_cold_start_with_a_reason(
        self, tmp_path: Path, change: Callable[[Path], None], reason: str
    ):
        change(make(tmp_path))
        slab = open_slab(tmp_path)
        assert reason in slab.reason_to_remake()
        slab.make(header_page(), lambda: None)
        assert slab.reason_to_remake() == ""
        assert slab.path.read_bytes() == header_page().ljust(SIZE, b"\0")
        os.close(slab.fd)

    def test_another_size_is_a_cold_start_that_names_the_setting(self, tmp_path: Path):
        make(tmp_path)
        slab = open_slab(tmp_path, SIZE + MIB)
        assert slab.reason_to_remake().startswith("disk.size changed: the slab has 4 extents")
        os.close(slab.fd)

    def test_another_extent_size_is_a_cold_start_that_names_the_setting(self, tmp_path: Path):
        make(tmp_path)
        slab = Slab.open(tmp_path, SIZE, 2 * MIB, create=True)
        assert slab.reason_to_remake().startswith("disk.extent_size changed")
        os.close(slab.fd)

    def test_a_slab_is_made_over_an_older_one_that_was_in_use(self, tmp_path: Path):
        path = make(tmp_path)
        patch(path, 2 * MIB, b"KVTIERX1")
        slab = open_slab(tmp_path, SIZE + MIB)
        slab.make(header_page(SIZE + MIB), lambda: None)
        assert path.read_bytes() == header_page(SIZE + MIB).ljust(SIZE + MIB, b"\0")
        os.close(slab.fd)


class TestWithoutPreallocation:
    @pytest.fixture(autouse=True)
    def no_fallocate(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(slab_module, "_fallocate", lambda fd, length: False)

    def test_it_goes_on_with_holes_and_says_so(self, tmp_path: Path):
        slab = open_slab(tmp_path)
        assert not slab.make(header_page(), lambda: None)
        assert os.fstat(slab.fd).st_size == SIZE
        assert slab.reason_to_remake() == ""
        assert not slab.allocate()
        os.close(slab.fd)

    def test_room_that_is_not_there_is_refused_all_the_same(self, tmp_path: Path):
        slab = Slab.open(tmp_path, 1 << 43, 1 << 30, create=True)
        with pytest.raises(Refusal):
            slab.make(header_page(), lambda: None)
        os.close(slab.fd)


class TestFailures:
    @pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
    def test_space_that_runs_out_while_it_is_made_is_given_back(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
    ):
        def full(fd: int, length: int) -> bool:
            os.ftruncate(fd, length)
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(slab_module, "_fallocate", full)
        slab = open_slab(tmp_path)
        with pytest.raises(Refusal, match="the space ran out") as caught:
            slab.make(header_page(), lambda: None)
        os.close(slab.fd)
        assert caught.value.field == "disk.size"
        assert list(tmp_path.iterdir()) == []

    def test_an_old_file_with_holes_and_no_room_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        path = make(tmp_path)
        os.truncate(path, 4096)
        os.truncate(path, SIZE)

        def full(fd: int, length: int) -> bool:
            raise OSError(errno.ENOSPC, "full")

        monkeypatch.setattr(slab_module, "_fallocate", full)
        slab = open_slab(tmp_path)
        with pytest.raises(Refusal, match="does not fit"):
            slab.allocate()
        os.close(slab.fd)
        assert path.exists()

    def test_an_error_of_the_disk_names_the_file_and_the_errno(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        slab = open_slab(tmp_path)

        def failing(fd: int, length: int) -> bool:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(slab_module, "_fallocate", failing)
        with pytest.raises(Refusal, match="EIO") as caught:
            slab.make(header_page(), lambda: None)
        os.close(slab.fd)
        assert str(slab.path) in caught.value.message

    def test_one_extent_that_cannot_be_read_is_given_up_and_the_others_are_loaded(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        geometry = disk_geometry(SIZE, MIB)
        make(tmp_path)
        with open(tmp_path / SLAB_NAME, "r+b") as file:
            whole = np.frombuffer(bytearray(file.read()), np.uint8)
            records = PoolRecords(whole)
            for extent in range(geometry.extents):
                records.format_extent(extent, 50_000 + extent)
            file.seek(0)
            file.write(whole.tobytes())
        slab = open_slab(tmp_path)
        bad_header, (bad_table, _) = slab.extent_offset(1), records.table_range(2)
        really = Slab.read

        def read(self: Slab, into: memoryview, offset: int) -> None:
            if offset in (bad_header, bad_table):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            really(self, into, offset)

        monkeypatch.setattr(Slab, "read", read)
        image = np.full(SIZE, 0xA5, np.uint8)  # as a worker left it that was killed while it loaded
        headers = load(slab, image)
        os.close(slab.fd)
        found = PoolRecords(image)
        assert [found.extent_info(extent) is not None for extent in range(4)] == [True, False, False, True]
        assert sorted(headers.errors) == [1, 2]
        assert headers.get(1) is headers.get(2) is None
        assert headers.get(3) == image[slab.extent_offset(3) :][:64].tobytes()

    def test_a_disk_with_many_bad_places_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        size = (2 + ExtentHeaders.ERRORS_MAX + 1) * MIB
        slab = open_slab(tmp_path, size)
        slab.make(header_page(size), lambda: None)
        really = Slab.read

        def read(self: Slab, into: memoryview, offset: int) -> None:
            if offset:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            really(self, into, offset)

        monkeypatch.setattr(Slab, "read", read)
        with pytest.raises(Refusal, match="EIO"):
            load(slab, np.zeros(size, np.uint8))
        os.close(slab.fd)


class TestImage:
    def test_it_is_as_long_as_the_file_and_cannot_be_cut(self):
        with DiskImage(disk_geometry(SIZE, MIB)) as image:
            assert os.fstat(image.fd).st_size == image.bytes == SIZE
            assert os.fstat(image.fd).st_blocks == 0
            with pytest.raises(PermissionError):
                os.ftruncate(image.fd, 0)

    def test_a_large_one_costs_nothing(self):
        with DiskImage(disk_geometry(1 << 42)) as image:
            assert os.fstat(image.fd).st_blocks == 0

    def test_recovery_begins_a_boot(self):
        geometry = disk_geometry(SIZE, MIB)
        with DiskImage(geometry) as image:
            format_pool(image._array, MIB, geometry.extents, config_digest(geometry))
            found = image.recover(77)
            assert (found.blocks, image.records.boots) == (0, 1)

    def test_what_was_being_written_is_free_after_a_recovery_and_what_was_set_aside_is_not(self):
        geometry = disk_geometry(SIZE, MIB)
        with DiskImage(geometry) as image:
            format_pool(image._array, MIB, geometry.extents, config_digest(geometry))
            image.recover(77)
            image.records.format_extent(0, 50_000)
            slots = geometry.slots_of(0, 50_000)
            hashes = np.zeros((2, 32), np.uint8)
            image.records.open(slots[:2], 1, 77, 1, bytes(16), 0, 0, 1, hashes, 50_000)
            image.set_aside(slots[1:2])
            found = image.recover(78)
            assert found.discarded == 1
            assert found.recovered.corrupt.tolist() == slots[1:2].tolist()
            assert len(found.recovered.quarantined) == 0


def patch(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def patch_header(path: Path, offset: int, data: bytes) -> None:
    """With a checksum that fits."""
    patch(path, offset, data)
    patch(path, 56, struct.pack("<Q", xxh3_64(path.read_bytes()[:56])))
