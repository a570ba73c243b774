"""Options of a step: what they refuse, and which of them make it wait for all gradients."""

import dataclasses
import math
from typing import Any

import pytest

from ddp_zero.loss_scale import DynamicLossScale
from ddp_zero.options import NONFINITE, Nonfinite, Offload, StepOptions, check_max_grad_norm


def test_by_default_nothing_is_asked_of_a_step_and_it_does_not_wait() -> None:
    options = StepOptions()
    assert dataclasses.asdict(options) == {
        "max_grad_norm": None,
        "norm_type": 2.0,
        "nonfinite": None,
        "loss_scale": None,
        "master_weights": False,
        "accumulate_in_fp32": False,
        "sync": "step",
        "offload": None,
    }
    assert options.why_wait() is None


def test_equal_options_are_written_alike_so_that_ranks_can_compare_them() -> None:
    one, other = (StepOptions(nonfinite="skip", loss_scale=DynamicLossScale(minimum=2.0)) for _ in range(2))
    assert repr(one) == repr(other)
    assert repr(one) != repr(StepOptions(nonfinite="skip", loss_scale=DynamicLossScale()))


# Waiting

WAITING: list[tuple[dict[str, Any], str | None]] = [
    ({"max_grad_norm": 1.0}, "max_grad_norm"),
    ({"max_grad_norm": math.inf}, "max_grad_norm"),
    ({"loss_scale": 1024.0}, "loss_scale"),
    ({"loss_scale": DynamicLossScale()}, "loss_scale"),
    ({"loss_scale": DynamicLossScale(), "nonfinite": "skip"}, "loss_scale"),
    ({"nonfinite": "skip"}, "nonfinite='skip'"),
    ({"nonfinite": "raise"}, "nonfinite='raise'"),
    ({"nonfinite": "step", "max_grad_norm": 1.0}, "max_grad_norm"),
    ({"nonfinite": "step"}, None),
    ({"norm_type": 1.0}, None),
    ({"master_weights": True}, None),
    ({"master_weights": True, "nonfinite": "step", "norm_type": math.inf}, None),
]


@pytest.mark.parametrize(("given", "names"), WAITING, ids=[repr(given) for given, _ in WAITING])
def test_a_step_waits_for_all_gradients_where_an_option_needs_them_and_says_which(
    given: dict[str, Any], names: str | None
) -> None:
    why = StepOptions(**given).why_wait()
    if names is None:
        assert why is None
    else:
        assert why is not None
        assert why.startswith(f"{names} needs ")


# Values


@pytest.mark.parametrize("value", [0, 0.0, -1.0, -math.inf, math.nan])
def test_a_largest_norm_that_is_not_above_0_is_refused(value: float) -> None:
    for refused in (check_max_grad_norm, lambda norm: StepOptions(max_grad_norm=norm)):
        with pytest.raises(ValueError, match=r"^Expected max_grad_norm above 0, got ") as raised:
            refused(value)
        assert repr(value) in str(raised.value)


@pytest.mark.parametrize("value", ["1.0", True, False, [1.0], 1j])
def test_a_largest_norm_that_is_no_number_is_refused(value: Any) -> None:
    for refused in (check_max_grad_norm, lambda norm: StepOptions(max_grad_norm=norm)):
        with pytest.raises(TypeError, match=r"^Expected max_grad_norm to be a number, got ") as raised:
            refused(value)
        assert repr(value) in str(raised.value)


@pytest.mark.parametrize("value", [0, -2.0, -math.inf, math.nan])
def test_a_norm_type_that_is_not_above_0_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match=r"^Expected norm_type above 0, got ") as raised:
        StepOptions(norm_type=value)
    assert repr(value) in str(raised.value)


@pytest.mark.parametrize("value", ["ignore", "Skip", "", True, 0])
def test_another_word_about_gradients_that_are_not_finite_is_refused_and_the_right_ones_are_named(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^Expected nonfinite to be one of ") as raised:
        StepOptions(nonfinite=value)
    for word in (*NONFINITE, "None", repr(value)):
        assert word in str(raised.value)


@pytest.mark.parametrize("value", [0, 0.0, -1.0, 1e39, 1e-46, math.inf, math.nan])
def test_a_loss_scale_that_fp32_cannot_hold_or_invert_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match=r"^Expected loss_scale from .* to .*, got ") as raised:
        StepOptions(loss_scale=value)
    assert repr(value) in str(raised.value)


@pytest.mark.parametrize("value", ["dynamic", True, False, {"initial": 2.0}, DynamicLossScale])
def test_a_loss_scale_of_another_type_is_refused_and_the_usual_one_is_named(value: Any) -> None:
    with pytest.raises(TypeError, match=r"^Expected loss_scale to be a number, .* or None, got ") as raised:
        StepOptions(loss_scale=value)
    assert repr(value) in str(raised.value)
    assert "DynamicLossScale()" in str(raised.value)


# Contradictions


@pytest.mark.parametrize("nonfinite", ["raise", "step"])
def test_a_dynamic_loss_scale_overflows_on_purpose_so_its_steps_must_be_skipped(nonfinite: Nonfinite) -> None:
    with pytest.raises(ValueError, match=r"^Expected nonfinite='skip' with a dynamic loss_scale, .* got ") as raised:
        StepOptions(nonfinite=nonfinite, loss_scale=DynamicLossScale())
    assert repr(nonfinite) in str(raised.value)


@pytest.mark.parametrize("nonfinite", [None, *NONFINITE])
def test_a_loss_scale_that_never_changes_contradicts_nothing(nonfinite: Nonfinite | None) -> None:
    assert StepOptions(nonfinite=nonfinite, loss_scale=128.0).nonfinite == nonfinite


@pytest.mark.parametrize("nonfinite", [None, "skip"])
def test_a_dynamic_loss_scale_goes_with_skipping(nonfinite: Nonfinite | None) -> None:
    assert StepOptions(nonfinite=nonfinite, loss_scale=DynamicLossScale()).why_wait() is not None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("norm_type", "2"),
        ("norm_type", True),
        ("master_weights", "yes"),
        ("master_weights", 1),
        ("accumulate_in_fp32", 1),
    ],
)
def test_an_option_of_another_type_is_refused_with_its_name_and_value(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=rf"^Expected {name} to be .*got {value!r}"):
        StepOptions(**{name: value})


def test_a_static_scale_that_never_skips_says_why_it_waits() -> None:
    assert (
        StepOptions(loss_scale=4.0, nonfinite="step").why_wait() == "loss_scale is divided out of all gradients at once"
    )


_ANY: Any = 1
_FLOAT: Any = 1.0


def test_offload_is_a_place_or_options_for_one() -> None:
    assert StepOptions(offload="cpu").offload == Offload() == Offload("cpu", buffers=3)
    assert repr(Offload()) != repr(Offload(buffers=2))


@pytest.mark.parametrize(
    ("build", "kind", "message"),
    [
        (lambda: StepOptions(offload="gpu"), ValueError, "'cpu' or None, got 'gpu'"),
        (lambda: Offload.of(_ANY), TypeError, "'cpu', a ddp_zero.Offload or None, got 1"),
        (lambda: Offload(buffers=0), ValueError, "at least 1 buffer, got 0"),
        (lambda: Offload(buffers=_FLOAT), TypeError, r"buffers to be an int, got 1\.0"),
    ],
)
def test_offload_refuses(build: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        build()
