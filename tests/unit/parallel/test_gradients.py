"""Averages of gradients that no DDP model reduces, with peers that send what a test says; ranks without tokens."""

import copy
from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_zero.core.comm.communicator import Communicator
from ddp_zero.core.comm.ranks import StepFailedElsewhereError
from ddp_zero.core.local.parameters import ParameterTable
from ddp_zero.parallel import gradients
from ddp_zero.parallel.gradients import Averages, check_same_values, take_part_with_zeros


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


# Averages on two ranks, of which the other's is given

HAS, TRAINS, REDUCED, FAILED = 1, 2, 4, 8  # bits of what ranks tell each other


class _Two:
    """A communicator whose peer, rank 1, sends these flags or samples."""

    group_rank, world_size = 0, 2

    def __init__(self, flags: Sequence[int] = (), text: str = "") -> None:
        self.flags, self.text = flags, text
        self.sent: list[list[int]] = []

    def all_gather_tensor(self, mine: Tensor) -> list[Tensor]:
        self.sent.append(mine.tolist())
        return [mine, torch.tensor(self.flags, dtype=torch.uint8)]

    def all_gather_text(self, mine: str) -> list[str]:
        return [mine, self.text]

    def name(self, rank: int) -> str:
        return f"rank {rank}"


def _averages(peer: _Two, grads: Sequence[float | None], monkeypatch: pytest.MonkeyPatch) -> tuple[Averages, Any, Any]:
    """Averages of a parameter for each gradient; the parameters, and a log of what was averaged, by divisor."""
    log: list[tuple[list[float], int]] = []

    def average(comm: Any, tensors: Sequence[Tensor], divisor: int) -> None:
        log.append(([float(one.sum()) for one in tensors], divisor))

    monkeypatch.setattr(gradients, "average_in_place", average)
    monkeypatch.setattr(gradients, "models_over", lambda params: [])
    params = [nn.Parameter(torch.ones(2)) for _ in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = None if grad is None else torch.full((2,), grad)
    averages = Averages(cast(Communicator, peer), ParameterTable([{"params": params}]), [], 4)
    return averages, params, log


def test_a_parameter_that_only_the_peer_has_used_counts_as_zeros_and_one_that_nobody_has_keeps_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peer = _Two([HAS | TRAINS, TRAINS, HAS | TRAINS, TRAINS])
    averages, params, log = _averages(peer, [3.0, 5.0, None, None], monkeypatch)
    averages.take()
    assert peer.sent == [[HAS | TRAINS, HAS | TRAINS, TRAINS, TRAINS]]
    assert log == [([6.0, 10.0, 0.0], 4)]
    assert torch.equal(params[2].grad, torch.zeros(2))
    assert params[3].grad is None


def test_a_sparse_gradient_is_told_to_the_peer_before_it_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = _Two([HAS | TRAINS])
    averages, params, log = _averages(peer, [None], monkeypatch)
    params[0].grad = torch.ones(2).to_sparse()
    with pytest.raises(NotImplementedError):
        averages.take()
    assert (peer.sent, log) == ([[FAILED]], [])


@pytest.mark.parametrize(
    ("flags", "error", "told"),
    [
        ([FAILED, FAILED], StepFailedElsewhereError, "rank 1"),
        ([TRAINS, 0], RuntimeError, r"parameter 1 .*rank 1.*rank 0"),
        ([TRAINS | REDUCED, TRAINS], RuntimeError, r"parameter 0 .*\[ZERO-803\]"),
    ],
)
def test_a_peer_that_differs_raises_before_anything_is_averaged(
    flags: list[int], error: type[Exception], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    averages, _, log = _averages(_Two(flags), [1.0, 1.0], monkeypatch)
    with pytest.raises(error, match=told):
        averages.take()
    assert log == []


def test_values_that_differ_at_the_start_are_refused_with_both_ranks() -> None:
    params = [nn.Parameter(torch.arange(3.0)), nn.Parameter(torch.arange(3.0))]
    table = ParameterTable([{"params": params}])
    samples = [fingerprint.sample for fingerprint in table.fingerprints()]
    check_same_values(cast(Communicator, _Two(text=" ".join(samples))), table)
    with torch.no_grad():
        params[1].add_(1)
    with pytest.raises(ValueError, match=r"parameter 1 .*different values on rank 0 and rank 1"):
        check_same_values(cast(Communicator, _Two(text=" ".join(samples))), ParameterTable([{"params": params}]))


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
def test_a_pass_without_tokens_reaches_ddp_with_zero_gradients() -> None:
    ddp, inputs = _expert(), torch.ones(1, 2, requires_grad=True)
    ddp(inputs, False).sum().backward()
    assert all(grad is not None and not grad.any() for grad in _gradients(ddp))
    assert inputs.grad is not None
    assert torch.equal(inputs.grad, torch.full((1, 2), 2.0)), "its inputs' gradients are what they were"


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
