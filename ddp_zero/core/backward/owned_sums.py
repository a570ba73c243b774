"""Stage 2's buckets: their layout in a scratch, their reduction, and this rank's sums.

Terms are defined in [Note: gradients of stage 2] in `partitioned.py`.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddp_zero.core.backward.gradients import BucketGradients, Users
from ddp_zero.core.backward.reducer import Window
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
from ddp_zero.core.plan.ownership import part_between
from ddp_zero.core.plan.shard_plan import Bucket
from ddp_zero.core.step.rank_shard import Shard

_USERS = -1  # in the tags, distinguishes the numbers of users from the gradients of a bucket


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
        by_owner: the parameters of which each rank gets the sum of anything.
        owned: those of this rank.
        own_windows: where their sums lie in this rank's slice.
        on_stream: a context in which the bucket is reduced and stepped.
        waiting: the label of the wait for its sums.
    """

    is_prepared: bool | None = None
    recv_nbytes = 0

    def __init__(self, params: list[Tensor], bucket: Bucket, shard: Shard, side: SideStream) -> None:
        table = shard.table
        self.index = bucket.index
        self.params = params
        self.indices = [table.index_of[param] for param in params]
        self.dtype, self.device = params[0].dtype, params[0].device
        self.on_stream = side.running(self.device)
        self.windows: dict[Tensor, Window] = {}
        self.ranges: list[tuple[int, int]] = []
        start = 0
        for segment in bucket.segments:
            for index, offset, (first, _) in zip(segment.params, segment.offsets, segment.ranges, strict=True):
                window = Window.of(table.params[index], start + offset - first)
                earlier = self.windows.setdefault(table.params[index], window)
                assert earlier == window, "the parts of a parameter lie end to end, in the order of ranks"
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
        self.by_owner = [segment.params for segment in bucket.segments]
        self.owned = own.params
        self.own_windows = {
            index: Window.of(param, offset - first, part_between(first, last, param.numel()))
            for index, offset, (first, last) in zip(own.params, own.offsets, own.ranges, strict=True)
            for param in [table.params[index]]
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
        self._prepared: dict[tuple[ScratchLayout, int, int], tuple[DirectSum, dict[int, Tensor]]] = {}
        self._windows: dict[tuple[ScratchLayout, int], list[Tensor]] = {}
        self.furnish([])

    def furnish(self, layouts: Sequence[ScratchLayout]) -> None:
        """Start with empty pools for buckets of these sizes."""
        prepared, windows = self._prepared, self._windows

        def forget() -> None:
            prepared.clear()
            windows.clear()

        # views of the old pools would keep dropped buffers alive, and an address may be reused by a new one
        forget()
        self.scratches, self.recv_buffers = pools_for([layout.nbytes for layout in layouts], self.side, forget)

    def windows(self, layout: ScratchLayout, scratch: Tensor) -> list[Tensor]:
        """The places of a bucket's gradients in a scratch, in the order of its parameters."""
        # addresses are safe as a key: a pool that drops a buffer clears this table before the address can be reused
        key = (layout, scratch.data_ptr())
        found = self._windows.get(key)
        if found is None:
            flat = layout.flat(scratch)
            found = self._windows[key] = [layout.windows[param].view(flat) for param in layout.params]
        return found

    def prepares(self, layout: ScratchLayout, scratch: Tensor) -> bool:
        """Decide, once, whether a bucket is summed by direct messages, in its own dtype and in place."""
        wire, flat = self.options.comm_dtype, layout.flat(scratch)
        parts = [flat[begin:end] for begin, end in layout.ranges]
        travels_smaller = wire is not None and wire.itemsize < layout.dtype.itemsize
        in_place = sum_dtype(layout.dtype) == layout.dtype and not travels_smaller
        layout.is_prepared = in_place and sums_directly(self.shard.ranks, parts)
        if layout.is_prepared:
            layout.recv_nbytes = recv_numel(self.comm, parts, layout.ranges[-1][1]) * flat.itemsize
        return layout.is_prepared

    def prepare(
        self, layout: ScratchLayout, scratch: Tensor, recv_buffer: Tensor | None
    ) -> tuple[DirectSum, dict[int, Tensor]]:
        """The sum of a bucket in place in its scratch, and windows of it by index of the parameter.

        Prepared once for memory that is lent again.
        """
        key = (layout, scratch.data_ptr(), 0 if recv_buffer is None else recv_buffer.data_ptr())
        found = self._prepared.get(key)
        if found is None:
            flat = layout.flat(scratch)
            parts = [flat[begin:end] for begin, end in layout.ranges]
            own, slots = parts[self.comm.group_rank], flat.new_empty(0)
            if recv_buffer is not None:
                slots = recv_buffer[: layout.recv_nbytes].view(flat.dtype)
            direct = DirectSum(self.comm, parts, own, slots, layout.ranges[-1][1], self.factor)
            windows = {index: window.view(own) for index, window in layout.own_windows.items()}
            found = self._prepared[key] = direct, windows
        return found


class UsersOfBucket(Users):
    """Of the owned parameters of a bucket of the plan.

    Args:
        unused: parameters without a gradient on this rank, among them all those of the bucket.
    """

    def __init__(self, context: ReduceContext, layout: ScratchLayout, unused: set[Tensor]) -> None:
        shard, params = context.shard, context.shard.table.params
        flags = [[float(params[index] not in unused) for index in owned] for owned in layout.by_owner]
        width = max(1, *map(len, flags))  # of every rank's part: one reduce-scatter, where the backend has one
        padded = [one + [0.0] * (width - len(one)) for one in flags]
        # not in the slices: the parts of a parameter lie end to end there
        with layout.on_stream:
            whole = torch.tensor(padded).flatten().to(layout.device, non_blocking=True)
            parts = whole.split(width)
            recv_buffer = whole.new_empty(recv_numel(context.comm, parts, whole.numel()))
            self._owned, self._counts = layout.owned, parts[context.comm.group_rank]
            subject = (shard.binding.digest, layout.index, _USERS)
            self._reduction = start_reduction(
                shard.ranks, whole, parts, self._counts, recv_buffer, subject, whole.numel()
            )

    def wait(self) -> None:
        self._reduction.wait()

    def unused(self) -> set[int]:
        return {index for index, count in zip(self._owned, self._counts.tolist(), strict=False) if not count}


class ReducedSegment(BucketGradients):
    """A bucket in flight to the owners; then this rank's sum of it.

    Args:
        without: the parameters without a gradient on this rank, among them all those of the bucket.
        users, doubtful: see `BucketGradients`.

    Attributes:
        is_released: whether `release` was called, and nothing is held.
    """

    def __init__(
        self,
        context: ReduceContext,
        layout: ScratchLayout,
        scratch: Tensor,
        without: set[Tensor],
        users: UsersOfBucket | None = None,
        doubtful: Collection[int] = (),
    ) -> None:
        self.without, self.users, self.doubtful = without, users, set(doubtful)
        self.params, self.indices, self.owned = layout.params, layout.indices, layout.owned
        self.layout, self.on_stream = layout, layout.on_stream
        self.is_summed = self.is_released = False
        self._context = context
        self._scratch: Tensor | None = scratch
        self._recv_buffers: list[Tensor] = []
        self._sum: Tensor | None = None
        self._gradients: Mapping[int, Tensor] = {}
        self._is_ready = False  # whether these are what the step uses, in the dtype of the parameters
        with layout.on_stream:  # rule 4 of [Note: who owns memory on an accelerator]
            is_prepared = context.prepares(layout, scratch) if layout.is_prepared is None else layout.is_prepared
            start = self._start_prepared if is_prepared else self._start
            self._reduction: DirectSum | SegmentReduction | GroupedReduction | None = start(scratch)

    def _start_prepared(self, scratch: Tensor) -> DirectSum:
        context, layout = self._context, self.layout
        recv_buffer = self._lend_recv_buffer(layout.recv_nbytes) if layout.recv_nbytes else None
        direct, self._gradients = context.prepare(layout, scratch, recv_buffer)
        self._sum, self._is_ready = direct.out, True
        # from here on peers write into the receive buffer and read the scratch: neither may be touched before `wait`
        direct.start((context.shard.binding.digest, layout.index))
        return direct

    def _start(self, scratch: Tensor) -> SegmentReduction | GroupedReduction:
        context, layout, flat = self._context, self.layout, self.layout.flat(scratch)
        comm, options = context.comm, context.options
        start, stop = layout.ranges[comm.group_rank]
        wire, factor = flat, context.factor
        travels_smaller = options.comm_dtype is not None and options.comm_dtype.itemsize < layout.dtype.itemsize
        parts = [flat[begin:end] for begin, end in layout.ranges]
        shard, ranks = context.shard, context.shard.ranks
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
        subject = (shard.binding.digest, layout.index)
        return start_reduction(ranks, whole, parts, out, recv_buffer, subject, whole.numel(), factor)

    def wait(self) -> None:
        """Block until the sum is complete, with the sums of earlier passes."""
        if self._reduction is None:
            return
        context, layout = self._context, self.layout
        # waited for on the side stream: the current stream, with backward's kernels, must not wait for a reduction
        with layout.on_stream, layout.waiting:
            total = self._reduction.wait()
            if self.users is not None:
                self.users.wait()
            if context.late_factor != 1.0:
                total.mul_(context.late_factor)
            if not self._is_ready and total.dtype != layout.dtype and self._was_summed_wide():
                total.copy_(total.to(layout.dtype))  # rounded as DDP's average; several add up in fp32
            # added on the stream that has summed; the next reader of the sum is this stream, or comes after `join`
            for index in self.owned if context.carried else ():
                carried = context.carried.pop(index, None)
                if carried is not None:
                    context.side.keep(carried)  # of the stream that has shown it
                    self.total(index).add_(carried)
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
                # the clone precedes the give-back on this stream: backward may fill the scratch again right after
                self._sum, self._gradients, self._is_ready = self._sum.clone(), {}, False
        self._context.scratches.give_back(self._scratch)
        self._scratch = None

    def gradient(self, index: int) -> Tensor | None:
        if self.doubtful and self.is_unused(index):
            return None
        if self._is_ready:
            return self._gradients[index]
        param = self._context.shard.table.params[index]
        found = self.total(index)
        return found if found.dtype == param.dtype else found.to(param.dtype)

    def in_accumulation_dtype(self, index: int) -> Tensor | None:
        """The same in the dtype of the sum, or None if that does not differ."""
        if self.doubtful and self.is_unused(index):
            return None
        dtype = self._context.shard.table.params[index].dtype
        if self._sum is not None and self._sum.dtype == dtype:
            return None  # without a view of it
        found = self.total(index)
        return None if found.dtype == dtype else found

    def total(self, index: int) -> Tensor:
        """As `gradient`, in the dtype of the sum; zeros where there is none."""
        found = self._gradients.get(index)
        if found is not None:
            return found
        assert self._sum is not None, "asked before it is released"
        return self.layout.own_windows[index].view(self._sum)

    def release(self) -> None:
        """Free the sum and the scratch, after the step has used them."""
        self._sum, self._gradients, self._is_ready, self.is_released = None, {}, False, True
        # the step has been issued on the side stream; the pool makes the next borrower wait for that stream
        if self._scratch is not None:
            self._context.scratches.give_back(self._scratch)
            self._scratch = None

    @property
    def nbytes(self) -> int:
        return 0 if self._sum is None else self._sum.nbytes

    def _lend_recv_buffer(self, nbytes: int) -> Tensor:
        recv_buffer = self._context.recv_buffers.lend(nbytes, self.layout.device)
        self._recv_buffers.append(recv_buffer)
        return recv_buffer
