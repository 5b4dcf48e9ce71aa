"""A disk that fails, fills up, slows down, hangs or is taken away costs its blocks, never a wrong byte or the
worker."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
from kvtierd.core.ids import PAGE_BYTES
from kvtierd.tiers.disk.slab import SLAB_NAME
from kvtierd.wire import worker_pb2 as wire
from kvtierd.workers.channel.status import StallDetector, StatusWord
from kvtierd.workers.disk.moving import WRITE_BYTES

from tests.integration.disk.conftest import ALSO_ENCRYPTED, NewFront
from tests.integration.disk.rig import MIB, Block, Front, Place

SIZE = 30_000


class TestErrors:
    def test_an_error_of_a_read_names_call_file_and_errno(self, front: Front):
        disk = front.write(front.store(Block(1, SIZE)))
        front.faults(read={"errno": "EIO"})
        finished, _ = front.read(*disk)
        assert (finished.failed, finished.corrupt, finished.moved_bytes) == ([0], [], 0)
        assert finished.error == f"reading from {front.slab} failed with EIO (Input/output error)"
        finished = front.check(*disk)
        assert (finished.failed, finished.corrupt) == ([0], [])
        assert "EIO" in finished.error
        front.faults()
        front.assert_reads_back(*disk)

    @pytest.mark.parametrize("code", ["EIO", "ENOSPC", "EROFS"])
    @pytest.mark.parametrize("where", ["write", "records"])
    def test_a_write_that_fails_leaves_nothing_ready(self, new_front: NewFront, where: str, code: str):
        front = new_front()
        front.start()
        kept = front.write(front.store(Block(1, SIZE)))
        front.faults(**{where: {"errno": code}})
        job, (lost,) = front.post_write([front.store(Block(2, SIZE))])
        finished = front.worker.wait(job)
        assert (finished.failed, finished.corrupt) == ([0], [])
        assert code in finished.error
        assert str(front.slab) in finished.error
        assert not front.is_ready(lost)
        front.faults()
        front.free("disk", lost)
        later = front.write(front.store(Block(3, SIZE)))
        front.assert_reads_back(*kept, *later)
        front = new_front()
        front.start()
        found = front.recovered([Block(1, SIZE), Block(3, SIZE)])
        assert len(found) == 2
        front.assert_reads_back(*found)

    def test_a_header_that_could_not_be_written_is_written_with_the_next_block(self, new_front: NewFront):
        front = new_front()
        front.start()
        front.faults(records={"errno": "EIO"})
        job, (lost,) = front.post_write([front.store(Block(1, SIZE))])
        assert "EIO" in front.worker.wait(job).error
        front.faults()
        front.free("disk", lost)
        front.write(front.store(Block(2, SIZE)))
        front = new_front()
        front.start()
        front.assert_reads_back(*front.recovered([Block(2, SIZE)]))

    def test_some_fail_and_the_others_do_not(self, new_front: NewFront):
        front = new_front(size_bytes=34 * MIB, pool_bytes=46 * MIB)
        front.start(threads=1, queue_depth=1)
        front.faults(write={"errno": "EIO", "every": 2})
        size = 900_000
        batch = WRITE_BYTES // (-(-size // PAGE_BYTES) * PAGE_BYTES)
        blocks = [Block(key, size) for key in range(batch + 3)]
        job, disk = front.post_write([front.store(block) for block in blocks])
        finished = front.worker.wait(job)
        assert finished.failed == [batch, batch + 1, batch + 2]
        assert [front.is_ready(place) for place in disk] == [True] * batch + [False] * 3
        front.faults()
        front.assert_reads_back(*disk[:batch])

    def test_a_slow_disk_is_only_slow(self, front: Front):
        front.faults(delay_s=0.2)
        job, disk = front.post_write([front.store(Block(1, SIZE))])
        finished = front.worker.wait(job)
        assert finished.failed == []
        assert finished.busy_ns > 0.6e9  # records, data, records
        front.assert_reads_back(*disk)

    def test_a_file_that_was_cut_behind_its_back_fails_reads(self, front: Front):
        first, *_, last = front.write(*[front.store(Block(key, SIZE)) for key in range(30)])
        os.truncate(front.slab, int(last.slots[0]) * PAGE_BYTES)
        finished, host = front.read(first, last)
        assert (finished.failed, finished.corrupt) == ([1], [])
        assert "EIO" in finished.error
        assert front.on_host(host[0])


class TestHangs:
    def test_the_status_page_tells_of_a_disk_that_hangs_and_a_new_worker_goes_on(self, front: Front):
        kept = front.write(*[front.store(Block(key, SIZE)) for key in range(3)])
        front.hold()
        _, (lost,) = front.post_write([front.store(Block(9, SIZE))])
        front.wait_until_held()
        stalls = StallDetector(5.0)
        words = list(front.worker.status.read())
        words[StatusWord.HEARTBEAT] = 0  # it goes on
        assert stalls.observe(tuple(words), 1.0) is None
        assert "the disk has not answered" in str(stalls.observe(tuple(words), 6.0))
        front.worker.kill()
        front.release()
        ready = front.respawn()
        assert ready.cold_reason == ""
        assert all(front.is_ready(place) for place in kept)
        front.free("disk", lost)
        front.assert_reads_back(*kept, *front.write(front.store(Block(10, SIZE))))

    def test_an_idle_worker_waits_for_nothing(self, front: Front):
        front.write(front.store(Block(1, SIZE)))
        assert front.worker.stop() == 0
        words = front.worker.status.read()
        assert words[StatusWord.IO_0 : StatusWord.IO_7 + 1] == (0,) * 8

    @ALSO_ENCRYPTED
    def test_a_killed_worker_in_the_middle_of_many_writes(self, new_front: NewFront):
        """Ten times, at whatever moment: what was reported is there, in this boot and in the next."""
        front = new_front(size_bytes=34 * MIB, pool_bytes=34 * MIB)
        front.start()
        reported: list[Place] = []
        blocks: list[Block] = []
        for round_number in range(10):
            new = [Block(100 * round_number + key, 100_000) for key in range(24)]
            hosts = [front.store(block) for block in new]
            jobs = [front.post_write(hosts[first : first + 3]) for first in range(0, 24, 3)]
            front.worker.wait(jobs[round_number % 8][0])
            front.worker.kill()
            for job, places in jobs:
                if job in front.worker.finished:
                    assert front.worker.finished[job].failed == []
                    reported += places
                else:
                    for place in places:
                        front.free("disk", place)
            for host in hosts:
                front.free("host", host)
            blocks += new
            front.respawn()
            front.assert_reads_back(*reported[-24:])
        front = new_front(size_bytes=34 * MIB, pool_bytes=34 * MIB)
        front.start()
        found = front.recovered(blocks)
        assert {place.block for place in found} >= {place.block for place in reported}
        for first in range(0, len(found), 20):
            front.assert_reads_back(*found[first : first + 20])


class TestDamage:
    @ALSO_ENCRYPTED
    def test_damaged_records_are_misses_and_the_others_are_found(self, new_front: NewFront):
        front = new_front()
        front.start()
        blocks = [Block(key, 4_000) for key in range(100)]  # 32 records to a page
        disk = front.write(*[front.store(block) for block in blocks])
        pages = front.image.records.record_pages(np.concatenate([place.slots for place in disk])).tolist()
        front.worker.stop()
        rng = np.random.default_rng(5)
        with front.slab.open("r+b") as file:
            file.seek(pages[0])
            file.write(rng.integers(0, 256, PAGE_BYTES, np.uint8).tobytes())
            file.seek(pages[1] + 128 * 3 + 50)
            file.write(b"torn!")
        front = new_front()
        assert front.start().cold_reason == ""
        found = front.recovered(blocks)
        assert {place.block for place in found} == set(blocks[32:35] + blocks[36:])
        front.assert_reads_back(*found)
        front.assert_reads_back(*front.write(front.store(Block(1_000, 4_000))))

    def test_a_damaged_extent_header_costs_its_extent(self, new_front: NewFront):
        front = new_front()
        front.start()
        blocks = [Block(1, SIZE), Block(2, 50_000)]
        disk = front.write(*[front.store(block) for block in blocks])
        front.worker.stop()
        extents = front.image.geometry.extent_of(np.concatenate([place.slots for place in disk]))
        assert len(set(extents.tolist())) == 2
        with front.slab.open("r+b") as file:
            file.seek(2 * MIB + int(extents[0]) * MIB + 24)
            file.write(b"\xff\xff")
        front = new_front()
        assert front.start().cold_reason == ""
        found = front.recovered(blocks)
        assert [place.block for place in found] == blocks[1:]
        front.assert_reads_back(*found, *front.write(front.store(Block(3, SIZE))))

    @pytest.mark.parametrize("size_bytes", [9 * MIB, 12 * MIB])
    def test_another_size_is_a_cold_start(self, new_front: NewFront, size_bytes: int):
        front = new_front()
        front.start()
        front.write(*[front.store(Block(key, SIZE)) for key in range(3)])
        front = new_front(size_bytes=size_bytes)
        assert "disk.size changed" in front.start().cold_reason
        assert front.recovery.blocks == 0
        assert front.slab.stat().st_size == size_bytes
        front.assert_reads_back(*front.write(front.store(Block(1, SIZE))))

    def test_a_truncated_file_is_a_cold_start(self, new_front: NewFront):
        front = new_front()
        front.start()
        front.write(front.store(Block(1, SIZE)))
        front.worker.stop()
        os.truncate(front.slab, 3 * MIB)
        front = new_front()
        assert "was cut or extended" in front.start().cold_reason
        assert front.recovery.blocks == 0
        front.assert_reads_back(*front.write(front.store(Block(1, SIZE))))

    def test_something_foreign_in_its_place_is_never_overwritten(self, new_front: NewFront, folder: Path):
        (folder / SLAB_NAME).write_bytes(b"not a slab" * 1000)
        (folder / SLAB_NAME).chmod(0o600)
        front = new_front()
        unusable = front.spawn(load=True).unusable()
        assert (unusable.field, unusable.value) == ("disk.paths", str(folder))
        assert "is not a slab" in unusable.message
        assert (folder / SLAB_NAME).read_bytes() == b"not a slab" * 1000

    @pytest.mark.parametrize("what", ["gone", "foreign", "another slab", "cut"])
    def test_a_later_worker_refuses_another_file(self, front: Front, folder: Path, what: str):
        front.write(front.store(Block(1, SIZE)))
        front.worker.stop()
        if what == "gone":
            front.slab.unlink()
        elif what == "foreign":
            front.slab.unlink()
            front.slab.write_bytes(b"not a slab" * 1000)
            front.slab.chmod(0o600)
        elif what == "another slab":
            front.slab.unlink()
            other = folder / "other"
            other.mkdir()
            with Front(other, size_bytes=12 * MIB) as another:
                another.start()
                another.worker.stop()
            (other / SLAB_NAME).rename(front.slab)
        else:
            os.truncate(front.slab, 5 * MIB)
        before = front.slab.read_bytes() if front.slab.exists() else None
        image = front.image.records.scan()
        assert "slab" in front.spawn(load=False).unusable().message
        assert (front.slab.read_bytes() if front.slab.exists() else None) == before
        assert front.image.records.scan()["generations"].tolist() == image["generations"].tolist()


class TestLock:
    def test_a_second_worker_waits_for_the_first_to_be_gone(self, new_front: NewFront):
        """It holds the lock for as long as the disk has something of it to do."""
        front = new_front()
        front.start()
        old = front.worker
        os.kill(old.process.pid, signal.SIGSTOP)
        front._worker = None
        new = front.spawn(load=False)
        assert not new.channel.wait(1.0), "it did not wait"
        os.kill(old.process.pid, signal.SIGKILL)
        old.process.wait()
        old.channel.close()
        new.ready()

    def test_a_directory_is_one_daemons_at_a_time(self, front: Front, folder: Path):
        with Front(folder) as second:
            unusable = second.spawn(load=True).unusable()
        assert f"process {front.worker.process.pid}" in unusable.message
        front.assert_reads_back(*front.write(front.store(Block(1, SIZE))))


def in_small_tmpfs(folder: Path, mebibytes: int, then: str = "true") -> list[str]:
    """Words before a command: it runs with a tmpfs of its own at `folder`, which ends with it. `then`: a
    shell command that is run there first. Fails if this machine does not let us mount one."""
    unshare = shutil.which("unshare")
    assert unshare, "unshare (util-linux) is needed to mount a small file system"
    root = [] if os.geteuid() == 0 else ["--map-root-user"]
    mount = f'mount -t tmpfs -o size={mebibytes}m,mode=0700 kvtier-test "$0" && {then} && exec "$@"'
    return [unshare, "--mount", *root, "sh", "-c", mount, str(folder)]


class TestSmallFileSystem:
    def test_a_slab_that_does_not_fit_is_refused_with_both_sizes(self, new_front: NewFront, folder: Path):
        front = new_front()
        unusable = front.spawn(load=True, wrap=in_small_tmpfs(folder, 8)).unusable()
        assert unusable.field == "disk.size"
        for part in ("10.0 MiB", "8.0 MiB free of 8.0 MiB", str(folder), "Lower disk.size"):
            assert part in unusable.message

    def test_a_read_only_file_system_is_refused(self, new_front: NewFront, folder: Path):
        front = new_front()
        wrap = in_small_tmpfs(folder, 20, f"mount -o remount,ro kvtier-test {folder}")
        unusable = front.spawn(load=True, wrap=wrap).unusable()
        assert unusable.field == "disk.paths"
        assert "Read-only file system" in unusable.message

    def test_a_file_system_that_is_full_fails_writes_only(self, new_front: NewFront, folder: Path):
        """The slab has lost its room, as where none can be preallocated."""
        front = new_front()
        front.start(wrap=in_small_tmpfs(folder, 12))
        kept = front.write(*[front.store(Block(key, SIZE)) for key in range(3)])
        seen = Path(f"/proc/{front.worker.process.pid}/root", *folder.parts[1:])
        punch = ["fallocate", "--punch-hole", "--offset", str(4 * MIB), "--length", str(6 * MIB)]
        subprocess.run([*punch, str(seen / SLAB_NAME)], check=True)
        fill(seen / "somebody")
        big = [front.store(Block(100 + key, 1_000_000)) for key in range(6)]
        job, disk = front.post_write(big)
        finished = front.worker.wait(job)
        assert "ENOSPC (No space left on device)" in finished.error
        assert finished.failed
        lost = set(finished.failed)
        assert [front.is_ready(place) for place in disk] == [row not in lost for row in range(6)]
        front.assert_reads_back(*kept)
        (seen / "somebody").unlink()
        job = front.post(wire.DISK_WRITE, [disk[row] for row in lost], [big[row] for row in lost])
        assert front.worker.wait(job).failed == []
        front.assert_reads_back(*disk)


def fill(path: Path) -> None:
    """Writes until the file system is full."""
    with path.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(PAGE_BYTES)):
                pass
        except OSError:
            pass
