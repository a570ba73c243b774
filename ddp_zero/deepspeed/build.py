"""The parts of an engine from a configuration: the wrapped model, its optimizer, and how they are connected."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed import get_world_size
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from ddp_zero.core.plan.buckets import bucket_mb
from ddp_zero.ddp_hooks import build_with_hook
from ddp_zero.deepspeed.config.config import Config
from ddp_zero.deepspeed.optimizers import Choice
from ddp_zero.deepspeed.precision import dtype_named
from ddp_zero.loss_scale import DynamicLossScale
from ddp_zero.optimizer import ZeroRedundancyOptimizer

_MIB = 1 << 20
_COMPRESSING = {torch.float16: fp16_compress_hook, torch.bfloat16: bf16_compress_hook}


def wrap_model(module: nn.Module, config: Config, device: torch.device) -> DistributedDataParallel:
    """The model in `DistributedDataParallel`, with buckets as large as the configuration allows. A collective."""
    caps: dict[str, Any] = {"bucket_cap_mb_list": [bucket_cap(module, config, get_world_size())]}
    return DistributedDataParallel(
        module,
        **caps,
        device_ids=None if device.type == "cpu" else [device.index],
        gradient_as_bucket_view=config.zero.contiguous_gradients or config.zero.stage == 2,
        find_unused_parameters=config.zero.ignore_unused_parameters,
    )


def bucket_cap(module: nn.Module, config: Config, ranks: int) -> float:
    """The size of DDP's buckets in MiB: the library's own, or the configuration's if that is smaller."""
    trained = [param for param in module.parameters() if param.requires_grad]
    usual = bucket_mb([param.nbytes for param in trained], ranks)
    elements = config.zero.bucket_elements
    itemsize = max((param.element_size() for param in trained), default=1)
    return usual if elements is None else min(usual, elements * itemsize / _MIB)


def build_optimizer(ddp: DistributedDataParallel, config: Config, choice: Choice) -> Optimizer:
    """The optimizer: a sharded one, or in stage 0 with fp32 parameters the plain one. A collective if sharded.

    Raises:
        ConfigError: for options that the chosen stage, or the optimizer's class, cannot have.
    """
    if not config.is_sharded:
        prepare_plain(ddp, config)
        return choice.optimizer_class(choice.groups, **choice.options)
    return build_with_hook(
        ddp,
        choice.optimizer_class,
        params=[dict(group) for group in choice.groups],
        **{**sharding_options(config), **choice.options},
    )


def prepare_plain(ddp: DistributedDataParallel, config: Config) -> None:
    """In stage 0 with a plain optimizer: let gradients travel in the configuration's dtype."""
    hook = _reduction(config)["hook"]
    if hook is not None:
        # By another name: DDP asks for NCCL before it takes torch's hook for bf16, which Gloo runs as well.
        ddp.register_comm_hook(None, lambda state, bucket: hook(state, bucket))


def sharding_options(config: Config) -> dict[str, Any]:
    """Options of `shard_optimizer`, but for the optimizer's own."""
    options: dict[str, Any] = {
        "stage": max(config.zero.stage, 1),
        "overlap": bool(config.zero.overlap_comm),
        "max_grad_norm": max_grad_norm(config),
        "master_weights": config.has_masters,
        **_scale(config),
        **_reduction(config),
    }
    if config.bf16.enabled:
        options["nonfinite"] = "skip" if config.bf16.check_grad_overflow else "step"
    if config.offload.device == "cpu":
        options["offload"] = "cpu"
    return {name: value for name, value in options.items() if value is not None}


def max_grad_norm(config: Config) -> float | None:
    """The largest norm: infinite where a norm is wanted and nothing clipped; None where none is."""
    if config.rest.gradient_clipping > 0:
        return config.rest.gradient_clipping
    return float("inf") if config.zero.compute_grad_norm else None


def _scale(config: Config) -> Mapping[str, Any]:
    fp16 = config.fp16
    if not fp16.enabled:
        return {}
    if not fp16.is_dynamic:
        return {"loss_scale": float(fp16.loss_scale)}
    return {"loss_scale": loss_scale_policy(config)}


def loss_scale_policy(config: Config) -> DynamicLossScale:
    """DeepSpeed's dynamic scale, which grows a step later at first, and after an overflow, than later on."""
    fp16 = config.fp16
    return DynamicLossScale(
        initial=2.0**fp16.initial_scale_power,
        growth_interval=fp16.loss_scale_window,
        first_interval=fp16.loss_scale_window + 1,
        hysteresis=fp16.hysteresis,
        restores_hysteresis=fp16.consecutive_hysteresis,
        minimum=float(fp16.min_loss_scale),
    )


def _reduction(config: Config) -> Mapping[str, Any]:
    """How gradients travel and add up."""
    rest, own = config.rest, dtype_named(config.dtype)
    comm = own if rest.communication_data_type is None else dtype_named(rest.communication_data_type)
    if config.zero.stage == 2:
        factor = None if rest.prescale_gradients else rest.gradient_predivide_factor
        return {"grad_comm_dtype": None if comm is own else comm, "gradient_predivide_factor": factor}
    sums = config.data_types.grad_accum_dtype
    return {
        "accumulate_in_fp32": own is not torch.float32 and sums is not None and dtype_named(sums) is torch.float32,
        "hook": None if comm is own else _COMPRESSING[comm],
    }


def shard_built(optimizer: ZeroRedundancyOptimizer, ddp: DistributedDataParallel, config: Config) -> None:
    """Connect an optimizer that the user has sharded to the model.

    Raises:
        ValueError: if it is of another stage than the configuration, or has another loss scale than it.
    """
    if optimizer.stage != max(config.zero.stage, 1):
        raise ValueError(
            f"Expected a ZeroRedundancyOptimizer of stage {config.zero.stage}, as the configuration says, got one of "
            f"stage {optimizer.stage}. Pass the plain optimizer, which is sharded here."
        )
    if (optimizer.loss_scale is not None) != config.fp16.enabled:
        raise ValueError(
            f"Expected a loss scale exactly if fp16 is enabled, got {optimizer.loss_scale} with fp16.enabled = "
            f"{config.fp16.enabled}. Pass the plain optimizer, which is sharded here."
        )
    optimizer.attach(ddp)


def build_loader(
    dataset: Dataset[Any],
    batch_size: int,
    config: Config,
    device: torch.device,
    *,
    data_sampler: Any = None,
    collate_fn: Callable[..., Any] | None = None,
    workers: int = 0,
) -> DataLoader[Any]:
    """A data loader of this rank's share of a dataset.

    Args:
        dataset: with a length and items.
        batch_size: of a round.
        config: says whether to drop the last, incomplete batch.
        device: of the model.
        data_sampler: None: a `DistributedSampler` that shuffles; its ``set_epoch`` changes the order.
        collate_fn: as for `torch.utils.data.DataLoader`.
        workers: processes that read.
    """
    return DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=data_sampler or DistributedSampler(dataset),
        collate_fn=collate_fn,
        num_workers=workers,
        pin_memory=device.type == "cuda",
        drop_last=config.rest.dataloader_drop_last,
    )
