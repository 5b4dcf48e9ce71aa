"""`kvtierctl doctor`: what of this host would keep a daemon with this configuration from doing well."""

import ctypes
import grp
import os
import re
import resource
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from kvtierd.config import Config
from kvtierd.settings import human_size

OF_MEMORY = ("tmpfs", "hugetlbfs", "ramfs")
KERNEL_MIN = (5, 14)
"""For MADV_POPULATE_WRITE: else the pool is not populated ahead of use, and not registered with a GPU."""
KERNEL_MIN_CONTAINERS = (6, 5)
"""For SO_PEERPIDFD: else a process of another pid namespace cannot be named, nor its death be seen."""
DESCRIPTORS_WANTED = 4_096
PROC = Path("/proc")
SYS = Path("/sys")


class Verdict(Enum):
    OK = "ok"
    WARN = "warn"
    """It works, and would work better otherwise."""
    FAIL = "fail"
    """The daemon would not start, or not do what it is configured to."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    about: str
    verdict: Verdict
    found: str
    advice: str = ""
    """What to change, where something is to be changed."""


Check = Callable[[Config], Iterator[Finding]]


def examine(config: Config) -> Iterator[Finding]:
    """Looks at everything; changes nothing, and needs no daemon."""
    for check in (_kernel, _pool, _huge_pages, _limits, _sockets, _disks, _gpus, _numa):
        try:
            yield from check(config)
        except OSError as error:
            yield Finding(
                check.__name__.strip("_").replace("_", " "), Verdict.WARN, f"cannot be looked at: {error}"
            )


def _kernel(config: Config) -> Iterator[Finding]:
    release = os.uname().release
    numbers = re.match(r"(\d+)\.(\d+)", release)
    version = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
    if version < KERNEL_MIN:
        advice = (
            f"upgrade to Linux {_dotted(KERNEL_MIN)} or later: this one cannot populate the pool ahead of "
            "use, nor register it with a GPU"
        )
        yield Finding("kernel", Verdict.WARN, release, advice)
    elif version < KERNEL_MIN_CONTAINERS:
        wanted = _dotted(KERNEL_MIN_CONTAINERS)
        advice = (
            f"where engines run in containers of their own, upgrade to Linux {wanted} or later, or run the "
            "daemon in the host's pid namespace (hostPID)"
        )
        yield Finding("kernel", Verdict.WARN, release, advice)
    else:
        yield Finding("kernel", Verdict.OK, release)


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def _pool(config: Config) -> Iterator[Finding]:
    path, size = config.pool.file, config.pool.size
    if path is None:
        yield Finding(
            "pool", Verdict.WARN, "anonymous memory", "set pool.persistent, or a restart loses the cache"
        )
        return
    folder = _existing(path.parent)
    kind = _file_system(folder)
    if kind not in OF_MEMORY:
        advice = "set pool.path to a file on tmpfs or hugetlbfs: it is used as memory"
        yield Finding("pool", Verdict.FAIL, f"{path} is on {kind}", advice)
        return
    room = os.statvfs(folder)
    total, free = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
    have = path.stat().st_blocks * 512 if path.exists() else 0
    found = f"{human_size(size)} on {kind}, {human_size(free + have)} of {human_size(total)} to be had"
    if size > total:
        enough_gib = -(-size // (1 << 30)) + 1
        advice = f"mount -o remount,size={enough_gib}G {_mount_of(folder).place}, or lower pool.size"
        yield Finding("pool", Verdict.FAIL, found, advice)
    elif size > free + have:
        yield Finding("pool", Verdict.FAIL, found, f"remove what else is in {folder}, or lower pool.size")
    else:
        yield Finding("pool", Verdict.OK, found)
    yield from _memory(size - have, kind)
    yield from _owner("pool's folder", path.parent)


def _memory(wanted: int, kind: str) -> Iterator[Finding]:
    if kind == "hugetlbfs" or wanted <= 0:
        return
    available = _meminfo("MemAvailable")
    found = f"{human_size(available)} available, the pool takes {human_size(wanted)} of it"
    if wanted > available:
        yield Finding("memory", Verdict.FAIL, found, "lower pool.size, or end what else uses memory")
    elif wanted > 0.9 * available:
        yield Finding("memory", Verdict.WARN, found, "leave engines and the kernel more: lower pool.size")
    else:
        yield Finding("memory", Verdict.OK, found)


def _huge_pages(config: Config) -> Iterator[Finding]:
    path = config.pool.file
    if path is None:
        return
    folder = _existing(path.parent)
    if _file_system(folder) == "hugetlbfs":
        free = _meminfo("HugePages_Free", 1) * _meminfo("Hugepagesize")
        have = path.stat().st_blocks * 512 if path.exists() else 0
        enough = free + have >= config.pool.size
        advice = "" if enough else "sysctl vm.nr_hugepages=N at boot, before memory is in pieces"
        yield Finding(
            "huge pages", Verdict.OK if enough else Verdict.FAIL, f"{human_size(free)} free", advice
        )
        return
    huge = next((each for each in _mount_of(folder).options if each.startswith("huge=")), "huge=never")
    if huge == "huge=never":
        advice = "give the pool a tmpfs mounted with huge=within_size (deploy/systemd/mnt-kvtier.mount)"
        yield Finding("huge pages", Verdict.WARN, "the pool's file system uses small pages", advice)
    else:
        yield Finding("huge pages", Verdict.OK, huge)


def _limits(config: Config) -> Iterator[Finding]:
    for name, number, wanted, unit in (
        ("memlock", resource.RLIMIT_MEMLOCK, resource.RLIM_INFINITY, "LimitMEMLOCK=infinity"),
        ("open files", resource.RLIMIT_NOFILE, DESCRIPTORS_WANTED, "LimitNOFILE=65536"),
    ):
        _, hard = resource.getrlimit(number)
        enough = hard == resource.RLIM_INFINITY or (wanted != resource.RLIM_INFINITY and hard >= wanted)
        found = "no limit" if hard == resource.RLIM_INFINITY else f"at most {hard:,} here"
        advice = (
            ""
            if enough
            else f"in the unit: {unit} (as deploy/systemd/kvtierd.service has it); a shell: ulimit -H"
        )
        yield Finding(name, Verdict.OK if enough else Verdict.WARN, found, advice)


def _sockets(config: Config) -> Iterator[Finding]:
    group = config.server.group
    if group:
        try:
            members = grp.getgrnam(group).gr_mem
            yield Finding("socket group", Verdict.OK, f"{group}: {', '.join(members) or 'no members listed'}")
        except KeyError:
            advice = f"create it (systemd-sysusers, groupadd --system {group}), or leave server.group empty"
            yield Finding("socket group", Verdict.FAIL, f"there is no group {group}", advice)
    yield from _owner("sockets' folder", config.server.socket_path.parent)


def _disks(config: Config) -> Iterator[Finding]:
    for path in config.disk.paths:
        about = f"disk {path}"
        folder = _existing(path)
        if _file_system(folder) in OF_MEMORY:
            yield Finding(
                about,
                Verdict.WARN,
                f"is on {_file_system(folder)}",
                "that is memory: enlarge the pool instead",
            )
            continue
        room = os.statvfs(folder)
        slab = path / "kvtier.slab"
        have = slab.stat().st_blocks * 512 if slab.exists() else 0
        free = room.f_bavail * room.f_frsize + have
        found = f"{human_size(config.disk.size)} wanted, {human_size(free)} to be had"
        if config.disk.size > free:
            yield Finding(about, Verdict.FAIL, found, "lower disk.size, or make room")
        else:
            yield Finding(about, Verdict.OK, found)
        yield from _owner(about, path)


def _gpus(config: Config) -> Iterator[Finding]:
    if not Path("/dev/nvidiactl").exists():
        yield Finding("GPUs", Verdict.OK, "no NVIDIA driver here: engines on CPUs only")
        return
    unreadable = [
        str(node)
        for node in (
            Path("/dev/nvidiactl"),
            Path("/dev/nvidia-uvm"),
            *sorted(Path("/dev").glob("nvidia[0-9]*")),
        )
        if not os.access(node, os.R_OK | os.W_OK)
    ]
    if unreadable:
        advice = "start nvidia-persistenced, or nvidia-modprobe -u -c 0; in a unit: DeviceAllow"
        yield Finding("GPUs", Verdict.FAIL, f"cannot be opened: {', '.join(unreadable)}", advice)
        return
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        advice = "install the driver's library, or in a container use the NVIDIA runtime"
        yield Finding("GPUs", Verdict.FAIL, f"libcuda.so.1 cannot be loaded: {error}", advice)
        return
    version = ctypes.c_int()
    library.cuDriverGetVersion(ctypes.byref(version))
    major, minor = divmod(version.value, 1000)
    found = f"driver for CUDA {major}.{minor // 10}"
    if major < 12:
        yield Finding("GPUs", Verdict.FAIL, found, "install driver 525 (CUDA 12.0) or later")
    else:
        yield Finding("GPUs", Verdict.OK, found)


def _numa(config: Config) -> Iterator[Finding]:
    nodes = sorted((SYS / "devices/system/node").glob("node[0-9]*"))
    yield Finding("NUMA", Verdict.OK, f"{len(nodes) or 1} {'node' if len(nodes) < 2 else 'nodes'}")


# --- looking ---


def _existing(path: Path) -> Path:
    """The folder itself, or the nearest above it that exists."""
    while not path.exists():
        path = path.parent
    return path


def _owner(about: str, folder: Path) -> Iterator[Finding]:
    """Whether a folder of ours, where it exists, is ours alone; root may look on behalf of another user."""
    if not folder.exists():
        above = _existing(folder)
        if not os.access(above, os.W_OK):
            advice = f"as root: install -d -m 0700 -o {os.geteuid()} {folder} (kvtier.tmpfiles for the unit)"
            yield Finding(
                about, Verdict.FAIL, f"{folder} does not exist, and {above} cannot be written", advice
            )
        return
    found = folder.stat()
    if found.st_mode & stat.S_IWOTH or found.st_mode & stat.S_IWGRP:
        mode = f"mode {stat.S_IMODE(found.st_mode):04o}"
        yield Finding(
            about, Verdict.FAIL, f"{folder} can be written by others ({mode})", f"chmod go-w {folder}"
        )
    elif found.st_uid not in (0, os.geteuid()) and os.geteuid() != 0:
        advice = f"run this as that user, or give {folder} to the daemon's"
        yield Finding(about, Verdict.FAIL, f"{folder} belongs to uid {found.st_uid}", advice)


@dataclass(frozen=True, slots=True)
class _Mount:
    place: Path
    kind: str
    options: list[str]


def _mounts() -> Iterator[_Mount]:
    for line in (PROC / "self/mounts").read_text().splitlines():
        _, place, kind, options, *_ = line.split()
        yield _Mount(Path(place.replace("\\040", " ")), kind, options.split(","))


def _mount_of(path: Path) -> _Mount:
    """The last of those that it may lie on: a later one covers an earlier one."""
    path = path.resolve()
    over = [mount for mount in _mounts() if path.is_relative_to(mount.place)]
    longest = max(len(mount.place.parts) for mount in over)
    return [mount for mount in over if len(mount.place.parts) == longest][-1]


def _file_system(path: Path) -> str:
    return _mount_of(path).kind


def _meminfo(name: str, unit: int = 1024) -> int:
    for line in (PROC / "meminfo").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * unit
    return 0
