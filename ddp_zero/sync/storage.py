"""Flat storage: the one file that re-points ``param.data``.

[Note: ddp_zero tensors]
*segment tensor*: 1-D, the parameters of one segment; what travels.
*flat tensor*: 1-D, the memory that the parameters of one segment live in.
*parameter view*: a window of a flat tensor with the parameter's own shape and strides.

With `ViewStorage` the flat tensors are the segment tensors, and a sync copies nothing. With `PackedStorage` the user's
storage is left alone: a segment is packed before it is sent and unpacked when it has arrived.

A flat tensor has gaps. Every parameter starts at a multiple of 64 bytes, as a tensor with memory of its own does,
because matrix products round differently at other offsets. The gaps are sent if they are at most 0.5% of the segment;
otherwise (small parameters of odd sizes) the segment is packed end to end.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ddp_zero.plan.partition import GroupRank
from ddp_zero.plan.shapes import aligned_offsets, is_dense
from ddp_zero.plan.shard_plan import Bucket, Segment, ShardPlan

_ALIGNMENT = 64  # bytes
_LARGEST_GAPS = 200  # at most one element of gap per this many


class ParameterStorage(Protocol):
    """Provides the segment tensors of a plan, and puts received ones into the parameters."""

    def segments_to_sync(self, bucket: Bucket, group_rank: GroupRank) -> list[Tensor]:
        """The segment tensors of a bucket, in rank order: this rank's filled, the others' as receive buffers."""

    def write_back(self, bucket: Bucket, segments: Sequence[Tensor], group_rank: GroupRank) -> None:
        """Make what was received visible in the parameters of the other owners."""

    def memory_of(self, bucket: Bucket, group_rank: GroupRank) -> Tensor | None:
        """The 1-D memory that holds all of a rank's parameters of a bucket; None if they do not share one."""


class ViewStorage:
    """Parameters are views into one flat tensor per (bucket, owner).

    Building it moves the parameters: their values are copied once and ``param.data`` is re-pointed. Strides are kept,
    so a channels-last weight stays channels-last.

    Raises:
        ValueError: for a parameter whose elements do not fill one run of memory.
    """

    def __init__(self, plan: ShardPlan, params: Sequence[Tensor], label: Callable[[int], str]) -> None:
        for bucket in plan.buckets:
            for segment in bucket.segments:
                for param in segment.params:
                    if not is_dense(params[param].shape, params[param].stride()):
                        raise ValueError(
                            f"Expected parameters without gaps or overlaps in memory, got {label(param)} with "
                            f"strides {list(params[param].stride())}. Use parameters_as_bucket_view=False."
                        )
        self._flats = [[_FlatSegment(segment, params) for segment in bucket.segments] for bucket in plan.buckets]

    def segments_to_sync(self, bucket: Bucket, group_rank: GroupRank) -> list[Tensor]:
        """The flat tensors themselves; where the gaps are too large, this rank's packed and buffers for the others."""
        flats = enumerate(self._flats[bucket.index])
        return [flat.packed() if rank == group_rank else flat.room() for rank, flat in flats]

    def write_back(self, bucket: Bucket, segments: Sequence[Tensor], group_rank: GroupRank) -> None:
        """Unpack what the other owners sent packed."""
        for rank, (flat, tensor) in enumerate(zip(self._flats[bucket.index], segments, strict=True)):
            if rank != group_rank:
                flat.unpack(tensor)

    def memory_of(self, bucket: Bucket, group_rank: GroupRank) -> Tensor | None:
        """The flat tensor of that segment."""
        found: Tensor = self._flats[bucket.index][group_rank].tensor
        return found


class _FlatSegment:
    """The flat tensor of one segment. Building it moves the segment's parameters there.

    Nothing here touches a parameter afterwards: using one that is still in flight would wait for it again.

    Attributes:
        tensor: 1-D, the parameters at aligned places, zeros between them.
    """

    @torch.no_grad()
    def __init__(self, segment: Segment, params: Sequence[Tensor]) -> None:
        members = [params[index] for index in segment.params]
        numels = [param.numel() for param in members]
        *offsets, end = aligned_offsets(numels, members[0].itemsize if members else 1, _ALIGNMENT)
        like = members[0] if members else torch.empty(0)
        self.tensor: Tensor = torch.zeros(end, dtype=like.dtype, device=like.device)
        for param, offset in zip(members, offsets, strict=True):
            view = self.tensor.as_strided(param.shape, param.stride(), offset)
            view.copy_(param)
            param.data = view  # the old memory is freed once nothing else holds it
        self._numel = segment.numel
        self._windows: list[Tensor] = []  # of the parameters, if they are packed
        if (end - segment.numel) * _LARGEST_GAPS > segment.numel:
            self._windows = [self.tensor[start : start + n] for start, n in zip(offsets, numels, strict=True)]

    @torch.no_grad()
    def packed(self) -> Tensor:
        """The segment tensor, filled."""
        return torch.cat(self._windows) if self._windows else self.tensor

    def room(self) -> Tensor:
        """The segment tensor, as a receive buffer."""
        return self.tensor.new_empty(self._numel) if self._windows else self.tensor

    @torch.no_grad()
    def unpack(self, segment: Tensor) -> None:
        """Put what was received into the parameters, unless they live in it."""
        if not self._windows:
            return
        parts = segment.split([window.numel() for window in self._windows])
        torch._foreach_copy_(self._windows, list(parts))
        if segment.device.type != "cpu":  # allocated on the step's stream, perhaps read on a different one
            segment.record_stream(torch.accelerator.current_stream(segment.device))


class PackedStorage:
    """Parameters stay where they are; segments are copied to and from temporary tensors.

    A segment of one contiguous parameter is that parameter's own memory and is not copied.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._params = params

    @torch.no_grad()
    def segments_to_sync(self, bucket: Bucket, group_rank: GroupRank) -> list[Tensor]:
        """This rank's segment packed, and receive buffers for the others; at most one bucket's bytes in total."""
        segments = [self._room_for(segment) for segment in bucket.segments]
        own = bucket.segments[group_rank]
        if own.params and not self._is_alias(own):
            torch._foreach_copy_(_views(own, segments[group_rank], self._params), self._of(own))
        return segments

    @torch.no_grad()
    def write_back(self, bucket: Bucket, segments: Sequence[Tensor], group_rank: GroupRank) -> None:
        """Unpack what the other owners sent."""
        for segment, tensor in zip(bucket.segments, segments, strict=True):
            if segment.owner != group_rank and segment.params and not self._is_alias(segment):
                targets = [param.data for param in self._of(segment)]  # has a version counter of its own
                torch._foreach_copy_(targets, _views(segment, tensor, self._params))

    def memory_of(self, bucket: Bucket, group_rank: GroupRank) -> Tensor | None:
        """None: each parameter has memory of its own."""
        return None

    def _of(self, segment: Segment) -> list[Tensor]:
        return [self._params[param] for param in segment.params]

    def _is_alias(self, segment: Segment) -> bool:
        return len(segment.params) == 1 and self._params[segment.params[0]].is_contiguous()

    def _room_for(self, segment: Segment) -> Tensor:
        if self._is_alias(segment):
            return self._params[segment.params[0]].detach().as_strided((segment.numel,), (1,))
        if not segment.params:
            return torch.empty(0)
        like = self._params[segment.params[0]]
        return torch.empty(segment.numel, dtype=like.dtype, device=like.device)


@torch.no_grad()
def release(params: Sequence[Tensor]) -> None:
    """Give parameters memory of their own, so that they do not keep a whole segment alive."""
    for param in params:
        param.data = param.data.clone()  # keeps dense strides


def _views(segment: Segment, tensor: Tensor, params: Sequence[Tensor]) -> list[Tensor]:
    return [
        tensor[offset : offset + params[param].numel()].view(params[param].shape)
        for param, offset in zip(segment.params, segment.offsets, strict=True)
    ]
