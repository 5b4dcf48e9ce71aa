"""A mini engine of several ranks, each of which holds its own tokens of every block: decode context
parallelism, as vLLM's runners place tokens. Every step checks the bytes of every rank.
"""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.daemon import DaemonHost
from tests.support.leaks import SHM, SHM_PREFIX, SOCKET_PREFIX
from tests.vllm.conftest import QUICK
from tests.vllm.mini_engine import (
    TOKENS,
    Digests,
    MiniEngine,
    WrongKV,
    engine_config,
)
from tests.vllm.mini_rig import wait_stored


def context_config(
    model: Path, kv_transfer_config: dict[str, Any] | None, *, ranks: int, spread: int, **changes: Any
) -> Any:
    """A VllmConfig of so many ranks, over `spread` of which the tokens of a block are distributed. Its model
    has one KV head: vLLM wants all ranks of a context to hold the same one."""
    return engine_config(
        model,
        kv_transfer_config,
        tensor_parallel_size=ranks,
        decode_context_parallel_size=spread,
        hf_overrides={"num_key_value_heads": 1},
        **changes,
    )


def of_rank(config: Any, rank: int) -> Any:
    """A VllmConfig as that rank's process has it."""
    own = copy.copy(config)
    own.parallel_config = copy.copy(config.parallel_config)
    own.parallel_config.rank = rank
    return own


class _AllRanks:
    """What is called here is called for every rank, with arguments of its own, as in processes."""

    def __init__(self, workers: Sequence[Any]) -> None:
        self._workers = workers

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> None:
            for worker in self._workers:
                getattr(worker, name)(*copy.deepcopy(arguments))

        return call


class ContextEngine(MiniEngine):
    """See the module."""

    def __init__(self, config: Any, blocks: int = 64, kv_cache_config: Any = None) -> None:
        from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator

        parallel = config.parallel_config
        self.ranks: list[Any] = []
        """The connector's half of each."""
        self._world_size = parallel.world_size
        self._spread = parallel.decode_context_parallel_size
        self._interleave = parallel.cp_kv_cache_interleave_size
        self._aggregator = KVOutputAggregator(parallel.world_size)
        super().__init__(config, blocks, kv_cache_config)

    @property
    def block_tokens(self) -> int:
        """Of all ranks together."""
        return TOKENS * int(self._spread)

    def _start_worker(self, config: Any, kv_cache_config: Any) -> tuple[Any, dict[str, Any]]:
        self._of_rank: list[list[Any]] = []
        everything: dict[str, Any] = {}
        for rank in range(self._world_size):
            worker, layers = super()._start_worker(of_rank(config, rank), kv_cache_config)
            self.ranks.append(worker)
            self._of_rank.append(list(layers.values()))
            everything |= {f"rank {rank}, {name}": pages for name, pages in layers.items()}
        return _AllRanks(self.ranks), everything

    def _block_sizes(self, kv_cache_config: Any, config: Any) -> tuple[int, int]:
        from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

        scheduled, hashed = resolve_kv_cache_block_sizes(kv_cache_config, config)
        return scheduled, hashed

    def _connector_output(self, output: Any) -> Any:
        from vllm.v1.outputs import ModelRunnerOutput

        told = [
            ModelRunnerOutput([], {}, [], kv_connector_output=self._told_by(worker, output))
            for worker in self.ranks
        ]
        return self._aggregator.aggregate(told).kv_connector_output

    def _own(self, rank: int, first: int, end: int) -> Any:
        """The tokens of a request that a rank holds."""
        positions = np.arange(first, end)
        in_block = positions % self.block_tokens
        return positions[in_block // self._interleave % self._spread == rank % self._spread]

    def _places(self, table: Sequence[int], positions: Any) -> tuple[Any, Any]:
        """Blocks of a rank's tokens, and where in its page."""
        blocks, in_block = np.divmod(positions, self.block_tokens)
        rounds = in_block // (self._interleave * self._spread)
        return np.array(table, np.int64)[blocks], rounds * self._interleave + in_block % self._interleave

    def _check(self, name: str, table: Sequence[int], digests: Digests) -> None:
        for rank, layers in enumerate(self._of_rank):
            positions = self._own(rank, 0, len(digests))
            blocks, offsets = self._places(table, positions)
            for layer, pages in enumerate(layers):
                wanted = (digests[positions] + np.uint64(layer))[:, None, None]
                good = (pages[blocks, :, offsets, :] == wanted).all(axis=(1, 2))
                if not good.all():
                    wrong = int(np.flatnonzero(~good)[0])
                    raise WrongKV(f"{name}, rank {rank}: token {positions[wrong]} in block {blocks[wrong]}")

    def _write(self, table: Sequence[int], digests: Digests, first: int) -> None:
        for rank, layers in enumerate(self._of_rank):
            positions = self._own(rank, first, len(digests))
            blocks, offsets = self._places(table, positions)
            for layer, pages in enumerate(layers):
                pages[blocks, :, offsets, :] = (digests[positions] + np.uint64(layer))[:, None, None]


@pytest.fixture(scope="module")
def host() -> Iterator[DaemonHost]:
    """A daemon that does not look for what the negative control spoils."""
    run = Path(tempfile.mkdtemp(prefix=SOCKET_PREFIX, dir="/tmp"))
    pool = Path(tempfile.mkdtemp(prefix=SHM_PREFIX, dir=SHM))
    host = DaemonHost(run, pool / "pool", pool__size="32MiB", integrity__sample_bytes_per_s=0, **QUICK)
    host.start()
    yield host
    host.stop()
    shutil.rmtree(run)
    shutil.rmtree(pool)


def all_came_back(engine: ContextEngine) -> None:
    """No request is left, nor a block that anybody holds, on any rank."""
    engine.run()
    wait_stored(engine)
    engine.step()
    assert engine.free_blocks == engine.blocks - 1
    assert not engine.connector._scheduler._requests
    for rank in engine.ranks:
        worker = rank._worker
        assert [worker._loads, worker._stores, worker._held] == [[], [], {}]
