"""Which weights an engine's blocks are of, as far as anybody has said: updates in place, and resets of the
engine's own cache, in whatever order they come.

A name is shared under only from a point on at which nothing of other weights is left in the engine. Its own
cache goes on serving blocks of the old weights until it is reset, and what is computed behind those would be
stored under the new name. So a name counts where the cache has been reset since the last step with the old
weights: before the name is said, or after it. A reset after it is its own only while the engine has taken no
step since; later, it may be that of another update, of which nobody has told.
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
        self._emptied_step = 1
        """Nothing that is in the engine was computed in a step before it."""
        self._began_step = 0
        """The first one with `weights`."""
        self._named: WeightsChange | None = None
        """What was said last, if no reset has come that is its own."""
        self._own_reset_step = 0
        """Before it came one that was, which may be told a second time."""
        self._left = False

    def was_reset(self, step: int, *, done: bool) -> bool:
        """vLLM was asked to reset its own cache before this step, as it is when weights have changed, and for
        measurements. It may have refused (not `done`): the weights have changed all the same."""
        named = self._named
        if done:
            self._emptied_step = step
        if done and named is not None and named.step + 1 == step:
            self._named, self._own_reset_step = None, step
            return not self.weights.revision and self._share(step, named.revision)
        return not self._keep and self._leave(step)

    def was_dropped(self, step: int) -> bool:
        """vLLM was asked to have this connector's cache reset, whatever resets mean here; it has told of its
        own already."""
        own = self._own_reset_step == step
        self._own_reset_step = 0
        return not own and self._leave(step)

    def have_changed(self, step: int, changes: Sequence[WeightsChange]) -> bool:
        """What the workers have said before this step, one each. Always true: they wait for an answer."""
        names = {change.revision for change in changes}
        revision = names.pop() if len(names) == 1 and len(changes) == self._world_size else ""
        after = max(change.step for change in changes)
        self._named = WeightsChange(revision, after) if revision else None
        if revision and self._emptied_step > after:
            return self._share(step, revision)
        self._begin(step, private=True)
        if revision:
            self._log.info(
                "kvtier: this engine's weights are %r now, but its own prefix cache may have blocks of the "
                "ones before: it shares under that name when weights are named right before or after "
                "reset_prefix_cache(), with no step between; until then it goes on in a namespace of its own",
                revision,
            )
        else:
            self._log.info(
                "kvtier: this engine's weights have changed, without a name that all workers agree on: it "
                "goes on in a namespace of its own"
            )
        return True

    def _share(self, step: int, revision: str) -> bool:
        self._begin(step, revision=revision)
        self._log.info("kvtier: this engine's weights are %r now, and shared under that name", revision)
        return True

    def _leave(self, step: int) -> bool:
        if self.weights.private and self._began_step == step:
            return False  # it has just done so
        self._begin(step, private=True)
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

    def _begin(self, step: int, *, private: bool = False, revision: str = "") -> None:
        self.weights = Weights(secrets.randbits(63) | 1, private, revision)
        self._began_step = step
