"""Load or recompute: whether bringing blocks to an engine beats computing them anew.

Whatever is not known, or was not measured lately, counts as fast: what is told to be a miss is never measured
again."""

from kvtierd.core.actions import Direction, DiskJobKind
from kvtierd.core.books import Books
from kvtierd.core.disks import Disk
from kvtierd.core.entities import GroupPlan, Instance, Part
from kvtierd.core.rates import Rate
from kvtierd.core.stimuli import PartFinished


class Admission:
    def __init__(self, books: Books) -> None:
        self._books = books
        self._loads: dict[str, Rate] = {}
        """By the device whose worker copies; there are no more devices than the machine has."""

    @property
    def _on(self) -> bool:
        disks = self._books.disks
        return disks.policy.recompute_if_faster and bool(disks)

    def part_finished(self, part: Part, stimulus: PartFinished) -> None:
        """Learns from a load how fast its worker copies."""
        if self._on and part.transfer.direction is Direction.LOAD:
            rate = self._loads.setdefault(part.mapping.worker.device, Rate())
            rate.measured(self._books.now_s, stimulus.copied_bytes, stimulus.copy_s)

    def load_loses(self, instance: Instance, plan: GroupPlan, blocks: int) -> bool:
        """Of blocks that are on the host."""
        if not self._on or not instance.prefill_tokens_per_s:
            return False
        return self._load_s(plan, blocks) > self._compute_s(instance, plan, blocks)

    def promotion_loses(
        self, instance: Instance, plan: GroupPlan, blocks: int, of_disk: list[tuple[Disk, int]]
    ) -> bool:
        """Of `blocks` that disks have, so many each, and that are loaded afterwards."""
        if not self._on or not instance.prefill_tokens_per_s:
            return False
        now_s, block_bytes = self._books.now_s, plan.domain.block_bytes
        read_s = max(
            disk.rates[DiskJobKind.READ].seconds(now_s, disk.bytes[DiskJobKind.READ] + count * block_bytes)
            for disk, count in of_disk
        )
        return read_s + self._load_s(plan, blocks) > self._compute_s(instance, plan, blocks)

    def _load_s(self, plan: GroupPlan, blocks: int) -> float:
        """Ranks on different devices are copied to at once."""
        slowest_s = 0.0
        for device, block_bytes in plan.device_bytes:
            rate = self._loads.get(device)
            if rate is not None:
                slowest_s = max(slowest_s, rate.seconds(self._books.now_s, blocks * block_bytes))
        return slowest_s

    @staticmethod
    def _compute_s(instance: Instance, plan: GroupPlan, blocks: int) -> float:
        return blocks * plan.block_tokens / instance.prefill_tokens_per_s
