"""The ways to overlap the step with backward: two hook builders with torch's signatures, and one line for all."""

from collections.abc import Callable
from typing import Any

from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ddp_zero.gradients import CommHook
from ddp_zero.optimizer import ZeroRedundancyOptimizer

_INTERLEAVED_LAG = 1


def hook_with_zero_step(
    hook: CommHook | None, ddp: DistributedDataParallel, zero: ZeroRedundancyOptimizer, shard_buckets: bool = False
) -> CommHook:
    """Extend a DDP communication hook by the optimizer step, taken when the last bucket has arrived.

    Backward computes without interruption; then buckets are stepped in order as their reductions resolve, and sent
    while the next one is stepped. When ``backward()`` returns, every rank has the new parameters.

    Args:
        hook: the reduction to extend, such as ``allreduce_hook``; it returns a future of the averaged bucket. None: the
            reduction of DDP without a hook, whose last bits ``allreduce_hook`` gives only at 2, 4, 8 ... ranks; in
            stage 2 the library's own, and nothing else.
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
    return zero._build_hook(ddp, hook, split=shard_buckets, lag=None)


def hook_with_zero_step_interleaved(
    hook: CommHook | None, ddp: DistributedDataParallel, zero: ZeroRedundancyOptimizer, shard_buckets: bool = False
) -> CommHook:
    """As `hook_with_zero_step`, but each bucket is stepped while backward computes the gradients of the next.

    Bucket *i* is stepped when bucket *i + 1* arrives, by when its reduction has had time to resolve.
    """
    return zero._build_hook(ddp, hook, split=shard_buckets, lag=_INTERLEAVED_LAG)


def shard_optimizer(
    ddp: DistributedDataParallel,
    optimizer_class: Callable[..., Optimizer],
    *,
    stage: int = 1,
    overlap: bool = True,
    hook: CommHook | None = None,
    hook_state: Any = None,
    interleaved: bool | None = None,
    shard_buckets: bool = True,
    parameters_as_bucket_view: bool = True,
    **defaults: Any,
) -> ZeroRedundancyOptimizer:
    """Shard an optimizer over the ranks of a DDP model and step it inside backward.

    Builds the optimizer over the model's named parameters, builds the hook and registers it. The training loop stays as
    it was: ``loss.backward(); opt.step(); opt.zero_grad()``.

    Args:
        ddp: the model, without a communication hook.
        optimizer_class: the class to shard, such as `torch.optim.AdamW`.
        stage: 1 shards optimizer state; 2 gradients too, of a model wrapped with ``gradient_as_bucket_view=True``.
        overlap: step inside backward, unless an option needs all gradients first. If False, ``opt.step()`` takes the
            step: between it and backward, gradients can be looked at, in stage 2 on the rank that owns them.
        hook: the reduction, such as ``fp16_compress_hook``; None: that of DDP without a hook.
        hook_state: handed to ``hook``; None: the model's process group, which the hooks of torch take.
        interleaved: step buckets while backward still computes, see `hook_with_zero_step_interleaved`; None: in
            stage 2, where it spares the memory of the averaged gradients.
        shard_buckets: spread each bucket over the ranks.
        parameters_as_bucket_view: see `ZeroRedundancyOptimizer`.
        **defaults: options for ``optimizer_class``, and for `ZeroRedundancyOptimizer`: ``max_grad_norm``,
            ``norm_type``, ``nonfinite``, ``loss_scale``, ``master_weights``, ``sync``, ``grad_comm_dtype``,
            ``gradient_predivide_factor``.

    Raises:
        TypeError: for another model than DDP's.
        ValueError: for another stage, a model that does not fit it, or as `ZeroRedundancyOptimizer` does.
    """
    if not isinstance(ddp, DistributedDataParallel):
        raise TypeError(f"Expected a DistributedDataParallel model, got {type(ddp).__name__}. Wrap the model first.")
    zero = ZeroRedundancyOptimizer(
        ddp.named_parameters(),
        optimizer_class,
        process_group=ddp.process_group,
        parameters_as_bucket_view=parameters_as_bucket_view,
        overlap_with_ddp=overlap,
        stage=stage,
        **defaults,
    )
    if not overlap and stage == 1:
        zero._know_model(ddp)
        if hook is None and not zero._decision.watch.is_on:
            return zero  # DDP's own reduction, and nobody will ask for more
        ddp.register_comm_hook(ddp.process_group if hook_state is None else hook_state, zero._build_watch(ddp, hook))
        return zero
    is_interleaved = stage == 2 if interleaved is None else interleaved
    build = hook_with_zero_step_interleaved if is_interleaved else hook_with_zero_step
    state = ddp.process_group if hook_state is None else hook_state
    ddp.register_comm_hook(state, build(hook, ddp, zero, shard_buckets))
    return zero
