"""Optimizers that were built already, fresh or in the middle of a training, are handed over to be sharded.

The training goes on as with the instance itself, bit for bit, from the next step on.
"""

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

import ddp_zero
from ddp_zero import ZeroRedundancyOptimizer, shard_optimizer
from tests.multiproc.cases import (
    OPTIMIZERS,
    OptimizerCase,
    assert_equal_models,
    assert_identical,
    batches,
    build_model,
    loss_of,
    step_on,
    sum_in_rank_order,
)
from tests.multiproc.harness import Cases, Setup

case = Cases()

Data = Iterator[tuple[Tensor, Tensor]]
Door = Callable[[DistributedDataParallel, Optimizer], ZeroRedundancyOptimizer]


def _one_line(**options: Any) -> Door:
    own = {"hook": sum_in_rank_order} if options.get("stage", 1) == 1 else {}
    return lambda ddp, given: shard_optimizer(ddp, given, **own, **options)  # type: ignore[call-overload]


def _in_place_of_parameters(ddp: DistributedDataParallel, given: Optimizer) -> ZeroRedundancyOptimizer:
    ddp.register_comm_hook(None, sum_in_rank_order)
    return ZeroRedundancyOptimizer(given)


def _in_place_of_a_class(ddp: DistributedDataParallel, given: Optimizer) -> ZeroRedundancyOptimizer:
    ddp.register_comm_hook(None, sum_in_rank_order)
    return ZeroRedundancyOptimizer(ddp.named_parameters(), given, parameters_as_bucket_view=True)


def _attached(ddp: DistributedDataParallel, given: Optimizer) -> ZeroRedundancyOptimizer:
    opt = ZeroRedundancyOptimizer(given, stage=2, overlap_with_ddp=True)
    opt.attach(ddp)
    return opt


DOORS: dict[str, Door] = {
    "parameters": _in_place_of_parameters,
    "class": _in_place_of_a_class,
    "attach": _attached,
    "stage 1": _one_line(),
    "stage 1, after backward": _one_line(overlap=False),
    "stage 2": _one_line(stage=2),
    "stage 2, after backward": _one_line(stage=2, overlap=False),
    "stage 2, clipped": _one_line(stage=2, max_grad_norm=1e9),
    "late": _one_line(stage=2, sync="forward"),
}
CUT: dict[str, Door] = {
    "cut": _one_line(partition="elements"),
    "stage 2, cut": _one_line(stage=2, partition="elements"),
    "stage 2, cut, late": _one_line(stage=2, partition="elements", sync="forward"),
}


class Kept(Optimizer):
    """Clips by what its constructor was told and keeps to itself, and counts its steps."""

    def __init__(self, params: Any, scale: float, *, clip: float = 1.0, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.clip, self.scale, self.steps = clip, scale, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    change = param.grad.clamp(-self.clip, self.clip) * self.scale
                    param.sub_(change, alpha=group["lr"] / self.steps)


def _built(model: nn.Module, one: OptimizerCase) -> tuple[Optimizer, LRScheduler]:
    """As factories do: two groups, one with names and an option of its own, and a scheduler over the optimizer."""
    named = list(model.named_parameters())
    groups = [{"params": named[::2], "lr": one.options.get("lr", 1e-2)}, {"params": named[1::2]}]
    optimizer = one.build(groups, **copy.deepcopy(one.options))
    is_plain = not isinstance(one.options.get("lr"), Tensor)
    return optimizer, LambdaLR(optimizer, lambda step: 0.9**step if is_plain else 1.0)


def _ddp(model: nn.Module, *, is_plain: bool = False) -> DistributedDataParallel:
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.0015, gradient_as_bucket_view=True)
    if is_plain:
        ddp.register_comm_hook(None, sum_in_rank_order)
    return ddp


def _train(model: nn.Module, optimizer: Optimizer, schedule: LRScheduler, data: Data, steps: int) -> None:
    for _ in range(steps):
        inputs, targets = next(data)
        step_on(optimizer, loss_of(model, inputs, targets))
        schedule.step()


def _check(setup: Setup, name: str, one: OptimizerCase, door: Door, steps: int) -> None:
    """Train so many steps with the plain optimizer before it is handed over, and four after."""
    model = build_model(matrices_only=one.matrices_only)
    before = copy.deepcopy(model)
    expected = _ddp(model, is_plain=True)
    plain, plain_schedule = _built(expected.module, one)
    _train(expected, plain, plain_schedule, batches(setup.rank, 100), steps)
    bare = copy.deepcopy(before)
    given, schedule = _built(bare, one)
    first = _ddp(bare, is_plain=True)
    _train(first, given, schedule, batches(setup.rank, 100), steps)
    ddp = _ddp(bare)
    opt = door(ddp, given)
    data = batches(setup.rank, 100)
    for _ in range(steps):
        next(data)
    more = copy.deepcopy(list(_taken(data, 4)))
    _train(expected, plain, plain_schedule, iter(more), 4)
    _train(ddp, opt, schedule, iter(more), 4)
    what = f"{one.name}, {name}, handed over after {steps} steps"
    assert_equal_models(expected.module, ddp.module, what)
    assert all(not torch.equal(old, new) for old, new in zip(before.parameters(), ddp.parameters(), strict=True)), what
    opt.consolidate_state_dict()
    if setup.rank == 0:
        assert_identical(plain.state_dict(), opt.state_dict(), what)


def _taken(data: Data, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    for _ in range(count):
        yield next(data)


WAYS = [(0, 0), (0, 3), (5, 0), (5, 3)]
"""Which door, counted on from that of a class, and after how many steps."""


@case(2, few=WAYS[1:2], every=WAYS)
def _instances_of_every_class_train_on_as_the_plain_ones(setup: Setup, configurations: list[tuple[int, int]]) -> None:
    cases = [*OPTIMIZERS, OptimizerCase("kept to itself", Kept, {"scale": 0.5, "clip": 0.01})]
    names = list(DOORS)
    for number, one in enumerate(cases):
        for further, steps in configurations:
            name = names[(number + further) % len(names)]
            _check(setup, name, one, DOORS[name], steps)


@case(
    2,
    3,
    few=[(number, 3 * (number % 2 == 0)) for number in range(len(DOORS | CUT))],
    every=[*product(range(len(DOORS | CUT)), (0, 3))],
)
def _every_door_takes_an_instance(setup: Setup, configurations: list[tuple[int, int]]) -> None:
    chosen = [one for one in OPTIMIZERS if one.name in ("AdamW fused", "Adagrad", "SGD momentum")]
    doors = list((DOORS | CUT).items())
    for number, steps in configurations:
        name, door = doors[number]
        _check(setup, name, chosen[(number + (steps == 0)) % 3], door, steps)


@case(2)
def _an_instance_taken_with_masters_equals_a_load_of_its_state_dict(setup: Setup) -> None:
    """As a load of the instance's state dict: in fp32 for masters."""
    for options in ({"master_weights": True}, {"master_weights": True, "partition": "elements", "stage": 2}):
        models = [_ddp(build_model().bfloat16()) for _ in range(2)]
        given = [AdamW(model.parameters(), lr=1e-2) for model in models]
        data = [batches(setup.rank, 100) for _ in models]
        for model, optimizer, ones in zip(models, given, data, strict=True):
            for _ in range(2):
                _low_step(model, optimizer, ones)
        loaded = shard_optimizer(models[0], AdamW, **options, lr=1e-2)
        loaded.load_state_dict(given[0].state_dict())
        taken = shard_optimizer(models[1], given[1], **options)
        for model, sharded, ones in zip(models, (loaded, taken), data, strict=True):
            for _ in range(3):
                _low_step(model, sharded, ones)
        assert_equal_models(models[0].module, models[1].module, f"{options}")
    one = next(one for one in OPTIMIZERS if one.name == "AdamW foreach")
    _check(setup, "offload to the host", one, _one_line(stage=2, offload="cpu"), 3)

    bare, expected = build_model(), _ddp(build_model())
    plain = AdamW(expected.parameters(), lr=1e-2)
    ddp, opt = ddp_zero.wrap(bare, AdamW(bare.parameters(), lr=1e-2), stage=2)
    unchanging = LambdaLR(plain, lambda _: 1.0)
    _train(expected, plain, unchanging, batches(setup.rank, 3), 3)
    _train(ddp, opt, unchanging, batches(setup.rank, 3), 3)
    assert_equal_models(expected.module, ddp.module, "wrap")


def _low_step(model: nn.Module, optimizer: Optimizer, data: Data) -> None:
    inputs, targets = next(data)
    step_on(optimizer, loss_of(model, inputs.bfloat16(), targets.bfloat16()))


@case(2)
def _an_instance_that_was_handed_over_has_options_and_hooks_of_the_sharded_one(setup: Setup) -> None:
    ddp = _ddp(build_model())
    given = AdamW(ddp.parameters(), lr=1e-2)
    called: list[Optimizer] = []
    handle = given.register_step_post_hook(lambda optimizer, *_: called.append(optimizer))
    data = batches(setup.rank, 100)
    _train(ddp, given, LambdaLR(given, lambda _: 1.0), data, 1)
    of_state = [weakref.ref(state["exp_avg"]) for state in given.state.values()]
    called.clear()
    opt = shard_optimizer(ddp, given, stage=2)
    assert sum(one() is not None for one in of_state) < len(of_state), "what others own was kept"
    late = LambdaLR(given, lambda step: 0.5**step)  # over the instance, after it was handed over
    _train(ddp, opt, late, data, 2)
    assert called == [opt, opt]
    handle.remove()
    assert given.param_groups is opt.param_groups
    opt.consolidate_state_dict()
    state = copy.deepcopy(opt.state_dict()) if setup.rank == 0 else None
    opt.load_state_dict(state)
    assert given.param_groups is opt.param_groups
    for group in given.param_groups:
        group["lr"] = 0.25
    inputs, targets = next(data)
    loss_of(ddp, inputs, targets).backward()
    opt.step()
    assert opt.optim.param_groups[0]["lr"] == 0.25
    assert called == [opt, opt]
    refused: list[Callable[[], object]] = [
        given.step,
        given.state_dict,
        lambda: given.load_state_dict({}),
        lambda: given.add_param_group({"params": []}),
        lambda: shard_optimizer(ddp, given),
        lambda: ZeroRedundancyOptimizer(given),
    ]
    for call in refused:
        with pytest.raises(RuntimeError, match=r"handed over.*ZERO-131"):
            call()
    assert isinstance(given, AdamW)


@case(2)
def _an_optimizer_built_of_an_instance_lives_as_long_as_the_instance(setup: Setup) -> None:
    model = build_model()
    given = AdamW(model.parameters())
    opt = ZeroRedundancyOptimizer(given)
    reference = weakref.ref(opt)
    gc.collect()
    gc.disable()
    try:
        del opt
        assert reference() is not None, "a scheduler over the instance needs it"
        del given
        assert reference() is None
    finally:
        gc.enable()


class Wraps(Optimizer):
    def __init__(self, params: Any) -> None:
        self.base = SGD(params, lr=0.1)
        super().__init__(self.base.param_groups, {})

    def step(self, closure: Any = None) -> Any:
        return self.base.step(closure)


class KeepsParameters(SGD):
    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.by_shape = {"all": [self.param_groups[0]["params"]]}


class HasItsOwnHook(SGD):
    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.register_step_post_hook(self.after)

    def after(self, *_: Any) -> None:
        pass


@case(2)
def _instances_that_do_not_fit_are_refused_and_stay_unchanged(setup: Setup) -> None:
    def refuse(error: type[Exception], match: str, given: Optimizer, *args: Any, **options: Any) -> None:
        before = copy.deepcopy(given.state_dict())
        with pytest.raises(error, match=match):
            shard_optimizer(ddp, given, *args, **options)
        if not args:
            with pytest.raises(error, match=match):
                ZeroRedundancyOptimizer(given, **options)
        assert_identical(before, given.state_dict(), match)
        given.step()

    ddp = _ddp(build_model())
    params = list(ddp.parameters())
    for kind in (Wraps, KeepsParameters, HasItsOwnHook):
        refuse(TypeError, "ZERO-130", kind(params))
    given = AdamW(params, lr=1e-2)
    refuse(TypeError, r"with its own options, got lr beside.*ZERO-130", given, lr=1e-3)
    refuse(TypeError, r"Did you mean 'partition'.*ZERO-104", given, partitoin="elements")
    refuse(TypeError, r"got groups beside it.*ZERO-130", given, [{"params": params, "lr": 1.0}])
    refuse(TypeError, r"got groups beside it.*ZERO-130", given, lambda name, param: None)
    refuse(ValueError, r"the \d+ parameters of the AdamW.*ZERO-130", given, params[1:])
    refuse(NotImplementedError, "ZERO-110", torch.optim.SparseAdam(params))
    for overlap in (True, False):
        with pytest.raises(NotImplementedError, match="ZERO-111"):
            shard_optimizer(ddp, torch.optim.LBFGS(params), overlap=overlap)
    params[0].grad = torch.ones_like(params[0]) * setup.rank
    given.step()
    with pytest.raises(ValueError, match=r"state of the optimizer"):
        shard_optimizer(ddp, given)
    given.step()
    ddp.register_comm_hook(None, sum_in_rank_order)  # so that attaching fails, after the optimizer was built
    given = AdamW(params, lr=1e-2)
    with pytest.raises(ValueError, match="ZERO-206"):
        shard_optimizer(ddp, given)
    given.step()


test_instances = case.each()
