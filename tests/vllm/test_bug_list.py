"""docs/known-bugs.md names tests that exist, for every bug that must be on it."""

from __future__ import annotations

import ast
import re

import pytest

from tools.stages import REPO

PAGE = REPO / "docs" / "known-bugs.md"
BUGS = {
    29870, 39306, 39732, 41784, 42632, 43468, 44294, 45704, 46278, 46453, 46951, 47282, 48596, 50696, 51080,
    51317, 52838, 53042, 54193, 55904,
}  # fmt: skip
ROWS = [
    line for line in PAGE.read_text().splitlines() if line.startswith("| ") and not line.startswith("| bug")
]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def test_every_bug_is_on_the_page() -> None:
    assert {int(number) for row in ROWS for number in re.findall(r"#(\d+)", row.split("|")[1])} == BUGS


@pytest.mark.parametrize("row", ROWS, ids=[row.split("|")[1].strip() for row in ROWS])
def test_each_is_caught_by_tests_that_exist(row: str) -> None:
    named = NAMED.findall(row)
    assert named
    for path, name in named:
        tree = ast.parse((REPO / path).read_text())
        tests = {
            node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        assert name in tests, f"{path} has no {name}"
