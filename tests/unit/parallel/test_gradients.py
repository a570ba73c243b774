"""Averages of gradients that no DDP model reduces, with peers that send what a test says; ranks without tokens."""

import copy
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_zero.core.comm.communicator import Communicator
from ddp_zero.core.local.parameters import ParameterTable
from ddp_zero.parallel import gradients
from ddp_zero.parallel.gradients import Averages, take_part_with_zeros


class _Alone:
    group_rank, world_size = 0, 1

    def all_gather_tensor(self, mine: Tensor) -> list[Tensor]:
        return [mine]

    def name(self, rank: int) -> str:
        return f"rank {rank}"


def test_ddp_models_are_looked_for_once_however_many_parameters_and_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search passes the whole heap; it was made for each parameter once, which took a minute while peers waited."""
    searches: list[int] = []

    def search(params: Any) -> list[Any]:
        searches.append(len(list(params)))
        return []

    monkeypatch.setattr(gradients, "models_over", search)
    monkeypatch.setattr(gradients, "average_in_place", lambda *_: None)
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(40)]
    averages = Averages(cast(Communicator, _Alone()), ParameterTable([{"params": params}]), [], 1)
    for _ in range(3):
        for param in params:
            param.grad = torch.ones(2)
        averages.take()
        averages.forget()
    assert searches == [40]


# A rank whose experts have got no token


class _Expert(nn.Module):
    """A layer that is used if there are tokens, and passes inputs on otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, inputs: Tensor, has_tokens: bool) -> Tensor:
        output: Tensor = self.layer(inputs) if has_tokens else inputs * 2
        return output


def _expert(finds_unused: bool = True) -> DistributedDataParallel:
    ddp = DistributedDataParallel(_Expert(), find_unused_parameters=finds_unused)
    take_part_with_zeros(ddp)
    return ddp


def _gradients(ddp: DistributedDataParallel) -> list[Tensor | None]:
    return [param.grad for param in ddp.parameters()]


@pytest.mark.usefixtures("job")
def test_outputs_without_gradients_frozen_parameters_and_copies_are_left_alone() -> None:
    ddp, inputs = _expert(), torch.ones(1, 2, requires_grad=True)
    with torch.no_grad():
        assert not ddp.module(inputs, False).requires_grad
    copied = copy.deepcopy(ddp.module)
    copied(inputs, False).sum().backward()
    assert _gradients(ddp) == [None, None]
    assert [param.grad for param in copied.parameters()] == [None, None]
    ddp.module.requires_grad_(False)
    ddp.module(inputs, False).sum().backward()
    assert _gradients(ddp) == [None, None]


@pytest.mark.usefixtures("job")
def test_a_model_whose_parameters_are_all_used_gets_no_hook() -> None:
    assert not _expert(finds_unused=False).module._forward_hooks
