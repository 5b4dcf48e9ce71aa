"""The ceiling that everything else is a ratio to: one pinned copy of 1 GiB, each way, and both ways at once.

`pages` is how the host memory was mapped (4 KiB pages, transparent huge pages asked for, 2 MiB pages). `both`
adds up two copies, started together on two streams, over the time of the slower. Medians; both ends are
compared afterwards.
"""

from __future__ import annotations

from tests.gpu.parts.bench import GIB, MIB, Bench
from tests.gpu.parts.ceilings import measure
from tests.gpu.parts.device import open_device


def run(bench: Bench) -> None:
    n = bench.pick(GIB, MIB)
    with open_device() as device:
        for pages in ("thp", "4k", "huge"):
            try:
                rates = measure(device, n, pages, times=bench.pick(9, 2))
            except OSError as error:
                bench.row(pages=pages, left_out=str(error))
                continue
            for way, rate in rates.items():
                bench.row(pages=pages, way=way, bytes=n, gb_per_s=rate)
