"""The rows of ``zero_optimization``."""

from ddp_zero.deepspeed.config.keys import Case, Key, Kind, honoured, no_effect, refused

_STAGE_3 = "It belongs to stage 3, which is refused."
_NEAREST = (
    "Parameters are not sharded here. What comes nearest to stage 3 is FSDP2 (torch.distributed.fsdp.fully_shard); "
    'what comes nearest here is "stage": 2.'
)
_NVME = 'Nothing is swapped to disk here. Use "device": "cpu".'


def _of_stage_3(name: str) -> Key:
    return no_effect(f"zero_optimization.{name}", _STAGE_3)


ZERO_KEYS = [
    honoured(
        "zero_optimization",
        "A block; true means stage 1, false stage 0.",
    ),
    honoured(
        "zero_optimization.stage",
        "0: plain DDP; 1: state is sharded; 2: gradients too.",
        Case((3,), Kind.REFUSED, _NEAREST),
    ),
    honoured(
        "zero_optimization.reduce_bucket_size",
        "The most elements in a bucket of DDP that has more than one parameter. The default of ddp_zero, a sixteenth "
        "of the model and at most 25 MiB, applies where it is smaller.",
    ),
    honoured(
        "zero_optimization.allgather_bucket_size",
        "The same bound: new parameters travel by the buckets of gradients.",
    ),
    honoured(
        "zero_optimization.overlap_comm",
        "true: step inside backward where no gradient has to be awaited. Without it only reductions overlap with "
        "backward, as always in DDP.",
    ),
    honoured(
        "zero_optimization.contiguous_gradients",
        "gradient_as_bucket_view of DDP. Stage 2 needs it, so there false has no effect.",
    ),
    honoured(
        "zero_optimization.reduce_scatter",
        "In stage 2 a gradient is sent to its owner only; in stages 0 and 1 DDP reduces to all ranks.",
        Case((False,), Kind.NO_EFFECT, "In stage 2 a gradient is always sent to its owner only: the same numbers."),
    ),
    honoured(
        "zero_optimization.round_robin_gradients",
        "Every bucket is always spread over all ranks.",
    ),
    honoured(
        "zero_optimization.ignore_unused_parameters",
        "true, the default: find_unused_parameters of DDP. false: DDP raises at a parameter without a gradient, and "
        "saves the search for them.",
    ),
    honoured(
        "zero_optimization.elastic_checkpoint",
        "Every checkpoint can be loaded at any number of ranks.",
    ),
    honoured(
        "zero_optimization.load_from_fp32_weights",
        "true, the default: load_checkpoint restores fp32 masters. false: it makes them from the 16-bit weights.",
    ),
    honoured(
        "zero_optimization.compute_grad_norm",
        "false: without gradient_clipping no norm is computed, and get_global_grad_norm() returns None.",
    ),
    honoured("zero_optimization.offload_optimizer", "A block.", off=(None,)),
    *(
        no_effect(f"zero_optimization.offload_optimizer.{name}", "It belongs to offloading to NVMe.")
        for name in ("nvme_path", "buffer_count", "pipeline_read", "pipeline_write", "fast_init")
    ),
    no_effect("zero_optimization.offload_optimizer.cpuadam_cores_perc", "It belongs to DeepSpeed's own Adam for CPUs."),
    honoured(
        "zero_optimization.offload_optimizer.device",
        "cpu: masters and state in CPU memory, stepped there.",
        Case(("nvme",), Kind.REFUSED, _NVME),
        off=("none",),
    ),
    no_effect(
        "zero_optimization.offload_optimizer.pin_memory",
        "Memory is pinned where the device can use that.",
    ),
    no_effect(
        "zero_optimization.offload_optimizer.ratio",
        "All of the state is offloaded.",
        off=(1.0,),
    ),
    refused(
        "zero_optimization.offload_optimizer.super_offload",
        "Leave it out: state is stepped on the CPU as a whole.",
        off=(False,),
    ),
    refused(
        "zero_optimization.offload_param",
        _NEAREST,
        off=(None,),
        holds=("nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "pin_memory"),
    ),
    refused("zero_optimization.offload_param.device", _NEAREST, off=("none",)),
    honoured("zero_optimization.cpu_offload", "The old form of offload_optimizer: {device: cpu}.", off=(False, None)),
    refused("zero_optimization.cpu_offload_param", _NEAREST, off=(False, None)),
    no_effect("zero_optimization.cpu_offload_use_pin_memory", "Memory is pinned where the device can use that."),
    no_effect("zero_optimization.allgather_partitions", "Owners send new parameters to all ranks, bucket by bucket."),
    no_effect(
        "zero_optimization.use_multi_rank_bucket_allreduce", "In stage 2 each owner gets one message per bucket."
    ),
    no_effect("zero_optimization.sub_group_size", "State is stepped bucket by bucket."),
    no_effect("zero_optimization.parameter_alignment", "Parameters in flat storage are always aligned, to 64 bytes."),
    refused("zero_optimization.legacy_stage1", "Leave it out: DeepSpeed refuses it, too.", off=(False,)),
    refused(
        "zero_optimization.zenflow",
        "Leave it out: every step uses all gradients.",
        off=(None,),
        holds=(
            *("topk_ratio", "select_strategy", "select_interval", "update_interval", "overlap_step", "offload"),
            *("auto_ratio", "full_warm_up_rounds", "pt_reserved_cores_perc", "steps_per_epoch"),
        ),
    ),
    refused(
        "zero_optimization.zero_quantized_gradients",
        'Gradients are not quantized here. "communication_data_type": "bf16" halves the bytes of fp32 gradients.',
        off=(False,),
    ),
    *(
        _of_stage_3(name)
        for name in (
            *("stage3_prefetch_bucket_size", "prefetch_bucket_size", "stage3_param_persistence_threshold"),
            *("param_persistence_threshold", "stage3_model_persistence_threshold", "model_persistence_threshold"),
            *("stage3_max_live_parameters", "max_live_parameters", "stage3_max_reuse_distance", "max_reuse_distance"),
            *("stage3_gather_16bit_weights_on_model_save", "gather_16bit_weights_on_model_save"),
            *("stage3_gather_fp16_weights_on_model_save", "stage3_module_granularity_threshold"),
            *("module_granularity_threshold", "stage3_use_all_reduce_for_fetch_params"),
            *("use_all_reduce_for_fetch_params", "stage3_allgather_sequential", "allgather_sequential"),
            *("zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_nontrainable_weights"),
            *("memory_efficient_linear", "pipeline_loading_checkpoint", "override_module_apply"),
            *("log_trace_cache_warnings", "enable_sanity_checks", "save_muon_momentum_buffer_in_memory"),
        )
    ),
    no_effect("zero_optimization.leaf_module", _STAGE_3, holds=("classes", "names", "name_suffixes")),
    *(
        refused(f"zero_optimization.{name}", "DeepSpeed has removed it. Leave it out.")
        for name in ("mics_shard_size", "mics_hierarchical_params_gather", "zeropp_loco_param")
    ),
]
