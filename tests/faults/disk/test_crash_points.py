"""kill -9 after every step that a worker persists, one after another: what it had reported is there, whatever
is found is right, and the disk goes on."""

from __future__ import annotations

import random
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from kvtierd.wire import worker_pb2 as wire
from kvtierd.workers.channel.packets import ChannelEndedError

from tests.integration.disk.conftest import make_key
from tests.integration.disk.rig import MIB, Block, Front, Place
from tests.support.length import LONG

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(600)]

SIZE = 6 * MIB
STEPS_MAX = 500

A, B = Block(1, 200_000), Block(2, 200_000)
PAIR = Block(3, 300_000, world=2)
A_AGAIN, C = Block(1, 200_000, version=2), Block(4, 200_000)
LATER, LAST = Block(5, 400_000), Block(6, 4_096)
"""Its extent was PAIR's, whose records would fit its larger slots, were they believed."""


class Story:
    """A scripted sequence, what a front has been told while it went on, and where it was cut."""

    def __init__(self, front: Front) -> None:
        self.front = front
        self.kept: dict[Block, Place] = {}
        """Reported, and not freed."""
        self.begun: set[Block] = set()
        self.aside: Place | None = None
        """Asked to be persisted as out of use."""
        self._steps: list[Callable[[], None]] = [
            lambda: self._write(A, B),
            lambda: self._write(PAIR),
            lambda: self._free(A),
            lambda: self._write(C, A_AGAIN),  # one of them in the slot that was A's
            lambda: self._set_aside(C),
            lambda: self._free(PAIR),
            lambda: self._take_extent_back(PAIR),
            lambda: self._write(LATER),  # in the extent that was PAIR's
            lambda: self._free(B),
            lambda: self._write(LAST),
        ]

    def go_on(self) -> bool:
        """From where it was cut; False if the worker was killed meanwhile."""
        while self._steps:
            try:
                self._steps[0]()
            except Killed:
                return False
            self._steps.pop(0)
        return self.front.worker.stop() == 0

    def _write(self, *blocks: Block) -> None:
        self.begun.update(blocks)
        hosts = [self.front.store(block) for block in blocks]
        disk = [self.front.open("disk", block) for block in blocks]
        try:
            finished = self.front.worker.wait(self.front.post(wire.DISK_WRITE, disk, hosts))
        except (AssertionError, ChannelEndedError) as error:
            assert self.front.worker.process.wait() == -signal.SIGKILL
            for place in disk:
                self.front.free("disk", place)
            raise Killed from error
        finally:
            for place in hosts:
                self.front.free("host", place)
        assert (finished.failed, finished.corrupt, finished.error) == ([], [], "")
        self.kept.update(zip(blocks, disk, strict=True))

    def _free(self, block: Block) -> None:
        self.front.free("disk", self.kept.pop(block))

    def _set_aside(self, block: Block) -> None:
        self.aside = self.kept.pop(block)
        try:
            self.front.set_aside(self.aside)
        except ChannelEndedError:
            pass  # the next one to wait for it will see

    def _take_extent_back(self, block: Block) -> None:
        slots = np.array(self.front._free.pop(("disk", block.data_bytes)), np.uint32)
        extents = np.unique(self.front.image.geometry.extent_of(slots)).tolist()
        self.front._extents["disk"] = iter([*extents, *self.front._extents["disk"]])


class Killed(Exception):
    """As was asked for."""


def boot(front: Front, crash_after: int) -> bool:
    """Starts its first worker; False if that was killed before it was ready."""
    front.faults(**({"crash_after": crash_after} if crash_after else {}))
    worker = front.spawn(load=True)
    if worker.receive() is None:
        assert worker.process.wait() == -signal.SIGKILL
        return False
    front.recover()
    return True


def look(front: Front, story: Story, count: Counter[str]) -> None:
    """Every block that the boot has found is right, and every block that was reported is found."""
    found = front.recovered(story.begun - {A} | {A_AGAIN})  # they have one key
    keys = {place.block.key for place in found}
    for block in story.kept:
        assert block.key in keys, f"{block} was reported and is lost"
    corrupt = set(front.recovery.recovered.corrupt.tolist())
    assert corrupt <= (set(story.aside.slots.tolist()) if story.aside else set())
    for place in found:
        finished, (host,) = front.read(place)
        assert (finished.failed, finished.corrupt, finished.error) == ([], [], ""), place
        versions = [A, A_AGAIN] if place.block is A_AGAIN else [place.block]
        held = [v for v in versions if front.on_host(Place(v, host.slots, host.generations))]
        assert held, f"wrong bytes of {place.block}"
        reported = [block for block in story.kept if block.key == place.block.key]
        assert not reported or held == reported, f"an older copy of {place.block} won"
        front.free("host", host)
        count["disk_blocks_read_after_a_crash"] += 1


def campaign(
    folder: Path, count: Counter[str], steps: range, *, same_boot: bool, keys: Path | None = None
) -> int:
    """The step at which nothing was left to be killed. `same_boot`: the front lives on, with a new worker,
    and ends the story. With `keys`, the slab is encrypted."""
    for step in steps:
        path = folder / str(step)
        path.mkdir()
        with Front(path, size_bytes=SIZE, keys=keys) as front:
            story = Story(front)
            ready = boot(front, step)
            crashed = not ready or not story.go_on()
            if ready and crashed and same_boot:
                front.faults()
                front.worker.channel.close()
                front.respawn()
                for place in story.kept.values():
                    front.assert_reads_back(place)
                assert story.go_on()
                assert set(story.kept) == {A_AGAIN, LATER, LAST}
        with Front(path, size_bytes=SIZE, keys=keys) as front:
            assert boot(front, 0)
            look(front, story, count)
            front.assert_reads_back(*front.write(front.store(Block(99, 50_000))))
        shutil.rmtree(path)
        count["disk_crash_points"] += 1
        if not crashed:
            return step
    raise AssertionError(f"more than {steps.stop} steps")


def test_killed_after_every_step_with_its_daemon(
    folder: Path, count: Counter[str], proved: Callable[[str], None]
):
    steps = campaign(folder, count, range(1, STEPS_MAX), same_boot=False) - 1
    assert steps > 25
    proved(f"a disk's worker killed at each of {steps} steps: no reported block lost, no byte wrong")


def test_killed_after_some_step_while_its_daemon_lives(folder: Path, count: Counter[str]):
    """In the long form: after every one."""
    stride = 1 if LONG else 4
    first = random.SystemRandom().randrange(1, stride + 1)
    print(f"steps from {first}")
    assert campaign(folder, count, range(first, STEPS_MAX, stride), same_boot=True) > 25


@pytest.mark.parametrize("same_boot", [False, True])
def test_killed_after_some_step_on_an_encrypted_slab(
    folder: Path, tmp_path: Path, count: Counter[str], same_boot: bool
) -> None:
    """In the long form: after every one."""
    stride = 1 if LONG else 8
    first = random.SystemRandom().randrange(1, stride + 1)
    print(f"steps from {first}")
    keys = make_key(tmp_path / "keys").parent
    steps = range(first, STEPS_MAX, stride)
    assert campaign(folder, count, steps, same_boot=same_boot, keys=keys) > 25
