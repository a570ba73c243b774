"""The rest of DeepSpeed's engine: methods that return settings, and replacements for methods missing here."""

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from operator import attrgetter
from typing import Any

from ddp_zero.deepspeed.config.config import Config
from ddp_zero.deepspeed.config.table import value_at


def _at(path: str, default: Any = None) -> Callable[[Config], Any]:
    return lambda config: value_at(config.document, path, default)


_OF_REST = (
    "communication_data_type dataloader_drop_last dump_state gradient_clipping log_level managed_gradient_accumulation "
    "memory_breakdown steps_per_print wall_clock_breakdown"
)
_OF_ZERO = (
    "allgather_bucket_size compute_grad_norm contiguous_gradients elastic_checkpoint ignore_unused_parameters "
    "load_from_fp32_weights reduce_bucket_size round_robin_gradients"
)

SETTINGS: Mapping[str, Callable[[Config], Any]] = {
    **{name: attrgetter(f"rest.{name}") for name in _OF_REST.split()},
    **{f"zero_{name}": attrgetter(f"zero.{name}") for name in _OF_ZERO.split()},
    "bf16_master_weights_and_gradients": attrgetter("bf16.bf16_master_weights_and_grads"),
    "bf16_optimizer_states": attrgetter("bf16.bf16_optimizer_states"),
    "bfloat16_enabled": attrgetter("bf16.enabled"),
    "checkpoint_tag_validation_enabled": lambda config: config.tag_validation != "ignore",
    "checkpoint_tag_validation_fail": lambda config: config.tag_validation == "fail",
    "dynamic_loss_scale": lambda config: config.fp16.loss_scale == 0,
    "fp16_auto_cast": attrgetter("fp16.auto_cast"),
    "fp16_enabled": attrgetter("fp16.enabled"),
    "fp16_master_weights_and_gradients": lambda config: False,
    "gradient_predivide_factor": lambda config: config.rest.gradient_predivide_factor or 1.0,
    "initial_dynamic_scale": lambda config: 2**config.fp16.initial_scale_power,
    "optimizer_name": lambda config: None if config.optimizer is None else config.optimizer.type,
    "optimizer_params": lambda config: None if config.optimizer is None else dict(config.optimizer.params),
    "postscale_gradients": lambda config: not config.rest.prescale_gradients,
    "scheduler_name": lambda config: None if config.scheduler is None else config.scheduler.type,
    "scheduler_params": lambda config: None if config.scheduler is None else dict(config.scheduler.params),
    "torch_autocast_enabled": attrgetter("autocast.enabled"),
    "zero_allow_untested_optimizer": _at("zero_allow_untested_optimizer", False),
    "zero_cpu_offload": lambda config: config.offload.device != "none",
    "zero_offload_optimizer": _at("zero_optimization.offload_optimizer"),
    "zero_optimization": lambda config: config.zero.stage > 0,
    "zero_optimization_stage": attrgetter("zero.stage"),
    "zero_optimization_partition_gradients": lambda config: config.zero.stage == 2,
    "zero_optimization_partition_weights": lambda config: False,
    "zero_overlap_comm": lambda config: bool(config.zero.overlap_comm),
    "zero_reduce_scatter": _at("zero_optimization.reduce_scatter", True),
}
"""Methods without arguments that return settings of the configuration."""

_STAGE_3 = "Stage 3 is not done here; FSDP2 comes nearest."
_NO_EFFECT = "Without effect here; docs/deepspeed-keys.md says why."

ELSEWHERE: Mapping[str, str] = {
    "Only data parallelism is done here: engine.global_rank; for meshes see docs/parallel.md.": (
        "*autotp* tensor_parallel_config get_*_parallel_rank get_sequence_parallel_group"
    ),
    "engine.compile() compiles the model by torch.compile; nothing else is compiled.": (
        "*autosp* *compile* register_compile_pass uses_parallelization_pass_only"
    ),
    "There is no autotuner; python -m ddp_zero estimate tells memory beforehand.": "autotuning_*",
    "Use torch.profiler; wall_clock_breakdown prints times.": (
        "flops_profiler_* get_wall_clock_timers print_forward_breakdown"
    ),
    "Not done here: use a sampler of your own.": (
        "curriculum_* data_efficiency_* data_sampling_* random_ltd_* set_custom_curriculum_* set_data_post_process_func"
    ),
    "DDP reduces gradients inside backward; nothing is left to call.": (
        "all_gather_scalar allreduce_* buffered_allreduce_fallback coalesce_grad_reduction sparse_*"
    ),
    "engine.step() clips; without the engine call opt.clip_grad_norm_().": "clip_fp32_gradients",
    "Call engine.zero.offload_state() and engine.zero.reload_state().": "offload_states reload_states",
    "engine.load_checkpoint() reads folders of every kind; python -m ddp_zero checkpoint export writes others.": (
        "load_universal_checkpoint checkpoint_serialization_enabled checkpoint_writer_enabled"
    ),
    "Call ddp_zero.checkpoint.load(), with global_names= for experts.": "load_moe_state_dict",
    "Read engine.config.": (
        "get_data_types torch_autocast_dtype torch_autocast_lower_precision_safe_modules "
        "get_optimizer_configuration get_type is_map_style_dataset is_iterable_style_dataset"
    ),
    "Read engine.config['fp16'] and engine.loss_scale().": "dynamic_loss_scale_args",
    "Optimizers are torch's; docs/offload.md says how state is kept on the host.": (
        "aio_config cpuadam_cores_perc optimizer_legacy_fusion super_offload swap_tensor_config use_node_local_storage"
    ),
    "Not done here: read engine.config.": "is_sanity_checks_enabled collect_python_gc zenflow_config",
    _NO_EFFECT: (
        "zero_allgather_partitions zero_allgather_sequential zero_force_ds_cpu_optimizer zero_legacy_stage1 "
        "zero_parameter_alignment zero_save_muon_momentum_buffer_in_memory zero_use_cpu_optimizer"
    ),
    _STAGE_3: (
        "empty_partition_cache is_first_weights_partition_group zero_gather_16bit_weights_on_model_save "
        "zero_hpz_* zero_log_* zero_max_* zero_model_* zero_module_* zero_multi_* zero_nvme_* zero_offload_param "
        "zero_param_persistence_threshold zero_partial_offload zero_prefetch_* zero_quantized_* zero_sub_group_size"
    ),
}
"""Replacements for names of DeepSpeed's engine that this one lacks: the replacement, and the names as patterns."""


OF_THE_OPTIMIZER: Mapping[str, str] = {
    "Call engine.backward(loss).": "backward backward_*",
    "engine.optimizer is the optimizer: param_groups, state_dict(); optim is this rank's shard of it.": "optimizer",
    "Read engine.optimizer.cur_scale.": "loss_scaler external_loss_scale",
    "Set fp16.loss_scale in the configuration: 0 is dynamic.": "override_loss_scale custom_loss_scaler",
    "Read engine.optimizer.overflow.": "*check_overflow *has_overflow* local_overflow",
    "engine.step() clips, to engine.gradient_clipping().": "clip_grad unscale_and_clip_grads",
    "Read engine.get_global_grad_norm().": "scaled_global_norm get_grad_norm_direct _global_grad_norm",
    "Use the safe_* functions of ddp_zero.deepspeed.": (
        "*bit16_groups* *fp16_groups* *fp32_groups* fp32_partitioned_groups_flat averaged_gradients "
        "params_in_partition params_not_in_partition get_bit16_param_group *get_hp_* update_lp_params"
    ),
    "Call engine.optimizer.offload_state() and reload_state().": "offload_states reload_states",
    "DDP reduces gradients inside backward; nothing is left to call.": (
        "*allreduce* reduce_gradients *_ipg_* *partition_gradients* average_tensor *grad_acc_post_hook* "
        "overlapping_partition_gradients_reduce_epilogue independent_gradient_partition_epilogue"
    ),
    "Ask the engine.": "is_gradient_accumulation_boundary set_gradient_accumulation_boundary",
    "engine.optimizer.explain() and owner_of(param) tell owners.": (
        "get_partition_info get_data_parallel_partitions get_flat_partition partition_count partition_size"
    ),
    "State begins in the first step; the library keeps its buffers itself.": (
        "initialize_optimizer_states reset_cpu_buffers *_gradient_structures *_grad_in_param_list clear_grad_attribute "
        "fill_grad_accum_attribute set_none_gradients_to_zero zero_reduced_gradients"
    ),
    "Use torch.profiler; engine.optimizer.stats() has times and bytes.": "timers print_rank_0 report_memory_usage",
    "Read engine.optimizer.process_group.": "dp_process_group real_dp_process_group",
    "Experts: docs/parallel.md.": "is_moe_group is_moe_param_group get_ep_ranks ep_process_group has_moe_layers",
    "Call engine.save_checkpoint() and engine.load_checkpoint().": (
        "checkpoint_event_* enable_universal_checkpoint load_hp_checkpoint_state* *elastic*"
    ),
}
"""As `ELSEWHERE`, for names of DeepSpeed's optimizers of stages 1 and 2."""


def way_here(name: str, ways: Mapping[str, str] = ELSEWHERE) -> str | None:
    """The replacement for a name of DeepSpeed's engine, or optimizer; None for a name that it does not have either."""
    return next((way for way, names in ways.items() if any(fnmatchcase(name, one) for one in names.split())), None)
