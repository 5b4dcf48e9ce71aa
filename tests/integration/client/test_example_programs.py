"""Every program in examples/ runs as it stands and prints what its README says; those with vLLM are run by
tests/vllm/test_example_program.py and test_prefill_decode.py, and the routers by
tests/security/test_remote_programs.py and tests/integration/events."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.daemon import DaemonHost
from tests.support.process import DEADLINE_S

EXAMPLES = Path(__file__).parents[3] / "examples"
WITH_VLLM = "vllm_on_cpu.py"
WITH_TORCH = "torch_engine.py"
ROUTERS = {"prefix_router.py", "events_router.py"}
PROXY = "prefill_decode.py"
PRINTS = {
    "store_and_load.py": ["computed 8 blocks, loaded 0, every byte right: True"],
    "requests_asyncio.py": [
        "request 0 stored 4 blocks",
        "8 requests loaded 32 blocks, every byte right: True",
    ],
    "arrays_out_of_memory.py": [
        "16 arrays of 512 KiB, memory for 4",
        "moved out 60 times, in 48 times, every number right: True",
    ],
}


def run(name: str, socket: Path) -> list[str]:
    """What the program prints; it must end with status 0 and complain about nothing."""
    ended = subprocess.run(
        [sys.executable, str(EXAMPLES / name)],
        capture_output=True,
        text=True,
        timeout=4 * DEADLINE_S,
        check=False,
        env=os.environ | {"KVTIER_SOCKET": str(socket)},
    )
    assert (ended.returncode, ended.stderr) == (0, ""), ended
    return ended.stdout.splitlines()


def test_these_are_all_programs_and_the_readme_names_each() -> None:
    programs = {path.name for path in EXAMPLES.glob("*.py")}
    assert programs == {*PRINTS, WITH_VLLM, WITH_TORCH, *ROUTERS, PROXY}
    page = (EXAMPLES / "README.md").read_text()
    assert not [name for name in programs if f"[{name}]({name})" not in page]
    assert not [name for name, lines in PRINTS.items() if f"`{lines[-1]}`" not in page]


@pytest.mark.parametrize("name", PRINTS)
def test_a_program_prints_what_it_says(name: str, shared_host: DaemonHost) -> None:
    assert run(name, shared_host.socket) == PRINTS[name]


def test_a_second_run_finds_what_the_first_one_stored_also_after_a_kill(host: DaemonHost) -> None:
    assert run("store_and_load.py", host.socket) == PRINTS["store_and_load.py"]
    host.restart()
    again = run("store_and_load.py", host.socket)
    assert again == ["computed 0 blocks, loaded 8, every byte right: True"]


def test_an_engine_of_torch_answers_the_same_with_what_it_has_loaded(host: DaemonHost) -> None:
    pytest.importorskip("torch")
    [computed], [loaded] = run(WITH_TORCH, host.socket), run(WITH_TORCH, host.socket)
    assert computed.startswith("loaded 0 of 30 blocks, first token after ")
    assert loaded.startswith("loaded 30 of 30 blocks, first token after ")
    assert computed.split(": ")[1] == loaded.split(": ")[1]
    assert len(set(computed.split(": ")[1].split(", "))) > 3, "the model does not repeat one token"
