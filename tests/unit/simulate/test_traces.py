"""Files that are traces, and files that are not."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvtierd.simulate.traces import Trace, TraceError, read

from tests.unit.simulate.conftest import MakeTrace, real_trace

LINES = [
    {"timestamp": 1_000, "input_length": 1_500, "output_length": 3, "hash_ids": [0, 1, 2]},
    {"timestamp": 2_500, "input_length": 1_024, "output_length": 3, "hash_ids": [0, 1]},
    {"timestamp": 2_500, "input_length": 1_200, "output_length": 3, "hash_ids": [0, 7, 8]},
]


def lines(path: Path, requests: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(map(json.dumps, requests)) + "\n")
    return path


def archive(path: Path, **changed: Any) -> Path:
    arrays: dict[str, Any] = {"parent": [-1, 0, 1], "leaf": [2, 1], "intok": [12, 8], "ts": [0.0, 1.0]}
    np.savez(path, **(arrays | {"block": 4} | changed))
    return path


def paths(trace: Trace) -> list[list[int]]:
    return [path.tolist() for path in trace.paths()]


@pytest.mark.parametrize("compressed", [False, True])
def test_lines_of_json_are_a_tree_of_blocks(tmp_path: Path, compressed: bool) -> None:
    path = lines(tmp_path / "trace.jsonl", LINES)
    if compressed:
        path.write_bytes(gzip.compress(path.read_bytes()))
    trace = read(path)
    assert paths(trace) == [[0, 1, 2], [0, 1], [0, 3, 4]]
    assert (trace.blocks, trace.requests, trace.block_tokens) == (5, 3, 512)
    assert trace.arrival_s.tolist() == [0.0, 1.5, 1.5]
    assert trace.path(2).tolist() == [0, 3, 4]


def test_a_hit_of_the_whole_prompt_counts_all_its_tokens(tmp_path: Path) -> None:
    trace = read(lines(tmp_path / "trace.jsonl", LINES))
    assert [trace.hit_tokens(0, blocks, 3) for blocks in range(4)] == [0, 512, 1_024, 1_500]


def test_an_archive_is_the_same_tree(tmp_path: Path) -> None:
    trace = read(archive(tmp_path / "trace.npz"))
    assert paths(trace) == [[0, 1, 2], [0, 1]]
    assert (trace.block_tokens, trace.tokens.tolist()) == (4, [12, 8])


def test_an_archive_of_what_was_made_up_comes_back(tmp_path: Path, make_trace: MakeTrace) -> None:
    made = make_trace(3)
    path = archive(
        tmp_path / "trace.npz",
        parent=made.parent,
        leaf=made.leaf,
        intok=made.tokens,
        ts=made.arrival_s,
        block=made.block_tokens,
    )
    assert paths(read(path)) == paths(made)


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"parent": [-1, 2, 1]}, r"parent\[1\] is 2; expected an earlier block, or -1"),
        ({"leaf": [3, 1]}, r"leaf\[0\] is 3; expected a block, 0 to 2"),
        ({"leaf": []}, "no requests"),
        ({"intok": [1]}, "have 2, 1, 2 elements"),
        ({"intok": [0, 1]}, "without tokens"),
        ({"ts": [1.0, 0.0]}, "order of their arrival"),
        ({"ts": [0.0, np.nan]}, "order of their arrival"),
        ({"block": 0}, "block is 0"),
        ({"leaf": [[2], [1]]}, "one dimension"),
    ],
)
def test_an_archive_that_is_no_trace_says_what_is_wrong(
    tmp_path: Path, changed: dict[str, Any], what: str
) -> None:
    with pytest.raises(TraceError, match=what) as refusal:
        read(archive(tmp_path / "trace.npz", **changed))
    assert str(tmp_path / "trace.npz") in str(refusal.value)


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"hash_ids": []}, "hash_ids must be a list"),
        ({"hash_ids": [[1]]}, "hash_ids must be a list"),
        ({"input_length": 0}, "input_length is 0"),
        ({"input_length": "many"}, "input_length is 'many'"),
        ({"timestamp": None}, "expected timestamp"),
        ({"timestamp": 1}, "order of their arrival"),
    ],
)
def test_lines_that_are_no_trace_say_which(tmp_path: Path, changed: dict[str, Any], what: str) -> None:
    with pytest.raises(TraceError, match=what):
        read(lines(tmp_path / "trace.jsonl", [LINES[0], LINES[1] | changed]))


@pytest.mark.parametrize("content", [b"", b"\n\n", b"hello", b"[1, 2]\n", b"PK\x03\x04broken", b"{}\n"])
def test_a_file_of_something_else_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "else"
    path.write_bytes(content)
    with pytest.raises(TraceError, match="else"):
        read(path)


def test_both_forms_of_a_published_trace_are_the_same() -> None:
    archived, lined = read(real_trace("mooncake")), read(real_trace("mooncake-lines"))
    assert archived.parent.tolist() == lined.parent.tolist()
    assert archived.leaf.tolist() == lined.leaf.tolist()
    assert archived.tokens.tolist() == lined.tokens.tolist()
