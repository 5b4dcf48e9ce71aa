"""Room for loads: what waits can go on when nothing else runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from kvtier import GroupKind
from kvtier_vllm.groups import Groups, GroupShape
from kvtier_vllm.scheduler.room import LoadRoom

pytestmark = pytest.mark.vllm

FULL = GroupShape(0, 16)
WINDOW = GroupShape(1, 16, GroupKind.SLIDING_WINDOW, window_tokens=40, window_blocks=3)


@dataclass
class Pool:
    """An engine's blocks."""

    free: int
    blocks: Sequence[Any] = ()

    def touch(self, blocks: Any) -> None: ...

    def free_blocks(self, ordered_blocks: Any) -> None: ...

    def get_num_free_blocks(self) -> int:
        return self.free


def request(name: str, tokens: int) -> Any:
    return SimpleNamespace(request_id=name, num_tokens=tokens)


def test_where_vllm_counts_everything_itself_there_is_always_room() -> None:
    room = LoadRoom(Groups.one(16))
    room.take(request("a", 320), 160)
    assert room.has(request("b", 320), 160)


def test_the_first_always_has_room_and_others_once_the_blocks_are_known() -> None:
    room = LoadRoom(Groups((FULL, WINDOW), 16))
    assert room.has(request("a", 320), 160)
    room.take(request("a", 320), 160)
    assert not room.has(request("b", 320), 160)
    room.watch(Pool(1_000))
    assert room.has(request("b", 320), 160)


def test_what_all_that_wait_will_need_stays_free() -> None:
    room, pool = LoadRoom(Groups((FULL, WINDOW), 16)), Pool(1_000)
    room.watch(pool)
    room.take(request("a", 320), 160)  # 10 blocks more, and one for what it samples, of each group
    pool.free = 22 + (10 + 4) + 22
    assert room.has(request("b", 320), 160)
    pool.free -= 1
    assert not room.has(request("b", 320), 160)
    room.give_back(["a"])
    assert room.has(request("b", 320), 160)


def test_smaller_ones_do_not_keep_out_who_came_before_them() -> None:
    room, pool = LoadRoom(Groups((FULL, WINDOW), 16)), Pool(60)
    room.watch(pool)
    large, small = request("large", 1_600), request("small", 48)
    room.take(request("a", 64), 48)
    assert room.has(small, 32)
    assert not room.has(large, 1_584)
    assert not room.has(small, 32)
    room.give_back(["a"])
    assert not room.has(small, 32)
    assert room.has(large, 1_584)
    room.take(large, 1_584)
    pool.free = 1_000
    assert room.has(small, 32)


def test_who_is_over_keeps_nobody_out() -> None:
    room = LoadRoom(Groups((FULL, WINDOW), 16))
    room.take(request("a", 64), 48)
    assert not room.has(request("b", 64), 48)
    room.give_back(["b"])
    room.give_back(["a"])
    assert room.has(request("c", 64), 48)
