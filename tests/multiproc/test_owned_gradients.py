"""Gradients that users change between backward and the step, element by element: equal to DDP with the same changes."""

import copy
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

from ddp_zero import DynamicLossScale, ZeroRedundancyOptimizer, shard_optimizer
from ddp_zero.values.parts import part_of
from tests import internals
from tests.multiproc.cases import (
    Twins,
    assert_equal_models,
    assert_identical,
    batches,
    build_model,
    loss_of,
    sum_in_rank_order,
)
from tests.multiproc.harness import Cases, Setup

case = Cases()

OPTIONS: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1}
MODES: dict[str, dict[str, Any]] = {
    "stage 1, standalone": {"stage": 1, "overlap": False},
    "stage 1, copied": {"stage": 1, "overlap": False, "parameters_as_bucket_view": False},
    "stage 1, overlapped": {"stage": 1},
    "stage 1, elements": {"stage": 1, "partition": "elements"},
    "stage 1, fp32 sums": {"stage": 1, "overlap": False, "accumulate_in_fp32": True},
    "stage 2": {"stage": 2},
    "stage 2, waiting": {"stage": 2, "overlap": False},
    "stage 2, elements": {"stage": 2, "partition": "elements"},
    "stage 2, sync in forward": {"stage": 2, "sync": "forward"},
}
Edit = Callable[[Mapping[Tensor, Tensor]], None]


def twins_of(mode: Mapping[str, Any], build: type[Optimizer] = AdamW, model: nn.Module | None = None) -> Twins:
    """Both average in the order of ranks."""
    model = build_model() if model is None else model
    plain_model, ddp = (
        DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=0.0015, gradient_as_bucket_view=True)
        for _ in range(2)
    )
    plain_model.register_comm_hook(None, sum_in_rank_order)
    if mode["stage"] == 1:
        mode = {**mode, "hook": sum_in_rank_order}
    plain: Optimizer = build(plain_model.parameters(), **OPTIONS)
    return Twins(plain_model, ddp, plain, shard_optimizer(ddp, build, **{**OPTIONS, **mode}))


def edit_both(twins: Twins, edit: Edit) -> None:
    """Change all gradients of the plain model, and what each rank owns of ours."""
    edit({param: param.grad for param in twins.plain_model.parameters() if param.grad is not None})
    edit(twins.opt.owned_gradients())


def spread(gradients: Mapping[Tensor, Tensor], opt: ZeroRedundancyOptimizer | None, make: Any) -> None:
    """Change gradients by a tensor per parameter, of which a rank takes what it owns."""
    stepped = None if opt is None else internals.targets_of(opt)
    for param, grad in gradients.items():
        whole = make(param)
        part = None if stepped is None or opt is None else stepped.part(internals.index_of(opt, param))
        grad.add_(whole if part is None else part_of(whole, param, part))


def noise(param: Tensor) -> Tensor:
    """As large as the gradients, the same for parameters of the same shape."""
    return torch.randn(param.shape, generator=torch.Generator().manual_seed(param.numel())) * 0.01


# Parity


CHOSEN = (slice(None), slice(2, 5))


@case(*(1, 2, 3), few=[(name, CHOSEN[place % 2]) for place, name in enumerate(MODES)], every=[*product(MODES, CHOSEN)])
def _clip_grad_value_equals_ddp(setup: Setup, configurations: list[tuple[str, slice]]) -> None:
    for name, chosen in configurations:
        twins, clipped = twins_of(MODES[name]), False
        for number, (inputs, targets) in enumerate(batches(setup.rank, 5)):
            twins.backward(inputs, targets)
            grads = [param.grad for param in twins.plain_model.parameters() if param.grad is not None]
            clipped |= any(bool((grad.abs() > 0.01).any()) for grad in grads)
            nn.utils.clip_grad_value_(list(twins.plain_model.parameters())[chosen], 0.01)
            if chosen == slice(None):
                twins.opt.clip_grad_value_(0.01)
            else:
                twins.opt.clip_grad_value_(0.01, list(twins.model.parameters())[chosen])
            twins.step(f"{name}, {chosen}, {number}")
        twins.assert_moved()
        assert clipped
        with pytest.raises(ValueError, match="parameters of this optimizer"):
            twins.opt.clip_grad_value_(0.01, torch.ones(2))


@case(1, 2, 3)
def _owned_gradients_with_noise_equal_ddp(setup: Setup) -> None:
    for name, mode in MODES.items():
        twins = twins_of(mode)
        for number, (inputs, targets) in enumerate(batches(setup.rank, 6)):
            twins.backward(inputs, targets)
            plain: dict[Tensor, Tensor] = {
                param: param.grad for param in twins.plain_model.parameters() if param.grad is not None
            }
            spread(plain, None, noise)
            owned = twins.opt.owned_gradients()
            assert set(owned) == {
                param for param in twins.model.parameters() if setup.rank in _owners(twins.opt, param)
            }
            spread(owned, twins.opt, noise)
            for grads in (plain, twins.opt.owned_gradients()):
                for grad in grads.values():
                    grad.mul_(0.7)
            if number % 2:
                param, other = next(iter(plain)), next(twins.model.parameters())
                assert_identical(param.grad, twins.opt.full_grad(other), f"{name}, full_grad")
                if "elements" in name:
                    expected = nn.utils.get_total_norm(list(plain.values()))
                    torch.testing.assert_close(twins.opt.clip_grad_norm_(1e6), expected)  # of parts: last bits
                else:
                    expected = nn.utils.clip_grad_norm_(list(plain), 0.02)
                    assert_identical(expected, twins.opt.clip_grad_norm_(0.02), f"{name}, {number}")
            twins.step(f"{name}, {number}")
        twins.assert_moved()
        with pytest.raises(TypeError):
            twins.opt.owned_gradients()[param] = torch.ones(1)  # type: ignore[index]


def _owners(opt: ZeroRedundancyOptimizer, param: Tensor) -> set[int]:
    return internals.owners_of_pieces(opt, param)


@case(2, 3)
def _max_grad_norm_clips_owned_gradients_as_they_were_changed(setup: Setup) -> None:
    """Of a parameter that is cut, an owner has no more than its own part right."""
    for kind in ("parameters", "elements"):
        every = [twins_of({"stage": stage, "partition": kind, "max_grad_norm": 0.02}) for stage in (1, 2)]
        for number, (inputs, targets) in enumerate(batches(setup.rank, 5)):
            for twins in every:
                twins.backward(inputs, targets)
                spread(twins.opt.owned_gradients(), twins.opt, noise)
                twins.opt.step()
            records = [twins.opt.last_step for twins in every]
            assert records[0].grad_norm == records[1].grad_norm  # type: ignore[union-attr]
            assert records[0].clip_coefficient < 1.0  # type: ignore[union-attr, operator]
            assert_equal_models(every[0].model.module, every[1].model.module, f"{kind}, {number}")
            for twins in every:
                twins.opt.zero_grad()
        every[0].assert_moved()


@case(2, 3)
def _owned_gradients_changed_between_passes_are_added_to_in_stage_2(setup: Setup) -> None:
    """What is changed is carried on in the sums."""
    for partition in ("parameters", "elements"):
        twins = twins_of({"stage": 2, "overlap": False, "partition": partition}, SGD)
        for number, (inputs, targets) in enumerate(batches(setup.rank, 4)):
            sums = [torch.zeros_like(param) for param in twins.plain_model.parameters()]
            for _ in range(3):
                twins.backward(inputs, targets)
                for param, total in zip(twins.plain_model.parameters(), sums, strict=True):
                    assert param.grad is not None
                    total.add_(param.grad).mul_(0.5)
                    param.grad = None
                for grad in twins.opt.owned_gradients().values():
                    grad.mul_(0.5)
            for param, total in zip(twins.plain_model.parameters(), sums, strict=True):
                param.grad = total
            twins.step(f"{partition}, {number}")
        twins.assert_moved()


# Masters and fp32 sums


def low_precision() -> nn.Module:
    return build_model().to(torch.bfloat16)


@case(1, 2)
def _halved_owned_gradients_step_masters_as_half_the_rate(setup: Setup) -> None:
    """Halves are exact: half the gradient is half the learning rate."""
    for stage, partition in ((1, "parameters"), (1, "elements"), (2, "parameters"), (2, "elements")):
        mode: dict[str, Any] = {
            "stage": stage, "overlap": False, "partition": partition, "master_weights": True, "weight_decay": 0.0,
            "accumulate_in_fp32": stage == 1,
        }  # fmt: skip
        model = low_precision()
        half, changed = twins_of({**mode, "lr": 0.025}, SGD, model), twins_of(mode, SGD, model)
        in_fp32 = 0
        for number in range(4):
            data = list(batches(setup.rank, 2, seed=number))
            for inputs, targets in data:
                for twins in (half, changed):
                    loss_of(twins.model, inputs.bfloat16(), targets.bfloat16()).backward()
            owned = changed.opt.owned_gradients()
            in_fp32 += sum(grad.dtype is torch.float32 for grad in owned.values())
            for grad in owned.values():
                grad.mul_(0.5)
            if number == 2:  # norms of what was changed
                norms = [twins.opt.clip_grad_norm_(1e9) for twins in (half, changed)]
                torch.testing.assert_close(norms[0] * 0.5, norms[1])
            for twins in (half, changed):
                twins.opt.step()
                twins.opt.zero_grad()
            for (_, one), (_, other) in zip(
                half.opt.master_weights.items(), changed.opt.master_weights.items(), strict=True
            ):
                assert_identical(one, other, f"stage {stage}, {partition}, {number}")
        changed.assert_moved()
        assert in_fp32, "no exact sum was changed"


@case(2)
def _stages_clip_values_of_fp32_sums_alike(setup: Setup) -> None:
    for partition in ("parameters", "elements"):
        every = [
            twins_of(
                {"stage": stage, "overlap": False, "partition": partition, "master_weights": True,
                 "accumulate_in_fp32": stage == 1}, AdamW, low_precision(),
            )
            for stage in (1, 2)
        ]  # fmt: skip
        for number in range(4):
            for inputs, targets in batches(setup.rank, 3, seed=number):
                for twins in every:
                    loss_of(twins.model, inputs.bfloat16(), targets.bfloat16()).backward()
            for twins in every:
                twins.opt.clip_grad_value_(0.013)
                largest = max(float(grad.abs().max()) for grad in twins.opt.owned_gradients().values())
                assert largest <= torch.tensor(0.013)
            if partition == "parameters":
                norms = [twins.opt.clip_grad_norm_(0.5 if number == 2 else 1e9) for twins in every]
                assert_identical(norms[0], norms[1], f"norm, {number}")
            for twins in every:
                twins.opt.step()
                twins.opt.zero_grad()
            assert_equal_models(every[0].model.module, every[1].model.module, f"{partition}, {number}")
        every[0].assert_moved()


@case(2)
def _changes_of_a_sum_in_both_of_two_ways_are_refused_and_in_one_count(setup: Setup) -> None:
    mode = {"stage": 2, "overlap": False, "master_weights": True}

    def summed() -> tuple[Twins, Tensor, Tensor]:
        twins = twins_of(mode, SGD, low_precision())
        for inputs, targets in batches(setup.rank, 3):
            loss_of(twins.model, inputs.bfloat16(), targets.bfloat16()).backward()
        param, grad = next((p, g) for p, g in twins.opt.owned_gradients().items() if g.dtype is torch.float32)
        return twins, param, grad

    twins, param, grad = summed()
    grad.fill_(1.0)
    assert twins.opt.full_grad(next(twins.model.parameters())) is not None
    assert param.grad is not None
    assert torch.equal(param.grad.float(), torch.ones_like(grad)), "param.grad shows it"
    param.grad.mul_(2.0)  # later, so that counts
    assert torch.equal(twins.opt.owned_gradients()[param].float(), torch.full_like(grad, 2.0))

    def without_a_trace(param: Tensor, grad: Tensor) -> None:
        grad.data.mul_(2.0)

    def both(param: Tensor, grad: Tensor) -> None:
        assert param.grad is not None
        grad.mul_(2.0)
        param.grad.mul_(3.0)

    for change in (without_a_trace, both):
        twins, param, grad = summed()
        change(param, grad)
        with pytest.raises(
            RuntimeError, match=r"changed both in param.grad and in the result of opt.owned_gradients\(\)"
        ):
            twins.opt.owned_gradients()
    twins, param, grad = summed()
    grad[0] = float("nan")
    assert twins.opt.owned_gradients()[param].isnan().any()


# Loss scales


@case(2)
def _limits_of_clip_grad_value_are_of_unscaled_gradients(setup: Setup) -> None:
    for stage in (1, 2):
        scale = DynamicLossScale(initial=1024.0)
        twins = twins_of({"stage": stage, "loss_scale": scale})
        for number, (inputs, targets) in enumerate(batches(setup.rank, 6)):
            overflows = number == 3
            if not overflows:
                loss_of(twins.plain_model, inputs, targets).backward()
                nn.utils.clip_grad_value_(twins.plain_model.parameters(), 0.01)
                twins.plain.step()
                twins.plain.zero_grad()
            scaled = twins.opt.scale(loss_of(twins.model, inputs, targets))
            (scaled * float("inf") if overflows and setup.rank == 1 else scaled).backward()
            twins.opt.clip_grad_value_(0.01)
            twins.opt.step()
            twins.opt.zero_grad()
            record = twins.opt.last_step
            assert record is not None
            assert record.stepped is not overflows
            assert twins.opt.loss_scale == (512.0 if number >= 3 else 1024.0)
            assert_equal_models(twins.plain_model.module, twins.model.module, f"stage {stage}, {number}")
        twins.assert_moved()


# What is refused


@case(2, 3)
def _other_changes_after_those_of_owners_are_refused(setup: Setup) -> None:
    data = list(batches(setup.rank, 8))

    def more_backward(twins: Twins) -> None:
        with twins.opt.accumulate():
            loss_of(twins.model, *data[1]).backward()

    def scale_by_hand(twins: Twins) -> None:
        for param in twins.model.parameters():
            assert param.grad is not None
            param.grad.mul_(0.5)

    def clip_by_torch(twins: Twins) -> None:
        nn.utils.clip_grad_norm_(twins.model.parameters(), 1e-3)

    def replace(twins: Twins) -> None:
        for param in twins.model.parameters():
            assert param.grad is not None
            param.grad = param.grad.clone()

    for name in ("stage 1, standalone", "stage 1, overlapped", "stage 1, elements"):
        for late in (more_backward, scale_by_hand, clip_by_torch, replace):
            twins = twins_of(MODES[name])
            drops: list[Callable[[], None]] = [twins.opt.zero_grad]
            if "standalone" in name:  # elsewhere a step that waits is missed
                drops.append(twins.model.zero_grad)
            for drop in drops:
                loss_of(twins.model, *data[0]).backward()
                for grad in twins.opt.owned_gradients().values():
                    grad.mul_(0.5)
                late(twins)
                for use in (twins.opt.step, partial(twins.opt.clip_grad_norm_, 1.0), twins.opt.owned_gradients):
                    with pytest.raises(RuntimeError, match=r"changed between opt.owned_gradients\(\) and opt.step\(\)"):
                        use()
                drop()
            loss_of(twins.model, *data[2]).backward()
            twins.opt.step()
            loss_of(twins.plain_model, *data[2]).backward()
            twins.plain.step()
            assert_equal_models(twins.plain_model.module, twins.model.module, f"{name}, {late.__name__}")
            twins.assert_moved()


@case(2)
def _owned_gradients_after_a_step_inside_backward_or_under_join_are_refused(setup: Setup) -> None:
    for stage in (1, 2):
        twins = twins_of({"stage": stage})
        for inputs, targets in batches(setup.rank, 3):
            twins.backward(inputs, targets)
            twins.step("untouched")
        twins.backward(*next(batches(setup.rank, 1)))
        for change in (partial(twins.opt.clip_grad_value_, 1.0), twins.opt.owned_gradients):
            with pytest.raises(RuntimeError, match="A step inside backward has used up the gradients"):
                change()
        twins.opt.step()
    twins = twins_of({"stage": 2, "overlap": False})
    with Join([twins.model, twins.opt]):
        loss_of(twins.model, *next(batches(setup.rank, 1))).backward()
        for change in (partial(twins.opt.clip_grad_value_, 1.0), twins.opt.owned_gradients):
            with pytest.raises(RuntimeError, match="Join does not support"):
                change()
        twins.opt.step()


@case(2)
def _stage_1_clips_values_under_join(setup: Setup) -> None:
    twins = twins_of({"stage": 1, "overlap": False})
    data = list(batches(setup.rank, 3 + 2 * setup.rank))
    for model, opt in twins.sides:
        joined: list[Any] = [model] if opt is twins.plain else [model, opt]
        with Join(joined):
            for inputs, targets in data:
                loss_of(model, inputs, targets).backward()
                if opt is twins.plain:
                    nn.utils.clip_grad_value_(model.parameters(), 0.01)
                else:
                    twins.opt.clip_grad_value_(0.01)
                opt.step()
                opt.zero_grad()
    if setup.rank == 1:  # of plain DDP, ranks that have joined stop
        assert_equal_models(twins.plain_model.module, twins.model.module, "under Join")
    twins.assert_moved()


test_owned_gradients = case.each()
