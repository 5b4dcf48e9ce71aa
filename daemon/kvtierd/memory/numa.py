"""Which memory and which processors are near a GPU. All of it is best effort: where the system does not say,
functions return None or do nothing."""

import ctypes
import os
import platform
from collections.abc import Sequence
from pathlib import Path

PCI_DEVICES = Path("/sys/bus/pci/devices")
NODES = Path("/sys/devices/system/node")

_MOVE_PAGES = {"x86_64": 279, "aarch64": 239}
"""Number of the system call. libnuma, which has a function for it, may not be installed."""


def nodes() -> list[int]:
    """The machine's memory nodes."""
    return sorted(int(path.name[4:]) for path in NODES.glob("node[0-9]*"))


def node_of_gpu(pci_bus_id: str) -> int | None:
    """The node that a GPU's link belongs to."""
    try:
        node = int((PCI_DEVICES / pci_bus_id / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def processors_of(node: int) -> set[int]:
    """Processors of a node; empty if that is not known."""
    try:
        text = (NODES / f"node{node}" / "cpulist").read_text().strip()
        processors: set[int] = set()
        for part in filter(None, text.split(",")):
            first, _, last = part.partition("-")
            processors.update(range(int(first), int(last or first) + 1))
    except (OSError, ValueError):
        return set()
    return processors


def stay_near(node: int | None) -> None:
    """Keeps the calling thread on a node's processors, as far as it may use them."""
    if node is None:
        return
    try:
        near = processors_of(node) & os.sched_getaffinity(0)
        if near:
            os.sched_setaffinity(0, near)
    except OSError:
        pass


def nodes_of_pages(addresses: Sequence[int]) -> list[int | None]:
    """The node that each page lies on; None for a page that this process has not mapped yet."""
    number = _MOVE_PAGES.get(platform.machine())
    count = len(addresses)
    unknown: list[int | None] = [None] * count
    if number is None or count == 0:
        return unknown
    pages = (ctypes.c_void_p * count)(*addresses)
    found = (ctypes.c_int * count)()
    # Without target nodes, move_pages(2) moves nothing and says where each page is.
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    code = syscall(
        ctypes.c_long(number), ctypes.c_int(0), ctypes.c_ulong(count), pages, None, found, ctypes.c_int(0)
    )
    if code != 0:
        return unknown
    return [node if node >= 0 else None for node in found]
