"""Stage 2's buckets: the scratches that DDP's reducer writes them into, their reduction, and this rank's sums.

Terms are defined in [Note: gradients of stage 2] in `partitioned.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddp_zero.core.backward.gradients import BucketGradients
from ddp_zero.core.backward.reducer import BucketViews, NewBucket, Window, ddp_takes, windows_in_bucket
from ddp_zero.core.backward.scratch_buffers import BufferPool, SideStream, pools_for
from ddp_zero.core.comm.reduction import (
    DirectSum,
    GroupedReduction,
    SegmentReduction,
    recv_numel,
    scales_late,
    start_reduction,
    sum_dtype,
    sums_directly,
)
from ddp_zero.core.comm.tracing import logger
from ddp_zero.core.local.memory import FreedMemory
from ddp_zero.core.plan.buckets import RECV_BUFFERS, SCRATCHES, bucket_mb, gradient_buffers
from ddp_zero.core.plan.ownership import Piece, Pieces, is_cut
from ddp_zero.core.plan.shard_plan import Bucket
from ddp_zero.core.step.rank_shard import Shard


@dataclass(frozen=True)
class ReduceOptions:
    """The options of the reduction.

    Attributes:
        comm_dtype: dtype on the wire, summed in fp32; None: their own.
        predivide_factor: gradients are divided by this before they are summed, and by the rest of the number of ranks
            after; None: by the number of ranks before, as DDP does.
    """

    comm_dtype: torch.dtype | None = None
    predivide_factor: float | None = None

    def __post_init__(self) -> None:
        if self.comm_dtype not in (None, torch.float16, torch.bfloat16, torch.float32, torch.float64):
            raise TypeError(
                "Expected grad_comm_dtype to be a floating dtype of at least 16 bits or None, got "
                f"{self.comm_dtype!r}. [ZERO-103]"
            )
        if self.predivide_factor is None:
            return
        if isinstance(self.predivide_factor, bool) or not isinstance(self.predivide_factor, int | float):
            raise TypeError(
                f"Expected gradient_predivide_factor to be a number or None, got {self.predivide_factor!r}. [ZERO-103]"
            )
        if not self.predivide_factor > 0:
            raise ValueError(f"Expected gradient_predivide_factor above 0, got {self.predivide_factor!r}. [ZERO-103]")


def options_of_stage(
    stage: int, comm_dtype: torch.dtype | None, predivide_factor: float | None
) -> ReduceOptions | None:
    """The options of a stage's reduction; None in stage 1, where DDP reduces."""
    if type(stage) is not int:
        raise TypeError(f"Expected stage to be the int 1 or 2, got {stage!r}. [ZERO-103]")
    if stage not in (1, 2):
        raise ValueError(f"Expected stage 1 or 2, got {stage!r}. [ZERO-103]")
    if stage == 2:
        return ReduceOptions(comm_dtype, predivide_factor)
    if comm_dtype is not None or predivide_factor is not None:
        raise ValueError(
            f"grad_comm_dtype and gradient_predivide_factor need stage=2, got {comm_dtype!r} and {predivide_factor!r} "
            "with stage=1. In stage 1 wrap a hook such as bf16_compress_hook instead. [ZERO-105]"
        )
    return None


class ScratchLayout:
    """The layout of one bucket's gradients in its scratch: slices in rank order, then gradients that no rank steps.

    Args:
        params: the bucket's parameters, in DDP's order.
        side: the stream that sums and steps.

    Attributes:
        params, indices: its parameters, in DDP's order, as tensors and as places in the optimizer.
        pieces: the ranks that get sums, and of which elements, by index of the parameter.
        owned: the parameters of which this rank gets the sum of anything.
        own_windows: where their sums lie in this rank's slice.
        on_stream: a context in which the bucket is reduced and stepped.
        waiting: the label of the wait for its sums.
    """

    is_prepared: bool | None = None
    recv_numel = 0

    def __init__(self, params: list[Tensor], bucket: Bucket, shard: Shard, side: SideStream) -> None:
        table = shard.table
        self.index = bucket.index
        self.params = params
        self.indices = [table.index_of[param] for param in params]
        self.dtype, self.device = params[0].dtype, params[0].device
        self.on_stream = side.running(self.device)
        self.windows: dict[Tensor, Window] = {}
        self.ranges: list[tuple[int, int]] = []
        self.pieces: dict[int, Pieces] = {}
        start = 0
        for segment in bucket.segments:
            for index, offset, (first, last) in zip(segment.params, segment.offsets, segment.ranges, strict=True):
                window = Window.of(table.params[index], start + offset - first)
                earlier = self.windows.setdefault(table.params[index], window)
                assert earlier == window, "the parts of a parameter lie end to end, in the order of ranks"
                self.pieces[index] = (*self.pieces.get(index, ()), Piece(segment.owner, first, last))
            self.ranges.append((start, start + segment.numel))
            start += segment.numel
        for param in params:
            if param not in self.windows:
                self.windows[param] = Window.of(param, start)
                start += param.numel()
        self.numel = start
        self.nbytes = start * self.dtype.itemsize
        self.waiting = shard.trace.label("wait_reduce", bucket.index)
        own = bucket.segments[shard.comm.group_rank]
        self.owned = own.params
        self.own_windows = {
            index: Window(offset, (last - first,), (1,))
            if is_cut(self.pieces[index])
            else Window.of(table.params[index], offset)
            for index, offset, (first, last) in zip(own.params, own.offsets, own.ranges, strict=True)
        }

    def flat(self, raw: Tensor) -> Tensor:
        """A byte buffer as this bucket's gradients, 1-D."""
        return raw[: self.nbytes].view(self.dtype)


class ReduceContext:
    """Shared by the buckets of one model while their gradients are reduced.

    Args:
        side: the stream that sums and steps.

    Attributes:
        factor: gradients are multiplied by it before they are summed.
        late_factor: and by this after, unless it is 1.
        carried: gradients accumulated by earlier backward passes, by parameter index, not yet in any sum.
        recv_buffers: separate, since the reducer may zero a bucket that has no scratch now, in the scratch that it had
            last.
    """

    scratches: BufferPool
    recv_buffers: BufferPool

    def __init__(self, shard: Shard, side: SideStream, options: ReduceOptions) -> None:
        self.shard = shard
        self.side = side
        self.options = options
        self.comm = shard.comm
        self.where = self.comm.name(self.comm.group_rank)
        num_summed = shard.everyone.world_size
        predivided = options.predivide_factor or num_summed
        self.factor, self.late_factor = 1.0 / predivided, predivided / num_summed
        self.carried: dict[int, Tensor] = {}
        self._prepared: dict[tuple[ScratchLayout, int, int], OwnedSums] = {}
        self.furnish([])

    def furnish(self, layouts: Sequence[ScratchLayout]) -> None:
        """Start with empty pools for buckets of these sizes."""
        # views of the old pools would keep dropped buffers alive, and an address may be reused by a new one
        self._prepared.clear()
        sizes = [layout.nbytes for layout in layouts]
        self.scratches, self.recv_buffers = pools_for(sizes, self.side, self._prepared.clear)

    def prepares(self, layout: ScratchLayout, scratch: Tensor) -> bool:
        """True if a bucket is summed by direct messages, in its own dtype and in place; decided once."""
        if layout.is_prepared is None:
            wire, flat = self.options.comm_dtype, layout.flat(scratch)
            parts = [flat[begin:end] for begin, end in layout.ranges]
            travels_smaller = wire is not None and wire.itemsize < layout.dtype.itemsize
            in_place = sum_dtype(layout.dtype) == layout.dtype and not travels_smaller
            layout.is_prepared = in_place and sums_directly(self.shard.ranks, parts)
            layout.recv_numel = recv_numel(self.comm, parts, layout.ranges[-1][1]) if layout.is_prepared else 0
        return layout.is_prepared

    def prepare(self, layout: ScratchLayout, scratch: Tensor, recv_buffer: Tensor | None) -> "OwnedSums":
        """The sums of a bucket that lies in this scratch and receives into this buffer."""
        # addresses are safe as a key: a pool that drops a buffer clears this table before the address can be reused
        key = (layout, scratch.data_ptr(), 0 if recv_buffer is None else recv_buffer.data_ptr())
        found = self._prepared.get(key)
        if found is None:
            found = self._prepared[key] = OwnedSums(self, layout, layout.flat(scratch), recv_buffer)
        return found


class OwnedSums:
    """The sums that this rank gets of one bucket, in place in its scratch; prepared once for memory that is lent again.

    Attributes:
        gradients: windows of the sum in the shape of parameters, or of this rank's parts of them, by index.
    """

    def __init__(self, context: ReduceContext, layout: ScratchLayout, flat: Tensor, recv_buffer: Tensor | None) -> None:
        parts = [flat[begin:end] for begin, end in layout.ranges]
        own = parts[context.comm.group_rank]
        slots = flat.new_empty(0)
        if recv_buffer is not None:
            slots = recv_buffer[: layout.recv_numel * flat.itemsize].view(flat.dtype)
        self.direct = DirectSum(context.comm, parts, own, slots, layout.ranges[-1][1], context.factor)
        self.gradients = {index: window.view(own) for index, window in layout.own_windows.items()}


class ReducedSegment(BucketGradients):
    """A bucket in flight to the owners; then this rank's sum of it.

    Attributes:
        is_released: whether `release` was called, and nothing is held.
    """

    def __init__(self, context: ReduceContext, layout: ScratchLayout, scratch: Tensor) -> None:
        self.params, self.indices, self.owned = layout.params, layout.indices, layout.owned
        self.layout, self.on_stream = layout, layout.on_stream
        self.is_summed = self.is_released = False
        self._context = context
        self._scratch: Tensor | None = scratch
        self._recv_buffers: list[Tensor] = []
        self._sum: Tensor | None = None
        self._gradients: Mapping[int, Tensor] = {}
        self._is_ready = False  # whether these are what the step uses, in the dtype of the parameters
        self._received: dict[int, Tensor] = {}
        with layout.on_stream:  # rule 4 of [Note: who owns memory on an accelerator]
            start = self._start_prepared if context.prepares(layout, scratch) else self._start
            self._reduction: DirectSum | SegmentReduction | GroupedReduction | None = start(scratch)

    def _start_prepared(self, scratch: Tensor) -> DirectSum:
        context, layout = self._context, self.layout
        recv_buffer = self._lend_recv_buffer(layout.recv_numel * layout.dtype.itemsize) if layout.recv_numel else None
        sums = context.prepare(layout, scratch, recv_buffer)
        self._sum, self._gradients, self._is_ready = sums.direct.out, sums.gradients, True
        # from here on peers write into the receive buffer and read the scratch: neither may be touched before `wait`
        sums.direct.start((context.shard.binding.digest, layout.index))
        return sums.direct

    def _start(self, scratch: Tensor) -> SegmentReduction | GroupedReduction:
        context, layout, flat = self._context, self.layout, self.layout.flat(scratch)
        comm, options = context.comm, context.options
        start, stop = layout.ranges[comm.group_rank]
        wire, factor = flat, context.factor
        travels_smaller = options.comm_dtype is not None and options.comm_dtype.itemsize < layout.dtype.itemsize
        parts = [flat[begin:end] for begin, end in layout.ranges]
        ranks = context.shard.ranks
        averages = ranks.replicas is None and factor == 1.0 / comm.world_size and comm.averages(parts)
        # scaled before the cast, or a product would be rounded, or overflow, in the dtype on the wire
        if (travels_smaller or not (averages or scales_late(comm, flat))) and factor != 1.0:
            flat.mul_(factor)
            factor = 1.0
        if options.comm_dtype is not None and travels_smaller:
            raw = self._lend_recv_buffer(layout.numel * options.comm_dtype.itemsize)
            wire = raw[: layout.numel * options.comm_dtype.itemsize].view(options.comm_dtype).copy_(flat)
        out = flat[start:stop]
        if sum_dtype(out.dtype) != out.dtype:
            out = torch.empty_like(out, dtype=sum_dtype(out.dtype))
        self._sum = out
        parts = [wire[begin:end] for begin, end in layout.ranges]
        whole, recv_buffer = wire[: layout.ranges[-1][1]], wire.new_empty(0)
        numel = recv_numel(comm, parts, whole.numel())
        if numel:
            nbytes = numel * wire.element_size()
            recv_buffer = self._lend_recv_buffer(nbytes)[:nbytes].view(wire.dtype)
        subject = (context.shard.binding.digest, layout.index)
        return start_reduction(ranks, whole, parts, out, recv_buffer, subject, whole.numel(), factor)

    def wait(self) -> None:
        """Block until the sum is complete, with the sums of earlier passes."""
        if self._reduction is None:
            return
        context, layout = self._context, self.layout
        # waited for on the side stream: the current stream, with backward's kernels, must not wait for a reduction
        with layout.on_stream, layout.waiting:
            total = self._reduction.wait()
            if context.late_factor != 1.0:
                total.mul_(context.late_factor)
            if total.dtype != layout.dtype and self._was_summed_wide():
                total.copy_(total.to(layout.dtype))  # rounded as DDP's average; several add up in fp32
            # added on the stream that has summed; the next reader of the sum is this stream, or comes after `join`
            for index in self.owned if context.carried else ():
                carried = context.carried.pop(index, None)
                if carried is not None:
                    context.side.keep(carried)  # of the stream that has shown it
                    self.total(index).add_(context.shard.stepped.own_part(index, carried))
        # peers have stopped writing; the pool orders the next receive after the kernels that sum
        for recv_buffer in self._recv_buffers:
            context.recv_buffers.give_back(recv_buffer)
        self._recv_buffers.clear()
        self._reduction = None  # it holds on to memory
        self.is_summed = True

    def _was_summed_wide(self) -> bool:
        """True if the sum has more digits than the dtype of the bucket, as where the backend does not add up itself."""
        context = self._context
        return context.late_factor != 1.0 or context.comm.has_direct_messages(self.layout.device)

    def keep(self) -> None:
        """Once it is summed: copy the sum out for a later step, and free the scratch."""
        if self._scratch is None or self._sum is None or self._reduction is not None:
            return
        with self.on_stream:
            if self._sum.untyped_storage().data_ptr() == self._scratch.untyped_storage().data_ptr():
                # the clone precedes the give-back on this stream: the reducer may fill the scratch again right after
                self._sum, self._gradients, self._is_ready = self._sum.clone(), {}, False
        self._context.scratches.give_back(self._scratch)
        self._scratch = None

    def gradient(self, index: int) -> Tensor:
        """The averaged gradient of an owned parameter, in its shape and dtype; 1-D of this rank's part if it is cut."""
        if self._is_ready:
            return self._gradients[index]
        param = self._context.shard.table.params[index]
        found = self.total(index)
        return found if found.dtype == param.dtype else found.to(param.dtype)

    def in_accumulation_dtype(self, index: int) -> Tensor | None:
        """The same in the dtype of the sum, or None if that does not differ."""
        dtype = self._context.shard.table.params[index].dtype
        if not self._received and self._sum is not None and self._sum.dtype == dtype:
            return None  # without a view of it
        found = self.total(index)
        return None if found.dtype == dtype else found

    def total(self, index: int) -> Tensor:
        """As `gradient`, in the dtype of the sum."""
        found = self._received.get(index) if self._received else self._gradients.get(index)
        if found is not None:
            return found
        assert self._sum is not None, "asked before it is released"
        return self.layout.own_windows[index].view(self._sum)

    def receive(self, index: int, total: Tensor) -> None:
        """Take over the averaged gradient of a parameter, or a part of it, that this rank owns from now on."""
        self._received[index], self._is_ready = total, False

    def release(self) -> None:
        """Free the sum and the scratch, after the step has used them."""
        self._sum, self._gradients, self._is_ready, self.is_released = None, {}, False, True
        self._received.clear()
        # the step has been issued on the side stream; the pool makes the next borrower wait for that stream
        if self._scratch is not None:
            self._context.scratches.give_back(self._scratch)
            self._scratch = None

    @property
    def nbytes(self) -> int:
        """Size of this rank's sum."""
        return 0 if self._sum is None else self._sum.nbytes

    @property
    def pieces(self) -> Mapping[int, Pieces]:
        """The ranks that get the sum of each parameter, by index."""
        return self.layout.pieces

    def _lend_recv_buffer(self, nbytes: int) -> Tensor:
        recv_buffer = self._context.recv_buffers.lend(nbytes, self.layout.device)
        self._recv_buffers.append(recv_buffer)
        return recv_buffer


class ReducedRuns(BucketGradients):
    """A bucket that is too large for one scratch: reduced in runs of parameters, whose sums are kept."""

    is_released = False

    def __init__(self, runs: Sequence[ReducedSegment]) -> None:
        self.params = [param for run in runs for param in run.params]
        self.indices = [index for run in runs for index in run.indices]
        self.pieces = {index: found for run in runs for index, found in run.pieces.items()}
        self.owned = [index for run in runs for index in run.owned]
        self.is_summed, self.on_stream = True, runs[0].on_stream
        self.nbytes = sum(run.nbytes for run in runs)
        self._runs = runs
        self._run_of = {index: run for run in runs for index in run.indices}

    def wait(self) -> None:
        """Nothing is in flight."""

    def keep(self) -> None:
        """The sums are kept."""

    def gradient(self, index: int) -> Tensor:
        """As `ReducedSegment.gradient`."""
        return self._run_of[index].gradient(index)

    def in_accumulation_dtype(self, index: int) -> Tensor | None:
        """As `ReducedSegment.in_accumulation_dtype`."""
        return self._run_of[index].in_accumulation_dtype(index)

    def total(self, index: int) -> Tensor:
        """As `ReducedSegment.total`."""
        return self._run_of[index].total(index)

    def receive(self, index: int, total: Tensor) -> None:
        """As `ReducedSegment.receive`."""
        self._run_of[index].receive(index, total)

    def release(self) -> None:
        """Free the sums."""
        for run in self._runs:
            run.release()


_MIB = 1 << 20
_BUFFERS = SCRATCHES + RECV_BUFFERS
_LEAST_REST = 4  # times the buffers' bytes: a model that is smaller would be slowed down by more than a percent


class BucketMemory:
    """The reducer's buckets and the scratches that they are pointed at.

    The views of DDP's first buckets are seen only when their gradients are ready. Each bucket is then moved out of the
    reducer's own memory (`take`); at the end of backward the reducer puts its view into ``param.grad``, and if that is
    not where it was moved, the reducer does not follow its views (`capture`). A parameter that no rank has used by then
    is captured once one does; until then its view keeps the bucket's own memory alive. When DDP is made to build its
    final buckets, all views are seen, and no memory is ever allocated for them (`lay_out`).

    Attributes:
        layouts: of the plan's buckets; empty until DDP's buckets are known.
        lent: the scratches of buckets that are being filled, by bucket.
        follows: whether the reducer writes where its views point. If not, its own memory is freed after backward.
    """

    def __init__(self, context: ReduceContext) -> None:
        self.layouts: list[ScratchLayout] = []
        self.follows = True
        self._context = context
        self._views: dict[int, BucketViews] = {}  # by bucket, once captured
        self.lent: dict[int, Tensor] = {}
        self._buffers: dict[int, Tensor] = {}  # the reducer's own, of this iteration
        self._moved: list[tuple[BucketViews, list[Tensor]]] = []  # in this iteration, with the gradients taken out
        self._freed: list[tuple[torch.UntypedStorage, int]] = []
        self._heap = FreedMemory()

    # Before gradients land

    def prepare(self) -> None:
        """Restore freed memory of the reducer before a backward pass that will be reduced."""
        # before autograd writes: a view over an empty storage is a null pointer to the reducer
        for storage, nbytes in self._freed:
            storage.resize_(nbytes)
        self._freed.clear()

    def point(self, index: int) -> None:
        """Make the reducer write a bucket into a scratch, unless it does already."""
        if index in self.lent or index not in self._views or not self.follows:
            return
        layout, views = self.layouts[index], self._views[index]
        scratch = self._context.scratches.lend(layout.nbytes, layout.device, like=views.scratch)
        # before the first gradient lands: the views still point at a scratch that may be lent to another bucket
        if views.scratch is not scratch:
            views.point_at(layout.flat(scratch), scratch)
        self.lent[index] = scratch

    def give_back_unfilled(self) -> None:
        """After a backward pass that DDP does not reduce: take back scratches into which no gradient was written."""
        for index, scratch in list(self.lent.items()):
            views = self._views[index]
            # a gradient in a view stays in use until the next pass takes it out: its scratch must not be lent meanwhile
            if not any(param.grad is not None and views.is_view(param, param.grad) for param in views.windows):
                del self.lent[index]
                self._context.scratches.give_back(scratch)

    # When a bucket is full

    def note_buffer(self, index: int, buffer: Tensor | None) -> None:
        """Note the buffer that DDP hands out for a bucket; a new one means that DDP has rebuilt its buckets.

        None on a rank that has joined: DDP stands in for it with zeros.
        """
        if buffer is None:
            return
        self._buffers[index] = buffer
        views = self._views.get(index)
        if views is not None and views.buffer is not buffer:
            self._forget_views()

    def take(self, layout: ScratchLayout, buffer: Tensor | None) -> Tensor:
        """The scratch with a bucket's gradients; the caller gives it back.

        Args:
            layout: the places of gradients; not one of ``layouts`` if the plan does not have the bucket.
            buffer: see `note_buffer`.
        """
        views = self._views.get(layout.index)
        if views is None or views.buffer is not buffer:
            self.note_buffer(layout.index, buffer)
        elif buffer is not None:
            self._buffers[layout.index] = buffer
        is_joined = buffer is None
        landed = self.lent.pop(layout.index, None)
        is_planned = layout.index < len(self.layouts) and self.layouts[layout.index] is layout
        if landed is not None and is_planned:
            # unused parameters: their places hold gradients of the bucket that had this scratch before
            if views is None or views.windows is not layout.windows or not views.hold_all_gradients():
                self._complete(layout, layout.flat(landed))
            return landed
        if landed is None and not is_joined:
            self._check_prepared(layout)
        scratch = self.copy(layout, is_joined)
        if not is_joined and self.follows and not (is_planned and layout.index in self._views):
            self._move(layout, scratch)
        if landed is not None:
            self._context.scratches.give_back(landed)
        return scratch

    def is_in_own_memory(self, index: int) -> bool:
        """True if the reducer has written a bucket into memory of its own, of which no view was captured."""
        return index not in self._views

    def copy(self, layout: ScratchLayout, is_joined: bool) -> Tensor:
        """A scratch with a copy of a bucket's gradients, or of some of them; the caller gives it back."""
        scratch = self._context.scratches.lend(layout.nbytes, layout.device)
        for param, window in layout.windows.items():
            _fill(window.view(layout.flat(scratch)), None if is_joined else param.grad)
        return scratch

    def _complete(self, layout: ScratchLayout, flat: Tensor) -> None:
        """Complete a scratch where the reducer has not written: zeros, gradients in views not captured so far."""
        views = self._views[layout.index]
        start, size = flat.data_ptr(), flat.element_size()
        for param, window in layout.windows.items():
            grad = param.grad
            if grad is not None and (grad.data_ptr() == start + window.offset * size or not param.numel()):
                continue
            _fill(window.view(flat), grad)
            if grad is not None and views.is_captured(param):
                self._give_up()
            elif grad is not None:
                views.capture(param, grad)

    def _check_prepared(self, layout: ScratchLayout) -> None:
        """Check that no gradient has landed in a scratch that was given back, where it may have been overwritten since.

        Raises:
            RuntimeError: naming the parameter.
        """
        if layout.index not in self._views or not self.follows:
            return
        views, table = self._views[layout.index], self._context.shard.table
        for param in layout.windows:
            if param.grad is not None and param.numel() and views.is_captured(param):
                raise RuntimeError(
                    f"The gradient of {table.label(table.index_of[param])} is in memory that was not prepared "
                    f"({self._context.where}), as after a forward pass inside ddp.no_sync() and a backward pass "
                    "outside. Run forward and backward in the same context. [ZERO-407]"
                )

    def _move(self, layout: ScratchLayout, scratch: Tensor) -> None:
        """Capture a full bucket's views and point them at the scratch, which has its gradients already."""
        earlier = self._views.get(layout.index)
        views = BucketViews(self._buffers[layout.index], layout.windows, earlier.captured if earlier else None)
        found = {param: param.grad for param in layout.windows if param.grad is not None}
        for param, grad in found.items():
            views.capture(param, grad)
        views.point_at(layout.flat(scratch), scratch)
        for param in found:
            param.grad = None  # the reducer will set it to what it takes for its view
        self._views[layout.index] = views
        self._moved.append((views, list(found)))
        if earlier is None:
            self._heap.add(layout.nbytes)

    # After backward

    def capture(self) -> None:
        """After the reducer, which has put its views into ``param.grad``: capture those not seen before."""
        for views, params in self._moved:
            self._check_follows(views, params)
        self._moved.clear()
        if not self._buffers:
            return
        if not self.follows:
            self._note_own_memory()
            return
        for index, views in self._views.items():
            if index in self._buffers and not views.are_complete:
                for param in views.windows:
                    if param.grad is not None:
                        views.capture(param, param.grad)

    def _check_follows(self, views: BucketViews, params: Sequence[Tensor]) -> None:
        """Check that the reducer has found its views where they were moved; if not, give up sharing scratches."""
        for param in params:
            if param.grad is None:
                param.grad = views.captured[param]  # from an earlier pass: the reducer leaves what is unused alone
            elif param.numel() and param.grad.data_ptr() != views.window(param).data_ptr():
                self._give_up()
                return

    def _give_up(self) -> None:
        if self.follows:
            logger.warning(
                "DDP's reducer does not write gradients where its views point; its buckets are freed after backward "
                "instead of being shared (%s). [ZERO-217]",
                self._context.where,
            )
        self.follows = False

    def lay_out(self, layouts: list[ScratchLayout], built: Sequence[NewBucket]) -> None:
        """Follow a plan from the next iteration on.

        Args:
            layouts: of its buckets.
            built: the buckets that the reducer has just built for it, or none if it keeps its own.
        """
        self.layouts = layouts
        self._buffers.clear()  # gradients of this iteration were captured, and may be published in other memory now
        if built or not all(self._is_of_same_bucket(index) for index in self._views):
            self._forget_views()
        for index, bucket in enumerate(built):
            if bucket.views:
                self._views[index] = BucketViews(bucket.buffer, windows_in_bucket(bucket.params), bucket.views)

    def _forget_views(self) -> None:
        """The reducer has replaced its buckets."""
        for scratch in self.lent.values():
            self._context.scratches.give_back(scratch)
        self.lent.clear()
        self._views.clear()
        self._freed.clear()

    def end_iteration(self, buckets: int, is_in_flight: bool) -> None:
        """Give back scratches that the iteration's buckets still hold; idle buffers need no pages then.

        To touch pages again takes about 0.5 ms per MiB. So buffers that are large beside the model keep theirs.

        Args:
            buckets: how many have arrived.
            is_in_flight: whether peers may still read lent buffers, since the iteration was given up.
        """
        for index in range(buckets):
            scratch = self.lent.pop(index, None)
            if scratch is not None:
                self._context.scratches.give_back(scratch)
        layouts = self.layouts
        if self.follows and any(
            index >= len(layouts) or views.windows is not layouts[index].windows for index, views in self._views.items()
        ):
            self._context.furnish(self.layouts)
            self._park()
        for storage, _ in self._freed:
            storage.resize_(0)
        self._buffers.clear()
        pools = (self._context.scratches, self._context.recv_buffers)
        for pool in pools:
            pool.trim()
        held = sum(pool.statistics.held_bytes for pool in pools)
        # pages are dropped only when no peer can read them: a message in flight would send zeros
        if not is_in_flight and _LEAST_REST * held <= sum(layout.nbytes for layout in self.layouts):
            for pool in pools:
                pool.rest()

    def reset(self) -> None:
        """Start with new scratches: peers may still write into those that were in flight."""
        self.lent.clear()
        self._buffers.clear()
        self._moved.clear()
        self._context.furnish(self.layouts)

    def is_view(self, param: Tensor, grad: Tensor) -> bool:
        """True if a gradient is the reducer's view of it."""
        return any(views.is_view(param, grad) for views in self._views.values())

    def describe(self) -> str:
        """The memory that the buckets have needed, in words."""
        scratches, recv_buffers = self._context.scratches.statistics, self._context.recv_buffers.statistics
        how = "shared by DDP's buckets" if self.follows else "beside DDP's buckets, which are freed after backward"
        most = scratches.most_bytes + recv_buffers.most_bytes
        return (
            f"gradients: at most {scratches.most_lent} scratch buffers {how}, {recv_buffers.most_lent} to receive "
            f"into, {most:,} bytes in all{self._advice()}"
        )

    def _advice(self) -> str:
        """The most that smaller buckets would save, in words: DDP overfills a bucket by up to one parameter."""
        sizes = [param.nbytes for layout in self.layouts for param in layout.params]
        largest = max((layout.nbytes for layout in self.layouts), default=0)
        cap = bucket_mb(sizes, self._context.comm.world_size, cuts=self._context.shard.binding.cuts)
        saved = gradient_buffers(largest - max(int(cap * _MIB), *sizes, 0)) if sizes else 0
        if saved < _MIB:
            return ""
        option = f"bucket_cap_mb_list=[{cap:.3g}]" if ddp_takes("bucket_cap_mb_list") else f"bucket_cap_mb={cap:.3g}"
        advice = f"DistributedDataParallel({option}) would save up to {saved:,}"
        return f", by formula {_BUFFERS} x {largest:,}; {advice}"

    def _is_of_same_bucket(self, index: int) -> bool:
        return index < len(self.layouts) and self._views[index].windows.keys() == self.layouts[index].windows.keys()

    def _park(self) -> None:
        """Point each bucket at the same scratch until its next iteration, so that none has memory of its own."""
        for index, layout in enumerate(self.layouts):
            if index not in self._views:
                continue
            views = BucketViews(self._views[index].buffer, layout.windows, self._views[index].captured)
            self._views[index] = views
            scratch = self._context.scratches.lend(layout.nbytes, layout.device)
            views.point_at(layout.flat(scratch), scratch)
            self._context.scratches.give_back(scratch)

    def _note_own_memory(self) -> None:
        """Note the memory of a reducer that does not follow its views: it can be freed between backward passes."""
        if self._freed:
            return
        grads = [param.grad for layout in self.layouts for param in layout.params]
        storages = [grad.untyped_storage() for grad in grads if grad is not None and grad.numel()]
        self._freed = [
            (storage, storage.nbytes()) for storage in {storage.data_ptr(): storage for storage in storages}.values()
        ]


def _fill(window: Tensor, grad: Tensor | None) -> None:
    if grad is None:
        window.zero_()
    else:
        window.copy_(grad)
