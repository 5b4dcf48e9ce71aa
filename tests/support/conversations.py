"""Conversations that share beginnings and grow, over a cache that cannot hold them all at once: what they ask
for, how much of it could be found again, and a client that asks like an engine."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
from kvtier import Client, Group, Lookup, Namespace, Plane, SharedBuffer

PENDING_WAIT_S = 60.0
"""How long to wait for what is on its way from a disk, however slow the machine is."""
POLL_S = 0.005
READY_S = 60.0
BLOCK_TOKENS = 32
BLOCK_BYTES = 32 << 10
NAMESPACE = Namespace(model="tests/talk", kv_dtype="uint8", hash_scheme="tests:name", hash_bytes=32)


@dataclass(frozen=True)
class Shape:
    """The shape of a workload, in blocks."""

    conversations: int = 12
    shared: int = 4
    """How many blocks all conversations begin with."""
    grows: tuple[int, int] = (1, 6)
    """How many blocks a turn adds, at least and at most."""
    longest: int = 40
    """The longest conversation. One that would grow beyond it is over, and another takes its place."""
    zipf: float = 1.0
    """The n-th conversation is chosen n ** -zipf times as often as the first."""


@dataclass
class Conversations:
    """One seeded workload, turn by turn."""

    shape: Shape
    seed: int
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def turns(self, count: int) -> Iterator[list[str]]:
        """Yields the names of all blocks of each turn, from the first block on."""
        shape, rng = self.shape, self._random
        weights = [(number + 1) ** -shape.zipf for number in range(shape.conversations)]
        lengths = [0] * shape.conversations
        generation = [0] * shape.conversations
        for _ in range(count):
            [chosen] = rng.choices(range(shape.conversations), weights)
            lengths[chosen] += rng.randint(*shape.grows)
            if shape.shared + lengths[chosen] > shape.longest:
                generation[chosen] += 1
                lengths[chosen] = rng.randint(*shape.grows)
            name = f"{self.seed}:{chosen}:{generation[chosen]}"
            own = [f"{name}:{number}" for number in range(lengths[chosen])]
            yield [f"{self.seed}:shared:{number}" for number in range(shape.shared)] + own


@dataclass
class Tally:
    """What was found, and what could have been found."""

    possible: int = 0
    found: int = 0
    turns: int = 0
    losses: list[tuple[int, int, int]] = field(default_factory=list)
    """The turns that found less: their number, what they found, and what there was."""
    stored: set[bytes] = field(default_factory=set)
    """The blocks whose store has succeeded, all of which must be found again."""

    def asks(self, hashes: Sequence[bytes]) -> int:
        """Returns how many blocks, from the first on, could be found."""
        return next((n for n, one in enumerate(hashes) if one not in self.stored), len(hashes))

    def count(self, possible: int, found: int) -> None:
        """Counts a turn that could find `possible` blocks and has found `found`."""
        self.possible += possible
        self.found += found
        if found < possible:
            self.losses.append((self.turns, found, possible))
        self.turns += 1

    @property
    def share(self) -> float:
        """The share that was found of what could be found."""
        return self.found / self.possible if self.possible else 1.0


def hash_of(name: str) -> bytes:
    """Returns the hash of the block with this name."""
    return hashlib.sha256(name.encode()).digest()


def _content(value: bytes) -> npt.NDArray[np.uint8]:
    return np.frombuffer(value * (BLOCK_BYTES // len(value)), np.uint8)


class Talker:
    """A client with a cache for one request, which it empties after each, so that everything comes from the
    daemon. It loads, computes, stores and touches as the connector does, and compares every byte."""

    def __init__(self, socket: Path, instance: str, blocks: int, chunk: int = 16) -> None:
        """`blocks` is the size of the longest request; `chunk` is how many blocks are computed, and stored,
        in one step."""
        self.tally = Tally()
        self._chunk = chunk
        self._memory = SharedBuffer.create(blocks * BLOCK_BYTES)
        self._cache = self._memory.array.reshape(blocks, BLOCK_BYTES)
        plane = Plane(
            fragment_bytes=BLOCK_BYTES, base_offset=0, block_stride_bytes=BLOCK_BYTES, description="all"
        )
        self.client = Client(
            instance=instance,
            namespace=NAMESPACE,
            groups=[Group(block_tokens=BLOCK_TOKENS, num_blocks=blocks, planes=(plane,))],
            memory=self._memory,
            socket=socket,
            program="tests",
        )
        assert self.client.wait_ready(READY_S), self.client.status

    def turn(self, names: Sequence[str]) -> None:
        """Makes one request. Its last block is computed in any case."""
        hashes = [hash_of(name) for name in names]
        possible = self.tally.asks(hashes[:-1])
        found = 0
        self._cache[:] = 0
        while found < len(hashes) - 1 and (more := self._load(hashes[:-1], found)):
            found += more
        self.tally.count(possible, found)
        for first in range(found, len(hashes), self._chunk):
            self._store(hashes[first : first + self._chunk], first)
        self.client.touch(hashes)

    def _load(self, hashes: Sequence[bytes], first: int) -> int:
        """Loads what can be loaded, after waiting for what is on its way. Returns how many blocks
        that was."""
        deadline_s = time.monotonic() + PENDING_WAIT_S
        while True:
            answer = self._lookup(hashes[first:])
            come = not answer.pending or bool(answer.hits and answer.unleased)
            if come or time.monotonic() > deadline_s:
                break
            answer.release()
            time.sleep(POLL_S)
        with answer:
            if not answer.hits:
                return 0
            outcome = self.client.load(answer, range(first, first + answer.hits)).wait(READY_S)
        assert outcome.done, outcome
        for index in range(first, first + answer.hits):
            assert (self._cache[index] == _content(hashes[index])).all(), f"block {index} has wrong bytes"
        return answer.hits

    def _lookup(self, hashes: Sequence[bytes]) -> Lookup:
        answer = self.client.lookup(hashes, lease=True, timeout_s=READY_S)
        assert answer.answered
        return answer

    def _store(self, hashes: Sequence[bytes], first: int) -> None:
        for index, value in enumerate(hashes):
            self._cache[first + index] = _content(value)
        transfer = self.client.store(hashes, range(first, first + len(hashes)))
        outcome = transfer.wait(READY_S)
        for index, value in enumerate(hashes):
            if outcome.succeeded[index]:
                self.tally.stored.add(value)

    def close(self) -> None:
        """Ends the session, and gives the memory back."""
        self.client.close()
        self._cache = np.zeros((0, 0), np.uint8)
        self._memory.close()
