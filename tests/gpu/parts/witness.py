"""Watches memory for changes: samples of 8 bytes at equal distances, of device memory or of host memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from kvtier_kernels.cuda import Copies

from tests.gpu.parts.device import Device
from tests.gpu.parts.host import HostMemory

U64 = npt.NDArray[np.uint64]
Sample = Callable[[], U64]
WORD_BYTES = 8


def host_sample(memory: HostMemory, n: int, stride: int) -> Sample:
    """Reads one word in `stride` bytes of the first `n`."""
    words = memory.array[:n].view(np.uint64)[:: stride // WORD_BYTES]
    return lambda: words.copy()


def device_sample(device: Device, address: int, n: int, stride: int, into: HostMemory) -> Sample:
    """The same of device memory, by one strided copy into registered memory."""
    count = n // stride
    copies, stream = Copies(device.driver), device.stream()

    def one(value: int) -> U64:
        return np.array([value], np.uint64)

    def sample() -> U64:
        copies.rows_to_host(
            one(address), one(into.address), one(WORD_BYTES), one(count), one(stride), one(WORD_BYTES), stream
        )
        device.driver.stream_synchronize(stream)
        return into.array[: count * WORD_BYTES].view(np.uint64).copy()

    return sample


@dataclass(frozen=True)
class Seen:
    """What a watch saw."""

    samples: int
    changed_words: int
    """Words that differed from the sample before, over all samples after the first."""
    last_change_s: float
    """When the last change was seen, since the watch began; 0 for none."""
    first_sample_s: float
    """When the first sample had been taken: what changed before it was not seen."""


def watch(sample: Sample, seconds: float) -> Seen:
    """Samples again and again, at first without a pause, then at growing intervals."""
    begin = time.perf_counter()
    before = sample()
    first_s = time.perf_counter() - begin
    samples, changed, last_s = 1, 0, 0.0
    while (now_s := time.perf_counter() - begin) < seconds:
        time.sleep(min(now_s / 10, 0.02))
        after = sample()
        samples += 1
        if differing := int(np.count_nonzero(after != before)):
            changed += differing
            last_s = time.perf_counter() - begin
        before = after
    return Seen(samples, changed, last_s, first_s)
