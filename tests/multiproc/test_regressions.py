"""What reviews found, each with the test that would have caught it."""

import copy
import gc
import time
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from ddp_zero import ZeroRedundancyOptimizer, checkpoint, shard_optimizer
from ddp_zero.core.step import rank_shard as binding
from tests import internals
from tests.multiproc.cases import (
    LooseTwins,
    OptimizerCase,
    ToyAdam8bit,
    ToyLAMB,
    assert_identical,
    at_stage,
    batches,
    build_overlapped_twins,
    build_twins,
    optimizer_case,
    step_on,
)
from tests.multiproc.harness import Cases, Setup, run_ranks_to_end

case = Cases(group_timeout=20)

SIZES = (60, 40, 30, 20, 10, 5)


def loose(build: Callable[..., Any] = torch.optim.AdamW, **options: Any) -> LooseTwins:
    torch.manual_seed(0)
    return LooseTwins([torch.randn(size) for size in SIZES], build, **options)


@case(2, 3)
def _a_memory_format_that_changes_under_the_buckets_is_refused_before_anything_moves(setup: Setup) -> None:
    """DDP without bucket views mixes up gradients then; with them, `test_stage2` shows equal numbers."""
    warnings.simplefilter("ignore")  # DDP says that its buckets keep the old strides
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Conv2d(8, 4, 2), nn.Flatten(), nn.Linear(16, 3))
    data = torch.Generator().manual_seed(setup.rank)
    for changes_at in (1, 3):
        for options in ({}, {"interleaved": True}, {"max_grad_norm": 0.1}):
            ddp = DistributedDataParallel(copy.deepcopy(model), gradient_as_bucket_view=False)
            opt = shard_optimizer(ddp, torch.optim.SGD, lr=0.1, **options)
            for step in range(changes_at + 1):
                opt.zero_grad()
                if step == changes_at:
                    ddp.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
                    before = [param.detach().clone() for param in ddp.parameters()]
                    with pytest.raises(RuntimeError, match=r"Expected 0.weight with strides \[27, 9, 3, 1\], .* got"):
                        ddp(torch.randn(2, 3, 5, 5, generator=data)).square().mean().backward()
                    for one, other in zip(before, ddp.parameters(), strict=True):
                        assert_identical(one, other.detach(), f"{options}")
                else:
                    ddp(torch.randn(2, 3, 5, 5, generator=data)).square().mean().backward()
                    opt.step()


@case(2)
def _a_memory_format_that_moves_gradients_out_of_the_buckets_is_refused_before_anything_moves(setup: Setup) -> None:
    """``model.to`` points the reducer's own views elsewhere where there are gradients; stage 2: see `test_stage2`."""
    warnings.simplefilter("ignore")  # DDP says that its buckets keep the old strides
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Conv2d(8, 4, 2), nn.Flatten(), nn.Linear(16, 3))
    for options in ({}, {"interleaved": True}, {"max_grad_norm": 0.1}, {"accumulate_in_fp32": True}):
        ddp = DistributedDataParallel(copy.deepcopy(model), gradient_as_bucket_view=True)
        opt = shard_optimizer(ddp, torch.optim.SGD, lr=0.1, **options)
        data = torch.Generator().manual_seed(setup.rank)
        for _ in range(4):
            opt.zero_grad()
            ddp(torch.randn(2, 3, 5, 5, generator=data)).square().mean().backward()
            opt.step()
        ddp.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        opt.zero_grad()
        before = [param.detach().clone() for param in ddp.parameters()]
        with pytest.raises(RuntimeError, match=r"Expected the gradient of .*0.weight.* in DDP's bucket, found"):
            ddp(torch.randn(2, 3, 5, 5, generator=data)).square().mean().backward()
        for value, param in zip(before, ddp.parameters(), strict=True):
            assert_identical(value, param.detach(), f"{options}")


class CountsInfinities(ToyLAMB):
    """Has attributes of its own of the names that a GradScaler leaves on the optimizer that it steps."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        self.found_inf = torch.zeros(())
        self.grad_scale = torch.full((), 8.0)


@case(2)
def _attributes_of_the_inner_optimizer_are_not_those_of_a_scaler(setup: Setup) -> None:
    finite = loose(CountsInfinities)
    for step in range(3):
        finite.step_from(step)
        assert finite.opt.last_step is not None
        assert finite.opt.last_step.stepped
    infinite = loose(CountsInfinities)
    infinite.opt.optim.found_inf.fill_(1)  # type: ignore[attr-defined]
    infinite.step_from(0)
    for stage in (1, 2):
        with at_stage(stage):
            twins = build_overlapped_twins(replace(optimizer_case("toy LAMB"), build=CountsInfinities))
        twins.train(setup, 4)
        twins.assert_moved()


@case(2)
def _options_that_a_group_has_gained_since_it_was_saved_are_gone_after_a_load(setup: Setup) -> None:
    """The toy counts its steps in its groups, from the first step on."""

    def by_checkpoint(opt: ZeroRedundancyOptimizer, ddp: DistributedDataParallel) -> Callable[[], object]:
        folder = setup.folder / "unstepped"
        checkpoint.save(folder, ddp, opt)
        return lambda: checkpoint.load(folder, ddp, opt)

    def whole(opt: ZeroRedundancyOptimizer, ddp: DistributedDataParallel) -> Callable[[], object]:
        saved = opt.state_dict()
        return lambda: opt.load_state_dict(saved)

    def by_shard(opt: ZeroRedundancyOptimizer, ddp: DistributedDataParallel) -> Callable[[], object]:
        saved = opt.sharded_state_dict()
        return lambda: opt.load_sharded_state_dict(saved)

    for door in (by_checkpoint, whole, by_shard):
        for stage in (1, 2):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2))
            plain = copy.deepcopy(model)
            ddp, plain_ddp = (DistributedDataParallel(one, gradient_as_bucket_view=True) for one in (model, plain))
            opt, plain_opt = shard_optimizer(ddp, ToyAdam8bit, stage=stage), ToyAdam8bit(plain_ddp.parameters())
            generator = torch.Generator().manual_seed(setup.rank)
            load, saved = door(opt, ddp), copy.deepcopy(plain_opt.state_dict())
            weights = copy.deepcopy(model.state_dict())
            for step in range(4):
                if step == 2:
                    load()
                    assert "k" not in opt.param_groups[0], door
                    model.load_state_dict(weights)
                    plain.load_state_dict(weights)
                    plain_opt.load_state_dict(saved)
                x = torch.randn(3, 6, generator=generator)
                for trained, by in ((ddp, opt), (plain_ddp, plain_opt)):
                    step_on(by, trained(x).square().sum())
            for one, other in zip(plain.parameters(), model.parameters(), strict=True):
                assert_identical(one, other, f"{door.__name__}, stage {stage}")
            assert opt.param_groups[0]["k"] == plain_opt.param_groups[0]["k"] == 2


@case(2)
def _options_changed_since_the_last_step_are_kept_when_a_group_is_added(setup: Setup) -> None:
    twins = loose(lr=0.1)
    twins.step_from(0)
    for optimizer, params in ((twins.plain, twins.plain_params), (twins.opt, twins.params)):
        optimizer.param_groups[0]["lr"] = 0.05
        optimizer.param_groups[0]["mine"] = "new"
        params.append(nn.Parameter(torch.ones(7)))
        optimizer.add_param_group({"params": params[-1:]})
        assert optimizer.param_groups[0]["lr"] == 0.05
        assert optimizer.param_groups[0]["mine"] == "new"
    twins.step_from(1)
    twins.opt.param_groups[0]["lr"] = 0.5
    clone = copy.deepcopy(twins.opt)
    assert clone.param_groups[0]["lr"] == 0.5


@case(2)
def _reading_the_state_of_parameters_of_other_ranks_changes_nothing(setup: Setup) -> None:
    twins = loose(lr=0.1)
    twins.step_from(0)
    assert [twins.opt.state[param].get("exp_avg") for param in twins.params]
    twins.assert_same_state("after looking")
    twins.step_from(1)
    twins.assert_same_state("a step later", to=1)


@case(2)
def _a_gradient_dropped_on_one_rank_changes_no_messages(setup: Setup) -> None:
    for dropping in range(setup.world_size):
        binding.BUCKET_CAP_BYTES = 100
        twins = loose(lr=0.1)
        twins.step_from(0)
        for params in (twins.plain_params, twins.params):
            params[1].requires_grad_(False)
        owner = internals.owners_of(twins.opt)[1]
        if setup.rank == dropping != owner:
            twins.params[1].grad = None
        twins.plain.step()
        twins.opt.step()
        twins.assert_equal("after a step")
        twins.step_from(1)


class Counting(torch.optim.SGD):
    """Counts its steps in the state of no parameter, and in a tensor option."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        self.state["k"] = 0  # type: ignore[index]
        for group in self.param_groups:
            group["t"] = torch.zeros(())

    def step(self, closure: Any = None) -> Any:
        self.state["k"] += 1  # type: ignore[index]
        for group in self.param_groups:
            group["t"] += 1
            for param in group["params"]:
                if param.grad is not None:
                    param.data -= group["lr"] * param.grad / self.state["k"] / group["t"]  # type: ignore[index]


@case(2)
def _counters_in_state_and_options_count_once_per_step(setup: Setup) -> None:
    binding.BUCKET_CAP_BYTES = 100
    twins = loose(Counting)
    for seed in range(3):
        twins.step_from(seed)
    assert twins.opt.param_groups[0]["t"].item() == 3


class Lookahead(torch.optim.Optimizer):
    """Wraps another optimizer and shares its groups, as such wrappers do."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        self.base = torch.optim.SGD(params, lr=lr, momentum=0.9)
        super().__init__(self.base.param_groups, self.base.defaults)
        self.param_groups = self.base.param_groups
        self.state = self.base.state
        self.count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        return self.base.step()


@case(2)
def _an_optimizer_that_wraps_another_equals_ddp_with_it(setup: Setup) -> None:
    binding.BUCKET_CAP_BYTES = 100
    parameters = loose(Lookahead, lr=0.1)
    for seed in range(4):
        parameters.plain.param_groups[0]["lr"] = parameters.opt.param_groups[0]["lr"] = 0.1 / (seed + 1)
        parameters.step_from(seed)
    assert vars(parameters.opt.optim)["count"] == 4
    twins = build_overlapped_twins(OptimizerCase("lookahead", Lookahead), interleaved=True)
    twins.train(setup, 5)
    assert "deferred to the end of backward: the optimizer wraps another one" in twins.opt.explain()
    twins.assert_moved()


class Hoarder(torch.optim.SGD):
    """Keeps a list of parameters of its own."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        self.hoard = [param for group in self.param_groups for param in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for param in self.hoard:
            param.sub_(0.1)


@case(2)
def _an_optimizer_that_keeps_a_list_of_parameters_is_refused(setup: Setup) -> None:
    binding.BUCKET_CAP_BYTES = 100
    twins = loose(partial(Hoarder))  # not tried beforehand
    twins.set_gradients(0)
    with pytest.raises(RuntimeError, match="keeps a list of parameters of its own"):
        twins.opt.step()


@case(2)
def _groups_edited_in_place_are_refused_at_the_step(setup: Setup) -> None:
    def append(opt: Any) -> None:
        opt.param_groups[0]["params"].append(nn.Parameter(torch.ones(2)))

    def remove(opt: Any) -> None:
        del opt.param_groups[0]["params"][0]

    def replace(opt: Any) -> None:
        opt.param_groups[0]["params"][1] = nn.Parameter(torch.ones(40))

    def add(opt: Any) -> None:
        opt.param_groups.append({**opt.param_groups[0], "params": [nn.Parameter(torch.ones(2))]})

    def split(opt: Any) -> None:
        params = opt.param_groups[0]["params"]
        opt.param_groups.append({**opt.param_groups[0], "params": [params.pop()]})

    for edit in (append, remove, replace, add, split):
        twins = loose(lr=0.1)
        twins.step_from(0)
        edit(twins.opt)
        with pytest.raises(RuntimeError, match=r"built with in group \d, got a different set. Use add_param_group"):
            twins.opt.step()
    params = [nn.Parameter(torch.ones(3)) for _ in range(3)]
    groups: list[dict[str, Any]] = [{"params": params[:2]}, {"params": params[2:], "lr": 0.5}]
    opt = ZeroRedundancyOptimizer(groups, torch.optim.SGD, lr=0.1)
    first, second = (group["params"] for group in opt.param_groups)
    second.insert(0, first.pop())  # the order of all stays
    with pytest.raises(RuntimeError, match=r"built with in group 0, got a different set"):
        opt.step()
    twins = loose(lr=0.1)
    twins.step_from(0)
    for optimizer in (twins.plain, twins.opt):
        optimizer.param_groups = [{**optimizer.param_groups[0], "lr": 0.5}]
    twins.step_from(1)


@case(2)
def _parameters_that_come_to_share_memory_are_refused_at_the_step(setup: Setup) -> None:
    for as_views in (False, True):
        twins = loose(as_views=as_views, lr=0.1)
        twins.step_from(0)
        twins.params[2].data = twins.params[0].data[: twins.params[2].numel()]
        twins.set_gradients(1)
        with pytest.raises(ValueError, match=r"Two parameters share memory: parameter 0 .* parameter 2.*\[ZERO-108\]$"):
            twins.opt.step()


@case(2)
def _consolidation_to_a_rank_that_does_not_exist_is_refused_on_all(setup: Setup) -> None:
    twins = loose(lr=0.1)
    last = setup.rank == setup.world_size - 1
    with pytest.raises(ValueError if last else RuntimeError, match="rank below"):
        twins.opt.consolidate_state_dict(to=99 if last else 0)
    twins.step_from(0)


@case(2)
def _options_that_cannot_be_sent_are_refused_under_join(setup: Setup) -> None:
    twins = build_twins(optimizer_case("SGD momentum"))
    twins.opt.param_groups[0]["function"] = len

    def train() -> None:
        with Join([twins.model, twins.opt]):
            for inputs, targets in batches(setup.rank, 2 - setup.rank):
                nn.functional.mse_loss(twins.model(inputs), targets).backward()
                twins.opt.step()

    with pytest.raises((TypeError, RuntimeError), match="builtin_function"):
        train()


@case(2)
def _a_graph_that_needs_unstepped_parameters_goes_backward(setup: Setup) -> None:
    for as_views in (False, True):
        twins = loose(lr=0.1, as_views=as_views)
        for params, optimizer in ((twins.plain_params, twins.plain), (twins.params, twins.opt)):
            loss = (params[0] * params[0]).sum()
            params[1].grad = torch.ones(40)
            optimizer.step()
            loss.backward()
        twins.assert_equal("after a step")
        loss = (twins.params[1] * twins.params[1]).sum()
        twins.opt.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@case(2)
def _frozen_parameters_leave_flat_storage_when_a_group_is_added(setup: Setup) -> None:
    twins = loose(lr=0.1)
    twins.step_from(0)
    twins.params[3].requires_grad_(False).grad = None
    added = nn.Parameter(torch.ones(2))
    twins.opt.add_param_group({"params": [added]})
    twins.opt.step()
    assert twins.params[3].untyped_storage().resizable(), "memory of its own, not a window"
    assert not added.untyped_storage().resizable()
    assert twins.opt.global_rank == setup.rank
    assert twins.opt.parameters_as_bucket_view


class MixedDtypes(nn.Module):
    """DDP's first buckets are one per dtype; some of them are final, too."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.c = nn.Linear(4, 4, bias=False, dtype=torch.float64)
        self.d = nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
        self.d.weight.data = self.d.weight.data.t().contiguous().t()  # is packed, not aliased

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.c(self.b(self.a(inputs[:, :4]).relu()).relu().double())
        output: torch.Tensor = self.d(hidden.relu().bfloat16())[:, :3].float()
        return output


@case(2)
def _buckets_of_several_dtypes_that_become_final_one_after_another_equal_ddp(setup: Setup) -> None:
    for as_views in (False, True):
        for interleaved in (False, True):
            torch.manual_seed(0)
            twins = build_overlapped_twins(
                optimizer_case("SGD momentum"),
                model=MixedDtypes(),
                interleaved=interleaved,
                as_views=as_views,
                bucket_cap_mb=1e-6,
            )
            twins.train(setup, 6)
            twins.assert_moved()


@case(2)
def _an_optimizer_is_freed_with_the_users_last_reference(setup: Setup) -> None:
    build_twins(optimizer_case("SGD"))  # what torch imports for the first DDP model leaves a frame behind
    gc.disable()
    for twins in (build_twins(optimizer_case("AdamW foreach")), build_overlapped_twins(optimizer_case("SGD"))):
        twins.train(setup, 4)
        communicator, optimizer = weakref.ref(internals.communicator_of(twins.opt)), weakref.ref(twins.opt)
        del twins.opt
        assert optimizer() is None
        del twins.model  # its reducer holds the hook
    del twins
    gc.enable()
    gc.collect()
    deadline = time.monotonic() + 20  # it answers until the other rank has dropped its optimizer, too
    while communicator() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert communicator() is None


test_regressions = case.each()


def _freezes_a_parameter_on_rank_1_alone(setup: Setup) -> list[str]:
    binding.BUCKET_CAP_BYTES = 100
    twins = loose(torch.optim.SGD, lr=0.1)
    told = []
    for seed in range(3):
        twins.set_gradients(seed)
        if setup.rank == 1 and seed == 1:
            twins.params[1].requires_grad_(False).grad = None
        try:
            twins.plain.step()
            twins.opt.step()
            twins.assert_equal("after a step")
            told.append("ok")
        except (RuntimeError, AssertionError) as error:
            told.append(str(error))
    return told


def test_ranks_out_of_step_never_take_each_others_bytes() -> None:
    outcomes = run_ranks_to_end(_freezes_a_parameter_on_rank_1_alone, 2, group_timeout=4, timeout=60)
    for outcome in outcomes:
        if outcome.error is None:
            assert outcome.result[0] == "ok"
            assert "ok" not in outcome.result[1:], "went on with another step's or another parameter's values"
    told = [text for outcome in outcomes for text in (outcome.result or [outcome.error])]
    assert any("to take part in" in text for text in told), told
