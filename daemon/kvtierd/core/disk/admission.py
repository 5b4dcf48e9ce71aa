"""Load or recompute: whether bringing blocks to an engine is faster than computing them anew.

Whatever is not known, or was not measured lately, counts as fast, because blocks that are reported as misses
are never measured again.
"""

from collections import Counter
from collections.abc import Sequence

from kvtierd.core.actions import Direction, DiskJobKind
from kvtierd.core.ids import Entries, Hashes
from kvtierd.core.state.core_state import CoreState
from kvtierd.core.state.disks import Disk
from kvtierd.core.state.entities import GroupPlan, Instance, TransferPart
from kvtierd.core.state.rates import Rate
from kvtierd.core.stimuli import PartFinished


class Admission:
    def __init__(self, core: CoreState) -> None:
        self._core = core
        self._loads: dict[str, Rate] = {}
        """How fast loads are, by the device whose worker copies; there are no more than the machine has
        devices."""

    def part_finished(self, part: TransferPart, stimulus: PartFinished) -> None:
        """Learns from a load how fast its worker copies."""
        if self._recomputes and part.transfer.direction is Direction.LOAD:
            rate = self._loads.setdefault(part.mapping.worker.device, Rate())
            rate.measured(self._core.now_s, stimulus.copied_bytes, stimulus.copy_s)

    def load_loses(self, instance: Instance, wanted: Sequence[tuple[GroupPlan, int]], tokens: int) -> bool:
        """As in `Tier.load_loses`."""
        if not self._recomputes or not instance.prefill_tokens_per_s:
            return False
        return self._loads_s(wanted) > tokens / instance.prefill_tokens_per_s

    def promotion_loses(
        self, instance: Instance, wanted: Sequence[tuple[GroupPlan, Hashes, Entries]], tokens: int
    ) -> bool:
        """As in `Tier.bringing_up_loses`: the blocks are read from disks first, and loaded afterwards."""
        if not instance.prefill_tokens_per_s:
            return False
        of_disk: Counter[Disk] = Counter()
        for plan, hashes, copies in wanted:
            for disk, own, _ in self._core.below.by_disk(hashes, copies):
                if disk.level.policy.recompute_if_faster:
                    of_disk[disk] += len(own) * plan.domain.block_bytes
        if not of_disk:
            return False
        now_s = self._core.now_s
        read_s = max(
            disk.rates[DiskJobKind.READ].seconds(now_s, disk.bytes[DiskJobKind.READ] + count_bytes)
            for disk, count_bytes in of_disk.items()
        )
        loads_s = self._loads_s([(plan, len(hashes)) for plan, hashes, _ in wanted])
        return read_s + loads_s > tokens / instance.prefill_tokens_per_s

    @property
    def _recomputes(self) -> bool:
        return any(level.policy.recompute_if_faster for level in self._core.below.levels)

    def _loads_s(self, wanted: Sequence[tuple[GroupPlan, int]]) -> float:
        """How long loading takes: ranks on different devices are copied to at once, and groups one after
        another."""
        of_device: Counter[str] = Counter()
        for plan, blocks in wanted:
            for device, block_bytes in plan.device_bytes:
                of_device[device] += blocks * block_bytes
        slowest_s = 0.0
        for device, count_bytes in of_device.items():
            rate = self._loads.get(device)
            if rate is not None:
                slowest_s = max(slowest_s, rate.seconds(self._core.now_s, count_bytes))
        return slowest_s
