"""The one-line entry points: `shard_optimizer` for a DDP model, on any ranks, and `wrap` for a plain module."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from ddp_zero.core.ddp import CommHook, bucket_options
from ddp_zero.core.local import Cost, Grouping
from ddp_zero.core.plan import MAX_BYTE_IMBALANCE
from ddp_zero.ddp_hooks import build_with_hook, door_parameters
from ddp_zero.loss_scale import DynamicLossScale
from ddp_zero.optimizer import ZeroRedundancyOptimizer
from ddp_zero.options import PARALLEL_KEYS, PARALLEL_OPTIONS, Nonfinite, Offload, PartitionName, Sync

if TYPE_CHECKING:
    from ddp_zero.parallel.names import GlobalNames
    from ddp_zero.parallel.optimizer import ParallelOptimizer


@overload
def shard_optimizer(
    ddp: nn.Module,
    optimizer_class: Callable[..., Optimizer] | Optimizer,
    params: Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Grouping | None = None,
    *,
    stage: int = 1,
    overlap: bool = True,
    hook: CommHook | None = None,
    hook_state: Any = None,
    interleaved: bool | None = None,
    shard_buckets: bool = True,
    parameters_as_bucket_view: bool = True,
    grad_comm_dtype: torch.dtype | None = None,
    gradient_predivide_factor: float | None = None,
    max_grad_norm: float | None = None,
    norm_type: float = 2.0,
    nonfinite: Nonfinite | None = None,
    loss_scale: DynamicLossScale | float | None = None,
    master_weights: bool = False,
    sync: Sync = "step",
    accumulate_in_fp32: bool = False,
    partition: PartitionName = "auto",
    shard_group: ProcessGroup | None = None,
    offload: Offload | Literal["cpu"] | None = None,
    cost: Cost = "auto",
    max_byte_imbalance: float = MAX_BYTE_IMBALANCE,
    mesh: None = None,
    data_parallel_group: None = None,
    **defaults: Any,
) -> ZeroRedundancyOptimizer: ...


@overload
def shard_optimizer(
    ddp: nn.Module,
    optimizer_class: Callable[..., Optimizer] | Optimizer,
    params: ParamsT | Grouping | None = None,
    *,
    mesh: DeviceMesh,
    data_parallel_dim: str | Sequence[str],
    pipeline_dim: str | None = None,
    global_names: "GlobalNames | None" = None,
    **options: Any,
) -> "ParallelOptimizer": ...


@overload
def shard_optimizer(
    ddp: nn.Module,
    optimizer_class: Callable[..., Optimizer] | Optimizer,
    params: ParamsT | Grouping | None = None,
    *,
    data_parallel_group: ProcessGroup,
    global_names: "GlobalNames | None" = None,
    **options: Any,
) -> "ParallelOptimizer": ...


@overload
def shard_optimizer(
    ddp: nn.Module,
    optimizer_class: Callable[..., Optimizer] | Optimizer,
    params: Iterable[dict[str, Any]],
    **options: Any,
) -> "ZeroRedundancyOptimizer | ParallelOptimizer": ...


def shard_optimizer(
    ddp: nn.Module, optimizer_class: Callable[..., Optimizer] | Optimizer, params: Any = None, **options: Any
) -> "ZeroRedundancyOptimizer | ParallelOptimizer":
    """Shard an optimizer over the ranks of a DDP model and step it inside backward.

    Builds the optimizer over the model's named parameters, builds the hook and registers it. The training loop stays
    unchanged: ``loss.backward(); opt.step(); opt.zero_grad()``. With ``mesh=``, groups with a ``process_group`` or
    distributed tensors, where ranks hold different parameters, it is a `ddp_zero.parallel.ParallelOptimizer`.

    Args:
        ddp: the model, without a communication hook, or a module that holds it, as ``torch.compile(ddp)`` does.
        optimizer_class: the class to shard, such as `torch.optim.AdamW`, or an optimizer that was built already, whose
            groups, options and state are taken over; then ``params`` and options of the class are left out. Do not step
            it afterwards.
        params: parameters or parameter groups, named or not; or a function of a name and the parameter that returns the
            options of its group, or None for the class's own; equal options form a group. None: all parameters. Among
            the options of a group, ``optimizer_class`` is a class of its own: Muon for matrices beside AdamW.
        stage: 1 shards optimizer state; 2 also shards gradients.
        overlap: step inside backward, unless an option needs all gradients first. If False, ``opt.step()`` takes the
            step; before it, gradients can be inspected, in stage 2 on their owner.
        hook: the reduction, such as ``fp16_compress_hook``; None for DDP's own.
        hook_state: passed to ``hook``; None for the model's process group.
        interleaved: step buckets while backward computes, see `hook_with_zero_step_interleaved`; None: in stage 2 only.
        shard_buckets: spread each bucket over the ranks.
        **options: further options of `ZeroRedundancyOptimizer` (``parameters_as_bucket_view``, ``grad_comm_dtype``,
            ``gradient_predivide_factor``, ``max_grad_norm``, ``norm_type``, ``nonfinite``, ``loss_scale``,
            ``master_weights``, ``sync``, ``accumulate_in_fp32``, ``partition``, ``shard_group``, ``offload``, ``cost``,
            ``max_byte_imbalance``) and of
            `ddp_zero.parallel.ParallelOptimizer` (``mesh``, ``data_parallel_dim``, ``pipeline_dim``,
            ``data_parallel_group``, ``global_names``); all other options go to ``optimizer_class``.

    Returns:
        The optimizer, whose hook is registered on the model.

    Raises:
        TypeError: for a model that neither is nor holds a DDP model, a wrong type, or an unknown option.
        ValueError: for several DDP models, a model that does not fit, or as `ZeroRedundancyOptimizer`.
    """
    asked = {name: value for name in PARALLEL_OPTIONS if (value := options.pop(name, None)) is not None}
    if not asked and not _is_parallel(params, ddp):
        return build_with_hook(ddp, optimizer_class, params, **options)
    from ddp_zero.parallel.optimizer import ParallelOptimizer  # late: it loads torch's distributed tensors

    known = door_parameters()  # a default differs between members: only options that are not the default are passed
    given = {name: value for name, value in options.items() if name not in known or known[name].default is not value}
    kind: Any = optimizer_class  # checked there
    return ParallelOptimizer(ddp, kind, params, **given, **asked)


def _is_parallel(params: object, model: object) -> bool:
    """True if groups in a list name the ranks of their parameters, or a model has distributed tensors."""
    groups = [one for one in params if isinstance(one, Mapping)] if isinstance(params, list | tuple) else []
    if any(key in group for group in groups for key in PARALLEL_KEYS):
        return True
    return isinstance(model, nn.Module) and any(hasattr(param, "device_mesh") for param in model.parameters())


shard_optimizer.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # every option, for `help()`
    list(door_parameters().values()), return_annotation="ZeroRedundancyOptimizer | ParallelOptimizer"
)


def wrap(
    module: nn.Module,
    optimizer_class: Callable[..., Optimizer] | Optimizer,
    *,
    ddp: Mapping[str, Any] | None = None,
    bucket_mb: float | None = None,
    **options: Any,
) -> tuple[DistributedDataParallel, ZeroRedundancyOptimizer]:
    """Wrap a module in `DistributedDataParallel` and shard an optimizer over its ranks.

    The model gets ``gradient_as_bucket_view=True``. A collective, as is the construction of DDP.

    Args:
        module: the model, not wrapped, on the device where it trains.
        optimizer_class: the class to shard, such as `torch.optim.AdamW`, or an optimizer over the module's parameters,
            see `shard_optimizer`.
        ddp: options of `DistributedDataParallel`, such as ``{"find_unused_parameters": True}``; they take precedence.
        bucket_mb: the size of buckets in MiB; gradients in stage 2 need three. None: DDP's, 1 for the first
            and 25 for all others. It is passed as ``bucket_cap_mb_list``, which holds from the first iteration on;
            where this version of DDP has no such list, DDP's first iteration has a single bucket of all parameters in
            stage 1.
        **options: options of `shard_optimizer`, and options for ``optimizer_class``.

    Returns:
        The wrapped model and its optimizer.

    Raises:
        TypeError: for a module that is already wrapped, or as `shard_optimizer` does.
        ValueError: as `shard_optimizer` does.
    """
    if isinstance(module, DistributedDataParallel) or not isinstance(module, nn.Module):
        raise TypeError(
            f"Expected a module that is not wrapped yet, got {type(module).__name__}. Call shard_optimizer(model, "
            "optimizer_class, ...) for a model that is. [ZERO-201]"
        )
    given: dict[str, Any] = dict(ddp or {})
    caps = {} if "bucket_cap_mb" in given else bucket_options(bucket_mb)
    model = DistributedDataParallel(module, **(dict(gradient_as_bucket_view=True) | caps | given))
    return model, build_with_hook(model, optimizer_class, **options)
