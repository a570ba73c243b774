"""The rows of what an ordinary run sets, outside ``zero_optimization``."""

from ddp_zero.deepspeed.config.keys import ANY, Case, Key, Kind, honoured, no_effect, refused

_EQUATION = "train_batch_size = train_micro_batch_size_per_gpu * gradient_accumulation_steps * ranks."

BATCH = [
    honoured("train_batch_size", f"{_EQUATION} Any two give the third; what contradicts it is an error."),
    honoured("train_micro_batch_size_per_gpu", _EQUATION),
    honoured("gradient_accumulation_steps", f"{_EQUATION} 1 if only one of the three is given."),
    honoured(
        "managed_gradient_accumulation",
        "engine.step() steps at the boundary.",
        Case(
            (False,),
            Kind.REFUSED,
            "Leave it out, and call engine.set_gradient_accumulation_boundary(True) before the last backward pass of a "
            "step, False before the others.",
        ),
    ),
    honoured("dataloader_drop_last", "drop_last of the data loader that initialize() builds."),
]

OPTIMIZER = [
    honoured("optimizer", "A block."),
    honoured(
        "optimizer.type",
        "Adam, AdamW, SGD, Adagrad, Lion, Muon, Lamb; the name of another class of torch.optim; or the full name of "
        "any importable class, such as my_package.MyOptimizer. Lion: where momentum and gradient are 0, nothing moves; "
        "in DeepSpeed by the rate. Lamb: the ratio is that of each parameter; in DeepSpeed's stages 1 and 2 that of a "
        "rank's share of a group. Muon: gradients are clipped first; DeepSpeed's stages 1 and 2 clip what Muon has "
        "made of them. per_head_muon is refused.",
    ),
    honoured(
        "optimizer.params",
        "Options of the class. adam_w_mode of Adam is true unless it is given, as in DeepSpeed; torch_adam and "
        "fp32_optimizer_states have no effect; max_grad_norm is refused: use gradient_clipping.",
        holds=ANY,
    ),
    no_effect("optimizer.legacy_fusion", "Steps are those of torch's own optimizers."),
    honoured("scheduler", "A block."),
    honoured(
        "scheduler.type",
        "WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest; or a class of torch.optim.lr_scheduler.",
    ),
    honoured("scheduler.params", "Options of the schedule, with DeepSpeed's defaults and curves.", holds=ANY),
    honoured(
        "gradient_clipping",
        "The largest norm of all gradients, 1.0 unless it is given, as in DeepSpeed 0.19; 0 does not clip.",
    ),
    no_effect("zero_allow_untested_optimizer", "ddp_zero.check_shardable() tests any optimizer, and steps compare."),
    no_effect("zero_force_ds_cpu_optimizer", "Optimizers are torch's, also with offload_optimizer."),
]

PRECISION = [
    honoured("fp16", "A block.", switch="enabled"),
    honoured("fp16.enabled", "Parameters are cast to fp16, their owner steps fp32 masters, the loss is scaled."),
    honoured("fp16.auto_cast", "Floating inputs of the model are cast to fp16."),
    honoured("fp16.loss_scale", "0, the default: dynamic. Else a static scale."),
    honoured("fp16.initial_scale_power", "The first dynamic scale is 2 to this power."),
    honoured("fp16.loss_scale_window", "Steps without an overflow after which the scale doubles."),
    honoured("fp16.hysteresis", "Overflows at which the scale starts to be halved."),
    honoured("fp16.consecutive_hysteresis", "true: a step without an overflow restores the hysteresis."),
    honoured("fp16.min_loss_scale", "The smallest dynamic scale; an overflow at it raises."),
    refused(
        "fp16.fp16_master_weights_and_grads",
        'Masters are fp32 here. Leave it out, or use "bf16" with bf16_optimizer_states.',
        off=(False,),
    ),
    *(
        row
        for name in ("bf16", "bfloat16")
        for row in (
            honoured(name, "A block." if name == "bf16" else "The old name of bf16.", switch="enabled"),
            honoured(f"{name}.enabled", "Parameters are cast to bf16, their owner steps fp32 masters."),
            honoured(
                f"{name}.check_grad_overflow",
                "true, the default: a step with a gradient that is not finite is skipped on all ranks. false: it is "
                "taken.",
            ),
            no_effect(f"{name}.immediate_grad_update", "Gradients are reduced as backward produces them."),
            honoured(
                f"{name}.bf16_master_weights_and_grads",
                "Together with bf16_optimizer_states: parameters and state in bf16, no masters.",
            ),
            honoured(
                f"{name}.bf16_optimizer_states",
                "Together with bf16_master_weights_and_grads: parameters and state in bf16, no masters.",
            ),
        )
    ),
    honoured("torch_autocast", "A block.", switch="enabled"),
    honoured(
        "torch_autocast.enabled",
        "Forward passes run under torch.autocast; parameters and gradients stay as they are. In stages 1 and 2 "
        "DeepSpeed sends gradients of linear layers and convolutions in the lower dtype: see communication_data_type.",
    ),
    honoured(
        "torch_autocast.dtype",
        "The dtype of torch.autocast.",
        Case(
            ("fp16", "float16", "half", "torch.float16"),
            Kind.REFUSED,
            'Use "bfloat16", or the block "fp16", which has a loss scale.',
        ),
    ),
    refused(
        "torch_autocast.lower_precision_safe_modules",
        "Leave it out: torch.autocast itself decides by operation.",
        off=(None,),
    ),
    honoured("data_types", "A block."),
    honoured(
        "data_types.grad_accum_dtype",
        "fp32: averages of several backward passes add up in fp32. Stage 2 always does that.",
    ),
    honoured("data_types.param_dtype", "The dtype of the mode; another one is an error.", off=(None,)),
    honoured("data_types.buffer_dtype", "Floating buffers are cast to it; without it they keep theirs.", off=(None,)),
    honoured(
        "data_types.keep_in_fp32_modules",
        "Buffers that stay in fp32: auto, those that a transformers model lists; or a list of patterns.",
        takes_auto=True,
    ),
]

REDUCTION = [
    honoured(
        "communication_data_type",
        "The dtype in which gradients travel, to any in stage 2; in stages 0 and 1 fp16 or bf16 for wider gradients.",
        off=(None,),
    ),
    honoured(
        "prescale_gradients",
        "true: gradients are divided by the number of ranks before they are summed, as DDP does, and as is done here "
        "without a factor.",
    ),
    honoured(
        "gradient_predivide_factor",
        "In stage 2 gradients are divided by this before they are summed, and by the rest of the number of ranks "
        "afterwards. In stages 0 and 1, where DDP divides, anything but 1.0 is an error.",
    ),
    honoured(
        "gradient_allreduce_op",
        "mean: gradients are averaged.",
        Case(("sum",), Kind.REFUSED, "Multiply the loss by the number of ranks instead."),
    ),
    no_effect("seq_parallel_communication_data_type", "There is no sequence parallelism here."),
    no_effect("disable_allgather", "New parameters always travel from their owner, once per step."),
    no_effect("use_data_before_expert_parallelism", "There is no expert parallelism here."),
]

LOGGING = [
    honoured("steps_per_print", "Rank 0 prints step, skipped steps, learning rate and momentum every so many steps."),
    honoured("wall_clock_breakdown", "Rank 0 prints the milliseconds of forward, backward and step of every step."),
    honoured("memory_breakdown", "Rank 0 prints the memory in use, and its peak, at every step."),
    honoured("dump_state", "Rank 0 prints the configuration as it is used."),
    honoured("log_level", "The level of the logger ddp_zero.", off=(None,)),
    honoured("tensorboard", "A block.", switch="enabled"),
    honoured("tensorboard.enabled", "Rank 0 writes learning rate and loss scale for TensorBoard, if it is installed."),
    honoured("tensorboard.output_path", "Where to write."),
    honoured("tensorboard.job_name", "The folder in it."),
    honoured("csv_monitor", "A block.", switch="enabled"),
    honoured("csv_monitor.enabled", "Rank 0 writes a CSV file per number: learning rate, loss scale."),
    honoured("csv_monitor.output_path", "Where to write."),
    honoured("csv_monitor.job_name", "The folder in it."),
    refused(
        "wandb",
        "Log from the loop: engine.get_lr(), engine.get_global_grad_norm(); or use csv_monitor.",
        switch="enabled",
        holds=("enabled", "group", "team", "project"),
    ),
    refused(
        "comet",
        "Log from the loop: engine.get_lr(), engine.get_global_grad_norm(); or use csv_monitor.",
        switch="enabled",
        holds=(
            *("enabled", "samples_log_interval", "project", "workspace", "api_key", "experiment_name"),
            *("experiment_key", "online", "mode"),
        ),
    ),
]

CHECKPOINTS = [
    honoured("checkpoint", "A block.", off=(None,)),
    honoured("checkpoint.tag_validation", "What to do if ranks save under different tags: Ignore, Warn or Fail."),
    refused(
        "checkpoint.load_universal",
        "Load such a checkpoint by the functions of docs/from-deepspeed.md, section Checkpoints.",
        off=(False,),
    ),
    refused(
        "checkpoint.use_node_local_storage",
        "Checkpoints are written to a folder that all ranks share.",
        off=(False,),
    ),
    no_effect("checkpoint.parallel_write", "Every rank always writes its part.", holds=("pipeline_stage",)),
    no_effect("checkpoint.checkpoint_serialization", "The format is that of ddp_zero.checkpoint."),
    no_effect(
        "checkpoint.writer",
        "The format is that of ddp_zero.checkpoint.",
        holds=(
            *("type", "decoupled", "io_buffer_size", "io_buffer_double", "show_statistics", "data_parallel"),
            "io_multiplier",
        ),
        off=(None,),
    ),
    refused(
        "datastates_ckpt", "Save with ddp_zero.checkpoint.save(..., background=True).", off=(False, None), holds=ANY
    ),
]

MAIN_KEYS: list[Key] = [*BATCH, *OPTIMIZER, *PRECISION, *REDUCTION, *LOGGING, *CHECKPOINTS]
