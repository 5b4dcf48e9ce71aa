"""Ids that a client still holds from a daemon that was killed mean nothing to the next daemon."""

from collections.abc import Callable

import pytest
from kvtier import Reason

from tests.faults.campaigns.content import hashes_of, wrong_blocks
from tests.faults.campaigns.engine import PlainEngine
from tests.support.process import Daemon

DEADLINE_S = 60.0

pytestmark = pytest.mark.faults


def test_a_lease_of_a_killed_daemon_never_loads_blocks_of_the_next_ones(start: Callable[..., Daemon]) -> None:
    daemon = start()
    ours, others = hashes_of("ours", 8), hashes_of("others", 8)
    with PlainEngine(daemon.socket, "survivor", num_blocks=16) as engine:
        engine.wait_ready()
        for hashes in (ours, others):
            engine.fill(list(range(8)), hashes)
            assert engine.store(hashes, range(8)).wait(DEADLINE_S).done
        promised = engine.lookup(ours, lease=True)
        daemon.kill()
        start()
        engine.wait_ready()
        newer = engine.lookup(others, lease=True)
        assert promised.hits == newer.hits == 8

        engine.wipe(list(range(16)))
        outcome = engine.client.load(promised, range(8)).wait(DEADLINE_S)
        assert outcome.refused, f"blocks {wrong_blocks(engine.read(list(range(8))), ours)} are wrong"
        assert outcome.error is not None
        assert outcome.error.reason is Reason.UNKNOWN_LEASE
        assert (engine.read(list(range(8))) == 0x5A).all()
        promised.release()  # takes nothing from anybody either
        assert engine.load(newer, range(8, 16)).wait(DEADLINE_S).done
        assert wrong_blocks(engine.read(list(range(8, 16))), others) == []
