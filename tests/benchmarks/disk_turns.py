"""Who moves a slab's slots for the benchmark of disks: fio, the native input and output, the worker."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
from kvtier_kernels import SlabIo, xxh3_64_rows
from kvtierd.core.ids import PAGE_BYTES
from kvtierd.core.stimuli import CoreDisks
from kvtierd.memory.host_pool import HostPool
from kvtierd.tiers.disk.image import WRITER, DiskImage, disk_geometry
from kvtierd.tiers.disk.slab import SLAB_NAME
from kvtierd.wire import worker_pb2 as wire
from kvtierd.workers.entry import NICENESS

from tests.integration.disk.rig import U32, U64, Worker
from tests.support.pools import whole

THREADS = 2
DEPTH = 32
SLAB_BYTES = (2 << 20) + (1 << 30)
POOL_BYTES = (2 << 20) + (320 << 20)
EXTENT_BYTES = 64 << 20
JOB_BYTES = CoreDisks().job_bytes
WINDOW_BYTES = CoreDisks().write_queue_bytes
NAMESPACE = b"benchmark-space!"
FIO_TIMEOUT_S = 300

Hashes = npt.NDArray[np.uint8]
Rows = npt.NDArray[np.int64]


@dataclass
class Bench:
    """One slab, which everybody moves, and a worker that has it open."""

    folder: Path
    pool: HostPool
    image: DiskImage
    worker: Worker
    memory: npt.NDArray[np.uint8]
    """As much as is on its way at once, for who works without the pool's records."""
    jobs: int = 0
    reading: dict[int, U32] = field(default_factory=dict)
    """Host slots of each read on its way."""

    @property
    def slab(self) -> Path:
        return self.folder / SLAB_NAME


@dataclass(frozen=True)
class Turn:
    """What everybody does: slots of the slab, each once."""

    slot_bytes: int
    scattered: bool
    slots: U32
    """In the order in which they are moved."""
    host_slots: U32
    hashes: Hashes
    """Of the blocks in the host's slots, parallel. Position i of `slots` holds block i modulo their number.
    """

    @property
    def bytes(self) -> int:
        return len(self.slots) * self.slot_bytes


@contextmanager
def slab_on(folder: Path, keys: Path | None = None) -> Iterator[Bench]:
    """A new slab in a folder, encrypted if there are `keys`. Stopped with its worker; the folder is the
    caller's to remove."""
    with (
        whole(HostPool.open(None, POOL_BYTES, EXTENT_BYTES, lock_timeout_s=1)) as pool,
        DiskImage(disk_geometry(SLAB_BYTES, EXTENT_BYTES)) as image,
    ):
        memory = np.frombuffer(mmap.mmap(-1, WINDOW_BYTES), np.uint8)
        memory[:] = 1  # all of it there, as the pool is
        random = np.random.default_rng(1)
        pool.array[pool.geometry.first_extent_offset :] = random.integers(
            0, 256, pool.geometry.capacity_bytes, np.uint8
        )
        worker = Worker(
            folder,
            pool,
            image,
            load=True,
            size_bytes=SLAB_BYTES,
            threads=THREADS,
            queue_depth=DEPTH,
            keys=keys,
        )
        try:
            if not worker.ready().direct_io:
                raise RuntimeError(f"{folder} has no direct input and output: there is nothing to compare")
            image.recover(pool.boot_nonce)
            yield Bench(folder, pool, image, worker, memory)
        finally:
            worker.kill()


def new_turn(bench: Bench, slot_bytes: int, scattered: bool) -> Turn:
    """All of the slab, whatever was in it before; no slot of it holds anything yet."""
    host_slots, hashes = fill_host(bench.pool, slot_bytes)
    slots = assign(bench.image, slot_bytes)
    if scattered:
        slots = np.random.default_rng(2).permutation(slots)
    return Turn(slot_bytes, scattered, slots, host_slots, hashes)


# --- slots ---


def assign(records_of: HostPool | DiskImage, slot_bytes: int) -> U32:
    """Every extent becomes one of slots of this size; all slots, free."""
    geometry = records_of.geometry
    for extent in range(geometry.extents):
        info = records_of.records.extent_info(extent)
        if info is not None:
            records_of.records.free(geometry.slots_of(extent, info[0]))
        records_of.records.format_extent(extent, slot_bytes)
    return np.concatenate([geometry.slots_of(extent, slot_bytes) for extent in range(geometry.extents)])


def fill_host(pool: HostPool, slot_bytes: int) -> tuple[U32, Hashes]:
    """Blocks in the pool, READY, of whatever bytes are there; as many as are on their way at once."""
    slots = assign(pool, slot_bytes)[: WINDOW_BYTES // slot_bytes]
    hashes = np.random.default_rng(slot_bytes).integers(0, 256, (len(slots), 32), np.uint8)
    generations = open_slots(pool, pool.boot_nonce, slots, hashes, slot_bytes)
    rows = np.stack([data_of(pool, slot, slot_bytes) for slot in slots.tolist()])
    pool.records.set_data_checksums(slots, generations, xxh3_64_rows(rows))
    pool.records.commit(slots, np.ones(len(slots), np.uint64))
    return slots, hashes


def data_of(pool: HostPool, slot: int, slot_bytes: int) -> npt.NDArray[np.uint8]:
    return pool.array[slot * PAGE_BYTES : slot * PAGE_BYTES + slot_bytes]


def open_slots(
    records_of: HostPool | DiskImage, boot_nonce: int, slots: U32, hashes: Hashes, slot_bytes: int
) -> U64:
    """WRITING slots; whatever was in them is gone."""
    records_of.records.free(slots)
    return records_of.records.open(
        slots, WRITER, boot_nonce, 1, NAMESPACE, 0, 0, 1, np.ascontiguousarray(hashes), slot_bytes
    )


# --- those who take turns ---


def by_worker(bench: Bench, turn: Turn, what: str) -> float:
    """Bytes a second of jobs, as many of them on their way as the front lets there be."""
    window = len(turn.host_slots)
    size = min(max(1, JOB_BYTES // turn.slot_bytes), window)
    starts = range(0, len(turn.slots), size)
    on_their_way: list[int] = []
    began_s = time.perf_counter()
    for start in starts:
        rows = np.arange(start, min(start + size, len(turn.slots)))
        host = rows % window
        while on_their_way and (len(on_their_way) + 1) * size > window:
            finish(bench, turn, on_their_way.pop(0))
        on_their_way.append(post(bench, turn, what, rows, host))
    for job in on_their_way:
        finish(bench, turn, job)
    return turn.bytes / (time.perf_counter() - began_s)


def post(bench: Bench, turn: Turn, what: str, rows: Rows, host: Rows) -> int:
    disk_slots, host_slots = turn.slots[rows], turn.host_slots[host]
    clocks = b""
    if what == "write":
        open_slots(bench.image, bench.pool.boot_nonce, disk_slots, turn.hashes[host], turn.slot_bytes)
        clocks = rows.astype("<u8").tobytes()
    else:
        open_slots(bench.pool, bench.pool.boot_nonce, host_slots, turn.hashes[host], turn.slot_bytes)
    bench.jobs += 1
    bench.worker.send(
        disk_job=wire.DiskJob(
            job=bench.jobs,
            kind=wire.DISK_WRITE if what == "write" else wire.DISK_READ,
            disk_slots=disk_slots.astype("<u4").tobytes(),
            disk_generations=bench.image.records.generations(disk_slots).astype("<u8").tobytes(),
            host_slots=host_slots.astype("<u4").tobytes(),
            host_generations=bench.pool.records.generations(host_slots).astype("<u8").tobytes(),
            clocks=clocks,
        )
    )
    if what == "read":
        bench.reading[bench.jobs] = host_slots
    return bench.jobs


def finish(bench: Bench, turn: Turn, job: int) -> None:
    """Waits for a job; the host's slots are READY again after a read."""
    finished = bench.worker.wait(job)
    if finished.failed or finished.corrupt:
        raise RuntimeError(f"a job failed: {finished}")
    host_slots = bench.reading.pop(job, None)
    if host_slots is not None:
        bench.pool.records.commit(host_slots, np.ones(len(host_slots), np.uint64))


def by_slab_io(bench: Bench, turn: Turn, what: str) -> float:
    """Bytes a second of `SlabIo`, which sums what it reads, in as many threads, in calls of eight
    times the depth."""
    memory = bench.memory
    at_once = min(8 * DEPTH, len(memory) // turn.slot_bytes // THREADS)
    sizes = np.full(at_once, turn.slot_bytes, np.uint64)
    places = turn.slots.astype(np.uint64) * PAGE_BYTES

    def move(thread: int) -> int:
        in_memory = np.arange(thread * at_once, (thread + 1) * at_once, dtype=np.uint64) * turn.slot_bytes
        mine = np.array_split(places, THREADS)[thread]
        wrong = 0
        with SlabIo(fd, DEPTH) as io:
            for first in range(0, len(mine), at_once):
                batch = mine[first : first + at_once]
                rows = memory, in_memory[: len(batch)], batch, sizes[: len(batch)]
                errors = io.write(*rows) if what == "write" else io.read(*rows, sizes[: len(batch)])[0]
                wrong += int(np.count_nonzero(errors))
        return wrong

    fd = os.open(bench.slab, os.O_RDWR | os.O_DIRECT)
    try:
        with ThreadPoolExecutor(THREADS) as threads:
            began_s = time.perf_counter()
            wrong = sum(threads.map(move, range(THREADS)))
            took_s = time.perf_counter() - began_s
    finally:
        os.close(fd)
    if wrong:
        raise RuntimeError(f"{wrong} blocks could not be moved")
    return turn.bytes / took_s


def by_fio(bench: Bench, turn: Turn, what: str) -> float:
    """Bytes a second as fio says; scattered: random blocks, each once."""
    each = len(turn.slots) // THREADS * turn.slot_bytes
    first = bench.image.geometry.first_extent_offset
    command = [
        "nice",
        f"--adjustment={NICENESS}",  # as the worker
        "fio",
        "--name=disk",
        f"--filename={bench.slab}",
        f"--rw={'rand' if turn.scattered else ''}{what}",
        f"--bs={turn.slot_bytes}",
        f"--offset={first}",
        f"--offset_increment={SLAB_BYTES // THREADS // PAGE_BYTES * PAGE_BYTES}",
        f"--size={(SLAB_BYTES - first) // THREADS // turn.slot_bytes * turn.slot_bytes}",
        f"--io_size={each}",
        "--direct=1",
        "--ioengine=libaio",
        f"--iodepth={DEPTH}",
        f"--numjobs={THREADS}",
        "--thread",
        "--group_reporting",
        "--fallocate=none",
        "--output-format=json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=FIO_TIMEOUT_S)
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    return float(job[what]["io_bytes"]) / (float(job[what]["runtime"]) / 1e3)
