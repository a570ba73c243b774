"""Any parameters (dtypes, shapes, frozen, moved, tied, without gradient): equal to DDP with the plain optimizer."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_zero import ZeroRedundancyOptimizer
from ddp_zero.core.step import rank_shard as binding
from tests import internals
from tests.multiproc.cases import LooseTwins, Twins, assert_identical, build_model, build_twins, optimizer_case
from tests.multiproc.harness import Cases, Setup

case = Cases()

ADAMW = optimizer_case("AdamW foreach")
BOTH_STORAGES = (False, True)


@case(1, 3)
def _mixed_dtypes_shapes_and_missing_gradients_equal_the_plain_optimizer(setup: Setup) -> None:
    tensors = [
        torch.randn(7, 5),
        torch.randn(33, dtype=torch.bfloat16),
        torch.randn(3, 3, dtype=torch.complex64),
        torch.randn(0, 4),
        torch.randn((), dtype=torch.float64),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.randn(6, 5).t(),
        torch.randn(40, dtype=torch.float16),
    ]
    for tensor in tensors:
        dist.broadcast(torch.view_as_real(tensor) if tensor.is_complex() else tensor.contiguous(), src=0)
    for as_views in BOTH_STORAGES:
        torch.manual_seed(0)
        same = [torch.randn_like(tensor) for tensor in tensors]
        strides = [tensor.stride() for tensor in same]
        twins = LooseTwins(same, as_views=as_views, lr=0.1, foreach=False)
        for step in range(4):
            twins.step_from(step, skip=(0, 3) if step == 1 else (step,))
        assert [param.stride() for param in twins.params] == strides
        assert all(not torch.equal(p, s) for p, s in zip(twins.params, same, strict=True) if p.numel())


@case(1, 3)
def _ranks_without_parameters_have_no_state(setup: Setup) -> None:
    for as_views in BOTH_STORAGES:
        torch.manual_seed(0)
        twins = LooseTwins([torch.randn(4, 4)], as_views=as_views, lr=0.1)
        for step in range(3):
            twins.step_from(step)
        assert len(twins.opt.state) == (1 if setup.rank == 0 else 0)
        assert len(twins.opt.optim.param_groups) == 1


@case(1, 3)
def _a_parameter_with_most_elements_has_an_owner_of_its_own(setup: Setup) -> None:
    for as_views in BOTH_STORAGES:
        torch.manual_seed(0)
        twins = LooseTwins(
            [torch.randn(5), torch.randn(900), torch.randn(40), torch.randn(50)], as_views=as_views, lr=0.1
        )
        for step in range(3):
            twins.step_from(step)
        big = twins.params[1]
        assert (big in twins.opt.state) is (setup.rank == 0)
        owned = {1: [4], 3: [1, 1, 2]}[setup.world_size][setup.rank]
        assert len(twins.opt.state) == len(twins.opt.optim.param_groups[0]["params"]) == owned


class TiedModel(nn.Module):
    """An embedding whose weight is also the output layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 6)
        self.body = nn.Linear(6, 6)
        self.head = nn.Linear(6, 8, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(self.table(tokens)))
        return logits


@case(1, 3)
def _tied_weights_equal_ddp_and_stay_tied(setup: Setup) -> None:
    for as_views in BOTH_STORAGES:
        torch.manual_seed(0)
        twins = build_twins(ADAMW, model=TiedModel(), parameters_as_bucket_view=as_views)
        for step in range(4):
            tokens = torch.arange(8).roll(setup.rank + step)
            for model, optimizer in twins.sides:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(tokens), tokens.flip(0)).backward()
                optimizer.step()
            twins.assert_equal(f"after step {step}")
        assert twins.model.module.head.weight is twins.model.module.table.weight
        twins.assert_moved()


@case(1, 3)
def _frozen_parameters_are_not_sent_and_step_again_once_unfrozen(setup: Setup) -> None:
    binding.BUCKET_CAP_BYTES = 64
    for as_views in BOTH_STORAGES:
        torch.manual_seed(0)
        tensors = [torch.randn(size) for size in (30, 20, 10, 8, 6, 4)]
        twins = LooseTwins(tensors, as_views=as_views, lr=0.1)
        for model_params in (twins.plain_params, twins.params):
            for param in model_params[:3]:
                param.requires_grad_(False)
        twins.opt = ZeroRedundancyOptimizer(twins.params, torch.optim.AdamW, parameters_as_bucket_view=as_views, lr=0.1)
        twins.step_from(0)
        sent_before = int(twins.opt.stats()["total_sent_bytes"])
        twins.step_from(1)
        per_step = int(twins.opt.stats()["total_sent_bytes"]) - sent_before
        assert "frozen: 3 parameters" in twins.opt.explain()
        for model_params in (twins.plain_params, twins.params):
            model_params[1].requires_grad_(True)
            model_params[4].requires_grad_(False)
            model_params[4].grad = None
        twins.step_from(2)
        twins.step_from(3)
        for model_params in (twins.plain_params, twins.params):
            for param in model_params:
                param.requires_grad_(True)
        twins.step_from(4)
        assert not torch.equal(twins.params[0], tensors[0])
        total = torch.tensor([float(per_step)])
        dist.all_reduce(total)
        assert total.item() == (8 + 6 + 4) * 4 * (setup.world_size - 1), "frozen parameters travelled"


@case(1, 3)
def _a_frozen_parameter_with_a_gradient_is_stepped_as_torch_does(setup: Setup) -> None:
    torch.manual_seed(0)
    twins = LooseTwins([torch.randn(6), torch.randn(5)], as_views=True, lr=0.1)
    twins.step_from(0)
    for params in (twins.plain_params, twins.params):
        params[0].requires_grad_(False)
    twins.plain.step()
    twins.opt.step()
    for one, other in zip(twins.plain_params, twins.params, strict=True):
        assert_identical(one, other, "parameter")


@case(1, 3)
def _parameters_in_new_memory_equal_ddp(setup: Setup) -> None:
    for as_views in BOTH_STORAGES:
        twins = build_twins(optimizer_case("SGD momentum"), parameters_as_bucket_view=as_views)
        twins.train(setup, 3)
        for model in (twins.plain_model, twins.model):
            for param in model.parameters():
                param.data = param.data * 0.5  # new memory
        twins.train(setup, 3, seed=1)
        for model in (twins.plain_model, twins.model):
            model.load_state_dict({key: value + 0.25 for key, value in model.state_dict().items()})
        twins.train(setup, 3, seed=2)
        twins.assert_moved()


@case(1, 3)
def _parameters_of_a_changed_dtype_equal_the_plain_optimizer(setup: Setup) -> None:
    for as_views in BOTH_STORAGES:
        torch.manual_seed(0)
        twins = LooseTwins([torch.randn(9, 3), torch.randn(4), torch.randn(12)], as_views=as_views, lr=0.1)
        twins.step_from(0)
        for params, optimizer in ((twins.plain_params, twins.plain), (twins.params, twins.opt.optim)):
            for param in params:
                param.grad = None
                param.data = param.data.double()
                for key, value in optimizer.state.get(param, {}).items():
                    if value.dim():
                        optimizer.state[param][key] = value.double()
        twins.step_from(1)
        assert twins.params[0].dtype is torch.float64


@case(1, 3)
def _groups_added_between_steps_equal_ddp_and_keep_owners(setup: Setup) -> None:
    binding.BUCKET_CAP_BYTES = 400
    for as_views in BOTH_STORAGES:
        model = build_model()
        plain_model, sharded = DistributedDataParallel(copy.deepcopy(model)), DistributedDataParallel(model)
        first, second = list(plain_model.parameters()), list(sharded.parameters())
        plain = torch.optim.AdamW(first[:3], lr=0.01)
        opt = ZeroRedundancyOptimizer(second[:3], torch.optim.AdamW, parameters_as_bucket_view=as_views, lr=0.01)
        twins = Twins(plain_model, sharded, plain, opt)
        twins.train(setup, 2)
        owners = internals.owners_of(opt)
        plain.add_param_group({"params": first[3:5], "lr": 0.02})
        opt.add_param_group({"params": second[3:5], "lr": 0.02})
        twins.train(setup, 2, seed=1)
        plain.add_param_group({"params": first[5:], "weight_decay": 0.3})
        opt.add_param_group({"params": second[5:], "weight_decay": 0.3})
        twins.train(setup, 3, seed=2)
        assert internals.owners_of(opt)[:3] == owners
        assert len(opt.optim.param_groups) == 3
        with pytest.raises(ValueError, match=r"Expected every parameter in one group.*ZERO-108"):
            opt.add_param_group({"params": second[:1]})
        assert len(opt.param_groups) == len(opt.optim.param_groups) == 3
        twins.train(setup, 2, seed=3)
        twins.assert_moved()


@case(1, 3)
def _schedulers_and_changed_options_equal_ddp(setup: Setup) -> None:
    def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.05, 0.02], total_steps=12)

    for as_views in BOTH_STORAGES:
        twins = build_twins(ADAMW, groups=2, parameters_as_bucket_view=as_views)
        schedulers = [schedule(twins.plain), schedule(twins.opt)]

        def after_step(step: int, twins: Twins = twins, schedulers: list[Any] = schedulers) -> None:
            for optimizer, scheduler in zip((twins.plain, twins.opt), schedulers, strict=True):
                scheduler.step()
                if step == 3:
                    optimizer.param_groups[1]["weight_decay"] = 0.5
                if step == 5:
                    optimizer.param_groups[0]["eps"] = 1e-3
                    optimizer.param_groups[0]["note"] = "mine"
            _assert_same_options(twins)

        twins.train(setup, 10, after_step=after_step)
        assert twins.opt.optim.param_groups[0]["note"] == "mine"
        twins.assert_moved()

    others: list[tuple[str, dict[str, Any]]] = [
        ("ReduceLROnPlateau", {"patience": 0}),
        ("CosineAnnealingWarmRestarts", {"T_0": 3}),
        ("ExponentialLR", {"gamma": 0.9}),
    ]
    for name, options in others:
        twins = build_twins(optimizer_case("SGD momentum"), groups=2)
        schedulers = [getattr(torch.optim.lr_scheduler, name)(o, **options) for o in (twins.plain, twins.opt)]

        def step_schedulers(step: int, name: str = name, schedulers: list[Any] = schedulers) -> None:
            for scheduler in schedulers:
                scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))

        twins.train(setup, 5, after_step=step_schedulers)
        _assert_same_options(twins)
        assert twins.opt.param_groups[0]["lr"] != 0.05


def _assert_same_options(twins: Twins) -> None:
    for plain, exposed in zip(twins.plain.param_groups, twins.opt.param_groups, strict=True):
        expected, actual = ({k: v for k, v in group.items() if k != "params"} for group in (plain, exposed))
        assert expected == actual


@case(1, 3)
def _sparse_gradients_are_refused_on_every_rank(setup: Setup) -> None:
    model = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 2))
    names = dict(model.named_parameters())
    opt = ZeroRedundancyOptimizer(names.items(), torch.optim.SGD, lr=0.1)
    model(torch.arange(8)).sum().backward()
    with pytest.raises(NotImplementedError, match=r"dense gradients.*parameter 0 '0.weight'"):
        opt.step()


test_parameters = case.each()
