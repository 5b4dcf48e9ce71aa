"""How a worker's KV cache is shared with the daemon: what its client registers, and what is done around
copies.

Three ways: host memory, which the daemon maps; a GPU's memory, which its copy worker imports; and, for memory
that cannot be exported, a mirror in host memory (`mirroring`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING

from kvtier import Client
from kvtier.memory import Memory

from kvtier_vllm.meta import LOAD_DOORBELL, STORE_DOORBELL
from kvtier_vllm.worker.gpu import EngineGpu
from kvtier_vllm.worker.kv_memory import SharedKVMemory
from kvtier_vllm.worker.parts import TrackedPart

if TYPE_CHECKING:
    from kvtier.cuda import DeviceMemory


class Landing(Enum):
    """What has become of a load's bytes after its part was DONE."""

    PENDING = "pending"
    """On their way into the engine's memory."""
    DONE = "done"
    FAILED = "failed"
    """Nothing of it can still land."""


class Sharing(ABC):
    """Of one worker. Called from the thread that runs the model; no call waits unless it says so."""

    client_memory: Memory
    """What the client registers."""

    @abstractmethod
    def let_load(self, client: Client, step: int, parts: Sequence[TrackedPart]) -> None:
        """Before the forward pass: the step's loads may start, once what was enqueued before has run."""

    @abstractmethod
    def let_store(self, client: Client, step: int, parts: Sequence[TrackedPart]) -> None:
        """After the forward pass: the step's stores may start, once what was enqueued before has run."""

    def landing(self, part: TrackedPart) -> Landing:
        """Of a load whose part is DONE; asked until it is over."""
        return Landing.DONE

    def over(self, part: TrackedPart) -> None:
        """Nobody asks for this part any more, which is fenced. Once for every part that was let go."""
        return None

    def sleep(self, client: Client | None, timeout_s: float) -> bool:
        """The engine takes its memory back: no copy touches it from now on, until `wake`. Waits for copies
        that run. False: they still did at the deadline."""
        return client is None or client.release_memory(timeout_s)

    def wake(self, client: Client | None, timeout_s: float) -> bool:
        """The engine's memory is there again, at the same addresses. False: the client still has not given
        back what it had before, and is of no use any more."""
        if client is None:
            return True
        if not client.release_memory(timeout_s):
            return False
        client.register_memory(self.client_memory)
        return True

    def close(self, timeout_s: float) -> bool:
        """Gives back what is ours, after the clients were closed. False: a copy of ours still ran at the
        deadline."""
        return True


class HostSharing(Sharing):
    """The daemon maps the memory in which the engine keeps its KV cache."""

    def __init__(self, memory: SharedKVMemory) -> None:
        self.client_memory = memory

    def let_load(self, client: Client, step: int, parts: Sequence[TrackedPart]) -> None:
        """See Sharing."""
        client.ring(LOAD_DOORBELL, step)

    def let_store(self, client: Client, step: int, parts: Sequence[TrackedPart]) -> None:
        """See Sharing."""
        client.ring(STORE_DOORBELL, step)


class GpuSharing(Sharing):
    """The daemon's copy worker imports the engine's GPU memory. The engine's stream itself rings, so neither
    side's processor waits for the other."""

    def __init__(self, memory: DeviceMemory, gpu: EngineGpu) -> None:
        self.client_memory = memory
        self._gpu = gpu

    def let_load(self, client: Client, step: int, parts: Sequence[TrackedPart]) -> None:
        """See Sharing. What was enqueued before may still write to the blocks: zeroing, for one."""
        client.ring_on(self._gpu.stream(), LOAD_DOORBELL, step)

    def let_store(self, client: Client, step: int, parts: Sequence[TrackedPart]) -> None:
        """See Sharing."""
        client.ring_on(self._gpu.stream(), STORE_DOORBELL, step)
