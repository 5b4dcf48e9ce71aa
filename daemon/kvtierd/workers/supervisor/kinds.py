"""What a worker is: its program, what it is told and inherits, and the deadlines that it has to keep."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

DISK_PREFIX = "disk-"
"""Begins the device names of disks: disk-0, disk-1, … by their place in the configuration."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
MPS_PIPES = "CUDA_MPS_PIPE_DIRECTORY"
NO_MPS = "/nonexistent/kvtierd-uses-no-mps"
IO_THREADS_MAX = 8
"""The most threads of a disk's worker. Its status page has a word for each."""


@dataclass(frozen=True, slots=True)
class WorkerKind:
    """What a worker to be started is. Deadlines are positive seconds."""

    title: str
    """What log lines call it, for example "copy worker"."""
    module: str
    arguments: Mapping[str, object]
    """Arguments of its command line, besides those that every worker gets; None for a flag without a
    value."""
    handshake_deadline_s: float
    """From start to Ready."""
    operation_deadline_s: float
    """The worker is killed if one of its threads is inside one native call for longer, or if its main thread
    does not come round."""
    map_deadline_s: float
    """For the answer to MapWords, MapMemory or AddChunks."""
    fds: tuple[int, ...] = ()
    """Descriptors that it inherits besides those of the pool, its channel and its status page."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that it has besides the daemon's own."""


@dataclass(frozen=True, slots=True)
class DiskOptions:
    """One disk of the disk tier, as its worker is told about it."""

    number: int
    """Its place in the configuration, from 0."""
    path: Path
    """The disk's directory."""
    size_bytes: int
    """The length of the slab file and of the image."""
    extent_bytes: int
    image_fd: int
    """Descriptor of the image. It stays the caller's, and must stay open as long as workers are started."""
    threads: int
    queue_depth: int
    deadline_s: float
    """How long the disk may do nothing of what a thread waits for."""
    encryption_keys: Path | None = None
    """The folder with the keys of an encrypted slab; None for one in plain."""

    @property
    def device(self) -> str:
        return disk_device(self.number)


def gpu_environment(device: str, of_daemon: Mapping[str, str]) -> dict[str, str]:
    """What a GPU's worker is to find in its environment, unless the daemon's says something itself.

    It sees its own GPU alone, because cuInit touches every GPU that is visible. It is no client of a running
    MPS server: the daemon kills workers that hang, and NVIDIA leaves undefined what the end of a client in
    the middle of its work does to the server's other clients, which are the engines.
    """
    usual = {VISIBLE: device, MPS_PIPES: NO_MPS}
    return {name: value for name, value in usual.items() if name not in of_daemon}


def disk_device(number: int) -> str:
    """The device name of a disk."""
    return f"{DISK_PREFIX}{number}"


def disk_worker(disk: DiskOptions, *, first: bool, handshake_deadline_s: float) -> WorkerKind:
    """A disk's worker. The `first` one of a boot fills the image from the file, and later ones leave the
    image as it is."""
    keys = {} if disk.encryption_keys is None else {"--encryption-keys": disk.encryption_keys}
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
            **keys,
            "--load" if first else "--keep": None,
        },
        handshake_deadline_s=handshake_deadline_s,
        operation_deadline_s=disk.deadline_s,
        map_deadline_s=handshake_deadline_s,
        fds=(disk.image_fd,),
    )
