"""What the front says to a worker, read as the worker reads it."""

import numpy as np
import pytest
from kvtier_kernels import TICKET_MAX, SharedWords
from kvtierd.core.actions import (
    CheckSlots,
    Direction,
    DiskJobKind,
    PostDiskJob,
    PostPart,
    UnwatchSpace,
    WatchSpace,
)
from kvtierd.core.errors import Reason
from kvtierd.core.ids import (
    CheckId,
    DiskId,
    DiskJobId,
    NamespaceDigest,
    PartId,
    RegistrationId,
    SessionId,
    SpaceId,
    Ticket,
    WorkerId,
)
from kvtierd.core.maintenance.sampling import SLOTS_MAX
from kvtierd.core.stimuli import CoreDisks, PartOutcome, Signals
from kvtierd.wire import worker_pb2 as wire
from kvtierd.workers.channel.packets import PACKET_BYTES_MAX
from kvtierd.workers.copy.parts import PartRefusedError, read_part
from kvtierd.workers.copy.sessions import MappedSession
from kvtierd.workers.disk.jobs import read_job
from kvtierd.workers.supervisor import orders, supervisor


def action(count: int, **changed: object) -> PostPart:
    numbers = np.arange(count, dtype=np.uint32)
    fields: dict[str, object] = {
        "worker": WorkerId(1),
        "part": PartId(2**63),
        "direction": Direction.LOAD,
        "session": SessionId(5),
        "registration": RegistrationId(6),
        "group": 7,
        "signals": Signals(Ticket(TICKET_MAX), 3, True, 1, 2**64 - 1),
        "block_ids": numbers,
        "slots": numbers + 1,
        "verify": None,
    }
    return PostPart(**{**fields, **changed})  # type: ignore[arg-type]


def test_the_largest_part_fits_a_packet() -> None:
    largest = np.full(8_192, 2**64 - 1, np.uint64)
    packet = orders.post_part_packet(
        action(8_192, verify=np.ones(8_192, np.uint8)), largest, orders.GATE_DEADLINE_MS_MAX
    )
    assert 8_192 * 17 < len(packet) < PACKET_BYTES_MAX


def test_a_worker_reads_what_the_front_wrote() -> None:
    generations = np.array([], np.uint64)
    packet = orders.post_part_packet(action(0), generations, 1_500)
    session = MappedSession(5, doorbells=2, parts=4, words=SharedWords(bytearray(48), 6))
    part = read_part(wire.ToWorker.FromString(packet).post_part, session, now_s=100.0)
    assert (part.number, part.ticket, part.word) == (2**63, TICKET_MAX, 2 + 3)
    assert (part.is_load, part.doorbell, part.doorbell_value) == (True, 1, 2**64 - 1)
    assert part.gate_deadline_s == 101.5


def test_arrays_that_are_not_parallel_are_refused_by_both_ends() -> None:
    with pytest.raises(ValueError, match="3 block ids"):
        orders.post_part_packet(action(3), np.zeros(2, np.uint64), 1)
    with pytest.raises(ValueError, match="slots"):
        orders.post_part_packet(action(3, slots=np.zeros((3, 1), np.uint32)), np.zeros(3, np.uint64), 1)
    with pytest.raises(ValueError, match="verify"):
        orders.post_part_packet(action(3, verify=np.ones(4, np.uint8)), np.zeros(3, np.uint64), 1)
    for deadline_ms in (0, -1, 1 << 32):
        with pytest.raises(ValueError, match="gate_deadline_ms"):
            orders.post_part_packet(action(0), np.zeros(0, np.uint64), deadline_ms)

    session = MappedSession(5, doorbells=2, parts=4)
    good = {"direction": wire.LOAD, "ticket": 1}
    for wrong, message in (
        ({"block_ids": bytes(4)}, "1 block ids, 0 slots"),
        ({"block_ids": bytes(5)}, "block_ids of 5 bytes"),
        ({"verify": bytes(1)}, "0 block ids, but 1 verify"),
        ({"direction": wire.DIRECTION_UNSPECIFIED}, "direction=0"),
        ({"ticket": 0}, "ticket=0"),
        ({"ticket": TICKET_MAX + 1}, "ticket="),
        ({"part_word": 4}, "part_word=4"),
        ({"gated": True, "doorbell": 2}, "doorbell=2"),
    ):
        with pytest.raises(PartRefusedError, match=message):
            read_part(wire.PostPart(**{**good, **wrong}), session, 0.0)  # type: ignore[arg-type]


def test_memory_of_a_gpu_is_described_range_by_range() -> None:
    groups = [
        wire.MappedGroup(
            group=0,
            num_blocks=2**32 - 1,
            base_offsets=[0, 5],
            block_strides=[7, 2**63],
            fragment_bytes=[6, 1],
        )
    ]
    ranges = [
        wire.DeviceRange(bytes=2**62, offset=2**61, ipc_handle=bytes(range(64)), buffer_id=2**64 - 1),
        wire.DeviceRange(bytes=4096, offset=17, chunks=3),
    ]
    packet = orders.map_memory_packet(9, SessionId(5), RegistrationId(6), 2**62 + 4096, groups, ranges)
    found = wire.ToWorker.FromString(packet).map_memory
    assert (found.request, found.session, found.registration) == (9, 5, 6)
    assert found.mapping_bytes == 2**62 + 4096
    ipc, chunks = found.ranges
    assert (ipc.bytes, ipc.offset, ipc.ipc_handle) == (2**62, 2**61, bytes(range(64)))
    assert (ipc.buffer_id, ipc.chunks) == (2**64 - 1, 0)
    assert (chunks.bytes, chunks.offset, chunks.ipc_handle, chunks.chunks) == (4096, 17, b"", 3)
    assert not wire.ToWorker.FromString(
        orders.map_memory_packet(9, SessionId(5), RegistrationId(6), 1, groups)
    ).map_memory.ranges


def test_chunks_travel_with_their_sizes() -> None:
    found = wire.ToWorker.FromString(orders.add_chunks_packet(9, SessionId(5), [1, 2**62])).add_chunks
    assert (found.request, found.session, list(found.bytes)) == (9, 5, [1, 2**62])


@pytest.mark.parametrize("message", [wire.MapRefused, wire.Unusable])
def test_refusals_keep_every_word(message: type[wire.MapRefused] | type[wire.Unusable]) -> None:
    refusal = supervisor.refusal_of(message(reason=17, field="device", value="GPU-1", message="no such"))
    assert (refusal.reason, refusal.field) == (Reason.DEVICE_UNKNOWN, "device")
    assert (refusal.value, refusal.message) == ("GPU-1", "no such")
    with pytest.raises(ValueError):
        supervisor.refusal_of(message(reason=12_345))
    with pytest.raises(ValueError, match="without saying why"):
        supervisor.refusal_of(message(reason=0))


def test_reports_become_stimuli_and_nonsense_an_error() -> None:
    report = wire.PartFinished(
        part=9,
        outcome=wire.FAILED,
        failed=np.array([3, 1], "<u4").tobytes(),
        corrupt=True,
        message="why",
        copied_bytes=2**40,
        copy_ns=2_500_000_000,
    )
    stimulus = supervisor.part_finished(WorkerId(4), report)
    assert (stimulus.worker, stimulus.part, stimulus.outcome) == (4, 9, PartOutcome.FAILED)
    assert stimulus.failed.tolist() == [3, 1]
    assert (stimulus.corrupt, stimulus.message) == (True, "why")
    assert (stimulus.copied_bytes, stimulus.copy_s) == (2**40, 2.5)
    for nonsense in (wire.PartFinished(part=1), wire.PartFinished(part=1, outcome=wire.DONE, failed=b"abc")):
        with pytest.raises(ValueError):
            supervisor.part_finished(WorkerId(4), nonsense)


def test_checks_and_their_answers_arrive_whole() -> None:
    slots, generations = np.array([7, 2**32 - 1], np.uint32), np.array([1, 2**40 - 1], np.uint64)
    request = CheckSlots(WorkerId(4), CheckId(2**63), slots)
    found = wire.ToWorker.FromString(orders.check_slots_packet(request, generations)).check_slots
    assert found.check == 2**63
    assert np.frombuffer(found.slots, "<u4").tolist() == slots.tolist()
    assert np.frombuffer(found.generations, "<u8").tolist() == generations.tolist()
    answer = wire.SlotsChecked(check=5, looked_at=2, corrupt=np.array([1], "<u4").tobytes())
    stimulus = supervisor.slots_checked(WorkerId(4), answer)
    assert (stimulus.worker, stimulus.check, stimulus.looked_at) == (4, 5, 2)
    assert stimulus.corrupt.tolist() == [1]
    with pytest.raises(ValueError):
        supervisor.slots_checked(WorkerId(4), wire.SlotsChecked(check=5, corrupt=b"abc"))


def test_the_largest_check_fits_a_packet() -> None:
    request = CheckSlots(WorkerId(1), CheckId(2**63), np.zeros(SLOTS_MAX, np.uint32))
    packet = orders.check_slots_packet(request, np.full(SLOTS_MAX, 2**64 - 1, np.uint64))
    assert len(packet) <= PACKET_BYTES_MAX


def test_outcomes_have_the_numbers_of_the_wire() -> None:
    on_the_wire = {value.name: value.number for value in wire.DESCRIPTOR.enum_types_by_name["Outcome"].values}
    assert on_the_wire.pop("OUTCOME_UNSPECIFIED") == 0
    assert on_the_wire == {outcome.name: outcome.value for outcome in PartOutcome}


NO_SLOTS, NO_NUMBERS = np.zeros(0, np.uint32), np.zeros(0, np.uint64)
BELOW_ALONE = (DiskJobKind.CHECK, DiskJobKind.ADOPT)
"""The kinds of jobs that have nothing to do with the host."""
NEW_BLOCKS = (DiskJobKind.WRITE, DiskJobKind.ADOPT)


def disk_job(kind: DiskJobKind, count: int, **changed: object) -> PostDiskJob:
    numbers = np.arange(2**32 - count, 2**32, dtype=np.uint32)
    fields: dict[str, object] = {
        "worker": WorkerId(1),
        "disk": DiskId(3),
        "job": DiskJobId(2**63),
        "kind": kind,
        "disk_slots": numbers,
        "host_slots": NO_SLOTS if kind in BELOW_ALONE else numbers - 7,
        "clocks": numbers.astype(np.uint64) << 31 if kind in NEW_BLOCKS else NO_NUMBERS,
        "pack": 7 if kind is DiskJobKind.ADOPT else 0,
        "positions": numbers[::-1].copy() if kind is DiskJobKind.ADOPT else NO_SLOTS,
    }
    return PostDiskJob(**{**fields, **changed})  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", DiskJobKind)
def test_a_disk_s_worker_is_told_everything_of_a_job(kind: DiskJobKind) -> None:
    job = disk_job(kind, 3)
    disk_generations = np.array([1, 2, 2**40 - 1], np.uint64)
    host_generations = disk_generations[: len(job.host_slots)] + 1
    packet = orders.disk_job_packet(job, disk_generations, host_generations)
    found = wire.ToWorker.FromString(packet).disk_job
    assert (found.job, wire.DiskJobKind.Name(found.kind)) == (2**63, f"DISK_{kind.name}")
    assert found.pack == job.pack
    for sent, kind_of_number, array in (
        (found.disk_slots, "<u4", job.disk_slots),
        (found.disk_generations, "<u8", disk_generations),
        (found.host_slots, "<u4", job.host_slots),
        (found.host_generations, "<u8", host_generations),
        (found.clocks, "<u8", job.clocks),
        (found.positions, "<u4", job.positions),
    ):
        assert np.frombuffer(sent, kind_of_number).tolist() == array.tolist()


@pytest.mark.parametrize(
    ("kind", "changed"),
    [
        (DiskJobKind.READ, {"host_slots": np.zeros(2, np.uint32)}),
        (DiskJobKind.READ, {"clocks": np.zeros(3, np.uint64)}),
        (DiskJobKind.WRITE, {"clocks": np.zeros(2, np.uint64)}),
        (DiskJobKind.CHECK, {"host_slots": np.zeros(3, np.uint32)}),
        (DiskJobKind.ADOPT, {"positions": np.zeros(2, np.uint32)}),
        (DiskJobKind.READ, {"positions": np.zeros(3, np.uint32)}),
        (DiskJobKind.READ, {"disk_slots": np.zeros((3, 1), np.uint32)}),
    ],
)
def test_a_disk_job_of_arrays_that_do_not_fit_is_refused(
    kind: DiskJobKind, changed: dict[str, object]
) -> None:
    generations = np.ones(3, np.uint64)
    host = NO_NUMBERS if kind in BELOW_ALONE else generations
    with pytest.raises(ValueError, match=f"9223372036854775808 .{kind.name}"):
        orders.disk_job_packet(disk_job(kind, 3, **changed), generations, host)


def test_the_largest_disk_job_fits_a_packet() -> None:
    count = CoreDisks().job_bytes // 4096
    generations = np.full(count, 2**40 - 1, np.uint64)
    packet = orders.disk_job_packet(disk_job(DiskJobKind.WRITE, count), generations, generations)
    assert count * 32 < len(packet) < PACKET_BYTES_MAX


def test_records_to_be_persisted_are_named_one_by_one() -> None:
    slots = np.array([5, 2**32 - 1], np.uint32)
    found = wire.ToWorker.FromString(orders.persist_records_packet(slots)).persist_records
    assert np.frombuffer(found.slots, "<u4").tolist() == slots.tolist()


def test_what_a_disk_s_worker_reports_arrives_whole() -> None:
    report = wire.DiskJobFinished(
        job=7,
        failed=np.array([3], "<u4").tobytes(),
        corrupt=np.array([1, 0], "<u4").tobytes(),
        error="EIO",
        bytes=2**40,
        saved_bytes=2**39,
        busy_ns=1_500_000_000,
        gone=np.array([2], "<u4").tobytes(),
    )
    found = supervisor.disk_job_finished(WorkerId(4), report)
    assert (found.worker, found.job, found.failed.tolist(), found.corrupt.tolist()) == (4, 7, [3], [1, 0])
    assert (found.error, found.bytes, found.busy_s, found.gone.tolist()) == ("EIO", 2**40, 1.5, [2])
    assert found.saved_bytes == 2**39
    assert not found.refused
    assert supervisor.disk_job_finished(WorkerId(4), wire.DiskJobFinished(job=7, refused=True)).refused
    with pytest.raises(ValueError):
        supervisor.disk_job_finished(WorkerId(4), wire.DiskJobFinished(job=7, failed=b"abc"))


@pytest.mark.parametrize(
    ("answers", "refused"), [([True, True], True), ([True, False], False), ([False, True], False)]
)
def test_a_write_is_refused_if_all_of_its_errors_are_refusals(answers: list[bool], refused: bool) -> None:
    packet = orders.disk_job_packet(disk_job(DiskJobKind.WRITE, 3), np.zeros(3, "<u8"), np.zeros(3, "<u8"))
    job = read_job(wire.ToWorker.FromString(packet).disk_job)
    job.fail(np.array([2]))  # had gone from the host
    for row, answer in enumerate(answers):
        job.fail(np.array([row]), f"error {row}", refused=answer)
    report = job.report()
    assert (report.error, report.refused) == ("error 0", refused)


def test_what_a_store_s_worker_has_found_arrives_whole() -> None:
    hashes = np.arange(64, dtype=np.uint8).reshape(2, 32)
    found = supervisor.pack_found(WorkerId(4), wire.PackFound(pack=2**40, space=5, hashes=hashes.tobytes()))
    assert (found.worker, found.pack, found.space) == (4, 2**40, 5)
    assert found.hashes.tolist() == hashes.tolist()
    with pytest.raises(ValueError):
        supervisor.pack_found(WorkerId(4), wire.PackFound(pack=1, space=5, hashes=bytes(33)))


def test_a_store_s_worker_is_told_what_to_look_for() -> None:
    told = WatchSpace(WorkerId(1), SpaceId(2**32 - 1), NamespaceDigest(bytes(range(16))), 3, (4096, 2**40))
    found = wire.ToWorker.FromString(orders.watch_space_packet(told)).watch_space
    assert (found.space, found.namespace, found.group) == (2**32 - 1, bytes(range(16)), 3)
    assert np.frombuffer(found.sizes, "<u8").tolist() == [4096, 2**40]
    over = wire.ToWorker.FromString(orders.watch_space_packet(UnwatchSpace(WorkerId(1), SpaceId(7))))
    assert over.unwatch_space.space == 7


def test_disk_jobs_have_the_numbers_of_the_wire() -> None:
    kinds = wire.DESCRIPTOR.enum_types_by_name["DiskJobKind"].values
    on_the_wire = {value.name.removeprefix("DISK_"): value.number for value in kinds}
    assert on_the_wire.pop("JOB_KIND_UNSPECIFIED") == 0
    assert on_the_wire == {kind.name: kind.value for kind in DiskJobKind}
