"""How a worker's KV cache is shared with the daemon: what its client registers, and what is done around
copies.

There are three ways: host memory, which the daemon maps; a GPU's memory, which its copy worker imports; and,
for memory that cannot be exported, a mirror in host memory (`mirroring`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING

from kvtier import Client, KvtierError, Reason
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
    """They are on their way into the engine's memory."""
    DONE = "done"
    FAILED = "failed"
    """They have not landed, and never will."""


class Sharing(ABC):
    """One way of sharing, for one worker. Called from the thread that runs the model; calls wait only if they
    say so."""

    client_memory: Memory
    """The memory that the client registers."""

    @abstractmethod
    def let_load(self, client: Client, step: int, parts: Sequence[TrackedPart]) -> None:
        """Lets the step's loads start, before the forward pass, once what was enqueued before has run."""

    @abstractmethod
    def let_store(self, client: Client, step: int, parts: Sequence[TrackedPart]) -> None:
        """Lets the step's stores start, after the forward pass, once what was enqueued before has run."""

    def landing(self, part: TrackedPart) -> Landing:
        """Returns whether the bytes of a load whose part is DONE have landed. Asked until that is known."""
        return Landing.DONE

    def over(self, part: TrackedPart) -> None:
        """Forgets a part, which is fenced. Called once for every part that was released."""
        return None

    def sleep(self, client: Client | None, timeout_s: float) -> bool:
        """Takes the engine's memory back: no copy touches it from now on, until `wake`. Waits for copies that
        run. Returns False if they still ran after `timeout_s` seconds."""
        return client is None or client.release_memory(timeout_s)

    def wake(self, client: Client | None, timeout_s: float) -> bool:
        """Registers the engine's memory, which is there again at the same addresses. Returns False if the
        client still has not given back what it had before, and is of no use any more."""
        if client is None:
            return True
        if not client.release_memory(timeout_s):
            return False
        client.register_memory(self.client_memory)
        return True

    def otherwise(self, error: KvtierError) -> Sharing | None:
        """Returns another way of sharing, because the daemon could not use this one; None if there is
        none."""
        return None

    def close(self, timeout_s: float) -> bool:
        """Gives back what is ours, after the clients were closed. Returns False if a copy of ours still ran
        after `timeout_s` seconds."""
        return True


class HostSharing(Sharing):
    """Shares host memory: the daemon maps the memory in which the engine keeps its KV cache."""

    def __init__(self, memory: SharedKVMemory) -> None:
        self.client_memory = memory

    def let_load(self, client: Client, step: int, parts: Sequence[TrackedPart]) -> None:
        client.ring(LOAD_DOORBELL, step)

    def let_store(self, client: Client, step: int, parts: Sequence[TrackedPart]) -> None:
        client.ring(STORE_DOORBELL, step)


class GpuSharing(Sharing):
    """Shares a GPU's memory: the daemon's copy worker imports it. The engine's stream itself rings, so
    neither side's processor waits for the other."""

    def __init__(
        self, memory: DeviceMemory, gpu: EngineGpu, make_mirror: Callable[[KvtierError], Sharing | None]
    ) -> None:
        """`make_mirror(error)` is called if the driver does not let the daemon open the memory. It returns
        None if there is to be no mirror."""
        self.client_memory = memory
        self._gpu = gpu
        self._make_mirror = make_mirror
        self._refused = False

    def let_load(self, client: Client, step: int, parts: Sequence[TrackedPart]) -> None:
        """Has the stream ring the load doorbell, because what was enqueued before may still write to the
        blocks, such as zeroing."""
        client.ring_on(self._gpu.stream(), LOAD_DOORBELL, step)

    def let_store(self, client: Client, step: int, parts: Sequence[TrackedPart]) -> None:
        client.ring_on(self._gpu.stream(), STORE_DOORBELL, step)

    def otherwise(self, error: KvtierError) -> Sharing | None:
        """See Sharing. Tried once: whoever cannot be mirrored now cannot be later."""
        if self._refused or error.reason is not Reason.IMPORT_REFUSED:
            return None
        self._refused = True
        return self._make_mirror(error)
