"""kill -9 at random of engines whose cache is on a GPU, of its copy worker, and of the daemon."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import pytest

from tests.faults.campaigns.content import compare, hashes_of
from tests.faults.campaigns.engine import PlainEngine
from tests.faults.gpu.victim import BATCH, family_of
from tests.support.daemon import DaemonHost
from tests.support.fake_cuda import FakeCuda
from tests.support.length import LONG
from tests.support.process import readable, until

KILLS = int(os.environ.get("KVTIER_GPU_KILLS", "32" if LONG else "3"))
"""Times that somebody is killed in each of the ways to copy, with and without kills of the daemon; eight
times as many in all, and now and then two at once."""
SEED = int(os.environ.get("KVTIER_SEED", "0")) or random.SystemRandom().randrange(1, 2**32)
ENGINES = 3
RELEASE_S = 1.0
"""The promise: a dead engine's memory is nobody's within a second."""
SLACK = 5
DEADLINE_S = 60.0
ACTIVITY = 3
"""Most reports of a part being copied that an engine is given before the next kill."""

WAYS = {
    "batch-13.0": (13000, "auto"),
    "batch-12.8": (12080, "auto"),
    "loop": (12040, "auto"),
    "rows": (13000, "rows"),
}

pytestmark = [pytest.mark.faults, pytest.mark.fake_gpu, pytest.mark.timeout(KILLS * 30 + 120)]


class Engine:
    """A child of a random role; its stdout is read whenever the campaign looks."""

    def __init__(self, socket: Path, number: int, chance: random.Random, log: IO[str]) -> None:
        self.number = number
        self.role = (chance.choice(("legacy", "chunks")), chance.choice(("host", "stream")))
        self.seen: Counter[str] = Counter()
        self.last_stored: int | None = None
        self.loaded_blocks = 0
        self._log = log
        self._rest = b""
        command = [sys.executable, "-m", "tests.faults.gpu.victim", str(socket), str(number)]
        command += [str(chance.randrange(2**32)), *self.role]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
        assert self.process.stdout is not None
        self._out = self.process.stdout.fileno()
        os.set_blocking(self._out, False)

    @property
    def pid(self) -> int:
        return self.process.pid

    def look(self) -> None:
        """Takes in what it has said. Fails if it ended by itself."""
        while True:
            try:
                data = os.read(self._out, 1 << 16)
            except BlockingIOError:
                break
            if not data:
                break
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                word, *more = line.decode().split()
                self.seen[" ".join([word, *more]) if word == "ENDED" else word] += 1
                if word == "STORED":
                    self.last_stored = int(more[0])
                elif word == "LOADED":
                    self.loaded_blocks += int(more[0])

    def wait_said(self, word: str, times: int) -> None:
        """Until it has said this so many times more."""
        target, deadline_s = self.seen[word] + times, time.monotonic() + DEADLINE_S
        while self.seen[word] < target:
            readable(self._out, 0.5)
            self.look()
            self.check()
            assert time.monotonic() < deadline_s, (
                f"engine {self.number} {self.role} does nothing: {self.seen}"
            )

    def check(self) -> None:
        if self.process.poll() is not None:
            self._log.seek(0)
            raise AssertionError(f"engine {self.number} {self.role} ended by itself:\n{self._log.read()}")

    def kill(self) -> None:
        """SIGKILL, and what it said before."""
        self.process.kill()
        self.process.wait(DEADLINE_S)
        self.look()
        self.close()

    def close(self) -> None:
        assert self.process.stdout is not None
        self.process.stdout.close()


class Campaign:
    """One fake GPU, one daemon after another, engines that come and go, and a witness on the CPU."""

    def __init__(self, fake: FakeCuda, host: DaemonHost, folder: Path, chance: random.Random) -> None:
        self.fake, self.host, self.folder, self.chance = fake, host, folder, chance
        self.engines: list[Engine] = []
        self.number = 0
        self.kills: Counter[str] = Counter()
        self.seen: Counter[str] = Counter()
        self.loaded_blocks = 0
        self.slowest_s = 0.0

    def spawn(self) -> None:
        """Engines until there are ENGINES."""
        while len(self.engines) < ENGINES:
            log = (self.folder / f"engine-{self.number}.log").open("w+")
            self.engines.append(Engine(self.host.socket, self.number, self.chance, log))
            self.number += 1

    def workers(self) -> list[int]:
        """Copy workers of the GPU that are alive."""
        workers = self.host.status().workers
        return [int(worker.pid) for worker in workers if worker.device != "cpu" and worker.state == "live"]

    def kill(self, what: str) -> Engine | None:
        """Kills one of these, if there is one now; returns the engine."""
        if what == "engine":
            self.kills[what] += 1
            return self.kill_engine(self.chance.choice(self.engines))
        if what == "daemon":
            self.kills[what] += 1
            self.host.kill9()
            self.host.start()
            return None
        for pid in self.workers():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue  # it has ended since it was listed
            self.kills[what] += 1
        return None

    def kill_engine(self, engine: Engine) -> Engine:
        engine.kill()
        self.engines.remove(engine)
        self.seen += engine.seen
        self.loaded_blocks += engine.loaded_blocks
        return engine

    def wait_released(self, pids: set[int]) -> None:
        """Until nobody holds memory of these dead engines any more."""
        killed_s = time.monotonic()
        while held := [one for one in self.fake.open_imports() if one.exporter_pid in pids]:
            waited_s = time.monotonic() - killed_s
            assert waited_s < RELEASE_S * SLACK, f"{waited_s:.1f} s after the death of {pids}: {held}"
            time.sleep(0.005)
        self.slowest_s = max(self.slowest_s, time.monotonic() - killed_s)

    def close(self) -> None:
        for engine in list(self.engines):
            engine.process.kill()
            engine.process.wait(DEADLINE_S)
            engine.close()
        self.host.stop()


@pytest.fixture(
    # `make test` has the newest driver's two ways.
    params=[pytest.param(way, marks=[pytest.mark.long] * (WAYS[way][0] != 13_000)) for way in WAYS]
)
def campaign(
    request: pytest.FixtureRequest,
    make_fake_cuda: Callable[..., FakeCuda],
    socket_dir: Path,
    shm_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    count: Counter[str],
) -> Iterator[Campaign]:
    """Copies of this way, slow enough that kills meet them."""
    version, method = WAYS[request.param]
    fake = make_fake_cuda(version=version, bandwidth=100 << 20, granularity=65_536, eager=1, latency_us=300)
    for name, value in fake.environment.items():
        monkeypatch.setenv(name, value)
    host = DaemonHost(socket_dir, shm_dir / "pool", pool__size="258MiB", workers__gpu_copy_method=method)
    host.start()
    made = Campaign(fake, host, tmp_path, random.Random(f"{SEED}/{request.param}"))
    yield made
    names = {"engine": "client_kills", "worker": "worker_kills", "daemon": "daemon_kills"}
    count.update({names[what]: kills for what, kills in made.kills.items()})
    count["gpu_kills"] += sum(made.kills.values())
    count["blocks_compared"] += made.loaded_blocks
    made.close()


@pytest.mark.parametrize("of_daemons", [False, True], ids=["engines and workers", "daemons too"])
def test_whoever_is_killed_no_byte_is_wrong_and_nothing_is_left_open(
    campaign: Campaign, of_daemons: bool, proved: Callable[[str], None], count: Counter[str]
) -> None:
    print(f"KVTIER_SEED={SEED}, {KILLS} kills")
    fake, host, chance = campaign.fake, campaign.host, campaign.chance
    checked = 0
    with PlainEngine(host.socket, "witness", num_blocks=BATCH) as witness:
        for _ in range(KILLS):
            campaign.spawn()
            for engine in campaign.engines:
                engine.look()
                engine.check()
            if chance.random() < 0.8:  # else whatever they are at: starting, registering, reconnecting
                chance.choice(campaign.engines).wait_said("STARTED", chance.randrange(1, ACTIVITY + 1))
            time.sleep(chance.random() * 0.005)
            dead = [campaign.kill(what) for what in victims(chance, of_daemons)]
            engines = [engine for engine in dead if engine is not None]
            campaign.wait_released({engine.pid for engine in engines})
            for engine in engines:
                checked += check_last_stored(witness, engine, count)
        for engine in campaign.engines:  # those that are left have got over it all
            engine.wait_said("STORED", 1)
            engine.wait_said("LOADED", 1)
        last = [campaign.kill_engine(engine) for engine in list(campaign.engines)]
        campaign.wait_released({engine.pid for engine in last})
        for engine in last:
            checked += check_last_stored(witness, engine, count)
    assert fake.open_imports() == []
    assert fake.hbm_used() == 0
    assert host.status().counters.integrity_failures == 0
    assert host.daemon.stop() == 0
    until(lambda: fake.hbm_used(contexts=True) == 0, "no context is left")
    # An engine may die between its registration and the worker's open; nothing else was ever asked in vain.
    assert {tuple(line.split()[1:3]) for line in fake.refusals()} <= {("cuIpcOpenMemHandle_v2", "205")}
    assert checked
    assert campaign.loaded_blocks
    proved(
        f"killed with -9 {dict(campaign.kills)}: {campaign.loaded_blocks} blocks loaded to the GPU by"
        f" the engines and {checked} by a witness, 0 wrong bytes; a dead engine's memory was nobody's"
        f" within {campaign.slowest_s:.2f} s; {dict(campaign.seen)} (KVTIER_SEED={SEED})"
    )


def victims(chance: random.Random, of_daemons: bool) -> list[str]:
    """Whom to kill now; at times two at once."""
    dice = chance.random()
    if of_daemons and dice < 0.2:
        return chance.choice((["daemon"], ["engine", "daemon"], ["worker", "daemon"]))
    if dice < 0.4:
        return chance.choice((["worker"], ["worker", "engine"], ["engine", "worker"]))
    return ["engine"]


def check_last_stored(witness: PlainEngine, engine: Engine, count: Counter[str]) -> int:
    """What it said was stored must be there, whatever daemon runs now, and right; returns how many blocks."""
    if engine.last_stored is None:
        return 0
    hashes = hashes_of(family_of(engine.number), BATCH, first=engine.last_stored * BATCH)
    witness.wait_ready()
    found = witness.lookup(hashes, lease=True)
    count["lost_blocks"] += BATCH - found.hits
    assert found.hits == BATCH, f"blocks whose store was DONE are gone: {found}"
    into = list(range(BATCH))
    witness.wipe(into)
    outcome = witness.load(found, into).wait(DEADLINE_S)
    assert outcome.done, outcome
    compare(witness.read(into), hashes, count)
    return BATCH
