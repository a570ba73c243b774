"""Training whose parameters arrive in the next forward pass."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from ddp_zero import ZeroRedundancyOptimizer, shard_optimizer
from tests import internals
from tests.multiproc.cases import Twins, assert_identical, loss_of, sharded_twins, step_on, sum_in_rank_order

CAP_MB = 0.0015  # several buckets


MODES: dict[str, dict[str, Any]] = {
    "stage 1, standalone": {"overlap": False},
    "stage 1, overlapped": {},
    "stage 1, interleaved": {"interleaved": True},
    "stage 1, clipped": {"max_grad_norm": 0.1},
    "stage 2, interleaved": {"stage": 2},
    "stage 2, last bucket": {"stage": 2, "interleaved": False},
    "stage 2, whole buckets": {"stage": 2, "shard_buckets": False},
    "stage 2, after backward": {"stage": 2, "overlap": False},
}


OPTIONS: dict[str, Any] = {"lr": 1e-2}


def wrapped(model: nn.Module, group: dist.ProcessGroup | None = None, **options: Any) -> DistributedDataParallel:
    options = {"bucket_cap_mb": CAP_MB, "gradient_as_bucket_view": True, **options}
    return DistributedDataParallel(model, process_group=group, **options)


def plain(model: nn.Module, group: dist.ProcessGroup | None = None, **options: Any) -> DistributedDataParallel:
    """Sums in rank order, as stage 2 does and as DDP does at two ranks."""
    ddp = wrapped(model, group, **options)
    ddp.register_comm_hook(ddp.process_group, sum_in_rank_order)
    return ddp


def sharded(
    ddp: DistributedDataParallel, mode: dict[str, Any], build: Callable[..., Optimizer] = AdamW, **options: Any
) -> ZeroRedundancyOptimizer:
    if mode.get("stage", 1) == 1:
        mode = {**mode, "hook": sum_in_rank_order}
    opt: ZeroRedundancyOptimizer = shard_optimizer(ddp, build, sync="forward", **mode, **OPTIONS, **options)
    return opt


def late_twins(mode: str, model: nn.Module | None = None, build: Callable[..., Optimizer] = AdamW, **ddp: Any) -> Twins:
    """Ours gathers parameters in the next forward pass."""
    ours = MODES[mode] if MODES[mode].get("stage") == 2 else {**MODES[mode], "hook": sum_in_rank_order}
    ddp = {"gradient_as_bucket_view": True, **ddp}
    return sharded_twins(model, build, ddp=ddp, plain_hook=sum_in_rank_order, sync="forward", **ours)


def left(opt: ZeroRedundancyOptimizer) -> list[int]:
    """Buckets that are on their way after a step."""
    return internals.syncs_in_flight(opt)


def assert_same_values(expected: nn.Module, actual: nn.Module, when: str) -> None:
    """Of parameters that may be on their way: reading them is a use."""
    for (name, one), other in zip(expected.named_parameters(), actual.parameters(), strict=True):
        assert_identical(one.detach(), other.detach(), f"{name} {when}")


def train_step(model: nn.Module, opt: Optimizer, inputs: Tensor, targets: Tensor) -> None:
    step_on(opt, loss_of(model, inputs, targets))
