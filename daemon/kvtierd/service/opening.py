"""What a start opens before anything else: the pool, and the images of the disks and of the store; and what
workers are told."""

import grp
import math
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvtierd.config.daemon import Config
from kvtierd.config.descriptors import RESERVE, DescriptorShares
from kvtierd.config.settings import ConfigError, human_size
from kvtierd.core.ids import TenantTag
from kvtierd.memory.host_pool import HostPool
from kvtierd.rpc.peers import PeerRules
from kvtierd.rpc.sockets import OwnedSockets, make_private_directory
from kvtierd.service.notify import EXTENSION_S, Notifier
from kvtierd.tiers.disk.image import DiskImage, disk_geometry
from kvtierd.tiers.disk.keys import FIELD as KEYS_FIELD
from kvtierd.tiers.disk.keys import KeyTroubleError, read_keys
from kvtierd.workers.supervisor.handles import SupervisorLimits, WorkerOptions
from kvtierd.workers.supervisor.kinds import BelowOptions, DiskOptions, StoreOptions
from kvtierd.workers.supervisor.supervisor import Supervisor, WorkerStimulus

PROGRESS_PERIOD_S = 1.0


@dataclass(frozen=True, slots=True)
class Opened:
    """What a start has opened, and found out about who may use it. It stays the caller's."""

    sockets: OwnedSockets
    pool: HostPool
    images: tuple[DiskImage, ...]
    """Those of the disks, in their order, and behind them that of the store, if there is one."""
    writable: frozenset[TenantTag] | None
    """The tenants whose blocks may be written to the disks; None for all."""
    rules: PeerRules
    shares: DescriptorShares


def want_descriptors(count: int) -> float:
    """Raises the limit on open descriptors as far as it may go. Returns what it is then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return math.inf
    if soft >= count:
        return soft
    allowed = count if hard == resource.RLIM_INFINITY else min(count, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed


def group_id(name: str) -> int | None:
    """The id of a group; None for an empty name. Raises ConfigError if there is no such group."""
    if not name:
        return None
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise ConfigError(
            "server.group", name, "there is no such group: create it, or leave it empty"
        ) from None


def open_pool(config: Config, notifier: Notifier, check_stop: Callable[[], None]) -> HostPool:
    """Opens the pool. Raises ConfigError, PoolError, or what `check_stop()` raises, which is called again and
    again."""
    told_s = 0.0

    def progress(done: int, of: int) -> None:
        nonlocal told_s
        if (now_s := time.monotonic()) - told_s >= PROGRESS_PERIOD_S:
            told_s = now_s
            notifier.starting(f"Making the pool: {human_size(done)} of {human_size(of)}", EXTENSION_S)

    path = config.pool.file
    if path is not None:
        make_private_directory(path.parent)
    try:
        return HostPool.open(
            path,
            config.pool.size,
            config.pool.extent_size or None,
            lock_timeout_s=config.pool.lock_timeout_s,
            progress=progress,
            check_stop=check_stop,
        )
    except ValueError as error:
        raise ConfigError("pool.size", human_size(config.pool.size), str(error)) from error


def writable_tenants(config: Config) -> frozenset[TenantTag] | None:
    """The tenants whose blocks may be written to disks: those with a key, if disks are encrypted. None for
    all. Raises ConfigError."""
    folder = config.disk.encryption_keys
    if folder is None:
        return None
    try:
        return read_keys(folder).writable
    except KeyTroubleError as error:
        raise ConfigError(KEYS_FIELD, folder, str(error)) from error


def open_images(config: Config) -> Iterator[DiskImage]:
    """The images, still empty, of the configured disks in their order, and of the store if there is one. The
    directories are not looked at. Raises ConfigError."""
    for _ in config.disk.paths:
        try:
            image = DiskImage(disk_geometry(config.disk.size, config.disk.extent_size))
        except ValueError as error:
            raise ConfigError("disk.size", human_size(config.disk.size), str(error)) from error
        yield image
    if config.store.url:
        yield DiskImage(disk_geometry(config.store.size))


def make_workers(
    config: Config,
    pool: HostPool,
    images: Sequence[DiskImage],
    events: Callable[[WorkerStimulus], object],
) -> Supervisor:
    """The supervisor of all workers, none of which is started yet. `events` gets what it reports."""
    return Supervisor(
        pool_fd=pool.fd,
        pool_bytes=len(pool.array),
        register_writer=pool.register_writer,
        events=events,
        reserve=RESERVE,
        disks=[below(config, number, image, pool.boot_nonce) for number, image in enumerate(images)],
        limits=SupervisorLimits(
            copy_deadline_s=config.workers.copy_deadline_s, gpu_idle_s=config.workers.gpu_idle_s
        ),
        options=WorkerOptions(
            gpu_copy_method=config.workers.gpu_copy_method,
            seal_threads=config.workers.seal_threads,
            gpu_chunks=config.workers.lane_chunks(),
            log_level=config.log.level,
            log_format=config.log.format,
        ),
    )


def below(config: Config, number: int, image: DiskImage, boot_nonce: int) -> BelowOptions:
    """What the worker of a disk, or of the store, which follows the disks, is told."""
    disk, store = config.disk, config.store
    if number == len(disk.paths):
        return StoreOptions(
            number=number,
            url=store.url,
            prefix="",
            options=dict(store.options),
            host=f"{boot_nonce & 0xFFFF_FFFF:08x}",
            image_bytes=image.bytes,
            extent_bytes=image.geometry.extent_bytes,
            image_fd=image.fd,
            call_deadline_s=store.deadline_s,
            look_every_s=store.look_every_s,
            compression=store.compression,
            deadline_s=disk.deadline_s,
        )
    return DiskOptions(
        number=number,
        path=disk.paths[number],
        size_bytes=image.bytes,
        extent_bytes=image.geometry.extent_bytes,
        image_fd=image.fd,
        threads=disk.threads,
        queue_depth=disk.queue_depth,
        deadline_s=disk.deadline_s,
        encryption_keys=disk.encryption_keys,
    )
