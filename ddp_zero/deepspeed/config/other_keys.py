"""The rows of what DeepSpeed has beyond data-parallel training: blocks that are refused when they are switched on."""

from ddp_zero.deepspeed.config.keys import ANY, Key, no_effect, refused

_REMOVED = "DeepSpeed has removed it. Leave it out."
_PARALLEL = "Only data parallelism is sharded here. Build a model that is parallel in other ways with torch itself."

OTHER_KEYS: list[Key] = [
    no_effect(
        "activation_checkpointing",
        "It configures deepspeed.checkpointing. Use torch.utils.checkpoint in the model.",
        off=(None,),
        holds=(
            *("partition_activations", "partitioned_activations", "number_checkpoints", "cpu_checkpointing"),
            *("contiguous_memory_optimization", "synchronize_checkpoint_boundary", "profile"),
        ),
    ),
    refused(
        "flops_profiler",
        "Use torch.profiler, or torch.utils.flop_counter.FlopCounterMode around a forward pass.",
        switch="enabled",
        holds=(
            *("enabled", "recompute_fwd_factor", "profile_step", "module_depth", "top_modules", "detailed"),
            "output_file",
        ),
    ),
    refused(
        "comms_logger",
        "Use torch.profiler, where every message has a label ddp_zero::...",
        switch="enabled",
        holds=("enabled", "prof_all", "prof_ops", "verbose", "debug"),
    ),
    refused(
        "autotuning", "Set the sizes by hand; python -m benchmarks.scale predicts time.", switch="enabled", holds=ANY
    ),
    refused(
        "hybrid_engine",
        "Generate with engine.module, which always has whole parameters.",
        switch="enabled",
        holds=(
            *("enabled", "max_out_tokens", "inference_tp_size", "release_inference_cache", "pin_parameters"),
            *("tp_gather_partition_size", "enable_cuda_graph"),
        ),
    ),
    refused("data_efficiency", "Choose samples in a sampler of your own.", switch="enabled", holds=ANY),
    refused("pipeline", _PARALLEL, off=(None,), holds=ANY),
    refused("expert_parallel", _PARALLEL, switch="enabled", holds=ANY),
    no_effect("tensor_parallel", "With autotp_size 0 or 1 nothing is split.", off=(None,), holds=ANY),
    refused("sequence_parallel_size", _PARALLEL, off=(1, None)),
    refused("data_parallel_size", "It is the number of ranks. Leave it out.", off=(None,)),
    refused(
        "weight_quantization",
        "Weights are not quantized here.",
        off=(None,),
        holds=ANY,
    ),
    refused("compile.deepcompile", "Use torch.compile on the model, or engine.compile().", off=(False,)),
    no_effect(
        "compile",
        "It configures DeepCompile.",
        off=(None,),
        holds=(
            *("autoep_non_moe", "free_activation", "free_activation_threshold", "offload_activation"),
            *("offload_activation_pin_memory", "offload_opt_states", "double_buffer", "symmetric_memory", "debug_log"),
            *("offload_parameters", "sync_before_reduce", "sync_after_reduce", "sync_before_allgather"),
            *("sync_after_allgather", "keep_int_input_tensors", "keep_all_input_tensors", "passes"),
        ),
    ),
    no_effect("timers", "steps_per_print and wall_clock_breakdown say what is logged.", off=(None,), holds=ANY),
    no_effect("aio", "Nothing is swapped to disk here.", off=(None,), holds=ANY),
    no_effect("disable_python_gc", "Call gc.disable() in the program.", off=(False,)),
    no_effect("vocabulary_size", "DeepSpeed only warns about it.", off=(None,)),
    no_effect("allgather_size", 'It belongs to the old form "zero_optimization": true.', off=(None,)),
    refused("inference", "Use engine.module in evaluation mode.", off=(None,), holds=ANY),
    *(
        refused(name, _REMOVED, off=(None, False), switch=switch, holds=ANY)
        for name, switch in (
            *(
                ("nebula", "enabled"),
                ("compression_training", ""),
                ("amp", "enabled"),
                ("quantize_training", "enabled"),
            ),
            *(("sparse_gradients", ""), ("eigenvalue", "enabled"), ("sparse_attention", ""), ("elasticity", "enabled")),
            *(("graph_harvesting", ""), ("curriculum_learning", "enabled"), ("progressive_layer_drop", "enabled")),
        )
    ),
]
