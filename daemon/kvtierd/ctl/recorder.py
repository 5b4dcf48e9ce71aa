"""What `kvtierctl record` writes: the files of a recording, as `kvtierd.simulate.records` describes them.

Of a block's hash only a keyed hash is written. The key is made at random for each recording and is written
nowhere, so that nobody who guesses a prompt can find it in a recording.
"""

import hashlib
import math
import os
import queue
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
from kvtier.v1 import admin_pb2

from kvtierd.config.settings import human_size
from kvtierd.ctl.text import count
from kvtierd.simulate.records import EVENT_ARRAYS, LOOKUP, PATTERN, PLACE_COLUMNS, VERSION, file_name

KEY_BYTES = 32
HASH_BYTES = KEYED_BYTES = 8
KEYED_KEPT = 1 << 16
"""Keyed hashes that are remembered, because most blocks come several times."""
HEAD_BYTES = 8 << 10
"""What an archive takes besides its arrays, at most."""
EVENT_BYTES = sum(np.dtype(kind).itemsize for kind in EVENT_ARRAYS.values())
FILE_S = 600.0
"""A file is ended after so long, so that a recorder that is killed loses no more."""
FILE_BYTES_MIN = 1 << 20
FILES_MIN = 2
"""As many files as the bound of all has to have room for."""
DIRECTORY_MODE, FILE_MODE = 0o700, 0o600
BATCHES_MAX = 16
"""That wait here; what the daemon cannot send meanwhile, it keeps or drops."""
POLL_S = 0.2
LAST_S = 1.2
"""The daemon keeps what happens for a second before it sends it; so long, the last of it is waited for."""
_UNITS = {"": 1, "s": 1, "min": 60, "m": 60, "h": 3_600, "d": 86_400}


def period_s(text: str) -> float:
    """Reads a time such as 90, 90s, 10min, 1h or 2d. Raises ValueError."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([a-z]*)", text.strip())
    if match is None or match[2] not in _UNITS or not float(match[1]):
        raise ValueError(f"{text!r} is no time: write one such as 90s, 10min, 1h or 2d")
    return float(match[1]) * _UNITS[match[2]]


class RecordWriter:
    """Writes one recording into a folder."""

    def __init__(self, folder: Path, file_bytes_max: int, total_bytes_max: int) -> None:
        """Makes the folder if it is not there. Raises ValueError if it has records already or if the sizes do
        not fit, and OSError."""
        if file_bytes_max < FILE_BYTES_MIN:
            given, least = human_size(file_bytes_max), human_size(FILE_BYTES_MIN)
            raise ValueError(f"--file-bytes: {given} is too small: write {least} or more")
        if total_bytes_max < FILES_MIN * file_bytes_max:
            raise ValueError(
                f"--total-bytes: {human_size(total_bytes_max)} has no room for {FILES_MIN} files of "
                f"{human_size(file_bytes_max)}: make it larger, or --file-bytes smaller"
            )
        folder.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
        if found := next(folder.glob(PATTERN), None):
            raise ValueError(f"FOLDER: {folder} has another recording ({found.name}): name a new folder")
        self.folder = folder
        self._file_bytes_max = file_bytes_max
        self._total_bytes_max = total_bytes_max
        self._recording = secrets.randbits(63)
        self._keyed = _keyed_by(secrets.token_bytes(KEY_BYTES))
        self._places: list[list[int]] = []
        self._files: list[tuple[Path, int]] = []
        """Those that are there, and their bytes."""
        self._number = 0
        self._columns: dict[str, list[npt.NDArray[np.generic]]] = {}
        self._hashes: list[npt.NDArray[np.uint64]] = []
        self.waiting_bytes = 0
        """Of events that are in no file yet."""
        self.events = self.requests = self.blocks = 0
        """That were received, and the blocks that they had."""
        self.dropped_events = self.dropped_blocks = 0
        self.removed_files = 0

    @property
    def files(self) -> int:
        return len(self._files)

    @property
    def written_bytes(self) -> int:
        """Of the files that are there."""
        return sum(size for _, size in self._files)

    def add(self, batch: admin_pb2.RecordBatch) -> None:
        """Takes what the daemon has sent. Raises OSError if a file is full and cannot be written."""
        events = np.frombuffer(batch.events, "<u8").reshape(-1, len(EVENT_ARRAYS))
        size_bytes = EVENT_BYTES * len(events) + KEYED_BYTES * (len(batch.hashes) // HASH_BYTES)
        if self.waiting_bytes and self.waiting_bytes + size_bytes > self._file_bytes_max - HEAD_BYTES:
            self.write()
        for place in batch.places:
            self._places.append(
                [place.number, place.tenant, place.group, place.block_tokens, place.block_bytes]
            )
        self.dropped_events, self.dropped_blocks = batch.dropped_events, batch.dropped_blocks
        if not len(events):
            return
        for (name, kind), column in zip(EVENT_ARRAYS.items(), events.T, strict=True):
            self._columns.setdefault(name, []).append(column.astype(kind))
        raw = batch.hashes
        keyed = b"".join([self._keyed(raw[at : at + HASH_BYTES]) for at in range(0, len(raw), HASH_BYTES)])
        self._hashes.append(np.frombuffer(keyed, "<u8"))
        self.waiting_bytes += size_bytes
        self.events += len(events)
        self.requests += int((events[:, 0] == LOOKUP).sum())
        self.blocks += len(keyed) // KEYED_BYTES

    def write(self, *, ended: bool = False) -> None:
        """Writes what waits as the next file. Raises OSError."""
        self._number += 1
        path = self.folder / file_name(self._number)
        arrays: dict[str, npt.NDArray[np.generic]] = {
            name: np.concatenate(self._columns[name]) if self._columns else np.zeros(0, kind)
            for name, kind in EVENT_ARRAYS.items()
        }
        arrays |= {
            "hash": np.concatenate(self._hashes) if self._hashes else np.zeros(0, np.uint64),
            "places": np.array(self._places, np.int64).reshape(-1, PLACE_COLUMNS),
            "dropped": np.array([self.dropped_events, self.dropped_blocks]),
            "kvtier_record": np.array(VERSION),
            "recording": np.array(self._recording),
            "number": np.array(self._number),
            "ended": np.array(ended),
        }
        self._make_room(sum(array.nbytes for array in arrays.values()) + HEAD_BYTES)
        self._files.append((path, _write(path, arrays)))
        self._columns, self._hashes, self.waiting_bytes = {}, [], 0

    def _make_room(self, wanted_bytes: int) -> None:
        while self._files and self.written_bytes + wanted_bytes > self._total_bytes_max:
            oldest, _ = self._files.pop(0)
            oldest.unlink(missing_ok=True)
            self.removed_files += 1

    def told(self) -> str:
        """What was recorded, in a line."""
        dropped = f", {self.dropped_blocks:,} dropped" if self.dropped_events else ""
        size_bytes = self.written_bytes + self.waiting_bytes
        what = f"{count(self.requests, 'request')}, {count(self.blocks, 'block')}"
        return f"{what}{dropped}, {human_size(size_bytes)}"

    def lines(self) -> Iterator[str]:
        """What was written, and what to do with it."""
        yield f"{self.folder}: {self.told()} in {count(self.files, 'file')}"
        if self.removed_files:
            removed = count(self.removed_files, "oldest file")
            yield f"  removed  the {removed}, so that no more than --total-bytes stay"
        if self.dropped_events:
            yield (
                f"  dropped  {count(self.dropped_events, 'event')}: this host, or the folder's disk, was too "
                "slow; simulated hits may differ from the daemon's"
            )
        yield (
            f"kvtierctl simulate {self.folder}"
            if self.requests
            else "no engine has asked for anything meanwhile: record while engines are used"
        )

    def figures(self) -> dict[str, object]:
        """The same for programs."""
        return {
            "folder": str(self.folder),
            "files": [path.name for path, _ in self._files],
            "removed_files": self.removed_files,
            "bytes": self.written_bytes,
            "requests": self.requests,
            "blocks": self.blocks,
            "dropped_events": self.dropped_events,
            "dropped_blocks": self.dropped_blocks,
        }


def _keyed_by(key: bytes) -> Callable[[bytes], bytes]:
    """Gives keyed hashes of blocks' hashes."""

    @lru_cache(KEYED_KEPT)
    def keyed(block_hash: bytes) -> bytes:
        return hashlib.blake2b(block_hash, digest_size=KEYED_BYTES, key=key).digest()

    return keyed


def _write(path: Path, arrays: dict[str, npt.NDArray[np.generic]]) -> int:
    """Writes an archive whole or not at all. Returns its bytes. Raises OSError."""
    unfinished = path.with_suffix(".tmp")
    try:
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, FILE_MODE)
        with open(descriptor, "wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise
    return path.stat().st_size


class BatchStream:
    """What the daemon sends, read by a thread, so that a signal or the end of the time is noticed at once."""

    def __init__(self, call: Any) -> None:
        """`call` is a running Admin.Record."""
        self._call = call
        self._batches: queue.Queue[admin_pb2.RecordBatch | None] = queue.Queue(BATCHES_MAX)
        self._closed = False
        self.error: grpc.RpcError | None = None
        """Why the stream broke off, if it did."""
        self._thread = threading.Thread(target=self._read, name="record", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for batch in self._call:
                while not self._closed:
                    try:
                        self._batches.put(batch, timeout=POLL_S)
                    except queue.Full:
                        continue
                    break
        except grpc.RpcError as error:
            if not self._closed:
                self.error = error
        while not self._closed:
            try:
                self._batches.put(None, timeout=POLL_S)
            except queue.Full:
                continue
            return

    def batches(self) -> Iterator[admin_pb2.RecordBatch | None]:
        """Batches until the stream ends; None whenever there is none for a moment."""
        while True:
            try:
                batch = self._batches.get(timeout=POLL_S)
            except queue.Empty:
                yield None
                continue
            if batch is None:
                return
            yield batch

    def close(self) -> None:
        self._closed = True
        self._call.cancel()
        self._thread.join()


def record(
    stream: BatchStream,
    writer: RecordWriter,
    period_s: float | None,
    stopped: Callable[[], bool],
    tell: Callable[[str], None],
) -> None:
    """Writes what comes until the time is up, the stream ends, or `stopped()`. Calls `tell` with a line about
    every second. Raises OSError."""
    began_s = told_s = file_s = time.monotonic()
    end_s = math.inf if period_s is None else began_s + period_s + LAST_S
    try:
        for batch in stream.batches():
            if batch is not None:
                writer.add(batch)
            now_s = time.monotonic()
            if now_s - file_s >= FILE_S:
                file_s = now_s
                if writer.waiting_bytes:
                    writer.write()
            if now_s - told_s >= 1.0:
                told_s = now_s
                tell(writer.told())
            if stopped():
                end_s = min(end_s, now_s + LAST_S)
            if now_s >= end_s:
                return
    finally:
        stream.close()
        writer.write(ended=True)
