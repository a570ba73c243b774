"""Stage 2: a rank keeps averaged gradients only of what it owns, and DDP's buckets share a few scratch buffers.

[Note: gradients of stage 2]
*scratch*: a buffer of a pool into which the reducer writes one bucket, laid out by owner instead of in DDP's order.
*slice*: one owner's part of it. *sum*: this rank's slice, averaged over the ranks; in place in the scratch where dtypes
allow it. *kept*: the sum copied out, so that the scratch is free while the step still waits.

An iteration, from the third on (the first two show DDP's layouts, and reduce whole buckets):

1. the first gradient of a bucket is about to be accumulated: lend a scratch, point the reducer's views at it;
2. the bucket is full: wait for the one before it, then send the slices of this one to their owners;
3. the step of the bucket before uses its sum, or else it is kept; its scratch goes back to the pool;
4. after backward, ``param.grad`` is the sum for what this rank owns if the step has not used it up, and otherwise an
   `AbsentGradient`, which says so to whoever computes with it.

So besides what is kept there are at most three buffers: one being filled, one being reduced, one to receive into.

Gradients accumulate where they rest: what ``param.grad`` shows at the start of a backward pass is taken out and added
to the next sum, unless `zero_grad` has dropped it.

Alternatives considered: freeing each bucket's own storage (its memory must then be faulted in again for every bucket,
and it cannot be freed before backward ends; it is the fallback where the reducer does not follow its views).
"""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from ddp_zero.absent import AbsentGradient, absent_gradient
from ddp_zero.grad_bucket import ReducedSegment, ReduceOptions, ScratchLayout, WholeBucket, Workshop
from ddp_zero.grad_reduce import sum_whole
from ddp_zero.gradients import Arrival, CommHook
from ddp_zero.parameters import ParameterTable
from ddp_zero.reducer import (
    BucketViews,
    backward_id,
    finds_unused,
    gradients_are_views,
    has_static_graph,
    in_backward,
    offsets_in_bucket,
    reduced_parameters,
    will_reduce,
    window,
)
from ddp_zero.sharded_step import ShardedStep
from ddp_zero.side_stream import SideStream
from ddp_zero.tracing import label, logger


class PartitionedGradients:
    """Stage 2: see the module docstring.

    Args:
        sharded: the step.
        ddp: the model.
        options: how gradients travel.
        side: the stream that sums and steps.
    """

    reach_joined = True

    def __init__(
        self, sharded: ShardedStep, ddp: DistributedDataParallel, options: ReduceOptions, side: SideStream
    ) -> None:
        self._sharded = sharded
        self._ddp_reference = weakref.ref(ddp)  # its reducer holds the hook that holds this
        self._workshop = Workshop(sharded, side, options)
        self._layouts: list[ScratchLayout] = []
        self._digest: int | None = None
        self._views: dict[int, BucketViews] = {}  # by bucket, once captured
        self._lent: dict[int, Tensor] = {}  # scratches of buckets that are being filled
        self._arrivals: list[ReducedSegment | WholeBucket] = []
        self._buffers: dict[int, Tensor] = {}  # the reducer's own, of this iteration
        self._hooks: list[RemovableHandle] = []
        self._backward = -1
        self._reduces = False
        self._shown = WeakTensorKeyDictionary()  # averaged gradients in param.grad: their exact sum, their version
        self._absent: dict[tuple[int, bool], AbsentGradient] = {}
        self._follows = True
        self._freed: list[tuple[torch.UntypedStorage, int]] = []

    # An iteration, in the order in which the hook asks

    def open(self) -> None:
        """Forget the buckets of the last iteration."""
        self._end_iteration()

    def start(self, state: Any, bucket: GradBucket, is_planned: bool) -> tuple[Future[Any], Arrival]:
        """Finish the reduction of the bucket before, start that of this one."""
        for arrival in self._arrivals:
            arrival.wait()
        if in_backward():
            self._note_buffer(bucket)
        arrival = self._start_planned(bucket) if is_planned and self._layouts else self._start_whole(bucket)
        self._arrivals.append(arrival)
        published: Future[Tensor] = Future()
        published.set_result(bucket.buffer())  # the reducer copies nothing: it is in its own memory
        return published, arrival

    def settle(self) -> None:
        """Keep what has been summed and not used."""
        for arrival in self._arrivals:
            if isinstance(arrival, ReducedSegment) and arrival.is_summed:
                arrival.keep()

    def lend_all(self, has_joined: bool) -> None:
        """Finish every reduction; show the sums of what this rank owns, where anybody has used the parameter."""
        self._capture()
        params = self._sharded.table.params
        for arrival in self._arrivals:
            carried = set(self._workshop.carried)
            arrival.wait()
            if isinstance(arrival, ReducedSegment):
                arrival.keep()
                for index in () if has_joined else arrival.layout.owned:
                    if params[index].grad is not None or index in carried:
                        params[index].grad = grad = arrival.gradient(index)
                        self._shown[grad] = (arrival.exact(index), grad._version)

    def publish(self, was_consumed: bool) -> None:
        """Show the sums of owned parameters unless they were used up, and `AbsentGradient` for the rest."""
        if not self._layouts:
            self._end_iteration()  # DDP's first layout: it has published whole gradients
            return
        whole = {} if was_consumed else self._copies_of_owned()
        self._capture()
        params, index_of = self._sharded.table.params, self._sharded.table.index_of
        for arrival in self._arrivals:
            for index in (index_of[param] for param in arrival.params):
                if index in whole:
                    params[index].grad = whole[index]
                    self._shown[whole[index]] = (None, whole[index]._version)
                elif params[index].grad is not None and (was_consumed or not self._is_owned(index)):
                    params[index].grad = self._absence(index, was_consumed)
        self._end_iteration()

    def adopted(self) -> None:
        """Lay out scratches for the plan's buckets; from the next iteration on, gradients land in them."""
        buckets = self._sharded.binding.plan.buckets
        self._layouts = [
            ScratchLayout(arrival.params, buckets[index], self._sharded) for index, arrival in enumerate(self._arrivals)
        ]
        self._digest = self._sharded.binding.digest
        self._absent.clear()
        for hook in self._hooks:
            hook.remove()
        reference = weakref.ref(self)  # a parameter holds its hooks
        for layout in self._layouts:
            on_gradient = partial(_on_gradient, reference, layout.index)
            self._hooks += [_register(param, on_gradient) for param in layout.params]

    def fits_plan(self) -> bool:
        """Whether scratches, if any, are laid out for the plan in force: not after parameters were frozen or added."""
        return not self._layouts or self._digest == self._sharded.binding.digest

    def check_untouched(self) -> None:
        """Nothing was left to be changed: `AbsentGradient` refuses."""

    def reset(self) -> None:
        """Drop the iteration; peers may still write into what was in flight."""
        for arrival in self._arrivals:
            if isinstance(arrival, ReducedSegment):
                arrival.abandon()
        self._arrivals.clear()
        self._workshop.carried.clear()
        self._lent.clear()
        self._workshop.furnish(self._layouts)
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def describe(self) -> list[str]:
        """How much memory the buckets have needed."""
        scratches, rooms = self._workshop.scratches.statistics, self._workshop.rooms.statistics
        how = "shared by DDP's buckets" if self._follows else "beside DDP's buckets, which are freed after backward"
        most = scratches.most_bytes + rooms.most_bytes
        return [
            f"gradients: at most {scratches.most_lent} scratch buffers {how}, {rooms.most_lent} to receive into, "
            f"{most:,} bytes in all"
        ]

    # The start of a backward pass

    def gradient_arrives(self, index: int) -> None:
        """A gradient of this bucket is about to be accumulated."""
        backward = backward_id()
        if backward != self._backward:
            self._backward = backward
            self._begin_backward()
        if self._reduces and index not in self._lent and index >= len(self._arrivals):
            self._point_at_scratch(index)

    def _begin_backward(self) -> None:
        """Take out what earlier passes have left in ``param.grad``; have scratches for what may be copied at once."""
        ddp = self._ddp
        will_be_reduced = will_reduce(ddp)
        left = self._take_out_gradients(will_be_reduced)
        for storage, nbytes in self._freed if will_be_reduced else ():
            storage.resize_(nbytes)
        self._reduces = will_be_reduced and self._follows and bool(self._views)
        may_have_unused = finds_unused(ddp) or has_static_graph(ddp)
        if self._reduces and may_have_unused and left:  # the reducer copies those of unused parameters at once
            for index in range(len(self._arrivals), len(self._layouts)):
                if index not in self._lent:
                    self._point_at_scratch(index)

    def _take_out_gradients(self, will_be_reduced: bool) -> bool:
        """Carry averaged gradients over to the next sums; says whether any gradients of this rank alone are left.

        Raises:
            RuntimeError: if a step has used up gradients that were not set to None since, or if averaged gradients
                would be mixed with those of this rank alone.
        """
        table, carried, left = self._sharded.table, self._workshop.carried, False
        for index, param in enumerate(table.params):
            grad = param.grad
            if grad is None:
                continue
            shown = None if isinstance(grad, AbsentGradient) else self._shown.get(grad)
            if isinstance(grad, AbsentGradient):
                if grad.consumed:
                    raise RuntimeError(
                        f"Expected zero_grad() between a step inside backward and the next backward pass, got "
                        f"{table.label(index)} without it ({self._where}): DDP would have accumulated gradients, and "
                        "stage 2 has used up the first. Call opt.zero_grad() after opt.step(); to accumulate, run "
                        "all but the last backward pass in opt.accumulate()."
                    )
                param.grad = None
            elif shown is not None:
                exact, version = shown
                carried[index] = grad if exact is None or grad._version != version else exact
                param.grad = None
            else:
                left = left or not self._is_view(param, grad)
                continue
            if not will_be_reduced:
                raise RuntimeError(
                    f"Expected no averaged gradients at a backward pass under ddp.no_sync(), got one for "
                    f"{table.label(index)} ({self._where}): this rank's own would be added to them. Call "
                    "opt.zero_grad() before, or accumulate in opt.accumulate() instead of ddp.no_sync()."
                )
        return left

    def _point_at_scratch(self, index: int) -> None:
        layout, views = self._layouts[index], self._views[index]
        scratch = self._workshop.scratches.lend(layout.nbytes, layout.device, like=views.scratch)
        self._workshop.side.wait_for(scratch)
        views.point_at(layout.flat(scratch), scratch)
        self._lent[index] = scratch

    # A bucket

    def _note_buffer(self, bucket: GradBucket) -> None:
        index, buffer = bucket.index(), bucket.buffer()
        self._buffers[index] = buffer
        if index in self._views and not self._views[index].are_of(buffer):  # DDP has rebuilt its buckets
            for scratch in self._lent.values():
                self._workshop.give_back(scratch)
            self._lent.clear()
            self._views.clear()

    def _start_planned(self, bucket: GradBucket) -> ReducedSegment:
        layout = self._layouts[bucket.index()]
        scratch = self._lent.pop(layout.index, None)
        has_landed = scratch is not None
        if scratch is None:
            scratch = self._workshop.scratches.lend(layout.nbytes, layout.device)
        flat = layout.flat(scratch)
        if in_backward():
            self._collect(layout, flat, has_landed)
        else:
            flat.zero_()  # on a joined rank there is nothing
        return ReducedSegment(self._workshop, layout, scratch)

    def _collect(self, layout: ScratchLayout, flat: Tensor, has_landed: bool) -> None:
        """See that every gradient of the bucket is in its scratch."""
        views = self._views.get(layout.index)
        start, size = flat.data_ptr(), flat.element_size()
        for param in layout.params:
            grad, offset = param.grad, layout.offsets[param]
            if grad is None:
                window(flat, param, offset).zero_()
            elif grad.data_ptr() != start + offset * size and param.numel():
                window(flat, param, offset).copy_(grad)
                if views is not None and self._follows:
                    self._note_elsewhere(views, param, grad, has_landed)

    def _note_elsewhere(self, views: BucketViews, param: Tensor, grad: Tensor, has_landed: bool) -> None:
        """A gradient has landed elsewhere: in a view not seen before, in memory given away, or the reducer is another.

        Raises:
            RuntimeError: if it may have been overwritten since.
        """
        if not views.is_captured(param):
            if has_landed:
                views.capture(param, grad)
        elif has_landed:
            logger.warning(
                "DDP's reducer does not write gradients where its views point; its buckets are freed after backward "
                "instead of being shared (%s)",
                self._where,
            )
            self._follows = False
        else:
            raise RuntimeError(
                f"Expected backward() outside ddp.no_sync() where forward was, got a gradient of "
                f"{self._sharded.table.label(self._sharded.table.index_of[param])} in memory that was not prepared "
                f"({self._where}). Run forward and backward in the same context."
            )

    def _start_whole(self, bucket: GradBucket) -> WholeBucket:
        """Average a bucket on every rank, where it is: the plan does not know it yet."""
        params, buffer, workshop = bucket.parameters(), bucket.buffer(), self._workshop
        views = self._views.get(bucket.index()) if in_backward() and self._follows else None
        if views is not None:
            if bucket.index() not in self._lent:
                self._point_at_scratch(bucket.index())
            self._collect(self._layouts[bucket.index()], buffer, has_landed=True)
        with label("reduce_whole", bucket=bucket.index()):
            buffer.mul_(1.0 / workshop.predivide_factor)
            after = workshop.predivide_factor / workshop.comm.world_size
            subject = (self._sharded.binding.digest, bucket.index())
            sum_whole(workshop.comm, buffer, subject, workshop.options.comm_dtype, after)
        offsets = offsets_in_bucket(params, self._sharded.table.index_of)
        index_of = self._sharded.table.index_of
        window_of = views.window if views is not None else lambda param: window(buffer, param, offsets[index_of[param]])
        return WholeBucket(params, window_of, self._sharded)

    # The end of an iteration

    def _copies_of_owned(self) -> dict[int, Tensor]:
        """Owned gradients of buckets that were averaged whole, by index, in memory of their own."""
        table = self._sharded.table
        whole = (arrival for arrival in self._arrivals if isinstance(arrival, WholeBucket))
        grads = {table.index_of[param]: param.grad for arrival in whole for param in arrival.params}
        return {index: grad.clone() for index, grad in grads.items() if grad is not None and self._is_owned(index)}

    def _capture(self) -> None:
        """Get hold of the reducer's views, which are in ``param.grad`` now, and give its own memory back."""
        if not self._follows:
            return
        for layout in self._layouts:
            buffer = self._buffers.get(layout.index)
            if buffer is None:
                continue
            views = self._views.get(layout.index)
            if views is None or views.offsets is not layout.offsets:
                views = BucketViews(buffer, layout.offsets, views)
                self._views[layout.index] = views
            for param in layout.params:
                if param.grad is not None and _share_memory(param.grad, buffer):
                    views.capture(param, param.grad)

    def _end_iteration(self) -> None:
        for arrival in self._arrivals:
            arrival.release()
        for index in range(len(self._arrivals)):
            scratch = self._lent.pop(index, None)
            if scratch is not None:
                self._workshop.give_back(scratch)
        self._arrivals.clear()
        if any(views.scratch is None for views in self._views.values()):
            self._workshop.furnish(self._layouts)
            self._park()
        self._free_buckets()
        self._buffers.clear()
        self._workshop.scratches.trim()
        self._workshop.rooms.trim()

    def _park(self) -> None:
        """Until its next iteration, each bucket shares one scratch with the others, and has no memory of its own."""
        for index, views in self._views.items():
            layout = self._layouts[index]
            scratch = self._workshop.scratches.lend(layout.nbytes, layout.device)
            views.point_at(layout.flat(scratch), scratch)
            self._workshop.scratches.give_back(scratch)

    def _free_buckets(self) -> None:
        """Where the reducer does not follow: its memory is needed from the first gradient on, and no longer."""
        if self._follows or not self._buffers:
            return
        self._freed = [
            (buffer.untyped_storage(), buffer.untyped_storage().nbytes()) for buffer in self._buffers.values()
        ]
        for storage, _ in self._freed:
            storage.resize_(0)

    # Questions

    def _is_owned(self, index: int) -> bool:
        return self._sharded.binding.owners[index] == self._sharded.comm.group_rank

    def _is_view(self, param: Tensor, grad: Tensor) -> bool:
        return any(views.is_view(param, grad) for views in self._views.values())

    def _absence(self, index: int, was_consumed: bool) -> AbsentGradient:
        key = (index, was_consumed)
        if key not in self._absent:
            table = self._sharded.table
            name = table.label(index)
            if was_consumed:
                reason = (
                    f"Expected the gradient of {name}, got none: the step inside backward has used it up (stage 2, "
                    f"{self._where}). To look at gradients, or to clip or scale them before the step, build the "
                    "optimizer with overlap_with_ddp=False."
                )
            else:
                owner = self._sharded.comm.name(self._sharded.binding.owners[index])
                reason = (
                    f"Expected the gradient of {name}, got none: stage 2 keeps it on {owner} only (this is "
                    f"{self._where}). opt.full_grad(param) gets it on every rank; a norm over the parameters here "
                    "would be that of a part of the model."
                )
            self._absent[key] = absent_gradient(table.params[index], was_consumed, reason)
        return self._absent[key]

    @property
    def _where(self) -> str:
        return self._sharded.comm.name(self._sharded.comm.group_rank)

    @property
    def _ddp(self) -> DistributedDataParallel:
        ddp = self._ddp_reference()
        assert ddp is not None, "the model in whose backward this is called is alive"
        return ddp


def check_can_partition(ddp: DistributedDataParallel, table: ParameterTable, wrapped: CommHook | None) -> None:
    """See that stage 2 can take over the gradients of a model.

    Raises:
        ValueError: for a wrapped hook, for a model whose gradients are not views of its buckets, or with parameters
            that are in another optimizer or none.
    """
    if wrapped is not None:
        raise ValueError(
            "Expected no communication hook to wrap with stage=2, which has a reduction of its own, got one. Pass "
            "None; to compress gradients, build the optimizer with grad_comm_dtype=torch.bfloat16 or torch.float16."
        )
    if not gradients_are_views(ddp):
        raise ValueError(
            "Expected gradient_as_bucket_view=True with stage=2, got False: every rank would keep all gradients beside "
            "DDP's buckets. Wrap the model with DistributedDataParallel(..., gradient_as_bucket_view=True)."
        )
    foreign = [name for name, param in reduced_parameters(ddp) if param not in table.index_of]
    if foreign:
        raise ValueError(
            f"Expected every parameter that DDP reduces in the optimizer with stage=2, got {foreign[0]!r} elsewhere, "
            f"{len(foreign)} in all. Add it to the optimizer, freeze it before wrapping the model, or use stage=1."
        )


def gather_gradient(sharded: ShardedStep, index: int) -> Tensor | None:
    """A parameter's averaged gradient from its owner, on every rank; None if it has none. A collective.

    Raises:
        RuntimeError: if it was used up.
    """
    param, comm = sharded.table.params[index], sharded.comm
    owner = sharded.binding.owners[index]
    grad = param.grad
    is_absent = isinstance(grad, AbsentGradient)
    statements = comm.all_gather_ints([int(grad is not None) + int(is_absent)])
    if statements[owner] == [0]:
        return None
    if isinstance(grad, AbsentGradient) and statements[owner] == [2]:
        raise grad.error()
    full = torch.empty_like(param) if is_absent or grad is None else grad.detach().clone()
    contiguous = full.contiguous()
    comm.broadcast(contiguous, owner)
    return full.copy_(contiguous)


def _on_gradient(reference: "weakref.ref[PartitionedGradients]", index: int, grad: Tensor | None) -> None:
    gradients = reference()
    if gradients is not None:
        gradients.gradient_arrives(index)


def _register(param: Tensor, hook: Callable[[Tensor | None], None]) -> RemovableHandle:
    """Register a tensor hook, also on a parameter that is frozen now: it may not be at its next gradient."""
    is_trainable = param.requires_grad
    param.requires_grad_(True)
    handle: RemovableHandle = param.register_hook(hook)
    param.requires_grad_(is_trainable)
    return handle


def _share_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
