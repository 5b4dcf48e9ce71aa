"""How the tests themselves are kept."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2]
FROM_A_TEST = re.compile(r"^\s*(?:from|import) (tests\.(?:\w+\.)*test_\w+)", re.MULTILINE)
FOLDERS = {
    "vllm": ("vllm/",),
    "sglang": ("sglang/",),
    "deploy": ("deploy/",),
    "fake_gpu": ("unit/client/", "unit/transfer/", "integration/", "gpu/", "faults/gpu/", "vllm/"),
}


def files() -> list[Path]:
    return [file for file in TESTS.rglob("*.py") if file != Path(__file__)]


def test_no_test_reaches_into_another() -> None:
    """What several of them use is beside them, in a module without tests. The contract of copies is run as it
    stands a second time, on GPUs."""
    found = {
        f"{file.relative_to(TESTS)} imports {module}"
        for file in files()
        for module in FROM_A_TEST.findall(file.read_text())
        if file.parent != TESTS / "gpu" / "contract"
    }
    own = {
        "integration/client/test_async.py imports tests.integration.client.test_async"
    }  # in another process
    assert found - own == set()


def test_marks_are_used_where_the_stages_look_for_them() -> None:
    """A stage of `tools.check` names the folders of its tests. Elsewhere such a test would run nowhere."""
    for mark, folders in FOLDERS.items():
        for file in files():
            if f"pytest.mark.{mark}" in file.read_text():
                assert file.relative_to(TESTS).as_posix().startswith(folders), f"{file} has tests of {mark}"
