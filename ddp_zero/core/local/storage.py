"""Flat storage: the one file that re-points ``param.data``.

[Note: ddp_zero tensors]
*segment tensor*: 1-D, the parameters of one segment; the unit that travels.
*block*: 1-D, the memory that the parameters of one segment live in, or of several if a parameter is cut among them.
*parameter window*: a run of a block with the parameter's own shape and strides, in a storage that is this run alone. So
whatever looks at storages (``torch.save``, safetensors, frameworks that look for shared tensors) sees independent
parameters of their own size.

With `ViewStorage` the segment tensors are windows of the blocks, and a sync copies nothing. With `PackedStorage` the
user's storage is left alone: a segment is packed before it is sent and unpacked when it has arrived.

A bucket of even parts, see [Note: even parts], has one block, in which one collective gathers it.

A block has gaps. Every parameter starts at a multiple of 64 bytes, as a tensor with memory of its own does,
because matrix products round differently at other offsets. The gaps are sent if they are at most 0.5% of the segment;
otherwise (small parameters of odd sizes) the segment is packed end to end.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from ddp_zero.core.plan.partition import GroupRank
from ddp_zero.core.plan.shard_plan import Bucket, Segment, ShardPlan
from ddp_zero.values.parts import run_of
from ddp_zero.values.shapes import aligned_offsets, is_dense

_ALIGNMENT = 64  # bytes
_LARGEST_GAPS = 200  # at most one element of gap per this many


class Block:
    """A flat buffer of parameters. The constructor moves the parameters into it.

    Args:
        indices: the parameters in the block.
        params: all parameters.
        places: the offset of each parameter, and of the end; None: at aligned offsets.

    Attributes:
        tensor: the buffer, 1-D, with zeros between parameters. Its memory lives as long as any parameter in it.
        starts: the offset of each parameter, by index.
    """

    @torch.no_grad()
    def __init__(self, indices: Sequence[int], params: Sequence[Tensor], places: Sequence[int] | None = None) -> None:
        members = [params[index] for index in indices]
        numels = [param.numel() for param in members]
        if places is None:
            places = aligned_offsets(numels, members[0].itemsize if members else 1, _ALIGNMENT)
        *offsets, end = places
        like = members[0] if members else torch.empty(0)
        self._end = end
        self.indices = tuple(indices)
        self.starts = dict(zip(indices, offsets, strict=True))
        self.tensor: Tensor = torch.zeros(end, dtype=like.dtype, device=like.device)
        for param, offset in zip(members, offsets, strict=True):
            run = with_own_storage(self.tensor[offset : offset + param.numel()])
            window = run.as_strided(param.shape, param.stride())
            # the old and the new memory live at once here: for one bucket at a time, not for the whole model
            window.copy_(param)
            param.data = window  # the old memory is freed once nothing else holds it

    def runs(self, nbytes: int) -> list[tuple[tuple[int, ...], Tensor]]:
        """Split the buffer: each parameter of at least so many bytes is a run; so are all parameters between two such.

        Returns for each run its parameters, and the memory from the run's first parameter to the next run.
        """
        if not self.indices:
            return []
        stops = [*list(self.starts.values())[1:], self._end]
        found: list[tuple[list[int], int, int, bool]] = []
        for index, start, stop in zip(self.indices, self.starts.values(), stops, strict=True):
            is_large = (stop - start) * self.tensor.itemsize >= nbytes
            if found and not (is_large or found[-1][3]):
                members, first, _, _ = found.pop()
                found.append(([*members, index], first, stop, False))
            else:
                found.append(([index], start, stop, is_large))
        return [(tuple(members), self.tensor[start:stop]) for members, start, stop, _ in found]


def with_own_storage(run: Tensor) -> Tensor:
    """The same memory as a tensor whose storage begins and ends with it.

    The storage keeps the whole memory alive and cannot be resized. The device's allocator does not know it, so
    ``record_stream`` on it has no effect. ``run`` is 1-D contiguous; its bytes travel, since DLPack does not know every
    dtype. It comes back itself where that cannot be done: on a device or for a kind of tensor without DLPack.
    """
    if type(run) is not Tensor:  # DLPack reads the pointer of any subclass; those of fake tensors are null
        return run
    if not run.numel():
        return torch.empty_like(run)
    try:
        # The bare capsule: `from_dlpack(tensor)` is the protocol between libraries. On CUDA it takes the current stream
        # along, makes it wait for itself and refuses devices other than the current device. Here nothing changes hands:
        # the same memory is used on the same streams as before.
        window = from_dlpack(to_dlpack(run.view(torch.uint8))).view(run.dtype)
    except (BufferError, RuntimeError, ValueError):
        return run
    storage = window.untyped_storage()
    is_same = window.device == run.device and window.data_ptr() == storage.data_ptr() == run.data_ptr()
    return window if is_same and storage.nbytes() == run.nbytes else run


class ViewStorage:
    """Parameters are windows of blocks of memory: one per (bucket, owner), or more owners where a parameter is cut.

    Building it moves the parameters: their values are copied once and ``param.data`` is re-pointed. Strides are kept,
    so a channels-last weight stays channels-last. ValueError if a parameter's elements do not fill one run of memory.
    """

    def __init__(self, plan: ShardPlan, params: Sequence[Tensor], label: Callable[[int], str]) -> None:
        for bucket in plan.buckets:
            for segment in bucket.segments:
                for param in segment.params:
                    if not is_dense(params[param].shape, params[param].stride()):
                        raise ValueError(
                            f"Expected parameters without gaps or overlaps in memory, got {label(param)} with strides "
                            f"{list(params[param].stride())}. Use parameters_as_bucket_view=False. [ZERO-114]"
                        )
        self._blocks: list[list[Block]] = []
        self._flats: list[list[_FlatSegment]] = []
        for bucket in plan.buckets:
            if bucket.is_even:  # one collective gathers its segments in place
                starts = bucket.starts
                end = sum(bucket.sizes)
                pairs = [(list(bucket.segments), Block(list(starts), params, [*starts.values(), end]))]
            else:
                pairs = [(segments, Block(indices, params)) for segments, indices in _connected_segments(bucket)]
            self._blocks.append([block for _, block in pairs])
            self._flats.append([_FlatSegment(segment, block) for segments, block in pairs for segment in segments])

    def segments_to_sync(self, bucket: Bucket, group_rank: GroupRank) -> list[Tensor]:
        """The segment tensors of a bucket, in rank order: this rank's filled, the others' as receive buffers.

        They are windows of the blocks; where the gaps are too large, this rank's packed and buffers for the others.
        """
        flats = enumerate(self._flats[bucket.index])
        return [flat.pack() if rank == group_rank else flat.recv_buffer() for rank, flat in flats]

    def fixed_segments(self, bucket: Bucket) -> list[Tensor] | None:
        """The segment tensors if they are the parameters' memory, which is never copied; None if gaps are too large."""
        flats = self._flats[bucket.index]
        return None if any(flat.is_packed for flat in flats) else [flat.recv_buffer() for flat in flats]

    def write_back(self, bucket: Bucket, segments: Sequence[Tensor], group_rank: GroupRank) -> None:
        """Unpack the segments of the other owners that were sent packed."""
        for rank, (flat, tensor) in enumerate(zip(self._flats[bucket.index], segments, strict=True)):
            if rank != group_rank:
                flat.unpack(tensor)

    def blocks_of(self, bucket: Bucket) -> Sequence[Block]:
        """The memory that parameters of a bucket share; `PackedStorage` has none."""
        return self._blocks[bucket.index]


def _connected_segments(bucket: Bucket) -> list[tuple[list[Segment], list[int]]]:
    """Consecutive segments that share a parameter, and all parameters of these, in the order of ranks."""
    groups: list[tuple[list[Segment], dict[int, None]]] = []
    last_segment = {param: place for place, segment in enumerate(bucket.segments) for param in segment.params}
    end = -1
    for position, segment in enumerate(bucket.segments):
        if position > end:
            groups.append(([], {}))
        segments, indices = groups[-1]
        segments.append(segment)
        indices |= dict.fromkeys(segment.params)
        end = max(end, position, *(last_segment[param] for param in segment.params), -1)
    return [(segments, list(indices)) for segments, indices in groups]


class _FlatSegment:
    """A segment as a view of its block, or packed without gaps.

    Nothing here touches a parameter: using a parameter that is still in flight would wait for it again.
    """

    def __init__(self, segment: Segment, block: Block) -> None:
        places = [
            (block.starts[param] + start, block.starts[param] + stop)
            for param, (start, stop) in zip(segment.params, segment.ranges, strict=True)
        ]
        begin, end = (places[0][0], places[-1][1]) if places else (0, 0)
        is_in_order = all(stop <= start for (_, stop), (start, _) in pairwise(places))
        self._numel = segment.numel
        self._windows: list[Tensor] = []  # of the parameters, if they are packed
        if segment.is_even:
            begin = segment.owner * segment.numel
            self._tensor: Tensor = block.tensor[begin : begin + segment.numel]
            return
        self._tensor = block.tensor[begin:end]
        if not is_in_order or (end - begin - segment.numel) * _LARGEST_GAPS > segment.numel:
            self._windows = [block.tensor[start:stop] for start, stop in places]

    @property
    def is_packed(self) -> bool:
        """True if it travels without its gaps, which costs a copy."""
        return bool(self._windows)

    @torch.no_grad()
    def pack(self) -> Tensor:
        return torch.cat(self._windows) if self._windows else self._tensor

    def recv_buffer(self) -> Tensor:
        return self._tensor.new_empty(self._numel) if self._windows else self._tensor

    @torch.no_grad()
    def unpack(self, segment: Tensor) -> None:
        """Copy a received segment into the parameters, unless they live in it."""
        if not self._windows:
            return
        parts = segment.split([window.numel() for window in self._windows])
        torch._foreach_copy_(self._windows, list(parts))
        if segment.device.type != "cpu":  # allocated on the step's stream, perhaps read on a different one
            segment.record_stream(torch.accelerator.current_stream(segment.device))


class PackedStorage:
    """Parameters stay where they are; segments are copied to and from temporary tensors.

    A segment of one contiguous parameter, or of a part of a dense parameter, is that memory itself and is not copied.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._params = params

    @torch.no_grad()
    def segments_to_sync(self, bucket: Bucket, group_rank: GroupRank) -> list[Tensor]:
        """This rank's segment packed, and receive buffers for the others; at most one bucket's bytes in total."""
        segments = self._recv_buffers_for(bucket)
        own = bucket.segments[group_rank]
        if own.params and self._alias(own) is None:
            # after the step of this bucket, on its stream; peers read the copy, so it must live until `write_back`
            torch._foreach_copy_(self._views(own, segments[group_rank]), self._windows(own))
        return segments

    def fixed_segments(self, bucket: Bucket) -> list[Tensor] | None:
        return None

    @torch.no_grad()
    def write_back(self, bucket: Bucket, segments: Sequence[Tensor], group_rank: GroupRank) -> None:
        for segment, tensor in zip(bucket.segments, segments, strict=True):
            # never this rank's own segment: the copy that was sent may be older than the parameters by now
            if segment.owner != group_rank and segment.params and self._alias(segment) is None:
                torch._foreach_copy_(self._windows(segment), self._views(segment, tensor))

    def blocks_of(self, bucket: Bucket) -> Sequence[Block]:
        return ()

    def _windows(self, segment: Segment) -> list[Tensor]:
        """The parameters of a segment, or the parts of them that it holds, with version counters of their own."""
        pairs = zip(segment.params, segment.ranges, strict=True)
        return [_window(self._params[index].data, start, stop) for index, (start, stop) in pairs]

    def _views(self, segment: Segment, tensor: Tensor) -> list[Tensor]:
        """The same places in the segment tensor."""
        windows = zip(self._windows(segment), segment.offsets, strict=True)
        return [tensor[offset : offset + window.numel()].view(window.shape) for window, offset in windows]

    def _alias(self, segment: Segment) -> Tensor | None:
        """The segment tensor, if it needs no copy."""
        if len(segment.params) != 1 or segment.is_even:  # whose end may lie behind the parameter
            return None
        window = _window(self._params[segment.params[0]].detach(), *segment.ranges[0])
        return window.as_strided((segment.numel,), (1,)) if window.is_contiguous() else None

    def _recv_buffers_for(self, bucket: Bucket) -> list[Tensor]:
        """The segment tensors: windows of one memory if they are even, as one collective gathers them in place."""
        if not bucket.segments[0].is_even:
            return [self._recv_buffer_for(segment) for segment in bucket.segments]
        like = self._params[bucket.segments[0].params[0]]
        numel = bucket.segments[0].numel
        recv_buffer = torch.empty(numel * len(bucket.segments), dtype=like.dtype, device=like.device)
        return list(recv_buffer.split(numel))

    def _recv_buffer_for(self, segment: Segment) -> Tensor:
        """The memory into which a segment is received: flat storage that is its parameters, or a new tensor."""
        alias = self._alias(segment)
        if alias is not None:
            return alias
        if not segment.params:
            return torch.empty(0)
        like = self._params[segment.params[0]]
        return torch.empty(segment.numel, dtype=like.dtype, device=like.device)


ParameterStorage = ViewStorage | PackedStorage
"""Provides the segment tensors of a plan, and puts received segments into the parameters."""


def _window(value: Tensor, start: int, stop: int) -> Tensor:
    """A whole parameter as it is, or a part of it, 1-D."""
    return value if stop - start == value.numel() else run_of(value)[start:stop]


@torch.no_grad()
def give_own_storage(params: Sequence[Tensor]) -> None:
    """Give parameters memory of their own, so that they do not keep a whole segment alive."""
    for param in params:
        param.data = param.data.clone()  # keeps dense strides
