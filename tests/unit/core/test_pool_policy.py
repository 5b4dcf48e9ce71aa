"""What goes first, as the pool's policy says: how the core tells its table what follows what, and what is
asked for."""

from __future__ import annotations

import pytest
from kvtier_kernels import BlockTable as NativeTable
from kvtierd.core.blocks.namespaces import tag_of
from kvtierd.core.stimuli import (
    NOBODY,
    BlockQuery,
    CoreDisks,
    PoolPolicy,
    PublishPage,
    Reconfigure,
    ShowLookups,
    SubmittedChain,
    TouchBlocks,
)

from tests.simulation.page import FakePage
from tests.unit.core.host import Host, Instance, keys

FULL = 56
"""4 KiB slots in the pool."""
UNWANTED = 4


def policy(host: Host, chosen: PoolPolicy) -> None:
    host.do(Reconfigure(0, CoreDisks(), chosen, CoreDisks()))


def ranks(host: Host) -> bool:
    return host.machine.core.blocks.ranks


def relied_on(page: FakePage) -> bool:
    return page.is_relied_on


def by_reuse() -> tuple[Host, Instance]:
    """It ranks at once, as one that goes on with what was learnt before."""
    host = Host(NativeTable)
    policy(host, PoolPolicy.REUSE)
    nothing = NativeTable(64, 1 << 20, seed=1, ranks=True, history_blocks=8).learnt()
    assert host.machine.core.blocks.table.restore_learnt(nothing)
    return host, host.instance()


def leaving(host: Host, one: Instance, *numbers: int) -> list[int]:
    """Those of these blocks that may go, in the order in which they would."""
    blocks = host.machine.core.blocks
    space = host.machine.core.names[one.owner, one.name].plans[0].space
    entries, _ = blocks.table.lookup(space, keys(*numbers))
    number_of = dict(zip(entries.tolist(), numbers, strict=True))
    [domain] = blocks.domains.by_id
    order = [number_of.get(entry) for entry in blocks.table.victims(domain, 100).tolist()]
    return [number for number in order if number is not None]


def test_a_store_that_begins_within_a_prompt_says_after_which_block() -> None:
    host, one = by_reuse()
    one.store(0, 1, chains=(SubmittedChain(2),)).finish()
    one.store(2, 3, chains=(SubmittedChain(2, keys(1)),)).finish()
    one.lease(3)
    assert leaving(host, one, 0, 1, 2, 3) == []


def test_prompts_of_one_store_do_not_follow_each_other() -> None:
    host, one = by_reuse()
    one.store(0, 1, 2, 3, chains=(SubmittedChain(2), SubmittedChain(2))).finish()
    one.lease(2, 3)
    assert leaving(host, one, 0, 1, 2, 3) == [1, 0]


def test_blocks_whose_beginning_is_not_there_are_not_stored() -> None:
    """Nothing could be loaded of them."""
    host, one = by_reuse()
    running = one.store(
        0, 2, 3, 2, 5, chains=(SubmittedChain(1), SubmittedChain(3, keys(1)), SubmittedChain(1, keys(3)))
    )
    assert running.results == [0, UNWANTED, UNWANTED, UNWANTED, UNWANTED]
    assert running.finish().succeeded.tolist() == [1, 0, 0, 0, 0]
    assert one.store(1, 2, chains=(SubmittedChain(2, keys(0)),)).results == [0, 0]
    assert host.counters.unwanted_blocks == 4


def test_each_prompt_of_a_store_has_to_be_worth_its_room_by_itself() -> None:
    _, one = by_reuse()
    for turn in range(400):
        first = 8 * (turn // 2 % 7) if turn % 2 == 0 else 1_000 + 8 * turn
        one.lookup(*range(first, first + 8))
        one.store(*range(first, first + 8), chains=(SubmittedChain(8),)).finish()
    there = one.hits(*range(FULL))
    running = one.store(9_000, 9_001, *there[:8], chains=(SubmittedChain(2), SubmittedChain(8)))
    assert running.results == [UNWANTED] * 2 + [1] * 8


def test_without_a_word_about_it_a_lookup_or_a_touch_tells_what_follows_what() -> None:
    host, one = by_reuse()
    one.stored(2)
    one.stored(0, 1)
    one.lookup(0, 1, 2)
    lease = one.lease(2)
    assert leaving(host, one, 0, 1, 2) == []
    one.load(lease, [0]).finish()
    one.stored(11)
    one.stored(10)
    host.do(TouchBlocks(one.scheduler, one.epoch, (BlockQuery(0, keys(10, 11)),)))
    one.lease(11)
    assert leaving(host, one, 10, 11) == []


def test_a_request_that_asks_again_uses_its_blocks_once() -> None:
    host, one = by_reuse()
    table = host.machine.core.blocks.table
    one.store(0, 1, chains=(SubmittedChain(2),)).finish()
    one.lookup(0, 1)
    before = table.learnt()
    one.lookup(0, 1, again=True)
    one.lookup(0, 1, 2, again=True)
    assert table.learnt() == before
    one.lookup(0, 1)
    assert table.learnt() != before


def test_what_is_not_worth_its_room_is_refused_before_anything_is_copied() -> None:
    """Prompts that come back fill the pool; those that never do are asked for between."""
    host, one = by_reuse()
    fresh = 1_000
    for turn in range(600):
        first = 8 * (turn // 2 % 7)
        if turn % 2:
            first, fresh = fresh, fresh + 8
        one.lookup(*range(first, first + 8))
        one.store(*range(first, first + 8), chains=(SubmittedChain(8),)).finish()
        if turn == 300:
            before = host.counters.unwanted_blocks
    assert host.counters.unwanted_blocks - before > 0.9 * 150 * 8
    assert not host.counters.throttled_blocks
    assert len(one.hits(*range(FULL))) >= FULL - 8


def test_the_policy_changes_with_blocks_there_and_back() -> None:
    host = Host(NativeTable)
    one = host.instance()
    one.stored(0, 1)
    one.stored(2, 3)
    one.lookup(0, 1)
    assert leaving(host, one, 0, 1, 2, 3) == [3, 2, 1, 0]
    policy(host, PoolPolicy.REUSE)
    assert ranks(host)
    assert leaving(host, one, 0, 1, 2, 3) == [3, 2, 1, 0]
    one.lookup(0, 1)
    policy(host, PoolPolicy.REUSE)  # again: nothing is forgotten
    host.validate()
    policy(host, PoolPolicy.LRU)
    assert not ranks(host)
    assert leaving(host, one, 0, 1, 2, 3) == [3, 2, 1, 0]


def test_clients_ask_about_everything_while_reuse_is_learnt() -> None:
    """A lookup that an index page spares would not be learnt from."""
    host = Host(NativeTable)
    one = host.instance()
    before, later = (FakePage(64, plain=False) for _ in range(2))
    host.machine.core.pages.entries_per_tick = 1 << 10
    host.do(PublishPage(one.scheduler, 0, before.page))
    assert relied_on(before)
    policy(host, PoolPolicy.REUSE)
    assert not relied_on(before)
    two = host.instance("another", fields=b"another model")
    host.do(PublishPage(two.scheduler, 0, later.page))
    assert not relied_on(later)
    policy(host, PoolPolicy.LRU)
    assert relied_on(before)
    assert relied_on(later)


def test_pages_do_not_spare_lookups_that_somebody_wants_to_see() -> None:
    host = Host(NativeTable)
    page = FakePage(64, plain=False)
    host.do(PublishPage(host.instance().scheduler, 0, page.page))
    host.do(ShowLookups(every=True))
    assert not relied_on(page)
    policy(host, PoolPolicy.REUSE)
    policy(host, PoolPolicy.LRU)
    assert not relied_on(page)
    policy(host, PoolPolicy.REUSE)
    host.do(ShowLookups(every=False))
    assert not relied_on(page)
    policy(host, PoolPolicy.LRU)
    assert relied_on(page)


@pytest.mark.parametrize("exact", [False, True])
def test_blocks_behind_a_window_and_those_asked_for_by_themselves_are_used_too(exact: bool) -> None:
    """Otherwise they would look older and older, however often they are hit."""
    host = Host(NativeTable)
    policy(host, PoolPolicy.REUSE)
    one = host.instance(sizes=((4096,), (8192,)), block_tokens=(16, 16))
    for first in (0, 10):
        for group in range(2):
            one.store(*range(first, first + 4), group=group, chains=(SubmittedChain(1),) * 4).finish()
    table = host.machine.core.blocks.table
    before = table.learnt()
    for _ in range(3):
        if exact:
            one.lookup(0, 1, 2, 3, group=1, exact=True)
        else:
            one.lookup_groups((0, range(4)), (2, range(4)))
    assert table.learnt() != before
    domain = host.machine.core.blocks.domains.of(tag_of(NOBODY.tenant), (8192,))
    space = host.machine.core.names[one.owner, one.name].plans[1].space
    entries, _ = table.lookup(space, keys(2, 3))
    order = table.victims(domain.domain, 8).tolist()
    assert order.index(entries[0]) >= 4
    assert order.index(entries[1]) >= 4
