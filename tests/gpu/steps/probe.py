"""What this machine lets us do, each asked once and for itself: a row says what, whether, and what was seen.

Later steps assume little of it; this tells why one of them could not run.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.gpu.machine import gpus
from tests.gpu.parts.bench import KIB, MIB, Bench, Unavailable
from tests.gpu.parts.child import Child
from tests.gpu.parts.content import random_bytes
from tests.gpu.parts.device import find_device, open_device
from tests.gpu.parts.host import HostMemory
from tests.gpu.parts.imports import Chunks

SO_PEERPIDFD = 77
WAIT_S = 10.0


def run(bench: Bench) -> None:
    questions: dict[str, Callable[[Bench], str]] = {
        "driver": driver,
        "context": context,
        "pidfd": pidfd,
        "SO_PEERPIDFD": peer_pidfd,
        "host registration": registration,
        "doorbell: a stream writes registered host memory": doorbell,
        "CUDA IPC, legacy handle": legacy_ipc,
        "chunks by descriptor (VMM)": chunks_by_descriptor,
        "2 MiB pages": huge_pages,
        "link": link,
        "torch": torch_there,
        "Triton": triton_there,
    }
    for what, ask in questions.items():
        try:
            bench.row(what=what, works=True, seen=ask(bench))
        except Exception as error:  # each question is for itself
            bench.row(what=what, works=False, seen=f"{type(error).__name__}: {error}"[:400])
    find_device()  # without a GPU the step counts as skipped, whatever else works


def driver(bench: Bench) -> str:
    found, info = find_device()
    which = f"{info.product}, {info.name}, {info.total_bytes // MIB} MiB, MIG: {info.is_mig}"
    return f"CUDA {found.version_text}, {which}"


def context(bench: Bench) -> str:
    with open_device() as device:
        return f"priorities {device.driver.stream_priority_range()}, {device.used_bytes() // MIB} MiB used"


def pidfd(bench: Bench) -> str:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    descriptor = os.pidfd_open(process.pid)
    try:
        begin = time.perf_counter()
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        _readable(descriptor)
        return f"readable {(time.perf_counter() - begin) * 1e6:.0f} us after SIGKILL"
    finally:
        process.kill()
        process.wait(WAIT_S)
        os.close(descriptor)


def peer_pidfd(bench: Bench) -> str:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        descriptor = ours.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
        os.close(descriptor)
    return "answered"


def registration(bench: Bench) -> str:
    with open_device() as device, HostMemory(bench.pick(64 * MIB, MIB)) as host:
        begin = time.perf_counter()
        host.register(device.driver)
        taken = time.perf_counter() - begin
        same = device.driver.host_device_pointer(host.address) == host.address
        return f"{host.n // MIB} MiB in {taken * 1e3:.1f} ms; device address is the host address: {same}"


def doorbell(bench: Bench) -> str:
    with open_device() as device, HostMemory(4 * KIB, "4k") as page:
        page.register(device.driver)
        word = ctypes.c_uint64.from_address(page.address)
        address, stream = device.driver.host_device_pointer(page.address), device.stream()
        begin = time.perf_counter()
        device.driver.write_value(stream, address, 0xD00B)
        while word.value != 0xD00B:
            if time.perf_counter() > begin + WAIT_S:
                raise TimeoutError(f"the word still says {word.value} after {WAIT_S} s")
        return f"seen after {(time.perf_counter() - begin) * 1e6:.0f} us"


def legacy_ipc(bench: Bench) -> str:
    n = 2 * MIB
    with open_device() as device, Child("tests.gpu.children.reader") as reader:
        address = device.alloc(n)
        content = random_bytes(n)
        device.write(address, content)
        handle = device.driver.ipc_export(address).hex()
        same = reader.ask("read", handle=handle, bytes=n)["xxh3"] == _checksum(content)
        if not same:
            raise ValueError("the other process read other bytes")
        return "another process read the same bytes"


def chunks_by_descriptor(bench: Bench) -> str:
    with open_device() as device, Child("tests.gpu.children.owner") as owner:
        size = owner.ask("chunks", bytes=2 * MIB, count=2)["bytes"]
        chunks = Chunks(device, owner, 2, size)
        first = device.read(chunks.address, 4 * KIB)
        chunks.close()
        return f"two chunks of {size // MIB} MiB mapped; first bytes {first[:4].tobytes().hex()}"


def huge_pages(bench: Bench) -> str:
    with HostMemory(4 * MIB, "huge") as memory:
        memory.populate()
    return "4 MiB of them"


def link(bench: Bench) -> str:
    if bench.fake:
        return "the fake driver has none"
    [gpu, *_] = gpus() or [{}]
    if not gpu:
        raise Unavailable("nvidia-smi says nothing")
    return ", ".join(f"{name} {gpu[name]}" for name in gpu if "link" in name or "numa" in name)


def torch_there(bench: Bench) -> str:
    return _package("torch")


def triton_there(bench: Bench) -> str:
    return _package("triton")


def _package(name: str) -> str:
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        raise ModuleNotFoundError(f"{name} is not installed")
    return str(Path(found.origin).parent)


def _checksum(content: object) -> int:
    from kvtier_kernels import xxh3_64

    return int(xxh3_64(content))  # type: ignore[arg-type]


def _readable(descriptor: int) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    if not poll.poll(WAIT_S * 1_000):
        raise TimeoutError(f"not readable after {WAIT_S} s")
