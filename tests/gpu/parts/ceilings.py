"""One large pinned copy, each way and both ways at once: what every other figure is a ratio to."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np

from tests.gpu.parts.bench import GIB, MIB, Bench, gb_per_s, median_s
from tests.gpu.parts.device import Device
from tests.gpu.parts.host import HostMemory
from tests.gpu.parts.loops import D2H, H2D

BOTH = "both"
WAYS = {H2D: (H2D,), D2H: (D2H,), BOTH: (H2D, D2H)}


def measure(device: Device, n: int, pages: str, times: int) -> dict[str, float]:
    """Gigabytes per second by way; "both" adds up two copies, started together on two streams, over the time
    of the slower. Raises OSError if there is no such host memory, and AssertionError if a byte is wrong
    afterwards."""
    driver = device.driver
    addresses = {way: device.alloc(n) for way in (H2D, D2H)}
    device.fill(addresses[D2H], n)
    streams = {way: device.stream() for way in (H2D, D2H)}
    with ExitStack() as stack:
        host = {way: stack.enter_context(HostMemory(n, pages)) for way in (H2D, D2H)}
        for memory in host.values():
            memory.populate()
            memory.fill().register(driver)

        def copy(ways: tuple[str, ...]) -> None:
            for way in ways:
                ends = (addresses[way], host[way].address)
                target, source = ends if way == H2D else ends[::-1]
                driver.copy_async(target, source, n, streams[way])
            for way in ways:
                driver.stream_synchronize(streams[way])

        rates = {}
        for name, ways in WAYS.items():
            rates[name] = gb_per_s(len(ways) * n, median_s(lambda ways=ways: copy(ways), times))  # type: ignore[misc]
        for way in (H2D, D2H):
            same = np.array_equal(device.read(addresses[way], n), host[way].array)
            assert same, f"{way}: the two ends differ"
    for address in addresses.values():
        device.free(address)
    return rates


def ceilings(bench: Bench, device: Device) -> dict[str, float]:
    """By way: of the step `ceiling` of this run, the best of its kinds of pages; measured now if it did not
    run."""
    rows = [row for row in bench.earlier("ceiling") if "gb_per_s" in row]
    if not rows:
        return measure(device, bench.pick(GIB, MIB), "thp", 3)
    return {way: max(float(row["gb_per_s"]) for row in rows if row["way"] == way) for way in WAYS}
