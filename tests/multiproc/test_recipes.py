"""Clipping, loss scales, masters, accumulation: bit for bit DDP, the unsharded optimizer and torch's own parts."""

import math
from collections.abc import Iterator

import pytest
import torch

from tests.multiproc.cases import assert_equal_models, optimizer_case
from tests.multiproc.harness import Setup, run_ranks
from tests.multiproc.recipes import MODES, Outcome, Recipe, Reference, Sharded, low_precision_model, micro_batches

STEPS = 8  # two after the last overflow, and scales grow once before
STEPS_WITHOUT_OVERFLOW = 4  # two with DDP's final buckets
BF16, FP16 = torch.bfloat16, torch.float16
OVERFLOWS = (0, 4, 5)

RECIPES = [
    Recipe("clip inside", clip=0.3),
    Recipe("clip inside, largest element", clip=0.05, norm_type=math.inf),
    Recipe("clip inside, norm 3", clip=0.1, norm_type=3.0),
    Recipe("clip a group on its own", clip=0.2, group_clip=0.05),
    Recipe("clip by a call", clip=0.3, clips_inside=False),
    Recipe("clip inside, skip", clip=0.3, overflows=OVERFLOWS),
    Recipe("skip", overflows=OVERFLOWS),
    Recipe("GradScaler", scaler="torch", overflows=OVERFLOWS),
    Recipe("GradScaler, unscale", scaler="torch", unscales=True, overflows=OVERFLOWS),
    Recipe("GradScaler, unscale, clip by a call", scaler="torch", clip=0.3, clips_inside=False, overflows=OVERFLOWS),
    Recipe("GradScaler, clip inside", scaler="torch", clip=0.3, overflows=OVERFLOWS),
    Recipe("GradScaler, fused", scaler="torch", overflows=OVERFLOWS, optimizer="AdamW fused"),
    Recipe("GradScaler, fused, a scale of 1,000", scaler="torch", optimizer="AdamW fused", initial=1000.0),
    Recipe("GradScaler, a scale of 1,000", scaler="torch", unscales=True, initial=1000.0),
    Recipe(
        "GradScaler, fused, unscale, clip by a call",
        scaler="torch",
        clip=0.3,
        clips_inside=False,
        overflows=OVERFLOWS,
        optimizer="AdamW fused",
    ),
    Recipe("own loss scale", scaler="own", overflows=OVERFLOWS),
    Recipe("own loss scale, clip inside", scaler="own", clip=0.3, overflows=OVERFLOWS),
    Recipe("autocast, GradScaler", scaler="torch", autocast=True, overflows=OVERFLOWS),
    Recipe("masters of bf16", dtype=BF16, masters=True),
    Recipe("masters of fp16", dtype=FP16, masters=True),
    Recipe("masters of bf16, clip inside", dtype=BF16, masters=True, clip=0.3),
    Recipe("masters of fp16, own loss scale", dtype=FP16, masters=True, scaler="own", overflows=OVERFLOWS),
    Recipe(
        "masters of fp16, own loss scale, clip inside",
        dtype=FP16,
        masters=True,
        scaler="own",
        clip=0.3,
        overflows=OVERFLOWS,
    ),
    Recipe("bf16 without masters", dtype=BF16),
    Recipe("bf16 without masters, clip inside", dtype=BF16, clip=0.3),
    Recipe("bf16 without masters, clip by a call", dtype=BF16, clip=0.3, clips_inside=False),
    Recipe("masters of bf16, skip", dtype=BF16, masters=True, overflows=OVERFLOWS),
    Recipe("accumulate", accumulate=3),
    Recipe("accumulate, clip inside", accumulate=3, clip=0.3),
    Recipe("accumulate, GradScaler", accumulate=3, scaler="torch", overflows=OVERFLOWS),
    Recipe("accumulate, own loss scale, clip inside", accumulate=3, scaler="own", clip=0.3, overflows=OVERFLOWS),
]


STAGE_2_ONLY = [
    Recipe("masters of bf16, accumulate", dtype=BF16, masters=True, accumulate=3),
    Recipe("masters of bf16, accumulate, clip inside", dtype=BF16, masters=True, accumulate=3, clip=0.3),
]


def combinations(stage: int, is_full: bool) -> Iterator[tuple[Recipe, str]]:
    """Every recipe in every mode; or in one of the modes and one of the stages in turn."""
    modes = MODES[stage]
    for place, recipe in enumerate(RECIPES if stage == 1 else RECIPES + STAGE_2_ONLY):
        if is_full:
            yield from ((recipe, mode) for mode in modes)
        elif place >= len(RECIPES) or place % 2 == stage % 2:
            yield recipe, modes[place // 2 % len(modes)]


def _follow(setup: Setup, stage: int, is_full: bool) -> dict[str, tuple[int, int]]:
    """Train every combination beside its reference; how many steps each took and skipped."""
    taken = {}
    for recipe, mode in combinations(stage, is_full):
        case = optimizer_case(recipe.optimizer)
        model = low_precision_model(recipe.dtype)
        plain = Reference(recipe, model, case.build, case.options, stage)
        ours = Sharded(recipe, model, case.build, case.options, stage, mode)
        name = f"{recipe.name}, stage {stage}, {mode}"
        before = [param.detach().clone() for param in model.parameters()]
        outcomes: list[Outcome] = []
        all_steps = STEPS if recipe.overflows or is_full else STEPS_WITHOUT_OVERFLOW
        for step, data in enumerate(micro_batches(setup.rank, all_steps, recipe.accumulate)):
            expected, got = plain.train(data), ours.train(data)
            assert_same(expected, got, f"{name}, step {step}")
            assert_equal_models(plain.model, ours.model, f"{name}, after step {step}")
            outcomes.append(got)
        assert all(not torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True)), name
        steps = sum(outcome.stepped for outcome in outcomes)
        taken[name] = steps, all_steps - steps
        expected_skips = len(recipe.overflows)
        assert taken[name][1] >= expected_skips, f"{name}: skipped {taken[name][1]} of {expected_skips}"
    return taken


def assert_same(expected: Outcome, got: Outcome, where: str) -> None:
    assert got.stepped == expected.stepped, f"{where}: {got} and {expected}"
    assert got.scale == expected.scale, f"{where}: {got} and {expected}"
    assert got.calls == expected.calls, f"{where}: {got} and {expected}"
    assert got.norm == expected.norm or (not expected.stepped and not math.isfinite(expected.norm or 0.0)), where


def _assert_parity(stage: int, world_size: int, is_full: bool) -> None:
    counts = run_ranks(_follow, world_size, stage, is_full, timeout=400)
    assert all(count == counts[0] for count in counts), "the ranks have decided alike"
    assert len(counts[0]) == len(list(combinations(stage, is_full)))


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.nightly), 2, 3])
@pytest.mark.parametrize("stage", [1, 2])
def test_a_step_that_needs_all_gradients_equals_ddp_with_torchs_own_parts(stage: int, world_size: int) -> None:
    _assert_parity(stage, world_size, is_full=False)


@pytest.mark.nightly
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("stage", [1, 2])
def test_every_recipe_equals_its_reference_in_every_mode(stage: int, world_size: int) -> None:
    _assert_parity(stage, world_size, is_full=True)
