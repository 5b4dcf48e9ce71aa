"""A process that makes a context and does nothing with it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from tests.gpu.parts.bench import KIB, MIB
from tests.gpu.parts.child import Handler
from tests.gpu.parts.device import take_device
from tests.gpu.parts.host import HostMemory

_kept: list[object] = []


def resident_bytes() -> int:
    """Of this process, now."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * KIB
    return 0


def driver(fields: dict[str, Any], fds: list[int]) -> dict[str, Any]:
    """A context; with `more`, what a copy worker adds to it."""
    begin = time.perf_counter()
    device = take_device()
    ready_s = time.perf_counter() - begin
    if fields["more"]:
        page = HostMemory(64 * KIB, "4k").register(device.driver)
        _kept.extend([page, device.stream(), device.stream(-5)])
    _kept.append(device)
    return {"ready_ms": round(ready_s * 1e3, 1), "resident_mib": resident_bytes() // MIB}


def torch_context(fields: dict[str, Any], fds: list[int]) -> dict[str, Any]:
    """torch's, with one small tensor."""
    import torch

    begin = time.perf_counter()
    _kept.append(torch.zeros(1, device="cuda"))
    torch.cuda.synchronize()
    return {
        "ready_ms": round((time.perf_counter() - begin) * 1e3, 1),
        "resident_mib": resident_bytes() // MIB,
    }


def handlers() -> dict[str, Handler]:
    return {"driver": driver, "torch": torch_context}
