"""An engine gets SIGKILL while its memory is being copied to and from: errors, memory held, time until it is
back.

This process is the copy worker. The engine's memory is a legacy allocation or chunks passed by descriptor.
Copies run both ways; the engine is killed; copying goes on for a while (`error` says what the driver answers,
if anything); then the worker does what it would do: drain (`drain_ms`), unmap (`close_ms`). `held_mib` is
what the GPU still counted as used after the engine's death and before the unmapping, over what was used
before the engine was there; `left_mib` the same after it. `released_ms` runs from the kill to the moment the
memory was free, without the time copied on purpose.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack

from kvtier_kernels.cuda import CudaError

from tests.gpu.parts.bench import GIB, KIB, MIB, Bench
from tests.gpu.parts.child import Child
from tests.gpu.parts.device import Device, open_device
from tests.gpu.parts.host import HostMemory
from tests.gpu.parts.imports import Chunks
from tests.gpu.parts.loops import D2H, H2D, CopyLoop

GO_ON_S = 0.3
BACK_S = 5.0


def run(bench: Bench) -> None:
    region = bench.pick(256 * MIB, 4 * MIB)
    with ExitStack() as stack:
        device = stack.enter_context(open_device())
        host = stack.enter_context(HostMemory(2 * region)).fill()
        host.register(device.driver)
        for number in range(bench.pick(6, 2)):
            if bench.left_s() < 5:
                break
            kind = ("legacy", "chunks")[number % 2]
            try:
                one(bench, device, host, region, kind)
            except CudaError as error:
                bench.row(memory=kind, error=str(error), context_lost=error.sticky)
                if error.sticky:
                    break


def one(bench: Bench, device: Device, host: HostMemory, region: int, kind: str) -> None:
    """One engine, one kill, one row."""
    memory_bytes = bench.pick(8 * GIB, 16 * MIB)
    before = device.used_bytes()
    with Child("tests.gpu.children.owner") as owner:
        address, close = imported(device, owner, kind, memory_bytes)
        loops = [
            CopyLoop(
                device,
                direction,
                device_address=address + index * region,
                host_address=host.address + index * region,
                region_bytes=region,
                fragment_bytes=bench.pick(256 * KIB, 16 * KIB),
            ).start()
            for index, direction in enumerate((H2D, D2H))
        ]
        time.sleep(bench.pick(0.1, 0.05))
        died_s = owner.kill()
        owner.close()
        time.sleep(GO_ON_S)
        begin = time.perf_counter()
        for loop in loops:
            loop.stop()
        drained = time.perf_counter()
        errors = [loop.error for loop in loops if loop.error is not None]
        if any(error.sticky for error in errors):
            raise errors[0]
        held = device.used_bytes() - before
        close()
        closed = time.perf_counter()
        while (
            device.used_bytes() - before > held - memory_bytes // 2 and time.perf_counter() < closed + BACK_S
        ):
            time.sleep(0.0005)
        free = time.perf_counter()
    bench.row(
        memory=kind,
        memory_mib=memory_bytes // MIB,
        error="; ".join(map(str, errors)) or "none",
        kill_to_pidfd_ms=died_s * 1e3,
        held_mib=held / MIB,
        drain_ms=(drained - begin) * 1e3,
        close_ms=(closed - drained) * 1e3,
        left_mib=(device.used_bytes() - before) / MIB,
        released_ms=(died_s + free - begin) * 1e3,
    )


def imported(device: Device, owner: Child, kind: str, n: int) -> tuple[int, Callable[[], None]]:
    """Address of the owner's memory here, and what gives it back."""
    if kind == "legacy":
        [handle] = owner.ask("legacy", bytes=n, count=1)["handles"]
        address = device.driver.ipc_open(bytes.fromhex(handle))
        return address, lambda: device.driver.ipc_close(address)
    count = 16
    size = owner.ask("chunks", bytes=n // count, count=count)["bytes"]
    chunks = Chunks(device, owner, count, size)
    return chunks.address, chunks.close
