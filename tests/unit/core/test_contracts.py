"""The transition table, refusals, the validator and the picture that status gives."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from kvtierd.core.blocks.table import BlockFlag
from kvtierd.core.errors import Reason, Refusal
from kvtierd.core.ids import NamespaceDigest
from kvtierd.core.state import transitions
from kvtierd.core.state.transitions import (
    TABLE,
    CheckState,
    Entity,
    Event,
    InvalidTransition,
    TransferPartState,
    Transitions,
    WorkerState,
)
from kvtierd.core.stimuli import NOBODY, EndSession, PartOutcome, Tick, WorkerLive, WorkerLost

from tests.oracles.free_slots import free_slots
from tests.oracles.invariants import validate
from tests.unit.core.disk import READ, WRITE, DiskHost
from tests.unit.core.host import Host, keys

DAMAGES = (
    "pins",
    "writing",
    "free_slot",
    "double_free",
    "condemned",
    "live",
    "part",
    "words",
    "leased",
    "deadline",
    "session",
    "worker",
    "transfer",
    "instance",
    "extent",
    "corrupt_slot",
    "set_aside",
    "recovered",
    "extent_slots",
    "about",
    "check",
)
DISK_DAMAGES = (
    "clean",
    "not_clean",
    "queued",
    "late",
    "late_jobs",
    "pinned",
    "promotion",
    "write",
    "bytes",
    "unreadable",
    "slot",
    "state",
    "worker",
    "probe",
    "errors",
)
PROTO = Path(__file__).resolve().parents[3] / "proto/kvtier/v1/types.proto"


class TestTransitions:
    def test_states_and_events_of_the_table_stay_within_one_kind(self) -> None:
        assert all(type(before) is type(after) for (before, _), after in TABLE.items())

    def test_every_state_can_be_reached_and_every_event_is_used(self) -> None:
        kinds = transitions.State.__subclasses__()
        first = {next(iter(kind)) for kind in kinds}
        everything = {state for kind in kinds for state in kind}
        assert first | set(TABLE.values()) == everything
        assert {event for _, event in TABLE} == set(Event)

    def test_a_step_remembers_what_happened_lately(self) -> None:
        part = Entity(state=TransferPartState.POSTED)
        steps = Transitions()
        steps.step(part, Event.LOSE)
        steps.step(part, Event.EXIT)
        assert part.state is TransferPartState.FAILED
        assert part.story == (Event.LOSE, Event.EXIT)
        assert steps.counts[TransferPartState.POSTED, Event.LOSE] == 1

    def test_stories_are_bounded(self) -> None:
        transfer = Entity(state=transitions.TransferJobState.CLOSING)
        steps = Transitions()
        for _ in range(100):
            steps.step(transfer, Event.SPOIL)
        assert len(transfer.story) == transitions.STORY_LENGTH

    def test_an_impossible_event_tells_the_story(self) -> None:
        worker = Entity(state=WorkerState.LIVE)
        steps = Transitions()
        steps.step(worker, Event.LOSE)
        with pytest.raises(
            InvalidTransition, match="LOSE is impossible for a entity in state LOST, after: lose"
        ):
            steps.step(worker, Event.LOSE)


def test_reasons_have_the_numbers_of_the_wire() -> None:
    numbers = dict(re.findall(r"REASON_(\w+) = (\d+);", PROTO.read_text()))
    assert {reason.name: reason.value for reason in Reason} == {name: int(n) for name, n in numbers.items()}


def test_a_refusal_names_field_and_value_and_shortens_it() -> None:
    refusal = Refusal(Reason.MALFORMED, "do better", field="hashes", value="x" * 1000)
    assert str(refusal).startswith("MALFORMED: do better [hashes=xxx")
    assert len(str(refusal)) < 200


class TestDiskValidator:
    """Likewise: a disk has 1 and 2, and the host too; 3 is being written, 4 promoted."""

    @pytest.fixture
    def host(self, make_disk_host: Callable[..., DiskHost]) -> DiskHost:
        host = make_disk_host(start=False)
        host.disk.start()
        one = host.instance()
        host.stored_on_disk(one, 4)
        host.evict_all(one)
        host.stored_on_disk(one, 1, 2)
        one.lookup(4)
        one.stored(3)
        validate(host.machine)
        return host

    @staticmethod
    def entry(host: DiskHost, number: int, *, on_disk: bool = False) -> np.ndarray:
        blocks = host.disk.core.blocks if on_disk else host.machine.core.blocks
        return blocks.table.lookup(host.machine.core.names[NOBODY, "engine"].plans[0].space, keys(number))[0]

    def clean(self, host: DiskHost) -> None:
        host.machine.core.blocks.table.clear_flags(self.entry(host, 1), BlockFlag.CLEAN)

    def not_clean(self, host: DiskHost) -> None:
        host.machine.core.blocks.table.set_flags(self.entry(host, 3), BlockFlag.CLEAN)

    def queued(self, host: DiskHost) -> None:
        host.machine.core.blocks.table.set_flags(self.entry(host, 1), BlockFlag.QUEUED)

    def late(self, host: DiskHost) -> None:
        host.machine.core.blocks.table.set_flags(self.entry(host, 4), BlockFlag.LATE)

    def late_jobs(self, host: DiskHost) -> None:
        host.machine.core.below.late_jobs += 1

    def pinned(self, host: DiskHost) -> None:
        host.disk.core.blocks.table.pin(self.entry(host, 1, on_disk=True))

    def promotion(self, host: DiskHost) -> None:
        job = host.disk.core.jobs.pop(host.disk.open_jobs(READ)[0])  # type: ignore[call-overload]
        host.disk.core.counts[READ] -= 1
        host.disk.core.bytes[READ] -= job.bytes

    def write(self, host: DiskHost) -> None:
        job = host.disk.core.jobs.pop(host.disk.open_jobs(WRITE)[0])  # type: ignore[call-overload]
        host.disk.core.counts[WRITE] -= 1
        host.disk.core.bytes[WRITE] -= job.bytes

    def bytes(self, host: DiskHost) -> None:
        host.disk.core.bytes[WRITE] += 1

    def unreadable(self, host: DiskHost) -> None:
        table = host.disk.core.blocks.table
        host.machine.core.below.levels[0].unwritten(host.disk.core, self.entry(host, 1, on_disk=True))
        table.set_flags(self.entry(host, 1, on_disk=True), BlockFlag.LATE)

    def slot(self, host: DiskHost) -> None:
        host.disk.core.blocks.slots.take(4096, 1)

    def state(self, host: DiskHost) -> None:
        host.disk.core.state = transitions.DiskState.OFF

    def worker(self, host: DiskHost) -> None:
        host.disk.core.worker = None

    def probe(self, host: DiskHost) -> None:
        host.disk.core.probe = host.disk.open_jobs(WRITE)[0]  # type: ignore[assignment]

    def errors(self, host: DiskHost) -> None:
        host.disk.core.errors_in_row = 3

    @pytest.mark.parametrize("damage", DISK_DAMAGES)
    def test_a_broken_invariant_is_found(self, host: DiskHost, damage: str) -> None:
        getattr(self, damage)(host)
        with pytest.raises(AssertionError):
            validate(host.machine)


class TestValidator:
    """It has to notice: each case breaks one thing behind the machine's back."""

    @staticmethod
    def pins(host: Host) -> None:
        table = host.machine.core.blocks.table
        table.pin(table.dump()["entries"][:1])

    @staticmethod
    def writing(host: Host) -> None:
        blocks = host.machine.core.blocks
        domain = next(iter(blocks.domains.by_id.values()))
        plan = host.machine.core.names[NOBODY, "engine"].plans[0]
        new = blocks.insert(plan.space, domain, np.full((1, 32), 9, np.uint8))
        blocks.give_slots(domain, new.entries)

    @staticmethod
    def free_slot(host: Host) -> None:
        host.machine.core.blocks.slots.take(4096, 1)

    @staticmethod
    def double_free(host: Host) -> None:
        slots = host.machine.core.blocks.slots
        one = slots.take(4096, 2)
        slots.give_back(4096, one[[0, 0]])

    @staticmethod
    def condemned(host: Host) -> None:
        host.machine.core.blocks.condemned += 1

    @staticmethod
    def live(host: Host) -> None:
        host.machine.core.blocks.live -= 1

    @staticmethod
    def part(host: Host) -> None:
        host.machine.core.parts.clear()

    @staticmethod
    def words(host: Host) -> None:
        host.machine.core.names[NOBODY, "engine"].words_in_use.clear()

    @staticmethod
    def leased(host: Host) -> None:
        host.machine.core.names[NOBODY, "engine"].leased_bytes += 1

    @staticmethod
    def deadline(host: Host) -> None:
        host.machine.core.deadlines.clear()

    @staticmethod
    def session(host: Host) -> None:
        host.machine.core.sessions.clear()

    @staticmethod
    def worker(host: Host) -> None:
        next(iter(host.machine.core.workers.values())).state = WorkerState.LOST

    @staticmethod
    def transfer(host: Host) -> None:
        next(iter(host.machine.core.transfers.values())).open_parts += 1

    @staticmethod
    def instance(host: Host) -> None:
        host.machine.core.names[NOBODY, "engine"].ranks.clear()

    @staticmethod
    def extent(host: Host) -> None:
        host.machine.core.blocks.slots._unassigned.pop()

    @staticmethod
    def corrupt_slot(host: Host) -> None:
        blocks = host.machine.core.blocks
        blocks.corrupt.add(int(blocks.table.dump()["slots"][0]))

    @staticmethod
    def set_aside(host: Host) -> None:
        slots = host.machine.core.blocks.slots
        slots.corrupt.add(int(free_slots(slots, 4096)[0]))

    @staticmethod
    def recovered(host: Host) -> None:
        table = host.machine.core.blocks.table
        table.set_flags(table.dump()["entries"][:1], int(BlockFlag.RECOVERED))

    @staticmethod
    def extent_slots(host: Host) -> None:
        host.machine.core.blocks.slots.extent_slots += 1

    @staticmethod
    def about(host: Host) -> None:
        about = host.machine.core.blocks.spaces.about
        about[NamespaceDigest(bytes(16))] = next(iter(about.values()))

    @staticmethod
    def check(host: Host) -> None:
        host.do(Tick())
        host.now_s += 1
        host.do(Tick())
        check = host.machine.core.check
        assert check is not None
        check.state = CheckState.DONE

    @pytest.mark.parametrize(
        "damage",
        DAMAGES,
    )
    def test_notices(self, host: Host, damage: str) -> None:
        one = host.instance()
        one.stored(1, 2, 3)
        one.lease(1)
        one.store(4, 5)
        validate(host.machine)
        getattr(self, damage)(host)
        with pytest.raises(AssertionError):
            validate(host.machine)


class TestStatus:
    def test_pictures_everything(self, host: Host) -> None:
        pair = host.instance("pair", sizes=((4096, 8192),), together=False)
        pair.stored(1, 2)
        pair.lease(1)
        pair.store(3)
        status = host.machine.status()
        [instance] = status.instances
        assert (instance.name, instance.world_size, instance.model, instance.ready) == (
            "pair",
            2,
            "model",
            True,
        )
        assert (instance.leases, instance.leased_blocks, instance.leased_bytes) == (1, 1, 12288)
        assert (instance.transfers_active, instance.mapped_bytes) == (1, 2 << 20)
        assert set(instance.sessions) == set(pair.sessions.values())
        assert (status.leases, status.leased_blocks, status.transfers_active) == (1, 1, 1)
        assert (status.blocks.writing, status.blocks.ready, status.blocks.capacity) == (1, 2, 256)
        assert status.used_bytes == 3 * 12288
        assert (status.extents, status.extents_free) == (4, 2)
        assert {size.slot_bytes: (size.slots, size.free) for size in status.sizes} == {
            4096: (14, 11),
            8192: (7, 4),
        }
        [worker] = status.workers
        assert (worker.device, worker.lost, worker.sessions, worker.parts_open) == ("cpu", False, 2, 2)
        host.do(WorkerLost(worker.worker, "stuck"))
        assert host.machine.status().workers[0].lost

    def test_counters_are_a_copy(self, host: Host) -> None:
        before = host.machine.status().counters
        one = host.instance()
        one.store(1).part(0, PartOutcome.FAILED)
        assert before.failed_transfers == 0
        assert host.machine.status().counters.failed_transfers == 1


def test_a_worker_that_comes_up_twice_is_a_bug(host: Host) -> None:
    worker = host.worker()
    host.do(WorkerLost(worker, "stuck"))
    with pytest.raises(AssertionError):
        host.do(WorkerLive(worker, "cpu"))


def test_domains_and_spaces_are_forgotten_when_nobody_needs_them(make_host: Callable[..., Host]) -> None:
    host = make_host()
    for number in range(600):
        one = host.instance(f"engine {number}", fields=b"%d" % number, sizes=((4096 + number,),), worker=None)
        host.do(EndSession(one.scheduler, "stopped"))
    blocks = host.machine.core.blocks
    assert len(blocks.domains.by_id) == 0
    assert len(blocks.spaces.ids) <= 256
