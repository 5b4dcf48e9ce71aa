"""Every invariant of the core, stated once.

`validate` reads everything, in time proportional to blocks and slots, and changes nothing.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
from kvtierd.core.actions import Direction, DiskJobKind
from kvtierd.core.blocks.blocks import Blocks
from kvtierd.core.blocks.namespaces import tag_of
from kvtierd.core.blocks.table import BlockFlag, BlockState
from kvtierd.core.ids import SpaceId, TenantTag
from kvtierd.core.machine import Machine
from kvtierd.core.state.core_state import CoreState
from kvtierd.core.state.entities import Instance, TransferJob
from kvtierd.core.state.transitions import (
    CheckState,
    InstanceState,
    LeaseState,
    MappingState,
    TransferJobState,
    TransferPartState,
    WorkerState,
)
from kvtierd.core.status import Tally
from kvtierd.core.stimuli import Verify
from kvtierd.core.transfers.leases import EXPIRED_KEPT

from tests.oracles.disk_invariants import check_disk, check_host_flags, check_promotions, jobs_of
from tests.oracles.free_slots import free_slots

Dump = dict[str, npt.NDArray[Any]]
_NONE = np.empty(0, np.int64)
OPEN_PARTS = (TransferPartState.POSTED, TransferPartState.LOST)


def validate(machine: Machine, coming: Iterable[int] = ()) -> None:
    """Raises AssertionError, which names what is wrong, if the machine's state breaks an invariant. `coming`:
    entries of the host that a tier of which nothing is said here is bringing up."""
    core = machine.core
    _check_counters(core.tally)
    core.blocks.table.check()
    dump = core.blocks.table.dump()
    _check_pins(core, dump)
    _check_retention(core, dump)
    _check_writing(core, dump, coming)
    plans = [plan for instance in core.instances.values() for plan in instance.plans]
    _check_blocks(core.blocks, dump, Counter(plan.domain.domain for plan in plans))
    _check_spaces(core, Counter(plan.space for plan in plans))
    _check_slots(core.blocks, dump)
    _check_workers(core)
    _check_sessions(core)
    for instance in core.instances.values():
        _check_instance(core, instance)
    _check_leases(core)
    _check_lease_room(core)
    for transfer in core.transfers.values():
        _check_transfer(core, transfer)
    _check_transfers_together(core)
    _check_doubts(core, dump)
    for disk in core.below.all:
        disk.blocks.table.check()
        on_disk = disk.blocks.table.dump()
        _check_blocks(disk.blocks, on_disk, Counter())
        _check_slots(disk.blocks, on_disk)
        _check_condemned(disk.blocks, on_disk)
        check_disk(core, disk, on_disk)
    if core.below:
        check_host_flags(core, dump)
        check_promotions(core)


# --- blocks ---


def _check_counters(tally: Tally) -> None:
    """Every hash that was asked for was a hit, or missed for one reason."""
    reasons = [tally.missed_absent, tally.missed_pending, tally.missed_beyond, tally.missed_recompute]
    reasons += [tally.missed_lease_limit, tally.missed_draining, tally.missed_not_ready]
    assert min(reasons) >= 0, reasons
    assert tally.lookup_hits + sum(reasons) == tally.lookup_hashes, (tally.lookup_hits, reasons)


def _check_pins(core: CoreState, dump: Dump) -> None:
    """The pins in the table are exactly those of leases, transfers and holds."""
    held = [lease.entries for lease in core.leases.values()]
    held.append(np.flatnonzero(core.retention.held_until).astype(np.uint32))
    for transfer in core.transfers.values():
        held.append(transfer.entries if transfer.direction is Direction.LOAD else transfer.existing)
    owed = np.bincount(np.concatenate([_NONE, *held]), minlength=core.blocks.capacity)
    counted = np.zeros(core.blocks.capacity, np.int64)
    counted[dump["entries"]] = dump["pins"]
    wrong = np.flatnonzero(counted != owed)
    assert len(wrong) == 0, (
        f"entry {wrong[0]} has {counted[wrong[0]]} pins; leases, transfers and holds have {owed[wrong[0]]}"
    )
    states = np.zeros(core.blocks.capacity, np.uint8)
    states[dump["entries"]] = dump["states"]
    for entries in held:
        assert (states[entries] >= BlockState.READY).all(), "something that is being written is pinned"


def _check_retention(core: CoreState, dump: Dump) -> None:
    """Only blocks that are there have retention requests; these are counted, and are looked at in time."""
    retention = core.retention
    held = np.flatnonzero(retention.held_until)
    states = np.zeros(core.blocks.capacity, np.uint8)
    states[dump["entries"]] = dump["states"]
    assert (states[held] == BlockState.READY).all(), "something is held that is not READY"
    domains = core.blocks.table.domains(held.astype(np.uint32)).tolist()
    assert retention.held == Counter(domains), "held blocks are counted wrongly"
    by_id = core.blocks.domains.by_id
    held_bytes = sum(by_id[number].block_bytes for number in domains)
    assert retention.held_bytes == held_bytes, f"{retention.held_bytes} bytes held, {held_bytes} counted"
    most = core.limits.held_fraction_max * core.blocks.geometry.capacity_bytes
    assert held_bytes <= most, "more is held than may be"
    timed = np.flatnonzero(retention.expires_at)
    assert (states[timed] != BlockState.ABSENT).all(), "a block that is gone has a time"
    flags = core.blocks.table.flags(timed.astype(np.uint32))
    assert (flags & BlockFlag.HOST_ONLY != 0).all(), "a block with a time may go to a disk"


def _check_writing(core: CoreState, dump: Dump, coming: Iterable[int]) -> None:
    """Every WRITING entry belongs to exactly one store or promotion, and has the slots that it writes."""
    stores = [transfer for transfer in core.transfers.values() if transfer.direction is Direction.STORE]
    written = [int(entry) for transfer in stores for entry in transfer.entries]
    written += [int(entry) for job in jobs_of(core, DiskJobKind.READ) for entry in job.host_entries]
    written += [int(entry) for entry in coming]
    writing = dump["entries"][dump["states"] == BlockState.WRITING].tolist()
    problem = f"stores and promotions write {sorted(written)}, the table has {writing} WRITING"
    assert sorted(written) == writing, problem
    for transfer in core.transfers.values():
        domain = transfer.instance.plans[transfer.group].domain
        slots = core.blocks.slots_of(domain, transfer.entries)
        assert np.array_equal(slots, transfer.slots), "a transfer copies other slots than its blocks'"


def _check_blocks(blocks: Blocks, dump: Dump, users: Counter[int]) -> None:
    """Blocks are counted rightly by domain and state, and domains are known exactly as long as someone uses
    them."""
    assert blocks.live == len(dump["entries"]), f"{blocks.live} entries counted, {len(dump['entries'])} there"
    evicting = dump["states"] == BlockState.EVICTING
    assert blocks.condemned == np.count_nonzero(evicting), "condemned blocks are counted wrongly"
    assert (dump["pins"][evicting] > 0).all(), "a condemned block outlived its last pin"
    by_domain = Counter(dump["domains"].tolist())
    assert set(by_domain) | set(users) == set(blocks.domains.by_id), "idle or unknown domains"
    for domain in blocks.domains.by_id.values():
        assert domain.blocks == by_domain[domain.domain], f"{domain.sizes} counts {domain.blocks} blocks"
        assert domain.users == users[domain.domain], f"{domain.sizes} counts {domain.users} users"
    assert set(dump["spaces"].tolist()) <= blocks.spaces.names.keys(), "a block's space has been forgotten"
    assert int(blocks.used_at.max()) <= blocks.now, "a block was used in the future"


def _check_spaces(core: CoreState, users: Counter[SpaceId]) -> None:
    spaces = core.blocks.spaces
    assert {space: key for key, space in spaces.ids.items()} == spaces.names, "two spaces share an id"
    assert len(spaces.ids) == len(spaces.names)
    assert spaces.users == users, "users of spaces are counted wrongly"


def _check_slots(blocks: Blocks, dump: Dump) -> None:
    """Each slot of each assigned extent is either free, owned, quarantined or corrupt, and has the right
    size."""
    slots = blocks.slots
    worlds = {number: domain.world for number, domain in blocks.domains.by_id.items()}
    expected = np.array([worlds[number] for number in dump["domains"].tolist()], np.int64)
    assert np.array_equal(dump["slot_counts"], expected), "a block does not have a slot for every shard"
    sizes = [size for number in dump["domains"].tolist() for size in blocks.domains.by_id[number].sizes]
    owned = dump["slots"]
    lie_in = slots.extent_size[slots.geometry.extent_of(owned)]
    assert np.array_equal(lie_in, np.array(sizes, np.int64)), "a slot lies in an extent of another size"

    quarantined = np.array(sorted(slots.quarantined), np.uint32)
    quarantined_sizes = slots.extent_size[slots.geometry.extent_of(quarantined)]
    corrupt = np.array(sorted(slots.corrupt), np.uint32)
    corrupt_sizes = slots.extent_size[slots.geometry.extent_of(corrupt)]
    known = {slot_bytes: (extents, total, free) for slot_bytes, extents, total, free in slots.sizes()}
    assigned = np.flatnonzero(slots.extent_size)
    assert set(slots.extent_size[assigned].tolist()) == set(known), "a size has no extents"
    assert len(assigned) + slots.extents_free == slots.extents, "an extent was lost"
    assert not slots.extent_size[slots.extents :].any(), "an extent without memory is in use"
    for slot_bytes, (extents, total, free) in known.items():
        own = np.flatnonzero(slots.extent_size == slot_bytes)
        everything = np.concatenate([slots.geometry.slots_of(e, slot_bytes) for e in own.tolist()])
        assert (extents, total) == (len(own), len(everything)), f"slots of {slot_bytes} bytes are miscounted"
        per_extent = slots.geometry.slots_per_extent(slot_bytes)
        assert (slots.extent_slots[own] == per_extent).all(), "an extent's slots are miscounted"
        found = np.concatenate(
            (
                free_slots(slots, slot_bytes),
                owned[lie_in == slot_bytes],
                quarantined[quarantined_sizes == slot_bytes],
                corrupt[corrupt_sizes == slot_bytes],
            )
        )
        assert len(free_slots(slots, slot_bytes)) == free
        assert np.array_equal(np.sort(found), np.sort(everything)), (
            f"slots of {slot_bytes} bytes: {len(found)} accounted for, of these {len(np.unique(found))} "
            f"different ones; {len(everything)} in all"
        )


# --- workers, sessions, instances ---


def _check_workers(core: CoreState) -> None:
    for name, worker in core.workers.items():
        assert worker.worker == name
        assert worker.state is not WorkerState.GONE, "a gone worker is kept"
        for session, mapping in worker.mappings.items():
            assert (mapping.worker, mapping.session.session) == (worker, session)
            assert mapping in mapping.session.instance.mappings, "an instance has forgotten a mapping"
            lost = mapping.state is MappingState.LOST
            assert lost == (worker.state is WorkerState.LOST), f"{worker.describe()}: {mapping.describe()}"
            assert mapping.state is not MappingState.GONE, "a gone mapping is kept"
            current = mapping.session.mapping is mapping
            assert current == (mapping.state is MappingState.MAPPED), f"a session's: {mapping.describe()}"
            for number, part in mapping.parts.items():
                assert core.parts.get(number) is part, "a mapping holds a part that is over"
                assert part.mapping is mapping
                assert part.state is (TransferPartState.LOST if lost else TransferPartState.POSTED), (
                    part.describe()
                )
    mappings = [mapping for worker in core.workers.values() for mapping in worker.mappings.values()]
    parts = sum(len(mapping.parts) for mapping in mappings)
    assert parts == len(core.parts), f"{len(core.parts)} parts are open, workers hold {parts}"


def _check_sessions(core: CoreState) -> None:
    for name, session in core.sessions.items():
        assert session.session == name
        assert session.instance.sessions.get(name) is session, "a session's instance does not know it"
        assert core.instances.get(session.instance.epoch) is session.instance, "a session without instance"
        if session.mapping is not None:
            assert not session.instance.over, "a session of an ended epoch has a mapping"
        assert not (session.lost and session.registered), "a registered session counts as lost"
    numbered = {((instance.owner, instance.name), instance.number) for instance in core.instances.values()}
    names, numbers = {name for name, _ in numbered}, {number for _, number in numbered}
    assert len(numbered) == len(names) == len(numbers), "two names have one number, or one has two"
    attached = sum(len(instance.sessions) for instance in core.instances.values())
    assert attached == len(core.sessions), "a session was lost"


def _check_instance(core: CoreState, instance: Instance) -> None:
    over = instance.state is InstanceState.FENCING
    assert instance.state is not InstanceState.GONE, "a gone instance is kept"
    assert core.instances.get(instance.epoch) is instance
    assert (core.names.get((instance.owner, instance.name)) is instance) == (not over), (
        f"names: {instance.describe()}"
    )
    if over:
        assert instance.mappings, "an ended instance without mappings is kept"
        assert not instance.leases, "leases outlived their epoch"
    complete = len(instance.ranks) == instance.world_size
    assert (instance.digest is not None) == complete
    ready = complete and all(session.registered for session in instance.ranks.values())
    assert over or instance.live == ready, f"ready is {ready}: {instance.describe()}"
    for rank, session in instance.ranks.items():
        assert (session.rank, instance.sessions.get(session.session)) == (rank, session)
    for mapping in instance.mappings:
        assert mapping.worker.mappings.get(mapping.session.session) is mapping, "a mapping without worker"
    plan_of = [instance.plans[lease.group] for lease in instance.leases.values()]
    sizes = [len(lease.entries) for lease in instance.leases.values()]
    leased = sum(count * plan.domain.block_bytes for count, plan in zip(sizes, plan_of, strict=True))
    assert (instance.leased_blocks, instance.leased_bytes) == (sum(sizes), leased), "leases are miscounted"
    assert len(instance.leases) <= core.limits.leases_max
    assert len(instance.transfers) <= core.limits.transfers_max
    assert len(instance.ended) <= core.limits.terminal_kept
    assert instance.ended_keys == sum(len(ended.succeeded) for ended in instance.ended.values())
    assert instance.ended_keys <= core.limits.transfers_max * core.limits.transfer_blocks_max
    assert len(instance.expired) <= EXPIRED_KEPT
    words = [transfer.part_word for transfer in instance.transfers.values()]
    assert len(words) == len(set(words)), "two transfers share a part word"
    assert set(words) == instance.words_in_use, "part words are not what transfers use"
    assert all(0 < ticket <= instance.last_ticket for ticket in (*instance.transfers, *instance.ended))
    assert not instance.transfers.keys() & instance.ended.keys(), "a transfer is active and has ended"


# --- leases and transfers ---


def _check_lease_room(core: CoreState) -> None:
    """What counts as held for loads is what leases and running loads hold, each block once."""
    room = core.lease_budget
    everything = np.zeros(core.blocks.capacity, np.int64)
    everybody = np.arange(core.blocks.capacity, dtype=np.uint32)
    for instance in core.instances.values():
        own = np.zeros(core.blocks.capacity, np.int64)
        size = np.zeros(core.blocks.capacity, np.int64)
        holders = [(lease.entries, lease.group) for lease in instance.leases.values()]
        for transfer in instance.transfers.values():
            if transfer.direction is Direction.LOAD:
                holders.append((transfer.entries, transfer.group))
        for entries, group in holders:
            np.add.at(own, entries, 1)
            size[entries] = room.block_bytes(instance.plans[group].domain)
        everything += own
        assert (instance.held.counts.of(everybody) == own).all(), (
            f"held blocks are miscounted: {instance.describe()}"
        )
        assert instance.held.bytes == size.sum(), f"held bytes are miscounted: {instance.describe()}"
    of_tenant: Counter[TenantTag] = Counter()
    for instance in core.instances.values():
        of_tenant[instance.held.tenant] += instance.held.bytes
    assert room._held_bytes == +of_tenant, "what a tenant holds is miscounted"
    here = Counter(tag_of(each.owner.tenant) for each in core.instances.values() if not each.over)
    under_way: Counter[str] = Counter(each.instance.owner.tenant for each in core.transfers.values())
    assert {tenant: each.transfers for tenant, each in core.under_way.items() if each.transfers} == under_way
    assert sum(each.blocks for each in core.under_way.values()) == sum(
        transfer.keys for transfer in core.transfers.values()
    )
    assert core.tenants._here == here, "the tenants that are here are miscounted"
    assert (room.all.counts.of(everybody) == everything).all(), "held blocks are miscounted"
    held = np.flatnonzero(everything).astype(np.uint32)
    of_domain = Counter(core.blocks.table.domains(held).tolist())
    by_id = core.blocks.domains.by_id
    assert room.all.bytes == sum(n * room.block_bytes(by_id[domain]) for domain, n in of_domain.items())
    assert room.all.bytes <= room.leasable_bytes or len(held) == 1, "more is held than may be"


def _check_leases(core: CoreState) -> None:
    for name, lease in core.leases.items():
        assert lease.lease == name
        assert lease.state is LeaseState.HELD, f"kept: {lease.describe()}"
        assert lease.instance.leases.get(name) is lease
    assert sum(len(instance.leases) for instance in core.instances.values()) == len(core.leases)


def _check_transfer(core: CoreState, transfer: TransferJob) -> None:
    instance = transfer.instance
    assert transfer.state in (TransferJobState.ACTIVE, TransferJobState.CLOSING), (
        f"kept: {transfer.describe()}"
    )
    assert instance.transfers.get(transfer.ticket) is transfer
    assert len(transfer.parts) == instance.world_size, "a rank has no part"
    open_parts = [part for part in transfer.parts if part.state in OPEN_PARTS]
    assert transfer.open_parts == len(open_parts), f"{transfer.open_parts} parts counted"
    assert open_parts, f"all parts have ended: {transfer.describe()}"
    for part in open_parts:
        assert core.parts.get(part.part) is part, "an open part was forgotten"
    spoiled = transfer.cause is not None
    assert spoiled == (transfer.state is TransferJobState.CLOSING), transfer.describe()
    bad = [
        part for part in transfer.parts if part.state in (TransferPartState.FAILED, TransferPartState.REVOKED)
    ]
    assert spoiled or not bad, "a part has failed and the transfer does not know"
    assert (transfer.failed is not None) == bool(bad), "which blocks have failed is not known, or made up"
    assert transfer.abandoned == instance.over, "abandoned exactly with its epoch"
    asked = transfer.revoked or transfer.abandoned
    assert (transfer.transfer in core.deadlines) != asked, "a deadline is watched in vain, or not at all"


def _check_transfers_together(core: CoreState) -> None:
    assert set(core.deadlines) <= set(core.transfers)
    deadlines = [transfer.deadline_s for transfer in core.deadlines.values()]
    assert deadlines == sorted(deadlines), "deadlines are out of order"
    assert sum(len(instance.transfers) for instance in core.instances.values()) == len(core.transfers)
    open_parts = sum(transfer.open_parts for transfer in core.transfers.values())
    assert open_parts == len(core.parts), f"{len(core.parts)} parts open, transfers count {open_parts}"


# --- doubts ---


def _check_doubts(core: CoreState, dump: Dump) -> None:
    """Corrupt blocks cannot be found, blocks that need verification are flagged, and the check that is under
    way has a worker."""
    blocks = core.blocks
    _check_condemned(blocks, dump)
    evicting = dump["states"] == BlockState.EVICTING
    flags = dump["flags"]
    doubted = flags & BlockFlag.VERIFY != 0
    assert doubted[evicting].all(), "a condemned block would be loaded unseen"
    if blocks.integrity.verify is Verify.ALWAYS:
        assert doubted.all(), "a block would be loaded unverified"
    assert doubted[flags & BlockFlag.RECOVERED != 0].all(), "a recovered block would be loaded unverified"
    assert {digest for digest, _ in blocks.spaces.ids} >= set(blocks.spaces.about), "a namespace has no space"
    check = core.check
    if check is not None:
        assert core.workers.get(check.worker.worker) is check.worker, "a check's worker is gone"
        assert (check.worker.state, check.state) == (WorkerState.LIVE, CheckState.OPEN), check.describe()
        lengths = {len(check.slots), len(check.sizes), len(check.entries), len(check.generations)}
        assert len(lengths) == 1, "a check does not know what it asks about"


def _check_condemned(blocks: Blocks, dump: Dump) -> None:
    """Slots known to be corrupt belong to blocks that cannot be found, or are set aside."""
    starts = np.cumsum(dump["slot_counts"]) - dump["slot_counts"]
    bad = np.isin(dump["slots"], np.array(sorted(blocks.corrupt), np.uint32))
    assert np.count_nonzero(bad) == len(blocks.corrupt), "a corrupt slot has no block, and is not set aside"
    of_block = np.searchsorted(starts, np.flatnonzero(bad), "right") - 1
    assert (dump["states"][of_block] == BlockState.EVICTING).all(), "a block with a corrupt slot can be found"
    assert not blocks.slots.corrupt & blocks.slots.quarantined, "a slot is quarantined twice"
