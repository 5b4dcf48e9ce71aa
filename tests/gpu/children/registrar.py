"""A process that registers a pool which others register too."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from kvtier_kernels.cuda import CudaError

from tests.gpu.parts.bench import KIB, MIB
from tests.gpu.parts.child import Handler
from tests.gpu.parts.device import Device, take_device
from tests.gpu.parts.host import HostMemory

TRIES = 5


class Registrar:
    """Answers `context` and `register`."""

    def context(self, fields: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        begin = time.perf_counter()
        self._device: Device = take_device()
        return {"ready_ms": round((time.perf_counter() - begin) * 1e3, 1)}

    def register(self, fields: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        """Chunk by chunk, all of the descriptor's memory. A chunk that the driver refuses, which it may while
        another process registers it, is tried again."""
        self._host = HostMemory(fields["bytes"], fd=fds[0])
        os.close(fds[0])
        begin, retries = time.perf_counter(), 0
        for offset in range(0, self._host.n, fields["chunk_bytes"]):
            n = min(fields["chunk_bytes"], self._host.n - offset)
            for left in range(TRIES, 0, -1):
                try:
                    self._device.driver.host_register(self._host.address + offset, n)
                    break
                except CudaError:
                    if left == 1:
                        raise
                    retries += 1
                    time.sleep(0.01)
        return {"seconds": time.perf_counter() - begin, "retries": retries, **memory_mib()}


def memory_mib() -> dict[str, int]:
    """Resident memory of this process, and how much of it is shared."""
    found = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("VmRSS", "RssShmem"):
            found[name] = int(value.split()[0]) * KIB // MIB
    return {"resident_mib": found.get("VmRSS", 0), "shared_mib": found.get("RssShmem", 0)}


def handlers() -> dict[str, Handler]:
    registrar = Registrar()
    return {"context": registrar.context, "register": registrar.register}
