"""Drivers of stores: which package serves a URL, and what is said if none does, or it cannot."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from kvtierd.core.errors import Reason, Refusal
from kvtierd.tiers.store.drivers import find_driver, load_driver, open_driver, schemes
from kvtierd.tiers.store.obstore_store import ObstoreStore

from tests.support.drivers import declare, declare_example, write_driver

STORE = """
class Store:
    def __init__(self, *given):
        self.given = given
    async def put(self, name, parts): ...
    async def read(self, name, begin, size_bytes): ...
    async def read_ranges(self, name, ranges): ...
    async def list(self, prefix, after="", limit=1000): ...
    async def delete(self, name): ...
    async def close(self): ...

def open_store(url, options, deadline_s):
    return Store(url, options, deadline_s)
"""


def refusal_of(url: str) -> Refusal:
    with pytest.raises(Refusal) as raised:
        open_driver(url, {}, 1.0)
    assert (raised.value.field, raised.value.value) == ("store.url", url)
    return raised.value


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Puts a folder on the path, in which packages may be installed. Returns it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return str(tmp_path)


def test_kvtiers_own_drivers_are_declared_like_any_other(tmp_path: Path) -> None:
    own = ["abfss", "az", "file", "gs", "https", "mooncake", "s3"]
    assert schemes() == own
    assert {find_driver(f"{scheme}://x").value for scheme in own} == {
        "kvtierd.tiers.store.mooncake_store:open_store",
        "kvtierd.tiers.store.obstore_store:open_store",
    }
    assert isinstance(open_driver(tmp_path.as_uri(), {}, 1.0), ObstoreStore)


def test_a_package_of_somebody_elses_serves_its_scheme(write: str) -> None:
    write_driver(Path(write), "my_driver", "my+store", STORE)
    assert "my+store" in schemes()
    assert find_driver("my+store://x").value == "my_driver:open_store"
    assert "my_driver" not in sys.modules, "what packages declare is enough to find it"
    store = open_driver("my+store://x/y", {"a": "b"}, 2.5)
    assert store.given == ("my+store://x/y", {"a": "b"}, 2.5)  # type: ignore[attr-defined]


def test_the_example_is_found_as_it_declares_itself(write: str) -> None:
    declare_example(Path(write))
    assert find_driver("sqlite:///x").value == "kvtier_sqlite:open_store"


def test_an_unknown_scheme_is_told_which_there_are_and_what_to_install(write: str) -> None:
    declare(Path(write), "a-package", {"mine": "nowhere:open_store", "NOT A SCHEME": "x:y"})
    refusal = refusal_of("redis://host/0")
    assert refusal.reason is Reason.MODE_UNSUPPORTED
    assert "redis://" in refusal.message
    assert "abfss, az, file, gs, https, mine, mooncake, s3:" in refusal.message
    assert "'redis' in the entry points 'kvtier.stores'" in refusal.message


def test_two_packages_of_one_scheme_are_both_named_and_neither_is_used(write: str) -> None:
    declare(Path(write), "another-s3", {"s3": "nowhere:open_store"})
    assert "another-s3 1.0 and kvtier" in refusal_of("s3://bucket").message


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import a_library_that_nobody_has", "cannot be imported: ModuleNotFoundError: No module named"),
        ("raise SystemExit(3)", "cannot be imported: SystemExit: 3"),
        ("x = 1", "cannot be imported: AttributeError"),
        ("open_store = 7", "is no function that opens a store"),
        ("def open_store(*given): raise ValueError('no')", "of broken-package 1.0, raised ValueError: no"),
        ("def open_store(): pass", "of broken-package 1.0, raised TypeError"),
        ("def open_store(*given): return given", "returned tuple, which lacks methods of an ObjectStore"),
        (
            "from kvtierd.tiers.store.objects import StoreError, StoreTrouble\n"
            "def open_store(*given): raise StoreError(StoreTrouble.DENIED, 'the password is missing')",
            "it cannot be used: the password is missing",
        ),
    ],
)
def test_a_driver_that_cannot_be_used_is_refused_by_name(
    write: str, monkeypatch: pytest.MonkeyPatch, source: str, said: str
) -> None:
    monkeypatch.delitem(sys.modules, "broken", raising=False)
    write_driver(Path(write), "broken", "broken", source)
    assert said in refusal_of("broken://x").message


def test_without_obstore_the_own_driver_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.delitem(sys.modules, "kvtierd.tiers.store.obstore_store")
    with pytest.raises(Refusal, match="pip install 'obstore>="):
        load_driver("s3://bucket")
