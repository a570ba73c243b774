"""Stage 2: a rank keeps averaged gradients of its own parameters only, and all buckets share a few scratch buffers.

[Note: gradients of stage 2]
*scratch*: a buffer into which the gradients of one bucket are copied, laid out by owner.
*slice*: one owner's part of it. *sum*: this rank's slice, averaged over the ranks; in place in the scratch where dtypes
allow it. *kept*: the sum copied out, so that the scratch is free while the step still waits.

An iteration:

1. the bucket before was launched: gradients are moved into the scratch of this one (`PlannedReducer`);
2. the bucket is full: wait for the one before it, then send the slices of this one to their owners;
3. the step of the bucket before uses its sum, or else it is kept; its scratch is free;
4. after backward, ``param.grad`` is the sum for owned parameters if the step has not used it up, and otherwise an
   `AbsentGradient`, which raises with the reason when used.

So besides kept sums, at most three buffers exist: one being filled, one being reduced, one to receive into.

Gradients accumulate on their owner: the sum in ``param.grad`` at the start of a backward pass is taken out and added
to the next sum, unless `zero_grad` has dropped it. A placeholder that was set to zero is put aside for the pass; its
owner steps a parameter that gets no gradient then by zeros, as DDP does.

Not chosen: None as the gradient of parameters of other ranks (partial norms, without a word); a collective inside
torch's ``clip_grad_norm_`` (a rank that owns all gradients that it is asked for would not take part).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import filterfalse, repeat
from operator import attrgetter, is_
from typing import Any

from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn.parallel import DistributedDataParallel

from ddp_zero.core.backward.gradients import Gradients, WholeGradients
from ddp_zero.core.backward.partitioned_buckets import PartitionedBuckets
from ddp_zero.core.backward.planned_reducer import PlannedReducer
from ddp_zero.core.backward.scratch_bucket import ReduceContext, ReduceOptions, ScratchBucket
from ddp_zero.core.backward.scratch_buffers import SideStream
from ddp_zero.core.backward.visible_gradients import BackwardWatch, SummedGradients, VisibleGradients
from ddp_zero.core.comm.recorder import Act
from ddp_zero.core.ddp.forward_passes import ForwardPasses
from ddp_zero.core.ddp.preconditions import check_can_partition
from ddp_zero.core.ddp.reducer import at_end_of_backward, will_reduce
from ddp_zero.core.ddp.registered_hook import CommHook
from ddp_zero.core.local.compiler import never_compiled
from ddp_zero.core.local.weak_calls import weakly
from ddp_zero.core.step.rank_shard import Shard
from ddp_zero.values.placeholders import AbsentGradient, not_awaiting_params

_GRAD, _PART = attrgetter("grad"), attrgetter("part")
_ABSENT = {AbsentGradient, type(None)}


class PartitionedGradients(Gradients):
    """Stage 2: see the module docstring.

    Args:
        split: of `BucketPlan`.
        side: the stream that sums and steps.
        in_join: whether ranks may have run out of inputs.
    """

    source: PlannedReducer
    context: ReduceContext
    reach_joined = shares_memory = True

    def __init__(
        self,
        shard: Shard,
        ddp: DistributedDataParallel,
        split: bool,
        options: ReduceOptions,
        side: SideStream,
        passes: ForwardPasses,
        in_join: Callable[[], bool],
    ) -> None:
        super().__init__(shard, ddp, split)
        self.context = context = ReduceContext(shard, side, options)
        self._visible = VisibleGradients(context)
        self._passes = passes
        self.carried = context.carried
        self._watch = BackwardWatch(self.plan.reduced, weakly(self._pass_begins))
        self._buckets = PartitionedBuckets(context, ddp, self.plan, self._visible, in_join)
        self.source = self._buckets.planned_reducer
        self._saw_local_pass = False
        self._when_interrupted = weakly(self._leave)

    @property
    def buckets(self) -> Sequence[ScratchBucket]:
        return self._buckets.scratch_buckets

    def follow_plan(self) -> None:
        self._buckets.follow_plan()

    # An iteration

    def open(self, may_communicate: bool) -> None:
        """Parameters that were frozen or moved were followed before the pass."""
        self.is_idle = False
        if self._buckets.started():
            self._end_iteration()
        self._buckets.return_first_sums()

    def start_acts(self, place: int) -> list[Act]:
        return self._buckets.start_acts(place, self.is_static)

    def finish_reductions(self, has_joined: bool) -> None:
        """Finish every reduction; show the sums of owned parameters that any rank has used."""
        reduced = self._buckets
        finished = reduced.finish()
        if has_joined:
            return
        reduced.used = self.source.used_anywhere()
        indices, grads, exact = list[int](), list[Any](), list[Tensor | None]()  # some rank has used each of these
        for bucket in finished:
            owned = bucket.owned if reduced.used is None else tuple(filter(reduced.has_gradient, bucket.owned))
            indices += owned
            grads += bucket.gradients(owned)
            exact += map(bucket.in_accumulation_dtype, owned) if bucket.is_wide else repeat(None, len(owned))
        self._visible.show_all(indices, grads, exact)
        with not_awaiting_params():
            self._hide(was_consumed=False)

    def publish(self, was_consumed: bool) -> None:
        """Show `AbsentGradient` where a step has used sums up; else `finish_reductions` has shown them."""
        with not_awaiting_params():
            if was_consumed:
                self._buckets.used = self.source.used_anywhere()
                self._count_changes()
                self._hide(was_consumed)
            self._buckets.publish_foreign()
        self._end_iteration()
        self.source.install()

    def _count_changes(self) -> None:
        """Increment the versions of parameters that only other ranks have used: a graph may still need the others."""
        index_of = self._shard.table.index_of
        known = [param for param in self.source.users.unused if param in index_of]
        increment_version([param for param in known if self._buckets.has_gradient(index_of[param])])

    def _hide(self, was_consumed: bool) -> None:
        reduced = self._buckets
        started = reduced.started()
        hidden: Iterable[int] = reduced.indices
        if len(started) < len(reduced.scratch_buckets):
            hidden = [index for bucket in started for index in bucket.indices]
        if not was_consumed:
            hidden = filterfalse(self._shard.binding.owned_parts().__contains__, hidden)
        if reduced.used is not None:
            hidden = filter(reduced.has_gradient, hidden)
        self._visible.hide(list(hidden), was_consumed)

    def close_joined(self) -> None:
        self._count_changes()
        self._end_iteration()

    def _end_iteration(self) -> None:
        self._saw_local_pass = False
        self._buckets.end()
        self._visible.forget_taken()

    def build_buckets_or_order(self, in_join: bool) -> list[int] | None:
        return None if in_join else self.source.launch_order()

    # Between passes

    def left_local(self) -> tuple[bool, Mapping[int, int]]:
        return self._saw_local_pass, self._visible.local_marks

    def gradient(self, index: int) -> Tensor | None:
        """The owned elements of the gradient shown in ``param.grad``; RuntimeError if a step has used them up."""
        held = self._shard.targets.owned_gradient(index, revives=True)
        grad = self._shard.table.params[index].grad
        if held is None and isinstance(grad, AbsentGradient):
            grad.refuse()
        return held

    def gradients(self, indices: Sequence[int]) -> list[Tensor | None]:
        params = self._shard.table.params
        grads = [*map(_GRAD, map(params.__getitem__, indices))]
        kinds = {*map(type, grads)}
        if kinds == {AbsentGradient}:  # most often all are cut, or none
            shown = [*map(_PART, grads)]
            if not any(map(is_, shown, repeat(None))):
                return shown
        parts = self._shard.binding.owned_parts()
        if kinds.isdisjoint(_ABSENT) and not any(map(parts.__getitem__, indices)):
            return grads
        found: list[Tensor | None] = []
        for index in indices:
            grad = params[index].grad
            held = grad.part if type(grad) is AbsentGradient else None if parts[index] else grad
            found += [self.gradient(index) if held is None else held]
        return found

    def in_accumulation_dtype(self, index: int) -> Tensor | None:
        """The sum that ``param.grad`` shows, unless users have changed it."""
        grad = self._shard.targets.owned_gradient(index, revives=True)
        return None if grad is None else self._visible.sums.of(grad)

    def editable(self, index: int) -> Tensor | None:
        return self._visible.editable(index)

    def reset(self) -> None:
        self._leave()
        self.source.reset()

    def _leave(self) -> None:
        """Leave the gradients of an interrupted pass as DDP does, and mark those that were sent to their owners."""
        with not_awaiting_params():
            self.source.abandon()
            self._visible.mark_interrupted({index for bucket in self._buckets.started() for index in bucket.indices})
        self._buckets.forget()
        self.context.drop_memory()  # peers may still write into receive buffers

    def check_complete(self) -> None:
        super().check_complete()
        if self._visible.lost:
            self._visible.check_complete()

    def drop_carried(self) -> None:
        """Forget shown gradients, and gradients that a local backward pass has taken out."""
        self._saw_local_pass = False
        self._visible.forget_all()
        self._buckets.return_first_sums()
        self.is_idle = not self._buckets.started() and not self.source.has_begun

    def check_none_on_owners_alone(self) -> None:
        self._visible.check_none_on_owners_alone()

    def detach(self) -> None:
        """Give DDP its reducer back, and take the library's gradients out of ``param.grad``."""
        self._watch.stop()
        self.source.remove()
        self._visible.drop()

    # A backward pass

    def _pass_begins(self) -> None:
        if not self._watch.accumulates():
            return
        self.is_idle = False
        if self._visible.lost:
            self._visible.check_none_lost()
        ddp = self._ddp_reference()
        if ddp is None:  # its module lives on without it
            self._visible.drop()
            self.source.reset()
            return
        if self.source.missing_when_abandoned is not None:  # others may train the parameters
            self.source.reset()
        at_end_of_backward(self._end_backward, self._when_interrupted)
        try:
            self._visible.take_up(self.source.is_prepared or will_reduce(ddp) or self._passes.is_scheduled)
        except RuntimeError:
            # a loop that zeroes what the model has now cannot reach a parameter that was replaced
            self._passes.models.check_none_lost(self.context.where)
            raise
        self.source.begin()

    @never_compiled
    def _end_backward(self) -> None:
        """If DDP does not reduce this pass after all, restore ``param.grad`` plus the gradients of this pass.

        Such are a second backward pass through one forward, and one outside DDP. A reentrant checkpoint's own pass ends
        here too; the next gradient of the outer one takes everything out again.
        """
        self._watch.note_end()
        self.source.end()
        if not self._buckets.started() and not self.source.has_begun:
            self._saw_local_pass = True
            if not self._passes.is_scheduled:  # else what was taken out waits for the schedule's last pass
                self._visible.restore()


def gradients_of_stage(
    options: ReduceOptions | None,
    shard: Shard,
    ddp: DistributedDataParallel,
    split: bool,
    wrapped: CommHook | None,
    side: SideStream,
    passes: ForwardPasses,
    in_join: Callable[[], bool],
    sums_in_fp32: bool,
) -> Gradients:
    """The gradients of stage 2 if it has options, otherwise stage 1's. A collective, see `BucketPlan`."""
    if options is None and sums_in_fp32:
        return SummedGradients(shard, ddp, split, wrapped, side, passes)
    if options is None:
        return WholeGradients(shard, ddp, split, wrapped, side)
    check_can_partition(wrapped)
    return PartitionedGradients(shard, ddp, split, options, side, passes, in_join)
