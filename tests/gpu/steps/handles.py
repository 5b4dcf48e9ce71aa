"""Opening an engine's memory: 1, 80 and 160 legacy handles, and chunks by descriptor; and how soon a host
sees that a stream has come somewhere: a doorbell (the stream writes registered host memory) against an event.

`open_us` and `close_us` are for all handles together. Latencies run from the call that enqueues on an idle
stream until the host has seen it (`poll` reads the word or asks the event without a pause; `sleep` waits for
an event that blocks).
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

from tests.gpu.parts.bench import KIB, MIB, Bench, percentile
from tests.gpu.parts.child import Child
from tests.gpu.parts.device import Device, open_device
from tests.gpu.parts.host import HostMemory
from tests.gpu.parts.imports import Chunks

COUNTS = (1, 80, 160)
CHUNK_BYTES = 20 * MIB
WAIT_S = 5.0


def run(bench: Bench) -> None:
    with open_device() as device:
        latencies(bench, device)
        with Child("tests.gpu.children.owner") as owner:
            legacy(bench, device, owner)
        with Child("tests.gpu.children.owner") as owner:
            chunks(bench, device, owner)


def legacy(bench: Bench, device: Device, owner: Child) -> None:
    """Allocations of their own, as vLLM has one per layer."""
    n = bench.pick(64 * MIB, 64 * KIB)
    handles = [bytes.fromhex(text) for text in owner.ask("legacy", bytes=n, count=max(COUNTS))["handles"]]
    for count in COUNTS:
        for turn in ("first", "again"):
            begin = time.perf_counter()
            addresses = [device.driver.ipc_open(handle) for handle in handles[:count]]
            opened = time.perf_counter()
            for address in addresses:
                device.driver.ipc_close(address)
            closed = time.perf_counter()
            bench.row(
                kind="legacy handle",
                count=count,
                bytes_each=n,
                turn=turn,
                open_us=(opened - begin) * 1e6,
                close_us=(closed - opened) * 1e6,
            )


def chunks(bench: Bench, device: Device, owner: Child) -> None:
    """Physical memory in chunks of 20 MiB, as torch's expandable segments are made of."""
    known = bench.pick(max(COUNTS), 8)
    size = owner.ask("chunks", bytes=bench.pick(CHUNK_BYTES, 64 * KIB), count=known)["bytes"]
    for count in (1, known):
        begin = time.perf_counter()
        imported = Chunks(device, owner, count, size)
        opened = time.perf_counter()
        imported.close()
        bench.row(
            kind="chunk by descriptor",
            count=count,
            bytes_each=size,
            turn="first" if count == 1 else "again",
            open_us=(opened - begin) * 1e6,
            close_us=(time.perf_counter() - opened) * 1e6,
        )


def latencies(bench: Bench, device: Device) -> None:
    """From the enqueueing call to the host's knowing, on an idle stream."""
    driver, stream, times = device.driver, device.stream(), bench.pick(2_000, 20)
    event = driver.event_create()
    with HostMemory(4 * KIB, "4k") as page:
        page.register(driver)
        word = ctypes.c_uint64.from_address(page.address)
        address = driver.host_device_pointer(page.address)

        def doorbell(turn: int) -> None:
            driver.write_value(stream, address, turn)
            poll(lambda: word.value == turn)

        def event_polled(turn: int) -> None:
            driver.event_record(event, stream)
            poll(lambda: driver.event_is_done(event))

        def event_slept(turn: int) -> None:
            driver.event_record(event, stream)
            driver.event_synchronize(event)

        asked: dict[str, Callable[[int], None]] = {
            "doorbell, poll": doorbell,
            "event, poll": event_polled,
            "event, sleep": event_slept,
        }
        for kind, once in asked.items():
            taken = []
            for turn in range(1, times + 1):
                begin = time.perf_counter()
                once(turn)
                taken.append((time.perf_counter() - begin) * 1e6)
            kept: dict[str, Any] = {f"p{p}_us": percentile(taken[times // 10 :], p) for p in (50, 99)}
            bench.row(kind=kind, count=times, **kept)
    driver.event_destroy(event)


def poll(seen: Callable[[], bool]) -> None:
    """Without a pause; raises TimeoutError."""
    end = time.perf_counter() + WAIT_S
    while not seen():
        if time.perf_counter() > end:
            raise TimeoutError(f"not seen within {WAIT_S} s")
