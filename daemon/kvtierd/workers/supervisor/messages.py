"""The front's side of the worker protocol: packets made of actions, and stimuli made of packets."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtierd.core.actions import CheckSlots, Direction, DiskJobKind, PostDiskJob, PostPart
from kvtierd.core.errors import Reason, Refusal
from kvtierd.core.ids import CheckId, DiskJobId, PartId, RegistrationId, SessionId, Slots, WorkerId
from kvtierd.core.stimuli import DiskJobFinished, PartFinished, PartOutcome, SlotsChecked
from kvtierd.wire import worker_pb2 as wire

GATE_DEADLINE_MS_MAX = 0xFFFF_FFFF


@dataclass(frozen=True, slots=True)
class GroupMapping:
    """Where the planes of one group lie in a rank's mapping. The three sequences have one entry for each
    plane."""

    group: int
    num_blocks: int
    base_offsets: Sequence[int]
    block_strides: Sequence[int]
    fragment_bytes: Sequence[int]


@dataclass(frozen=True, slots=True)
class DeviceRange:
    """A run of a GPU's addresses. A rank's memory is several of these, one after another.

    A range lies either completely in one allocation, which an IPC handle names, or in as many of the
    session's added chunks as `chunks` says, one after another.
    """

    size_bytes: int
    offset: int
    """Offset of its first byte in the allocation, or in the first of its chunks."""
    ipc_handle: bytes = b""
    """64 bytes, or empty for chunks."""
    buffer_id: int = 0
    chunks: int = 0


def map_words_packet(request: int, session: SessionId, doorbells: int, parts: int) -> bytes:
    return wire.ToWorker(
        map_words=wire.MapWords(request=request, session=session, doorbells=doorbells, parts=parts)
    ).SerializeToString()


def map_memory_packet(
    request: int,
    session: SessionId,
    registration: RegistrationId,
    mapping_bytes: int,
    groups: Sequence[GroupMapping],
    ranges: Sequence[DeviceRange] = (),
) -> bytes:
    return wire.ToWorker(
        map_memory=wire.MapMemory(
            request=request,
            session=session,
            registration=registration,
            mapping_bytes=mapping_bytes,
            groups=[
                wire.MappedGroup(
                    group=group.group,
                    num_blocks=group.num_blocks,
                    base_offsets=group.base_offsets,
                    block_strides=group.block_strides,
                    fragment_bytes=group.fragment_bytes,
                )
                for group in groups
            ],
            ranges=[
                wire.DeviceRange(
                    bytes=part.size_bytes,
                    offset=part.offset,
                    ipc_handle=part.ipc_handle,
                    buffer_id=part.buffer_id,
                    chunks=part.chunks,
                )
                for part in ranges
            ],
        )
    ).SerializeToString()


def add_chunks_packet(request: int, session: SessionId, sizes: Sequence[int]) -> bytes:
    """`sizes` has the bytes of each chunk, parallel to the descriptors that are sent with the packet."""
    return wire.ToWorker(
        add_chunks=wire.AddChunks(request=request, session=session, bytes=sizes)
    ).SerializeToString()


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
    on_host = (0,) if action.kind is DiskJobKind.CHECK else shape
    clocks = shape if action.kind is DiskJobKind.WRITE else (0,)
    found = (disk_generations, action.host_slots, host_generations, action.clocks)
    wanted = (shape, on_host, on_host, clocks)
    if len(shape) != 1 or tuple(array.shape for array in found) != wanted:
        raise ValueError(
            f"disk job {action.job} ({action.kind.name}) of slots {shape}: disk generations, host slots, "
            f"host generations and clocks of {[array.shape for array in found]}, expected {list(wanted)}"
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
        )
    ).SerializeToString()


def persist_records_packet(slots: Slots) -> bytes:
    return wire.ToWorker(
        persist_records=wire.PersistRecords(slots=slots.astype("<u4").tobytes())
    ).SerializeToString()


def persist_all_packet(request: int) -> bytes:
    return wire.ToWorker(persist_all=wire.PersistAll(request=request)).SerializeToString()


def revoke_part_packet(part: PartId) -> bytes:
    return wire.ToWorker(revoke_part=wire.RevokePart(part=part)).SerializeToString()


def release_session_packet(session: SessionId) -> bytes:
    return wire.ToWorker(release_session=wire.ReleaseSession(session=session)).SerializeToString()


def stop_packet() -> bytes:
    return wire.ToWorker(stop=wire.Stop()).SerializeToString()


def refusal_of(message: wire.MapRefused | wire.Unusable) -> Refusal:
    """Raises ValueError if the reason is not one of ours."""
    reason = Reason(message.reason)
    if reason is Reason.UNSPECIFIED:
        raise ValueError("a worker refuses without saying why")
    return Refusal(reason, message.message, field=message.field, value=message.value)


def part_finished(worker: WorkerId, message: wire.PartFinished) -> PartFinished:
    """Raises ValueError if the message holds something that no worker of ours sends."""
    return PartFinished(
        worker=worker,
        part=PartId(message.part),
        outcome=PartOutcome(message.outcome),
        failed=np.frombuffer(message.failed, "<u4").astype(np.uint32, copy=False),
        corrupt=message.corrupt,
        message=message.message,
        copied_bytes=message.copied_bytes,
        copy_s=message.copy_ns / 1e9,
    )


def slots_checked(worker: WorkerId, message: wire.SlotsChecked) -> SlotsChecked:
    """Raises ValueError if the message holds something that no worker of ours sends."""
    return SlotsChecked(
        worker=worker,
        check=CheckId(message.check),
        looked_at=message.looked_at,
        corrupt=np.frombuffer(message.corrupt, "<u4").astype(np.uint32, copy=False),
    )


def disk_job_finished(worker: WorkerId, message: wire.DiskJobFinished) -> DiskJobFinished:
    """Raises ValueError if the message holds something that no worker of ours sends."""
    return DiskJobFinished(
        worker=worker,
        job=DiskJobId(message.job),
        failed=np.frombuffer(message.failed, "<u4").astype(np.uint32, copy=False),
        corrupt=np.frombuffer(message.corrupt, "<u4").astype(np.uint32, copy=False),
        error=message.error,
        bytes=message.bytes,
        busy_s=message.busy_ns / 1e9,
    )
