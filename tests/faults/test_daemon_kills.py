"""kill -9 of kvtierd at random moments, under a client that lives on: what was DONE is found, and right."""

import os
import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import pytest
from kvtier import Transfer

from tests.faults.campaigns.content import compare, hashes_of
from tests.faults.campaigns.engine import PlainEngine
from tests.faults.campaigns.place import Place, side_by_side
from tests.support.length import rounds
from tests.support.process import Daemon, until

KILLS = rounds(5, 85)
CHAPTERS = rounds(2, 12)
"""Each with a pool of its own, which has room for all that its kills leave."""
SEED = int(os.environ.get("KVTIER_SEED", "0")) or random.SystemRandom().randrange(1, 2**32)
DEADLINE_S = 60.0
BATCH = 32
IN_FLIGHT = 6
SAMPLE = 128
POOL_SIZE = f"{max(256, KILLS * 10)}MiB"
"""Room for everything: a block that was evicted would look like a lost one."""

pytestmark = [pytest.mark.faults, pytest.mark.timeout(KILLS * CHAPTERS * 10 + 300)]


def store_until_killed(
    engine: PlainEngine, daemon: Daemon, chance: random.Random, family: str
) -> tuple[list[list[bytes]], list[list[bytes]]]:
    """Submits stores, kills the daemon at a random moment. Returns batches seen DONE, and all the others."""
    batches: list[list[bytes]] = []
    transfers: list[Transfer] = []
    kill_after = chance.randrange(1, IN_FLIGHT * 4)
    pause_s = chance.random() * 0.004
    for number in range(kill_after):
        if number >= IN_FLIGHT:  # its engine blocks are used again
            transfers[number - IN_FLIGHT].wait(DEADLINE_S)
        hashes = hashes_of(f"{family}/{number}", BATCH)
        first = number % IN_FLIGHT * BATCH
        ids = list(range(first, first + BATCH))
        engine.fill(ids, hashes)
        transfers.append(engine.client.store(hashes, ids))
        batches.append(hashes)
    time.sleep(pause_s)
    observed = [transfer.outcome.done for transfer in transfers]
    daemon.kill()
    done = [batch for batch, seen in zip(batches, observed, strict=True) if seen]
    rest = [batch for batch, seen in zip(batches, observed, strict=True) if not seen]
    # The client must come to terms by itself: every transfer ends, fenced, although the daemon is dead.
    for transfer in transfers:
        assert transfer.wait(DEADLINE_S).fenced, transfer
    return done, rest


def check(engine: PlainEngine, hashes: list[bytes], complete: bool, count: Counter[str]) -> None:
    """Loads what is found and compares every byte; `complete`: all of it must be found."""
    found = engine.lookup(hashes, lease=True)
    count["lost_blocks"] += len(hashes) - found.hits if complete else 0
    assert not complete or found.hits == len(hashes), f"{len(hashes) - found.hits} blocks seen DONE are lost"
    if not found.hits:
        return
    into = list(range(IN_FLIGHT * BATCH, IN_FLIGHT * BATCH + found.hits))
    engine.wipe(into)
    outcome = engine.load(found, into).wait(DEADLINE_S)
    assert outcome.done, outcome
    compare(engine.read(into), hashes[: found.hits], count)


def nothing_quarantined(daemon: Daemon) -> bool:
    return daemon.status().pool.quarantined_slots == 0


def chapter(number: int, count: Counter[str]) -> None:
    """One pool's share of the kills."""
    chance = random.Random(SEED + number)
    settings = {"pool__size": POOL_SIZE, "pool__extent_size": "4MiB"}
    survived: list[list[bytes]] = []
    with ExitStack() as stack:
        place = stack.enter_context(Place())
        daemon = place.start(**settings)
        engine = stack.enter_context(
            PlainEngine(daemon.socket, "survivor", num_blocks=IN_FLIGHT * BATCH + BATCH)
        )
        for round_ in range(KILLS):
            engine.wait_ready()
            done, rest = store_until_killed(engine, daemon, chance, f"round-{round_}")
            count["daemon_kills"] += 1
            daemon = place.start(**settings)
            engine.wait_ready()
            survived += done
            for batch in done + chance.sample(survived, min(len(survived), SAMPLE // BATCH)):
                check(engine, batch, complete=True, count=count)
            for batch in rest:
                check(engine, batch, complete=False, count=count)
            pool = daemon.status().pool
            assert pool.start == "warm", pool.cold_reason
            until(partial(nothing_quarantined, daemon), "dead writers are seen to be dead")
        engine.wait_ready()
        for batch in survived:
            check(engine, batch, complete=True, count=count)
        assert daemon.status().counters.integrity_failures == 0
        count["blocks_survived"] += len(survived) * BATCH
        engine.close()
        assert daemon.stop() == 0


def test_every_block_seen_done_survives_kill_nine_of_the_daemon(
    proved: Callable[[str], None], count: Counter[str]
) -> None:
    print(f"KVTIER_SEED={SEED}, {CHAPTERS} chapters of {KILLS} kills")
    side_by_side([partial(chapter, number) for number in range(CHAPTERS)], count)
    proved(
        f"{count['daemon_kills']} times kvtierd was killed with -9 while it stored: all"
        f" {count['blocks_survived']} blocks seen DONE were found again, {count['blocks_compared']} loads"
        f" compared, {count['wrong_bytes']} wrong bytes (KVTIER_SEED={SEED})"
    )
