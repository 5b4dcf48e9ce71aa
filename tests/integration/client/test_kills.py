"""kill -9 of client processes in the middle of a store: they vanish without a trace, and others notice
nothing."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.client.conftest import Connect
from tests.support.daemon import DaemonHost, until
from tests.support.plain_client import BLOCKS, NAMESPACE, READY_S, block_hashes
from tests.support.process import readable

pytestmark = pytest.mark.faults
KILLS = 20
SEED = random.SystemRandom().randrange(2**32)


class Victim:
    """A process that stores for ever, and says when one of its parts is being copied."""

    def __init__(self, socket: Path, instance: str) -> None:
        self.instance = instance
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.plain_client", str(socket), instance],
            stdout=subprocess.PIPE,
            text=True,
        )
        self.stored: list[int] = []

    def until_started(self, batch: int) -> None:
        """Returns when a part of this batch or a later one is STARTED."""
        assert self.process.stdout is not None
        deadline_s = time.monotonic() + READY_S
        while True:
            ready = readable(self.process.stdout.fileno(), deadline_s - time.monotonic())
            line = self.process.stdout.readline() if ready else ""
            assert line, f"{self.instance} said nothing, status {self.process.poll()}"
            word, number = line.split()
            if word == "STORED":
                self.stored.append(int(number))
            elif int(number) >= batch:
                return

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(READY_S)
        assert self.process.stdout is not None
        self.process.stdout.close()


def test_twenty_clients_killed_in_the_middle_of_a_store_harm_nobody(
    host: DaemonHost, connect_to: Connect, proved: Callable[[str], None], count: Counter[str]
) -> None:
    randomness = random.Random(SEED)
    print(f"seed {SEED}")
    witness = connect_to(host, "witness")
    own = block_hashes("witness", range(BLOCKS))
    assert witness.store(own).done
    epoch = witness.client.epoch
    checked = 0
    for number in range(KILLS):
        victim = Victim(host.socket, f"victim-{number}")
        try:
            victim.until_started(randomness.randrange(3))
            time.sleep(randomness.random() * 0.003)
        finally:
            victim.kill()
        count["client_kills"] += 1
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
        assert witness.client.lookup(own, timeout_s=READY_S).hits == BLOCKS, "and stays, being used"
    assert witness.client.epoch == epoch
    assert witness.load(own) == BLOCKS
    status = host.status()
    assert status.blocks.writing == 0
    assert status.transfers_active == 0
    assert status.leases == 0
    assert checked
    proved(f"{KILLS} clients killed in a store; {checked} blocks of theirs checked, no byte wrong")
