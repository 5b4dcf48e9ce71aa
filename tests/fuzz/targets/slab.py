"""A disk's worker and the front start on a slab file in which anything may have changed, or that was cut."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
from kvtier_kernels import BlockTable
from kvtierd.core.errors import Refusal
from kvtierd.core.ids import PAGE_BYTES, DiskId, WorkerId
from kvtierd.core.machine import Machine
from kvtierd.core.stimuli import CoreLimits, DiskRecovered, Recovered, WorkerLive
from kvtierd.memory import pool_file
from kvtierd.memory.recovery import recover
from kvtierd.tiers.disk.image import DiskImage
from kvtierd.tiers.disk.slab import Slab, load

from tests.fuzz.pool_bytes import (
    GEOMETRY,
    GUIDES,
    MIB,
    POOL_BYTES,
    change,
    check_found,
    sample,
)
from tests.fuzz.source import Source
from tests.fuzz.target import Target
from tests.oracles.invariants import validate
from tests.unit.core.host import GEOMETRY as HOST
from tests.unit.core.host import pages_of

BOOT_NONCE = 11


@functools.cache
def _slab() -> Slab:
    folder = Path(tempfile.mkdtemp(prefix="kvtier-fuzz-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    slab = Slab.open(folder, POOL_BYTES, MIB, create=True)
    assert slab.geometry == GEOMETRY
    return slab


@functools.cache
def _image() -> DiskImage:
    """Used again and again, as `load` writes over whatever was there."""
    return DiskImage(GEOMETRY)


def run(data: bytes) -> None:
    source = Source(data)
    slab, image, whole = _slab(), _image(), sample()
    pool = whole.data.copy()
    forged = change(pool, source)
    cut = source.hostile() % (POOL_BYTES + 1) if source.one_in(8) else POOL_BYTES
    _write(slab.fd, pool, cut)
    reason = slab.reason_to_remake()
    if cut == POOL_BYTES:
        if reason:
            return
    else:
        assert reason, "a slab that was cut is kept"
        # It may also be cut later, while the worker reads it: `load` then finds extents that cannot be read.
        header = pool_file.read_header(slab.fd)
        if pool_file.reason_to_remake(header, POOL_BYTES, POOL_BYTES, MIB):
            return
    try:
        load(slab, image._array)
    except Refusal as refusal:
        assert cut < POOL_BYTES, f"a slab that can be read was refused: {refusal}"
        return
    found = image.recover(BOOT_NONCE)
    assert len(found.recovered.quarantined) == 0
    check_found(pool, image.records, found.recovered, whole=whole, forged=forged, in_data=False)
    _take_over(found.recovered)
    # A crash of the front begins it again, on the image as it is.
    again = recover(image.records, lambda writer: True).recovered
    assert again.slots.tolist() == found.recovered.slots.tolist()


def _write(fd: int, pool: np.ndarray, length: int) -> None:
    """Only what is ever read: headers, tables, and whatever was changed there."""
    os.ftruncate(fd, length)
    starts = [0, *(GEOMETRY.first_extent_offset + extent * MIB for extent in range(GEOMETRY.extents))]
    for start in starts:
        piece = pool[start : min(start + 8 * PAGE_BYTES, length)]
        if len(piece):
            os.pwrite(fd, piece.data, start)


def _take_over(found: Recovered) -> None:
    table = BlockTable(64, pages_of(HOST))
    disk = BlockTable(256, POOL_BYTES // PAGE_BYTES)
    machine = Machine(table, lambda: 0.0, CoreLimits(), HOST, disks=[(disk, GEOMETRY)])
    machine.handle(WorkerLive(WorkerId(1), "disk-0"))
    machine.handle(DiskRecovered(DiskId(0), found))
    validate(machine)


TARGET = Target(
    run,
    (
        "kvtierd.tiers.disk.slab",
        "kvtierd.tiers.disk.image",
        "tests.fuzz.pool_bytes",
        "kvtierd.memory.recovery",
    ),
    guides=GUIDES,
    bytes_max=400,
)
