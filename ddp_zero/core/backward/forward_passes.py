"""Watches the passes of DDP models: whether DDP averages the gradients, and whether a step is due before the next one.

DDP decides in its forward pass whether the backward pass will be reduced. So a pre-hook on DDP itself, where ranks may
communicate as DDP does, notes that decision and lets the optimizer act before anything is computed. Nothing runs here
in evaluation, in copies of the model, or where `torch.compile` compiles DDP itself.

DDP reduces one backward pass for all forward passes since the last one that it has reduced. A second one over the same
forward pass, or over an earlier one, adds this rank's own gradients to averages, without a word. Hooks on what DDP
returns, and on one parameter, tell such a pass from one over something else, as a penalty on the weights, which may be
the same on every rank.

Pipeline schedules of torch decide differently. They run all passes of a step under ``no_sync()`` but the last backward
pass, before which they prepare DDP's reducer themselves. In the first step, and after an evaluation, they also run the
model once to learn the shapes of what it returns: not under ``no_sync()``, so that DDP would average the backward pass
of the first micro-batch, and its average once more with the last one (torch 2.13.0). Stage 1 leaves that to DDP, for
the same bits. Elsewhere averages would be mixed with a rank's own gradients: no forward pass prepares a reduction.

Before a step, gradients that no reduction is known to have averaged are compared between ranks. DDP leaves a rank's own
gradients in ``param.grad`` after backward passes under ``no_sync()`` or around its forward pass, and those for
parameters that it does not reduce: they were frozen when the model was wrapped, were replaced or converted since, or
are not part of it. Users may average such gradients themselves, or compute them from something that does not depend on
data. Where no hook sees the reductions, gradients are compared in the first steps and then less and less often all the
same: not every way around DDP can be seen.
"""

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from ddp_zero.core.backward.preconditions import check_none_unused
from ddp_zero.core.backward.reducer import (
    accumulator_of,
    backward_id,
    count_reduced,
    follows_join,
    has_static_graph,
    is_finalized,
    latest_join,
    models_over,
    prepare_reduction,
    reduced_parameters,
    registered_hooks,
    set_will_reduce,
    will_reduce,
)
from ddp_zero.core.backward.weak_calls import WeakHook, tensors_in, weakly
from ddp_zero.core.comm.tracing import warn
from ddp_zero.core.local.memory import mark_of
from ddp_zero.core.step.coupling import is_looked_at
from ddp_zero.core.step.rank_shard import Shard
from ddp_zero.values.placeholders import AbsentGradient, untouched

BeforeForward = Callable[[DistributedDataParallel], None]


class ForwardPasses:
    """Watches the forward passes of some DDP models.

    Args:
        before: called before each forward pass with gradients; may communicate, and may raise.

    Attributes:
        last_is_local: whether the last forward pass with gradients since `forget` was under ``no_sync()``: its
            gradients are this rank's own.
        is_scheduled: whether a pipeline schedule runs the model, see the module docstring.
        checks: called before each forward pass with gradients; may raise.
        has_seen: whether a pass was seen since `forget`.
        is_told: whether ranks know that they step by gradients of their own, without any DDP model.
        leave_if_dropped: called first, with the model: see `RegisteredHook.leave_if_dropped`.
    """

    def __init__(self, before: BeforeForward) -> None:
        self._before = before
        self._backwards: list[_Backwards] = []
        self._handles: list[RemovableHandle] = []
        self._reduces: int | None = None  # how many of the optimizer's parameters
        self.last_is_local = self.has_seen = self._is_pending = self.is_told = False
        self.is_scheduled = False
        self.checks: list[Callable[[], None]] = []
        self.leave_if_dropped: Callable[[DistributedDataParallel], object] = bool
        self._holds_back = False
        self._reduced_before: bool | None = None
        self._misses = 0
        self._ended: list[object] = []  # `latest_join` of the models

    def find_models(self, params: Sequence[Tensor]) -> bool:
        """Find the DDP models over some parameters, unless one is known, and watch them; not at every call.

        Returns:
            True if models were found.
        """
        if not self._should_search():
            return False
        models = models_over(params)
        if models:  # else one that was dropped stays known: its passes are missed
            self.watch(models)
        return bool(models)

    def watch(self, models: Sequence[DistributedDataParallel]) -> None:
        """Watch these models and no others from now on."""
        self.stop()
        for model in models:
            self._backwards.append(_Backwards(self, model))
            self._handles.append(model.register_forward_pre_hook(WeakHook(self.begin), prepend=True))
            self._handles.append(model.register_forward_hook(WeakHook(self.end), always_call=self._holds_back))
        self.note_join_ended()

    def note_join_ended(self) -> None:
        """Note that no `Join` over the models is active."""
        self._ended = [latest_join(model) for model in self.models]

    def in_join(self, model: DistributedDataParallel) -> bool:
        """True if a `Join` that lists a model has begun since `note_join_ended`."""
        return follows_join(model) and not any(latest_join(model) is one for one in self._ended)

    def follow_schedule(self, holds_back: bool) -> None:
        """Expect the passes of a pipeline schedule from now on.

        Args:
            holds_back: whether no forward pass may prepare a reduction.
        """
        self.is_scheduled, self._holds_back = True, holds_back
        self.watch(self.models)

    def know_any_over(self, params: Sequence[Tensor]) -> bool:
        """True if any DDP model is known, or was, or is found now over some parameters: then it is watched."""
        if not self._backwards:
            self.watch(models_over(params))
        return bool(self._backwards)

    @property
    def models(self) -> list[DistributedDataParallel]:
        """Those that are watched, and alive."""
        return [model for one in self._backwards if (model := one.model()) is not None]

    @property
    def hooks(self) -> list[Callable[[Any, Any], Any]]:
        """The communication hooks that are registered on the models."""
        return [hook for model in self.models for hook in registered_hooks(model)]

    @property
    def holds_back(self) -> bool:
        """True if no forward pass prepares a reduction, see `follow_schedule`."""
        return self._holds_back

    def stop(self) -> None:
        """Watch no model."""
        for handle in self._handles:
            handle.remove()
        for backwards in self._backwards:
            backwards.stop()
        self._backwards.clear()
        self._handles.clear()

    def learn_count(self, params: Sequence[Tensor]) -> None:
        """Count which of these the models reduce, at a moment that is the same on every rank: later, garbage dies.

        DDP tells how many parameters it reduces, not which: all others that it may reduce are taken to be among them.
        """
        own, models = set(params), self.models
        others = [param for model in models for _, param in reduced_parameters(model) if param not in own]
        self._reduces = sum(map(count_reduced, models)) - len(others) if models else None

    def reduces_fewer_than(self, count: int) -> bool:
        """True if the models of the first step, if any was known, reduce fewer of the parameters than this."""
        return self._reduces is not None and self._reduces < count

    def forget(self) -> None:
        """Forget the last pass, after its gradients were used or dropped; not one whose gradients are still to come."""
        self.last_is_local &= self._is_pending
        self.has_seen &= self._is_pending
        for backwards in self._backwards:
            backwards.mixes = backwards.follows = False

    def reset(self) -> None:
        """Forget the last pass, also one that an exception has interrupted before its gradients came."""
        self._is_pending = False
        self.forget()

    @property
    def mixes(self) -> bool:
        """True if a second backward pass over a forward pass has added to the averages of the first."""
        return any(backwards.mixes for backwards in self._backwards)

    @property
    def may_add_local(self) -> bool:
        """True if any backward pass that DDP did not reduce may have followed the one that it did."""
        return any(backwards.follows for backwards in self._backwards)

    def find_converted(self) -> str | None:
        """Name of a parameter whose gradients DDP no longer sees: it has another dtype or device, or had meanwhile."""
        return next((name for backwards in self._backwards if (name := backwards.find_converted()) is not None), None)

    def lost_parameter(self) -> str | None:
        """Why DDP no longer sees the gradients of a parameter, and the remedy, in words; None if it sees all."""
        replaced = next((name for one in self._backwards if (name := one.find_replaced()) is not None), None)
        if replaced is not None:
            return (
                f"{replaced!r} was replaced in the model after it was wrapped, as by load_state_dict(assign=True) or "
                "module.weight = Parameter(...), and DDP and the optimizer hold the old one. Copy the values into the "
                "parameter instead, or wrap the model again and build a new optimizer."
            )
        if (name := self.find_converted()) is not None:
            return (
                f"{name!r} was converted to a different dtype or device after the model was wrapped, as by "
                "model.double(), and DDP no longer sees its gradients. Convert the model before wrapping it."
            )
        return None

    def check_none_lost(self, where: str) -> None:
        """Raise RuntimeError if DDP no longer sees the gradients of a parameter."""
        if (why := self.lost_parameter()) is not None:
            raise RuntimeError(f"Gradients were not averaged ({where}): {why} [ZERO-301]")

    def why_not_reduced(self, after_a_step: bool = False) -> str:
        """Why DDP has not averaged gradients that the last backward passes have left, and the remedy, in words.

        Args:
            after_a_step: whether a step has been taken since the model was wrapped, which may have used them.
        """
        if self.is_scheduled:
            return PASSED_BY
        if after_a_step and not (self.has_seen or self.may_add_local):
            return self.lost_parameter() or _TWICE
        return self.lost_parameter() or (_NO_PASS if self.has_seen else _AROUND)

    def find_unfinished(self) -> DistributedDataParallel | None:
        """A model whose last backward pass has left DDP waiting for gradients; None: there is none."""
        return next((model for model in self.models if not is_finalized(model)), None)

    def note_reduced(self, model: DistributedDataParallel) -> None:
        """Note that a backward pass was reduced; the last one of a schedule reduces the sum of all."""
        self.last_is_local &= not (self.is_scheduled and will_reduce(model))

    def backward_begins(self) -> None:
        """Note that the gradients of the last forward pass arrive."""
        self._is_pending = False

    def prepare_reduction(self, model: DistributedDataParallel, loss: Tensor) -> None:
        """Have DDP reduce the next backward pass, which starts at a loss, whatever its forward pass has prepared."""
        prepare_reduction(model, loss)
        self.last_is_local = False
        for backwards in self._backwards:
            backwards.begin(model, is_reduced=True)

    def begin(self, model: DistributedDataParallel, _: Any) -> None:
        """Note that a forward pass begins, and call ``before``."""
        if torch.is_grad_enabled():
            self.leave_if_dropped(model)
            for check in self.checks:
                check()
            if self._holds_back:
                self._reduced_before = set_will_reduce(model, False)
            self.last_is_local, self.has_seen, self._is_pending = not will_reduce(model), True, True
            for backwards in self._backwards:
                backwards.begin(model, is_reduced=not self.last_is_local)
            self._before(model)

    def end(self, model: DistributedDataParallel, _: Any, returned: Any) -> None:
        """Note that a forward pass has ended, or failed."""
        if self._reduced_before is not None:
            set_will_reduce(model, self._reduced_before)
            self._reduced_before = None
        if torch.is_grad_enabled():
            for backwards in self._backwards:
                backwards.end(model, returned)

    def _should_search(self) -> bool:
        """If no model is known, True at the first, second, fourth ... call."""
        if self.models:
            return False
        self._misses += 1
        return self._misses & (self._misses - 1) == 0


class _Backwards:
    """Follows the backward passes of one model: which of them DDP reduces.

    Args:
        model: the model. Passes of a static graph are not told apart.
    """

    def __init__(self, passes: ForwardPasses, model: DistributedDataParallel) -> None:
        self._passes, self.model = weakref.ref(passes), weakref.ref(model)
        self._is_reduced_next = True  # unknown before the first forward pass
        self._pass_over_outputs = -1
        self.mixes = self.follows = False
        self._begins = weakly(self._begins_backward)
        params = reduced_parameters(model)
        self._handle = params[-1][1].register_post_accumulate_grad_hook(weakly(self._note_arrival)) if params else None
        self._wrapped = {name: (weakref.ref(param), accumulator_of(param)) for name, param in params}

    def begin(self, model: DistributedDataParallel, is_reduced: bool) -> None:
        self._is_reduced_next |= is_reduced and self.model() is model

    def end(self, model: DistributedDataParallel, returned: Any) -> None:
        """Note the outputs of a forward pass."""
        if self.model() is model and not has_static_graph(model):
            for output in tensors_in(returned):
                if output.grad_fn is not None:
                    output.register_hook(self._begins)

    def find_replaced(self) -> str | None:
        """Name of a parameter in whose place the model, if there still is one, has a different one now, or None."""
        model = self.model()
        if model is None:
            return None
        now = dict(model.module.named_parameters())
        return next((name for name, (was, _) in self._wrapped.items() if now.get(name) is not was()), None)

    def find_converted(self) -> str | None:
        """Name of a parameter that no longer accumulates gradients where DDP waits for them, or None."""
        alive = ((name, was(), node) for name, (was, node) in self._wrapped.items())
        with untouched():
            return next((name for name, param, node in alive if _accumulates_elsewhere(param, node)), None)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.remove()

    def _begins_backward(self, _: Tensor) -> None:
        self._pass_over_outputs = backward_id()

    def _note_arrival(self, _: Tensor) -> None:
        passes = self._passes()
        if passes is None:
            return
        passes.backward_begins()
        self.follows = not self._is_reduced_next
        if self._is_reduced_next:
            self.mixes = False
        elif self._pass_over_outputs == backward_id() and not passes.last_is_local:
            self.mixes = passes.has_seen = True
        self._is_reduced_next = False


_NONE, _EDITED = -1, -2

_NO_PASS = (
    "no backward pass since the last step was reduced. Run the last one before opt.step() outside ddp.no_sync(), or "
    "drop left-over gradients with opt.zero_grad(). If the loop averages gradients itself, average all of them, and "
    "build the optimizer with overlap_with_ddp=False (shard_optimizer(..., overlap=False))."
)
_AROUND = (
    "since the last step, or opt.zero_grad(), no forward pass has gone through DDP. Wrap the model in "
    "DistributedDataParallel and call the wrapped model, not its module. If the loop averages gradients itself, "
    "average all of them before opt.step(), and build the optimizer with overlap_with_ddp=False "
    "(shard_optimizer(..., overlap=False))."
)
_TWICE = (
    "opt.step() has taken the step of the last backward pass through DDP already. Call it once after each backward(), "
    "of a loss of the wrapped model. To step again with the same gradients, as a plain loop would, build the optimizer "
    "with overlap_with_ddp=False (shard_optimizer(..., overlap=False))."
)
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
PASSED_BY = (
    "the pipeline schedule has not started DDP's reducer. Schedules that compute gradients of weights apart from those "
    "of inputs, as InterleavedZeroBubble, ZBVZeroBubble and DualPipeV of torch, do not: give PipelineStage the stage "
    "without DDP, whose gradients opt.step() averages."
)
"""The remedy where a schedule passes a DDP model by."""
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
        marks: by parameter, see `Gradients.local_marks`.

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
    if step is not None and passes.is_told and not passes.has_seen and step & (step - 1):
        return
    if passes.mixes:
        why = _SECOND_PASS
    elif passes.last_is_local or (step is not None and not passes.has_seen):
        why = passes.why_not_reduced()
    elif shard.binding.layout is None and passes.reduces_fewer_than(sum(param.requires_grad for param in params)):
        why = _NO_BUCKET
    elif step is None:
        return check_unreduced(shard)
    elif passes.may_add_local:
        why = _ADDED
    elif not shard.binding.is_current and passes.find_converted() is not None:
        why = passes.why_not_reduced()
    elif is_looked_at(step):
        why = _DIFFERS if passes.find_converted() is None else passes.why_not_reduced()
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
    passes.is_told = True  # unless warnings are errors: then nothing is stepped


def check_hook(shard: Shard, arrived: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Before the step: have ranks compare gradients that a hook of the user's has reduced. A collective.

    Args:
        shard: the step.
        arrived: parameters and their reduced gradients, the same parameters on every rank.

    Raises:
        RuntimeError: on every rank, naming a parameter.
    """
    index_of = shard.table.index_of
    marks = {index_of[param]: mark_of(grad) for param, grad in arrived if param in index_of}
    wrong = _find_different(shard, list(marks), list(marks.values()))
    if wrong is not None:
        raise _not_averaged(shard, wrong, _HOOK)


def _accumulates_elsewhere(param: Tensor | None, node: Node | None) -> bool:
    if param is None or not param.requires_grad or node is None:
        return False
    return accumulator_of(param) not in (node, None)  # None: not to be asked, as while a late sync is under way


def check_finalized(shard: Shard, passes: ForwardPasses) -> None:
    """Before gradients are used: check that DDP has ended the last backward pass that it reduces."""
    ddp = passes.find_unfinished()
    if ddp is not None:
        where = shard.comm.name(shard.comm.group_rank)
        passes.check_none_lost(where)
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
    return 0 if isinstance(grad, AbsentGradient) else mark_of(grad)
