"""Misuse is told before anything hangs, naming rank and parameter; a dead or stuck rank does not hang the rest."""

import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim.functional_adam import _FunctionalAdam
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from ddp_zero import ZeroRedundancyOptimizer, shard_optimizer
from tests import internals
from tests.multiproc.cases import build_twins, optimizer_case
from tests.multiproc.harness import Cases, Outcome, Setup, kill_this_process, run_ranks, run_ranks_to_end

case = Cases(group_timeout=20)


def _params(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, fill: float = 1.0) -> list[nn.Parameter]:
    return [nn.Parameter(torch.full(shape, fill * (i + 1), dtype=dtype)) for i, shape in enumerate(shapes)]


def _build(params: Any, optimizer_class: Any = torch.optim.AdamW, **options: Any) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(params, optimizer_class, **options)


def _sharded(*arguments: Any) -> Any:
    ddp = DistributedDataParallel(nn.Linear(2, 2), gradient_as_bucket_view=True)
    return shard_optimizer(ddp, *arguments)


def _refused(kind: type[Exception], message: str, build: Callable[[], Any]) -> None:
    with pytest.raises(kind, match=message):
        build()


@case(2, 3)
def _parameters_that_differ_between_ranks_are_refused_on_all(setup: Setup) -> None:
    last = setup.rank == setup.world_size - 1
    ours = _params((2, 2), (3,), (4,))
    name = rf"rank 0 \(global rank 0\).*rank {setup.world_size - 1} \(global rank {setup.world_size - 1}\)"
    different = {
        rf"as many parameters.*got 3 on {name}": _params((2, 2), (3,)),
        rf"the same parameter 1 .*shape \[3\].*{name}": _params((2, 2), (5,), (4,)),
        rf"the same parameter 0 .*float32.*{name}": _params((2, 2), (3,), (4,), dtype=torch.float64),
        r"the same parameter 2 .*frozen": [*_params((2, 2), (3,)), nn.Parameter(torch.ones(4), requires_grad=False)],
    }
    for message, theirs in different.items():
        _refused(ValueError, message, lambda params=(theirs if last else ours): _build(params))  # type: ignore[misc]

    same_shape = _params((3,), (3,), (3,))
    swapped = [same_shape[0], same_shape[2], same_shape[1]]
    _refused(ValueError, "in the same order.*from parameter 1", lambda: _build(swapped if last else same_shape))
    named = [(f"w{index}", param) for index, param in enumerate(_params((3,), (3,), fill=0.0))]
    _refused(ValueError, r"the same parameter 0 .*'w0'.*'w1'", lambda: _build(named[::-1] if last else named))
    _refused(
        ValueError, "the same parameter 2", lambda: _build([{"params": ours[: 2 + last]}, {"params": ours[2 + last :]}])
    )
    _refused(
        ValueError, "the same parameters_as_bucket_view", lambda: _build(ours, lr=0.1, parameters_as_bucket_view=last)
    )
    _build(_params((3,), fill=float(setup.rank)))  # different values are fine: DDP may broadcast them later


@case(2)
def _buckets_that_differ_between_ranks_are_refused_with_the_option_of_ddp(setup: Setup) -> None:
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(6)))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.02 if setup.rank else 0.006)
    for stage in (1, 2):
        message = r"bucket_cap_mb of DistributedDataParallel, .*got none on rank 0 .*parameter \d+ 'module.*ZERO-506"
        _refused(ValueError, message, lambda stage=stage: shard_optimizer(ddp, SGD, stage=stage, lr=0.1))  # type: ignore[misc]


@case(2, 3)
def _failures_on_one_rank_reach_all(setup: Setup) -> None:
    last = setup.rank == setup.world_size - 1
    told = rf"failure on rank {setup.world_size - 1}: "
    one_sided: list[tuple[type[Exception], str, str, Callable[[], Any]]] = [
        (ValueError, "empty parameter list", "ValueError", lambda: _build([] if last else _params((2,)))),
        (TypeError, "iterable", "TypeError", lambda: _build(torch.ones(2) if last else _params((2,)))),
        (TypeError, "momentumm", "TypeError", lambda: _build(_params((2,)), **({"momentumm": 1} if last else {}))),
    ]
    for kind, message, name, build in one_sided:
        _refused(kind if last else RuntimeError, message if last else told + name, build)

    vector = _params((5,))
    # ranks own different shapes: only the owner of the vector knows that Muon refuses it
    expected = ValueError if setup.rank == 1 else RuntimeError
    _refused(expected, "2D", lambda: _build(_params((4, 4), (4,)), torch.optim.Muon, lr=0.1))

    opt = _build(_params((4, 4), (4, 3)), OnlyMatrices, lr=0.1)
    expected = ValueError if last else RuntimeError  # the least loaded rank gets it
    _refused(expected, "matrix", lambda: opt.add_param_group({"params": vector}))
    assert len(opt.param_groups) == len(opt.optim.param_groups) == 1
    opt.add_param_group({"params": _params((5, 5))})
    assert len(opt.param_groups) == len(opt.optim.param_groups) == 2


@case(2, 3)
def _wrong_parameters_and_options_are_refused_with_the_plain_optimizers_errors(setup: Setup) -> None:
    weight = nn.Parameter(torch.ones(3))
    shared = torch.ones(8)
    cases: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (ValueError, "empty parameter list", lambda: _build([])),
        (TypeError, "iterable", lambda: _build(weight)),
        (TypeError, "unexpected keyword argument 'nope'", lambda: _build([weight], nope=1)),
        (ValueError, "learning rate", lambda: _build([weight], lr=-1.0)),
        (ValueError, "every parameter once", lambda: _quietly(lambda: _build([weight, weight]))),
        (ValueError, "every parameter in one group", lambda: _build([{"params": [weight]}, {"params": [weight]}])),
        (ValueError, "non-leaf", lambda: _build([weight * 2])),
        (ValueError, "parameter 1 .*meta device", lambda: _build([weight, nn.Parameter(torch.ones(2, device="meta"))])),
        (
            ValueError,
            "parameter 0 .*parameter 1 .*To tie weights",
            lambda: _build([nn.Parameter(shared[:6]), nn.Parameter(shared[4:])]),
        ),
        (ValueError, "dense parameters, got parameter 0", lambda: _build([nn.Parameter(torch.eye(2).to_sparse())])),
        (NotImplementedError, "LBFGS", lambda: _build([weight], torch.optim.LBFGS)),
        (NotImplementedError, "SparseAdam", lambda: _build([weight], torch.optim.SparseAdam)),
        (ValueError, "LBFGS", lambda: _build([weight], torch.optim.LBFGS, overlap_with_ddp=True)),  # as torch's
        (ValueError, "got the class _FunctionalAdam", lambda: _build([weight], _FunctionalAdam)),
        (ValueError, "group 0 under 'params'", lambda: _build([{"lr": 0.1}])),
        (TypeError, "optimizer_class", lambda: _build([weight], None)),
        (TypeError, r"got None.*ZERO-101", lambda: ZeroRedundancyOptimizer([weight])),
        (TypeError, r"got 0.1. Options are keywords", lambda: _build([weight], SGD, process_group=0.1)),
        (TypeError, r"got 0.1. Options are keywords: lr=0.1.*ZERO-102", lambda: _sharded(SGD, 0.1)),
        (TypeError, r"lr=1e-3.*ZERO-102", lambda: _sharded(SGD, {"lr": 0.1})),
        (TypeError, r"got None.*ZERO-101", lambda: _sharded(None)),
        (ValueError, "group 0 under 'params'", lambda: _sharded(SGD, [{"lr": 0.1}])),
        (ValueError, "LBFGS", lambda: _sharded(torch.optim.LBFGS)),
        (ValueError, "group 0 under 'params'", lambda: _build([weight]).add_param_group({"lr": 0.1})),
        (TypeError, "to build a torch.optim.Optimizer, got dict", lambda: _build([weight], lambda params: {})),
        (
            ValueError,
            "without gaps or overlaps",
            lambda: _build([nn.Parameter(torch.ones(4, 1).expand(4, 3))], parameters_as_bucket_view=True),
        ),
    ]
    for kind, message, build in cases:
        _refused(kind, message, build)
    _build([nn.Parameter(shared[:4]), nn.Parameter(shared[4:])])  # one buffer, but places of their own


def _quietly(build: Callable[[], Any]) -> Any:
    with pytest.warns(UserWarning, match="duplicate parameters"):
        return build()


@case(2, 3)
def _a_closure_is_evaluated_once_with_gradients_enabled(setup: Setup) -> None:
    twins = build_twins(optimizer_case("AdamW foreach"))
    calls = 0

    def closure() -> torch.Tensor:
        nonlocal calls
        calls += 1
        assert torch.is_grad_enabled()
        twins.opt.zero_grad()
        loss: torch.Tensor = twins.model(torch.ones(2, 8) * setup.rank).square().sum()
        loss.backward()
        return loss

    loss = twins.opt.step(closure)
    assert calls == 1
    assert isinstance(loss, torch.Tensor)
    twins.assert_moved()


@case(2, 3)
def _a_second_evaluation_of_the_closure_is_refused(setup: Setup) -> None:
    opt = ZeroRedundancyOptimizer(_params((2,), (3,), (4,)), TwiceClosing)
    with pytest.raises(RuntimeError, match="evaluated the closure a second time"):
        opt.step(lambda: 1.0)
    assert opt.step() is None


@case(2, 3)
def _other_arguments_of_step_are_passed_on_if_the_class_takes_them(setup: Setup) -> None:
    told: list[Any] = []
    params = _params((2,), (3,), (4,))
    for param in params:
        param.grad = torch.ones_like(param)
    opt = ZeroRedundancyOptimizer(params, Telling, lr=0.1)
    opt.step(0, told=told)  # type: ignore[arg-type]  # as torch's own class hands it on
    assert set(told) == {0}
    assert torch.equal(params[0].detach(), torch.full((2,), 0.9))
    assert internals.all_params_of(opt) == params
    with pytest.raises(TypeError, match="Expected a callable closure or None, got int"):
        ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.1).step(0)  # type: ignore[arg-type]


class Telling(torch.optim.SGD):
    """An optimizer that takes something else for a closure."""

    def step(self, closure: Any = None, told: Any = None) -> Any:
        if told is not None:
            told.append(closure)
        return super().step()


class OnlyMatrices(torch.optim.SGD):
    """An optimizer that checks what it is given."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if any(param.dim() != 2 for param in param_group["params"]):
            raise ValueError("every parameter must be a matrix")


class TwiceClosing(torch.optim.SGD):
    """An optimizer that looks at the loss twice, as sharpness-aware optimizers do."""

    def step(self, closure: Any = None) -> Any:
        return [closure(), closure()] if closure is not None else None


test_misuse = case.each()


def _not_initialised(setup: Setup) -> None:
    outsiders = dist.new_group([0])
    if setup.rank == 1:
        _refused(RuntimeError, "is not a member of", lambda: _build(_params((2,)), process_group=outsiders))
    else:
        _build(_params((2,)), process_group=outsiders)


def test_a_group_without_this_process_is_refused() -> None:
    run_ranks(_not_initialised, 2)


def _destroyed(setup: Setup) -> None:
    """The group is gone; what the message advises works."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))

    def build(**options: Any) -> tuple[DistributedDataParallel, ZeroRedundancyOptimizer]:
        ddp = DistributedDataParallel(module, gradient_as_bucket_view=True)
        return ddp, shard_optimizer(ddp, torch.optim.AdamW, lr=0.1, **options)

    modes: list[dict[str, Any]] = [{"overlap": False}, {"stage": 2}, {"stage": 2, "max_grad_norm": 1.0}]
    for turn, options in enumerate(modes):
        ddp, opt = build(**options)
        for _ in range(2):
            ddp(torch.ones(2, 4)).sum().backward()
            opt.step()
            opt.zero_grad()
        saved = opt.state_dict()
        loss = ddp(torch.ones(2, 4)).sum()
        dist.barrier()
        dist.destroy_process_group()
        with pytest.raises(RuntimeError, match=r"destroy_process_group\(\) before.*wrap the module in DDP again"):  # noqa: PT012
            loss.backward()
            opt.step()
        met = (setup.folder / f"met-{turn}").as_uri()
        dist.init_process_group("gloo", init_method=met, rank=setup.rank, world_size=setup.world_size)
        module.zero_grad()
        ddp, opt = build(**options)
        opt.load_state_dict(saved)
        ddp(torch.ones(2, 4)).sum().backward()
        opt.step()
        assert opt.last_step is not None
        assert opt.state_dict()["state"][0]["step"] == 3
        opt.zero_grad()
        opt.detach()


def test_a_step_after_destroy_process_group_says_what_to_build_again() -> None:
    run_ranks(_destroyed, 2)


def test_an_uninitialised_job_is_refused() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        _build(_params((2,)))


def _step_until_a_rank_fails(setup: Setup, how: str) -> str:
    params = _params((400, 300), (300, 200), (500,))
    opt = _build(params, lr=0.1, parameters_as_bucket_view=how == "stuck")
    for step in range(6):
        for param in params:
            param.grad = torch.ones_like(param)
        try:
            if setup.rank == 1 and step == 3:
                if how == "killed":
                    kill_this_process()
                elif how in ("raising", "gone"):
                    params[0].grad = params[1].grad = params[2].grad = None
                    raise KeyError("a bug in the loop of rank 1")
                setup.wait_until_told(2)
            if step == 3 and how == "gone":
                time.sleep(3)  # rank 1's connections are closed by now: messages to it cannot even be posted
            opt.step()
        except RuntimeError as error:
            setup.tell()
            return str(error)
    raise AssertionError(f"rank {setup.rank} never noticed")


def test_the_others_raise_within_the_time_out_and_name_the_rank() -> None:
    def run(how: str) -> list[Outcome]:
        return run_ranks_to_end(_step_until_a_rank_fails, 3, how, group_timeout=5, timeout=60)

    ways = ("killed", "stuck", "raising", "gone")
    with ThreadPoolExecutor(4) as jobs:  # they mostly wait for time-outs
        found = dict(zip(ways, jobs.map(run, ways), strict=True))
    for how, (first, lost, last) in found.items():
        assert lost.killed is (how == "killed")
        assert (first.error, last.error) == (None, None), how
        messages = [first.result, last.result]
        taking_part = r"Expected rank \d \(global rank \d\) to take part in (the sync of|an agreement)"
        assert all(re.search(taking_part, message) for message in messages), (how, messages)
        assert any("Expected rank 1 (global rank 1)" in message for message in messages), (how, messages)
