"""A daemon starts on a pool file in which anything may have changed."""

from __future__ import annotations

import atexit
import functools
import mmap
import os
import time

import numpy as np
from kvtierd.memory import pool_file
from kvtierd.memory.host_pool import HostPool

from tests.fuzz.pool_bytes import GEOMETRY, GUIDES, MIB, POOL_BYTES, change, check_found, sample, take_over
from tests.fuzz.source import Source
from tests.fuzz.target import Target
from tests.oracles.invariants import validate


@functools.cache
def _file() -> tuple[int, np.ndarray]:
    """A file in memory, and all of its bytes."""
    fd = os.memfd_create("kvtier-fuzz-pool", os.MFD_CLOEXEC)
    atexit.register(os.close, fd)
    os.ftruncate(fd, POOL_BYTES)
    return fd, np.frombuffer(mmap.mmap(fd, POOL_BYTES), np.uint8)


def run(data: bytes) -> None:
    source = Source(data)
    fd, pool = _file()
    whole = sample()
    pool[:] = whole.data
    forged = change(pool, source)
    header = pool_file.read_header(fd)
    extent_bytes = source.choice((MIB, None, 2 * MIB))
    reason = pool_file.reason_to_remake(header, POOL_BYTES, POOL_BYTES, extent_bytes)
    if isinstance(header, str) or reason:
        assert reason, "a pool that is not kept without a reason"
        return
    assert header.geometry == GEOMETRY
    # Whatever header is believed here is believed natively as well: this does not raise.
    opened = HostPool(os.dup(fd), header.geometry, pool, "", time.monotonic())
    with opened:
        found = opened.recovered
        check_found(pool, opened.records, found, whole=whole, forged=forged)
        take_over(found, validate)
        freed = opened.retry_quarantine()
        assert set(freed.tolist()) <= set(found.quarantined.tolist())
        # A second start finds the same: what was freed stays free, and nothing that was kept is lost.
        with HostPool(os.dup(fd), header.geometry, pool, "", time.monotonic()) as again:
            assert again.recovered.slots.tolist() == found.slots.tolist()
            assert again.recovered.hashes.tobytes() == found.hashes.tobytes()


TARGET = Target(
    run,
    (
        "tests.fuzz.pool_bytes",
        "kvtierd.memory.recovery",
        "kvtierd.memory.host_pool",
        "kvtierd.memory.writers",
        "kvtierd.memory.replacing",
    ),
    guides=GUIDES,
    bytes_max=400,
)
