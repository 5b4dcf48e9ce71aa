"""Does memory still change after the pidfd of a copy worker, killed in the middle of its copies, has become
readable?

This process is the engine (it owns the device memory) and the pool's owner (it owns the host memory). A
worker imports the one and registers the other, and copies batches for ever, so that every pass changes every
byte. It gets SIGKILL at a random moment; as soon as its pidfd is readable, the target is sampled again and
again for half a second. One row per kill. `changed_words` of the sampled words that changed after the first
sample: anything but 0 means that the pidfd is no fence by itself. What lands between the pidfd and the end of
the first sample (`first_sample_us`) is not seen. `was_moving`: the target changed right before the kill, so
the kill did fall among copies.
"""

from __future__ import annotations

import time
from contextlib import ExitStack

import numpy as np

from tests.gpu.parts.bench import KIB, MIB, Bench
from tests.gpu.parts.child import Child
from tests.gpu.parts.device import Device, open_device
from tests.gpu.parts.host import HostMemory
from tests.gpu.parts.loops import D2H, H2D
from tests.gpu.parts.witness import Sample, device_sample, host_sample, watch

WATCH_S = 0.5


def run(bench: Bench) -> None:
    rng = np.random.default_rng()
    with ExitStack() as stack:
        device = stack.enter_context(open_device())
        trial = Trial(bench, stack, device)
        seen = 0
        for number in range(bench.pick(24, 4)):
            direction = (H2D, D2H)[number % 2]
            if bench.left_s() < 4:
                break
            seen += trial.run(direction, delay_s=float(rng.uniform(0.005, 0.15)))
        bench.row(direction="all", verdict="memory changed after the pidfd" if seen else "no change was seen")


class Trial:
    """Memory for both directions: two sources and one target each."""

    def __init__(self, bench: Bench, stack: ExitStack, device: Device) -> None:
        self._bench = bench
        self._device = device
        self._n = bench.pick(256 * MIB, 4 * MIB)
        self._stride = bench.pick(64 * KIB, 16 * KIB)
        self._fragment_bytes = bench.pick(256 * KIB, 16 * KIB)
        # H2D: two sources in host memory, one target on the device. D2H: the other way round.
        self._host = {
            H2D: stack.enter_context(HostMemory(2 * self._n)).fill(),
            D2H: stack.enter_context(HostMemory(self._n)).fill(),
        }
        self._address = {H2D: device.alloc(self._n), D2H: device.alloc(2 * self._n)}
        device.fill(self._address[H2D], self._n)
        device.fill(self._address[D2H], 2 * self._n)
        scratch = stack.enter_context(HostMemory(MIB)).register(device.driver)
        self._sample: dict[str, Sample] = {
            H2D: device_sample(device, self._address[H2D], self._n, self._stride, scratch),
            D2H: host_sample(self._host[D2H], self._n, self._stride),
        }

    def run(self, direction: str, delay_s: float) -> bool:
        """One kill; whether the target changed after it."""
        host, sample = self._host[direction], self._sample[direction]
        # About 50 MB/s on the fake driver, so that a kill can fall among copies of a few megabytes.
        slow = {"FAKE_CUDA_BANDWIDTH": str(50 << 20)} if self._bench.fake else None
        with Child("tests.gpu.children.copy_worker", slow) as worker:
            worker.ask(
                "open",
                [host.fd],
                handle=self._device.driver.ipc_export(self._address[direction]).hex(),
                direction=direction,
                region_bytes=self._n,
                host_bytes=host.n,
                fragment_bytes=self._fragment_bytes,
            )
            worker.ask("run")
            time.sleep(delay_s)
            before = sample()
            while not np.count_nonzero(sample() != before):
                if self._bench.left_s() < 2:
                    break
            moving = bool(np.count_nonzero(sample() != before))
            died_s = worker.kill()
            seen = watch(sample, self._bench.pick(WATCH_S, 0.1))
        self._bench.row(
            direction=direction,
            was_moving=moving,
            kill_to_pidfd_us=died_s * 1e6,
            samples=seen.samples,
            changed_words=seen.changed_words,
            last_change_us=seen.last_change_s * 1e6,
            first_sample_us=seen.first_sample_s * 1e6,
        )
        return bool(seen.changed_words)
