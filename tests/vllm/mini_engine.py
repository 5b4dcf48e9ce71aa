"""vLLM's own scheduler and block pool with the connector, around a model that only checks.

The "KV" of a token is a digest of all tokens up to it, so every step can tell whether each block that vLLM
counts as computed holds what it must. Steps take about a millisecond; nothing is loaded but vLLM's Python.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from kvtier_vllm.model import adapter_loads
from kvtier_vllm.model.adapter_loads import proof_of

TOKENS, HEADS, HEAD_SIZE, LAYERS = 16, 2, 32, 3
ROW_WORDS = 2 * HEAD_SIZE * 2 // 8
PAGE_BYTES = HEADS * TOKENS * ROW_WORDS * 8

Digests = npt.NDArray[np.uint64]


class WrongKV(AssertionError):
    """A block that counts as computed holds something else."""


def engine_config(model: Path, kv_transfer_config: dict[str, Any] | None, **changes: Any) -> Any:
    """A real VllmConfig."""
    from vllm.engine.arg_utils import EngineArgs

    arguments = {
        "model": str(model),
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "dtype": "bfloat16",
        "max_model_len": 512,
        "block_size": TOKENS,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 128,
        "async_scheduling": False,
        "enable_prefix_caching": True,
        "kv_transfer_config": kv_transfer_config,
    }
    config = EngineArgs(**arguments | changes).create_engine_config()
    # vLLM switches it off for a CPU, which has no use for it: it is the scheduler that is looked at.
    config.scheduler_config.async_scheduling = (arguments | changes)["async_scheduling"]
    return config


def _kv_cache_config(blocks: int) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        KVCacheTensor,
    )

    names = [f"model.layers.{index}.self_attn.attn" for index in range(LAYERS)]
    spec = FullAttentionSpec(block_size=TOKENS, num_kv_heads=HEADS, head_size=HEAD_SIZE, dtype=torch.bfloat16)
    tensor = KVCacheTensor(
        size=blocks * LAYERS * PAGE_BYTES,
        layers=names,
        layer_stride=PAGE_BYTES * blocks,
        block_stride=PAGE_BYTES,
    )
    return KVCacheConfig(
        num_blocks=blocks, kv_cache_tensors=[tensor], kv_cache_groups=[KVCacheGroupSpec(names, spec)]
    )


def _digests(tokens: Sequence[int]) -> Digests:
    """One per token, of it and all before it."""
    running = hashlib.blake2b(digest_size=8)
    found = []
    for token in tokens:
        running.update(int(token).to_bytes(4, "little"))
        found.append(int.from_bytes(running.digest(), "little"))
    return np.array(found, np.uint64)


def _next(digests: Digests) -> int:
    """The token that the model says behind these."""
    return int(digests[-1] % np.uint64(1000))


def output_of(tokens: Sequence[int], count: int) -> list[int]:
    """What the model says after `tokens`."""
    known = list(tokens)
    for _ in range(count):
        known.append(_next(_digests(known)))
    return known[len(tokens) :]


class MiniEngine:
    """One engine in this process. Step it; every step checks all KV that it relies on."""

    def __init__(self, config: Any, blocks: int = 64, kv_cache_config: Any = None) -> None:
        """`kv_cache_config`: by default one group of full attention."""
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.structured_output import StructuredOutputManager

        kv_cache_config = kv_cache_config or _kv_cache_config(blocks)
        block_tokens, hash_tokens = self._block_sizes(kv_cache_config, config)
        config.cache_config.num_gpu_blocks = blocks
        self.blocks = blocks
        self.finished: dict[str, list[int]] = {}
        self.told: dict[str, Any] = {}
        """What connectors had the clients of requests told."""
        """Output tokens by request."""
        self.cached: dict[str, int] = {}
        """Tokens that a request began with, computed by nobody here."""
        self.adapters: dict[int, str] = {}
        """Folders of LoRA adapters by number, as a worker has loaded them."""
        self.lora_config = config.lora_config
        self.preemptions = 0
        self.idle = False
        self.connector_stats: list[dict[str, Any]] = []
        """What vLLM is given to log, step by step."""
        self.kv_events: list[Any] = []
        """What vLLM publishes."""
        self._hasher = get_request_block_hasher(hash_tokens, sha256)
        init_none_hash(sha256)
        self.worker, self.layers = self._start_worker(config, kv_cache_config)
        self.pages = list(self.layers.values())
        self._ahead = bool(config.scheduler_config.async_scheduling)
        """A step is scheduled before the scheduler hears what the one before it has sampled."""
        self._unheard: list[Callable[[], None]] = []
        self.scheduler: Any = (AsyncScheduler if self._ahead else Scheduler)(
            vllm_config=config,
            kv_cache_config=kv_cache_config,
            structured_output_manager=StructuredOutputManager(config),
            block_size=block_tokens,
            hash_block_size=hash_tokens,
            log_stats=True,
        )
        publisher = self.scheduler.kv_event_publisher
        publisher.publish = lambda batch: self.kv_events.extend(batch.events)

    def _start_worker(self, config: Any, kv_cache_config: Any) -> tuple[Any, dict[str, Any]]:
        """The connector's half of a worker, if there is one, and the pages of each of its layers: words, of
        shape [blocks, heads, tokens, words]."""
        import torch
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
        from vllm.v1.kv_cache_layout import KVCacheLayout
        from vllm.v1.worker.utils import allocate_kv_cache

        worker, context = None, None
        if config.kv_transfer_config is not None:
            connector = KVConnectorFactory.get_connector_class(config.kv_transfer_config)
            worker = connector(config, KVConnectorRole.WORKER, kv_cache_config)
            context = worker.get_mem_pool_context()
        with context or contextlib.nullcontext():
            caches = allocate_kv_cache(kv_cache_config, torch.device("cpu"), KVCacheLayout.LBHNC)
        if worker is not None:
            worker.register_kv_caches(dict(caches))
        pages = {name: cache.view(torch.int8).numpy().view(np.uint64) for name, cache in dict(caches).items()}
        return worker, pages

    def _block_sizes(self, kv_cache_config: Any, config: Any) -> tuple[int, int]:
        """Tokens of what is scheduled at once, and of a block hash."""
        return TOKENS, TOKENS

    @property
    def connector(self) -> Any:
        """The scheduler's half of the connector."""
        return self.scheduler.connector

    @property
    def free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def add(
        self,
        name: str,
        tokens: Sequence[int],
        max_tokens: int = 8,
        kv_transfer_params: Any = None,
        **changes: Any,
    ) -> None:
        """`changes`: of what vLLM's Request is made of."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            extra_args={"kv_transfer_params": kv_transfer_params},
        )
        request = Request(name, list(tokens), sampling, None, block_hasher=self._hasher, **changes)
        self.scheduler.add_request(request)

    def abort(self, names: Iterable[str]) -> None:
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(list(names), RequestStatus.FINISHED_ABORTED)

    def step(self) -> None:
        """One step, in the order of vLLM's model runner."""
        requests = dict(self.scheduler.requests)
        output = self.scheduler.schedule()
        self.preemptions += len(output.preempted_req_ids or ())
        self.idle = not output.num_scheduled_tokens
        meta, worker = output.kv_connector_metadata, self.worker
        self._zero(output)
        self._prepare_blocks(meta)
        if worker is not None:
            worker.handle_preemptions(meta)
            worker.bind_connector_metadata(meta)
        sampled = self._forward(output, requests)
        connector_output = None
        if worker is not None:
            worker.start_load_kv(None)
            worker.wait_for_save()
            connector_output = self._connector_output(output)
            worker.clear_connector_metadata()
        self._unheard.append(lambda: self._finish_step(output, requests, sampled, connector_output))
        self._hear(self._ahead and not self.idle)

    def _hear(self, behind: bool) -> None:
        """The scheduler hears of all steps, or (`behind`) of all but the last."""
        while len(self._unheard) > behind:
            self._unheard.pop(0)()

    def run(self, steps_max: int = 20_000) -> None:
        """Until the scheduler holds nothing, blocks that are still stored included."""
        for _ in range(steps_max):
            if not self.scheduler.has_requests():
                self._hear(behind=False)
                return
            self.step()
            if self.idle:
                time.sleep(0.0005)  # as the engine's own loop does
        raise AssertionError(f"requests hang: {self.states()}")

    def states(self) -> dict[str, str]:
        return {name: request.status.name for name, request in self.scheduler.requests.items()}

    def forget(self) -> None:
        """Loses all KV."""
        self._hear(behind=False)
        assert self.scheduler.reset_prefix_cache()
        for pages in self.pages:
            pages[1:] = 0x3F3F3F3F3F3F3F3F

    def close(self) -> None:
        self.scheduler.shutdown()
        if self.worker is not None:
            self.worker.shutdown()

    def _zero(self, output: Any) -> None:
        """As vLLM's newer runner does, before the connector hears anything of the step."""
        for block in output.new_block_ids_to_zero or ():
            for pages in self.pages:
                pages[block] = 0

    def _prepare_blocks(self, meta: Any) -> None:
        """What a model runner does with blocks before the connector hears of the step."""

    def _connector_output(self, output: Any) -> Any:
        """What the scheduler is told of the step by the connector."""
        return self._told_by(self.worker, output)

    def _told_by(self, worker: Any, output: Any) -> Any:
        from vllm.v1.outputs import KVConnectorOutput

        results = worker.get_transfer_results(output.finished_req_ids)
        told = {
            "finished_sending": results.finished_sending,
            "finished_recving": results.finished_recving,
            "invalid_block_ids": worker.get_block_ids_with_load_errors(),
        }
        if "failed_recving" in {field.name for field in dataclasses.fields(KVConnectorOutput)}:
            told["failed_recving"] = results.failed_recving
        else:  # before 0.30 nobody asks
            assert not results.failed_recving
        told["kv_connector_worker_meta"] = worker.build_connector_worker_meta()
        return KVConnectorOutput(**told)

    def _forward(self, output: Any, requests: dict[str, Any]) -> dict[str, list[int]]:
        """Checks what the step relies on, writes what it computes, samples."""
        sampled: dict[str, list[int]] = {}
        for name, count in output.num_scheduled_tokens.items():
            request = requests[name]
            self.load_adapter(request.lora_request)
            start = request.num_computed_tokens - count  # vLLM has counted the step already
            [table] = self.scheduler.kv_cache_manager.get_block_ids(name)
            digests = _digests(self._tokens(request, start + count))
            self._check(name, table, digests[:start])
            self._write(table, digests[: start + count], start)
            self.cached.setdefault(name, start)
            done = start + count >= self._expected(request)
            sampled[name] = [_next(digests[: start + count])] if done else []
        return sampled

    def load_adapter(self, lora: Any, in_place: bool = False) -> None:
        """As vLLM's workers do before they compute with it, if they have none of that number."""
        if lora is not None and (in_place or lora.lora_int_id not in self.adapters):
            self.adapters[lora.lora_int_id] = lora.lora_path
            adapter_loads.tell(self.lora_config, (lora.lora_int_id, lora.lora_path), proof_of(lora.lora_path))

    def _tokens(self, request: Any, count: int) -> list[int]:
        """Those that the scheduler knows, and those that it has not heard of, up to `count`."""
        tokens = list(request.all_token_ids)
        while len(tokens) < count:
            tokens.append(_next(_digests(tokens)))
        return tokens

    def _expected(self, request: Any) -> int:
        """Tokens after which a step samples."""
        unheard: int = request.num_output_placeholders if self._ahead else 0
        return int(request.num_tokens) + max(0, unheard - 1)

    def _at(self, table: Sequence[int], first: int, end: int) -> tuple[Any, Any]:
        positions = np.arange(first, end)
        return np.array(table, np.int64)[positions // TOKENS], positions % TOKENS

    def _check(self, name: str, table: Sequence[int], digests: Digests) -> None:
        blocks, offsets = self._at(table, 0, len(digests))
        for layer, pages in enumerate(self.pages):
            good = pages[blocks, :, offsets, :] == (digests + np.uint64(layer))[:, None, None]
            if not good.all():
                position = int(np.flatnonzero(~good.all(axis=(1, 2)))[0])
                raise WrongKV(f"{name}: token {position} of {len(digests)} in block {blocks[position]}")

    def _write(self, table: Sequence[int], digests: Digests, first: int) -> None:
        blocks, offsets = self._at(table, first, len(digests))
        for layer, pages in enumerate(self.pages):
            pages[blocks, :, offsets, :] = (digests[first:] + np.uint64(layer))[:, None, None]

    def _finish_step(
        self, output: Any, requests: dict[str, Any], sampled: dict[str, list[int]], connector_output: Any
    ) -> None:
        from vllm.v1.outputs import ModelRunnerOutput

        names = list(output.num_scheduled_tokens)
        result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[sampled[name] for name in names],
            kv_connector_output=connector_output,
        )
        for outputs in self.scheduler.update_from_output(output, result).values():
            self.told |= {
                each.request_id: each.kv_transfer_params
                for each in outputs.outputs
                if each.kv_transfer_params is not None
            }
            if outputs.scheduler_stats is not None and outputs.scheduler_stats.kv_connector_stats:
                self.connector_stats.append(outputs.scheduler_stats.kv_connector_stats)
        for name, request in requests.items():
            if request.is_finished():
                self.finished[name] = list(request.output_token_ids)
