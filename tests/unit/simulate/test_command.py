"""`kvtierctl simulate`, as somebody types it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.simulate.conftest import run


def as_json(*arguments: object) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_the_result_is_by_policy_and_by_the_capacity_as_it_was_written(trace: Path) -> None:
    found = as_json(trace, "--capacity", "10%, 50%,7", "--policy", "optimum,lru")
    blocks = found["trace"]["blocks"]
    for policy in ("lru", "optimum"):
        assert list(found[policy]) == ["10%", "50%", "7"]
        assert found[policy]["10%"]["capacity_blocks"] == blocks // 10
        assert found[policy]["7"]["capacity_blocks"] == 7
        assert (
            0
            <= found[policy]["10%"]["prefix_token_hit_rate"]
            <= found[policy]["50%"]["prefix_token_hit_rate"]
        )
        assert {"block_hit_rate", "inserts", "hit_tokens"} <= found[policy]["7"].keys()
    assert found["trace"]["requests"] == 100


def test_sizes_in_bytes_need_the_size_of_a_block(trace: Path) -> None:
    found = as_json(trace, "--capacity", "10MiB", "--block-bytes", "2MiB", "--policy", "lru")
    assert found["lru"]["10MiB"]["capacity_blocks"] == 5
    refused = run(trace, "--capacity", "10MiB")
    assert refused.exit_code == 2
    assert "10MiB says bytes: say how many a block has (--block-bytes)" in refused.stderr


def test_what_hits_save_is_told_at_a_rate(trace: Path) -> None:
    found = as_json(trace, "--capacity", "50%", "--policy", "lru", "--prefill-rate", "100")
    each = found["lru"]["50%"]
    assert each["prefill_saved_s"] == pytest.approx(each["hit_tokens"] / 100)
    assert "prefill saved" in run(trace, "--capacity", "50%", "--prefill-rate", "100").stdout


def test_people_get_a_row_for_each_policy_and_size(trace: Path) -> None:
    result = run(trace, "--capacity", "20%,100%")
    assert result.exit_code == 0, result.output
    rows = [line.split()[:2] for line in result.stdout.splitlines() if "%" in line]
    names = ("lru", "reuse", "optimum")
    assert rows == [[name, size] for name in names for size in ("20%", "100%")]
    assert "100 requests" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("--capacity", "much"), "'much' is no size"),
        (("--capacity", "-1%"), "'-1%' is no size"),
        (("--capacity", "nan%"), "'nan%' is no size"),
        (("--capacity", "0.0001%"), "less than one block"),
        (("--capacity", ","), "write sizes"),
        (
            ("--policy", "best"),
            "there is no policy best: write some of lru, reuse, fifo, round-robin, arc, s3fifo, optimum",
        ),
        (("--policy", ""), "there is no policy"),
        (("--block-bytes", "0"), "at least one byte"),
        (("--prefill-rate", "0"), "--prefill-rate"),
    ],
)
def test_a_mistake_names_the_option_and_what_to_write(
    trace: Path, arguments: tuple[str, str], what: str
) -> None:
    result = run(trace, *arguments)
    assert result.exit_code == 2
    assert what in result.stderr
    assert arguments[0] in result.stderr


def test_a_file_that_is_no_trace_is_named(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("hello\n")
    result = run(path)
    assert result.exit_code == 2
    assert f"no trace: {path}, line 1" in result.stderr
