"""Stage 2's buckets: their layout in a scratch, their reduction, and this rank's sums.

Terms are defined in [Note: gradients of stage 2] in `partitioned.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ddp_zero.core.backward.bucket_gradients import BucketGradients, UsageCounts
from ddp_zero.core.backward.scratch_buffers import BucketMemory, Buffer, SideStream, memory_of
from ddp_zero.core.comm.exchange import InFlight
from ddp_zero.core.comm.reduction import (
    can_scale_in_sum,
    name_of_reduction,
    prepare_reduction,
    recv_numel,
    sum_dtype,
)
from ddp_zero.core.ddp.reducer import Window
from ddp_zero.core.plan.buckets import aligned
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
        by_owner: for each rank, the parameters of which it owns elements.
        owned: the parameters of which this rank does.
        own_windows: where the sums of their elements lie in this rank's slice.
        on_stream: a context in which the bucket is reduced and stepped.
        waiting: the label of the wait for its sums.
    """

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

    def parts_of(self, flat: Tensor) -> list[Tensor]:
        """The slice of each rank in all gradients of the bucket."""
        return [flat[begin:end] for begin, end in self.ranges]

    def wire_nbytes(self, dtype: torch.dtype) -> int:
        """Bytes of the bucket in another dtype, up to where other memory may begin."""
        return aligned(self.numel * dtype.itemsize)


class ReduceContext:
    """Shared by the buckets of one model while their gradients are reduced.

    Args:
        side: the stream that sums and steps.

    Attributes:
        factor: gradients are multiplied by it before they are summed.
        late_factor: sums are multiplied by it, unless it is 1.
        carried: gradients accumulated by earlier backward passes, by parameter index, not yet in any sum.
        scratches, receives: the buffers of the plan's buckets, once they have their memory.
        most_bytes: of buffers, so far.
    """

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
        self.scratches: list[Buffer] = []
        self.receives: list[Buffer] = []
        self.most_bytes = 0
        self._sizes: list[int] = []  # of the buckets in bytes

    def drop_memory(self) -> None:
        """Leave the buffers to peers that may still use them, and have the next pass use others."""
        self.scratches, self.receives = [], []

    @property
    def is_in_use(self) -> bool:
        """True if any scratch is lent: between passes, to messages in flight that a failed pass has left."""
        return any(buffer.is_lent for buffer in self.scratches)

    def assign_memory(self, buckets: "Sequence[ScratchBucket]") -> None:
        """Give the buckets of the plan their memory, and make the reduction of each there."""
        layouts = [bucket.layout for bucket in buckets]
        self._sizes = [layout.nbytes for layout in layouts]
        needs = [(layout.device, layout.nbytes, self._received_nbytes(layout)) for layout in layouts]
        memories = memory_of(self.side, needs)
        for bucket, memory in zip(buckets, memories, strict=True):
            bucket.assign(BucketReduction(self, bucket.layout, memory))
        self.scratches = list(dict.fromkeys(memory.scratch for memory in memories))
        self.receives = list(dict.fromkeys(memory.receives for memory in memories if memory.receives is not None))
        self.most_bytes = max(self.most_bytes, self.nbytes)

    def smaller_dtype_for(self, layout: ScratchLayout) -> torch.dtype | None:
        """The dtype of a bucket on the wire, if it is smaller than its gradients'."""
        wire = self.options.comm_dtype
        return wire if wire is not None and wire.itemsize < layout.dtype.itemsize else None

    def slots_nbytes(self, layout: ScratchLayout, wire: torch.dtype) -> int:
        """Bytes that the reduction of a bucket needs to receive into."""
        sizes = [end - begin for begin, end in layout.ranges]
        return recv_numel(self.comm, sizes, wire, layout.device) * wire.itemsize

    def _received_nbytes(self, layout: ScratchLayout) -> int:
        """The same, and bytes to cast into a smaller dtype on the wire."""
        smaller = self.smaller_dtype_for(layout)
        if smaller is None:
            return self.slots_nbytes(layout, layout.dtype)
        return self.slots_nbytes(layout, smaller) + layout.wire_nbytes(smaller)

    def describe(self) -> list[str]:
        """The memory that the buckets have needed, in words."""
        return [
            f"gradients: at most {len(self.scratches)} scratch buffers shared by {len(self._sizes)} buckets, "
            f"{len(self.receives)} to receive into, {self.nbytes:,} bytes in all, for buckets of at "
            f"most {max(self._sizes, default=0):,}"
        ]

    @property
    def nbytes(self) -> int:
        """Of buffers."""
        return sum(buffer.memory.nbytes for buffer in (*self.scratches, *self.receives))


class OwnedUsageCounts(UsageCounts):
    """Counts for the parameters that this rank owns in a bucket of the plan, by a reduction to the owners.

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
            sizes = [width] * len(parts)
            recv_buffer = whole.new_empty(recv_numel(context.comm, sizes, whole.dtype, layout.device))
            self._owned = layout.owned
            self._counts = parts[context.comm.group_rank]
            subject = (shard.binding.digest, layout.index, _USERS)
            prepared = prepare_reduction(shard.ranks, whole, parts, recv_buffer, subject, whole.numel())
            self._reduction = prepared.start(self._counts)
            self._what = name_of_reduction(layout.index)

    def wait(self) -> None:
        self._reduction.wait(self._what)

    def unused(self) -> set[int]:
        return {index for index, count in zip(self._owned, self._counts.tolist(), strict=False) if not count}


FILLING, IN_FLIGHT, SUMMED, KEPT, RELEASED = range(5)
"""The progress of a bucket in a pass. Up to `SUMMED` the scratch is the bucket's; `KEPT`: the sum was copied out of it;
`RELEASED`: nothing is held."""


class BucketReduction:
    """A bucket's place in the memory of its plan, and its reduction there: made once, for every pass.

    Attributes:
        scratch: the buffer that it is filled into; ``flat`` are its gradients there, 1-D.
        windows: the places of its gradients in ``flat``, in the order of its parameters.
        own: this rank's slice of ``flat``.
        own_windows: the sums of this rank's parameters there, by index; empty if sums have another dtype.
        own_gradients: the same, in the order of the parameters.
        starts_early: see `BucketGradients.starts_early`.
        wide_dtype: of sums that need memory of their own; None: they have the dtype of the gradients.
        is_in_place: whether ``own`` is the sum once it is reduced.
        before: called before ``start``, which sends the gradients.
        start: starts the reduction; given the memory of the sum unless ``is_in_place``.
        after: called with the sum.
    """

    def __init__(self, context: ReduceContext, layout: ScratchLayout, memory: BucketMemory) -> None:
        comm, ranks = context.comm, context.shard.ranks
        # a sum over replicas issues collectives while it is awaited: those of the next bucket come after them
        self.starts_early = memory.starts_early and ranks.replicas is None
        self.scratch = memory.scratch
        self.flat = flat = memory.scratch.memory[: layout.nbytes].view(layout.dtype)
        self.windows = [layout.windows[param].view(flat) for param in layout.params]
        parts = layout.parts_of(flat)
        self.own = own = parts[comm.group_rank]
        self.wide_dtype = None if sum_dtype(own.dtype) == own.dtype else sum_dtype(own.dtype)
        self.own_windows: dict[int, Tensor] = {}
        if self.wide_dtype is None:
            self.own_windows = {index: window.view(own) for index, window in layout.own_windows.items()}
        self.own_gradients: list[Tensor | None] = list(self.own_windows.values())
        self.before, factor = list[Callable[[], object]](), context.factor
        received = flat.new_empty(0).view(torch.uint8)
        if memory.receives is not None:
            received = memory.receives.memory[memory.received_at :]
        averages = ranks.replicas is None and factor == 1.0 / comm.world_size and comm.can_average(parts)
        # scaled before the cast, or a product would be rounded, or overflow, in the dtype on the wire
        smaller, wire = context.smaller_dtype_for(layout), flat
        if factor != 1.0 and (smaller is not None or not (averages or can_scale_in_sum(comm, flat))):
            self.before.append(partial(flat.mul_, factor))
            factor = 1.0
        if smaller is not None:
            # the cast gradients lie before the slots: peers write there while others still read the former
            wire = received[: layout.numel * smaller.itemsize].view(smaller)
            received = received[layout.wire_nbytes(smaller) :]
            self.before.append(partial(wire.copy_, flat))
            parts = layout.parts_of(wire)
        limit = layout.ranges[-1][1]
        slots = received[: context.slots_nbytes(layout, wire.dtype)].view(wire.dtype)
        subject = (context.shard.binding.digest, layout.index)
        prepared = prepare_reduction(ranks, wire[:limit], parts, slots, subject, limit, factor)
        self.is_in_place = self.wide_dtype is None and smaller is None
        self.start: Callable[..., InFlight] = prepared.in_place if self.is_in_place else prepared.start
        self.after = list[Callable[[Tensor], object]]()
        if context.late_factor != 1.0:
            self.after.append(partial(torch.Tensor.mul_, other=context.late_factor))
        # a sum has more digits than the bucket's dtype where the backend does not add up itself
        if self.wide_dtype is not None and (self.after or comm.has_direct_messages(layout.device)):
            self.after.append(lambda total: total.copy_(total.to(layout.dtype)))  # rounded as DDP's average


class ScratchBucket(BucketGradients):
    """A bucket of the plan: filled, in flight to the owners, then this rank's sum of it; in every pass.

    Args:
        assign_memory: assigns all buckets of the plan their reductions; called when one is filled that has none.
        without: the parameters without a gradient on this rank in the pass, among them all those of the bucket.

    Attributes:
        reduction: its memory and reduction, from the first pass on.
        flat: this rank's gradients, 1-D, from then on.
        is_wide: whether sums have another dtype than the gradients.
        is_started: whether the pass has started its reduction.
        progress: from `FILLING` to `RELEASED`.
    """

    reduction: BucketReduction
    flat: Tensor

    def __init__(
        self, context: ReduceContext, layout: ScratchLayout, assign_memory: Callable[[], object], without: set[Tensor]
    ) -> None:
        self.params, self.indices, self.owned = layout.params, layout.indices, layout.owned
        self.layout, self.on_stream, self.waiting = layout, layout.on_stream, layout.waiting
        self.is_wide = sum_dtype(layout.dtype) != layout.dtype
        self.is_started, self.progress = False, RELEASED
        self._context, self._assign_memory, self.without = context, assign_memory, without
        self._in_flight: InFlight | None = None
        self._what = name_of_reduction(layout.index)
        self._sum: Tensor | None = None
        self._gradients: Mapping[int, Tensor] = {}  # of a sum that is in place, or that was kept: windows of it

    def assign(self, reduction: BucketReduction) -> None:
        """Be filled and reduced there from now on."""
        self.reduction, self.flat, self.starts_early = reduction, reduction.flat, reduction.starts_early

    def begin_filling(self) -> list[Tensor]:
        """Take the scratch, which the bucket before the last one has left. Returns the places of its gradients."""
        if not self._context.scratches:  # here, on the stream that writes there
            self._assign_memory()
        reduction, scratch = self.reduction, self.reduction.scratch
        if scratch.has_streams:
            scratch.lend()
        scratch.is_lent, self.progress = True, FILLING
        return reduction.windows

    def drop_filling(self) -> None:
        """The gradients that were filled in are not wanted."""
        if self.progress == FILLING:
            self.progress = RELEASED
            with self.on_stream:
                self.reduction.scratch.give_back()

    def start(self) -> None:
        """Start the reduction of gradients that were filled in, within `on_stream`."""
        self.is_started, self.progress = True, IN_FLIGHT
        # from here on peers write into the receive buffer and read the scratch: neither may be touched before `wait`
        reduction = self.reduction
        for prepare in reduction.before:
            prepare()
        self._sum, self._gradients = reduction.own, reduction.own_windows
        if reduction.is_in_place:
            self._in_flight = reduction.start()
            return
        if reduction.wide_dtype is not None:
            # allocated on the stream that sums, which alone uses it until `join`
            self._sum = torch.empty_like(reduction.own, dtype=reduction.wide_dtype)
        self._in_flight = reduction.start(self._sum)

    def wait(self) -> None:
        """Block until the sum is complete, with the sums of earlier passes, within `on_stream` and `waiting`."""
        if self._in_flight is None:
            return
        self._in_flight.wait(self._what)
        if self.usage is not None:
            self.usage.wait()
        for finish in self.reduction.after:
            assert self._sum is not None, "it is being summed"
            finish(self._sum)
        if self._context.carried:  # several add up in fp32
            self._add_carried()
        self._in_flight, self.progress = None, SUMMED  # it holds on to memory

    def _add_carried(self) -> None:
        # on the stream that has summed; the next reader of the sum is this stream, or comes after `join`
        for index in self.owned:
            carried = self._context.carried.pop(index, None)
            if carried is not None:
                # allocated on the stream that has put it into `param.grad`
                self._context.side.record_use(carried)
                self.total(index).add_(carried)

    def keep(self) -> None:
        """Copy the sum out for a later step, once it is there, and free the scratch, within `on_stream`."""
        if self.progress != SUMMED:
            return
        if self.reduction.wide_dtype is None:
            # the clone precedes the give-back on this stream: backward may fill the scratch again right after
            self._sum = total = self.reduction.own.clone()
            self._gradients = {index: one.view(total) for index, one in self.layout.own_windows.items()}
        self.progress = KEPT
        self.reduction.scratch.give_back()

    def gradient(self, index: int) -> Tensor | None:
        if self.doubtful and self.is_unused(index):
            return None
        if self._gradients:
            return self._gradients[index]
        param = self._context.shard.table.params[index]
        found = self.total(index)
        return found if found.dtype == param.dtype else found.to(param.dtype)

    def gradients(self, indices: Sequence[int]) -> list[Tensor | None]:
        found, reduction = self._gradients, self.reduction
        if found and not self.doubtful and indices == self.owned:
            return reduction.own_gradients if found is reduction.own_windows else [*found.values()]
        return super().gradients(indices)

    def in_accumulation_dtype(self, index: int) -> Tensor | None:
        """The gradient in the dtype of the sum, or None if that is the parameter's."""
        if self.doubtful and self.is_unused(index):
            return None
        dtype = self._context.shard.table.params[index].dtype
        if self._sum is not None and self._sum.dtype == dtype:
            return None  # without a view of it
        found = self.total(index)
        return None if found.dtype == dtype else found

    def total(self, index: int) -> Tensor:
        """The gradient in the dtype of the sum; zeros where no rank has one."""
        found = self._gradients.get(index)
        if found is not None:
            return found
        assert self._sum is not None, "asked before it is released"
        return self.layout.own_windows[index].view(self._sum)

    def release(self) -> None:
        """Free the sum and the scratch, after the step has used them, within `on_stream`."""
        # the next borrower waits for the step, which was issued on this stream
        if self.progress == SUMMED or self.progress == IN_FLIGHT:
            scratch = self.reduction.scratch
            if scratch.has_streams:
                scratch.give_back()
            scratch.is_lent = False
        self._sum, self._gradients, self.progress = None, {}, RELEASED

    @property
    def nbytes(self) -> int:
        return 0 if self._sum is None else self._sum.nbytes
