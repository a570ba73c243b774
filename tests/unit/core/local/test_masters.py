"""Which tensors the inner optimizer steps and from which gradients: parameters, or fp32 masters of them."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_zero.core.local.parameters import (
    GradientFactors,
    GradientSource,
    ParameterTable,
    PublishedGradients,
    ScaledGradients,
    StepTargets,
    check_masters,
)
from ddp_zero.core.step.runner import LentGradients
from ddp_zero.values.placeholders import absent_gradient
from tests import internals

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def make_table(dtypes: Sequence[torch.dtype] = (BF16, FP32, FP16, FP64)) -> ParameterTable:
    """Two groups; the parameters of the first have names."""
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(3, 2, generator=generator).to(dtype)) for dtype in dtypes]
    for seed, param in enumerate(params):
        param.grad = torch.randn(3, 2, generator=torch.Generator().manual_seed(seed)).to(param.dtype)
    half = len(params) // 2
    names = [f"w{index}" for index in range(half)]
    return ParameterTable([{"params": params[:half], "param_names": names}, {"params": params[half:]}])


def masters_of(table: ParameterTable) -> StepTargets:
    stepped = StepTargets(table, has_masters=True)
    stepped.assign(dict.fromkeys(range(len(table))))
    return stepped


def with_masters(dtypes: Sequence[torch.dtype] = (BF16, FP32, FP16, FP64)) -> tuple[ParameterTable, StepTargets]:
    table = make_table(dtypes)
    return table, masters_of(table)


class Published(PublishedGradients):
    """With sums of another dtype beside them."""

    def __init__(self, params: Sequence[Tensor], exact: Callable[[int], Tensor | None]) -> None:
        super().__init__(params)
        self.in_accumulation_dtype = exact  # type: ignore[method-assign,assignment]


def published(
    stepped: StepTargets,
    factors: GradientFactors | None = None,
    exact: Callable[[int], Tensor | None] = lambda index: None,
) -> GradientSource:
    source = Published(internals.params_of(stepped), exact)
    return ScaledGradients(stepped, source, factors) if factors else source


# Who is stepped


def test_marks_on_a_parameter_which_optimizers_look_for_are_on_its_master() -> None:
    table = make_table()
    marked: Any = table.params[0]
    marked.is_embedding, marked.lr_factors = True, [0.5]
    table.params[2].requires_grad_(False)
    stepped = masters_of(table)
    master: Any = stepped[0]
    assert master.is_embedding
    assert master.lr_factors is marked.lr_factors
    master.is_embedding = False
    assert marked.is_embedding
    assert (stepped[0].requires_grad, stepped[2].requires_grad) == (True, False)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda tensor: tensor,
    "channels last": lambda tensor: tensor.to(memory_format=torch.channels_last),
    "transposed": lambda tensor: tensor.transpose(0, 3),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_master_has_the_strides_of_its_parameter_and_memory_of_its_own(layout: str) -> None:
    param = nn.Parameter(LAYOUTS[layout](torch.randn(2, 3, 4, 5, dtype=BF16)))
    stepped = masters_of(ParameterTable([{"params": [param]}]))
    assert stepped[0].stride() == param.stride()
    assert stepped[0].untyped_storage().data_ptr() != param.untyped_storage().data_ptr()
    with torch.no_grad():
        param.zero_()
    assert stepped[0].count_nonzero() > 0


# Factors


@pytest.mark.parametrize("as_tensors", [False, True])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_the_inverse_scale_is_multiplied_first_and_the_coefficient_after_it(
    as_tensors: bool, dtype: torch.dtype
) -> None:
    grad = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    inverse, coefficient = torch.tensor(1 / 3).item(), torch.tensor(0.7).item()
    factors = GradientFactors(
        torch.tensor(inverse) if as_tensors else inverse,
        {0: torch.tensor(coefficient) if as_tensors else coefficient},
        [0],
    )
    assert factors
    assert factors.apply(0, grad).dtype == dtype
    assert torch.equal(factors.apply(0, grad), (grad * inverse) * coefficient)
    assert not torch.equal(factors.apply(0, grad), (grad * coefficient) * inverse)


# Lending gradients


@pytest.mark.parametrize("factors", [None, GradientFactors(0.5)], ids=["plain", "scaled"])
def test_gradients_are_given_back_when_the_step_raises_and_no_master_is_rounded(
    factors: GradientFactors | None,
) -> None:
    table, stepped = with_masters()
    grads, before = [param.grad for param in table.params], [param.detach().clone() for param in table.params]

    def step() -> None:
        with LentGradients(stepped, tuple(range(4)), published(stepped, factors)), torch.no_grad():
            stepped[0].add_(1.0)
            raise FloatingPointError("overflow")

    with pytest.raises(FloatingPointError, match="overflow"):
        step()
    assert all(param.grad is grad for param, grad in zip(table.params, grads, strict=True))
    assert [master.grad for master in stepped.masters.values()] == [None, None]
    assert all(torch.equal(param, value) for param, value in zip(table.params, before, strict=True))


# The model's parameters and the masters


def test_a_master_diverges_when_its_parameter_is_not_its_rounded_value() -> None:
    table = make_table((BF16, FP16, BF16))
    with torch.no_grad():
        table.params[0].fill_(1.0)
    stepped = masters_of(table)
    with torch.no_grad():
        stepped[0].add_(1e-4)  # rounds to 1
    assert stepped.masters.find_diverged() == []
    with torch.no_grad():
        table.params[2].add_(1.0)
        stepped[1].add_(1.0)
    assert stepped.masters.find_diverged() == [1, 2]


# Groups and checkpoints


@pytest.mark.parametrize(
    ("index", "label", "dtype"), [(0, "parameter 0 'w0'", "bfloat16"), (3, "parameter 3 (group 1", "float16")]
)
def test_check_masters_refuses_a_different_value_with_the_parameters_name(index: int, label: str, dtype: str) -> None:
    table = make_table((BF16, BF16, FP16, FP16))
    masters = {place: param.detach().float() for place, param in enumerate(table.params)}
    masters[index] = masters[index] + 0.5
    with pytest.raises(ValueError, match=r"^Expected .* rounded to .*, got a different value") as raised:
        check_masters(table, masters)
    assert label in str(raised.value)
    assert f"torch.{dtype}" in str(raised.value)
    assert "'master_weight'" in str(raised.value)


def test_check_masters_refuses_another_shape_that_could_be_broadcast() -> None:
    table = ParameterTable([{"params": [nn.Parameter(torch.ones(3, 2, dtype=BF16))]}])
    for shape in ((), (2,), (2, 3), (6,)):
        with pytest.raises(ValueError, match="parameter 0"):
            check_masters(table, {0: torch.ones(shape)})


def test_a_parameter_in_new_memory_has_changed() -> None:
    table, stepped = with_masters((BF16,))
    stepped.masters.note_versions()
    table.params[0].data = torch.zeros_like(table.params[0])
    assert stepped.masters.have_changed()
    assert stepped.masters.find_diverged() == [0]


def test_a_master_of_nan_has_not_diverged_from_a_parameter_of_nan() -> None:
    table = make_table((BF16,))
    with torch.no_grad():
        table.params[0].view(-1)[0] = float("nan")
    stepped = masters_of(table)
    assert stepped.masters.find_diverged() == []
    check_masters(table, stepped.masters)
    with torch.no_grad():
        table.params[0].view(-1)[1] += 1.0
    assert stepped.masters.find_diverged() == [0]


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_a_gradient_of_no_dimension_keeps_its_dtype(dtype: torch.dtype) -> None:
    param = nn.Parameter(torch.tensor(1.0, dtype=dtype))
    param.grad = torch.tensor(2.0, dtype=dtype)
    stepped = StepTargets(ParameterTable([{"params": [param]}]), has_masters=False)
    stepped.assign(dict.fromkeys([0]))
    factors = GradientFactors(torch.tensor(0.5), {0: torch.tensor(0.25, dtype=torch.float64)}, [0])
    with LentGradients(stepped, (0,), published(stepped, factors)):
        assert param.grad == torch.tensor(0.25, dtype=dtype)
    assert param.grad == 2.0


def test_gradients_are_restored_where_one_cannot_be_lent() -> None:
    params = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    params[0].grad = torch.full((2,), 8.0)
    params[1].grad = absent_gradient(params[1], True, "gone")
    stepped = StepTargets(ParameterTable([{"params": params}]), has_masters=False)
    stepped.assign(dict.fromkeys([0, 1]))
    source = published(stepped, GradientFactors(0.5))
    with pytest.raises(RuntimeError, match="gone"), LentGradients(stepped, (0, 1), source):
        pass
    assert params[0].grad.tolist() == [8.0, 8.0]
