"""What the connector makes of vLLM's block tables and of joint answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtier import HIT, MISS, PENDING, GroupKind, GroupLookup, Lookup
from kvtier_vllm.groups import Groups, GroupShape
from kvtier_vllm.scheduler.question import Question
from kvtier_vllm.scheduler.tables import newly_allocated, targets_of

FULL = GroupShape(0, 16)
WINDOW = GroupShape(1, 16, GroupKind.SLIDING_WINDOW, 40, 3)
COARSE = GroupShape(2, 32, GroupKind.SLIDING_WINDOW, 40, 2, hash_stride=2)
GROUPS = Groups((FULL, WINDOW, COARSE), 16)
HASHES = [bytes([number]) * 32 for number in range(16)]


def test_units_end_where_blocks_of_all_groups_do() -> None:
    assert (GROUPS.unit_tokens, GROUPS.unit_hashes) == (32, 2)
    assert not GROUPS.plain
    assert not Groups((WINDOW,), 16).plain
    assert Groups.one(16).plain
    assert [(q.group, q.window_blocks, q.hash_stride) for q in GROUPS.queries] == [
        (0, 0, 1),
        (1, 3, 1),
        (2, 2, 2),
    ]


@given(st.integers(0, 5), st.integers(1, 5), st.integers(0, 3), st.integers(0, 2))
def test_loads_go_where_each_group_has_blocks(local: int, units: int, there: int, coarse: int) -> None:
    """`there`, `coarse`: how many of its last blocks vLLM has given to a window."""
    begin, end = local * 32, (local + units) * 32
    blocks, larger = end // 16, end // 32
    there, coarse = min(there, blocks - begin // 16), min(coarse, larger - local)
    tables = [
        list(range(1, blocks + 1)),
        [0] * (blocks - there) + list(range(100, 100 + there)),
        [0] * (larger - coarse) + list(range(200, 200 + coarse)),
    ]
    targets = {target.group: target for target in targets_of(GROUPS, tables, begin, end)}
    assert targets[0].block_ids == tuple(range(local * 2 + 1, blocks + 1))
    assert targets[0].hashes_of(HASHES) == HASHES[local * 2 : blocks]
    assert (1 in targets, 2 in targets) == (there > 0, coarse > 0)
    if there:
        assert targets[1].first == blocks - there
        assert targets[1].block_ids == tuple(range(100, 100 + there))
    if coarse:
        assert targets[2].first == larger - coarse
        assert list(targets[2].hashes_of(HASHES)) == HASHES[1::2][larger - coarse : larger]


@pytest.mark.parametrize(
    "tables",
    [
        [[1, 2, 3, 0], [0, 4, 5, 6], [0, 7]],  # full attention has no holes
        [[1, 2, 3, 4], [0, 5, 0, 6], [0, 7]],  # nor has what a window needs
        [[1, 2, 3, 4], [5, 6, 7, 8], [0, 9]],  # more than the lookup asked for
        [[1, 2, 3], [0, 4, 5, 6], [0, 7]],  # too short
    ],
)
def test_tables_that_cannot_be_are_not_written_to(tables: list[list[int]]) -> None:
    with pytest.raises(RuntimeError, match=r"tokens 0 to 64 are to be loaded, and group \d"):
        targets_of(GROUPS, tables, 0, 64)


def test_only_blocks_to_be_written_count_as_given_away() -> None:
    cached = SimpleNamespace(
        req_ids=["running", "resumed", "same"],
        resumed_req_ids={"resumed"},
        new_block_ids=[([1], [2], []), ([3, 4], [0, 5], [6]), None],
        num_computed_tokens=[64, 16, 80],
    )
    new = SimpleNamespace(block_ids=([7, 8, 9], [0, 0, 10], [11, 12]), num_computed_tokens=32)
    output: Any = SimpleNamespace(scheduled_new_reqs=[new], scheduled_cached_reqs=cached)
    found = list(newly_allocated(GROUPS, output))
    assert sorted(block for block in found if block) == [1, 2, 4, 5, 6, 9, 10, 12]


def test_what_an_answer_waits_for_is_its_first_pending_block() -> None:
    question = Question(GROUPS)
    groups = (
        GroupLookup(0, 4, bytes([HIT] * 6)),
        GroupLookup(1, 4, bytes([MISS, HIT, HIT, HIT, HIT, PENDING])),
        GroupLookup(2, 2, bytes([MISS, HIT, PENDING])),
    )
    answer = Lookup(groups, answered=True)
    assert question.hits(answer) == 2
    assert answer.pending
    assert question.pending_hash(answer, HASHES, 1) == HASHES[2 + 5]
