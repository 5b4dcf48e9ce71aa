"""A worker's side: it shares the KV cache, has the doorbells rung, and follows parts that the scheduler
names.

Every request is reported exactly once, and never before the fence, from which on no copy can land in its
blocks and none still reads them. Until then vLLM keeps its blocks, wherever they lie. So nothing of the
engine's memory is reused during a copy, and torch need not be told that others use it.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvtier import Client, Group, PartRef, PartState
from kvtier.memory import Memory
from kvtier.status import ClientState
from kvtier_engine.link import Link

from kvtier_vllm.config import ConnectorConfig
from kvtier_vllm.meta import KvtierMetadata, LoadOrder, Orders, Weights, WeightsChange, WorkerReport
from kvtier_vllm.model.adapter_loads import AdapterId, LoadedAdapters
from kvtier_vllm.worker.comparing import AuditFollower, Comparer
from kvtier_vllm.worker.gpu import EngineGpu, GpuKVMemory
from kvtier_vllm.worker.kv_memory import NotShareable, SharedKVMemory
from kvtier_vllm.worker.layout import GroupLayout, describe
from kvtier_vllm.worker.parts import TrackedPart
from kvtier_vllm.worker.sharing import HostSharing, Landing, Sharing
from kvtier_vllm.worker.sharing_choice import share_gpu

UNRESPONSIVE_AFTER_S = 0.1
"""When a part has not started for this long, the worker asks whether the daemon still answers."""
CLOSE_TIMEOUT_S = 2.0
SLEEP_TIMEOUT_S = 10.0
"""How long an engine that goes to sleep waits for copies that run."""

Connect = Callable[[Weights, tuple[Group, ...], Memory], Link]
"""Makes the link of the client that shares this memory, for blocks of these weights."""


@dataclass(slots=True, eq=False)
class _Load:
    order: LoadOrder
    left: list[TrackedPart] = field(default_factory=list)
    """Parts that are not over."""
    failed: bool = False
    """Whether some of it has not landed, and will not. The rest is then of no use."""
    bad_blocks: set[int] = field(default_factory=set)
    in_vain: bool = False
    """Whether the engine has given back the memory that it goes to, or must not trust what lands there."""
    block_ids: set[int] = field(default_factory=set)
    """All blocks that it goes to, as far as its orders have said."""

    def nothing_more(self) -> None:
        """Has the rest fail, because no order will come for it."""
        if self.order.rest:
            self.failed = True
            self.bad_blocks.update(self.order.rest)
            self.order = replace(self.order, rest=())


@dataclass(slots=True, eq=False)
class _Store:
    part: TrackedPart
    requests: tuple[str, ...]
    """The requests whose blocks it reads."""
    adapter: AdapterId | None
    """The adapter that these were computed with."""


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
    """The connector's part in one worker. Called by its model runner, from one thread."""

    def __init__(
        self,
        config: ConnectorConfig,
        connect: Connect,
        log: logging.Logger,
        gpu: EngineGpu | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        unnamed: bool = False,
    ) -> None:
        """`gpu` is where the KV cache will be; None for an engine on a CPU. With `unnamed`, the scheduler's
        side says with the first step under which weights blocks are stored."""
        self._config = config
        self._connect = connect
        self._log = log
        self._gpu = gpu
        self._clock = clock
        self._host_memory: SharedKVMemory | None = None
        self._sharing: Sharing | None = None
        self._asleep = False
        self._groups: tuple[Group, ...] = ()
        self.link: Link | None = None
        """The client in use."""
        self._old_links: list[Link] = []
        self._weights = Weights()
        self._changes = 0
        self._change: WeightsChange | None = None
        """The last change."""
        self._unsure = unnamed
        """Whether the scheduler's side has not answered yet. No client is attached meanwhile."""
        self._loads: list[_Load] = []
        self._stores: list[_Store] = []
        self._new_loads: list[TrackedPart] = []
        self._new_stores: list[TrackedPart] = []
        """Parts of this step that were not released yet."""
        self._held: dict[str, float] = {}
        """Requests to report as sent, and since when they wait."""
        self._adapters = LoadedAdapters()
        self._audits = AuditFollower(self._landing, self._forget_part, log)
        self._step = 0
        self._work = 0
        """The number of steps so far that compute or load anything."""
        self._stopped = False

    # --- the memory

    def memory_context(self, kv_cache_config: Any) -> contextlib.AbstractContextManager[None] | None:
        """Returns a context for the allocation of the KV cache; None on a GPU. Raises NotShareable."""
        if self._gpu is not None:
            return None
        sizes = {tensor.size for tensor in kv_cache_config.kv_cache_tensors}
        if len(sizes) != 1:
            raise NotShareable(f"the KV cache is made of {len(sizes)} allocations; one is understood")
        self._host_memory = SharedKVMemory(sizes.pop())
        return self._host_memory.allocation_context()

    def register(
        self,
        kv_caches: Mapping[str, Any],
        kv_cache_config: Any,
        replicated: Collection[int] = (),
        spread: int = 1,
        cache_dtype: str = "auto",
    ) -> None:
        """Shares the KV cache, in the background. `replicated` are the groups of which every rank holds the
        same bytes. The tokens of each block are `spread` over so many ranks. `cache_dtype` is that of vLLM's
        CacheConfig. Raises NotShareable."""
        if self._gpu is not None:
            memory = GpuKVMemory(kv_caches)
            layouts = describe(kv_caches, kv_cache_config, memory, spread)
            groups = _groups(layouts, replicated)
            self._sharing = share_gpu(memory, groups, self._config.share, self._gpu, self._log)
        elif self._host_memory is not None:
            layouts = describe(kv_caches, kv_cache_config, self._host_memory, spread)
            groups = _groups(layouts, replicated)
            self._sharing = HostSharing(self._host_memory)
        else:
            raise NotShareable("the engine did not allocate its KV cache through the connector's memory")
        self._groups = groups
        self._audits.comparer = Comparer(kv_caches, layouts, cache_dtype)
        self._attach()

    def sleep(self) -> None:
        """Takes the memory of the KV cache back for an engine that sleeps. Waits for copies that run. Safe to
        call again."""
        if self._asleep or self._sharing is None:
            return
        self._asleep = True
        for load in self._loads:
            load.in_vain = True
        self._audits.fail_all()
        if self.link is not None and self._client is None:  # not made yet, and must not register now
            self.link.close(0)
            self.link = None
        fenced = [link.close(SLEEP_TIMEOUT_S) for link in self._old_links]
        if not self._sharing.sleep(self._client, SLEEP_TIMEOUT_S) or not all(fenced):
            self._log.warning(
                "kvtier: the engine sleeps, but its KV cache is still held after %s s: that memory comes "
                "free when the copy ends",
                SLEEP_TIMEOUT_S,
            )

    def wake(self) -> None:
        """Shares the KV cache again, which is there at the same addresses. Safe to call again."""
        if not self._asleep or self._sharing is None:
            return
        self._asleep = False
        if self._stopped:
            return
        if not self._sharing.wake(self._client, SLEEP_TIMEOUT_S):
            self._renew(self._weights)
        elif self.link is None:
            self._attach()

    # --- a step

    def fence(self, meta: KvtierMetadata) -> None:
        """Withdraws stores of blocks that are given to others, before anything in the step happens, also
        those that run. They may still read, but nothing of what they read is ever served."""
        everything = meta.stopped or self._stopped
        if not everything and (meta.orders is None or not meta.orders.fence):
            return
        wanted = set() if meta.orders is None else set(meta.orders.fence)
        for store in self._stores:
            if everything or store.part.ref in wanted:
                store.part.revoke()

    def begin(self, meta: KvtierMetadata) -> None:
        """Takes up the step's parts before the forward pass, and lets its loads start."""
        self.adopt(meta)
        if meta.weights != self._weights:
            self._renew(meta.weights)
        self._share_otherwise()
        if meta.orders is not None:
            self._revoke(meta.orders.revoke)
            self._distrust(meta.orders.distrusted)
        if meta.stopped and not self._stopped:
            self.stop()
        if not self._new_loads:
            return
        parts, self._new_loads = self._new_loads, []
        if self._client is not None and self._sharing is not None and not self._stopped:
            self._sharing.let_load(self._client, self._step, parts)

    def adopt(self, meta: KvtierMetadata) -> None:
        """Takes up the step's parts and requests, which are followed and reported from now on. Called again
        in the same step it does nothing."""
        if meta.step == self._step:
            return
        self._step, self._work = meta.step, meta.work
        if self._new_loads or self._new_stores:
            for left in (*self._new_loads, *self._new_stores):
                left.revoke()  # a step broke off: the next one's doorbells must not release them
            self._new_loads, self._new_stores = [], []
        if meta.orders is not None:
            self._adopt(meta.orders)
        if meta.stopped or self._stopped:
            self._nothing_more()

    def end(self) -> None:
        """Lets the step's stores start, after the forward pass, when what it computed is in place or
        enqueued. Called again in the same step it does nothing."""
        if not self._new_stores:
            return
        # Parts that are over may have been followed to their end already.
        parts = [part for part in self._new_stores if not part.state().over]
        self._new_stores = []
        if parts and self._client is not None and self._sharing is not None and not self._stopped:
            self._sharing.let_store(self._client, self._step, parts)

    def poll(self) -> Results | None:
        """Returns everything that has ended since the last call, or None if nothing is under way."""
        if not (self._loads or self._stores or self._held):
            return None
        results = Results()
        now_s = self._clock()
        self._loads = [load for load in self._loads if not self._load_over(load, now_s, results)]
        self._stores = [store for store in self._stores if not self._store_over(store, now_s)]
        if self._held:
            read = {request for store in self._stores for request in store.requests}
            results.sent = self._held.keys() - read
            for request in results.sent:
                del self._held[request]
        return results

    def report(self) -> WorkerReport | None:
        """Returns what the scheduler's side must know after this step, or None if there is nothing."""
        if not self._unsure and not self._audits and not self._adapters.has_news:
            return None
        audits = self._audits.poll(self._clock())
        changed = [self._change] if self._unsure and self._change is not None else []
        loaded = self._adapters.take()
        return WorkerReport(audits, changed, loaded) if audits or changed or loaded else None

    def adapter_loaded(self, adapter: AdapterId, proof: bytes) -> None:
        """Takes note that a LoRA adapter was read, and is about to be computed with. If its number had other
        weights before, stores of what was computed with those are withdrawn: the next step would add
        to them."""
        if self._adapters.loaded(adapter, proof) is None:
            return
        for store in self._stores:
            if self._adapters.has_ended(store.adapter):
                store.part.revoke()

    def weights_changed(self, revision: str) -> WeightsChange | None:
        """Takes note that the weights have changed, with this name or without one. Nothing starts any more,
        and nothing that is on its way counts, until the scheduler's side has answered; the change is told in
        each step until then. Returns the change, or None if this side is disabled."""
        if self._stopped:
            return None
        last = self._change
        if not revision and last is not None and (last.revision, last.work) == ("", self._work):
            return last  # nothing was computed in between, so this is one of several calls that change them
        self._changes += 1
        self._change = WeightsChange(revision, self._work, self._changes)
        self._unsure = True
        for load in self._loads:
            load.in_vain = load.failed = True
            load.bad_blocks.update(load.block_ids)
        self._audits.fail_all()
        self._part()
        return self._change

    # --- the end

    def stop(self) -> None:
        """Disables this side for good: nothing starts any more. `fence` and `poll` still work."""
        self._stopped = True
        self._nothing_more()
        for link in self._links():
            link.close(0)

    def close(self) -> None:
        """Ends the connection, because the engine shuts down. Waits a short while for copies that run."""
        self._stopped = True
        deadline_s = self._clock() + CLOSE_TIMEOUT_S
        fenced = [link.close(max(0.0, deadline_s - self._clock())) for link in self._links()]
        if self._sharing is not None:
            fenced.append(self._sharing.close(max(0.0, deadline_s - self._clock())))
        if self._host_memory is not None:
            self._host_memory.close()
        if all(fenced):
            self.link, self._old_links, self._sharing = None, [], None  # the engine may free its memory
        else:
            self._log.warning("kvtier: a copy of the KV cache was still running at shutdown")

    # --- inside

    @property
    def _client(self) -> Client | None:
        return None if self.link is None else self.link.client

    def _links(self) -> Iterable[Link]:
        return [*self._old_links, *([] if self.link is None else [self.link])]

    def _attach(self) -> None:
        if self._sharing is not None and not (self._stopped or self._asleep or self._unsure):
            self.link = self._connect(self._weights, self._groups, self._sharing.client_memory)

    def _renew(self, weights: Weights) -> None:
        """Attaches anew, for blocks of these weights; if the weights have changed again meanwhile, later,
        when that change is answered."""
        self._weights = weights
        self._unsure = weights.heeded < self._changes
        self._part()
        self._attach()

    def _share_otherwise(self) -> None:
        """If the daemon cannot open the memory of the KV cache, attaches anew with another way of sharing, if
        there is one. What is still under way ends as after the loss of a daemon."""
        client, sharing = self._client, self._sharing
        if client is None or sharing is None or client.memory_error is None:
            return
        other = sharing.otherwise(client.memory_error)
        if other is not None:
            self._part()
            self._sharing = other
            self._attach()

    def _part(self) -> None:
        """Parts from the daemon."""
        if self.link is not None:
            self.link.close(0)
            self._old_links = [self.link]
            self.link = None

    def _adopt(self, orders: Orders) -> None:
        client, now_s = self._client, self._clock()
        for load in orders.loads:
            self._new_loads += self._follow(load, client, now_s)
        self._new_loads += self._audits.adopt(orders, client, now_s)
        for store in orders.stores:
            source = TrackedPart(client, store.part, store.block_ids, now_s)
            self._stores.append(_Store(source, store.requests, store.adapter))
            if self._adapters.has_ended(store.adapter):
                source.revoke()
            else:
                self._new_stores.append(source)
        for request in orders.held:
            self._held[request] = now_s

    def _nothing_more(self) -> None:
        for load in self._loads:
            load.nothing_more()
        self._audits.fail_all()

    def _distrust(self, requests: Collection[str]) -> None:
        """Has the loads of these requests fail, because they are not what the engine would compute."""
        for load in self._loads if requests else ():
            if load.order.request in requests:
                load.in_vain = load.failed = True
                load.bad_blocks.update(load.block_ids)

    def _forget_part(self, part: TrackedPart) -> None:
        if self._sharing is not None:
            self._sharing.over(part)

    def _follow(self, order: LoadOrder, client: Client | None, now_s: float) -> list[TrackedPart]:
        """Follows an order and returns its parts. The order is for a new load, or for one that has a rest."""
        if not order.goes_on:
            load = _Load(order, in_vain=self._asleep)
            self._loads.append(load)
        else:
            known = [each for each in self._loads if each.order.rest and each.order.request == order.request]
            if not known:  # it was reported already
                for part in order.parts:
                    if part is not None:
                        TrackedPart(client, part, (), now_s).revoke()
                return []
            load = known[0]
            load.order = order
        parts = []
        for part, block_ids in zip(order.parts, order.block_ids, strict=True):
            load.block_ids.update(block_ids)
            if part is None:
                load.failed = True
                load.bad_blocks.update(block_ids)
            else:
                parts.append(TrackedPart(client, part, block_ids, now_s))
        load.left += parts
        return parts

    def _revoke(self, refs: Iterable[PartRef]) -> None:
        wanted = set(refs)
        if not wanted:
            return
        parts = [part for load in self._loads for part in load.left]
        parts += [store.part for store in self._stores]
        for part in parts:
            if part.ref in wanted:
                part.revoke()

    def _store_over(self, store: _Store, now_s: float) -> bool:
        over = store.part.state().over
        if not over and self._held:
            waiting = [self._held[request] for request in store.requests if request in self._held]
            over = bool(waiting) and self._give_up(store.part, min(waiting), now_s)
        if over:
            self._forget_part(store.part)
        return over

    def _load_over(self, load: _Load, now_s: float, results: Results) -> bool:
        for part in list(load.left):
            if load.failed:
                part.revoke()
            landing = self._landing(part, now_s)
            if landing is Landing.PENDING:
                continue
            load.left.remove(part)
            self._forget_part(part)
            if landing is Landing.FAILED or load.in_vain:
                load.failed = True
                load.bad_blocks.update(part.block_ids)
        if load.left or load.order.rest:
            return False
        results.received.add(load.order.request)
        if load.failed:
            if load.order.blocks_tell and load.bad_blocks:
                results.bad_blocks.update(load.bad_blocks)
            else:
                results.failed.add(load.order.request)
        return True

    def _landing(self, part: TrackedPart, now_s: float) -> Landing:
        state = part.state()
        if state is PartState.ARMED and self._give_up(part, part.since_s, now_s):
            state = part.state()
        if state is PartState.DONE and self._sharing is not None:
            return self._sharing.landing(part)
        return Landing.FAILED if state.over else Landing.PENDING

    def _give_up(self, part: TrackedPart, since_s: float, now_s: float) -> bool:
        """Revokes a part that has waited for too long, or whose daemon does not answer. Returns whether it is
        over."""
        waited_s = now_s - since_s
        late = waited_s > self._config.load_start_deadline_s
        if not late and waited_s > UNRESPONSIVE_AFTER_S and part.client is not None:
            late = part.client.status.state is ClientState.UNRESPONSIVE
        return late and part.revoke().over


def _groups(layouts: Iterable[GroupLayout], replicated: Collection[int]) -> tuple[Group, ...]:
    return tuple(
        Group(
            block_tokens=layout.shape.block_tokens,
            num_blocks=layout.num_blocks,
            kind=layout.shape.kind,
            window_tokens=layout.shape.window_tokens,
            replicated=layout.shape.group in replicated,
            planes=tuple(layout.planes.values()),
        )
        for layout in layouts
    )
