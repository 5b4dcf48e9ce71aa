"""What a tenant asks for costs the core the same work, and leads to the same, whether another tenant has
those blocks or nobody has them. So neither the answer nor the time of an answer tells of other tenants'
blocks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import numpy as np
import pytest
from kvtier_kernels import BlockTable as NativeTable
from kvtierd.core.stimuli import BlockQuery, Owner, PrefetchBlocks, Stimulus, TouchBlocks
from kvtierd.core.transfers.outlook import PENDING

from tests.unit.core.disk import DiskHost
from tests.unit.core.host import Instance, keys

ASKER, OTHER = Owner("asker", 1), Owner("other", 2)
HELD = (1, 2, 3, 4)
"""Keys of which another tenant has the blocks."""
FREE = (101, 102, 103, 104)
"""Keys of which nobody has."""
WARM_UP = (201, 202, 203, 204)


class RecordedTable:
    """A native table that notes which of its methods are called, with what shapes, and what they return."""

    log: list[Any] = []  # noqa: RUF012 - of all tables of a machine together

    def __init__(self, *arguments: Any) -> None:
        self._table = NativeTable(*arguments)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._table, name)
        if not callable(value):
            return value

        def call(*arguments: Any) -> Any:
            returned = value(*arguments)
            RecordedTable.log.append((name, [np.shape(each) for each in arguments], _returned(returned)))
            return returned

        return call


def _returned(value: Any) -> Any:
    """What a method returned, as far as it does not name single blocks."""
    if isinstance(value, tuple):
        return [_returned(each) for each in value]
    if isinstance(value, np.ndarray):
        return value.shape, value.tolist() if value.dtype == np.uint8 else None
    return None


@dataclass
class Answered:
    """An answer, and what it took."""

    reply: Any
    actions: list[str]
    calls: list[CodeType]
    """Every function of Python that ran, in order."""
    table: list[Any]
    """Every call of the native tables."""


def answered(host: DiskHost, stimulus: Stimulus) -> Answered:
    calls: list[CodeType] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename != __file__:
            calls.append(frame.f_code)

    RecordedTable.log.clear()
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        reply, actions = host.machine.handle(stimulus)
    finally:
        sys.setprofile(before)
    host.actions = actions
    host.validate()
    return Answered(_plain(reply), [type(each).__name__ for each in actions], calls, list(RecordedTable.log))


def _plain(reply: Any) -> Any:
    """A reply that can be compared, without the ids that are counted up."""
    if isinstance(reply, np.ndarray):
        return reply.tolist()
    if isinstance(reply, tuple):
        return [_plain(each) for each in reply]
    if hasattr(reply, "__dataclass_fields__"):
        fields = set(reply.__dataclass_fields__) - {"transfer", "lease"}
        return {name: _plain(getattr(reply, name)) for name in sorted(fields)}
    return reply


Ask = Callable[[Instance, tuple[int, ...]], Stimulus]


def _queries(numbers: tuple[int, ...], **options: Any) -> tuple[BlockQuery, ...]:
    return (BlockQuery(0, keys(*numbers), **options),)


ASKED: dict[str, Ask] = {
    "prefix": lambda one, numbers: one.lookup_of(keys(*numbers)),
    "leased": lambda one, numbers: one.lookup_of(keys(*numbers), lease=True),
    "exact": lambda one, numbers: one.lookup_of(keys(*numbers), exact=True),
    "host_only": lambda one, numbers: one.lookup_of(keys(*numbers), host_only=True),
    "window": lambda one, numbers: one.lookup_groups_of((2, numbers)),
    "prefetch": lambda one, numbers: PrefetchBlocks(one.scheduler, one.epoch, _queries(numbers)),
    "touch": lambda one, numbers: TouchBlocks(one.scheduler, one.epoch, _queries(numbers)),
}


def on_host(host: DiskHost, other: Instance) -> None:
    host.stored_on_disk(other, *HELD)


def on_disk_only(host: DiskHost, other: Instance) -> None:
    host.stored_on_disk(other, *HELD)
    host.evict_all(other)


def being_promoted(host: DiskHost, other: Instance) -> None:
    on_disk_only(host, other)
    assert PENDING in other.lookup(*HELD).states


def being_stored(host: DiskHost, other: Instance) -> None:
    other.store(*HELD)


def leased(host: DiskHost, other: Instance) -> None:
    on_host(host, other)
    other.lease(*HELD)


def known_to_be_evicted(host: DiskHost, other: Instance) -> None:
    host.disk.pause()
    other.stored(*HELD)
    other.fill_pool(10_000)
    host.disk.resume()


HOLD = {
    each.__name__: each
    for each in (on_host, on_disk_only, being_promoted, being_stored, leased, known_to_be_evicted)
}


@pytest.mark.parametrize("held", HOLD)
def test_blocks_of_others_are_as_blocks_of_nobody(held: str) -> None:
    host = DiskHost(RecordedTable)
    asker, other = host.instance("asker", owner=ASKER), host.instance("other", owner=OTHER)
    HOLD[held](host, other)
    for name, ask in ASKED.items():
        answered(host, ask(asker, WARM_UP))
        theirs = answered(host, ask(asker, HELD))
        nobodys = answered(host, ask(asker, FREE))
        assert theirs.reply == nobodys.reply, name
        assert theirs.actions == nobodys.actions, name
        assert "PostDiskJob" not in theirs.actions, name
        assert theirs.table == nobodys.table, name
        assert theirs.calls == nobodys.calls, name


@pytest.mark.parametrize("held", HOLD)
def test_a_store_of_what_others_have_is_a_store_of_new_blocks(held: str) -> None:
    stored = []
    for numbers in (HELD, FREE):  # each on a host of its own, because a store takes room from the next
        host = DiskHost(RecordedTable)
        asker, other = host.instance("asker", owner=ASKER), host.instance("other", owner=OTHER)
        HOLD[held](host, other)
        stored.append(answered(host, asker.store_of(*numbers)))
    assert stored[0] == stored[1]
    assert not any(stored[0].reply["results"]), "all are taken, and none is there already"


@pytest.mark.parametrize("asked", ["leased", "exact"])
@pytest.mark.parametrize("held", HOLD)
def test_the_control_blocks_of_ones_own_are_not(asked: str, held: str) -> None:
    host = DiskHost(RecordedTable)
    asker = host.instance("asker", owner=ASKER)
    HOLD[held](host, asker)
    answered(host, ASKED[asked](asker, WARM_UP))
    own = answered(host, ASKED[asked](asker, HELD))
    nobodys = answered(host, ASKED[asked](asker, FREE))
    assert ("PostDiskJob" in own.actions) == (held == "on_disk_only")
    if held == "known_to_be_evicted":
        assert own == nobodys, "what is known of evicted blocks is for people, and asked for by Explain"
    else:
        assert own.table != nobodys.table
        assert own.reply != nobodys.reply


def test_the_control_a_step_more_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a lookup so much as asked whether another tenant has the block, the test above would fail."""
    host = DiskHost(RecordedTable)
    asker, other = host.instance("asker", owner=ASKER), host.instance("other", owner=OTHER)
    on_host(host, other)
    lookups = host.machine.lookups
    find, plans = lookups._find, host.machine.core.names[OTHER, "other"].plans

    def curious(asks: Any) -> int:
        _, states = host.machine.core.blocks.table.lookup(plans[0].space, asks[0].query.hashes)
        assert len(states) == len(HELD)
        return find(asks)

    monkeypatch.setattr(lookups, "_find", curious)
    theirs = answered(host, ASKED["prefix"](asker, HELD))
    nobodys = answered(host, ASKED["prefix"](asker, FREE))
    assert theirs.table != nobodys.table
