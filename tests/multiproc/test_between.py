"""What a loop does between ``backward()`` and ``opt.step()``, and gradients that nothing has averaged."""

import copy
import gc
import re
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ddp_zero import ZeroRedundancyOptimizer, hook_with_zero_step, shard_optimizer
from tests import internals
from tests.multiproc.cases import (
    Twins,
    assert_equal_models,
    assert_identical,
    assert_overlapped,
    batches,
    build_model,
    loss_of,
    sharded_twins,
    split_groups,
)
from tests.multiproc.harness import Cases, Setup
from tests.pairwise import Modes, every_other

case = Cases(timeout=240)

MODES: dict[str, dict[str, Any]] = {
    "stage 1": {"stage": 1},
    "stage 1 interleaved, packed": {"stage": 1, "interleaved": True, "parameters_as_bucket_view": False},
    "stage 2": {"stage": 2},
    "stage 2 at the last bucket": {"stage": 2, "interleaved": False},
    "sync in forward": {"stage": 2, "sync": "forward"},
}
Late = Callable[[nn.Module, Optimizer], object]


def twins_of(**mode: Any) -> Twins:
    """A model with many buckets under DDP, with AdamW and with the sharded one."""
    return sharded_twins(options={"lr": 1e-2, "weight_decay": 0.1}, **mode)


def run_backward(setup: Setup, model: nn.Module, step: int) -> None:
    loss_of(model, *list(batches(setup.rank, step + 1))[step]).backward()


# Things to do between backward and step


def _set_lr(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["lr"] *= 0.5


def _set_weight_decay(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["weight_decay"] = optimizer.param_groups[0]["weight_decay"] + 0.01


def _decay_by_hand(model: nn.Module, optimizer: Optimizer) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.9)


def _decay_through_data(model: nn.Module, optimizer: Optimizer) -> None:
    for param in model.parameters():
        param.data.mul_(0.9)


def _replace_data(model: nn.Module, optimizer: Optimizer) -> None:
    for param in model.parameters():
        param.data = param.data * 0.9


def _load_model(model: nn.Module, optimizer: Optimizer) -> None:
    model.load_state_dict({name: value * 0.9 for name, value in model.state_dict().items()})


def _clip(model: nn.Module, optimizer: Optimizer) -> None:
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        optimizer.clip_grad_norm_(0.05)
    else:
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)


CHANGES: dict[Late, str] = {
    _set_lr: r"'lr' of parameter group 0, 0.01 at backward and 0.005 now",
    _set_weight_decay: r"'weight_decay' of parameter group 0",
    _decay_by_hand: r"parameter 0 'module.0.weight'",
    _decay_through_data: r"the values of parameter \d+ 'module",
    _replace_data: r"parameter 0 'module.0.weight'",
    _load_model: r"state_dict\(\) of the model",  # first, it asks for values that a plain loop would not have yet
    _clip: r"A step inside backward.*Clip from the first step on",
}


@case(
    2,
    3,
    few=[(name, change) for place, name in enumerate(MODES) for change in list(CHANGES)[place % 2 :: 2]],
    every=[*product(MODES, CHANGES)],
)
def _a_change_in_every_iteration_equals_the_plain_loop(
    setup: Setup, configurations: list[tuple[str, Callable[..., None]]]
) -> None:
    for name, change in configurations:
        twins = twins_of(**MODES[name])
        twins.train(setup, 4, between=change, where=f"{name}, {change.__name__}")
        twins.assert_moved()
        assert "deferred to opt.step(): the loop changes" in twins.opt.explain(), f"{name}, {change.__name__}"


@case(
    2,
    few=[(name, change) for place, name in enumerate(MODES) for change in list(CHANGES)[1 - place % 2 :: 2]],
    every=[*product(MODES, CHANGES)],
)
def _a_change_in_a_later_iteration_alone_is_refused(
    setup: Setup, configurations: list[tuple[str, Callable[..., None]]]
) -> None:
    for name, change in configurations:
        twins = twins_of(**MODES[name])
        twins.train(setup, 4)
        assert_overlapped(twins.opt)
        twins.zero_grad()
        run_backward(setup, twins.model, 4)
        with pytest.raises(RuntimeError, match=CHANGES[change]) as caught:  # noqa: PT012
            change(twins.model, twins.opt)
            twins.opt.step()
        assert "overlap_with_ddp=False" in str(caught.value), f"{name}: the remedy"
        assert "(rank " in str(caught.value), f"{name}: the rank"


@case(2)
def _an_option_that_backward_sets_is_in_time_or_refused(setup: Setup) -> None:
    refused = []
    for name, mode in MODES.items():
        twins = twins_of(ddp={"bucket_cap_mb": 1e-4}, **mode)
        twins.train(setup, 4)
        assert_overlapped(twins.opt)
        twins.zero_grad()
        for model, optimizer in ((twins.plain_model, twins.plain), (twins.model, twins.opt)):
            last = next(model.parameters())
            removed = last.register_hook(lambda _, chosen=optimizer: _set_lr(model, chosen))  # noqa: B023
            run_backward(setup, model, 4)
            removed.remove()
        twins.plain.step()
        try:
            twins.opt.step()
        except RuntimeError as error:
            assert re.search(r"has set 'lr' of parameter group 0 to 0\.005 after .*\(rank", str(error)), error  # noqa: PT017
            assert twins.opt.param_groups[0]["lr"] == 0.005
            refused.append(name)
        else:
            assert_equal_models(twins.plain_model, twins.model, name)
    assert refused == ["stage 1 interleaved, packed", "stage 2", "sync in forward"], refused


@case(2, few=every_other(MODES), every=MODES)
def _after_a_late_clip_the_loop_clips_as_the_message_says(setup: Setup, configurations: Modes) -> None:
    for name, mode in configurations.items():
        twins = twins_of(**mode)
        twins.train(setup, 3)
        twins.zero_grad()
        run_backward(setup, twins.plain_model, 3)
        run_backward(setup, twins.model, 3)
        with pytest.raises(RuntimeError, match=r"call opt\.step\(\), opt\.zero_grad\(\) and opt\.reset\(\), and clip"):
            _clip(twins.model, twins.opt)
        twins.plain.step()
        twins.opt.step()
        twins.zero_grad()
        twins.opt.reset()
        twins.train(setup, 3, seed=1, between=_clip, where=name)


@case(2, few=every_other(MODES, 1), every=MODES)
def _after_a_late_scaler_a_checkpoint_and_a_scaler_work(setup: Setup, configurations: Modes) -> None:
    for name, mode in configurations.items():
        twins = twins_of(**mode)
        twins.train(setup, 3)
        weights, state = (copy.deepcopy(one.state_dict()) for one in (twins.plain_model, twins.plain))
        twins.zero_grad()
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(loss_of(twins.model, *next(iter(batches(setup.rank, 1))))).backward()
        reason = "used up the gradient of .*" if mode["stage"] == 2 else ""
        with pytest.raises(RuntimeError, match=rf"{reason}GradScaler.* checkpoint, and use .*\[ZERO-314\]$"):
            scaler.step(twins.opt)
        twins.opt.reset()
        twins.opt.zero_grad()
        twins.model.load_state_dict(weights)
        twins.opt.load_state_dict(state)
        scalers = [torch.amp.GradScaler("cpu", init_scale=8.0) for _ in range(2)]
        sides = twins.sides
        for step in range(3, 6):
            for (model, optimizer), scaler in zip(sides, scalers, strict=True):
                scaler.scale(loss_of(model, *list(batches(setup.rank, step + 1))[step])).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            twins.assert_equal(f"{name}, step {step}")


@case(2)
def _after_a_change_of_memory_format_a_new_wrapper_trains(setup: Setup) -> None:
    torch.manual_seed(setup.rank)
    data = torch.randn(4, 2, 3, 6, 6)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 2))
    twins = sharded_twins(model, loss=lambda model, inputs: model(inputs).square().mean(), ddp={"bucket_cap_mb": None})
    twins.iterate(data[0])
    for model, _ in twins.sides:
        model.module.to(memory_format=torch.channels_last)
    with pytest.raises(RuntimeError, match=r"To go on now, wrap the model again, and call .*\[ZERO-321\]$"):
        twins.loss(twins.model, data[1]).backward()
    twins.wrap_again()
    twins.opt.reset()
    twins.opt.zero_grad()
    twins.opt.attach(twins.model)
    for step in (1, 2, 3):
        twins.iterate(data[step])
        twins.assert_equal(f"step {step}")


@case(2, few=[(name, 3 * (place % 2)) for place, name in enumerate(MODES)], every=[*product(MODES, (0, 3))])
def _a_step_pre_hook_that_sets_the_rate_acts_or_is_refused(setup: Setup, configurations: list[tuple[str, int]]) -> None:
    for name, first in configurations:
        twins = twins_of(**MODES[name])
        steps = {True: 0, False: 0}

        def halve(optimizer: Optimizer, *_: Any, steps: dict[bool, int] = steps, first: int = first) -> None:
            is_ours = isinstance(optimizer, ZeroRedundancyOptimizer)
            steps[is_ours] += 1
            if steps[is_ours] > first:
                optimizer.param_groups[0]["lr"] *= 0.5

        twins.plain.register_step_pre_hook(halve)
        twins.opt.register_step_pre_hook(halve)
        twins.train(setup, 3 if first else 5)
        if first:
            twins.zero_grad()
            run_backward(setup, twins.model, 3)
            with pytest.raises(RuntimeError, match="'lr' of parameter group 0"):
                twins.opt.step()
        twins.assert_moved()


@case(2, few=every_other(MODES), every=MODES)
def _loading_optimizer_state_between_is_refused_or_acts(setup: Setup, configurations: Modes) -> None:
    for name, mode in configurations.items():
        twins = twins_of(**mode)
        other = twins_of(**mode)
        other.train(setup, 3, seed=2)
        saved = other.plain.state_dict()
        for model, optimizer in twins.sides:
            run_backward(setup, model, 0)
            optimizer.load_state_dict(copy.deepcopy(saved))
            optimizer.step()
            optimizer.zero_grad()
        twins.assert_equal(f"{name}: loaded before the first step")
        twins = twins_of(**mode)
        twins.train(setup, 4)
        twins.zero_grad()
        run_backward(setup, twins.model, 4)
        before = copy.deepcopy(twins.opt.optim.state_dict())
        with pytest.raises(
            RuntimeError, match=r"opt.load_state_dict\(\) between backward\(\) and opt.step\(\) comes too late"
        ):
            twins.opt.load_state_dict(saved)
        assert_identical(before, twins.opt.optim.state_dict(), f"{name}: nothing is loaded")
        twins.opt.step()
        twins.opt.load_state_dict(saved)


@case(2, few=every_other(MODES, 1), every=MODES)
def _a_later_change_of_the_state_raises(setup: Setup, configurations: Modes) -> None:
    """On ranks that own what was changed: a moment that is set back would act one step late."""
    for mode in configurations.values():
        for how in ("in place", "by a new tensor", "by a new dict"):
            twins = twins_of(**mode)
            twins.train(setup, 4)
            assert_overlapped(twins.opt)
            twins.zero_grad()
            run_backward(setup, twins.model, 4)
            for param, state in list(twins.opt.state.items()):
                if how == "in place":
                    state["exp_avg"].zero_()
                elif how == "by a new tensor":
                    state["exp_avg"] = torch.zeros_like(state["exp_avg"])
                else:
                    twins.opt.state[param] = {key: value.clone() for key, value in state.items()}
            with pytest.raises(RuntimeError, match=r"of opt\.state \(rank .*overlap=False.*\[ZERO-304\]$"):
                twins.opt.step()


@case(2)
def _a_learning_rate_that_groups_share_stays_shared(setup: Setup) -> None:
    """Groups share one tensor, also after a state dict is loaded."""
    for overlap in (False, True):
        options = {"lr": torch.tensor(1e-2)}
        twins = sharded_twins(
            groups=lambda model: split_groups(model, 2, weight_decay=0.1), options=options, overlap=overlap
        )

        def change(step: int, twins: Twins = twins) -> None:
            saved = copy.deepcopy(twins.plain.state_dict())
            for _, optimizer in twins.sides if step >= 2 else ():
                if step == 2:
                    optimizer.load_state_dict(copy.deepcopy(saved))
                optimizer.param_groups[0]["lr"].mul_(0.5)
            assert twins.opt.param_groups[0]["lr"] is twins.opt.param_groups[1]["lr"]

        twins.train(setup, 5, after_step=change, where=f"overlap {overlap}")


@case(2)
def _schedulers_after_the_step_go_on_working(setup: Setup) -> None:
    for name, mode in MODES.items():
        twins = twins_of(**mode)
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for _, optimizer in twins.sides]
        twins.train(setup, 5, after_step=lambda _, both=schedulers: [one.step() for one in both], where=name)  # type: ignore[misc]
        assert_overlapped(twins.opt)


# Loops that leave opt.step() out


@case(2, few=[(name, place % 2 == 1) for place, name in enumerate(MODES)], every=[*product(MODES, (False, True))])
def _loops_without_opt_step_equal_ddp(setup: Setup, configurations: list[tuple[str, bool]]) -> None:
    """With a scheduler after backward, and gradients dropped by the optimizer or by the model."""
    for name, is_dropped_by_model in configurations:
        twins = twins_of(**MODES[name])
        for step, (inputs, targets) in enumerate(batches(setup.rank, 6)):
            for model, optimizer in twins.sides:
                model.zero_grad() if is_dropped_by_model else optimizer.zero_grad()
                loss_of(model, inputs, targets).backward()
                if optimizer is twins.plain:
                    optimizer.step()
                optimizer.param_groups[0]["lr"] = 1e-2 * 0.8 ** (step + 1)
            if step > 0:  # the first step is taken before the next forward pass
                twins.assert_equal(f"{name}, step {step}")
        twins.assert_moved()
        assert_overlapped(twins.opt)


@case(2)
def _parameters_changed_before_a_due_step_are_refused_at_the_next_pass(setup: Setup) -> None:
    for change in (_decay_by_hand, _decay_through_data, _replace_data):
        twins = twins_of(stage=1)
        run_backward(setup, twins.model, 0)
        change(twins.model, twins.opt)
        with pytest.raises(RuntimeError, match=r"Expected opt\.step\(\) between backward\(\) and the next"):
            run_backward(setup, twins.model, 1)


@case(2)
def _zero_grad_takes_a_due_step_and_a_later_opt_step_is_refused(setup: Setup) -> None:
    model, twin = twins_of(stage=2), twins_of(stage=2)
    losses = [loss_of(model.model, *batch) for batch in batches(setup.rank, 1)]
    losses[0].backward()
    model.opt.zero_grad()  # takes the step, for this loop has not called opt.step()
    run_backward(setup, twin.plain_model, 0)
    twin.plain.step()
    assert_equal_models(twin.plain_model, model.model, "after zero_grad()")
    run_backward(setup, model.model, 1)
    with pytest.raises(RuntimeError, match=r"called once for 2 backward passes"):
        model.opt.step()  # a loop that does call it had dropped its first gradients


# Gradients that nothing has averaged


ALL_MODES: dict[str, dict[str, Any]] = {
    **MODES,
    "standalone": {"stage": 1, "overlap": False},
    "stage 2 in step": {"stage": 2, "overlap": False},
}


@case(2, few=[(name, 3 * (place % 2)) for place, name in enumerate(ALL_MODES)], every=[*product(ALL_MODES, (0, 3))])
def _opt_step_after_passes_in_no_sync_alone_is_refused(setup: Setup, configurations: list[tuple[str, int]]) -> None:
    for name, trained in configurations:
        mode = ALL_MODES[name]
        twins = twins_of(**mode)
        twins.train(setup, trained)
        before = twins.values()
        twins.zero_grad()
        with twins.model.no_sync():
            run_backward(setup, twins.model, 4)
        with pytest.raises(RuntimeError, match="no_sync") as caught:
            twins.opt.step()
        assert "(rank " in str(caught.value)
        if mode.get("overlap") is False:
            assert "opt.zero_grad()" in str(caught.value), name
            with pytest.raises(
                RuntimeError, match="Expected averaged gradients, got this rank's own gradient of parameter 0"
            ):
                twins.opt.full_grad(next(twins.model.parameters()))
            if mode["stage"] == 2:
                with pytest.raises(RuntimeError, match="Expected averaged gradients"):
                    twins.opt.clip_grad_norm_(1.0)
        assert_identical(before, twins.values(), f"{name}: unchanged")
        twins.zero_grad()
        twins.train(setup, 3, seed=7)


@case(2, few=every_other(ALL_MODES), every=ALL_MODES)
def _passes_in_no_sync_averaged_by_a_later_pass_equal_ddp(setup: Setup, configurations: Modes) -> None:
    for name, mode in configurations.items():
        twins = twins_of(**mode)
        for step in range(4):
            with twins.plain_model.no_sync(), twins.model.no_sync():
                twins.both(lambda model, _, step=step: run_backward(setup, model, 2 * step))  # type: ignore[misc]
            twins.both(lambda model, _, step=step: run_backward(setup, model, 2 * step + 1))  # type: ignore[misc]
            twins.step(f"{name}, step {step}")


@case(2)
def _a_pass_in_no_sync_on_top_of_averages_is_refused(setup: Setup) -> None:
    """DDP's own average, and then a pass that only this rank knows of."""
    for stage in (1, 2):
        for trained in (0, 3):
            twins = twins_of(stage=stage, max_grad_norm=1.0)
            twins.train(setup, trained)
            twins.zero_grad()
            run_backward(setup, twins.model, 4)
            added = r"under ddp.no_sync\(\) would add this rank's own.*to an averaged one"
            with pytest.raises(RuntimeError, match=added if stage == 2 else r"no_sync\(\)|averaged"):  # noqa: PT012
                with twins.model.no_sync():
                    run_backward(setup, twins.model, 5)
                twins.opt.step()
            twins.opt.reset()


# What DDP does in corners


class _Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(8, 3), nn.Linear(7, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.used(inputs)
        return output


WAITING: dict[str, dict[str, Any]] = {
    "stage 1 after backward": {"stage": 1, "overlap": False},
    "stage 2 after backward": {"stage": 2, "overlap": False},
    "stage 1 clipped": {"stage": 1, "max_grad_norm": 1.0},
    "stage 2 clipped": {"stage": 2, "max_grad_norm": 1.0},
    "stage 1, non-finite ones looked for": {"stage": 1, "overlap": False, "nonfinite": "skip"},
}


def _drop_in(twins: Twins) -> Twins:
    """With an optimizer that is not told of the DDP model."""
    twins.opt = ZeroRedundancyOptimizer(twins.model.parameters(), torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
    return twins


@case(2)
def _an_unused_parameter_is_named(setup: Setup) -> None:
    for mode in (*MODES.values(), *WAITING.values(), None):
        ddp = DistributedDataParallel(_Unused(), gradient_as_bucket_view=mode is None or mode["stage"] == 2)
        opt: Any
        if mode is None:
            opt = ZeroRedundancyOptimizer(ddp.named_parameters(), torch.optim.AdamW)
        else:
            opt = shard_optimizer(ddp, torch.optim.AdamW, **mode)
        before = [param.detach().clone() for param in ddp.parameters()]
        run_backward(setup, ddp, 0)
        with pytest.raises(
            RuntimeError, match=r"No gradient for parameter \d 'module.unused.*find_unused_parameters=True"
        ):
            opt.step()
        assert all(torch.equal(one, other) for one, other in zip(before, ddp.parameters(), strict=True))


@case(2)
def _an_unused_parameter_with_an_old_gradient_is_refused(setup: Setup) -> None:
    ddp = DistributedDataParallel(_Unused(), gradient_as_bucket_view=True)
    opt = shard_optimizer(ddp, torch.optim.AdamW, overlap=False)
    for param in ddp.parameters():
        param.grad = torch.zeros_like(param)
    run_backward(setup, ddp, 0)
    with pytest.raises(RuntimeError, match=r"DDP has not ended the last backward pass \(rank .*find_unused_parameters"):
        opt.step()


def _twice(setup: Setup, model: nn.Module, step: int) -> None:
    """Two backward passes over one forward pass: DDP reduces the first."""
    loss = loss_of(model, *list(batches(setup.rank, step + 1))[step])
    loss.backward(retain_graph=True)
    loss.backward()


TWICE: dict[str, Any] = {**MODES, **WAITING, "drop-in": None}


@case(2, few=every_other(TWICE, 1), every=TWICE)
def _a_second_pass_over_a_forward_pass_is_refused(setup: Setup, configurations: dict[str, Any]) -> None:
    for name, mode in configurations.items():
        for trained in (0, 3):
            if trained and name in MODES:
                continue  # the step has changed parameters that the second pass needs: torch raises
            twins = _drop_in(twins_of(stage=1, overlap=False)) if mode is None else twins_of(**mode)
            twins.train(setup, trained)
            twins.zero_grad()
            before = twins.values()
            _twice(setup, twins.model, 4)
            with pytest.raises(
                RuntimeError, match=r"got this rank's own gradient of parameter 0.*a second backward pass over"
            ):
                twins.opt.step()
            assert_identical(before, twins.values(), name)


@case(2)
def _second_passes_that_ddp_averages_in_the_end_equal_ddp(setup: Setup) -> None:
    """Two forward and backward passes; a second backward pass that a third one averages, or the loop."""
    for first, second in ((run_backward, run_backward), (_twice, run_backward), (_twice, _average)):
        twins = twins_of(stage=1, overlap=False)
        for step in range(3):
            for model, optimizer in twins.sides:
                first(setup, model, step)
                second(setup, model, step + 10)
                optimizer.step()
                optimizer.zero_grad()
            twins.assert_equal(f"{first} {second}, step {step}")
        twins.assert_moved()


def _average(setup: Setup, model: nn.Module, step: int) -> None:
    for param in model.parameters():
        assert param.grad is not None
        torch.distributed.all_reduce(param.grad)


@case(2, few=every_other(MODES, 1), every=MODES)
def _a_pass_in_no_sync_after_a_forward_pass_that_was_left_open(setup: Setup, configurations: Modes) -> None:
    """DDP averages it all the same: the numbers are DDP's. Stage 2 adds averages, whose last bits differ."""
    for name, mode in configurations.items():
        twins = twins_of(**mode)
        for step in range(5):
            for model, optimizer in twins.sides:
                if step in (0, 3):
                    inputs, _ = next(batches(setup.rank, 1, seed=9))
                    model(inputs)  # and no backward pass
                    with model.no_sync():
                        run_backward(setup, model, 10 + step)
                run_backward(setup, model, step)
                optimizer.step()
                optimizer.zero_grad()
            if mode["stage"] == 1:
                twins.assert_equal(f"{name}, step {step}")
            for one, other in zip(twins.plain_model.parameters(), twins.model.parameters(), strict=True):
                torch.testing.assert_close(one.detach(), other.detach(), rtol=1e-5, atol=1e-6)
        twins.assert_moved()


class _TwoDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 9), nn.Linear(9, 3).double()

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.second(torch.tanh(self.first(inputs)).double()).float()
        return output


@case(2, 3)
def _a_static_graph_with_two_dtypes_equals_ddp(setup: Setup) -> None:
    for mode in MODES.values():
        torch.manual_seed(0)
        twins = sharded_twins(_TwoDtypes(), ddp={"static_graph": True, "bucket_cap_mb": None}, **mode)
        twins.train(setup, 4)
        twins.assert_moved()
        assert_overlapped(twins.opt)


# A hook that is missing


@case(2)
def _a_missing_hook_fails_at_the_first_forward_pass(setup: Setup) -> None:
    inputs, _ = next(batches(setup.rank, 1))
    for stage, overlaps in ((1, True), (2, True), (2, False)):
        ddp = DistributedDataParallel(build_model(), gradient_as_bucket_view=True)
        opt = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, overlap_with_ddp=overlaps, stage=stage)
        with torch.no_grad():
            ddp(inputs)
        with pytest.raises(RuntimeError, match=r"no communication hook.*hook_with_zero_step"):
            ddp(inputs)
        hook = hook_with_zero_step(None, ddp, opt)
        with pytest.raises(RuntimeError, match=r"does not have the optimizer's communication hook.*register_comm_hook"):
            ddp(inputs)
        ddp.register_comm_hook(None, hook)
        ddp(inputs).sum().backward()
        opt.step()
        assert opt.last_step is not None
        assert opt.last_step.stepped


@case(2)
def _a_model_and_its_copy_train_after_the_optimizer_is_gone(setup: Setup) -> None:
    ddp = DistributedDataParallel(build_model())
    opt = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW)
    copied = copy.deepcopy(ddp.module)
    run_backward(setup, ddp, 0)
    opt.step()
    assert not internals.passes_of(opt).last_is_local
    del opt
    gc.collect()
    run_backward(setup, ddp, 1)  # its pre-hook is left behind and does nothing
    assert copied(torch.zeros(1, 8)).shape == (1, 3)


test_between = case.each()
