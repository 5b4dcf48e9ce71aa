"""Doorbells, revocations, and which part goes first."""

import asyncio
import contextlib
import os
import time
from pathlib import Path

import numpy as np
from kvtier_kernels import PART_ARMED, PART_DONE, PART_REVOKED, PART_STARTED
from kvtierd.core.actions import Direction
from kvtierd.core.ids import PartId, Slots
from kvtierd.core.stimuli import PartFinished, PartOutcome

from tests.integration.worker.conftest import StartRig
from tests.integration.worker.devices import ALL, on
from tests.integration.worker.rig import Client, Layout, Rig, is_armed, until

BIG = Layout(num_blocks=64, fragments=(1 << 20,))
"""Four blocks a chunk."""
CHUNK_S = 0.06
"""What each takes at least, where loads overtake a store."""
TRIES = 20


async def test_nothing_moves_before_the_doorbell(rig: Rig) -> None:
    client = await rig.client()
    client.fill(1)
    slots = await rig.store(client, [0, 1])
    target = client.block(30)
    part, ticket = rig.post(client, Direction.LOAD, [30, 31], slots, gate=(2, 5))
    client.ring(2, 4)
    client.ring(1, 100)
    await asyncio.sleep(0.2)
    assert is_armed(client, ticket)
    assert client.block(30) == target
    client.ring(2, 5)
    assert (await rig.finished(part)).outcome == PartOutcome.DONE
    assert client.block(30) == client.block(0)


async def test_a_gated_part_holds_up_no_other_of_its_lane(rig: Rig) -> None:
    client = await rig.client()
    slots = await rig.store(client, [0])
    gated, ticket = rig.post(client, Direction.LOAD, [1], slots, gate=(0, 1))
    free, _ = rig.post(client, Direction.LOAD, [2], slots)
    later, _ = rig.post(client, Direction.LOAD, [3], slots, gate=(1, 9))
    assert (await rig.finished(free)).outcome == PartOutcome.DONE
    client.ring(1, 9)
    assert (await rig.finished(later)).outcome == PartOutcome.DONE
    assert is_armed(client, ticket)
    client.ring(0, 1)
    assert (await rig.finished(gated)).outcome == PartOutcome.DONE


async def test_a_doorbell_that_rang_before_the_part_came_opens_it(rig: Rig) -> None:
    client = await rig.client()
    client.ring(3, 7)
    slots = await rig.store(client, [0])
    part, _ = rig.post(client, Direction.LOAD, [1], slots, gate=(3, 6))
    assert (await rig.finished(part)).outcome == PartOutcome.DONE


async def test_hundreds_of_gates_open_by_one_ring(rig: Rig) -> None:
    clients = [await rig.client() for _ in range(4)]
    slots = await rig.store(clients[0], [0])
    parts = [
        rig.post(client, Direction.LOAD, [1], slots, gate=(0, value))[0]
        for value in range(1, 61)
        for client in clients
    ]
    for client in clients:
        client.ring(0, 30)
    for index, part in enumerate(parts):
        if index < 120:
            assert (await rig.finished(part)).outcome == PartOutcome.DONE
    assert sum(rig.is_over(part) for part in parts) == 120
    for client in clients:
        client.ring(0, 60)
    for part in parts:
        assert (await rig.finished(part)).outcome == PartOutcome.DONE


async def test_the_client_revokes_without_asking_anybody(rig: Rig) -> None:
    client = await rig.client()
    slots = await rig.store(client, [0])
    target = client.block(1)
    part, ticket = rig.post(client, Direction.LOAD, [1], slots, gate=(0, 1))
    assert client.revoke(ticket)
    assert (await rig.finished(part)).outcome == PartOutcome.REVOKED
    client.ring(0, 1)
    assert client.part_state(ticket) == PART_REVOKED
    assert client.block(1) == target


async def test_the_front_revokes_what_has_not_started(rig: Rig) -> None:
    client = await rig.client()
    slots = await rig.store(client, [0])
    part, ticket = rig.post(client, Direction.LOAD, [1], slots, gate=(0, 1))
    rig.supervisor.orders.revoke(rig.worker, part)
    assert (await rig.finished(part)).outcome == PartOutcome.REVOKED
    assert client.part_state(ticket) == PART_REVOKED
    rig.supervisor.orders.revoke(rig.worker, part)  # over: nothing more comes of it
    await rig.store(client, [2])


async def test_a_started_part_runs_on_when_the_front_revokes_it(start_rig: StartRig) -> None:
    rig = await start_rig(fault="slow-copy:2500")  # longer than the machine may keep us from revoking
    client = await rig.client()
    slots = rig.open(3, client.layout.slot_bytes)
    # The second may have started as well: a GPU has two chunks on their way.
    posted = [rig.post(client, Direction.STORE, [i], slots[i : i + 1]) for i in range(3)]
    (first, ticket), _, (third, _) = posted
    await until(lambda: client.part_state(ticket) == PART_STARTED)
    rig.supervisor.orders.revoke(rig.worker, third)
    rig.supervisor.orders.revoke(rig.worker, first)
    assert (await rig.finished(third)).outcome == PartOutcome.REVOKED
    assert (await rig.finished(first)).outcome == PartOutcome.DONE
    assert [event.part for event in rig.seen(PartFinished)][:2] == [third, first]
    assert client.part_state(ticket) == PART_DONE


async def test_a_store_that_its_client_withdraws_while_it_runs_stores_nothing(start_rig: StartRig) -> None:
    rig = await start_rig(fault="slow-copy:2500")  # longer than the machine may keep us from withdrawing
    client = await rig.client()
    slots = rig.open(2, client.layout.slot_bytes)
    part, ticket = rig.post(client, Direction.STORE, [0, 1], slots)
    await until(lambda: client.part_state(ticket) == PART_STARTED, "the store to start")
    assert client.withdraw(ticket)
    finished = await rig.finished(part)
    assert (finished.outcome, finished.failed.tolist()) == (PartOutcome.REVOKED, [])
    assert client.part_state(ticket) == PART_REVOKED


async def test_a_gate_that_does_not_open_in_time_ends_the_part(rig: Rig) -> None:
    client = await rig.client()
    slots = await rig.store(client, [0])
    part, ticket = rig.post(client, Direction.LOAD, [1], slots, gate=(0, 1), gate_deadline_ms=50)
    waits, waiting = rig.post(client, Direction.LOAD, [2], slots, gate=(0, 1))
    assert (await rig.finished(part)).outcome == PartOutcome.GATE_DEADLINE
    assert client.part_state(ticket) == PART_REVOKED
    assert client.part_state(waiting) == PART_ARMED
    client.ring(0, 1)
    assert (await rig.finished(waits)).outcome == PartOutcome.DONE


@on(*ALL)
async def test_loads_overtake_a_store_that_runs(start_rig: StartRig) -> None:
    rig = await start_rig(fault=f"slow-copy:{CHUNK_S * 1_000:.0f}", pool_bytes=130 << 20)
    client = await rig.client(BIG)
    client.fill(3)
    slots = await rig.store(client, [0])
    for _ in range(TRIES):
        store, loads, in_time = await overtaken(rig, client, slots)
        assert (await rig.finished(store)).outcome == PartOutcome.DONE
        for load in loads:
            await rig.finished(load)
        if in_time:
            break
    assert in_time, f"late {TRIES} times"
    assert [event.part for event in rig.seen(PartFinished)][-3:] == [*loads, store]


async def overtaken(rig: Rig, client: Client, slots: Slots) -> tuple[PartId, list[PartId], bool]:
    """A store, two loads once it has started, and whether these were asked for in time."""
    targets = rig.open(60, BIG.slot_bytes)
    posted_s = time.monotonic()
    store, ticket = rig.post(client, Direction.STORE, list(range(1, 61)), targets)
    await until(lambda: client.part_state(ticket) != PART_ARMED)
    loads = [rig.post(client, Direction.LOAD, [63], slots)[0] for _ in range(2)]
    # A GPU's store has four chunks, two of which may be on their way: the loads need no longer than the rest.
    in_time = time.monotonic() - posted_s < CHUNK_S
    await rig.finished(store)
    rig.give_back(targets, BIG.slot_bytes)
    return store, loads, in_time


async def test_loads_without_end_do_not_starve_a_store(start_rig: StartRig) -> None:
    rig = await start_rig(fault="slow-copy:5")
    client = await rig.client()
    slots = await rig.store(client, [0])
    store, _ = rig.post(client, Direction.STORE, [1], rig.open(1, client.layout.slot_bytes))
    loads: list[PartId] = []

    def few_are_left() -> bool:
        return sum(not rig.is_over(load) for load in loads) <= 2

    while not rig.is_over(store):
        loads += [rig.post(client, Direction.LOAD, [2], slots)[0] for _ in range(3)]
        await until(few_are_left)
    assert (await rig.finished(store)).outcome == PartOutcome.DONE
    for load in loads:
        await rig.finished(load)


async def test_an_idle_worker_sleeps(rig: Rig) -> None:
    client = await rig.client()
    await rig.store(client, [0])
    pid = rig.pid

    def wakeups() -> dict[str, int]:
        """By thread of ours; one that has just ended is left out. Being preempted is no wakeup. Threads that
        a GPU's driver starts (cuda-EvtHandlr, and more) wake about every hundred milliseconds."""
        counts = {}
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                status = Path(f"/proc/{pid}/task/{task}/status").read_text().splitlines()
                if status[0].split()[1].startswith("cuda"):
                    continue
                counts[task] = sum(
                    int(line.split()[1]) for line in status if line.startswith("voluntary_ctxt")
                )
        return counts

    before = wakeups()
    await asyncio.sleep(2)
    woken = sum(count - before.get(task, 0) for task, count in wakeups().items())
    assert woken < 40  # the heartbeat, once a second, and nothing that polls


@on(*ALL)
async def test_gates_survive_random_traffic(rig: Rig) -> None:
    """Parts gated, free and revoked, of two sessions: every one ends, every byte is right."""
    random = np.random.default_rng(11)
    clients = [await rig.client() for _ in range(2)]
    source = clients[0]
    source.fill(12)
    slots = await rig.store(source, list(range(32)))
    loads = {}
    for step in range(1, 200):
        client = clients[int(random.integers(2))]
        gate = (int(random.integers(4)), step) if random.integers(3) else None
        block = int(random.integers(32))
        target = 32 + step % 32
        part, ticket = rig.post(client, Direction.LOAD, [target], slots[block : block + 1], gate=gate)
        loads[part] = (client, ticket, block, target)
        if random.integers(4) == 0:
            client.revoke(ticket)
        if step % 32 == 31:
            for other in clients:
                for doorbell in range(4):
                    other.ring(doorbell, step)
            for done in loads:
                await rig.finished(done)
            for done, (owner, its_ticket, source_block, its_target) in loads.items():
                outcome = (await rig.finished(done)).outcome
                assert (
                    outcome
                    == {PART_DONE: PartOutcome.DONE, PART_REVOKED: PartOutcome.REVOKED}[
                        owner.part_state(its_ticket)
                    ]
                )
                if outcome == PartOutcome.DONE:
                    assert owner.block(its_target) == source.block(source_block)
            loads.clear()
