"""Daemons in time namespaces of their own, whose monotonic clocks are days ahead or hours behind: a pool that
was written under one clock is found whole under another, and a living process is not taken for dead."""

import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest
from kvtierd.memory.processes import ProcessName, name_process, proved_gone

from tests.faults.campaigns.content import compare, hashes_of
from tests.faults.campaigns.engine import PlainEngine
from tests.support.length import LONG
from tests.support.process import DEADLINE_S, Daemon, until

DAY_S = 86_400
SEED = int(os.environ.get("KVTIER_SEED", "0")) or random.SystemRandom().randrange(1, 2**32)
BATCH = 32
SETTINGS = {
    "pool__size": "130MiB",
    "limits__lease_ttl_s": 4.0,
    "server__session_silence_s": 5.0,
    "server__heartbeat_interval_s": 0.2,
}

pytestmark = [pytest.mark.faults, pytest.mark.timeout(400)]


def shifted(seconds: int) -> list[str]:
    """Words before a command: it runs in a time namespace in which so many seconds more have passed since the
    machine was started. Fails if this machine does not let us make one."""
    unshare = shutil.which("unshare")
    assert unshare, "unshare (util-linux) is needed to make a time namespace"
    root = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return [unshare, *root, "--time", "--monotonic", str(seconds), "--boottime", str(seconds)]


def behind() -> int:
    """A shift almost back to the start of the machine."""
    return -int(time.clock_gettime(time.CLOCK_BOOTTIME)) + 60


def named_under(shift: list[str], pid: int) -> ProcessName:
    """How a process in a time namespace names another that is in none."""
    code = f"from kvtierd.memory.processes import *; n = name_process({pid})"
    code += "; print(n.pid, n.start_ticks, n.boot, n.namespace)"
    command = [*shift, sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    return ProcessName(*map(int, done.stdout.split()))


@pytest.mark.parametrize("shift_s", [10 * DAY_S, 12_345, None])
def test_a_process_has_the_same_name_under_every_clock(shift_s: int | None) -> None:
    shift = shifted(behind() if shift_s is None else shift_s)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        try:
            told = named_under(shift, process.pid)
            assert told == name_process(process.pid)
            assert not proved_gone(told), "a living writer is taken for dead: its slots would be given away"
        finally:
            process.kill()
        process.wait(DEADLINE_S)
        assert proved_gone(told)


class Client:
    """Stores, and checks all that it has seen DONE."""

    def __init__(self, engine: PlainEngine, chance: random.Random, count: Counter[str]) -> None:
        self._engine = engine
        self._chance = chance
        self._count = count
        self._done: list[list[bytes]] = []
        self._batches = 0

    def store_until_killed(self, daemon: Daemon) -> None:
        """The last stores are under way then."""
        self._engine.wait_ready()
        ids = list(range(BATCH))
        for _ in range(12):
            hashes = self._next()
            self._engine.fill(ids, hashes)
            assert self._engine.store(hashes, ids).wait(DEADLINE_S).done
            self._done.append(hashes)
        hashes = self._next()
        self._engine.fill(ids, hashes)
        last = self._engine.client.store(hashes, ids)
        time.sleep(self._chance.random() * 0.002)
        daemon.kill()
        self._count["daemon_kills"] += 1
        assert last.wait(DEADLINE_S).fenced

    def _next(self) -> list[bytes]:
        self._batches += 1
        return hashes_of(f"batch-{self._batches}", BATCH)

    def check(self) -> None:
        self._engine.wait_ready()
        into = list(range(BATCH, 2 * BATCH))
        for hashes in self._done:
            found = self._engine.lookup(hashes, lease=True)
            self._count["lost_blocks"] += BATCH - found.hits
            assert found.hits == BATCH, "blocks are lost from one clock to another"
            self._engine.wipe(into)
            assert self._engine.load(found, into).wait(DEADLINE_S).done
            compare(self._engine.read(into), hashes, self._count)

    def keep_a_lease(self, daemon: Daemon) -> None:
        """It lasts as long as heartbeats come, and no longer."""
        found = self._engine.lookup(self._done[0], lease=True)
        assert found.hits == BATCH
        time.sleep(5)
        assert daemon.status().leases == 1
        found.release()
        until(lambda: daemon.status().leases == 0, "it is given back")


def nothing_quarantined(daemon: Daemon) -> bool:
    return daemon.status().pool.quarantined_slots == 0


def namespace_of(daemon: Daemon) -> str:
    return os.readlink(f"/proc/{daemon.pid}/ns/time")


def test_a_pool_is_found_whole_by_a_daemon_with_another_clock(
    start: Callable[..., Daemon],
    monkeypatch: pytest.MonkeyPatch,
    count: Counter[str],
    proved: Callable[[str], None],
) -> None:
    print(f"KVTIER_SEED={SEED}")
    monkeypatch.setenv("KVTIER_TEST_WORKER_FAULT", "slow-copy:3")  # so that a kill meets a store
    shifts = [None, 10 * DAY_S, behind(), None, 400 * DAY_S] if LONG else [None, 10 * DAY_S, behind()]
    daemon = start(**SETTINGS)
    with PlainEngine(daemon.socket, "client", num_blocks=2 * BATCH) as engine:
        client = Client(engine, random.Random(SEED), count)
        for number, shift in enumerate(shifts):
            if number:
                daemon = start(wrap=shifted(shift) if shift is not None else (), **SETTINGS)
                pool = daemon.status().pool
                assert pool.start == "warm", pool.cold_reason
                assert (namespace_of(daemon) != os.readlink("/proc/self/ns/time")) == (shift is not None)
                until(partial(nothing_quarantined, daemon), "dead writers are seen to be dead")
                client.check()
            if number == 1 and LONG:
                client.keep_a_lease(daemon)
            if number < len(shifts) - 1:
                client.store_until_killed(daemon)
    assert daemon.status().counters.integrity_failures == 0
    assert daemon.stop() == 0
    proved(
        f"one pool under {len(shifts)} daemons whose clocks were days ahead and hours behind of each other:"
        f" {count['blocks_compared']} blocks compared, {count['wrong_bytes']} wrong bytes"
        f" (KVTIER_SEED={SEED})"
    )
