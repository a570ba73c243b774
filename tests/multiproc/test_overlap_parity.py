"""The step inside backward: bit for bit the numbers of DDP with the plain optimizer, at every step from the first.

docs/parity.md says what is compared.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from operator import ne
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from ddp_zero import ZeroRedundancyOptimizer, hook_with_zero_step, hook_with_zero_step_interleaved, shard_optimizer
from tests.multiproc.cases import (
    OptimizerCase,
    assert_equal_models,
    batches,
    optimizer_case,
    step_on,
    sum_in_rank_order,
)
from tests.multiproc.harness import Setup, run_ranks, run_ranks_to_end
from tests.pairwise import pairwise

STEPS = 5
WORLD_SIZES = (2, 3, 4)


class MuonWithAdamW(Optimizer):
    """Two classes in one, by group, as people train transformers: Muon for matrices, AdamW for the rest."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "matrices": False})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                state["step"] = state.get("step", 0) + 1
                if group["matrices"]:
                    momentum = state.setdefault("momentum", torch.zeros_like(param))
                    momentum.mul_(0.95).add_(param.grad)
                    update = momentum / momentum.norm().clamp(min=1e-7)
                    for _ in range(3):
                        update = 1.5 * update - 0.5 * update @ update.T @ update
                    param.mul_(1 - 0.01 * group["lr"]).add_(update, alpha=-group["lr"])
                else:
                    first = state.setdefault("first", torch.zeros_like(param))
                    second = state.setdefault("second", torch.zeros_like(param))
                    first.lerp_(param.grad, 0.1)
                    second.lerp_(param.grad.square(), 0.001)
                    correction = (1 - 0.999 ** state["step"]) ** 0.5 / (1 - 0.9 ** state["step"])
                    param.mul_(1 - 0.01 * group["lr"])
                    param.addcdiv_(first, second.sqrt().add_(1e-8), value=-group["lr"] * correction)


LAST, INTERLEAVED, OUTSIDE = "after the last bucket", "interleaved", "in opt.step()"

OPTIMIZERS = [
    optimizer_case("SGD momentum"),
    optimizer_case("AdamW fused"),
    optimizer_case("AdamW foreach"),
    OptimizerCase("Muon + AdamW groups", MuonWithAdamW),
    optimizer_case("Adafactor"),
]


class Branches(nn.Module):
    """A model with a head that not every rank uses in every step, and one that no rank ever uses."""

    def __init__(self, sometimes_unused: bool) -> None:
        super().__init__()
        self.sometimes_unused = sometimes_unused
        self.first = nn.Linear(8, 31)
        self.second = nn.Linear(31, 17)
        self.heads = nn.ModuleList([nn.Linear(17, 3), nn.Linear(17, 3)])
        if sometimes_unused:
            self.never = nn.Linear(5, 7)

    def forward(self, inputs: Tensor, choice: int) -> Tensor:
        hidden = torch.tanh(self.second(torch.tanh(self.first(inputs))))
        if self.sometimes_unused:
            output: Tensor = self.heads[choice](hidden)
            return output
        both: Tensor = self.heads[0](hidden) + self.heads[1](hidden.square())
        return both


@dataclass(frozen=True)
class Combination:
    """One configuration."""

    stage: int
    split: bool
    step: str
    static_graph: bool
    bucket_view: bool
    unused: bool
    optimizer: OptimizerCase

    def __str__(self) -> str:
        words = [
            f"stage {self.stage}",
            "split" if self.split else "whole bucket",
            self.step,
            "static graph" if self.static_graph else "dynamic graph",
            "bucket view" if self.bucket_view else "no bucket view",
            "unused parameters" if self.unused else "all used",
            self.optimizer.name,
        ]
        return ", ".join(words)


def combinations() -> Iterator[Combination]:
    flags = (False, True)
    for stage, steps in ((1, (LAST, INTERLEAVED)), (2, (LAST, INTERLEAVED, OUTSIDE))):
        for values in product((stage,), flags, steps, flags, flags, flags, OPTIMIZERS):
            yield Combination(*values)


def _groups(model: nn.Module, case: OptimizerCase) -> list[dict[str, Any]]:
    params = list(model.parameters())
    matrices = {"params": [p for p in params if p.dim() == 2]}
    others: dict[str, Any] = {"params": [p for p in params if p.dim() != 2], "lr": 3e-3}
    return [{**matrices, "matrices": True} if case.build is MuonWithAdamW else matrices, others]


def _wrap(model: nn.Module, combination: Combination) -> DistributedDataParallel:
    return DistributedDataParallel(
        model,
        bucket_cap_mb=0.0015,
        gradient_as_bucket_view=combination.bucket_view,
        static_graph=combination.static_graph,
        find_unused_parameters=combination.unused and not combination.static_graph,  # a static graph finds them itself
    )


def _compare(setup: Setup, combination: Combination) -> None:
    """Train both for some steps, comparing after every step."""
    case = combination.optimizer
    torch.manual_seed(0)
    model = Branches(combination.unused)
    plain_ddp, ddp = _wrap(copy.deepcopy(model), combination), _wrap(model, combination)
    plain = case.build(_groups(plain_ddp, case), **case.options)
    opt = ZeroRedundancyOptimizer(
        _groups(ddp, case),
        case.build,
        overlap_with_ddp=combination.step != OUTSIDE,
        stage=combination.stage,
        parameters_as_bucket_view=combination.split,
        **case.options,
    )
    build = hook_with_zero_step_interleaved if combination.step == INTERLEAVED else hook_with_zero_step
    wrapped = allreduce_hook if combination.stage == 1 else None
    if combination.stage == 1:
        plain_ddp.register_comm_hook(None, allreduce_hook)
    elif setup.world_size > 2:  # at two ranks the reference is DDP without a hook
        plain_ddp.register_comm_hook(None, sum_in_rank_order)
    ddp.register_comm_hook(None, build(wrapped, ddp, opt, combination.split))
    regimes = []
    for step, (inputs, targets) in enumerate(batches(setup.rank, STEPS)):
        # a dynamic graph: the second head is used by some ranks in some steps, by none in others
        choice = 0 if combination.static_graph else int(step in (2, 3) and (setup.rank + step) % 2)
        before = [param.detach().clone() for param in ddp.parameters()]
        for one, optimizer in ((plain_ddp, plain), (ddp, opt)):
            step_on(optimizer, nn.functional.mse_loss(one(inputs, choice), targets))
        assert_equal_models(plain_ddp, ddp, f"after step {step}")
        assert any(not torch.equal(p, b) for p, b in zip(ddp.parameters(), before, strict=True)), f"step {step}: stuck"
        regimes.append("deferred" if "deferred" in opt.explain() else "overlapped")
    expected = "deferred" if combination.step == OUTSIDE else "overlapped"
    assert regimes[2:] == [expected] * (STEPS - 2), regimes


def _parts() -> dict[str, list[Combination]]:
    """All configurations, cut into parts that a job each compares: by stage, buckets and place of the step."""
    parts: dict[str, list[Combination]] = {}
    for combination in combinations():
        parts.setdefault(", ".join(str(combination).split(", ")[:3]), []).append(combination)
    return parts


def _pairs(part: str) -> list[Combination]:
    """Of the configurations of a stage in which every two values meet, those of a part.

    Their factors are composed: DDP alone knows the graph and the views, the optimizer sees gradients of its parameters,
    and the number of ranks changes owners and sums, whatever the others are.
    """
    flags, names = (False, True), [case.name for case in OPTIMIZERS]
    stage = part.split(", ")[0]
    wanted = pairwise([one for one in _parts() if one.startswith(stage)], flags, flags, flags, names)
    of_part = {(one.static_graph, one.bucket_view, one.unused, one.optimizer.name): one for one in _parts()[part]}
    return [of_part[values] for own, *rest in wanted if own == part and (values := tuple(rest))]


def _compare_part(setup: Setup, part: str, pairs_only: bool) -> list[str]:
    done = []
    for combination in _pairs(part) if pairs_only else _parts()[part]:
        try:
            _compare(setup, combination)
        except Exception as error:
            raise AssertionError(f"{combination}, {setup.world_size} ranks: {error}") from error
        done.append(str(combination))
    return done


def _assert_parity(part: str, world_size: int, pairs_only: bool) -> None:
    done = run_ranks(_compare_part, world_size, part, pairs_only, timeout=600)
    expected = _pairs(part) if pairs_only else _parts()[part]
    assert done == [[str(combination) for combination in expected]] * world_size


@pytest.mark.parametrize("world_size", WORLD_SIZES, ids="{} ranks".format)
@pytest.mark.parametrize("part", _parts())
def test_overlap_parity(part: str, world_size: int) -> None:
    _assert_parity(part, world_size, pairs_only=True)


@pytest.mark.nightly
@pytest.mark.parametrize("world_size", WORLD_SIZES, ids="{} ranks".format)
@pytest.mark.parametrize("part", _parts())
def test_every_configuration_equals_ddp(part: str, world_size: int) -> None:
    _assert_parity(part, world_size, pairs_only=False)


def test_there_are_400_different_configurations() -> None:
    assert len({str(combination) for combination in combinations()}) == len(list(combinations())) == 400
    assert sum(len(_pairs(part)) for part in _parts()) == 50


class NeededLater(nn.Module):
    """Its weight's gradient is complete before backward has used its value for the last time."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8, bias=False)
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.layers = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        """Shape (N, 8) to the same."""
        hidden: Tensor = self.layers(self.first(x) @ self.weight.detach())
        return hidden @ self.weight


def _train_with_a_value_needed_later(setup: Setup, sharded: list[dict[str, Any]]) -> list[list[Any]]:
    trained = []
    for options in (None, *sharded):
        torch.manual_seed(0)
        model = NeededLater()
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.0001)
        build = partial(AdamW, ddp.parameters()) if options is None else partial(shard_optimizer, ddp, AdamW, **options)
        opt: Optimizer = build(lr=0.1, fused=True)
        data = torch.Generator().manual_seed(setup.rank)
        for _ in range(STEPS):
            step_on(opt, ddp(torch.randn(2, 8, generator=data)).square().mean())
        trained.append([param.tolist() for param in model.parameters()])
    return trained


def test_a_value_that_backward_needs_after_its_gradient_is_the_one_of_before() -> None:
    modes = [{"stage": 1}, {"stage": 2, "interleaved": False}, {"stage": 2, "overlap": False}]
    for found in run_ranks(_train_with_a_value_needed_later, 2, modes):
        assert found == [found[0]] * 4
        torch.manual_seed(0)
        assert all(map(ne, found[0], [param.tolist() for param in NeededLater().parameters()])), "all have moved"


@pytest.mark.parametrize(
    "options",
    [
        {"stage": 2},
        {"stage": 2, "partition": "elements"},
        {"stage": 2, "sync": "forward"},
        {"stage": 1, "interleaved": True},
    ],
    ids=str,
)
def test_where_a_step_comes_before_backward_needs_the_value_every_rank_raises(options: dict[str, Any]) -> None:
    outcomes = run_ranks_to_end(_train_with_a_value_needed_later, 2, [options])
    assert ["modified by an inplace operation" in (one.error or "") for one in outcomes] == [True, True]
