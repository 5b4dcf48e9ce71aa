"""What a cache has to do to be measured: its server's side, and an engine's side.

Both sides of every peer are in one module, which imports the peer's own client only inside of functions: the
benchmark's process has none of them. An engine's side lives in a process of its own (`engine_child`), in the
peer's environment.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

BLOCK_TOKENS = 16
ELEMENT_BYTES = 2
DEADLINE_S = 60.0
"""For one call of a peer, which should take a small part of that."""


class PeerAbsent(Exception):
    """A peer cannot be measured here; the message is one line that says why."""


class PeerRefused(Exception):
    """A peer did not store, find or load what it was asked for; the message says what it answered."""


@dataclass(frozen=True)
class PeerShape:
    """How an engine's KV cache is laid out: `layers` tensors, each (kv, blocks, tokens, heads, head_size) of
    two-byte elements, or (blocks, tokens, head_size) if `kv` is 1."""

    name: str
    title: str
    layers: int
    kv: int
    heads: int
    head_size: int

    @property
    def planes(self) -> int:
        """Fragments that each block is made of."""
        return self.layers * self.kv

    @property
    def fragment_bytes(self) -> int:
        return BLOCK_TOKENS * self.heads * self.head_size * ELEMENT_BYTES

    @property
    def block_bytes(self) -> int:
        return self.planes * self.fragment_bytes

    def contiguous(self) -> PeerShape:
        """Returns the shape whose blocks have as many bytes in a single fragment."""
        elements = self.block_bytes // BLOCK_TOKENS // ELEMENT_BYTES
        return PeerShape(f"{self.name}_whole", f"{self.title}, contiguous", 1, 1, 1, elements)


MODELS = (
    PeerShape("1b", "1B", 16, 2, 8, 64),
    PeerShape("8b", "8B", 32, 2, 8, 128),
    PeerShape("70b", "70B, one rank of four", 80, 2, 2, 128),
    PeerShape("mla", "MLA", 61, 1, 1, 576),
)
"""Of a small Llama, a Llama of 8 and of 70 billion parameters (a rank of four), and of DeepSeek V3."""
SHAPES = tuple(shape for model in MODELS for shape in (model, model.contiguous()))
SMALL = PeerShape("small", "4 KiB", 1, 1, 1, 128)
"""Blocks of 4 KiB, the least that all peers can tell apart without waste, so that many fit the memory."""


@dataclass(frozen=True)
class Prompt:
    """The first `blocks` blocks of an endless prompt; prompts of one seed begin alike."""

    seed: int
    blocks: int


class PeerServer(ABC):
    """A peer's server, which runs from `__init__` to `stop`. Several engines may use one."""

    @property
    @abstractmethod
    def address(self) -> dict[str, Any]:
        """What an engine's side needs to find it, as JSON."""

    @property
    def prefix(self) -> list[str]:
        """What comes before the command of an engine's process, so that it can reach the server."""
        return []

    @abstractmethod
    def pids(self) -> list[int]:
        """Its processes, those that own memory included."""

    @abstractmethod
    def kill(self) -> None:
        """SIGKILL to the process that engines talk to; it is gone when this returns."""

    @abstractmethod
    def restart(self) -> None:
        """Starts it again after `kill` as a supervisor would; returns when it answers."""

    @abstractmethod
    def stop(self) -> None:
        """Ends all of it, and removes what it leaves behind."""


class PeerEngine(ABC):
    """An engine's side of a peer. One call at a time, in one process.

    `names` are what `names_of` has made: preparing them is not timed, because an engine has its hashes and
    token ids anyway.
    """

    memory: list[npt.NDArray[np.uint8]]
    """After `register`: for each plane the engine's KV cache, of shape (blocks, fragment bytes)."""

    def warm(self) -> None:  # noqa: B027  # most peers have nothing to import
        """Imports what `register` needs, so that forks of this process need not."""

    @abstractmethod
    def register(self, address: Mapping[str, Any], shape: PeerShape, blocks: int, instance: str) -> None:
        """Connects, and gives the cache a KV cache of `blocks` blocks, filled with nothing in particular.
        Engines of one shape share what they store. Raises PeerRefused."""

    @abstractmethod
    def names_of(self, prompt: Prompt) -> Any:
        """The prompt's blocks as the peer names them; for all calls below."""

    @abstractmethod
    def store(self, names: Any, block_ids: Sequence[int]) -> None:
        """Copies blocks into the cache; returns when the peer says that this is done. Raises PeerRefused."""

    @abstractmethod
    def lookup(self, names: Any) -> tuple[int, Any]:
        """Returns how many leading blocks are there, and they stay until `give_back` or `load`; and what
        these two need."""

    @abstractmethod
    def give_back(self, found: Any) -> None:
        """Ends the hold of a lookup as the peer's own connector does, which waits for no answer."""

    def settle(self) -> None:  # noqa: B027  # most peers have nothing to wait for
        """Waits for answers that `give_back` has not waited for. Not timed."""

    @abstractmethod
    def load(self, names: Any, found: Any, block_ids: Sequence[int]) -> None:
        """Copies what a lookup has found into the engine's blocks; returns when it is there. Raises
        PeerRefused."""

    def cancel(self, names: Any, found: Any, block_ids: Sequence[int]) -> str:
        """Begins a load, and takes it back at once; returns when the engine's blocks may be used again, and
        says by which call. A peer that has no such call waits for the load's end."""
        self.load(names, found, block_ids)
        return "it has no call for that: waits for the load"

    @abstractmethod
    def clear(self) -> None:
        """Makes the cache forget all blocks that nobody holds. Not timed."""

    @abstractmethod
    def held(self, names: Any) -> int:
        """How many blocks cannot be evicted because some engine holds them, as the peer itself tells; 0 if
        none. `names` are the blocks that are asked about, where it cannot be asked of all."""

    @abstractmethod
    def stats(self) -> dict[str, float]:
        """What the peer itself counts, by a name with its unit."""

    @abstractmethod
    def close(self) -> None:
        """Unregisters and disconnects; `register` may follow."""


@dataclass(frozen=True)
class Peer:
    """One peer, or one way to configure it, as the report shows it."""

    name: str
    """In names of figures: lower case, no spaces."""
    title: str
    how: str
    """How it is configured and why, one sentence."""
    engine: str
    """MODULE:CLASS of its PeerEngine, and `options` for it."""
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: Callable[[], dict[str, str]] = dict
    """Variables of the engines' processes on top of the usual."""
    server: str = ""
    """Peers with the same text share one server; "" for one that needs none."""
    granularity_blocks: int = 1
    """Blocks that it only finds together."""
    ours: bool = False


@dataclass(frozen=True)
class PlaceForServers:
    """Where servers put what they need while they run."""

    run: Path
    shm: Path
    pool_bytes: int
    """What each server may hold."""


def planes_of(flat: npt.NDArray[np.uint8], shape: PeerShape, blocks: int) -> list[npt.NDArray[np.uint8]]:
    """Views of memory in which plane follows plane."""
    whole = flat[: shape.planes * blocks * shape.fragment_bytes]
    return list(whole.reshape(shape.planes, blocks, shape.fragment_bytes))
