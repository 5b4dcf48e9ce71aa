"""A disk's records read back and believed, against slots of 4 KiB: what a start from disk alone waits for.

    python -m tests.benchmarks.restart_disk [--json] [--directory DIR]

The slab's headers and record tables are on a real disk; the data of its slots was never written, for no start
reads it. Before each repetition the kernel drops the slab from its cache. `_s` is everything: `_read_s`, what
the disk's worker does (it opens the slab, and reads its tables into the image), and `_recover_s`, what the
front does.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
from kvtier_kernels import format_pool
from kvtierd.core.ids import PAGE_BYTES
from kvtierd.memory.pool_file import config_digest
from kvtierd.tiers.disk.image import WRITER, DiskImage, disk_geometry
from kvtierd.tiers.disk.slab import Slab, load

from tests.benchmarks.restart import EXTENT_BYTES, REPETITIONS, SIZES, pool_bytes, record_blocks


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON object")
    parser.add_argument("--directory", type=Path, default=Path("/var/tmp"), help="on the disk to read")
    arguments = parser.parse_args()
    figures: dict[str, float] = {}
    if shutil.disk_usage(arguments.directory).free < 2 * pool_bytes(max(SIZES.values())):
        print(f"restart_disk: skipped, no room in {arguments.directory}", file=sys.stderr)
    else:
        for name, slots in SIZES.items():
            with tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=arguments.directory) as folder:
                figures |= {f"restart_disk_{name}{key}": s for key, s in measure(Path(folder), slots).items()}
    if not arguments.json:
        for key, value in figures.items():
            print(f"{key:<36} {value:8.4f}")
    print(json.dumps(figures))
    return 0


def measure(folder: Path, slots: int) -> dict[str, float]:
    fill(folder, slots)
    reads, recoveries = [], []
    for repetition in range(REPETITIONS):
        with DiskImage(disk_geometry(pool_bytes(slots), EXTENT_BYTES)) as image:
            began_s = time.perf_counter()
            slab = Slab.open(folder, pool_bytes(slots), EXTENT_BYTES, create=False)
            if reason := slab.reason_to_remake():
                raise SystemExit(f"the slab would be made anew: {reason}")
            load(slab, mapped(image))
            reads.append(time.perf_counter() - began_s)
            began_s = time.perf_counter()
            found = image.recover(boot_nonce=repetition + 2)
            recoveries.append(time.perf_counter() - began_s)
            if found.blocks != slots:
                raise SystemExit(f"recovered {found.blocks} of {slots} blocks")
            forget(slab)
    return {
        "_s": statistics.median(map(sum, zip(reads, recoveries, strict=True))),
        "_read_s": statistics.median(reads),
        "_recover_s": statistics.median(recoveries),
    }


def mapped(image: DiskImage) -> npt.NDArray[np.uint8]:
    """As a worker maps it."""
    return np.frombuffer(mmap.mmap(image.fd, image.bytes), np.uint8)


def fill(folder: Path, slots: int) -> None:
    """A slab whose records say that it holds `slots` blocks of one shard."""
    with DiskImage(disk_geometry(pool_bytes(slots), EXTENT_BYTES)) as image:
        pages, geometry = mapped(image), image.geometry
        format_pool(pages, geometry.extent_bytes, geometry.extents, config_digest(geometry))
        slab = Slab.open(folder, pool_bytes(slots), EXTENT_BYTES, create=True)
        slab.make(bytes(pages[:PAGE_BYTES]), lambda: None)
        image.recover(boot_nonce=1)
        record_blocks(image.records, geometry, slots, WRITER, boot_nonce=1)
        for extent in range(geometry.extents):
            start = slab.extent_offset(extent)
            slab.write(pages[start : start + PAGE_BYTES].data, start)
            offset, length = image.records.table_range(extent)
            slab.write(pages[offset : offset + length].data, offset)
        forget(slab)


def forget(slab: Slab) -> None:
    """Lets go of it, and has the kernel read it anew."""
    os.fsync(slab.fd)
    os.posix_fadvise(slab.fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(slab.fd)


if __name__ == "__main__":
    sys.exit(main())
