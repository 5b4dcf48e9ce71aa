"""A worker's side: shares the KV cache, rings the doorbells, and follows the parts the scheduler tells it
about.

Every request is reported exactly once, and never before the fence: no copy can land in its blocks any more,
and none still reads them.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvtier import Client, Group, KvtierError, PartRef, PartState, Plane
from kvtier.status import ClientState

from kvtier_vllm.config import ConnectorConfig
from kvtier_vllm.kv_memory import NotShareable, SharedKVMemory
from kvtier_vllm.layout import GroupLayout, describe
from kvtier_vllm.link import Link
from kvtier_vllm.meta import LOAD_DOORBELL, STORE_DOORBELL, KvtierMetadata, LoadOrder

UNRESPONSIVE_AFTER_S = 0.1
"""A part that has not started for this long is worth asking whether the daemon still answers."""
CLOSE_TIMEOUT_S = 2.0

Connect = Callable[[int, tuple[Group, ...], SharedKVMemory], Link]
"""Makes the link of the client that shares this memory, for a generation of the namespace."""


@dataclass(slots=True, eq=False)
class _Part:
    """One part, and the client under which it was adopted."""

    client: Client | None
    ref: PartRef
    since_s: float

    def state(self) -> PartState:
        if self.client is None:
            return PartState.LOST
        try:
            return self.client.part_state(self.ref)
        except KvtierError:  # the reference makes no sense, so nothing can have been started under it
            return PartState.LOST

    def revoke(self) -> PartState:
        if self.client is None:
            return PartState.LOST
        try:
            return self.client.revoke(self.ref)
        except KvtierError:
            return PartState.LOST


@dataclass(slots=True, eq=False)
class _Load:
    order: LoadOrder
    part: _Part | None


@dataclass(slots=True)
class Results:
    """What is reported to vLLM after one step."""

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    """Those of `received` of which nothing counts as loaded."""
    bad_blocks: set[int] = field(default_factory=set)
    """Blocks of `received` that were not loaded."""


class WorkerSide:
    """Called by one worker's model runner, from one thread."""

    def __init__(
        self,
        config: ConnectorConfig,
        connect: Connect,
        log: logging.Logger,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._connect = connect
        self._log = log
        self._clock = clock
        self._memory: SharedKVMemory | None = None
        self._groups: tuple[Group, ...] = ()
        self._link: Link | None = None
        self._old_links: list[Link] = []
        self._generation = 0
        self._loads: list[_Load] = []
        self._stores: dict[str, list[_Part]] = {}
        self._held: dict[str, float] = {}
        """Requests to report as sent, and since when they wait."""
        self._step = 0
        self._stopped = False

    # --- the memory
    # ------------------------------------------------------------------------------------------------------

    def memory_context(self, kv_cache_config: Any) -> contextlib.AbstractContextManager[None] | None:
        """Around the allocation of the KV cache; None leaves it alone. Raises NotShareable."""
        sizes = {tensor.size for tensor in kv_cache_config.kv_cache_tensors}
        if len(sizes) != 1:
            raise NotShareable(f"the KV cache is made of {len(sizes)} allocations; one is understood")
        self._memory = SharedKVMemory(sizes.pop())
        return self._memory.allocation_context()

    def register(self, kv_caches: Mapping[str, Any], kv_cache_config: Any) -> None:
        """Shares the KV cache, in the background. Raises NotShareable."""
        if self._memory is None:
            raise NotShareable("the engine did not allocate its KV cache through the connector's memory")
        layout = describe(kv_caches, kv_cache_config, self._memory)
        self._groups = (_group(layout),)
        if not self._stopped:
            self._link = self._connect(self._generation, self._groups, self._memory)

    @property
    def link(self) -> Link | None:
        """The client in use."""
        return self._link

    # --- a step
    # ------------------------------------------------------------------------------------------------------

    def fence(self, meta: KvtierMetadata) -> None:
        """Before anything of the step: stores of blocks that are given to others are withdrawn, those that
        run too. They may still read, but nothing of what they read is ever served."""
        wanted = {part.ticket for part in meta.fence}
        everything = meta.stopped or self._stopped
        for parts in self._stores.values():
            for part in parts:
                if everything or part.ref.ticket in wanted:
                    part.revoke()

    def begin(self, meta: KvtierMetadata) -> None:
        """Before the forward pass: adopts the step's parts, and lets its loads start."""
        self.adopt(meta)
        if meta.generation != self._generation:
            self._renew(meta.generation)
        self._revoke(meta.revoke)
        if meta.stopped and not self._stopped:
            self.stop()
        self._ring(LOAD_DOORBELL)

    def adopt(self, meta: KvtierMetadata) -> None:
        """From now on the step's parts are followed, and their requests reported. Once per step: called again
        it does nothing."""
        if meta.step == self._step:
            return
        self._step = meta.step
        client, now_s = self._client, self._clock()
        for load in meta.loads:
            part = None if load.part is None else _Part(client, load.part, now_s)
            self._loads.append(_Load(load, part))
        for store in meta.stores:
            self._stores.setdefault(store.request, []).append(_Part(client, store.part, now_s))
        for request in meta.held:
            self._held[request] = now_s

    def end(self) -> None:
        """After the forward pass: what the step computed is in place."""
        self._ring(STORE_DOORBELL)

    def poll(self) -> Results:
        """Everything that has ended since the last call."""
        results = Results()
        now_s = self._clock()
        self._loads = [load for load in self._loads if not self._load_over(load, now_s, results)]
        for request, parts in list(self._stores.items()):
            left = [part for part in parts if not part.state().over]
            held_since_s = self._held.get(request)
            if left and held_since_s is not None:
                left = [part for part in left if not self._give_up(part, held_since_s, now_s)]
            if left:
                self._stores[request] = left
            else:
                del self._stores[request]
        for request in [request for request in self._held if request not in self._stores]:
            del self._held[request]
            results.sent.add(request)
        return results

    # --- the end
    # ------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Disables this side for good: nothing starts any more. `fence` and `poll` go on for what is open."""
        self._stopped = True
        for link in self._links():
            link.close(0)

    def close(self) -> None:
        """The engine shuts down: waits a short while for copies that run."""
        self._stopped = True
        deadline_s = self._clock() + CLOSE_TIMEOUT_S
        fenced = [link.close(max(0.0, deadline_s - self._clock())) for link in self._links()]
        if not all(fenced):
            self._log.warning("kvtier: a copy of the KV cache was still running at shutdown")
        if self._memory is not None:
            self._memory.close()

    # --- inside
    # ------------------------------------------------------------------------------------------------------

    @property
    def _client(self) -> Client | None:
        return None if self._link is None else self._link.client

    def _links(self) -> Iterable[Link]:
        return [*self._old_links, *([] if self._link is None else [self._link])]

    def _ring(self, doorbell: int) -> None:
        client = self._client
        if client is not None:
            client.ring(doorbell, self._step)

    def _renew(self, generation: int) -> None:
        """Attaches anew, in another generation of the namespace."""
        self._generation = generation
        if self._link is None or self._memory is None or self._stopped:
            return
        self._link.close(0)
        self._old_links = [self._link]
        self._link = self._connect(generation, self._groups, self._memory)

    def _revoke(self, refs: Iterable[PartRef]) -> None:
        wanted = {ref.ticket for ref in refs}
        if not wanted:
            return
        parts = [load.part for load in self._loads if load.part is not None]
        parts += [part for parts in self._stores.values() for part in parts]
        for part in parts:
            if part.ref.ticket in wanted:
                part.revoke()

    def _load_over(self, load: _Load, now_s: float, results: Results) -> bool:
        state = PartState.LOST
        if load.part is not None:
            state = load.part.state()
            if state is PartState.ARMED and self._give_up(load.part, load.part.since_s, now_s):
                state = load.part.state()
            if not state.over:
                return False
        results.received.add(load.order.request)
        if state is not PartState.DONE:
            if load.order.block_ids:
                results.bad_blocks.update(load.order.block_ids)
            else:
                results.failed.add(load.order.request)
        return True

    def _give_up(self, part: _Part, since_s: float, now_s: float) -> bool:
        """Revokes a part that has waited for too long, or whose daemon does not answer. True if it is
        over."""
        waited_s = now_s - since_s
        late = waited_s > self._config.load_start_deadline_s
        if not late and waited_s > UNRESPONSIVE_AFTER_S and part.client is not None:
            late = part.client.status.state is ClientState.UNRESPONSIVE
        return late and part.revoke().over


def _group(layout: GroupLayout) -> Group:
    return Group(
        block_tokens=layout.block_tokens,
        num_blocks=layout.num_blocks,
        planes=tuple(
            Plane(
                fragment_bytes=plane.fragment_bytes,
                base_offset=plane.base_offset,
                block_stride_bytes=plane.block_stride_bytes,
                description=plane.description,
            )
            for plane in layout.planes
        ),
    )
