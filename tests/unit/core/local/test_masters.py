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


def lent_to(stepped: StepTargets, index: int) -> Tensor:
    grad = stepped[index].grad
    assert grad is not None
    return grad


# Who is stepped


def test_low_precision_parameters_have_fp32_masters_of_their_value_and_others_are_stepped_themselves() -> None:
    table = make_table()
    stepped = StepTargets(table, has_masters=True)
    owned = stepped.assign(dict.fromkeys(range(4)))
    assert list(stepped.masters) == [0, 2]
    for index, param in enumerate(table.params):
        assert owned[param] is stepped[index]
        assert stepped.masters.wants(index) is (index in (0, 2))
        if index in (0, 2):
            assert (stepped[index].dtype, stepped[index].is_leaf) == (FP32, True)
            assert torch.equal(stepped[index], param.float())
        else:
            assert stepped[index] is param
            assert stepped.masters.get(index) is None


def test_without_masters_every_parameter_is_stepped_itself() -> None:
    table = make_table()
    stepped = StepTargets(table, has_masters=False)
    assert all(key is value for key, value in stepped.assign(dict.fromkeys(range(4))).items())
    assert (dict(stepped.masters), stepped.masters.wants(0)) == ({}, False)


def test_a_rank_has_masters_of_what_it_owns_only_and_keeps_those_that_it_had() -> None:
    table = make_table((BF16,) * 4)
    stepped = StepTargets(table, has_masters=True)
    assert list(stepped.assign(dict.fromkeys([2, 0]))) == [table.params[2], table.params[0]]
    kept, dropped = stepped[2], stepped[0]
    with torch.no_grad():
        kept.add_(1e-5)
    value = kept.detach().clone()
    assert list(stepped.assign(dict.fromkeys([1, 2])).values()) == [stepped[1], kept]
    assert sorted(stepped.masters) == [1, 2]
    assert stepped[0] is table.params[0]
    assert torch.equal(kept, value)
    with pytest.raises(KeyError):
        stepped.index_of(dropped)
    assert stepped.assign(dict.fromkeys([])) == {}
    assert dict(stepped.masters) == {}


def test_a_stepped_tensor_and_its_parameter_stand_for_the_same_index() -> None:
    table, stepped = with_masters()
    assert [stepped.index_of(stepped[index]) for index in range(4)] == [0, 1, 2, 3]
    assert [stepped.index_of(param) for param in table.params] == [0, 1, 2, 3]
    with pytest.raises(KeyError):
        stepped.index_of(torch.zeros(3, 2))


def test_a_master_that_is_given_away_is_known_no_more() -> None:
    table, stepped = with_masters()
    master = stepped[0]
    assert stepped.release(0) is master
    assert stepped[0] is table.params[0]
    assert stepped.release(0) is None
    assert stepped.release(1) is None
    with pytest.raises(KeyError):
        stepped.index_of(master)


def test_a_value_that_is_taken_is_copied_and_replaces_the_master() -> None:
    _, stepped = with_masters()
    before, value = stepped[0], torch.randn(3, 2)
    expected = value.clone()
    stepped.create(0, value)
    value.zero_()
    assert torch.equal(stepped[0], expected)
    assert (stepped.index_of(stepped[0]), len(stepped.masters)) == (0, 2)
    with pytest.raises(KeyError):
        stepped.index_of(before)


def test_a_tensor_that_is_put_is_the_master_itself() -> None:
    _, stepped = with_masters()
    before, mine = stepped[2], nn.Parameter(torch.randn(3, 2))
    stepped.install(2, mine)
    assert stepped[2] is mine
    assert stepped.index_of(mine) == 2
    with pytest.raises(KeyError):
        stepped.index_of(before)


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


def test_parameters_that_are_added_keep_the_others_index_and_their_masters() -> None:
    table, stepped = with_masters((BF16, FP32))
    master, added = stepped[0], nn.Parameter(torch.ones(2, dtype=FP16))
    bigger = ParameterTable([{"params": [*table.params, added]}])
    stepped.extend(bigger)
    stepped.assign(dict.fromkeys([0, 2]))
    assert stepped[0] is master
    assert torch.equal(stepped[2], torch.ones(2))
    assert [stepped.index_of(tensor) for tensor in (master, added, stepped[2])] == [0, 2, 2]


# Factors


def test_without_factors_a_gradient_is_itself() -> None:
    grad, factors = torch.randn(3), GradientFactors(groups=[0])
    assert not factors
    assert factors.apply(0, grad) is grad


def test_only_clipped_groups_are_scaled_in_a_new_tensor() -> None:
    grad = torch.full((3,), 8.0)
    factors = GradientFactors(coefficients={1: torch.tensor(0.5)}, groups=[0, 1, 1])
    assert factors
    assert [factors.apply(index, grad)[0].item() for index in range(3)] == [8, 4, 4]
    assert factors.apply(0, grad) is grad
    assert torch.equal(grad, torch.full((3,), 8.0))


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


def test_an_inverse_scale_alone_is_for_every_parameter() -> None:
    factors = GradientFactors(0.25)
    assert factors
    assert [factors.apply(index, torch.tensor([8.0])).item() for index in range(3)] == [2, 2, 2]


# Lending gradients


def test_while_lent_gradients_are_scaled_and_afterwards_they_are_what_they_were() -> None:
    table, stepped = with_masters()
    grads = [param.grad for param in table.params]
    values = [grad.clone() for grad in grads if grad is not None]
    factors = GradientFactors(0.1, {1: 0.3}, table.groups)
    with LentGradients(stepped, tuple(range(4)), published(stepped, factors)):
        for index, value in enumerate(values):
            in_dtype = value.to(stepped[index].dtype)  # a master's is scaled in fp32
            assert torch.equal(lent_to(stepped, index), in_dtype * 0.1 * (0.3 if index >= 2 else 1.0))
    for param, grad, value in zip(table.params, grads, values, strict=True):
        assert param.grad is grad
        assert grad is not None
        assert torch.equal(grad, value)


def test_a_master_gets_the_gradient_in_the_dtype_of_its_sum_before_it_is_scaled() -> None:
    table, stepped = with_masters()
    summed = {index: torch.randn(3, 2) for index in range(4)}
    asked: list[int] = []

    def in_accumulation_dtype(index: int) -> Tensor | None:
        asked.append(index)
        return None if index == 2 else summed[index]

    grads = [param.grad for param in table.params]
    with LentGradients(stepped, tuple(range(4)), published(stepped, GradientFactors(0.1), in_accumulation_dtype)):
        assert torch.equal(lent_to(stepped, 0), summed[0] * 0.1)
        for index in (1, 2, 3):
            grad = grads[index]
            assert grad is not None
            assert torch.equal(lent_to(stepped, index), grad.to(stepped[index].dtype) * 0.1)
    assert sorted(asked) == [0, 2]


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


def test_gradients_are_given_back_when_the_step_drops_them() -> None:
    table, stepped = with_masters()
    grads = [param.grad for param in table.params]
    optimizer = torch.optim.SGD([stepped[index] for index in range(4)], lr=0.1)
    with LentGradients(stepped, tuple(range(4)), published(stepped, GradientFactors(0.5))):
        optimizer.zero_grad()
    assert all(param.grad is grad for param, grad in zip(table.params, grads, strict=True))


def test_a_parameter_without_a_gradient_lends_none_and_is_left_alone() -> None:
    table, stepped = with_masters()
    table.params[0].grad = table.params[1].grad = None
    before = table.params[0].detach().clone()
    with torch.no_grad():
        stepped[0].add_(1.0)
    with LentGradients(stepped, tuple(range(4)), published(stepped, GradientFactors(0.5))):
        assert (stepped[0].grad, stepped[1].grad) == (None, None)
        assert stepped[2].grad is not None
    assert torch.equal(table.params[0], before)
    assert (table.params[0].grad, table.params[1].grad) == (None, None)


def test_only_the_parameters_of_the_step_are_lent_to_and_rounded() -> None:
    table, stepped = with_masters((BF16, BF16, FP32, FP32))
    before = [param.detach().clone() for param in table.params]
    with LentGradients(stepped, (1, 3), published(stepped, GradientFactors(0.5))):
        grads = [table.params[index].grad for index in (2, 3)]
        assert stepped[0].grad is None
        with torch.no_grad():
            stepped[0].add_(1.0)
            stepped[1].add_(1.0)
    assert torch.equal(table.params[0], before[0])
    assert torch.equal(table.params[1], (before[1].float() + 1.0).to(BF16))
    assert grads[0] is table.params[2].grad
    assert grads[1] is not table.params[3].grad


def test_the_gradient_to_look_at_is_the_one_that_would_be_lent() -> None:
    table, stepped = with_masters()
    factors = GradientFactors(0.1, {0: 0.5}, table.groups)
    looked = [stepped.gradient(index, published(stepped, factors)) for index in range(4)]
    with LentGradients(stepped, tuple(range(4)), published(stepped, factors)):
        for index, grad in enumerate(looked):
            assert grad is not None
            assert torch.equal(lent_to(stepped, index), grad)
    assert stepped.gradient(1, published(stepped)) is table.params[1].grad


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


def test_refreshed_masters_are_the_parameters_but_for_those_that_are_known() -> None:
    table, stepped = with_masters((BF16, FP16, FP32))
    masters = [stepped[0], stepped[1]]
    stepped.masters.note_versions()
    known = torch.randn(3, 2)
    with torch.no_grad():
        for param in table.params:
            param.fill_(0.5)
    assert stepped.masters.have_changed()
    stepped.masters.refresh({1: known})
    assert stepped[0] is masters[0]  # which the optimizer holds
    assert stepped[1] is masters[1]
    assert torch.equal(stepped[0], torch.full((3, 2), 0.5))
    assert torch.equal(stepped[1], known)
    assert not stepped.masters.have_changed()
    stepped.masters.refresh()
    assert torch.equal(stepped[1], torch.full((3, 2), 0.5))
    assert stepped.masters.find_diverged() == []


# Groups and checkpoints


def test_masters_that_round_to_the_parameters_are_accepted() -> None:
    table = make_table((BF16, FP16))
    with torch.no_grad():
        table.params[0].fill_(1.0)
    check_masters(table, {0: torch.full((3, 2), 1.0001), 1: table.params[1].detach().float()})
    check_masters(table, {})


@pytest.mark.parametrize(
    ("index", "label", "dtype"), [(0, "parameter 0 'w0'", "bfloat16"), (3, "parameter 3 (group 1", "float16")]
)
def test_the_first_master_of_another_value_is_refused_with_its_parameters_name(
    index: int, label: str, dtype: str
) -> None:
    table = make_table((BF16, BF16, FP16, FP16))
    masters = {place: param.detach().float() for place, param in enumerate(table.params)}
    masters[index] = masters[index] + 0.5
    with pytest.raises(ValueError, match=r"^Expected .* rounded to .*, got a different value") as raised:
        check_masters(table, masters)
    assert label in str(raised.value)
    assert f"torch.{dtype}" in str(raised.value)
    assert "'master_weight'" in str(raised.value)


def test_a_master_of_another_shape_is_refused_even_where_its_values_could_be_broadcast() -> None:
    table = ParameterTable([{"params": [nn.Parameter(torch.ones(3, 2, dtype=BF16))]}])
    for shape in ((), (2,), (2, 3), (6,)):
        with pytest.raises(ValueError, match="parameter 0"):
            check_masters(table, {0: torch.ones(shape)})


def test_a_parameter_that_was_given_other_memory_may_have_changed() -> None:
    table, stepped = with_masters((BF16,))
    stepped.masters.note_versions()
    table.params[0].data = torch.zeros_like(table.params[0])
    assert stepped.masters.have_changed()
    assert stepped.masters.find_diverged() == [0]


def test_a_master_that_is_not_a_number_rounds_to_one_that_is_not() -> None:
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
