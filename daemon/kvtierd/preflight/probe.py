"""Asks a disk's folder or the GPUs' driver, in a process of its own, because either may hang for ever.

It is run as a file, by path, and needs only the standard library. It prints one JSON object.
"""

import ctypes
import errno
import json
import mmap
import os
import sys

SLAB_NAME = "kvtier.slab"
MAGIC_STEM = b"KVTIERP"
PAGE_BYTES = 4096
COMPUTE_MODE = 20
"""CU_DEVICE_ATTRIBUTE_COMPUTE_MODE."""
CLOSED_MODES = (2, 3)
"""PROHIBITED and EXCLUSIVE_PROCESS."""


def disk(folder: str) -> dict[str, object]:
    """Facts about a folder of disk.paths. Nothing visible is made: it writes to a file without a name, where
    the file system has such files."""
    try:
        found = os.stat(folder)
    except FileNotFoundError:
        return {"exists": False}
    except NotADirectoryError:
        return {"exists": True, "is_folder": False}
    facts: dict[str, object] = {
        "exists": True,
        "is_folder": os.path.isdir(folder),
        "identity": [found.st_dev, found.st_ino],
        "others_write": bool(found.st_mode & 0o022),
    }
    if not facts["is_folder"]:
        return facts
    room = os.statvfs(folder)
    facts["total_bytes"] = room.f_blocks * room.f_frsize
    facts["free_bytes"] = room.f_bavail * room.f_frsize
    facts["read_only"] = bool(room.f_flag & os.ST_RDONLY)
    facts["writable"] = os.access(folder, os.W_OK | os.X_OK, effective_ids=True)
    facts |= _slab(os.path.join(folder, SLAB_NAME))
    if facts["writable"]:
        facts |= _writing(folder)
    return facts


def _slab(path: str) -> dict[str, object]:
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return {"slab": None}
    slab: dict[str, object] = {
        "uid": found.st_uid,
        "mode": found.st_mode,
        "links": found.st_nlink,
        "bytes": found.st_blocks * 512,
        "length": found.st_size,
    }
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        return {"slab": slab | {"is_ours": False, "error": _named(error)}}
    try:
        start = os.pread(fd, len(MAGIC_STEM), 0)
        empty = found.st_blocks == 0 and not any(start)
        slab["is_ours"] = empty or start == MAGIC_STEM
        slab["is_used"] = start == MAGIC_STEM
    finally:
        os.close(fd)
    return {"slab": slab}


def _writing(folder: str) -> dict[str, object]:
    """Whether a page can be written, and can bypass the kernel's cache; None if that could not be tried."""
    try:
        fd = os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT):
            return {"direct": None}
        return {"write_error": _named(error), "direct": None}
    try:
        direct = _direct(fd)
    finally:
        os.close(fd)
    return {"direct": direct}


def _direct(fd: int) -> bool:
    try:
        again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_DIRECT)
    except OSError:
        return False
    try:
        with mmap.mmap(-1, PAGE_BYTES) as page:
            os.pwritev(again, [page], 0)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        raise
    finally:
        os.close(again)
    return True


def gpus(nodes: list[str]) -> dict[str, object]:
    """Which of the driver's files cannot be opened, and which CUDA version its library has."""
    facts: dict[str, object] = {"unreadable": [n for n in nodes if not os.access(n, os.R_OK | os.W_OK)]}
    try:
        library = _driver()
        version = ctypes.c_int()
        library.cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError) as error:
        return facts | {"library_error": str(error)}
    return facts | {"cuda": version.value}


def closed_gpus() -> dict[str, object]:
    """Ordinals of the GPUs that let no second process in. Initialises the driver, which may take seconds and
    touches every GPU, and makes no context."""
    library, count, mode = _driver(), ctypes.c_int(), ctypes.c_int()
    if library.cuInit(0) or library.cuDeviceGetCount(ctypes.byref(count)):
        return {"closed": []}  # workers will say what is wrong
    closed = [
        ordinal
        for ordinal in range(count.value)
        if not library.cuDeviceGetAttribute(ctypes.byref(mode), COMPUTE_MODE, ordinal)
        and mode.value in CLOSED_MODES
    ]
    return {"closed": closed}


def _driver() -> ctypes.CDLL:
    return ctypes.CDLL(os.environ.get("KVTIER_CUDA_LIBRARY") or "libcuda.so.1")


def _named(error: OSError) -> str:
    return f"{errno.errorcode.get(error.errno or 0, 'OSError')} ({error.strerror})"


if __name__ == "__main__":
    try:
        match sys.argv[1]:
            case "disk":
                facts = disk(sys.argv[2])
            case "closed-gpus":
                facts = closed_gpus()
            case _:
                facts = gpus(sys.argv[2:])
    except OSError as error:
        facts = {"error": _named(error)}
    print(json.dumps(facts))
