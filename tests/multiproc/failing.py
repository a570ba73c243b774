"""An optimizer that fails on one rank, and what all ranks must hear."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW

import ddp_zero
from ddp_zero.parallel import ParallelOptimizer
from tests.multiproc.cases import batches


@ddp_zero.elementwise
class FailingAdamW(AdamW):
    """Raises in its step when told to."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise ValueError("out of order")
        return super().step(closure)


def fail_at_once(opt: ParallelOptimizer, iteration: Callable[[], None], member: int, rank: int) -> None:
    """Two steps pass; then this member's optimizer raises on this rank, and all ranks raise in ``opt.step()``."""
    for _ in range(2):
        iteration()
        opt.step()
    inner: Any = opt.members[member].optim
    inner.fails = dist.get_rank() == rank
    iteration()
    if dist.get_rank() == rank:
        with pytest.raises(ValueError, match="out of order"):
            opt.step()
    else:
        with pytest.raises(RuntimeError, match=rf"ValueError: out of order \(global rank {rank}\)\. Some parameters"):
            opt.step()
    dist.barrier()


Loss = Callable[[Any, Any], torch.Tensor]


def iterations(opt: ParallelOptimizer, model: nn.Module, loss: Loss, data_rank: int) -> Callable[[], None]:
    feed = batches(data_rank, 10)

    def run() -> None:
        opt.zero_grad()
        loss(model, next(feed)).backward()

    return run
