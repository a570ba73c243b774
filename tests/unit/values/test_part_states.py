"""A part of a parameter, and its optimizer state: taken out and put together, in the order of memory."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop

from ddp_zero import elementwise
from ddp_zero.core.local import inner as known
from ddp_zero.values.parts import check_can_be_cut, join_parts, narrow_state, part_of, run_of, whole_of

SHAPES = {
    "matrix": torch.arange(96.0).view(8, 12),
    "transposed": torch.arange(96.0).view(12, 8).t(),
    "channels last": torch.arange(96.0).view(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "inside a larger tensor": torch.arange(200.0)[50:146].view(8, 12),
}


@pytest.mark.parametrize("param", SHAPES.values(), ids=SHAPES.keys())
def test_parts_cover_a_parameter_and_share_its_memory(param: Tensor) -> None:
    parts = [part_of(param, param, slice(start, start + 32)) for start in (0, 32, 64)]
    assert torch.equal(whole_of(torch.cat(parts), param), param)
    assert whole_of(torch.cat(parts), param).stride() == param.stride()
    assert parts[1].data_ptr() == param.data_ptr() + 32 * 4
    assert run_of(param).data_ptr() == param.data_ptr()


def test_part_of_a_strided_gradient_is_in_the_order_of_the_parameter() -> None:
    param = torch.empty(8, 12)
    grad = torch.arange(96.0).view(12, 8).t()
    assert torch.equal(part_of(grad, param, slice(16, 48)), grad.reshape(-1)[16:48])


def test_a_parameter_with_gaps_cannot_be_cut() -> None:
    with pytest.raises(ValueError, match=r"without gaps.*parameter 3.*\[10, 1\].*partition='parameters'"):
        check_can_be_cut(torch.empty(5, 10)[:, :4], "parameter 3")


def state_after_steps(build: type[Optimizer], param: Tensor, grads: list[Tensor]) -> dict[str, Tensor]:
    stepped = torch.nn.Parameter(param.clone())
    optimizer = build([stepped], lr=0.1)  # type: ignore[call-arg]
    for grad in grads:
        stepped.grad = grad.clone()
        optimizer.step()
    return {"param": stepped.detach(), **optimizer.state[stepped]}


BUILDERS = [SGD, Adam, AdamW, Adagrad, RMSprop, Adadelta, Adamax, NAdam, RAdam, ASGD, Rprop]


@pytest.mark.parametrize("build", BUILDERS, ids=lambda build: build.__name__)
def test_parts_are_stepped_as_the_whole(build: type[Optimizer]) -> None:
    generator = torch.Generator().manual_seed(0)
    param = torch.randn(40, 33, generator=generator)
    grads = [torch.randn(40, 33, generator=generator) for _ in range(5)]
    whole = state_after_steps(build, param, grads)
    cuts = [slice(0, 448), slice(448, 512), slice(512, 1320)]
    parts = [
        (cut, state_after_steps(build, part_of(param, param, cut), [part_of(grad, param, cut) for grad in grads]))
        for cut in cuts
    ]
    together = join_parts(parts[::-1], param, None)
    assert list(together) == list(whole)
    assert not torch.equal(whole["param"], param)
    for key, value in whole.items():
        assert torch.equal(torch.as_tensor(together[key]), torch.as_tensor(value)), key
        assert torch.as_tensor(together[key]).shape == torch.as_tensor(value).shape, key
    for cut, state in parts:
        mine = narrow_state(whole, param, None, cut)
        assert all(torch.equal(torch.as_tensor(mine[key]), torch.as_tensor(state[key])) for key in whole)


def test_narrowed_parts_of_a_state_join_to_the_part() -> None:
    param = torch.zeros(100)
    state = {"step": torch.tensor(3.0), "moment": torch.arange(10.0, 60.0), "buffer": None, "other": torch.ones(2)}
    found = narrow_state(state, param, slice(10, 60), slice(20, 30))
    assert torch.equal(found["moment"], torch.arange(20.0, 30.0))
    assert (found["step"], found["buffer"]) == (3.0, None)
    assert torch.equal(found["other"], torch.ones(2))
    again = join_parts(
        [(slice(30, 40), {"moment": torch.ones(10)}), (slice(20, 30), {"moment": found["moment"]})],
        param,
        slice(20, 40),
    )
    assert torch.equal(again["moment"], torch.cat([torch.arange(20.0, 30.0), torch.ones(10)]))


def test_parts_with_different_states_are_refused() -> None:
    parts: list[tuple[slice, dict[str, Any]]] = [
        (slice(0, 4), {"step": 1, "moment": torch.zeros(4)}),
        (slice(4, 8), {"step": 1}),
    ]
    with pytest.raises(AssertionError, match=r"\['step', 'moment'\], but \['step'\] from element 4 on"):
        join_parts(parts, torch.zeros(8), None)


class Mine(SGD):
    """A class of a user's own."""


class Wrapper(Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.inner = SGD(self.param_groups, lr=0.1)


def test_only_known_and_declared_classes_may_be_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "elementwise_classes", set(known.elementwise_classes))
    params = [torch.nn.Parameter(torch.zeros(3))]
    for build in BUILDERS:
        known.check_elementwise(build(params))
    with pytest.raises(TypeError, match=r"got Mine; known are ASGD, Adadelta.*ddp_zero\.elementwise"):
        known.check_elementwise(Mine(params))
    assert elementwise(Mine) is Mine
    known.check_elementwise(Mine(params))
    elementwise(Wrapper)
    with pytest.raises(TypeError, match=r"an optimizer that wraps an optimizer.*Wrapper\.inner"):
        known.check_elementwise(Wrapper(params))
    for wrong in (SGD(params), "SGD", dict):
        with pytest.raises(TypeError, match=r"Expected a torch\.optim\.Optimizer class"):
            elementwise(wrong)  # type: ignore[type-var]
