"""Traces: requests in the order of their arrival, each a chain of blocks that share prefixes.

Two kinds of files are read. Lines of JSON, as Mooncake publishes them (`hash_ids` names the blocks of a
prompt by hashes of whole prefixes, `input_length` its tokens, `timestamp` its arrival in milliseconds), plain
or compressed by gzip. And numpy archives with the same as a tree: `parent` has each block's parent (-1: none;
parents come before their children), `leaf` each request's last block, `intok` its tokens, `ts` its arrival in
seconds, and `block` how many tokens a block has.
"""

import gzip
import json
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]
BLOCK_TOKENS = 512
"""Of lines of JSON that do not say it: Mooncake's."""
NO_PARENT = -1
GZIP_MAGIC, ZIP_MAGIC = b"\x1f\x8b", b"PK"


class TraceError(ValueError):
    """A file is no trace; the text names the file, the line or field, and what was expected."""


@dataclass(frozen=True, slots=True)
class LiveCourse:
    """What a daemon has answered to the requests of a trace that was recorded, and what engines stored."""

    hits: I64
    """By request: how many of its first blocks were hits."""
    after: I64
    """By chain of blocks that were stored, in the order of the stores: the number of the latest request
    before it; -1 if there was none."""
    store: I64
    """By chain: the number of its store. Those of one store are side by side."""
    leaf: I64
    """By chain: its last block."""
    count: I64
    """By chain: how many blocks were stored, which are the last ones of the path to `leaf`."""
    behind: npt.NDArray[np.bool_]
    """By chain: whether the store has said which block comes before them."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests as paths in a tree of blocks. Arrays are parallel by block, or by request."""

    name: str
    block_tokens: int
    parent: I64
    """By block; blocks are numbered by first appearance, so parents come before their children."""
    leaf: I64
    """By request: its last block."""
    tokens: I64
    """By request: its tokens. The last block may be partial."""
    arrival_s: npt.NDArray[np.float64]
    """By request, from the first one on; never falls."""
    block_bytes: int | None = None
    """What a block takes, if the trace says it."""
    live: LiveCourse | None = None
    """Of a trace that was recorded; of others, each request's blocks are stored when it was answered."""

    @property
    def blocks(self) -> int:
        """Different blocks."""
        return len(self.parent)

    @property
    def requests(self) -> int:
        return len(self.leaf)

    def path(self, request: int) -> I64:
        """The blocks of a request, from the first to the last."""
        found = []
        block = int(self.leaf[request])
        while block != NO_PARENT:
            found.append(block)
            block = int(self.parent[block])
        return np.array(found[::-1], np.int64)

    def tail(self, leaf: int, count: int) -> tuple[I64, int]:
        """The last blocks of the path to a block, and the block before them (-1: none)."""
        found: list[int] = []
        block = leaf
        while len(found) < count and block != NO_PARENT:
            found.append(block)
            block = int(self.parent[block])
        return np.array(found[::-1], np.int64), block

    def generated(self) -> dict[int, I64]:
        """Blocks that were stored before anybody asked for them, as those of an answer are: by the number of
        the latest request before."""
        if self.live is None:
            return {}
        first_asked = np.full(self.blocks, self.requests, np.int64)
        for request, path in enumerate(self.paths()):
            new = path[first_asked[path] == self.requests]
            first_asked[new] = request
        found: dict[int, list[int]] = {}
        known: set[int] = set()
        columns = (self.live.after, self.live.leaf, self.live.count)
        for after, leaf, count in zip(*(column.tolist() for column in columns), strict=True):
            for block in self.tail(leaf, count)[0].tolist():
                if first_asked[block] > after and block not in known:
                    known.add(block)
                    found.setdefault(max(after, 0), []).append(block)
        return {request: np.array(blocks, np.int64) for request, blocks in found.items()}

    def paths(self) -> Iterator[I64]:
        """Those of all requests, in their order."""
        parent = self.parent.tolist()
        for leaf in self.leaf.tolist():
            found = []
            while leaf != NO_PARENT:
                found.append(leaf)
                leaf = parent[leaf]
            yield np.array(found[::-1], np.int64)

    def hit_tokens(self, request: int, blocks: int, path_blocks: int) -> int:
        """Tokens of the first `blocks` blocks of a request that has `path_blocks`."""
        tokens = int(self.tokens[request])
        return tokens if blocks == path_blocks else min(tokens, blocks * self.block_tokens)


def read(path: Path) -> Trace:
    """Reads a trace of either kind, by what the file begins with. Raises TraceError and OSError."""
    with path.open("rb") as file:
        begin = file.read(2)
    if begin == ZIP_MAGIC:
        return _from_archive(path)
    return _from_lines(path, compressed=begin == GZIP_MAGIC)


def _from_archive(path: Path) -> Trace:
    try:
        with np.load(path, allow_pickle=False) as archive:
            lacking = [name for name in ("parent", "leaf", "intok", "ts") if name not in archive]
            if lacking:
                raise TraceError(f"{path}: has no array {', '.join(lacking)}")
            parent, leaf, tokens = (archive[name].astype(np.int64) for name in ("parent", "leaf", "intok"))
            arrival_s = archive["ts"].astype(np.float64)
            block_tokens = int(archive["block"]) if "block" in archive else BLOCK_TOKENS
    except (ValueError, TypeError, zipfile.BadZipFile) as error:
        if isinstance(error, TraceError):
            raise
        raise TraceError(f"{path}: not an archive of arrays ({error})") from None
    if not len(leaf) or any(array.ndim != 1 for array in (parent, leaf, tokens, arrival_s)):
        raise TraceError(f"{path}: leaf: no requests, or arrays of more than one dimension")
    if not len(leaf) == len(tokens) == len(arrival_s):
        raise TraceError(
            f"{path}: leaf, intok, ts have {len(leaf)}, {len(tokens)}, {len(arrival_s)} elements; "
            "expected as many"
        )
    wrong = np.flatnonzero((parent < NO_PARENT) | (parent >= np.arange(len(parent))))
    if len(wrong):
        raise TraceError(
            f"{path}: parent[{wrong[0]}] is {parent[wrong[0]]}; expected an earlier block, or -1"
        )
    wrong = np.flatnonzero((leaf < 0) | (leaf >= len(parent)))
    if len(wrong):
        raise TraceError(
            f"{path}: leaf[{wrong[0]}] is {leaf[wrong[0]]}; expected a block, 0 to {len(parent) - 1}"
        )
    return _checked(path, block_tokens, parent, leaf, tokens, arrival_s)


def _from_lines(path: Path, *, compressed: bool) -> Trace:
    parents: list[int] = []
    numbers: dict[tuple[int, int | str], int] = {}
    leaves, tokens, arrivals = [], [], []
    with gzip.open(path, "rt") if compressed else path.open() as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                request = json.loads(line)
                ids, length = request["hash_ids"], request["input_length"]
                arrival_s = float(request["timestamp"]) / 1_000
            except (ValueError, TypeError, KeyError) as error:
                raise TraceError(
                    f"{where}: expected timestamp, input_length and hash_ids ({error!r})"
                ) from None
            if not isinstance(ids, list) or not ids or not all(isinstance(each, int | str) for each in ids):
                raise TraceError(f"{where}: hash_ids must be a list of numbers or texts, of one at least")
            if not isinstance(length, int) or length < 1:
                raise TraceError(f"{where}: input_length is {length!r}; expected a number above 0")
            block = NO_PARENT
            for each in ids:  # an id stands for all that comes before it; the parent keeps it so anyway
                if (known := numbers.get((block, each))) is None:
                    known = numbers[block, each] = len(parents)
                    parents.append(block)
                block = known
            leaves.append(block)
            tokens.append(length)
            arrivals.append(arrival_s)
    if not leaves:
        raise TraceError(f"{path}: has no requests")
    return _checked(
        path,
        BLOCK_TOKENS,
        np.array(parents, np.int64),
        np.array(leaves, np.int64),
        np.array(tokens, np.int64),
        np.array(arrivals, np.float64),
    )


def _checked(
    path: Path, block_tokens: int, parent: I64, leaf: I64, tokens: I64, arrival_s: npt.NDArray[np.float64]
) -> Trace:
    if block_tokens < 1:
        raise TraceError(f"{path}: block is {block_tokens}; expected tokens of a block, 1 or more")
    if not np.isfinite(arrival_s).all() or (np.diff(arrival_s) < 0).any():
        raise TraceError(f"{path}: requests must be in the order of their arrival")
    if (tokens < 1).any():
        raise TraceError(f"{path}: a request without tokens")
    return Trace(path.name, block_tokens, parent, leaf, tokens, arrival_s - arrival_s[0])
