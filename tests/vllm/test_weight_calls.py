"""Which calls of vLLM's are known to change weights, and whether a model is another one afterwards."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
from kvtier_vllm.model import weight_calls
from kvtier_vllm.model.weight_calls import CHANGING, digest_of_parameters

pytestmark = pytest.mark.vllm

WATCHED = {*CHANGING, "sleep", "discard", "apply_model"}
HARMLESS = {
    "compute_weight_checksums",
    "init_weight_transfer_engine",
    "shutdown_weight_transfer_engine",
    "supports_draft_weight_updates",
}


def test_every_call_of_a_worker_that_is_about_weights_has_been_looked_at() -> None:
    from vllm.v1.worker.gpu_worker import Worker

    about = {
        name
        for name, _ in inspect.getmembers(Worker, inspect.isfunction)
        if re.search("weight|load_model|sleep|discard|apply_model", name) and not name.startswith("_")
    }
    assert {"reload_weights", "update_weights", "sleep"} <= about
    assert about <= WATCHED | HARMLESS, "see kvtier_vllm/model/weight_calls.py"


def test_each_is_told_of_once_and_of_its_own_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker.worker_base import WorkerBase

    class Model:
        def load_weights(self, weights: Any) -> str:
            return f"loaded {weights}"

    class Runner:
        vllm_config = ""

        def reload_weights(self) -> None: ...

    class Worker(WorkerBase):
        def __init__(self, name: str) -> None:
            self.vllm_config, self.model, self.model_runner = name, Model(), Runner()
            self.model_runner.vllm_config = name

        def get_model(self) -> Any:
            return self.model

        def compile_or_warm_up_model(self) -> Any: ...

        def update_weights(self) -> None: ...

        def sleep(self, level: int = 1) -> str:
            return f"asleep {level}"

        def discard(self, tags: Any) -> None: ...

    told: list[Any] = []
    monkeypatch.setattr(weight_calls, "_classes", lambda base: [Worker])
    for _ in range(2):
        weight_calls.notice(told.append)
    one, other = Worker("one"), Worker("other")
    other.model.load_weights(0)  # an engine that starts
    assert told == []
    one.compile_or_warm_up_model()
    other.compile_or_warm_up_model()
    assert other.model.load_weights(1) == "loaded 1"
    one.update_weights()
    one.model_runner.reload_weights()
    assert one.sleep() == one.sleep(level=1) == "asleep 1"
    one.discard(("kv_cache",))
    assert told == ["other", "one", "one"]
    assert one.sleep(2) == "asleep 2"
    one.discard(("weights",))
    assert told == ["other", "one", "one", "one", "one"]


def test_a_model_is_another_one_when_anything_of_it_has_changed() -> None:
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4)).to(torch.bfloat16)
    seen = [digest_of_parameters(model)]
    assert digest_of_parameters(model) == seen[0]
    weight, (first, second) = model[0].weight.data, ([1, 0, 2, 3], [1, 0, 2, 3, 4, 5])
    for change in (
        lambda: weight[2, 3].add_(1),
        lambda: weight.copy_(weight[first]),
        lambda: weight.copy_(weight[:, second]),
        lambda: model[0].bias.data.zero_(),
        lambda: model[1].running_mean.add_(1),
    ):
        change()
        seen.append(digest_of_parameters(model))
    assert len(set(seen)) == 6


def test_a_model_that_cannot_be_read_is_another_one_each_time() -> None:
    assert digest_of_parameters(None) != digest_of_parameters(None)
