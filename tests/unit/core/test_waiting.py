"""Requests that were told to wait and ask again: they use their blocks once, whether their client says so or
not."""

from __future__ import annotations

import pytest
from kvtier_kernels import BlockTable as NativeTable
from kvtierd.core.state.waiting import WAITING_MAX, WAITING_S, Waiting
from kvtierd.core.stimuli import (
    BlockQuery,
    CoreDisks,
    PoolPolicy,
    PrefetchBlocks,
    Reconfigure,
    SubmittedChain,
    WriteMode,
)

from tests.unit.core.disk import DiskHost
from tests.unit.core.host import Instance, keys

CHAIN_OF_TWO = (SubmittedChain(2),)


def prompt(*numbers: int, group: int = 0) -> tuple[BlockQuery, ...]:
    return (BlockQuery(group, keys(*numbers)),)


def test_who_was_told_to_wait_asks_again_until_told_otherwise() -> None:
    waiting = Waiting()
    assert not waiting.asks_again(prompt(1, 2), 0.0)
    waiting.told(prompt(1, 2), 0.0, to_wait=True)
    assert waiting.asks_again(prompt(1, 2), 1.0)
    assert waiting.asks_again(prompt(2), 1.0), "its engine has the first block by now"
    for another in (prompt(1), prompt(1, 3), prompt(1, 2, group=1)):
        assert not waiting.asks_again(another, 1.0)
    waiting.told(prompt(1, 2), 1.0, to_wait=False)
    assert not waiting.asks_again(prompt(1, 2), 1.0)


def test_after_a_minute_it_is_another_request() -> None:
    waiting = Waiting()
    waiting.told(prompt(1), 0.0, to_wait=True)
    assert waiting.asks_again(prompt(1), WAITING_S - 1)
    assert not waiting.asks_again(prompt(1), WAITING_S)


def test_the_latest_are_remembered() -> None:
    waiting = Waiting()
    waiting.told(prompt(0), 0.0, to_wait=True)
    for number in range(1, WAITING_MAX):
        waiting.told(prompt(number), 0.0, to_wait=True)
    waiting.told(prompt(0), 1.0, to_wait=True)
    waiting.told(prompt(9_999), 1.0, to_wait=True)
    assert not waiting.asks_again(prompt(1), 2.0)
    assert waiting.asks_again(prompt(0), 2.0)


def by_reuse() -> tuple[DiskHost, Instance]:
    """A host that learns, and an instance of which only a disk has the blocks 0 and 1."""
    host = DiskHost(NativeTable, mode=WriteMode.THROUGH)
    host.do(Reconfigure(0, CoreDisks(mode=WriteMode.THROUGH), PoolPolicy.REUSE, CoreDisks()))
    one = host.instance()
    one.store(0, 1, chains=CHAIN_OF_TWO).finish()
    host.disk.finish_all()
    host.disk.pause()
    for first in range(100, 200, 4):  # pushes them out
        one.store(*range(first, first + 4), chains=(SubmittedChain(4),)).finish()
    host.disk.resume()
    assert not one.hits(0)
    return host, one


@pytest.mark.parametrize("on_host", [False, True])
def test_a_prompt_that_is_brought_up_ahead_is_used_once(on_host: bool) -> None:
    host, one = by_reuse()
    if on_host:
        one.store(0, 1, chains=CHAIN_OF_TWO).finish()
    table = host.machine.core.blocks.table
    before = table.learnt()
    ahead = PrefetchBlocks(one.scheduler, one.epoch, prompt(0, 1))
    host.do(ahead)
    host.disk.finish_all()
    used = table.learnt()
    assert used != before
    host.do(ahead)
    assert one.lookup(0, 1).hits == 2
    assert table.learnt() == used, "its own lookup is the same use"
    one.lookup(0, 1)
    assert table.learnt() != used, "and then it is another"


def test_a_prompt_that_a_disk_brings_up_is_used_once() -> None:
    host, one = by_reuse()
    one.lookup(0, 1)
    table = host.machine.core.blocks.table
    before = table.learnt()
    one.lookup(0, 1)
    host.disk.finish_all()
    assert one.lookup(0, 1).hits == 2
    assert table.learnt() == before
    one.lookup(0, 1)
    assert table.learnt() != before, "and then it is another use"
