"""A gradient that is not here: it can be dropped and looked at from outside, never computed with."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_zero.absent import AbsentGradient, absent_gradient


def layer(dtype: torch.dtype = torch.float32) -> nn.Linear:
    """With absent gradients."""
    model = nn.Linear(3, 4, dtype=dtype)
    for name, param in model.named_parameters():
        param.grad = absent_gradient(param, consumed=True, reason=f"the reason of {name}")
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_it_has_the_parameters_shape_and_dtype_and_one_element_of_memory(dtype: torch.dtype) -> None:
    grad = layer(dtype).weight.grad
    assert isinstance(grad, AbsentGradient)
    assert grad.consumed
    assert (grad.shape, grad.dtype, grad.layout, grad.device) == (
        torch.Size([4, 3]),
        dtype,
        torch.strided,
        torch.device("cpu"),
    )
    assert grad.untyped_storage().nbytes() == grad.element_size()
    assert "the reason of weight" in repr(grad)


COMPUTATIONS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "clip_grad_norm_": lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "clip_grad_norm_ foreach": lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True),
    "clip_grad_value_": lambda model, _: nn.utils.clip_grad_value_(model.parameters(), 1.0),
    "get_total_norm": lambda model, _: nn.utils.get_total_norm(
        [p.grad for p in model.parameters() if p.grad is not None]
    ),
    "norm": lambda _, grad: grad.norm(),
    "add": lambda _, grad: 1 + grad,
    "in place": lambda _, grad: grad.mul_(2),
    "item": lambda _, grad: grad[0, 0].item(),
    "clone": lambda _, grad: grad.clone(),
    "detach": lambda _, grad: grad.detach(),
    "numpy": lambda _, grad: grad.numpy(),
    "tolist": lambda _, grad: grad.tolist(),
    "isfinite": lambda _, grad: torch.isfinite(grad).all(),
    "stack": lambda _, grad: torch.stack([torch.ones(4, 3), grad]),
    "keyword": lambda _, grad: torch.add(input=torch.ones(4, 3), other=grad),
    "SGD": lambda model, _: torch.optim.SGD(model.parameters(), lr=0.1).step(),
    "AdamW fused": lambda model, _: torch.optim.AdamW(model.parameters(), fused=True).step(),
    "AdamW foreach": lambda model, _: torch.optim.AdamW(model.parameters(), foreach=True).step(),
}


@pytest.mark.parametrize("name", COMPUTATIONS)
def test_a_computation_says_where_the_gradient_is(name: str) -> None:
    model = layer()
    assert model.weight.grad is not None
    with pytest.raises(RuntimeError, match="the reason of weight"):
        COMPUTATIONS[name](model, model.weight.grad)


def test_no_property_leads_to_a_tensor_with_values() -> None:
    grad = layer().weight.grad
    assert grad is not None
    names = [name for name in dir(Tensor) if type(getattr(Tensor, name)).__name__ in ("getset_descriptor", "property")]
    assert len(names) > 20
    names.remove("volatile")  # only warns
    for name in names:
        try:
            value = getattr(grad, name)
        except (RuntimeError, AttributeError, NotImplementedError, TypeError):
            continue
        assert not isinstance(value, Tensor) or isinstance(value, AbsentGradient), name
    for name in ("data", "T", "mT", "H", "real"):
        with pytest.raises(RuntimeError, match="the reason of weight"):
            getattr(grad, name)


@pytest.mark.parametrize("foreach", [False, True])
def test_it_can_be_zeroed_and_dropped(foreach: bool) -> None:
    model = layer()
    real = nn.Parameter(torch.ones(2))
    real.grad = torch.ones(2)
    optimizer = torch.optim.SGD([*model.parameters(), real], lr=0.1, foreach=foreach)
    optimizer.zero_grad(set_to_none=False)
    assert isinstance(model.weight.grad, AbsentGradient)
    assert torch.equal(real.grad, torch.zeros(2))
    model.zero_grad(set_to_none=False)
    assert isinstance(model.weight.grad, AbsentGradient)
    optimizer.zero_grad()
    assert model.weight.grad is None
