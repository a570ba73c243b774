"""A rank that is lost, or does not come, where ranks decide together: the others name it."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from ddp_zero import DynamicLossScale, shard_optimizer
from tests.multiproc.experts import cut_mixture, dense_and_experts, expert_groups, wrapped_without_experts
from tests.multiproc.harness import Setup, kill_this_process, run_ranks_to_end

GROUP_TIMEOUT = 4
LOST = 1


def _dense(setup: Setup, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return ddp, shard_optimizer(ddp, AdamW, foreach=False, **options)


def _experts(setup: Setup) -> tuple[nn.Module, Any]:
    spread, same = expert_groups(setup.rank, setup.world_size, 2)
    ddp = wrapped_without_experts(cut_mixture(setup.rank, 2, 4, spread), gradient_as_bucket_view=True)
    groups = dense_and_experts(ddp, same)
    return ddp, shard_optimizer(ddp, AdamW, groups, stage=2, max_grad_norm=1.0, foreach=False)


BUILD: dict[str, Callable[[Setup], tuple[nn.Module, Any]]] = {
    "norm, stage 1": lambda setup: _dense(setup, stage=1, max_grad_norm=1.0),
    "norm, stage 2": lambda setup: _dense(setup, stage=2, max_grad_norm=1.0),
    "norm of parts": lambda setup: _dense(setup, stage=2, max_grad_norm=1.0, partition="elements"),
    "scale": lambda setup: _dense(setup, stage=2, loss_scale=DynamicLossScale(4.0)),
    "experts": _experts,
}


def _lose_a_rank(setup: Setup, kind: str, how: str) -> str:
    ddp, opt = BUILD[kind](setup)
    inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(setup.rank))
    for step in range(3):
        loss = ddp(inputs).square().mean()
        (opt.scale(loss) if kind == "scale" else loss).backward()
        if step == 2 and setup.rank == LOST:
            if how == "killed":
                kill_this_process()
            setup.wait_until_told(setup.world_size - 1)
            return "late"
        try:
            opt.step()
        except RuntimeError as error:
            setup.tell()
            return str(error)
        opt.zero_grad()
    return "no error"


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("norm, stage 1", "killed"),
        ("norm of parts", "killed"),
        *(pytest.param(kind, "killed", marks=pytest.mark.nightly) for kind in ("norm, stage 2", "scale", "experts")),
        pytest.param("norm, stage 2", "late", marks=pytest.mark.nightly),
        ("experts", "late"),
    ],
)
def test_a_rank_that_is_missing_in_a_decision_is_named(kind: str, how: str) -> None:
    ranks = 4 if kind == "experts" else 3
    outcomes = run_ranks_to_end(_lose_a_rank, ranks, kind, how, timeout=60, group_timeout=GROUP_TIMEOUT)
    told = [outcome.result or outcome.error for rank, outcome in enumerate(outcomes) if rank != LOST]
    assert all(re.search(r"Expected .*\(global rank \d\).* to take part in", text or "") for text in told), told
    named = [text for text in told if text and f"(global rank {LOST})" in text]
    if kind == "experts":
        assert named, told
    else:
        assert named == told
