"""``offload=``: state and step on the host, with the numbers of the plain optimizer to the bit."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from ddp_zero import Offload, ZeroRedundancyOptimizer, checkpoint, shard_optimizer
from ddp_zero.core.local.copy_pipeline import AwaitCopyBack, AwaitHost, CopyToHost, Schedule
from ddp_zero.core.step import rank_shard as binding
from ddp_zero.values.placeholders import on_this_rank
from tests import internals
from tests.multiproc.cases import (
    OPTIMIZERS,
    OptimizerCase,
    ToyLAMB,
    Twins,
    assert_equal_models,
    assert_identical,
    at_stage,
    batches,
    build_model,
    build_overlapped_twins,
    build_twins,
    optimizer_case,
    step_on,
)
from tests.multiproc.cut_models import grow_and_train, large_model
from tests.multiproc.harness import Cases, Setup
from tests.multiproc.overlap_loops import one_epoch
from tests.multiproc.recipes import MODES, Recipe, Reference, Sharded, low_precision_model, micro_batches
from tests.multiproc.small_models import TOY
from tests.multiproc.two_memories import TwoMemories, assert_away, pipeline_of, taken_for_a_device

case = Cases()

ADAMW, MOMENTUM = optimizer_case("AdamW fused"), optimizer_case("SGD momentum")
ELEMENTWISE = OPTIMIZERS[: [one.name for one in OPTIMIZERS].index("Adafactor")]
CAP = 0.006  # MiB: several buckets
BF16, FP16 = torch.bfloat16, torch.float16
RECIPES = [
    Recipe("clip inside", clip=0.3),
    Recipe("masters of bf16, clip inside", dtype=BF16, masters=True, clip=0.3),
    Recipe("masters of bf16", dtype=BF16, masters=True),
    Recipe("masters of bf16, accumulate", dtype=BF16, masters=True, accumulate=2),
    Recipe("bf16 without masters", dtype=BF16),
    Recipe("GradScaler, unscale, clip by a call", scaler="torch", clip=0.3, clips_inside=False, overflows=(0, 3)),
    Recipe("masters of fp16, own scale, clip", dtype=FP16, masters=True, scaler="own", clip=0.3, overflows=(2,)),
    Recipe("skip", overflows=(1, 2)),
    Recipe("accumulate, clip inside", accumulate=2, clip=0.3),
]


@contextmanager
def offloaded() -> Iterator[dict[str, Any]]:
    """Options for state on the host of a device stand-in."""
    with taken_for_a_device():
        yield {"offload": "cpu"}


def twins_of(one: OptimizerCase, number: int, options: dict[str, Any], model: nn.Module | None = None) -> Twins:
    """One of six modes, by a number: standalone, inside backward at the end or interleaved, waiting; both stages."""
    mode = number % 6
    stage, overlap = (1, 2)[mode % 2], mode < 4
    groups = 1 + number // 6 % 2
    model = model if model is not None else build_model(matrices_only=one.matrices_only)
    if mode == 4:
        return build_twins(one, groups, model, parameters_as_bucket_view=bool(groups - 1), **options)
    with at_stage(stage):
        return build_overlapped_twins(
            one, groups, model, overlap=overlap, interleaved=mode >= 2, bucket_cap_mb=CAP / 2, zero_options=options
        )


# The same numbers


@case(2, marks=[pytest.mark.nightly])
def _every_optimizer_equals_ddp_with_its_state_on_the_host(setup: Setup) -> None:
    for number, one in enumerate(OPTIMIZERS):
        with offloaded() as options:
            twins = twins_of(one, number, options)
            twins.train(setup, 4)
            twins.assert_moved()
            assert_away(twins.opt)
            twins.assert_same_state(one.name)


@case(3)
def _every_mode_equals_ddp_with_its_state_on_the_host(setup: Setup) -> None:
    for mode in range(6):
        for late in ({}, {"sync": "forward"}) if mode in (0, 1, 3) else ({},):
            with offloaded() as options:
                twins = twins_of(ADAMW, mode, options | late)
                twins.train(setup, 4)
                twins.assert_moved()
                assert_away(twins.opt)
                twins.assert_same_state(f"mode {mode}")


@case(2)
def _cut_parameters_equal_ddp(setup: Setup) -> None:
    for number, one in enumerate(ELEMENTWISE[1::3]):
        with offloaded() as options:
            twins = twins_of(one, number, {**options, "partition": "elements"}, large_model())
            twins.train(setup, 4)
            twins.assert_moved()
            assert internals.owned_parts(twins.opt)
            twins.assert_same_state(one.name)


@case(2)
def _clipping_scaling_and_masters_equal_the_reference_recipes(setup: Setup) -> None:
    for number, recipe in enumerate(RECIPES):
        stage = 1 + number % 2
        mode = MODES[stage][number // 2 % len(MODES[stage])]
        with offloaded() as options:
            model = low_precision_model(recipe.dtype)
            plain = Reference(recipe, model, ADAMW.build, ADAMW.options, stage)
            ours = Sharded(recipe, model, ADAMW.build, ADAMW.options, stage, mode, **options)
            before = [param.detach().clone() for param in model.parameters()]
            skipped = 0
            for step, data in enumerate(micro_batches(setup.rank, 6, recipe.accumulate)):
                expected, got = plain.train(data), ours.train(data)
                assert (got.stepped, got.scale) == (expected.stepped, expected.scale), recipe.name
                assert got.norm == expected.norm or not expected.stepped, recipe.name
                assert_equal_models(plain.model, ours.model, f"{recipe.name}, stage {stage}, {mode}, step {step}")
                skipped += not got.stepped
            assert skipped >= len(recipe.overflows)
            assert all(not torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True)), recipe.name
            assert_away(ours.opt)


@case(2)
def _masters_of_cut_parameters_equal_those_without_offload(setup: Setup) -> None:
    """Beside the same optimizer without offload, which other tests compare with the plain optimizer."""
    own: dict[str, Any] = {"master_weights": True, "partition": "elements", "lr": 1e-2, "fused": True}
    for stage in (1, 2):
        model = large_model(dtype=torch.bfloat16)
        models = [model, copy.deepcopy(model)]
        wrapped = [DistributedDataParallel(one, gradient_as_bucket_view=True, bucket_cap_mb=CAP) for one in models]
        with offloaded() as options:
            moved = shard_optimizer(wrapped[0], AdamW, stage=stage, **own, **options)
            stays = shard_optimizer(wrapped[1], AdamW, stage=stage, **own)
            for inputs, targets in batches(setup.rank, 4):
                for ddp, opt in zip(wrapped, (moved, stays), strict=True):
                    step_on(opt, nn.functional.mse_loss(ddp(inputs.bfloat16()), targets.bfloat16()))
                assert_equal_models(wrapped[1], wrapped[0], f"stage {stage}")
            assert_away(moved)
            for opt in (moved, stays):
                opt.consolidate_state_dict(to=0)
            if setup.rank == 0:
                assert_identical(stays.state_dict(), moved.state_dict(), f"stage {stage}")
        start = large_model(dtype=torch.bfloat16)
        assert all(not torch.equal(*pair) for pair in zip(start.parameters(), model.parameters(), strict=True))


# What changes between steps


@case(2)
def _added_groups_freezing_and_new_wrappers_equal_ddp(setup: Setup) -> None:
    for stage in (1, 2):
        with offloaded() as options, at_stage(stage):
            twins = build_overlapped_twins(ADAMW, 2, large_model(), bucket_cap_mb=CAP, zero_options=options)
            twins.train(setup, 3)
            for ddp in (twins.plain_model, twins.model):
                ddp.module[3].weight.requires_grad_(False)
            grow_and_train(twins, setup, 4 * CAP, f"stage {stage}")
            assert_away(twins.opt)
            twins.assert_same_state(f"stage {stage}")


@case(3)
def _join_with_uneven_inputs_equals_ddp(setup: Setup) -> None:
    for stage in (1, 2):
        with offloaded() as options, at_stage(stage):
            twins = build_overlapped_twins(MOMENTUM, bucket_cap_mb=CAP / 2, zero_options=options)
            one_epoch(setup, twins, (5, 2, 4)[setup.rank], seed=0, calls_step=True, scheduled=False)
            twins.assert_equal(f"stage {stage}")
            twins.assert_moved()


@case(2)
def _parameters_that_the_loop_writes_are_copied_to_the_host(setup: Setup) -> None:
    """A copy on the host follows the model, however it was written to."""
    with offloaded() as options:
        twins = twins_of(ADAMW, 3, options)
        for seed in range(3):
            twins.train(setup, 2, seed=seed)
            for model in (twins.plain_model, twins.model):
                for number, param in enumerate(model.parameters()):
                    if number % 2:
                        param.data.mul_(0.9)
                    else:
                        param.detach().add_(0.01)
        twins.train(setup, 2, seed=9)


@case(2)
def _state_that_the_loop_writes_is_stepped_with(setup: Setup) -> None:
    for mode in range(3):
        with offloaded() as options:
            twins = twins_of(ADAMW, mode, options)
            twins.train(setup, 2)
            for optimizer in (twins.plain, twins.opt.optim):
                for state in optimizer.state.values():
                    state["exp_avg"].mul_(0.5)
            twins.train(setup, 2, seed=1)
            twins.assert_moved()
            assert_away(twins.opt)
            twins.assert_same_state(f"mode {mode}")


@case(2)
def _train_and_eval_of_the_inner_class_equal_ddp(setup: Setup) -> None:
    with offloaded() as options:
        twins = build_twins(TOY, 2, **options)
        for inputs, targets in batches(setup.rank, 4):
            for model, optimizer in twins.sides:
                optimizer.train()
                optimizer.zero_grad()
                nn.functional.mse_loss(model(inputs), targets).backward()
                optimizer.step()
                optimizer.eval()
            twins.assert_equal("methods")
        twins.assert_moved()


@case(2)
def _a_copy_of_the_optimizer_trains_as_the_original_with_its_state_on_the_host(setup: Setup) -> None:
    with offloaded() as options:
        model = large_model()
        opt = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=1e-2, fused=True, **options)
        others: list[tuple[nn.Module, ZeroRedundancyOptimizer]] = [(model, opt)]
        for step in range(4):
            if step == 2:
                others.append(copy.deepcopy((model, opt)))
            for module, optimizer in others:
                for param in module.parameters():
                    param.grad = torch.full_like(param, 0.1 * (step + 1))
                optimizer.step()
        (_, again) = others[1]
        assert_equal_models(model, others[1][0], "copies")
        assert_away(again)
        assert all(not torch.equal(*pair) for pair in zip(large_model().parameters(), model.parameters(), strict=True))


# State dicts and checkpoints


@contextmanager
def on_the_device() -> Iterator[dict[str, Any]]:
    yield {}


PLACES = {"host": offloaded, "on_the_device": on_the_device}


@case(2)
def _checkpoints_with_or_without_offload_load_with_or_without_it(setup: Setup) -> None:
    own: dict[str, Any] = {"master_weights": True, "lr": 1e-2, "fused": True}
    for number, where in enumerate(PLACES):
        with PLACES[where]() as options:
            saved, opt = _trained(setup, 1 + number % 2, own | options)
        checkpoint.save(setup.folder / where, saved, opt).wait()
        whole = opt.state_dict()
        for other in PLACES:
            with PLACES[other]() as options:
                model, loaded = _trained(setup, 2 - number % 2, own | options, steps=1)
                checkpoint.load(setup.folder / where, model, loaded)
                assert_identical(saved.module.state_dict(), model.module.state_dict(), f"{where} to {other}")
                assert_identical(whole["state"], loaded.state_dict()["state"], f"{where} to {other}")
                if other == "host":
                    assert_away(loaded)
                model.module.load_state_dict(saved.module.state_dict())
                loaded.load_state_dict(whole if setup.rank == 0 else None)
                assert_identical(whole["state"], loaded.state_dict()["state"], f"{where} to {other}, from one rank")
                dist.barrier()  # no rank drops an optimizer that another asks


@case(1)
def _one_rank_has_the_plain_state_dict_with_or_without_offload(setup: Setup) -> None:
    for number, where in enumerate(PLACES):
        with PLACES[where]() as options:
            twins = twins_of(MOMENTUM, 4 * number, options)
        twins.train(setup, 2)
        assert_identical(twins.plain.state_dict(), twins.opt.state_dict(), where)
        twins.opt.load_state_dict(twins.opt.state_dict())
        twins.train(setup, 1)
        assert_identical(twins.plain.state_dict(), twins.opt.state_dict(), f"{where}, loaded")


def _trained(setup: Setup, stage: int, own: dict[str, Any], steps: int = 3) -> tuple[Any, ZeroRedundancyOptimizer]:
    ddp = DistributedDataParallel(large_model(dtype=torch.bfloat16), gradient_as_bucket_view=True, bucket_cap_mb=CAP)
    opt = shard_optimizer(ddp, AdamW, stage=stage, **own)
    for inputs, targets in batches(setup.rank, steps, seed=steps):
        step_on(opt, nn.functional.mse_loss(ddp(inputs.bfloat16()), targets.bfloat16()))
    return ddp, opt


# On demand


@case(2)
def _offload_state_is_readable_but_no_step_is_taken_until_reload_state(setup: Setup) -> None:
    for stage in (1, 2):
        twins = build_overlapped_twins(ADAMW, 2, bucket_cap_mb=CAP / 2, stage=stage)
        twins.train(setup, 3)
        twins.zero_grad()
        with pytest.raises(RuntimeError, match=r"opt.reload_state\(\) needs an opt.offload_state\(\) before it"):
            twins.opt.reload_state()
        twins.opt.offload_state()
        before = twins.values()
        with pytest.raises(RuntimeError, match=r"an earlier opt.offload_state\(\) has moved away \(rank"):
            twins.opt.offload_state()
        twins.assert_same_state("while it is away")
        inputs, targets = next(batches(setup.rank, 1, seed=5))
        with pytest.raises(RuntimeError, match=r"moved away \(rank \d.*Call opt.reload_state\(\)"):
            nn.functional.mse_loss(twins.model(inputs), targets).backward()
        assert all(torch.equal(*pair) for pair in zip(before, twins.model.parameters(), strict=True))
        twins.opt.reload_state()
        twins.opt.reset()
        twins.opt.zero_grad()
        twins.train(setup, 3, seed=1)
        twins.assert_same_state("after it came back")


@case(2)
def _offload_state_and_reload_state_keep_masters(setup: Setup) -> None:
    model = large_model(dtype=torch.bfloat16)
    opt = ZeroRedundancyOptimizer(model.parameters(), AdamW, master_weights=True)
    masters = {param: master.clone() for param, master in opt.master_weights.items()}
    opt.offload_state("cpu")
    assert all(torch.equal(master, masters[param]) for param, master in opt.master_weights.items())
    opt.reload_state()
    assert all(torch.equal(master, masters[param]) for param, master in opt.master_weights.items())


@case(2)
def _state_that_is_offloaded_already_is_not_moved_again(setup: Setup) -> None:
    opt = ZeroRedundancyOptimizer(large_model().parameters(), AdamW, offload="cpu")
    with pytest.raises(RuntimeError, match="got state that offload= of the optimizer has moved away"):
        opt.offload_state()


@case(2)
def _an_error_of_one_ranks_step_is_raised_on_all(setup: Setup) -> None:
    class Fails(ToyLAMB):
        calls = 0

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.calls += 1
            if setup.rank == 1 and self.calls == 5:
                raise ArithmeticError("no more")
            super().step(closure)

    with offloaded() as options, at_stage(2):
        twins = build_overlapped_twins(
            OptimizerCase("fails", Fails), interleaved=True, bucket_cap_mb=CAP / 2, zero_options=options
        )
        raised = []
        for inputs, targets in batches(setup.rank, 5):
            twins.opt.zero_grad()
            try:
                nn.functional.mse_loss(twins.model(inputs), targets).backward()
                twins.opt.step()
            except (ArithmeticError, RuntimeError) as error:
                raised.append(str(error))
                twins.opt.reset()
        assert len(raised) == 1
        assert "no more" in raised[0]


# What travels, and what waits


def _tower() -> nn.Module:
    """Buckets of 4 KiB, in all of which either rank owns something."""
    state = torch.random.get_rng_state()
    torch.manual_seed(0)
    layers = [nn.Linear(16, 16, bias=False) for _ in range(24)]
    torch.random.set_rng_state(state)
    return nn.Sequential(nn.Linear(8, 16), *layers, nn.Linear(16, 3))


@case(2)
def _a_step_waits_for_copies_exactly_where_the_schedule_says(setup: Setup) -> None:
    for mode in (2, 3, 4, 5):
        with taken_for_a_device(), mock.patch.object(binding, "BUCKET_CAP_BYTES", 2000):
            twins = twins_of(ADAMW, mode, {"offload": "cpu"}, _tower())
            twins.train(setup, 2)
            pipeline, transfer = pipeline_of(twins.opt)
            pipeline.abandon()
            internals.restart(pipeline, Schedule(3))
            schedule = Schedule(3)
            transfer.log.clear()
            twins.train(setup, 3, seed=1)
        buckets = internals.plan_of(twins.opt).buckets
        owns = {bucket.index: bool(bucket.segments[setup.rank].params) for bucket in buckets}
        assert sum(owns.values()) > 4
        assert transfer.log == list(_waits(schedule, owns, steps=3)), f"mode {mode}"


def _waits(schedule: Schedule, owns: dict[int, bool], steps: int) -> Iterator[str]:
    """The waits that the schedule names, of buckets of which anything is copied."""
    bucket_in: dict[int, int] = {}
    for _ in range(steps):
        for actions in (*map(schedule.submit, owns), schedule.drain()):
            for action in actions:
                if isinstance(action, AwaitCopyBack) and owns[bucket_in[action.buffer]]:
                    yield "to device"
                elif isinstance(action, AwaitHost) and owns[action.bucket]:
                    yield "to host"
                elif isinstance(action, CopyToHost):
                    bucket_in[action.buffer] = action.bucket


def _gradient(param: Tensor) -> Tensor | None:
    return on_this_rank(param.grad) if param.grad is not None else None


@case(2)
def _no_operation_of_a_step_mixes_host_and_device_memory(setup: Setup) -> None:
    for stage, options in (
        (1, {}),
        (2, {}),
        (1, {"max_grad_norm": 0.1, "nonfinite": "step"}),
        (2, {"partition": "elements"}),
    ):
        with taken_for_a_device():
            ddp = DistributedDataParallel(large_model(), gradient_as_bucket_view=True, bucket_cap_mb=CAP)
            opt = shard_optimizer(ddp, AdamW, stage=stage, overlap=False, offload="cpu", lr=1e-2, **options)
            for step, (inputs, targets) in enumerate(batches(setup.rank, 4)):
                nn.functional.mse_loss(ddp(inputs), targets).backward()
                if step == 3:
                    grads = [one for one in map(_gradient, ddp.parameters()) if one is not None]
                    stepped = [param for group in opt.optim.param_groups for param in group["params"]]
                    states = [one for state in opt.optim.state.values() for one in state.values() if one.dim()]
                    with TwoMemories([*ddp.parameters(), *grads], [*stepped, *states]) as memories:
                        opt.step()
                    assert memories.operations["host"] > 0
                else:
                    opt.step()
                opt.zero_grad()


@case(2)
def _pinned_bytes_are_those_of_the_formula(setup: Setup) -> None:
    for masters, buffers in ((False, 2), (True, 3)):
        dtype = torch.bfloat16 if masters else torch.float32
        model = _tower().to(dtype)
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=CAP / 2)
        with taken_for_a_device():
            opt = shard_optimizer(
                ddp, AdamW, stage=2, interleaved=True, master_weights=masters, offload=Offload(buffers=buffers)
            )
            for inputs, targets in batches(setup.rank, 4):
                step_on(opt, nn.functional.mse_loss(ddp(inputs.to(dtype)), targets.to(dtype)))
        pipeline, _ = pipeline_of(opt)
        plan = internals.plan_of(opt)
        owned = [bucket.segments[setup.rank] for bucket in plan.buckets]
        size = max(segment.numel for segment in owned) * (4 if masters else 8)  # an fp32 sum; a gradient and a value
        sizes = internals.pinned_bytes(pipeline)
        assert size <= max(sizes) <= size + 16
        assert len(sizes) == buffers <= len(owned)
        assert pipeline.nbytes == sum(sizes)
        assert f"{pipeline.nbytes:,} bytes in {buffers} pinned buffers" in opt.explain()


test_offload = case.each()
