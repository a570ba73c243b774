"""Checks that gradients are averages if no reduction is known to have averaged them.

DDP leaves a rank's own gradients in ``param.grad`` after backward passes under ``no_sync()``, and those of parameters
that it does not reduce: they were frozen when the model was wrapped, or are not part of it. Users may average such
gradients themselves, or compute them from something that does not depend on data. So ranks compare them.
"""

from collections.abc import Sequence

from ddp_zero.core.backward.forward_passes import ForwardPasses
from ddp_zero.core.backward.preconditions import check_none_unused
from ddp_zero.core.local.memory import sum_of_bits
from ddp_zero.core.local.placeholders import is_present
from ddp_zero.core.step.sharded_step import ShardedStep

_NONE = -1

_NO_PASS = (
    "no backward pass since was reduced. Run the last backward pass before opt.step() outside ddp.no_sync() and "
    "through the DDP model, or drop left-over gradients with opt.zero_grad()."
)
_SECOND_PASS = (
    "a second backward pass over a forward pass, which DDP does not reduce, has added to averages. Add up the losses "
    "and call backward() once, or run a forward pass of the DDP model before each backward()."
)
_NO_BUCKET = (
    "DDP does not reduce it, since it was frozen when the model was wrapped or is not part of the model. Wrap the "
    "model again while it is trainable, average its gradient before the step, or freeze it."
)


def check_reduced(sharded: ShardedStep, passes: ForwardPasses, *, is_local: bool, has_hook: bool) -> None:
    """Before gradients are used: have ranks compare those that no reduction is known to have averaged.

    A collective only if there are any.

    Args:
        sharded: the step.
        passes: the forward passes of the models over the parameters.
        is_local: whether no gradient was reduced since the last step.
        has_hook: whether the optimizer's hook has seen which parameters DDP reduces.

    Raises:
        RuntimeError: on every rank, naming a parameter.
    """
    params = sharded.table.params
    if passes.mixes:
        _check_same(sharded, range(len(params)), _SECOND_PASS)
    elif is_local:
        _check_same(sharded, range(len(params)), _NO_PASS)
    elif has_hook:
        check_unreduced(sharded)
    elif passes.reduces_fewer_than(sum(param.requires_grad for param in params)):
        _check_same(sharded, range(len(params)), _NO_BUCKET)


def check_finalized(sharded: ShardedStep, passes: ForwardPasses) -> None:
    """Before gradients are used: check that DDP has ended the last backward pass that it reduces.

    Raises:
        RuntimeError: if it still waits for the gradient of a parameter.
    """
    ddp = passes.unfinished()
    if ddp is not None:
        where = sharded.comm.name(sharded.comm.group_rank)
        check_none_unused(ddp, sharded.table, (), where)
        raise RuntimeError(
            f"Expected averaged gradients, got a backward pass that DDP has not ended ({where}): a parameter has got "
            "no gradient, or an exception has interrupted the pass. If a parameter is not used, wrap the model with "
            "find_unused_parameters=True, or freeze the parameter before wrapping it."
        )


def check_unreduced(sharded: ShardedStep) -> None:
    """Have ranks compare gradients of parameters that are in none of DDP's buckets. A collective if there are any.

    Raises:
        RuntimeError: on every rank, naming a parameter.
    """
    if sharded.binding.not_reduced:
        _check_same(sharded, sharded.binding.not_reduced, _NO_BUCKET)


def _check_same(sharded: ShardedStep, indices: Sequence[int], why: str) -> None:
    """Check that the gradients of some parameters are the same on every rank. A collective.

    Args:
        sharded: the step.
        indices: the parameters, the same on every rank; having no gradient on any rank counts as the same.
        why: why they may not be averaged, and the remedy, for the message.

    Raises:
        RuntimeError: on every rank, naming the first parameter whose gradients differ.
    """
    table, comm = sharded.table, sharded.everyone
    grads = [table.params[index].grad for index in indices]
    mine = [_NONE if grad is None or not is_present(grad) else int(sum_of_bits(grad.detach())) for grad in grads]
    every = comm.all_gather_ints(mine)
    wrong = next((index for index, *marks in zip(indices, *every, strict=True) if len(set(marks)) > 1), None)
    if wrong is not None:
        raise RuntimeError(
            f"Expected averaged gradients, got this rank's own for {table.label(wrong)} "
            f"({comm.name(comm.group_rank)}): {why}"
        )
