"""Rings at any number of ranks, and the reference for what is summed around them."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from ddp_zero import ZeroRedundancyOptimizer
from ddp_zero.core.comm import communicator, ring
from ddp_zero.core.comm.ring import RingTransfer
from tests import internals
from tests.multiproc.cases import added, gathered, ready


@contextmanager
def rings_for_all() -> Iterator[list[RingTransfer]]:
    """Rings whatever the size, with chunks of at least 64 bytes; the transfers that were run."""
    run, transfers = RingTransfer.run, []

    def noted(transfer: RingTransfer) -> None:
        transfers.append(transfer)
        run(transfer)

    with (
        mock.patch.multiple(communicator, RING_RANKS=2, RING_BYTES=0),
        mock.patch.object(ring, "LEAST_BYTES", 64),
        mock.patch.object(RingTransfer, "run", noted),
    ):
        yield transfers


class SumInRingOrder:
    """`average` is a hook for the plain twin of a sharded model: DDP's averaging, with sums in the order of stage 2.

    Each backward pass of the twin must come before that of the sharded model.

    Args:
        twin: the model that it is registered on.
        opt: the sharded optimizer, of stage 2.
    """

    def __init__(self, twin: DistributedDataParallel, opt: ZeroRedundancyOptimizer) -> None:
        self._index_of: dict[Tensor, int] = {param: index for index, param in enumerate(twin.parameters())}
        self._opt = opt

    def average(self, state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        ranks = dist.get_world_size()
        mine = bucket.buffer().mul_(1.0 / ranks)
        parts = gathered(mine)
        total = torch.empty_like(mine)
        for owner, (start, stop) in self._owned(bucket):
            order = [parts[(owner + 1 + place) % ranks][start:stop] for place in range(ranks)]
            total[start:stop] = added(order)
        return ready(total)

    def _owned(self, bucket: GradBucket) -> Iterator[tuple[int, tuple[int, int]]]:
        """Who sums which part of a bucket: the owner as it is now, whose own part comes last."""
        params, owners = bucket.parameters(), internals.owners_of(self._opt)
        ends = list(accumulate((param.numel() for param in params), initial=0))
        yield from zip([int(owners[self._index_of[param]]) for param in params], pairwise(ends), strict=True)
