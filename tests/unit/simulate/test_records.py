"""Files of a recording: what is written, what bounds it, and what is said of those that cannot be read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvtier.v1 import admin_pb2
from kvtierd.ctl.recorder import FILE_BYTES_MIN, RecordWriter, period_s
from kvtierd.simulate.host import SimulatedHost
from kvtierd.simulate.records import read_traces
from kvtierd.simulate.results import replayed
from kvtierd.simulate.traces import Trace, TraceError

from tests.unit.simulate.conftest import run

LOOKUP, STORE, BEHIND, LOOSE = 1, 2, 3, 4
Event = tuple[int, int, Sequence[int], int, int]
"""Kind, place, blocks, hits, part."""
PLACES = {1: (1, 0, 16, 4_096), 2: (2, 1, 32, 8_192)}
MIB = 1 << 20


def batch(
    events: Sequence[Event], places: Sequence[int] = (), dropped: tuple[int, int] = (0, 0), at_us: int = 0
) -> admin_pb2.RecordBatch:
    return admin_pb2.RecordBatch(
        places=[
            admin_pb2.RecordedPlace(
                number=number,
                tenant=PLACES[number][0],
                group=PLACES[number][1],
                block_tokens=PLACES[number][2],
                block_bytes=PLACES[number][3],
            )
            for number in places
        ],
        events=np.array(
            [
                (each[0], at_us + 1_000_000 * number, each[1], len(each[2]), each[3], each[4])
                for number, each in enumerate(events)
            ],
            "<u8",
        ).tobytes(),
        hashes=b"".join(np.array(each[2], "<u8").tobytes() for each in events),
        dropped_events=dropped[0],
        dropped_blocks=dropped[1],
    )


@pytest.fixture
def writer(tmp_path: Path) -> RecordWriter:
    return RecordWriter(tmp_path / "records", MIB, 4 * MIB)


def lookup(blocks: Sequence[int], hits: int = 0, place: int = 1) -> Event:
    return (LOOKUP, place, blocks, hits, 1)


def written(writer: RecordWriter, events: Sequence[Event], places: Sequence[int] = (1,)) -> Trace:
    writer.add(batch(events, places))
    writer.write(ended=True)
    trace, notes = read_traces([writer.folder])
    assert notes == []
    return trace


def paths(trace: Trace) -> list[list[int]]:
    return [path.tolist() for path in trace.paths()]


def hits(trace: Trace, capacity: int = 100) -> list[int]:
    return list(replayed(SimulatedHost(capacity), trace, list(trace.paths()), lambda done: None))


def test_lookups_and_stores_are_a_tree_of_blocks(writer: RecordWriter) -> None:
    trace = written(
        writer,
        [
            lookup([10, 11, 12]),
            (STORE, 1, [10, 11, 12], 0, 0),
            (BEHIND, 1, [12, 13], 0, 0),  # an answer
            lookup([10, 11, 12, 13, 14], hits=4),
            (BEHIND, 1, [13, 14], 0, 0),
            lookup([10, 99], hits=1),
            (LOOSE, 1, [99, 14], 0, 0),
        ],
    )
    assert paths(trace) == [[0, 1, 2], [0, 1, 2, 3, 4], [0, 5]]
    assert (trace.block_tokens, trace.block_bytes, trace.name) == (16, 4_096, "records")
    assert trace.tokens.tolist() == [48, 80, 32]
    assert trace.arrival_s.tolist() == [0.0, 3.0, 5.0]
    live = trace.live
    assert live is not None
    assert live.hits.tolist() == [0, 4, 1]
    assert live.after.tolist() == [0, 0, 1, 2, 2]
    assert [
        trace.tail(leaf, count)[0].tolist() for leaf, count in zip(live.leaf, live.count, strict=True)
    ] == [
        [0, 1, 2],
        [3],
        [4],
        [5],
        [4],
    ]
    assert {request: blocks.tolist() for request, blocks in trace.generated().items()} == {0: [3]}
    assert hits(trace) == [0, 4, 1]


def test_what_the_engine_loaded_is_computed_and_stored_where_it_is_not_there(writer: RecordWriter) -> None:
    """The daemon had these blocks before, so the engine has not stored them while it was recorded."""
    trace = written(writer, [lookup([1, 2, 3], hits=3), lookup([1, 2, 3, 4], hits=3), lookup([1, 2], hits=2)])
    assert hits(trace) == [0, 3, 2]
    assert hits(trace, 2) == [0, 2, 2]


def test_chains_of_one_store_stay_one_store(writer: RecordWriter) -> None:
    trace = written(
        writer,
        [lookup([1, 2]), lookup([5]), (STORE, 1, [1, 2], 0, 0), (STORE, 1, [5], 0, 1), (STORE, 1, [6], 0, 0)],
    )
    assert trace.live is not None
    assert trace.live.store.tolist() == [1, 1, 2]


def test_places_are_kept_apart(writer: RecordWriter) -> None:
    writer.add(batch([lookup([1, 2]), lookup([1, 7], place=2), lookup([1, 2, 3], place=2)], [1, 2]))
    writer.write(ended=True)
    trace, [note] = read_traces([writer.folder])
    assert (trace.block_tokens, paths(trace)) == (32, [[0, 1], [0, 2, 3]])
    assert "2 places were recorded, and 2 is simulated" in note
    assert "1: tenant 1, group 0, 1 requests, blocks of 16 tokens" in note
    first, _ = read_traces([writer.folder], 1)
    assert (first.block_tokens, paths(first)) == (16, [[0, 1]])
    with pytest.raises(TraceError, match="has no place 3"):
        read_traces([writer.folder], 3)


def test_hashes_are_keyed_anew_for_each_recording(tmp_path: Path) -> None:
    raw = np.random.default_rng(1).integers(0, 2**63, 8)
    seen = []
    for name in ("one", "two"):
        writer = RecordWriter(tmp_path / name, MIB, 4 * MIB)
        events = batch([lookup(raw.tolist())], [1])
        writer.add(events)
        writer.write(ended=True)
        [file] = (tmp_path / name).iterdir()
        content = file.read_bytes()
        assert not any(events.hashes[at : at + 8] in content for at in range(0, len(events.hashes), 8))
        with np.load(file) as archive:
            seen.append(archive["hash"].tolist())
    assert len(set(seen[0]) | set(seen[1])) == 16


def test_files_are_bounded_and_the_oldest_go(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / "records", FILE_BYTES_MIN, 3 * FILE_BYTES_MIN)
    for number in range(30):
        first = number * 20_000
        writer.add(batch([lookup(range(first, first + 20_000))], [1] if not number else [], at_us=number))
        assert writer.written_bytes <= 3 * FILE_BYTES_MIN
    writer.write(ended=True)
    files = sorted((tmp_path / "records").iterdir())
    assert len(files) >= 2
    assert all(each.stat().st_size <= FILE_BYTES_MIN for each in files)
    assert sum(each.stat().st_size for each in files) == writer.written_bytes <= 3 * FILE_BYTES_MIN
    assert all(each.stat().st_mode & 0o777 == 0o600 for each in files)
    assert (tmp_path / "records").stat().st_mode & 0o777 == 0o700
    assert writer.removed_files > 0
    _, notes = read_traces([tmp_path / "records"])
    assert notes == [
        f"files 1 to {writer.removed_files} are not there any more: blocks stored before are missing"
    ]
    assert f"{writer.removed_files} oldest files" in "\n".join(writer.lines())


def test_a_file_that_cannot_be_written_leaves_nothing(writer: RecordWriter) -> None:
    writer.add(batch([lookup([1])], [1]))
    (writer.folder / "record-000001.tmp").mkdir()
    with pytest.raises(OSError, match=r"record-000001\.tmp"):
        writer.write()
    assert not list(writer.folder.glob("*.npz"))


def several(tmp_path: Path) -> list[Path]:
    writer = RecordWriter(tmp_path / "records", MIB, 8 * MIB)
    for number in range(3):
        writer.add(batch([lookup([1, 2, number + 3])], [] if number else [1]))
        writer.write(ended=number == 2)
    return sorted(writer.folder.iterdir())


def test_files_of_one_recording_can_be_named_in_any_order(tmp_path: Path) -> None:
    files = several(tmp_path)
    trace, notes = read_traces([files[2], files[0], files[1]])
    assert (paths(trace), notes) == ([[0, 1, 2], [0, 1, 3], [0, 1, 4]], [])
    _, [note] = read_traces(files[:2])
    assert note == "the recording went on after record-000002.npz, or was cut off"


def test_a_file_that_is_missing_in_the_middle_is_named(tmp_path: Path) -> None:
    files = several(tmp_path)
    files[1].unlink()
    missing = r"file 2 of this recording is missing before it; put record-000002\.npz back"
    with pytest.raises(TraceError, match=missing):
        read_traces([files[0].parent])


def test_two_recordings_are_not_one_trace(tmp_path: Path) -> None:
    one, two = several(tmp_path / "a"), several(tmp_path / "b")
    with pytest.raises(TraceError, match="are of two recordings"):
        read_traces([one[0], two[1]])
    with pytest.raises(TraceError, match="are both file 1"):
        read_traces([one[0], one[0]])


def test_several_files_are_one_trace_only_if_they_are_records(tmp_path: Path) -> None:
    other = tmp_path / "trace.npz"
    np.savez(other, parent=[-1])
    with pytest.raises(TraceError, match=r"trace\.npz: is no record; several files are one trace only if"):
        read_traces([*several(tmp_path), other])


@pytest.mark.parametrize("content", [b"hello", b"", b"PK\x03\x04broken"])
def test_a_file_of_something_else_is_named(tmp_path: Path, content: bytes) -> None:
    files = several(tmp_path)
    for broken in (content, files[1].read_bytes()[:-200]):
        files[1].write_bytes(broken)
        with pytest.raises(TraceError, match=r"record-000002\.npz: is (damaged, or )?no record"):
            read_traces([files[0].parent])


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"kvtier_record": 9}, "version 9; this kvtierctl reads 1"),
        ({"hits": None}, "damaged, or no record"),
        ({"hits": [1, 2]}, "not parallel"),
        ({"count": [4]}, "count does not fit its 3 hashes"),
        ({"kind": [7]}, "kind has others than 1 to 4"),
        ({"hits": [9]}, "hits has more than"),
        ({"place": [2]}, "place has numbers that places lacks"),
        ({"places": [[1, 1, 0, 0, 1]]}, "no tokens"),
        ({"places": [[1, 1]]}, "places"),
        ({"hash": [0.5, 1.5, 2.5]}, "hash"),
    ],
)
def test_a_damaged_file_is_named_with_what_is_wrong(
    tmp_path: Path, changed: dict[str, Any], what: str
) -> None:
    files = several(tmp_path)
    with np.load(files[1]) as archive:
        arrays = dict(archive) | {name: np.array(value) for name, value in changed.items()}
    for name in (name for name, value in changed.items() if value is None):
        del arrays[name]
    np.savez(files[1], **arrays)
    with pytest.raises(TraceError, match=what) as refusal:
        read_traces([files[0].parent])
    assert str(files[1]) in str(refusal.value)


def test_blocks_in_a_circle_end_somewhere(writer: RecordWriter) -> None:
    """An engine may say anything."""
    writer.add(batch([lookup([1, 2, 1]), lookup([2, 1]), (BEHIND, 1, [2, 1], 0, 0)], [1]))
    writer.write(ended=True)
    trace, notes = read_traces([writer.folder])
    assert any("the engine's hashes do not stand for whole prefixes" in note for note in notes)
    assert len(hits(trace)) == 2


def test_the_command_says_what_the_daemon_hit_and_what_is_missing(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / "records", MIB, 4 * MIB)
    events = [lookup([1, 2, 3, 4]), (STORE, 1, [1, 2, 3, 4], 0, 0), lookup([1, 2, 3, 4], hits=4)]
    writer.add(batch(events, [1], dropped=(3, 40)))
    writer.write(ended=True)
    result = run(writer.folder, "--capacity", "16KiB,50%", "--policy", "lru")
    assert result.exit_code == 0, result.output
    assert "3 events with 40 blocks were dropped while it was recorded" in result.stderr
    assert "the daemon hit 50.00% of the tokens" in " ".join(result.stdout.split())
    figures = json.loads(run(writer.folder, "--capacity", "16KiB,50%", "--policy", "lru", "--json").stdout)
    assert figures["lru"]["16KiB"]["capacity_blocks"] == 4
    assert figures["lru"]["16KiB"]["prefix_token_hit_rate"] == 0.5
    assert figures["lru"]["50%"]["prefix_token_hit_rate"] == 0.25
    assert figures["trace"]["daemon_token_hit_rate"] == 0.5
    empty = run(tmp_path)
    assert (empty.exit_code, "has no record-*.npz" in empty.stderr) == (2, True)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("1.5s", 1.5), ("10min", 600), ("1h", 3_600), ("2 d", 172_800)]
)
def test_a_time_has_a_unit_or_is_in_seconds(text: str, seconds: float) -> None:
    assert period_s(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "-1s", "0", "1y"])
def test_what_is_no_time_says_how_to_write_one(text: str) -> None:
    with pytest.raises(ValueError, match="write one such as 90s, 10min, 1h or 2d"):
        period_s(text)


@pytest.mark.parametrize(
    ("sizes", "what"),
    [((MIB - 1, 4 * MIB), "--file-bytes"), ((2 * MIB, 3 * MIB), "--total-bytes: 3 MiB has no room")],
)
def test_bounds_that_do_not_fit_name_the_option(tmp_path: Path, sizes: tuple[int, int], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        RecordWriter(tmp_path, *sizes)
