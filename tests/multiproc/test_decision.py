"""What a step decides once all gradients are there, in situations: who is told what, and what is left untouched."""

import contextlib
import copy
import dataclasses
import math
import threading
import warnings
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from ddp_zero import DynamicLossScale, StepRegime, ZeroRedundancyOptimizer, shard_optimizer
from tests.multiproc.cases import (
    OptimizerCase,
    ToyAdam8bit,
    assert_equal_models,
    assert_identical,
    assert_overlapped,
    at_stage,
    batches,
    build_model,
    build_overlapped_twins,
    build_twins,
    loss_of,
    optimizer_case,
    record_of,
    sharded_twins,
    step_on,
)
from tests.multiproc.harness import Cases, Setup
from tests.multiproc.recipes import low_precision_model

case = Cases(group_timeout=30)

ADAMW = optimizer_case("AdamW foreach")
MODES: list[dict[str, Any]] = [
    {"stage": 1, "overlap": False},
    {"stage": 1, "overlap": True},
    {"stage": 2, "overlap": False},
    {"stage": 2, "overlap": True},
]
BF16 = torch.bfloat16


def sharded_ddp(model: nn.Module, **options: Any) -> tuple[DistributedDataParallel, ZeroRedundancyOptimizer]:
    """A model under DDP with many buckets, and its sharded AdamW."""
    views = options.get("stage") == 2
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.0015, gradient_as_bucket_view=views)
    return ddp, shard_optimizer(ddp, torch.optim.AdamW, lr=1e-2, **options)


def backward(
    setup: Setup,
    ddp: nn.Module,
    step: int,
    scale: Callable[[Tensor], Tensor] = lambda loss: loss,
    *,
    poisoned: Tensor | None = None,
    by: float = 0.0,
) -> None:
    """A backward pass on this rank's data of a step; the gradient of the poisoned parameter ends with a value not 0."""
    inputs, targets = list(batches(setup.rank, step + 1))[step]
    handle = poisoned.register_hook(partial(_poison, by)) if poisoned is not None and by else None
    scale(loss_of(ddp, inputs, targets)).backward()
    if handle is not None:
        handle.remove()


def _poison(value: float, grad: Tensor) -> Tensor:
    grad = grad.clone()
    grad.view(-1)[-1] = value
    return grad


def train(setup: Setup, ddp: nn.Module, opt: Any, *steps: int, scale: Callable[[Tensor], Tensor] | None = None) -> None:
    """On this rank's data of these steps."""
    for step in steps:
        backward(setup, ddp, step, *[scale] if scale else [])
        opt.step()
        opt.zero_grad()


def clip(model: nn.Module, optimizer: Any) -> None:
    """In the loop, as for this optimizer."""
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        optimizer.clip_grad_norm_(0.05)
    else:
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def consolidated(opt: ZeroRedundancyOptimizer) -> dict[str, Any]:
    """The state dict of rank 0, on every rank."""
    opt.consolidate_state_dict(0)
    saved: list[Any] = [opt.state_dict() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(saved, src=0)
    return dict(saved[0])


def copies_of_state(ddp: nn.Module, opt: ZeroRedundancyOptimizer) -> list[Any]:
    """Copies of parameters, state and masters of this rank."""
    masters = list(opt.master_weights.values())
    return copy.deepcopy([[p.detach() for p in ddp.parameters()], masters, opt.optim.state_dict()])


# Gradients that are not finite


BAD = [(math.inf, torch.float32), (math.nan, torch.float32), (math.nan, BF16)]


@case(
    *(1, 2, 3),
    few=[(mode, *BAD[place % 3]) for place, mode in enumerate(MODES)],
    every=[(mode, *bad) for mode in MODES for bad in BAD],
)
def _a_skipped_step_changes_nothing_and_is_recorded_on_all_ranks(
    setup: Setup, configurations: list[tuple[dict[str, Any], float, torch.dtype]]
) -> None:
    culprit = setup.world_size - 1
    for mode, value, dtype in configurations:
        masters = dtype is BF16
        ddp, opt = sharded_ddp(low_precision_model(dtype), nonfinite="skip", master_weights=masters, **mode)
        twin, expected = sharded_ddp(low_precision_model(dtype), nonfinite="skip", master_weights=masters, **mode)
        name, param = list(ddp.named_parameters())[2]
        for step in range(6):
            where = f"{mode}, {value}, {dtype}, step {step}"
            is_bad = step in (0, 4)
            backward(setup, ddp, step, poisoned=param, by=value if is_bad and setup.rank == culprit else 0.0)
            before = copies_of_state(ddp, opt)  # the first backward pass decides who owns what
            opt.step()
            opt.zero_grad()
            record = record_of(opt)
            assert record.stepped is not is_bad, where
            if is_bad:
                assert_identical(before, copies_of_state(ddp, opt), where)
                assert (record.nonfinite_parameter, record.nonfinite_rank) == (name, culprit), where
                assert record.reason is not None
                assert name in record.reason
                assert f"rank {culprit}" in record.reason
            else:
                assert (record.reason, record.nonfinite_parameter, record.nonfinite_rank) == (None, None, None)
            backward(setup, twin, step)
            if not is_bad:
                expected.step()
            expected.zero_grad()
            assert_equal_models(twin, ddp, where)
        opt.consolidate_state_dict()
        expected.consolidate_state_dict()
        if setup.rank == 0:
            assert_identical(expected.state_dict(), opt.state_dict(), f"{mode}, {dtype}, state")


@case(2)
def _nonfinite_raise_raises_on_all_ranks_and_changes_nothing(setup: Setup) -> None:
    for mode in MODES:
        ddp, opt = sharded_ddp(build_model(), nonfinite="raise", **mode)
        param = next(ddp.parameters())
        for step in range(4):
            before = copies_of_state(ddp, opt)
            backward(setup, ddp, step, poisoned=param, by=math.inf if step == 2 and setup.rank == 0 else 0.0)
            if step == 2:
                with pytest.raises(RuntimeError, match=r"nonfinite='raise'.*module.0.weight is not finite.*rank 0"):
                    opt.step()
                assert_identical(before, copies_of_state(ddp, opt), f"{mode}")
            else:
                opt.step()
            opt.zero_grad()
        assert record_of(opt).stepped


@case(2)
def _nonfinite_step_equals_ddp_with_nan_gradients(setup: Setup) -> None:
    for stage in (1, 2):
        for options in ({}, {"nonfinite": "step", "max_grad_norm": 0.5}):
            twins = build_overlapped_twins(ADAMW, zero_options=options, stage=stage)
            if options:
                twins.clip = partial(nn.utils.clip_grad_norm_, list(twins.plain_model.parameters()), 0.5)
            for factor in (1.0, 1.0, 1.0, math.nan, 1.0):
                twins.train(setup, 1, loss=lambda *batch, factor=factor: loss_of(*batch) * factor, where=options)
                assert record_of(twins.opt).stepped
            assert all(param.isnan().all() for param in twins.model.parameters())


@case(2)
def _nan_gradients_are_skipped_by_default_only_where_the_step_waits_for_all_gradients(setup: Setup) -> None:
    """Elsewhere a bucket may have been stepped before another is known to be NaN: all are, as under DDP."""
    for mode in MODES:
        for options in ({}, {"max_grad_norm": 1.0}):
            ddp, opt = sharded_ddp(build_model(), **mode, **options)
            for step in range(4):
                backward(setup, ddp, step, lambda loss, step=step: loss * math.nan if step == 3 else loss)  # type: ignore[misc]
                opt.step()
                opt.zero_grad()
            waits = bool(options) or (mode["stage"] == 2 and not mode["overlap"])
            assert record_of(opt).stepped is not waits, f"{mode}, {options}"


@case(2)
def _an_overflow_of_the_norm_skips_the_step_and_is_recorded(setup: Setup) -> None:
    ddp, opt = sharded_ddp(build_model(), max_grad_norm=1.0)
    before = [param.detach().clone() for param in ddp.parameters()]
    backward(setup, ddp, 0, lambda loss: loss * 1e25)
    opt.step()
    assert (record_of(opt).stepped, record_of(opt).nonfinite_parameter) == (False, None)
    assert record_of(opt).reason == "the norm of all gradients has overflowed"
    assert_identical(before, [param.detach() for param in ddp.parameters()], "parameters")


@case(2)
def _finite_gradients_whose_sum_overflows_are_stepped(setup: Setup) -> None:
    """A check by the sum of a gradient would skip them."""
    for mode in MODES:
        ddp, opt = sharded_ddp(nn.Linear(2, 2, bias=False), nonfinite="skip", **mode)
        for _ in range(3):
            step_on(opt, ddp(torch.ones(1, 2)).sum() * 2e38)
            assert record_of(opt).stepped, f"{mode}"


@case(2, 3)
def _the_record_of_an_accumulated_step_names_the_nonfinite_rank(setup: Setup) -> None:
    """Two backward passes add up, not finite on another rank each."""
    for stage in (1, 2):
        ddp, opt = sharded_ddp(build_model(), nonfinite="skip", stage=stage)
        train(setup, ddp, opt, *range(3))
        param = list(ddp.parameters())[3]
        for step, bad, context in ((3, 1, opt.accumulate()), (4, 0, contextlib.nullcontext())):
            with context:
                backward(setup, ddp, step, poisoned=param, by=math.inf if setup.rank == bad else 0.0)
        opt.step()
        assert record_of(opt).nonfinite_rank == (1 if stage == 1 else 0), "stage 2 adds up averages, each on its own"


@case(2)
def _the_record_without_ddp_names_the_nonfinite_parameter_and_no_rank(setup: Setup) -> None:
    twins = build_twins(ADAMW, nonfinite="skip")
    backward(setup, twins.model, 0, lambda loss: loss * math.nan)
    twins.opt.step()
    record = record_of(twins.opt)
    assert (record.nonfinite_parameter, record.nonfinite_rank) == ("parameter 0", None)
    assert record.regime is StepRegime.STANDALONE


# The record


@case(2)
def _the_record_has_the_regime_the_reason_norm_clip_and_scale(setup: Setup) -> None:
    ddp, opt = sharded_ddp(build_model(), stage=2)
    assert opt.last_step is None
    regimes: list[tuple[StepRegime, bool]] = []
    for step in range(4):
        backward(setup, ddp, step)
        if step == 0:
            assert opt.last_step is None, "the first step waits"
            opt.step()
        record = record_of(opt)
        assert record.stepped, "a step inside backward is recorded as soon as it is taken"
        if step > 0:
            opt.step()
        opt.zero_grad()
        regimes.append((record.regime, record.deferred_because is None))
        assert (record.grad_norm, record.clip_coefficient, record.loss_scale) == (None, None, None)
    assert regimes == [(StepRegime.DEFERRED, False)] + [(StepRegime.OVERLAPPED, True)] * 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        record.stepped = False  # type: ignore[misc]

    ddp, opt = sharded_ddp(build_model(), max_grad_norm=0.01, loss_scale=256.0)
    train(setup, ddp, opt, *range(3), scale=opt.scale)
    record = record_of(opt)
    assert record.deferred_because == "max_grad_norm needs the norm of all gradients"
    assert (record.regime, record.loss_scale) == (StepRegime.DEFERRED, 256.0)
    assert record.grad_norm is not None
    assert record.clip_coefficient == pytest.approx(0.01 / record.grad_norm, rel=1e-3)
    assert "regime: deferred to opt.step(): max_grad_norm" in opt.explain()


@case(2)
def _the_step_clips_and_unscales_copies_and_leaves_param_grad(setup: Setup) -> None:
    """So every rank sees the same gradients as under DDP."""
    ddp, opt = sharded_ddp(build_model(), max_grad_norm=0.01, loss_scale=64.0)
    plain = DistributedDataParallel(build_model())
    for step in range(3):
        backward(setup, ddp, step, opt.scale)
        plain.load_state_dict(ddp.state_dict())
        backward(setup, plain, step, lambda loss: loss * 64.0)
        opt.step()
        for one, other in zip(plain.parameters(), ddp.parameters(), strict=True):
            assert_identical(one.grad, other.grad, "a gradient after the step")
        opt.zero_grad()
        plain.zero_grad()


@case(2, 3)
def _max_grad_norm_equals_a_call_of_clip_grad_norm_with_gradients_sent_in_bf16(setup: Setup) -> None:
    for overlap in (False, True):
        options: dict[str, Any] = {"stage": 2, "overlap": overlap, "grad_comm_dtype": BF16}
        inside, opt = sharded_ddp(build_model(), max_grad_norm=0.1, **options)
        outside, called = sharded_ddp(build_model(), **options)
        for step in range(6):
            backward(setup, inside, step)
            backward(setup, outside, step)
            norm = called.clip_grad_norm_(0.1)
            for optimizer in (opt, called):
                optimizer.step()
                optimizer.zero_grad()
            for optimizer in (opt, called):
                assert record_of(optimizer).grad_norm == norm.item()
                assert (record_of(optimizer).clip_coefficient or 1.0) < 1
            assert_equal_models(inside, outside, f"overlap {overlap}, step {step}")


# Loss scales


@case(2)
def _an_overflow_at_the_smallest_loss_scale_raises(setup: Setup) -> None:
    for mode in MODES:
        ddp, opt = sharded_ddp(build_model(), loss_scale=DynamicLossScale(initial=4.0, minimum=2.0), **mode)
        before = [param.detach().clone() for param in ddp.parameters()]
        for step, scale in enumerate((4.0, 2.0)):
            assert opt.loss_scale == scale
            backward(setup, ddp, step, lambda loss: opt.scale(loss) * math.inf)  # noqa: B023
            if scale == 2.0:
                with pytest.raises(RuntimeError, match=r"smallest loss scale, 2.0.*module.0.weight.*minimum"):
                    opt.step()
            else:
                opt.step()
            opt.zero_grad()
        assert_identical(before, [param.detach() for param in ddp.parameters()], f"{mode}")
        assert opt.loss_scale == 2.0
        backward(setup, ddp, 2, opt.scale)
        opt.step()
        assert record_of(opt).stepped


@case(1, 2, 3)
def _scales_of_grad_scalers_agree_where_one_rank_owns_the_only_parameter(setup: Setup) -> None:
    """One parameter: a single rank has its gradient, and all scales fall and rise together."""
    for mode in MODES:
        ddp, opt = sharded_ddp(nn.Linear(8, 3, bias=False), **mode)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
        scales = []
        for step in range(9):
            bad = step in (0, 3, 4) and setup.rank == setup.world_size - 1
            inputs, targets = next(batches(setup.rank, 1, seed=step))
            (scaler.scale(loss_of(ddp, inputs, targets)) * (math.inf if bad else 1.0)).backward()
            if step % 2:
                scaler.unscale_(opt)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
            scales.append(scaler.get_scale())
        assert scales == [128.0, 128.0, 256.0, 128.0, 64.0, 64.0, 128.0, 128.0, 256.0], f"{mode}"
        opt.clip_grad_norm_(1.0)  # no gradients


@case(2)
def _a_disabled_grad_scaler_keeps_the_step_inside_backward(setup: Setup) -> None:
    ddp, opt = sharded_ddp(build_model(), interleaved=True)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for step in range(4):
        scaler.scale(loss_of(ddp, *next(batches(setup.rank, 1, seed=step)))).backward()
        scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    assert_overlapped(opt)


@case(2)
def _a_dynamic_scale_is_in_the_state_dict(setup: Setup) -> None:
    policy = DynamicLossScale(initial=16.0, growth_interval=2)
    ddp, opt = sharded_ddp(build_model(), loss_scale=policy)
    _, resumed = sharded_ddp(build_model(), loss_scale=policy)
    train(setup, ddp, opt, *range(3), scale=opt.scale)
    saved = consolidated(opt)
    resumed.load_state_dict(saved)
    assert resumed.loss_scale == opt.loss_scale == 32.0
    resumed.consolidate_state_dict(0)
    if setup.rank == 0:
        assert resumed.state_dict()["loss_scale"] == saved["loss_scale"], "with the steps since it last grew"
    plain = torch.optim.AdamW(build_model().parameters())
    plain.load_state_dict(saved)
    with pytest.raises(TypeError, match="value of the loss scale to be a number"):
        resumed.load_state_dict({**saved, "loss_scale": {"value": "x"}})


@case(1)
def _a_plain_state_dict_leaves_max_grad_norm_and_a_constant_loss_scale(setup: Setup) -> None:
    params = list(build_model().parameters())
    groups: list[dict[str, Any]] = [{"params": params[:2], "max_grad_norm": 1e-3}, {"params": params[2:]}]
    opt = ZeroRedundancyOptimizer(groups, torch.optim.SGD, lr=0.1, loss_scale=128.0)
    plain = torch.optim.SGD([{"params": params[:2]}, {"params": params[2:]}], lr=0.1)
    scale = {"value": 4096.0, "good_steps": 0, "patience": 1}
    opt.load_state_dict({**plain.state_dict(), "loss_scale": scale})
    assert [group.get("max_grad_norm") for group in opt.param_groups] == [1e-3, None]
    assert [group.get("max_grad_norm") for group in opt.optim.param_groups] == [1e-3, None]
    assert opt.loss_scale == 128.0  # a constant one stays


@case(1)
def _a_loss_scale_and_a_grad_scaler_are_refused_together(setup: Setup) -> None:
    opt = ZeroRedundancyOptimizer(build_model().parameters(), torch.optim.SGD, lr=0.1, loss_scale=128.0)
    opt.scale(torch.ones(1))
    for param in opt.param_groups[0]["params"]:
        param.grad = torch.full_like(param, 128.0)
    opt.found_inf = torch.zeros(())  # type: ignore[attr-defined]  # as a GradScaler does before it calls step()
    with pytest.raises(RuntimeError, match=r"has loss_scale= and is stepped by a torch.amp.GradScaler"):
        opt.step()


@case(2)
def _a_loss_scale_that_is_no_power_of_two_is_divided_out_before_clipping(setup: Setup) -> None:
    """Clipped inside: unscaled first, as the sequence with torch's own parts does; by a call but for last bits."""
    for mode in MODES:
        ddp, opt = sharded_ddp(build_model(), loss_scale=1000.0, max_grad_norm=0.05, **mode)
        plain_model = DistributedDataParallel(build_model(), bucket_cap_mb=0.0015)
        plain = torch.optim.AdamW(plain_model.parameters(), lr=1e-2)
        inverse = torch.tensor(1000.0).double().reciprocal().float()
        for step in range(4):
            backward(setup, ddp, step, opt.scale)
            backward(setup, plain_model, step, lambda loss: loss * 1000.0)
            for param in plain_model.parameters():
                assert param.grad is not None
                param.grad.mul_(inverse)
            expected = nn.utils.clip_grad_norm_(plain_model.parameters(), 0.05)
            torch.testing.assert_close(opt.clip_grad_norm_(1e9), expected)
            plain.step()
            opt.step()
            assert record_of(opt).grad_norm == expected.item()
            assert_equal_models(plain_model, ddp, f"{mode}, step {step}")
            plain.zero_grad()
            opt.zero_grad()


@case(1, 2)
def _scale_without_a_loss_scale_is_refused(setup: Setup) -> None:
    _, opt = sharded_ddp(build_model())
    assert opt.loss_scale is None
    with pytest.raises(RuntimeError, match=r"no loss scale.*loss_scale=DynamicLossScale"):
        opt.scale(torch.ones(1))


@case(1, 2)
def _refresh_master_weights_without_masters_is_refused(setup: Setup) -> None:
    _, opt = sharded_ddp(build_model())
    with pytest.raises(RuntimeError, match=r"no master weights.*master_weights=True"):
        opt.refresh_master_weights()


# The first step


@case(1, 2)
def _clipping_by_a_call_after_a_load_equals_the_plain_optimizer(setup: Setup) -> None:
    """State that was loaded, counters in groups and on the optimizer: one step each."""
    for stage in (1, 2):
        case = optimizer_case("toy 8-bit Adam")
        with at_stage(stage):
            first = build_overlapped_twins(case, overlap=stage == 1)
            first.train(setup, 3)
            first.opt.consolidate_state_dict(0)
            states = [first.opt.state_dict() if setup.rank == 0 else None]
            dist.broadcast_object_list(states, src=0)
            twins = build_overlapped_twins(case)
        for one, other in ((twins.plain_model, first.plain_model), (twins.model, first.model)):
            one.load_state_dict(other.state_dict())
        assert states[0] is not None
        twins.plain.load_state_dict(states[0])
        twins.opt.load_state_dict(states[0])
        assert isinstance(twins.plain, ToyAdam8bit)
        for step, (inputs, targets) in enumerate(batches(setup.rank, 4, seed=5)):
            twins.backward(inputs, targets)
            expected = nn.utils.clip_grad_norm_(twins.plain_model.parameters(), 0.05)
            assert_identical(expected, twins.opt.clip_grad_norm_(0.05), f"norm of step {step}")
            twins.plain.step()
            twins.opt.step()
            twins.assert_equal(f"stage {stage}, step {step}")
            assert twins.opt.optim.calls == twins.plain.calls == step + 1  # type: ignore[attr-defined]
            assert twins.opt.param_groups[0]["k"] == twins.plain.param_groups[0]["k"] == step + 4
            assert record_of(twins.opt).grad_norm == expected.item()
            twins.zero_grad()
        assert "changes gradients, options or parameters between backward and opt.step()" in twins.opt.explain()


class WrapsAdamW(torch.optim.Optimizer):
    """Wraps AdamW, which has the state, and keeps a sum of gradients in a dict of its own."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})
        self.inside = torch.optim.AdamW(self.param_groups, lr=lr)
        self.sums: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inside.step()
        for group in self.inside.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.sums[param] = self.sums.get(param, torch.zeros_like(param)) + param.grad
                    param.add_(self.sums[param], alpha=-0.01)


@case(1, 2)
def _clipping_by_a_call_equals_ddp_for_an_optimizer_that_wraps_adamw(setup: Setup) -> None:
    for stage in (1, 2):
        twins = build_overlapped_twins(OptimizerCase("wrapper", WrapsAdamW), stage=stage)
        twins.train(setup, 4, between=clip, where=f"stage {stage}")


class WithLock(torch.optim.SGD):
    """Has an attribute that `copy.deepcopy` refuses: no step may need a copy of the optimizer."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        self.locks = {"lock": threading.Lock()}
        self.helper = object()


@case(2)
def _an_optimizer_with_an_uncopyable_attribute_trains_as_the_plain_one_with_and_without_clipping(setup: Setup) -> None:
    for clips in (True, False):
        twins = build_overlapped_twins(OptimizerCase("with a lock", WithLock))
        twins.train(setup, 4, between=clip if clips else None, where=f"clips {clips}")


@case(2)
def _weights_loaded_before_the_first_step_reach_the_masters(setup: Setup) -> None:
    """Masters follow the model until the first step, also where that step waits for a clip in the loop."""
    for stage in (1, 2):
        trained = []
        for clips_in_loop in (False, True):
            options = {} if clips_in_loop else {"max_grad_norm": 0.05}
            ddp, opt = sharded_ddp(low_precision_model(BF16), stage=stage, master_weights=True, **options)
            with torch.no_grad():
                for param in ddp.parameters():
                    param.mul_(2.0)
            opt.consolidate_state_dict(0)
            for weight, master in opt.master_weights.items():
                assert_identical(weight.detach().float(), master, "a fresh master")
            for step in range(3):
                backward(setup, ddp, step)
                if clips_in_loop:
                    opt.clip_grad_norm_(0.05)
                opt.step()
                opt.zero_grad()
            trained.append(ddp)
        clipped_inside, clipped_in_loop = (ddp.parameters() for ddp in trained)
        for inside, in_loop in zip(clipped_inside, clipped_in_loop, strict=True):
            # the loop clips gradients in bf16, the step in fp32
            torch.testing.assert_close(inside, in_loop, rtol=0.02, atol=1e-3)


@case(1, 2)
def _a_copy_of_the_optimizer_has_equal_masters(setup: Setup) -> None:
    ddp, opt = sharded_ddp(low_precision_model(BF16), master_weights=True, overlap=False)
    train(setup, ddp, opt, *range(3))
    model, clone = copy.deepcopy((ddp.module, opt))
    for module, optimizer in ((ddp, opt), (model, clone)):
        for weight in module.parameters():
            weight.grad = torch.zeros_like(weight)
        optimizer.step()
    for one, other in zip(opt.master_weights.values(), clone.master_weights.values(), strict=True):
        assert_identical(one, other, "a master")
    assert any(not torch.equal(m, m.to(BF16).float()) for m in opt.master_weights.values()) or setup.world_size > 1


@case(2)
def _a_tensor_learning_rate_changed_in_place_is_stepped_with(setup: Setup) -> None:
    case = OptimizerCase("AdamW", torch.optim.AdamW, {"lr": torch.tensor(1e-3)})
    twins = build_overlapped_twins(case)

    def clip_and_double(model: nn.Module, optimizer: Any) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        for group in optimizer.param_groups:
            group["lr"].mul_(2.0)

    twins.train(setup, 3, between=clip_and_double)


@case(2)
def _gradients_dropped_after_a_step_inside_backward_are_refused(setup: Setup) -> None:
    for drop in (lambda p: setattr(p, "grad", None), lambda p: p.grad.zero_()):
        twins = build_overlapped_twins(ADAMW, stage=2)
        twins.train(setup, 4)
        twins.zero_grad()
        backward(setup, twins.model, 4)
        drop(list(twins.model.parameters())[2])
        with pytest.raises(RuntimeError, match="of the gradient of parameter 2 "):
            twins.opt.step()


@case(2)
def _opt_step_without_gradients_changes_nothing(setup: Setup) -> None:
    for stage in (1, 2):
        ddp, opt = sharded_ddp(build_model(), stage=stage, max_grad_norm=1.0)
        for step in range(4):
            backward(setup, ddp, step)
            before = [param.detach().clone() for param in ddp.parameters()]
            if step % 2:
                opt.zero_grad()
            opt.step()
            is_unchanged = all(torch.equal(a, b) for a, b in zip(before, ddp.parameters(), strict=True))
            assert is_unchanged is bool(step % 2)
            opt.zero_grad()


@case(2)
def _an_overflow_of_the_norm_under_a_grad_scaler_equals_ddp(setup: Setup) -> None:
    """As torch's clipping does: a step with gradients of zero, and every scaler goes on alike."""
    for mode in MODES:
        ddp, opt = sharded_ddp(nn.Linear(8, 3, bias=False), max_grad_norm=10.0, **mode)
        plain_model = DistributedDataParallel(nn.Linear(8, 3, bias=False))
        plain_model.load_state_dict(ddp.state_dict())
        plain = torch.optim.AdamW(plain_model.parameters(), lr=1e-2)
        scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2) for _ in range(2)]
        for step in range(4):
            for model, optimizer, scaler in ((plain_model, plain, scalers[0]), (ddp, opt, scalers[1])):
                inputs, targets = next(batches(setup.rank, 1, seed=step))
                scaler.scale(loss_of(model, inputs, targets) * (1e24 if step == 1 else 1.0)).backward()
                if optimizer is plain:
                    scaler.unscale_(plain)
                    nn.utils.clip_grad_norm_(plain_model.parameters(), 10.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            assert scalers[0].get_scale() == scalers[1].get_scale(), f"{mode}, step {step}"
            assert_equal_models(plain_model, ddp, f"{mode}, step {step}")


@case(2)
def _the_record_after_clipping_by_a_call_names_the_nonfinite_parameter_and_rank(setup: Setup) -> None:
    for mode in MODES:
        ddp, opt = sharded_ddp(build_model(), nonfinite="skip", **mode)
        name, param = list(ddp.named_parameters())[5]
        for step in range(2):
            backward(setup, ddp, step, poisoned=param, by=math.nan if step and setup.rank == 1 else 0.0)
            opt.clip_grad_norm_(1.0)
            opt.step()
            opt.zero_grad()
        record = record_of(opt)
        assert (record.nonfinite_parameter, record.nonfinite_rank) == (name, 1), f"{mode}"


@case(2)
def _a_learning_rate_set_between_backward_and_a_waiting_step_is_stepped_with(setup: Setup) -> None:
    for stage in (1, 2):
        twins = build_overlapped_twins(ADAMW, stage=stage)
        scalers = [torch.amp.GradScaler("cpu", init_scale=8.0) for _ in range(2)]
        for step in range(3):
            for (model, optimizer), scaler in zip(twins.sides, scalers, strict=True):
                backward(setup, model, step, scaler.scale)
                for group in optimizer.param_groups:
                    group["lr"] = 1e-3 * (step + 1)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            twins.assert_equal(f"stage {stage}, step {step}")
            assert twins.opt.param_groups[0]["lr"] == 1e-3 * (step + 1)


@case(2)
def _gradients_replaced_or_dropped_from_the_first_step_on_equal_ddp_and_later_ones_are_refused(setup: Setup) -> None:
    """As loops that freeze a layer by dropping its gradients do."""

    def shrink(model: nn.Module, _: Any = None) -> None:
        param: Any = model.get_parameter("module.2.weight")
        param.grad = param.grad * 0.1

    def drop(model: nn.Module, _: Any = None) -> None:
        model.get_parameter("module.2.weight").grad = None

    for replace in (shrink, drop):
        build_overlapped_twins(ADAMW).train(setup, 4, between=replace)
        late = build_overlapped_twins(ADAMW)
        late.train(setup, 3)
        late.zero_grad()
        backward(setup, late.model, 3)
        replace(late.model)
        with pytest.raises(RuntimeError, match=r"of the gradient of parameter 2 "):
            late.opt.step()


@case(2)
def _a_first_step_from_accumulated_gradients_alone_equals_ddp(setup: Setup) -> None:
    """With a scaler, or clipped, and a backward pass that would step only after that."""
    for scales in (True, False):
        twins = build_overlapped_twins(ADAMW)
        scalers = [torch.amp.GradScaler("cpu", init_scale=8.0, enabled=scales) for _ in range(2)]
        for step in range(4):
            for (model, optimizer), scaler in zip(twins.sides, scalers, strict=True):
                with twins.opt.accumulate() if step == 0 else contextlib.nullcontext():
                    backward(setup, model, step, scaler.scale)
                if not scales:
                    clip(model, optimizer)
                scaler.step(optimizer)
                scaler.update()
            twins.zero_grad()
            twins.assert_equal(f"scales {scales}, step {step}")


@case(2, 3)
def _a_first_step_that_was_clipped_and_dropped_is_not_taken(setup: Setup) -> None:
    ddp, opt = sharded_ddp(build_model())
    before = [param.detach().clone() for param in ddp.parameters()]
    backward(setup, ddp, 0)
    opt.clip_grad_norm_(1.0)
    opt.zero_grad()  # and no step
    backward(setup, ddp, 1)
    assert_identical(before, [param.detach() for param in ddp.parameters()], "parameters")
    assert opt.last_step is None
    assert not opt.optim.state


@case(2)
def _a_gradient_written_on_one_rank_defers_the_step_of_all(setup: Setup) -> None:
    ddp, opt = sharded_ddp(build_model())
    before = [param.detach().clone() for param in ddp.parameters()]
    backward(setup, ddp, 0)
    if setup.rank == 0:
        next(ddp.parameters()).grad.mul_(1.0)  # type: ignore[union-attr]
    opt.step()
    reference = [torch.empty_like(param) for param in ddp.parameters()]
    for param, other in zip(ddp.parameters(), reference, strict=True):
        other.copy_(param.detach())
        dist.broadcast(other, 0)
        assert_identical(other, param.detach(), "the same parameters everywhere")
    assert not any(torch.equal(*pair) for pair in zip(before, reference, strict=True))
    assert record_of(opt).regime is StepRegime.DEFERRED


@case(2)
def _a_gradient_changed_on_one_rank_alone_is_refused_everywhere(setup: Setup) -> None:
    ddp, opt = sharded_ddp(build_model())
    backward(setup, ddp, 0)
    if setup.rank == 0:
        next(ddp.parameters()).grad.mul_(0.5)  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match=r"0\.weight.* changed on some ranks alone.*ZERO-302"):
        opt.step()


@case(2)
def _gradients_that_are_zeroed_before_any_opt_step_warn_and_accumulated_ones_do_not(setup: Setup) -> None:
    ddp, opt = sharded_ddp(build_model(), max_grad_norm=1.0)
    backward(setup, ddp, 0)
    ddp.zero_grad()
    with pytest.warns(UserWarning, match=r"The step waits for opt.step\(\) \(max_grad_norm"):
        backward(setup, ddp, 1)
    opt.step()
    opt.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(2):
            backward(setup, ddp, step)


# What was dropped


@case(2)
def _the_record_has_nothing_of_gradients_dropped_before(setup: Setup) -> None:
    for mode in MODES:
        ddp, opt = sharded_ddp(build_model(), nonfinite="skip", **mode)
        param = next(ddp.parameters())
        for bad in (0, 1):
            backward(setup, ddp, bad, poisoned=param, by=math.inf if setup.rank == bad else 0.0)
            if bad == 0:
                opt.clip_grad_norm_(1.0)
                opt.zero_grad()
        opt.step()
        record = record_of(opt)
        assert (record.nonfinite_rank, record.grad_norm, record.clip_coefficient) == (1, None, None), f"{mode}"
        opt.zero_grad()


@case(2)
def _a_grad_scaler_without_gradients_raises_as_in_a_plain_loop(setup: Setup) -> None:
    for mode in MODES:
        ddp, opt = sharded_ddp(build_model(), **mode)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.ones(1))
        with pytest.raises(AssertionError, match="No inf checks were recorded"):  # of torch, as in a plain loop
            scaler.step(opt)
        assert opt.last_step is None
        backward(setup, ddp, 0)


# Whose option it is


class WithOwnMaxGradNorm(torch.optim.SGD):
    """Has an option of the name of ours, as some optimizers do."""

    def __init__(self, params: Any, lr: float = 0.1, limit: float | None = 1e-6) -> None:
        torch.optim.Optimizer.__init__(
            self, params, torch.optim.SGD([torch.ones(1)], lr=lr).defaults | {"max_grad_norm": limit}
        )


@case(2)
def _max_grad_norm_of_the_inner_optimizer_is_left_to_it(setup: Setup) -> None:
    twins = build_twins(OptimizerCase("own limit", WithOwnMaxGradNorm))
    twins.train(setup, 3)
    assert record_of(twins.opt).clip_coefficient is None
    with pytest.raises(ValueError, match=r"max_grad_norm is an option of ddp_zero and of WithOwnMaxGradNorm"):
        ZeroRedundancyOptimizer(build_model().parameters(), WithOwnMaxGradNorm, max_grad_norm=0.1)


# Accumulation


@case(2)
def _opt_step_after_passes_in_accumulate_alone_equals_ddp(setup: Setup) -> None:
    for stage in (1, 2):
        twins = build_overlapped_twins(ADAMW, stage=stage)
        twins.train(setup, 3)
        for step in range(3):
            twins.zero_grad()
            for model, optimizer in twins.sides:
                with twins.opt.accumulate():
                    backward(setup, model, step)
                optimizer.step()
            twins.assert_equal(f"stage {stage}, step {step}")
            assert record_of(twins.opt).regime is StepRegime.DEFERRED
        twins.train(setup, 2, seed=1)
        assert_overlapped(twins.opt)


# Master weights


@case(2, 3)
def _parameters_written_without_refresh_are_refused_but_before_the_first_step(setup: Setup) -> None:
    for mode in MODES:
        ddp, opt = sharded_ddp(low_precision_model(BF16), master_weights=True, **mode)
        train(setup, ddp, opt, *range(3))
        state = copy.deepcopy(ddp.state_dict())
        ddp.load_state_dict(state)  # the same values: nothing has diverged
        train(setup, ddp, opt, 3)
        ddp.load_state_dict(state)
        message = r"parameter \d+ 'module.layers.*fp32 master weight rounded.*refresh_master_weights"
        steps_inside = mode["overlap"]
        if not steps_inside:
            backward(setup, ddp, 4)
        with pytest.raises(RuntimeError, match=message):
            backward(setup, ddp, 4) if steps_inside else opt.step()
        opt.reset()
        opt.zero_grad()

        trained: list[Any] = []
        for says_so in (True, False):  # before the first step the model is the truth in any case
            ddp, opt = sharded_ddp(low_precision_model(BF16), master_weights=True, **mode)
            ddp.load_state_dict(state)
            if says_so:
                opt.refresh_master_weights()
            train(setup, ddp, opt, *range(3))
            trained.append(ddp)
        assert_equal_models(trained[0], trained[1], f"{mode}")
        assert any(not torch.equal(state[name], value) for name, value in ddp.state_dict().items())


@case(2)
def _parameters_written_and_restored_on_one_rank_are_accepted(setup: Setup) -> None:
    for mode in MODES:
        ddp, opt = sharded_ddp(low_precision_model(BF16), master_weights=True, **mode)
        for step in range(4):
            if step == 2 and setup.rank == 0:
                with torch.no_grad():
                    for param in ddp.parameters():
                        kept = param.clone()
                        param.zero_()
                        param.copy_(kept)
            train(setup, ddp, opt, step)


@case(1, 2)
def _masters_in_a_state_dict_resume_in_another_mode(setup: Setup) -> None:
    """Through a consolidated state dict into another stage and mode; the run goes on as if unbroken."""
    for one, other in zip(MODES, MODES[1:] + MODES[:1], strict=True):
        options: dict[str, Any] = {"master_weights": True}
        ddp, opt = sharded_ddp(low_precision_model(BF16), **options, **one)
        train(setup, ddp, opt, *range(3))
        saved = consolidated(opt)
        again, resumed = sharded_ddp(low_precision_model(BF16), **options, **other)
        with pytest.raises(ValueError, match=r"its master weight rounded.*Load the model's state dict.*before"):
            resumed.load_state_dict(saved)
        again.load_state_dict(ddp.state_dict())
        resumed.load_state_dict(saved)
        _, without = sharded_ddp(low_precision_model(BF16), **other)
        with pytest.raises(ValueError, match=r"'master_weight' for parameter.*master_weights=True"):
            without.load_state_dict(saved)
        for step in range(3, 6):
            for model, optimizer in ((ddp, opt), (again, resumed)):
                train(setup, model, optimizer, step)
            assert_equal_models(ddp, again, f"{one} to {other}, step {step}")
        low = [param for param in ddp.parameters() if param.dtype is BF16]
        owned = opt.master_weights
        assert all(master.dtype is torch.float32 and param in opt.state for param, master in owned.items())
        assert setup.world_size > 1 or len(owned) == len(low) > 0


@case(2)
def _masters_of_sgd_are_the_only_state_in_the_state_dict(setup: Setup) -> None:
    ddp = DistributedDataParallel(low_precision_model(BF16))
    opt = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, master_weights=True)
    train(setup, ddp, opt, *range(2))
    opt.consolidate_state_dict()
    if setup.rank == 0:
        state = opt.state_dict()["state"]
        low = [index for index, param in enumerate(ddp.parameters()) if param.dtype is BF16]
        assert sorted(state) == low
        assert all(list(value) == ["master_weight"] for value in state.values())


@case(1, 2)
def _added_groups_and_copies_of_the_optimizer_have_masters_of_their_own(setup: Setup) -> None:
    first, second = nn.Linear(8, 8, dtype=BF16), nn.Linear(8, 3, dtype=BF16)
    for layer in (first, second):
        for param in layer.parameters():
            dist.broadcast(param.data, 0)
    opt = ZeroRedundancyOptimizer(first.parameters(), torch.optim.SGD, lr=1e-4, master_weights=True)
    opt.add_param_group({"params": list(second.parameters()), "max_grad_norm": 1e-3})
    clone_first, clone_second, clone = copy.deepcopy((first, second, opt))
    for layers, optimizer in (((first, second), opt), ((clone_first, clone_second), clone)):
        for _ in range(30):
            step_on(optimizer, layers[1](layers[0](torch.ones(1, 8, dtype=BF16))).float().square().sum())
    for one, other in zip([*first.parameters(), *second.parameters()], opt.param_groups[0]["params"], strict=False):
        assert one is other
    for one, other in zip(first.parameters(), clone_first.parameters(), strict=True):
        assert_identical(one.detach(), other.detach(), "a copy steps alike")
    cloned = {master.data_ptr() for master in clone.master_weights.values()}
    assert cloned.isdisjoint(master.data_ptr() for master in opt.master_weights.values())
    assert opt.master_weights or setup.world_size > 1
    assert (record_of(opt).clip_coefficient or 1.0) < 1


# Uneven inputs, unused parameters


@case(2, 3)
def _clipping_and_scaling_under_join_equal_ddp(setup: Setup) -> None:
    """A rank that has joined decides as the others do."""
    for stage in (1, 2):
        for options in ({"max_grad_norm": 0.1}, {"loss_scale": DynamicLossScale(initial=8.0), "max_grad_norm": 0.2}):
            twins = build_overlapped_twins(ADAMW, zero_options=options, stage=stage)
            limit = options["max_grad_norm"]
            assert isinstance(limit, float)
            counts = (5, 3, 7)[: setup.world_size]
            with Join([twins.plain_model]):
                for inputs, targets in batches(setup.rank, counts[setup.rank]):
                    twins.plain.zero_grad()
                    loss_of(twins.plain_model, inputs, targets).backward()
                    nn.utils.clip_grad_norm_(twins.plain_model.parameters(), limit)
                    twins.plain.step()
            with Join([twins.model, twins.opt]):
                for inputs, targets in batches(setup.rank, counts[setup.rank]):
                    twins.opt.zero_grad()
                    loss = loss_of(twins.model, inputs, targets)
                    (twins.opt.scale(loss) if "loss_scale" in options else loss).backward()
                    twins.opt.step()
            twins.assert_equal(f"stage {stage}, {options}")
            twins.assert_moved()
            assert record_of(twins.opt).stepped


@case(2)
def _a_grad_scaler_under_join_is_refused(setup: Setup) -> None:
    for stage in (1, 2):
        twins = build_overlapped_twins(ADAMW, zero_options={"max_grad_norm": 0.1}, stage=stage)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        with Join([twins.model, twins.opt]):
            backward(setup, twins.model, 0, scaler.scale)
            with pytest.raises(RuntimeError, match=r"Join does not support torch.amp.GradScaler"):
                scaler.step(twins.opt)
            twins.opt.zero_grad()


@case(2)
def _clipping_by_a_call_under_join_is_refused_in_stage_2(setup: Setup) -> None:
    twins = build_overlapped_twins(ADAMW, overlap=False, stage=2)
    with Join([twins.model, twins.opt]):
        backward(setup, twins.model, 0)
        with pytest.raises(
            RuntimeError, match=r"Join does not support opt.clip_grad_norm_\(\) with stage=2.*max_grad_norm="
        ):
            twins.opt.clip_grad_norm_(1.0)
        twins.opt.step()


@case(2)
def _a_group_added_between_backward_and_step_leaves_the_step_inside_backward(setup: Setup) -> None:
    """Neither the first step nor a later one waits for it, or raises."""

    def add(_: nn.Module, optimizer: Any) -> None:
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3), requires_grad=False)]})

    for as_views, late in product((False, True), (0, 3)):
        twins = build_overlapped_twins(ADAMW, as_views=as_views)
        twins.go_on(late)
        twins.go_on(1, between=add)
        twins.go_on(2)
        assert "changes gradients" not in twins.opt.explain()


class OneOfTwoHeads(nn.Module):
    """A third head is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = nn.Linear(8, 9), nn.ModuleList([nn.Linear(9, 3), nn.Linear(9, 3), nn.Linear(2, 2)])

    def forward(self, inputs: Tensor, choice: int) -> Tensor:
        output: Tensor = self.heads[choice](torch.tanh(self.body(inputs)))
        return output


@case(2)
def _clipping_with_unused_parameters_equals_ddp(setup: Setup) -> None:
    def loss(model: nn.Module, inputs: Tensor, choice: int, targets: Tensor) -> Tensor:
        return nn.functional.mse_loss(model(inputs, choice), targets)

    for stage in (1, 2):
        torch.manual_seed(0)
        ddp = {"find_unused_parameters": True, "bucket_cap_mb": 0.0005}
        twins = sharded_twins(OneOfTwoHeads(), loss=loss, ddp=ddp, stage=stage, max_grad_norm=0.1)
        for step, (inputs, targets) in enumerate(batches(setup.rank, 6)):
            twins.iterate(inputs, 0 if step in (0, 3) else (step + setup.rank) % 2, targets)
            twins.assert_equal(f"stage {stage}, step {step}")
            assert (record_of(twins.opt).clip_coefficient or 1.0) < 1


test_decision = case.each()
