"""Stage 2: a rank keeps averaged gradients of its own parameters only, and DDP's buckets share a few scratch buffers.

[Note: gradients of stage 2]
*scratch*: a buffer of a pool into which the reducer writes one bucket, laid out by owner instead of in DDP's order.
*slice*: one owner's part of it. *sum*: this rank's slice, averaged over the ranks; in place in the scratch where dtypes
allow it. *kept*: the sum copied out, so that the scratch is free while the step still waits.

An iteration:

1. the first gradient of a bucket is about to be accumulated: lend a scratch, point the reducer's views at it;
2. the bucket is full: wait for the one before it, then send the slices of this one to their owners;
3. the step of the bucket before uses its sum, or else it is kept; its scratch goes back to the pool;
4. after backward, ``param.grad`` is the sum for owned parameters if the step has not used it up, and otherwise an
   `AbsentGradient`, which raises with the reason when used.

So besides kept sums, at most three buffers exist: one being filled, one being reduced, one to receive into.

In the first iteration, DDP's buckets are not known before they arrive, nor their views: gradients land in the reducer's
own memory, and are moved to a scratch that is laid out for the owners so far. At its end DDP is made to build its final
buckets at once. If owners change with them, sums travel from the old ones to the new ones. Where DDP builds them later
(in a static graph, under Join), or the plan changes, one more iteration is such a first one.

Gradients accumulate on their owner: the sum in ``param.grad`` at the start of a backward pass is taken out and added
to the next sum, unless `zero_grad` has dropped it. A placeholder that was set to zero is put aside for the pass; its
owner steps a parameter that gets no gradient then by zeros, as DDP does.

Alternatives considered: freeing each bucket's own storage (its memory must then be faulted in again for every bucket,
and it cannot be freed before backward ends; it is the fallback if the reducer does not follow its views).

Not chosen: None as the gradient of parameters of other ranks (partial norms, without a word); a collective inside
torch's ``clip_grad_norm_`` (a rank that owns all gradients that it is asked for would not take part).
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import filterfalse
from typing import Any

from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from ddp_zero.core.backward.forward_passes import ForwardPasses
from ddp_zero.core.backward.gradients import BucketGradients, CommHook, Gradients
from ddp_zero.core.backward.owned_sums import (
    BucketMemory,
    ReducedRuns,
    ReducedSegment,
    ReduceOptions,
    ScratchLayout,
)
from ddp_zero.core.backward.preconditions import check_can_partition
from ddp_zero.core.backward.reducer import (
    NO_BACKWARD,
    NewBucket,
    at_end_of_backward,
    backward_id,
    finds_unused,
    has_static_graph,
    on_gradient,
    rebuild_buckets,
    reduced_parameters,
    will_reduce,
)
from ddp_zero.core.backward.scratch_buffers import SideStream
from ddp_zero.core.backward.visible_gradients import CarriedGradients, SummedGradients, VisibleGradients
from ddp_zero.core.local.memory import return_freed_memory
from ddp_zero.core.local.parts import join_parts, part_of
from ddp_zero.core.local.placeholders import AbsentGradient, on_its_owner, untouched
from ddp_zero.core.plan.ownership import Piece, is_cut, moves, piece_of
from ddp_zero.core.plan.shard_plan import cut
from ddp_zero.core.step.rank_shard import Shard

RUN_BYTES = 8 << 20
BUCKET_RUNS = 4  # a bucket of at most as many is reduced at once


class PartitionedGradients(CarriedGradients):
    """Stage 2: see the module docstring.

    Args:
        side: the stream that sums and steps.
    """

    reach_joined = True

    def __init__(
        self,
        shard: Shard,
        ddp: DistributedDataParallel,
        options: ReduceOptions,
        side: SideStream,
        passes: ForwardPasses,
    ) -> None:
        super().__init__(shard, ddp, None, options, side, passes)
        self._memory = BucketMemory(self._context)
        self._digest: int | None = None
        self._arrivals: list[ReducedSegment | ReducedRuns] = []
        self._published: dict[int, tuple[Tensor, Future[Tensor]]] = {}  # of each planned bucket, for the reducer
        self._begun: dict[int | None, int] = {}  # the backward pass in which each bucket was last prepared
        self._saw_local_pass = False
        self._first_sums: int | None = None  # bytes of those of the first pass that were not freed yet
        self._watch_gradients({None: [param for _, param in reduced_parameters(ddp)]})

    # An iteration, in the order in which the hook asks

    def open(self) -> None:
        """Forget the buckets of the last iteration."""
        if self._arrivals:
            self._end_iteration()
        self._return_first_sums()

    def start(
        self, state: Any, bucket: GradBucket, index: int, is_planned: bool
    ) -> tuple[Future[Any], BucketGradients]:
        """Finish the reduction of the previous bucket, then start this one."""
        self.is_idle = False
        for earlier in self._arrivals[-1:]:
            earlier.wait()
            if not is_planned:
                earlier.keep()  # nothing is stepped before the last bucket has arrived
        buffer, has_joined = bucket.buffer(), backward_id() == NO_BACKWARD
        arrival: ReducedSegment | ReducedRuns
        if is_planned:
            layout = self._memory.layouts[index]
            arrival = ReducedSegment(self._context, layout, self._memory.take(layout, None if has_joined else buffer))
        else:
            arrival = self._start_unplanned(index, bucket.parameters(), None if has_joined else buffer)
        self._arrivals.append(arrival)
        known = self._published.get(index)
        if known is None or known[0] is not buffer:
            published: Future[Tensor] = Future()
            published.set_result(buffer)  # the reducer copies nothing: it is in its own memory
            known = buffer, published
            if is_planned and not has_joined:  # there DDP hands out new zeros each time
                self._published[index] = known
        return known[1], arrival

    def settle(self) -> None:
        """Keep sums that no step has used yet."""
        for arrival in self._arrivals[-2:]:  # those before were settled in earlier calls
            arrival.keep()

    def lend_all(self, has_joined: bool) -> None:
        """Finish every reduction; show the sums of owned parameters that any rank has used."""
        self._memory.capture()
        params = self._shard.table.params
        for arrival in self._arrivals:
            arrival.wait()
            arrival.keep()
        if self._first_sums is None:
            self._first_sums = sum(arrival.nbytes for arrival in self._arrivals)
        self._context.side.join()  # from here on sums are read on the user's stream: shown, handed over, stepped
        for arrival in self._arrivals:
            for index in () if has_joined else arrival.owned:
                if params[index].grad is not None or self._visible.was_taken(index):
                    self._visible.show(index, arrival.gradient(index), arrival.in_accumulation_dtype(index))

    def show(self, was_consumed: bool) -> None:
        """Show the sums of owned parameters unless they were used up, and `AbsentGradient` for the rest."""
        arrived = [index for arrival in self._arrivals for index in arrival.indices]
        with untouched():
            self._memory.capture()
            self._visible.hide(arrived if was_consumed else filterfalse(self._is_owned, arrived), was_consumed)
        self._end_iteration()

    def close(self) -> None:
        """Give back the iteration's buffers."""
        self._end_iteration()

    def rebuild(self, ddp: DistributedDataParallel) -> list[NewBucket]:
        """They have no memory of their own if they will lie in scratches."""
        return rebuild_buckets(ddp, frees_memory=self._memory.follows)

    def follow_plan(self, built: Sequence[NewBucket], publishes: bool) -> None:
        """Lay out scratches for the plan's buckets; from the next iteration on, gradients land in them."""
        self._published.clear()
        params_of = [one.params for one in built] or [arrival.params for arrival in self._arrivals]
        buckets = self._shard.plan.buckets
        layouts = [
            ScratchLayout(params, buckets[index], self._shard, self._context.side)
            for index, params in enumerate(params_of)
        ]
        # before sums move: the reducer's own memory, kept by its views, is as large as all gradients
        self._memory.lay_out(layouts, built)
        hand_over(self._shard, self._arrivals, self._visible, publishes)
        self._digest = self._shard.binding.digest
        self._visible.forget()
        self._watch_gradients({layout.index: layout.params for layout in self._memory.layouts})

    def fits_plan(self) -> bool:
        """True if scratches are laid out for the plan: not at first, nor after parameters were frozen or added."""
        return self._digest == self._shard.binding.digest

    def why_refuse(self) -> str | None:
        """None: `BucketMemory` lays out views itself, and follows strides."""
        return None

    def has_local(self) -> bool:
        """Known from every backward pass."""
        return self._saw_local_pass

    def local_marks(self) -> Mapping[int, int]:
        """Noted at the end of each pass."""
        return self._visible.local_marks

    def gradient(self, index: int) -> Tensor | None:
        """The gradient shown in ``param.grad``, or this rank's part of it."""
        grad = self._shard.table.params[index].grad
        if type(grad) is not AbsentGradient:
            return grad
        held = on_its_owner(grad)
        return grad if held is None else self._shard.stepped.own_part(index, held)

    def editable(self, index: int) -> Tensor | None:
        """The gradient or its sum, or this rank's part of it."""
        return self._visible.editable(index)

    def reset(self) -> None:
        """Drop the iteration; peers may still write into receive buffers."""
        self._arrivals.clear()
        self._visible.forget_taken()
        self._memory.reset()

    def drop_carried(self) -> None:
        """Forget shown gradients, and gradients that a local backward pass has taken out."""
        self._saw_local_pass = False
        self._visible.forget_all()
        self._return_first_sums()
        self.is_idle = not self._arrivals and not self._memory.lent

    def detach(self) -> None:
        """Take the tensor hooks off the parameters, and the library's gradients out of ``param.grad``."""
        self._stop_watching()
        self._visible.drop()

    def describe(self) -> list[str]:
        """The memory that the buckets have needed, in words."""
        return [self._memory.describe()]

    def buffer_bytes(self) -> tuple[int, int]:
        """Of scratches, and of receive buffers."""
        pools = (self._context.scratches.statistics, self._context.recv_buffers.statistics)
        return sum(pool.held_bytes for pool in pools), sum(pool.most_bytes for pool in pools)

    # The start of a backward pass

    def gradient_arrives(self, index: int | None) -> None:
        """A gradient of this bucket is about to be accumulated; None: before buckets are known."""
        backward = backward_id()
        if backward != self._backward:
            self._backward = backward
            self._begin_backward()
        if index is not None and index not in self._memory.lent and self._reduces and index >= len(self._arrivals):
            self._memory.point(index)
        self._begun[index] = backward

    def _watch_gradients(self, buckets: Mapping[int | None, Sequence[Tensor]]) -> None:
        """Watch the gradients of these parameters, and no others, from now on."""
        self._stop_watching()
        reference = weakref.ref(self)  # a parameter holds its hooks
        for index, params in buckets.items():
            hook = _gradient_hook(reference, index, self._begun)
            self._hooks += [on_gradient(param, hook) for param in params]

    def _begin_backward(self) -> None:
        """Take out the gradients of earlier passes; lend scratches for gradients that may be copied at once."""
        self.is_idle = False
        ddp = self._ddp_reference()
        if ddp is None:  # its module lives on without it
            self._visible.drop()
            self._reduces = False
            return
        at_end_of_backward(self._end_backward)
        self._reduces = will_reduce(ddp) or self._passes.expect_reduction
        left = self._visible.take_out(self._reduces or self._passes.is_scheduled, self._memory.is_view)
        if not self._reduces:
            return
        self._memory.prepare()
        may_have_unused = finds_unused(ddp) or has_static_graph(ddp)
        if may_have_unused and any(not self._memory.is_view(param, grad) for param, grad in left):
            for index in range(len(self._arrivals), len(self._memory.layouts)):
                self._memory.point(index)  # the reducer copies gradients of unused parameters at once

    def _end_backward(self) -> None:
        """If DDP does not reduce this pass after all, restore ``param.grad`` plus the gradients of this pass.

        Such are a second backward pass through one forward, one outside DDP, and `torch.autograd.grad`. A reentrant
        checkpoint's own pass ends here too; the next gradient of the outer one takes everything out again.
        """
        self._backward = NO_BACKWARD
        self._begun.clear()
        if not self._arrivals:
            self._saw_local_pass = True
            if not self._passes.is_scheduled:  # else what was taken out waits for the schedule's last pass
                self._visible.put_back(self._memory.is_view)
            self._memory.give_back_unfilled()

    # A bucket

    def _start_unplanned(self, index: int, params: list[Tensor], buffer: Tensor | None) -> ReducedSegment | ReducedRuns:
        """Reduce a bucket that is not in the plan to the owners so far.

        Before DDP builds its final buckets it has a single one, unless it was given ``bucket_cap_mb_list`` or looks for
        unused parameters. A second copy of that would be as large as all gradients.
        """
        self._memory.note_buffer(index, buffer)
        is_joined, sizes = buffer is None, [param.nbytes for param in params]
        num_runs = -(-sum(sizes) // RUN_BYTES)
        if num_runs <= BUCKET_RUNS or not self._memory.is_in_own_memory(index):
            layout = self._new_layout(index, params)
            return ReducedSegment(self._context, layout, self._memory.take(layout, buffer))
        segments = []
        for run in filter(None, cut(sizes, range(len(params)), num_runs)):
            layout = self._new_layout(index, [params[place] for place in run])
            segments.append(ReducedSegment(self._context, layout, self._memory.copy(layout, is_joined)))
            segments[-1].wait()
            segments[-1].keep()
        return ReducedRuns(segments)

    def _new_layout(self, index: int, params: list[Tensor]) -> ScratchLayout:
        """Lay out parameters of a bucket that is not in the plan, for the owners so far."""
        index_of, binding = self._shard.table.index_of, self._shard.binding
        bucket = binding.bucket_over(index, [index_of[param] for param in params])
        return ScratchLayout(params, bucket, self._shard, self._context.side)

    # The end of an iteration

    def _end_iteration(self) -> None:
        self._saw_local_pass = False
        held = [arrival for arrival in self._arrivals if not arrival.is_released]
        is_in_flight = not all(arrival.is_summed for arrival in held)
        for arrival in held:
            arrival.release()
        self._memory.end_iteration(len(self._arrivals), is_in_flight)
        self._arrivals.clear()
        self._visible.forget_taken()

    def _return_first_sums(self) -> None:
        """Once the sums of the first pass are free: the first step waits for them all, later ones may keep none."""
        if self._first_sums and not self._context.carried:
            return_freed_memory(self._first_sums)
            self._first_sums = 0

    # Questions

    def _is_owned(self, index: int) -> bool:
        return self._shard.binding.owns(index)


def gradients_of_stage(
    options: ReduceOptions | None,
    shard: Shard,
    ddp: DistributedDataParallel,
    wrapped: CommHook | None,
    side: SideStream,
    passes: ForwardPasses,
    sums_in_fp32: bool,
) -> Gradients:
    """The gradients of stage 2 if it has options, otherwise those of stage 1."""
    if options is None and sums_in_fp32:
        return SummedGradients(shard, ddp, wrapped, side, passes)
    if options is None:
        return Gradients(shard, ddp, wrapped, side)
    check_can_partition(ddp, shard.table, wrapped)
    return PartitionedGradients(shard, ddp, options, side, passes)


def _gradient_hook(
    reference: "weakref.ref[PartitionedGradients]", index: int | None, begun: Mapping[int | None, int]
) -> Callable[[Tensor | None], None]:
    """A tensor hook of a bucket's parameters, which acts at the first of their gradients in a backward pass."""
    last_prepared = begun.get

    def hook(_: Tensor | None) -> None:
        if last_prepared(index) != backward_id():  # runs once per parameter: nothing more than this is done for most
            gradients = reference()
            if gradients is not None:
                gradients.gradient_arrives(index)

    return hook


Arrival = ReducedSegment | ReducedRuns


def hand_over(shard: Shard, arrivals: Sequence[Arrival], visible: VisibleGradients, publishes: bool) -> None:
    """Send sums from old owners to new ones, where owners have changed. Then a collective.

    Every rank walks the parameters in the same order, so the blocking messages cannot deadlock.

    Args:
        shard: knows the new owners.
        arrivals: the buckets of this iteration, with the pieces that each rank got.
        visible: shows gradients.
        publishes: whether gradients are shown on this rank.
    """
    comm, after = shard.comm, shard.binding.pieces
    pairs = ((arrival, index) for arrival in arrivals for index in arrival.pieces)
    moved = [(arrival, index) for arrival, index in pairs if arrival.pieces[index] != after[index]]
    if not moved:
        return
    every = comm.all_gather_ints([int(visible.was_taken(index)) for _, index in moved])
    for place, (arrival, index) in enumerate(moved):
        was_taken = any(every[piece.owner][place] for piece in arrival.pieces[index])
        arrival.wait()
        total = _exchange(shard, arrival, index)
        if total is None:
            continue
        arrival.receive(index, total)
        if was_taken:
            visible.note_taken(index)
        if publishes and (shard.table.params[index].grad is not None or visible.was_taken(index)):
            visible.show(index, arrival.gradient(index), arrival.in_accumulation_dtype(index))


def _exchange(shard: Shard, arrival: Arrival, index: int) -> Tensor | None:
    """Send a sum to its new owners. Returns this rank's new piece of it; None if it has none, or the same as before.

    A collective.
    """
    comm, param = shard.comm, shard.table.params[index]
    before, after = arrival.pieces[index], shard.binding.pieces[index]
    old, new = piece_of(before, comm.group_rank), piece_of(after, comm.group_rank)
    mine = None if old is None else arrival.total(index)
    cuts = is_cut(before) or is_cut(after)
    found: list[tuple[slice, Mapping[str, Tensor]]] = []
    for move in moves(before, after):
        elements = slice(move.start, move.stop)
        if move.source == comm.group_rank and old is not None and mine is not None:
            comm.send_tree(_elements(mine, param, old, elements) if cuts else mine, move.target)
        elif move.target == comm.group_rank:
            found.append((elements, {"sum": comm.receive_tree(move.source, param.device)}))
    if new is None or new == old:
        return None
    if not cuts:
        return found[0][1]["sum"]
    if old is not None and mine is not None and old.start < new.stop and new.start < old.stop:
        kept = slice(max(old.start, new.start), min(old.stop, new.stop))
        found.append((kept, {"sum": _elements(mine, param, old, kept)}))
    whole: Tensor = join_parts(found, param, slice(new.start, new.stop) if is_cut(after) else None)["sum"]
    return whole


def _elements(total: Tensor, param: Tensor, piece: Piece, elements: slice) -> Tensor:
    """Some elements of the sum of a piece, 1-D and contiguous."""
    if total.shape == param.shape:
        return part_of(total, param, elements).contiguous()
    return total[elements.start - piece.start : elements.stop - piece.start].contiguous()
