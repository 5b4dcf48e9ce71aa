"""By what the daemon knows the blocks of a request: vLLM's hashes, and with a LoRA adapter hashes of those
and of the adapter's files.

vLLM's block hash carries an adapter's name and (from 0.31 on) its path, and nothing of its weights: two
engines, or one engine at two times, may have different ones under the same name.
"""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

from kvtier_vllm.weights import Stamp, UnknownWeights, local_revision, stamp_of

ADAPTERS_MAX = 1_024
"""Remembered; one that comes back later is identified again."""

Keys = Callable[[Sequence[bytes]], Sequence[bytes]]
"""From a request's block hashes to keys, one for each, in order."""


class DerivedKeys(Sequence[bytes]):
    """Keys of one request's blocks, made as they are asked for, each once."""

    def __init__(self, hashes: Sequence[bytes], revision: bytes, made: dict[bytes, bytes]) -> None:
        """`made`: those of the request so far; added to."""
        self._hashes = hashes
        self._revision = revision
        self._made = made

    def __len__(self) -> int:
        return len(self._hashes)

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        if isinstance(index, slice):
            return [self._of(each) for each in self._hashes[index]]
        return self._of(self._hashes[index])

    def _of(self, block_hash: bytes) -> bytes:
        key = self._made.get(block_hash)
        if key is None:
            digest = hashlib.sha256(self._revision + block_hash).digest()
            key = self._made[block_hash] = digest[: len(block_hash)]
        return key


@dataclass(slots=True)
class _Adapter:
    """One that requests have named."""

    directory: Path
    stamp: Stamp | None = None
    """Of its files when it was first seen; None: they could not be looked at."""
    revision: Future[str] | None = None
    left_out: bool = False
    """What its requests compute is neither stored nor loaded, as long as this engine lives."""


@dataclass(slots=True)
class Adapters:
    """The adapters of one engine. Called from the scheduler's thread; files are read in another.

    An adapter's files are taken for what the engine has loaded from them, as long as they stay as they were
    when the first request named it. Once they have changed its blocks are left alone.
    """

    log: logging.Logger
    identify: Callable[[Path], str] = local_revision
    _known: OrderedDict[tuple[str, int, str], _Adapter] = field(default_factory=OrderedDict)
    _reading: ThreadPoolExecutor | None = None

    def keys(self, request: Any) -> Keys | None:
        """How the blocks of a request are named. None: not known (yet): nothing of it can be shared."""
        lora = getattr(request, "lora_request", None)
        if lora is None:
            return as_they_are
        adapter = self._adapter(lora)
        if adapter.left_out or adapter.revision is None:
            return None
        if not self._unchanged(adapter):
            self._leave_out(adapter, lora, "its files have changed since they were first used")
            return None
        if not adapter.revision.done():
            return None
        try:
            revision = adapter.revision.result().encode()
        except (UnknownWeights, OSError) as error:
            self._leave_out(adapter, lora, str(error))
            return None
        return _derived_from(revision)

    def known_keys(self, request: Any) -> Keys | None:
        """As `keys`, of a request whose blocks were stored or loaded before: looks at no file."""
        lora = getattr(request, "lora_request", None)
        if lora is None:
            return as_they_are
        adapter = self._known.get(_name_of(lora))
        if adapter is None or adapter.left_out or adapter.revision is None:
            return None
        if not adapter.revision.done() or adapter.revision.exception() is not None:
            return None
        return _derived_from(adapter.revision.result().encode())

    def close(self) -> None:
        """The engine shuts down."""
        if self._reading is not None:
            self._reading.shutdown(wait=False, cancel_futures=True)

    def _adapter(self, lora: Any) -> _Adapter:
        name = _name_of(lora)
        adapter = self._known.get(name)
        if adapter is None:
            adapter = self._known[name] = self._first_seen(lora)
            while len(self._known) > ADAPTERS_MAX:
                self._known.popitem(last=False)
        self._known.move_to_end(name)
        return adapter

    def _first_seen(self, lora: Any) -> _Adapter:
        adapter = _Adapter(Path(lora.lora_path).expanduser())
        try:
            adapter.stamp = stamp_of(adapter.directory)
        except UnknownWeights as error:
            self._leave_out(adapter, lora, str(error))
            return adapter
        if self._reading is None:
            self._reading = ThreadPoolExecutor(1, "kvtier-adapters")
        adapter.revision = self._reading.submit(self.identify, adapter.directory)
        return adapter

    @staticmethod
    def _unchanged(adapter: _Adapter) -> bool:
        try:
            return stamp_of(adapter.directory) == adapter.stamp
        except UnknownWeights:
            return False

    def _leave_out(self, adapter: _Adapter, lora: Any, why: str) -> None:
        adapter.left_out = True
        self.log.warning(
            "kvtier: what adapter %.64r computes is not cached: %s. Its files must lie in a folder of this "
            "machine, as safetensors, and stay as they are",
            lora.lora_name,
            why,
        )


def as_they_are(hashes: Sequence[bytes]) -> Sequence[bytes]:
    """The keys of blocks without an adapter."""
    return hashes


def _derived_from(revision: bytes) -> Keys:
    made: dict[bytes, bytes] = {}
    return lambda hashes: DerivedKeys(hashes, revision, made)


def _name_of(lora: Any) -> tuple[str, int, str]:
    return lora.lora_name, lora.lora_int_id, lora.lora_path
