"""A real engine with LoRA adapters: what each of them left is restored to it, bit for bit."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.support.daemon import DaemonHost, until
from tests.vllm.engine import EngineOptions
from tests.vllm.rig import Rig, full_blocks, kv_transfer_config, prompt, same, start_rig

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

RANK = 8
LENGTH = 777
FILES_READ = "all(one.revision.done() for one in side._adapters._known.values())"
Adapter = tuple[str, int, str]


def write_adapter(folder: Path, model: Path, seed: int) -> None:
    """Random weights for the projections of queries, keys and values, far from doing nothing."""
    config = json.loads((model / "config.json").read_text())
    hidden = config["hidden_size"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    sizes = {
        "q_proj": config["num_attention_heads"] * head,
        "k_proj": config["num_key_value_heads"] * head,
        "v_proj": config["num_key_value_heads"] * head,
    }
    random = np.random.Generator(np.random.PCG64(seed))
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, size in sizes.items():
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for half, shape in (("lora_A", (RANK, hidden)), ("lora_B", (size, RANK))):
                values = random.standard_normal(shape, np.float32) * 0.1
                tensors[f"{at}.{half}.weight"] = values.astype(np.float16)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    described = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "target_modules": list(sizes),
        "bias": "none",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "",
    }
    (folder / "adapter_config.json").write_text(json.dumps(described))


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Adapter]:
    folder = tmp_path_factory.mktemp("adapters")
    for number in (1, 2):
        write_adapter(folder / str(number), model, number)
    return [(f"adapter {number}", number, str(folder / str(number))) for number in (1, 2)]


@pytest.fixture(scope="module")
def rig(model: Path, session_host: DaemonHost, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    options = EngineOptions(
        model,
        kv_transfer_config=kv_transfer_config(session_host.socket, adapters="files"),
        max_num_batched_tokens=256,
        num_blocks=512,
        extra={"enable_lora": True, "max_loras": 2, "max_lora_rank": RANK},
    )
    rig = start_rig(session_host, options, tmp_path_factory.mktemp("lora") / "log")
    with rig.engine:
        yield rig


def test_every_adapter_gets_its_own_back(rig: Rig, adapters: list[Adapter]) -> None:
    tokens = prompt(LENGTH, seed=1)
    hits = []
    for lora in (None, *adapters):
        rig.generate(prompt(40, seed=99), lora=lora)
        until(lambda: rig.look(FILES_READ), "its files are read")
        cold, hit = rig.generate(tokens, lora=lora), rig.generate(tokens, lora=lora)
        assert (cold.num_cached_tokens, hit.num_cached_tokens) == (0, full_blocks(LENGTH))
        hits.append(hit)
        rig.wait_stored()
    assert not any(same(one, other) for one, other in itertools.pairwise(hits)), "they do something"
    rig.forget()
    for lora, hit in zip((None, *adapters), hits, strict=True):
        restored = rig.generate(tokens, lora=lora)
        assert restored.num_cached_tokens == full_blocks(LENGTH)
        assert same(restored, hit)
