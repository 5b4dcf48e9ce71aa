"""kill -9 of client processes in the middle of a store: they vanish without a trace, and others notice
nothing."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.client.conftest import HEARTBEAT, Connect
from tests.support.daemon import DaemonHost, until
from tests.support.plain_client import BLOCKS, NAMESPACE, READY_S, block_hashes
from tests.support.process import readable

pytestmark = pytest.mark.faults
KILLS = 20
MORE, MOST = 8, 100
"""Batches that a victim stores after it was seen in one, if this test comes late to kill it, and at most: on
a busy machine it may never run while one is copied. The pool has room for some 250, and nothing of its may be
evicted, nor of the witness's."""
SEED = random.SystemRandom().randrange(2**32)


class Victim:
    """A process that stores, and says when it has seen that one of its parts is being copied."""

    def __init__(self, socket: Path, instance: str, batch: int) -> None:
        """To be killed in this batch, or a later one."""
        self.instance = instance
        self._batch = batch
        command = [sys.executable, "-m", "tests.support.plain_client", str(socket), instance]
        self.process = subprocess.Popen(
            [*command, str(batch), str(MORE), str(MOST)],
            stdout=subprocess.PIPE,
            bufsize=0,  # what a buffer holds back, `readable` does not see
        )
        self.stored: list[int] = []

    def until_started(self) -> bool:
        """Returns when a part of its batch or a later one is STARTED; False if it never saw one."""
        assert self.process.stdout is not None
        deadline_s = time.monotonic() + READY_S
        while True:
            ready = readable(self.process.stdout.fileno(), deadline_s - time.monotonic())
            line = self.process.stdout.readline().decode() if ready else ""
            assert line, f"{self.instance} said nothing, status {self.process.poll()}"
            word, number = line.split()
            if word == "STORED":
                self.stored.append(int(number))
            elif int(number) >= self._batch:
                return word == "STARTED"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(READY_S)
        assert self.process.stdout is not None
        self.process.stdout.close()


def test_twenty_clients_killed_in_the_middle_of_a_store_harm_nobody(
    socket_dir: Path,
    shm_dir: Path,
    connect_to: Connect,
    proved: Callable[[str], None],
    count: Counter[str],
) -> None:
    host = DaemonHost(socket_dir, shm_dir / "pool", pool__size="258MiB", **HEARTBEAT)
    host.start()
    try:
        kill_in_stores(host, connect_to, proved, count)
    finally:
        host.stop()


def kill_in_stores(
    host: DaemonHost, connect_to: Connect, proved: Callable[[str], None], count: Counter[str]
) -> None:
    randomness = random.Random(SEED)
    print(f"seed {SEED}")
    witness = connect_to(host, "witness")
    own = block_hashes("witness", range(BLOCKS))
    assert witness.store(own).done
    epoch = witness.client.epoch
    checked = kills = 0
    for number in itertools.count():
        if kills == KILLS:
            break
        victim = Victim(host.socket, f"victim-{number}", randomness.randrange(3))
        try:
            started = victim.until_started()
            time.sleep(randomness.random() * 0.003)
        finally:
            victim.kill()
        kills += started  # one that was never seen in a store does not count
        count["client_kills"] += started
        until(
            lambda: [instance.instance for instance in host.status().instances] == [witness.client.instance],
            "the victim's session, leases and mapping are gone",
        )
        # What it was told is stored is right; what it was not may be missing, but never wrong.
        reader = connect_to(host, f"reader-{number}", NAMESPACE)
        for batch in range(victim.stored[-1] + 2 if victim.stored else 1):
            hashes = block_hashes(victim.instance, range(batch * BLOCKS, (batch + 1) * BLOCKS))
            found = reader.load(hashes)
            assert found == BLOCKS or batch not in victim.stored, "what was said to be stored is there"
            checked += found
            count["blocks_compared"] += found
        reader.close()
        assert witness.lookup(own).hits == BLOCKS, "and stays, being used"
    assert witness.client.epoch == epoch
    assert witness.load(own) == BLOCKS
    # The last load is over for its client a moment before its worker has reported it.
    until(lambda: host.status().transfers_active == 0, "no transfer is left")
    status = host.status()
    assert status.blocks.writing == 0
    assert status.leases == 0
    assert checked
    proved(f"{KILLS} clients killed in a store; {checked} blocks of theirs checked, no byte wrong")
