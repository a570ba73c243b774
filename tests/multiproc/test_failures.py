"""Steps that fail on one rank alone, and what was in flight when a model is dropped: all ranks hear, none hangs."""

import copy
import gc
import logging.handlers
import os
import re
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from ddp_zero import ZeroRedundancyOptimizer, checkpoint, shard_optimizer
from ddp_zero.core.comm import communicator, exchange
from ddp_zero.core.step import rank_shard as binding
from ddp_zero.values.placeholders import Awaited
from tests import internals
from tests.multiproc.cases import assert_equal_models, assert_same_on_all_ranks, loss_of
from tests.multiproc.harness import Setup, run_ranks

# Local steps that raise


class Failing(SGD):
    """Raises at one of its calls, counted from 1 over all buckets and steps; at none if that is 0."""

    fails_at = 0
    calls = 0

    def step(self, closure: Any = None) -> Any:
        Failing.calls += 1
        if Failing.calls == Failing.fails_at:
            raise KeyError("a check of its own")
        return super().step(closure)


TOLD = r"Expected the local step to succeed on every rank, got .*on rank {0} \(global rank {0}\) KeyError: .a check of"


def _fail_in(step: int, bucket: int, buckets: int) -> None:
    """From now on count calls; fail in this bucket of this step (from 0)."""
    Failing.calls, Failing.fails_at = 0, step * buckets + bucket + 1


def _expect_error(setup: Setup, failing: set[int], use: Callable[[], Any]) -> None:
    """Every rank raises: those that fail their own error, the others with the text of those."""
    if setup.rank in failing:
        with pytest.raises(KeyError, match="a check of its own") as own:
            use()
        if sys.version_info >= (3, 11):
            assert "restart from a checkpoint" in own.value.__notes__[0]
        return
    with pytest.raises(RuntimeError) as told:
        use()
    for rank in failing:
        assert re.search(TOLD.format(rank), str(told.value)), told.value
    assert "restart from a checkpoint" in str(told.value)


def _standalone(setup: Setup, failing: set[int]) -> None:
    """By buckets of 3 parameters: in the first bucket and in the last, then training goes on as if nothing were."""
    binding.BUCKET_CAP_BYTES = 100
    for as_views in (False, True):
        for bucket in (0, -1):
            torch.manual_seed(0)
            params = [nn.Parameter(torch.randn(20)) for _ in range(9)]
            opt = ZeroRedundancyOptimizer(params, Failing, parameters_as_bucket_view=as_views, lr=0.1)
            owned = internals.num_owned_buckets(opt, setup.rank)
            assert owned > 1
            for param in params:
                param.grad = torch.ones_like(param)
            _fail_in(1, bucket % owned, owned)
            if setup.rank not in failing:
                Failing.fails_at = 0
            opt.step()
            _expect_error(setup, failing, opt.step)
            assert_same_on_all_ranks(params)
            before = [param.detach().clone() for param in params]
            opt.reset()
            opt.step()
            assert_same_on_all_ranks(params)
            for param, value in zip(params, before, strict=True):
                torch.testing.assert_close(param.detach(), value - 0.1, rtol=0, atol=0)


def _one_rank_fails(setup: Setup) -> None:
    _standalone(setup, {1})


def _all_ranks_but_one_fail(setup: Setup) -> None:
    _standalone(setup, set(range(setup.world_size)) - {1})


def _rank_0_owns_the_only_parameter(setup: Setup) -> None:
    """It steps empty groups, and that fails; then the owner fails, and it hears."""
    for failing in ({1}, {0}):
        param = nn.Parameter(torch.ones(5))
        opt = ZeroRedundancyOptimizer([param], Failing, lr=0.1)
        assert bool(opt.optim.param_groups[0]["params"]) is (setup.rank == 0)
        param.grad = torch.ones(5)
        _fail_in(1, 0, 1)
        if setup.rank not in failing:
            Failing.fails_at = 0
        opt.step()
        _expect_error(setup, failing, opt.step)
        opt.step()
        assert_same_on_all_ranks([param])


def _adafactor_fails_on_an_empty_parameter(setup: Setup) -> None:
    """Torch's own Adafactor divides by the number of elements: only the parameter's owner gets that error."""
    params = [nn.Parameter(torch.randn(20, 10)), nn.Parameter(torch.randn(19, 10)), nn.Parameter(torch.empty(0, 4))]
    opt = ZeroRedundancyOptimizer(params, torch.optim.Adafactor, lr=0.1)
    for param in params:
        param.grad = torch.zeros_like(param)
    owner = internals.owners_of(opt)[2]
    expected: Any = ZeroDivisionError if setup.rank == owner else RuntimeError
    with pytest.raises(expected, match="float division by zero"):
        opt.step()


def _model(width: int = 16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(width, width), nn.Tanh())))


def _train(ddp: nn.Module, opt: Any, steps: int, rank: int, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    width = next(ddp.parameters()).shape[0]
    for _ in range(steps):
        opt.zero_grad()
        inputs, targets = (torch.randn(4, width, generator=generator) for _ in range(2))
        loss_of(ddp, inputs, targets).backward()
        opt.step()


MODES: dict[str, dict[str, Any]] = {
    "overlap": {},
    "interleaved": {"interleaved": True},
    "stage 2": {"stage": 2},
    "stage 2 interleaved": {"stage": 2, "interleaved": True},
    "stage 2 standalone": {"stage": 2, "overlap": False},
    "clipped": {"max_grad_norm": 1.0},
    "forward": {"sync": "forward"},
    "forward, stage 2": {"sync": "forward", "stage": 2},
    "forward, standalone": {"sync": "forward", "overlap": False},
}


def _under_ddp(setup: Setup, mode: str) -> None:
    binding.BUCKET_CAP_BYTES = 1100
    for bucket in (0, -1):
        ddp = DistributedDataParallel(_model(), bucket_cap_mb=0.001, gradient_as_bucket_view=True)
        opt = shard_optimizer(ddp, Failing, lr=0.1, **MODES[mode])
        Failing.fails_at = 0
        _train(ddp, opt, 4, setup.rank)
        opt.finish_sync()
        owned = internals.num_owned_buckets(opt, setup.rank)
        assert opt.stats()["buckets"] > 2
        _fail_in(1, bucket % owned, owned)
        if setup.rank != 1:
            Failing.fails_at = 0
        _expect_error(setup, {1}, partial(_train, ddp, opt, 3, setup.rank))
        opt.reset()
        assert_same_on_all_ranks(ddp.parameters())
        _goes_on(setup, ddp, opt)


def _goes_on(setup: Setup, ddp: Any, opt: Any) -> None:
    """After `reset`, with the same model, no rank hangs, and the ranks agree."""
    before = [param.detach().clone() for param in ddp.parameters()]
    _train(ddp, opt, 2, setup.rank, seed=1)
    opt.finish_sync()
    assert_same_on_all_ranks(ddp.parameters())
    assert not any(torch.equal(param, value) for param, value in zip(ddp.parameters(), before, strict=True))


@pytest.mark.parametrize("world_size", [2, 3])
def test_errors_in_local_steps_of_some_ranks_are_raised_on_all(world_size: int) -> None:
    bodies = [_one_rank_fails, _all_ranks_but_one_fail, _adafactor_fails_on_an_empty_parameter]
    run_ranks(_run_in_turn, world_size, bodies)


def _run_in_turn(setup: Setup, bodies: list[Callable[[Setup], None]]) -> None:
    """One spawn for all; a failing body is in the traceback."""
    for body in bodies:
        body(setup)


def test_errors_of_a_rank_without_parameters_and_of_the_owner_are_raised_on_both() -> None:
    run_ranks(_rank_0_owns_the_only_parameter, 2)


def _world_of_one(setup: Setup) -> None:
    param = nn.Parameter(torch.ones(5))
    opt = ZeroRedundancyOptimizer([param], Failing, lr=0.1)
    param.grad = torch.ones(5)
    _fail_in(1, 0, 1)
    opt.step()
    with pytest.raises(KeyError, match="a check of its own"):
        opt.step()
    opt.step()
    assert torch.equal(param.detach(), torch.ones(5) - 0.1 - 0.1)


def test_with_one_rank_the_error_is_raised_and_training_goes_on() -> None:
    run_ranks(_world_of_one, 1)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("mode", MODES)
def test_an_error_in_the_local_step_of_one_rank_is_raised_on_all_under_ddp(mode: str, world_size: int) -> None:
    run_ranks(_under_ddp, world_size, mode)


# Models that are dropped with messages in flight


class Interrupted(Exception):
    """Raised in the middle of backward."""


def _interrupt(ddp: Any, opt: Any, rank: int, layer: int) -> None:
    """A backward pass that raises when it comes to this layer."""

    def raising(grad: torch.Tensor) -> None:
        raise Interrupted("in the middle of backward")

    handle = ddp.module[layer].weight.register_hook(raising)
    with pytest.raises(Interrupted):
        _train(ddp, opt, 1, rank)
    handle.remove()


def _dropped_without_reset(setup: Setup, mode: str, layers: list[list[int]]) -> None:
    """Wrapped again each time, and after the last time compared with a plain optimizer, over rounds seen before."""
    options = MODES[mode]
    model = _model()
    for layer in layers:
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.001, gradient_as_bucket_view=True)
        opt = shard_optimizer(ddp, torch.optim.AdamW, lr=0.1, **options)
        _train(ddp, opt, 3, setup.rank)
        _interrupt(ddp, opt, setup.rank, layer[setup.rank % len(layer)])
        opt.finish_sync()
        # state_dict() refuses parameters that may be half updated
        state = {name: value.detach().clone() for name, value in model.named_parameters()}
        del ddp, opt, model
        gc.collect()
        model = _model()
        model.load_state_dict(state)
    plain_ddp = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=0.001)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.001, gradient_as_bucket_view=True)
    assert_same_on_all_ranks(ddp.parameters())
    plain = torch.optim.AdamW(plain_ddp.parameters(), lr=0.1)
    opt = shard_optimizer(ddp, torch.optim.AdamW, lr=0.1, **{**options, "max_grad_norm": None})
    for seed in range(5):
        _train(plain_ddp, plain, 1, setup.rank, seed)
        _train(ddp, opt, 1, setup.rank, seed)
        opt.finish_sync()
        for expected, param in zip(plain_ddp.parameters(), ddp.parameters(), strict=True):
            torch.testing.assert_close(param.detach(), expected.detach(), rtol=0, atol=0)
        if seed == 0:  # torch lets go of an interrupted pass, and of messages in it, in the next one
            kept = len(exchange.unfinished)
    assert len(exchange.unfinished) == kept, "steps that go well leave nothing"
    assert not any(torch.equal(param, state[name]) for name, param in model.named_parameters())


def _trained_on(setup: Setup, mode: str, layers: list[int]) -> None:
    """Parameters whose gradients are zeroed go on with a plain or a sharded optimizer; the earlier may be alive."""
    warnings.filterwarnings("ignore", "The interrupted backward pass has stepped some buckets", UserWarning)
    kept: list[Any] = []
    for layer, is_plain in product(layers, (True, False)):
        model = _model(width=80)  # whose gradients are taken as they arrive
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.06, gradient_as_bucket_view=True)
        opt = shard_optimizer(ddp, torch.optim.AdamW, lr=0.1, **MODES[mode])
        _interrupt(ddp, opt, setup.rank, layer)  # in the first pass, after which no step is taken
        if layer:
            kept += [ddp, opt]
        del ddp, opt
        plain_model = copy.deepcopy(model)
        ddps = [DistributedDataParallel(one, bucket_cap_mb=0.06) for one in (plain_model, model)]
        opts: list[Any] = [torch.optim.AdamW(plain_model.parameters(), lr=0.1)]
        opts.append(
            torch.optim.AdamW(model.parameters(), lr=0.1)
            if is_plain
            else shard_optimizer(ddps[1], torch.optim.AdamW, lr=0.1, **MODES[mode])
        )
        before = [param.detach().clone() for param in model.parameters()]
        for seed in range(3):
            for wrapper, optimizer in zip(ddps, opts, strict=True):
                _train(wrapper, optimizer, 1, setup.rank, seed)
            if not is_plain:
                opts[1].finish_sync()
            assert_equal_models(plain_model, model, f"{mode}, layer {layer}, plain: {is_plain}, step {seed}")
        assert not any(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("mode", [mode for mode, options in MODES.items() if options.get("stage") == 2])
def test_parameters_train_on_in_a_new_wrapper_after_an_exception(mode: str) -> None:
    run_ranks(_trained_on, 2, mode, [0, 4])


@pytest.mark.parametrize("mode", MODES)
def test_a_model_can_be_dropped_in_the_middle_of_backward(mode: str) -> None:
    run_ranks(_dropped_without_reset, 2, mode, [[0], [2], [4], [6], [4]])


@pytest.mark.parametrize("mode", ["stage 2", "stage 2 interleaved"])
def test_a_model_can_be_dropped_where_ranks_are_a_bucket_apart(mode: str) -> None:
    """What the rank that is ahead has sent is never taken."""
    run_ranks(_dropped_without_reset, 2, mode, [[2, 4]])


def _dropped_waits(setup: Setup, uses_rings: bool) -> None:
    """Of ranks a bucket apart; the time-out passes before a new model trains, and it does as one on new groups."""
    warnings.filterwarnings("ignore", "The interrupted backward pass has stepped some buckets", UserWarning)
    communicator.RING_BYTES = 0 if uses_rings else 1 << 40
    groups = [[dist.new_group([0, 1]), dist.new_group([2, 3])][setup.rank // 2] for _ in range(2)]

    def wrapped(group: dist.ProcessGroup) -> tuple[nn.Module, Any]:
        ddp = DistributedDataParallel(_model(), bucket_cap_mb=0.001, gradient_as_bucket_view=True)
        options: dict[str, Any] = {} if uses_rings else {"shard_group": group}
        return ddp, shard_optimizer(ddp, torch.optim.AdamW, lr=0.1, stage=2, **options)

    for _ in range(4):
        ddp, opt = wrapped(groups[0])
        _train(ddp, opt, 3, setup.rank)
        _interrupt(ddp, opt, setup.rank, [2, 4][setup.rank % 2])
        opt.reset()
    names = [thread.name for thread in threading.enumerate()]
    if setup.rank % 2 == 0:
        assert names.count("ddp_zero ring") >= 4, "threads wait for what the rank that was behind never sent"
    time.sleep(6)
    trained = []
    for group in groups:
        ddp, opt = wrapped(group)
        _train(ddp, opt, 4, setup.rank)
        trained.append([param.detach().clone() for param in ddp.parameters()])
        assert_same_on_all_ranks(ddp.parameters())
    assert all(torch.equal(one, other) for one, other in zip(*trained, strict=True))
    assert not any(torch.equal(one, other) for one, other in zip(trained[0], _model().parameters(), strict=True))


def test_waits_of_dropped_iterations_close_no_connection() -> None:
    """Of shard groups and of rings. On Gloo a wait whose time-out passes closes all connections of its group."""
    with ThreadPoolExecutor(2) as jobs:  # they mostly sleep
        list(jobs.map(lambda uses_rings: run_ranks(_dropped_waits, 4, uses_rings, group_timeout=5.0), (False, True)))


def _two_optimizers(setup: Setup, overlaps: bool) -> None:
    """The one that fails is stepped before the other, inside backward or out of it; last, nothing reads what it has."""
    log = logging.handlers.BufferingHandler(100)
    logging.getLogger("ddp_zero").addHandler(log)
    model = _model()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.001, gradient_as_bucket_view=True)
    params = [*model.parameters()]
    options: dict[str, Any] = {"lr": 0.1, "stage": 2, "overlap": overlaps, "sync": "forward"}
    optimizers = [
        shard_optimizer(ddp, kind, part, **options)
        for kind, part in zip((Failing, SGD), (params[4:], params[:4]), strict=True)
    ]

    def train(steps: int) -> None:
        for _ in range(steps):
            ddp(torch.ones(2, 16)).sum().backward()
            for opt in optimizers:
                opt.step()
                opt.zero_grad()

    for is_last in (False, True):
        Failing.fails_at = 0
        train(3)
        if setup.rank == 1:
            _fail_in(0, 0, 1)
        if is_last:
            train(1)
            internals.complete_at_exit()
            assert len(log.buffer) == 1, log.buffer
            assert "a check of its own" in log.buffer[0].getMessage()
        else:
            _expect_error(setup, {1}, partial(train, 2))
            for opt in optimizers:
                opt.reset()
    assert_same_on_all_ranks(ddp.parameters())


@pytest.mark.parametrize("overlaps", [False, True])
def test_an_error_is_raised_on_all_ranks_before_they_step_another_optimizer_whose_syncs_are_late(
    overlaps: bool,
) -> None:
    run_ranks(_two_optimizers, 2, overlaps, group_timeout=20.0)


# Processes that are forked while parameters are on their way


def _in_a_fork(use: Callable[[], Any]) -> str:
    """What a forked child says of an error: its text; killed if it has not ended after ten seconds."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        try:
            use()
            text = "no error"
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writer, text.encode()[:4000])
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return text or "hung"


def _forked(setup: Setup, root: str) -> None:
    """With a message that comes late, and with the lock in the hands of another thread of the parent."""
    warnings.filterwarnings("ignore", "This process .* is multi-threaded, use of fork", DeprecationWarning)
    ddp = DistributedDataParallel(_model(), bucket_cap_mb=0.001, gradient_as_bucket_view=True)
    opt = shard_optimizer(ddp, torch.optim.AdamW, lr=0.1, sync="forward")
    _train(ddp, opt, 4, setup.rank)
    first = next(iter(ddp.parameters()))
    assert isinstance(first, Awaited)
    uses: dict[str, Callable[[], Any]] = {
        "a use": lambda: first + 1,
        "a layer": lambda: ddp.module(torch.ones(1, 16)),
        "finish_sync": opt.finish_sync,
        "state_dict": lambda: {name: value.clone() for name, value in ddp.module.state_dict().items()},
        "a copy": lambda: copy.deepcopy(ddp.module),
    }
    for name, use in uses.items():
        text = _in_a_fork(use)
        assert re.match(r"RuntimeError: .*forked from rank .*Call opt\.finish_sync\(\) before forking", text), (
            name,
            text,
        )
    holds, ends = threading.Event(), threading.Event()

    def holding() -> None:
        with internals.keeping_others_from_waiting(opt):
            holds.set()
            ends.wait(60)

    thread = threading.Thread(target=holding)
    thread.start()
    assert holds.wait(10)
    text = _in_a_fork(opt.finish_sync)
    assert "Call opt.finish_sync() before forking" in text, text
    ends.set()
    thread.join()
    opt.finish_sync()
    assert _in_a_fork(lambda: first + 1) == "no error"
    for _ in range(2):  # before the connections of checkpoints are built, and after
        for what in (opt.state_dict, lambda: checkpoint.save(root, ddp, opt), lambda: checkpoint.load(root, ddp, opt)):
            text = _in_a_fork(what)
            assert re.match(r"RuntimeError: .*forked from.*save and load in the parent", text), text
        checkpoint.save(root, ddp, opt)
    _train(ddp, opt, 2, setup.rank)
    opt.finish_sync()
    assert_same_on_all_ranks(ddp.parameters())


def _stepped_in_a_fork(setup: Setup) -> None:
    warnings.filterwarnings("ignore", "This process .* is multi-threaded, use of fork", DeprecationWarning)
    ddp = DistributedDataParallel(_model(), gradient_as_bucket_view=True)
    for options in ({"overlap": False}, {"max_grad_norm": 1.0}, {"stage": 2, "overlap": False}):
        opt = shard_optimizer(ddp, torch.optim.AdamW, lr=0.1, **options)
        _train(ddp, opt, 2, setup.rank)
        ddp(torch.ones(1, 16)).sum().backward()
        if setup.rank == 1:
            text = _in_a_fork(opt.step)
            assert re.match(r"RuntimeError: .*forked from.*Train, save and load in the parent", text), (options, text)
        opt.step()
        opt.zero_grad()
        _train(ddp, opt, 2, setup.rank)
        assert_same_on_all_ranks(ddp.parameters())
        opt.zero_grad()
        opt.detach()


def test_a_forked_process_takes_no_step_and_leaves_the_parents_connections_alone() -> None:
    run_ranks(_stepped_in_a_fork, 2, group_timeout=20.0)


def test_a_forked_process_is_told_to_have_parameters_first(tmp_path: Path) -> None:
    run_ranks(_forked, 2, str(tmp_path))
