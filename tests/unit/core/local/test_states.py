"""States: moved however nested, and known before the first step."""

import inspect
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim import AdamW, Optimizer

from ddp_zero.core.local.inner import options_on_host, state_like
from ddp_zero.core.local.placement import move_tensors, tensors_in


def test_moved_tensors_of_a_state_stay_in_their_tuples_and_lists() -> None:
    state = {"a": (torch.ones(2), "text", 3), "b": [torch.ones(1)], "c": None}
    found = move_tensors(state, lambda tensor: tensor + 1)
    assert found is state
    assert type(state["a"]) is tuple
    assert [one.tolist() for one in tensors_in(state)] == [[2.0, 2.0], [2.0]]


# What a class will need


CLASSES = [
    (torch.optim.SGD, {"lr": 0.1}, []),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, [(6, 4)]),
    (AdamW, {"fused": True}, [(6, 4), (6, 4)]),
    (torch.optim.Adam, {"foreach": True, "amsgrad": True}, [(6, 4)] * 3),
    (torch.optim.Adafactor, {}, [(6, 1), (1, 4)]),
]


@pytest.mark.parametrize(("kind", "options", "shapes"), CLASSES)
def test_the_state_of_a_class_is_known_without_memory(
    kind: type[torch.optim.Optimizer], options: dict[str, Any], shapes: list[tuple[int, ...]]
) -> None:
    param = nn.Parameter(torch.randn(6, 4))
    inner = kind([param], **options)
    found = list(tensors_in(state_like(inner, inner.param_groups[0], param)))
    assert [tuple(one.shape) for one in found] == shapes
    assert all(one.is_meta == (kind is not torch.optim.Adafactor) for one in found), "which reads values"
    param.grad = torch.ones_like(param)
    before = param.detach().clone()
    assert not inner.state
    inner.step()
    assert [tuple(one.shape) for one in tensors_in(inner.state[param])] == shapes
    assert not torch.equal(before, param)


class _ReadsValues(AdamW):
    """Cannot step what has no values."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        if all(bool((param == 0).all()) for group in self.param_groups for param in group["params"]):
            super().step()


def test_a_class_that_reads_values_steps_zeros() -> None:
    inner = _ReadsValues([nn.Parameter(torch.randn(3))])
    found = list(tensors_in(state_like(inner, inner.param_groups[0], torch.empty(3, device="meta"))))
    assert [(tuple(one.shape), one.device.type) for one in found] == [((3,), "cpu")] * 2


def test_a_step_on_the_host_is_fused_unless_the_user_says_how() -> None:
    assert options_on_host(AdamW, {"lr": 0.1}) == {"lr": 0.1, "fused": True}
    for own in ({"fused": False}, {"foreach": True}, {"foreach": False}, {"capturable": True}):
        assert options_on_host(AdamW, own) == own
    assert options_on_host(torch.optim.RMSprop, {}) == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "kind", [one for one in vars(optim).values() if isinstance(one, type) and issubclass(one, Optimizer)]
)
def test_a_step_on_the_host_is_as_exact_as_the_plain_one(kind: Any, dtype: torch.dtype) -> None:
    """Whatever is chosen for the user, beside a step in fp64; sizes with and without a rest behind full vectors."""
    known = inspect.signature(kind).parameters
    variants: list[dict[str, Any]] = [
        {},
        {"weight_decay": 0.1},
        {"maximize": True},
        {"amsgrad": True},
        {"momentum": 0.9},
    ]
    for own in (one for one in variants if known.keys() >= one.keys()):
        options = options_on_host(kind, {"lr": 0.1, **own})
        if options == {"lr": 0.1, **own}:
            continue
        torch.manual_seed(0)
        start = [torch.randn(size).to(dtype) for size in (5, 16, 91)]
        stepped = [[nn.Parameter(one.to(kept, copy=True)) for one in start] for kept in (dtype, dtype, torch.float64)]
        chosen, plain, exact = (
            kind(params, **given)
            for params, given in zip(stepped, (options, {"lr": 0.1, **own}, {"lr": 0.1, **own}), strict=True)
        )
        for _ in range(3):
            grads = [torch.randn_like(one) for one in start]
            for optimizer, params in zip((chosen, plain, exact), stepped, strict=True):
                for param, grad in zip(params, grads, strict=True):
                    param.grad = grad.to(param.dtype)
                optimizer.step()
        flat, flat_plain, flat_exact = (torch.cat([param.detach().double() for param in params]) for params in stepped)
        assert (flat_exact - torch.cat(start)).abs().min() > 0, f"{own}: all elements move"
        worst, worst_plain = ((one - flat_exact).abs().max().item() for one in (flat, flat_plain))
        assert worst <= max(worst_plain, 4 * torch.finfo(dtype).eps), (own, worst, worst_plain)
