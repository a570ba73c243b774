"""The buffers that the buckets of stage 2 share: their sizes, found by lending them as an iteration does."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ddp_zero.core.backward.scratch_buffers import BufferPool, pools_for
from ddp_zero.core.backward.side_stream import SideStream
from ddp_zero.core.comm.communicator import RING_BYTES, RING_RANKS
from ddp_zero.core.comm.reduction import received_window
from ddp_zero.core.comm.ring import ring_room_numel
from ddp_zero.core.plan.shapes import padded_size

_META = torch.device("meta")


@dataclass(frozen=True)
class BucketSizes:
    """One bucket of stage 2.

    Attributes:
        slices: elements that each rank owns, in rank order.
        itemsize: bytes of an element.
        is_low: whether sums are in fp32, and elements are not.
    """

    slices: Sequence[int]
    itemsize: int
    is_low: bool

    @property
    def nbytes(self) -> int:
        """Of all gradients."""
        return sum(self.slices) * self.itemsize


def buffer_bytes(buckets: Sequence[BucketSizes], rank: int, on_accelerator: bool) -> int:
    """Bytes that a rank needs to fill, reduce and receive buckets, from the second iteration on.

    Args:
        buckets: in the order in which they are reduced.
        rank: the rank.
        on_accelerator: whether NCCL reduces them; else Gloo does.
    """
    scratches, rooms = pools_for([bucket.nbytes for bucket in buckets], SideStream())
    last = [_lend_and_return(scratches, bucket.nbytes) for bucket in buckets]
    received = [_received_bytes(bucket, rank, on_accelerator) for bucket in buckets]
    reduced: list[torch.Tensor] = []
    for place, bucket in enumerate(buckets):
        filled = scratches.lend(bucket.nbytes, _META, like=last[place])  # while the one before is being reduced
        for earlier in reduced:
            scratches.give_back(earlier)
        reduced = [filled]
        if received[place]:
            _lend_and_return(rooms, received[place])
    return scratches.statistics.most_bytes + rooms.statistics.most_bytes


def _lend_and_return(pool: BufferPool, nbytes: int) -> torch.Tensor:
    buffer = pool.lend(nbytes, _META)
    pool.give_back(buffer)
    return buffer


def _received_bytes(bucket: BucketSizes, rank: int, on_accelerator: bool) -> int:
    """What a reduction needs besides the bucket."""
    world_size, own = len(bucket.slices), bucket.slices[rank]
    if world_size == 1:
        return 0
    if on_accelerator:
        padded = padded_size(bucket.slices)
        return 0 if padded is None else bucket.itemsize * padded * (world_size + 1)
    if world_size >= RING_RANKS and bucket.nbytes >= RING_BYTES and not bucket.is_low:
        return ring_room_numel(bucket.slices, bucket.itemsize) * bucket.itemsize
    return received_window(own, world_size, sum(bucket.slices)) * (world_size - 1) * bucket.itemsize
