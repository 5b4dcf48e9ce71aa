"""The log of names in a Mooncake store: whatever entries are lost, nothing that comes later is hidden."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvtierd.tiers.store.mooncake_names import AHEAD, ENTRY_BYTES, PERIOD_S, NameLog
from kvtierd.tiers.store.objects import StoreError
from kvtierd.tiers.store.threads import BlockingCall


class Entries:
    """Objects that a test can take away."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.unfinished: set[str] = set()
        """Keys that a writer has claimed, and not written."""

    def create(
        self, call: BlockingCall, key: str, data: npt.NDArray[np.uint8], *, pinned: bool = False
    ) -> bool:
        assert pinned
        if key in self.objects or key in self.unfinished:
            return False
        self.objects[key] = data.tobytes()
        return True

    def exist(self, call: BlockingCall, keys: Sequence[str]) -> list[bool]:
        return [key in self.objects for key in keys]

    def read_small(self, call: BlockingCall, keys: Sequence[str], size_bytes: int) -> list[bytes | None]:
        return [self.objects.get(key) for key in keys]

    def take(self, call: BlockingCall, size_bytes: int) -> npt.NDArray[np.uint8]:
        return np.zeros(size_bytes, np.uint8)


class Hosts:
    """A store, and clocks that a test sets."""

    def __init__(self) -> None:
        self.entries = Entries()
        self.now_s = 1_800_000_000.0
        self.call = BlockingCall("test", 60)

    def host(self, clock_ahead_s: float = 0, remembered_s: int = 86_400) -> NameLog:
        return NameLog(self.entries, "index/", lambda: self.now_s + clock_ahead_s, remembered_s)

    def add(self, log: NameLog, *names: str) -> None:
        for name in names:
            log.add(self.call, name, len(name))

    def names(self, log: NameLog, prefix: str = "a/", after: str = "", limit: int = 1_000) -> list[str]:
        return [each.name for each in log.list(self.call, prefix, after, limit)]

    def key(self, number: int) -> str:
        return f"index/{int(self.now_s // PERIOD_S)}/{number}"


@pytest.fixture
def hosts() -> Hosts:
    return Hosts()


def test_names_are_listed_in_order_with_lengths_and_times(hosts: Hosts) -> None:
    one, two = hosts.host(), hosts.host()
    hosts.add(one, "a/3", "a/1", "b/9", "a/20", "a")
    assert hosts.names(two) == ["a/1", "a/20", "a/3"]
    assert hosts.names(two, after="a/1", limit=1) == ["a/20"]
    assert hosts.names(two, "b/") == ["b/9"]
    [listed] = two.list(hosts.call, "b/", "", 1)
    assert (listed.size_bytes, listed.modified_s) == (3, hosts.now_s)


def test_a_long_name_fits_and_all_entries_are_of_one_length(hosts: Hosts) -> None:
    name = "a/" + "x" * 198
    hosts.add(hosts.host(), name)
    assert {len(each) for each in hosts.entries.objects.values()} == {ENTRY_BYTES}
    assert hosts.names(hosts.host()) == [name]


def test_writers_take_numbers_one_after_the_other(hosts: Hosts) -> None:
    one, two = hosts.host(), hosts.host()
    for number in range(3 * AHEAD):
        hosts.add(one if number % 3 else two, f"a/{number:04}")
    assert set(hosts.entries.objects) == {hosts.key(number) for number in range(3 * AHEAD)}
    for log in (one, two, hosts.host()):
        assert len(hosts.names(log)) == 3 * AHEAD


def test_a_writer_that_died_leaves_a_gap_that_hides_nothing(hosts: Hosts) -> None:
    one, two = hosts.host(), hosts.host()
    hosts.entries.unfinished = {hosts.key(0), hosts.key(1)}
    hosts.add(one, "a/1")
    assert hosts.names(two) == ["a/1"]
    hosts.add(one, "a/2")
    assert hosts.names(two) == ["a/1", "a/2"]


def test_an_entry_that_comes_late_is_found(hosts: Hosts) -> None:
    """Its writer has its number, and is slow to write it."""
    one, two = hosts.host(), hosts.host()
    hosts.add(one, "a/slow", "a/quick")
    slow = hosts.entries.objects.pop(hosts.key(0))
    assert hosts.names(two) == ["a/quick"]
    hosts.entries.objects[hosts.key(0)] = slow
    assert hosts.names(two) == ["a/quick", "a/slow"]


def test_a_store_that_has_lost_everything_begins_anew(hosts: Hosts) -> None:
    one, two = hosts.host(), hosts.host()
    for number in range(2 * AHEAD):
        hosts.add(one, f"a/{number:04}")
    assert len(hosts.names(two)) == 2 * AHEAD
    hosts.entries.objects.clear()
    three = hosts.host()
    hosts.add(three, "a/new")
    assert "a/new" in hosts.names(two)
    hosts.add(one, "a/newer")
    assert hosts.names(three) == ["a/new", "a/newer"]


def test_a_period_without_its_first_entries_hides_no_other_period(hosts: Hosts) -> None:
    one = hosts.host()
    for number in range(2 * AHEAD):
        hosts.add(one, f"a/{number:04}")
    for number in range(2 * AHEAD - 1):
        del hosts.entries.objects[hosts.key(number)]
    assert hosts.names(hosts.host()) == [], "what is known to be lost: too far behind the gap"
    hosts.now_s += PERIOD_S
    hosts.add(one, "a/later")
    assert hosts.names(hosts.host()) == ["a/later"]


def test_a_number_that_was_lost_is_not_taken_before_others_that_are_there(hosts: Hosts) -> None:
    """Whoever has read it once does not look at it again."""
    one, two = hosts.host(), hosts.host()
    hosts.add(one, "a/0")
    assert hosts.names(two) == ["a/0"]
    hosts.add(one, "a/1", "a/2")
    del hosts.entries.objects[hosts.key(1)]
    hosts.add(two, "a/3")
    assert hosts.names(one) == ["a/0", "a/1", "a/2", "a/3"]


def test_clocks_may_differ_by_a_period(hosts: Hosts) -> None:
    ahead, behind, right = hosts.host(PERIOD_S), hosts.host(-PERIOD_S), hosts.host()
    assert hosts.names(right) == []
    hosts.add(ahead, "a/1")
    hosts.add(behind, "a/2")
    assert hosts.names(right) == ["a/1", "a/2"]


def test_a_clock_that_is_set_back_hides_nothing(hosts: Hosts) -> None:
    one, two = hosts.host(), hosts.host()
    assert hosts.names(two) == []
    hosts.now_s -= 3_600
    hosts.add(one, "a/1")
    assert hosts.names(two) == ["a/1"]
    hosts.now_s += 1_800
    hosts.add(one, "a/2")
    assert hosts.names(two) == ["a/1", "a/2"]


def test_a_host_that_slept_finds_what_was_put_meanwhile(hosts: Hosts) -> None:
    one, sleeper = hosts.host(), hosts.host()
    assert hosts.names(sleeper) == []
    for hour in range(20):
        hosts.now_s += 3_600
        hosts.add(one, f"a/{hour:02}")
    assert len(hosts.names(sleeper)) == 20


def test_what_is_deleted_is_listed_nowhere_until_it_is_put_again(hosts: Hosts) -> None:
    one, two = hosts.host(), hosts.host()
    hosts.add(one, "a/1", "a/2")
    assert hosts.names(two) == ["a/1", "a/2"]
    one.delete(hosts.call, "a/1")
    for log in (one, two, hosts.host()):
        assert hosts.names(log) == ["a/2"]
    hosts.add(two, "a/1")
    for log in (one, two, hosts.host()):
        assert hosts.names(log) == ["a/1", "a/2"]


def test_what_is_no_entry_is_passed_over(hosts: Hosts) -> None:
    hosts.entries.objects[hosts.key(0)] = bytes(ENTRY_BYTES)
    hosts.entries.objects[hosts.key(1)] = b"\xff" * ENTRY_BYTES
    hosts.add(hosts.host(), "a/1")
    assert hosts.names(hosts.host()) == ["a/1"]


def test_what_is_older_than_is_remembered_is_neither_looked_for_nor_kept(hosts: Hosts) -> None:
    one = hosts.host(remembered_s=3_600)
    hosts.add(one, "a/old")
    assert hosts.names(one) == ["a/old"]
    hosts.now_s += 7_200
    assert hosts.names(one) == hosts.names(hosts.host(remembered_s=3_600)) == []


def test_numbers_that_are_taken_and_never_written_end_in_an_error(hosts: Hosts) -> None:
    hosts.entries.unfinished = {hosts.key(number) for number in range(10 * AHEAD)}
    with pytest.raises(StoreError, match="numbers are taken"):
        hosts.add(hosts.host(), "a/1")


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_every_host_finds_what_is_put_whatever_was_evicted(data: st.DataObject) -> None:
    """Each name is put by one of the hosts after some entries have gone, and is in all later listings."""
    hosts = Hosts()
    logs = [hosts.host(remembered_s=PERIOD_S) for _ in range(3)]
    for number in range(data.draw(st.integers(1, 30))):
        evicted = data.draw(st.lists(st.sampled_from(sorted(hosts.entries.objects) or [""]), max_size=5))
        for key in evicted:
            hosts.entries.objects.pop(key, None)
        hosts.now_s += data.draw(st.sampled_from([0, 1, PERIOD_S]))
        hosts.add(data.draw(st.sampled_from(logs)), f"a/{number:04}")
        for log in (data.draw(st.sampled_from(logs)), hosts.host(remembered_s=PERIOD_S)):
            assert f"a/{number:04}" in hosts.names(log)
