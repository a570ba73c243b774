"""Gradients that nothing has averaged never step a DDP model, whatever the mode; without any, the user is told.

Gradients that no reduction is known to have averaged may step once the ranks have seen that theirs are equal: users
may average by hand.
"""

import re
import warnings
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_wrapper
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from ddp_zero import ZeroRedundancyOptimizer, hook_with_zero_step, shard_optimizer
from tests.multiproc.cases import Twins, assert_identical, batches, build_model, loss_of, step_on
from tests.multiproc.harness import Cases, Setup
from tests.pairwise import Modes, every_other

REFUSED = r"\[ZERO-30[128]\]"
"""The codes of gradients that were not averaged, of a pass that DDP has not ended, and of a pass around the model."""

TOLD = r"own gradient of parameter 0 .*no DDP model of this process has the parameters.*\[ZERO-325\]$"
"""A warning, which is an error here, before anything is stepped."""

MODES: dict[str, dict[str, Any]] = {
    "standalone": {},
    "stage 1": {"stage": 1},
    "stage 1 waiting": {"stage": 1, "overlap": False},
    "stage 1 clipped": {"stage": 1, "max_grad_norm": 1e9},
    "stage 1 clipped waiting": {"stage": 1, "max_grad_norm": 1e9, "overlap": False},
    "stage 1 cut": {"stage": 1, "partition": "elements"},
    "stage 1 cut waiting": {"stage": 1, "partition": "elements", "overlap": False},
    "stage 1 late": {"stage": 1, "sync": "forward"},
    "stage 1 late waiting": {"stage": 1, "sync": "forward", "overlap": False},
    "stage 1 in fp32": {"stage": 1, "accumulate_in_fp32": True},
    "stage 1 in fp32 waiting": {"stage": 1, "accumulate_in_fp32": True, "overlap": False},
    "stage 2": {"stage": 2},
    "stage 2 waiting": {"stage": 2, "overlap": False},
    "stage 2 clipped": {"stage": 2, "max_grad_norm": 1e9},
    "stage 2 cut": {"stage": 2, "partition": "elements"},
    "stage 2 cut waiting": {"stage": 2, "partition": "elements", "overlap": False},
    "stage 2 late": {"stage": 2, "sync": "forward"},
}
GOOD_STEPS = (0, 1, 3, 6)
"""How many steps come before the first whose gradients nothing has averaged."""
OPTIONS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}

case = Cases(group_timeout=20)


def averaged(plain_model: nn.Module, model: nn.Module, opt: ZeroRedundancyOptimizer) -> Twins:
    """By DDP, by the loop, or by nothing."""
    return Twins(plain_model, model, torch.optim.AdamW(plain_model.parameters(), **OPTIONS), opt)


def assert_refused(
    where: str,
    twins: Twins,
    forward: nn.Module,
    average: Callable[[nn.Module], object] = lambda _: None,
    match: str = REFUSED,
) -> None:
    """An iteration that nothing averages is refused, and changes nothing on any rank."""
    before = twins.values()
    twins.opt.zero_grad()
    try:
        loss_of(forward, *_of_dtype(forward, next(twins.feed))).backward()
        average(twins.model)
        twins.opt.step()
    except (RuntimeError, UserWarning) as error:
        text = f"{where}: {error}"
        assert re.search(match, text), text
        assert "rank " in text, text
    else:
        raise AssertionError(f"{where}: stepped by gradients that nothing has averaged")
    assert_identical(before, twins.values(), f"{where}: unchanged")
    twins.opt.zero_grad()


def _of_dtype(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    dtype = next(model.parameters()).dtype
    return batch[0].to(dtype), batch[1].to(dtype)


def _in_ddp(mode: str) -> Twins:
    models = [
        DistributedDataParallel(build_model(), gradient_as_bucket_view=True, bucket_cap_mb=0.0015) for _ in range(2)
    ]
    if MODES[mode]:
        opt = shard_optimizer(models[1], torch.optim.AdamW, **MODES[mode], **OPTIONS)
    else:
        opt = ZeroRedundancyOptimizer(models[1].parameters(), torch.optim.AdamW, **OPTIONS)
    return averaged(models[0], models[1], opt)


def _alone(**options: Any) -> Twins:
    """Models that are in no DDP."""
    models = [build_model(), build_model()]
    return averaged(
        models[0], models[1], ZeroRedundancyOptimizer(models[1].parameters(), torch.optim.AdamW, **OPTIONS, **options)
    )


def of_model(average: Callable[[nn.Module], object]) -> Callable[..., object]:
    return lambda model, _: average(model)


def average_each(model: nn.Module) -> None:
    """One all-reduce per parameter, as scripts without DDP do it."""
    for param in model.parameters():
        if param.grad is not None:
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()


def average_all(model: nn.Module) -> None:
    """One all-reduce of a flat copy."""
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    flat = torch.cat([grad.reshape(-1) for grad in grads])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(part.view_as(grad))


DROP_IN: dict[str, dict[str, Any]] = {
    "plain": {},
    "cut": {"partition": "elements"},
    "clipped": {"max_grad_norm": 1e9},
    "late": {"sync": "forward", "parameters_as_bucket_view": True},
    "checked": {"nonfinite": "raise"},
}


# Without DDP


@case(2, 3)
def _gradients_of_a_model_without_ddp_are_refused(setup: Setup) -> None:
    for name, options in DROP_IN.items():
        twins = _alone(**options)
        assert_refused(name, twins, twins.model, match=TOLD)


@case(2, 3, few=every_other(DROP_IN), every=DROP_IN)
def _each_parameter_is_stepped_by_its_owners_gradient_alone(setup: Setup, configurations: Modes) -> None:
    """As torch's ZeroRedundancyOptimizer does without DDP; told in the first step, and at powers of two."""
    for name, options in configurations.items():
        twins = _alone(**options)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for batch in batches(setup.rank, 9):
                for model, opt in twins.sides:
                    loss_of(model, *batch).backward()
                    opt.step()  # the line that is named below
                    opt.zero_grad()
                if name == "cut":
                    continue
                for plain, param in zip(twins.plain_model.parameters(), twins.model.parameters(), strict=True):
                    dist.broadcast(plain.data, twins.opt.owner_of(param))
                twins.assert_equal(name)
        assert [re.findall(r"in step (\d+)", str(one.message)) for one in told] == [["1"], ["2"], ["4"], ["8"]]
        assert {one.filename for one in told} == {__file__}
        twins.assert_moved()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*ZERO-325")  # as the message says
        loss_of(twins.model, *next(twins.feed)).backward()
        twins.opt.step()


@case(2)
def _a_ddp_model_that_comes_later_must_average(setup: Setup) -> None:
    twins = _alone()
    assert_refused("without DDP", twins, twins.model, match=TOLD)
    twins.model = DistributedDataParallel(twins.model)
    assert_refused("around DDP", twins, twins.model.module)
    twins.plain_model = DistributedDataParallel(twins.plain_model)
    twins.go_on(3)
    twins.assert_moved()


@case(2)
def _every_step_is_refused_until_the_loop_averages(setup: Setup) -> None:
    twins = _alone()
    for attempt in range(3):
        assert_refused(f"attempt {attempt}", twins, twins.model, match=TOLD)
    twins = _alone()
    assert_refused("before averaging", twins, twins.model, match=TOLD)
    twins.go_on(3, between=of_model(average_each))
    twins.assert_moved()


@case(2, 3)
def _gradients_averaged_by_hand_equal_ddp(setup: Setup) -> None:
    for average in (average_each, average_all):
        for options in DROP_IN.values():
            twins = _alone(**options)
            twins.go_on(6, between=of_model(average))
            twins.assert_moved()


@case(2)
def _a_step_without_the_averaging_of_earlier_steps_is_refused(setup: Setup) -> None:
    for steps, (name, options) in product(GOOD_STEPS[1:], DROP_IN.items()):
        twins = _alone(**options)
        twins.go_on(steps, between=of_model(average_each))
        assert_refused(f"{name} after {steps} steps", twins, twins.model, match=TOLD)


@case(2)
def _a_step_with_one_parameter_left_unaveraged_is_refused(setup: Setup) -> None:
    def average_others(model: nn.Module) -> None:
        for param in list(model.parameters())[:-1]:
            assert param.grad is not None
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()

    for steps in (0, 3):
        twins = _alone()
        twins.go_on(steps, between=of_model(average_each))
        told = TOLD.replace("parameter 0", r"parameter \d")
        assert_refused(f"after {steps} steps", twins, twins.model, average_others, told)


@case(2)
def _gradients_of_the_same_data_on_all_ranks_are_stepped_without_averaging(setup: Setup) -> None:
    twins = _alone()
    twins.feed = batches(0, 100)
    twins.go_on(6)
    twins.assert_moved()


@case(2)
def _a_model_wrapped_after_the_optimizer_was_built_equals_ddp(setup: Setup) -> None:
    twins = _alone()
    twins.plain_model = DistributedDataParallel(twins.plain_model)
    twins.model = DistributedDataParallel(twins.model)
    twins.go_on(6)
    twins.assert_moved()


@case(1)
def _one_rank_trains_without_ddp_as_the_plain_optimizer(setup: Setup) -> None:
    for options in DROP_IN.values():
        twins = _alone(**options)
        twins.go_on(4)
        twins.assert_moved()
    for mode in ("standalone", "stage 1 waiting", "stage 1 cut waiting"):
        twins = _in_ddp(mode)
        assert isinstance(twins.model, DistributedDataParallel)
        assert isinstance(twins.plain_model, DistributedDataParallel)
        twins.plain_model, twins.model = twins.plain_model.module, twins.model.module
        twins.go_on(4)
        twins.assert_moved()


# Around DDP


@case(
    2,
    few=[(mode, GOOD_STEPS[place % len(GOOD_STEPS)]) for place, mode in enumerate(MODES)],
    every=[(mode, steps) for mode in MODES for steps in GOOD_STEPS],
)
def _a_pass_through_the_module_inside_ddp_is_refused(setup: Setup, configurations: list[tuple[str, int]]) -> None:
    for mode, steps in configurations:
        twins = _in_ddp(mode)
        twins.go_on(steps)
        assert_refused(f"{mode} after {steps} steps", twins, twins.model.module)


@case(2)
def _a_loop_trains_through_ddp_as_the_plain_one_after_a_refusal(setup: Setup) -> None:
    for mode in ("standalone", "stage 1 waiting", "stage 2 waiting", "stage 1 cut waiting"):
        twins = _in_ddp(mode)
        twins.go_on(3)
        assert_refused(mode, twins, twins.model.module)
        twins.go_on(3)


@case(2)
def _a_pass_through_parts_of_the_module_without_ddp_is_refused(setup: Setup) -> None:
    """Between two passes through DDP, a part of the model is called alone, as an auxiliary loss."""
    for mode, steps in product(("standalone", "stage 1 waiting", "stage 2 waiting"), (0, 3)):
        twins = _in_ddp(mode)
        twins.go_on(steps)
        inner = twins.model.module
        assert isinstance(inner, nn.Sequential)
        assert_refused(f"{mode} after {steps} steps", twins, nn.Sequential(*inner))


@case(2)
def _a_step_after_the_ddp_model_was_dropped_is_refused(setup: Setup) -> None:
    for steps in (0, 3):
        twins = _in_ddp("standalone")
        twins.go_on(steps)
        twins.model = twins.model.module
        assert_refused(f"after {steps} steps", twins, twins.model)


@case(2)
def _a_step_after_the_dtype_of_a_wrapped_model_has_changed_is_refused(setup: Setup) -> None:
    """DDP loses its hooks on the gradients: its ranks diverge, without a word."""
    modes = ("standalone", "stage 1", "stage 1 waiting", "stage 1 clipped", "stage 2", "stage 2 waiting")
    for mode, steps in product(modes, (0, 3)):
        twins = _in_ddp(mode)
        twins.go_on(steps)
        twins.model.module.double()
        assert_refused(f"{mode} after {steps} steps", twins, twins.model)


@case(2)
def _a_parameter_frozen_after_wrapping_is_named(setup: Setup) -> None:
    """DDP waits for its gradient, since it does not look for unused parameters."""
    for mode in MODES:
        twins = _in_ddp(mode)
        twins.go_on(2)
        next(twins.model.parameters()).requires_grad_(False)
        loss_of(twins.model, *next(twins.feed)).backward()
        with pytest.raises(RuntimeError, match=r"No gradient for parameter 0.*freeze the parameter before.*ZERO-301"):
            twins.opt.step()


# Communication hooks


def stopping(last: int) -> Any:
    """A communication hook that averages in its first iterations and not later, as torch's `post_localSGD_hook`."""
    iteration, group = 0, dist.group.WORLD
    assert group is not None

    def hook(_: Any, bucket: Any) -> Any:
        nonlocal iteration
        iteration += bucket.is_last()
        if iteration - bucket.is_last() < last:
            return allreduce_hook(group, bucket)
        local: torch.futures.Future[Tensor] = torch.futures.Future()
        local.set_result(bucket.buffer())
        return local

    return hook


HOOKED: dict[str, dict[str, Any]] = {
    **{name: mode for name, mode in MODES.items() if mode.get("stage") == 1},
    "interleaved": {"interleaved": True},
    "whole buckets": {"shard_buckets": False},
    "masters": {"master_weights": True},
}


def _hooked(mode: dict[str, Any], last: int, **ddp_options: Any) -> Twins:
    models = [DistributedDataParallel(build_model(), bucket_cap_mb=0.0015, **ddp_options) for _ in range(2)]
    models[0].register_comm_hook(dist.group.WORLD, allreduce_hook)
    opt = shard_optimizer(models[1], torch.optim.AdamW, hook=stopping(last), **mode, **OPTIONS)
    return averaged(models[0], models[1], opt)


@case(3, few=[({}, 5)], every=[({"static_graph": True}, 1), ({"find_unused_parameters": True}, 2), ({}, 15)])
def _a_hook_that_stops_averaging_is_refused(setup: Setup, configurations: list[tuple[dict[str, Any], int]]) -> None:
    for (ddp_options, last), (name, mode) in product(configurations, HOOKED.items()):
        twins = _hooked(mode, last, **ddp_options)
        twins.go_on(last)
        hook = r"communication hook does not average.*\[ZERO-302\]$"
        assert_refused(f"{name} {ddp_options} after {last} steps", twins, twins.model, match=hook)
        # both anew: until DDP rebuilds its buckets, a ring of three ranks sums in another order
        twins.plain_model, twins.model = (
            DistributedDataParallel(model.module, bucket_cap_mb=0.0015) for model in (twins.plain_model, twins.model)
        )
        twins.plain_model.register_comm_hook(dist.group.WORLD, allreduce_hook)
        twins.opt.reset()
        twins.opt.zero_grad()
        twins.opt.attach(twins.model, hook=stopping(99))
        twins.go_on(2)
        twins.assert_moved()


@case(2)
def _a_hook_that_stops_averaging_under_join_is_refused(setup: Setup) -> None:
    for mode in ({}, {"interleaved": True}, {"max_grad_norm": 1e9}):
        twins = _hooked(mode, 2)
        with pytest.raises(RuntimeError, match=r"communication hook does not average.*\[ZERO-302\]$"):
            _train_under_join(twins, setup)


def _train_under_join(twins: Twins, setup: Setup) -> None:
    with Join([twins.model, twins.opt]):
        for batch in batches(setup.rank, 6 - setup.rank):
            step_on(twins.opt, loss_of(twins.model, *batch))


@case(2)
def _hooks_of_torch_that_cannot_work_are_refused(setup: Setup) -> None:
    local = PostLocalSGDState(None, None, start_localSGD_iter=100)
    refused = partial(pytest.raises, NotImplementedError, match=r"torch's (noop|post_localSGD)_hook.*\[ZERO-217\]$")
    hooks = [(None, noop_hook), (local, post_localSGD_hook), (local, fp16_compress_wrapper(post_localSGD_hook))]
    for (state, hook), options in product(hooks, ({}, {"overlap": False}, {"accumulate_in_fp32": True})):
        with refused():
            shard_optimizer(DistributedDataParallel(build_model()), SGD, hook=hook, hook_state=state, **options)
    for state, hook in hooks:
        ddp = DistributedDataParallel(build_model())
        opt = ZeroRedundancyOptimizer(ddp.parameters(), SGD, overlap_with_ddp=True)
        with refused():
            hook_with_zero_step(hook, ddp, opt)
        with refused():
            opt.attach(ddp, hook=partial(hook), hook_state=state)
        opt.attach(ddp, hook=fp16_compress_wrapper(allreduce_hook), hook_state=dist.group.WORLD)
        ddp = DistributedDataParallel(build_model())
        late = ZeroRedundancyOptimizer(ddp.parameters(), SGD)
        ddp.register_comm_hook(state, hook)
        with refused():
            ZeroRedundancyOptimizer(ddp.parameters(), SGD)
        with refused():
            shard_optimizer(ddp, SGD, overlap=False)
        loss_of(ddp, *next(batches(0, 1))).backward()
        with refused():
            late.step()


# Partly in DDP


class Trunk(nn.Module):
    """A DDP model, and a head beside it that is averaged by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 3)
        self.trunk = DistributedDataParallel(build_model())

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.trunk(inputs)))
        return out


def _partly(**options: Any) -> Twins:
    torch.manual_seed(0)
    model = Trunk()
    torch.manual_seed(0)
    plain_model = Trunk()
    opt = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **OPTIONS, **options)
    return averaged(plain_model, model, opt)


def average_head(model: nn.Module) -> None:
    assert isinstance(model, Trunk)
    average_each(model.head)


@case(2, 3)
def _a_head_outside_ddp_averaged_by_hand_equals_ddp(setup: Setup) -> None:
    for options in DROP_IN.values():
        twins = _partly(**options)
        twins.go_on(6, between=of_model(average_head))
        twins.assert_moved()


@case(2)
def _a_head_outside_ddp_that_is_not_averaged_is_refused(setup: Setup) -> None:
    for steps in GOOD_STEPS:
        twins = _partly()
        twins.go_on(steps, between=of_model(average_head))
        assert_refused(f"after {steps} steps", twins, twins.model)


@case(2)
def _a_pass_around_a_trunk_in_ddp_is_refused(setup: Setup) -> None:
    for steps in (0, 3):
        twins = _partly()
        twins.go_on(steps, between=of_model(average_head))
        assert isinstance(twins.model, Trunk)
        around = nn.Sequential(twins.model.trunk.module, nn.Tanh(), twins.model.head)
        assert_refused(f"after {steps} steps", twins, around, average_head)


test_unaveraged = case.each()
