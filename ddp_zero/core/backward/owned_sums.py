"""One bucket's gradients in stage 2: where they lie in a scratch, how they are reduced, what this rank gets.

Terms are defined in [Note: gradients of stage 2] in `partitioned.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddp_zero.core.backward.reducer import Window
from ddp_zero.core.backward.scratch_buffers import BufferPool, SideStream, pools_for
from ddp_zero.core.comm.reduction import (
    DirectSum,
    GroupedReduction,
    SegmentReduction,
    room_numel,
    scales_late,
    start_reduction,
    sum_dtype,
    sums_directly,
)
from ddp_zero.core.plan.ownership import Piece, Pieces, is_cut
from ddp_zero.core.plan.shard_plan import Bucket
from ddp_zero.core.step.sharded_step import ShardedStep


@dataclass(frozen=True)
class ReduceOptions:
    """How gradients travel.

    Attributes:
        comm_dtype: dtype on the wire, summed in fp32; None: their own.
        predivide_factor: gradients are divided by this before they are summed, and by the rest of the number of ranks
            after; None: by the number of ranks before, as DDP does.

    Raises:
        TypeError: for a ``comm_dtype`` that is not a floating dtype of at least 16 bits, or a factor that is no number.
        ValueError: for a ``predivide_factor`` that is not positive.
    """

    comm_dtype: torch.dtype | None = None
    predivide_factor: float | None = None

    def __post_init__(self) -> None:
        if self.comm_dtype not in (None, torch.float16, torch.bfloat16, torch.float32, torch.float64):
            raise TypeError(
                f"Expected grad_comm_dtype to be a floating dtype of at least 16 bits or None, got {self.comm_dtype!r}."
            )
        if self.predivide_factor is None:
            return
        if isinstance(self.predivide_factor, bool) or not isinstance(self.predivide_factor, int | float):
            raise TypeError(
                f"Expected gradient_predivide_factor to be a number or None, got {self.predivide_factor!r}."
            )
        if not self.predivide_factor > 0:
            raise ValueError(f"Expected gradient_predivide_factor above 0, got {self.predivide_factor!r}.")


def options_of_stage(
    stage: int, comm_dtype: torch.dtype | None, predivide_factor: float | None
) -> ReduceOptions | None:
    """How gradients travel in a stage; None in stage 1, where DDP reduces them.

    Raises:
        TypeError: for a stage that is not an int.
        ValueError: for a stage other than 1 and 2, or options that stage 1 does not have.
    """
    if type(stage) is not int:
        raise TypeError(f"Expected stage to be the int 1 or 2, got {stage!r}.")
    if stage not in (1, 2):
        raise ValueError(f"Expected stage 1 or 2, got {stage!r}.")
    if stage == 2:
        return ReduceOptions(comm_dtype, predivide_factor)
    if comm_dtype is not None or predivide_factor is not None:
        raise ValueError(
            f"Expected grad_comm_dtype and gradient_predivide_factor with stage=2 only, got {comm_dtype!r} and "
            f"{predivide_factor!r} with stage=1. Wrap a hook such as bf16_compress_hook instead."
        )
    return None


class ScratchLayout:
    """Where the gradients of one bucket lie in its scratch: slices in rank order, then those that no rank steps.

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
    room_numel = 0

    def __init__(self, params: list[Tensor], bucket: Bucket, sharded: ShardedStep, side: SideStream) -> None:
        table = sharded.table
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
        self.waiting = sharded.trace.label("wait_reduce", bucket.index)
        own = bucket.segments[sharded.comm.group_rank]
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
    """What the buckets of one model share while their gradients are reduced.

    Args:
        side: the stream that sums and steps.

    Attributes:
        factor: gradients are multiplied by it before they are summed.
        late_factor: and by this after, unless it is 1.
        carried: gradients accumulated by earlier backward passes, by parameter index, not yet in any sum.
        rooms: buffers to receive into. Separate, since the reducer may zero a bucket that has no scratch now, in the
            scratch that it had last.
    """

    scratches: BufferPool
    rooms: BufferPool

    def __init__(self, sharded: ShardedStep, side: SideStream, options: ReduceOptions) -> None:
        self.sharded = sharded
        self.side = side
        self.options = options
        self.comm = sharded.comm
        self.where = self.comm.name(self.comm.group_rank)
        num_summed = sharded.everyone.world_size
        predivided = options.predivide_factor or num_summed
        self.factor, self.late_factor = 1.0 / predivided, predivided / num_summed
        self.carried: dict[int, Tensor] = {}
        self._prepared: dict[tuple[ScratchLayout, int, int], OwnedSums] = {}
        self.furnish([])

    def furnish(self, layouts: Sequence[ScratchLayout]) -> None:
        """Start with empty pools for buckets of these sizes."""
        self._prepared.clear()
        self.scratches, self.rooms = pools_for([layout.nbytes for layout in layouts], self.side, self._prepared.clear)

    def prepares(self, layout: ScratchLayout, scratch: Tensor) -> bool:
        """Whether a bucket is summed by direct messages, in its own dtype and in place; decided once."""
        if layout.is_prepared is None:
            wire, flat = self.options.comm_dtype, layout.flat(scratch)
            parts = [flat[begin:end] for begin, end in layout.ranges]
            travels_smaller = wire is not None and wire.itemsize < layout.dtype.itemsize
            in_place = sum_dtype(layout.dtype) == layout.dtype and not travels_smaller
            layout.is_prepared = in_place and sums_directly(self.sharded.ranks, parts)
            layout.room_numel = room_numel(self.comm, parts, layout.ranges[-1][1]) if layout.is_prepared else 0
        return layout.is_prepared

    def prepared(self, layout: ScratchLayout, scratch: Tensor, room: Tensor | None) -> "OwnedSums":
        """The sums of a bucket that lies in this scratch and receives into this room."""
        key = (layout, scratch.data_ptr(), 0 if room is None else room.data_ptr())
        found = self._prepared.get(key)
        if found is None:
            found = self._prepared[key] = OwnedSums(self, layout, layout.flat(scratch), room)
        return found


class OwnedSums:
    """The sums that this rank gets of one bucket, in place in its scratch; prepared once for memory that is lent again.

    Attributes:
        gradients: windows of the sum in the shape of parameters, or of this rank's parts of them, by index.
    """

    def __init__(self, workshop: ReduceContext, layout: ScratchLayout, flat: Tensor, room: Tensor | None) -> None:
        parts = [flat[begin:end] for begin, end in layout.ranges]
        own = parts[workshop.comm.group_rank]
        slots = flat.new_empty(0) if room is None else room[: layout.room_numel * flat.itemsize].view(flat.dtype)
        self.direct = DirectSum(workshop.comm, parts, own, slots, layout.ranges[-1][1], workshop.factor)
        self.gradients = {index: window.view(own) for index, window in layout.own_windows.items()}


class ReducedSegment:
    """A bucket in flight to the owners; then this rank's sum of it.

    Attributes:
        is_released: whether `release` was called, and nothing is held.
    """

    def __init__(self, workshop: ReduceContext, layout: ScratchLayout, scratch: Tensor) -> None:
        self.params, self.indices, self.owned = layout.params, layout.indices, layout.owned
        self.layout, self.on_stream = layout, layout.on_stream
        self.is_summed = self.is_released = False
        self._workshop = workshop
        self._scratch: Tensor | None = scratch
        self._rooms: list[Tensor] = []
        self._sum: Tensor | None = None
        self._gradients: Mapping[int, Tensor] = {}
        self._is_ready = False  # whether these are what the step uses, in the dtype of the parameters
        self._received: dict[int, Tensor] = {}
        with layout.on_stream:  # rule 4 of [Note: who owns memory on an accelerator]
            start = self._start_prepared if workshop.prepares(layout, scratch) else self._start
            self._reduction: DirectSum | SegmentReduction | GroupedReduction | None = start(scratch)

    def _start_prepared(self, scratch: Tensor) -> DirectSum:
        workshop, layout = self._workshop, self.layout
        room = self._lend_room(layout.room_numel * layout.dtype.itemsize) if layout.room_numel else None
        sums = workshop.prepared(layout, scratch, room)
        self._sum, self._gradients, self._is_ready = sums.direct.out, sums.gradients, True
        sums.direct.start((workshop.sharded.binding.digest, layout.index))
        return sums.direct

    def _start(self, scratch: Tensor) -> SegmentReduction | GroupedReduction:
        workshop, layout, flat = self._workshop, self.layout, self.layout.flat(scratch)
        comm, options = workshop.comm, workshop.options
        start, stop = layout.ranges[comm.group_rank]
        wire, factor = flat, workshop.factor
        travels_smaller = options.comm_dtype is not None and options.comm_dtype.itemsize < layout.dtype.itemsize
        parts = [flat[begin:end] for begin, end in layout.ranges]
        averages = workshop.sharded.ranks.replicas is None and factor == 1.0 / comm.world_size and comm.averages(parts)
        if (travels_smaller or not (averages or scales_late(comm, flat))) and factor != 1.0:
            flat.mul_(factor)
            factor = 1.0
        if options.comm_dtype is not None and travels_smaller:
            raw = self._lend_room(layout.numel * options.comm_dtype.itemsize)
            wire = raw[: layout.numel * options.comm_dtype.itemsize].view(options.comm_dtype).copy_(flat)
        out = flat[start:stop]
        if sum_dtype(out.dtype) != out.dtype:
            out = torch.empty_like(out, dtype=sum_dtype(out.dtype))
        self._sum = out
        parts = [wire[begin:end] for begin, end in layout.ranges]
        whole, room = wire[: layout.ranges[-1][1]], wire.new_empty(0)
        numel = room_numel(comm, parts, whole.numel())
        if numel:
            nbytes = numel * wire.element_size()
            room = self._lend_room(nbytes)[:nbytes].view(wire.dtype)
        subject = (workshop.sharded.binding.digest, layout.index)
        return start_reduction(workshop.sharded.ranks, whole, parts, out, room, subject, whole.numel(), factor)

    def wait(self) -> None:
        """Block until the sum is complete, with what was accumulated before."""
        if self._reduction is None:
            return
        workshop, layout = self._workshop, self.layout
        with layout.on_stream, layout.waiting:
            total = self._reduction.wait()
            if workshop.late_factor != 1.0:
                total.mul_(workshop.late_factor)
            was_summed_wide = workshop.comm.has_direct_messages(layout.device) or workshop.late_factor != 1.0
            if total.dtype != layout.dtype and was_summed_wide:
                total.copy_(total.to(layout.dtype))  # rounded as DDP's average; several add up in fp32
            for index in self.owned if workshop.carried else ():
                carried = workshop.carried.pop(index, None)
                if carried is not None:
                    workshop.side.keep(carried)  # of the stream that has shown it
                    self.total(index).add_(carried)
        for room in self._rooms:
            workshop.rooms.give_back(room)
        self._rooms.clear()
        self._reduction = None  # it holds on to memory
        self.is_summed = True

    def keep(self) -> None:
        """Once it is summed: copy the sum out for a later step, and free the scratch."""
        if self._scratch is None or self._sum is None or self._reduction is not None:
            return
        with self.on_stream:
            if self._sum.untyped_storage().data_ptr() == self._scratch.untyped_storage().data_ptr():
                self._sum, self._gradients, self._is_ready = self._sum.clone(), {}, False
        self._workshop.scratches.give_back(self._scratch)
        self._scratch = None

    def gradient(self, index: int) -> Tensor:
        """The averaged gradient of an owned parameter, in its shape and dtype; 1-D of this rank's part if it is cut."""
        if self._is_ready:
            return self._gradients[index]
        param = self._workshop.sharded.table.params[index]
        found = self.total(index)
        return found if found.dtype == param.dtype else found.to(param.dtype)

    def in_accumulation_dtype(self, index: int) -> Tensor | None:
        """The same in the dtype of the sum, or None if that does not differ."""
        param = self._workshop.sharded.table.params[index]
        found = self.total(index)
        return None if found.dtype == param.dtype else found

    def total(self, index: int) -> Tensor:
        """As `gradient`, in the dtype of the sum."""
        found = self._received.get(index) if self._received else self._gradients.get(index)
        if found is not None:
            return found
        assert self._sum is not None, "asked before it is released"
        return self.layout.own_windows[index].view(self._sum)

    def receive(self, index: int, total: Tensor) -> None:
        """Take over the averaged gradient of what this rank owns of a parameter from now on."""
        self._received[index], self._is_ready = total, False

    def release(self) -> None:
        """Free the sum and the scratch, after the step has used them."""
        self._sum, self._gradients, self._is_ready, self.is_released = None, {}, False, True
        self._received.clear()
        if self._scratch is not None:
            self._workshop.scratches.give_back(self._scratch)
            self._scratch = None

    @property
    def nbytes(self) -> int:
        """Size of this rank's sum."""
        return 0 if self._sum is None else self._sum.nbytes

    @property
    def pieces(self) -> Mapping[int, Pieces]:
        """The ranks that get the sum of each parameter, by index."""
        return self.layout.pieces

    def _lend_room(self, nbytes: int) -> Tensor:
        room = self._workshop.rooms.lend(nbytes, self.layout.device)
        self._rooms.append(room)
        return room


class ReducedRuns:
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
        """As `ReducedSegment.exact`."""
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
