"""Two DDP models in one parallel optimizer."""

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from ddp_zero.parallel import ParallelOptimizer
from tests.multiproc.cases import assert_equal_models, batches, loss_of, sum_in_rank_order
from tests.multiproc.experts import (
    OPTIONS,
    clip,
    cut_mixture,
    dense_and_experts,
    expert_groups,
    wrapped_without_experts,
)
from tests.multiproc.harness import Setup
from tests.multiproc.parity import Parity


def train_two_ddp_models(setup: Setup, clipped: float | None, expert_ranks: int) -> Parity:
    """A DDP model over what is dense, and one over the experts: beside the plain optimizer."""
    spread, same = expert_groups(setup.rank, setup.world_size, expert_ranks)
    parity = Parity()
    pairs = []
    for _ in range(2):
        model: Any = cut_mixture(setup.rank, expert_ranks, 4, spread)
        options: dict[str, Any] = {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0004}
        model.experts.runs_empty = True
        model.experts = DistributedDataParallel(model.experts, process_group=same, **options)
        pairs.append(wrapped_without_experts(model, **options))
    expected, ddp = pairs
    expected.register_comm_hook(None, sum_in_rank_order)
    plain = AdamW(expected.parameters(), **OPTIONS)
    opt = ParallelOptimizer(ddp, AdamW, dense_and_experts(ddp, same), stage=2, max_grad_norm=clipped, **OPTIONS)
    assert [member.stage for member in opt.members] == [2, 2]
    for step, batch in enumerate(batches(setup.rank, 4)):
        plain.zero_grad()
        loss_of(expected, *batch).backward()
        opt.zero_grad()
        loss_of(ddp, *batch).backward()
        opt.step()
        assert opt.last_step is not None
        if clipped is not None:
            clip(expected, torch.tensor(opt.last_step.grad_norm))
        plain.step()
        assert_equal_models(expected.module, ddp.module, f"after step {step}, clipped {clipped}")
        parity.note_plain(expected.parameters(), ddp.parameters())
    return parity
