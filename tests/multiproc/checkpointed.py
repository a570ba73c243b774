"""A training that is saved and loaded."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from ddp_zero import ZeroRedundancyOptimizer, shard_optimizer
from ddp_zero.optimizer import states_of
from tests.multiproc.cases import batches, build_model, loss_of
from tests.multiproc.harness import Setup

OPTIONS: dict[str, Any] = {"lr": 1e-2}


def wrap(model: nn.Module | None = None) -> DistributedDataParallel:
    model = build_model() if model is None else model
    return DistributedDataParallel(model, bucket_cap_mb=0.0015, gradient_as_bucket_view=True)


def sharded(
    stage: int = 2, model: nn.Module | None = None, build: Callable[..., Optimizer] = AdamW, **options: Any
) -> tuple[DistributedDataParallel, ZeroRedundancyOptimizer]:
    ddp = wrap(model)
    return ddp, shard_optimizer(ddp, build, stage=stage, **{**OPTIONS, **options})


def train(setup: Setup, model: nn.Module, optimizer: Optimizer, seed: int = 0, steps: int = 3) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"] if param.requires_grad]
    before = [param.detach().clone() for param in params]
    for inputs, targets in batches(setup.rank, steps, seed):
        optimizer.zero_grad()
        loss = loss_of(model, inputs, targets)
        scales = isinstance(optimizer, ZeroRedundancyOptimizer) and optimizer.loss_scale is not None
        (optimizer.scale(loss) if scales else loss).backward()  # type: ignore[attr-defined]
        optimizer.step()
    moved = sum(not torch.equal(old, new) for old, new in zip(before, params, strict=True))
    assert moved >= len(params) // 2 if steps else moved == 0, f"{moved} of {len(params)} parameters moved"


def everything(model: nn.Module, optimizer: Optimizer) -> Any:
    """Copies of all that a load may change on this rank."""
    own = (
        states_of(optimizer).owned_state() if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer.state_dict()
    )
    groups = [{key: value for key, value in g.items() if key != "params"} for g in optimizer.param_groups]
    return copy.deepcopy((dict(model.state_dict()), own, groups))
