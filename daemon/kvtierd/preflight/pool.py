"""Whether the pool can be made or used: its folder, its file, its room, its memory, and who uses it now."""

import fcntl
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from kvtierd.config.settings import format_size, human_size
from kvtierd.memory.errors import PoolError
from kvtierd.memory.pool_file import (
    HEADER_AREA_BYTES,
    Header,
    default_extent_bytes,
    file_bytes,
    gib,
    holders,
    read_header,
    reason_to_remake,
    refuse_foreign,
)
from kvtierd.preflight import places
from kvtierd.preflight.findings import Finding, Situation, Verdict, in_use_by
from kvtierd.preflight.processes import described

PROC = Path("/proc")
SYS = Path("/sys")
MEMORY_WARNING = 0.9


def check_pool(situation: Situation) -> Iterator[Finding]:
    """Checks the pool's file, its folder and its memory; for an anonymous pool only the memory."""
    config = situation.config
    path, size = config.pool.file, config.pool.size
    if path is None:
        remedy = "set pool.persistent, or a restart loses the cache"
        yield Finding(
            "pool", Verdict.WARNING, "it is anonymous memory", remedy, "pool.persistent", value="false"
        )
        yield from _check_memory(size, _file_bytes(situation))
        return
    if (trouble := places.private_folder(path.parent)) is not None:
        yield Finding("pool folder", Verdict.FAILURE, trouble.found, trouble.remedy, "pool.path", path)
        return
    yield Finding("pool folder", Verdict.OK, places.usable(path.parent))
    if os.path.lexists(path):
        unusable = list(_check_file(path, situation))
        yield from unusable
        if any(each.verdict is Verdict.FAILURE and not each.holder for each in unusable):
            return
    folder = places.existing(path.parent)
    mount = places.mount_of(folder)
    have = path.stat().st_blocks * 512 if path.exists() else 0
    if mount.kind not in places.OF_MEMORY:
        yield Finding(
            "pool file system",
            Verdict.WARNING,
            f"it is on {mount.kind}, which writes what is stored to a disk, and slows it down",
            "name a file on tmpfs or hugetlbfs: the pool is used as memory",
            "pool.path",
            path,
        )
    else:
        yield Finding("pool file system", Verdict.OK, mount.kind)
    yield from _check_room(path, size, have, folder, mount)
    if mount.kind in places.OF_MEMORY and mount.kind != "hugetlbfs" and _file_bytes(situation) > have:
        yield from _check_memory(size, _file_bytes(situation) - have)


def _file_bytes(situation: Situation) -> int:
    """How much of pool.size is used: a header and whole extents. Unlike `geometry_for`, it accepts any size,
    because what is too large is told with all else."""
    pool = situation.config.pool
    extent_bytes = pool.extent_size or default_extent_bytes(pool.size)
    return pool.size - (pool.size - HEADER_AREA_BYTES) % extent_bytes


def _check_file(path: Path, situation: Situation) -> Iterator[Finding]:
    """Checks a pool file that exists: that it is this user's, that it is a pool, and that nobody uses it."""

    def failure(found: str, remedy: str, **more: bool) -> Finding:
        return Finding("pool file", Verdict.FAILURE, found, remedy, "pool.path", path, **more)

    found = path.lstat()
    if (trouble := places.not_private(found.st_uid, found.st_mode, found.st_nlink)) is not None:
        yield failure(trouble.found, trouble.remedy)
        return
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            pids = holders(fd)
            said = f"the pool is {in_use_by(pids, described(pids))}"
            if situation.is_of_daemon(pids):
                yield _dropped(fd, path, situation) or Finding("pool file", Verdict.OK, said)
            else:
                remedy = "stop that daemon, or name another file"
                yield failure(said, remedy, passing=True, holder=True)
            return
        # This is checked with the lock, because a process that makes the pool holds it until there is one.
        try:
            refuse_foreign(fd, path)
        except PoolError:
            yield failure("the file holds something that is not a pool", "remove it, or name another")
            return
        free = f"{path} is a pool, or empty, and nobody uses it"
        yield _dropped(fd, path, situation) or Finding("pool file", Verdict.OK, free)
    finally:
        os.close(fd)


def _dropped(fd: int, path: Path, situation: Situation) -> Finding | None:
    """Warns if the pool in this file does not have the configured size, and a start would make it anew."""
    header, pool = read_header(fd), situation.config.pool
    if not isinstance(header, Header):
        return None
    made = file_bytes(header.geometry)
    why = reason_to_remake(header, made, pool.size, pool.extent_size or None)
    if why is None:
        return None
    found = f"the next start is cold, and drops the blocks that {path} holds: {why}"
    extents = ", and leave pool.extent_size out," if pool.extent_size else ""
    remedy = f"set pool.size as it was, or to {format_size(made)}{extents} to keep them"
    return Finding("pool file", Verdict.WARNING, found, remedy, "pool.size", format_size(pool.size))


def _check_room(path: Path, size: int, have: int, folder: Path, mount: places.Mount) -> Iterator[Finding]:
    failure = partial(Finding, verdict=Verdict.FAILURE, field="pool.size", value=format_size(size))
    system = os.statvfs(folder)
    total, free = system.f_blocks * system.f_frsize, system.f_bavail * system.f_frsize
    if mount.kind == "hugetlbfs":
        page = system.f_frsize
        pages = _free_huge_pages(page)
        found = f"{human_size(pages * page + have)} of huge pages to be had for {human_size(size)}"
        if size > pages * page + have:
            wanted = -(-size // page)
            remedy = (
                f"sysctl vm.nr_hugepages={wanted} at boot, while memory is in one piece, or lower pool.size"
            )
            yield failure("huge pages", found=found, remedy=remedy, passing=True)
        else:
            yield Finding("huge pages", Verdict.OK, found)
    elif mount.kind == "tmpfs":
        huge = next((each for each in mount.options if each.startswith("huge=")), "huge=never")
        found = f"{mount.place} has {huge}"
        if huge == "huge=never":
            found += ": mounted with huge=within_size it would save page-table walks"
        yield Finding("huge pages", Verdict.OK, found)
    if total == 0:  # a hugetlbfs that is mounted without a size says nothing
        return
    to_be_had = f"{gib(free + have)} free of {gib(total)}"
    if size > total:
        gib_wanted = -(-(size + HEADER_AREA_BYTES) // (1 << 30))
        remedy = "lower pool.size, or set pool.path to a larger one"
        if mount.kind == "tmpfs":
            remedy = (
                f"lower pool.size, enlarge it (mount -o remount,size={gib_wanted}G {mount.place}; "
                "containers: give them a larger /dev/shm), or set pool.path to a larger one"
            )
            if size - have > meminfo("MemAvailable") + meminfo("SwapFree"):
                remedy = "lower pool.size: there is no memory for it, which no remount changes"
        yield failure(
            "pool room",
            found=f"{human_size(size)} is larger than the file system of {path} ({human_size(total)})",
            remedy=remedy,
        )
    elif size > free + have:
        yield failure(
            "pool room",
            found=f"{human_size(size)} does not fit {folder}: {to_be_had}",
            remedy=f"lower pool.size, or remove what else is in {folder}",
            passing=True,
        )
    else:
        yield Finding("pool room", Verdict.OK, f"{human_size(size)} wanted, {to_be_had}")


def _check_memory(size: int, wanted: int) -> Iterator[Finding]:
    """Checks that there is memory for the part of the pool that has none yet."""
    finding = partial(Finding, "memory", field="pool.size", value=format_size(size))
    free, swap = meminfo("MemAvailable"), meminfo("SwapFree")
    limit = _control_group_limit()
    found = f"{human_size(free)} available, the pool takes {human_size(wanted)} more"
    if limit is not None and wanted > limit:
        yield finding(
            Verdict.FAILURE,
            f"this control group may use {human_size(limit)}, the pool takes {human_size(wanted)} more",
            "raise its limit (memory.max; Kubernetes: resources.limits.memory), or lower pool.size",
        )
    elif wanted > free + swap:
        remedy = "lower pool.size, or end what else uses memory"
        yield finding(Verdict.FAILURE, found, remedy, passing=True)
    elif wanted > MEMORY_WARNING * free:
        remedy = "leave engines and the kernel more: lower pool.size"
        yield finding(Verdict.WARNING, found, remedy)
    else:
        yield Finding("memory", Verdict.OK, found)


def _control_group_limit() -> int | None:
    """The smallest memory.max of this process's control group and those above it; None if there is none."""
    try:
        name = next(
            line.split("::", 1)[1]
            for line in (PROC / "self/cgroup").read_text().splitlines()
            if line.startswith("0::")
        )
    except (OSError, StopIteration):
        return None
    root = SYS / "fs/cgroup"
    group = root / name.strip("/")
    limits = []
    for folder in (group, *group.parents):
        if not folder.is_relative_to(root):
            break
        try:
            text = (folder / "memory.max").read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            limits.append(int(text))
    return min(limits, default=None)


def _free_huge_pages(page_bytes: int) -> int:
    file = SYS / f"kernel/mm/hugepages/hugepages-{page_bytes >> 10}kB/free_hugepages"
    return int(file.read_text()) if file.exists() else 0


def meminfo(name: str) -> int:
    """An entry of /proc/meminfo in bytes; 0 if the kernel does not have it."""
    for line in (PROC / "meminfo").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0
