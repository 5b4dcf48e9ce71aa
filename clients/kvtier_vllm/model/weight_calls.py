"""Notices vLLM's own calls that change the weights of a running engine, in the process of each worker.

vLLM tells connectors nothing of these calls, so they are wrapped, once, in every class of workers and model
runners that this process knows. So is `load_weights` of the model's class, which most programs that update
weights arrive at. Nobody knows what such a call has loaded, so the weights have no name afterwards until
somebody gives them one.

Code that writes into parameters by itself (a function given to `collective_rpc`) is not noticed. Functions
given to `apply_model` are: the parameters are compared before and afterwards.
"""

from __future__ import annotations

import functools
import hashlib
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any

CHANGING = (
    "finish_weight_update",
    "load_model",
    "reload_weights",
    "reset_weights",
    "start_draft_weight_update",
    "start_weight_update",
    "update_weights",
)
"""Methods of workers and model runners in vLLM 0.29 to 0.33 that do nothing but change weights."""
DISCARDING_LEVEL = 2
"""The level of vLLM's sleep from which on weights are discarded, and others may be loaded on waking."""

Tell = Callable[[Any], object]
"""Called with the VllmConfig of the engine whose weights have changed, or are about to."""

_models: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""The models of this process's workers, with the VllmConfig of each."""


def notice(tell: Tell) -> None:
    """Calls `tell` from now on, in this process. When called again, only looks for new classes. Raises
    ImportError or AttributeError if vLLM has no such workers."""
    from vllm.v1.worker.worker_base import WorkerBase

    for worker in _classes(WorkerBase):
        for name in CHANGING:
            _wrap(worker, name, functools.partial(_told_before, tell))
        _wrap(worker, "sleep", functools.partial(_told_after, tell, _sleep_loses))
        _wrap(
            worker, "discard", functools.partial(_told_after, tell, lambda tags, *_, **__: "weights" in tags)
        )
        _wrap(worker, "apply_model", functools.partial(_told_of_differences, tell))
        _wrap(worker, "compile_or_warm_up_model", functools.partial(_knowing_the_model, tell))


def _classes(base: type) -> Iterator[type]:
    yield base
    subclasses: list[type] = base.__subclasses__()
    for below in subclasses:
        yield from _classes(below)


def _wrap(owner: type, name: str, wrapper: Callable[[Any], Any]) -> None:
    """Wraps the class's own method, if it has one that was not wrapped before."""
    method = vars(owner).get(name)
    if method is not None and not hasattr(method, "_told_to_kvtier"):
        wrapped: Any = functools.wraps(method)(wrapper(method))
        wrapped._told_to_kvtier = True
        setattr(owner, name, wrapped)


def _told_before(tell: Tell, method: Any) -> Any:
    """Tells before the call, during which nothing is computed. So a name that is given from within, at its
    end, is the last that is heard."""

    def telling(self: Any, *args: Any, **kwargs: Any) -> Any:
        tell(self.vllm_config)
        return method(self, *args, **kwargs)

    return telling


def _told_after(tell: Tell, loses: Callable[..., bool], method: Any) -> Any:
    """Tells after a call whose arguments, as `loses` finds, say that the weights are lost."""

    def telling(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        finally:
            if loses(*args, **kwargs):
                tell(self.vllm_config)

    return telling


def _sleep_loses(level: int = 1, *_: Any, **__: Any) -> bool:
    return level >= DISCARDING_LEVEL


def _told_of_differences(tell: Tell, method: Any) -> Any:
    """Tells only if the parameters differ afterwards: most functions only look at the model."""

    def telling(self: Any, *args: Any, **kwargs: Any) -> Any:
        model = self.get_model()
        before = digest_of_parameters(model)
        try:
            return method(self, *args, **kwargs)
        finally:
            if digest_of_parameters(model) != before:
                tell(self.vllm_config)

    return telling


def _knowing_the_model(tell: Tell, method: Any) -> Any:
    """Wraps the last call of an engine's start, at which connectors exist."""

    def knowing(self: Any, *args: Any, **kwargs: Any) -> Any:
        model = self.get_model()
        _models[model] = self.vllm_config
        _wrap_wherever(type(model), "load_weights", functools.partial(_told_of_the_models, tell))
        for name in CHANGING:
            _wrap_wherever(type(self.model_runner), name, functools.partial(_told_before, tell))
        return method(self, *args, **kwargs)

    return knowing


def _wrap_wherever(owner: type, name: str, wrapper: Callable[[Any], Any]) -> None:
    """As `_wrap`, in whichever base class the method comes from."""
    for each in owner.__mro__:
        _wrap(each, name, wrapper)


def _told_of_the_models(tell: Tell, method: Any) -> Any:
    """Tells only for a model of a worker: others of its class load weights as well, such as a draft, or the
    model of an engine that starts."""

    def telling(self: Any, *args: Any, **kwargs: Any) -> Any:
        vllm_config = _models.get(self)
        if vllm_config is not None:
            tell(vllm_config)
        return method(self, *args, **kwargs)

    return telling


def digest_of_parameters(model: Any) -> bytes:
    """Returns a digest of the sums of all rows and columns of a torch module's parameters and buffers.

    It differs when the weights were trained, replaced, scaled or moved. It is no proof against somebody who
    exchanges values so that no sum changes. It reads all parameters; if it cannot, it differs each time.
    """
    import torch

    whole = hashlib.sha256()
    try:
        with torch.no_grad():
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                whole.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\0".encode())
                for sums in _sums_of(tensor.detach()):
                    whole.update(sums.cpu().numpy().tobytes())
    except Exception:  # such as tensors that are more than numbers in memory
        return os.urandom(whole.digest_size)
    return whole.digest()


def _sums_of(tensor: Any) -> Iterator[Any]:
    """Yields the sums of a tensor's bits, as whole numbers, along its first and along its last dimension."""
    import torch

    if not tensor.numel() or tensor.is_meta:
        return
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    rows = tensor.reshape(-1, tensor.shape[-1] if tensor.dim() else 1).view(bits)
    yield rows.sum(0, dtype=torch.int64)
    yield rows.sum(1, dtype=torch.int64)
