"""Remembering, per bucket and backward pass, whether this rank's own gradients were finite."""

import math
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from ddp_zero.core.ddp.registered_hook import watching
from ddp_zero.core.step.decision import NonfiniteProbe, find_nonfinite_rank


def watch() -> NonfiniteProbe:
    """One that somebody will ask."""
    watch = NonfiniteProbe()
    watch.is_on = True
    return watch


def three_params() -> list[Tensor]:
    return [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]


def buffer_with(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
    buffer = torch.ones(5, dtype=dtype)
    buffer[3] = value
    return buffer


def test_a_hook_screens_no_bucket_until_somebody_will_ask() -> None:
    off, params = NonfiniteProbe(), three_params()
    bucket = mock.Mock(**{"parameters.return_value": params, "buffer.return_value": buffer_with(math.inf)})
    reduce = mock.Mock()
    hook: Any = watching(off, mock.Mock(), reduce)
    assert hook(None, bucket) is reduce.return_value
    assert off.flags(params[0]) == []
    off.is_on = True
    hook(None, bucket)
    assert off.flags(params[0]) == [1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_one_value_that_is_not_finite_flags_its_bucket(value: float, dtype: torch.dtype) -> None:
    looking, params = watch(), three_params()
    looking.screen(params, buffer_with(value, dtype))
    assert [looking.flags(param) for param in params] == [[1]] * 3


def test_finite_values_whose_sum_overflows_flag_no_bucket() -> None:
    looking, params = watch(), three_params()
    looking.screen(params, torch.full((100,), 60_000.0, dtype=torch.float16))
    looking.screen(params, torch.full((10,), 1e300, dtype=torch.float64))
    looking.screen(params, torch.empty(0))
    assert looking.flags(params[1]) == [0, 0, 0]


def test_a_parameter_has_the_flags_of_its_own_bucket() -> None:
    looking, params = watch(), three_params()
    for values in ((math.nan, 0.0), (0.0, 0.0), (0.0, math.inf)):
        looking.screen(params[:2], buffer_with(values[0]))
        looking.screen(params[2:], buffer_with(values[1]))
    assert [looking.flags(param) for param in params] == [[1, 0, 0], [1, 0, 0], [0, 0, 1]]
    assert looking.flags(torch.zeros(2)) == []


# Of all ranks


@pytest.mark.parametrize(
    ("flags_of_rank", "expected"),
    [
        pytest.param([[0], [1]], 1, id="one pass"),
        pytest.param([[1], [1]], 0, id="several ranks"),
        pytest.param([[0, 0], [0, 0]], None, id="none"),
        pytest.param([[], []], None, id="nobody has looked"),
        pytest.param([[0, 1], [1, 1]], 1, id="adds up: all ranks see it in later passes"),
        pytest.param([[0, 1, 1], [0, 1, 1], [1, 1, 1]], 2, id="and in still later ones"),
        pytest.param([[0, 1], [1, 0]], 0, id="the earlier pass was dropped"),
        pytest.param([[0, 0, 1], [1, 0, 0]], 0, id="the earlier pass was dropped, and a good one came between"),
        pytest.param([[0, 0], [1, 0]], 1, id="a good pass was added"),
    ],
)
def test_the_rank_of_the_last_gradient_that_was_not_finite_by_itself_is_told(
    flags_of_rank: list[list[int]], expected: int | None
) -> None:
    assert find_nonfinite_rank(flags_of_rank) == expected


def test_a_loop_that_never_steps_is_remembered_in_part() -> None:
    one, params = watch(), three_params()
    for _ in range(5000):
        one.screen(params, torch.ones(1))
    assert len(one.flags(params[0])) == 4096
