"""What KV hints say about pages is done when the pages are stored."""

from __future__ import annotations

import hashlib

import pytest
from kvtier import Retention
from kvtier_sglang import wishes
from kvtier_sglang.wishes import Wishes

PAGES = [hashlib.sha256(str(number).encode()).digest() for number in range(8)]


def runs(of: Wishes, pages: list[bytes]) -> list[tuple[int, float]]:
    """How many pages in a row are stored in which way."""
    found = []
    while pages:
        count, retention = of.run(pages)
        assert 0 < count <= len(pages)
        found.append((count, 0.0 if retention is None else retention.hold_s))
        pages = pages[count:]
    return found


def test_without_wishes_nothing_is_special() -> None:
    none = Wishes()
    assert none.run(PAGES) == (8, None)
    assert none.stored(PAGES) == []


def test_a_store_is_split_where_what_is_wished_changes() -> None:
    some = Wishes()
    some.hold(PAGES[:6], 5)
    some.hold(PAGES[:2], 60)
    some.hold(PAGES[1:3], 7)  # the longer one counts
    assert runs(some, PAGES) == [(2, 60), (1, 7), (3, 5), (2, 0)]
    assert some.run(PAGES[5:]) == (1, Retention(hold_s=5))


def test_a_wish_is_over_when_the_page_is_stored() -> None:
    some = Wishes()
    some.hold(PAGES[:2], 5)
    some.cool(PAGES[4:6])
    assert some.stored(PAGES[:5]) == [PAGES[4]]
    assert runs(some, PAGES) == [(8, 0)]
    assert some.stored(PAGES) == [PAGES[5]]
    assert some.stored(PAGES) == []


def test_pages_that_are_never_stored_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wishes, "PAGES_MAX", 3)
    some = Wishes()
    some.hold(PAGES[:5], 5)
    some.hold([PAGES[2]], 6)  # which makes it the newest
    some.hold([PAGES[7]], 5)
    assert runs(some, PAGES) == [(2, 0), (1, 6), (1, 0), (1, 5), (2, 0), (1, 5)]
