"""kill -9 of daemons with disks at random moments, of their disks' workers with them, and hosts that come
back without a pool: what was on a disk is found again, and nothing that is found is wrong."""

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest
from kvtier import Transfer

from tests.faults.campaigns.place import side_by_side
from tests.faults.campaigns.tier import (
    BATCH,
    Owner,
    Tier,
    disk_workers,
    owner_engine,
    signal_if_there,
    wait_live,
)
from tests.support.length import rounds
from tests.support.process import DEADLINE_S, Daemon

KILLS = rounds(1, 30)
CHAPTERS = rounds(2, 6)
SEED = int(os.environ.get("KVTIER_SEED", "0")) or random.SystemRandom().randrange(1, 2**32)
WITHOUT_POOL = 0.35
"""The share of starts on a host that has been booted meanwhile."""
SAMPLE = 5

pytestmark = [pytest.mark.faults, pytest.mark.timeout(KILLS * CHAPTERS * 20 + 400)]


def race(owner: Owner, daemon: Daemon, chance: random.Random) -> None:
    """Stores and promotions under way; then, at a random moment, somebody is killed, and the daemon."""
    engine, client = owner.engine, owner.engine.client
    transfers: list[Transfer] = []
    workers = disk_workers(daemon)
    for first in (0, BATCH):
        hashes = owner.next_batch()
        ids = list(range(first, first + BATCH))
        engine.fill(ids, hashes)
        transfers.append(client.store(hashes, ids))
        owner.others.append(hashes)
    for hashes in chance.sample(owner.settled, min(3, len(owner.settled))):
        client.lookup(hashes, timeout_s=DEADLINE_S)  # has it promoted
    time.sleep(chance.choice((0.0, 0.002, 0.02, 0.1)) * chance.random())
    who = chance.choice(("daemon", "daemon", "disks first", "disks too"))
    if who == "disks first":
        for pid in workers:
            owner.count["disk_worker_kills"] += signal_if_there(pid, signal.SIGKILL)
        time.sleep(chance.random() * 0.05)
    daemon.kill()
    owner.count["daemon_kills_with_disks"] += 1
    if who == "disks too":
        for pid in workers:
            owner.count["disk_worker_kills"] += signal_if_there(pid, signal.SIGKILL)
    for transfer in transfers:
        assert transfer.wait(DEADLINE_S).fenced, transfer


def chapter(number: int, count: Counter[str]) -> None:
    chance = random.Random(SEED + number)
    with Tier(disks=1 + number % 2) as tier:
        daemon = tier.start_tier()
        with owner_engine(daemon.socket) as engine:
            owner = Owner(engine, count)
            for round_ in range(KILLS):
                engine.wait_ready()
                wait_live(daemon)
                for _ in range(chance.choice((1, 2))):
                    owner.settle(daemon)
                race(owner, daemon, chance)
                without_pool = chance.random() < WITHOUT_POOL or number + round_ == 1
                if without_pool:
                    tier.lose_pool()
                    count["disk_only_starts"] += 1
                daemon = tier.start_tier()
                engine.wait_ready()
                wait_live(daemon)
                status = daemon.status()
                assert status.pool.start == ("cold" if without_pool else "warm")
                assert [disk.cold_reason for disk in status.disks] == [""] * len(status.disks)
                assert sum(disk.recovered_blocks for disk in status.disks) >= BATCH * len(owner.settled)
                for hashes in [
                    owner.settled[-1],
                    *chance.sample(owner.settled, min(SAMPLE, len(owner.settled))),
                ]:
                    owner.load(hashes, complete=True)
                for hashes in owner.others[-2:]:
                    owner.load(hashes, complete=False)
            for hashes in owner.settled:
                owner.load(hashes, complete=True)
            for hashes in owner.others:
                owner.load(hashes, complete=False)
            status = daemon.status()
            assert status.counters.integrity_failures == 0
            assert all(disk.corrupt_blocks == 0 for disk in status.disks), "a torn write was believed"
        assert daemon.stop() == 0


def test_what_was_on_a_disk_survives_kill_nine_of_everybody(
    proved: Callable[[str], None], count: Counter[str]
) -> None:
    print(f"KVTIER_SEED={SEED}, {CHAPTERS} chapters of {KILLS} kills")
    side_by_side([partial(chapter, number) for number in range(CHAPTERS)], count)
    assert count["disk_only_starts"]
    proved(
        f"{count['daemon_kills_with_disks']} times kvtierd was killed with -9 while it wrote to disks and"
        f" read from them, {count['disk_worker_kills']} times a disk's worker,"
        f" {count['disk_only_starts']} times the pool was gone as well: every block seen on a disk was found"
        f" again, {count['blocks_compared']} blocks compared, {count['wrong_bytes']} wrong bytes"
        f" (KVTIER_SEED={SEED})"
    )
