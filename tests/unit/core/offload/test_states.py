"""States: moved however nested, and known before the first step."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from ddp_zero.core.local.inner import options_on_host, state_like
from ddp_zero.core.offload.placement import move_tensors, tensors_in


def test_moving_keeps_kinds() -> None:
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
