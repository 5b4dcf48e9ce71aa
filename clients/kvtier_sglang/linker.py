"""The linker for SGLang: `--enable-unified-cache-external-linker --unified-cache-external-linker-backend
dynamic --unified-cache-external-linker-config '{"linker": "KvtierLinker", "linker_module_path":
"kvtier_sglang.linker", "linker_extra_config": {}}'`.

One in each process of an engine. An engine never fails because of it: whatever goes wrong here disables the
linker for the rest of the engine's life, with one warning, and the engine runs on without it.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from kvtier import ClientOptions, GroupQuery
from kvtier_engine import autostart
from kvtier_engine.hints import Allowed, Answer, HintVerdict
from kvtier_engine.link import Link
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker

from kvtier_sglang import matching, updates
from kvtier_sglang.agreement import Agreement
from kvtier_sglang.config import LinkerConfig
from kvtier_sglang.hinted import HintedRequests, Pages
from kvtier_sglang.identity import UnsupportedArguments, check_version, derive
from kvtier_sglang.loads import Loads
from kvtier_sglang.lookups import HeldLookups
from kvtier_sglang.pools import UnsupportedPool, check_components, is_replicated, pools_of
from kvtier_sglang.staging import Staging
from kvtier_sglang.stores import Stores
from kvtier_sglang.wishes import Wishes

ATTACH_WAIT_S = 1.0
"""How long an engine's start may wait for the daemon, so that its first requests can already hit."""
CLOSE_TIMEOUT_S = 2.0
PAGE_TOKENS = 16
"""Engines with smaller pages are warned: for each page there is a lookup, a record and a copy."""

_Result = TypeVar("_Result")
log = logging.getLogger("sglang.kvtier")


class _LoadsAreOver:
    """What the forward pass asks before it reads a layer. Loads are over when they are said to be, so it
    never waits."""

    def set_consumer(self, index: int) -> None:
        """Does nothing."""

    def wait_until(self, threshold: int) -> None:
        """Does nothing."""


class KvtierLinker(UnifiedCacheLinker):
    """The linker in one process of an engine. Called by its scheduler, from one thread."""

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: set[ComponentType],
        extra_config: dict[str, Any] | None = None,
        forward_stream: Any = None,
    ) -> None:
        """Raises SettingsError for settings that cannot be used. Any other error only disables the linker."""
        self.forward_stream = forward_stream
        self.layer_done_counter = _LoadsAreOver()
        self.pools: dict[PoolName, object] = {}
        """SGLang restores nothing of sliding windows that are not in it."""
        self._config = LinkerConfig.parse(extra_config)
        self._off = False
        self._agreement = Agreement(params)
        self._side: _Side | None = None
        self._loaded: set[str] = set()
        """Requests whose loads are over, and whose batch has not begun."""
        self._batches = -1
        self._lost = 0
        """Nodes that were offered, without a side to store them, and whose results were not taken."""
        try:
            check_version(importlib.metadata.version("sglang"))
            # Before anything that may fail on one rank alone: ranks wait for each other in a lookup, so all
            # of them have to ask for the same pages.
            matching.listen(KvtierLinker)
            names = [component.name for component in components]
            self._side = _Side(self._config, server_args, params, names, self._disable)
            updates.listen(self._side)
            self.pools = dict.fromkeys(self._side.names)  # SGLang asks which there are
        except Exception as error:
            self._disable(error)

    # --- lookups and loads

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        """See UnifiedCacheLinker. Where all pages of a prefix are needed, each shorter one can be restored as
        well; where a window or a state is, only the longest one is known to be."""
        side = self._active
        if side is None or not self._config.load:
            return []
        readable = self._guard(lambda: side.readable(rid, transfers), 0)
        if not readable:
            return []
        return list(range(1, readable + 1)) if len(side.names) == 1 else [readable]

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        """Loads, and returns whether all ranks have. Until then the engine can still compute."""
        side = self._active
        landed = side is not None and self._guard(lambda: side.load(rid, transfers), False)
        landed = self._agreement.all_say(landed)
        if landed:
            self._loaded.add(rid)
        return landed

    def start_layer_wise_loading(self) -> int:
        if not self._loaded:
            return -1
        self._loaded.clear()
        self._batches += 1
        return self._batches

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        return True

    def cancel_queued_load(self, rid: str) -> bool:
        if rid not in self._loaded:
            return False
        self._loaded.remove(rid)
        return True

    def hinted(self, envelope: Any, prompt_tokens: int, pages: Pages) -> list[Answer]:
        """Does what a request's KV hints ask for (see `hinted`), and returns the answers."""
        off = [Answer("", "", HintVerdict.REFUSED, "kvtier is off for this engine, whose log says why")]
        side = self._active
        return off if side is None else self._guard(lambda: side.hinted(envelope, prompt_tokens, pages), off)

    def text_of(self, key: Any, req: Any) -> Any:
        """Returns the part of a request's RadixKey that may be looked up (see `media`)."""
        return self._guard(lambda: matching.text_of(key, req), key)

    # --- stores

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        """Takes a node on every rank or on none. What this rank cannot store has a result that says so."""
        if not self._config.store:
            return False
        side = self._side
        if side is None:
            self._lost += 1
            return True
        begun = side.stores.begun
        if not self._off:
            self._guard(lambda: side.store(transfers, self.record_offload_ready), None)
        if side.stores.begun == begun:
            side.stores.refuse()
        return True

    def num_completed_offloads(self) -> int:
        side = self._side
        if side is None:
            return self._lost
        if not self._off:
            self._guard(side.go_on, None)
        return side.stores.completed

    def pop_completed_offload(self) -> bool:
        if self._side is None:
            self._lost -= 1
            return False
        return self._side.stores.take_result()

    # --- the end

    def reset(self) -> None:
        self._loaded.clear()
        self._lost = 0
        side = self._side
        if side is not None:
            self._guard(side.reset, None)

    def close(self) -> None:
        side = self._side
        if side is not None:
            self._guard(side.close, None)

    # --- inside

    @property
    def _active(self) -> _Side | None:
        return None if self._off else self._side

    def _guard(self, call: Callable[[], _Result], otherwise: _Result) -> _Result:
        try:
            return call()
        except Exception as error:
            self._disable(error)
            return otherwise

    def _disable(self, error: Exception) -> None:
        if self._off:
            return
        self._off = True
        expected = isinstance(error, (UnsupportedArguments, UnsupportedPool))
        log.warning(
            "kvtier is off for this engine, which serves on without it: %s",
            error if expected else f"{type(error).__name__}: {error}",
            exc_info=None if expected else error,
        )
        side = self._side
        if side is not None:
            try:
                side.stores.fail_all()
                side.stop()
            except Exception:
                log.exception("kvtier: the connection could not be ended")


class _Side:
    """What an engine's process has of kvtier, once its configuration is known to be supported."""

    def __init__(
        self,
        config: LinkerConfig,
        server_args: Any,
        params: Any,
        components: Sequence[str],
        on_refused: Callable[[Exception], None],
    ) -> None:
        kvcache = params.token_to_kv_pool_allocator.get_kvcache()
        self._config, self._server_args, self._params = config, server_args, params
        self._on_refused = on_refused
        pools = pools_of(kvcache, params)
        check_components(pools, components)
        self.names = [PoolName(pool.name) for pool in pools]
        """The engine's pools, which number the groups."""
        attention = getattr(kvcache, "full_kv_pool", kvcache)
        # Not `store_dtype`, which is bytes for every kind of eight bits.
        self._kv_dtype = str(attention.dtype).removeprefix("torch.")
        self._device = str(attention.device)
        self._replicated = is_replicated(kvcache)
        self._staging = Staging(pools, config.staging_mib << 20)
        self._rank = _rank(params)
        if params.page_size < PAGE_TOKENS and not self._rank:
            log.warning(
                "kvtier: pages of %d tokens are small. Each is stored, found and loaded by itself, which"
                " costs time and memory. Set --page-size to %d or more.",
                params.page_size,
                PAGE_TOKENS,
            )
        self._instance = f"sglang-{os.getpid()}-{secrets.token_hex(4)}"
        self._secret = secrets.token_bytes(16)
        queries = [GroupQuery(group, pool.window_blocks) for group, pool in enumerate(pools)]
        self._lookups = HeldLookups(queries, time.monotonic)
        self._loads = Loads(self._staging, self._lookups, time.monotonic)
        wishes = Wishes()
        self.stores = Stores(self._staging, time.monotonic, wishes)
        allowed = Allowed(
            hold_s_max=config.max_pin_s, hold_s_max_name="max_pin_s", load=config.load, output=False
        )
        self._hinted = HintedRequests(allowed, queries, params.page_size, wishes)
        self._generation = 0
        if config.autostart and self._rank == 0:
            autostart.ensure_and_tell(config.socket, log)
        self._link = self._connect()
        self._link.wait_ready(ATTACH_WAIT_S)

    def readable(self, request: str, transfers: Sequence[PoolTransfer]) -> int:
        client = self._link.client
        if client is None or [each.name for each in transfers] != self.names:
            return 0
        return self._lookups.readable(client, request, _hashes(transfers[0]))

    def hinted(self, envelope: Any, prompt_tokens: int, pages: Pages) -> list[Answer]:
        return self._hinted.take(self._link.client, envelope, prompt_tokens, pages)

    def load(self, request: str, transfers: Sequence[PoolTransfer]) -> bool:
        client = self._link.client
        if client is None or [each.name for each in transfers] != self.names:
            return False
        pages = [
            staging.pool.pages_of(each.device_indices)
            for staging, each in zip(self._staging.pools, transfers, strict=True)
        ]
        deadline_s = time.monotonic() + self._config.load_deadline_s
        self._wait_for_gpu()  # slots may still be in use by what was enqueued before
        landed = self._loads.load(client, request, _hashes(transfers[0]), pages, deadline_s)
        self._wait_for_gpu()
        return landed

    def store(self, transfers: Sequence[PoolTransfer], ready: Callable[[], list[Any]]) -> None:
        if self._replicated and self._rank:
            self.stores.skip()
            return
        events = [] if self._device == "cpu" else ready()
        parts = []
        for each in transfers:
            group = self.names.index(each.name)
            pages = self._staging.pools[group].pool.pages_of(each.device_indices)
            parts.append((group, _hashes(each), pages))
        self.stores.add(self._link.client, parts, lambda: all(event.query() for event in events))

    def go_on(self) -> None:
        self._lookups.expire()
        self._loads.reap()
        self.stores.go_on(self._link.client)

    def reset(self) -> None:
        self._lookups.clear()
        self.stores.forget()

    def weights_changed(self) -> None:
        """From now on pages are shared with nobody: they belong to weights that have no name."""
        self._lookups.clear()
        self.stores.fail_all()
        self._link.close(0)
        self._generation = secrets.randbits(63) | 1
        self._link = self._connect()

    def stop(self) -> None:
        """Ends the connection, and waits for nothing."""
        self._lookups.clear()
        self._link.close(0)

    def close(self) -> None:
        """Ends the connection, and waits a short while for copies that run."""
        self.stores.forget()
        self._lookups.clear()
        if self._link.close(CLOSE_TIMEOUT_S):
            self._staging.close()

    def _connect(self) -> Link:
        generation = self._generation

        def options() -> ClientOptions:
            if self._config.autostart:
                autostart.wait(self._config.socket, autostart.START_TIMEOUT_S)
            return ClientOptions(
                instance=self._instance,
                namespace=derive(
                    self._server_args,
                    self._params,
                    kv_dtype=self._kv_dtype,
                    replicated=self._replicated,
                    tenant=self._config.tenant,
                    salt=self._config.salt,
                    revision=self._config.weights_revision,
                    generation=generation,
                ),
                groups=self._staging.groups,
                memory=self._staging.memory,
                socket=self._config.socket or None,
                program=f"sglang {importlib.metadata.version('sglang')}",
                secret=self._secret,
            )

        return Link(options, self._on_refused)

    def _wait_for_gpu(self) -> None:
        """Waits until what was enqueued has run."""
        if self._device != "cpu":
            torch.cuda.synchronize()


def _hashes(transfer: PoolTransfer) -> list[bytes]:
    return [bytes.fromhex(key) for key in transfer.keys or ()]


def _rank(params: Any) -> int:
    group = params.attn_tp_cache_group or params.tp_cache_group
    if group is None or not torch.distributed.is_initialized():
        return 0
    return int(torch.distributed.get_rank(group=group))
