"""Stores and loads: how they are submitted and cancelled. How their parts end is in `fencing.py`."""

import numpy as np
import numpy.typing as npt

from kvtierd.core.actions import Direction, OpenSlots, PostPart, RevokePart, SubmitReply
from kvtierd.core.blocks.history import Fate
from kvtierd.core.blocks.table import U8, BlockFlag, BlockState
from kvtierd.core.errors import Reason, Refusal
from kvtierd.core.ids import Entries, PartId, Rank, Slots, TransferNumber
from kvtierd.core.state.core_state import NOTHING_UNDER_WAY, CoreState
from kvtierd.core.state.entities import GroupPlan, Instance, TransferJob, TransferPart
from kvtierd.core.state.transitions import Event, MappingState, TransferPartState
from kvtierd.core.stimuli import CancelTransfers, Signals, SubmitLoad, SubmitStore
from kvtierd.core.tier import Tier
from kvtierd.core.transfers.checks import check_hashes
from kvtierd.core.transfers.leases import Leases
from kvtierd.core.transfers.making_room import (
    ACCEPTED,
    CREATED,
    EXISTS,
    PENDING,
    THROTTLED,
    UNWANTED,
    make_room,
)

TICKET_MAX = 2**56 - 1
PINS_MANY = 1 << 19
"""Far below what the table can count, and far more than a batch can add."""
EXISTED, TABLE_FULL = 0, 2

_RESULT = np.full(len(BlockState), THROTTLED, np.uint8)
"""The kvtier.v1.StoreResult of a key that was there, by its state. A condemned block is in the way until its
pins are dropped, so the key is throttled."""
_RESULT[BlockState.WRITING] = PENDING
_RESULT[BlockState.READY] = EXISTS

_NO_ENTRIES = np.empty(0, np.uint32)
_NO_POSITIONS = np.empty(0, np.intp)
VERIFY = int(BlockFlag.VERIFY)


class Transfers:
    def __init__(self, core: CoreState, leases: Leases, tier: Tier) -> None:
        self._core = core
        self._blocks = core.blocks
        self._leases = leases
        self._tier = tier

    # --- stores ---

    def submit_store(self, stimulus: SubmitStore) -> SubmitReply:
        """Accepts as many blocks as there is room for, only whole ones, and posts a part to every rank."""
        core, blocks = self._core, self._blocks
        instance, plan = self._may_submit(stimulus)
        hashes = stimulus.hashes
        check_hashes(hashes, core.limits.transfer_blocks_max)
        self._check_block_ids(stimulus.block_ids, plan)
        if len(hashes) != len(stimulus.block_ids):
            raise Refusal(
                Reason.COUNT_MISMATCH,
                f"one block id for each of the {len(hashes)} hashes",
                field="block_ids",
                value=len(stimulus.block_ids),
            )
        instance.alive_at_s = core.now_s

        domain = plan.domain
        core.shadow.stored(plan, hashes, stimulus.chains)
        inserted = blocks.insert(plan.space, domain, hashes)
        entries, created = inserted.entries, inserted.created
        existing, existing_positions = _NO_ENTRIES, _NO_POSITIONS
        new = entries
        results: U8 = np.zeros(len(hashes), np.uint8)
        if inserted.count < len(hashes):
            existing, existing_positions = self._pin_existing(entries, created)
            if TABLE_FULL in created:
                self._make_entries(plan, hashes, entries, created)
            results = self._results(entries, created)
            new = entries[created == CREATED]
        core.retention.requested(new, entries[created == EXISTED], stimulus.retention)
        room = make_room(core, self._tier, plan, new, entries, created, stimulus.chains)
        accepted = None
        if room.results is not None:
            accepted = np.flatnonzero(created == CREATED)
            results[accepted] = room.results
            twice = np.flatnonzero((created == EXISTED) & (results == PENDING))
            if len(twice):  # the batch may name a new block twice; one that is accepted is on its way
                result_of = dict(zip(new.tolist(), room.results.tolist(), strict=True))
                results[twice] = [
                    result_of.get(entry, ACCEPTED) or PENDING for entry in entries[twice].tolist()
                ]
            kept = room.results == ACCEPTED
            new, accepted = new[kept], accepted[kept]
        slots = room.slots

        transfer = self._begin(instance, stimulus, Direction.STORE, len(hashes), new, slots)
        transfer.retention = stimulus.retention
        if plan.replicated:  # ranks take turns, so that no GPU's link carries more than another's
            transfer.storing = Rank(transfer.transfer % instance.world_size)
        block_ids, new_hashes = stimulus.block_ids, hashes
        if len(new) < len(hashes):
            if accepted is None:
                accepted = np.flatnonzero(created == CREATED)
            transfer.positions = accepted
            transfer.existing, transfer.existing_positions = existing, existing_positions
            transfer.batch = entries[np.sort(np.concatenate((existing_positions, accepted)))]
            block_ids, new_hashes = block_ids[accepted], hashes[accepted]
            tally = core.tally
            throttled = int(np.count_nonzero(results == THROTTLED))
            unwanted = int(np.count_nonzero(results == UNWANTED))
            if throttled:
                blocks.history.remember(plan.space, hashes[results == THROTTLED], Fate.REFUSED, blocks.now)
            if unwanted:
                blocks.history.remember(plan.space, hashes[results == UNWANTED], Fate.UNWANTED, blocks.now)
            tally.throttled_blocks += throttled
            tally.unwanted_blocks += unwanted
            tally.deduplicated_blocks += int(np.count_nonzero((results == EXISTS) | (results == PENDING)))
        if len(new):
            self._open_slots(transfer, plan, new_hashes)
        self._post(transfer, stimulus.signals, block_ids, None)
        return SubmitReply(transfer.transfer, results)

    def _pin_existing(self, entries: Entries, created: U8) -> tuple[Entries, npt.NDArray[np.intp]]:
        """Pins the blocks that are READY already, because making room for the others must not evict their
        prefix."""
        positions = np.flatnonzero(created == EXISTED)
        states = self._blocks.table.states(entries[positions])
        positions = positions[states == BlockState.READY]
        existing = entries[positions]
        try:
            self._blocks.table.pin(existing)
        except ValueError:  # some have so many pins that they will stay anyway
            few = self._blocks.table.pins(existing) < PINS_MANY
            existing, positions = existing[few], positions[few]
            self._blocks.table.pin(existing)
        self._blocks.used_at[existing] = self._blocks.now
        return existing, positions

    def _make_entries(self, plan: GroupPlan, hashes: U8, entries: Entries, created: U8) -> None:
        """Makes room in the table for keys that found none, and tries them again. Updates `entries` and
        `created`."""
        left_out = np.flatnonzero(created == TABLE_FULL)
        self._core.eviction.for_entries(plan.domain, len(left_out), unhold=True)
        again = self._blocks.insert(plan.space, plan.domain, np.ascontiguousarray(hashes[left_out]))
        entries[left_out], created[left_out] = again.entries, again.created

    def _results(self, entries: Entries, created: U8) -> U8:
        results = np.full(len(created), THROTTLED, np.uint8)
        results[created == CREATED] = ACCEPTED
        existed = np.flatnonzero(created == EXISTED)
        results[existed] = _RESULT[self._blocks.table.states(entries[existed])]
        return results

    def _open_slots(self, transfer: TransferJob, plan: GroupPlan, hashes: U8) -> None:
        instance = transfer.instance
        assert instance.digest is not None
        for shard, data_bytes in enumerate(plan.domain.sizes):
            rank = Rank(shard) if transfer.storing is None else transfer.storing
            mapping = instance.ranks[rank].mapping
            assert mapping is not None
            self._blocks.actions.append(
                OpenSlots(
                    slots=transfer.slots[shard],
                    worker=mapping.worker.worker,
                    store=transfer.transfer,
                    namespace=instance.digest,
                    group=transfer.group,
                    shard=Rank(shard),
                    world_size=plan.domain.world,
                    hashes=hashes,
                    data_bytes=data_bytes,
                )
            )

    # --- loads ---

    def submit_load(self, stimulus: SubmitLoad) -> SubmitReply:
        """Loads a run of a lease's blocks, which the transfer holds from now on."""
        core, blocks = self._core, self._blocks
        instance, plan = self._may_submit(stimulus)
        block_ids = stimulus.block_ids
        lease = self._leases.held(instance, stimulus.lease)
        if lease.group != stimulus.group:
            raise Refusal(
                Reason.UNKNOWN_GROUP,
                f"the lease holds blocks of group {lease.group}",
                field="group",
                value=stimulus.group,
            )
        self._check_block_ids(block_ids, plan)
        if len(np.unique(block_ids)) != len(block_ids):
            values, counts = np.unique(block_ids, return_counts=True)
            raise Refusal(
                Reason.BLOCK_ID_DUPLICATE,
                "a load writes each engine block once",
                field="block_ids",
                value=values[counts > 1][0],
            )
        first, end = stimulus.first, stimulus.first + len(block_ids)
        if first < 0 or end > len(lease.entries):
            raise Refusal(
                Reason.COUNT_MISMATCH,
                f"the lease holds {len(lease.entries)} blocks",
                field="first",
                value=f"{first}, {len(block_ids)} blocks",
            )
        entries = lease.entries[first:end]
        if stimulus.keep_lease:
            try:
                blocks.table.pin(entries)
            except ValueError as error:
                raise Refusal(Reason.QUEUE_FULL, f"too many hold these blocks at once: {error}") from error
            core.step(lease, Event.LOAD_AND_KEEP)
        else:
            self._leases.consume(lease, first, end)
        core.lease_budget.add(instance.held, plan.domain, entries)
        instance.alive_at_s = core.now_s

        slots = blocks.slots_of(plan.domain, entries)
        blocks.mark_used(entries, slots)
        transfer = self._begin(instance, stimulus, Direction.LOAD, len(entries), entries, slots)
        verify: U8 = np.bitwise_and(blocks.table.flags(entries), VERIFY, dtype=np.uint8)
        if verify.any():
            transfer.verified = np.unique(entries[verify != 0])
        self._post(transfer, stimulus.signals, block_ids, None if transfer.verified is None else verify)
        return SubmitReply(transfer.transfer, np.empty(0, np.uint8))

    # --- both ---

    def _may_submit(self, stimulus: SubmitStore | SubmitLoad) -> tuple[Instance, GroupPlan]:
        core = self._core
        instance = core.submitter(stimulus.session, stimulus.epoch)
        if core.draining:
            raise Refusal(Reason.DRAINING, "the daemon is being stopped: go on without it")
        if not instance.live:
            raise Refusal(
                Reason.INSTANCE_INCOMPLETE,
                "some rank has not attached or not registered its memory: wait for the instance to be ready",
                field="epoch",
                value=instance.epoch,
            )
        plan = core.plan(instance, stimulus.group)
        self._check_signals(instance, stimulus.signals)
        if len(instance.transfers) >= core.limits.transfers_max:
            raise Refusal(
                Reason.QUEUE_FULL,
                f"an instance may have {core.limits.transfers_max} transfers in flight: wait for one to end",
                field="signals.ticket",
                value=stimulus.signals.ticket,
            )
        under_way = core.under_way.get(instance.owner.tenant, NOTHING_UNDER_WAY)
        blocks = stimulus.block_ids.size  # its shape is checked later
        if (
            under_way.transfers >= core.limits.tenant_transfers_max
            or under_way.blocks + blocks > core.limits.tenant_blocks_max
        ):
            raise Refusal(
                Reason.QUEUE_FULL,
                f"the engines of tenant {instance.owner.tenant!r} have {under_way.transfers:,} transfers of "
                f"{under_way.blocks:,} blocks in flight, and {core.limits.tenant_transfers_max:,} of "
                f"{core.limits.tenant_blocks_max:,} are possible: wait for some to end "
                "(limits.tenant_transfers_max, limits.tenant_blocks_max)",
                field="block_ids",
                value=blocks,
            )
        return instance, plan

    @staticmethod
    def _check_signals(instance: Instance, signals: Signals) -> None:
        if not instance.last_ticket < signals.ticket <= TICKET_MAX:
            raise Refusal(
                Reason.TICKET_ORDER,
                f"tickets are strictly increasing and below 2^56; the last one was {instance.last_ticket}",
                field="signals.ticket",
                value=signals.ticket,
            )
        if not 0 <= signals.part_word < instance.part_words:
            raise Refusal(
                Reason.WORD_INDEX_RANGE,
                f"every rank has part words 0 to {instance.part_words - 1}",
                field="signals.part_word",
                value=signals.part_word,
            )
        if signals.part_word in instance.words_in_use:
            raise Refusal(
                Reason.WORD_INDEX_RANGE,
                "a transfer that has not ended uses this part word: take another, or wait for its event",
                field="signals.part_word",
                value=signals.part_word,
            )
        if signals.gated and not 0 <= signals.doorbell < instance.doorbells:
            raise Refusal(
                Reason.WORD_INDEX_RANGE,
                f"every rank has doorbells 0 to {instance.doorbells - 1}",
                field="signals.doorbell",
                value=signals.doorbell,
            )

    def _check_block_ids(self, block_ids: npt.NDArray[np.uint32], plan: GroupPlan) -> None:
        if block_ids.dtype != np.uint32 or block_ids.ndim != 1:
            raise Refusal(
                Reason.MALFORMED,
                "block ids are one row of 32-bit numbers",
                field="block_ids",
                value=f"{block_ids.dtype} {block_ids.shape}",
            )
        if len(block_ids) > self._core.limits.transfer_blocks_max:
            raise Refusal(
                Reason.TOO_MANY_BLOCKS,
                f"at most {self._core.limits.transfer_blocks_max} in one call: split it",
                field="block_ids",
                value=len(block_ids),
            )
        if len(block_ids) and int(block_ids.max()) >= plan.num_blocks:
            position = int(np.argmax(block_ids >= plan.num_blocks))
            raise Refusal(
                Reason.BLOCK_ID_RANGE,
                f"every rank has blocks 0 to {plan.num_blocks - 1}",
                field=f"block_ids[{position}]",
                value=block_ids[position],
            )

    def _begin(
        self,
        instance: Instance,
        stimulus: SubmitStore | SubmitLoad,
        direction: Direction,
        keys: int,
        entries: Entries,
        slots: Slots,
    ) -> TransferJob:
        core, signals = self._core, stimulus.signals
        transfer = TransferJob(
            transfer=TransferNumber(next(core.transfer_ids)),
            direction=direction,
            instance=instance,
            submitter=stimulus.session,
            ticket=signals.ticket,
            part_word=signals.part_word,
            group=stimulus.group,
            deadline_s=core.now_s + core.limits.transfer_deadline_s,
            keys=keys,
            entries=entries,
            slots=slots,
            existing=_NO_ENTRIES,
            existing_positions=_NO_POSITIONS,
        )
        core.transfers[transfer.transfer] = transfer
        core.under_way[instance.owner.tenant].add(keys)
        core.deadlines[transfer.transfer] = transfer
        instance.transfers[signals.ticket] = transfer
        instance.words_in_use.add(signals.part_word)
        instance.last_ticket = signals.ticket
        return transfer

    def _post(
        self,
        transfer: TransferJob,
        signals: Signals,
        block_ids: npt.NDArray[np.uint32],
        verify: U8 | None,
    ) -> None:
        """Posts one part for every rank. Empty ones are posted too, because every rank's part word has to
        end."""
        core, instance = self._core, transfer.instance
        plan = instance.plans[transfer.group]
        parts = []
        for rank in map(Rank, range(instance.world_size)):
            session = instance.ranks[rank]
            mapping = session.mapping
            assert mapping is not None
            assert mapping.registration is not None
            blocks = len(transfer.entries) if transfer.storing in (None, rank) else 0
            part = TransferPart(
                part=PartId(next(core.part_ids)), transfer=transfer, mapping=mapping, blocks=blocks
            )
            parts.append(part)
            core.parts[part.part] = part
            mapping.parts[part.part] = part
            self._blocks.actions.append(
                PostPart(
                    worker=mapping.worker.worker,
                    part=part.part,
                    direction=transfer.direction,
                    session=session.session,
                    registration=mapping.registration,
                    group=transfer.group,
                    signals=signals,
                    block_ids=block_ids[:blocks],
                    slots=transfer.slots[plan.shard(rank)][:blocks],
                    verify=verify,
                )
            )
        transfer.parts = tuple(parts)
        transfer.open_parts = len(parts)

    # --- calling off ---

    def cancel_tickets(self, stimulus: CancelTransfers) -> None:
        """Asks transfers to end early. Tickets that are unknown or have ended are ignored."""
        instance = self._core.submitter(stimulus.session, stimulus.epoch)
        for ticket in stimulus.tickets:
            transfer = instance.transfers.get(ticket)
            if transfer is not None:
                self.cancel(transfer, Refusal(Reason.CANCELLED, "the transfer was cancelled"))

    def cancel_overdue(self) -> None:
        core = self._core
        while core.deadlines:
            transfer = next(iter(core.deadlines.values()))
            if transfer.deadline_s > core.now_s:
                return
            self.cancel(
                transfer,
                Refusal(
                    Reason.DEADLINE,
                    f"the transfer had not ended after {core.limits.transfer_deadline_s:g} s",
                ),
            )

    def cancel(self, transfer: TransferJob, why: Refusal) -> None:
        """Asks all open parts to end. How they end decides how the transfer ends."""
        self.spoil(transfer, why, cancelled=True)
        self.revoke_rest(transfer)

    def abandon(self, transfer: TransferJob, why: Refusal) -> None:
        """The transfer's epoch is over and its sessions are released, so none of it will be committed."""
        self.spoil(transfer, why, cancelled=True)
        transfer.abandoned = True
        self._core.deadlines.pop(transfer.transfer, None)

    def spoil(self, transfer: TransferJob, why: Refusal, *, cancelled: bool) -> None:
        """The transfer cannot simply be DONE any more. Its first reason is the one that counts."""
        self._core.step(transfer, Event.SPOIL)
        if transfer.cause is None:
            transfer.cause = why
            transfer.cancelled = cancelled

    def revoke_rest(self, transfer: TransferJob) -> None:
        """Asks every part that may not have started to end, once. Mappings that are being released end theirs
        anyway."""
        self._core.deadlines.pop(transfer.transfer, None)
        if transfer.revoked:
            return
        transfer.revoked = True
        for part in transfer.parts:
            if part.state is TransferPartState.POSTED and part.mapping.state is MappingState.MAPPED:
                self._blocks.actions.append(RevokePart(part.mapping.worker.worker, part.part))
