"""A loss scale follows the gradients as `torch.amp.GradScaler`'s does, with patience and a floor if asked."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddp_zero.loss_scale import DynamicLossScale, LossScale

TINY = 2.0**-126
"""A minimum that no test reaches."""


def scales_after(scale: LossScale, steps: str) -> list[float]:
    """The scale after each step: an overflow is an ``x``, a good step a dot."""
    values = []
    for step in steps:
        scale.after_step(has_overflowed=step == "x")
        values.append(scale.value)
    return values


def powers_of_two(smallest: int, largest: int) -> st.SearchStrategy[float]:
    return st.integers(smallest, largest).map(lambda exponent: 2.0**exponent)


# The rule


@given(
    initial=powers_of_two(0, 127),
    growth_factor=powers_of_two(0, 3),
    backoff_factor=powers_of_two(-3, -1),
    growth_interval=st.integers(1, 4),
    overflows=st.lists(st.booleans(), max_size=40),
)
def test_a_scale_without_patience_equals_that_of_grad_scaler(
    initial: float, growth_factor: float, backoff_factor: float, growth_interval: int, overflows: list[bool]
) -> None:
    scale = LossScale(DynamicLossScale(initial, growth_factor, backoff_factor, growth_interval, minimum=TINY))
    theirs, tracker = torch.tensor(initial), torch.tensor(0, dtype=torch.int32)
    for has_overflowed in overflows:
        found = torch.tensor(float(has_overflowed))
        torch._amp_update_scale_(theirs, tracker, found, growth_factor, backoff_factor, growth_interval)
        scale.after_step(has_overflowed)
        assert scale.value == theirs.item()


def test_the_first_growth_may_come_later_than_the_others() -> None:
    scale = LossScale(DynamicLossScale(initial=8.0, growth_interval=2, first_interval=3))
    assert scales_after(scale, ".......") == [8, 8, 16, 16, 32, 32, 64]
    assert scales_after(scale, "x...") == [32, 32, 32, 64]
    state = LossScale(DynamicLossScale(initial=8.0, growth_interval=2, first_interval=3)).state_dict()
    scale.load_state_dict(state)
    assert scales_after(scale, "...") == [8, 8, 16]
    early = LossScale(DynamicLossScale(initial=8.0, growth_interval=3, first_interval=1))
    assert scales_after(early, "....x.") == [16, 16, 16, 32, 16, 32]


def test_every_good_step_may_restore_the_hysteresis() -> None:
    often, once = (
        LossScale(DynamicLossScale(initial=8.0, hysteresis=2, restores_hysteresis=restores))
        for restores in (True, False)
    )
    assert scales_after(often, "x.x.xx") == [8, 8, 8, 8, 8, 4]
    assert scales_after(once, "x.x.xx") == [8, 8, 4, 4, 2, 1]


def test_defaults_of_a_dynamic_scale_are_those_of_grad_scaler() -> None:
    policy, theirs = DynamicLossScale(), torch.amp.GradScaler("cpu")
    assert (policy.initial, policy.growth_factor) == (theirs.get_scale(), theirs.get_growth_factor())
    assert (policy.backoff_factor, policy.growth_interval) == (
        theirs.get_backoff_factor(),
        theirs.get_growth_interval(),
    )
    assert policy.hysteresis == 1


# Patience


@given(hysteresis=st.integers(1, 5), growth_interval=st.integers(1, 4), steps=st.text(alphabet="x.", max_size=40))
def test_patience_postpones_backing_off_alone(hysteresis: int, growth_interval: int, steps: str) -> None:
    policy = DynamicLossScale(2.0**60, growth_interval=growth_interval, hysteresis=hysteresis, minimum=TINY)
    overflows_since_growth, good = 0, 0
    before, expected = policy.initial, []
    for step in steps:
        overflows_since_growth += step == "x"
        good = 0 if step == "x" else good + 1
        if step == "x" and overflows_since_growth >= hysteresis:
            before /= 2
        if good == growth_interval:
            before, good, overflows_since_growth = before * 2, 0, 0
        expected.append(before)
    assert scales_after(LossScale(policy), steps) == expected


# Limits


def test_it_stays_at_the_minimum_which_need_not_be_the_initial_one_divided() -> None:
    scale = LossScale(DynamicLossScale(initial=8.0, minimum=3.0, growth_interval=2))
    assert scales_after(scale, "xxx") == [4, 3, 3]
    assert scales_after(scale, "..") == [3, 6]


def test_it_is_at_its_minimum_where_the_next_overflow_cannot_lower_it() -> None:
    scale = LossScale(DynamicLossScale(initial=4.0))
    seen = []
    for _ in range(3):
        seen.append(scale.is_at_minimum)
        scale.after_step(has_overflowed=True)
    assert (seen, scale.is_at_minimum) == ([False, False, True], True)


def test_it_is_not_at_its_minimum_while_it_has_patience() -> None:
    scale = LossScale(DynamicLossScale(initial=1.0, hysteresis=3))
    seen = []
    for _ in range(4):
        seen.append(scale.is_at_minimum)
        scale.after_step(has_overflowed=True)
    assert seen == [False, False, True, True]


def test_a_scale_at_its_minimum_grows_away_from_it() -> None:
    scale = LossScale(DynamicLossScale(initial=1.0, growth_interval=1))
    assert scale.is_at_minimum
    assert scales_after(scale, ".") == [2]
    assert not scale.is_at_minimum


@pytest.mark.parametrize("growth_factor", [2.0, 3.0, 1e30])
def test_a_scale_grows_up_to_what_fp32_can_hold(growth_factor: float) -> None:
    scale = LossScale(DynamicLossScale(initial=2.0**120, growth_factor=growth_factor, growth_interval=1))
    values = scales_after(scale, "." * 20)
    assert max(values) <= 2.0**127
    assert max(values) * growth_factor > 2.0**127
    assert all(math.isfinite(value) for value in torch.tensor(values, dtype=torch.float32).tolist())
    assert values == sorted(values)


def test_at_the_largest_scale_a_growth_renews_patience_alone() -> None:
    scale = LossScale(DynamicLossScale(initial=2.0**126, growth_interval=1, hysteresis=2))
    assert scales_after(scale, "...") == [2.0**127] * 3
    assert scales_after(scale, "x.x") == [2.0**127] * 3
    assert scales_after(scale, "x") == [2.0**126]


# A scale that does not follow


@pytest.mark.parametrize("number", [1024.0, 1024, 0.5])
def test_a_number_is_a_scale_that_never_changes(number: float) -> None:
    scale = LossScale(number)
    assert not scale.is_dynamic
    assert isinstance(scale.value, float)
    assert scales_after(scale, "x.x.xxxx....") == [number] * 12
    assert not scale.is_at_minimum


def test_a_dynamic_loss_scale_begins_at_its_initial_value() -> None:
    scale = LossScale(DynamicLossScale(initial=32))
    assert scale.is_dynamic
    assert (scale.value, type(scale.value)) == (32.0, float)


# Refused


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("initial", value) for value in (0.0, -1.0, 0.5, math.inf, math.nan)],
        *[("minimum", value) for value in (0.0, -1.0, 1e6, math.inf, math.nan)],
        *[("initial", 1e300), ("minimum", 1e-60)],
        *[("growth_factor", value) for value in (0.5, 0.0, -2.0, math.inf, math.nan)],
        *[("backoff_factor", value) for value in (0.0, 1.0, 2.0, -0.5, math.nan)],
        *[("growth_interval", value) for value in (0, -3)],
        *[("hysteresis", value) for value in (0, -1)],
    ],
)
def test_a_number_out_of_range_is_refused_with_its_name_and_value(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=r"^Expected .*got ") as raised:
        DynamicLossScale(**{name: value})
    assert name in str(raised.value)
    assert str(value) in str(raised.value).partition("got")[2]


@pytest.mark.parametrize(
    ("name", "value"),
    [("initial", "x"), ("growth_factor", True), ("growth_interval", 2.5), ("hysteresis", True), ("minimum", None)],
)
def test_arguments_that_are_no_numbers_are_refused_with_name_and_value(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=rf"^Expected {name} to be an? .*got {value!r}"):
        DynamicLossScale(**{name: value})
