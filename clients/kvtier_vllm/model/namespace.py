"""Derives from a vLLM configuration the namespace that the engine's blocks belong to.

vLLM's block hash covers tokens, LoRA name (see `adapters`), multi-modal content and cache salt, but nothing
of the model. Everything else that decides a block's bytes is named here. It is taken from what was given to
the engine (files and settings, see `identity`) and not from what its processes have made of it. What cannot
be named for certain is refused: too narrow a namespace costs a miss, too wide a one serves wrong bytes.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import re
import sys
from pathlib import Path
from typing import Any

from kvtier import Namespace
from kvtier_engine.rendering import Unnameable, text_of
from kvtier_engine.weights import UnknownWeights, local_revision

from kvtier_vllm.model.identity import positions
from kvtier_vllm.model.identity.settings import UnnameableSetting, configuration_of, identity_of

# The first release whose NONE_HASH is the same in every process for the sha256 family, and whose KV caches
# are views of one allocation.
OLDEST_VLLM = (0, 29)
# The last release whose block hashing was read; a later one gets a scheme of its own until somebody has
# looked.
NEWEST_READ_VLLM = (0, 33)
# The first release that tags the extra keys of a block hash with their kind.
TAGGED_EXTRA_KEYS_VLLM = (0, 31)

_NONE_HASH_SEED = "vllm-none-hash"
_HASH_BYTES = {"sha256": 32, "sha256_cbor": 32, "xxhash": 16, "xxhash_cbor": 16}
_PLAIN_KV_DTYPES = {"auto", "float16", "bfloat16"}
# Scales per tensor, read from the checkpoint (or 1), which are part of the weights' identity.
_STATIC_SCALE_KV_DTYPES = {"fp8", "fp8_e4m3", "fp8_e5m2"}
# Speculative methods that keep no KV of their own in the cache.
_DRAFTLESS_METHODS = {"ngram", "ngram_gpu", "suffix"}
# Methods whose draft's KV lies beside the model's, and follows from a block's tokens and the one behind it.
_DRAFTING_METHODS = {"eagle", "eagle3", "mtp"}
# These read weights from the safetensors files in the model's folder, which are the files that are digested.
_SAFETENSORS_FORMATS = {
    "auto",
    "bitsandbytes",
    "fastsafetensors",
    "hf",
    "instanttensor",
    "mistral",
    "runai_streamer",
    "runai_streamer_sharded",
    "safetensors",
    "sharded_state",
}
# These read from the files of a repository, whose commit is known.
_REPOSITORY_FORMATS = _SAFETENSORS_FORMATS | {"gguf", "npcache", "pt"}
# Models of these kinds read from other repositories, which their configuration names under these keys.
_OTHER_REPOSITORIES = {"ultravox": ("audio_model_id", "text_model_id")}
# With this value vLLM finds out by itself how long prompts may be.
_FITTED = -1
# The most settings, and bytes, that a client may tell about an engine.
_CONFIGURATION_MAX, _CONFIGURATION_BYTES_MAX = 256, 32 << 10


class UnsupportedConfiguration(Exception):
    """This engine's blocks cannot be shared. The message says why, and what to change."""


def derive(
    vllm_config: Any,
    vllm_version: str,
    tenant: str = "",
    salt: str = "",
    revision: str = "",
    *,
    adapters_by_files: bool = False,
) -> Namespace:
    """Returns the namespace of the engine that `vllm_config` (a VllmConfig) describes.

    Every process of an engine derives the same one. It may read the model's weights (see `weights`), unless
    the user has set a `revision`. With `adapters_by_files`, blocks of LoRA adapters are named by `adapters`;
    without, engines with LoRA are refused. Raises UnsupportedConfiguration.
    """
    version = version_of(vllm_version)
    _refuse_what_the_hash_omits(vllm_config, adapters_by_files)
    try:
        identity = _identity(vllm_config, revision)
    except UnnameableSetting as error:
        raise UnsupportedConfiguration(
            f"{error}: it may change what is computed, and engines with such a setting cannot be told apart"
        ) from error
    scheme, hash_bytes = _hash_scheme(vllm_config.cache_config.prefix_caching_hash_algo, version)
    kv_dtype, kv_scales = _kv_dtype(vllm_config)
    return Namespace(
        model=_model_name(vllm_config.model_config),
        weights_revision=revision or _found_revision(vllm_config.model_config, _load_format(vllm_config)),
        kv_dtype=kv_dtype,
        kv_scales=kv_scales,
        parallelism=_parallelism(vllm_config.parallel_config),
        hash_scheme=scheme,
        hash_bytes=hash_bytes,
        tenant=tenant,
        salt=salt,
        adapter=_adapters(vllm_config),
        identity=identity,
    )


def told(vllm_config: Any, on_reset: str = "leave") -> tuple[tuple[str, str], ...]:
    """Returns settings of this engine in which others that share with it may differ, for people, and what a
    reset of its cache does, for `kvtierctl check-engine`."""
    found = configuration_of(vllm_config) | {"kvtier.on_reset": on_reset}
    found.setdefault("model_config.max_model_len", str(vllm_config.model_config.max_model_len))
    kept, size = [], 0
    for name, value in sorted(found.items())[:_CONFIGURATION_MAX]:
        size += len(name.encode()) + len(value.encode())
        if size <= _CONFIGURATION_BYTES_MAX:
            kept.append((name, value))
    return tuple(kept)


def version_of(text: str) -> tuple[int, int]:
    """Returns the major and minor number of a vLLM release. Raises UnsupportedConfiguration if this is no
    release, or one that is too old."""
    match = re.match(r"(\d+)\.(\d+)", text)
    if match is None:
        raise UnsupportedConfiguration(
            f"vLLM's version {text!r} is not a release; kvtier needs 0.29 or later"
        )
    version = int(match[1]), int(match[2])
    if version < OLDEST_VLLM:
        raise UnsupportedConfiguration(f"vLLM {text} is too old: kvtier needs 0.29 or later")
    return version


def _adapters(vllm_config: Any) -> str:
    """Returns what all adapters have in common; their weights are in their blocks' keys."""
    lora = getattr(vllm_config, "lora_config", None)
    return "" if lora is None else f"LoRA {lora.lora_dtype}"


def _refuse_what_the_hash_omits(vllm_config: Any, adapters_by_files: bool) -> None:
    if not vllm_config.cache_config.enable_prefix_caching:
        raise UnsupportedConfiguration("prefix caching is off; enable it (--enable-prefix-caching)")
    if getattr(vllm_config, "lora_config", None) is not None and not adapters_by_files:
        raise UnsupportedConfiguration(
            "LoRA is on, and vLLM's block hashes carry an adapter's name, not its weights: if the files of "
            'an adapter never change while an engine lives, set adapters to "files"'
        )
    speculative = getattr(vllm_config, "speculative_config", None)
    if speculative is not None and speculative.method not in _DRAFTLESS_METHODS | _DRAFTING_METHODS:
        raise UnsupportedConfiguration(
            f"speculative decoding by {speculative.method!r} keeps a draft's KV in the cache: not supported; "
            f"use one of {', '.join(sorted(_DRAFTLESS_METHODS | _DRAFTING_METHODS))}"
        )
    _refuse_unsettled_contexts(vllm_config.parallel_config)
    if _load_format(vllm_config) == "dummy":
        raise UnsupportedConfiguration("the weights are dummies (--load-format dummy): they have no identity")


def _load_format(vllm_config: Any) -> str:
    return _load_format_of(vllm_config.load_config)


def _load_format_of(load_config: Any) -> str:
    return str(getattr(load_config, "load_format", "auto")).rsplit(".", 1)[-1].lower()


def _refuse_unsettled_contexts(parallel: Any) -> None:
    """Refuses context parallelism if this process cannot say which rank holds which tokens. Which KV caches
    decode context parallelism may spread is up to `groups`."""
    prefill = getattr(parallel, "prefill_context_parallel_size", 1)
    if prefill != 1:
        raise UnsupportedConfiguration(
            f"prefill_context_parallel_size={prefill}: not supported by this version"
        )
    old = getattr(parallel, "dcp_kv_cache_interleave_size", 1)
    if getattr(parallel, "decode_context_parallel_size", 1) > 1 and old not in (1, _interleave(parallel)):
        # Workers put it into cp_kv_cache_interleave_size when they start; the scheduler's process does not.
        raise UnsupportedConfiguration(
            f"dcp_kv_cache_interleave_size={old}: set cp_kv_cache_interleave_size to it instead"
        )


def _interleave(parallel: Any) -> Any:
    return getattr(parallel, "cp_kv_cache_interleave_size", 1)


def _hash_scheme(algorithm: str, version: tuple[int, int]) -> tuple[str, int]:
    if algorithm not in _HASH_BYTES:
        known = ", ".join(sorted(_HASH_BYTES))
        raise UnsupportedConfiguration(
            f"prefix_caching_hash_algo={algorithm!r} is unknown; use one of {known}"
        )
    seed = os.environ.get("PYTHONHASHSEED")
    if seed is None and not algorithm.startswith("sha256"):
        raise UnsupportedConfiguration(
            f"block hashes by {algorithm} start from a random seed in every process; set PYTHONHASHSEED to "
            "one value everywhere, or use --prefix-caching-hash-algo sha256_cbor"
        )
    none_hash = _NONE_HASH_SEED if seed is None else f"seed-{hashlib.sha256(seed.encode()).hexdigest()[:16]}"
    parts = ["vllm", algorithm, none_hash]
    # Pickle's bytes may change with Python; CBOR's do not.
    if not algorithm.endswith("_cbor"):
        parts.append(f"py{sys.version_info[0]}.{sys.version_info[1]}")
    parts.append("tagged-keys" if version >= TAGGED_EXTRA_KEYS_VLLM else "plain-keys")
    if version > NEWEST_READ_VLLM:
        parts.append(f"v{version[0]}.{version[1]}")
    return ":".join(parts), _HASH_BYTES[algorithm]


def _kv_dtype(vllm_config: Any) -> tuple[str, str]:
    cache = vllm_config.cache_config
    kv = str(cache.cache_dtype)
    model_dtype = str(vllm_config.model_config.dtype).removeprefix("torch.")
    # The model's own dtype decides the values even where the cache is wider or narrower.
    if kv in _PLAIN_KV_DTYPES:
        return f"{model_dtype if kv == 'auto' else kv}/{model_dtype}", ""
    if kv in _STATIC_SCALE_KV_DTYPES:
        return f"{kv}/{model_dtype}", "checkpoint"
    raise UnsupportedConfiguration(
        f"kv_cache_dtype={kv!r} keeps dynamic scales or packed values that this version cannot share; use "
        f"one of {', '.join(sorted(_PLAIN_KV_DTYPES | _STATIC_SCALE_KV_DTYPES))}"
    )


def _parallelism(parallel: Any) -> str:
    fields = {
        "tp": parallel.tensor_parallel_size,
        "pp": parallel.pipeline_parallel_size,
        "pcp": getattr(parallel, "prefill_context_parallel_size", 1),
        "dcp": getattr(parallel, "decode_context_parallel_size", 1),
        "interleave": _interleave(parallel),
    }
    return " ".join(f"{name}={value}" for name, value in fields.items())


def _model_name(model: Any) -> str:
    path = Path(model.model)
    # A path says where weights lie on one machine, not what they are.
    return path.resolve().name if path.is_dir() else str(model.model)


def _identity(vllm_config: Any, revision: str) -> tuple[tuple[str, str], ...]:
    """Returns the settings that are in the identity. Raises UnnameableSetting
    and UnsupportedConfiguration."""
    model = vllm_config.model_config
    drafts = _drafts(vllm_config)
    found = identity_of(vllm_config, drafts=drafts)
    if model.quantization is not None:
        found["model_config.quantization"] = text_of(model.quantization)
        found["platform"] = _platform()
    if packing := _packing():
        found["platform"] = packing
    if str(vllm_config.cache_config.cache_dtype) in _STATIC_SCALE_KV_DTYPES:
        # Some attention kernels compute with such a cache in eight bits, and others widen it first.
        found["platform"] = _packing() or _platform()
        backend = getattr(getattr(vllm_config, "attention_config", None), "backend", None)
        found["attention_config.backend"] = text_of(backend)
    if _has_two_sets_of_weights(model):
        found["load_config.load_format"] = _load_format(vllm_config)
    if positions.is_others_code(model):
        found["transformers"] = importlib.metadata.version("transformers")
    found |= _overrides(model, revision)
    # else it is part of what was found out about the weights
    if revision and (given := positions.given_digest(model)):
        found["model_config.hf_config"] = given
    if positions.matters(model):
        # A length that is fitted to the memory is known only when the model has been built.
        fitted = getattr(model, "original_max_model_len", None) == _FITTED
        found["model_config.max_model_len"] = "auto" if fitted else str(model.max_model_len)
    if drafts:
        speculative = vllm_config.speculative_config
        draft = speculative.draft_model_config
        found["speculative_config.method"] = str(speculative.method)
        found["speculative_config.weights"] = _found_revision(
            draft, _load_format_of(getattr(speculative, "draft_load_config", None) or vllm_config.load_config)
        )
        if positions.matters(draft):
            found["speculative_config.positions"] = str(draft.max_model_len)
    return tuple(sorted(found.items()))


def _has_two_sets_of_weights(model: Any) -> bool:
    """Returns whether the folder has weights in Mistral's format and in another one. Which are read then
    depends on how the engine was started."""
    folder = positions.folder_of(model)
    return folder is not None and any(folder.glob("consolidated*.safetensors"))


def _drafts(vllm_config: Any) -> bool:
    speculative = getattr(vllm_config, "speculative_config", None)
    return speculative is not None and speculative.method in _DRAFTING_METHODS


def _platform() -> str:
    """Returns the kind of processor. Kernels for quantised weights differ in what they compute with: a GPU
    without FP4 or FP8 units multiplies in a wider type."""
    from vllm.platforms import current_platform

    capability = current_platform.get_device_capability()
    return str(current_platform.device_name) + (f" {capability.as_version_str()}" if capability else "")


def _packing() -> str:
    """Returns the instructions of a CPU, by which vLLM's kernels order the keys within a block, or an empty
    text on a GPU. A pool on a disk may outlive the machine."""
    import torch
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return ""
    asked = {"AMX": "_is_amx_tile_supported", "AVX-512": "_is_avx512_supported", "AVX2": "_is_avx2_supported"}
    known = (name for name, ask in asked.items() if getattr(torch.cpu, ask, bool)())
    return " ".join(("cpu", platform.machine(), *known))


def _overrides(model: Any, revision: str) -> dict[str, str]:
    """Returns the parts of the model's configuration that do not come from beside its weights."""
    found = {}
    if overrides := getattr(model, "hf_overrides", None):
        try:
            found["model_config.hf_overrides"] = text_of(overrides)
        except Unnameable as error:
            if not revision:
                raise UnsupportedConfiguration(
                    f"hf_overrides is {error}, of which nobody can say what it does: write a dictionary, or "
                    "set weights_revision in kv_connector_extra_config to a name for the model with it"
                ) from error
    if (code := positions.foreign_code(model)) and not revision:
        raise UnsupportedConfiguration(
            f"the model runs code of another repository ({code}), which may change: set weights_revision in "
            "kv_connector_extra_config to a name for the model with this code"
        )
    given = positions.given_config(model)
    if getattr(model, "trust_remote_code", False) and given.get("auto_map"):
        found["model_config.trust_remote_code"] = text_of(True)  # without it, another class reads the files
    for key in _OTHER_REPOSITORIES.get(str(given.get("model_type")), ()):
        if (other := given.get(key)) and not revision:
            raise UnsupportedConfiguration(
                f"the model takes weights from {other!r} ({key}), which may change: set weights_revision in "
                "kv_connector_extra_config to a name for all of its weights"
            )
    if elsewhere := getattr(model, "hf_config_path", None):
        file = Path(elsewhere) / "config.json"
        if file.is_file():
            found["model_config.hf_config_path"] = f"sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}"
        else:
            found["model_config.hf_config_path"] = str(elsewhere)
    return found


def _found_revision(model: Any, load_format: str = "auto") -> str:
    path = Path(getattr(model, "model_weights", "") or model.model)
    if load_format not in (_SAFETENSORS_FORMATS if path.is_dir() else _REPOSITORY_FORMATS):
        raise UnsupportedConfiguration(
            f"nobody can say which weights --load-format {load_format} reads: set weights_revision in "
            "kv_connector_extra_config to a name that changes whenever they do"
        )
    if path.is_dir():
        try:
            return local_revision(path)
        except UnknownWeights as error:
            raise UnsupportedConfiguration(str(error)) from error
    commit = getattr(model.hf_config, "_commit_hash", None)
    if (getattr(model, "hf_config_path", None) or model.model) != str(path):
        commit = None  # it is the commit of another repository, which has no weights
    if not commit:
        raise UnsupportedConfiguration(
            f"the commit of {model.model!r} is unknown; set weights_revision in kv_connector_extra_config"
        )
    return f"commit:{commit}"
