"""Every field of vLLM's configuration in its releases 0.29 to 0.33, by dataclass, and what it has to do with
a block's bytes. Names are separated by blanks."""

from kvtier_vllm.model.identity import reasons

CLASSES = {
    "AttentionConfig": {
        reasons.IDENTITY: (
            "disable_flashinfer_q_quantization hisparse_config indexer_kv_dtype indexer_sparse_logits "
            "use_fp4_indexer_cache use_non_causal use_prefill_query_quantization use_trtllm_attention"
        ),
        reasons.ROUNDING: (
            "backend backend_per_kind flash_attn_max_num_splits_for_cuda_graph flash_attn_version "
            "flex_attn_block_m flex_attn_block_n flex_attn_kv_block_size flex_attn_q_block_size "
            "indexer_tp_shard_min_rows minimax_m3_indexer_cp minimax_m3_msa_decode_backend "
            "mla_prefill_backend sparse_mla_force_mqa sparse_mla_prefill_workspace_factor "
            "tokenspeed_mla_min_split_kv tq_max_kv_splits_for_cuda_graph trtllm_ragged_backend"
        ),
    },
    "AudioDummyOptions": {
        reasons.PLACEMENT: "count length",
    },
    "AuxOutputConfig": {
        reasons.OUTPUT: "enable_return_routed_experts max_bytes",
    },
    "BaseDummyOptions": {
        reasons.PLACEMENT: "count",
    },
    "CacheConfig": {
        reasons.IDENTITY: (
            "enable_mamba_fine_grained_prefix_cache enable_mamba_shared_prefix_checkpoint "
            "kv_cache_dtype_skip_layers kv_sharing_fast_prefill replayssm_buffer_len "
            "swa_bounded_replay use_kda_recoverssm use_replayssm"
        ),
        reasons.ELSEWHERE: "cache_dtype enable_prefix_caching prefix_caching_hash_algo",
        reasons.DERIVED: "sliding_window",
        reasons.LAYOUT: (
            "_block_size_resolved block_size cache_hit_alignment_tokens "
            "effective_attention_block_size hash_block_size is_attention_free kv_cache_layout "
            "mamba_block_size mamba_cache_dtype mamba_cache_mode mamba_page_size_padded "
            "mamba_ssm_cache_dtype prefix_match_unit skip_page_size_padded user_specified_block_size "
            "user_specified_mamba_block_size"
        ),
        reasons.PLACEMENT: (
            "gpu_memory_utilization kv_cache_max_concurrency kv_cache_memory_bytes "
            "kv_cache_size_tokens kv_offloading_backend kv_offloading_size num_cpu_blocks "
            "num_gpu_blocks num_gpu_blocks_override prefix_cache_retention_interval "
            "simple_cpu_offload_num_blocks"
        ),
    },
    "CompilationConfig": {
        reasons.PART: "dynamic_shapes_config pass_config",
        reasons.ROUNDING: (
            "backend compile_mm_encoder compile_ranges_endpoints compile_sizes "
            "cudagraph_capture_sizes cudagraph_copy_inputs cudagraph_decoder_replay "
            "cudagraph_mm_encoder cudagraph_mode cudagraph_num_of_warmups cudagraph_specialize_lora "
            "custom_ops decoder_replay_cudagraph_capture_sizes decoder_replay_trim_threshold "
            "disabled_custom_ops enabled_custom_ops encoder_cudagraph_max_frames_per_batch "
            "encoder_cudagraph_max_vision_items_per_batch encoder_cudagraph_token_budgets "
            "fast_moe_cold_start inductor_compile_config ir_enable_torch_wrap "
            "max_cudagraph_capture_size mode splitting_ops static_all_moe_layers "
            "static_forward_context use_inductor_graph_partition"
        ),
        reasons.FILES: "cache_dir compile_cache_save_format debug_dump_path local_cache_dir",
        reasons.WATCHING: "compilation_time encoder_compilation_time traced_files",
        reasons.OWN_CODE: "inductor_passes",
    },
    "DeviceConfig": {
        reasons.PLACEMENT: "device device_type",
    },
    "DiffusionConfig": {
        reasons.IDENTITY: "canvas_length max_denoising_steps",
    },
    "DynamicShapesConfig": {
        reasons.ROUNDING: "assume_32_bit_indexing evaluate_guards type",
    },
    "ECTransferConfig": {
        reasons.PROCESSES: (
            "ec_buffer_device ec_buffer_size ec_connector ec_connector_extra_config "
            "ec_connector_module_path ec_ip ec_parallel_size ec_port ec_rank ec_role engine_id "
            "mm_encoder_output_widths"
        ),
    },
    "EPLBConfig": {
        reasons.ROUNDING: (
            "communicator enable_migration_batching log_balancedness log_balancedness_interval "
            "num_redundant_experts policy step_interval use_async window_size"
        ),
    },
    "EncoderCacheManagerConfig": {
        reasons.PLACEMENT: "encoder_cache_manager_cls manager_config",
    },
    "EngramConfig": {
        reasons.PLACEMENT: "cpu_offload dp_shared_memory embedding_across_dp use_thp",
    },
    "FaultToleranceConfig": {
        reasons.PROCESSES: "engine_recovery_timeout_sec",
    },
    "HiSparseConfig": {
        reasons.IDENTITY: "device_buffer_size eager_host_mirror",
    },
    "ImageDummyOptions": {
        reasons.PLACEMENT: "count height width",
    },
    "IrOpPriorityConfig": {
        reasons.ROUNDING: "fused_add_rms_norm gelu_and_mul_sparse rms_norm",
    },
    "KVEventsConfig": {
        reasons.WATCHING: (
            "buffer_steps enable_kv_cache_events endpoint hwm max_queue_size publisher replay_endpoint topic"
        ),
    },
    "KVTransferConfig": {
        reasons.PROCESSES: (
            "enable_permute_local_kv engine_id kv_buffer_device kv_buffer_size kv_connector "
            "kv_connector_extra_config kv_connector_module_path kv_ip kv_load_failure_policy "
            "kv_parallel_size kv_port kv_rank kv_role"
        ),
    },
    "KernelConfig": {
        reasons.IDENTITY: "linear_backend linear_backend_per_quant moe_backend",
        reasons.PART: "ir_op_priority",
        reasons.ROUNDING: (
            "enable_bf16x3_router_gemm enable_cutedsl_warmup enable_flashinfer_autotune "
            "enable_jit_warmup enable_rocm_segmented_attn_autotune monokernel "
            "sparse_indexer_topk_backend"
        ),
    },
    "LoRAConfig": {
        reasons.IDENTITY: "default_mm_loras enable_tower_connector_lora target_modules",
        reasons.ELSEWHERE: "lora_dtype",
        reasons.ROUNDING: (
            "enable_mixed_moe_lora_format enable_moe_shared_loras fully_sharded_loras specialize_active_lora"
        ),
        reasons.PLACEMENT: "max_cpu_loras max_lora_cls_labels max_lora_rank max_loras",
    },
    "LoadConfig": {
        reasons.IDENTITY: "ignore_patterns load_format model_loader_extra_config",
        reasons.FILES: (
            "device download_dir pt_load_map_location safetensors_load_strategy "
            "safetensors_prefetch_block_size safetensors_prefetch_num_threads use_tqdm_on_load"
        ),
    },
    "LoggingConfig": {
        reasons.WATCHING: "configure_logging formatter log_level pylogging_config_file",
    },
    "MambaConfig": {
        reasons.IDENTITY: "enable_stochastic_rounding stochastic_rounding_philox_rounds",
        reasons.ROUNDING: "backend ssu_algorithm",
    },
    "ModelArchitectureConfig": {
        reasons.DERIVED: (
            "architectures derived_max_model_len_and_key head_size hidden_size is_deepseek_mla "
            "is_mm_prefix_lm model_type num_experts num_experts_per_token per_layer_overrides "
            "quantization_config rswa_window text_model_type total_num_attention_heads "
            "total_num_hidden_layers total_num_kv_heads vocab_size"
        ),
    },
    "ModelConfig": {
        reasons.IDENTITY: (
            "code_revision config_format disable_sliding_window model_class_overrides model_impl "
            "quantization_config"
        ),
        reasons.PART: "multimodal_config",
        reasons.ELSEWHERE: (
            "dtype hf_config_path hf_overrides max_model_len model model_weights quantization revision"
        ),
        reasons.DERIVED: (
            "hf_config hf_text_config is_submodel_config spec_target_max_model_len "
            "word_embeddings_untied_by_checkpoint"
        ),
        reasons.ROUNDING: "disable_cascade_attn enforce_eager",
        reasons.PLACEMENT: (
            "enable_cumem_allocator enable_nccl_comm_suspend enable_sleep_mode sleep_mode_backend "
            "sleep_mode_offload_cudagraph sleep_preserve_parameter_names"
        ),
        reasons.FILES: "allow_deprecated_quantization hf_token trust_remote_code",
        reasons.FRONT_END: (
            "allowed_local_media_path allowed_media_domains enable_mm_embeds enable_prompt_embeds "
            "interleave_mm_strings io_processor_plugin language_model_only limit_mm_per_prompt "
            "media_io_kwargs mm_device_do_normalize mm_encoder_attn_backend mm_encoder_attn_dtype "
            "mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_margin "
            "mm_encoder_fp8_scale_save_path mm_encoder_only mm_encoder_tp_mode mm_hasher_algorithm "
            "mm_ipc_gpu_memory_gb mm_processor_cache_gb mm_processor_cache_type mm_processor_device "
            "mm_processor_kwargs mm_shm_cache_max_object_size_mb mm_tensor_ipc renderer_num_workers "
            "served_model_name skip_mm_profiling skip_tokenizer_init tokenizer tokenizer_mode "
            "tokenizer_revision video_pruning_method video_pruning_rate"
        ),
        reasons.OUTPUT: (
            "convert enable_return_routed_experts enable_trace_replay generation_config "
            "logits_processors logprobs_mode max_logprobs override_generation_config pooler_config "
            "return_sampling_mask runner seed use_fp64_gumbel"
        ),
    },
    "MultiModalConfig": {
        reasons.IDENTITY: (
            "allow_missing_mm_embeddings enable_mm_embeds language_model_only media_io_kwargs "
            "mm_device_do_normalize mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_only "
            "mm_processor_kwargs video_pruning_method video_pruning_rate"
        ),
        reasons.ROUNDING: "mm_encoder_attn_backend mm_encoder_tp_mode",
        reasons.FRONT_END: (
            "interleave_mm_strings limit_per_prompt mm_encoder_fp8_scale_save_margin "
            "mm_encoder_fp8_scale_save_path mm_hasher_algorithm mm_ipc_gpu_memory_gb "
            "mm_processor_cache_gb mm_processor_cache_type mm_shm_cache_max_object_size_mb "
            "mm_tensor_ipc skip_mm_profiling"
        ),
    },
    "ObservabilityConfig": {
        reasons.WATCHING: (
            "collect_detailed_traces cudagraph_metrics custom_histogram_buckets "
            "enable_layerwise_nvtx_tracing enable_logging_iteration_details enable_mfu_metrics "
            "enable_mm_processor_stats jit_monitor_mode jit_monitor_verbose kv_cache_metrics "
            "kv_cache_metrics_sample otlp_traces_endpoint per_request_spec_decode_metrics "
            "show_hidden_metrics_for_version"
        ),
    },
    "OffloadConfig": {
        reasons.PART: "prefetch uva",
        reasons.PLACEMENT: "offload_backend",
    },
    "ParallelConfig": {
        reasons.PART: "eplb_config fault_tolerance_config",
        reasons.ELSEWHERE: (
            "cp_kv_cache_interleave_size dcp_kv_cache_interleave_size decode_context_parallel_size "
            "pipeline_parallel_size prefill_context_parallel_size tensor_parallel_size"
        ),
        reasons.ROUNDING: (
            "all2all_backend dbo_decode_token_threshold dbo_prefill_token_threshold dcp_comm_backend "
            "dcp_q_replicate disable_custom_all_reduce enable_dbo enable_ep_weight_filter enable_eplb "
            "enable_expert_parallel enable_hc_sp enable_shm_tensor_arena expert_placement_strategy "
            "ubatch_size"
        ),
        reasons.PROCESSES: (
            "_allow_auto_resolve_cp_interleave_size _api_process_count _api_process_rank "
            "_coord_store_port _data_parallel_master_port_list assigned_physical_gpu_ids "
            "cpu_distributed_timeout_seconds data_parallel_backend data_parallel_external_lb "
            "data_parallel_hybrid_lb data_parallel_index data_parallel_master_ip "
            "data_parallel_master_port data_parallel_rank data_parallel_rank_local "
            "data_parallel_rpc_port data_parallel_size data_parallel_size_local "
            "disable_nccl_for_dp_synchronization distributed_executor_backend "
            "distributed_timeout_seconds dp_sync_interval elastic_ep_max_dp_size "
            "enable_batch_sharded_sampling enable_elastic_ep enable_fault_tolerance is_moe_model "
            "master_addr master_port max_parallel_loading_workers nnodes node_rank numa_bind "
            "numa_bind_cpus numa_bind_nodes placement_group rank ray_runtime_env "
            "ray_workers_use_nsight world_size"
        ),
        reasons.OWN_CODE: "sd_worker_cls worker_cls worker_extension_cls",
    },
    "PassConfig": {
        reasons.ROUNDING: (
            "eliminate_noops enable_qk_norm_rope_fusion enable_sp fi_allreduce_fusion_max_size_mb "
            "fuse_act_padding fuse_act_quant fuse_allreduce_rms fuse_attn_quant fuse_gemm_comms "
            "fuse_mla_dual_rms_norm fuse_norm_quant fuse_qk_norm_rope_kvcache fuse_rope_kvcache "
            "fuse_rope_kvcache_cat_mla rope_kvcache_fusion_max_token_num sp_min_token_num"
        ),
    },
    "PoolerConfig": {
        reasons.OUTPUT: (
            "dimensions enable_chunked_processing enable_flash_late_interaction logit_mean "
            "logit_sigma max_embed_len pooling_type returned_token_ids seq_pooling_type step_tag_id "
            "task tok_pooling_type use_activation"
        ),
    },
    "PrefetchOffloadConfig": {
        reasons.PLACEMENT: "offload_group_size offload_num_in_group offload_params offload_prefetch_step",
    },
    "ProfilerConfig": {
        reasons.WATCHING: (
            "active_iterations capture_torch_profiler delay_iterations detailed_trace_annotation "
            "ignore_frontend max_iterations profiler proton_backend proton_context proton_data "
            "proton_graph_attribution proton_hook proton_mode proton_output_format "
            "proton_profiler_dir torch_profiler_activities torch_profiler_dir "
            "torch_profiler_dump_cuda_time_total torch_profiler_record_shapes torch_profiler_use_gzip "
            "torch_profiler_with_flops torch_profiler_with_memory torch_profiler_with_stack "
            "wait_iterations warmup_iterations"
        ),
    },
    "QuantSpec": {
        reasons.PART: "activation weight",
    },
    "QuantizationConfigArgs": {
        reasons.PART: "ignore linear moe targets",
    },
    "Range": {
        reasons.ROUNDING: "end start",
    },
    "ReasoningConfig": {
        reasons.OUTPUT: (
            "_enabled _natural_reasoning_end_token_ids _reasoning_end_token_ids "
            "_reasoning_start_token_ids reasoning_end_str reasoning_parser reasoning_start_str"
        ),
    },
    "SchedulerConfig": {
        reasons.LAYOUT: "disable_hybrid_kv_cache_manager",
        reasons.PLACEMENT: (
            "async_scheduling disable_chunked_mm_input enable_chunked_prefill encoder_cache_size "
            "is_encoder_decoder is_multimodal_model long_prefill_token_threshold "
            "long_prefill_token_threshold_adaptive max_model_len max_num_active_seqs "
            "max_num_batched_tokens max_num_encoder_input_tokens max_num_queued_reqs "
            "max_num_queued_tokens max_num_scheduled_tokens max_num_seqs policy "
            "prefill_schedule_interval runner_type scheduler_reserve_full_isl stream_interval "
            "watermark"
        ),
        reasons.OWN_CODE: "scheduler_cls",
    },
    "SpeculativeConfig": {
        reasons.DRAFT: (
            "disable_eagle_block_drop disable_lookahead_block_hashes draft_lm_head_quantization "
            "index_share_for_mtp_iteration kv_cache_dtype max_model_len parallel_drafting "
            "quantization use_heterogeneous_vocab"
        ),
        reasons.ELSEWHERE: (
            "code_revision draft_model_config draft_parallel_config method model revision "
            "target_model_config target_parallel_config"
        ),
        reasons.ROUNDING: "attention_backend enforce_eager moe_backend",
        reasons.FILES: "draft_load_config",
        reasons.OUTPUT: (
            "disable_padded_drafter_batch draft_sample_method draft_tensor_parallel_size "
            "dspark_draft_topk enable_adaptive_verification fly_entropy_threshold fly_entropy_top_k "
            "fly_window_size num_speculative_tokens num_speculative_tokens_per_batch_size "
            "prompt_lookup_max prompt_lookup_min rejection_sample_method "
            "suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor "
            "suffix_decoding_max_tree_depth suffix_decoding_min_token_prob "
            "synthetic_acceptance_length synthetic_acceptance_rates tensor_parallel_size "
            "use_local_argmax_reduction xpress_topc"
        ),
    },
    "SpeechToTextConfig": {
        reasons.FRONT_END: "max_audio_clip_s min_energy_split_window_size overlap_chunk_second sample_rate",
    },
    "SpeechToTextParams": {
        reasons.FRONT_END: (
            "audio hotwords language model_config request_prompt stt_config task_type to_language"
        ),
    },
    "StructuredOutputsConfig": {
        reasons.OUTPUT: (
            "backend disable_additional_properties disable_any_whitespace enable_in_reasoning "
            "reasoning_parser reasoning_parser_plugin"
        ),
    },
    "UVAOffloadConfig": {
        reasons.PLACEMENT: "cpu_offload_gb cpu_offload_params",
    },
    "VideoDummyOptions": {
        reasons.PLACEMENT: "count height num_frames width",
    },
    "VllmConfig": {
        reasons.IDENTITY: "additional_config",
        reasons.PART: (
            "attention_config aux_output_config cache_config compilation_config device_config "
            "diffusion_config ec_manager_config ec_transfer_config engram_config kernel_config "
            "kv_events_config kv_transfer_config load_config logging_config lora_config mamba_config "
            "model_config observability_config offload_config parallel_config profiler_config "
            "reasoning_config scheduler_config speculative_config structured_outputs_config "
            "watchdog_config watermark_config weight_transfer_config"
        ),
        reasons.DERIVED: "quant_config",
        reasons.ROUNDING: "optimization_level performance_mode",
        reasons.PROCESSES: "instance_id shutdown_timeout",
    },
    "WatchdogConfig": {
        reasons.WATCHING: "check_interval dump_dir timeout",
    },
    "WatermarkConfig": {
        reasons.OUTPUT: (
            "algorithm allow_target_only_watermarking alpha context_width deduplicate_contexts "
            "deduplicate_contexts_max_history key prf"
        ),
    },
    "WeightTransferConfig": {
        reasons.ELSEWHERE: "backend",
    },
}
