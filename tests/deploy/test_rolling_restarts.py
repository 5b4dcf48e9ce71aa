"""Twenty restarts by an operator and twenty by kill -9, under clients that never stop."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable

import pytest

from tests.faults.campaigns import rolling
from tests.integration.daemon.conftest import start as start
from tests.support.process import Daemon

RESTARTS = 20
"""Of each kind."""
SEED = int(os.environ.get("KVTIER_SEED", "0")) or random.SystemRandom().randrange(1, 2**32)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * RESTARTS * rolling.SECONDS_PER_RESTART + 60)]


def test_a_rolling_restart_under_load_loses_no_block_and_fails_no_request(
    start: Callable[..., Daemon], proved: Callable[[str], None], count: Counter[str]
) -> None:
    print(f"KVTIER_SEED={SEED}")
    restarts = [rolling.drain_as_operators_do, None] * RESTARTS
    random.Random(SEED).shuffle(restarts)
    proved(rolling.restart_again_and_again(start, restarts, SEED, count))
    assert (count["planned_restarts"], count["daemon_kills"]) == (RESTARTS, RESTARTS)
