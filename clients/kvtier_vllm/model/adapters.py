"""The keys by which the daemon knows the blocks of a request: vLLM's hashes or, with a LoRA adapter, hashes
of those and of the adapter's files.

vLLM's block hash carries an adapter's name and (from 0.31 on) its path, but nothing of its weights: two
engines, or one engine at two times, may have different ones under the same name. The workers, which have
loaded the weights, say from which files (see `adapter_loads`).
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

from kvtier_engine.weights import UnknownWeights, local_revision

from kvtier_vllm.model.adapter_loads import UNKNOWN, AdapterId, AdapterLoad, proof_of, remember

ADAPTERS_MAX = 1_024
"""The most adapters that are remembered; one that comes back later is identified again."""

Keys = Callable[[Sequence[bytes]], Sequence[bytes]]
"""Makes keys out of a request's block hashes, one for each, in order."""


class DerivedKeys(Sequence[bytes]):
    """The keys of one request's blocks. Each is made when it is first asked for."""

    def __init__(self, hashes: Sequence[bytes], revision: bytes, made: dict[bytes, bytes]) -> None:
        """`made` holds the request's keys so far, and is added to."""
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
    """An adapter that requests have named, or that a worker has loaded."""

    proof: bytes
    """The proof of its files when it was first seen."""
    revision: Future[str] | None = None
    """The identity of its files; None if they cannot be identified."""
    doubt: str = ""
    """Why what its requests compute is neither stored nor loaded while this engine lives; empty without a
    reason."""
    said: bool = False
    """Whether the user was told why."""


@dataclass(slots=True)
class _Loaded:
    """What the workers have said about one adapter."""

    proof: bytes
    workers: int = 1
    ended: bool = False
    """Whether its number has other weights now, or its workers have read different files."""


@dataclass(slots=True)
class Adapters:
    """The adapters of one engine. Called from the scheduler's thread; files are read in another.

    An adapter is known by its files once all workers have loaded the very files that are there, and as long
    as these stay as they are. Once they have changed, or others were loaded under the adapter's number, its
    blocks are left alone.
    """

    log: logging.Logger
    identify: Callable[[Path], str] = local_revision
    world_size: int = 1
    """The number of workers, each of which loads every adapter."""
    names_alone: bool = False
    """Whether vLLM's block hashes carry only an adapter's name, so that two with the same name look alike."""
    _known: OrderedDict[AdapterId, _Adapter] = field(default_factory=OrderedDict)
    _loaded: dict[AdapterId, _Loaded] = field(default_factory=dict)
    _paths: dict[int, str] = field(default_factory=dict)
    """The path of the adapter that was last loaded, by number."""
    _names: dict[str, AdapterId] = field(default_factory=dict)
    """With `names_alone`, the adapter that first had the name."""
    _told_at_once: bool = False
    _reading: ThreadPoolExecutor | None = None

    def loaded(self, loads: Sequence[AdapterLoad], *, at_once: bool = False) -> set[AdapterId]:
        """Takes note of what workers have loaded. `at_once` says that the only worker tells this as it
        happens; the same news in the step's results is then ignored. Returns the adapters whose requests
        compute with other weights now."""
        if self._told_at_once and not at_once:
            return set()
        self._told_at_once = at_once
        ended = set()
        for load in loads:
            number, path = load.adapter
            before = (number, self._paths.get(number, path))
            remember(self._paths, number, path)
            if before != load.adapter:
                ended.add(before)
                if before in self._loaded:
                    self._loaded[before].ended = True
            known = self._loaded.get(load.adapter)
            if known is None:
                remember(self._loaded, load.adapter, _Loaded(load.proof))
                self._adapter(load.adapter)  # its files are read before the first request needs to know
            elif known.proof == load.proof:
                known.workers += 1
            else:
                known.ended = True
                ended.add(load.adapter)
        return ended

    def keys(self, request: Any) -> Keys | None:
        """Returns how the blocks of a request are named, or None if that is not known (yet)."""
        lora = getattr(request, "lora_request", None)
        if lora is None:
            return as_they_are
        this = (lora.lora_int_id, lora.lora_path)
        adapter = self._adapter(this)
        adapter.doubt = adapter.doubt or self._doubt(adapter, this, lora.lora_name)
        if adapter.doubt:
            self._say(adapter, lora.lora_name)
            return None
        loaded = self._loaded.get(this)
        if loaded is None or loaded.workers < self.world_size:
            return None
        if adapter.revision is None or not adapter.revision.done():
            return None
        try:
            revision = adapter.revision.result().encode()
        except (UnknownWeights, OSError) as error:
            adapter.doubt = str(error)
            self._say(adapter, lora.lora_name)
            return None
        return _derived_from(revision)

    def known_keys(self, request: Any) -> Keys | None:
        """As `keys`, for a request whose blocks were stored or loaded before. Looks at no file."""
        lora = getattr(request, "lora_request", None)
        if lora is None:
            return as_they_are
        adapter = self._known.get((lora.lora_int_id, lora.lora_path))
        if adapter is None or adapter.doubt or adapter.revision is None:
            return None
        if not adapter.revision.done() or adapter.revision.exception() is not None:
            return None
        return _derived_from(adapter.revision.result().encode())

    def close(self) -> None:
        """Stops reading files, because the engine shuts down."""
        if self._reading is not None:
            self._reading.shutdown(wait=False, cancel_futures=True)

    def _adapter(self, this: AdapterId) -> _Adapter:
        adapter = self._known.get(this)
        if adapter is None:
            adapter = self._known[this] = _Adapter(proof_of(this[1]))
            if adapter.proof != UNKNOWN:
                if self._reading is None:
                    self._reading = ThreadPoolExecutor(1, "kvtier-adapters")
                adapter.revision = self._reading.submit(self.identify, Path(this[1]).expanduser())
            while len(self._known) > ADAPTERS_MAX:
                self._known.popitem(last=False)
        self._known.move_to_end(this)
        return adapter

    def _doubt(self, adapter: _Adapter, this: AdapterId, name: str) -> str:
        """Returns why what the engine computes with an adapter may not be of its files, or these
        are unknown."""
        if adapter.proof == UNKNOWN:
            return f"no safetensors files can be read in {this[1]!r}"
        if self.names_alone and name not in self._names:
            remember(self._names, name, this)
        if self.names_alone and self._names[name] != this:
            return "block hashes of this vLLM do not tell it from another adapter of the same name"
        if proof_of(this[1]) != adapter.proof:
            return "its files have changed since they were first used"
        loaded = self._loaded.get(this)
        if loaded is not None and loaded.ended:
            return "its number was given other weights"
        if loaded is not None and loaded.proof != adapter.proof:
            return "its files have changed since the engine loaded them"
        return ""

    def _say(self, adapter: _Adapter, name: str) -> None:
        if adapter.said:
            return
        adapter.said = True
        self.log.warning(
            "kvtier: what adapter %.64r computes is not cached: %s. Its files must lie in a folder of this "
            "machine, as safetensors, and stay as they are; load changed weights under a new name, from a "
            "folder of their own",
            name,
            adapter.doubt,
        )


def as_they_are(hashes: Sequence[bytes]) -> Sequence[bytes]:
    """Returns the hashes unchanged: the keys of blocks without an adapter."""
    return hashes


def _derived_from(revision: bytes) -> Keys:
    made: dict[bytes, bytes] = {}
    return lambda hashes: DerivedKeys(hashes, revision, made)
