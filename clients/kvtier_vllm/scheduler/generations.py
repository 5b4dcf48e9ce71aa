"""Which weights an engine's blocks are of, as far as anybody has said: updates in place, and resets of the
engine's own cache, in whatever order they come.

A name is shared under only from a point on at which nothing of other weights is left in the engine. Its own
cache goes on serving blocks of the old weights until it is reset, and what is computed behind those would be
stored under the new name. So a name counts where the cache was reset right before the name was said, or right
after it: with no step between that computed or loaded anything. After such a step a reset may be that of
another update, of which nobody has told.

Time is told by the number of such steps (`KvtierMetadata.work`), which workers and the scheduler count alike.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence

from kvtier_vllm.meta import Weights, WeightsChange


class Generations:
    """What is known of one engine's weights. Each method tells whether the engine's blocks are others' from
    now on, which are those of `weights`."""

    def __init__(self, weights: Weights, *, keep: bool, world_size: int, log: logging.Logger) -> None:
        """`keep`: resets only flush the cache."""
        self.weights = weights
        self._keep = keep
        self._world_size = world_size
        self._log = log
        self._emptied = 0
        """When nothing was in the engine's cache."""
        self._began = 0
        """When `weights` did."""
        self._named: WeightsChange | None = None
        """What was said last, if no reset has come that is its own."""
        self._own_reset: int | None = None
        """When there was one, which may be told a second time."""
        self._told = 0
        """Changes that some worker has told of, and perhaps not all."""
        self._left = False

    def was_reset(self, work: int, *, done: bool) -> bool:
        """vLLM was asked to reset its own cache, as it is when weights have changed, and for measurements. It
        may have refused (not `done`): the weights have changed all the same."""
        named = self._named
        if done:
            self._emptied = work
        if done and named is not None and named.work == work:
            self._named, self._own_reset = None, work
            return not self.weights.revision and self._share(work, named.revision, named.count)
        return not self._keep and self._leave(work)

    def was_dropped(self, work: int) -> bool:
        """vLLM was asked to have this connector's cache reset, whatever resets mean here; it has told of its
        own already."""
        own, self._own_reset = self._own_reset == work, None
        return not own and self._leave(work)

    def have_changed(self, work: int, changes: Sequence[WeightsChange]) -> bool:
        """What workers have said, one each, and go on saying until they are answered."""
        count = max(change.count for change in changes)
        if len(changes) < self._world_size or {change.count for change in changes} != {count}:
            if count <= self._told:
                return False
            self._told, self._named = count, None
            self._begin(work, self.weights.heeded, private=True)  # the others' answer is waited for
            return True
        if count <= self.weights.heeded:
            return False
        self._told = count
        revision, after = changes[0].revision, changes[0].work
        if not revision or any(one != changes[0] for one in changes):
            self._named = None
            self._begin(work, count, private=True)
            self._log.info(
                "kvtier: this engine's weights have changed, without a name that all workers agree on: it "
                "goes on in a namespace of its own"
            )
            return True
        self._named = changes[0]
        if self._emptied == after:
            return self._share(work, revision, count)
        self._begin(work, count, private=True)
        self._log.info(
            "kvtier: this engine's weights are %r now, but its own prefix cache may have blocks of the "
            "ones before: it shares under that name when weights are named right before or after "
            "reset_prefix_cache(), with no step between; until then it goes on in a namespace of its own",
            revision,
        )
        return True

    def _share(self, work: int, revision: str, count: int) -> bool:
        self._begin(work, count, revision=revision)
        self._log.info("kvtier: this engine's weights are %r now, and shared under that name", revision)
        return True

    def _leave(self, work: int) -> bool:
        if self.weights.private and self._began == work:
            return False  # it has just done so
        self._begin(work, self.weights.heeded, private=True)
        if self._left:
            self._log.info("kvtier: cache reset; this engine goes on in a namespace of its own again")
            return True
        self._left = True
        self._log.warning(
            "kvtier: the prefix cache was reset, as it is when weights have changed: from now on this engine "
            "shares blocks with no other, nor with its own past. To share again, name the weights after each "
            "update (kvtier_vllm.updates.weights_changed); if resets only flush the cache, and weights never "
            'change in place, set "on_reset": "keep" in kv_connector_extra_config'
        )
        return True

    def _begin(self, work: int, heeded: int, *, private: bool = False, revision: str = "") -> None:
        self.weights = Weights(secrets.randbits(63) | 1, private, revision, heeded)
        self._began = work
