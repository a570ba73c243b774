"""accelerate with this library's optimizer, untouched and by `prepare`, next to DDP with the plain optimizer."""

from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from tests.frameworks.job import as_a_job, assert_equal, assert_moved, forget, run_and_resume, scale_on_a_cpu, values
from tests.multiproc.cases import sum_in_rank_order
from tests.multiproc.harness import Cases, Setup

pytest.importorskip("accelerate", minversion="1.15")

from accelerate import Accelerator

from ddp_zero import ZeroRedundancyOptimizer
from ddp_zero.integrations.accelerate import prepare

case = Cases(as_a_job, timeout=240)

OPTIONS: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1}
STEPS, GLOBAL_BATCH = 12, 12
Prepared = tuple[Any, Any, Any, Any]
Preparing = Callable[..., Prepared]
schedule = partial(StepLR, step_size=4, gamma=0.5)


def build_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))


def build_loader(world_size: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(5)
    data = TensorDataset(
        torch.randn(STEPS * GLOBAL_BATCH, 6, generator=generator),
        torch.randn(STEPS * GLOBAL_BATCH, 1, generator=generator),
    )
    return DataLoader(data, batch_size=GLOBAL_BATCH // world_size)


# Who prepares


def plainly(accelerator: Accelerator, model: nn.Module, loader: Any, **own: Any) -> Prepared:
    opt = AdamW(model.parameters(), **own, **OPTIONS)
    prepared: Prepared = accelerator.prepare(model, opt, loader, schedule(opt))
    return prepared


def in_rank_order(accelerator: Accelerator, model: nn.Module, loader: Any, **own: Any) -> Prepared:
    prepared = plainly(accelerator, model, loader, **own)
    prepared[0].register_comm_hook(None, sum_in_rank_order)
    return prepared


def untouched_before(accelerator: Accelerator, model: nn.Module, loader: Any, **own: Any) -> Prepared:
    opt = ZeroRedundancyOptimizer(model.parameters(), AdamW, **own, **OPTIONS)
    prepared: Prepared = accelerator.prepare(model, opt, loader, schedule(opt))
    return prepared


def untouched_after(accelerator: Accelerator, model: nn.Module, loader: Any, **own: Any) -> Prepared:
    ddp = accelerator.prepare(model)
    opt = ZeroRedundancyOptimizer(ddp.parameters(), AdamW, **own, **OPTIONS)
    rest: tuple[Any, Any, Any] = accelerator.prepare(opt, loader, schedule(opt))
    return ddp, *rest


def by_prepare(**options: Any) -> Preparing:
    def prepares(accelerator: Accelerator, model: nn.Module, loader: Any, **own: Any) -> Prepared:
        prepared: Prepared = prepare(accelerator, model, AdamW, loader, schedule, **options, **own, **OPTIONS)
        return prepared

    return prepares


PREPARED = {
    "stage 1, untouched": untouched_before,
    "stage 1": by_prepare(stage=1),
    "stage 2": by_prepare(stage=2),
    "stage 2, not overlapped": by_prepare(stage=2, overlap=False),
}
RECIPES: dict[str, dict[str, Any]] = {
    "train": {},
    "clip": {"clip": 0.05},
    "clip values": {"clip_value": 0.01},
    "accumulate": {"accumulate": 2},
    "clip and accumulate": {"clip": 0.05, "accumulate": 3},
    "bf16": {"precision": "bf16", "clip": 0.05},
    "fp16": {"precision": "fp16", "clip": 0.05},
}
OVERFLOWS: dict[str, Any] = {"precision": "fp16", "init_scale": 2.0**20}
CLIPS: tuple[dict[str, Any], ...] = ({}, {"clip": 0.05}, {"clip_value": 0.01}, {"clip": 0.05, "accumulate": 2})


def trained(
    setup: Setup,
    prepares: Preparing,
    *,
    clip: float | None = None,
    clip_value: float | None = None,
    accumulate: int = 1,
    precision: str = "no",
    init_scale: float = 1024.0,
    save: Path | None = None,
    load: Path | None = None,
    **own: Any,
) -> tuple[dict[str, Tensor], list[Any]]:
    """Parameters after an epoch and what was seen of every step; saved in the middle, or continued from there."""
    forget()
    accelerator = Accelerator(gradient_accumulation_steps=accumulate, mixed_precision=precision)
    if precision == "fp16":
        scale_on_a_cpu(accelerator, init_scale)
    inner = build_model()
    before = values(inner)
    model, opt, loader, scheduler = prepares(accelerator, inner, build_loader(setup.world_size), **own)
    middle, seen, skipped = STEPS // 2, [], 0
    if load is not None:
        accelerator.load_state(str(load))
        loader = accelerator.skip_first_batches(loader, middle)
    for number, (inputs, targets) in enumerate(loader, start=1 if load is None else middle + 1):
        with accelerator.accumulate(model):
            loss = (model(inputs) - targets).square().mean()
            accelerator.backward(loss)
            norm = None
            if accelerator.sync_gradients and clip is not None:
                norm = accelerator.clip_grad_norm_(model.parameters(), clip)
            if accelerator.sync_gradients and clip_value is not None:
                accelerator.clip_grad_value_(model.parameters(), clip_value)
            opt.step()
            scheduler.step()
            opt.zero_grad()
            skipped += accelerator.optimizer_step_was_skipped
        scale = None if accelerator.scaler is None else accelerator.scaler.get_scale()
        seen.append((loss.detach(), norm, scheduler.get_last_lr(), scale))
        if number == middle and save is not None:
            accelerator.save_state(str(save))
    after = values(inner)
    assert len(seen) == (STEPS if load is None else STEPS - middle)
    assert_moved(before, after)
    if load is None:
        overflows = init_scale > 1024.0
        assert (skipped > 2) is (overflows and not own.get("fused")), f"{skipped} steps were skipped"
        assert not overflows or accelerator.scaler.get_scale() < init_scale, "no step has overflowed"
    accelerator.free_memory()
    return after, seen


def equal_training(setup: Setup, prepares: Preparing, where: str, **recipe: Any) -> None:
    assert_equal(trained(setup, plainly, **recipe), trained(setup, prepares, **recipe), where)


@case(2)
def _stage_1_untouched(setup: Setup) -> None:
    for name, recipe in RECIPES.items():
        equal_training(setup, untouched_before, f"built before, {name}", **recipe)
        equal_training(setup, untouched_after, f"built after, {name}", **recipe)


def _each_recipe(setup: Setup, stage: str) -> None:
    equal_training(setup, PREPARED[stage], f"{stage}, fp16 with overflows", **OVERFLOWS)
    for name, recipe in RECIPES.items():
        equal_training(setup, PREPARED[stage], f"{stage}, {name}", **recipe)


@case(2)
def _stage_1(setup: Setup) -> None:
    _each_recipe(setup, "stage 1")


@case(2)
def _stage_2(setup: Setup) -> None:
    _each_recipe(setup, "stage 2")


@case(2)
def _stage_2_not_overlapped(setup: Setup) -> None:
    _each_recipe(setup, "stage 2, not overlapped")


@case(2)
def _fp16_overflows_as_with_the_plain_optimizer(setup: Setup) -> None:
    """Fused or not, clipped or not, resumed: schedules and scales, too."""
    for number, (fused, clip) in enumerate(product((True, False), CLIPS)):
        recipe: dict[str, Any] = {**OVERFLOWS, **clip, "fused": fused}
        expected = trained(setup, plainly, **recipe)
        for stage, prepares in PREPARED.items():
            where, place = f"{stage}, {recipe}", setup.folder / f"{number}-{stage}"
            assert_equal(expected, trained(setup, prepares, save=place, **recipe), where)
            resumed = trained(setup, prepares, load=place, **recipe)
            assert_equal((expected[0], expected[1][STEPS // 2 :]), resumed, f"{where}, resumed")


@case(2)
def _clips_inside_the_step(setup: Setup) -> None:
    expected, _ = trained(setup, plainly, clip=0.05)
    for stage in (1, 2):
        actual, _ = trained(setup, by_prepare(stage=stage, max_grad_norm=0.05))
        assert_equal(expected, actual, f"stage {stage}")


@case(2)
def _steps_inside_backward(setup: Setup) -> None:
    for stage in (1, 2):
        accelerator = Accelerator()
        model, opt, loader, _ = by_prepare(stage=stage)(accelerator, build_model(), build_loader(setup.world_size))
        for inputs, targets in loader:
            accelerator.backward((model(inputs) - targets).square().mean())
            opt.step()
            opt.zero_grad()
        assert "regime: overlapped" in opt.optimizer.explain()
        assert model.gradient_as_bucket_view


@case(2)
def _a_scheduler_waits_for_a_step_that_is_taken(setup: Setup) -> None:
    forget()
    accelerator = Accelerator()
    by = by_prepare(stage=2, max_grad_norm=0.05)
    model, opt, loader, scheduler = by(accelerator, build_model(), build_loader(setup.world_size))
    rates = []
    for number, (inputs, targets) in enumerate(loader):
        spoilt = number == 1 and setup.rank == 1
        accelerator.backward((model(inputs) - targets).square().mean() * (float("inf") if spoilt else 1.0))
        opt.step()
        scheduler.step()
        opt.zero_grad()
        assert accelerator.optimizer_step_was_skipped is (number == 1)
        rates.append(scheduler.get_last_lr()[0])
    assert rates[:5] == [0.05, 0.05, 0.025, 0.025, 0.0125], (
        "two steps of a scheduler at two ranks, but for the skipped one"
    )


# Saving and loading


def _saves(setup: Setup, stage: str) -> None:
    folder, prepares = setup.folder, PREPARED[stage]
    for name in ("train", "clip and accumulate"):
        recipe = RECIPES[name]
        expected = trained(setup, plainly, save=folder / f"{name}-plain", **recipe)
        actual = trained(setup, prepares, save=folder / f"{name}-{stage}", **recipe)
        assert_equal(expected, actual, f"{stage}, a run that saves, {name}")
        saved = folder / f"{name}-{stage}"
        if prepares is not untouched_before:
            assert len(list((saved / "zero_0").glob("step-*/complete.json"))) == 1
            assert (saved / "optimizer.bin").stat().st_size < 2000, "the whole state is in accelerate's own file"
        for start in (saved, folder / f"{name}-plain"):
            resumed, seen = trained(setup, prepares, load=start, **recipe)
            assert_equal((expected[0], expected[1][STEPS // 2 :]), (resumed, seen), f"{stage}, {name}, from {start}")


@case(2)
def _stage_1_untouched_saves(setup: Setup) -> None:
    """All ranks ask for the state dict at once, and every rank loads the whole one."""
    _saves(setup, "stage 1, untouched")


@case(2)
def _stage_1_saves(setup: Setup) -> None:
    _saves(setup, "stage 1")


@case(2)
def _stage_2_saves(setup: Setup) -> None:
    _saves(setup, "stage 2")


@case(2)
def _the_state_is_shown_outside_save_state(setup: Setup) -> None:
    accelerator = Accelerator()
    model, opt, loader, _ = PREPARED["stage 2"](accelerator, build_model(), build_loader(setup.world_size))
    inputs, targets = next(iter(loader))
    accelerator.backward((model(inputs) - targets).square().mean())
    opt.step()
    opt.zero_grad()
    accelerator.save_state(str(setup.folder / "state"))
    for rank in range(setup.world_size):
        opt.optimizer.consolidate_state_dict(to=rank)
    assert len(opt.state_dict()["state"]) == 6
    accelerator.save_model(model, str(setup.folder / "model"))
    torch.distributed.barrier()
    from safetensors.torch import load_file

    saved = load_file(setup.folder / "model" / "model.safetensors")
    assert_equal(values(model.module), saved, "save_model")


@case(2)
def _files_saved_from_flat_storage_hold_every_parameter(setup: Setup) -> None:
    """Accelerate and safetensors keep one of the tensors that share a storage."""
    from safetensors.torch import load_file, save_file, save_model

    def in_flat_storage(accelerator: Accelerator, model: nn.Module, loader: Any) -> Prepared:
        opt = ZeroRedundancyOptimizer(model.parameters(), AdamW, parameters_as_bucket_view=True, **OPTIONS)
        prepared: Prepared = accelerator.prepare(model, opt, loader, schedule(opt))
        return prepared

    for number, prepares in enumerate((in_flat_storage, PREPARED["stage 1"], PREPARED["stage 2"])):
        forget()
        accelerator = Accelerator()
        model, opt, loader, _ = prepares(accelerator, build_model(), build_loader(setup.world_size))
        for inputs, targets in list(loader)[:3]:
            accelerator.backward((model(inputs) - targets).square().mean())
            opt.step()
            opt.zero_grad()
        folder, trained = setup.folder / f"{number}", values(model.module)
        assert not next(model.parameters()).untyped_storage().resizable(), "not in flat storage"
        accelerator.save_state(str(folder / "state"))
        accelerator.save_model(model, str(folder / "model"))
        if accelerator.is_main_process:
            save_model(model.module, str(folder / "whole.safetensors"))
            save_file(model.module.state_dict(), str(folder / "dict.safetensors"))
        torch.distributed.barrier()
        for name in ("state/model", "model/model", "whole", "dict"):
            assert_equal(trained, load_file(folder / f"{name}.safetensors"), f"{number}, {name}")
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        accelerator.load_state(str(folder / "state"))
        assert_equal(trained, values(model.module), f"{number}, loaded")


def _trains_or_resumes(setup: Setup, folder: Path, stage: str, resume: bool) -> None:
    plain = in_rank_order if setup.world_size > 2 and stage == "stage 2" else plainly
    results = []
    for name, prepares in (("plain", plain), ("ours", PREPARED[stage])):
        place: dict[str, Any] = {"load": folder / name} if resume else {"save": folder / name}
        results.append(trained(setup, prepares, clip=0.05, **place))
    assert_equal(results[0], results[1], f"{stage} at {setup.world_size} ranks")


@pytest.mark.parametrize("stage", ["stage 1, untouched", "stage 1", "stage 2"])
@pytest.mark.parametrize("sizes", [(2, 3), (3, 2)])
def test_loads_at_another_number_of_ranks(stage: str, sizes: tuple[int, int], tmp_path: Path) -> None:
    run_and_resume(_trains_or_resumes, sizes, tmp_path, stage)


# What is refused


@case(2)
def _what_cannot_be_prepared_is_refused(setup: Setup) -> None:
    accelerator = Accelerator()
    model = build_model()
    with pytest.raises(TypeError, match=r"Expected a function of the optimizer .* Pass functools.partial\(StepLR"):
        prepare(accelerator, model, AdamW, schedule(AdamW(model.parameters())))
    other = nn.Linear(2, 2)
    ddp, _ = prepare(accelerator, model, AdamW, stage=2, **OPTIONS)
    other(torch.ones(2)).sum().backward()
    ddp(torch.ones(3, 6)).sum().backward()
    with pytest.raises(ValueError, match="2 parameters with a gradient are not in this sharded optimizer"):
        accelerator.clip_grad_norm_([*ddp.parameters(), *other.parameters()], 1.0)
    assert accelerator.clip_grad_norm_(other.parameters(), 1.0) > 0


def test_a_job_without_ddp_is_refused() -> None:
    try:
        with pytest.raises(RuntimeError, match=r"several processes with DDP, got DistributedType.NO.*\[ZERO-911\]"):
            prepare(Accelerator(cpu=True), build_model(), AdamW, **OPTIONS)
    finally:
        forget()


test_accelerate = case.each()
