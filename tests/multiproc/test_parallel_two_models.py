"""A DDP model over what is dense and a second one over the experts, also where no token reaches some of them."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from ddp_zero.parallel import ParallelOptimizer
from tests.multiproc.cases import assert_equal_models, batches, loss_of, sum_in_rank_order
from tests.multiproc.experts import (
    CLIP,
    OPTIONS,
    cut_mixture,
    dense_and_experts,
    expert_groups,
    wrapped_without_experts,
)
from tests.multiproc.harness import Cases, Setup
from tests.multiproc.two_ddp_models import train_two_ddp_models

case = Cases(timeout=120, group_timeout=30)


@case(4)
def _a_second_ddp_model_over_the_experts_shards_their_gradients_too(setup: Setup) -> None:
    for clipped in (None, CLIP):
        train_two_ddp_models(setup, clipped, expert_ranks=2)


@case(4, marks=[pytest.mark.nightly])
def _experts_that_rest_in_a_ddp_model_of_their_own_neither_stall_nor_diverge(setup: Setup) -> None:
    spread, same = expert_groups(setup.rank, 4, 2)
    modes: tuple[dict[str, Any], ...] = ({}, {"stage": 2}, {"stage": 2, "max_grad_norm": 1.0})
    for mode in modes:
        pairs = []
        for _ in range(2):
            model: Any = cut_mixture(setup.rank, 2, 4, spread)
            options: dict[str, Any] = {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0004}
            choose_experts(model, setup.rank)
            model.experts = DistributedDataParallel(
                model.experts, process_group=same, find_unused_parameters=True, **options
            )
            pairs.append(wrapped_without_experts(model, **options))
        expected, ddp = pairs
        if mode.get("stage") == 2:
            expected.register_comm_hook(None, sum_in_rank_order)
        plain = AdamW(expected.parameters(), **OPTIONS)
        opt = ParallelOptimizer(ddp, AdamW, dense_and_experts(ddp, same), **mode, **OPTIONS)
        rested = [0, 0]
        for step, batch in enumerate(batches(setup.rank, 6)):
            for one, optimizer in ((expected, plain), (ddp, opt)):
                optimizer.zero_grad()
                experts: Any = one.module.experts
                experts.module.step = step
                loss_of(one, *batch).backward()
            opt.step()
            if "max_grad_norm" in mode:
                assert opt.last_step is not None
                scale(expected, float(opt.last_step.grad_norm or 0.0))
            plain.step()
            assert_equal_models(expected.module, ddp.module, f"after step {step}: {mode}")
            for number, expert in enumerate(experts.module.local):
                rested[number] += all(param.grad is None for param in expert.parameters())
        assert rested[0], "no step in which no rank has used the expert"


def scale(model: nn.Module, norm: float) -> None:
    factor = torch.clamp(1.0 / (torch.tensor(norm) + 1e-6), max=1.0)
    for param in model.parameters():
        if param.grad is not None:
            param.grad.mul_(factor)


def choose_experts(model: Any, rank: int) -> None:
    """Send tokens by step: to all experts; to the second of each rank only; from some ranks to the first only."""
    experts = model.experts
    experts.step = 0
    forward = experts.forward

    def chosen(tokens: torch.Tensor, by_gate: torch.Tensor) -> Any:
        places = torch.arange(len(tokens)) + rank
        if experts.step % 3 == 1:
            by_gate = places % 2 * 2 + 1  # experts 1 and 3: each rank's second
        elif experts.step % 3 == 2:
            by_gate = places % 2 * 2 if rank < 2 else places % 4  # ranks 0 and 1 leave each rank's second alone
        else:
            by_gate = places % 4
        return forward(tokens, by_gate)

    experts.forward = chosen


@case(4)
def _a_rank_without_any_token_takes_part_with_zeros(setup: Setup) -> None:
    """As if it had run its experts on empty batches; DDP alone would wait for it."""
    spread, same = expert_groups(setup.rank, 4, 2)
    for mode in ({}, {"stage": 2, "max_grad_norm": 1.0}):
        pairs = []
        for runs_empty in (True, False):
            model: Any = cut_mixture(setup.rank, 2, 4, spread)
            model.experts.runs_empty = runs_empty
            choose_one_rank(model, setup.rank)
            options: dict[str, Any] = {"gradient_as_bucket_view": True}
            model.experts = DistributedDataParallel(
                model.experts, process_group=same, find_unused_parameters=not runs_empty, **options
            )
            pairs.append(wrapped_without_experts(model, **options))
        expected, ddp = (
            (one, ParallelOptimizer(one, AdamW, dense_and_experts(one, same), **mode, **OPTIONS))  # type: ignore[arg-type]
            for one in pairs
        )
        for step, batch in enumerate(batches(setup.rank, 4)):
            for one, opt in (expected, ddp):
                opt.zero_grad()
                loss_of(one, *batch).backward()
                opt.step()
            assert_equal_models(expected[0].module, ddp[0].module, f"after step {step}: {mode}")
        copied = copy.deepcopy(ddp[0].module.experts.module.local)
        assert torch.equal(copied[0](torch.zeros(1, 8)), ddp[0].module.experts.module.local[0](torch.zeros(1, 8)))


def choose_one_rank(model: Any, rank: int) -> None:
    """Ranks 0 and 1 send tokens to all experts, ranks 2 and 3 to those of rank 2 alone: rank 3 gets none."""
    forward = model.experts.forward

    def chosen(tokens: torch.Tensor, by_gate: torch.Tensor) -> Any:
        return forward(tokens, torch.arange(len(tokens)) % (4 if rank < 2 else 2))

    model.experts.forward = chosen


test_two_models = case.each()
