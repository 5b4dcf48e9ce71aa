"""Slots of killed containers on huge pages: not used while a device holds the page, free at a later start."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from kvtierd.memory.host_pool import HostPool

from tests.unit.memory.containers import COUNT, KEPT, PAGE_BYTES, SIZE, Container, fill
from tests.unit.memory.plain_pool import MIB


@pytest.fixture
def huge(as_root: None, tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of huge pages."""
    if not Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled").exists():
        pytest.fail("this kernel has no huge pages for tmpfs (CONFIG_TRANSPARENT_HUGEPAGE)")
    place = tmp_path / "huge"
    place.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64M,huge=always,mode=700", "tmpfs", place], check=True
    )
    yield place
    subprocess.run(["umount", place], check=True)


def huge_bytes(path: Path) -> int:
    """Of a file that this process has mapped, on huge pages."""
    smaps = Path("/proc/self/smaps").read_text().split(str(path))
    return sum(int(part.split("ShmemPmdMapped:")[1].split()[0]) << 10 for part in smaps[1:])


def test_a_page_that_a_device_holds_stays_out_of_use_until_it_lets_go(huge: Path) -> None:
    path = huge / "pool"
    fill(path)
    container = Container(path, pin=True)
    container.kill()
    with HostPool.open(path, SIZE, MIB, lock_timeout_s=60) as pool:
        pool.array[::PAGE_BYTES].sum()
        assert huge_bytes(path) > 0, "or this proves nothing"
        assert (pool.quarantined_slots, pool.start.recovered_blocks) == (COUNT, KEPT)
        assert len(pool.retry_quarantine()) == 0
    container.close()
    with HostPool.open(path, SIZE, MIB, lock_timeout_s=60) as pool:
        assert (pool.quarantined_slots, pool.start.recovered_blocks) == (0, KEPT)
        kept = pool.recovered.slots.tolist()
        blocks = [pool.array[slot * PAGE_BYTES : (slot + 1) * PAGE_BYTES] for slot in kept]
        assert np.concatenate(blocks).tolist() == [0x11] * (KEPT * PAGE_BYTES)
        assert os.fstat(pool.fd).st_blocks * 512 >= len(pool.array)
