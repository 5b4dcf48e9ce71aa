"""What workers are told to do: each order is one packet, made and sent here.

Only orders to map memory and to persist all records wait for their answers; the supervisor reads these.
"""

import asyncio
import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtierd.core.actions import (
    CheckSlots,
    Direction,
    DiskJobKind,
    PostDiskJob,
    PostPart,
    UnwatchSpace,
    WatchSpace,
)
from kvtierd.core.errors import Reason, Refusal
from kvtierd.core.ids import NO_TENANT, PartId, RegistrationId, SessionId, Slots, TenantTag, WorkerId
from kvtierd.wire import worker_pb2 as wire
from kvtierd.workers.channel.packets import PACKET_BYTES_MAX
from kvtierd.workers.supervisor.handles import MappingRequest, WorkerHandle, WorkerProcessState, unavailable
from kvtierd.workers.supervisor.lifecycle import Lifecycle

GATE_DEADLINE_MS_MAX = 0xFFFF_FFFF
RECORDS_PER_PACKET = 32_768


class WorkerOrders:
    """Sends orders to workers, and notes in their handles what they have been given."""

    def __init__(self, lives: Lifecycle, release_deadline_s: float) -> None:
        """`lives` knows the workers. One that has not let go of a session after `release_deadline_s` is
        killed."""
        self._lives = lives
        self._release_deadline_s = release_deadline_s
        self._request_ids = itertools.count(1)

    def post(self, action: PostPart, generations: npt.NDArray[np.uint64], gate_deadline_ms: int) -> None:
        """Sends a part to its worker. PartFinished follows, or the worker's end. Never blocks.

        Does nothing for a worker that is not live: WorkerLost has been reported, or is about to be. A worker
        whose queue is full is lost. Raises ValueError if the arrays are not parallel or too long, and then
        nothing was posted.
        """
        packet = post_part_packet(action, generations, gate_deadline_ms)
        if len(packet) > PACKET_BYTES_MAX:
            raise ValueError(
                f"part {action.part} of {len(action.block_ids)} blocks is too large for one packet"
            )
        handle = self._lives.workers.get(action.worker)
        if handle is not None and self._send(handle, packet):
            handle.parts[action.part] = action.direction

    def check_slots(self, action: CheckSlots, generations: npt.NDArray[np.uint64]) -> None:
        """Has a worker compare slots with their checksums. SlotsChecked follows, or the worker's end. Workers
        that are not live are treated as in `post`."""
        handle = self._lives.workers.get(action.worker)
        if handle is not None:
            self._send(handle, check_slots_packet(action, generations))

    def post_disk_job(
        self,
        action: PostDiskJob,
        disk_generations: npt.NDArray[np.uint64],
        host_generations: npt.NDArray[np.uint64],
    ) -> None:
        """Sends a job to a disk's worker. DiskJobFinished follows, or the worker's end, but for an ADOPT of
        nothing. Errors, and workers that are not live, are treated as in `post`."""
        packet = disk_job_packet(action, disk_generations, host_generations)
        if len(packet) > PACKET_BYTES_MAX:
            raise ValueError(
                f"disk job {action.job} of {len(action.disk_slots)} slots is too large for one packet"
            )
        handle = self._lives.workers.get(action.worker)
        is_answered = action.kind is not DiskJobKind.ADOPT or len(action.disk_slots) > 0
        if handle is not None and self._send(handle, packet) and is_answered:
            handle.jobs.add(action.job)

    def watch_space(self, action: WatchSpace | UnwatchSpace) -> None:
        """Tells a store's worker what to look for. Workers that are not live are treated as in `post`."""
        handle = self._lives.workers.get(action.worker)
        if handle is not None:
            self._send(handle, watch_space_packet(action))

    def persist_records(self, device: str, slots: Slots) -> None:
        """Has a disk's worker write the records of these slots to its file, as they are in the image. Does
        nothing if it has no live worker."""
        handle = self._lives.devices.worker(device)
        if handle is not None:
            for first in range(0, len(slots), RECORDS_PER_PACKET):
                part = slots[first : first + RECORDS_PER_PACKET]
                self._send(handle, persist_records_packet(part))

    async def persist_all(self, device: str) -> str:
        """Has a disk's worker write all records to its file, as they are in the image. Returns "" once they
        are there, or why they are not: there is no live worker, it was lost, or the disk failed. Waits as
        long as the worker takes."""
        handle, request = self._lives.devices.worker(device), next(self._request_ids)
        if handle is None or handle.state is not WorkerProcessState.LIVE:
            return "it has no worker just now"
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        handle.persisting[request] = answer
        try:
            packet = wire.ToWorker(persist_all=wire.PersistAll(request=request)).SerializeToString()
            if not self._send(handle, packet):
                return f"its worker was lost: {handle.why}"
            return await answer
        finally:
            handle.persisting.pop(request, None)

    def revoke(self, worker: WorkerId, part: PartId) -> None:
        """Ends a part that has not started. PartFinished follows in both cases. Workers that are not live are
        treated as in `post`."""
        handle = self._lives.workers.get(worker)
        if handle is not None:
            packet = wire.ToWorker(revoke_part=wire.RevokePart(part=part)).SerializeToString()
            self._send(handle, packet)

    def release_session(self, worker: WorkerId, session: SessionId) -> None:
        """Fences and unmaps everything that the worker holds of a session. SessionReleased follows, even if
        it held nothing. Workers that are not live are treated as in `post`."""
        handle = self._lives.workers.get(worker)
        packet = wire.ToWorker(release_session=wire.ReleaseSession(session=session)).SerializeToString()
        if handle is not None and self._send(handle, packet):
            handle.releases.setdefault(session, []).append(self._lives.watch.now_s + self._release_deadline_s)

    async def map_words(
        self,
        worker: WorkerId,
        session: SessionId,
        fd: int,
        doorbells: int,
        parts: int,
        tenant: TenantTag = NO_TENANT,
    ) -> None:
        """Has the worker map a session's shared words: first `doorbells` words, then `parts` words. Sessions
        of one tenant share what it gets of the worker's time.

        The descriptor stays the caller's. Raises Refusal if the worker refuses or is lost; a worker that does
        not answer in time is lost. If the caller is cancelled, the session's mappings are released.
        """
        request = next(self._request_ids)
        words = wire.MapWords(
            request=request, session=session, doorbells=doorbells, parts=parts, tenant=tenant
        )
        packet = wire.ToWorker(map_words=words).SerializeToString()
        await self._map(worker, session, request, [fd], packet)

    async def add_chunks(
        self, worker: WorkerId, session: SessionId, fds: Sequence[int], sizes: Sequence[int]
    ) -> None:
        """Has a GPU's worker import chunks of physical memory, which the session's next `map_memory` uses up.

        `sizes` are their bytes, parallel to `fds`. Errors and cancellation are as in `map_words`.
        """
        request = next(self._request_ids)
        packet = add_chunks_packet(request, session, sizes)
        await self._map(worker, session, request, fds, packet)

    async def map_memory(
        self,
        worker: WorkerId,
        session: SessionId,
        registration: RegistrationId,
        fd: int | None,
        mapping_bytes: int,
        groups: Sequence[wire.MappedGroup],
        ranges: Sequence[wire.DeviceRange] = (),
    ) -> None:
        """Has the worker map a rank's memory: the first `mapping_bytes` of `fd`, or a GPU's `ranges`, which
        have so many bytes together. Errors and cancellation are as in `map_words`."""
        request = next(self._request_ids)
        packet = map_memory_packet(request, session, registration, mapping_bytes, groups, ranges)
        if len(packet) > PACKET_BYTES_MAX:
            planes = sum(len(group.base_offsets) for group in groups)
            raise Refusal(
                Reason.LAYOUT_INVALID,
                "too many planes and ranges to describe in one packet; register a layout with fewer, larger "
                "ones",
                field="groups.planes",
                value=f"{planes} planes, {len(ranges)} ranges",
            )
        await self._map(worker, session, request, [] if fd is None else [fd], packet)
        self._lives.memory_mapped(worker)

    async def _map(
        self, worker: WorkerId, session: SessionId, request: int, fds: Sequence[int], packet: bytes
    ) -> None:
        handle = self._lives.serving(worker)
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        deadline_s = self._lives.watch.now_s + handle.kind.map_deadline_s
        handle.requests[request] = MappingRequest(session, answer, deadline_s)
        is_first = session not in handle.sessions
        handle.sessions.add(session)
        try:
            if not self._send(handle, packet, fds):
                raise unavailable(handle)
            await answer
        except asyncio.CancelledError:
            # The core does not know about this mapping, so nobody else would have it released. The answer may
            # have come already without reaching the caller.
            if handle.state is WorkerProcessState.LIVE and not _is_refused(answer):
                self.release_session(worker, session)
                handle.own_releases[session] += 1
            raise
        except OSError as error:
            raise Refusal(
                Reason.QUEUE_FULL,
                f"the daemon cannot pass so many descriptors on just now ({error}): try again, or raise its "
                "limit of open files",
                field="descriptors",
                value=len(fds),
            ) from error
        finally:
            handle.requests.pop(request, None)
            if is_first and (not answer.done() or _is_refused(answer)) and session not in handle.releases:
                handle.sessions.discard(session)

    def _send(self, handle: WorkerHandle, packet: bytes, fds: Sequence[int] = ()) -> bool:
        """False if the worker is not live, or if its queue is full, which loses the worker. Raises OSError if
        descriptors would have to wait and the process cannot copy them."""
        if handle.state is not WorkerProcessState.LIVE:
            return False
        return self._lives.processes[handle.worker].channel.send(packet, fds)


def _is_refused(answer: "asyncio.Future[None]") -> bool:
    return answer.done() and not answer.cancelled() and answer.exception() is not None


# --- packets ---


def post_part_packet(action: PostPart, generations: npt.NDArray[np.uint64], gate_deadline_ms: int) -> bytes:
    """Raises ValueError if the arrays are not parallel or the deadline is out of range."""
    count = len(action.block_ids)
    verify = action.verify
    if action.slots.shape != (count,) or generations.shape != (count,):
        raise ValueError(
            f"part {action.part}: {count} block ids, but slots {action.slots.shape} "
            f"and generations {generations.shape}"
        )
    if verify is not None and verify.shape != (count,):
        raise ValueError(f"part {action.part}: {count} block ids, but verify flags {verify.shape}")
    if not 0 < gate_deadline_ms <= GATE_DEADLINE_MS_MAX:
        raise ValueError(f"gate_deadline_ms={gate_deadline_ms}: use 1 to {GATE_DEADLINE_MS_MAX}")
    return wire.ToWorker(
        post_part=wire.PostPart(
            part=action.part,
            direction=wire.STORE if action.direction is Direction.STORE else wire.LOAD,
            session=action.session,
            registration=action.registration,
            group=action.group,
            ticket=action.signals.ticket,
            part_word=action.signals.part_word,
            gated=action.signals.gated,
            doorbell=action.signals.doorbell,
            doorbell_value=action.signals.doorbell_value,
            gate_deadline_ms=gate_deadline_ms,
            block_ids=action.block_ids.astype("<u4").tobytes(),
            slots=action.slots.astype("<u4").tobytes(),
            generations=generations.astype("<u8").tobytes(),
            verify=b"" if verify is None else verify.astype("u1").tobytes(),
        )
    ).SerializeToString()


def check_slots_packet(action: CheckSlots, generations: npt.NDArray[np.uint64]) -> bytes:
    return wire.ToWorker(
        check_slots=wire.CheckSlots(
            check=action.check,
            slots=action.slots.astype("<u4").tobytes(),
            generations=generations.astype("<u8").tobytes(),
        )
    ).SerializeToString()


def disk_job_packet(
    action: PostDiskJob,
    disk_generations: npt.NDArray[np.uint64],
    host_generations: npt.NDArray[np.uint64],
) -> bytes:
    """Raises ValueError if the arrays are not parallel, or one is there that this kind of job does not
    have."""
    shape = action.disk_slots.shape
    on_host = (0,) if action.kind in (DiskJobKind.CHECK, DiskJobKind.ADOPT) else shape
    clocks = shape if action.kind in (DiskJobKind.WRITE, DiskJobKind.ADOPT) else (0,)
    positions = shape if action.kind is DiskJobKind.ADOPT else (0,)
    found = (disk_generations, action.host_slots, host_generations, action.clocks, action.positions)
    wanted = (shape, on_host, on_host, clocks, positions)
    if len(shape) != 1 or tuple(array.shape for array in found) != wanted:
        raise ValueError(
            f"disk job {action.job} ({action.kind.name}) of slots {shape}: disk generations, host slots, "
            f"host generations, clocks and positions of {[array.shape for array in found]}, "
            f"expected {list(wanted)}"
        )
    return wire.ToWorker(
        disk_job=wire.DiskJob(
            job=action.job,
            kind=wire.DiskJobKind.ValueType(action.kind.value),
            disk_slots=action.disk_slots.astype("<u4").tobytes(),
            disk_generations=disk_generations.astype("<u8").tobytes(),
            host_slots=action.host_slots.astype("<u4").tobytes(),
            host_generations=host_generations.astype("<u8").tobytes(),
            clocks=action.clocks.astype("<u8").tobytes(),
            pack=action.pack,
            positions=action.positions.astype("<u4").tobytes(),
        )
    ).SerializeToString()


def map_memory_packet(
    request: int,
    session: SessionId,
    registration: RegistrationId,
    mapping_bytes: int,
    groups: Sequence[wire.MappedGroup],
    ranges: Sequence[wire.DeviceRange] = (),
) -> bytes:
    return wire.ToWorker(
        map_memory=wire.MapMemory(
            request=request,
            session=session,
            registration=registration,
            mapping_bytes=mapping_bytes,
            groups=groups,
            ranges=ranges,
        )
    ).SerializeToString()


def add_chunks_packet(request: int, session: SessionId, sizes: Sequence[int]) -> bytes:
    """`sizes` has the bytes of each chunk, parallel to the descriptors that are sent with the packet."""
    return wire.ToWorker(
        add_chunks=wire.AddChunks(request=request, session=session, bytes=sizes)
    ).SerializeToString()


def persist_records_packet(slots: Slots) -> bytes:
    return wire.ToWorker(
        persist_records=wire.PersistRecords(slots=slots.astype("<u4").tobytes())
    ).SerializeToString()


def watch_space_packet(action: WatchSpace | UnwatchSpace) -> bytes:
    if isinstance(action, UnwatchSpace):
        return wire.ToWorker(unwatch_space=wire.UnwatchSpace(space=action.space)).SerializeToString()
    return wire.ToWorker(
        watch_space=wire.WatchSpace(
            space=action.space,
            namespace=action.namespace,
            group=action.group,
            sizes=np.array(action.sizes, "<u8").tobytes(),
        )
    ).SerializeToString()
