"""A worker maps the pool ahead of use, in the background."""

import mmap
import os
import re
import threading
from pathlib import Path

import pytest
from kvtierd.workers.populate import CHUNK_BYTES, Populator

from tests.integration.worker.rig import SLACK_S, Rig, until


def mapped_bytes(pid: int | str, name: str) -> int:
    """Bytes of the mappings of this file that a process has in its page tables."""
    areas = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path(f"/proc/{pid}/smaps").read_text())
    return sum(
        int(match[1]) << 10 for area in areas if name in area for match in re.finditer(r"Rss: +(\d+)", area)
    )


@pytest.fixture
def pool() -> mmap.mmap:
    fd = os.memfd_create("kvt-test-pool", os.MFD_CLOEXEC)
    os.posix_fallocate(fd, 0, 2 * CHUNK_BYTES)
    mapping = mmap.mmap(fd, 2 * CHUNK_BYTES)
    os.close(fd)
    return mapping


async def test_an_idle_worker_has_soon_mapped_the_whole_pool(rig: Rig) -> None:
    pid = rig.pid
    extents_bytes = rig.pool.geometry.extents * rig.pool.geometry.extent_bytes
    await until(lambda: mapped_bytes(pid, "kvtier-pool") >= extents_bytes, "the pool to be mapped")


def test_it_waits_for_the_lanes_and_stops_when_told(pool: mmap.mmap) -> None:
    asked = threading.Event()

    def busy() -> bool:
        asked.set()
        return True

    populator = Populator(pool, lambda: len(pool), busy)
    assert populator.join(0)
    populator.start()
    assert asked.wait(SLACK_S)
    assert not populator.join(0)
    populator.stop()
    assert populator.join(SLACK_S)
    assert mapped_bytes("self", "kvt-test-pool") == 0


def test_pages_that_cannot_be_had_are_left_to_those_who_need_them(
    pool: mmap.mmap, caplog: pytest.LogCaptureFixture
) -> None:
    os.truncate(
        f"/proc/self/fd/{_descriptor('kvt-test-pool')}", CHUNK_BYTES
    )  # as if there were no room for the rest
    populator = Populator(pool, lambda: len(pool), lambda: False)
    with caplog.at_level("INFO"):
        populator.start()
        assert populator.join(SLACK_S)
    assert "mapped as they are touched" in caplog.text
    assert mapped_bytes("self", "kvt-test-pool") == CHUNK_BYTES


def _descriptor(name: str) -> str:
    """The mapping's own."""
    [found] = [
        entry.name
        for entry in Path("/proc/self/fd").iterdir()
        if entry.is_symlink() and name in os.readlink(entry)
    ]
    return found
