"""Ranks that are killed, raise or stay away while gradients are reduced in stage 1: their peers' errors name them."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from ddp_zero import shard_optimizer
from tests.multiproc.cases import loss_of
from tests.multiproc.harness import Outcome, Setup, kill_this_process, run_ranks_to_end

GROUP_TIMEOUT = 5.0
VICTIM = 1
AT = 4
"""The step, from 0, of the fault; by then DDP has its final buckets, and steps are taken inside backward."""

MODES: dict[str, dict[str, Any]] = {
    "overlapped": {},
    "interleaved": {"interleaved": True},
    "clipped": {"max_grad_norm": 1.0},
    "a hook": {"hook": fp16_compress_hook},
    "standalone": {"overlap": False},
}
PLACES = ("forward", "between", "backward", "step")


class _FaultError(Exception):
    """The victim's own."""


def _raise() -> None:
    raise _FaultError("a fault of its own")


def _stay_away(setup: Setup) -> None:
    setup.wait_until_told(setup.world_size - 1)


def _train(setup: Setup, mode: str, place: str, fault: str) -> str:
    """Returns the error of the healthy ranks."""
    faults: dict[str, Callable[[], None]] = {
        "killed": kill_this_process,
        "raises": _raise,
        "away": partial(_stay_away, setup),
    }
    torch.manual_seed(0)
    layers = [nn.Linear(16, 16) for _ in range(4)]
    model = nn.Sequential(*(layer for linear in layers for layer in (linear, nn.Tanh())))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.001, gradient_as_bucket_view=True)
    opt = shard_optimizer(ddp, torch.optim.AdamW, lr=0.1, **MODES[mode])
    armed: list[str] = []

    def fault_at(where: str) -> None:
        if where in armed:
            faults[fault]()

    layers[2].register_forward_pre_hook(lambda *_: fault_at("forward"))
    layers[2].weight.register_hook(lambda _: fault_at("backward"))
    generator = torch.Generator().manual_seed(setup.rank)
    for step in range(AT + 2):
        if step == AT and setup.rank == VICTIM:
            armed.append(place)
        before = layers[0].weight.detach().clone()
        inputs, targets = (torch.randn(4, 16, generator=generator) for _ in range(2))
        try:
            opt.zero_grad()
            loss = loss_of(ddp, inputs, targets)
            fault_at("between")
            loss.backward()
            fault_at("step")
            opt.step()
        except _FaultError:
            _stay_away(setup)  # as a process that prints its traceback, and ends a little later
            raise
        except RuntimeError as error:
            if setup.rank == VICTIM:
                return "the victim"
            setup.tell()
            return str(error)
        assert not torch.equal(layers[0].weight, before), "it trains until then"
    raise AssertionError("no error has come")


def _in_parallel(world_size: int, cases: list[tuple[str, str, str]]) -> list[list[Outcome]]:
    def run(case: tuple[str, str, str]) -> list[Outcome]:
        return run_ranks_to_end(_train, world_size, *case, group_timeout=GROUP_TIMEOUT)

    with ThreadPoolExecutor(4) as pool:  # they mostly wait for time-outs
        return list(pool.map(run, cases))


INSIDE_BACKWARD = [mode for mode in MODES if mode != "standalone"]


@pytest.mark.parametrize("fault", ["killed", "raises", "away"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_peers_name_the_rank_that_is_missing(world_size: int, fault: str) -> None:
    """Each mode at one place, or two modes where the peers wait for a time-out."""
    if fault == "killed":
        cases = [*zip(INSIDE_BACKWARD, PLACES, strict=True), ("standalone", "step")]
    else:
        cases = [("overlapped", "backward"), ("clipped", "forward")]
    _assert_named(world_size, [(*case, fault) for case in cases])


@pytest.mark.nightly
@pytest.mark.parametrize("world_size", [2, 3])
def test_peers_name_the_rank_that_is_missing_in_full(world_size: int) -> None:
    _assert_named(world_size, [(*case, "killed") for case in product(INSIDE_BACKWARD, PLACES)])
    late = product(("overlapped", "clipped"), ("forward", "backward"), ("raises", "away"))
    _assert_named(world_size, [*late])


def _assert_named(world_size: int, cases: list[tuple[str, str, str]]) -> None:
    for case, outcomes in zip(cases, _in_parallel(world_size, cases), strict=True):
        for outcome in outcomes:
            if outcome.rank != VICTIM:
                expected = f"Expected rank {VICTIM} (global rank {VICTIM}) to take part in "
                assert outcome.error is None, (case, outcome)
                assert expected in outcome.result, (case, outcome)
                assert "[ZERO-503]" in outcome.result, (case, outcome)


@pytest.mark.nightly
def test_of_four_ranks_the_one_that_was_killed_is_named() -> None:
    """Also by the rank that has no connection with it in Gloo's ring, and by those that it waits for."""
    [outcomes] = _in_parallel(4, [("overlapped", "backward", "killed")])
    for outcome in outcomes:
        if outcome.rank != VICTIM:
            assert outcome.error is None, outcome
            assert f"Expected rank {VICTIM} (global rank {VICTIM}) to take part in the reduction" in outcome.result


def _raise_in_a_hook(setup: Setup, mode: str) -> str:
    """Returns the error of each rank: that of its own hook, or of the rank whose hook has raised."""

    def raises(_: Any) -> Any:
        raise _FaultError("a fault of its own")

    def hook(group: Any, bucket: Any) -> Any:
        future = fp16_compress_hook(group, bucket)
        return future.then(raises) if armed else future

    torch.manual_seed(0)
    armed: list[bool] = []
    ddp = DistributedDataParallel(nn.Linear(16, 16))
    opt = shard_optimizer(ddp, torch.optim.AdamW, lr=0.1, **MODES[mode] | {"hook": hook})
    for step in range(AT + 2):
        if step == AT and setup.rank == VICTIM:
            armed.append(True)
        try:
            ddp(torch.ones(1, 16)).sum().backward()
            opt.step()
        except RuntimeError as error:
            return str(error)
        opt.zero_grad()
    raise AssertionError("no error has come")


@pytest.mark.parametrize("mode", ["overlapped", "standalone"])
def test_a_hook_that_raises_is_not_taken_for_a_peer_that_is_missing(mode: str) -> None:
    outcomes = run_ranks_to_end(_raise_in_a_hook, 2, mode, group_timeout=GROUP_TIMEOUT)
    told = {outcome.rank: outcome.result for outcome in outcomes}
    assert "a fault of its own" in told[VICTIM]
    assert "to take part in" not in told[VICTIM], "no peer is missing"
    assert f"Expected rank {VICTIM} (global rank {VICTIM}) to take part in" in told[0]
