"""Uneven inputs under Join: equal to DDP with the plain optimizer under Join([ddp]), whoever runs out first."""

import copy
import gc
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ddp_zero import ZeroRedundancyOptimizer, shard_optimizer
from ddp_zero.core.comm.communicator import Communicator
from ddp_zero.core.ddp import unaveraged
from ddp_zero.core.step import coupling
from ddp_zero.core.step import rank_shard as binding
from tests import internals
from tests.multiproc.cases import (
    OptimizerCase,
    assert_equal_models,
    assert_same_on_all_ranks,
    batches,
    build_model,
    build_twins,
    optimizer_case,
    split_groups,
)
from tests.multiproc.harness import Setup, run_ranks
from tests.pairwise import pairwise

Schedule = Callable[[Optimizer], torch.optim.lr_scheduler.LRScheduler]


def _train(
    ddp: DistributedDataParallel,
    optimizer: Optimizer,
    joinables: Sequence[Any],
    setup: Setup,
    steps: int,
    schedule: Schedule | None,
    seed: int,
    **join_options: Any,
) -> None:
    scheduler = schedule(optimizer) if schedule is not None else None
    with Join(list(joinables), **join_options):
        for inputs, targets in batches(setup.rank, steps, seed):
            optimizer.zero_grad()
            nn.functional.mse_loss(ddp(inputs), targets).backward()
            optimizer.step()
            if scheduler is not None:
                scheduler.step()


def _decay(optimizer: Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.8)


CASES = [
    OptimizerCase("SGD", torch.optim.SGD, {"lr": 0.1}),
    optimizer_case("SGD momentum"),
    optimizer_case("AdamW foreach"),
    optimizer_case("Adam tensor lr"),
    optimizer_case("toy 8-bit Adam"),
]


def _uneven_inputs_with_ddp(setup: Setup, inputs_of_rank: Sequence[int], is_full: bool) -> int:
    steps, compared = inputs_of_rank[setup.rank], 0
    for case, as_views, schedule in (product if is_full else pairwise)(CASES, (False, True), (None, _decay)):
        binding.BUCKET_CAP_BYTES = 800 if as_views else 25 << 20
        twins = build_twins(case, groups=2, parameters_as_bucket_view=as_views)
        _train(twins.plain_model, twins.plain, [twins.plain_model], setup, steps, schedule, seed=0)
        _train(twins.model, twins.opt, [twins.model, twins.opt], setup, steps, schedule, seed=0)
        # the last rank to join broadcasts its parameters in DDP's post hook, so the reference is the same on all ranks
        assert_equal_models(twins.plain_model, twins.model, f"{case.name}, views {as_views}, scheduled {schedule}")
        twins.assert_moved()
        compared += 1
    return compared


INPUTS = [(3, 0, 5), (0, 4), (4, 0), (3, 3), (2, 5, 3, 1), (0, 0, 3)]


@pytest.mark.parametrize("inputs_of_rank", INPUTS[:4], ids=lambda inputs: "-".join(map(str, inputs)))
def test_join_with_ddp_equals_the_plain_optimizer(inputs_of_rank: tuple[int, ...]) -> None:
    compared = run_ranks(_uneven_inputs_with_ddp, len(inputs_of_rank), inputs_of_rank, False)
    assert compared == [len(CASES) * 2] * len(inputs_of_rank)


@pytest.mark.nightly
@pytest.mark.parametrize("inputs_of_rank", INPUTS, ids=lambda inputs: "-".join(map(str, inputs)))
def test_join_with_ddp_equals_the_plain_optimizer_in_every_combination(inputs_of_rank: tuple[int, ...]) -> None:
    compared = run_ranks(_uneven_inputs_with_ddp, len(inputs_of_rank), inputs_of_rank, True)
    assert compared == [len(CASES) * 4] * len(inputs_of_rank)


def _averaged_by_hand(model: nn.Module, step: int, inputs_of_rank: Sequence[int]) -> None:
    """Gradients of the average over the ranks that still have inputs; every rank can work them out alone."""
    model.zero_grad()
    training = [rank for rank, steps in enumerate(inputs_of_rank) if step < steps]
    for rank in training:
        inputs, targets = list(batches(rank, step + 1))[step]
        (nn.functional.mse_loss(model(inputs), targets) / len(training)).backward()


def _uneven_inputs_without_ddp(setup: Setup, inputs_of_rank: Sequence[int]) -> None:
    for place, case in enumerate(CASES):
        as_views = (place + setup.world_size) % 2 == 0  # both at two numbers of ranks
        reference = build_model()
        plain = case.build(split_groups(reference, 2), **copy.deepcopy(case.options))
        for step in range(max(inputs_of_rank)):
            _averaged_by_hand(reference, step, inputs_of_rank)
            plain.step()

        model = build_model()
        opt = ZeroRedundancyOptimizer(
            split_groups(model, 2), case.build, parameters_as_bucket_view=as_views, **copy.deepcopy(case.options)
        )
        with Join([opt]):
            for step in range(inputs_of_rank[setup.rank]):
                _averaged_by_hand(model, step, inputs_of_rank)
                opt.step()
        assert_equal_models(reference, model, f"{case.name}, views {as_views}")


@pytest.mark.parametrize(
    "inputs_of_rank",
    [(3, 0, 5), (1, 4), pytest.param((4, 0, 0, 2), marks=pytest.mark.nightly)],
    ids=lambda i: "-".join(map(str, i)),
)
def test_join_with_the_optimizer_alone_equals_averages_by_hand(inputs_of_rank: tuple[int, ...]) -> None:
    run_ranks(_uneven_inputs_without_ddp, len(inputs_of_rank), inputs_of_rank)


def _steps_after_join_gather_nothing(setup: Setup) -> None:
    for module in (coupling, unaveraged):
        setattr(module, "is_checked_step", lambda step: False)  # noqa: B010
    twins = build_twins(optimizer_case("SGD momentum"), parameters_as_bucket_view=True)
    steps = (4, 2, 3)[setup.rank]
    _train(twins.model, twins.opt, [twins.model, twins.opt], setup, steps, None, seed=0)
    assert not internals.joins(twins.opt)
    calls = 0
    gather = Communicator.all_gather_tensor

    def counting(comm: Communicator, mine: torch.Tensor) -> list[torch.Tensor]:
        nonlocal calls
        calls += 1
        return gather(comm, mine)

    Communicator.all_gather_tensor = counting  # type: ignore[assignment, method-assign]
    for inputs, targets in batches(setup.rank, 3, seed=1):
        nn.functional.mse_loss(twins.model(inputs), targets).backward()
        twins.opt.step()
    assert calls == 0
    with Join([twins.model, twins.opt]):
        for inputs, targets in batches(setup.rank, steps, seed=1):
            nn.functional.mse_loss(twins.model(inputs), targets).backward()
            twins.opt.step()
    assert calls == 4  # the longest rank's steps: one question each
    assert_same_on_all_ranks(twins.model.parameters())


def _early_termination_raises_on_every_rank(setup: Setup) -> None:
    twins = build_twins(optimizer_case("SGD"))
    with pytest.raises(RuntimeError, match=r"exhausted"):
        _train(
            twins.model,
            twins.opt,
            [twins.model, twins.opt],
            setup,
            2 + setup.rank,
            None,
            seed=0,
            throw_on_early_termination=True,
        )
    hooked = DistributedDataParallel(build_model())
    opt = shard_optimizer(hooked, torch.optim.SGD, lr=0.1)
    with pytest.raises(RuntimeError, match=r"exhausted"):
        _train(hooked, opt, [hooked, opt], setup, 2 + setup.rank, None, seed=0, throw_on_early_termination=True)
    gc.collect()
    assert not {name for name in vars(hooked) if name.startswith("_match")}, "Join's part of the model is left"


def _optimizers_in_another_order_are_refused_at_once(setup: Setup) -> None:
    """Layers of one size, so plans of one digest. Ranks that waited for each other would do so for minutes."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    ddp = DistributedDataParallel(model)
    first, second = (ZeroRedundancyOptimizer(layer.parameters(), torch.optim.SGD, lr=0.1) for layer in model)

    def train() -> None:
        with Join([ddp, second, first]):
            for _ in range(1 + setup.rank):
                ddp(torch.ones(2, 6)).sum().backward()
                first.step()
                second.step()

    with pytest.raises(RuntimeError, match="step the same optimizer, got several at once: Join lists them in another"):
        train()


def _an_optimizer_that_steps_inside_backward_may_be_listed_after_one_that_steps_in_the_loop(setup: Setup) -> None:
    """An optimizer that steps inside backward is listed after one that steps in the loop."""
    for finds in (False, True):
        sides: list[list[Any]] = []
        for is_ours in (True, False):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
            ddp = DistributedDataParallel(model, find_unused_parameters=finds)
            inner, outer = (list(layer.parameters()) for layer in model)
            if is_ours:
                hooked = shard_optimizer(ddp, torch.optim.SGD, inner, stage=1, lr=0.1)
                sides.append([ddp, ZeroRedundancyOptimizer(outer, torch.optim.AdamW, lr=0.1), hooked])
            else:
                sides.append([ddp, torch.optim.AdamW(outer, lr=0.1), torch.optim.SGD(inner, lr=0.1)])
        for ddp, first, second in sides:
            with Join([ddp, first, second] if isinstance(first, ZeroRedundancyOptimizer) else [ddp]):
                for step in range(2 + 2 * setup.rank):
                    first.zero_grad()
                    second.zero_grad()
                    ddp(torch.full((2, 6), 1.0 + setup.rank + step)).square().mean().backward()
                    first.step()
                    second.step()
        if setup.rank == 1:  # plain optimizers of rank 0 have not stepped as often
            assert_equal_models(sides[1][0], sides[0][0], f"after Join, finds unused parameters: {finds}")


def _a_join_without_the_optimizer_is_refused_at_once(setup: Setup) -> None:
    """Ranks that still train would wait for the steps of the others until the time-out."""
    modes: list[dict[str, Any]] = [{"stage": 1, "overlap": False}, {"stage": 1}, {"stage": 2}]
    for options in modes:
        ddp = DistributedDataParallel(build_model())
        with ddp.join():  # before there is an optimizer
            for inputs, _ in batches(setup.rank, setup.rank):
                ddp(inputs).sum().backward()
        ddp.zero_grad()
        opt = shard_optimizer(ddp, torch.optim.AdamW, lr=0.01, **options)
        before = [param.detach().clone() for param in ddp.parameters()]

        def train(steps: int, ddp: DistributedDataParallel = ddp, opt: Any = opt) -> None:
            for inputs, targets in batches(setup.rank, steps):
                opt.zero_grad()
                nn.functional.mse_loss(ddp(inputs), targets).backward()
                opt.step()

        train(1)
        for context in (ddp.join(), Join([ddp])):
            with pytest.raises(RuntimeError, match=r"Expected Join to list the optimizer, .*rank \d.*\[ZERO-312\]$"):
                with context:
                    train(1 + setup.rank)
        with Join([ddp, opt]):
            train(3 * setup.rank)  # none on the first rank
        train(1)
        assert not any(torch.equal(*pair) for pair in zip(ddp.parameters(), before, strict=True))


def _averages_over_ranks_that_still_train_need_ddps_own_division(setup: Setup) -> None:
    """DDP leaves the division to a communication hook, which would silently divide by all ranks."""
    ours, plain = nn.Linear(6, 6), nn.Linear(6, 6)
    plain.load_state_dict(ours.state_dict())
    models = DistributedDataParallel(ours), DistributedDataParallel(plain)
    plain.load_state_dict(ours.state_dict())  # as rank 0's
    start = copy.deepcopy(plain)
    optimizers = ZeroRedundancyOptimizer(ours.parameters(), torch.optim.AdamW), torch.optim.AdamW(plain.parameters())
    for ddp, opt in zip(models, optimizers, strict=True):
        joinables: list[Any] = [ddp] if opt is optimizers[1] else [ddp, opt]
        with Join(joinables, divide_by_initial_world_size=False):
            for step in range(1 + setup.rank):
                opt.zero_grad()
                ddp(torch.full((2, 6), 1.0 + setup.rank + step)).square().sum().backward()
                opt.step()
    assert_equal_models(models[1], models[0], "after uneven inputs")
    assert not torch.equal(start.weight, plain.weight)
    hooked = DistributedDataParallel(nn.Linear(2, 2))
    with pytest.raises(NotImplementedError, match=r"=False with a communication hook.*ZERO-310"):
        Join([hooked, shard_optimizer(hooked, torch.optim.AdamW)], divide_by_initial_world_size=False)


_ASKING: dict[str, dict[str, Any]] = {
    "stage 1, no overlap": {"overlap": False},
    "stage 1": {},
    "stage 1, clipped": {"max_grad_norm": 1e9},
    "stage 1, cut": {"overlap": False, "partition": "elements"},
    "stage 2": {"stage": 2},
    "stage 2, no overlap": {"stage": 2, "overlap": False},
    "stage 2, clipped": {"stage": 2, "max_grad_norm": 1e9},
}


def _a_rank_that_has_asked_for_the_state_waits_for_ranks_that_have_joined(setup: Setup) -> None:
    """It begins no step before they have come to theirs, and they are served within its step."""
    for (name, mode), asker in product(_ASKING.items(), range(setup.world_size)):
        models = [DistributedDataParallel(build_model(), gradient_as_bucket_view=True) for _ in range(2)]
        start = [param.detach().clone() for param in models[0].parameters()]
        options: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1}
        plain = torch.optim.AdamW(models[0].parameters(), **options)
        opt: Any = shard_optimizer(models[1], torch.optim.AdamW, **mode, **options)
        for ddp, one in zip(models, (plain, opt), strict=True):
            _train(ddp, one, [ddp, one] if one is opt else [ddp], setup, 2, None, seed=0)
            for seed in (1, 2):  # asked before a Join and within one
                if one is opt and setup.rank == asker:
                    opt.state_dict()
                with Join([ddp, one] if one is opt else [ddp]):
                    for inputs, targets in batches(setup.rank, 2 * setup.rank, seed):
                        one.zero_grad()
                        nn.functional.mse_loss(ddp(inputs), targets).backward()
                        one.step()
                        if one is opt and setup.rank == asker:
                            opt.state_dict()
        if setup.rank == setup.world_size - 1:  # plain optimizers of others have not stepped as often
            assert_equal_models(models[0], models[1], f"{name}, rank {asker} asks")
        assert not any(map(torch.equal, start, models[1].parameters())), name


@pytest.mark.parametrize(
    "case",
    [
        _a_join_without_the_optimizer_is_refused_at_once,
        _averages_over_ranks_that_still_train_need_ddps_own_division,
        _steps_after_join_gather_nothing,
        _early_termination_raises_on_every_rank,
        _optimizers_in_another_order_are_refused_at_once,
    ],
)
def test_around_join(case: Callable[[Setup], None]) -> None:
    run_ranks(case, 3)


def test_an_optimizer_that_steps_inside_backward_may_be_listed_last() -> None:
    run_ranks(
        _an_optimizer_that_steps_inside_backward_may_be_listed_after_one_that_steps_in_the_loop, 2, group_timeout=20.0
    )


def test_ranks_ask_for_the_state_around_join() -> None:
    run_ranks(_a_rank_that_has_asked_for_the_state_waits_for_ranks_that_have_joined, 2, group_timeout=20.0)
