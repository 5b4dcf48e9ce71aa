"""For programs that change an engine's weights in place, such as reinforcement learning: tell kvtier, in the
process of each worker, right where the weights are loaded: `weights_changed("run 7, step 100")` behind
`model.load_weights(…)`.

From that moment on, nothing that was stored before is loaded, and nothing that is computed is stored under
the name of the old weights. If the new weights have a name, the engine shares blocks with all engines that
say the same name (and are equal in everything else), as soon as its own prefix cache has nothing of the old
weights. Without a name it shares with nobody until its weights have one. Engines that need not call Python in
their workers say it by `--worker-extension-cls kvtier_vllm.updates.Worker` and `collective_rpc(
"kvtier_weights_changed", args=("step 100",))`.

Call it after every update, while the engine's requests are paused or over, and right before or after
`reset_prefix_cache()`. An engine that is not reset goes on with blocks of the old weights, so it shares with
nobody, whatever its weights are called. A reset that comes after the engine has computed or loaded anything
since the call may belong to another update: then the engine shares with nobody until its weights are named
again. An earlier reset is taken for that of the named update. So if another update follows a name at once,
tell kvtier of that as well, with a name of its own or without one.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from kvtier_vllm.meta import WeightsChange


class UpdateListener(Protocol):
    """One half of the connector, the scheduler's or a worker's."""

    @property
    def engine(self) -> str:
        """The engine's id, which is the same for all halves of one engine."""

    @property
    def parallel_config(self) -> Any:
        """vLLM's configuration object, which belongs to this engine only."""

    def weights_changed(self, revision: str) -> WeightsChange | None:
        """Takes note that the weights have changed. Returns what a worker's half must tell the scheduler's;
        None for the scheduler's half."""

    def weights_told(self, change: WeightsChange) -> None:
        """Takes what a worker in the same process has to tell: the scheduler's half of an engine with one
        worker need not wait for the next step."""


_listeners: weakref.WeakSet[UpdateListener] = weakref.WeakSet()


def listen(listener: UpdateListener) -> None:
    """Has a listener told of changes for as long as it lives."""
    _listeners.add(listener)


def weights_changed(revision: str | None = None) -> bool:
    """Tells kvtier that the weights of this process's engine have changed; the module says when to call it.
    `revision` is their name, which no other weights may ever have. Returns False if no worker with kvtier
    lives in this process, so that nobody was told."""
    return _tell(list(_listeners), revision or "")


def weights_change(vllm_config: Any) -> None:
    """Tells kvtier that a call of vLLM changes, without a name, the weights of the engine of
    this VllmConfig."""
    of_engine = vllm_config.parallel_config
    _tell([listener for listener in _listeners if listener.parallel_config is of_engine], "")


def _tell(listeners: Collection[UpdateListener], revision: str) -> bool:
    changes = {
        listener.engine: change
        for listener in listeners
        if (change := listener.weights_changed(revision)) is not None
    }
    for listener in list(_listeners):
        if (change := changes.get(listener.engine)) is not None:
            listener.weights_told(change)
    return bool(changes)


class Worker:
    """The class to name in vLLM's `--worker-extension-cls`."""

    def kvtier_weights_changed(self, revision: str | None = None) -> bool:
        """Tells kvtier that the weights have changed; see `weights_changed`."""
        return weights_changed(revision)
