"""Averages of gradients that no DDP model reduces: what they look at on the way to the wire."""

from typing import Any, cast

import pytest
import torch
from torch import Tensor

from ddp_zero.core.comm.communicator import Communicator
from ddp_zero.core.local.parameters import ParameterTable
from ddp_zero.parallel import gradients
from ddp_zero.parallel.gradients import Averages


class _Alone:
    """A communicator of one rank."""

    group_rank, world_size, sent_bytes = 0, 1, 0

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
