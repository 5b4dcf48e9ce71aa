"""Whether the disks can be used: their folders, their slabs, their room, and whether two of them are one.

A disk that has never worked is a mistake in the configuration, and keeps the daemon from starting. A disk
that worked before and does not now is broken: the daemon starts without it, and uses it again later.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from kvtierd.config.settings import format_size, human_size
from kvtierd.memory.pool_file import file_bytes
from kvtierd.preflight.asking import DEADLINE_S, Facts, ask
from kvtierd.preflight.findings import Finding, Situation, Verdict
from kvtierd.preflight.places import OF_MEMORY, Trouble, existing, mount_of, not_mounted, not_private
from kvtierd.tiers.disk.image import disk_geometry

LATER = "the daemon starts without it, and uses it as soon as it can"


def check_disks(situation: Situation) -> Iterator[Finding]:
    """Checks every folder of disk.paths, and all of them together."""
    disk = situation.config.disk
    if not disk.paths:
        return
    try:
        length = file_bytes(disk_geometry(disk.size, disk.extent_size))
    except ValueError as error:
        remedy = "write another size"
        yield Finding("disk size", Verdict.FAILURE, str(error), remedy, "disk.size", format_size(disk.size))
        return
    answers = ask([["disk", str(path)] for path in disk.paths])
    found = list(zip(disk.paths, answers, strict=True))
    for path, facts in found:
        yield from _check_one(path, facts, disk.size)
    yield from _check_twice([(path, facts) for path, facts in found if facts and facts.get("is_folder")])
    yield from _check_room_together(found, disk.size, length)


def _check_one(path: Path, facts: Facts | None, size: int) -> Iterator[Finding]:
    finding = partial(_about, path)
    if facts is None:
        found = f"the folder does not answer within {DEADLINE_S:g} s: {LATER}"
        yield finding(Verdict.WARNING, found, "check the disk, or take it out of disk.paths")
        return
    trouble = facts.get("error") or facts.get("write_error")
    if trouble:
        found = f"looking at it failed with {trouble}: {LATER}"
        yield finding(Verdict.WARNING, found, "check the disk, or take it out of disk.paths")
        return
    if (place := not_mounted(path)) is not None:
        found = f"nothing is mounted at {place}, where /etc/fstab has a file system"
        if facts["exists"]:
            yield finding(Verdict.WARNING, f"{found}: the folder below it would be used", f"mount {place}")
        else:
            yield finding(Verdict.WARNING, f"{found}: {LATER}", f"mount {place}")
            return
    elif not facts["exists"]:
        remedy = f"create it for the daemon's user (install -d -m 0700 {path}), or take it out of disk.paths"
        yield finding(Verdict.FAILURE, "the folder does not exist", remedy)
        return
    if not facts["is_folder"]:
        yield finding(Verdict.FAILURE, f"{path} is not a folder", "name one in disk.paths")
        return
    if (unusable := _slab_trouble(facts)) is not None:
        yield finding(Verdict.FAILURE, f"{path}/kvtier.slab: {unusable.found}", unusable.remedy)
        return
    worked = bool(facts["slab"] and facts["slab"]["is_used"])
    if facts["read_only"]:
        remedy = f"mount -o remount,rw {mount_of(path).place}, or take it out of disk.paths"
        found = "the file system is mounted read-only"
        if worked:
            found = f"{found}, and has been written before: {LATER}; the disk may be failing"
        yield finding(Verdict.WARNING if worked else Verdict.FAILURE, found, remedy)
        return
    if not facts["writable"]:
        remedy = "let the daemon's user write there, or name another folder"
        yield finding(Verdict.FAILURE, "the folder cannot be written by the daemon's user", remedy)
        return
    kind = mount_of(existing(path)).kind
    if kind in OF_MEMORY:
        found = f"the folder is on {kind}, which is memory"
        yield finding(Verdict.WARNING, found, "name a folder on a disk, and enlarge the pool instead")
    elif facts["direct"] is False:
        found = f"{kind} has no O_DIRECT: what is written goes through the kernel's cache, which takes memory"
        yield finding(Verdict.WARNING, found, "name a folder on a local file system, as ext4 or xfs")
    else:
        yield Finding(f"disk {path}", Verdict.OK, f"{human_size(size)} wanted, on {kind}")
    if facts["others_write"]:
        found = "the folder can be written by others, who may remove what the daemon keeps there"
        yield finding(Verdict.WARNING, found, f"chmod go-w {path}")


def _about(path: Path, verdict: Verdict, found: str, remedy: str) -> Finding:
    return Finding(f"disk {path}", verdict, found, remedy, "disk.paths", path)


def _slab_trouble(facts: Facts) -> Trouble | None:
    slab = facts["slab"]
    if slab is None:
        return None
    if (trouble := not_private(slab["uid"], slab["mode"], slab["links"])) is not None:
        return trouble
    if slab.get("error"):
        return Trouble(f"opening it failed with {slab['error']}", "remove it, or name another folder")
    if not slab["is_ours"]:
        return Trouble("the file holds something that is not a slab", "remove it, or name another folder")
    return None


def _check_twice(found: Sequence[tuple[Path, Facts]]) -> Iterator[Finding]:
    """Refuses two names of one folder, and warns of two folders on one disk."""
    for number, (path, facts) in enumerate(found):
        for other, others in found[:number]:
            if facts["identity"] == others["identity"]:
                yield _about(
                    path, Verdict.FAILURE, f"it is the same folder as {other}", "name each folder once"
                )
                break
            if facts["identity"][0] == others["identity"][0]:
                yield _about(
                    path,
                    Verdict.WARNING,
                    f"it is on the same file system as {other}, and no faster, nor safer, than one folder",
                    "name one folder for each disk, and enlarge disk.size",
                )
                break


def _check_room_together(
    found: Sequence[tuple[Path, Facts | None]], size: int, length: int
) -> Iterator[Finding]:
    """Checks that each file system has room for all slabs that are to be on it."""
    devices: dict[int, list[tuple[Path, Facts]]] = {}
    for path, facts in found:
        if facts and facts.get("writable") and not facts.get("write_error"):
            devices.setdefault(facts["identity"][0], []).append((path, facts))
    for together in devices.values():
        slabs = [facts["slab"] for _, facts in together]
        have = [slab["bytes"] if slab else 0 for slab in slabs]
        missing = sum(max(0, length - bytes_) for bytes_ in have)
        free, total = together[0][1]["free_bytes"], together[0][1]["total_bytes"]
        # A slab that is larger than wanted gives the difference back when it is made anew.
        free += sum(max(0, bytes_ - length) for bytes_ in have)
        if missing <= free:
            continue
        places = ", ".join(str(path) for path, _ in together)
        worked = all(slab and slab["is_used"] and slab["length"] == length for slab in slabs)
        said = (
            f"{places} {'needs' if len(together) == 1 else 'need'} {human_size(missing)} more, and "
            f"{human_size(free)} of {human_size(total)} are free"
        )
        yield Finding(
            "disk room",
            Verdict.WARNING if worked else Verdict.FAILURE,
            f"{said}{': blocks that find no room are not written' if worked else ''}",
            f"lower disk.size, make room in {places}, or name another folder in disk.paths",
            "disk.size",
            format_size(size),
            passing=True,
        )
