"""Upgrade after upgrade under clients that never stop: drained for a restart, and now and then kill -9."""

import os
import random
from collections import Counter
from collections.abc import Callable

import grpc
import pytest
from kvtier.v1 import admin_pb2, admin_pb2_grpc

from tests.faults.campaigns import rolling
from tests.support.length import rounds
from tests.support.process import DEADLINE_S, Daemon

RESTARTS = rounds(6, 100)
ROLLING = rounds(2, 20)
"""Of each kind."""
SEED = int(os.environ.get("KVTIER_SEED", "0")) or random.SystemRandom().randrange(1, 2**32)
KILLED = 0.3
"""The share of restarts that nobody planned."""

pytestmark = [pytest.mark.faults, pytest.mark.timeout(RESTARTS * rolling.SECONDS_PER_RESTART + 60)]


def drain_for_restart(daemon: Daemon) -> int:
    """Returns how many blocks it says are kept."""
    request = admin_pb2.DrainRequest(for_restart=True, timeout_ms=int(DEADLINE_S * 1000))
    with grpc.insecure_channel(f"unix:{daemon.socket}") as channel:
        *_, last = admin_pb2_grpc.AdminStub(channel).Drain(request, timeout=2 * DEADLINE_S)
    assert (last.state, last.transfers_active) == ("stopping", 0)
    assert daemon.wait() == 0
    return int(last.kept_blocks)


def test_no_upgrade_loses_a_block_or_fails_a_request(
    start: Callable[..., Daemon], proved: Callable[[str], None], count: Counter[str]
) -> None:
    print(f"KVTIER_SEED={SEED}, {RESTARTS} restarts")
    kills = round(RESTARTS * KILLED)
    restarts = [rolling.drain_as_operators_do, *[drain_for_restart] * (RESTARTS - kills - 1), *[None] * kills]
    random.Random(SEED).shuffle(restarts)
    proved(rolling.restart_again_and_again(start, restarts, SEED, count))
    assert count["planned_restarts"] > count["daemon_kills"] > 0


def test_a_rolling_restart_under_load_loses_no_block_and_fails_no_request(
    start: Callable[..., Daemon], proved: Callable[[str], None], count: Counter[str]
) -> None:
    """As many restarts by kvtierctl as by kill -9; `make test-deploy` has the same at full length."""
    print(f"KVTIER_SEED={SEED}, {ROLLING} + {ROLLING} restarts")
    restarts = [rolling.drain_as_operators_do, None] * ROLLING
    proved(rolling.restart_again_and_again(start, restarts, SEED, count))
