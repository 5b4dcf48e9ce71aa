"""The vLLM connector: `--kv-transfer-config '{"kv_connector": "KvtierConnector", "kv_connector_module_path":
"kvtier_vllm.connector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}'`.

A thin shell around `scheduler.side.SchedulerSide` and `worker.side.WorkerSide`. An engine never fails because
of it: an error here disables the connector for the rest of the engine's life, with one warning, and the
engine runs on without it.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.metadata
import secrets
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

import vllm
from kvtier import ClientOptions, ClientStatus, Group, Namespace, Role
from kvtier.connection.address import resolve
from kvtier.memory import Memory
from kvtier_engine import autostart
from kvtier_engine.link import Link
from kvtier_engine.settings import SettingsError
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvtier_vllm import updates
from kvtier_vllm.config import ConnectorConfig
from kvtier_vllm.groups import HYBRID_VLLM, Groups, context_ranks, groups_of, replicated_groups
from kvtier_vllm.hooks import CACHE_HIT_SOURCE, KVConnectorTransferResults, around_reset
from kvtier_vllm.instance import secret_of, shown_id
from kvtier_vllm.logs import adopt_client_log, attached, log
from kvtier_vllm.meta import DOORBELLS, KvtierMetadata, Weights, WeightsChange
from kvtier_vllm.model import adapter_loads, weight_calls
from kvtier_vllm.model.adapter_loads import AdapterId, AdapterLoad
from kvtier_vllm.model.namespace import UnsupportedConfiguration, derive, told, version_of
from kvtier_vllm.scheduler.auditing import Audits, threshold_of
from kvtier_vllm.scheduler.prefill import STEP_TOKENS_MIN, PrefillMeter
from kvtier_vllm.scheduler.side import SchedulerSide
from kvtier_vllm.stats import Increments, KvtierPromMetrics, KvtierStats
from kvtier_vllm.worker.gpu import EngineGpu, engine_gpu, refuse_sleep_mode, required_layout
from kvtier_vllm.worker.kv_memory import NotShareable
from kvtier_vllm.worker.side import WorkerSide

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvtier_vllm.scheduler.events import BlockEvents

ATTACH_WAIT_S = 1.0
"""How long an engine's start may wait for the daemon, so that its first requests can already hit."""
UNNAMED = "unnamed"
"""The name of weights that nobody knows; their namespace has a number of its own."""

_Result = TypeVar("_Result")
_Other = TypeVar("_Other")


class KvtierConnector(KVConnectorBase_V1, SupportsHMA):
    """The connector in one process of an engine."""

    _cache_hit_source = CACHE_HIT_SOURCE

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        """Raises SettingsError for settings that cannot be used. Any other error only disables the
        connector."""
        super().__init__(vllm_config, role, kv_cache_config)
        adopt_client_log()
        transfer = vllm_config.kv_transfer_config
        self._config = ConnectorConfig.parse(transfer.kv_connector_extra_config)
        self._off: str | None = None
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._step_without_us = 0
        self._bad_blocks: set[int] = set()
        self._increments = Increments()
        self._attachments = 0
        try:
            gpu = self._engine_gpu()
            if gpu is not None:
                refuse_sleep_mode(vllm_config, version_of(vllm.__version__))
            self._identity = _Identity(vllm_config, self._config)
            _refuse_hybrid_models(kv_cache_config, version_of(vllm.__version__))
            groups = groups_of(kv_cache_config, vllm_config)
            if role is KVConnectorRole.SCHEDULER:
                if self._config.autostart:
                    autostart.ensure_and_tell(self._config.socket, log)
                self._scheduler = SchedulerSide(
                    self._config,
                    groups,
                    self._connect_scheduler,
                    log,
                    None if self._config.prefill_tokens_per_s else _prefill_meter(vllm_config),
                    _block_events(vllm_config, kv_cache_config),
                    audits=_audits(vllm_config, groups, self._config),
                    in_parts=_failures_recompute(transfer),
                    weights=_first_weights(vllm_config),
                    world_size=vllm_config.parallel_config.world_size,
                    adapters_by_name=version_of(vllm.__version__) < (0, 31),
                )
                self._scheduler.link.wait_ready(ATTACH_WAIT_S)
            else:
                self._worker = WorkerSide(
                    self._config, self._connect_rank, log, gpu, unnamed=_transfers_weights(vllm_config)
                )
            updates.listen(self)
            weight_calls.notice(updates.weights_change)
            if vllm_config.lora_config is not None:
                adapter_loads.listen(self)
        except Exception as error:
            self._disable(error)
        if self._is_off:  # this was found out in the background meanwhile
            self._stop_sides()

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a store that is lost is no more than a miss later."""
        return False

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """vLLM from 0.33 on asks this when an engine starts with sleep mode."""
        return True

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """vLLM asks this before there is a connector. It never fails: the constructor reports what
        is wrong."""
        try:
            config = ConnectorConfig.parse(vllm_config.kv_transfer_config.kv_connector_extra_config)
            return required_layout(config, version_of(vllm.__version__))
        except (SettingsError, UnsupportedConfiguration):
            return None

    def _engine_gpu(self) -> EngineGpu | None:
        """Returns the GPU that the engine computes on, or None on a CPU. Raises NotShareable for anything
        else."""
        return engine_gpu()

    # --- the scheduler's hooks

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        side = self._scheduler
        if side is not None and not self._is_off:
            self._guard(lambda: side.watch_blocks(gpu_block_pool), None)
            around_reset(
                gpu_block_pool,
                lambda: self._guard(side.settle, None),
                lambda done: self._guard(lambda: side.was_reset(done), None),
            )

    def has_pending_block_frees(self) -> bool:
        """vLLM from 0.30 on asks this when there are no blocks for a running request: True lets it wait for a
        moment instead of preempting a request."""
        side = self._scheduler
        return side is not None and not self._is_off and self._guard(lambda: side.frees_soon, False)

    def has_pending_push_work(self) -> bool:
        """vLLM asks this to learn whether to go on stepping without requests."""
        side = self._scheduler
        return side is not None and side.has_steps_to_do

    def on_new_request(self, request: Request) -> None:
        side = self._scheduler
        if side is not None and not self._is_off:
            self._guard(lambda: side.arrived(request), None)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        side = self._scheduler
        if side is None or self._is_off:
            return 0, False
        tokens: int | None = self._guard(lambda: side.match(request, num_computed_tokens), 0)
        return tokens, bool(tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        side = self._scheduler
        if side is None:
            return
        if not self._is_off:
            failed = object()
            if (
                self._guard(
                    lambda: side.allocated(request, blocks.get_block_ids(), num_external_tokens), failed
                )
                is not failed
            ):
                return
        if num_external_tokens:
            side.promise_failed(request.request_id, blocks.get_block_ids())

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        side = self._scheduler
        if side is None:
            self._step_without_us += 1
            return KvtierMetadata(step=self._step_without_us, stopped=True)
        try:  # called in every step, so without `_guard`, whose closures cost microseconds
            side.plan_step(scheduler_output)
        except Exception as error:
            self._disable(error)
        return side.take_metadata()

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        side = self._scheduler
        if side is not None:
            try:
                side.results(connector_output)
            except Exception as error:
                self._disable(error)

    def take_events(self) -> Iterable[KVCacheEvent]:
        side = self._scheduler
        return [] if side is None else self._guard(side.take_events, [])

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        side = self._scheduler
        if side is None:
            return None
        try:
            grown = self._increments.of(side.totals())
        except Exception as error:
            self._disable(error)
            return None
        return KvtierStats(grown) if grown else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return KvtierStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        return KvtierPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        side = self._scheduler
        if side is None:
            return False, None
        held = self._guard(lambda: side.finished(request.request_id, block_ids), False)
        return held, self._guard(lambda: side.answers(request), None)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def reset_cache(self) -> bool | None:
        side = self._scheduler
        if side is None or self._is_off:
            return True  # nothing that we have stored is ever served again
        self._guard(side.reset, None)
        return True

    # --- weights that change (`updates`)

    @property
    def engine(self) -> str:
        """The engine's id (see `updates.UpdateListener`)."""
        return str(self._vllm_config.kv_transfer_config.engine_id)

    @property
    def parallel_config(self) -> Any:
        """vLLM's configuration object, which belongs to this engine only (see `updates.UpdateListener`)."""
        return self._vllm_config.parallel_config

    def weights_changed(self, revision: str) -> WeightsChange | None:
        """Takes note that a worker's weights have changed (see `updates.UpdateListener`)."""
        side = self._worker
        if side is None or self._is_off:
            return None
        return self._guard(lambda: side.weights_changed(revision), None)

    def weights_told(self, change: WeightsChange) -> None:
        """Takes a change that a worker in this process has told (see `updates.UpdateListener`)."""
        side = self._scheduler
        if side is not None and not self._is_off and self._vllm_config.parallel_config.world_size == 1:
            self._guard(lambda: side.weights_changed([change]), None)

    # --- adapters (`adapter_loads`)

    @property
    def lora_config(self) -> Any:
        """vLLM's LoRA configuration object, which belongs to this engine only (see
        `adapter_loads.AdapterListener`)."""
        return self._vllm_config.lora_config

    def adapter_loaded(self, adapter: AdapterId, proof: bytes) -> None:
        """Takes note that a worker has loaded an adapter (see `adapter_loads.AdapterListener`)."""
        worker, scheduler = self._worker, self._scheduler
        if worker is not None:
            self._guard(lambda: worker.adapter_loaded(adapter, proof), None)
        if scheduler is not None and self._vllm_config.parallel_config.world_size == 1:
            loads = [AdapterLoad(adapter, proof)]
            self._guard(lambda: scheduler.adapters_loaded(loads, at_once=True), None)

    # --- the worker's hooks

    def get_mem_pool_context(self) -> AbstractContextManager[None] | None:
        side = self._worker
        if side is None or self._is_off:
            return None
        return self._guard(lambda: side.memory_context(self._kv_cache_config), None)

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        side = self._worker
        if side is not None and not self._is_off:
            cache, engine = self._kv_cache_config, self._vllm_config
            same, spread = replicated_groups(cache, engine), context_ranks(cache, engine)
            dtype = str(engine.cache_config.cache_dtype)
            self._guard(lambda: side.register(kv_caches, cache, same, spread, dtype), None)
            if side.link is not None and not self._config.autostart:  # else the scheduler, which comes next,
                side.link.wait_ready(ATTACH_WAIT_S)  # may have to start a daemon first

    def unregister_kv_caches(self) -> None:
        """vLLM from 0.33 on calls this when the engine goes to sleep and gives the memory of its KV cache
        back."""
        side = self._worker
        if side is not None:
            self._guard(side.sleep, None)

    def restore_kv_caches(self) -> None:
        """vLLM from 0.33 on calls this when the engine is awake and its KV cache has memory again."""
        side = self._worker
        if side is not None:
            self._guard(side.wake, None)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        side = self._worker
        if side is not None and isinstance(kv_connector_metadata, KvtierMetadata):
            try:
                side.fence(kv_connector_metadata)
            except Exception as error:
                self._disable(error)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        side = self._worker
        if side is not None and isinstance(connector_metadata, KvtierMetadata):
            try:
                side.begin(connector_metadata)
            except Exception as error:
                self._disable(error)
                # In any case the requests of this step have to be reported at some time.
                self._guard(lambda: side.adopt(connector_metadata), None)

    def has_connector_metadata(self) -> bool:
        """vLLM asks this before and after each layer: there is never anything to wait for, or to save."""
        return False

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Does nothing: loads were released when the metadata was bound, before the forward pass."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: no request computes before all of its blocks are loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Does nothing: blocks are stored as a whole, after the step."""

    def wait_for_save(self) -> None:
        side = self._worker
        if side is not None:
            self._guard(side.end, None)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        side = self._worker
        results = None if side is None else self._guard(side.poll, None)
        if results is None:
            return KVConnectorTransferResults()
        self._bad_blocks |= results.bad_blocks
        return KVConnectorTransferResults(
            finished_sending=results.sent, finished_recving=results.received, failed_recving=results.failed
        )

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending or None, results.finished_recving or None

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        side = self._worker
        return None if side is None else self._guard(side.report, None)

    def get_block_ids_with_load_errors(self) -> set[int]:
        bad_blocks, self._bad_blocks = self._bad_blocks, set()
        return bad_blocks

    def shutdown(self) -> None:
        for side in (self._scheduler, self._worker):
            if side is not None:
                self._guard(side.close, None)

    # --- inside

    @property
    def _is_off(self) -> bool:
        return self._off is not None

    def _guard(self, call: Callable[[], _Result], otherwise: _Other) -> _Result | _Other:
        """Returns what `call` returns. If it fails, disables the connector and returns `otherwise`."""
        try:
            return call()
        except Exception as error:
            self._disable(error)
            return otherwise

    def _disable(self, error: Exception) -> None:
        first = self._off is None
        self._off = f"{type(error).__name__}: {error}"
        if first:
            expected = isinstance(error, (UnsupportedConfiguration, NotShareable))
            log.warning(
                "kvtier is off for this engine, which serves on without it: %s",
                error if expected else self._off,
                exc_info=None if expected else error,
            )
        self._stop_sides()

    def _stop_sides(self) -> None:
        for side in (self._scheduler, self._worker):
            if side is not None:
                try:
                    side.stop()
                except Exception:
                    log.exception("kvtier: the connection could not be ended")

    def _connect_scheduler(self, weights: Weights) -> Link:
        def find_options() -> ClientOptions:
            options = self._identity.options(weights, Role.SCHEDULER)
            return ClientOptions(**options, on_ready=self._say_attached)

        return Link(find_options, self._disable)

    def _connect_rank(self, weights: Weights, groups: tuple[Group, ...], memory: Memory) -> Link:
        def find_options() -> ClientOptions:
            options = self._identity.options(weights, Role.RANK, groups, memory)
            if self._config.autostart:  # the scheduler starts a daemon, and comes after the workers
                autostart.wait(self._config.socket, autostart.START_TIMEOUT_S)
            return options

        return Link(find_options, self._disable)

    def _say_attached(self, status: ClientStatus) -> None:
        """Logs that the engine is attached."""
        again, self._attachments = self._attachments > 0, self._attachments + 1
        socket = str(resolve(self._config.socket or None).socket)
        log.info("%s", attached(status, socket, self._config, again=again))


def _register() -> None:
    """Makes the class known by its name, which is all that vLLM's MultiConnector has when it passes on the
    statistics of its children."""
    name = KvtierConnector.__name__
    if name not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(name, __name__, name)


_register()


class _Identity:
    """What this engine tells the daemon about itself."""

    def __init__(self, vllm_config: VllmConfig, config: ConnectorConfig) -> None:
        # A copy of how it is now: vLLM writes into it when it reloads weights from another folder, in workers
        # only.
        self._vllm_config = copy.copy(vllm_config)
        self._vllm_config.model_config = copy.copy(vllm_config.model_config)
        self._config = config
        self._derived: dict[bool, Namespace] = {}
        """By whether somebody has named the weights. The rest is the same whatever they are called, and
        weights that have a name are not read."""

    def options(
        self,
        weights: Weights,
        role: Role,
        groups: tuple[Group, ...] = (),
        memory: Memory | None = None,
    ) -> ClientOptions:
        """Returns the options of a client of this process. Slow, because it may read the model's weights.
        Raises UnsupportedConfiguration."""
        parallel = self._vllm_config.parallel_config
        engine = str(self._vllm_config.kv_transfer_config.engine_id)
        return ClientOptions(
            # With other weights this is another instance, so that its processes never meet those of the one
            # before.
            instance=f"{shown_id(engine)}-dp{parallel.data_parallel_rank}"
            + (f"-g{weights.life}" if weights.life else ""),
            secret=secret_of(engine),
            namespace=self._namespace(weights),
            role=role,
            rank=parallel.rank if role is Role.RANK else 0,
            world_size=parallel.world_size,
            groups=groups,
            memory=memory,
            socket=self._config.socket or None,
            doorbells=DOORBELLS,
            prefill_tokens_per_s=self._config.prefill_tokens_per_s if role is Role.SCHEDULER else 0.0,
            configuration=told(self._vllm_config, self._config.on_reset) if role is Role.SCHEDULER else (),
            program=f"kvtier-vllm {importlib.metadata.version('kvtier')} (vLLM {vllm.__version__})",
        )

    def _namespace(self, weights: Weights) -> Namespace:
        revision = weights.revision or (UNNAMED if weights.private else self._config.weights_revision)
        derived = self._derived.get(bool(revision))
        if derived is None:
            config = self._config
            derived = self._derived[bool(revision)] = derive(
                self._vllm_config,
                vllm.__version__,
                config.tenant,
                config.salt,
                revision,
                adapters_by_files=config.adapters == "files",
            )
        return dataclasses.replace(
            derived,
            generation=weights.life if weights.private else 0,
            weights_revision=revision or derived.weights_revision,
        )


def _prefill_meter(vllm_config: VllmConfig) -> PrefillMeter:
    scheduler, pipeline = vllm_config.scheduler_config, vllm_config.parallel_config.pipeline_parallel_size
    return PrefillMeter(
        # Batches of a pipeline overlap, and asynchronous scheduling is one ahead.
        steps_in_flight=pipeline + bool(scheduler.async_scheduling),
        # An engine whose steps are all small has no larger ones to measure.
        step_tokens_min=min(STEP_TOKENS_MIN, max(1, scheduler.max_num_batched_tokens // 2)),
    )


def _transfers_weights(vllm_config: VllmConfig) -> bool:
    return getattr(vllm_config, "weight_transfer_config", None) is not None


def _first_weights(vllm_config: VllmConfig) -> Weights:
    """Returns the weights that the engine starts with. If weights are transferred into a running engine,
    nobody knows which these are before they are named."""
    if not _transfers_weights(vllm_config):
        return Weights()
    log.info(
        "kvtier: weights are transferred to this engine (weight_transfer_config): until they are named by "
        "kvtier_vllm.updates.weights_changed(revision) it shares blocks with no other engine"
    )
    return Weights(secrets.randbits(63) | 1, private=True)


def _audits(vllm_config: VllmConfig, groups: Groups, config: ConnectorConfig) -> Audits:
    threshold = threshold_of(str(vllm_config.model_config.dtype), str(vllm_config.cache_config.cache_dtype))
    workers = vllm_config.parallel_config.world_size
    direct = config.share == "export" or engine_gpu() is None
    return Audits(groups, config.audit_rate, threshold, workers, log, direct=direct)


def _block_events(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> BlockEvents | None:
    """Returns None if vLLM publishes no KV events."""
    events = vllm_config.kv_events_config
    if events is None or not events.enable_kv_cache_events:
        return None
    from kvtier_vllm.scheduler.events import BlockEvents

    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    return BlockEvents(groups_of(kv_cache_config, vllm_config), specs, log)


def _refuse_hybrid_models(kv_cache_config: KVCacheConfig, vllm_version: tuple[int, int]) -> None:
    """Raises UnsupportedConfiguration if a load that fails would end the engine."""
    if len(kv_cache_config.kv_cache_groups) > 1 and vllm_version < HYBRID_VLLM:
        raise UnsupportedConfiguration(
            f"the model has {len(kv_cache_config.kv_cache_groups)} KV cache groups (hybrid attention), and "
            "this vLLM ends when a load of several groups fails: use vLLM 0.30 or later"
        )


def _failures_recompute(transfer: Any) -> bool:
    """Returns whether vLLM computes what cannot be loaded, and logs a warning if it does not."""
    policy = getattr(transfer, "kv_load_failure_policy", "recompute")
    if policy == "recompute":
        return True
    log.warning(
        "kvtier: kv_load_failure_policy is %r: a request whose blocks cannot be loaded fails instead of "
        'being computed; set "kv_load_failure_policy": "recompute" in --kv-transfer-config',
        policy,
    )
    return False
