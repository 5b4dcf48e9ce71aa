"""How parts end, and with the last of them their transfer: what is committed, what is freed, what clients
hear."""

import numpy as np

from kvtierd.core.actions import Direction, TransferEnd, TransferEnded
from kvtierd.core.blocks.blocks import RECOVERED
from kvtierd.core.blocks.history import Fate
from kvtierd.core.blocks.table import U8, U32, BlockState
from kvtierd.core.errors import Reason, Refusal
from kvtierd.core.state.core_state import CoreState
from kvtierd.core.state.entities import Instance, TransferJob, TransferPart, WorkerMapping
from kvtierd.core.state.transitions import Event, TransferPartState
from kvtierd.core.stimuli import PartFinished, PartOutcome
from kvtierd.core.tier import Tier
from kvtierd.core.transfers.transfers import Transfers

READY = int(BlockState.READY)
_NONE = np.empty(0, np.uint32)


class Fencing:
    def __init__(self, core: CoreState, transfers: Transfers, tier: Tier) -> None:
        self._core = core
        self._tier = tier
        self._blocks = core.blocks
        self._transfers = transfers

    # --- parts ---

    def part_finished(self, stimulus: PartFinished) -> None:
        """A worker has ended a part. Messages about parts that are over, or from lost workers, are only
        counted."""
        part = self._core.parts.get(stimulus.part)
        if (
            part is None
            or part.state is not TransferPartState.POSTED
            or part.mapping.worker.worker != stimulus.worker
        ):
            self._core.tally.late_messages += 1
            return
        self._tier.part_finished(part, stimulus)
        outcome, failed = stimulus.outcome, stimulus.failed
        if outcome is PartOutcome.DONE and len(failed) == 0:
            self._end(part, Event.DONE, _NONE, None)
            return
        all_failed = outcome is not PartOutcome.DONE and len(failed) == 0
        if all_failed or int(failed.max()) >= part.blocks:
            failed = _all(part)
        if stimulus.corrupt and part.transfer.direction is Direction.LOAD:
            self._condemn(part, failed)
        self._end(part, _EVENT[outcome], failed, _why(stimulus))

    def _condemn(self, part: TransferPart, failed: U32) -> None:
        """Condemns blocks whose records or data did not match when they were to be loaded. The load's pins
        hold them."""
        blocks, tally, transfer = self._blocks, self._core.tally, part.transfer
        shard = transfer.instance.plans[transfer.group].shard(part.mapping.session.rank)
        condemned = blocks.condemn(transfer.entries[failed], transfer.slots[shard][failed])
        recovered = int(np.count_nonzero(blocks.table.flags(condemned) & RECOVERED))
        tally.corrupt_after_restart += recovered
        tally.corrupt_on_load += len(condemned) - recovered

    def mapping_released(self, mapping: WorkerMapping) -> None:
        """The worker has fenced the whole mapping. Parts whose end it has not reported have failed."""
        why = Refusal(Reason.CANCELLED, "the rank's memory was taken back")
        for part in list(mapping.parts.values()):
            self._end(part, Event.SESSION_RELEASED, _all(part), why)

    def parts_lost(self, mapping: WorkerMapping, why: Refusal) -> None:
        """The worker is lost: its parts cannot succeed any more, but may still be copying."""
        for part in mapping.parts.values():
            self._core.step(part, Event.LOSE)
            self._transfers.spoil(part.transfer, why, cancelled=False)
            self._transfers.revoke_rest(part.transfer)

    def parts_exited(self, mapping: WorkerMapping) -> None:
        """The lost worker's process is gone, so no copy of its parts can still land."""
        for part in list(mapping.parts.values()):
            self._end(part, Event.EXIT, _all(part), part.transfer.cause)

    def _end(self, part: TransferPart, event: Event, failed: U32, why: Refusal | None) -> None:
        """Ends a part. `failed` has positions in it, and `why` is None if it went well."""
        core, transfer = self._core, part.transfer
        core.step(part, event)
        del core.parts[part.part], part.mapping.parts[part.part]
        transfer.open_parts -= 1
        if why is not None:
            if transfer.failed is None:
                transfer.failed = np.zeros(len(transfer.entries), np.bool_)
            transfer.failed[failed] = True
            self._transfers.spoil(transfer, why, cancelled=part.state is TransferPartState.REVOKED)
            if transfer.failed.all():
                self._transfers.revoke_rest(transfer)  # no block is left that the other ranks could complete
        if transfer.open_parts == 0:
            self._finish(transfer)

    # --- transfers ---

    def _finish(self, transfer: TransferJob) -> None:
        """Ends a transfer whose parts are all fenced."""
        core = self._core
        instance = transfer.instance
        if transfer.abandoned:
            transfer.failed = np.ones(len(transfer.entries), np.bool_)
        whole = not transfer.abandoned and all(
            part.state is TransferPartState.DONE for part in transfer.parts
        )
        succeeded = (
            self._store_ended(transfer)
            if transfer.direction is Direction.STORE
            else self._load_ended(transfer)
        )
        del core.transfers[transfer.transfer], instance.transfers[transfer.ticket]
        core.deadlines.pop(transfer.transfer, None)
        if core.under_way[instance.owner.tenant].remove(transfer.keys):
            del core.under_way[instance.owner.tenant]
        instance.words_in_use.discard(transfer.part_word)
        if whole:
            core.step(transfer, Event.DONE)
            core.tally.done_transfers += 1
            end, error = TransferEnd.DONE, None
        elif transfer.cancelled:
            core.step(transfer, Event.CANCEL)
            core.tally.cancelled_transfers += 1
            end, error = TransferEnd.CANCELLED, transfer.cause
        else:
            core.step(transfer, Event.FAIL)
            core.tally.failed_transfers += 1
            end, error = TransferEnd.FAILED, transfer.cause
        took_s = core.now_s - (transfer.deadline_s - core.limits.transfer_deadline_s)
        if transfer.direction is Direction.STORE:
            core.tally.store_transfers += 1
            core.tally.store_transfer_s += took_s
        else:
            core.tally.load_transfers += 1
            core.tally.load_transfer_s += took_s
        if not instance.over:
            ended = TransferEnded(transfer.transfer, transfer.ticket, end, succeeded, error)
            self._remember(instance, ended)
            core.notify(transfer.submitter, ended)

    def _store_ended(self, transfer: TransferJob) -> U8:
        """Commits the blocks whose every shard has landed, and removes the others."""
        plan = transfer.instance.plans[transfer.group]
        blocks, domain = self._blocks, plan.domain
        entries, slots = transfer.entries, transfer.slots
        good = entries
        if transfer.failed is not None:
            ok = ~transfer.failed
            good = entries[ok]
            blocks.commit(domain, good, slots[:, ok])
            why = transfer.cause.reason if transfer.cause is not None else None
            blocks.remember(entries[~ok], Fate.STORE_ENDED, why)
            blocks.discard(domain, entries[~ok], slots[:, ~ok])
        else:
            blocks.commit(domain, good, slots)
        self._tier.stored(plan, good)
        self._core.retention.stored(domain, good, transfer)
        for tally in (self._core.tally, transfer.instance.tally):
            tally.stored_blocks += len(good)
            tally.stored_bytes += len(good) * domain.block_bytes
        if transfer.positions is None and transfer.failed is None:
            succeeded = np.ones(transfer.keys, np.uint8)
        else:
            succeeded = np.zeros(transfer.keys, np.uint8)
            positions = np.arange(transfer.keys) if transfer.positions is None else transfer.positions
            succeeded[positions] = 1 if transfer.failed is None else ~transfer.failed
        if len(transfer.existing):
            still = blocks.table.states(transfer.existing) == READY
            succeeded[transfer.existing_positions[still]] = 1
            self._drop_existing(transfer)
        return succeeded

    def _drop_existing(self, transfer: TransferJob) -> None:
        """Unpins the blocks that were there already, and makes the whole batch recent, its head most of
        all."""
        blocks, domain = self._blocks, transfer.instance.plans[transfer.group].domain
        blocks.table.unpin(np.ascontiguousarray(transfer.existing[::-1]))
        batch = transfer.batch
        assert batch is not None
        if transfer.failed is not None and transfer.failed.any():
            batch = batch[~np.isin(batch, transfer.entries[transfer.failed])]
        blocks.touch(batch)
        if blocks.condemned:
            blocks.reap(domain, transfer.existing)

    def _load_ended(self, transfer: TransferJob) -> U8:
        """Drops the pins. Blocks that every rank has verified need not be verified again."""
        blocks, domain = self._blocks, transfer.instance.plans[transfer.group].domain
        entries = transfer.entries
        good = entries if transfer.failed is None else entries[~transfer.failed]
        if transfer.verified is not None and len(good):
            verified = good[np.isin(good, transfer.verified)]
            sound = verified[blocks.table.states(verified) == READY]
            blocks.sound(sound)
        blocks.unpin(domain, entries)
        self._core.lease_budget.remove(transfer.instance.held, domain, entries)
        for tally in (self._core.tally, transfer.instance.tally):
            tally.loaded_blocks += len(good)
            tally.loaded_bytes += len(good) * domain.block_bytes
        if transfer.failed is None:
            return np.ones(transfer.keys, np.uint8)
        return (~transfer.failed).astype(np.uint8)

    def _remember(self, instance: Instance, ended: TransferEnded) -> None:
        limits = self._core.limits
        keys_max = limits.transfers_max * limits.transfer_blocks_max
        instance.ended[ended.ticket] = ended
        instance.ended_keys += len(ended.succeeded)
        while len(instance.ended) > limits.terminal_kept or instance.ended_keys > keys_max:
            oldest = instance.ended.pop(next(iter(instance.ended)))
            instance.ended_keys -= len(oldest.succeeded)


_EVENT = {
    PartOutcome.DONE: Event.FAIL,  # a part that is DONE, but names failed blocks
    PartOutcome.FAILED: Event.FAIL,
    PartOutcome.REVOKED: Event.REVOKED,
    PartOutcome.GATE_DEADLINE: Event.GATE_DEADLINE,
}


def _all(part: TransferPart) -> U32:
    return np.arange(part.blocks, dtype=np.uint32)


def _why(stimulus: PartFinished) -> Refusal:
    match stimulus.outcome:
        case PartOutcome.REVOKED:
            return Refusal(Reason.REVOKED, stimulus.message or "a part was revoked before it started")
        case PartOutcome.GATE_DEADLINE:
            return Refusal(
                Reason.GATE_DEADLINE, stimulus.message or "a rank's doorbell did not reach its value in time"
            )
    if stimulus.corrupt:
        return Refusal(
            Reason.CORRUPT,
            stimulus.message or "blocks did not match their records; they are misses from now on",
        )
    return Refusal(Reason.COPY_FAILED, stimulus.message or "a copy failed")
