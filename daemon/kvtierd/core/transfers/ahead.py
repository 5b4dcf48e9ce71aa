"""Prompts that come up as a whole, however little of them the tier below has room for at once, and though
nobody asks again."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvtierd.core.state.core_state import CoreState
from kvtierd.core.state.entities import Instance
from kvtierd.core.state.waiting import WAITING_S, RequestName, name_of
from kvtierd.core.stimuli import BlockQuery
from kvtierd.core.tier import Tier

HASHES_MAX = 1 << 17
"""Hashes of all prompts that are remembered, which take 4 MiB."""

_Queries = tuple[BlockQuery, ...]


@dataclass(frozen=True, slots=True)
class _Prompt:
    instance: Instance
    queries: _Queries
    asked_s: float

    @property
    def hashes(self) -> int:
        return sum(len(query.hashes) for query in self.queries)


class OpenPrompts:
    """Prompts of which some blocks wait for room in the tier's queues, in the order in which they go on."""

    def __init__(
        self, core: CoreState, tier: Tier, bring_up: Callable[[Instance, Sequence[BlockQuery]], bool]
    ) -> None:
        """`bring_up` begins with what a prompt needs, as far as there is room. It returns whether some of it
        is left."""
        self._core = core
        self._tier = tier
        self._bring_up = bring_up
        self._prompts: dict[tuple[int, RequestName], _Prompt] = {}
        self._hashes = 0

    def __len__(self) -> int:
        return len(self._prompts)

    def asked(self, instance: Instance, queries: Sequence[BlockQuery], *, left: bool) -> None:
        """An instance has asked about a prompt. `left`: some blocks of it come, but not yet."""
        if not (left or self._prompts):
            return
        key = int(instance.epoch), name_of(queries)
        known = self._forget(key)
        if not left:
            return
        if known is not None and known.hashes == sum(len(query.hashes) for query in queries):
            own = known.queries
        else:  # copies, because the message that the hashes came with would stay in memory as long
            own = tuple(replace(query, hashes=query.hashes.copy()) for query in queries)
        self._remember(key, _Prompt(instance, own, self._core.now_s))
        while self._hashes > HASHES_MAX:
            self._forget(next(iter(self._prompts)))

    def go_on(self) -> None:
        """Goes on with the first prompt, if the tier has room. Others come next, so that none of them waits
        for a disk that only the first one needs."""
        if not self._prompts or not self._tier.idles:
            return
        core = self._core
        if core.draining:
            self._prompts.clear()
            self._hashes = 0
        while self._prompts:
            key = next(iter(self._prompts))
            prompt = self._forget(key)
            if prompt is None or not prompt.instance.live or core.now_s - prompt.asked_s >= WAITING_S:
                continue
            if self._bring_up(prompt.instance, prompt.queries):
                self._remember(key, prompt)
            return

    def _remember(self, key: tuple[int, RequestName], prompt: _Prompt) -> None:
        self._prompts[key] = prompt
        self._hashes += prompt.hashes

    def _forget(self, key: tuple[int, RequestName]) -> _Prompt | None:
        prompt = self._prompts.pop(key, None)
        if prompt is not None:
            self._hashes -= prompt.hashes
        return prompt
