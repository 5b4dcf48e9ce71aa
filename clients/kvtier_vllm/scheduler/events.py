"""KV events: which blocks this engine has seen kvtierd hold, for whoever routes requests by them.

vLLM publishes them with its own events, if KV events are enabled. Each announcement describes itself (tokens,
parent, block size, group, extra keys of the hash), with medium "CPU" and the owner "kvtier".

Announced as stored are blocks of this engine's stores once they are DONE, blocks that kvtierd held already,
and blocks that were loaded. Announced as removed are, of these:
- blocks that the index page no longer has (a part of them is looked up per step, so an idle engine is late);
- blocks that are too old to be remembered here;
- all of them, when the engine attaches to a daemon anew or its cache is reset: vLLM's AllBlocksCleared would
  include the engine's own blocks.

While a daemon is away nothing is announced. Blocks of LoRA adapters are announced as all others, by vLLM's
hashes and with the adapter's name; kvtierd knows them by keys (see `adapters`), which the index page is asked
for. Not announced are what others store, blocks of an adapter whose files have changed, and on which tier of
kvtierd a block lies, because a load passes its host memory anyway.

This uses experimental interfaces of vLLM: take_events, BlockStored, BlockRemoved (0.29 to 0.33).
"""

from __future__ import annotations

import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvtier import Client
from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, maybe_convert_block_hash
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from kvtier_vllm.groups import Groups, GroupShape
from kvtier_vllm.model.adapters import Keys, as_they_are

try:
    from vllm.v1.core.kv_cache_utils import to_event_extra_keys
except ImportError:  # before 0.31 events have them as the hash does

    def to_event_extra_keys(extra_keys: Any) -> Any:
        """Stands for vLLM's function of the same name."""
        return extra_keys if any(extra_keys) else None


LOCALITY, OWNERSHIP = "LOCAL", "kvtier"
ANNOUNCED_MAX = 262_144
"""The most blocks remembered as announced, of all groups: about 40 MB, half as much again with adapters."""
WAITING_MAX = 65_536
"""The most blocks announced between two calls of `take`. Others never are, which costs hits."""
CHECKED_PER_STEP = 512
"""How many announced blocks are looked up in the index page in each step, which takes about 5 µs."""


class BlockEvents:
    """The events of one engine. Called from the scheduler's thread."""

    def __init__(
        self,
        groups: Groups,
        specs: Sequence[Any],
        log: logging.Logger,
        *,
        announced_max: int = ANNOUNCED_MAX,
        waiting_max: int = WAITING_MAX,
    ) -> None:
        """`specs` are vLLM's KVCacheSpec of each group."""
        self._groups = groups
        self._kinds = [
            (get_kv_cache_spec_kind(spec).value, get_kv_cache_spec_sliding_window(spec)) for spec in specs
        ]
        self._log = log
        self.keys_of: Callable[[Any], Keys | None] = lambda _: as_they_are
        """Returns how the daemon knows the blocks of a request; None if none of it is to be announced."""
        self._announced: tuple[OrderedDict[bytes, bytes], ...] = tuple(OrderedDict() for _ in specs)
        """For each group, vLLM's hash for each of the daemon's keys. The oldest, or those whose check was
        longest ago, come first."""
        self._announced_max = max(1, announced_max // len(specs))
        self._waiting: list[Any] = []
        self._waiting_max = waiting_max
        self._room = waiting_max
        self._overflowed = False

    def held(self, request: Any, group: int, indexes: Sequence[int], keys: Sequence[bytes]) -> None:
        """Announces blocks of a request that kvtierd holds, in rising order, by these keys, except those that
        are announced already."""
        keys_now = self.keys_of(request)
        if keys_now is None:
            return
        announced = self._announced[group]
        stride = self._groups.shapes[group].hash_stride
        hashes = request.block_hashes
        named = keys_now(hashes)
        # A request that goes on with other input may have other hashes than when its store was submitted.
        new = [
            index
            for index, key in zip(indexes, keys, strict=True)
            if key not in announced
            and (index + 1) * stride <= len(hashes)
            and named[(index + 1) * stride - 1] == key
        ]
        if len(new) > self._room:
            if not self._overflowed:
                self._overflowed = True
                self._log.warning(
                    "kvtier: more than %d blocks were to be announced in one step; the others are not, and "
                    "routers do not learn of them",
                    self._waiting_max,
                )
            new = new[: self._room]
        self._room -= len(new)
        for run in _runs(new):
            event = self._stored(request, self._groups.shapes[group], run)
            self._waiting.append(event)
            for index in run:
                last = (index + 1) * stride - 1
                announced[named[last]] = hashes[last]
        if len(announced) > self._announced_max:
            count = len(announced) - self._announced_max
            self._remove(group, [announced.popitem(last=False)[1] for _ in range(count)])

    def check(self, client: Client) -> None:
        """Looks up the next part of the announced blocks, and announces those that are gone as removed."""
        for group, announced in enumerate(self._announced):
            keys = list(itertools.islice(announced, CHECKED_PER_STEP))
            gone: list[bytes] = []
            position = 0
            while position < len(keys):
                known = client.known_run(keys, position, group=group, counted=False)
                if known is None:
                    return
                position += known
                if position < len(keys):
                    gone.append(keys[position])
                    position += 1
            for key in keys:
                announced.move_to_end(key)
            self._remove(group, [announced.pop(key) for key in gone])

    def clear(self) -> None:
        """Announces all announced blocks as removed."""
        for group, announced in enumerate(self._announced):
            self._remove(group, list(announced.values()))
            announced.clear()

    def take(self) -> list[Any]:
        """Returns the events since the last call, in their order."""
        events, self._waiting = self._waiting, []
        self._room = self._waiting_max
        return events

    def _remove(self, group: int, hashes: Sequence[bytes]) -> None:
        if hashes:
            self._waiting.append(
                BlockRemoved(
                    block_hashes=[maybe_convert_block_hash(block_hash) for block_hash in hashes],
                    medium=MEDIUM_CPU,
                    group_idx=group,
                    locality=LOCALITY,
                    ownership=OWNERSHIP,
                )
            )

    def _stored(self, request: Any, shape: GroupShape, run: Sequence[int]) -> Any:
        """Makes one event for neighbouring blocks."""
        first, end, tokens, stride = run[0], run[-1] + 1, shape.block_tokens, shape.hash_stride
        hashes = request.block_hashes[(first + 1) * stride - 1 : end * stride : stride]
        parent = request.block_hashes[first * stride - 1] if first else None
        kind, window = self._kinds[shape.group]
        lora = request.lora_request
        return BlockStored(
            block_hashes=[maybe_convert_block_hash(block_hash) for block_hash in hashes],
            parent_block_hash=None if parent is None else maybe_convert_block_hash(parent),
            token_ids=list(request.all_token_ids[first * tokens : end * tokens]),
            block_size=tokens,
            lora_id=None if lora is None else lora.adapter_id,
            medium=MEDIUM_CPU,
            lora_name=None if lora is None else lora.name,
            extra_keys=to_event_extra_keys(_extra_keys(request, tokens, run)),
            group_idx=shape.group,
            kv_cache_spec_kind=kind,
            kv_cache_spec_sliding_window=window,
            locality=LOCALITY,
            ownership=OWNERSHIP,
        )


def _extra_keys(request: Any, tokens: int, run: Sequence[int]) -> list[Any]:
    keys, feature = [], 0
    for index in run:
        extra, feature = generate_block_hash_extra_keys(
            request, index * tokens, (index + 1) * tokens, feature
        )
        keys.append(extra)
    return keys


def _runs(indexes: Sequence[int]) -> Iterator[list[int]]:
    """Yields rising indexes, cut where they do not follow each other."""
    run: list[int] = []
    for index in indexes:
        if run and index != run[-1] + 1:
            yield run
            run = []
        run.append(index)
    if run:
        yield run
