"""Checks that the hook can step an optimizer in a model's backward, before anything depends on it."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ddp_zero.core.ddp.reducer import (
    built_in_hook,
    finds_unused,
    has_python_reducer,
    in_buckets,
    is_finalized,
    is_finalized_by_hand,
    landed_gradients,
    localized_parameters,
    reduced_parameters,
)
from ddp_zero.core.ddp.registered_hook import free_place, has_hook, held_hooks
from ddp_zero.core.local.parameters import ParameterTable
from ddp_zero.core.step.rank_shard import Shard

WRAPPED_AGAIN = "call opt.reset() and opt.attach(model) with the new DDP model, and keep no reference to the old one."
"""The remedy, between two steps, if a module was wrapped again."""


def check_torch(needs: str, missing: Sequence[str]) -> None:
    """Check that torch lacks none of the names that a mode needs; RuntimeError, before any training."""
    if missing:
        raise RuntimeError(
            f"Expected a PyTorch with all that {needs} on, got {torch.__version__}, which lacks it: "
            f"{'; '.join(missing)}. Install one of the versions in docs/status.md, such as torch==2.13.0. [ZERO-910]"
        )


def gradients_of_dropped(where: str) -> RuntimeError:
    """The error for gradients of a DDP model that is gone, as a reference to its reducer brings them."""
    return RuntimeError(
        f"Expected gradients of the DDP model that has the optimizer, got gradients of a dropped one ({where}). If a "
        f"reference to its reducer was kept, use the new model's. If the module was wrapped again, {WRAPPED_AGAIN} "
        "[ZERO-208]"
    )


def check_can_sync(sync: str, as_views: bool) -> None:
    """Check that ``sync="forward"`` has flat storage, in which parameters can arrive after the step."""
    if sync == "forward" and not as_views:
        raise ValueError(
            "sync='forward' needs parameters_as_bucket_view=True, got False: parameters in flight would need copies "
            "of all of them. Pass parameters_as_bucket_view=True, or sync='step'. [ZERO-105]"
        )


def check_has_no_hook(takes_hook: bool, has_hook: bool, may_be_replaced: bool) -> None:
    """Check that an optimizer can be given a hook."""
    if not takes_hook:
        raise ValueError(
            "This optimizer steps in step() and takes no communication hook. Build it with overlap_with_ddp=True, "
            "stage=2 or accumulate_in_fp32=True, or do not attach it. [ZERO-205]"
        )
    if has_hook and not may_be_replaced:
        raise ValueError(
            "This optimizer already has a communication hook. Build one hook per optimizer. If the module was wrapped "
            f"again, {WRAPPED_AGAIN} [ZERO-205]"
        )


def check_is_free(ddp: DistributedDataParallel, shares: Collection[Tensor] | None) -> None:
    """Check that a hook can be registered on a model, or that further parameters of it can be taken.

    Args:
        ddp: the model.
        shares: parameters that no other optimizer may have, if optimizers can share the model; else None.
    """
    for holder in [hook.holder for hook in held_hooks(ddp)]:
        assert holder is not None, "held"
        if shares is None or any(param in shares for param in holder.params()):
            raise ValueError(
                f"This DDP model already has an optimizer: {holder}, which still exists. To train by this one instead, "
                "call earlier.detach() first; or drop it and all that holds it, such as its scheduler. To train by "
                "both, build this one with overlap=False in stage 1. Several optimizers of stage 2 share a model if "
                "none has parameters of another, and no hook is registered by hand. [ZERO-206]"
            )
    if shares is not None:
        return
    check_hands_over_buckets(ddp)
    # a place that was left is in the reducer, which takes one hook
    if has_hook(ddp) or (built_in_hook(ddp) is not None and free_place(ddp) is None):
        raise ValueError(
            "This DDP model already has a communication hook, and DDP takes only one. Pass a reduction of your own as "
            "hook=, instead of registering it, or wrap the model again; without mixed_precision=, which registers one. "
            "Several optimizers of stage 2 share a model if opt.attach(ddp) is called for each, and no hook is "
            "registered by hand. [ZERO-206]"
        )


def check_model(ddp: DistributedDataParallel, shard: Shard) -> None:
    """Check that an optimizer can be stepped by the hook of a model.

    Raises:
        TypeError: if it is not a DDP model.
        NotImplementedError: for a complex parameter, or as `check_finalizes` and `check_keeps_parameters` do.
        ValueError: if optimizer and model have no parameter in common, or are on different ranks.
    """
    if not isinstance(ddp, DistributedDataParallel):
        raise TypeError(f"Expected a DistributedDataParallel model, got {type(ddp).__name__}. [ZERO-201]")
    check_finalizes(ddp)
    check_hands_over_buckets(ddp)
    check_keeps_parameters(ddp, "a communication hook")
    complex_params = [index for param, index in shard.table.index_of.items() if param.is_complex()]
    if complex_params:
        raise NotImplementedError(
            "A communication hook does not support complex parameters such as "
            f"{shard.table.label(complex_params[0])} of dtype {shard.table.params[complex_params[0]].dtype}: DDP "
            "hands hooks real views of complex buckets. Build the optimizer with overlap_with_ddp=False and stage=1. "
            "[ZERO-215]"
        )
    if not any(param in shard.table.index_of for param in ddp.parameters()):
        raise ValueError(
            "This optimizer has none of the parameters of this DDP model. Pass the parameters of the model that you "
            "attach. [ZERO-208]"
        )
    if not shard.everyone.has_same_ranks(ddp.process_group):
        raise ValueError(
            "Expected the optimizer and the DDP model on the same ranks, got different process groups. Pass "
            "process_group=ddp.process_group to the optimizer. [ZERO-207]"
        )


def check_keeps_parameters(ddp: DistributedDataParallel, need: str | None) -> None:
    """Check that forward passes leave a model's parameters in their modules, and that these are whole.

    Args:
        ddp: the model.
        need: why that is needed; None: it is not.
    """
    if need is not None and (names := localized_parameters(ddp)):
        raise NotImplementedError(
            f"Distributed tensors such as {names[0]!r}, which DDP(model, device_mesh=...) takes out of the model, do "
            f"not work with {need}. Pass the model without DDP, as in shard_optimizer(model, ..., mesh=mesh, "
            "data_parallel_dim=...), or set overlap=False in stage 1 and do not clip. [ZERO-215]"
        )


def check_finalizes(ddp: DistributedDataParallel) -> None:
    """Check that DDP publishes gradients at the end of each backward pass, after which the hook acts."""
    if is_finalized_by_hand(ddp):
        raise NotImplementedError(
            "A communication hook does not support require_manual_backward_finalization=True: steps inside backward "
            "and stage 2 rely on gradients being in place when backward() returns. Set it to False, or build the "
            "optimizer with overlap_with_ddp=False and stage=1. [ZERO-215]"
        )


def check_hands_over_buckets(ddp: DistributedDataParallel) -> None:
    """Check that DDP calls communication hooks with its buckets."""
    if has_python_reducer(ddp):
        raise NotImplementedError(
            "A communication hook gets no buckets from a DDP model that was wrapped under "
            "torch._dynamo.config.optimize_ddp='python_reducer'. Set it to True and wrap the module again, or build "
            "the optimizer with overlap_with_ddp=False and stage=1. [ZERO-215]"
        )


def check_can_partition(wrapped: object) -> None:
    """Check that stage 2 can take over the gradients of a model."""
    if wrapped is not None:
        raise ValueError(
            "stage=2 has a reduction of its own and cannot wrap a communication hook. Pass None; to compress "
            "gradients, build the optimizer with grad_comm_dtype=torch.bfloat16 or torch.float16. [ZERO-105]"
        )


def check_bucket_of(ddp: DistributedDataParallel, params: list[Tensor]) -> None:
    """Check that a bucket is one of a model's."""
    own = set(ddp.parameters())
    if any(param not in own for param in params):
        raise RuntimeError(
            "The hook received a bucket with parameters of a different DDP model than it was built for. Pass the same "
            "model to hook_with_zero_step() and call its register_comm_hook(). [ZERO-208]"
        )


def check_none_unused(
    ddp: DistributedDataParallel, table: ParameterTable, arrived: Collection[Tensor], where: str
) -> None:
    """Check that a backward pass of which DDP has not averaged all buckets has left out no parameter."""
    landed = {*arrived, *landed_gradients(ddp)}
    # one that was frozen after the model was wrapped, too, if DDP waits
    awaited = reduced_parameters(ddp) if is_finalized(ddp) else in_buckets(ddp)
    grads = {param: param.grad is not None for _, param in awaited if param in table.index_of}
    unused = [param for param, has_grad in grads.items() if not has_grad and param not in landed]
    if unused and (landed or any(grads.values())) and not finds_unused(ddp):
        raise RuntimeError(
            f"No gradient for {table.label(table.index_of[unused[0]])}, {len(unused)} parameters in all ({where}): DDP "
            "waits for it and has not averaged its bucket. If an exception has interrupted backward, wrap the module "
            f"again. Then {WRAPPED_AGAIN} If the parameter is not used, wrap the model with "
            "find_unused_parameters=True, or freeze the parameter before wrapping it. [ZERO-301]"
        )


def sparse_gradient_error(table: ParameterTable, params: list[Tensor]) -> NotImplementedError:
    """The error for a bucket with a sparse gradient."""
    names = [table.label(table.index_of[param]) for param in params if param in table.index_of]
    return NotImplementedError(
        f"Expected dense gradients, got a sparse gradient of {', '.join(names) or 'a parameter of another optimizer'}. "
        "Build the layer with sparse=False. [ZERO-110]"
    )


def second_gradient_error(ddp: DistributedDataParallel | None, param: Tensor, where: str) -> RuntimeError:
    """The error for a gradient that arrives again in the same pass."""
    names = {} if ddp is None else {member: name for name, member in in_buckets(ddp)}
    return RuntimeError(
        f"Expected one gradient of {names.get(param, 'a parameter')!r} in a backward pass, got two ({where}), as with "
        "reentrant checkpoints over shared parameters: its bucket is already being averaged. Use "
        "checkpoint(..., use_reentrant=False), or static_graph=True if every iteration uses the same parameters. "
        "[ZERO-301]"
    )
