"""Blocks go to a disk and come back, and nothing that is not theirs ever does."""

from __future__ import annotations

import numpy as np
import pytest
from kvtierd.core.ids import PAGE_BYTES
from kvtierd.wire import worker_pb2 as wire
from kvtierd.workers.disk.jobs import JOBS_MAX
from kvtierd.workers.disk.moving import WRITE_BYTES

from tests.integration.disk.conftest import ALSO_ENCRYPTED, NewFront
from tests.integration.disk.rig import MIB, Block, Front, Place

SIZE = 30_000


def flip(front: Front, offset: int) -> None:
    """One bit of the slab changes behind everybody's back."""
    with front.slab.open("r+b") as file:
        file.seek(offset)
        old = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([old ^ 1]))


class TestRoundTrips:
    @pytest.mark.parametrize("data_bytes", [1, 4_096, 4_097, 65_536, 100_001, MIB - 9_000])
    def test_a_block_that_was_written_is_read_back(self, front: Front, data_bytes: int):
        disk = front.write(front.store(Block(1, data_bytes)), front.store(Block(2, data_bytes)))
        front.assert_reads_back(*disk)

    @ALSO_ENCRYPTED
    def test_blocks_of_many_sizes_up_to_4_mib(self, new_front: NewFront):
        front = new_front(
            size_bytes=66 * MIB, extent_bytes=8 * MIB, pool_bytes=66 * MIB, pool_extent_bytes=8 * MIB
        )
        front.start()
        sizes = [4_096, 5_000, 65_536, 700_001, 4 * MIB]
        disk = [front.write(front.store(Block(key, size)))[0] for key, size in enumerate(sizes)]
        front.assert_reads_back(*disk)
        assert front.check(*disk).failed == []

    @ALSO_ENCRYPTED
    def test_a_job_larger_than_a_batch(self, new_front: NewFront):
        front = new_front(size_bytes=18 * MIB)
        front.start(queue_depth=1)
        disk = front.write(*[front.store(Block(key, 200_000)) for key in range(60)])
        for first in range(0, len(disk), 10):
            front.assert_reads_back(*disk[first : first + 10])

    @ALSO_ENCRYPTED
    def test_every_shard_of_a_block(self, front: Front):
        disk = front.write(front.store(Block(1, SIZE, world=2)), front.store(Block(2, SIZE, world=4)))
        front.assert_reads_back(*disk)

    @ALSO_ENCRYPTED
    def test_without_direct_input_and_output(self, new_front: NewFront):
        front = new_front()
        front.faults(no_direct=True)
        assert not front.start().direct_io
        disk = front.write(*[front.store(Block(key, SIZE)) for key in range(40)])
        front.assert_reads_back(*disk)

    def test_the_clock_of_the_job_is_the_recency_of_the_block(self, front: Front):
        front.write(front.store(Block(1, SIZE)))
        found = front.image.records.scan()
        assert found["clocks"].tolist() == [1000]

    def test_an_empty_job_is_reported(self, front: Front):
        assert front.worker.wait(front.post(wire.DISK_WRITE, [])).failed == []


class TestRestarts:
    @ALSO_ENCRYPTED
    def test_a_restart_finds_what_was_written(self, new_front: NewFront):
        front = new_front()
        assert front.start().cold_reason == "there was no slab yet"
        blocks = [Block(key, SIZE) for key in range(20)] + [Block(100, 200_000, world=2)]
        front.write(*[front.store(block) for block in blocks])
        assert front.worker.stop() == 0
        front = new_front()
        assert front.start().cold_reason == ""
        found = front.recovered(blocks)
        assert {place.block for place in found} == set(blocks)
        front.assert_reads_back(*found)

    def test_a_restart_finds_what_was_written_here_and_there_in_a_table(self, new_front: NewFront):
        front = new_front()
        front.start()
        host = [front.store(Block(key, 4_096)) for key in range(240)]  # an extent's records: 8 pages
        disk = [front.open("disk", place.block) for place in host]
        written = [0, 1, 70, 150, 239]
        job = front.post(wire.DISK_WRITE, [disk[i] for i in written], [host[i] for i in written])
        assert front.worker.wait(job).failed == []
        assert front.worker.stop() == 0
        front = new_front()
        front.start()
        found = front.recovered([place.block for place in host])
        assert {place.block.key for place in found} == set(written)
        front.assert_reads_back(*found)

    @ALSO_ENCRYPTED
    def test_slots_that_were_set_aside_stay_so(self, new_front: NewFront):
        front = new_front()
        front.start()
        blocks = [Block(key, SIZE) for key in range(3)]
        bad, *good = front.write(*[front.store(block) for block in blocks])
        front.set_aside(bad)
        assert front.worker.stop() == 0
        front = new_front()
        front.start()
        assert front.recovery.recovered.corrupt.tolist() == bad.slots.tolist()
        found = front.recovered(blocks)
        assert {place.block for place in found} == {place.block for place in good}

    def test_records_of_slots_that_are_there_no_more_are_left_out(self, new_front: NewFront):
        front = new_front()
        front.start()
        blocks = [Block(key, SIZE) for key in range(3)]
        bad, *_ = front.write(*[front.store(block) for block in blocks])
        front.image.set_aside(bad.slots)
        slots = np.array([5, bad.slots[0], 2**32 - 1], "<u4")
        front.worker.send(persist_records=wire.PersistRecords(slots=slots.tobytes()))
        assert front.worker.stop() == 0
        front = new_front()
        front.start()
        assert front.recovery.recovered.corrupt.tolist() == bad.slots.tolist()

    @ALSO_ENCRYPTED
    def test_what_was_freed_comes_back_until_the_file_was_told_everything(self, new_front: NewFront):
        front = new_front()
        front.start()
        blocks = [Block(key, SIZE) for key in range(3)]
        places = front.write(*[front.store(block) for block in blocks])
        front.free("disk", places[0])
        front.worker.kill()
        front = new_front()
        front.start()
        found = front.recovered(blocks)
        assert len(found) == 3, "a place that is not used again keeps its block in the file"
        gone, *kept = found
        front.image.records.free(gone.slots)
        front.worker.send(persist_all=wire.PersistAll(request=7))
        told = front.worker.receive()
        assert told is not None
        assert (told.records_persisted.request, told.records_persisted.error) == (7, "")
        front.worker.kill()
        front = new_front()
        front.start()
        assert {each.block for each in front.recovered(blocks)} == {each.block for each in kept}

    def test_slots_can_be_used_again(self, new_front: NewFront):
        """Also by another size, in an extent that was taken back."""
        front = new_front(size_bytes=3 * MIB)
        front.start()
        old = front.write(*[front.store(Block(key, 200_000)) for key in range(5)])
        for place in old:
            front.free("disk", place)
        young = [Block(10 + key, 200_000) for key in range(5)]
        for place in front.write(*[front.store(block) for block in young]):
            front.free("disk", place)
        front._free.clear()
        front._extents["disk"] = iter([0])
        other = [Block(20 + key, 90_000) for key in range(4)]
        front.assert_reads_back(*front.write(*[front.store(block) for block in other]))
        front = new_front(size_bytes=3 * MIB)
        front.start()
        found = front.recovered(other)
        assert {place.block for place in found} == set(other)
        front.assert_reads_back(*found)

    @ALSO_ENCRYPTED
    def test_a_later_worker_of_the_boot_keeps_the_image(self, front: Front):
        disk = front.write(*[front.store(Block(key, SIZE)) for key in range(3)])
        before = front.image.records.scan()
        assert front.worker.stop() == 0
        ready = front.respawn()
        assert (ready.cold_reason, ready.direct_io) == ("", True)
        after = front.image.records.scan()
        assert all(np.array_equal(before[name], after[name]) for name in before)
        front.assert_reads_back(*disk)
        front.assert_reads_back(*front.write(front.store(Block(9, 60_000))))


class TestStale:
    def test_a_block_that_had_gone_from_the_host_is_not_written(self, front: Front):
        gone, there = front.store(Block(1, SIZE)), front.store(Block(2, SIZE))
        front.free("host", gone)
        job, (gone_disk, there_disk) = front.post_write([gone, there])
        finished = front.worker.wait(job)
        assert (finished.failed, finished.corrupt, finished.error) == ([0], [], "")
        assert not front.is_ready(gone_disk)
        front.assert_reads_back(there_disk)

    @ALSO_ENCRYPTED
    def test_a_block_that_goes_from_the_host_while_it_is_written_is_not_ready(self, front: Front):
        gone, there = front.store(Block(1, SIZE)), front.store(Block(2, SIZE))
        front.hold()
        job, (gone_disk, there_disk) = front.post_write([gone, there])
        front.wait_until_held()
        front.free("host", gone)
        assert front.store(Block(3, SIZE)).slots.tolist() == gone.slots.tolist()
        front.release()
        finished = front.worker.wait(job)
        assert (finished.failed, finished.corrupt, finished.error) == ([0], [], "")
        assert not front.is_ready(gone_disk)
        front.assert_reads_back(there_disk)

    @ALSO_ENCRYPTED
    def test_a_block_that_had_gone_from_the_disk_is_not_read(self, front: Front):
        gone, there = front.write(front.store(Block(1, SIZE)), front.store(Block(2, SIZE)))
        front.free("disk", gone)
        finished, host = front.read(gone, there)
        assert (finished.failed, finished.corrupt, finished.error) == ([0], [], "")
        assert front.on_host(host[1])

    def test_nothing_is_read_into_a_slot_that_is_not_being_written(self, front: Front):
        (disk,) = front.write(front.store(Block(1, SIZE)))
        ready = front.store(Block(5, SIZE))
        finished = front.worker.wait(front.post(wire.DISK_READ, [disk], [ready]))
        assert (finished.failed, finished.corrupt) == ([0], [])
        assert front.on_host(ready)

    @pytest.mark.parametrize("kind", [wire.DISK_READ, wire.DISK_WRITE])
    def test_two_blocks_are_never_mixed_up(self, front: Front, kind: wire.DiskJobKind.ValueType):
        (disk,) = front.write(front.store(Block(1, SIZE)))
        if kind == wire.DISK_READ:
            other = front.open("host", Block(2, SIZE))
        else:
            disk, other = front.open("disk", Block(1, SIZE)), front.store(Block(2, SIZE))
        finished = front.worker.wait(front.post(kind, [disk], [other]))
        assert (finished.failed, finished.corrupt) == ([0], [])

    def test_pages_that_are_no_slots_fail(self, front: Front):
        front.write(front.store(Block(1, SIZE)))
        nowhere = Place(Block(1, SIZE), np.array([3, 2**32 - 1], np.uint32), np.array([1, 1], np.uint64))
        for kind, host in [(wire.DISK_CHECK, []), (wire.DISK_READ, [nowhere]), (wire.DISK_WRITE, [nowhere])]:
            assert front.worker.wait(front.post(kind, [nowhere], host)).failed == [0, 1]


class TestIntegrity:
    @pytest.mark.parametrize("at", [0, SIZE - 1])
    def test_data_that_rotted_on_the_disk_is_found(self, front: Front, at: int):
        disk = front.write(*[front.store(Block(key, SIZE)) for key in range(3)])
        flip(front, int(disk[1].slots[0]) * PAGE_BYTES + at)
        finished, host = front.read(*disk)
        assert (finished.failed, finished.corrupt, finished.error) == ([], [1], "")
        assert front.on_host(host[0])
        assert front.on_host(host[2])
        finished = front.check(*disk)
        assert (finished.failed, finished.corrupt, finished.error) == ([], [1], "")

    @ALSO_ENCRYPTED
    def test_data_that_rotted_on_the_host_is_found_when_it_is_read_back(self, front: Front):
        host = front.store(Block(1, SIZE))
        front.pool.array[int(host.slots[0]) * PAGE_BYTES + 17] ^= 1
        (disk,) = front.write(host)
        assert front.read(disk)[0].corrupt == [0]

    @ALSO_ENCRYPTED
    def test_a_rotted_record_is_corrupt_and_its_data_is_not_read(self, front: Front):
        bad, good = front.write(front.store(Block(1, SIZE)), front.store(Block(2, SIZE)))
        page = int(front.image.records.record_pages(bad.slots)[0])
        front.image._array[page + 40] ^= 1  # of the first slot's hash
        finished, host = front.read(bad, good)
        assert (finished.failed, finished.corrupt, finished.error) == ([], [0], "")
        assert front.on_host(host[1])
        assert front.check(bad, good).corrupt == [0]

    @ALSO_ENCRYPTED
    def test_a_check_moves_nothing_and_finds_good_blocks_good(self, front: Front):
        disk = front.write(*[front.store(Block(key, SIZE)) for key in range(40)])
        before = front.pool.array.copy()
        finished = front.check(*disk)
        assert (finished.failed, finished.corrupt, finished.error) == ([], [], "")
        assert finished.moved_bytes == 40 * 32_768
        assert finished.busy_ns > 0
        assert np.array_equal(before, front.pool.array)

    def test_a_check_of_a_block_larger_than_its_buffer(self, new_front: NewFront):
        front = new_front(
            size_bytes=18 * MIB, extent_bytes=8 * MIB, pool_bytes=34 * MIB, pool_extent_bytes=16 * MIB
        )
        front.start()
        disk = front.write(front.store(Block(1, 7 * MIB)), front.store(Block(2, 7 * MIB)))
        assert front.check(*disk).corrupt == []
        flip(front, int(disk[0].slots[0]) * PAGE_BYTES + 7 * MIB - 1)
        assert front.check(*disk).corrupt == [0]

    @ALSO_ENCRYPTED
    def test_a_check_of_many_sizes_at_once(self, new_front: NewFront):
        front = new_front(
            size_bytes=26 * MIB, extent_bytes=4 * MIB, pool_bytes=42 * MIB, pool_extent_bytes=4 * MIB
        )
        front.start()
        sizes = [4_096, 3_000_000, 1, 100_000, 3_500_000, 4_097]
        disk = [front.write(front.store(Block(key, size)))[0] for key, size in enumerate(sizes)]
        flip(front, int(disk[4].slots[0]) * PAGE_BYTES + 3_000_000)
        finished = front.check(*disk)
        assert (finished.failed, finished.corrupt, finished.error) == ([], [4], "")

    def test_a_check_of_a_block_that_had_gone(self, front: Front):
        gone, there = front.write(front.store(Block(1, SIZE)), front.store(Block(2, SIZE)))
        front.free("disk", gone)
        finished = front.check(gone, there)
        assert (finished.failed, finished.corrupt, finished.error) == ([0], [], "")


class TestOrder:
    def test_reads_go_before_writes_before_checks(self, new_front: NewFront):
        front = new_front()
        front.start(threads=1)
        disk = front.write(*[front.store(Block(key, SIZE)) for key in range(2)])
        hosts = [front.store(Block(10 + key, SIZE)) for key in range(2)]
        front.hold()
        first, _ = front.post_write(hosts[:1])
        front.wait_until_held()
        check = front.post(wire.DISK_CHECK, disk)
        write, _ = front.post_write(hosts[1:])
        read, _ = front.post_read(disk)
        front.worker.wait_until_heard()
        front.release()
        front.worker.wait(check)
        assert front.worker.order[-4:] == [first, read, write, check]

    def test_a_large_write_lets_a_read_go_first(self, new_front: NewFront):
        front = new_front(size_bytes=34 * MIB, pool_bytes=46 * MIB)
        front.start(threads=1, queue_depth=1)
        disk = front.write(front.store(Block(1, SIZE)))
        size = 800_000
        hosts = [front.store(Block(10 + key, size)) for key in range(WRITE_BYTES // size + 4)]
        front.hold()
        write, written = front.post_write(hosts)
        front.wait_until_held()
        read, _ = front.post_read(disk)
        front.worker.wait_until_heard()
        front.release()
        assert front.worker.wait(write).failed == []
        assert front.worker.order[-2:] == [read, write]
        front.assert_reads_back(*written[:3])

    def test_what_the_queue_cannot_hold_fails_at_once(self, new_front: NewFront):
        front = new_front()
        front.start(threads=1)
        disk = front.write(front.store(Block(1, SIZE)))
        front.hold()
        front.post(wire.DISK_CHECK, disk)
        front.wait_until_held()
        jobs = [front.post(wire.DISK_CHECK, disk) for _ in range(JOBS_MAX + 1)]
        assert front.worker.wait(jobs[-1]).failed == [0]
        front.release()
        assert front.worker.wait(jobs[-2]).failed == []


class TestEnds:
    @pytest.mark.parametrize("how", ["stop", "hang up"])
    def test_what_is_in_flight_is_finished_and_the_rest_is_dropped(self, new_front: NewFront, how: str):
        front = new_front()
        front.start(threads=1)
        hosts = [front.store(Block(key, SIZE)) for key in range(2)]
        front.hold()
        begun, (begun_disk,) = front.post_write(hosts[:1])
        front.wait_until_held()
        _, (dropped_disk,) = front.post_write(hosts[1:])
        worker = front.worker
        if how == "stop":
            worker.send(stop=wire.Stop())
            worker.wait_until_heard()
            front.release()
            worker.drain()
            assert worker.order == [begun]
            assert worker.stop() == 0
        else:
            worker.channel.close()
            worker.wait_until_heard()
            front.release()
            assert worker.hang_up() == 0
        assert front.is_ready(begun_disk)
        assert not front.is_ready(dropped_disk)
        front = new_front()
        front.start()
        found = front.recovered([Block(0, SIZE), Block(1, SIZE)])
        assert [place.block for place in found] == [Block(0, SIZE)]
        front.assert_reads_back(*found)

    def test_a_worker_whose_disk_hangs_ends_without_its_front(self, new_front: NewFront):
        front = new_front()
        front.start(operation_deadline_s=0.5)
        hosts = [front.store(Block(key, SIZE)) for key in range(2)]
        front.hold()
        front.post_write(hosts)
        front.wait_until_held()
        assert front.worker.hang_up() == 75

    @pytest.mark.parametrize(
        "body",
        [
            {"disk_job": wire.DiskJob(job=1)},
            {"disk_job": wire.DiskJob(job=1, kind=wire.DISK_READ, disk_slots=bytes(4))},
            {
                "disk_job": wire.DiskJob(
                    job=1, kind=wire.DISK_CHECK, disk_slots=bytes(8), disk_generations=bytes(16)
                )
            },
            {"release_session": wire.ReleaseSession(session=1)},
        ],
        ids=["no kind", "no generations", "one slot twice", "not for a disk"],
    )
    def test_a_message_that_makes_no_sense_ends_it(self, front: Front, body: dict[str, object]):
        front.worker.send(**body)
        assert front.worker.receive() is None
        assert front.worker.stop() == 1
