"""One bucket's gradients in stage 2: where they lie in a scratch, how they are reduced, what this rank gets.

Terms are defined in [Note: gradients of stage 2] in `partitioned.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ddp_zero.backward.reducer import Window
from ddp_zero.backward.side_stream import SideStream
from ddp_zero.comm.communicator import Communicator
from ddp_zero.comm.reduction import (
    GroupedReduction,
    SegmentReduction,
    room_numel,
    scales_late,
    start_reduction,
    sum_dtype,
)
from ddp_zero.plan.ownership import Piece, Pieces, is_cut
from ddp_zero.plan.shard_plan import Bucket
from ddp_zero.stage2.buffers import BufferPool, pools_for
from ddp_zero.step.sharded_step import ShardedStep


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
        bucket: which of them each rank owns.
        sharded: knows the optimizer's parameters.

    Attributes:
        pieces: the ranks that get sums, and of which elements, by index of the parameter.
    """

    def __init__(self, params: list[Tensor], bucket: Bucket, sharded: ShardedStep) -> None:
        table = sharded.table
        self.index = bucket.index
        self.params = params
        self.indices = [table.index_of[param] for param in params]
        self.numel = sum(param.numel() for param in params)
        self.dtype, self.device = params[0].dtype, params[0].device
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
        own = bucket.segments[sharded.comm.group_rank]
        self.owned = own.params
        self.own_windows = {
            index: Window(offset, (last - first,), (1,))
            if is_cut(self.pieces[index])
            else Window.of(table.params[index], offset)
            for index, offset, (first, last) in zip(own.params, own.offsets, own.ranges, strict=True)
        }

    @property
    def nbytes(self) -> int:
        """Size of the bucket."""
        return self.numel * self.dtype.itemsize

    def flat(self, raw: Tensor) -> Tensor:
        """A byte buffer as this bucket's gradients, 1-D."""
        return raw[: self.nbytes].view(self.dtype)


@dataclass
class Workshop:
    """What the buckets of one model share while their gradients are reduced.

    Attributes:
        sharded: the step.
        side: the stream that sums and steps.
        options: how gradients travel.
        carried: gradients accumulated by earlier backward passes, by parameter index, not yet in any sum.
        scratches: buffers that the reducer writes buckets into.
        rooms: buffers to receive into. Separate, since the reducer may zero a bucket that has no scratch now, in the
            scratch that it had last.
    """

    sharded: ShardedStep
    side: SideStream
    options: ReduceOptions
    carried: dict[int, Tensor] = field(default_factory=dict)
    scratches: BufferPool = field(init=False)
    rooms: BufferPool = field(init=False)

    def __post_init__(self) -> None:
        self.furnish([])

    def furnish(self, layouts: Sequence[ScratchLayout]) -> None:
        """Start with empty pools for buckets of these sizes."""
        self.scratches, self.rooms = pools_for([layout.nbytes for layout in layouts], self.side)

    @property
    def comm(self) -> Communicator:
        """The ranks that share the buckets."""
        return self.sharded.comm

    @property
    def where(self) -> str:
        """This rank's name in messages."""
        return self.comm.name(self.comm.group_rank)

    @property
    def predivide_factor(self) -> float:
        """The number by which gradients are divided before they are summed."""
        return self.options.predivide_factor or self.num_summed

    @property
    def num_summed(self) -> int:
        """The number of ranks whose gradients add up."""
        return self.sharded.ranks.everyone.world_size


class ReducedSegment:
    """A bucket in flight to the owners; then this rank's sum of it."""

    def __init__(self, workshop: Workshop, layout: ScratchLayout, scratch: Tensor) -> None:
        self.params, self.indices = layout.params, layout.indices
        self.layout = layout
        self._workshop = workshop
        self._scratch: Tensor | None = scratch
        self._rooms: list[Tensor] = []
        self._sum: Tensor | None = None
        self._received: dict[int, Tensor] = {}
        with workshop.side.running(layout.device):  # rule 4 of [Note: who owns memory on an accelerator]
            self._reduction: SegmentReduction | GroupedReduction | None = self._start(layout.flat(scratch))

    def _start(self, flat: Tensor) -> SegmentReduction | GroupedReduction:
        workshop, layout = self._workshop, self.layout
        comm, options = workshop.comm, workshop.options
        start, stop = layout.ranges[comm.group_rank]
        wire, factor = flat, 1.0 / workshop.predivide_factor
        travels_smaller = options.comm_dtype is not None and options.comm_dtype.itemsize < layout.dtype.itemsize
        if (travels_smaller or not scales_late(comm, flat)) and factor != 1.0:
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
        workshop = self._workshop
        waiting = workshop.comm.trace.label("wait_reduce", self.layout.index)
        with workshop.side.running(self.layout.device), waiting:
            total = self._reduction.wait()
            if workshop.predivide_factor != workshop.num_summed:
                total.mul_(workshop.predivide_factor / workshop.num_summed)
            if total.dtype != self.layout.dtype:
                total.copy_(total.to(self.layout.dtype))  # rounded as DDP's average; several add up in fp32
            for index in self.layout.owned:
                carried = workshop.carried.pop(index, None)
                if carried is not None:
                    workshop.side.keep(carried)  # of the stream that has shown it
                    self.total(index).add_(carried)
        for room in self._rooms:
            workshop.rooms.give_back(room)
        self._rooms.clear()
        self._reduction = None  # it holds on to memory

    def keep(self) -> None:
        """Copy the sum out for a later step, and free the scratch."""
        if self._scratch is None or self._sum is None:
            return
        with self._workshop.side.running(self.layout.device):
            if self._sum.untyped_storage().data_ptr() == self._scratch.untyped_storage().data_ptr():
                self._sum = self._sum.clone()
        self._workshop.scratches.give_back(self._scratch)
        self._scratch = None

    def gradient(self, index: int) -> Tensor:
        """The averaged gradient of an owned parameter, in its shape and dtype; 1-D of this rank's part if it is cut."""
        param = self._workshop.sharded.table.params[index]
        found = self.total(index)
        return found if found.dtype == param.dtype else found.to(param.dtype)

    def exact(self, index: int) -> Tensor | None:
        """The same in the dtype of the sum, or None if that does not differ."""
        param = self._workshop.sharded.table.params[index]
        found = self.total(index)
        return None if found.dtype == param.dtype else found

    def total(self, index: int) -> Tensor:
        """As `gradient`, in the dtype of the sum."""
        received = self._received.get(index)
        if received is not None:
            return received
        assert self._sum is not None, "asked before it is released"
        return self.layout.own_windows[index].view(self._sum)

    def receive(self, index: int, total: Tensor) -> None:
        """Take over the averaged gradient of what this rank owns of a parameter from now on."""
        self._received[index] = total

    def release(self) -> None:
        """Free the sum and the scratch, after the step has used them."""
        self._sum = None
        self._received.clear()
        if self._scratch is not None:
            self._workshop.scratches.give_back(self._scratch)
            self._scratch = None

    @property
    def pieces(self) -> Mapping[int, Pieces]:
        """The ranks that get the sum of each parameter, by index."""
        return self.layout.pieces

    @property
    def owned(self) -> Sequence[int]:
        """The parameters whose sums this rank gets."""
        return self.layout.owned

    @property
    def is_summed(self) -> bool:
        """Whether `wait` has returned."""
        return self._reduction is None

    def _lend_room(self, nbytes: int) -> Tensor:
        room = self._workshop.rooms.lend(nbytes, self.layout.device)
        self._rooms.append(room)
        return room


class ReducedRuns:
    """A bucket that is too large for one scratch: reduced in runs of parameters, whose sums are kept.

    Args:
        runs: complete reductions, of all the bucket's parameters.
    """

    def __init__(self, runs: Sequence[ReducedSegment]) -> None:
        self.params = [param for run in runs for param in run.params]
        self.indices = [index for run in runs for index in run.indices]
        self.pieces = {index: found for run in runs for index, found in run.pieces.items()}
        self.owned = [index for run in runs for index in run.owned]
        self.is_summed = True
        self._runs = runs
        self._run_of = {index: run for run in runs for index in run.indices}

    def wait(self) -> None:
        """Nothing is in flight."""

    def keep(self) -> None:
        """The sums are kept."""

    def gradient(self, index: int) -> Tensor:
        """As `ReducedSegment.gradient`."""
        return self._run_of[index].gradient(index)

    def exact(self, index: int) -> Tensor | None:
        """As `ReducedSegment.exact`."""
        return self._run_of[index].exact(index)

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
