"""For programs that change an engine's weights in place (reinforcement learning, for one): tell kvtier, in
the process of each worker, right where the weights are loaded: `weights_changed("run 7, step 100")` behind
`model.load_weights(…)`.

From that moment on nothing that was stored before is loaded, and nothing that is computed is stored under the
name of the old weights. With a name the engine shares with all engines that say the same name (and are equal
in everything else), as soon as its own prefix cache has nothing of the old weights; without one it keeps what
it computes to itself, until its weights have a name. Engines that need not call Python in their workers say
it by `--worker-extension-cls kvtier_vllm.updates.Worker` and `collective_rpc("kvtier_weights_changed",
args=("step 100",))`.

Call it after every update, with the engine's requests paused or over, and right before or after
`reset_prefix_cache()`: an engine that is not reset goes on with blocks of the old weights, so that it shares
with nobody, whatever its weights are called. A reset that comes when the engine has computed or loaded
anything since the call may belong to another update: the engine then goes on by itself, and the weights have
to be named again. Before that, a reset is taken for the one of the update that was named, so an update that
follows a name at once has to be told of as well, by a name of its own or without one.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from kvtier_vllm.meta import WeightsChange


class UpdateListener(Protocol):
    """A half of the connector."""

    @property
    def engine(self) -> str:
        """The same for all halves of one engine."""

    @property
    def parallel_config(self) -> Any:
        """vLLM's, of this engine and no other."""

    def weights_changed(self, revision: str) -> WeightsChange | None:
        """A worker's half has something to tell the scheduler's."""

    def weights_told(self, change: WeightsChange) -> None:
        """What a worker in the same process has to tell: the scheduler's half of an engine with one worker
        need not wait for it."""


_listeners: weakref.WeakSet[UpdateListener] = weakref.WeakSet()


def listen(listener: UpdateListener) -> None:
    """It is told from now on, for as long as it lives."""
    _listeners.add(listener)


def weights_changed(revision: str | None = None) -> bool:
    """The weights of this process's engine are others now; see the module. `revision`: their name, which no
    other weights ever have. False: no worker with kvtier lives in this process, and nobody has been told."""
    return _tell(list(_listeners), revision or "")


def weights_change(vllm_config: Any) -> None:
    """A call of vLLM's changes the weights of the engine that this VllmConfig is of, if it is one that uses
    kvtier. What they are then nobody has said."""
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
    """For vLLM's `--worker-extension-cls`."""

    def kvtier_weights_changed(self, revision: str | None = None) -> bool:
        """See `weights_changed`."""
        return weights_changed(revision)
