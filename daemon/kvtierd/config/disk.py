"""The settings of the disk tier, and checks of everything that is divided into extents."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from kvtierd.config import settings as s
from kvtierd.core.ids import PAGE_BYTES
from kvtierd.core.stimuli import CoreDisks, WriteMode
from kvtierd.workers.supervisor.kinds import IO_THREADS_MAX

EXTENT_BYTES_MIN, EXTENT_BYTES_MAX = 1 << 20, 1 << 30
HEADER_BYTES = 2 << 20
"""The size of the header of a pool file or of a disk's slab file; extents follow it."""
DISK_BYTES_MAX = PAGE_BYTES << 32
"""The largest disk: a slot is addressed by a page number of 32 bits."""
DISKS_MAX = 16
QUEUE_BYTES_MIN = 1 << 20

_DISKS = CoreDisks()


@dataclass(frozen=True, slots=True)
class DiskConfig:
    """The disk tier: folders that take the blocks that memory has no room for."""

    paths: tuple[Path, ...] = s.setting(
        (),
        s.paths,
        "Directories of the disk tier, one for each disk; each gets a file kvtier.slab. A list, or text "
        "with colons between them. Empty: no disk tier.",
    )
    size: int = s.setting(0, s.size, "Bytes in each of the directories; its file is made as large at once.")
    encryption_keys: Path | None = s.setting(
        None,
        s.path,
        "The folder with the keys by which disks are encrypted: a file named default for all tenants, and "
        "one named after each tenant that has a key of its own. Empty: disks are not encrypted.",
    )
    extent_size: int = s.setting(
        0, s.size, "Bytes of one extent, a power of two from 1MiB to 1GiB. 0: chosen from the disk's size."
    )
    write_mode: str = s.setting(
        _DISKS.mode.value,
        s.choice(*(mode.value for mode in WriteMode)),
        "When a block is written to its disk: back (before it is evicted), through (as soon as it is "
        "stored) or on-reuse (when it is found for the first time).",
        metavar="MODE",
    )
    write_bytes_per_s: int = s.setting(
        _DISKS.write_bytes_per_s,
        s.size,
        "At most so many bytes are written to each disk in a second, so that reads find room beside them. "
        "0: any number.",
    )
    writes_per_day: float = s.setting(
        _DISKS.writes_per_day,
        s.times,
        "How often each disk may be written from end to end in a day, to spare its flash; what is "
        "beyond that does not reach it. 0: any number.",
        metavar="NUMBER",
    )
    threads: int = s.setting(2, partial(s.count, most=IO_THREADS_MAX), "Threads of each disk's worker.")
    queue_depth: int = s.setting(
        32, partial(s.count, most=1024), "Operations of each of these threads at once."
    )
    deadline_s: float = s.setting(
        30.0,
        partial(s.seconds, least=0.1),
        "A disk's worker for which the disk has done nothing for this long is killed and started again.",
    )
    start_deadline_s: float = s.setting(
        10.0,
        partial(s.seconds, least=0),
        "How long the start waits for disks; one that needs longer joins later.",
    )
    write_queue_size: int = s.setting(
        _DISKS.write_queue_bytes, s.size, "Bytes on their way to each disk at once."
    )
    read_queue_size: int = s.setting(
        _DISKS.read_queue_bytes,
        s.size,
        "Bytes on their way from each disk at once; blocks beyond that are promoted after them.",
    )
    slow_deadline_s: float = s.setting(
        _DISKS.slow_deadline_s,
        s.seconds,
        "A read or write that takes longer counts as an error, and what it was to promote is a miss.",
    )
    errors_max: int = s.setting(
        _DISKS.errors_max, s.count, "After this many errors in a row a disk is not used for a while."
    )
    probe_after_s: float = s.setting(
        _DISKS.probe_after_s,
        s.seconds,
        "How long such a disk is not used; after that, one read decides whether it is.",
    )
    recompute_if_faster: bool = s.setting(
        _DISKS.recompute_if_faster,
        s.boolean,
        "Report blocks as missing where their engine computes them faster than they load.",
    )

    def to_core(self) -> CoreDisks:
        return CoreDisks(
            mode=WriteMode(self.write_mode),
            write_bytes_per_s=self.write_bytes_per_s,
            writes_per_day=self.writes_per_day,
            write_queue_bytes=self.write_queue_size,
            read_queue_bytes=self.read_queue_size,
            slow_deadline_s=self.slow_deadline_s,
            errors_max=self.errors_max,
            probe_after_s=self.probe_after_s,
            recompute_if_faster=self.recompute_if_faster,
        )


class Refuse(Protocol):
    """Notes that the value of a setting cannot be used, because of the values of `besides`."""

    def __call__(self, key: str, value: object, message: str, *besides: str) -> None: ...


def check_extents(refuse: Refuse, section: str, size: int, extent: int) -> None:
    """Refuses a size without room for two extents, and an extent size that is not possible."""
    if extent and not (EXTENT_BYTES_MIN <= extent <= EXTENT_BYTES_MAX and extent & (extent - 1) == 0):
        advice = "write a power of two from 1MiB to 1GiB, or 0"
        refuse(f"{section}.extent_size", s.format_size(extent), advice)
        extent = 0
    if size < (least := 2 * (extent or EXTENT_BYTES_MIN) + HEADER_BYTES):
        advice = f"write at least {s.format_size(least)}: a header and two extents"
        refuse(f"{section}.size", s.format_size(size), advice, f"{section}.extent_size")


def check_disks(disk: DiskConfig, refuse: Refuse, *, wanted: bool) -> None:
    """Refuses values of the disk tier that are wrong only together with others. `wanted`: whether there is
    to be one, which is so too if its paths are given and cannot be used."""
    if not wanted:
        return
    if len(disk.paths) > DISKS_MAX:
        refuse("disk.paths", len(disk.paths), f"at most {DISKS_MAX} disks can be used: name fewer")
    if not disk.size:
        advice = "say how many bytes each directory of disk.paths may hold, e.g. 500GiB"
        refuse("disk.size", 0, advice)
    else:
        check_extents(refuse, "disk", disk.size, disk.extent_size)
    if disk.size > DISK_BYTES_MAX:
        advice = f"a disk holds at most {s.format_size(DISK_BYTES_MAX)}: write less, or use several paths"
        refuse("disk.size", s.format_size(disk.size), advice)
    for name in ("write_queue_size", "read_queue_size"):
        if (value := getattr(disk, name)) < QUEUE_BYTES_MIN:
            advice = f"write at least {s.format_size(QUEUE_BYTES_MIN)}"
            refuse(f"disk.{name}", s.format_size(value), advice)
    if disk.slow_deadline_s > disk.deadline_s:
        refuse(
            "disk.slow_deadline_s",
            disk.slow_deadline_s,
            f"must be at most disk.deadline_s ({disk.deadline_s:g}), at which the worker is killed",
            "disk.deadline_s",
        )
