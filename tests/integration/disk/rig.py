"""The front of one disk, played by the test's own process: a real pool, a real image, real workers on a real
file system. Blocks' bytes follow from their keys, so that whoever reads one can tell whether it is right.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import subprocess
import sys
import termios
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from kvtier_kernels import xxh3_64
from kvtierd.core.blocks.namespaces import tag_in
from kvtierd.core.ids import PAGE_BYTES, NamespaceDigest
from kvtierd.memory.host_pool import HostPool
from kvtierd.memory.recovery import Recovery
from kvtierd.tiers.disk.image import WRITER, DiskImage, disk_geometry
from kvtierd.tiers.disk.slab import SLAB_NAME
from kvtierd.wire import worker_pb2 as wire
from kvtierd.workers.channel.packets import BlockingPacketChannel, packet_socketpair
from kvtierd.workers.channel.status import StatusPage, StatusWord, create_status_fd

from tests.support.pools import whole
from tests.support.process import readable

MIB = 1 << 20
SLACK_S = 60.0
"""For anything that takes milliseconds on an idle machine."""
SPACE = b"a namespace of 16"[:16]
TAG = tag_in(NamespaceDigest(SPACE))
"""The tag of its tenant."""
GROUP = 3

U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Block:
    """One stored copy; a key that is stored again has a higher version."""

    key: int
    data_bytes: int
    version: int = 1
    world: int = 1

    def data(self, shard: int) -> npt.NDArray[np.uint8]:
        seed = (self.key, self.version, shard, self.world)
        return np.random.default_rng(seed).integers(0, 256, self.data_bytes, np.uint8)

    @property
    def hash(self) -> npt.NDArray[np.uint8]:
        return np.random.default_rng(self.key).integers(0, 256, (1, 32), np.uint8)


@dataclass(frozen=True)
class Place:
    """Where the shards of a block are, in the pool or on the disk."""

    block: Block
    slots: U32
    generations: U64


@dataclass(frozen=True)
class Finished:
    failed: list[int]
    corrupt: list[int]
    error: str
    moved_bytes: int
    busy_ns: int


class Worker:
    """A worker process and the front's end of its channel."""

    def __init__(
        self,
        folder: Path,
        pool: HostPool,
        image: DiskImage,
        *,
        load: bool,
        size_bytes: int,
        threads: int = 2,
        queue_depth: int = 8,
        operation_deadline_s: float = 60.0,
        environment: Mapping[str, str] | None = None,
        wrap: Sequence[str] = (),
        keys: Path | None = None,
        module: str = "kvtierd.workers.disk",
        own: Mapping[str, object] | None = None,
    ) -> None:
        """`wrap`: words before its command line; they must become it by exec. `own`: what another `module` is
        told instead of what a disk's worker is told of its slab."""
        status_fd = create_status_fd()
        self.status = StatusPage(status_fd)
        ours, theirs = packet_socketpair()
        arguments: dict[str, object] = {
            "--pool-fd": pool.fd,
            "--pool-bytes": pool.array.nbytes,
            "--channel-fd": theirs.fileno(),
            "--status-fd": status_fd,
            "--image-fd": image.fd,
            "--image-bytes": image.bytes,
            "--extent-bytes": image.geometry.extent_bytes,
            "--operation-deadline-s": operation_deadline_s,
            "--log-level": "debug",
            "--log-format": "human",
        }
        slab = {
            "--path": folder,
            "--size-bytes": size_bytes,
            "--threads": threads,
            "--queue-depth": queue_depth,
        }
        arguments |= slab if own is None else own
        if keys is not None:
            arguments["--encryption-keys"] = keys
        command = [
            *wrap,
            sys.executable,
            "-P",
            "-m",
            module,
            "--load" if load else "--keep",
        ]
        for name, value in arguments.items():
            command += [name, str(value)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            pass_fds=(pool.fd, theirs.fileno(), status_fd, image.fd),
            env={**os.environ, **(environment or {})},
        )
        os.close(status_fd)
        theirs.close()
        self._socket = ours
        self.channel = BlockingPacketChannel(ours)
        self.finished: dict[int, Finished] = {}
        self.order: list[int] = []
        """Jobs as they were reported."""

    def receive(self) -> wire.ToFront | None:
        """The next message; None once the worker has ended or closed its end."""
        assert self.channel.wait(SLACK_S), "no message came"
        received = self.channel.receive()
        return None if received is None else wire.ToFront.FromString(received[0])

    def ready(self) -> wire.Ready:
        message = self.receive()
        assert message is not None, f"the worker ended with status {self.process.wait(SLACK_S)}"
        assert message.HasField("ready"), message
        assert message.ready.pid == self.process.pid
        return message.ready

    def unusable(self) -> wire.Unusable:
        message = self.receive()
        assert message is not None
        assert message.HasField("unusable"), message
        assert self.receive() is None
        assert self.process.wait(SLACK_S) == 0
        return message.unusable

    def send(self, **body: Any) -> None:
        self.channel.send(wire.ToWorker(**body).SerializeToString())

    def wait_until_heard(self) -> None:
        """Its main thread has dealt with all that was sent, or, if the channel is closed, with its end. Its
        other threads may be held meanwhile."""
        deadline_s = time.monotonic() + SLACK_S
        while self._socket.fileno() >= 0 and self._unread_bytes():
            assert time.monotonic() < deadline_s, "the worker reads nothing"
            time.sleep(0.002)
        # It comes round after each message. After the channel's end only the second time says anything: the
        # first may be from just before.
        for _ in range(2):
            since_ns = time.monotonic_ns()
            while self.status.read()[StatusWord.HEARTBEAT] <= since_ns:
                assert time.monotonic() < deadline_s, "its main thread does not come round"
                time.sleep(0.002)

    def _unread_bytes(self) -> int:
        """Of what was sent."""
        return int.from_bytes(fcntl.ioctl(self._socket, termios.TIOCOUTQ, bytes(4)), sys.byteorder)

    def wait(self, job: int) -> Finished:
        while job not in self.finished:
            assert self._take(), f"the worker ended with status {self.process.wait(SLACK_S)}, job {job} open"
        return self.finished[job]

    def _take(self) -> bool:
        message = self.receive()
        if message is None:
            return False
        end = message.disk_job_finished
        assert end.job
        assert end.job not in self.finished, "a job was reported twice"
        self.order.append(end.job)
        self.finished[end.job] = Finished(
            np.frombuffer(end.failed, np.uint32).tolist(),
            np.frombuffer(end.corrupt, np.uint32).tolist(),
            end.error,
            end.bytes,
            end.busy_ns,
        )
        return True

    def drain(self) -> None:
        """Everything that it says until its end."""
        while self._take():
            pass

    def stop(self) -> int:
        """Its exit status."""
        with contextlib.suppress(Exception):
            self.send(stop=wire.Stop())
        status = self.process.wait(SLACK_S)
        self.channel.close()
        return status

    def kill(self) -> None:
        """SIGKILL, and waits for its end."""
        self.process.kill()
        self.process.wait(SLACK_S)
        self.drain()
        self.channel.close()

    def hang_up(self) -> int:
        """Closes the front's end, as a dead front does; the exit status."""
        self.channel.close()
        return self.process.wait(SLACK_S)


@dataclass
class Front:
    """One boot of a daemon with one disk. `start` a worker first."""

    folder: Path
    size_bytes: int = 10 * MIB
    extent_bytes: int = MIB
    pool_bytes: int = 18 * MIB
    pool_extent_bytes: int = MIB
    options: dict[str, Any] = field(default_factory=dict)
    """Of every worker."""
    boot_nonce: int = 0x1234_5678_9ABC_DEF1
    keys: Path | None = None
    """The folder with its keys, if it is encrypted."""

    def __post_init__(self) -> None:
        self.pool = whole(HostPool.open(None, self.pool_bytes, self.pool_extent_bytes, lock_timeout_s=1))
        self.image = DiskImage(disk_geometry(self.size_bytes, self.extent_bytes))
        self.jobs = itertools.count(1)
        self._worker: Worker | None = None
        self.recovery: Recovery
        self._free: dict[tuple[str, int], list[int]] = {}
        self._extents: dict[str, Iterable[int]] = {"host": itertools.count(), "disk": itertools.count()}
        self._clock = itertools.count(1)

    @property
    def slab(self) -> Path:
        return self.folder / SLAB_NAME

    @property
    def control(self) -> Path:
        return self.folder.with_name(self.folder.name + ".faults")

    @property
    def worker(self) -> Worker:
        assert self._worker is not None
        return self._worker

    def faults(self, **faults: object) -> None:
        """From now on; none: none."""
        written = self.control.with_suffix(".new")
        written.write_text(json.dumps(faults))
        written.replace(self.control)

    def spawn(self, *, load: bool, **options: Any) -> Worker:
        """A worker that has not said anything yet."""
        if self._worker is not None:
            assert self._worker.process.poll() is not None, "one worker at a time"
        environment = {"KVTIER_DISK_FAULTS": str(self.control)}
        self._worker = Worker(
            self.folder,
            self.pool,
            self.image,
            load=load,
            size_bytes=self.size_bytes,
            environment=environment,
            keys=self.keys,
            **{**self.options, **options},
        )
        return self._worker

    def start(self, **options: Any) -> wire.Ready:
        """The boot's first worker, and what is recovered."""
        ready = self.spawn(load=True, **options).ready()
        self.recover()
        return ready

    def recover(self) -> None:
        """What the front does when its first worker is ready."""
        self.recovery = self.image.recover(self.boot_nonce)
        used = {extent.extent for extent in self.recovery.recovered.extents}
        self._extents["disk"] = (e for e in range(self.image.geometry.extents) if e not in used)

    def respawn(self, **options: Any) -> wire.Ready:
        """A later one."""
        return self.spawn(load=False, **options).ready()

    def close(self) -> None:
        if self._worker is not None:
            if self._worker.process.poll() is None:
                self._worker.kill()
            self._worker.channel.close()
        self.image.close()
        self.pool.close()
        self.control.unlink(missing_ok=True)

    def __enter__(self) -> Front:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- slots ---

    def take(self, where: str, slot_bytes: int, count: int) -> U32:
        """Free slots; extents are assigned as needed."""
        pool = self.pool if where == "host" else self.image
        free = self._free.setdefault((where, slot_bytes), [])
        while len(free) < count:
            extent = next(iter(self._extents[where]))
            pool.records.format_extent(extent, slot_bytes)
            free += pool.geometry.slots_of(extent, slot_bytes).tolist()
        taken, self._free[where, slot_bytes] = free[:count], free[count:]
        return np.array(taken, np.uint32)

    def free(self, where: str, place: Place) -> None:
        """The slots are handed out again, first of all."""
        (self.pool if where == "host" else self.image).records.free(place.slots)
        self._free[where, place.block.data_bytes][:0] = place.slots.tolist()

    def open(self, where: str, block: Block, transfer: int = 7) -> Place:
        """WRITING slots for a block."""
        pool = self.pool if where == "host" else self.image
        slots = self.take(where, block.data_bytes, block.world)
        generations = [
            pool.records.open(
                slots[shard : shard + 1],
                WRITER,
                self.boot_nonce,
                transfer,
                SPACE,
                GROUP,
                shard,
                block.world,
                block.hash,
                block.data_bytes,
            )
            for shard in range(block.world)
        ]
        return Place(block, slots, np.concatenate(generations))

    def store(self, block: Block) -> Place:
        """A block on the host, READY, as an engine's store leaves it."""
        place = self.open("host", block)
        sums = []
        for shard, slot in enumerate(place.slots.tolist()):
            data = block.data(shard)
            self.pool.array[slot * PAGE_BYTES : slot * PAGE_BYTES + len(data)] = data
            sums.append(xxh3_64(data))
        self.pool.records.set_data_checksums(place.slots, place.generations, np.array(sums, np.uint64))
        self.pool.records.commit(place.slots, np.full(block.world, next(self._clock), np.uint64))
        return place

    def on_host(self, place: Place) -> bool:
        """Whether the host's slots hold exactly the block's bytes."""
        return all(
            np.array_equal(
                self.pool.array[slot * PAGE_BYTES : slot * PAGE_BYTES + place.block.data_bytes],
                place.block.data(shard),
            )
            for shard, slot in enumerate(place.slots.tolist())
        )

    # --- jobs ---

    def post(
        self, kind: wire.DiskJobKind.ValueType, disk: Sequence[Place], host: Sequence[Place] = ()
    ) -> int:
        """Its number."""
        job = next(self.jobs)
        count = sum(len(place.slots) for place in disk)
        clocks = np.arange(count) + 1000 * job if kind == wire.DISK_WRITE else np.empty(0)
        self.worker.send(
            disk_job=wire.DiskJob(
                job=job,
                kind=kind,
                disk_slots=_bytes([place.slots for place in disk], "<u4"),
                disk_generations=_bytes([place.generations for place in disk], "<u8"),
                host_slots=_bytes([place.slots for place in host], "<u4"),
                host_generations=_bytes([place.generations for place in host], "<u8"),
                clocks=clocks.astype("<u8").tobytes(),
            )
        )
        return job

    def post_write(self, host: Sequence[Place]) -> tuple[int, list[Place]]:
        """Slots on the disk for blocks of the host, and a job that writes them."""
        disk = [self.open("disk", place.block) for place in host]
        return self.post(wire.DISK_WRITE, disk, host), disk

    def write(self, *host: Place) -> list[Place]:
        """As `post_write`, and all of it goes well."""
        job, disk = self.post_write(host)
        finished = self.worker.wait(job)
        assert (finished.failed, finished.corrupt, finished.error) == ([], [], "")
        return disk

    def hold(self) -> None:
        """Every batch from now on waits for `release`."""
        self.faults(hang=True)

    def wait_until_held(self, threads: int = 1) -> None:
        """So many threads have begun a batch and wait."""
        deadline_s = time.monotonic() + SLACK_S
        while sum(word > 0 for word in self.worker.status.read()[StatusWord.IO_0 :]) < threads:
            assert time.monotonic() < deadline_s
            time.sleep(0.005)

    def release(self) -> None:
        self.faults()

    def post_read(self, disk: Sequence[Place]) -> tuple[int, list[Place]]:
        host = [self.open("host", place.block) for place in disk]
        return self.post(wire.DISK_READ, disk, host), host

    def read(self, *disk: Place) -> tuple[Finished, list[Place]]:
        """Where on the host it read them to."""
        job, host = self.post_read(disk)
        return self.worker.wait(job), host

    def assert_reads_back(self, *disk: Place) -> None:
        """Each block's bytes come back right, with their checksum; the host's slots are free again then."""
        finished, host = self.read(*disk)
        assert (finished.failed, finished.corrupt, finished.error) == ([], [], "")
        assert finished.moved_bytes >= sum(p.block.data_bytes * p.block.world for p in disk)
        for place in host:
            assert self.on_host(place), f"wrong bytes of {place.block}"
            self.pool.records.commit(place.slots, np.full(len(place.slots), 1, np.uint64))
            assert self.pool.records.verify_data(place.slots, place.generations).all()
            self.free("host", place)

    def is_ready(self, place: Place) -> bool:
        """Whether the image says that the disk has the block."""
        return bool(self.image.records.check(place.slots, place.generations).all())

    def set_aside(self, place: Place) -> None:
        """Out of use, in the image; the worker is told to persist it."""
        self.image.set_aside(place.slots)
        self.worker.send(persist_records=wire.PersistRecords(slots=place.slots.astype("<u4").tobytes()))

    def check(self, *disk: Place) -> Finished:
        return self.worker.wait(self.post(wire.DISK_CHECK, disk))

    def recovered(self, blocks: Iterable[Block]) -> list[Place]:
        """Which of these blocks the boot has found, and where."""
        found = self.recovery.recovered
        by_hash = {block.hash.tobytes(): block for block in blocks}
        places, at = [], 0
        for space, block_hash in zip(found.spaces.tolist(), found.hashes, strict=True):
            world = found.namespaces[space][2]
            slots = found.slots[at : at + world]
            at += world
            block = by_hash[block_hash.tobytes()]
            assert block.world == world
            places.append(Place(block, slots, self.image.records.generations(slots)))
        return places


def _bytes(arrays: Sequence[npt.NDArray[Any]], dtype: str) -> bytes:
    return np.concatenate(arrays).astype(dtype).tobytes() if arrays else b""


def ended(worker: Worker, timeout_s: float = SLACK_S) -> bool:
    """Whether the process ends in that time."""
    pidfd = os.pidfd_open(worker.process.pid)
    try:
        return readable(pidfd, timeout_s)
    finally:
        os.close(pidfd)
