"""A gradient that is not here: it can be dropped and looked at from outside, never computed with."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import SGD, Optimizer

from ddp_zero.values.placeholders import AbsentGradient, absent_gradient, report_nonfinite


def layer(dtype: torch.dtype = torch.float32) -> nn.Linear:
    """With absent gradients."""
    model = nn.Linear(3, 4, dtype=dtype)
    for name, param in model.named_parameters():
        param.grad = absent_gradient(param, consumed=True, reason=f"the reason of {name}")
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_an_absent_gradient_has_its_parameters_shape_and_one_element_of_memory(dtype: torch.dtype) -> None:
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
    "set item": lambda _, grad: grad.__setitem__(0, 1.0),
    "add to": lambda _, grad: torch.ones(4, 3).add_(grad),
    "data": lambda _, grad: grad.data.mul_(2),
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


ADVICE = {
    "clip_grad_norm_": r"opt.clip_grad_norm_\(max_norm\) clips by the norm of all",
    "clip_grad_norm_ foreach": r"opt.clip_grad_norm_\(max_norm\) clips by the norm of all",
    "norm": r"opt.clip_grad_norm_\(max_norm\) clips by the norm of all",
    "clip_grad_value_": r"opt.clip_grad_value_\(value\) limits every element",
    "in place": r"opt.owned_gradients\(\) is what this rank steps, to change in place",
    "set item": r"opt.owned_gradients\(\) is what this rank steps, to change in place",
    "isfinite": "nonfinite='raise' or 'skip'",
    "detach": r"opt.clip_grad_norm_\(float\('inf'\)\), from .* returns .*opt.full_grad\(param\) gets one",
    "add": r"opt.clip_grad_norm_\(float\('inf'\)\), from .* returns .*opt.full_grad\(param\) gets one",
    "add to": r"opt.clip_grad_norm_\(float\('inf'\)\), from .* returns .*opt.full_grad\(param\) gets one",
    "data": r"opt.owned_gradients\(\) is what this rank steps, to change in place",
}


@pytest.mark.parametrize("name", COMPUTATIONS)
def test_computations_with_an_absent_gradient_are_refused_with_reason_and_remedy(name: str) -> None:
    model = layer()
    assert model.weight.grad is not None
    advice = f" .*{ADVICE[name]}.* The line to change: .*test_absent" if name in ADVICE else ""
    with pytest.raises(RuntimeError, match=f"the reason of weight{advice}"):
        COMPUTATIONS[name](model, model.weight.grad)


def test_properties_of_an_absent_gradient_have_no_tensor_with_values() -> None:
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
    for name in ("T", "mT", "H", "real"):
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


ZEROINGS: dict[str, Callable[[Tensor], Any]] = {
    "zero_": lambda grad: grad.zero_(),
    "torch.zero_": torch.zero_,
    "data": lambda grad: grad.data.zero_(),
    "detach_": lambda grad: grad.detach_().zero_(),
    "fill_": lambda grad: grad.fill_(0.0),
    "init": nn.init.zeros_,
    "foreach": lambda grad: torch._foreach_zero_([grad, torch.ones(2)]),
}


@pytest.mark.parametrize("name", ZEROINGS)
def test_zeroed_it_is_a_gradient_of_zeros(name: str) -> None:
    model = layer()
    grad = model.weight.grad
    assert isinstance(grad, AbsentGradient)
    assert not grad.zeroed
    ZEROINGS[name](grad)
    assert model.weight.grad is grad
    assert grad.zeroed
    assert grad.untyped_storage().nbytes() == grad.element_size(), "no memory until it is used"
    assert grad.norm() == 0
    assert model.weight.grad is grad
    assert type(grad) is Tensor
    grad[0] += 1
    assert grad.sum() == 3
    with pytest.raises(RuntimeError, match="the reason of bias"):
        model.bias.grad.norm()


def test_a_norm_of_zeroed_and_absent_gradients_together_is_refused() -> None:
    model = layer()
    one, other = model.weight.grad, model.bias.grad
    assert one is not None
    assert other is not None
    one.zero_()
    with pytest.raises(RuntimeError, match="the reason of bias"):
        torch._foreach_norm([one, other])
    assert isinstance(one, AbsentGradient)


# Moves of the model


MOVES: dict[str, tuple[Callable[[nn.Module], Any], torch.dtype, str]] = {
    "cpu": (lambda model: model.cpu(), torch.float32, "cpu"),
    "to a device": (lambda model: model.to("meta"), torch.float32, "meta"),
    "to a dtype": (lambda model: model.to(torch.bfloat16), torch.bfloat16, "cpu"),
    "to both": (lambda model: model.to("meta", torch.float64), torch.float64, "meta"),
    "to a tensor's": (lambda model: model.to(torch.ones((), dtype=torch.float64)), torch.float64, "cpu"),
    "to a memory format": (lambda model: model.to(memory_format=torch.channels_last), torch.float32, "cpu"),  # type: ignore[call-overload]
    "to_empty": (lambda model: model.to_empty(device="meta"), torch.float32, "meta"),
    "double": (lambda model: model.double(), torch.float64, "cpu"),
    "half": (lambda model: model.half(), torch.float16, "cpu"),
    "bfloat16": (lambda model: model.bfloat16(), torch.bfloat16, "cpu"),
    "type": (lambda model: model.type(torch.float64), torch.float64, "cpu"),
    "share_memory": (lambda model: model.share_memory(), torch.float32, "cpu"),
}


@pytest.mark.parametrize("flag", [None, "overwrite_module_params_on_conversion", "swap_module_params_on_conversion"])
@pytest.mark.parametrize("name", MOVES)
def test_it_follows_its_model_and_stays_absent(name: str, flag: str | None) -> None:
    move, dtype, device = MOVES[name]
    model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Linear(3, 4), nn.ParameterList([torch.ones(0, 3)]))
    for number, param in enumerate(model.parameters()):
        param.grad = absent_gradient(param, consumed=number % 2 == 0, reason=f"the reason of {number}")
    if flag is not None:
        getattr(torch.__future__, f"set_{flag}")(True)
    try:
        move(model)
    finally:
        if flag is not None:
            getattr(torch.__future__, f"set_{flag}")(False)
    for number, param in enumerate(model.parameters()):
        grad = param.grad
        assert isinstance(grad, AbsentGradient)
        assert (param.dtype, param.device.type) == (grad.dtype, grad.device.type) == (dtype, device)
        assert grad.shape == param.shape
        assert grad.consumed == (number % 2 == 0)
        assert grad.untyped_storage().nbytes() == grad.element_size()
        with pytest.raises(RuntimeError, match=f"the reason of {number}"):
            grad.add_(1.0)
    model.zero_grad()
    assert all(param.grad is None for param in model.parameters())


def test_the_part_of_this_rank_moves_along() -> None:
    model = nn.Linear(3, 4)
    part = torch.arange(5.0)
    model.weight.grad = absent_gradient(model.weight, consumed=False, reason="the reason", part=part)
    model.double().share_memory()
    grad = model.weight.grad
    assert isinstance(grad, AbsentGradient)
    assert grad.part is not None
    assert torch.equal(grad.part, part.double())
    assert grad.part.is_shared()
    model.zero_grad(set_to_none=False)
    assert not grad.part.any()


def test_a_part_in_the_order_of_memory_does_not_follow_to_a_different_order() -> None:
    model = nn.Conv2d(2, 3, 2)
    part = torch.arange(5.0)
    model.weight.grad = absent_gradient(model.weight, consumed=False, reason="the reason", part=part)
    with pytest.raises(RuntimeError, match="the reason"):
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def test_it_takes_no_values_and_gives_none_in_a_move() -> None:
    grad, real = layer().weight.grad, torch.ones(4, 3)
    assert grad is not None
    with pytest.raises(RuntimeError, match="the reason of weight"):
        grad.data = real
    with pytest.raises(RuntimeError, match="the reason of weight"):
        real.to(grad)


COPIES: dict[str, Callable[[nn.Module], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": lambda model: torch.save(model, io.BytesIO()),
    "AveragedModel": torch.optim.swa_utils.AveragedModel,
    "export": lambda model: torch.export.export(model, (torch.ones(2, 3),)).module()(torch.ones(2, 3)),
    "compile": lambda model: torch.compile(model, backend="aot_eager")(torch.ones(2, 3)),
    "fx": torch.fx.symbolic_trace,
    "functional_call": lambda model: torch.func.functional_call(model, dict(model.named_parameters()), torch.ones(3)),
}


@pytest.mark.filterwarnings("ignore")  # of compilers
@pytest.mark.parametrize("name", COPIES)
def test_its_model_can_be_copied_saved_and_traced(name: str) -> None:
    model = layer()
    COPIES[name](model)
    assert isinstance(model.weight.grad, AbsentGradient)
    for one in (copy.deepcopy, pickle.dumps):
        with pytest.raises(RuntimeError, match="the reason of weight"):
            one(model.weight.grad)


# Under a GradScaler


def partly_absent() -> tuple[nn.Linear, SGD]:
    """A layer whose weight's gradient is with another rank, and an optimizer over it."""
    model = nn.Linear(3, 4)
    model.weight.grad = absent_gradient(model.weight, consumed=False, reason="the reason of weight")
    model.bias.grad = torch.full((4,), 6.0)
    return model, SGD(model.parameters(), lr=1.0)


def scaler_of_4() -> GradScaler:
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    return scaler


def noted_by(scaler: GradScaler, optimizer: Optimizer) -> float:
    """What the scaler has found so far; above 0 if a gradient is not finite."""
    found: dict[torch.device, Tensor] = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    return sum(tensor.item() for tensor in found.values())


def test_an_absent_gradient_has_the_found_inf_of_the_scaler_that_unscaled_it() -> None:
    model, optimizer = partly_absent()
    grad = model.weight.grad
    assert isinstance(grad, AbsentGradient)
    assert grad.found_inf is None
    scaler = scaler_of_4()
    scaler.unscale_(optimizer)
    assert isinstance(grad.found_inf, Tensor)
    assert grad.found_inf.item() == 0
    report_nonfinite([grad])
    assert noted_by(scaler, optimizer) > 0
