"""Keeps track of which weights an engine's blocks belong to, as far as anybody has said: from updates in
place, and from resets of the engine's own cache, in whatever order they come.

Blocks are shared under a name only from a point on at which the engine has nothing of other weights left. Its
own cache goes on serving blocks of the old weights until it is reset, and what is computed behind those would
be stored under the new name. So a name counts if the cache was reset right before the name was given, or
right after it, with no step between that computed or loaded anything. After such a step, a reset may belong
to another update, of which nobody has told.

Time is counted in such steps (`KvtierMetadata.work`), which workers and the scheduler count alike.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence

from kvtier_vllm.meta import Weights, WeightsChange


class Generations:
    """What is known about one engine's weights. Each method returns whether the engine's blocks belong to
    other weights from now on, which are then in `weights`."""

    def __init__(self, weights: Weights, *, keep: bool, world_size: int, log: logging.Logger) -> None:
        """`keep` says that resets only flush the cache."""
        self.weights = weights
        self._keep = keep
        self._world_size = world_size
        self._log = log
        self._emptied = 0
        """When the engine's cache was last empty."""
        self._began = 0
        """When `weights` began to hold."""
        self._named: WeightsChange | None = None
        """The last change that was told, if the reset that belongs to it has not come."""
        self._own_reset: int | None = None
        """When that reset came, which may be told a second time."""
        self._told = 0
        """How many changes some worker has told of, perhaps not all workers."""
        self._left = False

    def was_reset(self, work: int, *, done: bool) -> bool:
        """Takes note that vLLM was asked to reset its own cache, as it is when weights have changed, and for
        measurements. If it refused (not `done`), the weights have changed all the same."""
        named = self._named
        if done:
            self._emptied = work
        if done and named is not None and named.work == work:
            self._named, self._own_reset = None, work
            return not self.weights.revision and self._share(work, named.revision, named.count)
        return not self._keep and self._leave(work)

    def was_dropped(self, work: int) -> bool:
        """Takes note that vLLM was asked to have this connector's cache reset, whatever resets mean here.
        vLLM may have told of its own reset already."""
        own, self._own_reset = self._own_reset == work, None
        return not own and self._leave(work)

    def have_changed(self, work: int, changes: Sequence[WeightsChange]) -> bool:
        """Takes what workers have told, one change each, which they repeat until they are answered."""
        count = max(change.count for change in changes)
        if len(changes) < self._world_size or {change.count for change in changes} != {count}:
            if count <= self._told:
                return False
            self._told, self._named = count, None
            self._begin(work, self.weights.heeded, private=True)  # until the other workers have told it too
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
            return False  # it has just left
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
