"""Functions that connect an optimizer to DDP: hook builders with torch's signatures, `shard_optimizer` and `wrap`."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup, get_world_size
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from ddp_zero.backward.gradients import CommHook
from ddp_zero.backward.reducer import ddp_takes
from ddp_zero.comm.agreement import Agreement
from ddp_zero.comm.communicator import Communicator
from ddp_zero.engine import INTERLEAVED_LAG
from ddp_zero.local.arguments import Grouping, check_class, check_flags, check_known, grouped
from ddp_zero.local.live_model import the_ddp_model_in
from ddp_zero.loss_scale import DynamicLossScale
from ddp_zero.optimizer import ZeroRedundancyOptimizer
from ddp_zero.options import Offload
from ddp_zero.plan.buckets import bucket_mb
from ddp_zero.plan.elements import CutParameters


def hook_with_zero_step(
    hook: CommHook | None, ddp: DistributedDataParallel, zero: ZeroRedundancyOptimizer, shard_buckets: bool = False
) -> CommHook:
    """Extend a DDP communication hook by the optimizer step, taken when the last bucket has arrived.

    Backward computes without interruption; then buckets are stepped in order as their reductions resolve, each sent
    while the next one is stepped. When ``backward()`` returns, every rank has the new parameters.

    Args:
        hook: the reduction to extend, such as ``allreduce_hook``; it returns a future of the averaged bucket. None: the
            reduction of DDP without a hook, which ``allreduce_hook`` matches bit for bit only at 2, 4, 8 ... ranks.
            Must be None in stage 2, which has its own reduction.
        ddp: the model. Register the result on it: ``ddp.register_comm_hook(state, result)``.
        zero: an optimizer over the model's parameters, built with ``overlap_with_ddp=True`` or ``stage=2``. In stage 2
            without overlap the hook only reduces, and ``zero.step()`` takes the step.
        shard_buckets: spread each bucket over the ranks; if False, a bucket goes whole to the least loaded rank.

    Returns:
        The hook for ``ddp.register_comm_hook``; its ``state`` is handed to ``hook``.

    Raises:
        ValueError: if ``zero`` was not built for overlap, shares no parameter or not all ranks with ``ddp``, or has a
            hook already.
    """
    return zero._engine.build_hook(ddp, hook, split=shard_buckets, lag=None)


def hook_with_zero_step_interleaved(
    hook: CommHook | None, ddp: DistributedDataParallel, zero: ZeroRedundancyOptimizer, shard_buckets: bool = False
) -> CommHook:
    """As `hook_with_zero_step`, but each bucket is stepped while backward computes the gradients of the next.

    Bucket *i* is stepped when bucket *i + 1* arrives, so that its reduction has had time to resolve.
    """
    return zero._engine.build_hook(ddp, hook, split=shard_buckets, lag=INTERLEAVED_LAG)


def shard_optimizer(  # noqa: D417  # options that are those of the class are documented there
    ddp: nn.Module,
    optimizer_class: Callable[..., Optimizer],
    *,
    params: ParamsT | Grouping | None = None,
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
    nonfinite: str | None = None,
    loss_scale: DynamicLossScale | float | None = None,
    master_weights: bool = False,
    sync: str = "step",
    accumulate_in_fp32: bool = False,
    partition: str = "parameters",
    shard_group: ProcessGroup | None = None,
    offload: Offload | str | None = None,
    **defaults: Any,
) -> ZeroRedundancyOptimizer:
    """Shard an optimizer over the ranks of a DDP model and step it inside backward.

    Builds the optimizer over the model's named parameters, builds the hook and registers it. The training loop stays as
    it was: ``loss.backward(); opt.step(); opt.zero_grad()``.

    Args:
        ddp: the model, without a communication hook, or a module that holds it, such as ``torch.compile(ddp)`` or
            what ``Fabric.setup`` returns.
        optimizer_class: the class to shard, such as `torch.optim.AdamW`.
        params: parameters or parameter groups, named or not; or a function of a parameter's name and the parameter that
            returns the options of its group, or None for the class's own; equal options form a group. None: all.
        stage: 1 shards optimizer state; 2 also shards gradients, with ``gradient_as_bucket_view=True`` in the model.
        overlap: step inside backward, unless an option needs all gradients first. If False, ``opt.step()`` takes the
            step: between backward and it, gradients can be inspected, in stage 2 on the rank that owns them.
        hook: the reduction, such as ``fp16_compress_hook``; None: that of DDP without a hook.
        hook_state: handed to ``hook``; None: the model's process group, which torch's hooks expect.
        interleaved: step buckets while backward still computes, see `hook_with_zero_step_interleaved`; None: only in
            stage 2, where it saves the memory of the averaged gradients.
        shard_buckets: spread each bucket over the ranks.
        parameters_as_bucket_view, grad_comm_dtype, gradient_predivide_factor, max_grad_norm, norm_type,
            nonfinite, loss_scale, master_weights, sync, accumulate_in_fp32, partition, shard_group, offload: see
            `ZeroRedundancyOptimizer`.
        **defaults: options for ``optimizer_class``.

    Raises:
        TypeError: for a model that neither is nor holds a DDP model, a wrong type, or an unknown option.
        ValueError: for several DDP models, a model that does not fit, or as `ZeroRedundancyOptimizer` does.
    """
    given = dict(locals())  # arguments by name; those that the optimizer does not take are removed below
    model = the_ddp_model_in(given.pop("ddp"))
    hooks = {name: given.pop(name) for name in ("hook", "hook_state", "interleaved", "shard_buckets")}
    zero = _build(model, hooks, overlap=given.pop("overlap"), options=given.pop("defaults"), **given)
    zero.attach(model, **hooks)
    return zero


def wrap(
    module: nn.Module,
    optimizer_class: Callable[..., Optimizer],
    *,
    ddp: Mapping[str, Any] | None = None,
    **options: Any,
) -> tuple[DistributedDataParallel, ZeroRedundancyOptimizer]:
    """Wrap a module in `DistributedDataParallel` and shard an optimizer over its ranks.

    The model gets ``gradient_as_bucket_view=True``, and buckets of a sixteenth of the parameters, from 1 to 25 MiB, and
    of a quarter of a MiB per rank at least: three of them are what gradients need in stage 2. They are given as
    ``bucket_cap_mb_list``, which holds from the first iteration on; with ``bucket_cap_mb``, which is used where this
    version of DDP has no such list, the first one has a single bucket of all parameters. A collective, as the
    construction of DDP is.

    Args:
        module: the model, not wrapped, on the device where it trains.
        optimizer_class: the class to shard, such as `torch.optim.AdamW`.
        ddp: options of `DistributedDataParallel`, such as ``{"find_unused_parameters": True}``; they take precedence.
        **options: of `shard_optimizer`, among them those of ``optimizer_class``.

    Returns:
        The wrapped model and its optimizer.

    Raises:
        TypeError: for a module that is wrapped already, or as `shard_optimizer` does.
        ValueError: as `shard_optimizer` does.
    """
    if isinstance(module, DistributedDataParallel) or not isinstance(module, nn.Module):
        raise TypeError(
            f"Expected a module that is not wrapped yet, got {type(module).__name__}. Call shard_optimizer(model, "
            "optimizer_class, ...) for a model that is."
        )
    given: dict[str, Any] = dict(ddp or {})
    sizes = [param.nbytes for param in module.parameters() if param.requires_grad]
    sharers = options.get("shard_group")
    group = sharers if isinstance(sharers, ProcessGroup) else given.get("process_group")
    cuts = options.get("partition") == CutParameters.name  # parts are even in a bucket of any size
    cap = bucket_mb(sizes, get_world_size(group), cuts=cuts)
    caps: dict[str, Any] = {"bucket_cap_mb": cap}
    if ddp_takes("bucket_cap_mb_list"):
        caps = {} if "bucket_cap_mb" in given else {"bucket_cap_mb_list": [cap]}
    model = DistributedDataParallel(module, **(dict(gradient_as_bucket_view=True) | caps | given))
    return model, shard_optimizer(model, optimizer_class, **options)


def _build(
    ddp: DistributedDataParallel,
    hooks: dict[str, Any],
    optimizer_class: Callable[..., Optimizer],
    params: ParamsT | Grouping | None,
    overlap: bool,
    options: dict[str, Any],
    **own: Any,
) -> ZeroRedundancyOptimizer:
    """Build the optimizer over groups with the model's parameter names."""
    with Agreement(Communicator(ddp.process_group), "shard_optimizer"):
        _check_hooks(**hooks)
        check_flags(overlap=overlap)
        _check_options(options, optimizer_class)
        named = list(ddp.named_parameters())
        groups = named if params is None else grouped(named, params) if callable(params) else params
    zero = ZeroRedundancyOptimizer(
        groups, optimizer_class, process_group=ddp.process_group, overlap_with_ddp=overlap, **own, **options
    )
    zero._engine.sharded.table.learn_names(named)
    return zero


def _check_hooks(hook: object, hook_state: object, interleaved: object, shard_buckets: object) -> None:
    """Check the arguments for the hook."""
    if hook is not None and not callable(hook):
        raise TypeError(f"Expected hook to be a communication hook or None, got {hook!r:.80}.")
    check_flags(interleaved=False if interleaved is None else interleaved, shard_buckets=shard_buckets)


def _check_options(options: dict[str, Any], optimizer_class: Callable[..., Optimizer]) -> None:
    """Check that no option is misspelt, or passed to `shard_optimizer` under a different name."""
    for name, remedy in {"overlap_with_ddp": "Use overlap=.", "process_group": "It is that of the model."}.items():
        if name in options:
            raise TypeError(f"Expected an option of shard_optimizer, got {name!r}. {remedy}")
    known = [name for name in inspect.signature(shard_optimizer).parameters if name not in ("ddp", "defaults")]
    check_class(optimizer_class)
    check_known(options, optimizer_class, known)
