"""Batches of 4,096 descriptors, one after another, every byte checked: repeated batches have hung a driver.

Each round copies random blocks to the device, and back to other places in the host memory, and compares
checksums of all of them with those of the source. A round that does not end is ended by the step's deadline,
and the rows before it stay.
"""

from __future__ import annotations

import time

import numpy as np
from kvtier_kernels import xxh3_64_rows
from kvtier_kernels.cuda import DESCRIPTORS_PER_CALL, Copies

from tests.gpu.parts.bench import KIB, MIB, Bench
from tests.gpu.parts.content import random_bytes
from tests.gpu.parts.fragments import sizes_of
from tests.gpu.parts.region import open_region

FRAGMENT_BYTES = 16 * KIB
ROUNDS_PER_ROW = 50


def run(bench: Bench) -> None:
    count, n = bench.pick((DESCRIPTORS_PER_CALL, FRAGMENT_BYTES), (DESCRIPTORS_PER_CALL, 512))
    half = count * n
    rng = np.random.default_rng()
    with open_region(2 * half) as region:
        driver, copies = region.device.driver, Copies(region.device.driver)
        # The first half of the host memory is the source, the second the target of the way back.
        rows = region.host.array.reshape(2 * count, n)
        sizes = sizes_of(count, n)
        end = time.monotonic() + min(bench.pick(20.0, 0.5), bench.left_s())
        rounds, begin = 0, time.monotonic()
        while time.monotonic() < end:
            source, there, back = (rng.permutation(count) for _ in range(3))
            rows[:count] = random_bytes(min(half, MIB)).reshape(-1, n)[
                rng.integers(0, min(half, MIB) // n, count)
            ]
            rows[:count, 0:8] ^= rng.integers(0, 256, (count, 8), np.uint8)
            rows[count:] = 0x5A
            on_device = region.address + there.astype(np.uint64) * np.uint64(n)
            host = np.uint64(region.host.address)
            copies.to_device(on_device, host + source.astype(np.uint64) * np.uint64(n), sizes, region.stream)
            copies.to_host(
                host + (count + back).astype(np.uint64) * np.uint64(n), on_device, sizes, region.stream
            )
            driver.stream_synchronize(region.stream)
            wrong = int(np.count_nonzero(xxh3_64_rows(rows[source]) != xxh3_64_rows(rows[count + back])))
            assert wrong == 0, (
                f"round {rounds}: {wrong} of {count} fragments have other bytes than their source"
            )
            rounds += 1
            if rounds % ROUNDS_PER_ROW == 0:
                spent = time.monotonic() - begin
                bench.row(
                    rounds=rounds,
                    descriptors=2 * count * rounds,
                    gib=2 * half * rounds / (1 << 30),
                    seconds=spent,
                )
        spent = time.monotonic() - begin
        bench.row(
            rounds=rounds, descriptors=2 * count * rounds, gib=2 * half * rounds / (1 << 30), seconds=spent
        )
