"""Registering host memory: seconds per GB, by chunk size and pages; one pool registered by two processes.

The rows of `who` "two processes" answer whether a process per GPU or one for several is cheaper, as far as
one GPU can tell: each process retains its own context and registers the same pool, at the same time or one
after the other. `context_mib` is what both hold of the GPU, `resident_mib` is of one process and counts the
pool's pages that it has mapped; `shared_mib` is how much of that is the pool, which is there only once.
"""

from __future__ import annotations

import time
from contextlib import ExitStack

from tests.gpu.parts.bench import GIB, MIB, Bench, gb_per_s
from tests.gpu.parts.child import Child
from tests.gpu.parts.device import Device, open_device
from tests.gpu.parts.host import HostMemory

CHUNKS = (GIB, 256 * MIB, 64 * MIB, 4 * GIB)


def run(bench: Bench) -> None:
    n = bench.pick(4 * GIB, 8 * MIB)
    with open_device() as device:
        for pages in ("thp", "4k", "huge"):
            for chunk in bench.pick(CHUNKS if pages == "thp" else CHUNKS[:1], (4 * MIB,)):
                try:
                    one(bench, device, n, pages, chunk, populated=True)
                except OSError as error:
                    bench.row(who="one process", pages=pages, left_out=str(error))
        one(bench, device, bench.pick(GIB, 8 * MIB), "thp", bench.pick(GIB, 4 * MIB), populated=False)
        for together in (True, False):
            for count in (1, 2):
                if bench.left_s() > 8:
                    several(bench, device, n, count, together)


def one(bench: Bench, device: Device, n: int, pages: str, chunk: int, *, populated: bool) -> None:
    """This process alone."""
    with HostMemory(n, pages) as host:
        begin = time.perf_counter()
        if populated:
            host.populate()
        ready = time.perf_counter()
        host.register(device.driver, chunk)
        registered = time.perf_counter()
        host.unregister()
        bench.row(
            who="one process",
            pages=pages,
            bytes=n,
            chunk_bytes=min(chunk, n),
            populated=populated,
            populate_s_per_gb=(ready - begin) / n * 1e9,
            register_s_per_gb=(registered - ready) / n * 1e9,
            unregister_s_per_gb=(time.perf_counter() - registered) / n * 1e9,
        )


def several(bench: Bench, device: Device, n: int, count: int, together: bool) -> None:
    """`count` processes and one pool."""
    before = device.used_bytes()
    with ExitStack() as stack:
        host = stack.enter_context(HostMemory(n))
        host.populate()
        children = [stack.enter_context(Child("tests.gpu.children.registrar")) for _ in range(count)]
        ready_ms = [child.ask("context")["ready_ms"] for child in children]
        context_mib = (device.used_bytes() - before) / MIB
        begin = time.perf_counter()
        question = {"bytes": n, "chunk_bytes": bench.pick(GIB, 4 * MIB)}
        if together:
            for child in children:
                child.tell("register", [host.fd], **question)
            answers = [child.answer() for child in children]
        else:
            answers = [child.ask("register", [host.fd], **question) for child in children]
        taken = time.perf_counter() - begin
        bench.row(
            who="two processes" if count == 2 else "one other process",
            together=together,
            bytes=n,
            context_mib=context_mib,
            context_ms=max(ready_ms),
            wall_s=taken,
            gb_per_s=gb_per_s(n * count, taken),
            register_s_per_gb=max(answer["seconds"] for answer in answers) / n * 1e9,
            retries=sum(answer["retries"] for answer in answers),
            resident_mib=max(answer["resident_mib"] for answer in answers),
            shared_mib=max(answer["shared_mib"] for answer in answers),
        )
