"""Hook builders with torch's signatures, and construction of an optimizer with its hook on a DDP model."""

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from ddp_zero.core.comm import Agreement, Communicator
from ddp_zero.core.ddp import CommHook
from ddp_zero.core.local import Grouping, check_class, check_flags, check_known, group_by_options, instance_in
from ddp_zero.optimizer import ZeroRedundancyOptimizer, engine_of, shard_of
from ddp_zero.options import PartitionName
from ddp_zero.values import the_ddp_model_in


def hook_with_zero_step(
    hook: CommHook | None, ddp: DistributedDataParallel, zero: ZeroRedundancyOptimizer, shard_buckets: bool = False
) -> CommHook:
    """Extend a DDP communication hook by the optimizer step, taken once DDP has passed the last bucket.

    Backward computes without interruption; then buckets are stepped in order as their reductions complete, and each
    bucket's all-gather overlaps with the step of the next. When ``backward()`` returns, every rank has the new
    parameters.

    Args:
        hook: the reduction to extend, such as ``allreduce_hook``; it returns a future of the averaged bucket. None for
            DDP's own reduction, which ``allreduce_hook`` matches bit for bit only at 2, 4, 8, ... ranks. Must be None
            in stage 2, which has its own reduction.
        ddp: the model. Register the result on it: ``ddp.register_comm_hook(state, result)``.
        zero: an optimizer over the model's parameters, built with ``overlap_with_ddp=True`` or ``stage=2``. In stage 2
            without overlap the hook only reduces, and ``zero.step()`` takes the step.
        shard_buckets: True to spread each bucket over the ranks; False to assign it whole to the least loaded rank.

    Returns:
        The hook for ``ddp.register_comm_hook``; its ``state`` is passed to ``hook``.

    Raises:
        ValueError: if ``zero`` was not built for overlap, shares no parameter or not all ranks with ``ddp``, or already
            has a hook.
    """
    return engine_of(zero).attachment.hook_by_hand(ddp, hook, shard_buckets, interleaved=False)


def hook_with_zero_step_interleaved(
    hook: CommHook | None, ddp: DistributedDataParallel, zero: ZeroRedundancyOptimizer, shard_buckets: bool = False
) -> CommHook:
    """As `hook_with_zero_step`, but each bucket is stepped while backward computes the gradients of the next.

    Bucket *i* is stepped when DDP passes bucket *i + 1* to the hook, so that its reduction overlaps with backward.

    Args:
        hook: see `hook_with_zero_step`.
        ddp: see `hook_with_zero_step`.
        zero: see `hook_with_zero_step`.
        shard_buckets: see `hook_with_zero_step`.

    Returns:
        The hook for ``ddp.register_comm_hook``.

    Raises:
        ValueError: as `hook_with_zero_step`.
    """
    return engine_of(zero).attachment.hook_by_hand(ddp, hook, shard_buckets, interleaved=True)


_RENAMED = {"overlap_with_ddp": "Use overlap=.", "process_group": "It is that of the model."}
"""Options of the optimizer that have another name here, or come from the model."""


def _check_not_captured(model: nn.Module) -> None:
    """Refuse forward passes that are CUDA graphs: parameters are about to move, and a graph reads where they were."""
    for name, module in model.named_modules():
        # what `torch.cuda.make_graphed_callables` leaves on a module
        if getattr(module.__dict__.get("forward"), "__module__", None) == "torch.cuda.graphs":
            raise NotImplementedError(
                f"Expected forward passes that are no CUDA graphs, got that of {name!r}: the graph reads parameters "
                "where they are, and the optimizer moves them into flat storage. Build it with "
                "parameters_as_bucket_view=False, partition='parameters'. [ZERO-124]"
            )


def build_with_hook(
    ddp: nn.Module,
    optimizer_class: Callable[..., Optimizer] | Optimizer,
    params: ParamsT | Grouping | None = None,
    *,
    overlap: bool = True,
    hook: CommHook | None = None,
    hook_state: Any = None,
    interleaved: bool | None = None,
    shard_buckets: bool = True,
    parameters_as_bucket_view: bool = True,
    partition: PartitionName = "auto",
    **options: Any,
) -> ZeroRedundancyOptimizer:
    """Build a sharded optimizer over a DDP model's named parameters, and register its hook on the model.

    `ddp_zero.shard_optimizer` documents arguments and errors.
    """
    model = the_ddp_model_in(ddp)
    device = next((param.device for param in model.parameters()), None)
    with Agreement(Communicator(model.process_group, device=device), "shard_optimizer"):
        if hook is not None and not callable(hook):
            raise TypeError(f"Expected hook to be a communication hook or None, got {hook!r:.80}. [ZERO-103]")
        check_flags(interleaved=False if interleaved is None else interleaved, shard_buckets=shard_buckets)
        check_flags(overlap=overlap)
        for name, remedy in _RENAMED.items():
            if name in options:
                raise TypeError(f"Expected an option of shard_optimizer, got {name!r}. {remedy} [ZERO-104]")
        if parameters_as_bucket_view:
            _check_not_captured(model)
        instance = instance_in(None, optimizer_class)
        kind: Any = optimizer_class if instance is None else instance.kind
        check_class(kind)
        known = options_of_hook()
        check_known([name for name in options if name not in known], kind, known)
        named = list(model.named_parameters())
        if instance is not None:
            instance.check_params(params)
            groups: Any = instance.groups
        else:
            groups = named if params is None else group_by_options(named, params) if callable(params) else params
    zero = ZeroRedundancyOptimizer(
        groups,
        instance or optimizer_class,
        process_group=model.process_group,
        overlap_with_ddp=overlap,
        parameters_as_bucket_view=parameters_as_bucket_view,
        partition=partition,
        **options,
    )
    shard_of(zero).table.learn_names(named)
    zero.attach(model, hook=hook, hook_state=hook_state, interleaved=interleaved, shard_buckets=shard_buckets)
    if instance is not None:
        instance.retire(zero)
    return zero


def door_parameters() -> dict[str, inspect.Parameter]:
    """The parameters of `build_with_hook`, and the options of `ZeroRedundancyOptimizer` that it passes on."""
    own, of_class = (dict(inspect.signature(one).parameters) for one in (build_with_hook, ZeroRedundancyOptimizer))
    del own["options"]
    handed_on = {
        name: one if name == "defaults" else one.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, one in of_class.items()
        if name not in (*own, *_RENAMED)
    }
    return {**own, **handed_on}


def options_of_hook() -> list[str]:
    """Names of the options of `build_with_hook`, without options of an optimizer class."""
    return [name for name in door_parameters() if name not in ("ddp", "params", "defaults")]
