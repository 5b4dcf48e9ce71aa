"""Engines share blocks exactly if their configurations promise the same bytes: on vLLM's own classes."""

from __future__ import annotations

import copy
import json
import os
import platform
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kvtier import Namespace
from kvtier_engine import weights
from kvtier_vllm.model.namespace import UnsupportedConfiguration, derive, told

from tests.vllm.tiny_models import write_eagle_head
from tools import tiny_llama

pytestmark = pytest.mark.vllm

VERSION = "0.32.0"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.ensure(tmp_path_factory.mktemp("model") / "tiny", tiny_llama.PRESETS["tiny"])


@pytest.fixture(scope="module")
def plain(model: Path) -> Any:
    """A real VllmConfig; tests change copies of it."""
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(
        model=str(model), skip_tokenizer_init=True, enforce_eager=True, dtype="bfloat16", max_model_len=512
    )
    return arguments.create_engine_config()


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(weights, "SETTLED_S", 0.0)  # tests have just written what they look at
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)


def changed(config: Any, part: str, **fields: Any) -> Any:
    """A copy of the configuration with fields of one part set, without vLLM's checks running again."""
    result = copy.copy(config)
    section = copy.copy(getattr(config, part))
    for name, value in fields.items():
        object.__setattr__(section, name, value)
    object.__setattr__(result, part, section)
    return result


def test_a_plain_engine(plain: Any, model: Path) -> None:
    namespace = derive(plain, VERSION, tenant="team-a", salt="s")
    assert namespace.model == model.name
    assert namespace.weights_revision == weights.local_revision(model)
    [(name, value)] = namespace.identity
    assert name == "platform"
    assert value.split()[:2] == ["cpu", platform.machine()]
    assert (namespace.kv_dtype, namespace.kv_scales) == ("bfloat16/bfloat16", "")
    assert namespace.hash_bytes == 32
    assert (namespace.tenant, namespace.salt) == ("team-a", "s")
    assert namespace == derive(copy.copy(plain), VERSION, tenant="team-a", salt="s")


@pytest.mark.parametrize(
    ("part", "fields"),
    [
        ("model_config", {"dtype": "float16"}),
        ("model_config", {"quantization": "fp8"}),
        ("cache_config", {"cache_dtype": "fp8"}),
        ("cache_config", {"cache_dtype": "float16"}),
        ("cache_config", {"kv_cache_dtype_skip_layers": ["3"]}),
        ("model_config", {"disable_sliding_window": True}),
        ("model_config", {"hf_overrides": {"rms_norm_eps": 1e-6}}),
        ("model_config", {"hf_config_path": "another/model"}),
        ("attention_config", {"use_prefill_query_quantization": True}),
        ("kernel_config", {"linear_backend": "marlin"}),
        ("load_config", {"load_format": "sharded_state"}),
        ("load_config", {"model_loader_extra_config": {"tensorizer_uri": "s3://a"}}),
        ("cache_config", {"prefix_caching_hash_algo": "sha256_cbor"}),
        ("parallel_config", {"tensor_parallel_size": 2}),
        ("parallel_config", {"pipeline_parallel_size": 2}),
        ("parallel_config", {"decode_context_parallel_size": 2}),
        ("parallel_config", {"cp_kv_cache_interleave_size": 4}),
    ],
)
def test_whatever_changes_a_blocks_bytes_or_name_separates(
    plain: Any, part: str, fields: dict[str, Any]
) -> None:
    assert derive(changed(plain, part, **fields), VERSION) != derive(plain, VERSION)


@pytest.mark.parametrize(
    ("part", "fields"),
    [
        ("model_config", {"max_model_len": 256}),
        ("model_config", {"enforce_eager": False}),
        ("model_config", {"seed": 7}),
        ("model_config", {"tokenizer": "another"}),
        ("model_config", {"served_model_name": "another"}),
        ("model_config", {"generation_config": "vllm"}),
        ("cache_config", {"gpu_memory_utilization": 0.5}),
        ("cache_config", {"num_gpu_blocks": 1_000}),
        ("scheduler_config", {"max_num_seqs": 3}),
        ("scheduler_config", {"max_num_batched_tokens": 999}),
        ("parallel_config", {"data_parallel_rank": 1}),
        ("parallel_config", {"distributed_executor_backend": "mp"}),
        ("load_config", {"load_format": "safetensors"}),
        ("load_config", {"download_dir": "/elsewhere"}),
        ("attention_config", {"flash_attn_version": 2}),
        ("observability_config", {"cudagraph_metrics": True}),
    ],
)
def test_what_cannot_change_a_block_separates_nobody(plain: Any, part: str, fields: dict[str, Any]) -> None:
    assert derive(changed(plain, part, **fields), VERSION) == derive(plain, VERSION)


def test_what_a_models_class_writes_into_its_configuration_separates_nobody(plain: Any) -> None:
    """Workers' processes build the model, the scheduler's does not."""
    built = copy.deepcopy(plain.model_config.hf_config)
    built.rms_norm_eps = 1e-6
    built.num_kv_heads = 7
    assert derive(changed(plain, "model_config", hf_config=built), VERSION) == derive(plain, VERSION)


def test_variables_of_the_environment_separate(plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = derive(plain, VERSION)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert derive(plain, VERSION) == before
    assert ("environment.VLLM_BATCH_INVARIANT", "1") in told(plain)
    monkeypatch.setenv("VLLM_MARLIN_INPUT_DTYPE", "fp8")
    assert ("environment.VLLM_MARLIN_INPUT_DTYPE", "fp8") in derive(plain, VERSION).identity


def test_code_of_another_repository_needs_a_name(plain: Any, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / model.name
    shutil.copytree(model, folder)
    given = json.loads((folder / "config.json").read_text())
    for where, foreign in (("modeling.Model", False), ("org/other--modeling.Model", True)):
        (folder / "config.json").write_text(json.dumps(given | {"auto_map": {"AutoModel": where}}))
        config = changed(plain, "model_config", model=str(folder), trust_remote_code=True)
        assert derive(config, VERSION, revision="mine").weights_revision == "mine"
        if foreign:
            with pytest.raises(UnsupportedConfiguration, match=r"org/other.*weights_revision"):
                derive(config, VERSION)
        else:
            derive(config, VERSION)


def test_a_name_for_the_weights_is_none_for_their_configuration(
    plain: Any, model: Path, tmp_path: Path
) -> None:
    def named(**changes: Any) -> Namespace:
        folder = tmp_path / str(len(list(tmp_path.iterdir()))) / model.name
        shutil.copytree(model, folder)
        given = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(given | changes))
        return derive(changed(plain, "model_config", model=str(folder)), VERSION, revision="mine")

    assert named() == named(transformers_version="99")
    assert named() != named(rope_theta=12345.0)


@pytest.mark.parametrize("name", ["params.json", "hf_quant_config.json", "preprocessor_config.json"])
def test_nor_is_it_for_other_files_beside_them(plain: Any, model: Path, tmp_path: Path, name: str) -> None:
    folder, seen = copied(model, tmp_path), set()
    for content in ("{}", '{"a": 1}'):
        (folder / name).write_text(content)
        seen.add(derive(changed(plain, "model_config", model=str(folder)), VERSION, revision="mine").identity)
    assert len(seen) == 2


def test_what_may_hold_keys_is_not_shown(plain: Any) -> None:
    def told_of(key: str) -> tuple[tuple[str, str], ...]:
        extra = {"s3_secret_access_key": key}
        return derive(changed(plain, "load_config", model_loader_extra_config=extra), VERSION).identity

    assert told_of("hunter2") != told_of("hunter3")
    assert "hunter2" not in str(told_of("hunter2"))


def test_code_beside_the_weights_is_part_of_them(plain: Any, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / model.name
    shutil.copytree(model, folder)
    seen = {weights.local_revision(folder)}
    for name in ("modeling.py", "preprocessor_config.json", "params.json"):
        (folder / name).write_text("{}")
        seen.add(weights.local_revision(folder))
    (folder / "tokenizer.json").write_text("{}")
    seen.add(weights.local_revision(folder))
    assert len(seen) == 4


def test_overrides_by_a_function_need_a_name(plain: Any) -> None:
    config = changed(plain, "model_config", hf_overrides=lambda hf_config: hf_config)
    with pytest.raises(UnsupportedConfiguration, match=r"hf_overrides is .*weights_revision"):
        derive(config, VERSION)
    assert derive(config, VERSION, revision="mine").weights_revision == "mine"


def test_a_draft_model_separates_by_its_weights(plain: Any, model: Path, tmp_path: Path) -> None:
    from vllm.engine.arg_utils import EngineArgs

    def drafting(seed: int, method: str = "eagle") -> Any:
        head = write_eagle_head(tmp_path / f"head {seed}", model, seed)
        speculative = {"model": str(head), "method": "eagle", "num_speculative_tokens": 2}
        config = EngineArgs(
            model=str(model), skip_tokenizer_init=True, dtype="bfloat16", speculative_config=speculative
        ).create_engine_config()
        config.speculative_config.method = method
        return config

    one = derive(drafting(1), VERSION).identity
    assert one == derive(drafting(1), VERSION).identity
    assert len({one, derive(drafting(2), VERSION).identity, derive(plain, VERSION).identity}) == 3
    with pytest.raises(UnsupportedConfiguration, match="'medusa' keeps a draft's KV"):
        derive(drafting(1, "medusa"), VERSION)


def test_tenant_and_salt_separate(plain: Any) -> None:
    spaces = {derive(plain, VERSION, tenant=t, salt=s) for t in ("", "a") for s in ("", "a")}
    assert len(spaces) == 4


def test_vllm_releases_with_equal_hashing_share_and_unread_ones_do_not(plain: Any) -> None:
    def scheme(version: str) -> str:
        return derive(plain, version).hash_scheme

    assert scheme("0.31.0") == scheme("0.32.1") == scheme("0.33.0rc1")
    assert scheme("0.30.0") != scheme("0.31.0")
    assert len({scheme("0.33.0"), scheme("0.34.0"), scheme("0.35.0")}) == 3


def test_the_same_weights_under_another_path_are_the_same_model(
    plain: Any, model: Path, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere" / model.name
    shutil.copytree(model, elsewhere)
    assert derive(changed(plain, "model_config", model=str(elsewhere)), VERSION) == derive(plain, VERSION)


def test_other_weights_under_the_same_name_are_another_model(plain: Any, model: Path, tmp_path: Path) -> None:
    other = tiny_llama.ensure(tmp_path / "other" / model.name, tiny_llama.PRESETS["tiny"], seed=1)
    assert derive(changed(plain, "model_config", model=str(other)), VERSION) != derive(plain, VERSION)


def test_a_hub_model_is_its_commit(plain: Any) -> None:
    hub = copy.deepcopy(plain.model_config.hf_config)
    hub._commit_hash = "0123abcd"
    config = changed(plain, "model_config", model="org/model", hf_config=hub)
    assert derive(config, VERSION).weights_revision == "commit:0123abcd"
    hub._commit_hash = None
    with pytest.raises(UnsupportedConfiguration, match="weights_revision"):
        derive(config, VERSION)
    assert derive(config, VERSION, revision="mine-7").weights_revision == "mine-7"


def _without_prefix_caching(config: Any) -> Any:
    return changed(config, "cache_config", enable_prefix_caching=False)


def copied(model: Path, folder: Path, **changes: Any) -> Path:
    """The model, of the same name in another folder, with other values in its configuration."""
    shutil.copytree(model, folder / model.name)
    given = json.loads((model / "config.json").read_text())
    (folder / model.name / "config.json").write_text(json.dumps(given | changes))
    return folder / model.name


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors.index.json",
        "consolidated.safetensors.index.json",
        "quant_config.json",
        "quantization_config.json",
        "tekken.json",
        "adapters/retrieval/adapter_config.json",
        "whisper-large-v3/model.safetensors",
    ],
)
def test_a_file_that_decides_values_is_part_of_the_weights(model: Path, tmp_path: Path, name: str) -> None:
    folder, seen = copied(model, tmp_path), set()
    for content in (None, "{}", "[]"):
        if content is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(content)
            if name.startswith("adapters"):
                shutil.copy(folder / "model.safetensors", folder / "adapters/retrieval")
        seen.add(weights.local_revision(folder))
    assert len(seen) == 3


def test_every_file_that_a_quantisation_of_vllm_reads_is_part_of_the_weights() -> None:
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, get_quantization_config

    read = set()
    for method in QUANTIZATION_METHODS:
        try:
            read |= set(get_quantization_config(method).get_config_filenames())
        except Exception:  # not on this machine
            continue
    assert "quantize_config.json" in read
    assert read <= set(weights.CONFIG_NAMES)


def test_every_model_of_vllm_that_reads_other_weights_has_been_looked_at() -> None:
    """From other folders and repositories than the model's: `SUBFOLDERS`, and what is refused. RoBERTa and
    some others read heads for what is made of the last hidden states."""
    import vllm.model_executor.models as models

    known = {"roberta.py", "clef_omni.py", "ultravox.py", "kimi_audio.py", "jina.py"}
    known |= {
        "adapters.py",
        "clef_flash.py",
        "d3.py",
        "qwen3_dflash.py",
    }  # heads, and drafts that are refused
    found = {
        path.name
        for path in Path(models.__path__[0]).rglob("*.py")
        if re.search(r"DefaultModelLoader\.Source\(|get_hf_file_bytes\(", path.read_text())
    }
    assert "ultravox.py" in found
    assert found <= known


def test_weights_from_another_repository_need_a_name(plain: Any, model: Path, tmp_path: Path) -> None:
    folder = copied(model, tmp_path, model_type="ultravox", text_model_id="org/text", audio_model_id=None)
    config = changed(plain, "model_config", model=str(folder))
    with pytest.raises(UnsupportedConfiguration, match=r"org/text.*weights_revision"):
        derive(config, VERSION)
    assert derive(config, VERSION, revision="mine").weights_revision == "mine"


@pytest.mark.parametrize("load_format", ["pt", "npcache", "tensorizer", "ipc_cache", "somebodys"])
def test_weights_that_are_not_the_ones_that_are_digested_need_a_name(plain: Any, load_format: str) -> None:
    config = changed(plain, "load_config", load_format=load_format)
    with pytest.raises(UnsupportedConfiguration, match=rf"{load_format}.*weights_revision"):
        derive(config, VERSION)
    assert derive(config, VERSION, revision="mine").weights_revision == "mine"


def test_two_sets_of_weights_in_one_folder_are_told_apart(plain: Any, model: Path, tmp_path: Path) -> None:
    """`auto` reads Mistral's, if there are any; `safetensors` never does."""
    folder = copied(model, tmp_path)
    shutil.copy(folder / "model.safetensors", folder / "consolidated.safetensors")
    config = changed(plain, "model_config", model=str(folder))
    assert derive(config, VERSION) != derive(
        changed(config, "load_config", load_format="safetensors"), VERSION
    )


def test_the_commit_of_a_configuration_is_not_that_of_the_weights(plain: Any) -> None:
    hub = copy.deepcopy(plain.model_config.hf_config)
    hub._commit_hash = "0123abcd"
    config = changed(
        plain, "model_config", model="org/model", hf_config=hub, hf_config_path="org/configuration"
    )
    with pytest.raises(UnsupportedConfiguration, match=r"the commit of 'org/model' is unknown"):
        derive(config, VERSION)


def test_a_class_that_the_files_bring_along_is_told_from_vllms(
    plain: Any, model: Path, tmp_path: Path
) -> None:
    """Their code may read the same configuration otherwise."""
    folder = copied(model, tmp_path, auto_map={"AutoConfig": "configuration.Config"})
    config = changed(plain, "model_config", model=str(folder))
    trusting = changed(config, "model_config", trust_remote_code=True)
    assert derive(config, VERSION) != derive(trusting, VERSION)
    assert derive(plain, VERSION) == derive(
        changed(plain, "model_config", trust_remote_code=True), VERSION
    ), "where there is no such class, nothing is different"


def test_models_of_the_transformers_library_are_told_apart_by_its_version(
    plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.metadata

    config = changed(plain, "model_config", model_impl="transformers")
    one, own = derive(config, VERSION), derive(plain, VERSION)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "99")
    assert derive(config, VERSION) != one
    assert derive(plain, VERSION) == own


def test_a_length_that_is_fitted_to_the_memory_is_not_that_of_the_model(plain: Any) -> None:
    """It is built before, for longer prompts; Llama 4, for one, chooses values by that."""
    config = changed(plain, "model_config", model_impl="transformers", max_model_len=512)
    fitted = changed(config, "model_config", original_max_model_len=-1)
    assert derive(config, VERSION) != derive(fitted, VERSION)
    assert derive(fitted, VERSION) == derive(changed(fitted, "model_config", max_model_len=99), VERSION)


def test_a_file_that_a_setting_names_counts_by_its_content(plain: Any, tmp_path: Path) -> None:
    file = tmp_path / "quantization.json"
    seen = set()
    for content in ("{}", "[]"):
        file.write_text(content)
        overrides = {"quantization_config_file": str(file)}
        seen.add(derive(changed(plain, "model_config", hf_overrides=overrides), VERSION).identity)
        extra = changed(plain, "load_config", model_loader_extra_config={"a": str(file)})
        seen.add(derive(extra, VERSION).identity)
    assert len(seen) == 4


def test_attention_on_eight_bits_is_told_apart_by_its_kernels(plain: Any) -> None:
    """Some quantise the queries as well. With a wider cache they only add up in another order."""
    flash = changed(plain, "attention_config", backend="FLASHINFER")
    assert derive(plain, VERSION) == derive(flash, VERSION)
    plain8, flash8 = (changed(each, "cache_config", cache_dtype="fp8_e4m3") for each in (plain, flash))
    assert derive(plain8, VERSION) != derive(flash8, VERSION)


def test_processors_that_order_keys_otherwise_share_nothing(
    plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    here = torch.cpu._is_amx_tile_supported()
    before = derive(plain, VERSION)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: not here)
    assert derive(plain, VERSION) != before


def test_the_digest_of_files_that_have_just_changed_is_not_remembered(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may change again without another change time."""
    monkeypatch.setattr(weights, "SETTLED_S", 60.0)
    weights.local_revision(copied(model, tmp_path))
    assert not list((tmp_path / "cache").rglob("*.json"))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_without_prefix_caching, "prefix caching is off"),
        (lambda c: changed(c, "cache_config", prefix_caching_hash_algo="xxhash"), "PYTHONHASHSEED"),
        (lambda c: changed(c, "cache_config", prefix_caching_hash_algo="md5"), "'md5' is unknown"),
        (lambda c: changed(c, "cache_config", cache_dtype="fp8_per_token_head"), "fp8_per_token_head"),
        (lambda c: changed(c, "load_config", load_format="dummy"), "dummies"),
        (lambda c: changed(c, "parallel_config", prefill_context_parallel_size=2), "prefill_context"),
        (
            lambda c: changed(
                c, "parallel_config", decode_context_parallel_size=2, dcp_kv_cache_interleave_size=4
            ),
            "dcp_kv_cache_interleave_size=4: set cp_kv_cache",
        ),
        (lambda c: changed(c, "model_config", model="/nowhere/at-all"), "commit"),
    ],
)
def test_what_cannot_be_named_for_certain_is_refused(
    plain: Any, change: Callable[[Any], Any], reason: str
) -> None:
    with pytest.raises(UnsupportedConfiguration, match=reason):
        derive(change(plain), VERSION)


@pytest.mark.parametrize("version", ["0.28.1", "dev"])
def test_other_vllms_are_refused(plain: Any, version: str) -> None:
    with pytest.raises(UnsupportedConfiguration, match=r"0\.29"):
        derive(plain, version)


def test_a_shared_hash_seed_makes_xxhash_shareable(plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def space(algorithm: str, seed: str) -> Namespace:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        return derive(changed(plain, "cache_config", prefix_caching_hash_algo=algorithm), VERSION)

    assert space("xxhash_cbor", "7") == space("xxhash_cbor", "7")
    assert space("xxhash_cbor", "7") != space("xxhash_cbor", "8")
    assert space("xxhash_cbor", "7").hash_bytes == 16
    seeded = space("sha256", "7")
    monkeypatch.delenv("PYTHONHASHSEED")
    assert seeded != derive(plain, VERSION)


def test_vllm_hashes_as_the_scheme_says(plain: Any) -> None:
    """The seed and digest sizes named in the scheme are those of the installed vLLM."""
    import vllm
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils

    for algorithm in ("sha256", "sha256_cbor"):
        namespace = derive(
            changed(plain, "cache_config", prefix_caching_hash_algo=algorithm), vllm.__version__
        )
        assert len(get_hash_fn_by_name(algorithm)("x")) == namespace.hash_bytes
        assert kv_cache_utils.resolve_none_hash_seed(get_hash_fn_by_name(algorithm)) in namespace.hash_scheme


def test_a_remembered_digest_is_dropped_when_a_file_changes(model: Path, tmp_path: Path) -> None:
    copy_of_model = tmp_path / "copy"
    shutil.copytree(model, copy_of_model)
    first = weights.local_revision(copy_of_model)
    assert list((tmp_path / "cache").rglob("*.json"))
    file = copy_of_model / "model.safetensors"
    before = file.stat()
    with file.open("r+b") as stream:  # same size, same mtime: only content and change time differ
        stream.seek(-1, os.SEEK_END)
        last = stream.read(1)
        stream.seek(-1, os.SEEK_END)
        stream.write(bytes([last[0] ^ 1]))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert weights.local_revision(copy_of_model) != first


def test_a_remembered_digest_is_used(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = weights.local_revision(model)
    entry = next((tmp_path / "cache").rglob("*.json"))
    entry.write_text(entry.read_text().replace(first, "sha256:remembered"))
    assert weights.local_revision(model) == "sha256:remembered"
    # Others could have written it: not believed.
    entry.parent.chmod(0o777)
    assert weights.local_revision(model) == first


def test_damaged_or_missing_cache_only_costs_time(model: Path, tmp_path: Path) -> None:
    first = weights.local_revision(model)
    entry = next((tmp_path / "cache").rglob("*.json"))
    entry.write_text("{")
    assert weights.local_revision(model) == first
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").write_text("not a directory")
    assert weights.local_revision(model) == first


def test_weights_without_safetensors_need_a_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(weights.UnknownWeights, match="weights_revision"):
        weights.local_revision(tmp_path)
