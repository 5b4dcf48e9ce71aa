"""Engines' memory is never the daemon's: what an engine gives back to the system, or has not allocated yet,
costs it failed transfers, and costs nobody else anything."""

import mmap
import os
from pathlib import Path

import pytest
from kvtier.v1 import types_pb2

from tests.integration.daemon.conftest import Connect, Start
from tests.integration.daemon.raw import RawSession, hashes, memfd
from tests.support.process import Daemon

DONE, FAILED = types_pb2.TRANSFER_STATE_DONE, types_pb2.TRANSFER_STATE_FAILED
BLOCKS, BLOCK_BYTES = 24, 512 << 10
"""Three chunks."""


class Engine:
    """A session and its memory."""

    def __init__(self, connect: Connect, name: str, *, sparse: bool = False) -> None:
        self.session: RawSession = connect(fragments=(BLOCK_BYTES,), num_blocks=BLOCKS)
        self.session.attach(instance=name)
        self.session.register_words()
        fd = memfd(BLOCKS * BLOCK_BYTES, sparse=sparse)
        self.fd = os.dup(fd)
        self.session.register_memory(fd, sparse=sparse)

    def allocated(self) -> int:
        return os.fstat(self.fd).st_blocks * 512

    def of_worker(self) -> int:
        """Bytes of clients' memory that the copy worker has in its page tables."""
        found, ours = 0, False
        for line in Path(f"/proc/{self.session.worker_pid}/smaps").read_text().splitlines():
            if "-" in line.split()[0]:
                ours = line.endswith("/memfd:kvtier-test-client (deleted)")
            elif ours and line.startswith("Rss:"):
                found += int(line.split()[1]) * 1024
        return found

    def punch(self, first: int, count: int) -> None:
        """Gives the memory of blocks back to the system."""
        with mmap.mmap(self.fd, BLOCKS * BLOCK_BYTES) as mapping:
            mapping.madvise(mmap.MADV_REMOVE, first * BLOCK_BYTES, count * BLOCK_BYTES)


@pytest.fixture
def daemon(start: Start) -> Daemon:
    daemon = start()
    daemon.may_complain = True  # of the parts that fail
    return daemon


@pytest.fixture
def small(connect: Connect, daemon: Daemon) -> Engine:
    return Engine(connect, "small")


def test_memory_that_is_given_back_costs_failed_transfers_and_no_memory(
    daemon: Daemon, connect: Connect, small: Engine
) -> None:
    engine, blocks = Engine(connect, "large"), range(BLOCKS)
    engine.session.fill(1)
    assert engine.session.store(hashes(BLOCKS, 1), blocks).state == DONE
    kept = engine.session.block(3)
    engine.punch(0, BLOCKS)
    of_worker = engine.of_worker()
    assert engine.session.store(hashes(BLOCKS, 2), blocks).state == FAILED
    assert engine.session.load(hashes(BLOCKS, 1), blocks).state == FAILED
    assert engine.allocated() == 0
    assert engine.of_worker() <= of_worker
    assert engine.session.lookup(hashes(BLOCKS, 2)).answers[0].hits == 0
    # Another engine goes on, on the same worker, and so does this one with memory that it has.
    assert small.session.worker_pid == engine.session.worker_pid
    assert small.session.load(hashes(BLOCKS, 1), blocks).state == DONE
    assert small.session.block(3) == kept
    engine.session.memory[3 * BLOCK_BYTES : 5 * BLOCK_BYTES] = 0
    assert engine.session.load(hashes(BLOCKS, 1)[3 * 32 : 4 * 32], [3]).state == DONE
    assert engine.session.block(3) == kept
    assert engine.allocated() == 2 * BLOCK_BYTES


def test_sparse_memory_is_copied_where_its_owner_has_allocated_it(daemon: Daemon, connect: Connect) -> None:
    engine = Engine(connect, "sparse", sparse=True)
    assert engine.session.store(hashes(2, 3), [0, 1]).state == FAILED
    assert engine.allocated() == 0
    engine.session.memory[: 2 * BLOCK_BYTES] = 7
    assert engine.session.store(hashes(2, 3), [0, 1]).state == DONE
    assert engine.session.load(hashes(2, 3), [1, 2]).state == FAILED
    assert engine.allocated() == 2 * BLOCK_BYTES
