"""The schedules as plain numbers, worked out by hand."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from ddp_zero.deepspeed.config.table import ConfigError
from ddp_zero.deepspeed.schedules import CURVES, OneCycle, Schedule, build_curve


def rates(name: str, iterations: range, base: float = 0.5, **params: Any) -> list[float]:
    curve = build_curve(name, params)
    return [curve.lr(iteration, base, 0) for iteration in iterations]


def test_warmup_lr_rises_linearly_or_by_logarithm_and_stays() -> None:
    linear = rates(
        "WarmupLR", range(-1, 6), warmup_min_lr=1.0, warmup_max_lr=5.0, warmup_num_steps=4, warmup_type="linear"
    )
    assert linear == [1.0, 1.0, 2.0, 3.0, 4.0, 5.0, 5.0]
    log = rates("WarmupLR", range(-1, 4), warmup_max_lr=2.0, warmup_num_steps=3)
    assert log == pytest.approx([0, 0, 2 * math.log(2) / math.log(3), 2.0, 2.0])


def test_warm_up_ends_at_the_rate_of_the_group_and_is_two_steps_long_at_least() -> None:
    assert rates("WarmupLR", range(-1, 3), base=0.25, warmup_num_steps=1, warmup_type="linear") == [0, 0, 0.125, 0.25]


def test_warmup_decay_lr_falls_linearly_to_zero() -> None:
    found = rates(
        "WarmupDecayLR", range(-1, 9), total_num_steps=6, warmup_max_lr=4.0, warmup_num_steps=2, warmup_type="linear"
    )
    assert found == [0, 0, 2, 4, 3, 2, 1, 0, 0, 0]
    assert rates("WarmupDecayLR", range(2, 3), total_num_steps=10, warmup_num_steps=2) == [0.001]


def test_warmup_cosine_lr_multiplies_the_rate_of_the_group() -> None:
    found = rates(
        "WarmupCosineLR",
        range(-1, 8),
        base=10.0,
        total_num_steps=6,
        warmup_num_steps=2,
        warmup_type="linear",
        cos_min_ratio=0.1,
    )
    cosine = [10 * (0.1 + 0.9 * (1 + math.cos(math.pi * quarter / 4)) / 2) for quarter in (1, 2, 3, 4)]
    assert found == pytest.approx([0, 0, 5, *cosine, 1, 1])
    assert rates("WarmupCosineLR", range(0, 1), 1.0, total_num_steps=9, warmup_min_ratio=0.5) == [0.5]


def test_lr_range_test_rises_linearly_or_in_stairs() -> None:
    options: dict[str, Any] = dict(lr_range_test_min_lr=1.0, lr_range_test_step_size=2, lr_range_test_step_rate=3.0)
    assert rates("LRRangeTest", range(-1, 4), **options) == [1.0, 2.5, 4.0, 5.5, 7.0]
    assert rates("LRRangeTest", range(-1, 4), lr_range_test_staircase=True, **options) == [1.0, 1.0, 4.0, 4.0, 7.0]


def test_one_cycle_rises_falls_and_decays() -> None:
    options: dict[str, Any] = dict(
        cycle_min_lr=1.0, cycle_max_lr=5.0, cycle_first_step_size=4, cycle_second_step_size=2
    )
    assert rates("OneCycle", range(-1, 6), **options) == pytest.approx([1, 2, 3, 4, 5, 3, 1])
    assert rates("OneCycle", range(6, 8), **options) == [1, 1]
    decayed = rates("OneCycle", range(6, 8), decay_step_size=2, decay_lr_rate=1.0, **options)
    assert decayed == [1 / 1.5, 1 / 2.0]


def test_one_cycle_with_stair_counts_rises_in_stairs() -> None:
    found = rates(
        "OneCycle", range(-1, 8), cycle_min_lr=0.0, cycle_max_lr=4.0, cycle_first_step_size=4, cycle_first_stair_count=2
    )
    assert found == [0, 0, 2, 2, 4, 2, 2, 0, 0]


def test_one_cycle_lowers_the_first_beta_while_the_rate_rises() -> None:
    options: dict[str, Any] = dict(cycle_min_lr=1.0, cycle_max_lr=5.0, cycle_first_step_size=2)
    curve = OneCycle(cycle_min_mom=0.5, cycle_max_mom=0.75, decay_mom_rate=1.0, decay_step_size=1, **options)
    found = [curve.betas(iteration, 0) for iteration in range(-1, 6)]
    assert found == [
        (0.5, 0.99),
        *[(first, 0.99) for first in (0.625, 0.5, 0.625, 0.75)],
        *[(0.75 * 2, 0.99), (0.75 * 3, 0.99)],
    ]
    assert OneCycle(cycle_momentum=False, **options).betas(0, 0) is None
    assert CURVES["WarmupLR"]().betas(0, 0) is None


def test_groups_may_have_rates_of_their_own() -> None:
    curve = build_curve("WarmupLR", {"warmup_max_lr": [1.0, 3.0], "warmup_num_steps": 2, "warmup_type": "linear"})
    assert [curve.lr(1, 0.0, group) for group in (0, 1)] == [0.5, 1.5]

    def optimizer(groups: int) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": [nn.Parameter(torch.ones(1))]} for _ in range(groups)], lr=1.0)

    Schedule(optimizer(2), curve)
    with pytest.raises(ConfigError, match="Expected 3 values in warmup_max_lr of WarmupLR"):
        Schedule(optimizer(3), curve)


@pytest.mark.parametrize(
    ("name", "params", "told"),
    [
        ("WarmupLR", {"warmup_nun_steps": 1}, "got 'warmup_nun_steps'; did you mean 'warmup_num_steps'"),
        ("WarmupLR", {"warmup_num_steps": 0}, "warmup_num_steps of WarmupLR"),
        ("WarmupLR", {"warmup_type": "cubic"}, "'log' or 'linear'"),
        ("WarmupDecayLR", {}, "Expected total_num_steps in scheduler.params of WarmupDecayLR"),
        ("WarmupCosineLR", {"total_num_steps": True}, "total_num_steps of WarmupCosineLR"),
        ("OneCycle", {"cycle_min_lr": 1}, "Expected cycle_max_lr"),
        ("OneCycle", {"cycle_min_lr": 1, "cycle_max_lr": 2, "cycle_first_step_size": 0}, "cycle_first_step_size above"),
        ("OneCycle", {"cycle_min_lr": 1, "cycle_max_lr": 2, "cycle_second_step_size": -1}, "cycle_second_step_size"),
        ("LRRangeTest", {"lr_range_test_step_size": 1.5}, "lr_range_test_step_size"),
    ],
)
def test_wrong_options_are_refused(name: str, params: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as raised:
        build_curve(name, params)
    assert told in str(raised.value)
