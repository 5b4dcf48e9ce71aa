"""The disk tier as an engine sees it: what the host had no room for comes back, also late or not at all, and
every KV byte that a step relies on is checked."""

from __future__ import annotations

import itertools
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kvtier.v1 import admin_pb2

from tests.support.daemon import DaemonHost, until
from tests.support.leaks import SHM, SHM_PREFIX, SOCKET_PREFIX
from tests.support.length import repeats, rounds
from tests.vllm.conftest import QUICK
from tests.vllm.mini_engine import TOKENS, MiniEngine, engine_config, output_of
from tests.vllm.mini_rig import BLOCKS, Chaos, all_came_back, client, step_until, wait_ready, wait_stored
from tests.vllm.rig import kv_transfer_config, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.faults, pytest.mark.timeout(300)]

STORY = prompt(30 * TOKENS + 1, seed=77)
STORY_BLOCKS = 30
HOST_BLOCKS = 4 * 1024 // 12
"""Of 12 KiB, that the host has room for at most."""
SEEDS = range(rounds(2, 10))
UNHURRIED = {"pending_wait_s": 120, "prefill_tokens_per_s": 1, "load_start_deadline_s": 60}
"""However slow this machine is, it waits for the disk and for copies, and the daemon does not think computing
quicker."""


class Disks:
    """A daemon with a small pool and a disk, and what is to go wrong with that."""

    def __init__(self, host: DaemonHost, control: Path) -> None:
        self.host = host
        self._control = control

    def fail(self, **faults: object) -> None:
        """From now on this goes wrong (kvtierd.workers.disk.faults); nothing: nothing more."""
        fresh = self._control.with_suffix(".new")
        fresh.write_text(json.dumps(faults))
        fresh.rename(self._control)

    @property
    def status(self) -> admin_pb2.DiskStatus:
        [disk] = self.host.status().disks
        return disk

    def wait_settled(self) -> None:
        """Until the disk is in use, and nothing is on its way to or from it."""
        until(lambda: self.status.state == "live", "the disk is in use")
        until(lambda: not self.status.writing_bytes + self.status.reading_bytes, "nothing on its way")


@pytest.fixture(scope="module")
def disks() -> Iterator[Disks]:
    run = Path(tempfile.mkdtemp(prefix=SOCKET_PREFIX, dir="/tmp"))
    pool = Path(tempfile.mkdtemp(prefix=SHM_PREFIX, dir=SHM))
    disk = run / "disk"
    disk.mkdir(mode=0o700)
    settings: dict[str, Any] = {
        "pool__size": "6MiB",
        "pool__extent_size": "1MiB",
        "disk__paths": disk,
        "disk__size": "34MiB",
        "disk__extent_size": "1MiB",
        "disk__write_mode": "through",
        "disk__probe_after_s": "1",
    }
    host = DaemonHost(run, pool / "pool", **settings, **QUICK)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVTIER_DISK_FAULTS", str(run / "faults.json"))
        host.start()
        yield Disks(host, run / "faults.json")
        host.stop()
    shutil.rmtree(run)
    shutil.rmtree(pool)


@pytest.fixture
def make(disks: Disks, model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., MiniEngine]]:
    """Makes engines, attached to the daemon, each in a namespace of its own."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    made: list[MiniEngine] = []
    disks.fail()
    disks.wait_settled()

    def engine(changes: dict[str, object] | None = None, **extra: object) -> MiniEngine:
        config = kv_transfer_config(disks.host.socket, salt=f"disk {id(made)}/{len(made)}", **extra)
        made.append(MiniEngine(engine_config(model, config, **changes or {}), BLOCKS))
        wait_ready(made[-1])
        return made[-1]

    yield engine
    disks.fail()
    disks.host.thaw()
    for one in made:
        one.close()


def compute(engine: MiniEngine, name: str, tokens: list[int]) -> None:
    """Computes a prompt, and returns when its blocks are stored."""
    engine.add(name, tokens)
    engine.run()
    wait_stored(engine)


def compute_and_displace(engine: MiniEngine, disks: Disks) -> None:
    """Computes the story; then so much else that only the disk has it."""
    before = disks.status.written_blocks

    def written() -> bool:
        """After one more try: the host, full of what others have left, may refuse some of it."""
        disks.wait_settled()
        if disks.status.written_blocks >= before + STORY_BLOCKS:
            return True
        compute(engine, "story", STORY)
        return False

    until(written, "the disk has the story")
    evicted = disks.host.status().counters.evicted_blocks
    numbers = itertools.count()

    def displaced() -> bool:
        """After one prompt more; the host may refuse some, and is not asked again for a while then."""
        number = next(numbers)
        compute(engine, f"other{number}", prompt(len(STORY), seed=number % 64))
        return disks.host.status().counters.evicted_blocks >= evicted + HOST_BLOCKS

    until(displaced, "the host has forgotten all that it had")
    disks.wait_settled()
    engine.forget()


@pytest.mark.usefixtures("unhurried")
def test_a_prompt_that_left_the_host_comes_back_from_the_disk(
    make: Callable[..., MiniEngine], disks: Disks
) -> None:
    engine = make(**UNHURRIED)
    compute_and_displace(engine, disks)
    counters = engine.connector._scheduler._matcher.counters
    read, waits = disks.status.read_blocks, counters.waits
    compute(engine, "again", STORY)
    assert engine.cached["again"] == STORY_BLOCKS * TOKENS
    assert engine.finished["again"] == engine.finished["story"] == output_of(STORY, 8)
    assert disks.status.read_blocks >= read + STORY_BLOCKS
    assert counters.waits == waits + 1, "its blocks were PENDING"
    all_came_back(engine)


@pytest.mark.usefixtures("unhurried")
def test_others_are_computed_while_one_waits_for_a_slow_disk(
    make: Callable[..., MiniEngine], disks: Disks
) -> None:
    engine = make(**UNHURRIED)
    compute_and_displace(engine, disks)
    disks.fail(hang=True)
    counters = engine.connector._scheduler._matcher.counters
    polls = counters.polls
    engine.add("again", STORY)
    step_until(engine, lambda: counters.polls > polls + 1, "it waits, and asks again")
    engine.add("new", prompt(100, seed=900))
    step_until(engine, lambda: "new" in engine.finished, "another is computed meanwhile")
    assert "again" not in engine.cached
    disks.fail()
    engine.run()
    assert engine.cached["again"] == STORY_BLOCKS * TOKENS
    assert engine.finished["again"] == output_of(STORY, 8)
    all_came_back(engine)


@pytest.mark.usefixtures("unhurried")
def test_a_disk_that_hangs_costs_a_request_its_patience_and_nothing_else(
    make: Callable[..., MiniEngine], disks: Disks
) -> None:
    engine = make(**UNHURRIED | {"pending_wait_s": 0.2})
    compute_and_displace(engine, disks)
    disks.fail(hang=True)
    compute(engine, "again", STORY)
    assert engine.cached["again"] < STORY_BLOCKS * TOKENS
    assert engine.finished["again"] == output_of(STORY, 8)
    disks.fail()
    all_came_back(engine)


@pytest.mark.usefixtures("unhurried")
def test_a_disk_that_fails_is_a_miss(make: Callable[..., MiniEngine], disks: Disks) -> None:
    engine = make(**UNHURRIED)
    compute_and_displace(engine, disks)
    disks.fail(read={"errno": "EIO"})
    compute(engine, "again", STORY)
    assert engine.cached["again"] < STORY_BLOCKS * TOKENS
    assert engine.finished["again"] == output_of(STORY, 8)
    all_came_back(engine)


@pytest.mark.usefixtures("unhurried")
def test_what_waits_in_the_queue_is_promoted_ahead_of_its_turn(
    make: Callable[..., MiniEngine], disks: Disks
) -> None:
    engine = make({"max_num_seqs": 1}, **UNHURRIED)
    compute_and_displace(engine, disks)
    counters = engine.connector._scheduler._matcher.counters
    engine.add("long", prompt(20, seed=901), max_tokens=200)
    step_until(engine, lambda: "long" in engine.cached, "the only slot is taken")
    asked, read = counters.lookups, disks.status.read_blocks
    engine.add("again", STORY)
    engine.step()
    until(lambda: disks.status.read_blocks >= read + STORY_BLOCKS, "the story is promoted")
    engine.step()
    assert (counters.lookups, "again" in engine.cached) == (asked, False), "it was not even its turn"
    engine.run()
    assert engine.cached["again"] == STORY_BLOCKS * TOKENS
    assert engine.finished["again"] == output_of(STORY, 8)
    all_came_back(engine)


@pytest.mark.usefixtures("unhurried")
def test_the_engine_learns_how_fast_it_computes(make: Callable[..., MiniEngine]) -> None:
    engine = make()
    for number in range(4):
        compute(engine, f"prompt{number}", prompt(400, seed=910 + number))
    assert 100 < client(engine)._session.news.prefill_tokens_per_s < 1e7
    all_came_back(engine)


@pytest.mark.parametrize("seed", repeats(SEEDS))
def test_disorder_with_a_disk_costs_no_byte_no_block_and_no_request(
    make: Callable[..., MiniEngine], disks: Disks, seed: int
) -> None:
    """Daemons, copy workers and disk workers are killed and stopped; each engine begins with an empty cache
    of its own and finds what the one before has left."""
    engine = make(load_start_deadline_s=0.2, pending_wait_s=0.5)
    chaos = Chaos(engine, disks.host, seed)
    troubles: list[dict[str, object]] = [
        {},
        {"delay_s": 0.02},
        {"read": {"errno": "EIO", "every": 3}},
        {"write": {"errno": "ENOSPC", "every": 2}},
        {"hang": True},
    ]
    for number in range(100):
        if number % 10 == 0:
            disks.fail(**chaos.random.choice(troubles))
        chaos.act()
    disks.fail()
    chaos.end()
