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
from collections.abc import Set as AbstractSet
from functools import partial
from itertools import filterfalse
from typing import Any

from torch import Tensor
from torch.autograd.graph import increment_version
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from ddp_zero.core.backward.forward_passes import ForwardPasses
from ddp_zero.core.backward.gradients import Gradients
from ddp_zero.core.backward.owned_sums import ReducedSegment, ReduceOptions, ScratchLayout, UsersOfBucket
from ddp_zero.core.backward.planned_reducer import OthersSpace, PlannedReducer
from ddp_zero.core.backward.preconditions import check_can_partition, sparse_gradient
from ddp_zero.core.backward.reducer import (
    NO_BACKWARD,
    at_end_of_backward,
    backward_id,
    will_reduce,
)
from ddp_zero.core.backward.registered_hook import CommHook
from ddp_zero.core.backward.scratch_buffers import SideStream
from ddp_zero.core.backward.visible_gradients import CarriedGradients, SummedGradients
from ddp_zero.core.backward.weak_calls import weakly
from ddp_zero.core.comm.recorder import Act
from ddp_zero.core.local.compiler import never_compiled
from ddp_zero.core.local.memory import return_freed_memory
from ddp_zero.core.plan.buckets import CAP_BYTES, RECV_BUFFERS, SCRATCHES, ddp_layout
from ddp_zero.core.step.rank_shard import Shard
from ddp_zero.values.placeholders import AbsentGradient, untouched

_BUFFERS = SCRATCHES + RECV_BUFFERS
_LEAST_REST = 4  # times the buffers' bytes: a model that is smaller would be slowed down by more than a percent


class PartitionedGradients(CarriedGradients):
    """Stage 2: see the module docstring.

    Args:
        side: the stream that sums and steps.
        joins: whether ranks may have run out of inputs.
    """

    reach_joined = shares_memory = True

    def __init__(
        self,
        shard: Shard,
        ddp: DistributedDataParallel,
        options: ReduceOptions,
        side: SideStream,
        passes: ForwardPasses,
        joins: Callable[[], bool],
    ) -> None:
        super().__init__(shard, ddp, None, options, side, passes)
        self._context.when_needed = weakly(self._compile)
        self._joins = joins
        self.arrivals: list[ReducedSegment] = []
        self._indices: list[int] = []  # the parameters of all of them
        self._nbytes = 0  # of gradients in all of them
        self._digest: int | None = None
        self._beside: set[Tensor] = set()  # parameters that other optimizers of stage 2 have
        self._used: set[Tensor] | None = None  # parameters that any rank has used in this pass; None: all
        self._saw_local_pass = False
        self._first_sums: int | None = None  # bytes of those of the first pass that were not freed yet
        self._reducer = PlannedReducer(
            ddp, self._context.where, weakly(self._before_pass), lambda params: sparse_gradient(shard.table, params)
        )
        self._watch(self._reduced)

    # The plan

    def follow_plan(self) -> None:
        """Lay out scratches for the plan's buckets; from the next pass on, gradients land in them."""
        super().follow_plan()
        shard, buckets = self._shard, self._shard.plan.buckets
        self.arrivals = [
            ReducedSegment(self._context, ScratchLayout(members, buckets[place], shard, self._context.side))
            for place, members in enumerate(self._members)
        ]
        for arrival in self.arrivals:
            arrival.without = self._reducer.unused
        self._indices = [index for arrival in self.arrivals for index in arrival.indices]
        self._nbytes = sum(arrival.layout.nbytes for arrival in self.arrivals)
        self._context.drop_memory()
        self._beside = self._reducer.taken_by_others()
        self._reducer.lay_out(self.arrivals, self._buckets_of_others())
        self._digest = shard.binding.digest
        self._visible.follow_owners(shard.binding.holdings())

    def _buckets_of_others(self) -> list[OthersSpace]:
        """Buckets of the parameters that DDP reduces and that are not in the plan, by DDP's rule."""
        others = [param for param in self._reduced if param not in self._bucket_of and param not in self._beside]
        kinds = [f"{param.device}/{param.dtype}" for param in others]
        layout = ddp_layout([param.nbytes for param in others], kinds, self._given_caps or (CAP_BYTES,))
        return [OthersSpace([others[place] for place in bucket]) for bucket in layout]

    def _compile(self) -> None:
        self._context.compile(self.arrivals)

    def take_place(self) -> None:
        self._reducer.install()

    def _before_pass(self) -> None:
        """Before a pass that is reduced, where ranks may communicate: follow parameters that were frozen or moved."""
        super().refresh(may_talk=not self._joins())
        # another optimizer of the model may have come, gone or grown
        if self._digest != self._shard.binding.digest or self._beside != self._reducer.taken_by_others():
            self.follow_plan()
        if self._context.is_in_use:
            self._context.drop_memory()

    # An iteration, in the order in which the hook asks

    def place_of(self, bucket: Any) -> tuple[int, bool] | None:
        """None: DDP's own reducer has filled it."""
        return None

    def refresh(self, may_talk: bool) -> None:
        """Nothing: it was done before the pass."""

    def open(self) -> None:
        self.is_idle = False
        if self._started():
            self._end_iteration()
        self._return_first_sums()

    def take_over(self, bucket: Any) -> Future[Any]:
        return self._reducer.take_over(bucket)

    def start_acts(self, place: int) -> list[Act]:
        start = partial(self.arrivals[place].start, self._reducer.unused)
        if self._finds_unused or self.is_static:
            start = partial(weakly(self._start_asking), place)
        return [(self._shard.trace.label("reduce", place), start)]

    def _start_asking(self, place: int) -> None:
        """Start a reduction where parameters may be unused on this rank, and used on others."""
        arrival, unused = self.arrivals[place], self._reducer.unused
        is_asked = self._finds_unused and self.steps_by_bucket
        users = UsersOfBucket(self._context, arrival.layout, unused) if is_asked else None
        doubtful = self._doubtful(arrival.owned) if unused and self.steps_by_bucket else frozenset[int]()
        arrival.start(unused, users, doubtful)

    def _doubtful(self, owned: Sequence[int]) -> AbstractSet[int]:
        """The owned parameters of a full bucket of which, as far as this rank knows, there is no gradient."""
        params, unused, used = self._shard.table.params, self._reducer.unused, self._reducer.used
        if not self._finds_unused and used is None:
            return frozenset()
        without = [index for index in owned if params[index] in unused and params[index] not in (used or ())]
        return set(filterfalse(self._visible.was_taken, without))

    def _started(self) -> list[ReducedSegment]:
        """The buckets whose reduction the iteration has started."""
        return [arrival for arrival in self.arrivals if arrival.is_started]

    def lend_all(self, has_joined: bool) -> None:
        """Finish every reduction; show the sums of owned parameters that any rank has used."""
        arrivals = self._started()
        for arrival in arrivals:
            if not arrival.is_summed:
                with arrival.on_stream, arrival.waiting:
                    arrival.wait()
            arrival.keep()
        if self._first_sums is None:
            self._first_sums = sum(arrival.nbytes for arrival in arrivals)
        self._context.side.join()  # from here on sums are read on the user's stream: shown, handed over, stepped
        if has_joined:
            return
        self._used = self._reducer.used_anywhere()
        for arrival in arrivals:
            owned = arrival.owned if self._used is None else tuple(filter(self._has_gradient, arrival.owned))
            for index, grad in zip(owned, arrival.gradients(owned), strict=True):
                assert grad is not None, "some rank has used it"
                self._visible.show(index, grad, arrival.in_accumulation_dtype(index) if arrival.is_wide else None)
        with untouched():
            self._hide(was_consumed=False)

    def show(self, was_consumed: bool) -> None:
        """Show `AbsentGradient` where a step has used sums up; else `lend_all` has shown them."""
        with untouched():
            if was_consumed:
                self._used = self._reducer.used_anywhere()
                self._count_changes()
                self._hide(was_consumed)
            self._reducer.publish_others(self._used)
        self._end_iteration()
        self._reducer.install()

    def _count_changes(self) -> None:
        """Increment the versions of parameters that only other ranks have used: a graph may still need the others."""
        index_of = self._shard.table.index_of
        known = [param for param in self._reducer.unused if param in index_of]
        increment_version([param for param in known if self._has_gradient(index_of[param])])

    def _hide(self, was_consumed: bool) -> None:
        started = self._started()
        hidden: Iterable[int] = self._indices
        if len(started) < len(self.arrivals):
            hidden = [index for arrival in started for index in arrival.indices]
        if not was_consumed:
            hidden = filterfalse(self._shard.binding.owns, hidden)
        if self._used is not None:
            hidden = filter(self._has_gradient, hidden)
        self._visible.hide(list(hidden), was_consumed)

    def close(self) -> None:
        self._count_changes()
        self._end_iteration()

    def _order_of_pass(self, has_joins: bool) -> list[int] | None:
        return None if has_joins else self._reducer.launch_order()

    def why_refuse(self) -> str | None:
        """None: gradients are copied, in whatever strides they are."""
        return None

    def _has_gradient(self, index: int) -> bool:
        """True if any rank has used a parameter, or earlier passes have left a gradient of it."""
        used = self._used
        return used is None or self._shard.table.params[index] in used or self._visible.was_taken(index)

    def learn_unused(self, has_joined: bool) -> None:
        """Nothing: its reducer has learnt it."""

    def has_local(self) -> bool:
        return self._saw_local_pass

    def local_marks(self) -> Mapping[int, int]:
        return self._visible.local_marks

    def gradient(self, index: int) -> Tensor | None:
        """The owned elements of the gradient shown in ``param.grad``; RuntimeError if a step has used them up."""
        held, grad = self._shard.stepped.own_gradient(index, revives=True), self._shard.table.params[index].grad
        if held is None and isinstance(grad, AbsentGradient):
            grad.refuse()
        return held

    def gradients(self, indices: Sequence[int]) -> list[Tensor | None]:
        params, parts = self._shard.table.params, self._shard.binding.holdings()
        grads = [params[index].grad for index in indices]
        held = [
            one.part if type(one) is AbsentGradient else None if parts[index] else one
            for index, one in zip(indices, grads, strict=True)
        ]
        return [self.gradient(index) if one is None else one for index, one in zip(indices, held, strict=True)]

    def in_accumulation_dtype(self, index: int) -> Tensor | None:
        """The sum that ``param.grad`` shows, unless users have changed it."""
        grad = self._shard.stepped.own_gradient(index, revives=True)
        return None if grad is None else self._visible.exact(grad)

    @property
    def wholes(self) -> None:
        return None

    def editable(self, index: int) -> Tensor | None:
        return self._visible.editable(index)

    def reset(self) -> None:
        """Drop the iteration."""
        self._leave()
        self._reducer.reset()

    def _leave(self) -> None:
        """Leave the gradients of an interrupted pass as DDP does, and mark those that were sent to their owners."""
        started = self._started()
        with untouched():
            self._reducer.leave()
            self._visible.leave_taken({index for arrival in started for index in arrival.indices})
        for arrival in started:
            arrival.is_started = False
        self._context.drop_memory()  # peers may still write into receive buffers

    def check_complete(self) -> None:
        super().check_complete()
        if self._visible.lost:
            self._visible.check_complete()

    def drop_carried(self) -> None:
        """Forget shown gradients, and gradients that a local backward pass has taken out."""
        self._saw_local_pass = False
        self._visible.forget_all()
        self._return_first_sums()
        self.is_idle = not self._started() and not self._reducer.has_begun

    def check_dropped(self) -> None:
        self._visible.check_dropped()

    def detach(self) -> None:
        """Give DDP its reducer back, and take the library's gradients out of ``param.grad``."""
        self._stop_watching()
        self._reducer.remove()
        self._visible.drop()

    def describe(self) -> list[str]:
        """The memory that the buckets have needed, in words."""
        context = self._context
        largest = max((segment.layout.nbytes for segment in self.arrivals), default=0)
        return [
            f"gradients: at most {len(context.scratches)} scratch buffers shared by {len(self.arrivals)} buckets, "
            f"{len(context.receives)} to receive into, {context.nbytes:,} bytes in all, by formula {_BUFFERS} x "
            f"{largest:,}"
        ]

    def buffer_bytes(self) -> tuple[int, int]:
        return self._context.nbytes, self._context.most_bytes

    # A backward pass

    def gradient_arrives(self) -> None:
        self._begun[0] = backward_id()
        if not self._accumulates():
            return
        self.is_idle = False
        if self._visible.lost:
            self._visible.check_none_lost()
        ddp = self._ddp_reference()
        if ddp is None:  # its module lives on without it
            self._visible.drop()
            self._reducer.reset()
            return
        self._reducer.forget_left()
        at_end_of_backward(self._end_backward, weakly(self._leave))
        try:
            self._visible.take_out(self._reducer.is_prepared or will_reduce(ddp) or self._passes.is_scheduled)
        except RuntimeError:
            # a loop that zeroes what the model has now cannot reach a parameter that was replaced
            self._passes.check_none_lost(self._context.where)
            raise
        self._reducer.begin()

    @never_compiled
    def _end_backward(self) -> None:
        """If DDP does not reduce this pass after all, restore ``param.grad`` plus the gradients of this pass.

        Such are a second backward pass through one forward, and one outside DDP. A reentrant checkpoint's own pass ends
        here too; the next gradient of the outer one takes everything out again.
        """
        self._begun[0] = NO_BACKWARD
        self._reducer.end()
        if not self._started() and not self._reducer.has_begun:
            self._saw_local_pass = True
            if not self._passes.is_scheduled:  # else what was taken out waits for the schedule's last pass
                self._visible.put_back()

    # The end of an iteration

    def _end_iteration(self) -> None:
        self._saw_local_pass, self._used = False, None
        started = self._started()
        held = [arrival for arrival in started if not arrival.is_released]
        is_in_flight = not all(arrival.is_summed for arrival in held)
        for arrival in held:
            arrival.release()
        self._rest(is_in_flight)
        for arrival in started:
            arrival.is_started = False
        self._visible.forget_taken()

    def _rest(self, is_in_flight: bool) -> None:
        """Give back the pages of idle buffers.

        To touch pages again takes about 0.5 ms per MiB. So buffers that are large beside the model keep theirs.

        Args:
            is_in_flight: whether peers may still read lent buffers, since the iteration was given up.
        """
        # pages are dropped only when no peer can read them: a message in flight would send zeros
        if not is_in_flight and _LEAST_REST * self._context.nbytes <= self._nbytes:
            for buffer in (*self._context.scratches, *self._context.receives):
                buffer.rest()

    def _return_first_sums(self) -> None:
        """Once the sums of the first pass are free: the first step waits for them all, later ones may keep none."""
        if self._first_sums and not self._context.carried:
            return_freed_memory(self._first_sums)
            self._first_sums = 0


def gradients_of_stage(
    options: ReduceOptions | None,
    shard: Shard,
    ddp: DistributedDataParallel,
    wrapped: CommHook | None,
    side: SideStream,
    passes: ForwardPasses,
    joins: Callable[[], bool],
    sums_in_fp32: bool,
) -> Gradients:
    """The gradients of stage 2 if it has options, otherwise stage 1's."""
    if options is None and sums_in_fp32:
        return SummedGradients(shard, ddp, wrapped, side, passes)
    if options is None:
        return Gradients(shard, ddp, wrapped, side)
    check_can_partition(wrapped)
    return PartitionedGradients(shard, ddp, options, side, passes, joins)
