"""What `kvtierctl` says in sentences, line by line."""

from collections.abc import Iterable, Iterator, Mapping

from kvtier.v1 import admin_pb2

from kvtierd.config.settings import human_size


def sizes_line(shadow: admin_pb2.ShadowStatus) -> str:
    """What other sizes of the pool would hit."""
    if not shadow.known:
        return "not known yet"
    return (
        f"half {shadow.half:.1%}, now {shadow.now:.1%}, twice {shadow.twice:.1%} by a sample; "
        f"hit {shadow.actual:.1%}"
    )


def scrub_line(disk: admin_pb2.DiskStatus) -> str:
    """Says how far the scrub of a disk is."""
    share = disk.scrubbed_blocks / disk.scrub_blocks if disk.scrub_blocks else 1.0
    return (
        f"{disk.path}: {disk.scrubbed_blocks:,} of {count(disk.scrub_blocks, 'block')} compared, {share:.0%}"
    )


def scrubbed(disks: Iterable[admin_pb2.DiskStatus], corrupt: Mapping[str, int]) -> Iterator[str]:
    """Says how a scrub ended, disk by disk. `corrupt`: how many corrupt blocks it found, by the disk's
    path."""
    for disk in disks:
        if disk.state != "live":
            yield f"{disk.path}: not looked at, {disk.state}{f': {disk.why}' if disk.why else ''}"
            continue
        how = "" if disk.scrubbed_blocks >= disk.scrub_blocks else "; it goes on"
        bad = f"{count(corrupt[disk.path], 'block')} CORRUPT" if corrupt[disk.path] else "none corrupt"
        yield f"{scrub_line(disk)}, {bad}{how}"


def duration(seconds: float) -> str:
    """Writes a time in its two largest units: 3 s, 12 min 5 s, 2 h 4 min, 3 d 1 h."""
    whole = int(seconds)
    units = (("d", 86_400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1))
    for name, size, lesser, lesser_size in units:
        if whole >= size:
            return f"{whole // size} {name} {whole % size // lesser_size} {lesser}"
    return f"{whole} s"


def drained(progress: admin_pb2.DrainProgress) -> Iterator[str]:
    """Says how a drain ended and what to do next, line by line."""
    kept = f"{count(progress.kept_blocks, 'block')}, {human_size(progress.kept_bytes)}"
    match progress.state:
        case "stopping":
            yield f"kvtierd, pid {progress.pid}, has stopped; everything accepted was committed"
            yield f"  kept   {kept}, in {progress.pool_path}"
            yield f"  start  {progress.start_again}"
            yield "         with the same configuration file and environment; engines attach by themselves"
        case "drained":
            yield f"kvtierd, pid {progress.pid}, is drained: nothing is under way, and nothing new is taken"
            yield f"  holds  {kept}, in {progress.pool_path or 'anonymous memory, which ends with it'}"
            yield "  next   `kvtierctl resume`, or stop it: kill -TERM, systemctl stop"
        case "late":
            active = progress.transfers_active
            what = count(active, "transfer") if active else "reading from a disk"
            yield f"{what} still active when the time was up"
            yield f"  kvtierd, pid {progress.pid}, goes on draining: wait again with the same command, or"
            yield "  take it back with `kvtierctl resume`; SIGTERM stops it and fails what is under way"
        case _:
            yield "somebody has resumed it meanwhile: it takes stores and loads again"


def reloaded(response: admin_pb2.ReloadResponse) -> Iterator[str]:
    """Says what a reload has changed, line by line."""
    for change in response.applied:
        yield f"{change.key}: {change.before} -> {change.after}"
    for change in response.needs_restart:
        yield f"{change.key}: stays {change.before}; {change.after} takes a restart (drain --for-restart)"
    if not response.applied and not response.needs_restart:
        yield "nothing has changed"


def count(number: int, what: str) -> str:
    """Writes a number with its noun: 1 block, 2,000 blocks."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def shortened(name: str, width: int | None) -> str:
    """A name, without its beginning if it is longer than `width`: names differ in their ends more often."""
    return name if width is None or len(name) <= width else f"…{name[1 - width :]}"


def usable_bytes(pool: admin_pb2.PoolStatus) -> int:
    """The part of the pool that can be used now."""
    return pool.populated_bytes or pool.capacity_bytes  # in a daemon of an earlier version it is all of it
