"""Lint's contract against circles of imports finds those that there are, and names them import by import."""

import sys
from pathlib import Path

import grimp
import pytest

from tools.import_contracts import NoCirclesContract

OWNER = """
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from circling.part import Part
"""
PART = """
def whole():
    from circling import middle
    return middle
"""


def circles(folder: Path, monkeypatch: pytest.MonkeyPatch, **modules: str) -> list[list[str]]:
    """What the contract says of a package `circling` with these modules; `__` in a name parts folders."""
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "circling", raising=False)
    for name, source in {"__init__": "", **modules}.items():
        path = folder / "circling" / (name if name == "__init__" else name.replace("__", "/", 1))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".py").write_text(source)
    graph = grimp.build_graph("circling", cache_dir=None)
    check = NoCirclesContract(name="", session_options={}, contract_options={}).check(graph, verbose=False)
    found: list[list[str]] = check.metadata["circles"]
    assert check.kept == (not found)
    return found


def test_a_circle_is_named_import_by_import_wherever_its_imports_stand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    middle = "from circling.owner import Owner\n"
    (found,) = circles(
        tmp_path, monkeypatch, owner=OWNER, part=PART, middle=middle, aside="import circling.part"
    )
    assert sorted(found) == [
        "circling.middle:1: from circling.owner import Owner",
        "circling.owner:5: from circling.part import Part",
        "circling.part:3: from circling import middle",
    ]


def test_a_package_that_runs_because_of_what_is_below_it_closes_a_circle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = {
        "inner____init__": "import circling.user",
        "inner__leaf": "",
        "user": "import circling.inner.leaf",
    }
    (found,) = circles(tmp_path, monkeypatch, **modules)
    assert sorted(found) == [
        "circling.inner:1: import circling.user",
        "circling.user:1: import circling.inner.leaf",
    ]


def test_circles_apart_from_each_other_are_all_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {one: f"import circling.{other}" for one, other in ("ab", "ba", "cd", "dc")}
    assert len(circles(tmp_path, monkeypatch, **modules)) == 2


def test_imports_in_one_direction_are_no_circle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {"__init__": "from circling.top import x", "top": "import circling.low", "low": ""}
    assert circles(tmp_path, monkeypatch, **modules) == []
