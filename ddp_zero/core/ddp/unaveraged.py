"""Before a step: have ranks compare gradients that no reduction is known to have averaged.

DDP leaves a rank's own gradients in ``param.grad`` after backward passes under ``no_sync()`` or around its forward
pass, and those for parameters that it does not reduce: they were frozen when the model was wrapped, were replaced or
converted since, or are not part of it. Users may average such gradients themselves, or compute them from something
that does not depend on data. Where no hook sees the reductions, gradients are compared in the first steps and then
less and less often all the same: not every way around DDP can be seen.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

from torch import Tensor

from ddp_zero.core.comm.tracing import warn
from ddp_zero.core.ddp.forward_passes import ForwardPasses
from ddp_zero.core.ddp.preconditions import check_none_unused
from ddp_zero.core.local.memory import bit_sum_of
from ddp_zero.core.step.coupling import is_checked_step
from ddp_zero.core.step.rank_shard import Shard
from ddp_zero.values.placeholders import AbsentGradient

_NONE, _EDITED = -1, -2

_ADDED = (
    "a backward pass that DDP has not reduced has added to its averages. Call the wrapped model, not its module, in "
    "every pass, and add up losses before backward()."
)
_DIFFERS = (
    "DDP does not reduce it, as it was frozen when the model was wrapped; or a backward pass around DDP has added to "
    "its average; or it was changed on some ranks alone; or the model's communication hook does not average. Wrap the "
    "model while it is trainable, call the wrapped model in every pass, change gradients alike on every rank, and use "
    "a hook that averages over all ranks."
)
_HOOK = (
    "the communication hook does not average over all ranks in this iteration. Wrap the model again, and call "
    "opt.reset(), opt.zero_grad() and opt.attach(model, hook=...) with the new DDP model and a hook that does in all."
)
_SECOND_PASS = (
    "a second backward pass over a forward pass, which DDP does not reduce, has added to averages. Add up the losses "
    "and call backward() once, or run a forward pass of the DDP model before each backward()."
)
_NO_BUCKET = (
    "DDP does not reduce it, since it was frozen when the model was wrapped or is not part of the model. Wrap the "
    "model again while it is trainable, average its gradient before the step, or freeze it."
)


def check_reduced(shard: Shard, passes: ForwardPasses, *, is_local: bool, marks: Mapping[int, int]) -> None:
    """Before gradients of stage 2 are used: have ranks compare those that no hook has seen reduced.

    A collective only if there are any.

    Args:
        shard: the step.
        passes: the forward passes of the models over the parameters.
        is_local: whether no gradient was reduced since the last step.
        marks: by parameter, see `Gradients.left_local`.

    Raises:
        RuntimeError: on every rank, naming a parameter.
    """
    everything = range(len(shard.table.params))
    if passes.mixes:
        _check_same(shard, everything, _SECOND_PASS)
    elif is_local:
        _check_same(shard, everything, passes.why_not_reduced())
    elif marks:
        wrong = _find_different(shard, everything, [marks.get(index, 0) for index in everything])
        if wrong is not None:
            raise _not_averaged(shard, wrong, _ADDED)
    else:
        check_unreduced(shard)


def check_equal(shard: Shard, passes: ForwardPasses, *, step: int | None, edited: Collection[int]) -> None:
    """Before gradients are used that every rank has: have ranks compare them, unless DDP has averaged them all.

    A collective, but where a reduced pass through DDP was the last and nothing speaks against it. Even then ranks
    compare in the first steps, and less and less often later.

    Args:
        shard: the step.
        passes: the forward passes of the models over the parameters.
        step: the number of the step, in which every rank takes part; None: outside of one ranks compare only gradients
            that are known to be doubtful.
        edited: parameters whose gradient this rank has changed for itself, as an owner.

    Raises:
        RuntimeError: on every rank, naming a parameter; where no DDP model has the parameters, a warning instead.
    """
    params = shard.table.params
    if step is not None and passes.has_warned and not passes.has_seen and step & (step - 1):
        return
    if passes.mixes:
        why = _SECOND_PASS
    elif passes.last_is_local or (step is not None and not passes.has_seen):
        why = passes.why_not_reduced()
    elif shard.binding.layout is None and passes.models.reduce_fewer_than(sum(param.requires_grad for param in params)):
        why = _NO_BUCKET
    elif step is None:
        return check_unreduced(shard)
    elif passes.may_add_local:
        why = _ADDED
    elif not shard.binding.is_current and passes.models.find_converted() is not None:
        why = passes.why_not_reduced()
    elif is_checked_step(step):
        why = _DIFFERS if passes.models.find_converted() is None else passes.why_not_reduced()
    else:
        return check_unreduced(shard)
    wrong = _find_different(shard, range(len(params)), _marks(shard, range(len(params)), edited))
    if wrong is None:
        return
    if any(found for (found,) in shard.everyone.all_gather_ints([passes.know_any_over(params)])):
        raise _not_averaged(shard, wrong, why)
    warn(
        f"Expected averaged gradients, got this rank's own gradient of {shard.table.label(wrong)} in step {step} "
        f"({shard.comm.name(shard.comm.group_rank)}), and no DDP model of this process has the parameters: each is "
        "stepped by the gradient of its owner alone, as by torch's ZeroRedundancyOptimizer. Wrap the model in "
        "DistributedDataParallel and call the wrapped model, or average gradients before opt.step(). If this is "
        "meant, as where gradients are reduced to their owners alone, say so: warnings.filterwarnings('ignore', "
        "'.*ZERO-325'). [ZERO-325]"
    )
    passes.has_warned = True  # unless warnings are errors: then nothing is stepped


def check_hook(shard: Shard, arrived: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Before the step: have ranks compare gradients that a hook of the user's has reduced. A collective.

    Args:
        shard: the step.
        arrived: parameters and their reduced gradients, the same parameters on every rank.

    Raises:
        RuntimeError: on every rank, naming a parameter.
    """
    index_of = shard.table.index_of
    marks = {index_of[param]: bit_sum_of(grad) for param, grad in arrived if param in index_of}
    wrong = _find_different(shard, list(marks), list(marks.values()))
    if wrong is not None:
        raise _not_averaged(shard, wrong, _HOOK)


def check_finalized(shard: Shard, passes: ForwardPasses) -> None:
    """Before gradients are used: check that DDP has ended the last backward pass that it reduces."""
    ddp = passes.models.find_unfinished()
    if ddp is not None:
        where = shard.comm.name(shard.comm.group_rank)
        passes.models.check_none_lost(where)
        check_none_unused(ddp, shard.table, (), where)
        raise RuntimeError(
            f"Gradients were not averaged: DDP has not ended the last backward pass ({where}), because a parameter has "
            "got no gradient or an exception interrupted the pass. If a parameter is not used, wrap the model with "
            "find_unused_parameters=True, or freeze the parameter before wrapping it. [ZERO-301]"
        )


def check_unreduced(shard: Shard) -> None:
    """Have ranks compare gradients of parameters that are in none of DDP's buckets. A collective if there are any.

    Raises:
        RuntimeError: on every rank, naming a parameter.
    """
    if shard.binding.not_reduced:
        _check_same(shard, shard.binding.not_reduced, _NO_BUCKET)


def _check_same(shard: Shard, indices: Sequence[int], why: str, edited: Collection[int] = ()) -> None:
    """Check that the gradients of some parameters are the same on every rank. A collective.

    Args:
        shard: the step.
        indices: the parameters, the same on every rank; having no gradient on any rank counts as the same. Of frozen
            ones, ranks may have dropped theirs.
        why: why they may not be averaged, and the remedy, for the message.
        edited: those that this rank has changed for itself: they are not compared with the others.

    Raises:
        RuntimeError: on every rank, naming the first parameter whose gradients differ.
    """
    wrong = _find_different(shard, indices, _marks(shard, indices, edited))
    if wrong is not None:
        raise _not_averaged(shard, wrong, why)


def _marks(shard: Shard, indices: Sequence[int], edited: Collection[int]) -> list[int]:
    params = shard.table.params
    return [_EDITED if index in edited else _mark(params[index].grad) for index in indices]


def _find_different(shard: Shard, indices: Sequence[int], marks: Sequence[int]) -> int | None:
    """The first of some parameters for which ranks have different marks, the same answer on each. A collective."""
    every = shard.everyone.all_gather_ints(marks)
    ignored = [{_EDITED} if shard.table.params[index].requires_grad else {_EDITED, _NONE} for index in indices]
    columns = zip(indices, ignored, *every, strict=True)
    return next((index for index, without, *marks in columns if len({*marks} - without) > 1), None)


def _not_averaged(shard: Shard, index: int, why: str) -> RuntimeError:
    comm = shard.everyone
    return RuntimeError(
        f"Expected averaged gradients, got this rank's own gradient of {shard.table.label(index)} "
        f"({comm.name(comm.group_rank)}): {why} [ZERO-302]"
    )


def _mark(grad: Tensor | None) -> int:
    if grad is None or (isinstance(grad, AbsentGradient) and not grad.zeroed):
        return _NONE
    return 0 if isinstance(grad, AbsentGradient) else bit_sum_of(grad)
