"""How blocks are stored in packs: as they are, or compressed, with their byte planes apart.

The planes of a block come one after the other: the first bytes of all elements, then all second bytes, and so
on. Of a float, one byte has the sign and most of the exponent, which takes few values, and the others are
close to noise. Side by side they hide each other from a compressor that reads bytes; apart, the first plane
shrinks, and the others are passed on nearly as fast as they can be copied.

A record's coding says how the bytes were made: 0 for bytes as they are, else the method in the second byte
and the width of an element in the first. Its checksum is of the block's own bytes, so whatever goes wrong
with coded ones, their reader sees it.
"""

import threading
from collections.abc import Sequence
from enum import Enum
from importlib import import_module
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvtierd.tiers.store.objects import Bytes
from kvtierd.tiers.store.packs import RAW, Records

WIDTHS: Final = (1, 2, 4)
"""How many bytes an element may have."""
CODINGS: Final = tuple(1 << 8 | width for width in WIDTHS)
"""Zstandard, for each of the widths."""
SAVED_SHARE: Final = 16
"""Bytes are stored as they are unless coding saves one in so many."""
LEVEL: Final = 1
"""Of zstd. Higher levels look for repetitions, of which planes of floats have none, and take long for it."""
WINDOW_BYTES_MAX: Final = 8 << 20
"""No memory beyond this is used to decode, whatever the coded bytes ask for."""
DATA_BYTES_MAX: Final = 1 << 30
"""No record that says more than this is decoded."""
SAMPLE_PIECES: Final = 16
SAMPLE_PIECE_BYTES: Final = 4 << 10
LIBRARY: Final = "zstandard"
INSTALL: Final = "pip install 'zstandard>=0.22,<1'"

Plane = npt.NDArray[np.uint8]


class Compression(Enum):
    """What `store.compression` may be."""

    OFF = "off"
    ZSTD = "zstd"


class CodingError(Exception):
    """Stored bytes did not become what their record promises."""


def has_library() -> bool:
    """Whether blocks can be compressed, and be read that are."""
    try:
        import_module(LIBRARY)
    except ImportError:
        return False
    return True


def readable(records: Records) -> npt.NDArray[np.bool_]:
    """Which records this host can read, by what they say of their coding and their lengths."""
    stored, data = records["stored_bytes"], records["data_bytes"]
    found: npt.NDArray[np.bool_] = (records["coding"] == RAW) & (stored == data)
    coded = np.isin(records["coding"], CODINGS) & (stored < data) & (data <= DATA_BYTES_MAX)
    if coded.any() and has_library():
        found |= coded
    return found


class Codec:
    """Codes and decodes. For any thread; each has memory of its own for it, as much as the largest block."""

    def __init__(self) -> None:
        self._own = threading.local()

    def choose(self, shards: Sequence[Bytes]) -> int:
        """The coding for shards of one kind, by what a sample of them becomes: RAW if none saves enough.

        Nothing says which type their elements have, and it needs not be known: a wrong width saves less."""
        sample = _sample(shards)
        sizes = [len(self._coded(coding, sample)) for coding in CODINGS]
        best = 0
        for at in range(1, len(sizes)):
            if sizes[at] < 0.99 * sizes[best]:  # of widths that do as well, the narrowest is fastest
                best = at
        # The whole is coded a little better than pieces of it are.
        return CODINGS[best] if sizes[best] <= len(sample) * (1 - 0.5 / SAVED_SHARE) else RAW

    def encode(self, coding: int, data: Bytes) -> tuple[int, Bytes]:
        """How the bytes are stored, and what is stored then: coded as asked for, or as they are."""
        if coding != RAW:
            stored = self._coded(coding, data)
            if len(data) - len(stored) >= max(1, len(data) / SAVED_SHARE):
                return coding, stored
        return RAW, data

    def decode(self, coding: int, stored: Bytes, into: memoryview) -> None:
        """Makes stored bytes what they were, which are exactly as many as `into` has; never makes more.
        Raises CodingError, and then nobody knows what `into` has."""
        if coding == RAW:
            if len(stored) != len(into):
                raise CodingError(f"{len(stored)} bytes of {len(into)}")
            into[:] = stored
        elif coding not in CODINGS or len(into) > DATA_BYTES_MAX:
            raise CodingError(f"coding {coding:#x} of {len(into)} bytes")
        elif (width := coding & 0xFF) == 1:
            self._decompress(stored, into)
        else:
            planes = self._memory(len(into))
            self._decompress(stored, planes.data)
            _join(planes, width, np.frombuffer(into, np.uint8))

    def _coded(self, coding: int, data: Bytes) -> bytes:
        """A frame of zstd for each plane, one after the other. In one frame, planes of less than the 128 KiB
        that zstd looks at together would hide each other as if they were not apart."""
        planes, width = np.frombuffer(data, np.uint8), coding & 0xFF
        if width > 1:
            apart = self._memory(len(planes))
            _split(planes, width, apart)
            planes = apart
        ends = [len(planes) // width * (number + 1) for number in range(width - 1)]
        compress = self._zstd().compressor.compress
        return b"".join(compress(plane) for plane in np.split(planes, ends))

    def _decompress(self, stored: Bytes, into: memoryview) -> None:
        own = self._zstd()
        try:
            reader = own.decompressor.stream_reader(stored, read_across_frames=True)
            done = 0
            while done < len(into) and (count := reader.readinto(into[done:])):
                done += count
            more = done == len(into) and bool(reader.read(1))
        except own.error as error:
            raise CodingError(str(error)) from error
        if more or done < len(into):
            raise CodingError(f"{'more than ' if more else ''}{done} bytes of {len(into)}")

    def _zstd(self) -> "_Zstd":
        """This thread's compressor and decompressor, which no two threads may use at once."""
        found = getattr(self._own, "zstd", None)
        if not isinstance(found, _Zstd):
            found = self._own.zstd = _Zstd()
        return found

    def _memory(self, size: int) -> Plane:
        """This thread's memory for planes, until it asks for it again."""
        found = getattr(self._own, "memory", None)
        if not isinstance(found, np.ndarray) or len(found) < size:
            found = self._own.memory = np.empty(size, np.uint8)
        return found[:size]


class _Zstd:
    """The library's objects. Without the library, CodingError."""

    def __init__(self) -> None:
        try:
            library: Any = import_module(LIBRARY)
        except ImportError as error:
            raise CodingError(f"without {LIBRARY}, nothing is decoded: {error}") from error
        self.compressor = library.ZstdCompressor(level=LEVEL)
        self.decompressor = library.ZstdDecompressor(max_window_size=WINDOW_BYTES_MAX)
        self.error: type[Exception] = library.ZstdError


def _split(data: Plane, width: int, apart: Plane) -> None:
    """Puts the planes of `data` one after the other, and what is no whole element behind them."""
    count = len(data) // width
    whole = count * width
    elements = data[:whole].reshape(count, width)
    for number in range(width):  # numpy would go through elements of a few bytes each, and take longer
        apart[number * count : (number + 1) * count] = elements[:, number]
    apart[whole:] = data[whole:]


def _join(planes: Plane, width: int, data: Plane) -> None:
    """Undoes `_split`."""
    count = len(data) // width
    whole = count * width
    elements = data[:whole].reshape(count, width)
    for number in range(width):  # numpy would go through elements of a few bytes each, and take longer
        elements[:, number] = planes[number * count : (number + 1) * count]
    data[whole:] = planes[whole:]


def _sample(shards: Sequence[Bytes]) -> bytes:
    """Pieces of shards, from all over them; each begins with an element, however wide that is."""
    total = sum(map(len, shards))
    if not total:
        return b""
    places = np.linspace(0, max(0, total - SAMPLE_PIECE_BYTES), SAMPLE_PIECES).astype(np.int64)
    ends = np.cumsum([len(shard) for shard in shards])
    pieces = []
    for place in np.unique(places).tolist():
        number = int(np.searchsorted(ends, place, "right"))
        shard = memoryview(shards[number])
        at = (place - int(ends[number]) + len(shard)) // max(WIDTHS) * max(WIDTHS)
        at = min(at, max(0, (len(shard) - SAMPLE_PIECE_BYTES) // max(WIDTHS) * max(WIDTHS)))
        pieces.append(shard[at : at + SAMPLE_PIECE_BYTES])
    return b"".join(piece[: len(piece) // max(WIDTHS) * max(WIDTHS)] for piece in pieces)
