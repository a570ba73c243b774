"""Options of a step: what they refuse, and which of them make it wait for all gradients."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest

from ddp_zero.loss_scale import DynamicLossScale
from ddp_zero.options import NONFINITE, Nonfinite, Offload, StepOptions, check_max_grad_norm


def test_default_options_are_off_and_no_step_waits() -> None:
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

TOO_SMALL = "^Expected {} above 0, got "
NO_NUMBER = "^Expected {} to be a number, got "
LIMIT = r"^Expected loss_scale from .* to .*, got "
SCALE = r"^Expected loss_scale to be a number, .* or None, got .*DynamicLossScale\(\)"
WORD = r"^Expected nonfinite to be one of .*'skip'.*'raise'.*'step'.*None"
REFUSED: list[tuple[str, list[Any], type[Exception], str]] = [
    ("max_grad_norm", [0, 0.0, -1.0, -math.inf, math.nan], ValueError, TOO_SMALL),
    ("max_grad_norm", ["1.0", True, False, [1.0], 1j], TypeError, NO_NUMBER),
    ("norm_type", [0, -2.0, -math.inf, math.nan], ValueError, TOO_SMALL),
    ("norm_type", ["2", True], TypeError, "^Expected {} to be .*got "),
    ("nonfinite", ["ignore", "Skip", "", True, 0], ValueError, WORD),
    ("loss_scale", [0, 0.0, -1.0, 1e39, 1e-46, math.inf, math.nan], ValueError, LIMIT),
    ("loss_scale", ["dynamic", True, False, {"initial": 2.0}, DynamicLossScale], TypeError, SCALE),
    ("master_weights", ["yes", 1], TypeError, "^Expected {} to be .*got "),
    ("accumulate_in_fp32", [1], TypeError, "^Expected {} to be .*got "),
]


@pytest.mark.parametrize(
    ("name", "value", "kind", "message"),
    [(name, value, kind, told.format(name)) for name, values, kind, told in REFUSED for value in values],
)
def test_wrong_options_are_refused_with_their_value(name: str, value: Any, kind: type[Exception], message: str) -> None:
    checks: list[Callable[[Any], object]] = [lambda value: StepOptions(**{name: value})]
    for refused in [*checks, check_max_grad_norm] if name == "max_grad_norm" else checks:
        with pytest.raises(kind, match=message) as raised:
            refused(value)
        assert repr(value) in str(raised.value)


# Contradictions


@pytest.mark.parametrize("nonfinite", ["raise", "step"])
def test_a_dynamic_loss_scale_overflows_on_purpose_so_its_steps_must_be_skipped(nonfinite: Nonfinite) -> None:
    with pytest.raises(ValueError, match=r"^Expected nonfinite='skip' with a dynamic loss_scale, .* got ") as raised:
        StepOptions(nonfinite=nonfinite, loss_scale=DynamicLossScale())
    assert repr(nonfinite) in str(raised.value)


@pytest.mark.parametrize("nonfinite", [None, *NONFINITE])
def test_a_loss_scale_that_never_changes_contradicts_nothing(nonfinite: Nonfinite | None) -> None:
    assert StepOptions(nonfinite=nonfinite, loss_scale=128.0).nonfinite == nonfinite


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
def test_wrong_offload_options_are_refused(build: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        build()
