"""The table of DeepSpeed's configuration keys with their effect here, and the findings for a document.

A key is *honoured*, has *no effect* here for a reason, which is logged once, or is *refused* with a remedy. At some
values a key requests nothing, such as ``"enabled": false``; it is then *off* regardless of its other effects. A key
that is in no table is an error: nothing is ignored silently.
"""

import difflib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

AUTO = "auto"
"""Placeholder for a value that is filled in later."""

ANY = ("*",)
"""In ``Key.holds``: keys of any name."""

DTYPES = {
    **dict.fromkeys(("fp16", "float16", "half"), "float16"),
    **dict.fromkeys(("bf16", "bfloat16"), "bfloat16"),
    **dict.fromkeys(("fp32", "float32", "float"), "float32"),
}
"""DeepSpeed's names of dtypes, as attributes of torch."""


class Kind(Enum):
    """The effect of a key."""

    HONOURED = "honoured"
    NO_EFFECT = "no effect"
    REFUSED = "refused"
    OFF = "off"


class ConfigError(ValueError):
    """A configuration that cannot be used; the message lists all of its errors."""


@dataclass(frozen=True)
class Case:
    """A different effect of a key at some of its values, compared by ``==``; strings regardless of case."""

    values: tuple[object, ...]
    kind: Kind
    text: str


@dataclass(frozen=True)
class Rule:
    """A condition on the values of a key, in words and as a function, and its default."""

    expected: str
    holds: Callable[[Any], bool]
    default: Any = None

    def __call__(self, default: Any) -> "Rule":
        """The rule of a key with this default."""
        return replace(self, default=default)


@dataclass(frozen=True)
class Key:
    """One row of the table."""

    path: str  # names from the root, joined by dots
    kind: Kind  # effect of the key
    text: str  # effect in words, reason for having none, or remedy
    rule: Rule | None = None  # of its values; None if its values are not checked by themselves
    off: tuple[object, ...] = ()  # values at which it requests nothing
    cases: tuple[Case, ...] = ()  # values with a different effect
    holds: tuple[str, ...] = ()  # names of keys below it that share its row; `ANY` for all
    switch: str = ""  # key below it that turns the block on; the block is off if it is missing or False

    @property
    def default(self) -> Any:
        return None if self.rule is None else self.rule.default

    def at(self, value: object) -> tuple[Kind, str]:
        """The effect of the key at a value, and its text."""
        if any(_equal(value, known) for known in self.off):
            return Kind.OFF, "asks for nothing"
        for case in self.cases:
            if any(_equal(value, known) for known in case.values):
                return case.kind, case.text
        return self.kind, self.text


@dataclass(frozen=True)
class Finding:
    """The effect of one key of a document at its value."""

    path: str
    value: Any
    kind: Kind
    text: str


def _equal(value: object, other: object) -> bool:
    if isinstance(value, str) and isinstance(other, str):
        return value.lower() == other.lower()
    return (
        type(value) in (type(other), int, float)
        and value == other
        and isinstance(value, bool) == isinstance(other, bool)
    )


def _row_of(kind: Kind) -> Callable[..., Key]:
    def row(path: str, text: str, rule: Rule | None = None, *cases: Case, holds: str = "", **more: Any) -> Key:
        return Key(path, kind, text, rule, cases=cases, holds=tuple(holds.split()), **more)

    return row


_honour, _no_effect, _refuse = map(_row_of, (Kind.HONOURED, Kind.NO_EFFECT, Kind.REFUSED))


def _each(row: Callable[..., Key], names: str, text: str, **more: Any) -> list[Key]:
    """A row of one effect for each of these names."""
    return [row(name, text, **more) for name in names.split()]


def _inside(block: str, *rows: Key) -> list[Key]:
    return [replace(row, path=f"{block}.{row.path}") for row in rows]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_FLAG = Rule("true or false", lambda value: isinstance(value, bool))
COUNT = Rule("an int of at least 1", lambda value: _is_int(value) and value >= 1)
_WHOLE = Rule("an int of at least 0", lambda value: _is_int(value) and value >= 0)
_POWER = Rule("an int from 0 to 127", lambda value: _is_int(value) and 0 <= value <= 127)
_AMOUNT = Rule("a number of at least 0", lambda value: _is_number(value) and 0 <= value < math.inf)
_POSITIVE = Rule("a number above 0", lambda value: _is_number(value) and 0 < value < math.inf)
_TEXT = Rule("a string", lambda value: isinstance(value, str))
_NAME = Rule("a name", lambda value: isinstance(value, str) and bool(value))
_OPTIONS = Rule("a block", lambda value: isinstance(value, Mapping) and all(isinstance(name, str) for name in value))
_DTYPE = Rule(f"one of {', '.join(DTYPES)}", lambda value: isinstance(value, str) and value in DTYPES)
_MEAN = Rule("'mean'", lambda value: _equal(value, "mean"))
_TAGS = Rule("Ignore, Warn or Fail", lambda value: any(_equal(value, one) for one in ("ignore", "warn", "fail")))
_PATTERNS = Rule(
    '"auto" or a list of patterns',
    lambda value: value == AUTO or (isinstance(value, list) and all(isinstance(one, str) for one in value)),
)


def _one_of(*values: object) -> Rule:
    return Rule(f"one of {', '.join(map(repr, values))}", lambda value: type(value) is not bool and value in values)


def _optional(rule: Rule) -> Rule:
    return Rule(f"{rule.expected}, or null", lambda value: value is None or rule.holds(value))


# The rows, in the order of the page

_EQUATION = "train_batch_size = train_micro_batch_size_per_gpu * gradient_accumulation_steps * ranks."

_BATCH = [
    _honour("train_batch_size", f"{_EQUATION} Any two give the third; a contradiction is an error."),
    _honour("train_micro_batch_size_per_gpu", _EQUATION),
    _honour("gradient_accumulation_steps", f"{_EQUATION} 1 if only one of the three is given."),
    _honour(
        "managed_gradient_accumulation",
        "engine.step() steps at the boundary.",
        _FLAG(True),
        Case(
            (False,),
            Kind.REFUSED,
            "Leave it out, and call engine.set_gradient_accumulation_boundary(True) before the last backward pass of a "
            "step, False before the others.",
        ),
    ),
    _honour("dataloader_drop_last", "drop_last of the data loader that initialize() builds.", _FLAG(False)),
]

_OPTIMIZER = [
    _honour("optimizer", "A block."),
    _honour(
        "optimizer.type",
        "Adam, AdamW, SGD, Adagrad, Lion, Muon, Lamb; the name of another class of torch.optim; or the full name of "
        "any importable class, such as my_package.MyOptimizer. Lion: where momentum and gradient are 0, nothing moves; "
        "in DeepSpeed by the rate. Lamb: each parameter has a ratio of its own; in DeepSpeed's stages 1 and 2 "
        "each rank's share of a group has one. Muon: gradients are clipped first; DeepSpeed's stages 1 and 2 clip "
        "Muon's updates. per_head_muon is refused.",
        _NAME(""),
    ),
    _honour(
        "optimizer.params",
        "Options of the class. adam_w_mode of Adam is true unless it is given, as in DeepSpeed; torch_adam and "
        "fp32_optimizer_states have no effect; max_grad_norm is refused: use gradient_clipping.",
        _OPTIONS({}),
        holds="*",
    ),
    _no_effect("optimizer.legacy_fusion", "Steps are taken by torch's own optimizers."),
    _honour("scheduler", "A block."),
    _honour(
        "scheduler.type",
        "WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest; or a class of torch.optim.lr_scheduler.",
        _NAME(""),
    ),
    _honour(
        "scheduler.params", "Options of the schedule, with DeepSpeed's defaults and curves.", _OPTIONS({}), holds="*"
    ),
    _honour(
        "gradient_clipping",
        "The largest norm of all gradients, 1.0 unless it is given, as in DeepSpeed 0.19; 0 does not clip.",
        _AMOUNT(1.0),
    ),
    _no_effect("zero_allow_untested_optimizer", "ddp_zero.check_shardable() tests any optimizer, and steps compare."),
    _no_effect("zero_force_ds_cpu_optimizer", "Optimizers are torch's, also with offload_optimizer."),
]

_PRECISION = [
    _honour("fp16", "A block.", switch="enabled"),
    _honour(
        "fp16.enabled", "Parameters are cast to fp16, their owner steps fp32 masters, the loss is scaled.", _FLAG(False)
    ),
    _honour("fp16.auto_cast", "Floating inputs of the model are cast to fp16.", _FLAG(False)),
    _honour("fp16.loss_scale", "0, the default: dynamic. Else a static scale.", _AMOUNT(0)),
    _honour("fp16.initial_scale_power", "The first dynamic scale is 2 to this power.", _POWER(16)),
    _honour("fp16.loss_scale_window", "Steps without an overflow after which the scale doubles.", COUNT(1000)),
    _honour("fp16.hysteresis", "Overflows at which the scale starts to be halved.", COUNT(2)),
    _honour("fp16.consecutive_hysteresis", "true: a step without an overflow restores the hysteresis.", _FLAG(False)),
    _honour("fp16.min_loss_scale", "The smallest dynamic scale; an overflow at it raises.", _POSITIVE(1)),
    _refuse(
        "fp16.fp16_master_weights_and_grads",
        'Masters are fp32 here. Leave it out, or use "bf16" with bf16_optimizer_states.',
        off=(False,),
    ),
    *(
        row
        for name in ("bf16", "bfloat16")
        for row in (
            _honour(name, "A block." if name == "bf16" else "The old name of bf16.", switch="enabled"),
            _honour(f"{name}.enabled", "Parameters are cast to bf16, their owner steps fp32 masters.", _FLAG(False)),
            _honour(
                f"{name}.check_grad_overflow",
                "true, the default: a step with a gradient that is not finite is skipped on all ranks. false: it is "
                "taken.",
                _FLAG(True),
            ),
            _no_effect(f"{name}.immediate_grad_update", "Gradients are reduced as backward produces them."),
            _honour(
                f"{name}.bf16_master_weights_and_grads",
                "Together with bf16_optimizer_states: parameters and state in bf16, no masters.",
                _FLAG(False),
            ),
            _honour(
                f"{name}.bf16_optimizer_states",
                "Together with bf16_master_weights_and_grads: parameters and state in bf16, no masters.",
                _FLAG(False),
            ),
        )
    ),
    _honour("torch_autocast", "A block.", switch="enabled"),
    _honour(
        "torch_autocast.enabled",
        "Forward passes run under torch.autocast; parameters and gradients stay as they are. In stages 1 and 2 "
        "DeepSpeed sends gradients of linear layers and convolutions in the lower dtype: see communication_data_type.",
        _FLAG(False),
    ),
    _honour(
        "torch_autocast.dtype",
        "The dtype of torch.autocast.",
        _one_of("bfloat16", "bf16", "torch.bfloat16")("bfloat16"),
        Case(
            ("fp16", "float16", "half", "torch.float16"),
            Kind.REFUSED,
            'Use "bfloat16", or the block "fp16", which has a loss scale.',
        ),
    ),
    _refuse(
        "torch_autocast.lower_precision_safe_modules",
        "Leave it out: torch.autocast itself decides by operation.",
        off=(None,),
    ),
    _honour("data_types", "A block."),
    _honour(
        "data_types.grad_accum_dtype",
        "fp32: averages of several backward passes add up in fp32. Stage 2 always does that.",
        _optional(_DTYPE),
    ),
    _honour(
        "data_types.param_dtype", "The dtype of the mode; another one is an error.", _optional(_DTYPE), off=(None,)
    ),
    _honour(
        "data_types.buffer_dtype",
        "Floating buffers are cast to it; without it they keep theirs.",
        _optional(_DTYPE),
        off=(None,),
    ),
    _honour(
        "data_types.keep_in_fp32_modules",
        "Buffers that stay in fp32: auto, those that a transformers model lists; or a list of patterns.",
        _PATTERNS(AUTO),
    ),
]

_REDUCTION = [
    _honour(
        "communication_data_type",
        "The dtype in which gradients travel, to any in stage 2; in stages 0 and 1 fp16 or bf16 for wider gradients.",
        _optional(_DTYPE),
        off=(None,),
    ),
    _honour(
        "prescale_gradients",
        "true: gradients are divided by the number of ranks before they are summed, as DDP does, and as is done here "
        "without a factor.",
        _FLAG(False),
    ),
    _honour(
        "gradient_predivide_factor",
        "In stage 2 gradients are divided by this before they are summed, and by the rest of the number of ranks "
        "afterwards. In stages 0 and 1, where DDP divides, anything but 1.0 is an error.",
        _optional(_POSITIVE),
    ),
    _honour(
        "gradient_allreduce_op",
        "mean: gradients are averaged.",
        _MEAN("mean"),
        Case(("sum",), Kind.REFUSED, "Multiply the loss by the number of ranks instead."),
    ),
    _no_effect("seq_parallel_communication_data_type", "There is no sequence parallelism here."),
    _no_effect("disable_allgather", "New parameters always travel from their owner, once per step."),
    _no_effect("use_data_before_expert_parallelism", "There is no expert parallelism here."),
]

_LOGGING = [
    _honour(
        "steps_per_print",
        "Rank 0 prints step, skipped steps, learning rate and momentum every so many steps.",
        _optional(COUNT),
    ),
    _honour(
        "wall_clock_breakdown",
        "Rank 0 prints the milliseconds of forward, backward and step of every step.",
        _FLAG(False),
    ),
    _honour("memory_breakdown", "Rank 0 prints the memory in use, and its peak, at every step.", _FLAG(False)),
    _honour("dump_state", "Rank 0 prints the configuration as it is used.", _FLAG(False)),
    _honour(
        "log_level",
        "The level of the logger ddp_zero.",
        _optional(_one_of("debug", "info", "warning", "error", "critical")),
        off=(None,),
    ),
    _honour("tensorboard", "A block.", switch="enabled"),
    _honour(
        "tensorboard.enabled",
        "Rank 0 writes learning rate and loss scale for TensorBoard, if it is installed.",
        _FLAG(False),
    ),
    _honour("tensorboard.output_path", "Where to write.", _TEXT("")),
    _honour("tensorboard.job_name", "The folder in it.", _TEXT("DeepSpeedJobName")),
    _honour("csv_monitor", "A block.", switch="enabled"),
    _honour("csv_monitor.enabled", "Rank 0 writes a CSV file per number: learning rate, loss scale.", _FLAG(False)),
    _honour("csv_monitor.output_path", "Where to write.", _TEXT("")),
    _honour("csv_monitor.job_name", "The folder in it.", _TEXT("DeepSpeedJobName")),
    _refuse(
        "wandb",
        "Log from the loop: engine.get_lr(), engine.get_global_grad_norm(); or use csv_monitor.",
        switch="enabled",
        holds="enabled group team project",
    ),
    _refuse(
        "comet",
        "Log from the loop: engine.get_lr(), engine.get_global_grad_norm(); or use csv_monitor.",
        switch="enabled",
        holds="enabled samples_log_interval project workspace api_key experiment_name experiment_key online mode",
    ),
]

_CHECKPOINTS = [
    _honour("checkpoint", "A block.", off=(None,)),
    _honour(
        "checkpoint.tag_validation",
        "The reaction if ranks save under different tags: Ignore, Warn or Fail.",
        _TAGS("Warn"),
    ),
    _refuse(
        "checkpoint.load_universal",
        "Load such a checkpoint by the functions of docs/from-deepspeed.md, section Checkpoints.",
        off=(False,),
    ),
    _refuse(
        "checkpoint.use_node_local_storage", "Checkpoints are written to a folder that all ranks share.", off=(False,)
    ),
    _no_effect("checkpoint.parallel_write", "Every rank always writes its part.", holds="pipeline_stage"),
    _no_effect("checkpoint.checkpoint_serialization", "The format is the one of ddp_zero.checkpoint."),
    _no_effect(
        "checkpoint.writer",
        "The format is the one of ddp_zero.checkpoint.",
        holds="type decoupled io_buffer_size io_buffer_double show_statistics data_parallel io_multiplier",
        off=(None,),
    ),
    _refuse(
        "datastates_ckpt", "Save with ddp_zero.checkpoint.save(..., background=True).", off=(False, None), holds="*"
    ),
]

_REMOVED = "DeepSpeed has removed it. Leave it out."
_STAGE_3 = "It belongs to stage 3, which is refused."
_NEAREST = (
    "Parameters are not sharded here. Nearest to stage 3 is FSDP2 (torch.distributed.fsdp.fully_shard); "
    'nearest here is "stage": 2.'
)
_IN_STAGE_3 = "DeepSpeed itself offloads parameters in stage 3 only."
_NOT_HERE = f"In stages 0 to 2 no effect. {_IN_STAGE_3} {_NEAREST}"

_ZERO = [
    _honour("zero_optimization", "A block; true means stage 1, false stage 0."),
    *_inside(
        "zero_optimization",
        _honour(
            "stage",
            "0: plain DDP; 1: state is sharded; 2: gradients too.",
            _one_of(0, 1, 2)(0),
            Case((3,), Kind.REFUSED, _NEAREST),
        ),
        _honour(
            "reduce_bucket_size",
            "The most elements in a bucket of DDP that has more than one parameter. DDP's default, 25 MiB, applies "
            "where it is smaller.",
            _optional(COUNT),
        ),
        _honour(
            "allgather_bucket_size",
            "The same bound: new parameters travel by the buckets of gradients.",
            _optional(_WHOLE),
        ),
        _honour(
            "overlap_comm",
            "true: step inside backward where no gradient has to be awaited. Without it only reductions overlap with "
            "backward, as always in DDP.",
            _optional(_FLAG)(False),
        ),
        _honour(
            "contiguous_gradients",
            "gradient_as_bucket_view of DDP. In stage 2 gradients share buffers of the library either way.",
            _FLAG(True),
        ),
        _honour(
            "reduce_scatter",
            "In stage 2 a gradient is sent to its owner only; in stages 0 and 1 DDP reduces to all ranks.",
            _FLAG(True),
            Case((False,), Kind.NO_EFFECT, "In stage 2 a gradient is always sent to its owner only: the same numbers."),
        ),
        _honour("round_robin_gradients", "Every bucket is always spread over all ranks.", _FLAG(False)),
        _honour(
            "ignore_unused_parameters",
            "true, the default: find_unused_parameters of DDP. false: DDP raises at a parameter without a gradient, "
            "and saves the search for them.",
            _FLAG(True),
        ),
        _honour("elastic_checkpoint", "Every checkpoint can be loaded at any number of ranks.", _FLAG(False)),
        _honour(
            "load_from_fp32_weights",
            "true, the default: load_checkpoint restores fp32 masters. false: it makes them from the 16-bit weights.",
            _FLAG(True),
        ),
        _honour(
            "compute_grad_norm",
            "false: without gradient_clipping no norm is computed, and get_global_grad_norm() returns None.",
            _FLAG(True),
        ),
        _honour("offload_optimizer", "A block.", off=(None,)),
        *(
            _no_effect(f"offload_optimizer.{name}", "It belongs to offloading to NVMe.")
            for name in ("nvme_path", "buffer_count", "pipeline_read", "pipeline_write", "fast_init")
        ),
        _no_effect("offload_optimizer.cpuadam_cores_perc", "It belongs to DeepSpeed's own Adam for CPUs."),
        _honour(
            "offload_optimizer.device",
            "cpu: masters and state in CPU memory, stepped there.",
            _one_of("none", "cpu")("none"),
            Case(("nvme",), Kind.REFUSED, 'Nothing is swapped to disk here. Use "device": "cpu".'),
            off=("none",),
        ),
        _no_effect("offload_optimizer.pin_memory", "Memory is pinned where the device can use that."),
        _no_effect("offload_optimizer.ratio", "All of the state is offloaded.", off=(1.0,)),
        _refuse(
            "offload_optimizer.super_offload", "Leave it out: state is stepped on the CPU as a whole.", off=(False,)
        ),
        _refuse(
            "offload_param", _NOT_HERE, off=(None,), holds="nvme_path buffer_count buffer_size max_in_cpu pin_memory"
        ),
        _refuse("offload_param.device", _NOT_HERE, off=("none",)),
        _honour(
            "cpu_offload", "The old form of offload_optimizer: {device: cpu}.", _optional(_FLAG), off=(False, None)
        ),
        _refuse("cpu_offload_param", _NOT_HERE, off=(False, None)),
        _no_effect("cpu_offload_use_pin_memory", "Memory is pinned where the device can use that."),
        _no_effect("allgather_partitions", "Owners send new parameters to all ranks, bucket by bucket."),
        _no_effect("use_multi_rank_bucket_allreduce", "In stage 2 each owner gets one message per bucket."),
        _no_effect("sub_group_size", "State is stepped bucket by bucket."),
        _no_effect("parameter_alignment", "Parameters in flat storage are always aligned, to 64 bytes."),
        _refuse("legacy_stage1", "Leave it out: DeepSpeed refuses it, too.", off=(False,)),
        _refuse(
            "zenflow",
            "Leave it out: every step uses all gradients.",
            off=(None,),
            holds=(
                "topk_ratio select_strategy select_interval update_interval overlap_step offload auto_ratio "
                "full_warm_up_rounds pt_reserved_cores_perc steps_per_epoch"
            ),
        ),
        _refuse(
            "zero_quantized_gradients",
            'Gradients are not quantized here. "communication_data_type": "bf16" halves the bytes of fp32 gradients.',
            off=(False,),
        ),
        *_each(
            _no_effect,
            "stage3_prefetch_bucket_size prefetch_bucket_size stage3_param_persistence_threshold "
            "param_persistence_threshold stage3_model_persistence_threshold model_persistence_threshold "
            "stage3_max_live_parameters max_live_parameters stage3_max_reuse_distance max_reuse_distance "
            "stage3_gather_16bit_weights_on_model_save gather_16bit_weights_on_model_save "
            "stage3_gather_fp16_weights_on_model_save stage3_module_granularity_threshold module_granularity_threshold "
            "stage3_use_all_reduce_for_fetch_params use_all_reduce_for_fetch_params stage3_allgather_sequential "
            "allgather_sequential zero_hpz_partition_size zero_quantized_weights zero_quantized_nontrainable_weights "
            "memory_efficient_linear pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings "
            "enable_sanity_checks save_muon_momentum_buffer_in_memory",
            _STAGE_3,
        ),
        _no_effect("leaf_module", _STAGE_3, holds="classes names name_suffixes"),
        *_each(_refuse, "mics_shard_size mics_hierarchical_params_gather zeropp_loco_param", _REMOVED),
    ),
]

_UNSWITCHED = ("compression_training", "sparse_gradients", "sparse_attention", "graph_harvesting")
_PARALLEL = "Only data parallelism is sharded here. Build a model that is parallel in other ways with torch itself."

_OTHERS = [
    _no_effect(
        "activation_checkpointing",
        "It configures deepspeed.checkpointing. Use torch.utils.checkpoint in the model.",
        off=(None,),
        holds=(
            "partition_activations partitioned_activations number_checkpoints cpu_checkpointing "
            "contiguous_memory_optimization synchronize_checkpoint_boundary profile"
        ),
    ),
    _refuse(
        "flops_profiler",
        "Use torch.profiler, or torch.utils.flop_counter.FlopCounterMode around a forward pass.",
        switch="enabled",
        holds="enabled recompute_fwd_factor profile_step module_depth top_modules detailed output_file",
    ),
    _refuse(
        "comms_logger",
        "Use torch.profiler, where every message has a label ddp_zero::...",
        switch="enabled",
        holds="enabled prof_all prof_ops verbose debug",
    ),
    *(
        _no_effect(name, f"DeepSpeed does not read it either; {read}", off=(None,), holds="*")
        for name, read in (
            ("comms_config", "it logs messages by comms_logger."),
            ("monitor_config", "it logs by tensorboard, csv_monitor, wandb and comet."),
        )
    ),
    _refuse(
        "autotuning", "Set the sizes by hand; python -m benchmarks.scale predicts time.", switch="enabled", holds="*"
    ),
    _refuse(
        "hybrid_engine",
        "Generate with engine.module, which always has whole parameters.",
        switch="enabled",
        holds=(
            "enabled max_out_tokens inference_tp_size release_inference_cache pin_parameters tp_gather_partition_size "
            "enable_cuda_graph"
        ),
    ),
    _refuse("data_efficiency", "Choose samples in a sampler of your own.", switch="enabled", holds="*"),
    _refuse("pipeline", _PARALLEL, off=(None,), holds="*"),
    _refuse("expert_parallel", _PARALLEL, switch="enabled", holds="*"),
    _no_effect("tensor_parallel", "With autotp_size 0 or 1 nothing is split; more is refused.", off=(None,), holds="*"),
    _refuse("sequence_parallel_size", _PARALLEL, off=(1, None)),
    _refuse("data_parallel_size", "It is the number of ranks. Leave it out.", off=(None,)),
    _refuse("weight_quantization", "Weights are not quantized here.", off=(None,), holds="*"),
    _refuse("compile.deepcompile", "Use torch.compile on the model, or engine.compile().", off=(False,)),
    _no_effect(
        "compile",
        "It configures DeepCompile.",
        off=(None,),
        holds=(
            "autoep_non_moe free_activation free_activation_threshold offload_activation "
            "offload_activation_pin_memory offload_opt_states double_buffer symmetric_memory debug_log "
            "offload_parameters sync_before_reduce sync_after_reduce sync_before_allgather sync_after_allgather "
            "keep_int_input_tensors keep_all_input_tensors passes"
        ),
    ),
    _no_effect(
        "timers", "steps_per_print and wall_clock_breakdown choose the lines of the log.", off=(None,), holds="*"
    ),
    _no_effect("aio", "Nothing is swapped to disk here.", off=(None,), holds="*"),
    _no_effect("disable_python_gc", "Call gc.disable() in the program.", off=(False,)),
    _no_effect("vocabulary_size", "DeepSpeed only warns about it.", off=(None,)),
    _no_effect("allgather_size", 'It belongs to the old form "zero_optimization": true.', off=(None,)),
    _refuse("inference", "Use engine.module in evaluation mode.", off=(None,), holds="*"),
    *(
        _refuse(name, _REMOVED, off=(None, False), switch="" if name in _UNSWITCHED else "enabled", holds="*")
        for name in (
            *("nebula", "compression_training", "amp", "quantize_training", "sparse_gradients", "eigenvalue"),
            *("sparse_attention", "elasticity", "graph_harvesting", "curriculum_learning", "progressive_layer_drop"),
        )
    ),
]


SECTIONS: Mapping[str, list[Key]] = {
    "Batch": _BATCH,
    "Optimizer and scheduler": _OPTIMIZER,
    "Precision": _PRECISION,
    "Reduction": _REDUCTION,
    "Logging": _LOGGING,
    "Checkpoints": _CHECKPOINTS,
    "zero_optimization": _ZERO,
    "Others": _OTHERS,
}
"""The rows by the title of their section."""

TABLE: Mapping[str, Key] = {row.path: row for rows in SECTIONS.values() for row in rows}
"""The rows by path."""


# The findings for a document


def value_at(document: Mapping[str, Any], path: str, default: Any = None) -> Any:
    """The value of a key, or the default if it, or a block around it, is missing."""
    found: Any = document
    for name in path.split("."):
        if not isinstance(found, Mapping) or name not in found:
            return default
        found = found[name]
    return found


def find(document: Mapping[str, Any]) -> list[Finding]:
    """Findings for every key of a document, in its order; ``"auto"`` counts as a value that is filled in later.

    Raises ConfigError for keys that DeepSpeed does not have, with the nearest name for each.
    """
    stage = value_at(document, "zero_optimization.stage", 0)
    findings, unknown = list[Finding](), list[str]()
    for path, value, key in _walk(document, "", None):
        if key is None:
            unknown.append(_unknown(path))
        else:
            findings.append(Finding(path, value, *(_in_context(path, value, stage) or key.at(value))))
    if unknown:
        raise ConfigError("\n".join(["Unknown keys in the DeepSpeed configuration:", *unknown]) + " [ZERO-703]")
    return findings


def check(document: Mapping[str, Any]) -> list[Finding]:
    """Findings for a document that can be used as it is; ConfigError for unknown, refused or ``"auto"`` keys."""
    findings = find(document)
    wrong = [f"- {one.path} = {one.value!r}: {one.text}" for one in findings if one.kind is Kind.REFUSED]
    if wrong:
        raise ConfigError("\n".join(["Keys of the configuration that are not supported here:", *wrong]) + " [ZERO-704]")
    left = [path for path in autos(document) if path not in TABLE or TABLE[path].default != AUTO]
    if left:
        raise ConfigError(
            f'Expected numbers in place of "auto", got "auto" for {", ".join(left)}. Write the values, or fill them '
            "with ddp_zero.deepspeed.config.config.Auto. [ZERO-705]"
        )
    return findings


def autos(document: Mapping[str, Any], prefix: str = "") -> list[str]:
    """The paths whose value is ``"auto"``."""
    found = list[str]()
    for name, value in document.items():
        if isinstance(value, Mapping):
            found += autos(value, f"{prefix}{name}.")
        elif value == AUTO:
            found.append(f"{prefix}{name}")
    return found


def nearest(path: str) -> str | None:
    """The key with the most similar name, in the same block or else anywhere."""
    block = path.rpartition(".")[0]
    siblings, anywhere = dict[str, str](), dict[str, str]()
    for row in TABLE.values():
        for known in (row.path, *(f"{row.path}.{name}" for name in row.holds if name not in ANY)):
            around, _, name = known.rpartition(".")
            anywhere.setdefault(name, known)
            if around == block:
                siblings[name] = known
    for names, cutoff in ((siblings, 0.6), (anywhere, 0.75)):
        found = difflib.get_close_matches(path.rpartition(".")[2], names, n=1, cutoff=cutoff)
        if found:
            return names[found[0]]
    return None


def _walk(block: Mapping[str, Any], prefix: str, owner: Key | None) -> Iterator[tuple[str, Any, Key | None]]:
    """Every leaf with its row; a block with a single row counts as one leaf."""
    for name, value in block.items():
        path = f"{prefix}{name}"
        key = None if "." in name else TABLE.get(path)
        if key is None and owner is not None and (owner.holds == ANY or name in owner.holds):
            key = Key(path, owner.kind, owner.text)
        if key is None or not isinstance(value, Mapping):
            yield path, value, key
        elif key.switch and value.get(key.switch) in (None, False, 0, "false", "False"):
            yield path, value, Key(path, Kind.OFF, f"asks for nothing without {key.switch!r}: true")
            for inner in value:  # keys in no table are errors in a block that is switched off, too
                if not (f"{path}.{inner}" in TABLE or key.holds == ANY or inner in key.holds):
                    yield f"{path}.{inner}", value[inner], None
        elif key.holds == ANY:
            yield path, value, key
        else:
            yield from _walk(value, f"{path}.", key)


_OFFLOAD_PARAM = ("zero_optimization.offload_param", "zero_optimization.cpu_offload_param")
_OFFLOADS_PARAM = ("zero_optimization.offload_param.device", "zero_optimization.cpu_offload_param")


def _in_context(path: str, value: Any, stage: object) -> tuple[Kind, str] | None:
    """The effect of a key if it depends on more than its own value."""
    if path == "tensor_parallel" and isinstance(value, Mapping) and value.get("autotp_size", 0) not in (0, 1, None):
        return Kind.REFUSED, "Leave it out: only data parallelism is sharded here."
    if stage in (0, 1, 2) and path.startswith(_OFFLOAD_PARAM):
        is_asked = path in _OFFLOADS_PARAM and value not in ("none", None, False)
        return (Kind.NO_EFFECT, _IN_STAGE_3) if is_asked else (Kind.OFF, "asks for nothing")
    if path == "zero_optimization.contiguous_gradients" and value is False and stage == 2:
        return Kind.NO_EFFECT, "In stage 2 gradients share buffers of the library either way."
    if path == "data_types.grad_accum_dtype" and stage == 2 and value not in (None, "fp32", "float32", "float"):
        return Kind.NO_EFFECT, "Stage 2 always adds up in fp32."
    return None


def hint(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The end of a message about an unknown name: the most similar one, if there is any."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"; did you mean {near[0]!r}?" if near else ""


def _unknown(path: str) -> str:
    if path in TABLE:
        *blocks, name = path.split(".")
        return f"- {path!r}: expected {name!r} in the block {'.'.join(blocks)!r}, got a key with dots"
    near = nearest(path)
    return f"- {path!r}" + (f": did you mean {near!r}?" if near else ", which DeepSpeed 0.19 does not have")
