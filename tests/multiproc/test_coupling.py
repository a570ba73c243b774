"""An optimizer that couples parameters raises on every rank in its first steps; no other does."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from ddp_zero import ZeroRedundancyOptimizer, shard_optimizer, wrap
from ddp_zero.core.engine import shardable
from ddp_zero.core.step import coupling
from ddp_zero.core.step import rank_shard as binding
from tests.coupled import ToyByPlace, ToyPreNorm, ToyProdigy, ToyScale
from tests.multiproc.cases import (
    OPTIMIZERS,
    OptimizerCase,
    assert_overlapped,
    at_stage,
    batches,
    build_model,
    build_overlapped_twins,
    build_twins,
    loss_of,
    split_groups,
)
from tests.multiproc.harness import Setup, run_ranks

Build = Callable[..., Optimizer]

UNTRIED = partial
"""A function that builds the optimizer: what couples parameters must then be noticed while training."""
SMALL_CAP = 800  # bytes: several buckets even in a small model

MODES: dict[str, dict[str, Any]] = {
    "standalone": {"overlap": False},
    "copied": {"overlap": False, "parameters_as_bucket_view": False},
    "overlapped": {},
    "interleaved": {"interleaved": True},
    "stage 2": {"stage": 2},
    "stage 2 waits": {"stage": 2, "overlap": False},
    "in forward": {"sync": "forward"},
    "in forward, stage 2": {"sync": "forward", "stage": 2},
    "clipped": {"max_grad_norm": 1.0},
}


def _sharded(build: Build, options: dict[str, Any], model: nn.Module | None = None) -> Any:
    ddp = DistributedDataParallel(
        build_model() if model is None else model,
        gradient_as_bucket_view=options.get("stage") == 2,
        bucket_cap_mb=0.0015,
    )
    return ddp, shard_optimizer(ddp, build, **options)


def _train(setup: Setup, ddp: nn.Module, opt: Optimizer, steps: int) -> None:
    for inputs, targets in batches(setup.rank, steps):
        opt.zero_grad()
        loss_of(ddp, inputs, targets).backward()
        opt.step()


def _message(setup: Setup, build: Build, options: dict[str, Any]) -> str:
    """What a rank raises within eight steps; the same on every rank."""
    ddp, opt = _sharded(build, options)
    with pytest.raises(RuntimeError) as caught:
        _train(setup, ddp, opt, 8)
    told: list[Any] = [None] * setup.world_size
    dist.all_gather_object(told, str(caught.value))
    assert told == [str(caught.value)] * setup.world_size
    return str(caught.value)


def _is_refused(setup: Setup) -> int:
    for name, options in MODES.items():
        for build, value in ((ToyProdigy, "'d', an option of group 0"), (ToyScale, "'mean', an attribute or state")):
            message = _message(setup, UNTRIED(build), options)
            assert value in message, f"{name}: {message}"
            assert f"Start again with {build.__name__} unsharded on every rank" in message, message
    return len(MODES)


@pytest.mark.parametrize("world_size", [2, 3])
def test_an_optimizer_that_couples_parameters_is_refused_on_every_rank(world_size: int) -> None:
    assert run_ranks(_is_refused, world_size) == [len(MODES)] * world_size


def _is_refused_before_it_trains(setup: Setup) -> None:
    """By whichever door."""
    doors: list[Callable[[Any], object]] = [
        lambda build: ZeroRedundancyOptimizer(build_model().parameters(), build, lr=0.1),
        lambda build: _sharded(build, {"stage": 2}),
        lambda build: _sharded(build, {"max_grad_norm": 1.0}),
        lambda build: wrap(build_model(), build),
    ]
    for build in (ToyProdigy, ToyScale, ToyPreNorm):
        for door in doors:
            with pytest.raises(NotImplementedError, match=rf"got different results of {build.__name__} if each rank"):
                door(build)
    _refused_by_a_key_of_a_group(setup)
    tried = len(shardable.refusals)
    _sharded(SGD, {"lr": 0.1})
    assert len(shardable.refusals) == tried, "torch's own are known"


def _refused_by_a_key_of_a_group(setup: Setup) -> None:
    refused = partial(pytest.raises, NotImplementedError, match="got different results of ToyByPlace if each rank")
    model = build_model()
    params: list[Any] = list(model.parameters())
    groups: list[dict[str, Any]] = [{"params": params[:3]}, {"params": params[3:], "by_place": True}]
    with refused():
        ZeroRedundancyOptimizer(groups, ToyByPlace)
    with refused():
        ZeroRedundancyOptimizer(ToyByPlace(groups))
    for options in MODES.values():
        ddp = DistributedDataParallel(build_model(), gradient_as_bucket_view=True)
        with refused():
            shard_optimizer(ddp, ToyByPlace, [{"params": ddp.parameters(), "by_place": True}], **options)
    del groups[1]["by_place"]
    opt = ZeroRedundancyOptimizer(groups[:1], ToyByPlace)
    with refused():
        opt.add_param_group({**groups[1], "by_place": True})
    assert len(opt.param_groups) == len(opt.optim.param_groups) == 1
    opt.add_param_group(groups[1])


def test_an_unknown_class_is_tried_before_it_trains() -> None:
    run_ranks(_is_refused_before_it_trains, 2)


def _buckets_of_one_rank(setup: Setup) -> str:
    binding.BUCKET_CAP_BYTES = SMALL_CAP
    return _message(setup, UNTRIED(ToyProdigy), {"overlap": False})


def test_buckets_of_one_rank_are_compared_with_each_other() -> None:
    (message,) = run_ranks(_buckets_of_one_rank, 1)
    assert "on bucket 0 of rank 0" in message
    assert "on bucket 1 of rank 0" in message


def _coupled_late(setup: Setup) -> None:
    """A coupling that begins after 20 steps is found at the next power of two."""

    class Late(SGD):
        steps = 0

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step(closure)
            if Late.steps > 20:
                for group in self.param_groups:
                    group["size"] = float(sum(param.numel() for param in group["params"]))

    ddp = DistributedDataParallel(build_model())
    opt = shard_optimizer(ddp, Late, overlap=False, lr=0.1)
    for inputs, targets in batches(setup.rank, 33):
        Late.steps += 1
        loss_of(ddp, inputs, targets).backward()
        with pytest.raises(RuntimeError, match="'size'") if Late.steps == 32 else nullcontext():
            opt.step()


def test_a_coupling_that_begins_late_is_found_at_the_next_look() -> None:
    run_ranks(_coupled_late, 2)


def _different_options_by_rank(setup: Setup) -> str:
    ddp = DistributedDataParallel(build_model())
    opt = shard_optimizer(ddp, SGD, overlap=False, lr=0.1)
    opt.param_groups[0]["lr"] = 0.1 + setup.rank
    with pytest.raises(RuntimeError, match=r"'lr' of parameter group 0.* Set options alike .*ZERO-820\]$") as caught:
        _train(setup, ddp, opt, 1)
    return str(caught.value)


def test_an_option_that_the_loop_sets_differently_is_refused() -> None:
    for message in run_ranks(_different_options_by_rank, 2):  # each rank begins with its own value, or with the first
        assert "rank 0 (global rank 0)" in message
        assert "rank 1 (global rank 1)" in message
        assert message.endswith("[ZERO-820]")


# No false alarms


class Looks:
    """Counts how often a rank compares."""

    def __init__(self) -> None:
        self.count = 0
        check = coupling.CouplingWatch.check

        def counting(watch: coupling.CouplingWatch) -> None:
            self.count += 1
            check(watch)

        setattr(coupling.CouplingWatch, "check", counting)  # noqa: B010


def _decay(schedulers: list[torch.optim.lr_scheduler.ExponentialLR], step: int) -> None:
    for scheduler in schedulers:
        scheduler.step()


def _every_optimizer(setup: Setup, stage: int, every: int) -> None:
    looks, decays = Looks(), torch.optim.lr_scheduler.ExponentialLR
    for case in OPTIMIZERS[::every]:
        with at_stage(stage):
            twins = build_overlapped_twins(case, groups=2)
        schedulers = [decays(twins.plain, 0.9), decays(twins.opt, 0.9)]
        looks.count = 0
        twins.train(setup, 9, after_step=partial(_decay, schedulers))
        assert_overlapped(twins.opt)
        twins.assert_moved()
        assert looks.count >= 6, case.name


@pytest.mark.parametrize(
    ("world_size", "stage", "every"),
    [(3, 2, 3), *(pytest.param(*full, marks=pytest.mark.nightly) for full in ((2, 1, 1), (3, 2, 1)))],
)
def test_no_other_optimizer_is_refused_inside_backward(world_size: int, stage: int, every: int) -> None:
    run_ranks(_every_optimizer, world_size, stage, every, timeout=300)


def _under_join(setup: Setup) -> int:
    binding.BUCKET_CAP_BYTES = SMALL_CAP
    steps, looks = (9, 5, 2)[setup.rank], Looks()
    for case in OPTIMIZERS:
        twins = build_twins(case, groups=2, parameters_as_bucket_view=True)
        looks.count = 0
        with Join([twins.model, twins.opt]):
            _train(setup, twins.model, twins.opt, steps)
        assert looks.count == 8, (case.name, looks.count)
    for case in OPTIMIZERS[::4]:
        twins = build_overlapped_twins(case, groups=2)
        with Join([twins.model, twins.opt]):
            _train(setup, twins.model, twins.opt, steps)
    return len(OPTIMIZERS)


@pytest.mark.nightly
def test_no_other_optimizer_is_refused_under_join() -> None:
    assert run_ranks(_under_join, 3, timeout=300) == [len(OPTIMIZERS)] * 3


def _refused_under_join(setup: Setup) -> None:
    for options in (MODES["standalone"], MODES["overlapped"]):
        ddp, opt = _sharded(UNTRIED(ToyProdigy), options)
        with pytest.raises(RuntimeError, match="'d', an option of group 0"), Join([ddp, opt]):
            _train(setup, ddp, opt, (6, 0)[setup.rank])


def test_a_rank_that_has_joined_raises_as_well() -> None:
    run_ranks(_refused_under_join, 2)


def _empty_parts(setup: Setup) -> None:
    """Ranks that own nothing, in a group or at all, and gradients that are missing, are no difference."""
    for case in (OptimizerCase("toy", UNTRIED(ToyProdigy)), OptimizerCase("SGD", SGD, {"lr": 0.1})):
        model: nn.Module = nn.Linear(4, 1, bias=False)
        opt = ZeroRedundancyOptimizer(model.parameters(), case.build, **case.options)
        for inputs, _ in batches(0, 3):
            model.zero_grad()
            model(inputs[:, :4]).sum().backward()
            opt.step()
    model = build_model()
    opt = ZeroRedundancyOptimizer(split_groups(model, 2), UNTRIED(ToyProdigy), lr=0.01)
    first = next(iter(model.parameters()))
    for _ in range(3):
        model.zero_grad()
        first.grad = torch.ones_like(first)
        opt.step()  # one parameter has a gradient: one rank says what d is


def test_an_option_that_one_rank_alone_steps_is_not_coupled() -> None:
    run_ranks(_empty_parts, 3)


# The real ones


def _real(setup: Setup) -> None:
    real = pytest.importorskip("pytorch_optimizer")

    for name in ("Prodigy", "DAdaptAdam"):
        for options in (MODES["standalone"], MODES["overlapped"], MODES["stage 2"]):
            assert "of group 0" in _message(setup, UNTRIED(getattr(real, name)), options)


def test_real_optimizers_are_refused() -> None:
    """Runs where ``pytorch_optimizer`` is installed."""
    pytest.importorskip("pytorch_optimizer")
    run_ranks(_real, 2)
