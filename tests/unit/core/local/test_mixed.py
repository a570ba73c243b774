"""Several classes in one optimizer, without ranks: copies and loads where one of them owns nothing here."""

import copy
import inspect
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.optim import LBFGS, SGD, Adagrad, AdamW, Optimizer, SparseAdam

from ddp_zero.core.local.inner import rehearse_load, state_like
from ddp_zero.core.local.mixed import CLASS_KEY, MixedOptimizer, Mixture, name_of

CLASSES = [
    kind
    for kind in vars(torch.optim).values()
    if inspect.isclass(kind) and issubclass(kind, Optimizer) and kind not in (Optimizer, LBFGS, SparseAdam)
]

_PAIRS = [pair for one in CLASSES for pair in ((one, Adagrad), (Adagrad, one)) if one is not Adagrad] + [(SGD, AdamW)]
"""Adagrad's copies look into the first state that they find."""


def _params(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [torch.nn.Parameter(torch.randn(4, 3, generator=generator)) for _ in range(count)]


def _built(default: type[Optimizer], other: type[Optimizer], counts: tuple[int, int]) -> MixedOptimizer:
    name = name_of(other)
    groups = [{"params": _params(counts[0]), "lr": 0.1}, {"params": _params(counts[1]), "lr": 0.1, CLASS_KEY: name}]
    return Mixture(default, {name: other})(groups)


def _step(optimizer: Optimizer) -> None:
    generator = torch.Generator().manual_seed(1)
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.randn(param.shape, generator=generator)
    optimizer.step()


def _loaded(optimizer: MixedOptimizer) -> MixedOptimizer:
    rehearse_load(optimizer, optimizer.state_dict())
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return optimizer


@pytest.mark.parametrize("counts", [(2, 0), (0, 2), (1, 2)], ids=str)
@pytest.mark.parametrize("way", [copy.deepcopy, _loaded])
def test_every_class_is_copied_and_loaded_beside_another(
    way: Callable[[MixedOptimizer], MixedOptimizer], counts: tuple[int, int]
) -> None:
    for default, other in _PAIRS:
        expected, used = _built(default, other, counts), _built(default, other, counts)
        before = [param.detach().clone() for group in used.param_groups for param in group["params"]]
        for optimizer in (expected, used):
            _step(optimizer)
        made = way(used)
        for group in used.param_groups:
            if group["params"]:
                state_like(used, group, group["params"][0])  # steps a shallow copy
        for optimizer in (expected, used, made) if made is not used else (expected, used):
            _step(optimizer)
        for one in (used, made):
            found = [param for group in one.param_groups for param in group["params"]]
            wanted = [param for group in expected.param_groups for param in group["params"]]
            assert all(map(torch.equal, wanted, found)), (default, other)
            assert not any(map(torch.equal, before, found)), "nothing moved"
