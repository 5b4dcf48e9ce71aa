"""Weights that change in a running engine: whatever changes them is noticed, in the process of each rank."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Protocol

CALLS = (
    "update_weights_from_disk",
    "load_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
)
"""Methods of SGLang's WeightUpdater after which a model has other weights."""


class WeightsListener(Protocol):
    """Who has to know of it."""

    def weights_changed(self) -> None:
        """Takes note that the weights of this process's engine are about to change, or have changed."""


_listeners: weakref.WeakSet[WeightsListener] = weakref.WeakSet()


def listen(listener: WeightsListener) -> None:
    """Has a listener told of changes for as long as it lives. Raises AttributeError if this SGLang changes
    weights in a way that is not known."""
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    for name in CALLS:
        call = getattr(WeightUpdater, name)
        if not hasattr(call, "_kvtier"):
            setattr(WeightUpdater, name, _telling(call))
    _listeners.add(listener)


def _telling(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def told(*arguments: Any, **named: Any) -> Any:
        _tell()
        try:
            return call(*arguments, **named)
        finally:
            _tell()

    told._kvtier = True  # type: ignore[attr-defined]
    return told


def _tell() -> None:
    for listener in list(_listeners):
        listener.weights_changed()
