"""Versions, NUMA and link as they are, and the GPU memory that a process costs before it has allocated
anything.

Each row is a process of its own: a driver context alone (what a copy worker has), the same with its streams
and a registered page, and torch's context with one small tensor (what an engine has at least). `context_mib`
is the growth of the GPU's used memory, seen by a process that has its context already; `ready_ms` is the time
from the process's start of the work to the context being there, without Python's own start.
"""

from __future__ import annotations

import os

from tests.gpu.parts.bench import MIB, Bench
from tests.gpu.parts.child import Child, ChildError
from tests.gpu.parts.device import open_device

KINDS = ("driver context", "driver context, lazy loading off", "two streams and a registered page", "torch")


def run(bench: Bench) -> None:
    with open_device() as device:
        driver, info = device.driver, device.info
        bench.row(
            driver=driver.version_text,
            product=info.product,
            pci_bus_id=info.pci_bus_id,
            total_mib=info.total_bytes // MIB,
            mig=info.is_mig,
            cpus=len(os.sched_getaffinity(0)),
        )
        for kind in KINDS:
            if kind == "torch" and bench.fake:
                continue
            loading = {"CUDA_MODULE_LOADING": "EAGER" if "lazy loading off" in kind else "LAZY"}
            before = device.used_bytes()
            with Child("tests.gpu.children.footprint", loading) as child:
                try:
                    answer = child.ask("torch" if kind == "torch" else "driver", more="streams" in kind)
                except ChildError as error:
                    bench.row(process=kind, error=str(error)[-300:])
                    continue
                bench.row(
                    process=kind,
                    context_mib=(device.used_bytes() - before) / MIB,
                    ready_ms=answer["ready_ms"],
                    resident_mib=answer["resident_mib"],
                )
