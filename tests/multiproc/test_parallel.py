"""Experts, tensor and pipeline parallel ranks: who reduces and shards what, and one decision over the whole model."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW

import ddp_zero
from ddp_zero.parallel import ParallelOptimizer
from tests import internals
from tests.multiproc.cases import (
    assert_equal_models,
    assert_identical,
    assert_same_on_all_ranks,
    batches,
    loss_of,
    sum_in_rank_order,
)
from tests.multiproc.experts import (
    EXPERT_MODES,
    OPTIONS,
    Mixture,
    average_experts,
    cut_mixture,
    dense_and_experts,
    expert_groups,
    norm_of_one_device,
    train_mixture,
    wrapped_without_experts,
)
from tests.multiproc.harness import Cases, Setup

case = Cases(timeout=120, group_timeout=30)


@case(4, few=list(EXPERT_MODES)[1::3], every=list(EXPERT_MODES))
def _experts_equal_the_plain_optimizer_and_norms_one_device(setup: Setup, configurations: Sequence[str]) -> None:
    for name in configurations:
        mode = EXPERT_MODES[name]
        train_mixture(setup, mode, "in the loop" in name, expert_ranks=2, total=4)


@case(4)
def _a_gradient_that_is_not_finite_in_one_expert_stops_every_rank(setup: Setup) -> None:
    spread, same = expert_groups(setup.rank, 4, 2)
    for mode in ({"stage": 2}, {"overlap": False}):
        model = cut_mixture(setup.rank, 2, 4, spread)
        ddp = wrapped_without_experts(model, gradient_as_bucket_view=True)
        scale = ddp_zero.DynamicLossScale(initial=8.0)
        opt = ParallelOptimizer(ddp, AdamW, dense_and_experts(ddp, same), loss_scale=scale, **mode, **OPTIONS)
        for step, batch in enumerate(batches(setup.rank, 3)):
            before = [param.detach().clone() for param in model.parameters()]
            opt.zero_grad()
            opt.scale(loss_of(ddp, *batch)).backward()
            weight = model.get_parameter("experts.local.1.0.weight")
            if step == 1 and setup.rank == 3:
                weight.grad = torch.full_like(weight, float("inf"))
            opt.step()
            record = opt.last_step
            assert record is not None
            assert record.stepped == (step != 1)
            moved = [not torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True)]
            assert any(moved) == (step != 1)
            if step == 1:
                assert record.nonfinite_parameter == "module.experts.local.1.0.weight"
                assert opt.loss_scale == 4.0
        assert [member.loss_scale for member in opt.members] == [4.0, 4.0]


@case(4)
def _experts_that_are_frozen_or_unused_somewhere_do_not_stall_the_others(setup: Setup) -> None:
    spread, same = expert_groups(setup.rank, 4, 2)
    model = cut_mixture(setup.rank, 2, 4, spread)
    ddp = wrapped_without_experts(model)
    opt = ParallelOptimizer(ddp, AdamW, dense_and_experts(ddp, same), max_grad_norm=1.0, **OPTIONS)
    first, second = model.experts.local[0], model.experts.local[1]
    for step, batch in enumerate(batches(setup.rank, 4)):
        if step == 1 and setup.rank % 2:  # both ranks that hold it, not those with the other experts
            first.requires_grad_(False)
        frozen = copy.deepcopy(first.state_dict())
        before = copy.deepcopy(second.state_dict())
        opt.zero_grad()
        loss_of(ddp, *batch).backward()
        if step == 2 and setup.rank == 0:
            for param in second.parameters():
                param.grad = None  # used by rank 2 only
        opt.step()
        moved = {name: not torch.equal(frozen[name], value) for name, value in first.state_dict().items()}
        assert not (step >= 1 and setup.rank % 2 and any(moved.values()))
        assert any(not torch.equal(before[name], value) for name, value in second.state_dict().items())
    assert_same_on_all_ranks(second.parameters(), same)
    if setup.rank == 2:
        second.requires_grad_(False)
    opt.zero_grad()
    loss_of(ddp, *next(batches(setup.rank, 1))).backward()
    with pytest.raises(RuntimeError, match=r"frozen on rank 1 \(global rank 2\) and trainable on rank 0|on rank 0: R"):
        opt.step()


@case(4)
def _ranks_with_different_views_of_the_groups_are_named(setup: Setup) -> None:
    spread, same = expert_groups(setup.rank, 4, 2)

    def refused(group: Any, kind: type[Exception], match: str, seed: int = 0) -> None:
        model = cut_mixture(setup.rank, 2, 4, spread)
        model.get_parameter("experts.local.0.0.bias").data.add_(seed)
        ddp = wrapped_without_experts(model)
        with pytest.raises(kind, match=match):
            ParallelOptimizer(ddp, AdamW, dense_and_experts(ddp, group), **OPTIONS)

    wrong = spread if setup.rank == 1 else same
    refused(
        wrong, ValueError, r"agree on who they are, got \[0, 1\] on global rank 1 and \[0, 2\] on global rank 0|on glo"
    )
    refused(None if setup.rank == 3 else same, ValueError, "the same parameter groups with a process group.*rank 3")
    others = (
        r"different values on rank 0 \(global rank 0\) and rank 1 \(global rank 2\)" if setup.rank % 2 == 0 else "on ra"
    )
    refused(same, ValueError if setup.rank % 2 == 0 else RuntimeError, others, seed=int(setup.rank == 2))
    opt = ParallelOptimizer(
        ddp := wrapped_without_experts(cut_mixture(setup.rank, 2, 4, spread)),
        AdamW,
        dense_and_experts(ddp, same),
        **OPTIONS,
    )
    text = opt.explain()
    assert "shared by global ranks 0 1 2 3; this rank's are 0 1 2 3; averaged by DDP" in text
    mine = "0 2" if setup.rank % 2 == 0 else "1 3"
    assert f"shared by global ranks 0 2 | 1 3; this rank's are {mine}; averaged in opt.step()" in text
    with pytest.raises(TypeError, match=r"ddp_zero\.parallel"):
        ddp_zero.ZeroRedundancyOptimizer(dense_and_experts(ddp, same), AdamW)


@case(4)
def _the_norm_shows_each_parameter_that_is_left_out_or_counted_twice(setup: Setup) -> None:
    spread, same = expert_groups(setup.rank, 4, 2)
    ddp = wrapped_without_experts(cut_mixture(setup.rank, 2, 4, spread), gradient_as_bucket_view=True)
    opt = ParallelOptimizer(ddp, AdamW, dense_and_experts(ddp, same), stage=2, overlap=False, **OPTIONS)
    loss_of(ddp, *next(batches(setup.rank, 1))).backward()
    norm = opt.clip_grad_norm_(1e9)
    torch.testing.assert_close(norm, norm_of_one_device(Mixture(range(4), 4), 4, 0), rtol=1e-6, atol=0)
    for member in opt.members:
        for left_out in range(internals.num_counted_in_norms(member)):
            with internals.miscounted_in_norms(member, [left_out]):
                found = float(opt.clip_grad_norm_(1e9))
            assert abs(found / float(norm) - 1) > 2e-6, f"parameter {left_out} is missing, and nothing shows it"
    (level,) = internals.norm_levels(opt)
    assert level.counted is not None
    for counts in ([[True] * 4, level.counted[1]], [level.counted[0], [True] * 4]):
        with internals.first_norm_level(opt, counts):
            found = float(opt.clip_grad_norm_(1e9))
        assert found > float(norm) * 1.001, "parameters that every rank counts, and nothing shows it"


CHANGED: list[dict[str, Any]] = [{"overlap": False}, {}, {"stage": 2}, {"stage": 2, "partition": "elements"}]


@case(4, few=CHANGED[1::2], every=CHANGED)
def _gradients_are_changed_by_their_owners(setup: Setup, configurations: list[dict[str, Any]]) -> None:
    for mode in configurations:
        spread, same = expert_groups(setup.rank, 4, 2)
        expected, ddp = (
            wrapped_without_experts(cut_mixture(setup.rank, 2, 4, spread), gradient_as_bucket_view=True)
            for _ in range(2)
        )
        if "stage" in mode:
            expected.register_comm_hook(None, sum_in_rank_order)
        plain = AdamW(expected.parameters(), **OPTIONS)
        opt = ParallelOptimizer(ddp, AdamW, dense_and_experts(ddp, same), **mode, **OPTIONS)
        before = [param.detach().clone() for param in ddp.parameters()]
        clipped = list(ddp.parameters())[::2]
        for number, batch in enumerate(batches(setup.rank, 4)):
            plain.zero_grad()
            loss_of(expected, *batch).backward()
            average_experts(expected, same)
            for param in expected.parameters():
                if param.grad is not None:
                    param.grad.mul_(0.7)
            nn.utils.clip_grad_value_(list(expected.parameters())[::2], 1e-3)
            opt.zero_grad()
            loss_of(ddp, *batch).backward()
            owned = opt.owned_gradients()
            assert owned.keys() <= set(ddp.parameters())
            for grad in owned.values():
                grad.mul_(0.7)
            opt.clip_grad_value_(1e-3, clipped)
            opt.step()
            plain.step()
            assert_equal_models(expected.module, ddp.module, f"after step {number}: {mode}")
        assert not any(torch.equal(*pair) for pair in zip(before, ddp.parameters(), strict=True)), "nothing moved"


@case(4)
def _bytes_and_state_are_those_of_each_group_of_ranks(setup: Setup) -> None:
    spread, same = expert_groups(setup.rank, 4, 2)
    model = cut_mixture(setup.rank, 2, 4, spread)
    model.experts.runs_empty = True  # gradients of experts that no rank has used would not be sent
    ddp = wrapped_without_experts(model, gradient_as_bucket_view=True, bucket_cap_mb=0.0004)
    opt = ParallelOptimizer(ddp, AdamW, dense_and_experts(ddp, same), stage=2, **OPTIONS)
    sent: list[int] = []
    for batch in batches(setup.rank, 3):
        sent = [int(member.stats()["total_sent_bytes"]) for member in opt.members]
        opt.zero_grad()
        loss_of(ddp, *batch).backward()
        opt.step()
    for member, before, times in zip(opt.members, sent, (2, 3), strict=True):
        ranks, params = member.world_size, [param for group in member.param_groups for param in group["params"]]
        nbytes = sum(param.nbytes for param in params)
        state = sum(value.nbytes for one in member.state.values() for value in one.values())
        found = torch.tensor([member.stats()["total_sent_bytes"] - before, float(state)])
        dist.all_reduce(found, group=member.process_group)
        assert abs(found[0].item() / (times * (ranks - 1) * nbytes) - 1) < 0.02, (found, nbytes)
        assert found[1].item() == 2 * nbytes + 4 * len(params), "moments once in the group, and counters"


@case(4)
def _state_dicts_load_at_another_number_of_ranks_and_schedulers_reach_all_members(setup: Setup) -> None:
    spread, same = expert_groups(setup.rank, 4, 2)
    model = cut_mixture(setup.rank, 2, 4, spread)
    ddp = wrapped_without_experts(model, gradient_as_bucket_view=True)
    opt = ParallelOptimizer(ddp, AdamW, dense_and_experts(ddp, same), stage=2, **OPTIONS)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda epoch: 0.5**epoch)
    for batch in batches(setup.rank, 4):
        opt.zero_grad()
        loss_of(ddp, *batch).backward()
        opt.step()
        schedule.step()
    assert [group["lr"] for group in opt.param_groups] == [OPTIONS["lr"] / 16] * 2
    assert all(member.optim.param_groups[0]["lr"] == OPTIONS["lr"] / 8 for member in opt.members), "of the last step"
    state = opt.state_dict()
    pair = dist.new_group([0, 1])
    alone = [dist.new_group([rank]) for rank in range(2)]
    if setup.rank < 2:  # two ranks with other experts, and no other with the same
        fewer = cut_mixture(setup.rank, 2, 4, pair)
        fewer.load_state_dict(model.state_dict())
        part = wrapped_without_experts(fewer, process_group=pair)
        again = ParallelOptimizer(part, AdamW, dense_and_experts(part, alone[setup.rank]), **OPTIONS)
        assert [member.world_size for member in again.members] == [2, 1]
        again.load_state_dict(state)
        assert_identical(state, again.state_dict(), "at two ranks")
        dist.barrier(pair)
    dist.barrier()


@case(4)
def _several_backward_passes_add_up_to_one_step(setup: Setup) -> None:
    spread, same = expert_groups(setup.rank, 4, 2)
    options: dict[str, Any] = {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0004}
    expected, ddp = (wrapped_without_experts(cut_mixture(setup.rank, 2, 4, spread), **options) for _ in range(2))
    plain = torch.optim.SGD(expected.parameters(), lr=0.1)
    opt = ParallelOptimizer(ddp, torch.optim.SGD, dense_and_experts(ddp, same), stage=2, lr=0.1)
    before = [param.detach().clone() for param in ddp.parameters()]
    for first, second in zip(batches(setup.rank, 3), batches(setup.rank, 3, seed=1), strict=True):
        plain.zero_grad()
        with expected.no_sync():
            loss_of(expected, *first).backward()
        loss_of(expected, *second).backward()
        average_experts(expected, same)
        plain.step()
        opt.zero_grad()
        with opt.accumulate():
            loss_of(ddp, *first).backward()
        loss_of(ddp, *second).backward()
        opt.step()
        for (name, param), other in zip(ddp.named_parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(param, other, rtol=1e-5, atol=1e-6, msg=name)
    assert all(not torch.equal(param, old) for param, old in zip(ddp.parameters(), before, strict=True))


test_parallel = case.each()
