"""The identity of model weights, which must be equal for two engines' KV blocks to be interchangeable.

Local weights are identified by their content. Hashing tens of gigabytes takes tens of seconds, so the digest
is kept in the user's cache directory. It is valid only while every file has the size, inode and change time
that it was made from. Processes that need the same digest at once wait for the first, instead of all reading
the disk.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

# These files say which of the weight files are read.
INDEX_NAMES = ("consolidated.safetensors.index.json", "model.safetensors.index.json")
# Files that decide the values a model computes. Tokenizer files do not: blocks are named by token ids.
CONFIG_NAMES = (
    "config.json",
    "hf_quant_config.json",
    "quant_config.json",
    "quantization_config.json",
    "quantize_config.json",
    "adapter_config.json",
    "params.json",
    # What images, videos and sounds are turned into; block hashes cover these before they are.
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "tekken.json",
    *INDEX_NAMES,
)
CODE_PATTERN = "*.py"
WEIGHT_PATTERN = "*.safetensors"
# Folders in a model's folder from which some architectures read weights.
SUBFOLDERS = ("adapters/*", "whisper-large-v3")

_CHUNK_BYTES = 8 << 20
# Longer than hashing the largest models takes; after it, a process computes the digest itself.
_LOCK_TIMEOUT_S = 600.0

SETTLED_S = 2.0
"""Files that have changed more lately than this may change again without another change time, because many
file systems take it from a clock that stands still for milliseconds. Their digest is not remembered."""


Stamp = list[list[int | str]]
"""The state of files; equal exactly if no file was changed or replaced."""


class UnknownWeights(Exception):
    """The weights cannot be identified. The message says why, and what to set."""


def local_revision(directory: Path) -> str:
    """Returns `sha256:…`, a digest of the names, sizes and contents of the config, code and safetensors files
    of the model or adapter in `directory`.

    It does not depend on the directory's path. Raises UnknownWeights if there are no safetensors files or one
    cannot be read. A cache that cannot be read or written only costs time.
    """
    files = _files_of(directory)
    key = hashlib.sha256(os.fsencode(directory.resolve())).hexdigest()[:32]
    stamp = _stamp_of(directory, files)
    with _cache_entry(key) as entry:
        if entry is not None:
            remembered = _read_entry(entry, stamp)
            if remembered is not None:
                return remembered
        last_change_ns = max(int(state[-1]) for state in stamp)
        settled = last_change_ns < time.time_ns() - SETTLED_S * 1e9
        revision = _digest(directory, files)
        if _stamp_of(directory, files) != stamp:
            raise UnknownWeights(f"files in {directory} changed while they were read")
        if entry is not None and settled:
            _write_entry(entry, stamp, revision)
    return revision


def stamp_of(directory: Path) -> Stamp:
    """Returns the stamp of the files that `local_revision` reads. Raises UnknownWeights if there are none, or
    one cannot be looked at."""
    return _stamp_of(directory, _files_of(directory))


def _files_of(directory: Path) -> list[Path]:
    weights = sorted(directory.glob(WEIGHT_PATTERN))
    if not weights:
        raise UnknownWeights(
            f"no {WEIGHT_PATTERN} in {directory}; set weights_revision to a "
            "name that changes whenever the weights do"
        )
    folders = [directory, *sorted(each for pattern in SUBFOLDERS for each in directory.glob(pattern))]
    configs = [folder / name for folder in folders for name in CONFIG_NAMES if (folder / name).exists()]
    below = [file for folder in folders[1:] for file in sorted(folder.glob(WEIGHT_PATTERN))]
    return configs + sorted(directory.glob(CODE_PATTERN)) + weights + below


def _stamp_of(directory: Path, files: list[Path]) -> Stamp:
    try:
        states = [(file.relative_to(directory).as_posix(), file.stat()) for file in files]
    except OSError as error:
        raise UnknownWeights(f"{error.filename}: {error.strerror}") from error
    return [[name, s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns] for name, s in states]


def _digest(directory: Path, files: list[Path]) -> str:
    # Files are hashed one by one, in threads (hashing releases the GIL); the digest of digests is the
    # revision.
    with concurrent.futures.ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        digests = list(pool.map(_file_digest, files))
    whole = hashlib.sha256()
    for file, digest in zip(files, digests, strict=True):
        whole.update(f"{file.relative_to(directory).as_posix()}\0{digest}\n".encode())
    return f"sha256:{whole.hexdigest()}"


def _file_digest(file: Path) -> str:
    digest, size = hashlib.sha256(), 0
    try:
        with file.open("rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                digest.update(chunk)
                size += len(chunk)
    except OSError as error:
        raise UnknownWeights(f"{file}: {error.strerror}") from error
    return f"{size}\0{digest.hexdigest()}"


@contextlib.contextmanager
def _cache_entry(key: str) -> Iterator[Path | None]:
    """Yields the path of the cache entry, locked against other processes, or None without a cache."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvtier" / "weights"
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = root.stat()
        # An entry decides which blocks are shared, so only a directory that nobody else can write to is
        # trusted.
        if state.st_uid != os.getuid() or state.st_mode & 0o022:
            raise PermissionError(root)
        lock = os.open(root / f"{key}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        yield None
        return
    try:
        deadline_s = time.monotonic() + _LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    break
                time.sleep(0.05)
        yield root / f"{key}.json"
    finally:
        os.close(lock)


def _read_entry(entry: Path, stamp: Stamp) -> str | None:
    try:
        content = json.loads(entry.read_text())
        revision = content["revision"] if content["stamp"] == stamp else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return revision if isinstance(revision, str) else None


def _write_entry(entry: Path, stamp: Stamp, revision: str) -> None:
    with (
        contextlib.suppress(OSError),
        tempfile.NamedTemporaryFile("w", dir=entry.parent, delete=False) as file,
    ):
        json.dump({"stamp": stamp, "revision": revision}, file)
        file.flush()
        os.replace(file.name, entry)
