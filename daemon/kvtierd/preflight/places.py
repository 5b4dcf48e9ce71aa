"""Folders and file systems: what is there, and what the daemon may do there. Nothing is made or changed."""

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
OF_MEMORY = ("tmpfs", "hugetlbfs", "ramfs")


@dataclass(frozen=True, slots=True)
class Mount:
    """A mounted file system."""

    place: Path
    kind: str
    options: list[str]


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why a place cannot be used, and what to do."""

    found: str
    remedy: str


def existing(path: Path) -> Path:
    """The path itself, or the nearest folder above it that exists."""
    while not os.path.lexists(path):
        path = path.parent
    return path


def private_folder(path: Path) -> Trouble | None:
    """Why the daemon cannot use this folder for files of its own, as
    `kvtierd.rpc.sockets.make_private_directory` requires; None if it can. A missing folder is fine if it can
    be made."""
    if not os.path.lexists(path):
        above = existing(path)
        return None if above == path else _makeable(path, above)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        return Trouble(f"{path} is not a folder", "remove it, or name another place")
    if found.st_uid not in (0, os.geteuid()):
        return Trouble(
            f"the folder {path} belongs to uid {found.st_uid}, this daemon runs as {os.geteuid()}",
            "give it to the daemon's user, or name another place",
        )
    if found.st_mode & 0o022:
        mode = f"{stat.S_IMODE(found.st_mode):04o}"
        if found.st_mode & stat.S_ISVTX:  # a folder for everybody, such as /tmp
            return Trouble(
                f"the folder {path} can be written by others (mode {mode})",
                f"name a folder of its own, e.g. {path / 'kvtier'}",
            )
        return Trouble(f"the folder {path} can be written by others (mode {mode})", f"chmod go-w {path}")
    return _writable(path)


def usable(path: Path) -> str:
    """For a folder without trouble, says whether it exists or will be made."""
    return f"{path} is there" if path.exists() else f"{path} will be made"


def _makeable(path: Path, above: Path) -> Trouble | None:
    if not above.is_dir():
        return Trouble(
            f"the folder {path} cannot be made: {above} is not a folder",
            f"remove {above}, or name another place",
        )
    trouble = _writable(above)
    if trouble is None:
        return None
    made = f"install -d -m 0700 -o {os.geteuid()} {path}"
    if is_read_only(above):
        return Trouble(f"the folder {path} does not exist, and {trouble.found}", trouble.remedy)
    return Trouble(f"the folder {path} does not exist, and {trouble.found}", f"create it as root: {made}")


def _writable(folder: Path) -> Trouble | None:
    if is_read_only(folder):
        place = mount_of(folder).place
        return Trouble(
            f"{folder} is on a file system that is mounted read-only",
            f"mount -o remount,rw {place}, or name another place",
        )
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
        return Trouble(
            f"{folder} cannot be written by uid {os.geteuid()}",
            "let the daemon's user write there, or name another place",
        )
    return None


def is_read_only(folder: Path) -> bool:
    return bool(os.statvfs(folder).f_flag & os.ST_RDONLY)


def not_private(uid: int, mode: int, links: int) -> Trouble | None:
    """Why a file cannot be the daemon's own, as `kvtierd.memory.pool_file.open_locked` requires; None if it
    can."""
    if stat.S_ISLNK(mode):
        return Trouble("it is a symbolic link", "name the file itself")
    if stat.S_ISDIR(mode):
        return Trouble("it is a folder", "name a file in it")
    if not stat.S_ISREG(mode):
        return Trouble("it is not a regular file", "remove it, or name another")
    if uid != os.geteuid():
        return Trouble(
            f"the file belongs to uid {uid}, this daemon runs as {os.geteuid()}", "remove it, or name another"
        )
    if links > 1:
        return Trouble(f"the file has {links} hard links, and may be one in disguise", "remove the others")
    if mode & 0o077:
        return Trouble(
            f"the file has mode {stat.S_IMODE(mode):04o}: others may have changed it",
            "remove it, or chmod 600 it if you trust what is in it",
        )
    return None


def mounts() -> Iterator[Mount]:
    """Yields the file systems that this process sees; a later one covers an earlier one at the same place."""
    for line in (PROC / "self/mounts").read_text().splitlines():
        _, place, kind, options, *_ = line.split()
        yield Mount(Path(_unescaped(place)), kind, options.split(","))


def mount_of(path: Path) -> Mount:
    """The file system that holds an existing path."""
    path = path.resolve()
    over = [mount for mount in mounts() if path.is_relative_to(mount.place)]
    longest = max(len(mount.place.parts) for mount in over)
    return [mount for mount in over if len(mount.place.parts) == longest][-1]


def not_mounted(path: Path, table: Path = Path("/etc/fstab")) -> Path | None:
    """The place in /etc/fstab where a path should lie, but where nothing is mounted; None if there is
    none."""
    try:
        lines = [line.split() for line in table.read_text().splitlines()]
    except OSError:
        return None
    wanted = [Path(_unescaped(line[1])) for line in lines if len(line) > 1 and not line[0].startswith("#")]
    over = [place for place in wanted if place != Path("/") and path.is_relative_to(place)]
    if not over:
        return None
    place = max(over, key=lambda each: len(each.parts))
    return None if any(mount.place == place for mount in mounts()) else place


def _unescaped(text: str) -> str:
    for escaped, plain in (("\\040", " "), ("\\011", "\t"), ("\\134", "\\")):
        text = text.replace(escaped, plain)
    return text
