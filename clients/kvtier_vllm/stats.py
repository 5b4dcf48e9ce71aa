"""What vLLM shows of the connector: its log line and its Prometheus metrics. All of it comes from the
scheduler's side, as increments since the last step. A transfer counts once for all ranks.

This uses experimental interfaces of vLLM: KVConnectorStats, KVConnectorPromMetrics (0.29 to 0.33).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter, Metric
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

PREFIX = "vllm:kvtier_"

COUNTERS = {
    "lookups": "Lookups sent to kvtierd for waiting requests.",
    "lookups_hit": "Of them, those that found a block.",
    "lookups_unanswered": "Of them, those given up because kvtierd did not answer in time.",
    "requests_known_absent": "Requests for which kvtierd's index page had nothing, so that it was not asked.",
    "computed_instead": "Requests of which kvtierd held something that was sooner computed than loaded.",
    "waits": "Requests that waited for blocks on their way from a disk or another engine.",
    "waits_in_vain": "Of them, those that got less than they waited for.",
    "loads": "Loads of cached blocks that have ended.",
    "loads_failed": "Of them, those that failed: their tokens were computed.",
    "loaded_tokens": "Tokens of prompts that were loaded instead of computed.",
    "load_seconds": "From the submission of each load to its report, summed.",
    "stores": "Stores submitted.",
    "stores_refused": "Stores that were refused or failed, wholly or in part.",
    "stored_blocks": "Blocks that kvtierd holds because of this engine's stores, or held already.",
    "hints_accepted": "KV hints that requests came with and that are done as asked.",
    "hints_clipped": "KV hints of which less is done than asked.",
    "hints_refused": "KV hints of which nothing is done.",
    "audits": "Hits whose last block was computed as well, and compared.",
    "audit_mismatches": "Of them, those that found another block than this engine computes.",
}
"""The description of each counter, by its name, which is the metric's after `PREFIX`."""


@dataclass
class KvtierStats(KVConnectorStats):
    """Increments in `data`, by the names of `COUNTERS`. What is missing has not changed."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KvtierStats:
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def is_empty(self) -> bool:
        return not any(self.data.values())

    def reduce(self) -> dict[str, int | float]:
        """Returns what happened since the last log line, with the mean time of a load in milliseconds."""
        told: dict[str, int | float] = {
            name.replace("_", " "): value
            for name in COUNTERS
            if name != "load_seconds" and (value := self.data.get(name, 0))
        }
        if loads := self.data.get("loads"):
            told["mean load ms"] = round(self.data.get("load_seconds", 0.0) / loads * 1e3, 1)
        return told


class _PlainCounter(Counter):
    """A counter without the `_created` series, which nobody reads. The library can switch them off only for a
    whole process, which would include vLLM's own."""

    def collect(self) -> Iterable[Metric]:
        for metric in super().collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric


class KvtierPromMetrics(KVConnectorPromMetrics):
    """One counter for each of `COUNTERS`, with the engine's labels. It lives in the API server's process."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, dict(metric_types), labelnames, per_engine_labelvalues)
        make = metric_types[Counter]  # Ray has a class of its own
        if make is Counter:
            make = _PlainCounter
        self._counters = {
            name: make(name=f"{PREFIX}{name}", documentation=text, labelnames=labelnames)
            for name, text in COUNTERS.items()
        }
        self._of_engine = {
            engine: {name: counter.labels(*values) for name, counter in self._counters.items()}
            for engine, values in per_engine_labelvalues.items()
        }

    def observe(self, transfer_stats_data: Mapping[str, Any], engine_idx: int = 0) -> None:
        """Adds increments to the counters. Ignores names that only a newer connector has."""
        counters = self._of_engine[engine_idx]
        for name, value in transfer_stats_data.items():
            if name in counters and value > 0:
                counters[name].inc(value)


class Increments:
    """Remembers totals, and returns by how much they have grown."""

    def __init__(self) -> None:
        self._told: dict[str, float] = {}

    def of(self, totals: Mapping[str, float]) -> dict[str, float]:
        """Returns the growth since the last call, of what has changed."""
        if totals == self._told:  # the case after most steps
            return {}
        grown = {name: value - self._told.get(name, 0) for name, value in totals.items()}
        self._told = dict(totals)
        return {name: value for name, value in grown.items() if value}
