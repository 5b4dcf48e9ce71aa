"""Real engines with LoRA adapters: what each of them left is restored to it, bit for bit, and nothing that
was computed with other weights than its name says ever is."""

from __future__ import annotations

import itertools
import json
import shutil
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


def engine_with_adapters(model: Path, host: DaemonHost, folder: Path, **extra: object) -> Rig:
    options = EngineOptions(
        model,
        kv_transfer_config=kv_transfer_config(host.socket, adapters="files"),
        max_num_batched_tokens=256,
        num_blocks=512,
        extra={"enable_lora": True, "max_loras": 2, "max_lora_rank": RANK, **extra},
    )
    return start_rig(host, options, folder / "log")


@pytest.fixture(scope="module")
def rig(model: Path, session_host: DaemonHost, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    rig = engine_with_adapters(model, session_host, tmp_path_factory.mktemp("lora"))
    with rig.engine:
        yield rig


@pytest.fixture(scope="module")
def other(model: Path, session_host: DaemonHost, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """A second engine, which shares with the first."""
    rig = engine_with_adapters(model, session_host, tmp_path_factory.mktemp("other"))
    with rig.engine:
        yield rig


@pytest.fixture
def folder(tmp_path: Path, model: Path) -> Path:
    """Of an adapter with weights of its own."""
    write_adapter(tmp_path / "adapter", model, 11)
    return tmp_path / "adapter"


def replace(folder: Path, model: Path, seed: int) -> None:
    """Other weights in the same folder."""
    shutil.rmtree(folder)
    write_adapter(folder, model, seed)


def load(rig: Rig, adapter: Adapter, in_place: bool = False) -> None:
    """Until nothing stands in the way of sharing what it computes, if that may be shared."""
    assert rig.engine.call("load_adapter", lora=adapter, in_place=in_place)["ok"]
    until(lambda: rig.look(FILES_READ), "its files are read")


def use(rig: Rig, adapter: Adapter) -> None:
    """The same without `load`'s help, with a prompt that is too short to be cached."""
    rig.generate(prompt(20, seed=99), lora=adapter)
    until(lambda: rig.look(FILES_READ), "its files are read")


def test_every_adapter_gets_its_own_back(rig: Rig, adapters: list[Adapter]) -> None:
    tokens = prompt(LENGTH, seed=1)
    hits = []
    for lora in (None, *adapters):
        if lora is not None:
            use(rig, lora)
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


def test_an_adapter_that_was_loaded_before_its_first_request_hits_at_once(
    rig: Rig, other: Rig, folder: Path
) -> None:
    """As after a restart of a server that is told its adapters when it starts."""
    adapter, tokens = ("early", 21, str(folder)), prompt(LENGTH, seed=21)
    for engine in (rig, other):
        load(engine, adapter)
    rig.generate(tokens, lora=adapter)
    rig.wait_stored()
    assert other.generate(tokens, lora=adapter).num_cached_tokens == full_blocks(LENGTH)


def test_files_replaced_before_the_first_request_are_not_what_was_loaded(
    rig: Rig, other: Rig, folder: Path, model: Path
) -> None:
    adapter, tokens = ("replaced", 22, str(folder)), prompt(LENGTH, seed=22)
    load(rig, adapter)
    replace(folder, model, 12)
    use(rig, adapter)
    rig.generate(tokens, lora=adapter)
    rig.wait_stored()
    load(other, adapter)
    use(other, adapter)
    fresh = other.generate(tokens, lora=adapter)
    assert fresh.num_cached_tokens == 0, "the first engine computes with the files of before"
    hit = other.generate(tokens, lora=adapter)
    other.wait_stored()
    other.forget()
    restored = other.generate(tokens, lora=adapter)
    assert restored.num_cached_tokens == full_blocks(LENGTH), "the second one shares what it computes"
    assert same(restored, hit)


@pytest.mark.parametrize("where", ["same folder", "other folder"])
def test_weights_that_are_replaced_under_a_running_request_are_not_stored_as_the_old_ones(
    rig: Rig, other: Rig, folder: Path, model: Path, where: str
) -> None:
    number = 23 if where == "same folder" else 24
    old, new = (f"swapped {number}", number, str(folder)), folder
    tokens, more = prompt(LENGTH, seed=number), 128
    load(rig, old)
    running = rig.engine.call("add", prompt=tokens, max_tokens=more, logprobs=1, lora=old)["request"]
    rig.engine.call("step", count=20)
    if where == "same folder":
        shutil.copytree(folder, kept := folder.parent / "kept")
        replace(folder, model, 13)
    else:
        kept = folder
        new = folder.parent / "new"
        write_adapter(new, model, 13)
    swapped = (old[0], number, str(new))
    load(rig, swapped, in_place=True)
    [finished] = rig.engine.call("finish", requests=[running], engine_timeout_s=60)["results"]
    rig.wait_stored()
    before = full_blocks(LENGTH + 20)
    if where == "same folder":  # the second engine finds the old files there
        shutil.rmtree(folder)
        shutil.copytree(kept, folder)
    load(other, old)
    use(other, old)
    whole = other.generate(tokens + finished["tokens"], lora=old)
    assert whole.num_cached_tokens <= before, "what was computed after the swap has not the old name"
    use(rig, swapped)
    later = prompt(LENGTH, seed=100 + number)
    rig.generate(later, lora=swapped)
    rig.wait_stored()
    rig.forget()
    found = rig.generate(later, lora=swapped).num_cached_tokens
    assert found == (0 if where == "same folder" else full_blocks(LENGTH))


@pytest.mark.long
def test_workers_in_processes_of_their_own_say_what_they_loaded(
    model: Path, session_host: DaemonHost, other: Rig, folder: Path, tmp_path: Path
) -> None:
    adapter, tokens = ("apart", 25, str(folder)), prompt(LENGTH, seed=25)
    extra = {"distributed_executor_backend": "mp"}
    rig = engine_with_adapters(model, session_host, tmp_path, **extra)
    with rig.engine:
        load(rig, adapter)
        use(rig, adapter)
        rig.generate(tokens, lora=adapter)
        rig.wait_stored()
        load(other, adapter)
        assert other.generate(tokens, lora=adapter).num_cached_tokens == full_blocks(LENGTH)
        replace(folder, model, 14)
        load(rig, adapter, in_place=True)
        rig.generate(prompt(LENGTH, seed=27), lora=adapter)
        rig.wait_stored()
        rig.forget()
        assert rig.generate(prompt(LENGTH, seed=27), lora=adapter).num_cached_tokens == 0
