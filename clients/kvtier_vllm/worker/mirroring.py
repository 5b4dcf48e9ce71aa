"""Copies between the engine's blocks on a GPU and a mirror of them in host memory, which the daemon maps,
where the daemon cannot reach the GPU memory. One thread does it, in the order of the steps.

That order keeps bytes right although an engine reuses a block's id for other content:
- a store's doorbell rings when its blocks are in the mirror;
- a load's doorbell rings after every copy that was asked for before, so that none of them overwrites what the
  daemon then puts into the mirror; first its blocks get memory there, because the daemon takes none for them;
- a block's place in the mirror is emptied when nothing of it is in use, before its next use.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from kvtier import Client, Group

from kvtier_vllm.meta import LOAD_DOORBELL, STORE_DOORBELL
from kvtier_vllm.worker.gpu import EngineGpu
from kvtier_vllm.worker.parts import TrackedPart
from kvtier_vllm.worker.sharing import Landing, Sharing

if TYPE_CHECKING:
    from kvtier.cuda import DeviceMemory, MirrorMemory

JOBS_MAX = 4_096
"""The most copies that wait, fewer than there can be part words. Beyond it stores and loads fail."""


class _Job(ABC):
    """A job for the copying thread. It is run, or given up, or given up after its run has failed."""

    @abstractmethod
    def run(self) -> None: ...

    @abstractmethod
    def give_up(self) -> None: ...


def _wanted(parts: Iterable[TrackedPart]) -> list[int]:
    """The blocks of parts that are not over, each once."""
    return list(dict.fromkeys(block for part in parts if not part.state().over for block in part.block_ids))


class _LetLoad(_Job):
    def __init__(self, memory: MirrorMemory, client: Client, step: int, parts: Sequence[TrackedPart]) -> None:
        self._memory = memory
        self._client, self._step, self._parts = client, step, parts

    def run(self) -> None:
        ids = _wanted(self._parts)
        if ids:
            self._memory.populate(ids)
        self._client.ring(LOAD_DOORBELL, self._step)

    def give_up(self) -> None:
        for part in self._parts:
            part.revoke()


class _CopyOut(_Job):
    def __init__(
        self,
        memory: MirrorMemory,
        computed: Callable[[], None],
        client: Client,
        step: int,
        parts: Sequence[TrackedPart],
    ) -> None:
        self._memory, self._computed = memory, computed
        self._client, self._step, self._parts = client, step, parts

    def run(self) -> None:
        self._computed()
        ids = _wanted(self._parts)
        if ids:
            self._memory.copy_out(ids)
        self._client.ring(STORE_DOORBELL, self._step)

    def give_up(self) -> None:
        # The doorbell of a later step releases all parts before it, so what is not in the mirror must never
        # start.
        for part in self._parts:
            part.revoke()


class _CopyIn(_Job):
    def __init__(self, memory: MirrorMemory, ready: Callable[[], None], part: TrackedPart) -> None:
        self._memory, self._ready, self._part = memory, ready, part
        self.landing = Landing.PENDING

    def run(self) -> None:
        self._ready()
        self._memory.copy_in(self._part.block_ids, discard=False)
        self.landing = Landing.DONE

    def give_up(self) -> None:
        self.landing = Landing.FAILED


class _Unused(_Job):
    """Blocks whose place in the mirror is to be emptied. It is one job for all, submitted as often as needed:
    what it finds when it runs is used by nobody, or only by jobs that come after it."""

    def __init__(self, memory: MirrorMemory) -> None:
        self._memory = memory
        self._lock = threading.Lock()
        self._blocks: set[int] = set()
        self._waiting = False

    def add(self, block_ids: Iterable[int]) -> bool:
        """Adds blocks. Returns whether the job must be submitted."""
        with self._lock:
            self._blocks.update(block_ids)
            submit = bool(self._blocks) and not self._waiting
            self._waiting |= submit
            return submit

    def remove(self, block_ids: Iterable[int]) -> None:
        """Removes blocks that are used again."""
        with self._lock:
            self._blocks.difference_update(block_ids)

    def run(self) -> None:
        with self._lock:
            block_ids, self._blocks, self._waiting = list(self._blocks), set(), False
        if block_ids:
            self._memory.discard(block_ids)

    def give_up(self) -> None:
        """Leaves the blocks until others are added."""
        with self._lock:
            self._waiting = False


class _Copier:
    """One thread that takes jobs in their order. At most `jobs_max` of them wait."""

    def __init__(self, jobs_max: int, log: logging.Logger) -> None:
        self._jobs_max = jobs_max
        self._log = log
        self._changed = threading.Condition()
        self._jobs: deque[_Job] = deque()
        self._busy = False
        self._closing = False
        self._paused = False
        self._told = False
        self._thread = threading.Thread(target=self._run, name="kvtier-mirror", daemon=True)
        self._thread.start()

    def submit(self, job: _Job) -> bool:
        """Adds a job, without waiting. Returns False if it was given up instead."""
        with self._changed:
            taken = not (self._paused or self._closing or len(self._jobs) >= self._jobs_max)
            if taken:
                self._jobs.append(job)
                self._changed.notify_all()
        if not taken:
            job.give_up()
        return taken

    def pause(self, timeout_s: float) -> bool:
        """Gives up all jobs from now on, and waits for the job that runs. False: it still ran after
        `timeout_s`."""
        with self._changed:
            self._paused = True
            return self._changed.wait_for(lambda: not self._busy and not self._jobs, timeout_s)

    def resume(self) -> None:
        """Ends a pause."""
        with self._changed:
            self._paused = False

    def close(self, timeout_s: float) -> bool:
        """Ends the thread and gives up what waits. False: it still runs after `timeout_s`."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (taken := self._take()) is not None:
            job, wanted = taken
            try:
                if wanted:
                    job.run()
                    continue
            except Exception as error:
                if not self._told:
                    self._told = True
                    self._log.warning("kvtier: copying between the KV cache and its mirror failed: %s", error)
            job.give_up()

    def _take(self) -> tuple[_Job, bool] | None:
        with self._changed:
            self._busy = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._jobs or self._closing)
            if not self._jobs:
                return None
            self._busy = True
            return self._jobs.popleft(), not (self._paused or self._closing)


class MirrorSharing(Sharing):
    """Shares a KV cache through a mirror in host memory, which costs the engine a copy, and memory for the
    blocks that are being copied. The module says how."""

    def __init__(
        self,
        memory: DeviceMemory,
        group: Group,
        gpu: EngineGpu,
        log: logging.Logger,
        jobs_max: int = JOBS_MAX,
    ) -> None:
        """`group` covers the blocks of all groups. Raises KvtierError without memory for the mirror."""
        from kvtier.cuda import MirrorMemory

        self.client_memory = self._memory = MirrorMemory(memory, (group,))
        self._gpu = gpu
        self._users: Counter[int] = Counter()
        """For each block, how many parts were released and are not over."""
        self._let_go: set[TrackedPart] = set()
        self._unused = _Unused(self._memory)
        self._ready: dict[TrackedPart, Callable[[], None]] = {}
        """For each load's part, a function that waits until the engine no longer writes its blocks."""
        self._landings: dict[TrackedPart, _CopyIn] = {}
        self._copier = _Copier(jobs_max, log)

    def let_load(self, client: Client, step: int, parts: Sequence[TrackedPart]) -> None:
        """Lets the step's loads start, before the forward pass. The mirror may be written at once, the
        engine's blocks only after what was enqueued until now."""
        self._ready.update(dict.fromkeys(parts, self._mark()))
        self._use(parts)
        self._copier.submit(_LetLoad(self._memory, client, step, parts))

    def let_store(self, client: Client, step: int, parts: Sequence[TrackedPart]) -> None:
        """Lets the step's stores start, after the forward pass, once their blocks are in the mirror."""
        computed = self._mark()
        self._use(parts)
        self._copier.submit(_CopyOut(self._memory, computed, client, step, parts))

    def landing(self, part: TrackedPart) -> Landing:
        """Copies a load's blocks from the mirror, and returns whether they have landed."""
        if part not in self._ready:
            return Landing.FAILED  # nobody released it: whatever it loaded, the engine has not got it
        job = self._landings.get(part)
        if job is None:
            job = self._landings[part] = _CopyIn(self._memory, self._ready[part], part)
            self._copier.submit(job)
        return job.landing

    def over(self, part: TrackedPart) -> None:
        """Forgets a part, and empties the places in the mirror that no other part uses."""
        if part not in self._let_go:
            return
        self._let_go.remove(part)
        self._ready.pop(part, None)
        self._landings.pop(part, None)
        self._users.subtract(part.block_ids)
        unused = [block for block in part.block_ids if not self._users[block]]
        for block in unused:
            del self._users[block]
        if self._unused.add(unused):
            self._copier.submit(self._unused)

    def sleep(self, client: Client | None, timeout_s: float) -> bool:
        """Pauses copies to and from the engine's memory. The daemon knows only the mirror, and keeps it."""
        return self._copier.pause(timeout_s)

    def wake(self, client: Client | None, timeout_s: float) -> bool:
        self._copier.resume()
        return True

    def close(self, timeout_s: float) -> bool:
        if not self._copier.close(timeout_s):
            return False
        self._memory.close()
        return True

    def _mark(self) -> Callable[[], None]:
        """Marks the stream as EngineGpu.mark does. The wait must run with the GPU's context current: in a
        thread without one, CUDA's runtime makes another, on the first GPU of the process; and a wait outside
        of it would spoil a graph that the engine is capturing."""
        wait, memory = self._gpu.mark(), self._memory

        def wait_in_context() -> None:
            with memory.context:
                wait()

        return wait_in_context

    def _use(self, parts: Sequence[TrackedPart]) -> None:
        for part in parts:
            self._let_go.add(part)
            self._users.update(part.block_ids)
            self._unused.remove(part.block_ids)
