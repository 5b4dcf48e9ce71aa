"""What a worker is: its program, what it is told and inherits, and the deadlines that it has to keep."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

DISK_PREFIX = "disk-"
"""Begins the device names of disks: disk-0, disk-1, … by their place in the configuration."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
MPS_PIPES = "CUDA_MPS_PIPE_DIRECTORY"
NO_MPS = "/nonexistent/kvtierd-uses-no-mps"
OPTIONS_VARIABLE = "KVTIER_STORE_OPTIONS"
"""In the environment of a store's worker: JSON of what its client is told."""
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

    def worker(self, *, first: bool, handshake_deadline_s: float) -> WorkerKind:
        """Its worker. The `first` one of a boot fills the image from the file, and later ones leave the image
        as it is."""
        keys = {} if self.encryption_keys is None else {"--encryption-keys": self.encryption_keys}
        return WorkerKind(
            title="disk worker",
            module="kvtierd.workers.disk",
            arguments={
                "--image-fd": self.image_fd,
                "--image-bytes": self.size_bytes,
                "--path": self.path,
                "--size-bytes": self.size_bytes,
                "--extent-bytes": self.extent_bytes,
                "--threads": self.threads,
                "--queue-depth": self.queue_depth,
                "--operation-deadline-s": self.deadline_s,
                **keys,
                "--load" if first else "--keep": None,
            },
            handshake_deadline_s=handshake_deadline_s,
            operation_deadline_s=self.deadline_s,
            map_deadline_s=handshake_deadline_s,
            fds=(self.image_fd,),
        )


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """A store that other hosts use as well, as its worker is told about it. It is the last of the disks."""

    number: int
    """Position after the disks."""
    url: str
    prefix: str
    """The folder of kvtier's objects in the store, empty or with a slash at its end."""
    options: Mapping[str, str]
    """What the store's driver is told besides the URL."""
    host: str
    """8 hexadecimal digits that name this daemon."""
    image_bytes: int
    extent_bytes: int
    image_fd: int
    """Descriptor of the image. It stays the caller's, and must stay open as long as workers are started."""
    call_deadline_s: float
    """For each call of the store."""
    look_every_s: float
    """How often it is looked for what other hosts have put there."""
    deadline_s: float
    """The worker is killed if its event loop does not come round for so long."""
    compression: str = "off"
    """As in `store.compression`."""

    @property
    def device(self) -> str:
        return disk_device(self.number)

    def worker(self, *, first: bool, handshake_deadline_s: float) -> WorkerKind:
        """Its worker. The `first` one of a boot makes the image."""
        return WorkerKind(
            title="store worker",
            module="kvtierd.workers.store",
            arguments={
                "--image-fd": self.image_fd,
                "--image-bytes": self.image_bytes,
                "--extent-bytes": self.extent_bytes,
                "--url": self.url,
                "--prefix": self.prefix,
                "--host": self.host,
                "--call-deadline-s": self.call_deadline_s,
                "--look-every-s": self.look_every_s,
                "--compression": self.compression,
                "--operation-deadline-s": self.deadline_s,
                "--load" if first else "--keep": None,
            },
            handshake_deadline_s=handshake_deadline_s,
            operation_deadline_s=self.deadline_s,
            map_deadline_s=handshake_deadline_s,
            fds=(self.image_fd,),
            # Everybody may read a command line, and there may be a secret among them.
            environment={OPTIONS_VARIABLE: json.dumps(dict(self.options))},
        )


BelowOptions = DiskOptions | StoreOptions
"""What the worker of something below the host is told."""


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
