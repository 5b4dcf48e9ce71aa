"""What one process's copies cost another's, call by call.

`calls`: how long this process's copies take until the host knows that they have landed, idle and beside a
process whose kernels keep every multiprocessor busy: by the way, the size of fragments (64 of them) and the
shape in which they get to the driver (`tests.gpu.parts.submitting`). What waits for a time slice of the
multiprocessors takes milliseconds more, and takes that slice from the engine.

`small copy`: how long a copy of an engine takes (`bytes`: 4 KiB as sampled tokens, 64 KiB as block tables),
idle and while another process copies at full rate, by the bytes of its chunks, how many are in flight, and
the size of fragments. Copies of two contexts on one copy engine are said to alternate about every
millisecond (RTAS 2024, Bakita and Anderson).

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

from tests.gpu.parts.bench import GIB, KIB, MIB, Bench, Unavailable, percentile
from tests.gpu.parts.child import Child
from tests.gpu.parts.device import Device, open_device
from tests.gpu.parts.host import HostMemory
from tests.gpu.parts.submitting import (
    BATCH,
    D2H,
    H2D,
    LOOP,
    PAIRS,
    ROWS,
    SINGLE,
    STAGED,
    STREAM,
    VOLUMES,
    submitter,
)

SMALL_BYTES = (4 * KIB, 64 * KIB)
"""Of an engine's own copies."""
CHUNKS = ((32, 2, 512), (8, 1, 512), (4, 1, 512))
"""MiB of a chunk, chunks in flight, and KiB of a fragment."""
SMALL_FRAGMENTS = ((8, 1, 8),)
"""The same, measured in both directions at once only."""
CALLS = (
    (H2D, BATCH, (4, 16, 24, 32, 64)),
    (H2D, ROWS, (4, 24, 64)),
    (H2D, SINGLE, (4, 24)),
    (H2D, PAIRS, (4, 16)),
    (H2D, VOLUMES, (4, 24, 64)),
    (H2D, STREAM, (4,)),
    (H2D, LOOP, (4,)),
    (H2D, STAGED, (4,)),
    (D2H, BATCH, (4, 64)),
    (D2H, ROWS, (4,)),
    (D2H, VOLUMES, (4, 64)),
)
"""Directions, shapes, and KiB of a fragment."""
FRAGMENTS = 64
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
        self.staging = device.alloc(FRAGMENTS * 64 * KIB)

    def landed(self) -> None:
        self.device.driver.event_record(self.event, self.stream)
        self.device.driver.event_synchronize(self.event)

    def small_copy(self, way: str, n: int) -> None:
        """One copy of `n` bytes, until the host knows that it has landed."""
        ends = (self.address, self.host.address) if way == H2D else (self.host.address, self.address)
        self.device.driver.copy_async(*ends, n, self.stream)
        self.landed()

    def fragments(self, way: str, shape: str, fragment_bytes: int) -> Callable[[], None]:
        """Copies fragments in one shape."""
        submit = submitter(
            self.device,
            shape,
            way,
            self.stream,
            device_address=self.address,
            host_address=self.host.address,
            region_bytes=self.n,
            fragment_bytes=fragment_bytes,
            count=FRAGMENTS,
            rng=np.random.default_rng(0),
            staging_address=self.staging,
        )

        def once() -> None:
            submit()
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
    probes: dict[tuple[str, str, int], Callable[[], None]] = {}
    for way in (H2D, D2H):
        probes[way, "one copy", 4] = partial(engine.small_copy, way, 4 * KIB)
    for way, shape, sizes in CALLS:
        for kib in bench.pick(sizes, sizes[:2]):
            try:
                probes[way, shape, kib] = engine.fragments(way, shape, bench.pick(kib, 1) * KIB)
            except Unavailable as error:
                bench.row(kind="calls", left_out=f"{shape} {way}", why=str(error))
                break
    with Child("tests.gpu.children.spinner") as spinner:
        spinner.ask("open", kernels=not bench.fake)
        for beside in ("idle", "kernels of another process"):
            if beside != "idle":
                spinner.ask("start")
            for (way, shape, kib), call in probes.items():
                about = {"way": way, "shape": shape, "fragment_kib": kib, "beside": beside}
                bench.row(kind="calls", **about, **timed(bench, call))
        spinner.ask("stop")


def small_copies(bench: Bench, engine: Engine) -> None:
    def measure(stop: Callable[[], dict[str, Any]], **about: object) -> None:
        rows = [
            (way, n, timed(bench, partial(engine.small_copy, way, n)))
            for way in (H2D, D2H)
            for n in SMALL_BYTES
        ]
        rate = stop()
        for way, n, took in rows:
            bench.row(kind="small copy", way=way, bytes=n, **about, **rate, **took)

    measure(dict, beside="idle")
    with Child("tests.gpu.children.copier") as copier:
        copier.ask("open", region_bytes=bench.pick(256 * MIB, MIB), directions=[D2H, H2D])
        for beside, ways in WAYS.items():
            for chunk_mib, flights, kib in (*CHUNKS, *(SMALL_FRAGMENTS if beside == "both" else ())):
                fragment_bytes = bench.pick(kib * KIB, 4 * KIB)
                copier.ask(
                    "start",
                    directions=ways,
                    fragment_bytes=fragment_bytes,
                    batch_bytes=bench.pick(chunk_mib * MIB, 64 * KIB),
                    flights=flights,
                )
                time.sleep(bench.pick(0.1, 0.0))
                about = {"beside": beside, "chunk_mib": chunk_mib, "flights": flights, "fragment_kib": kib}
                measure(lambda: copier.ask("stop").fields, **about)


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
            took = timed(bench, lambda: engine.small_copy(D2H, 4 * KIB))
            answer = registrar.answer(120.0).fields
            bench.row(kind="while registering", beside=what, way=D2H, **took, **answer)


def timed(bench: Bench, call: Callable[[], None]) -> dict[str, float]:
    """Microseconds of one call, over a quarter of a second."""
    call()
    taken: list[float] = []
    end = time.perf_counter() + bench.pick(0.25, 0.01)
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
