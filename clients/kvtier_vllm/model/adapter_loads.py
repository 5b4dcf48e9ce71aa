"""Which LoRA adapters the workers of this process have loaded, and from which files.

Only the worker that loads an adapter knows which files it has read: they may be replaced before the first
request names the adapter, and an adapter may be loaded again in place (`load_inplace`), under requests that
run. vLLM tells connectors nothing of either, so the function with which it reads an adapter is wrapped.
"""

from __future__ import annotations

import functools
import hashlib
import json
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from kvtier_engine.weights import UnknownWeights, stamp_of

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

LOADED_MAX = 65_536
"""The most adapters of one engine that are remembered. What later ones compute is not cached."""

UNKNOWN = b""
"""The proof of files that could not be looked at, or changed while they were read. It proves nothing."""

AdapterId = tuple[int, str]
"""vLLM's number of an adapter, and its path as the user gave it."""


@dataclass(frozen=True, slots=True)
class AdapterLoad:
    """One worker has loaded an adapter: for the first time, or other files than before."""

    adapter: AdapterId
    proof: bytes
    """The proof of the files that were read (see `proof_of`)."""


def adapter_of(request: Any) -> AdapterId | None:
    """Returns the adapter that a request of vLLM computes with, or None."""
    lora = getattr(request, "lora_request", None)
    return None if lora is None else (lora.lora_int_id, lora.lora_path)


def remember(kept: dict[_Key, _Value], key: _Key, value: _Value) -> None:
    """Adds an entry, and forgets the oldest if there are more than LOADED_MAX."""
    kept[key] = value
    if len(kept) > LOADED_MAX:
        del kept[next(iter(kept))]


def proof_of(path: str) -> bytes:
    """Returns a proof that is equal for two moments exactly if no file of the adapter at `path` was changed
    or replaced between them, or UNKNOWN if that cannot be told."""
    try:
        stamp = stamp_of(Path(path).expanduser())
    except (UnknownWeights, OSError):
        return UNKNOWN
    return hashlib.sha256(json.dumps(stamp).encode()).digest()[:16]


@dataclass(slots=True)
class LoadedAdapters:
    """The adapters that one worker has loaded. An adapter ends when its number gets other weights, because
    what is computed under that number from then on is not what its name says."""

    _current: dict[int, AdapterLoad] = field(default_factory=dict)
    """By vLLM's number."""
    _ended: dict[AdapterId, None] = field(default_factory=dict)
    _news: list[AdapterLoad] = field(default_factory=list)

    def loaded(self, adapter: AdapterId, proof: bytes) -> AdapterLoad | None:
        """Notes that the worker has read an adapter and is about to compute with it. Returns the load if it
        is new, which `take` then also returns."""
        number = adapter[0]
        before, now = self._current.get(number), AdapterLoad(adapter, proof)
        if before == now and proof != UNKNOWN:
            return None
        if before is None and len(self._current) >= LOADED_MAX:
            return None
        self._current[number] = now
        if before is not None:
            remember(self._ended, before.adapter, None)
        self._news.append(now)
        return now

    def has_ended(self, adapter: AdapterId | None) -> bool:
        """Whether what this worker computes for an adapter no longer counts. None means no adapter."""
        return adapter in self._ended

    @property
    def has_news(self) -> bool:
        """Whether `take` has something to return."""
        return bool(self._news)

    def take(self) -> list[AdapterLoad]:
        """Returns the loads since the last call."""
        news, self._news = self._news, []
        return news


class AdapterListener(Protocol):
    """One half of a connector, the scheduler's or a worker's."""

    @property
    def lora_config(self) -> Any:
        """vLLM's LoRA configuration of the engine; None without adapters."""

    def adapter_loaded(self, adapter: AdapterId, proof: bytes) -> None:
        """Takes note that a worker of the engine has read this adapter, and is about to compute with it."""


_listeners: weakref.WeakSet[AdapterListener] = weakref.WeakSet()


def listen(listener: AdapterListener) -> None:
    """Has a listener told of each adapter that a worker of its engine loads in this process, for as long as
    the listener lives. Raises AttributeError or ImportError if vLLM has no such workers."""
    from vllm.lora.worker_manager import WorkerLoRAManager

    if not hasattr(WorkerLoRAManager._load_adapter, "_told_to_kvtier"):
        WorkerLoRAManager._load_adapter = _telling(WorkerLoRAManager._load_adapter)
    _listeners.add(listener)


def _telling(load: Any) -> Any:
    """Returns vLLM's `_load_adapter`, extended to tell what it has read."""

    @functools.wraps(load)
    def telling(manager: Any, lora_request: Any) -> Any:
        before = proof_of(lora_request.lora_path)
        loaded = load(manager, lora_request)
        unchanged = proof_of(lora_request.lora_path) == before
        tell(
            manager.lora_config,
            (lora_request.lora_int_id, lora_request.lora_path),
            before if unchanged else UNKNOWN,
        )
        return loaded

    telling._told_to_kvtier = True  # type: ignore[attr-defined]
    return telling


def tell(lora_config: Any, adapter: AdapterId, proof: bytes) -> None:
    """Tells the halves of the engine that has this configuration; if none has, all halves in this process."""
    listeners = list(_listeners)
    own = [listener for listener in listeners if listener.lora_config is lora_config]
    for listener in own or listeners:
        listener.adapter_loaded(adapter, proof)
