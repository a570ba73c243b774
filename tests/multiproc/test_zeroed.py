"""Gradients that are set to zero instead of dropped: every mode goes on as DDP with the plain optimizer does."""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from ddp_zero import ZeroRedundancyOptimizer, checkpoint, shard_optimizer
from ddp_zero.values.placeholders import AbsentGradient
from tests.multiproc.cases import assert_equal_models, assert_identical, assert_moved, sum_in_rank_order
from tests.multiproc.harness import Cases, Setup

MODES: dict[str, dict[str, Any]] = {
    "stage 1": {"stage": 1},
    "stage 1 waiting": {"stage": 1, "overlap": False},
    "stage 1 clipped": {"stage": 1, "max_grad_norm": 1e9},
    "stage 1 cut": {"stage": 1, "partition": "elements"},
    "stage 1 late": {"stage": 1, "sync": "forward"},
    "stage 1 in fp32": {"stage": 1, "accumulate_in_fp32": True},
    "stage 1 in fp32 waiting": {"stage": 1, "accumulate_in_fp32": True, "overlap": False},
    "standalone": {},
    "stage 2": {"stage": 2},
    "stage 2 after the last bucket": {"stage": 2, "interleaved": False},
    "stage 2 waiting": {"stage": 2, "overlap": False},
    "stage 2 clipped": {"stage": 2, "max_grad_norm": 1e9},
    "stage 2 cut": {"stage": 2, "partition": "elements"},
    "stage 2 cut waiting": {"stage": 2, "partition": "elements", "overlap": False},
    "stage 2 late": {"stage": 2, "sync": "forward"},
}
WAITING = [name for name in MODES if "waiting" in name or name == "standalone"]
STAGE_2 = [name for name in MODES if "stage 2" in name]


class Net(nn.Module):
    """Three layers, of which a pass may skip the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(5, 33), nn.Linear(33, 33), nn.Linear(33, 2)

    def forward(self, inputs: Tensor, skips: bool = False) -> Tensor:
        hidden = torch.tanh(self.first(inputs))
        if not skips:
            hidden = hidden + torch.tanh(self.second(hidden))
        out: Tensor = self.third(hidden)
        return out


@dataclass
class Side:
    """A DDP model and its optimizer."""

    model: DistributedDataParallel
    opt: Any

    def backward(
        self,
        inputs: Tensor,
        skips: bool = False,
        zero: Callable[["Side"], object] = lambda _: None,
        zeroes_between: bool = False,
    ) -> None:
        if not zeroes_between:
            zero(self)
        loss = self.model(inputs, skips).square().mean()
        if zeroes_between:
            zero(self)
        loss.backward()

    def grads(self) -> list[Tensor]:
        return [param.grad for param in self.model.parameters() if param.grad is not None]


def sides(mode: str, **ddp_options: Any) -> tuple[Side, Side]:
    """DDP with the plain optimizer, and a mode; weight decay and momentum act where a gradient is zero."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}
    net = Net()
    ddp_options |= {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.003}
    plain, model = (DistributedDataParallel(one, **ddp_options) for one in (copy.deepcopy(net), net))
    if dist.get_world_size() > 2:
        plain.register_comm_hook(None, sum_in_rank_order)
    if MODES[mode]:
        opt = shard_optimizer(model, torch.optim.SGD, **MODES[mode], **options)
    else:
        opt = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, **options)
    return Side(plain, torch.optim.SGD(plain.parameters(), **options)), Side(model, opt)


def inputs_of(setup: Setup) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(setup.rank)
    while True:
        yield torch.randn(4, 5, generator=generator)


def _each(change: Callable[[Tensor], object]) -> Callable[[Side], object]:
    return lambda side: [change(grad) for grad in side.grads()]


def _foreach(side: Side) -> None:
    if side.grads():
        torch._foreach_zero_(side.grads())


def _replace(side: Side) -> None:
    for param in side.model.parameters():
        param.grad = None if param.grad is None else torch.zeros_like(param)


def _some(side: Side) -> None:
    for number, param in enumerate(side.model.parameters()):
        if param.grad is not None and number % 2:
            param.grad.zero_()
        else:
            param.grad = None


WAYS: list[Callable[[Side], object]] = [
    lambda side: side.opt.zero_grad(set_to_none=False),
    lambda side: side.model.zero_grad(set_to_none=False),
    lambda side: side.model.module.zero_grad(set_to_none=False),
    _each(lambda grad: grad.zero_()),
    _each(nn.init.zeros_),
    _each(lambda grad: grad.data.zero_()),
    _each(lambda grad: grad.fill_(0)),
    _foreach,
    _replace,
    _some,
]
OPT_ZERO_GRAD = WAYS[0]

case = Cases(group_timeout=30)


@contextmanager
def _without_sync(model: DistributedDataParallel) -> Iterator[None]:
    """By the flag that ``no_sync()`` sets."""
    model.require_backward_grad_sync = False
    yield
    model.require_backward_grad_sync = True


@dataclass(frozen=True)
class Program:
    """An iteration.

    Attributes:
        number: two of three iterations begin with a local pass, in which the second layer may be unused.
        may_skip: whether it may be in passes that DDP reduces.
    """

    number: int
    may_skip: bool

    @property
    def zero(self) -> Callable[[Side], object]:
        return WAYS[self.number % len(WAYS)]

    @property
    def zeroes_between(self) -> bool:
        """Whether gradients are zeroed between forward and backward; else before the forward pass."""
        return (self.number + self.number // len(WAYS)) % 2 == 1

    def run(self, side: Side, batches: list[Tensor]) -> None:
        number = self.number
        if number % 3 == 0:
            side.backward(batches[0], self.may_skip and number % 2 == 0, self.zero, self.zeroes_between)
        else:
            with side.model.no_sync() if number % 3 == 1 else _without_sync(side.model):
                side.backward(batches[0], number % 2 == 0, self.zero, self.zeroes_between)
            side.backward(batches[1], self.may_skip and number % 4 < 2)
        side.opt.step()


def _train(setup: Setup, mode: str, programs: range, **ddp_options: Any) -> None:
    (plain, ours), data = sides(mode, **ddp_options), inputs_of(setup)
    before = copy.deepcopy(ours.model.module)
    for number in programs:
        program, batches = Program(number, "find_unused_parameters" in ddp_options), [next(data), next(data)]
        for side in (plain, ours):
            program.run(side, batches)
        assert_equal_models(plain.model, ours.model, f"{mode}, step {number}")
        if program.zero is not _replace:
            _assert_stays_small(ours, f"{mode}, step {number}")
    assert_moved(before, ours.model.module)


def _assert_stays_small(side: Side, where: str) -> None:
    """In stage 2, zeroing costs no memory for gradients of other ranks."""
    if side.opt.stage == 2:
        owned = {param for group in side.opt.optim.param_groups for param in group["params"]}
        for param in side.model.parameters():
            assert param.grad is None or param in owned or isinstance(param.grad, AbsentGradient), where


def _each_way(modes: Sequence[str]) -> list[tuple[str, range]]:
    """Each way at one place, and at the other one in the next mode."""
    return [(mode, range(n, n + len(WAYS))) for n, mode in zip(count(step=len(WAYS) + 1), modes, strict=False)]


def _each_way_at_each_place(modes: Iterable[str]) -> list[tuple[str, range]]:
    """Beginning with a different way in each mode."""
    return [(mode, range(number, number + 2 * len(WAYS))) for number, mode in enumerate(modes)]


@case(2, few=_each_way([*MODES][::3]), every=_each_way_at_each_place(MODES))
def _gradients_zeroed_in_any_way_equal_ddp(setup: Setup, configurations: list[tuple[str, range]]) -> None:
    for mode, programs in configurations:
        _train(setup, mode, programs)


@case(2, few=_each_way([*MODES][1::3]), every=_each_way_at_each_place(MODES))
def _unused_parameters_with_zeroed_gradients_are_stepped_as_by_ddp(
    setup: Setup, configurations: list[tuple[str, range]]
) -> None:
    for mode, programs in configurations:
        _train(setup, mode, programs, find_unused_parameters=True)


@case(
    3,
    few=[(*one, place % 2 == 0) for place, one in enumerate(_each_way([*STAGE_2][::3]))],
    every=[(*one, finds) for one in _each_way_at_each_place(STAGE_2) for finds in (True, False)],
)
def _gradients_zeroed_at_three_ranks_equal_ddp(setup: Setup, configurations: list[tuple[str, range, bool]]) -> None:
    for mode, programs, finds in configurations:
        _train(setup, mode, programs, **({"find_unused_parameters": True} if finds else {}))


ADDING = [*STAGE_2, "stage 1", "stage 1 in fp32"]


@case(2, few=ADDING[::2], every=ADDING)
def _gradients_zeroed_in_static_graphs_equal_ddp(setup: Setup, configurations: list[str]) -> None:
    """There DDP builds its final buckets in the second iteration, and copies gradients into them."""
    for start, mode in enumerate(configurations):
        (plain, ours), data = sides(mode, static_graph=True), inputs_of(setup)
        for number in range(start, start + len(WAYS)):
            batch = next(data)
            for side in (plain, ours):
                side.backward(batch, zero=WAYS[number % len(WAYS)])
                side.opt.step()
            assert_equal_models(plain.model, ours.model, f"{mode}, step {number}")


@case(2, few=ADDING[1::2], every=ADDING)
def _gradients_zeroed_with_masters_equal_dropped_ones(setup: Setup, configurations: list[str]) -> None:
    """Against the same mode with gradients dropped: plain bf16 has no masters."""
    for mode in configurations:
        found = []
        for to_none in (True, False):
            torch.manual_seed(0)
            options: dict[str, Any] = {"lr": 0.05, "momentum": 0.9, "master_weights": True} | MODES[mode]
            ddp = DistributedDataParallel(Net().bfloat16(), gradient_as_bucket_view=True, bucket_cap_mb=0.003)
            before, data = copy.deepcopy(ddp.module), inputs_of(setup)
            side = Side(ddp, shard_optimizer(ddp, torch.optim.SGD, **options))
            for step in range(4):
                if step % 2:
                    with side.model.no_sync():
                        side.backward(next(data).bfloat16())
                side.backward(next(data).bfloat16())
                side.opt.step()
                (side.opt if step % 3 else side.model).zero_grad(set_to_none=to_none)
            assert_moved(before, ddp.module)
            found.append(ddp)
        assert_equal_models(found[0], found[1], mode)


@case(2, 3, few=ADDING[::2], every=ADDING)
def _passes_in_accumulate_after_zeroing_equal_those_after_dropping(setup: Setup, configurations: list[str]) -> None:
    """`opt.accumulate()` after zeroing, also in the middle, is as after dropping."""
    for mode in configurations:
        models = []
        for to_none in (True, False):
            side, data = sides(mode)[1], inputs_of(setup)
            for step in range(4):
                with side.opt.accumulate():
                    side.backward(next(data))
                    if step == 3:
                        side.model.zero_grad(set_to_none=to_none)
                        side.backward(next(data))
                side.backward(next(data))
                side.opt.step()
                (side.opt if step % 2 else side.model).zero_grad(set_to_none=to_none)
            models.append(side.model)
        assert_equal_models(models[0], models[1], mode)
        assert_moved(sides(mode)[1].model, models[1])


@case(2)
def _a_step_without_a_pass_after_zeroing_equals_ddp(setup: Setup) -> None:
    for mode in WAITING:
        pair, data = sides(mode), inputs_of(setup)
        for step in range(6):
            batch = next(data)
            for side in pair:
                if step not in (2, 4):
                    side.backward(batch)
                side.opt.step()
                WAYS[step](side)
            assert_equal_models(pair[0].model, pair[1].model, f"{mode}, step {step}")


@case(2)
def _a_penalty_outside_the_model_after_zeroing_equals_ddp(setup: Setup) -> None:
    """A pass outside the model, the same on every rank: all other gradients are still zeros."""
    for mode in WAITING:
        pair, data = sides(mode), inputs_of(setup)
        for step in range(6):
            batch = next(data)
            for side in pair:
                if step % 2 == 0:
                    side.backward(batch)
                else:
                    side.model.module.first.weight.square().sum().backward()
                side.opt.step()
                WAYS[step](side)
            assert_equal_models(pair[0].model, pair[1].model, f"{mode}, step {step}")


@case(2, 3)
def _zeroed_gradients_can_be_read_and_changed(setup: Setup) -> None:
    for mode in STAGE_2:
        for zero in (OPT_ZERO_GRAD, WAYS[3]):
            side, data = sides(mode)[1], inputs_of(setup)
            for _ in range(4):
                side.backward(next(data))
                side.opt.step()
                zero(side)
            params = list(side.model.parameters())
            for param in params[:2]:
                assert_identical(torch.zeros_like(param), side.opt.full_grad(param), f"{mode}: gradient")
            for param in params:
                assert param.grad is not None
                assert not copy.deepcopy(param.grad).any()
                assert not param.grad.norm()
                param.grad += 1
                assert param.grad.sum() == param.numel()


@case(2)
def _gradients_zeroed_under_join_equal_ddp(setup: Setup) -> None:
    for mode in ("stage 1", "stage 2", "stage 2 waiting", "stage 2 cut"):
        plain, ours = sides(mode)
        for side, members in ((plain, [plain.model]), (ours, [ours.model, ours.opt])):
            data = inputs_of(setup)
            with Join(members):  # type: ignore[arg-type]
                for _ in range(5 - setup.rank):
                    side.backward(next(data))
                    side.opt.step()
                    side.opt.zero_grad(set_to_none=False)
        if setup.rank == 0:  # ranks that have joined do not step the plain optimizer
            assert_equal_models(plain.model, ours.model, mode)


LATER_FROZEN = ("second.weight", "second.bias")


@case(
    2, few=[(mode, LATER_FROZEN[place % 2]) for place, mode in enumerate(MODES)], every=[*product(MODES, LATER_FROZEN)]
)
def _parameters_frozen_after_zeroing_are_stepped_as_by_ddp(setup: Setup, configurations: list[tuple[str, str]]) -> None:
    for mode, name in configurations:
        plain, sharded = sides(mode, find_unused_parameters=True)
        for step, inputs in zip(range(4), inputs_of(setup), strict=False):
            for side in (plain, sharded):
                side.model.module.get_parameter(name).requires_grad_(step < 2)
                side.backward(inputs, zero=lambda side: side.model.zero_grad(set_to_none=False))
                side.opt.step()
            assert_equal_models(plain.model, sharded.model, f"{mode}, {name}, {step}")


@case(2)
def _a_save_after_dropping_gradients_of_a_waiting_step_is_not_refused(setup: Setup) -> None:
    for mode in WAITING:
        plain, sharded = sides(mode)
        for step, inputs in zip(range(4), inputs_of(setup), strict=False):
            for side in (plain, sharded):
                side.backward(inputs)
                if step == 1:
                    side.model.zero_grad()
                else:
                    side.opt.step()
            if step == 1:
                checkpoint.save(setup.folder / mode, sharded.model, sharded.opt)
                assert sharded.opt.state_dict()["state"]
            for side in (plain, sharded):
                side.model.zero_grad()
        assert_equal_models(plain.model, sharded.model, mode)


@case(2)
def _a_gradient_that_was_not_zeroed_is_refused_with_its_name(setup: Setup) -> None:
    side, data = sides("stage 2")[1], inputs_of(setup)
    for _ in range(3):
        side.backward(next(data))
        side.opt.step()
        side.opt.zero_grad(set_to_none=False)
    side.backward(next(data))
    side.opt.step()
    for param in side.model.parameters():
        if param is not side.model.module.third.bias and param.grad is not None:
            param.grad.zero_()
    with pytest.raises(RuntimeError, match=r"'module.third.bias' .*\[ZERO-403\]"):
        side.backward(next(data))
    side, data = sides("stage 2 waiting")[1], inputs_of(setup)
    for _ in range(3):
        side.opt.zero_grad(set_to_none=False)
        side.backward(next(data))
    with side.model.no_sync(), pytest.raises(RuntimeError, match=r"rank's own.*\[ZERO-404\]"):
        side.backward(next(data))


test_zeroed = case.each()
