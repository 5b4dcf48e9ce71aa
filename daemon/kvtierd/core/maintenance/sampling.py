"""Checks READY blocks in the background: a worker whose lanes are idle compares randomly chosen slots with
their checksums.

Every READY slot is as likely to be chosen as any other, so one that has rotted is found after `bytes of all
slots in use / rate` seconds on average, and after three times as long in 95 of 100 cases.
"""

import numpy as np
import numpy.typing as npt

from kvtierd.core.actions import CheckSlots
from kvtierd.core.blocks.table import BlockState
from kvtierd.core.ids import NO_ENTRY, CheckId, Slots
from kvtierd.core.state.core_state import CoreState
from kvtierd.core.state.entities import Check, WorkerRecord
from kvtierd.core.state.transitions import Event, WorkerState
from kvtierd.core.stimuli import SlotsChecked

HOST_DEVICE = "cpu"
"""The device whose worker does it. It is always there, and it has no link that could be kept busy."""
SLOTS_MAX = 8_192
"""Slots drawn at once, and so for one request, which has to fit into one packet."""
ASK_S = 0.85
"""Between two requests, unless the largest possible draw met too few slots in use: choosing takes longer than
most else that an idle daemon does, however few slots are chosen."""
SAVED_S = 1.0
"""What could not be read for want of an idle worker is made up for, up to this many seconds' worth."""
TICKS_PER_S = 10
"""Ticks per second, at least; each draws at most `SLOTS_MAX` slots, and does so if draws meet too few."""
READY = int(BlockState.READY)


class Sampler:
    """Chooses slots and has them checked, with at most one request under way."""

    def __init__(self, core: CoreState, bytes_per_s: int, randomness: np.random.Generator) -> None:
        self._core = core
        self._blocks = core.blocks
        self.bytes_per_s = bytes_per_s
        self._random = randomness
        self._credit_bytes = 0.0
        """Bytes that may be read now; below zero after a slot that was larger than the credit."""
        self._earned_at_s: float | None = None
        self._asks_at_s = 0.0
        """When to ask next, at the earliest."""
        self._drew_most = False
        """Whether the latest draw was of as many slots as there may be in one."""
        self._checks = 0

    def tick(self) -> None:
        """Asks for as many slots as the time since the last tick allows."""
        core = self._core
        since_s = 0.0 if self._earned_at_s is None else max(0.0, core.now_s - self._earned_at_s)
        self._earned_at_s = core.now_s
        self._credit_bytes = min(self._credit_bytes + self.bytes_per_s * since_s, self.bytes_per_s * SAVED_S)
        if core.check is not None or core.draining or self._credit_bytes <= 0:
            return
        if core.now_s < self._asks_at_s:
            return
        worker = self._worker()
        if worker is None:
            return
        slots, sizes = self._choose()
        if len(slots) == 0:
            return
        self._credit_bytes -= float(sizes.sum())
        if self._credit_bytes <= 0 or not self._drew_most:
            self._asks_at_s = core.now_s + ASK_S
        self._checks += 1
        entries = self._blocks.table.owners(slots)
        core.check = Check(
            check=CheckId(self._checks),
            worker=worker,
            slots=slots,
            sizes=sizes,
            entries=entries,
            generations=self._blocks.table.generations(entries),
        )
        self._blocks.actions.append(CheckSlots(worker.worker, core.check.check, slots))

    def checked(self, stimulus: SlotsChecked) -> None:
        """A worker has looked. Blocks that it found corrupt, and that are still the same blocks, are misses
        from now on."""
        core, table = self._core, self._blocks.table
        check = core.check
        if check is None or (check.check, check.worker.worker) != (stimulus.check, stimulus.worker):
            core.tally.late_messages += 1
            return
        core.step(check, Event.CHECKED)
        core.check = None
        looked_at = check.sizes[: stimulus.looked_at]
        core.tally.sampled_slots += len(looked_at)
        core.tally.sampled_bytes += int(looked_at.sum())
        self._credit_bytes += float(check.sizes[stimulus.looked_at :].sum())
        positions = stimulus.corrupt[stimulus.corrupt < len(check.slots)]
        slots, entries = check.slots[positions], check.entries[positions]
        same = table.owners(slots) == entries
        same[same] = table.generations(entries[same]) == check.generations[positions[same]]
        slots, entries = slots[same], entries[same]
        core.tally.corrupt_in_sample += len(self._blocks.condemn(entries, slots))
        for domain, chosen in self._blocks.by_domain(entries):
            self._blocks.reap(domain, chosen)
            self._blocks.domains.forget_idle(domain)

    def worker_lost(self, worker: WorkerRecord) -> None:
        """A worker is lost. What it was asked to check is not known, and is not asked for again."""
        check = self._core.check
        if check is not None and check.worker is worker:
            self._core.step(check, Event.LOSE)
            self._core.check = None

    def _worker(self) -> WorkerRecord | None:
        for worker in self._core.workers.values():
            if worker.device == HOST_DEVICE and worker.state is WorkerState.LIVE:
                return worker
        return None

    def _choose(self) -> tuple[Slots, npt.NDArray[np.int64]]:
        """Slots of READY blocks, each as likely as any other, and their bytes: as many as may be read now."""
        slots, table = self._blocks.slots, self._blocks.table
        extents = np.flatnonzero(slots.extent_slots)
        counts = slots.extent_slots[extents]
        ends = np.cumsum(counts)
        in_use = sum(total - free for _, _, total, free in slots.sizes())
        if in_use == 0:
            return np.empty(0, np.uint32), np.empty(0, np.int64)
        smallest = int(slots.extent_size[extents].min())
        # Most of the time, this many draws meet as many slots in use as the credit can pay for.
        wanted = 1 + self._credit_bytes / smallest
        draws = int(min(SLOTS_MAX, 8 + 1.5 * wanted * int(ends[-1]) / in_use))
        self._drew_most = draws == SLOTS_MAX
        drawn = self._random.integers(0, ends[-1], draws)
        which = np.searchsorted(ends, drawn, "right")
        positions = drawn - (ends[which] - counts[which])
        sizes = slots.extent_size[extents[which]]
        chosen = slots.geometry.slots_at(extents[which], sizes, counts[which], positions)
        _, first = np.unique(chosen, return_index=True)
        once = np.sort(first)  # in the order in which they were drawn, so that any beginning is as random
        chosen, sizes = chosen[once], sizes[once]
        owners = table.owners(chosen)
        taken = np.flatnonzero(owners != NO_ENTRY)
        ready = taken[table.states(owners[taken]) == READY]
        chosen, sizes = chosen[ready], sizes[ready]
        affordable = int(np.count_nonzero(np.cumsum(sizes) - sizes < self._credit_bytes))
        return chosen[:affordable], sizes[:affordable]


def expected_detection_s(in_use_bytes: int, slots: int, bytes_per_s: int) -> float | None:
    """How long a slot that has rotted stays unnoticed on average, if the worker is never busy; None if
    nothing is sampled. `slots` counts all slots of assigned extents, in use or not, because a draw can meet
    any of them."""
    if bytes_per_s == 0:
        return None
    return max(in_use_bytes / bytes_per_s, slots / (SLOTS_MAX * TICKS_PER_S))
