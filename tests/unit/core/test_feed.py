"""What is told of blocks to routers: everything, and each block exactly once."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from kvtierd.core.actions import Action, BlockNews, NewsKind, TellOfBlocks
from kvtierd.core.blocks.namespaces import tag_of
from kvtierd.core.ids import DiskId, NamespaceDigest
from kvtierd.core.state import feed
from kvtierd.core.stimuli import ClearBlocks, Owner, ShowBlocks, TellAgain, Tick

from tests.unit.core.disk import DiskHost, nothing
from tests.unit.core.host import Host, Instance, keys

Key = tuple[NamespaceDigest, int, DiskId | None, bytes]
MakeDiskHost = Callable[..., DiskHost]


class Ear:
    """Hears all that is told, and knows what that makes. A block that is told twice, or removed and never
    told, is an error."""

    def __init__(self, host: Host) -> None:
        self.known: set[Key] = set()
        self.shown: dict[NamespaceDigest, set[Key]] = {}
        """What those who have asked know, as long as it is being shown."""
        self.all_shown = 0
        self.news: list[BlockNews] = []
        host.on_actions.append(self.hear)

    def hear(self, actions: list[Action]) -> None:
        for action in actions:
            for each in action.news if isinstance(action, TellOfBlocks) else ():
                self.news.append(each)
                self._take(each)

    def _take(self, news: BlockNews) -> None:
        told = {(news.namespace, news.group, news.disk, each.tobytes()) for each in news.hashes}
        assert len(told) == len(news.hashes)
        of_namespace = {key for key in self.known if key[0] == news.namespace}
        match news.kind:
            case NewsKind.CLEARED:
                assert news.about is not None
                self.known -= of_namespace
                self.shown.pop(news.namespace, None)
            case NewsKind.STORED:
                assert not told & self.known, "told twice"
                self.known |= told
                if news.namespace in self.shown:
                    self.shown[news.namespace] |= told
            case NewsKind.REMOVED:
                assert told <= self.known, "never told"
                self.known -= told
                if news.namespace in self.shown:
                    self.shown[news.namespace] -= told
            case NewsKind.SHOWING:
                self.shown[news.namespace] = set()
            case NewsKind.SHOWN:
                self.shown[news.namespace] |= told
            case NewsKind.SHOWN_ALL:
                assert self.shown.pop(news.namespace) == of_namespace
                self.all_shown += 1


def truth(host: Host) -> set[Key]:
    """All READY blocks, in all tiers."""
    core, found = host.machine.core, set()
    for blocks in (core.blocks, *(disk.blocks for disk in core.below.all)):
        for space, (namespace, group) in core.blocks.spaces.names.items():
            entries, _ = blocks.table.ready_among(space, 0, blocks.capacity)
            found |= {
                (namespace, group, blocks.disk, each.tobytes()) for each in blocks.table.hashes(entries)
            }
    return found


def settle(host: Host) -> None:
    """Ticks until everything is told."""
    core_feed = host.machine.core.feed
    assert core_feed is not None
    for _ in range(10_000):
        host.do(Tick())
        if not core_feed.busy:
            return
    raise AssertionError("there is always more to tell")


def of_everybody(_: object) -> bool:
    return True


def digest_of(instance: Instance) -> NamespaceDigest:
    core = instance.host.machine.core
    digest = core.names[instance.owner, instance.name].digest
    assert digest is not None
    return digest


def test_without_a_feed_nothing_is_told(host: Host) -> None:
    ear = Ear(host)
    host.instance().stored(1, 2)
    host.do(Tick())
    assert host.machine.core.feed is None
    assert ear.news == []


def test_a_namespace_begins_with_nothing(make_host: Callable[..., Host]) -> None:
    host = make_host(told_of=of_everybody)
    ear = Ear(host)
    one = host.instance()
    assert not host.machine.is_idle
    settle(host)
    [news] = ear.news
    assert (news.kind, news.namespace) == (NewsKind.CLEARED, digest_of(one))
    assert news.about is not None
    assert news.about.model == "model"
    host.instance("another of the same")
    settle(host)
    assert ear.news == [news]


def test_blocks_that_come_and_go(make_host: Callable[..., Host]) -> None:
    host = make_host(told_of=of_everybody)
    ear = Ear(host)
    one = host.instance()
    settle(host)
    one.stored(1, 2, 3)
    assert len(ear.news) == 1, "it is told at the next tick"
    settle(host)
    assert ear.news[-1].kind is NewsKind.STORED
    assert np.array_equal(ear.news[-1].hashes, keys(1, 2, 3)), "in the order of the prompt"
    one.fill_pool(1_000)
    settle(host)
    assert ear.known == truth(host)
    assert not {each[3] for each in ear.known} & {each.tobytes() for each in keys(1, 2, 3)}
    space = host.machine.core.names[one.owner, one.name].plans[0].space
    host.do(ClearBlocks(space, host.machine.keys(space)))
    settle(host)
    assert ear.known == truth(host) == set()


def test_a_block_that_fails_its_check_is_removed(make_host: Callable[..., Host]) -> None:
    host = make_host(told_of=of_everybody)
    ear = Ear(host)
    one = host.instance()
    one.stored(1, 2, 3)
    settle(host)
    assert len(ear.known) == 3
    one.load(one.lease(1, 2, 3), (0, 1, 2)).part(failed=(1,), corrupt=True)
    settle(host)
    assert ear.known == truth(host)
    assert len(ear.known) == 2


def test_what_is_not_stored_in_the_end_is_not_told(make_host: Callable[..., Host]) -> None:
    host = make_host(told_of=of_everybody)
    ear = Ear(host)
    one = host.instance()
    settle(host)
    one.store(1, 2, 3).part(failed=(0, 1, 2))
    settle(host)
    assert len(ear.news) == 1


def test_tiers_are_told_of_one_by_one(make_disk_host: MakeDiskHost) -> None:
    host = make_disk_host(told_of=of_everybody)
    ear = Ear(host)
    one = host.instance()
    host.stored_on_disk(one, 1, 2)
    settle(host)
    assert len(ear.known) == 4
    assert ear.known == truth(host)
    host.evict_all(one)
    settle(host)
    on_disk = {each for each in ear.known if each[2] == DiskId(0)}
    assert {each[3] for each in on_disk} == {each.tobytes() for each in keys(1, 2)}
    assert ear.known == truth(host)
    one.lookup(1, 2)
    host.disk.finish_all()
    settle(host)
    assert {each[3] for each in ear.known - on_disk} >= {each.tobytes() for each in keys(1, 2)}
    assert ear.known == truth(host)


def test_a_disk_that_joins_late(make_disk_host: MakeDiskHost) -> None:
    """What it has found is told when it is known."""
    host = make_disk_host(told_of=of_everybody, start=False)
    ear = Ear(host)
    one = host.instance()
    one.stored(1)
    settle(host)
    host.disk.start(nothing())
    host.stored_on_disk(one, 2, 3)
    settle(host)
    assert ear.known == truth(host)
    assert any(each[2] == DiskId(0) for each in ear.known)


def test_tenants_who_have_not_agreed(make_host: Callable[..., Host]) -> None:
    agreed = tag_of("research")
    host = make_host(told_of=lambda tenant: tenant == agreed)
    ear = Ear(host)
    one = host.instance(owner=Owner(tenant="production"))
    two = host.instance("two", owner=Owner(tenant="research"))
    one.stored(1, 2)
    two.stored(3)
    settle(host)
    assert {each[3] for each in ear.known} == {each.tobytes() for each in keys(3)}
    assert {each.namespace for each in ear.news} == {digest_of(two)}


def test_groups_are_told_apart(make_host: Callable[..., Host]) -> None:
    host = make_host(told_of=of_everybody)
    ear = Ear(host)
    one = host.instance(sizes=((4096,), (8192,)))
    one.stored(1, 2)
    one.stored(1, group=1)
    settle(host)
    assert sorted(each[1] for each in ear.known) == [0, 0, 1]


def test_more_namespaces_than_are_told_of(
    make_host: Callable[..., Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "NAMESPACES_MAX", 2)
    host = make_host(told_of=of_everybody)
    ear = Ear(host)
    engines = [host.instance(f"engine {number}", fields=bytes([number])) for number in range(3)]
    for engine in engines:
        engine.stored(1)
    settle(host)
    assert {each[0] for each in ear.known} == {digest_of(engine) for engine in engines[:2]}


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_things(make_disk_host: MakeDiskHost, seed: int) -> None:
    """Blocks come and go, in front of the walk and behind it, while it begins anew again and again and
    somebody wants to be shown everything."""
    chance = random.Random(seed)
    host = make_disk_host(told_of=of_everybody)
    core_feed = host.machine.core.feed
    assert core_feed is not None
    core_feed.walked_per_tick = 5
    ear = Ear(host)
    engines = [host.instance(), host.instance("other", fields=b"other", sizes=((4096,), (4096,)))]
    host.disk.finish_all()

    def store() -> None:
        engine = chance.choice(engines)
        first, group = chance.randrange(80), chance.randrange(len(engine.sizes))
        engine.store(*range(first, first + chance.randrange(1, 9)), group=group).finish()

    def clear() -> None:
        engine = chance.choice(engines)
        plan = chance.choice(host.machine.core.names[engine.owner, engine.name].plans)
        host.do(ClearBlocks(plan.space, keys(*chance.sample(range(90), 20))))

    def show() -> None:
        host.do(ShowBlocks(digest_of(chance.choice(engines))))

    asked = 0
    host.do(TellAgain())
    for _ in range(120):
        match chance.choices(("store", "tick", "disk", "clear", "again", "show"), (8, 8, 4, 1, 0.5, 1))[0]:
            case "store":
                store()
            case "tick":
                host.do(Tick())
            case "disk":
                host.disk.finish_all()
            case "clear":
                clear()
            case "again":
                host.do(TellAgain())
            case "show":
                asked += 1
                show()
    settle(host)
    assert ear.known == truth(host)
    assert ear.known
    assert asked
    show()
    before = ear.all_shown
    settle(host)
    assert ear.all_shown == before + 1
