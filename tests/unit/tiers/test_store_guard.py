"""Whatever a driver does, whoever calls it gets what the protocol allows, or StoreError, and in time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from kvtierd.tiers.store import guarded
from kvtierd.tiers.store.guarded import GuardedStore
from kvtierd.tiers.store.objects import Listed, Piece, StoreError, StoreTrouble


class Answering:
    """A driver whose calls all do the same."""

    def __init__(self, answer: Callable[[], Any]) -> None:
        self._answer = answer

    async def put(self, name: str, parts: Sequence[memoryview]) -> Any:
        return await self._call()

    async def read(self, name: str, begin: int, size_bytes: int) -> Any:
        return await self._call()

    async def read_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> Any:
        return await self._call()

    async def list(self, prefix: str, after: str = "", limit: int = 1_000) -> Any:
        return await self._call()

    async def delete(self, name: str) -> None:
        await self._call()

    async def close(self) -> None:
        await self._call()

    async def _call(self) -> Any:
        answer = self._answer()
        return await answer if asyncio.iscoroutine(answer) else answer


def guard(
    answer: Callable[[], Any], deadline_s: float = 30.0, stuck: list[bool] | None = None
) -> GuardedStore:
    noted = stuck if stuck is not None else []
    return GuardedStore(Answering(answer), deadline_s, lambda: noted.append(True))


async def error_of(call: Any) -> StoreError:
    with pytest.raises(StoreError) as raised:
        await call
    return raised.value


async def test_what_the_protocol_allows_passes() -> None:
    assert await guard(lambda: True).put("n", [memoryview(b"x")]) is True
    assert await guard(lambda: Piece(b"12", 4)).read("n", 2, 10) == Piece(b"12", 4)
    assert await guard(lambda: Piece(b"", 4)).read("n", 9, 10) == Piece(b"", 4)
    buffers = [b"ab", bytearray(b"c"), memoryview(b"def")]
    assert await guard(lambda: buffers).read_ranges("n", [(0, 2), (5, 1), (1, 3)]) == buffers
    rows = [Listed("p/a", 1, 0.0), Listed("p/b", 2, 0.0)]
    assert await guard(lambda: rows).list("p/", "p/", 2) == rows


@pytest.mark.parametrize("made", [None, 1, "yes"])
async def test_put_says_whether_it_made_the_object(made: object) -> None:
    assert "put returned" in str(await error_of(guard(lambda: made).put("n", [])))


async def test_what_is_put_cannot_be_changed_by_the_driver() -> None:
    class Scribbler(Answering):
        async def put(self, name: str, parts: Sequence[memoryview]) -> bool:
            parts[0][:1] = b"!"
            return True

    data = bytearray(b"block")
    store = GuardedStore(Scribbler(lambda: None), 30.0, lambda: None)
    assert "TypeError" in str(await error_of(store.put("n", [memoryview(data)])))
    assert data == b"block"


@pytest.mark.parametrize(
    "piece",
    [b"12", None, Piece(b"123", 10), Piece(b"1", 10), Piece(b"12", 1), Piece(b"12", -1), Piece("12", 10)],  # type: ignore[arg-type]
)
async def test_read_has_as_many_bytes_as_there_are(piece: object) -> None:
    error = await error_of(guard(lambda: piece).read("n", 0, 2))
    assert error.trouble is StoreTrouble.OTHER
    assert "breaks its contract" in str(error)


@pytest.mark.parametrize(
    "found", [None, [], [b"ab"], [b"ab", b"c", b"d"], [b"ab", b""], [b"ab", b"cd"], [b"ab", "c"], [b"ab", 1]]
)
async def test_ranges_have_exactly_the_bytes_that_were_asked_for(found: object) -> None:
    error = await error_of(guard(lambda: found).read_ranges("n", [(0, 2), (5, 1)]))
    assert error.trouble is StoreTrouble.OTHER
    assert "breaks its contract" in str(error)


@pytest.mark.parametrize(
    "names",
    [
        ["q/a"],
        ["p/a", "p/a"],
        ["p/c", "p/b"],
        ["p/0"],
        ["p/a", "p/b", "p/c", "p/d"],
        ["p/" + "x" * 5_000],
    ],
)
async def test_a_listing_has_what_was_asked_for_in_order(names: list[str]) -> None:
    rows = [Listed(name, 1, 0.0) for name in names]
    assert "list returned" in str(await error_of(guard(lambda: rows).list("p/", "p/0", 3)))


@pytest.mark.parametrize("rows", [None, [1], ("p/a",), [Listed("p/a", -1, 0.0)], [Listed(b"p/a", 1, 0.0)]])  # type: ignore[arg-type]
async def test_a_listing_has_objects(rows: object) -> None:
    assert "list returned" in str(await error_of(guard(lambda: rows).list("p/")))


async def test_whatever_is_raised_is_a_store_error_of_one_line() -> None:
    def fail() -> None:
        raise ValueError("two\nlines \x1b[31m and\x00 more" + "x" * 5_000)

    error = await error_of(guard(fail).read("n", 0, 1))
    assert error.trouble is StoreTrouble.OTHER
    assert "n: ValueError: two lines" in str(error)
    assert str(error).isprintable()
    assert len(str(error)) < 1_000


async def test_a_store_error_keeps_its_trouble() -> None:
    def fail() -> None:
        raise StoreError(StoreTrouble.FULL, "no\nroom")

    error = await error_of(guard(fail).put("n", []))
    assert (error.trouble, str(error)) == (StoreTrouble.FULL, "no room")


async def test_a_call_that_cancels_itself_is_an_error_and_no_end_of_ours() -> None:
    def cancel() -> None:
        raise asyncio.CancelledError

    assert "was cancelled" in str(await error_of(guard(cancel).put("n", [])))


async def test_a_call_that_hangs_is_late() -> None:
    stuck: list[bool] = []
    error = await error_of(guard(lambda: asyncio.sleep(600), 0.05, stuck).read("n", 0, 1))
    assert error.trouble is StoreTrouble.LATE
    assert not stuck, "it has ended when it was cancelled"


async def test_a_call_that_goes_on_when_it_is_cancelled_is_late_and_its_process_has_to_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(guarded, "CANCELLED_S", 0.05)
    ended = asyncio.Event()

    async def deaf() -> None:
        while not ended.is_set():
            try:
                await ended.wait()
            except asyncio.CancelledError:
                continue

    stuck: list[bool] = []
    error = await error_of(guard(deaf, 0.05, stuck).put("n", []))
    assert (error.trouble, stuck) == (StoreTrouble.LATE, [True])
    ended.set()


async def test_who_is_cancelled_cancels_the_call() -> None:
    seen: list[str] = []

    async def notes() -> None:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    task = asyncio.create_task(guard(notes).put("n", []))
    while not seen:
        await asyncio.sleep(0.01)
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
