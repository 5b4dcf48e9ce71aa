"""Records of a live daemon, as `kvtierctl record` writes them: what its engines looked up and stored.

A recording is a folder of numpy archives. Each has the events of a while, as arrays that are parallel by
event (`kind`, `time_us`, `place`, `count`, `hits`, `part`: see kvtier.v1.RecordBatch), the keyed hashes of
their blocks one event after the other (`hash`), all places met so far (`places`: number, tenant, group,
tokens and bytes of a block), how much had been dropped by then (`dropped`: events, blocks), which recording
it is of (`recording`, a random number), its own `number` from 1 on, and whether the recording `ended` with
it.
"""

import itertools
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvtierd.simulate.traces import I64, NO_PARENT, LiveCourse, Trace, TraceError, read

PATTERN = "record-*.npz"
VERSION = 1
EVENT_ARRAYS = {
    "kind": np.uint8,
    "time_us": np.uint64,
    "place": np.uint32,
    "count": np.uint32,
    "hits": np.uint32,
    "part": np.uint32,
}
PLACE_COLUMNS = 5
LOOKUP, STORE, STORE_BEHIND, STORE_LOOSE = 1, 2, 3, 4
"""Kinds of events, numbered as kvtier.v1.RecordedKind."""


def file_name(number: int) -> str:
    """Of one file of a recording."""
    return f"record-{number:06d}.npz"


@dataclass(frozen=True, slots=True)
class RecordPlace:
    """One group of one namespace: the blocks of one place have nothing to do with those of another."""

    number: int
    tenant: int
    group: int
    block_tokens: int
    block_bytes: int
    requests: int = 0


@dataclass(frozen=True, slots=True)
class _RecordFile:
    path: Path
    recording: int
    number: int
    ended: bool
    dropped: tuple[int, int]
    places: I64
    events: dict[str, I64]
    hashes: npt.NDArray[np.uint64]


def read_traces(paths: Sequence[Path], place: int | None = None) -> tuple[Trace, list[str]]:
    """Reads one trace of any kind: a file, a folder of records, or several files of one recording. With
    `place`, that place of a recording; otherwise the one with the most requests.

    Returns the trace, and what people should know of it, in sentences. Raises TraceError and OSError.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            found = sorted(path.glob(PATTERN))
            if not found:
                raise TraceError(f"{path}: has no {PATTERN}; name a folder of `kvtierctl record`")
            files += found
        else:
            files.append(path)
    if len(files) == 1 and not _is_record(files[0]):
        if place is not None:
            raise TraceError(f"{files[0]}: is no record of a daemon, so it has no place {place}")
        return read(files[0]), []
    return _from_records([_read_file(path) for path in files], place)


def _is_record(path: Path) -> bool:
    try:
        with np.load(path, allow_pickle=False) as archive:
            return "kvtier_record" in getattr(archive, "files", ())
    except (ValueError, EOFError, zipfile.BadZipFile):
        return False


def _read_file(path: Path) -> _RecordFile:
    try:
        with np.load(path, allow_pickle=False) as archive:
            names = getattr(archive, "files", ())
            if "kvtier_record" not in names:
                raise TraceError(f"{path}: is no record; several files are one trace only if all are records")
            if (version := int(archive["kvtier_record"])) != VERSION:
                raise TraceError(f"{path}: is a record of version {version}; this kvtierctl reads {VERSION}")
            events = {name: archive[name].astype(np.int64) for name in EVENT_ARRAYS}
            hashes = archive["hash"]
            places = archive["places"].astype(np.int64)
            events_dropped, blocks_dropped = archive["dropped"].astype(np.int64).tolist()
            found = _RecordFile(
                path,
                int(archive["recording"]),
                int(archive["number"]),
                bool(archive["ended"]),
                (events_dropped, blocks_dropped),
                places,
                events,
                hashes,
            )
    except (ValueError, TypeError, KeyError, EOFError, OverflowError, zipfile.BadZipFile) as error:
        if isinstance(error, TraceError):
            raise
        raise TraceError(f"{path}: is damaged, or no record ({error}); leave it out") from None
    _check_file(found)
    return found


def _check_file(found: _RecordFile) -> None:
    """Raises TraceError if the arrays do not belong together."""
    kinds, counts = found.events["kind"], found.events["count"]
    wrong = ""
    if any(array.ndim != 1 or len(array) != len(kinds) for array in found.events.values()):
        wrong = "its arrays are not parallel"
    elif (
        found.hashes.dtype != np.uint64
        or found.hashes.ndim != 1
        or found.places.shape[1:] != (PLACE_COLUMNS,)
    ):
        wrong = "hash or places has another shape"
    elif ((kinds < LOOKUP) | (kinds > STORE_LOOSE)).any():
        wrong = f"kind has others than {LOOKUP} to {STORE_LOOSE}"
    elif (counts <= (kinds == STORE_BEHIND)).any() or counts.sum() != len(found.hashes):
        wrong = f"count does not fit its {len(found.hashes)} hashes"
    elif ((found.events["hits"] < 0) | (found.events["hits"] > counts)).any():
        wrong = "hits has more than there are blocks"
    elif not np.isin(found.events["place"], found.places[:, 0]).all():
        wrong = "place has numbers that places lacks"
    elif (found.places[:, 3:] < 1).any():
        wrong = "places has blocks of no tokens or bytes"
    if wrong:
        raise TraceError(f"{found.path}: is damaged: {wrong}; leave it out")


def _in_order(files: list[_RecordFile]) -> list[_RecordFile]:
    """Files of one recording in their order. Raises TraceError if one is missing between them."""
    files = sorted(files, key=lambda each: each.number)
    for before, after in itertools.pairwise(files):
        if before.recording != after.recording:
            raise TraceError(f"{before.path} and {after.path} are of two recordings: simulate one at a time")
        if after.number == before.number:
            raise TraceError(f"{before.path} and {after.path} are both file {after.number}: name each once")
        if after.number > before.number + 1:
            raise TraceError(
                f"{after.path}: file {before.number + 1} of this recording is missing before it; "
                f"put {file_name(before.number + 1)} back, or name only the files after it"
            )
    return files


def _from_records(files: list[_RecordFile], wanted: int | None) -> tuple[Trace, list[str]]:
    files = _in_order(files)
    events = {name: np.concatenate([each.events[name] for each in files]) for name in EVENT_ARRAYS}
    hashes = np.concatenate([each.hashes for each in files])
    places = _places(files, events)
    chosen = _chosen(files[0].path.parent, places, wanted)
    notes = list(_notes(files))
    if len(places) > 1:
        told = "; ".join(
            f"{each.number}: tenant {each.tenant}, group {each.group}, {each.requests:,} requests, blocks of "
            f"{each.block_tokens} tokens"
            for each in places
        )
        notes.append(f"{len(places)} places were recorded, and {chosen.number} is simulated ({told})")
    first = np.concatenate(([0], np.cumsum(events["count"])))
    rows = np.flatnonzero(events["place"] == chosen.number)
    tree = _Tree(
        _Chain(kind, hashes[start : start + count].tolist(), hits, part)
        for kind, start, count, hits, part in zip(
            *(column[rows].tolist() for column in (events["kind"], first, events["count"])),
            *(events[name][rows].tolist() for name in ("hits", "part")),
            strict=True,
        )
    )
    notes += tree.notes()
    joint = (events["part"][rows] > 1) & (events["kind"][rows] == LOOKUP)
    if joint.any():
        notes.append(
            f"{int(joint.sum()):,} lookups asked for several groups together, and hit what all of them had: "
            "this group alone may hit more"
        )
    arrival_s = events["time_us"][rows][events["kind"][rows] == LOOKUP] / 1e6
    leaf = np.array(tree.leaf, np.int64)
    return (
        Trace(
            name=files[0].path.parent.resolve().name or "records",
            block_tokens=chosen.block_tokens,
            parent=np.array(tree.parent, np.int64),
            leaf=leaf,
            tokens=np.array(tree.depth, np.int64)[leaf] * chosen.block_tokens,
            arrival_s=np.maximum.accumulate(arrival_s) - arrival_s[0],
            block_bytes=chosen.block_bytes,
            live=tree.live(),
        ),
        notes,
    )


def _places(files: list[_RecordFile], events: dict[str, I64]) -> list[RecordPlace]:
    lookups = events["place"][events["kind"] == LOOKUP]
    return [
        RecordPlace(number, tenant, group, tokens, size_bytes, int(np.count_nonzero(lookups == number)))
        for number, tenant, group, tokens, size_bytes in files[-1].places.tolist()
    ]


def _chosen(folder: Path, places: list[RecordPlace], wanted: int | None) -> RecordPlace:
    """Raises TraceError."""
    if wanted is not None:
        places = [each for each in places if each.number == wanted]
        if not places:
            raise TraceError(f"{folder}: has no place {wanted}: leave --place out to see which there are")
    most = max(places, key=lambda each: each.requests, default=None)
    if most is None or not most.requests:
        raise TraceError(f"{folder}: has no requests; record while engines are asked something")
    return most


def _notes(files: list[_RecordFile]) -> Iterator[str]:
    if files[0].number > 1:
        yield f"files 1 to {files[0].number - 1} are not there any more: blocks stored before are missing"
    if not files[-1].ended:
        yield f"the recording went on after {files[-1].path.name}, or was cut off"
    events, blocks = files[-1].dropped
    if events:
        yield (
            f"{events:,} events with {blocks:,} blocks were dropped while it was recorded: the hits may "
            "differ from the daemon's"
        )


@dataclass(frozen=True, slots=True)
class _Chain:
    """One event."""

    kind: int
    hashes: list[int]
    hits: int
    part: int


class _Tree:
    """The blocks of a place by their keyed hashes. A block has one predecessor: its hash stands for all that
    comes before it."""

    def __init__(self, chains: Iterator[_Chain]) -> None:
        events = list(chains)
        self.parent: list[int] = []
        self.depth: list[int] = []
        """By block: how many blocks the path to it has."""
        self.leaf: list[int] = []
        self._hits: list[int] = []
        self._stores: list[tuple[int, int, int, int, bool]] = []
        self._before: dict[int, int] = {}
        self._conflicts = 0
        self._inside = 0
        self._number_of: dict[int, int] = {}
        for event in events:
            if event.kind != STORE_LOOSE:
                self._learn(event.hashes)
        store = 0
        for event in events:
            if event.kind == LOOKUP:
                self._ask(event)
                continue
            store += event.part == 0
            if event.kind == STORE_LOOSE:
                for run in self._runs(event.hashes):
                    self._stored(store, run, behind=True)
            elif event.kind == STORE_BEHIND:
                self._stored(store, event.hashes[1:], behind=True)
            else:
                self._stored(store, event.hashes, behind=False)

    def live(self) -> LiveCourse:
        columns = np.array(self._stores, np.int64).reshape(-1, 5).T
        after, store, leaf, count, behind = columns
        return LiveCourse(np.array(self._hits, np.int64), after, store, leaf, count, behind.astype(np.bool_))

    def notes(self) -> Iterator[str]:
        if self._conflicts:
            yield (
                f"{self._conflicts:,} times a block came behind another one than before: the engine's hashes "
                "do not stand for whole prefixes, and the hits may differ from the daemon's"
            )
        if self._inside:
            yield f"{self._inside:,} lookups began within a prompt, and count as if they asked for all of it"

    def _learn(self, hashes: list[int]) -> None:
        before = self._before
        for block, previous in zip(hashes[1:], hashes, strict=False):
            if before.setdefault(block, previous) != previous:
                self._conflicts += 1

    def _number(self, block: int) -> int:
        """The number of a block, which is given to those before it first."""
        path: list[int] = []
        waiting: set[int] = set()
        current: int | None = block
        while current is not None and current not in self._number_of and current not in waiting:
            path.append(current)
            waiting.add(current)
            current = self._before.get(current)
        self._conflicts += current in waiting  # blocks that follow each other in a circle
        above = self._number_of.get(current, NO_PARENT) if current is not None else NO_PARENT
        for each in reversed(path):
            self._number_of[each] = len(self.parent)
            self.parent.append(above)
            self.depth.append(1 + (self.depth[above] if above != NO_PARENT else 0))
            above = self._number_of[each]
        return self._number_of[block]

    def _ask(self, event: _Chain) -> None:
        leaf = self._number(event.hashes[-1])
        outside = self.depth[leaf] - len(event.hashes)
        self._inside += outside > 0
        self.leaf.append(leaf)
        self._hits.append(min(self.depth[leaf], event.hits + max(outside, 0)))

    def _stored(self, store: int, hashes: list[int], *, behind: bool) -> None:
        leaf = self._number(hashes[-1])
        self._stores.append((len(self.leaf) - 1, store, leaf, min(len(hashes), self.depth[leaf]), behind))

    def _runs(self, hashes: list[int]) -> Iterator[list[int]]:
        """Blocks that follow each other, of blocks of which nothing was said."""
        run: list[int] = []
        for block in hashes:
            if run and self._before.get(block) != run[-1]:
                yield run
                run = []
            run.append(block)
        if run:
            yield run
