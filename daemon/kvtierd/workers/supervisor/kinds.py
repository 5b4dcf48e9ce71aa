"""What a worker is: which program, what it is told and inherits, and which deadlines it has to keep."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

DISK_PREFIX = "disk-"
"""Of the device names of disks: disk-0, disk-1, …, by their place in the configuration."""
IO_THREADS_MAX = 8
"""Of a disk's worker: its status page has a word for each."""


@dataclass(frozen=True, slots=True)
class WorkerKind:
    """One worker, to be. Deadlines are positive seconds."""

    title: str
    """What it is called in log lines: "copy worker"."""
    module: str
    arguments: Mapping[str, object]
    """Of its command line, besides what every worker is told; None: a flag without a value."""
    handshake_deadline_s: float
    """From start to Ready."""
    operation_deadline_s: float
    """A thread of it inside one native call for longer, or a main thread that does not come round."""
    map_deadline_s: float
    """For an answer to MapWords, MapMemory or AddChunks."""
    fds: tuple[int, ...] = ()
    """That it inherits besides the pool, its channel and its status page."""


@dataclass(frozen=True, slots=True)
class DiskOptions:
    """One disk of the disk tier, as its worker is told of it."""

    number: int
    """Its place in the configuration, from 0."""
    path: Path
    """The directory."""
    size_bytes: int
    """Of the slab file, and of the image."""
    extent_bytes: int
    image_fd: int
    """Of the image; stays the caller's, and open as long as workers are started."""
    threads: int
    queue_depth: int
    deadline_s: float
    """How long the disk may do nothing of what is waited for."""

    @property
    def device(self) -> str:
        return disk_device(self.number)


def disk_device(number: int) -> str:
    """The device name of a disk."""
    return f"{DISK_PREFIX}{number}"


def disk_worker(disk: DiskOptions, *, first: bool, handshake_deadline_s: float) -> WorkerKind:
    """A disk's worker. The `first` of a boot fills the image from the file, later ones leave it as it is."""
    return WorkerKind(
        title="disk worker",
        module="kvtierd.workers.disk",
        arguments={
            "--image-fd": disk.image_fd,
            "--image-bytes": disk.size_bytes,
            "--path": disk.path,
            "--size-bytes": disk.size_bytes,
            "--extent-bytes": disk.extent_bytes,
            "--threads": disk.threads,
            "--queue-depth": disk.queue_depth,
            "--operation-deadline-s": disk.deadline_s,
            "--load" if first else "--keep": None,
        },
        handshake_deadline_s=handshake_deadline_s,
        operation_deadline_s=disk.deadline_s,
        map_deadline_s=handshake_deadline_s,
        fds=(disk.image_fd,),
    )
