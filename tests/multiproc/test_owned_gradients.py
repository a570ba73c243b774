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
from ddp_zero.core.local.parts import part_of
from ddp_zero.core.local.placeholders import AbsentGradient
from tests import internals
from tests.multiproc.cases import (
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


class Pair:
    """A model under DDP with the plain optimizer, and under ours; both average in the order of ranks."""

    def __init__(self, mode: Mapping[str, Any], build: type[Optimizer] = AdamW, model: nn.Module | None = None) -> None:
        model = build_model() if model is None else model
        self.expected, self.ddp = (
            DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=0.0015, gradient_as_bucket_view=True)
            for _ in range(2)
        )
        self.expected.register_comm_hook(None, sum_in_rank_order)
        if mode["stage"] == 1:
            mode = {**mode, "hook": sum_in_rank_order}
        self.plain: Optimizer = build(self.expected.parameters(), **OPTIONS)
        self.opt: ZeroRedundancyOptimizer = shard_optimizer(self.ddp, build, **{**OPTIONS, **mode})
        self.before = copy.deepcopy(model)

    def backward(self, inputs: Tensor, targets: Tensor) -> None:
        for model in (self.expected, self.ddp):
            loss_of(model, inputs, targets).backward()

    def edit(self, edit: Edit) -> None:
        """Change all gradients of the plain model, and what each rank owns of ours."""
        edit({param: param.grad for param in self.expected.parameters() if param.grad is not None})
        edit(self.opt.owned_gradients())

    def step(self, where: str) -> None:
        for one in (self.plain, self.opt):
            one.step()
        assert_equal_models(self.expected.module, self.ddp.module, where)
        for one in (self.plain, self.opt):
            one.zero_grad()

    def assert_moved(self) -> None:
        pairs = zip(self.before.parameters(), self.ddp.module.parameters(), strict=True)
        assert all(not torch.equal(one, other) for one, other in pairs), "nothing moved"


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


@case(
    *(1, 2, 3),
    few=[(name, CHOSEN[place % 2]) for place, name in enumerate(MODES)],
    every=[*product(MODES, CHOSEN)],
)
def _clipped_values(setup: Setup, configurations: list[tuple[str, slice]]) -> None:
    for name, chosen in configurations:
        pair, clipped = Pair(MODES[name]), False
        for number, (inputs, targets) in enumerate(batches(setup.rank, 5)):
            pair.backward(inputs, targets)
            grads = [param.grad for param in pair.expected.parameters() if param.grad is not None]
            clipped |= any(bool((grad.abs() > 0.01).any()) for grad in grads)
            nn.utils.clip_grad_value_(list(pair.expected.parameters())[chosen], 0.01)
            if chosen == slice(None):
                pair.opt.clip_grad_value_(0.01)
            else:
                pair.opt.clip_grad_value_(0.01, list(pair.ddp.parameters())[chosen])
            pair.step(f"{name}, {chosen}, {number}")
        pair.assert_moved()
        assert clipped
        with pytest.raises(ValueError, match="parameters of this optimizer"):
            pair.opt.clip_grad_value_(0.01, torch.ones(2))


@case(1, 2, 3)
def _noise_scaling_and_norms(setup: Setup) -> None:
    for name, mode in MODES.items():
        pair = Pair(mode)
        for number, (inputs, targets) in enumerate(batches(setup.rank, 6)):
            pair.backward(inputs, targets)
            plain: dict[Tensor, Tensor] = {
                param: param.grad for param in pair.expected.parameters() if param.grad is not None
            }
            spread(plain, None, noise)
            owned = pair.opt.owned_gradients()
            assert set(owned) == {param for param in pair.ddp.parameters() if setup.rank in _owners(pair.opt, param)}
            spread(owned, pair.opt, noise)
            for grads in (plain, pair.opt.owned_gradients()):
                for grad in grads.values():
                    grad.mul_(0.7)
            if number % 2:
                param, other = next(iter(plain)), next(pair.ddp.parameters())
                assert_identical(param.grad, pair.opt.full_grad(other), f"{name}, full_grad")
                if "elements" in name:
                    expected = nn.utils.get_total_norm(list(plain.values()))
                    torch.testing.assert_close(pair.opt.clip_grad_norm_(1e6), expected)  # of parts: last bits
                else:
                    expected = nn.utils.clip_grad_norm_(list(plain), 0.02)
                    assert_identical(expected, pair.opt.clip_grad_norm_(0.02), f"{name}, {number}")
            pair.step(f"{name}, {number}")
        pair.assert_moved()
        with pytest.raises(TypeError):
            pair.opt.owned_gradients()[param] = torch.ones(1)  # type: ignore[index]


def _owners(opt: ZeroRedundancyOptimizer, param: Tensor) -> set[int]:
    return internals.owners_of_pieces(opt, param)


@case(2, 3)
def _norms_inside_the_step_see_the_changes(setup: Setup) -> None:
    """Of a parameter that is cut, an owner has no more than its own part right."""
    for kind in ("parameters", "elements"):
        pairs = [Pair({"stage": stage, "partition": kind, "max_grad_norm": 0.02}) for stage in (1, 2)]
        for number, (inputs, targets) in enumerate(batches(setup.rank, 5)):
            for pair in pairs:
                pair.backward(inputs, targets)
                spread(pair.opt.owned_gradients(), pair.opt, noise)
                pair.opt.step()
            records = [pair.opt.last_step for pair in pairs]
            assert records[0].grad_norm == records[1].grad_norm  # type: ignore[union-attr]
            assert records[0].clip_coefficient < 1.0  # type: ignore[union-attr, operator]
            assert_equal_models(pairs[0].ddp.module, pairs[1].ddp.module, f"{kind}, {number}")
            for pair in pairs:
                pair.opt.zero_grad()
        pairs[0].assert_moved()


@case(2, 3)
def _changes_between_passes_of_stage_2(setup: Setup) -> None:
    """What is changed is carried on in the sums."""
    for partition in ("parameters", "elements"):
        pair = Pair({"stage": 2, "overlap": False, "partition": partition}, SGD)
        for number, (inputs, targets) in enumerate(batches(setup.rank, 4)):
            sums = [torch.zeros_like(param) for param in pair.expected.parameters()]
            for _ in range(3):
                pair.backward(inputs, targets)
                for param, total in zip(pair.expected.parameters(), sums, strict=True):
                    assert param.grad is not None
                    total.add_(param.grad).mul_(0.5)
                    param.grad = None
                for grad in pair.opt.owned_gradients().values():
                    grad.mul_(0.5)
            for param, total in zip(pair.expected.parameters(), sums, strict=True):
                param.grad = total
            pair.step(f"{partition}, {number}")
        pair.assert_moved()


# Masters and fp32 sums


def low_precision() -> nn.Module:
    return build_model().to(torch.bfloat16)


@case(1, 2)
def _masters_are_stepped_by_what_was_changed(setup: Setup) -> None:
    """Halves are exact: half the gradient is half the learning rate."""
    for stage, partition in ((1, "parameters"), (1, "elements"), (2, "parameters"), (2, "elements")):
        mode: dict[str, Any] = {
            "stage": stage, "overlap": False, "partition": partition, "master_weights": True, "weight_decay": 0.0,
            "accumulate_in_fp32": stage == 1,
        }  # fmt: skip
        model = low_precision()
        half, changed = Pair({**mode, "lr": 0.025}, SGD, model), Pair(mode, SGD, model)
        in_fp32 = 0
        for number in range(4):
            data = list(batches(setup.rank, 2, seed=number))
            for inputs, targets in data:
                for pair in (half, changed):
                    loss_of(pair.ddp, inputs.bfloat16(), targets.bfloat16()).backward()
            owned = changed.opt.owned_gradients()
            in_fp32 += sum(grad.dtype is torch.float32 for grad in owned.values())
            for grad in owned.values():
                grad.mul_(0.5)
            if number == 2:  # norms of what was changed
                norms = [pair.opt.clip_grad_norm_(1e9) for pair in (half, changed)]
                torch.testing.assert_close(norms[0] * 0.5, norms[1])
            for pair in (half, changed):
                pair.opt.step()
                pair.opt.zero_grad()
            for (_, one), (_, other) in zip(
                half.opt.master_weights.items(), changed.opt.master_weights.items(), strict=True
            ):
                assert_identical(one, other, f"stage {stage}, {partition}, {number}")
        changed.assert_moved()
        assert in_fp32, "no exact sum was changed"


@case(2)
def _stages_clip_values_of_fp32_sums_alike(setup: Setup) -> None:
    for partition in ("parameters", "elements"):
        pairs = [
            Pair(
                {"stage": stage, "overlap": False, "partition": partition, "master_weights": True,
                 "accumulate_in_fp32": stage == 1}, AdamW, low_precision(),
            )
            for stage in (1, 2)
        ]  # fmt: skip
        for number in range(4):
            for inputs, targets in batches(setup.rank, 3, seed=number):
                for pair in pairs:
                    loss_of(pair.ddp, inputs.bfloat16(), targets.bfloat16()).backward()
            for pair in pairs:
                pair.opt.clip_grad_value_(0.013)
                largest = max(float(grad.abs().max()) for grad in pair.opt.owned_gradients().values())
                assert largest <= torch.tensor(0.013)
            if partition == "parameters":
                norms = [pair.opt.clip_grad_norm_(0.5 if number == 2 else 1e9) for pair in pairs]
                assert_identical(norms[0], norms[1], f"norm, {number}")
            for pair in pairs:
                pair.opt.step()
                pair.opt.zero_grad()
            assert_equal_models(pairs[0].ddp.module, pairs[1].ddp.module, f"{partition}, {number}")
        pairs[0].assert_moved()


@case(2)
def _one_of_two_ways_to_change_a_sum(setup: Setup) -> None:
    mode = {"stage": 2, "overlap": False, "master_weights": True}

    def summed() -> tuple[Pair, Tensor, Tensor]:
        pair = Pair(mode, SGD, low_precision())
        for inputs, targets in batches(setup.rank, 3):
            loss_of(pair.ddp, inputs.bfloat16(), targets.bfloat16()).backward()
        param, grad = next((p, g) for p, g in pair.opt.owned_gradients().items() if g.dtype is torch.float32)
        return pair, param, grad

    pair, param, grad = summed()
    grad.fill_(1.0)
    assert pair.opt.full_grad(next(pair.ddp.parameters())) is not None
    assert param.grad is not None
    assert torch.equal(param.grad.float(), torch.ones_like(grad)), "param.grad shows it"
    param.grad.mul_(2.0)  # later, so that counts
    assert torch.equal(pair.opt.owned_gradients()[param].float(), torch.full_like(grad, 2.0))

    def without_a_trace(param: Tensor, grad: Tensor) -> None:
        grad.data.mul_(2.0)

    def both(param: Tensor, grad: Tensor) -> None:
        assert param.grad is not None
        grad.mul_(2.0)
        param.grad.mul_(3.0)

    for change in (without_a_trace, both):
        pair, param, grad = summed()
        change(param, grad)
        with pytest.raises(
            RuntimeError, match=r"changed both in param.grad and in the result of opt.owned_gradients\(\)"
        ):
            pair.opt.owned_gradients()
    pair, param, grad = summed()
    grad[0] = float("nan")
    assert pair.opt.owned_gradients()[param].isnan().any()


# Loss scales


@case(2)
def _limits_are_of_unscaled_gradients(setup: Setup) -> None:
    for stage in (1, 2):
        scale = DynamicLossScale(initial=1024.0)
        pair = Pair({"stage": stage, "loss_scale": scale})
        for number, (inputs, targets) in enumerate(batches(setup.rank, 6)):
            overflows = number == 3
            if not overflows:
                loss_of(pair.expected, inputs, targets).backward()
                nn.utils.clip_grad_value_(pair.expected.parameters(), 0.01)
                pair.plain.step()
                pair.plain.zero_grad()
            scaled = pair.opt.scale(loss_of(pair.ddp, inputs, targets))
            (scaled * float("inf") if overflows and setup.rank == 1 else scaled).backward()
            pair.opt.clip_grad_value_(0.01)
            pair.opt.step()
            pair.opt.zero_grad()
            record = pair.opt.last_step
            assert record is not None
            assert record.stepped is not overflows
            assert pair.opt.loss_scale == (512.0 if number >= 3 else 1024.0)
            assert_equal_models(pair.expected.module, pair.ddp.module, f"stage {stage}, {number}")
        pair.assert_moved()


# What is refused


@case(2, 3)
def _other_changes_after_those_of_owners(setup: Setup) -> None:
    data = list(batches(setup.rank, 8))

    def more_backward(pair: Pair) -> None:
        with pair.opt.accumulate():
            loss_of(pair.ddp, *data[1]).backward()

    def scale_by_hand(pair: Pair) -> None:
        for param in pair.ddp.parameters():
            assert param.grad is not None
            param.grad.mul_(0.5)

    def clip_by_torch(pair: Pair) -> None:
        nn.utils.clip_grad_norm_(pair.ddp.parameters(), 1e-3)

    def replace(pair: Pair) -> None:
        for param in pair.ddp.parameters():
            assert param.grad is not None
            param.grad = param.grad.clone()

    for name in ("stage 1, standalone", "stage 1, overlapped", "stage 1, elements"):
        for late in (more_backward, scale_by_hand, clip_by_torch, replace):
            pair = Pair(MODES[name])
            drops: list[Callable[[], None]] = [pair.opt.zero_grad]
            if "standalone" in name:  # elsewhere a step that waits is missed
                drops.append(pair.ddp.zero_grad)
            for drop in drops:
                loss_of(pair.ddp, *data[0]).backward()
                for grad in pair.opt.owned_gradients().values():
                    grad.mul_(0.5)
                late(pair)
                for use in (pair.opt.step, partial(pair.opt.clip_grad_norm_, 1.0), pair.opt.owned_gradients):
                    with pytest.raises(RuntimeError, match=r"changed between opt.owned_gradients\(\) and opt.step\(\)"):
                        use()
                drop()
            loss_of(pair.ddp, *data[2]).backward()
            pair.opt.step()
            loss_of(pair.expected, *data[2]).backward()
            pair.plain.step()
            assert_equal_models(pair.expected.module, pair.ddp.module, f"{name}, {late.__name__}")
            pair.assert_moved()


@case(2)
def _too_late_or_under_join(setup: Setup) -> None:
    for stage in (1, 2):
        pair = Pair({"stage": stage})
        for inputs, targets in batches(setup.rank, 3):
            pair.backward(inputs, targets)
            pair.step("untouched")
        pair.backward(*next(batches(setup.rank, 1)))
        for change in (partial(pair.opt.clip_grad_value_, 1.0), pair.opt.owned_gradients):
            with pytest.raises(RuntimeError, match="A step inside backward has used up the gradients"):
                change()
        pair.opt.step()
    pair = Pair({"stage": 2, "overlap": False})
    with Join([pair.ddp, pair.opt]):
        loss_of(pair.ddp, *next(batches(setup.rank, 1))).backward()
        for change in (partial(pair.opt.clip_grad_value_, 1.0), pair.opt.owned_gradients):
            with pytest.raises(RuntimeError, match="Join does not support"):
                change()
        pair.opt.step()


@case(2)
def _stage_1_clips_values_under_join(setup: Setup) -> None:
    pair = Pair({"stage": 1, "overlap": False})
    data = list(batches(setup.rank, 3 + 2 * setup.rank))
    for model, opt in ((pair.expected, pair.plain), (pair.ddp, pair.opt)):
        joined: list[Any] = [model] if opt is pair.plain else [model, opt]
        with Join(joined):
            for inputs, targets in data:
                loss_of(model, inputs, targets).backward()
                if opt is pair.plain:
                    nn.utils.clip_grad_value_(model.parameters(), 0.01)
                else:
                    pair.opt.clip_grad_value_(0.01)
                opt.step()
                opt.zero_grad()
    if setup.rank == 1:  # of plain DDP, ranks that have joined stop
        assert_equal_models(pair.expected.module, pair.ddp.module, "under Join")
    pair.assert_moved()


@case(2)
def _the_advice_of_a_placeholder_works(setup: Setup) -> None:
    pair = Pair(MODES["stage 2, waiting"])
    pair.backward(*next(batches(setup.rank, 1)))
    param = next(param for param in pair.ddp.parameters() if isinstance(param.grad, AbsentGradient))
    grad = param.grad
    assert grad is not None
    with pytest.raises(RuntimeError, match=r"keeps it on rank \d .*opt.clip_grad_value_\(value\) limits"):
        nn.utils.clip_grad_value_(pair.ddp.parameters(), 0.01)
    with pytest.raises(RuntimeError, match=r"keeps it on rank \d .*opt.owned_gradients\(\) is what this rank steps"):
        grad.add_(1.0)
    with pytest.raises(RuntimeError, match=r"keeps it on rank \d .*nonfinite='raise' or 'skip'"):
        grad.isfinite()


test_owned_gradients = case.each()
