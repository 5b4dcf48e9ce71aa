"""What half and twice of the pool would hit, live."""

from collections.abc import Sequence

from kvtierd.core.blocks.blocks import Blocks
from kvtierd.core.blocks.domains import Domain
from kvtierd.core.ids import Hashes
from kvtierd.core.state.entities import GroupPlan
from kvtierd.core.status import ShadowStatus
from kvtierd.core.stimuli import SubmittedChain

SHADOW_BLOCKS = 8_192
"""How many blocks the shadow follows at most, for one size."""
SAMPLED_MIN = 1_000
"""Blocks of its sample that must have been asked for before it says anything."""
HALF_LIFE_S = 3_600.0
"""What was counted so long ago weighs half."""
FADE_EVERY_S = 60.0


class SizeShadow:
    """Tells the native shadow of the pool what is asked for and stored. It knows blocks that are looked up
    from the first of a prompt on, and not those of which a window or any part is asked for."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self.native = blocks.table.shadow(SHADOW_BLOCKS)
        self._faded_at_s: float | None = None
        self.begin()

    def begin(self) -> None:
        """Begins anew, because the policy has changed, or blocks were found in the pool. If there are blocks
        already, counting begins when the pool has been turned over."""
        capacity_bytes = self._blocks.slots.capacity_bytes
        self.native.begin(capacity_bytes, 2 * capacity_bytes if self._blocks.live else 0)

    def resize(self) -> None:
        """The pool has more memory than before."""
        self.native.resize(self._blocks.slots.capacity_bytes)

    def asked(self, plan: GroupPlan, hashes: Hashes, hits: int) -> None:
        """A prompt was asked for, whose first `hits` blocks the pool had."""
        domain = plan.domain
        self.native.asked(plan.space, hashes, domain.pool_bytes or self._measured(domain), hits)

    def stored(self, plan: GroupPlan, hashes: Hashes, chains: Sequence[SubmittedChain]) -> None:
        """Blocks are about to be stored."""
        if not plan.by_prefix:
            return
        block_bytes = plan.domain.pool_bytes or self._measured(plan.domain)
        if len(chains) < 2:
            self.native.stored(plan.space, hashes, block_bytes)
            return
        end = len(hashes)
        for chain in reversed(chains):  # the first of a store becomes the most recent
            self.native.stored(plan.space, hashes[end - chain.blocks : end], block_bytes)
            end -= chain.blocks

    def spared(self, plans: Sequence[GroupPlan], hashes: int) -> None:
        """Clients did not ask for so many blocks of these groups, because index pages showed that they are
        not there."""
        if hashes and plans:
            self.native.spared(hashes, plans[0].domain.block_bytes)

    def tick(self, now_s: float) -> None:
        """Forgets little by little."""
        if self._faded_at_s is None:
            self._faded_at_s = now_s
        passed_s = now_s - self._faded_at_s
        if passed_s >= FADE_EVERY_S:
            self.native.fade(0.5 ** (passed_s / HALF_LIFE_S))
            self._faded_at_s = now_s

    def status(self) -> ShadowStatus:
        """What it has found."""
        stats = self.native.stats()
        asked = stats["asked"]
        known = stats["sampled"] >= SAMPLED_MIN

        def rate(missed: str) -> float:
            return min(1.0, max(0.0, 1 - stats[missed] / asked)) if known else 0.0

        return ShadowStatus(
            known=known,
            half=rate("missed_half"),
            now=rate("missed_now"),
            twice=rate("missed_twice"),
            actual=stats["hit"] / asked if known else 0.0,
            asked=asked,
            share=stats["share"],
        )

    def _measured(self, domain: Domain) -> int:
        """An extent's bytes by its slots, rounded down: so a pool has room for as many as it has slots."""
        geometry = self._blocks.geometry
        domain.pool_bytes = sum(
            count * (geometry.extent_bytes // geometry.slots_per_extent(slot_bytes))
            for slot_bytes, count in domain.per_size
        )
        return domain.pool_bytes
