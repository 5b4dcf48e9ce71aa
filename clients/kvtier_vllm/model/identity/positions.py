"""Finds out whether the longest prompt that an engine takes (`max_model_len`) changes the values that it
computes.

For most models it does not, and engines that differ in it share. LongRoPE chooses its factors by it, and
Llama 4 its temperatures. What code that is not vLLM's own does with it cannot be known.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvtier_engine.rendering import digest_of
from kvtier_engine.weights import CONFIG_NAMES, INDEX_NAMES

COSMETIC_KEYS = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype"})
"""Keys of config.json that say nothing about values. The dtype that is used is in the namespace."""
OTHER_CONFIGS = tuple(name for name in CONFIG_NAMES if name not in ("config.json", *INDEX_NAMES))
"""Other files that are read beside the model's weights, if these have a folder of their own."""
ROPE_KEYS = ("rope_scaling", "rope_parameters", "rope_type")
INDEPENDENT_ROPES = frozenset(
    {
        "bailing_mrope",
        "deepseek_llama_scaling",
        "deepseek_yarn",
        "default",
        "dynamic",
        "linear",
        "llama3",
        "mllama4",
        "mrope",
        "ntk",
        "openpangu",
        "proportional",
        "yarn",
    }
)
"""The ropes of `get_rope` in vLLM 0.29 to 0.33 whose factors follow from the model's configuration alone."""

READERS = {
    "layers/attention/mla_attention.py": (),
    "layers/attention/sparse_mla_attention.py": (),
    "layers/attention/static_sink_attention.py": (),
    "layers/indexer_topk.py": (),
    "layers/quantization/modelopt_block_quant.py": (),
    "layers/rocm_paged_mxfp4_indexer.py": (),
    "layers/rotary_embedding/phi3_long_rope_scaled_rope.py": (),  # by its rope type
    "layers/sparse_attn_indexer.py": (),
    "layers/sparse_attn_indexer_kpool.py": (),
    "models/cohere_compass.py": ("CohereCompassForConditionalGeneration",),
    "models/colpali.py": (),
    "models/config.py": ("EmbeddingGemma2Model", "NomicBertModel"),
    "models/deepseek_ocr.py": (),
    "models/deepseek_v2.py": (),
    "models/deepseek_vl2.py": (),
    "models/diffusion_gemma.py": (),
    "models/embedding_gemma2.py": ("EmbeddingGemma2Model",),
    "models/ernie45_vl.py": (),
    "models/gemma3_mm.py": (),
    "models/gemma4_mm.py": (),
    "models/glm4_1v.py": (),
    "models/idefics3.py": (),
    "models/internvl.py": (),
    "models/kimi_k25.py": (),
    "models/kimi_vl.py": (),
    "models/lfm2_vl.py": (),
    "models/llama4.py": (
        "EagleLlama4ForCausalLM",
        "Llama4ForCausalLM",
        "Llama4ForConditionalGeneration",
    ),
    "models/minicpmv.py": (),
    "models/minimax_m2.py": ("MiniMaxM2ForCausalLM",),
    "models/mllama4.py": (),
    "models/nano_nemotron_vl.py": (),
    "models/parakeet.py": (),
    "models/plamo3.py": ("Plamo3ForCausalLM",),
    "models/qwen2_5_vl.py": (),
    "models/qwen2_vl.py": (),
    "models/qwen3_vl.py": (),
    "models/step3_vl.py": (),
    "models/transformers/utils.py": (),  # never vLLM's own, see below
    "models/voxtral.py": (),
    "models/voxtral_realtime.py": (),
}
"""Files below vllm/model_executor that read `max_model_len`, in 0.29 to 0.33, and the architectures whose
values depend on it. The other files only size buffers, budgets and dummy inputs by it."""
DEPENDENT = frozenset(name for names in READERS.values() for name in names)


def matters(model_config: Any) -> bool:
    """Returns whether engines of this model that differ in `max_model_len` may compute other values. It
    follows from the configuration as given, not from what a model's class has made of it."""
    given = _given(model_config)
    if not set(_rope_types(given)) <= INDEPENDENT_ROPES:
        return True
    return is_others_code(model_config) or bool(set(_architectures(given)) & DEPENDENT)


def is_others_code(model_config: Any) -> bool:
    """Returns whether code that is not vLLM's own computes this model, as far as its configuration tells:
    code of the Transformers library, of a plugin, or of the model's repository."""
    architectures = set(_architectures(_given(model_config)))
    if not architectures or str(getattr(model_config, "model_impl", "auto")) not in ("auto", "vllm"):
        return True
    return not all(map(_is_vllms_own, architectures))


def _given(model_config: Any) -> list[dict[str, Any]]:
    """Returns the files' configuration, and the overrides of parts of it."""
    overrides = getattr(model_config, "hf_overrides", None)
    return [given_config(model_config), *([dict(overrides)] if isinstance(overrides, Mapping) else [])]


def given_config(model_config: Any) -> dict[str, Any]:
    """Returns the model's configuration as in its files or, without files here, as in this process."""
    file = _given_file(model_config)
    if file is None:
        return dict(model_config.hf_config.to_dict())
    return _read(file)


def _read(file: Path) -> dict[str, Any]:
    found = json.loads(file.read_text())
    return found if isinstance(found, dict) else {}


def given_digest(model_config: Any) -> str:
    """Returns a digest of that file, without keys that say nothing about values, and of the other
    configurations in the model's folder. Empty if there is no such file on this machine."""
    if _given_file(model_config) is None:
        return ""
    folder = Path(model_config.model)
    files = {"config.json": given_config(model_config)}
    files |= {name: _read(folder / name) for name in OTHER_CONFIGS if (folder / name).is_file()}
    return digest_of(
        {
            name: {key: value for key, value in found.items() if key not in COSMETIC_KEYS}
            for name, found in files.items()
        }
    )


def folder_of(model_config: Any) -> Path | None:
    """Returns the model's folder on this machine, or None if that is not known."""
    if Path(model_config.model).is_dir():
        return Path(model_config.model)
    file = None if getattr(model_config, "hf_config_path", None) else _given_file(model_config)
    return None if file is None else file.parent


def _given_file(model_config: Any) -> Path | None:
    where = getattr(model_config, "hf_config_path", None) or model_config.model
    for name in ("config.json", "params.json"):
        if (path := Path(where) / name).is_file():
            return path
    try:
        from vllm.transformers_utils.repo_utils import try_get_local_file

        commit = getattr(model_config.hf_config, "_commit_hash", None)
        cached = try_get_local_file(str(where), "config.json", revision=commit)
    except Exception:  # such as from another hub, or another release
        return None
    return cached if isinstance(cached, Path) else None


def foreign_code(model_config: Any) -> str:
    """Returns the repository, other than the model's, whose code the configuration runs; else empty."""
    if not getattr(model_config, "trust_remote_code", False):
        return ""
    classes = given_config(model_config).get("auto_map")
    names = classes.values() if isinstance(classes, Mapping) else ()
    return next((str(name).split("--")[0] for name in names if "--" in str(name)), "")


def _rope_types(values: Iterable[Any]) -> Iterator[str]:
    for value in values:
        if isinstance(value, Mapping):
            for key, below in value.items():
                if key in ROPE_KEYS:
                    yield from _types_in(below)
                yield from _rope_types([below])
        elif isinstance(value, (list, tuple)):
            yield from _rope_types(value)


def _types_in(rope: Any) -> Iterator[str]:
    """Yields the types of one rope, or of several by the kind of layer."""
    if isinstance(rope, str):
        yield rope
    elif isinstance(rope, Mapping):
        for key, value in rope.items():
            if key in ("rope_type", "type") and isinstance(value, str):
                yield value
            elif isinstance(value, Mapping):
                yield from _types_in(value)


def _architectures(values: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    for value in values:
        names = value.get("architectures")
        if isinstance(names, (list, tuple)):
            yield from map(str, names)


def _is_vllms_own(architecture: str) -> bool:
    """Returns whether the model's code is vLLM's own, not the Transformers library's or anybody else's."""
    from vllm.model_executor.models import registry

    own = getattr(registry, "_VLLM_MODELS", {})
    if architecture not in own or architecture.startswith("Transformers"):
        return False
    used = getattr(registry.ModelRegistry, "models", {}).get(architecture)
    module = getattr(used, "module_name", None)
    # `READERS` knows of no code elsewhere.
    return module is None or str(module).startswith("vllm.model_executor.models.")
