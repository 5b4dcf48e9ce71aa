"""The system's description of memory nodes is understood, and what it leaves out does no harm."""

import mmap
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from kvtierd.memory import numa


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """/sys of a machine with two nodes and three GPUs."""
    for node, processors in ((0, "0-1,4"), (1, "2-3\n"), (10, "")):
        folder = tmp_path / "nodes" / f"node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(processors)
    for gpu, name in (("0000:3b:00.0", "1\n"), ("0000:4b:00.0", "-1\n"), ("0000:5b:00.0", "?")):
        folder = tmp_path / "pci" / gpu
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(name)
    monkeypatch.setattr(numa, "NODES", tmp_path / "nodes")
    monkeypatch.setattr(numa, "PCI_DEVICES", tmp_path / "pci")
    return tmp_path


def test_the_node_of_a_gpu(system: Path) -> None:
    assert numa.node_of_gpu("0000:3b:00.0") == 1
    for unknown in ("0000:4b:00.0", "0000:5b:00.0", "0000:6b:00.0"):
        assert numa.node_of_gpu(unknown) is None


def test_nodes_and_their_processors(system: Path) -> None:
    assert numa.nodes() == [0, 1, 10]
    assert numa.processors_of(0) == {0, 1, 4}
    assert numa.processors_of(1) == {2, 3}
    assert numa.processors_of(10) == numa.processors_of(11) == set()


def test_a_thread_stays_on_a_nodes_processors_as_far_as_it_may(system: Path) -> None:
    mine = os.sched_getaffinity(0)
    (system / "nodes/node0/cpulist").write_text(f"{min(mine)}")
    (system / "nodes/node1/cpulist").write_text(f"{max(mine) + 1}")
    seen: dict[int | None, set[int]] = {}

    def stay() -> None:
        for node in (None, 1, 7, 0):
            numa.stay_near(node)
            seen[node] = os.sched_getaffinity(0)

    thread = threading.Thread(target=stay)
    thread.start()
    thread.join()
    assert seen == {None: mine, 1: mine, 7: mine, 0: {min(mine)}}
    assert os.sched_getaffinity(0) == mine


def test_where_pages_lie() -> None:
    memory = mmap.mmap(-1, 3 * mmap.PAGESIZE)
    address = np.frombuffer(memory, np.uint8).ctypes.data
    memory[0] = 1
    touched, untouched = numa.nodes_of_pages([address, address + mmap.PAGESIZE])
    assert untouched is None
    assert touched is None or touched in numa.nodes()
    assert numa.nodes_of_pages([]) == []
