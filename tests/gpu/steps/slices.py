"""What one process's copies cost another's, call by call.

`calls`: how long this process's driver calls take, idle and beside a process whose kernels keep every
multiprocessor busy. If a batch waits for a time slice of the multiprocessors, the boundary between engine and
daemon is in the wrong place.

`small copy`: how long a 4 KiB copy of an engine takes (sampled tokens, input ids), idle and while another
process copies at full rate, by the bytes of its chunks, how many are in flight, and the size of fragments.
Copies of two contexts on one copy engine are said to alternate about every millisecond (RTAS 2024, Bakita and
Anderson).

`while registering`: the same while another process registers host memory with the driver, and while one
starts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
from kvtier_kernels.cuda import Copies

from tests.gpu.parts.bench import GIB, KIB, MIB, Bench, percentile
from tests.gpu.parts.child import Child
from tests.gpu.parts.device import Device, open_device
from tests.gpu.parts.fragments import scattered, sizes_of
from tests.gpu.parts.host import HostMemory
from tests.gpu.parts.loops import D2H, H2D

SMALL_BYTES = 4 * KIB
CHUNKS = ((32, 2, 512), (16, 2, 512), (8, 2, 512), (8, 1, 512), (4, 1, 512), (2, 1, 512))
"""MiB of a chunk, chunks in flight, and KiB of a fragment."""
SMALL_FRAGMENTS = ((32, 2, 64), (32, 2, 8), (4, 1, 64), (4, 1, 8))
"""The same, measured in both directions at once only."""
WAYS = {D2H: (D2H,), H2D: (H2D,), "both": (D2H, H2D)}
CALLS_MIN = 5


class Engine:
    """This process, with device and registered host memory."""

    def __init__(self, bench: Bench, device: Device, stack: ExitStack) -> None:
        self.device = device
        self.n = bench.pick(64 * MIB, 2 * MIB)
        self.host = stack.enter_context(HostMemory(self.n)).fill().register(device.driver)
        self.address = device.alloc(self.n)
        self.stream = device.stream()
        self.event = device.driver.event_create()
        stack.callback(device.driver.event_destroy, self.event)
        self._copies = Copies(device.driver)

    def landed(self) -> None:
        self.device.driver.event_record(self.event, self.stream)
        self.device.driver.event_synchronize(self.event)

    def small_copy(self, way: str) -> None:
        """One copy of 4 KiB, until the host knows that it has landed."""
        ends = (self.address, self.host.address) if way == H2D else (self.host.address, self.address)
        self.device.driver.copy_async(*ends, SMALL_BYTES, self.stream)
        self.landed()

    def batch(self, way: str, fragment_bytes: int, count: int) -> Callable[[], None]:
        """Copies so many fragments in one call."""
        rng = np.random.default_rng(0)
        device = scattered(self.address, self.n, fragment_bytes, count, rng)
        host = scattered(self.host.address, self.n, fragment_bytes, count, rng)
        sizes = sizes_of(count, fragment_bytes)

        def once() -> None:
            if way == H2D:
                self._copies.to_device(device, host, sizes, self.stream)
            else:
                self._copies.to_host(host, device, sizes, self.stream)
            self.landed()

        return once


def run(bench: Bench) -> None:
    with ExitStack() as stack:
        device = stack.enter_context(open_device())
        engine = Engine(bench, device, stack)
        calls(bench, engine)
        small_copies(bench, engine)
        registering(bench, engine)


def calls(bench: Bench, engine: Engine) -> None:
    probes: dict[str, Callable[[], None]] = {"event": engine.landed}
    for way in (H2D, D2H):
        probes[f"copy of 4 KiB {way}"] = partial(engine.small_copy, way)
        for kib, count in ((4, 64), (16, 64), (64, 64), (1024, 16)):
            size = bench.pick(kib * KIB, 4 * KIB)
            probes[f"batch of {count} x {kib} KiB {way}"] = engine.batch(way, size, count)
    with Child("tests.gpu.children.spinner") as spinner:
        spinner.ask("open", kernels=not bench.fake)
        for beside in ("idle", "kernels of another process"):
            if beside != "idle":
                spinner.ask("start")
            for name, call in probes.items():
                bench.row(kind="calls", call=name, beside=beside, **timed(bench, call))
        spinner.ask("stop")


def small_copies(bench: Bench, engine: Engine) -> None:
    def measure(**about: object) -> None:
        for way in (H2D, D2H):
            took = timed(bench, partial(engine.small_copy, way))
            bench.row(kind="small copy", way=way, **about, **took)

    measure(beside="idle")
    with Child("tests.gpu.children.copier") as copier:
        copier.ask("open", region_bytes=bench.pick(256 * MIB, MIB), directions=[D2H, H2D])
        for beside, ways in WAYS.items():
            for chunk_mib, flights, kib in (*CHUNKS, *(SMALL_FRAGMENTS if beside == "both" else ())):
                fragment_bytes = bench.pick(kib * KIB, 4 * KIB)
                copier.ask(
                    "start",
                    directions=ways,
                    fragment_bytes=fragment_bytes,
                    prefer_overlap=False,
                    batch_bytes=bench.pick(chunk_mib * MIB, 64 * KIB),
                    flights=flights,
                )
                time.sleep(bench.pick(0.1, 0.0))
                about = {"beside": beside, "chunk_mib": chunk_mib, "flights": flights, "fragment_kib": kib}
                rows = [(way, timed(bench, partial(engine.small_copy, way))) for way in (H2D, D2H)]
                rate = copier.ask("stop").fields
                for way, took in rows:
                    bench.row(kind="small copy", way=way, **about, **rate, **took)


def registering(bench: Bench, engine: Engine) -> None:
    n = bench.pick(8 * GIB, 8 * MIB)
    with HostMemory(n) as pool, Child("tests.gpu.children.registrar") as registrar:
        pool.populate()
        for what, question, fds in (
            ("a process takes a context", {"what": "context"}, []),
            ("a process registers memory", {"what": "register", "bytes": n}, [pool.fd]),
        ):
            asked: dict[str, Any] = dict(question)
            if "bytes" in asked:
                asked["chunk_bytes"] = bench.pick(256 * MIB, MIB)
            registrar.tell(asked.pop("what"), fds, **asked)
            took = timed(bench, lambda: engine.small_copy(D2H))
            answer = registrar.answer(120.0).fields
            bench.row(kind="while registering", beside=what, way=D2H, **took, **answer)


def timed(bench: Bench, call: Callable[[], None]) -> dict[str, float]:
    """Microseconds of one call, over half a second."""
    call()
    taken: list[float] = []
    end = time.perf_counter() + bench.pick(0.5, 0.01)
    while time.perf_counter() < end or len(taken) < CALLS_MIN:
        begin = time.perf_counter()
        call()
        taken.append((time.perf_counter() - begin) * 1e6)
    return {
        "count": len(taken),
        "p50_us": percentile(taken, 50),
        "p99_us": percentile(taken, 99),
        "max_us": max(taken),
    }
