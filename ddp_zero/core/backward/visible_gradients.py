"""The contents of ``param.grad`` between iterations, and how the next backward pass takes them up.

Stage 2 shows averages on their owners; stage 1 with ``accumulate_in_fp32`` shows sums over passes on every rank.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import compress, repeat
from operator import attrgetter, is_not
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ddp_zero.core.backward.bucket_gradients import BucketGradients
from ddp_zero.core.backward.ddp_buckets import ReducedBucket
from ddp_zero.core.backward.exact_sums import ExactSums
from ddp_zero.core.backward.gradients import WholeGradients
from ddp_zero.core.backward.scratch_bucket import ReduceContext, ReduceOptions
from ddp_zero.core.backward.scratch_buffers import SideStream
from ddp_zero.core.comm.reduction import sum_dtype
from ddp_zero.core.ddp.forward_passes import ForwardPasses
from ddp_zero.core.ddp.reducer import (
    NO_BACKWARD,
    accumulating_node,
    at_end_of_backward,
    backward_id,
    backward_ids,
    reduced_parameters,
    trainable_for_now,
    will_reduce,
    will_run,
)
from ddp_zero.core.ddp.registered_hook import CommHook
from ddp_zero.core.local.compiler import never_compiled
from ddp_zero.core.local.memory import bit_sum_of
from ddp_zero.core.local.parameters import GradientSource, PublishedGradients
from ddp_zero.core.local.weak_calls import weakly
from ddp_zero.core.plan.ownership import describe_owners
from ddp_zero.core.step.rank_shard import Shard
from ddp_zero.values.parts import part_of
from ddp_zero.values.placeholders import AbsentGradient, absent_gradient, not_awaiting_params
from ddp_zero.values.shapes import Part

_GRAD, _ZEROED = attrgetter("grad"), attrgetter("zeroed")
_AVERAGE, _ABSENT, _MIXED = 1, 2, 4
"""The library's content of ``param.grad``, unless users have replaced it: an average, or an `AbsentGradient`.
Mixed: a pass that was not reduced has added to it."""
_CARRIED, _HIDDEN = 1, 2
"""Taken out of ``param.grad`` by a backward pass: an average, to be added to the next sum; or an
`AbsentGradient`, or the average of a parameter that another rank owns.

A gradient that the user has set to zero is neither: a pass adds to it as to none, but a parameter without a gradient in
that pass keeps its zeros, by which weight decay and momentum act in the step.
"""


class VisibleGradients:
    """The content of ``param.grad``: averaged gradients on the rank that owns them, `AbsentGradient` elsewhere.

    Args:
        context: holds gradients that are carried over to the next sum.

    Attributes:
        sums: the sums of gradients that are shown rounded.
    """

    def __init__(self, context: ReduceContext) -> None:
        self._parts: Mapping[int, Part] = {}  # of parameters that are shown and carried in parts
        self._context = context
        self._shard = context.shard
        self.sums = ExactSums(context.where)
        self._shown: dict[int, int] = {}  # by parameter: an average or its absence, until a backward pass takes it out
        self._taken: dict[int, int] = {}  # by parameter, by the backward pass under way
        self.zeros: dict[int, AbsentGradient] = {}  # placeholders, set to zero, that it has taken out
        self._kept: set[int] = set()  # averages that `keep_published` has left in place
        self._put_aside: dict[int, Tensor] = {}  # those, once they are taken out
        self.lost: set[int] = set()  # gradients that `mark_interrupted` has marked
        self._absent: dict[bool, dict[int, AbsentGradient]] = {False: {}, True: {}}  # by whether it was consumed
        self._reasons: dict[int, str] = {}  # by parameter, while it has these owners
        self.local_marks: dict[int, int] = {}  # of gradients that a pass without reduction has added to averages

    def taken(self) -> set[int]:
        """The parameters whose sum, or zeros, were taken out for the sums of this iteration."""
        return {*self._context.carried, *self.zeros}

    def was_taken(self, index: int) -> bool:
        """True if an averaged gradient, its absence, or zeros were taken out for the sums of this iteration."""
        return index in self._taken or index in self.zeros

    def show(self, index: int, grad: Tensor, exact: Tensor | None = None) -> None:
        """Put an averaged gradient into ``param.grad``.

        Args:
            index: the parameter.
            grad: in its dtype. If it is a part, `AbsentGradient.part` holds it.
            exact: the same in the dtype of the sum, if that differs.
        """
        self.show_all((index,), (grad,), (exact,))

    def show_all(self, indices: Sequence[int], grads: Sequence[Tensor], exact: Sequence[Any]) -> None:
        """`show` several."""
        params: list[Any] = [*map(self._shard.table.params.__getitem__, indices)]
        parts = [*map(self._parts.get, indices)]
        before = [*map(self._shown.get, indices, repeat(0))]
        shown: Iterable[Tensor] = grads
        if any(parts):
            rows = zip(params, grads, parts, map(self._why_elsewhere, indices), strict=True)
            shown = [
                grad if part is None else absent_gradient(param, False, why, grad) for param, grad, part, why in rows
            ]
        deque(map(setattr, params, repeat("grad"), shown), maxlen=0)
        for grad, total in compress(zip(grads, exact, strict=True), map(is_not, exact, repeat(None))):
            self.sums.keep(grad, total)
        marks = [one & _MIXED | _AVERAGE for one in before] if any(before) else repeat(_AVERAGE)
        self._shown.update(zip(indices, marks, strict=False))

    def hide(self, indices: Sequence[int], was_consumed: bool) -> None:
        """Put an `AbsentGradient` into the ``grad`` of parameters, which says where the gradient is."""
        params = self._shard.table.params
        known = self._absent[was_consumed]
        placeholders: list[Any] = [*map(known.get, indices)]
        if {AbsentGradient}.issuperset(map(type, placeholders)) and not any(map(_ZEROED, placeholders)):
            # those of the last time, as most often: without a loop in Python, as all that is done per parameter
            deque(map(setattr, map(params.__getitem__, indices), repeat("grad"), placeholders), maxlen=0)
        else:
            for index in indices:
                params[index].grad = self._absence(index, was_consumed)
        self._shown.update(dict.fromkeys(indices, _ABSENT))

    def mark_interrupted(self, used: Iterable[int]) -> None:
        """After an interrupted pass: put back zeros that it has taken out, and mark gradients that are used up.

        Args:
            used: parameters whose gradients of this pass are; so are gradients of earlier ones that it has taken out.
        """
        params, label = self._shard.table.params, self._shard.table.label
        for index in self.zeros:
            if params[index].grad is None:
                params[index].grad = torch.zeros_like(params[index])
        for index in {
            *used,
            *(index for index, how in self._taken.items() if how == _HIDDEN or index in self._context.carried),
        }:
            reason = (
                f"An interrupted backward pass has used up the gradient of {label(index)} ({self._context.where}). "
                "Call model.zero_grad(), and start the iteration again."
            )
            params[index].grad = absent_gradient(params[index], consumed=True, reason=reason)
            self._shown[index] = _ABSENT
            self.lost.add(index)
        self.forget_taken()

    def check_none_lost(self) -> None:
        """Before a pass: check that gradients that an interrupted one has used up were dropped or zeroed since."""
        if (label := self._lost_one()) is not None:
            raise RuntimeError(
                f"Expected the gradient of {label} to be dropped before the next "
                f"backward pass, got what an interrupted one has left ({self._context.where}): it was sent to its "
                "owner, and DDP would add to it. Call model.zero_grad() after the exception. [ZERO-308]"
            )

    def check_complete(self) -> None:
        """At ``opt.step()``: check that no gradient of an interrupted pass is to be used."""
        if (label := self._lost_one()) is not None:
            raise RuntimeError(
                f"Expected the gradient of {label}, got what an interrupted backward pass has left of it "
                f"({self._context.where}): opt.step() cannot use it. After a pass through the DDP model, wrap the "
                "module again, and call opt.reset() and opt.attach(model). Call opt.zero_grad(), and start the "
                "iteration again. [ZERO-308]"
            )

    def _lost_one(self) -> str | None:
        table = self._shard.table
        lost = (index for index in self.lost if is_unknown(table.params[index].grad))
        return next(map(table.label, lost), None)

    def keep_published(self, index: int) -> None:
        """Leave an average that DDP's reducer has put into ``param.grad`` there, until the next backward pass."""
        grad = self._shard.table.params[index].grad
        if grad is not None:
            self._kept.add(index)
            self.show(index, grad)

    def editable(self, index: int) -> Tensor | None:
        """The tensor that the step uses of an owned gradient, for users to change in place; None if there is none."""
        held = self._shard.targets.owned_gradient(index, revives=True)
        total = None if held is None else self.editable_sum(index, held)
        return held if total is None else total

    def editable_sum(self, index: int, grad: Tensor) -> Tensor | None:
        """The exact sum of a shown gradient, to be changed in place; None unless a master is stepped by it."""
        return self.sums.editable(grad) if self._shard.masters.needs_master(index) else None

    def follow_owners(self, parts: Mapping[int, Part]) -> None:
        """Forget placeholders that name owners; show and carry these parts of parameters from now on."""
        self._absent = {False: {}, True: {}}
        self._reasons = {}
        self._parts = parts

    def take_up(self, will_be_reduced: bool) -> None:
        """At the first gradient of a backward pass: take averages out of ``param.grad``, to be added to the next sums.

        This rank's own gradients stay. Placeholders that were set to zero are put aside until the end of the pass.

        Args:
            will_be_reduced: whether this backward pass is meant to be reduced.
        """
        carried = self._context.carried
        if self.sums.of_gradient:
            self.sums.take_up_edits()
        params = self._shard.table.params
        grads = [*map(_GRAD, params)]
        for index, grad in compress(enumerate(grads), map(is_not, grads, repeat(None))):
            param = params[index]
            flags = self._shown.get(index, 0)
            is_average = flags & _AVERAGE
            if isinstance(grad, AbsentGradient) and grad.zeroed:
                self.zeros[index] = grad
                param.grad = None
                continue
            adds_to_local = flags & _MIXED or not will_be_reduced
            if not isinstance(grad, AbsentGradient) and (not is_average or (adds_to_local and not grad.any())):
                continue
            self._check_may_be_taken(index, grad, will_be_reduced)
            held = grad.part if isinstance(grad, AbsentGradient) else part_of(grad, param, self._parts.get(index))
            if held is None or not is_average:
                self._taken[index] = _HIDDEN
            else:
                total = self.sums.of(held)
                if index in self._kept:
                    self._put_aside[index] = held
                    if total is None:  # the reducer will fill its memory again
                        total = held.to(sum_dtype(held.dtype), copy=True)
                carried[index] = held if total is None else total
                self._taken[index] = _CARRIED
            param.grad = None
        self._forget_shown()

    def restore(self) -> None:
        """After a pass that was not reduced: put averages back into ``param.grad``, plus the gradients of that pass."""
        carried = self._context.carried
        for index, zeros in self.zeros.items():
            param = self._shard.table.params[index]
            param.grad = zeros if param.grad is None else param.grad
        self.zeros.clear()
        hidden = [index for index, taken in self._taken.items() if taken == _HIDDEN]
        for index in sorted({*hidden, *carried}):
            param = self._shard.table.params[index]
            is_hidden = self._taken.get(index) == _HIDDEN
            grad = param.grad
            if grad is not None:
                self._shown[index] = self._shown.get(index, 0) | _MIXED
                self.local_marks[index] = bit_sum_of(grad)
            if index in self._put_aside and grad is None:  # nothing was added: the old gradient is back
                left = self._put_aside.pop(index)
                total = carried[index]
                self.show(index, left, total if total.dtype != left.dtype else None)
                self._kept.add(index)
            elif is_hidden:  # another rank owns it
                param.grad = self._absence(index, was_consumed=False)
                self._shown[index] = self._shown.get(index, 0) & _MIXED | _ABSENT
            else:  # carried from passes before; this one may add to it
                total = carried[index]
                if grad is not None:
                    total = total + part_of(grad, param, self._parts.get(index))
                self.show(index, total.to(param.dtype), total if total.dtype != param.dtype else None)
            self._taken.pop(index, None)
            carried.pop(index, None)
        for index, param in enumerate(self._shard.table.params) if self._shown else ():
            if index not in self._shown and param.grad is not None:
                self.local_marks[index] = bit_sum_of(param.grad)  # the reduced pass has left none there

    def forget_taken(self) -> None:
        """Forget gradients that were taken out: they are in the sums, or dropped."""
        self._context.carried.clear()
        self._put_aside.clear()
        self.zeros.clear()
        self._taken.clear()

    def forget_all(self) -> None:
        """Forget all gradients, which the user has dropped or zeroed: from now on ``param.grad`` is this rank's own."""
        self.forget_taken()
        self._forget_shown()

    def check_none_on_owners_alone(self) -> None:
        """Check that ``param.grad`` shows no average or its absence; RuntimeError, naming one."""
        for index, param in enumerate(self._shard.table.params):
            grad = param.grad
            is_absent = isinstance(grad, AbsentGradient)
            if grad is None or not (is_absent or index in self._shown):
                continue
            if not grad.zeroed if isinstance(grad, AbsentGradient) else bool(grad.any()):
                raise RuntimeError(
                    f"Expected no gradients when an optimizer of stage 2 leaves its model ({self._context.where}), got "
                    f"that of {self._shard.table.label(index)}, which is on its owner alone. Call opt.step(), if it is "
                    "still to be used, and then model.zero_grad(). [ZERO-309]"
                )

    def drop(self) -> None:
        """Remove the library's gradients from ``param.grad``, copies in new buckets too, if a new hook takes over."""
        for index, param in enumerate(self._shard.table.params):
            grad = param.grad
            if isinstance(grad, AbsentGradient) and grad.zeroed:
                param.grad = torch.zeros_like(param)
            elif (index in self._shown or isinstance(grad, AbsentGradient)) and index not in self.lost:
                param.grad = None
        self.forget_all()

    def _forget_shown(self) -> None:
        self._shown.clear()
        self.lost.clear()
        self._kept.clear()
        self.local_marks.clear()
        if self.sums.of_gradient:
            self.sums.forget_edits()

    def _check_may_be_taken(self, index: int, grad: Tensor, will_be_reduced: bool) -> None:
        name = self._shard.table.label(index)
        if isinstance(grad, AbsentGradient) and grad.consumed:
            # of a group that was taken out by hand: no `zero_grad()` reaches it
            self._shard.table.check_groups(self._shard.param_groups)
            raise RuntimeError(
                f"The gradient of {name} was neither dropped nor zeroed before the next backward pass "
                f"({self._context.where}). DDP would accumulate gradients, and the step inside backward has used up "
                "the first (stage 2). Call opt.step() and opt.zero_grad() before each backward pass, also one through "
                "the module instead of the wrapped model, or add up the losses for a single pass; to accumulate, run "
                "all but the last in opt.accumulate() or ddp.no_sync(). [ZERO-403]"
            )
        if self._shown.get(index, 0) & _MIXED:
            raise RuntimeError(
                f"The gradient of {name} mixes a local backward pass, which DDP did not reduce, with an averaged "
                f"gradient ({self._context.where}): a further pass would average the local one again. Call opt.step() "
                "and opt.zero_grad() between them, or add the local loss to the loss of a pass that is reduced. "
                "[ZERO-404]"
            )
        if not will_be_reduced:
            raise RuntimeError(
                f"A backward pass under ddp.no_sync() would add this rank's own gradient of {name} to an averaged one "
                f"({self._context.where}). Call opt.zero_grad() before it, or accumulate in opt.accumulate() instead "
                "of ddp.no_sync(). After a forward pass that was left without a backward pass, as by an exception, DDP "
                "averages the next one: call opt.reset() there. [ZERO-404]"
            )

    def _absence(self, index: int, was_consumed: bool) -> AbsentGradient:
        known = self._absent[was_consumed]
        table = self._shard.table
        if type(known.get(index)) is not AbsentGradient:  # none yet, or it has become zeros
            reason = self._why_elsewhere(index)
            if was_consumed:
                reason = (
                    f"The step inside backward has used up the gradient of {table.label(index)} "
                    f"(stage 2, {self._context.where}). Build the optimizer with overlap_with_ddp=False to have "
                    "gradients until opt.step()."
                )
            known[index] = absent_gradient(table.params[index], was_consumed, reason)
        if known[index].zeroed:
            known[index].hide_value()
        return known[index]

    def _why_elsewhere(self, index: int) -> str:
        if index not in self._reasons:
            owners = describe_owners(self._shard.binding.pieces[index], self._shard.comm.name)
            self._reasons[index] = (
                f"The gradient of {self._shard.table.label(index)} is not on this rank: stage 2 keeps it on {owners} "
                f"only (this is {self._context.where})."
            )
        return self._reasons[index]


def is_unknown(grad: Tensor | None) -> bool:
    """True of an `AbsentGradient`, and of NaN that DDP's constructor makes of one."""
    if isinstance(grad, AbsentGradient):
        return not grad.zeroed
    return type(grad) is Tensor and grad.layout is torch.strided and bool(grad.isnan().all())


def gather_gradient(shard: Shard, index: int) -> Tensor | None:
    """A parameter's averaged gradient from its owner, on every rank; None if it has none. A collective."""
    param = shard.table.params[index]
    comm = shard.comm
    pieces = shard.binding.pieces[index]
    grad = param.grad
    held = shard.targets.owned_gradient(index, revives=True)
    statements = comm.all_gather_ints([int(grad is not None) + int(grad is not None and held is None)])
    found = {piece.owner: statements[piece.owner][0] for piece in pieces}
    if 0 in found.values():
        return None
    if 2 in found.values():
        raise RuntimeError(
            f"The step inside backward has used up the gradient of {shard.table.label(index)} "
            f"(stage 2, {comm.name(comm.group_rank)}). Build the optimizer with overlap_with_ddp=False to keep it. "
            "[ZERO-402]"
        )
    full = torch.empty_like(param)
    if held is not None:
        shard.targets.owned_elements(index, full).copy_(held.detach())
    shard.broadcast_from_owner(index, full)
    return full


class SummedBucket(BucketGradients):
    """A reduced bucket plus the sums of earlier passes.

    Args:
        carried: sums of earlier passes, by parameter index; not modified.
    """

    def __init__(self, bucket: ReducedBucket, carried: Mapping[int, Tensor], shard: Shard) -> None:
        self.params = bucket.params
        self.on_stream, self.waiting = bucket.on_stream, bucket.waiting
        self._bucket = bucket
        self._carried = carried
        self._params, self._own = shard.table.params, shard.targets.owned_elements

    def wait(self) -> None:
        self._bucket.wait()

    def gradient(self, index: int) -> Tensor | None:
        exact = self.in_accumulation_dtype(index)
        return self._bucket.gradient(index) if exact is None else exact.to(self._params[index].dtype)

    def whole(self, param: Tensor) -> Tensor:
        return self._bucket.whole(param)

    def in_accumulation_dtype(self, index: int) -> Tensor | None:
        """The sum in its own dtype, or None if nothing was added."""
        carried = self._carried.get(index)
        if carried is None:
            return None
        carried_part = self._own(index, carried)
        grad = self._bucket.gradient(index)
        return carried_part if grad is None else carried_part + grad


def _first_gradient_hook(arrives: Callable[[], object], begun: Sequence[int]) -> Callable[[Tensor | None], None]:
    """A tensor hook of many parameters, which acts at the first of their gradients in a backward pass.

    Args:
        arrives: called then.
        begun: the backward pass in which it was last called, see `backward_id`.
    """
    now = backward_ids()

    @never_compiled
    def hook(_: Tensor | None) -> None:
        if begun[0] != now():  # runs once per parameter: nothing more than this is done for most
            arrives()

    return hook


class BackwardWatch:
    """Calls a function once in each backward pass, before the first gradient of some parameters is accumulated.

    Args:
        begins: the function.
    """

    def __init__(self, params: Sequence[Tensor], begins: Callable[[], object]) -> None:
        self._begun = [NO_BACKWARD]  # the backward pass that was last seen to begin
        hook = _first_gradient_hook(begins, self._begun)
        with trainable_for_now(params):  # a frozen one may be trainable at its next gradient
            self._hooks = [param.register_hook(hook) for param in params]
        self._params = params
        self._find_nodes()

    def _find_nodes(self) -> None:
        with trainable_for_now(self._params):
            self._nodes = [accumulating_node(param) for param in self._params]

    def accumulates(self) -> bool:
        """Note a pass; True if it is none of `torch.autograd.grad`, which leaves ``param.grad`` alone."""
        self._begun[0] = backward_id()
        if any(map(will_run, self._nodes)):
            return True
        self._find_nodes()  # `model.double()` gives parameters others
        return any(map(will_run, self._nodes))

    def note_end(self) -> None:
        """The backward pass has ended."""
        self._begun[0] = NO_BACKWARD

    def stop(self) -> None:
        """Remove its hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._params, self._nodes = (), []


class _ShownSums(PublishedGradients):
    """Gradients in ``param.grad``, and the sums that they show."""

    def __init__(self, params: Sequence[Tensor], visible: VisibleGradients) -> None:
        super().__init__(params)
        self._visible = visible

    def in_accumulation_dtype(self, index: int) -> Tensor | None:
        grad = self.gradient(index)
        return None if grad is None else self._visible.sums.of(grad)


class SummedGradients(WholeGradients):
    """Stage 1 with ``accumulate_in_fp32``: averages of several backward passes add up as in stage 2, on every rank.

    DDP adds a pass to ``param.grad``, in its dtype, and averages the total. So the sum that earlier passes have left
    there is taken out when a backward pass begins, and added to the new average: in fp32 for fp16 and bf16.
    """

    carried: dict[int, Tensor]

    def __init__(
        self,
        shard: Shard,
        ddp: DistributedDataParallel,
        split: bool,
        wrapped: CommHook | None,
        side: SideStream,
        passes: ForwardPasses,
    ) -> None:
        context = ReduceContext(shard, side, ReduceOptions())
        super().__init__(shard, ddp, split, wrapped, side, lambda one: SummedBucket(one, context.carried, shard))
        self._passes, self._visible, self.carried = passes, VisibleGradients(context), context.carried
        self._pass_is_reduced = False
        params = [param for _, param in reduced_parameters(ddp)]
        self._watch = BackwardWatch(params, weakly(self._pass_begins))
        self._summed = [shard.table.index_of[param] for param in params if param in shard.table.index_of]

    def _held(self) -> Collection[int]:
        return self._visible.taken()

    def open(self, may_communicate: bool) -> None:
        super().open(may_communicate)
        self._pass_is_reduced, self.is_idle = True, False

    @torch.no_grad()
    def finish_reductions(self, has_joined: bool) -> None:
        params = self._shard.table.params
        for index, carried in {} if has_joined else list(self.carried.items()):
            grad = params[index].grad
            total = carried if grad is None else carried + grad
            shown = total.to(params[index].dtype) if grad is None else grad.copy_(total)
            self._visible.show(index, shown, total if total.dtype != shown.dtype else None)
        self._visible.forget_taken()

    def publish(self, was_consumed: bool) -> None:
        """Show the sums, and remember that they are averages."""
        super().publish(was_consumed)
        with not_awaiting_params():
            self.finish_reductions(has_joined=False)
            for index in self._summed:
                self._visible.keep_published(index)
        self._pass_is_reduced = False

    def in_accumulation_dtype(self, index: int) -> Tensor | None:
        """This rank's part of the sum before it was rounded; None if it was not."""
        total = self.whole_gradients.in_accumulation_dtype(index)
        return None if total is None else self._shard.targets.owned_elements(index, total)

    @property
    def whole_gradients(self) -> GradientSource:
        return _ShownSums(self._shard.table.params, self._visible)

    def close_joined(self) -> None:
        super().close_joined()
        self._visible.forget_taken()
        self._pass_is_reduced = False

    def editable(self, index: int) -> Tensor | None:
        """The sum, where the step uses that, or the content of ``param.grad``."""
        grad = self._shard.table.params[index].grad
        total = None if grad is None else self._visible.editable_sum(index, grad)
        return super().editable(index) if total is None else self._shard.targets.owned_elements(index, total)

    def reset(self) -> None:
        self._leave()
        self.close_joined()

    def _leave(self) -> None:
        """An exception has ended the pass: leave sums without a new gradient, and mark the others."""
        carried, params = self.carried, self._shard.table.params
        with not_awaiting_params():
            for index in [index for index in carried if params[index].grad is None]:
                params[index].grad = carried.pop(index).to(params[index].dtype)
            self._visible.mark_interrupted(())

    def drop_carried(self) -> None:
        self._visible.forget_all()
        self.is_idle = True

    def detach(self) -> None:
        """Take the tensor hooks off the parameters; gradients stay."""
        self._watch.stop()
        self._visible.forget_all()

    def _pass_begins(self) -> None:
        ddp = self._ddp_reference()
        if self._watch.accumulates() and ddp is not None:
            self.is_idle = False
            at_end_of_backward(self._end_backward, weakly(self._leave))
            self._visible.take_up(will_reduce(ddp) or self._passes.is_scheduled)

    @never_compiled
    def _end_backward(self) -> None:
        """If DDP does not reduce this pass after all, restore ``param.grad`` plus the gradients of this pass."""
        self._watch.note_end()
        if not (self._pass_is_reduced or self._passes.is_scheduled):
            self._visible.restore()
