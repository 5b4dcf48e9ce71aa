"""Engine memory and copy workers: memory is mapped in the worker first, and then the core is told.

A session has only one request at a time here, because the side socket serves them one after another.
"""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtierd.core.errors import Reason, Refusal
from kvtierd.core.ids import NO_TENANT, RegistrationId, SessionId, TenantTag, WorkerId
from kvtierd.core.stimuli import RegisterMemory, RegisterWords, UnregisterMemory
from kvtierd.wire import worker_pb2 as wire
from kvtierd.workers.supervisor.handles import CPU
from kvtierd.workers.supervisor.supervisor import Supervisor

CHUNKS_MAX = 65_536
"""Chunks of one session: more than a terabyte in chunks of 20 MiB."""

RELEASE_DEADLINE_S = 60.0
"""Time for a worker to let go of a session. The supervisor kills a worker that takes too long earlier than
that."""


def _may_be_its_pid(refusal: Refusal) -> bool:
    """Whether a worker with another PID might be allowed to open what this one was not: drivers take a
    process of another PID namespace that has one's own PID for oneself, and refuse one's own handles."""
    return refusal.reason is Reason.IMPORT_REFUSED and refusal.value == "CUDA_ERROR_INVALID_CONTEXT"


@dataclass(slots=True)
class _Mapped:
    """What one session has mapped, and in which worker."""

    worker: WorkerId
    device: str
    registration: RegistrationId | None = None
    chunks: list[int] = field(default_factory=list)
    """Sizes in bytes of the chunks that were added and are not registered yet."""


class Mappings:
    """Knows which worker has mapped what, of which session."""

    def __init__(
        self,
        tell_core: Callable[[RegisterWords | RegisterMemory | UnregisterMemory], object],
        workers: Supervisor,
    ) -> None:
        """`tell_core` has the core handle what was mapped. It raises Refusal if the session is over."""
        self._tell_core = tell_core
        self._workers = workers
        self._mapped: dict[SessionId, _Mapped] = {}
        self._unowned: set[tuple[WorkerId, SessionId]] = set()
        self._releasing: dict[SessionId, tuple[WorkerId, asyncio.Future[None]]] = {}
        self._registrations = itertools.count(1)

    async def register_words(
        self,
        session: SessionId,
        device: str,
        fd: int,
        doorbells: int,
        parts: int,
        tenant: TenantTag = NO_TENANT,
    ) -> tuple[int, int]:
        """Has the device's worker map the session's shared words. The worker is started if there is none.
        `fd` stays the caller's. Raises Refusal.

        Returns the worker's pid, and a pidfd of it that the caller has to close.
        """
        if session in self._mapped:
            raise Refusal(Reason.ALREADY_REGISTERED, "words are registered once: unregister the memory first")
        worker = await self._workers.lives.worker_for(device)
        pid = self._workers.workers[worker].pid
        await self._workers.orders.map_words(worker, session, fd, doorbells, parts, tenant)
        try:
            self._tell_core(RegisterWords(session, worker, doorbells, parts))
        except Refusal:
            # The core does not know that this worker holds words of the session, so it will not release them.
            if worker in self._workers.workers:
                self._unowned.add((worker, session))
            self._workers.orders.release_session(worker, session)
            raise
        self._mapped[session] = _Mapped(worker, device)
        return pid, self._workers.pidfd_for(worker)

    def expected(self, session: SessionId) -> tuple[str, Sequence[int]]:
        """The device whose memory this session may register now, and the sizes of the chunks that it has
        added.

        Raises Refusal if the memory is registered already, or the words are not.
        """
        mapped = self._expected(session)
        return mapped.device, tuple(mapped.chunks)

    def _expected(self, session: SessionId) -> _Mapped:
        mapped = self._mapped.get(session)
        if mapped is None:
            raise Refusal(Reason.NOT_ATTACHED, "register the shared words before the memory")
        if mapped.registration is not None:
            raise Refusal(
                Reason.ALREADY_REGISTERED,
                "unregister the memory first, or attach again",
                field="registration_id",
                value=mapped.registration,
            )
        return mapped

    async def add_chunks(self, session: SessionId, fds: Sequence[int], sizes: Sequence[int]) -> int:
        """Has the GPU worker that holds the words import chunks of memory, which `register_memory` uses up.

        `sizes` are their bytes, parallel to `fds`, which stay the caller's. Returns how many chunks the
        session has added so far. Raises Refusal, and then none was added.
        """
        mapped = self._expected(session)
        if mapped.device == CPU:
            raise Refusal(
                Reason.DEVICE_MEMORY_INVALID,
                "chunks are memory of a GPU: name it in RegisterWords, or register a memfd",
                field="device",
                value=mapped.device,
            )
        if len(mapped.chunks) + len(sizes) > CHUNKS_MAX:
            raise Refusal(
                Reason.DEVICE_MEMORY_INVALID,
                f"a session adds at most {CHUNKS_MAX} chunks: allocate larger ones",
                field="bytes",
                value=len(mapped.chunks) + len(sizes),
            )
        await self._workers.orders.add_chunks(mapped.worker, session, fds, sizes)
        mapped.chunks += sizes
        return len(mapped.chunks)

    async def register_memory(
        self,
        session: SessionId,
        fd: int | None,
        mapping_bytes: int,
        groups: Sequence[wire.MappedGroup],
        ranges: Sequence[wire.DeviceRange] = (),
    ) -> RegistrationId:
        """Has the worker that holds the words map the memory of `fd`, or a GPU's `ranges`. `fd` stays the
        caller's. Raises Refusal, and then the chunks that were added are still there."""
        mapped = self._expected(session)
        registration = RegistrationId(next(self._registrations))
        try:
            await self._workers.orders.map_memory(
                mapped.worker, session, registration, fd, mapping_bytes, groups, ranges
            )
        except Refusal as refusal:
            if _may_be_its_pid(refusal) and self._workers.lives.renew(mapped.worker):
                raise Refusal(
                    Reason.WORKER_UNAVAILABLE,
                    "the driver does not let the copy worker open this memory; one with another PID is "
                    "tried: register again in a second",
                    field="worker",
                    value=mapped.worker,
                ) from refusal
            raise
        # If the session has ended meanwhile, the core refuses. The release of the words came after this
        # mapping on the worker's socket, and releases the memory with them.
        blocks = tuple(group.num_blocks for group in groups)
        self._tell_core(RegisterMemory(session, mapped.worker, registration, blocks, mapping_bytes))
        mapped.registration = registration
        mapped.chunks.clear()
        return registration

    async def unregister_memory(self, session: SessionId, registration: RegistrationId) -> None:
        """Returns when the memory and the words are unmapped, so that no copy can touch them any more. Raises
        Refusal."""
        mapped = self._mapped.get(session)
        if mapped is None or mapped.registration != registration:
            raise Refusal(
                Reason.NOT_ATTACHED,
                "no such memory is registered by this session",
                field="registration_id",
                value=registration,
            )
        released: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._releasing[session] = (mapped.worker, released)
        try:
            self._tell_core(UnregisterMemory(session))
            async with asyncio.timeout(RELEASE_DEADLINE_S):
                await released
        except TimeoutError:
            raise Refusal(
                Reason.DEADLINE,
                f"the copy worker has not let go in {RELEASE_DEADLINE_S:g} s: end the session",
            ) from None
        finally:
            self._releasing.pop(session, None)

    # --- what the façade reports ---

    def session_released(self, worker: WorkerId, session: SessionId) -> bool:
        """False if the core does not know about this release."""
        if (worker, session) in self._unowned:
            self._unowned.discard((worker, session))
            return False
        self._forget(worker, session)
        return True

    def session_ended(self, session: SessionId) -> None:
        self._mapped.pop(session, None)

    def worker_lost(self, worker: WorkerId) -> None:
        """What the worker had mapped must be registered again, with its successor."""
        for session in [session for session, mapped in self._mapped.items() if mapped.worker == worker]:
            del self._mapped[session]

    def worker_exited(self, worker: WorkerId) -> None:
        for session in [session for session, (its, _) in self._releasing.items() if its == worker]:
            self._forget(worker, session)
        self._unowned = {pair for pair in self._unowned if pair[0] != worker}

    def _forget(self, worker: WorkerId, session: SessionId) -> None:
        if (mapped := self._mapped.get(session)) is not None and mapped.worker == worker:
            del self._mapped[session]
        waiting = self._releasing.get(session)
        if waiting is not None and waiting[0] == worker and not waiting[1].done():
            waiting[1].set_result(None)
