"""Derives from SGLang's arguments the namespace that the engine's pages belong to.

SGLang's page hashes cover token ids, and the extra key and salt of a request, but nothing of the model. What
decides a page's bytes is named here. Every argument counts that is not known to change nothing: one that a
later release brings separates engines until somebody has looked, which costs misses and never wrong bytes.
"""

from __future__ import annotations

import hashlib
import platform
import re
from pathlib import Path
from typing import Any

import msgspec
from kvtier import Namespace
from kvtier_engine.rendering import Unnameable, text_of
from kvtier_engine.weights import UnknownWeights, local_revision
from sglang.srt.environ import envs

from kvtier_sglang.environment import variables_of

OLDEST_SGLANG = (0, 5, 23)
"""The first release with out-of-tree linkers whose contract this is."""
HASH_SCHEME = "sglang-sha256-v1"
_COMMIT = re.compile(r"[0-9a-f]{40}")

NAMESPACES_WITHOUT_EFFECT = {"device", "disagg", "memory", "observability", "schedule", "serving"}
"""Groups of arguments that say where, when and for whom is computed."""
_WITHOUT_EFFECT = """
    model_path trust_remote_code download_dir model_checksum revision
    startup_weight_load_mode weight_loader_disable_mmap weight_loader_prefetch_checkpoints
    weight_loader_prefetch_num_threads weight_loader_drop_cache_after_load delete_ckpt_after_loading
    engine_info_bootstrap_port weight_cache_mode weight_cache_socket weight_cache_timeout
    checkpoint_engine_wait_weights_before_ready kv_cache_dtype dtype nccl_port dist_timeout dist_init_addr
    gated_launch_port nnodes node_rank dp_size load_balance_method pp_max_micro_batch_size
    pp_async_batch_depth tp_size pp_size attn_cp_size attn_dp_size dcp_size enable_dp_lm_head
    enable_tp_lm_head_all_to_all enable_p2p_check enable_multimodal mm_processor_worker_num
    mm_io_worker_num allowed_media_domains media_url_max_file_size_mb mm_preprocess_cache_size_mb
    limit_mm_data_per_request mm_global_cache_backend enable_mm_global_cache enable_prefix_mm_cache
    enable_broadcast_mm_inputs_process mm_feature_transport enable_fp32_lm_head enable_memory_saver
    enable_weights_cpu_backup enable_draft_weights_cpu_backup enable_custom_logit_processor
    watermark_config watermark_key watermark_key_b watermark_context_window watermark_mixing_probability
    watermark_max_probability watermark_default_enabled watermark_enforce_all enable_watermark
    enable_return_hidden_states return_hidden_states_mode enable_return_aux_hidden_states
    aux_hidden_state_capture return_aux_hidden_state_layer_ids enable_return_routed_experts
    enable_return_indexer_topk sampling_mask_max_tokens disable_outlines_disk_cache sampling_backend
    grammar_backend disable_flashinfer_autotune flashinfer_autotune_skip_ops cuda_graph_config
    cuda_graph_backend_decode cuda_graph_backend_prefill cuda_graph_max_bs_decode
    cuda_graph_max_bs_prefill cuda_graph_max_seq_len_prefill cuda_graph_bs_decode cuda_graph_bs_prefill
    cuda_graph_prefill_max_context disable_prefill_cuda_graph disable_decode_cuda_graph disable_cuda_graph
    disable_cuda_graph_padding enable_profile_cuda_graph enable_cudagraph_gc debug_cuda_graph
    enable_torch_compile_debug_mode torch_compile_max_bs enable_layerwise_nvtx_marker pre_warm_nccl
    expert_distribution_recorder_mode expert_distribution_recorder_buffer_size
    expert_balancedness_report_mode cpu_offload_gb offload_group_size offload_num_in_group
    offload_prefetch_step offload_mode max_loaded_loras max_loras_per_batch
"""
WITHOUT_EFFECT = frozenset(_WITHOUT_EFFECT.split())
"""Arguments that change no byte of a page, or that are named in another way."""
_ROUNDING = """
    attention_backend decode_attention_backend prefill_attention_backend mm_attention_backend
    fp8_gemm_runner_backend fp4_gemm_runner_backend bf16_gemm_backend dsa_prefill_backend
    dsa_decode_backend dsv4_prefill_backend dsv4_attn_backend dsa_paged_mqa_logits_backend
    dsa_topk_backend triton_attention_reduce_in_fp32 triton_attention_num_kv_splits
    triton_attention_split_tile_size flashinfer_mla_disable_ragged enable_fused_qk_norm_rope mamba_backend
    linear_attn_backend linear_attn_decode_backend linear_attn_prefill_backend linear_attn_verify_backend
    enable_torch_compile enable_nccl_nvls enable_symm_mem disable_custom_all_reduce enable_mscclpp
    enable_torch_symm_mem enable_flashinfer_allreduce_fusion enforce_disable_flashinfer_allreduce_fusion
    flashinfer_allreduce_fusion_backend enable_aiter_allreduce_fusion moe_a2a_backend moe_runner_backend
    deepep_mode enable_two_batch_overlap enable_single_batch_overlap tbo_token_distribution_threshold
    enable_deterministic_inference enable_lean_attention
"""
ROUNDING = frozenset(_ROUNDING.split())
"""Arguments that only reorder sums, in which engines that share may differ."""


class UnsupportedArguments(Exception):
    """This engine's pages cannot be shared. The message says why, and what to change."""


def derive(
    server_args: Any,
    params: Any,
    *,
    kv_dtype: str,
    replicated: bool,
    tenant: str,
    salt: str,
    revision: str,
    generation: int = 0,
) -> Namespace:
    """Returns the namespace of one rank's pages. May read the model's weights, unless there is a `revision`.

    server_args, params: SGLang's ServerArgs and CacheInitParams.
    kv_dtype: the dtype of the cache.
    replicated: whether every rank of the tensor-parallel group has the same bytes.
    generation: a number that belongs to weights that were changed in place; 0 for those of the start.

    Raises UnsupportedArguments.
    """
    arguments = server_args.resolved_dict()
    _refuse(arguments)
    identity = _identity(server_args, arguments)
    if revision and (config := _config_of(arguments["model_path"], arguments.get("revision"))):
        identity["config.json"] = config  # a name for the weights says nothing of how they are used
    return Namespace(
        model=_model_name(arguments["model_path"]),
        weights_revision=revision or _revision(arguments),
        kv_dtype=f"{kv_dtype}/{arguments['dtype']}",
        parallelism=_parallelism(params, replicated=replicated),
        hash_scheme=f"{HASH_SCHEME}{':bigrams' if params.is_eagle else ''}",
        hash_bytes=32,
        tenant=tenant,
        salt=salt,
        generation=generation,
        identity=tuple(sorted(identity.items())),
    )


def check_version(version: str) -> None:
    """Raises UnsupportedArguments for a release that is too old."""
    numbers = tuple(int(each) for each in re.findall(r"\d+", version)[:3])
    if numbers < OLDEST_SGLANG:
        oldest = ".".join(map(str, OLDEST_SGLANG))
        raise UnsupportedArguments(f"SGLang {version} is too old: kvtier needs {oldest} or later")


def _refuse(arguments: dict[str, Any]) -> None:
    if arguments.get("enable_lora") or arguments.get("lora_paths"):
        raise UnsupportedArguments(
            "LoRA is on, and SGLang's page hashes carry an adapter's id, not its weights: not supported"
        )
    if str(arguments.get("load_format")) == "dummy":
        raise UnsupportedArguments("the weights are dummies (load_format dummy): they have no identity")
    if arguments.get("speculative_algorithm"):
        raise UnsupportedArguments(
            f"speculative decoding ({arguments['speculative_algorithm']}) is not supported yet"
        )
    for name, why in (
        ("pp_size", "stages of a pipeline do not agree about what can be loaded"),
        ("dcp_size", "the tokens of a page are spread over ranks"),
    ):
        if arguments.get(name) not in (None, 1):
            raise UnsupportedArguments(f"{name}={arguments[name]} is not supported: {why}")


def _model_name(path: str) -> str:
    # A path says where weights lie on one machine, not what they are.
    return Path(path).resolve().name if Path(path).is_dir() else path


def _revision(arguments: dict[str, Any]) -> str:
    path, revision = arguments["model_path"], arguments.get("revision")
    if Path(path).is_dir():
        try:
            return local_revision(Path(path))
        except UnknownWeights as error:
            raise UnsupportedArguments(str(error)) from error
    if revision and _COMMIT.fullmatch(revision):
        return str(revision)
    commit = _commit_of(path, revision)
    if commit is None:
        raise UnsupportedArguments(
            f"the commit of {path!r} is not known: give --revision with a commit, or set weights_revision in "
            "linker_extra_config"
        )
    return commit


def _commit_of(repository: str, revision: str | None) -> str | None:
    """Returns the commit of a model that was downloaded from the hub, from the cache's own layout."""
    found = _downloaded(repository, revision)
    return found.parent.name if found is not None and _COMMIT.fullmatch(found.parent.name) else None


def _config_of(path: str, revision: str | None) -> str | None:
    """Returns the digest of the model's configuration, if there is such a file."""
    file = Path(path, "config.json") if Path(path).is_dir() else _downloaded(path, revision)
    try:
        return None if file is None else f"sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}"
    except OSError:
        return None


def _downloaded(repository: str, revision: str | None) -> Path | None:
    """Returns where the hub's cache has a model's configuration."""
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(repository, "config.json", revision=revision)
    except Exception:
        return None
    return Path(found) if isinstance(found, str) else None


def _parallelism(params: Any, *, replicated: bool) -> str:
    """Returns which share of the model's cache this rank holds. Ranks that hold the same have the same."""
    import torch.distributed as dist

    parts = {}
    for name, group in (
        ("tp", params.attn_tp_cache_group or params.tp_cache_group),
        ("cp", params.attn_cp_cache_group),
    ):
        size = rank = 0
        if group is not None and dist.is_available() and dist.is_initialized():
            size, rank = dist.get_world_size(group=group), dist.get_rank(group=group)
        if size > 1:
            parts[name] = f"{size}" if replicated and name == "tp" else f"{rank}/{size}"
    return " ".join(f"{name}={value}" for name, value in parts.items())


def _identity(server_args: Any, arguments: dict[str, Any]) -> dict[str, str]:
    namespaces = type(server_args)._NS_BY_FIELD
    found = {}
    for field in msgspec.structs.fields(type(server_args)):
        name = field.name
        if name in WITHOUT_EFFECT | ROUNDING or _group_of(namespaces.get(name)) in NAMESPACES_WITHOUT_EFFECT:
            continue
        value = arguments[name]
        default = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
        if value == default or name.startswith(("tokenizer", "_")):
            continue
        try:
            found[name] = text_of(value)
        except Unnameable as error:
            raise UnsupportedArguments(
                f"{name} is {error}, which cannot be named: engines that differ in it cannot be told apart"
            ) from error
    try:
        found |= variables_of(envs)
    except Unnameable as error:
        raise UnsupportedArguments(f"{error}: engines that differ in it cannot be told apart") from error
    if str(arguments.get("device")) == "cpu" or arguments.get("quantization"):
        found["platform"] = f"{arguments.get('device')} {platform.machine()}"
    return found


def _group_of(namespace: Any) -> str:
    """Returns the first part of a namespace's path, as in "exec.moe"."""
    path = getattr(namespace, "_NS_PATH", namespace)
    return str(path or "").split(".")[0]
