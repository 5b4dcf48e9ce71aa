"""Which bytes of an HTTP/1.1 connection are bodies, and which are not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

_HEAD_END = b"\r\n\r\n"
_LINE_END = b"\r\n"


class _At(Enum):
    HEAD = "the lines before a body"
    BODY = "a body of known length"
    CHUNK_LINE = "the line before a chunk"
    CHUNK = "a chunk of a body"
    CHUNK_END = "the line end behind a chunk"
    TRAILERS = "the lines behind the last chunk"


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes that follow each other: of a body, or of anything else."""

    data: bytes
    offset: int = -1
    """Where in its body it begins; -1 if it is of none."""
    first_line: bytes = b""
    """Of the lines before a body, the first one; empty for anything else."""


class Framing:
    """Takes what one side of a connection sends, as it comes, and gives the same bytes as pieces. For
    requests, and for answers to anything but HEAD."""

    def __init__(self) -> None:
        self._at = _At.HEAD
        self._waiting = b""
        """What has come of lines that are not whole."""
        self._left = 0
        self._offset = 0

    def split(self, data: bytes) -> Iterator[Piece]:
        """Bytes of lines come out when the lines are whole, those of bodies at once."""
        while data:
            if self._at in (_At.BODY, _At.CHUNK):
                some, data = data[: self._left], data[self._left :]
                yield Piece(some, self._offset)
                self._left -= len(some)
                self._offset += len(some)
                if not self._left:
                    self._at = _At.HEAD if self._at is _At.BODY else _At.CHUNK_END
                continue
            end = _HEAD_END if self._at is _At.HEAD else _LINE_END
            lines, found, rest = (self._waiting + data).partition(end)
            if not found:
                self._waiting += data
                return
            self._waiting, data = b"", rest
            first_line = lines.partition(_LINE_END)[0] if self._at is _At.HEAD else b""
            yield Piece(lines + end, first_line=first_line)
            self._lines_end(lines)

    def _lines_end(self, lines: bytes) -> None:
        match self._at:
            case _At.HEAD:
                self._offset = 0
                self._left, self._at = _body_of(lines)
            case _At.CHUNK_LINE:
                self._left = int(lines.partition(b";")[0], 16)
                self._at = _At.CHUNK if self._left else _At.TRAILERS
            case _At.CHUNK_END:
                self._at = _At.CHUNK_LINE
            case _ if not lines:
                self._at = _At.HEAD


def _body_of(lines: bytes) -> tuple[int, _At]:
    """The length of what follows the head of a message, if that is known, and what it is."""
    first, *rest = lines.split(_LINE_END)
    fields = {}
    for line in rest:
        name, _, value = line.partition(b":")
        fields[name.strip().lower()] = value.strip()
    has_none = first.startswith(b"HTTP/") and (is_interim(first) or first.split()[1] in (b"204", b"304"))
    length = 0 if has_none else int(fields.get(b"content-length", b"0"))
    if not has_none and fields.get(b"transfer-encoding", b"").lower() == b"chunked":
        return 0, _At.CHUNK_LINE
    return length, _At.BODY if length else _At.HEAD


def is_interim(first_line: bytes) -> bool:
    """Whether an answer is only the announcement of another one (100 Continue)."""
    return first_line.startswith(b"HTTP/") and first_line.split()[1].startswith(b"1")
