"""What `tests.fuzz` has found in its campaigns, each as the smallest loop that shows it."""

import copy
import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

from ddp_zero import ZeroRedundancyOptimizer, hook_with_zero_step
from tests.fuzz.toys import ToyCoupled, ToyScheduleFree
from tests.multiproc.cases import Twins, assert_identical, step_on, sum_in_rank_order
from tests.multiproc.harness import Cases, Setup

case = Cases(group_timeout=20)

Groups = Callable[[nn.Module], Any]


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4), nn.Linear(4, 3))


def inputs_of(setup: Setup, step: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * setup.rank + step)
    return torch.randn(*(shape or (4, 6)), generator=generator)


def all_params(model: nn.Module) -> Any:
    return list(model.parameters())


class Wrapped(Twins):
    """Under DDP."""

    def __init__(
        self,
        build: Callable[..., Optimizer] = AdamW,
        groups: Groups = all_params,
        model: nn.Module | None = None,
        ddp_options: dict[str, Any] | None = None,
        zero_options: dict[str, Any] | None = None,
        **defaults: Any,
    ) -> None:
        self.zero_options = {"overlap_with_ddp": True, "parameters_as_bucket_view": True, **(zero_options or {})}
        self.ddp_options = {"gradient_as_bucket_view": True, "bucket_cap_mb": 1e-4, **(ddp_options or {})}
        model = mlp() if model is None else model
        self.plain_module, self.module = copy.deepcopy(model), model
        self.wrap()
        plain = build(groups(self.plain_module), **defaults)
        opt = ZeroRedundancyOptimizer(groups(self.module), build, **self.zero_options, **defaults)
        super().__init__(self.plain_model, self.model, plain, opt)
        self.register()

    def wrap(self) -> None:
        self.wrap_plain()
        self.model = DistributedDataParallel(self.module, **self.ddp_options)

    def wrap_plain(self) -> None:
        self.plain_model = DistributedDataParallel(self.plain_module, **self.ddp_options)
        if self.zero_options.get("stage") == 2 and dist.get_world_size() > 2:
            self.plain_model.register_comm_hook(None, sum_in_rank_order)

    def register(self) -> None:
        if self.opt.needs_hook:
            self.model.register_comm_hook(None, hook_with_zero_step(None, self.model, self.opt))

    def copy(self) -> None:
        self.plain_module, self.plain = copy.deepcopy((self.plain_module, self.plain))
        self.module, self.opt = copy.deepcopy((self.module, self.opt))
        for param in (*self.plain_module.parameters(), *self.module.parameters()):
            param.grad = None
        self.wrap()
        self.register()

    def refuses(self, setup: Setup, match: str) -> None:
        """A step of ours raises, and nothing has moved."""
        before = [param.detach().clone() for param in self.module.parameters()]
        loss = self.model(inputs_of(setup, 9)).square().mean()

        def backward_and_step() -> None:
            loss.backward()
            self.opt.step()

        with pytest.raises(RuntimeError, match=match):
            backward_and_step()
        assert_identical(before, [param.detach() for param in self.module.parameters()], "nothing has moved")

    def train(  # type: ignore[override]
        self, setup: Setup, steps: int, calls_step: bool = True, shape: tuple[int, ...] = (), clip: float | None = None
    ) -> None:
        for step in range(steps):
            for ddp, optimizer in self.sides:
                optimizer.zero_grad()
                ddp(inputs_of(setup, step, *shape)).square().mean().backward()
                if clip is not None and optimizer is self.plain:
                    nn.utils.clip_grad_norm_(self.plain_module.parameters(), clip)
                if calls_step or optimizer is self.plain:
                    optimizer.step()
            if calls_step or step:
                self.assert_equal(f"after step {step}")


@case(2, 3)
def _an_unused_parameter_added_to_a_static_graph_is_never_stepped(setup: Setup) -> None:
    """Its bucket holds zeros, which are no gradient: weight decay would move it."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.never = mlp(), nn.Parameter(torch.ones(3))

        def forward(self, inputs: Tensor) -> Any:
            return self.used(inputs)

    def used(model: nn.Module) -> Any:
        return [param for name, param in model.named_parameters() if name != "never"]

    twins = Wrapped(groups=used, model=Model(), ddp_options={"static_graph": True}, lr=0.1, weight_decay=0.5)
    twins.train(setup, 4)
    for module, optimizer in ((twins.plain_module, twins.plain), (twins.module, twins.opt)):
        optimizer.add_param_group({"params": [module.never]})
    twins.train(setup, 3)
    assert torch.equal(twins.module.get_parameter("never"), torch.ones(3))


@case(2, 3)
def _a_parameter_unfrozen_after_wrapping_is_refused_as_not_reduced(setup: Setup) -> None:
    """Otherwise the owner's own gradient would move it on all ranks."""
    modes: tuple[dict[str, Any], ...] = ({}, {"overlap_with_ddp": False})
    for zero_options in (*modes, *({"stage": 2, **mode} for mode in modes)):
        twins = Wrapped(zero_options=zero_options, lr=0.1)
        twins.train(setup, 2)
        twins.module.get_parameter("1.weight").requires_grad_(False)
        twins.plain_module.get_parameter("1.weight").requires_grad_(False)
        twins.wrap()
        twins.opt = ZeroRedundancyOptimizer(all_params(twins.module), AdamW, **twins.zero_options, lr=0.1)
        twins.plain = AdamW(twins.plain_module.parameters(), lr=0.1)
        twins.register()
        twins.train(setup, 3)
        twins.module.get_parameter("1.weight").requires_grad_(True)
        twins.opt.zero_grad()
        twins.refuses(setup, r"Expected averaged gradients, got this rank's own gradient of .*: DDP does not reduce it")
        del twins


@case(2, 3)
def _a_parameter_that_ddp_does_not_reduce_is_refused_where_it_reduces_as_many_others(setup: Setup) -> None:
    """A count of reduced parameters cannot tell: DDP reduces as many as the optimizer has, but not the same."""

    def middle(model: nn.Module) -> Any:
        return [model.get_parameter("1.weight"), model.get_parameter("1.bias")]

    for zero_options in ({}, {"overlap_with_ddp": False}):
        twins = Wrapped(groups=middle, zero_options=zero_options, lr=0.1)
        twins.module.get_parameter("1.weight").requires_grad_(False)
        twins.wrap()
        twins.opt = ZeroRedundancyOptimizer(middle(twins.module), AdamW, **twins.zero_options, lr=0.1)
        twins.register()
        twins.module.get_parameter("1.weight").requires_grad_(True)
        twins.refuses(setup, r"Expected averaged gradients, got this rank's own gradient of .*: DDP does not reduce it")
        del twins


@case(2, 3)
def _a_gradient_that_all_ranks_set_alike_is_stepped_and_one_that_differs_is_refused(setup: Setup) -> None:
    twins = Wrapped(lr=0.1)
    extra = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    for (_, optimizer), param in zip(twins.sides, extra, strict=True):
        optimizer.add_param_group({"params": [param]})
    for step in range(5):
        for (ddp, optimizer), param in zip(twins.sides, extra, strict=True):
            optimizer.zero_grad()
            param.grad = torch.full((3,), 0.5 * step)
            ddp(inputs_of(setup, step)).square().mean().backward()
            optimizer.step()
        twins.assert_equal(f"step {step}")
        assert_identical(extra[0], extra[1], "the extra parameter")
    assert not torch.equal(extra[1], torch.ones(3))
    extra[1].grad = torch.full((3,), float(setup.rank))
    twins.refuses(setup, "DDP does not reduce it")


@case(2, 3)
def _ranks_without_parameters_of_a_group_follow_its_options(setup: Setup) -> None:
    """One rank owns all of the group; options that its step computes must reach the others, and their state dicts."""
    modes: list[dict[str, Any]] = [{"overlap_with_ddp": False}, {}, {"stage": 2}, {"sync": "forward"}]
    modes += [mode | {"nonfinite": "skip"} for mode in modes[::2]]
    for zero_options in modes:
        twins = Wrapped(partial(ToyCoupled), model=nn.Linear(6, 3, bias=False), zero_options=zero_options, lr=0.1)
        if "nonfinite" in zero_options:  # the first step is decided against
            step_on(twins.opt, (twins.model(inputs_of(setup, 0)) * math.inf).sum())
        for _ in range(5):  # 20 steps: also those in which nobody looks
            twins.train(setup, 4)
            assert twins.opt.param_groups[0]["d"] == twins.plain.param_groups[0]["d"] != 1e-3
        twins.assert_same_state("state dict", to=setup.world_size - 1)


@case(2)
def _a_scheduled_tensor_learning_rate_without_opt_step_equals_ddp(setup: Setup) -> None:
    twins = Wrapped(lr=torch.tensor(0.1))
    twins.plain.param_groups[0]["lr"] = torch.tensor(0.1)  # of its own
    before = [param.detach().clone() for param in twins.module.parameters()]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for _, optimizer in twins.sides]
    for step in range(4):
        twins.train(setup, 1, calls_step=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, which misses opt.step()
            for scheduler in schedulers:
                scheduler.step()
        if step:
            twins.assert_equal(f"step {step}")
        assert_identical(twins.plain.param_groups[0]["lr"], twins.opt.param_groups[0]["lr"], "lr")
    twins.assert_moved(before)


@case(2, 3)
def _a_step_after_a_pass_in_no_sync_of_a_copied_model_is_refused(setup: Setup) -> None:
    """No hook sees that pass: a copy learns of its DDP model, which is wrapped later, at its first step."""
    twins = Wrapped(zero_options={"overlap_with_ddp": False}, lr=0.1)
    twins.train(setup, 2)
    twins.copy()
    before = [param.detach().clone() for param in twins.module.parameters()]
    with twins.model.no_sync():
        twins.model(inputs_of(setup, 9)).square().mean().backward()
    with pytest.raises(RuntimeError, match=r"Expected averaged gradients, got this rank's own .*no_sync"):
        twins.opt.step()
    assert_identical(before, [param.detach() for param in twins.module.parameters()], "nothing has moved")
    twins.train(setup, 3)
    twins.assert_moved(before)


def _join(twins: Wrapped, setup: Setup, counts: list[int], shape: tuple[int, ...] = ()) -> None:
    """Different numbers of iterations; the plain model of a rank with most of them is right."""
    for ddp, optimizer in twins.sides:
        with Join([ddp] if optimizer is twins.plain else [ddp, optimizer]):
            for step in range(counts[setup.rank]):
                optimizer.zero_grad()
                ddp(inputs_of(setup, step, *shape)).square().mean().backward()
                if optimizer is twins.plain and (limit := twins.zero_options.get("max_grad_norm")):
                    nn.utils.clip_grad_norm_(twins.plain_module.parameters(), limit)
                optimizer.step()
    if counts[setup.rank] == max(counts):
        twins.assert_equal("at the end of Join")


@case(2, 3)
def _join_in_the_first_iterations_of_a_channels_last_model_equals_ddp(setup: Setup) -> None:
    """Buckets are not known yet: ranks that have joined must send elements in the order of those that still train."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Conv2d(*size, 3, padding=1) for size in ((3, 1), (1, 4), (4, 3))))
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    twins = Wrapped(model=model, zero_options={"max_grad_norm": 0.1}, lr=0.1)
    before = [param.detach().clone() for param in twins.module.parameters()]
    _join(twins, setup, [0, 3, 1][: setup.world_size], (2, 3, 5, 5))
    twins.assert_moved(before)


@case(2)
def _a_memory_format_changed_before_the_first_pass_over_new_buckets_equals_ddp(setup: Setup) -> None:
    """DDP's buckets keep the strides of when they were built, and must be read by these."""
    for static_graph, steps in ((False, 1), (True, 2)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), nn.Conv2d(5, 4, 3, padding=1))
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        twins = Wrapped(SGD, model=model, ddp_options={"static_graph": static_graph}, lr=0.1)
        twins.train(setup, steps, shape=(2, 3, 5, 5))
        for ddp, optimizer in twins.sides:
            optimizer.zero_grad()
            ddp.module.to(memory_format=torch.contiguous_format)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of DDP, whose buckets have other strides
            twins.train(setup, 3, shape=(2, 3, 5, 5))
        del twins


@case(2)
def _a_group_added_after_a_changed_memory_format_equals_ddp(setup: Setup) -> None:
    """The new plan must keep the strides of DDP's buckets, not take those of the parameters now."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Conv2d(*size, 3, padding=1) for size in ((3, 5), (5, 4), (4, 4))))
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def first_two(module: nn.Module) -> Any:
        return list(module.parameters())[:4]

    twins = Wrapped(SGD, first_two, model, lr=0.1)
    twins.train(setup, 3, shape=(2, 3, 5, 5))
    for ddp, optimizer in twins.sides:
        optimizer.zero_grad()
        ddp.zero_grad()
        ddp.module.to(memory_format=torch.contiguous_format)
    before = [param.detach().clone() for param in twins.module.parameters()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of DDP, whose buckets have other strides
        twins.train(setup, 2, shape=(2, 3, 5, 5))
        for module, (ddp, optimizer) in zip((twins.plain_module, twins.module), twins.sides, strict=True):
            optimizer.zero_grad()
            ddp.zero_grad()
            optimizer.add_param_group({"params": list(module.parameters())[4:]})
        twins.train(setup, 3, shape=(2, 3, 5, 5))
    twins.assert_moved(before)


class _TakesFloats(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.bfloat16()


@case(2, 3)
def _a_changed_memory_format_equals_ddp_in_bf16_and_with_norms(setup: Setup) -> None:
    """Gradients must have the new strides: torch rounds bf16, and adds up norms, in the order of elements in memory.

    DDP's own reducer mixes up elements after the change, so the reference is wrapped again.
    """
    for options in ({}, {"max_grad_norm": 0.1}):
        torch.manual_seed(0)
        convolutions = nn.Conv2d(3, 5, 3, padding=1), nn.Conv2d(5, 4, 3, padding=1)
        model = nn.Sequential(*convolutions) if options else nn.Sequential(_TakesFloats(), *convolutions).bfloat16()
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        zero_options = {"stage": 2, "overlap_with_ddp": False, **options}
        twins = Wrapped(SGD, model=model, zero_options=zero_options, lr=0.1, momentum=0.9, weight_decay=0.5)
        shape, before = (2, 3, 5, 5), [param.detach().clone() for param in twins.module.parameters()]
        twins.train(setup, 2, shape=shape, clip=options.get("max_grad_norm"))
        for ddp, optimizer in twins.sides:
            optimizer.zero_grad()
            ddp.module.to(memory_format=torch.contiguous_format)
        twins.wrap_plain()
        twins.train(setup, 3, shape=shape, clip=options.get("max_grad_norm"))
        twins.assert_moved(before)
        del twins


@case(2)
def _a_changed_memory_format_of_cut_parameters_with_masters_is_refused(setup: Setup) -> None:
    """With the error of changed elements, not with that of a master that differs from its parameter."""
    torch.manual_seed(0)
    model = nn.Sequential(_TakesFloats(), nn.Conv2d(3, 20, 3, padding=1), nn.Conv2d(20, 4, 3, padding=1)).bfloat16()
    ddp = DistributedDataParallel(model)
    opt = ZeroRedundancyOptimizer(model.parameters(), AdamW, partition="elements", master_weights=True, lr=0.1)
    step_on(opt, ddp(inputs_of(setup, 0, 2, 3, 5, 5)).square().mean())
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of DDP, whose buckets have other strides
        ddp(inputs_of(setup, 1, 2, 3, 5, 5)).square().mean().backward()
    with pytest.raises(RuntimeError, match=r"Expected the elements of .*ZERO-114"):
        opt.step()


@case(2, 3)
def _a_step_after_an_exception_and_a_pass_in_no_sync_is_refused(setup: Setup) -> None:
    """The interrupted forward pass must not count as one whose gradients DDP averages; the new model is watched."""
    for calls_attach in (True, False):
        twins = Wrapped(zero_options={"overlap_with_ddp": False}, lr=0.1)
        twins.train(setup, 9)  # from here on ranks no longer compare gradients in every step
        last = twins.model.module[2]
        handle = last.weight.register_hook(_fail) if calls_attach else last.register_forward_hook(_fail)
        with pytest.raises(ZeroDivisionError):
            twins.model(inputs_of(setup, 0)).square().mean().backward()
        handle.remove()
        twins.opt.reset()
        twins.opt.zero_grad()
        twins.wrap()
        if calls_attach:
            twins.opt.attach(twins.model)
        before = [param.detach().clone() for param in twins.module.parameters()]
        with twins.model.no_sync():
            twins.model(inputs_of(setup, 1)).square().mean().backward()
        with pytest.raises(RuntimeError, match="Expected averaged gradients"):
            twins.opt.step()
        assert_identical(before, [param.detach() for param in twins.module.parameters()], "nothing has moved")
        twins.opt.zero_grad()
        twins.train(setup, 2)


def _fail(*_: object) -> None:
    raise ZeroDivisionError


@case(2, 3)
def _join_after_a_skipped_step_equals_ddp(setup: Setup) -> None:
    """The skipped step must leave no comparison of options open: it would meet messages of ranks that have joined."""
    for zero_options in ({"stage": 2, "overlap_with_ddp": False}, {}):
        twins = Wrapped(zero_options={"max_grad_norm": 0.1, **zero_options}, lr=0.1)
        before = [param.detach().clone() for param in twins.module.parameters()]
        twins.opt.zero_grad()
        (twins.model(inputs_of(setup, 0)).square().mean() * (float("nan") if setup.rank == 0 else 1.0)).backward()
        twins.opt.step()
        assert twins.opt.last_step is not None
        assert not twins.opt.last_step.stepped
        if setup.world_size == 2:  # where stage 2 sums as DDP does
            _join(twins, setup, [0, 4])
        else:
            _join(twins, setup, [0, 4, 2])
        twins.assert_moved(before)
        del twins


@case(2)
def _eval_and_train_of_the_inner_class_without_opt_step_equal_ddp(setup: Setup) -> None:
    twins = Wrapped(ToyScheduleFree, lr=0.1)
    twins.train(setup, 4, calls_step=False)
    for _, optimizer in twins.sides:
        optimizer.eval()
    twins.assert_equal("averages")
    for _, optimizer in twins.sides:
        optimizer.train()
    twins.train(setup, 3, calls_step=False)


@case(2, 3)
def _a_state_that_eval_creates_comes_after_those_of_the_step_in_the_state_dict(setup: Setup) -> None:
    model = mlp()
    model.get_parameter("1.weight").requires_grad_(False)
    twins = Wrapped(ToyScheduleFree, model=model, lr=0.1)
    twins.train(setup, 2)
    for _, optimizer in twins.sides:
        optimizer.eval()  # looks up the state of the frozen parameter, too
        optimizer.train()
    twins.train(setup, 2)
    twins.opt.consolidate_state_dict()
    if setup.rank == 0:
        expected, found = twins.plain.state_dict()["state"], twins.opt.state_dict()["state"]
        assert list(found) == list(expected) == [0, 1, 3, 4, 5, 2]


@case(2)
def _a_pass_without_opt_step_after_wrapping_again_is_dropped_as_in_ddp(setup: Setup) -> None:
    """The loop has called ``step()`` before: the new hook must not take the omitted step at the next pass."""
    twins = Wrapped(SGD, lr=0.1)
    twins.train(setup, 4)
    twins.opt.reset()
    twins.wrap()
    twins.register()
    for ddp, optimizer in twins.sides:
        optimizer.zero_grad()
        ddp(inputs_of(setup, 7)).square().mean().backward()
    twins.train(setup, 4)


@case(2)
def _the_first_step_of_a_copy_compares_gradients_that_are_views_of_one_bucket(setup: Setup) -> None:
    twins = Wrapped(zero_options={"overlap_with_ddp": False}, ddp_options={"bucket_cap_mb": 25}, lr=0.1)
    twins.train(setup, 2)
    twins.copy()  # a bucket of 25 MB holds them all
    assert {param.grad for param in twins.module.parameters()} == {None}
    before = [param.detach().clone() for param in twins.module.parameters()]
    twins.train(setup, 2)
    twins.assert_moved(before)


@case(2)
def _refresh_master_weights_between_backward_and_step_is_refused(setup: Setup) -> None:
    """The step inside backward was taken from the old masters."""
    twins = Wrapped(model=mlp().bfloat16(), zero_options={"master_weights": True}, lr=0.1)
    for step in range(3):
        twins.opt.zero_grad()
        twins.model(inputs_of(setup, step).bfloat16()).square().mean().backward()
        twins.opt.step()
    twins.model(inputs_of(setup, 4).bfloat16()).square().mean().backward()
    with pytest.raises(
        RuntimeError, match=r"opt\.refresh_master_weights\(\) between backward\(\) and opt\.step\(\) comes too late"
    ):
        twins.opt.refresh_master_weights()
    twins.opt.step()
    twins.opt.refresh_master_weights()


@case(2)
def _an_empty_parameter_between_others_in_flat_storage_or_not_equals_ddp(setup: Setup) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.empty, self.last = nn.Linear(6, 5), nn.Parameter(torch.empty(0, 3)), nn.Linear(5, 3)

        def forward(self, inputs: Tensor) -> Any:
            return self.last(self.first(inputs)) + self.empty.sum()

    for as_views in (True, False):
        twins = Wrapped(SGD, model=Model(), zero_options={"parameters_as_bucket_view": as_views}, lr=0.1)
        before = [param.detach().clone() for param in twins.module.parameters()]
        twins.train(setup, 4)
        twins.assert_moved(before)


test_fuzzed = case.each()
