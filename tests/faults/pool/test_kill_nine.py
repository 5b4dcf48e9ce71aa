"""kill -9 at every step and at random moments: what was committed is found, no byte wrong, nothing leaks."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.length import rounds

REPO = Path(__file__).resolve().parents[3]
ROUNDS = rounds(25, 1_500)

pytestmark = pytest.mark.faults


def campaign(module: str, *arguments: str, timeout_s: float = 100) -> dict[str, int]:
    """Run a campaign in a process of its own, which may fork: it has one thread."""
    command = [sys.executable, "-m", f"tests.faults.pool.{module}", *arguments]
    result = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert result.returncode == 0, f"{' '.join(command)}\n{result.stdout}{result.stderr}"
    figures: dict[str, int] = json.loads(result.stdout.splitlines()[-1])
    return figures


def test_no_step_of_a_store_loses_or_spoils_a_block(
    shm_dir: Path, proved: Callable[[str], None], count: Counter[str]
) -> None:
    figures = campaign("crash_points", "store", str(shm_dir))
    count["crash_points"] += figures["points"]
    assert figures["points"] > 80
    assert figures["wanted"] > 60
    proved(
        f"killed at each of {figures['points']} steps of a scripted store: "
        f"{figures['wanted']} committed blocks found, none wrong"
    )


def test_no_step_of_a_recovery_loses_a_block(shm_dir: Path, count: Counter[str]) -> None:
    figures = campaign("crash_points", "recover", str(shm_dir))
    count["crash_points"] += figures["points"]
    # The older copy's two slots, the ready half of a block whose other half is not, and the slot that gets
    # other memory.
    assert figures["points"] == 4


def test_a_pool_half_made_is_recognised_at_every_step(shm_dir: Path, count: Counter[str]) -> None:
    figures = campaign("crash_points", "create", str(shm_dir))
    count["crash_points"] += figures["points"]
    assert figures["points"] == 5
    assert figures["recovered"] == 4, "only after its last step is it a pool"


def test_random_kills_of_front_and_worker(
    shm_dir: Path, proved: Callable[[str], None], count: Counter[str]
) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")
    figures = campaign("random_kills", str(shm_dir), str(ROUNDS), str(seed), timeout_s=100 + 2 * ROUNDS)
    count["pool_owner_kills"] += figures["rounds"]
    assert figures["rounds"] == ROUNDS
    assert figures["locked"] > 0
    assert figures["wanted"] > 0
    proved(
        f"{ROUNDS} random kills of front and worker: {figures['wanted']} committed blocks found, none wrong"
    )
