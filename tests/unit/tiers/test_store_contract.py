"""The contract of stores notices what is wrong: for each promise a driver that breaks it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from kvtierd.tiers.store import contract
from kvtierd.tiers.store.contract import BrokenPromiseError
from kvtierd.tiers.store.objects import Listed, Piece, StoreError

from tests.support.memory_store import InMemory, Objects


class Overwrites(InMemory):
    async def put(self, name: str, parts: Sequence[memoryview]) -> bool:
        self.objects.pop(name, None)
        return await super().put(name, parts)


class Races(InMemory):
    async def put(self, name: str, parts: Sequence[memoryview]) -> bool:
        taken = name in self.objects
        await asyncio.sleep(0)
        self.objects[name] = b"".join(parts)
        return not taken


class ShowsHalves(InMemory):
    async def put(self, name: str, parts: Sequence[memoryview]) -> bool:
        data = b"".join(parts)
        self.objects[name] = data[: len(data) // 2]
        await asyncio.sleep(0.005)
        self.objects[name] = data
        return True


class ForgetsTheLastPart(InMemory):
    async def put(self, name: str, parts: Sequence[memoryview]) -> bool:
        return await super().put(name, parts[:-1] or parts)


class SortsRanges(InMemory):
    async def read_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        return await super().read_ranges(name, sorted(ranges))


class FillsUp(InMemory):
    async def read_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        data = self.there(name)
        return [data[begin : begin + size].ljust(size, b"\0") for begin, size in ranges]


class ListsBySize(InMemory):
    async def list(self, prefix: str, after: str = "", limit: int = 1_000) -> list[Listed]:
        found = await super().list(prefix, "", 10**9)
        return sorted(found, key=lambda each: -each.size_bytes)[::-1][:limit]


class ListsBeside(InMemory):
    async def list(self, prefix: str, after: str = "", limit: int = 1_000) -> list[Listed]:
        found = await super().list(prefix[:-1], after, limit)
        return [each for each in found if each.name != prefix]


class ListsFiveHundred(InMemory):
    async def list(self, prefix: str, after: str = "", limit: int = 1_000) -> list[Listed]:
        return await super().list(prefix, after, min(500, limit))


class ListsLate(InMemory):
    async def list(self, prefix: str, after: str = "", limit: int = 1_000) -> list[Listed]:
        found = await super().list(prefix, after, limit + 1)
        return found[:-1]


class HoldsUpTheLoop(InMemory):
    async def read(self, name: str, begin: int, size_bytes: int) -> Piece:
        data = self.there(name)
        return Piece(data[begin : begin + size_bytes], len(data))


class TakesOthersBytes(InMemory):
    latest = b""

    async def put(self, name: str, parts: Sequence[memoryview]) -> bool:
        self.latest = b"".join(parts)
        await asyncio.sleep(0)
        return await super().put(name, [memoryview(self.latest)])


class KeepsWhatIsDeleted(InMemory):
    async def delete(self, name: str) -> None:
        await asyncio.sleep(0)


class DeletesTooMuch(InMemory):
    async def delete(self, name: str) -> None:
        await asyncio.sleep(0)
        for each in [each for each in self.objects if each.startswith(name[:-1])]:
            del self.objects[each]


class DeletesOnce(InMemory):
    async def delete(self, name: str) -> None:
        await asyncio.sleep(0)
        del self.objects[name]


FAULTS: list[tuple[type[InMemory], contract.Check]] = [
    (Overwrites, contract.an_object_is_made_once),
    (Races, contract.an_object_is_made_once),
    (ShowsHalves, contract.an_object_is_there_whole_or_not_at_all),
    (ShowsHalves, contract.a_put_that_is_cancelled_leaves_no_half_object),
    (ForgetsTheLastPart, contract.an_object_comes_back_whole_and_in_pieces),
    (SortsRanges, contract.an_object_comes_back_whole_and_in_pieces),
    (FillsUp, contract.what_is_not_there_is_missing),
    (ListsBySize, contract.objects_are_listed_in_the_order_of_their_names),
    (ListsBeside, contract.objects_are_listed_in_the_order_of_their_names),
    (ListsFiveHundred, contract.a_listing_goes_on_where_the_last_one_ended),
    (ListsLate, contract.what_one_host_puts_another_has_at_once),
    (KeepsWhatIsDeleted, contract.what_was_deleted_has_gone_and_nothing_else),
    (DeletesTooMuch, contract.what_was_deleted_has_gone_and_nothing_else),
    (DeletesOnce, contract.what_was_deleted_has_gone_and_nothing_else),
    (HoldsUpTheLoop, contract.calls_do_not_hold_up_the_event_loop),
    (TakesOthersBytes, contract.many_calls_at_once_do_not_disturb_each_other),
]


def opener(kind: type[InMemory]) -> Callable[..., InMemory]:
    """Opens stores that have the same objects."""
    objects: Objects = {}

    def open_store(url: str, options: Mapping[str, str], deadline_s: float) -> InMemory:
        return kind(objects)

    return open_store


@pytest.mark.parametrize(("kind", "check"), FAULTS, ids=lambda each: each.__name__)
def test_a_broken_promise_is_noticed(kind: type[InMemory], check: contract.Check) -> None:
    with pytest.raises((BrokenPromiseError, StoreError)):
        contract.run(check, opener(kind), "memory://x")


OUTLIVING = contract.what_was_put_survives_the_process
IN_ONE_PROCESS = [check for check in contract.CHECKS if check is not OUTLIVING]


@pytest.mark.parametrize("check", IN_ONE_PROCESS, ids=contract.title)
def test_a_store_that_is_sound_keeps_the_contract(check: contract.Check) -> None:
    contract.run(check, opener(InMemory), "memory://x")


def test_every_check_is_known_to_notice_something() -> None:
    assert {check for _, check in FAULTS} == set(IN_ONE_PROCESS)


def test_methods_that_are_missing_are_named() -> None:
    def open_store(url: str, options: Mapping[str, str], deadline_s: float) -> Any:
        return object()

    with pytest.raises(BrokenPromiseError, match="read_ranges"):
        contract.run(contract.an_object_is_made_once, open_store, "x://y")


FORGETFUL = """
from tests.support.memory_store import InMemory

def open_store(url, options, deadline_s):
    return InMemory({})
"""


def test_what_does_not_outlive_its_process_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "forgetful_store.py").write_text(FORGETFUL)
    from forgetful_store import open_store  # type: ignore[import-not-found]

    with pytest.raises((BrokenPromiseError, StoreError), match=r"survives|not there"):
        contract.run(contract.what_was_put_survives_the_process, open_store, "x://y")
