"""What a worker maps of a session, and how it lets go."""

import asyncio
import fcntl
import os
import resource

import pytest
from kvtier_kernels import PART_DONE, PART_FAILED, PART_REVOKED, PART_STARTED, TICKET_MAX
from kvtierd.core.actions import Direction
from kvtierd.core.errors import Reason, Refusal
from kvtierd.core.ids import RegistrationId, SessionId, WorkerId
from kvtierd.core.stimuli import PartFinished, PartOutcome, SessionReleased
from kvtierd.wire.worker_pb2 import MappedGroup

from tests.integration.worker.conftest import StartRig
from tests.integration.worker.devices import ON_CPU, memfd, on
from tests.integration.worker.rig import DOORBELLS, GROUP, PARTS, Layout, Rig, until

BIG = Layout(num_blocks=64, fragments=(1 << 20,))
STRANGER = SessionId(1_000)


async def test_release_revokes_reports_and_unmaps_in_this_order(rig: Rig) -> None:
    client = await rig.client()
    assert len(rig.mapped()) == 2
    slots = await rig.store(client, [0])
    rig.events.clear()
    gated = [rig.post(client, Direction.LOAD, [i], slots, gate=(0, i)) for i in range(1, 20)]
    rig.supervisor.orders.release_session(rig.worker, client.session)
    await rig.released(client.session)
    assert rig.mapped() == []
    assert isinstance(rig.events[-1], SessionReleased)
    assert [event.outcome for event in rig.seen(PartFinished)] == [PartOutcome.REVOKED] * len(gated)
    assert {client.part_state(ticket) for _, ticket in gated} == {PART_REVOKED}
    # The same session may come back with new memory.
    await rig.map(client)
    await rig.store(client, [1])


async def test_release_during_a_copy_ends_it_at_the_next_chunk(start_rig: StartRig) -> None:
    rig = await start_rig(fault="slow-copy:1000", pool_bytes=130 << 20)
    client = await rig.client(BIG)
    other = await rig.client()
    # 15 chunks, on a GPU 4: seconds if nobody interrupts it.
    store, store_ticket = rig.post(client, Direction.STORE, list(range(60)), rig.open(60, BIG.slot_bytes))
    await until(lambda: client.part_state(store_ticket) == PART_STARTED)
    queued, queued_ticket = rig.post(client, Direction.STORE, [60], rig.open(1, BIG.slot_bytes))
    rig.supervisor.orders.release_session(rig.worker, client.session)
    await rig.released(client.session)
    assert (await rig.finished(store)).outcome == PartOutcome.FAILED
    assert (await rig.finished(queued)).outcome == PartOutcome.REVOKED
    assert client.part_state(store_ticket) == PART_FAILED
    assert client.part_state(queued_ticket) == PART_REVOKED
    assert rig.supervisor.totals[Direction.STORE].copied_bytes == 0
    assert len(rig.mapped()) == 2  # the other session's
    await rig.store(other, [0])


async def test_a_copy_that_runs_keeps_its_memory_mapped_until_it_ends(start_rig: StartRig) -> None:
    rig = await start_rig(fault="slow-copy:800")
    client = await rig.client()
    part, ticket = rig.post(client, Direction.STORE, [0], rig.open(1, client.layout.slot_bytes))
    await until(lambda: client.part_state(ticket) == PART_STARTED)
    rig.supervisor.orders.release_session(rig.worker, client.session)
    await rig.released(client.session)
    assert (await rig.finished(part)).outcome == PartOutcome.DONE  # it was its only chunk
    assert client.part_state(ticket) == PART_DONE
    assert [type(event) for event in rig.events[-2:]] == [PartFinished, SessionReleased]


async def test_every_release_is_answered_also_of_a_stranger(rig: Rig) -> None:
    client = await rig.client()
    for session in (client.session, client.session, STRANGER):
        rig.supervisor.orders.release_session(rig.worker, session)
    await until(lambda: len(rig.seen(SessionReleased)) == 3)
    part, _ = rig.post(client, Direction.LOAD, [], rig.slots(0, 4096))
    finished = await rig.finished(part)
    assert finished.outcome == PartOutcome.FAILED
    assert "no words" in finished.message


async def _refused(rig: Rig, fd: int, **changed: object) -> Refusal:
    """Has `fd` mapped as memory; it must be refused, and leave nothing behind in the worker."""
    layout = Layout()
    arguments = {
        "worker": rig.worker,
        "session": STRANGER,
        "registration": RegistrationId(1),
        "mapping_bytes": layout.mapping_bytes,
        "groups": [layout.mapping()],
        **changed,
    }
    try:
        with pytest.raises(Refusal) as refused:
            await rig.supervisor.orders.map_memory(fd=fd, **arguments)  # type: ignore[arg-type]
    finally:
        os.close(fd)
    assert rig.mapped() == []
    return refused.value


@on(ON_CPU)
async def test_memory_that_could_shrink_is_refused(rig: Rig) -> None:
    refusal = await _refused(rig, memfd(Layout().mapping_bytes, sealed=False))
    assert (refusal.reason, refusal.field) == (Reason.MAPPING_NOT_SEALED, "seals")
    assert "F_SEAL_SHRINK" in refusal.message


@on(ON_CPU)
async def test_memory_smaller_than_it_says_is_refused(rig: Rig) -> None:
    refusal = await _refused(rig, memfd(Layout().mapping_bytes - 1))
    assert (refusal.reason, refusal.field) == (Reason.MAPPING_INVALID, "mapping_bytes")
    assert refusal.value == str(Layout().mapping_bytes)


@on(ON_CPU)
async def test_what_is_no_memfd_is_refused(rig: Rig) -> None:
    for name in ("/dev/null", "/proc/self/exe"):
        refusal = await _refused(rig, os.open(name, os.O_RDONLY))
        assert (refusal.reason, refusal.field) == (Reason.MAPPING_INVALID, "descriptor")


@on(ON_CPU)
async def test_memory_that_cannot_be_written_is_refused(rig: Rig) -> None:
    fd = memfd(Layout().mapping_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    assert (await _refused(rig, fd)).reason == Reason.MAPPING_INVALID


@on(ON_CPU)
@pytest.mark.parametrize(
    "group",
    [
        MappedGroup(
            group=GROUP,
            num_blocks=65,
            base_offsets=Layout().bases,
            block_strides=Layout().strides,
            fragment_bytes=Layout().fragments,
        ),
        MappedGroup(
            group=GROUP,
            num_blocks=1 << 62,
            base_offsets=[0],
            block_strides=[1 << 40],
            fragment_bytes=[1 << 40],
        ),
        MappedGroup(
            group=GROUP, num_blocks=2, base_offsets=[(1 << 64) - 8], block_strides=[8], fragment_bytes=[8]
        ),
        MappedGroup(
            group=GROUP, num_blocks=1, base_offsets=[0, 0], block_strides=[4096], fragment_bytes=[4096]
        ),
    ],
    ids=["one block too many", "overflow", "base overflow", "not parallel"],
)
async def test_planes_beyond_the_mapping_are_refused(rig: Rig, group: MappedGroup) -> None:
    refusal = await _refused(rig, memfd(Layout().mapping_bytes), groups=[group])
    assert refusal.reason == Reason.PLANE_BEYOND_MAPPING
    assert refusal.field == f"groups[{GROUP}]"


@on(ON_CPU)
async def test_a_layout_too_large_to_describe_is_refused(rig: Rig) -> None:
    planes = 60_000
    group = MappedGroup(
        group=GROUP,
        num_blocks=1,
        base_offsets=[0] * planes,
        block_strides=[1 << 30] * planes,
        fragment_bytes=[1 << 30] * planes,
    )
    assert (await _refused(rig, memfd(4096), groups=[group])).reason == Reason.LAYOUT_INVALID


async def test_words_are_mapped_once_and_memory_once_per_registration(rig: Rig) -> None:
    client = await rig.client()
    with pytest.raises(Refusal, match="ALREADY_REGISTERED"):
        await rig.map(client)
    with pytest.raises(Refusal, match="ALREADY_REGISTERED"):
        await rig.map_memory(client)
    assert len(rig.mapped()) == 2
    await rig.store(client, [0])


async def test_words_beyond_their_memfd_are_refused(rig: Rig) -> None:
    client = await rig.client()
    for doorbells, parts in ((0, 0), (DOORBELLS, 1_000_000), (0xFFFF_FFFF, 0xFFFF_FFFF)):
        with pytest.raises(Refusal, match="MAPPING_INVALID"):
            await rig.supervisor.orders.map_words(rig.worker, STRANGER, client.words_fd, doorbells, parts)


async def test_a_worker_without_descriptors_left_refuses_and_goes_on(rig: Rig) -> None:
    client = await rig.client()
    pid = rig.pid
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (112, 112))

    async def map_many() -> None:
        for session in range(2_000, 2_048):
            await rig.supervisor.orders.map_words(
                rig.worker, SessionId(session), client.words_fd, DOORBELLS, PARTS
            )

    with pytest.raises(Refusal, match="112 descriptors"):
        await map_many()
    await rig.store(client, [0])
    for session in (SessionId(2_000), SessionId(2_001)):
        rig.supervisor.orders.release_session(rig.worker, session)
        await rig.released(session)
    await rig.client()  # takes two mappings


async def test_a_part_on_a_page_that_its_client_has_sealed_never_starts(rig: Rig) -> None:
    client = await rig.client()
    part, ticket = rig.post(client, Direction.LOAD, [0], await rig.store(client, [1]), gate=(0, 1))
    sealed = TICKET_MAX << 8 | PART_REVOKED
    client.words.store(DOORBELLS + ticket % PARTS, sealed)
    client.ring(0, 1)
    finished = await rig.finished(part)
    assert (finished.outcome, finished.message) == (PartOutcome.REVOKED, "")
    assert client.words.load(DOORBELLS + ticket % PARTS) == sealed


async def test_a_mapping_whose_asker_went_away_is_released(rig: Rig) -> None:
    fd = memfd(8 * (DOORBELLS + PARTS))
    asking = asyncio.create_task(rig.supervisor.orders.map_words(rig.worker, STRANGER, fd, DOORBELLS, PARTS))
    await asyncio.sleep(0)
    asking.cancel()
    os.close(fd)
    with pytest.raises(asyncio.CancelledError):
        await asking
    handle = rig.handle
    await until(lambda: not handle.releases)
    assert rig.mapped() == []
    assert rig.seen(SessionReleased) == []  # nobody outside had asked for it


async def test_a_mapping_whose_asker_went_away_before_it_heard_the_answer_is_released(rig: Rig) -> None:
    handle = rig.handle
    fd = memfd(8 * (DOORBELLS + PARTS))
    asking = asyncio.create_task(rig.supervisor.orders.map_words(rig.worker, STRANGER, fd, DOORBELLS, PARTS))
    await asyncio.sleep(0)
    [request] = handle.requests.values()

    def cancel_once_answered() -> None:
        if request.answer.done():
            asking.cancel()
        else:
            asyncio.get_running_loop().call_soon(cancel_once_answered)

    cancel_once_answered()
    with pytest.raises(asyncio.CancelledError):
        await asking
    os.close(fd)
    assert not handle.requests
    await until(lambda: not handle.releases)
    assert rig.mapped() == []
    assert rig.seen(SessionReleased) == []


async def test_unknown_workers_are_refused_by_name(rig: Rig) -> None:
    with pytest.raises(Refusal, match="WORKER_UNAVAILABLE"):
        await rig.supervisor.orders.map_words(WorkerId(99), STRANGER, 0, 1, 1)
    with pytest.raises(Refusal, match="WORKER_UNAVAILABLE"):
        rig.supervisor.pidfd_for(WorkerId(99))
