"""``sync="forward"``: parameters may still be on their way when a step is over, and nobody ever sees an old value."""

import contextlib
import copy
import inspect
import io
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle, product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW
from torch.utils.checkpoint import checkpoint

from ddp_zero import ZeroRedundancyOptimizer, shard_optimizer
from ddp_zero.core.comm.exchange import Exchange
from ddp_zero.core.comm.parameter_sync import BucketSync
from ddp_zero.core.local.parameters import GradientSource
from ddp_zero.core.step import coupling
from ddp_zero.values.placeholders import Awaited
from tests import internals
from tests.multiproc.cases import Twins, assert_identical, batches, build_model, loss_of, split_groups, step_on
from tests.multiproc.harness import Cases, Setup, kill_this_process, run_ranks, run_ranks_to_end
from tests.multiproc.late_sync import (
    MODES,
    OPTIONS,
    assert_same_values,
    late_twins,
    left,
    plain,
    sharded,
    train_step,
    wrapped,
)
from tests.multiproc.rings import rings_for_all

case = Cases()

STEPS = 4  # two with the final buckets of DDP


def late_by(mode: str = "stage 2, interleaved", model: nn.Module | None = None, **ddp: Any) -> Twins:
    return late_twins(mode, model, **ddp)


def go_on(twins: Twins, steps: int = 4) -> None:
    """After it, syncs are on their way."""
    twins.go_on(steps, compares=False)
    assert left(twins.opt)


def check(twins: Twins) -> None:
    twins.assert_equal("sync in forward")
    twins.assert_moved()
    assert not left(twins.opt)


# Parity


def _equals_ddp(setup: Setup, is_full: bool) -> int:
    """In every mode, with both optimizers or with each by turns."""
    compared = 0
    for name, build in product(MODES, (AdamW, SGD)) if is_full else zip(MODES, cycle((AdamW, SGD)), strict=False):
        twins = late_twins(name, build=build)
        in_flight = []
        for _ in range(STEPS):
            twins.go_on(1, compares=False)
            in_flight.append(len(left(twins.opt)))
        assert min(in_flight[3:]) >= (1 if "standalone" in name else 2), (
            f"{name} waits at the end of a step: {in_flight}"
        )
        check(twins)
        compared += 1
    return compared


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_mode_equals_ddp_with_the_plain_optimizer(world_size: int) -> None:
    assert run_ranks(_equals_ddp, world_size, False, timeout=300) == [len(MODES)] * world_size


@pytest.mark.nightly
@pytest.mark.parametrize("world_size", [2, 3])
def test_every_mode_equals_ddp_with_either_optimizer_in_full(world_size: int) -> None:
    assert run_ranks(_equals_ddp, world_size, True, timeout=300) == [2 * len(MODES)] * world_size


# Under a profiler


def _profiled(setup: Setup, with_rings: bool, every: int) -> None:
    """Modes through several profiles, each of which ends while parameters are on their way."""
    warnings.filterwarnings("ignore", message=".*Profiler clears events at the end of each cycle")
    labels: list[int] = []

    def note(profile: Any) -> None:
        found = profile.profiler.kineto_results.events()
        labels.append(sum(event.name().startswith("ddp_zero::sync") for event in found))

    modes = [name for name, options in MODES.items() if "max_grad_norm" not in options][::every]
    for name in modes:
        twins = late_by(name)
        with (
            rings_for_all() if with_rings else contextlib.nullcontext(),
            torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU],
                schedule=torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=2),
                on_trace_ready=note,
                record_shapes=True,
                profile_memory=True,
                with_stack=True,
            ) as profile,
        ):
            for _ in range(9):
                go_on(twins, 1)
                profile.step()
        check(twins)
    assert len(labels) == 2 * len(modes)
    assert min(labels) > 0


def test_a_profile_may_end_while_parameters_are_on_their_way() -> None:
    run_ranks(_profiled, 2, False, 2, timeout=240)


@pytest.mark.nightly
@pytest.mark.parametrize("with_rings", [False, True])
def test_a_profile_may_end_in_every_mode(with_rings: bool) -> None:
    run_ranks(_profiled, 2, with_rings, 1, timeout=240)


# Uses


def _state_dict(twins: Twins) -> None:
    for value, expected in zip(
        twins.model.module.state_dict().values(), twins.plain_model.module.state_dict().values(), strict=True
    ):
        assert_identical(expected, value, "state_dict")


def _average_kept_beside(twins: Twins) -> None:
    averages = [torch.zeros_like(param) for param in twins.before]
    ours = [average.clone() for average in averages]
    with torch.no_grad():
        torch._foreach_lerp_(averages, list(twins.plain_model.parameters()), 0.5)
        torch._foreach_lerp_(ours, list(twins.model.parameters()), 0.5)
    for expected, average in zip(averages, ours, strict=True):
        assert_identical(expected, average, "average")


def _written_in_place(twins: Twins) -> None:
    """Also what this rank sends: its peers must not get half of it."""
    with torch.no_grad():
        for model in (twins.plain_model, twins.model):
            for param in model.parameters():
                param.clamp_(-0.2, 0.2)
    go_on(twins, 2)


def _loaded(twins: Twins) -> None:
    state = {name: value + 1 for name, value in zip(twins.plain_model.module.state_dict(), twins.before, strict=True)}
    for model in (twins.plain_model, twins.model):
        model.module.load_state_dict(state)
    go_on(twins, 2)


def _copied_and_saved(twins: Twins) -> None:
    for made in (copy.deepcopy, _saved_and_loaded):
        go_on(twins, 1)
        twin = made(twins.model.module)
        assert all(type(param) is nn.Parameter for param in twin.parameters())
        assert_same_values(twins.plain_model.module, twin, made.__name__)
        assert not left(twins.opt)


def _saved_and_loaded(module: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(module, buffer)
    loaded: nn.Module = torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
    return loaded


def _sent_by_the_user(twins: Twins) -> None:
    """Collectives take tensors to C++; these look at the dtype first, but in torch 2.8 not the last three."""
    is_root = dist.get_rank() == 0
    calls: list[Callable[[Tensor], object]] = [
        lambda param: dist.all_reduce(param, dist.ReduceOp.MAX),
        lambda param: dist.all_gather([torch.empty_like(param) for _ in range(2)], param),
    ]
    if "relevant_args" in inspect.getsource(dist.reduce):  # where torch asks tensors for their type
        calls += [
            lambda param: dist.broadcast(param, 0),
            lambda param: dist.gather(param, [torch.empty_like(param) for _ in range(2)] if is_root else None),
            lambda param: dist.reduce(param, 0, dist.ReduceOp.MAX),
        ]
    for call in calls:
        go_on(twins, 1)
        with torch.no_grad():
            for param in twins.model.parameters():
                call(param)
                assert not isinstance(param, Awaited)


def _evaluated(twins: Twins) -> None:
    inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(5))
    for model in (twins.plain_model, twins.model):
        model.eval()
    with torch.no_grad():
        assert_identical(twins.plain_model.module(inputs), twins.model.module(inputs), "outputs")
    assert not left(twins.opt)
    for model in (twins.plain_model, twins.model):
        model.train()


def _consolidated(twins: Twins) -> None:
    twins.opt.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        ours, plain_state = twins.opt.state_dict()["state"], twins.plain.state_dict()["state"]
        for index, values in plain_state.items():
            for key, value in values.items():
                assert_identical(value, ours[index][key], f"{key} of {index}")


def _asked_for_its_shape(twins: Twins) -> None:
    """Nothing waits, nothing comes."""
    before = left(twins.opt)
    for param in twins.model.parameters():
        assert param.shape
        assert param.dtype
        assert param.device
        assert param.requires_grad
        assert param.grad is None
        assert param.numel()
        assert param.size()
        assert param.dim()
        assert isinstance(param, nn.Parameter)
        assert {param: 1}[param] == 1
    twins.opt.zero_grad()
    twins.model.zero_grad()
    assert left(twins.opt) == before


def _finished_by_hand(twins: Twins) -> None:
    """For those that keep views from before."""
    twins.opt.finish_sync()
    assert not left(twins.opt)
    go_on(twins, 1)


def _exception_in_forward(twins: Twins) -> None:
    """What is on its way belongs to a step that was taken; it still comes after `reset`."""
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        twins.model(torch.ones(2, 5))
    twins.opt.reset()
    go_on(twins, 2)


def _added_group(twins: Twins) -> None:
    twins.opt.add_param_group({"params": [("added", nn.Parameter(torch.ones(3)))]})
    assert not left(twins.opt)


def _deep_copied_optimizer(twins: Twins) -> None:
    model, opt = copy.deepcopy((twins.model.module, twins.opt))
    assert_same_values(twins.plain_model.module, model, "copy")
    assert opt.stage == 2


def _step_without_a_use(twins: Twins) -> None:
    """Gradients that no forward pass has made: the step completes the step before."""
    for model, opt in twins.sides:
        inputs, targets = torch.ones(2, 8), torch.ones(2, 3)
        step_on(opt, loss_of(model, inputs, targets))


USES = [
    _state_dict,
    _average_kept_beside,
    _written_in_place,
    _loaded,
    _copied_and_saved,
    _sent_by_the_user,
    _evaluated,
    _consolidated,
    _asked_for_its_shape,
    _finished_by_hand,
    _exception_in_forward,
    _added_group,
    _deep_copied_optimizer,
    _step_without_a_use,
]


def _slow_wait(exchange: Exchange, what: str, original: Any = Exchange.wait) -> Any:
    time.sleep(0.002)
    return original(exchange, what)


def _use_waits(setup: Setup, use: Callable[[Twins], None]) -> None:
    """The other rank is late with everything it sends."""
    start = BucketSync.start

    def late(sync: BucketSync, source: GradientSource) -> None:
        if setup.rank == 1:
            time.sleep(0.01)
        start(sync, source)

    with mock.patch.object(BucketSync, "start", late), mock.patch.object(Exchange, "wait", _slow_wait):
        twins = late_by()
        go_on(twins)
        use(twins)
        check(twins)


@case(2)
def _every_use_of_a_parameter_in_flight_waits_for_it(setup: Setup) -> None:
    for use in USES:
        try:
            _use_waits(setup, use)
        except Exception as error:
            raise AssertionError(f"in {use.__name__}") from error


# Models


class Tied(nn.Module):
    """The first layer's weight is the last one's, too, and a parameter is of no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(8, 16), nn.Linear(16, 16)
        self.scale = nn.Parameter(torch.ones(8))
        self.out = nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = checkpoint(self.middle, torch.tanh(self.first(inputs)), use_reentrant=False)
        result: Tensor = self.out((torch.tanh(hidden) @ self.first.weight) * self.scale)
        return result


class Attention(nn.Module):
    """Looks at the type of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.out = nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.out(self.layer(inputs[None])[0])
        return result


@case(2)
def _tied_checkpointed_and_packed_parameters_equal_ddp(setup: Setup) -> None:
    torch.manual_seed(0)
    for model in (Tied(), nn.Sequential(nn.LSTM(8, 4), _First(), nn.Linear(4, 3))):
        twins = late_by(model=model)
        go_on(twins)
        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(5))
        for one in (twins.plain_model, twins.model):
            one.eval()
        with torch.no_grad():
            assert_identical(twins.plain_model.module(inputs), twins.model.module(inputs), "outputs")
        check(twins)


@case(2)
def _attention_in_evaluation_equals_ddp_and_is_synced_in_the_step(setup: Setup) -> None:
    """Its faster way, which it takes in evaluation only without hooks and with nothing but parameters."""
    torch.manual_seed(0)
    twins = late_by(model=Attention())
    for _ in range(4):
        twins.go_on(1, compares=False)
        assert not left(twins.opt)
    assert "at the end of the step" in twins.opt.explain()
    inputs, mask = torch.randn(4, 5, 8), torch.zeros(4, 5, dtype=torch.bool)
    mask[:, -2:] = True
    with torch.no_grad():
        layers = [model.module.eval().layer for model in (twins.plain_model, twins.model)]
        expected, actual = (layer(inputs, src_key_padding_mask=mask) for layer in layers)
    assert_identical(expected, actual, "outputs")
    check(twins)


class _First(nn.Module):
    def forward(self, pair: tuple[Tensor, Any]) -> Tensor:
        return pair[0]


@case(2)
def _compiled_models_equal_ddp(setup: Setup) -> None:
    """Compiled code is made for parameters of one type: the model inside DDP, DDP with it, its parts, a layer."""
    for how in ("inside", "outside", "outside, in parts", "layer", "late"):
        torch._dynamo.config.optimize_ddp = "parts" in how  # it takes no small buckets
        twins = late_by(bucket_cap_mb=25) if "parts" in how else late_by()
        if how == "inside":
            twins.model.module = torch.compile(twins.model.module, backend="eager")
        model: Any = torch.compile(twins.model, backend="eager") if "outside" in how else twins.model
        if how == "layer":
            twins.model.module[0].compile(backend="eager")
        for step in range(8):
            if how == "late" and step == 4:
                model = torch.compile(twins.model, backend="eager")
            inputs, targets = next(twins.feed)
            train_step(twins.plain_model, twins.plain, inputs, targets)
            train_step(model, twins.opt, inputs, targets)
        if "outside" in how:
            assert not left(twins.opt), "nothing can wait before compiled code"
        pairs = zip(twins.plain_model.parameters(), twins.model.parameters(), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs), how
        assert torch._dynamo.utils.counters["frames"]["ok"] > 0
        torch._dynamo.reset()


@case(2)
def _unused_parameters_static_graphs_and_no_sync_equal_ddp(setup: Setup) -> None:
    every: list[dict[str, Any]] = [{"find_unused_parameters": True}, {"static_graph": True}, {}]
    for options in every:
        twins = late_by(**options)
        go_on(twins, 6)
        for model, opt in twins.sides:
            inputs, targets = torch.ones(2, 8) + setup.rank, torch.ones(2, 3)
            if not options:
                with model.no_sync():
                    loss_of(model, inputs, targets).backward()
            train_step(model, opt, inputs, targets)
        check(twins)


@case(2)
def _masters_equal_those_of_a_sync_in_the_step_without_reading_all_parameters(setup: Setup) -> None:
    low = build_model().to(torch.bfloat16)
    models = [wrapped(copy.deepcopy(low)) for _ in range(2)]
    opts = [
        shard_optimizer(model, AdamW, stage=2, master_weights=True, sync=sync, **OPTIONS)
        for model, sync in zip(models, ("step", "forward"), strict=True)
    ]
    for step, (inputs, targets) in enumerate(batches(setup.rank, STEPS)):
        for model, opt in zip(models, opts, strict=True):
            train_step(model, opt, inputs.bfloat16(), targets.bfloat16())
        if step < 3:  # parameters still move into buckets
            continue
        masters = type(internals.targets_of(opts[1]).masters)
        with mock.patch.object(masters, "find_diverged", side_effect=AssertionError("reads all")):
            internals.shard_of(opts[1]).check_masters()
    assert left(opts[1])
    assert not left(opts[0])
    assert_same_values(models[0].module, models[1].module, "masters")


@case(2)
def _join_equals_a_sync_in_the_step(setup: Setup) -> None:
    for mode in ("stage 1, overlapped", "stage 2, interleaved", "stage 1, standalone"):
        models = [wrapped(build_model()) for _ in range(2)]
        opts = [
            shard_optimizer(model, AdamW, sync=sync, **MODES[mode], **OPTIONS)
            for model, sync in zip(models, ("step", "forward"), strict=True)
        ]
        for model, opt in zip(models, opts, strict=True):
            with Join([model, opt]):
                for inputs, targets in batches(setup.rank, 4 + 2 * setup.rank):
                    train_step(model, opt, inputs, targets)
        assert_same_values(models[0].module, models[1].module, mode)


@case(4)
def _a_subgroup_of_the_ranks_equals_ddp(setup: Setup) -> None:
    if setup.rank < 2:
        dist.new_group([2, 3])
        return
    group = dist.new_group([2, 3])
    twins = late_by(process_group=group)
    go_on(twins)
    check(twins)


# Order


def _order(setup: Setup) -> tuple[list[int], list[int]]:
    """Which bucket is sent, and then waited for, in a step and the next forward pass."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(6)])
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.001, gradient_as_bucket_view=True)
    opt = shard_optimizer(ddp, AdamW, stage=2, sync="forward", **OPTIONS)
    for _ in range(4):
        step_on(opt, ddp(torch.ones(2, 16)).sum())
    opt.finish_sync()
    sent: list[int] = []
    waited: list[int] = []
    start, receive = BucketSync.start, BucketSync.receive

    def sending(one: BucketSync, source: GradientSource) -> None:
        sent.append(one.bucket.index)
        start(one, source)

    def receiving(one: BucketSync) -> None:
        waited.append(one.bucket.index)
        receive(one)

    with internals.replaced(opt, BucketSync, "start", sending), mock.patch.object(BucketSync, "receive", receiving):
        step_on(opt, ddp(torch.ones(2, 16)).sum())
        assert not waited
        hidden = torch.ones(2, 16)
        for count, layer in enumerate(model, start=1):
            hidden = layer(hidden)
            assert len(waited) <= count, "a layer waits for its own bucket only"
    return sent, waited


def test_what_forward_needs_first_is_sent_first_and_each_layer_waits_for_its_own() -> None:
    for sent, waited in run_ranks(_order, 2):
        buckets = sorted(sent, reverse=True)
        assert len(buckets) > 3
        assert sent == buckets
        assert waited == buckets


# Failures


def _peer_dies(setup: Setup) -> str:
    coupling.is_checked_step = lambda step: False  # or the end of the step would notice
    twins = late_by()
    go_on(twins)
    if setup.rank == 1:
        with internals.replaced(twins.opt, BucketSync, "start", lambda *_: kill_this_process()):
            train_step(twins.model, twins.opt, torch.ones(2, 8), torch.ones(2, 3))
    train_step(twins.model, twins.opt, torch.ones(2, 8), torch.ones(2, 3))
    told = ""
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"Expected rank 1 \(global rank 1\) to take part in the sync of") as e:
            twins.model(torch.ones(2, 8))
        told = str(e.value)
    with pytest.raises(RuntimeError, match="Expected rank 1"):
        twins.model.module.state_dict()
    twins.opt.reset()
    assert not any(isinstance(param, Awaited) for param in twins.model.parameters())
    return told


def test_a_use_raises_when_the_peer_has_died_again_and_again() -> None:
    survivor, victim = run_ranks_to_end(_peer_dies, 2, group_timeout=5)
    assert victim.killed
    assert survivor.error is None, survivor.error
    assert "bucket" in survivor.result


def _one_rank_uses_the_result(setup: Setup) -> float:
    """The other drops model and optimizer, and the process group, with messages still to be sent."""
    twins = late_by()
    go_on(twins)
    if setup.rank == 1:
        del twins
        threading.Event().wait(0.1)
        dist.destroy_process_group()
        return 0.0
    time.sleep(0.5)
    check(twins)
    return 1.0


def test_a_rank_that_drops_the_model_still_sends_it() -> None:
    first, second = run_ranks_to_end(_one_rank_uses_the_result, 2)
    assert first.result == 1.0, first.error
    assert second.result == 0.0 or "destroy" in str(second.error) or "process group" in str(second.error), second.error


_ENDS_AT_ONCE = """
import sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from ddp_zero import shard_optimizer
from ddp_zero.values.placeholders import Awaited

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=sys.argv[2], rank=rank, world_size=2)
ddp = DistributedDataParallel(torch.nn.Linear(4096, 2048), gradient_as_bucket_view=True)
opt = shard_optimizer(ddp, torch.optim.SGD, lr=0.1, overlap=False, sync="forward")
for step in range(3):
    ddp(torch.ones(1, 4096)).sum().backward()
    if rank == 0 and step == 2:
        time.sleep(2)  # what the other sends has nowhere to go before this rank steps
    opt.step()
    opt.zero_grad()
assert all(isinstance(param, Awaited) for param in ddp.parameters()), "nothing is on its way"
if rank == 0:
    print(sum(param.double().sum().item() for param in ddp.parameters()))
"""


@pytest.mark.nightly
def test_a_process_that_ends_right_after_its_last_step_still_sends(tmp_path: Path) -> None:
    """At the end of the interpreter, since nobody has asked before."""
    rendezvous = (tmp_path / "rendezvous").as_uri()
    commands = [[sys.executable, "-W", "ignore", "-c", _ENDS_AT_ONCE, str(rank), rendezvous] for rank in (0, 1)]
    ranks = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for command in commands
    ]
    try:
        told = [rank.communicate(timeout=60) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], told
    assert float(told[0][0])


@case(2)
def _sync_forward_without_flat_storage_an_unknown_sync_or_one_that_differs_is_refused(setup: Setup) -> None:
    ddp = wrapped(build_model())
    with pytest.raises(ValueError, match=r"sync='forward' needs parameters_as_bucket_view=True"):
        shard_optimizer(ddp, AdamW, sync="forward", parameters_as_bucket_view=False)
    with pytest.raises(ValueError, match=r"Expected sync to be one of \('step', 'forward'\), got 'later'"):
        shard_optimizer(ddp, AdamW, **{"sync": "later"})  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"the same sync on every rank in .*, got step on rank 0 .* and forward on rank 1"
    ):
        shard_optimizer(ddp, AdamW, sync="forward" if setup.rank else "step")


@case(2)
def _finish_sync_without_a_ddp_model_does_nothing(setup: Setup) -> None:
    ddp = wrapped(build_model())
    alone = ZeroRedundancyOptimizer(
        split_groups(ddp.module, 2), AdamW, parameters_as_bucket_view=True, sync="forward", **OPTIONS
    )
    alone.finish_sync()


# What reads parameters without asking


@case(2)
def _backward_through_a_graph_from_before_the_step_is_refused(setup: Setup) -> None:
    """Autograd reads saved parameters in C++, without waiting for those in flight."""
    twins = late_by()
    go_on(twins)
    twins.opt.finish_sync()
    scales = [torch.ones_like(param.detach(), requires_grad=True) for param in twins.model.parameters()]
    losses = [(param * scale).sum() for param, scale in zip(twins.model.parameters(), scales, strict=True)]
    train_step(twins.model, twins.opt, *next(twins.feed))
    before = left(twins.opt)
    for loss, scale in zip(losses, scales, strict=True):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(loss, scale)
    assert left(twins.opt) == before != []


@contextmanager
def _late(opt: ZeroRedundancyOptimizer, rank: int, seconds: float) -> Iterator[None]:
    """A rank sends its parameters late, once; no step meanwhile ends with a collective that would wait for them."""
    start, sleeps = BucketSync.start, [seconds]

    def late(sync: BucketSync, source: GradientSource) -> None:
        if dist.get_rank() == rank and sleeps:
            time.sleep(sleeps.pop())
        start(sync, source)

    with (
        internals.replaced(opt, BucketSync, "start", late),
        mock.patch.object(coupling, "is_checked_step", return_value=False),
    ):
        yield


@case(2)
def _threads_that_use_a_parameter_in_flight_all_wait_for_it(setup: Setup) -> None:
    twins = late_by()
    go_on(twins)
    errors: list[Exception] = []

    def use() -> None:
        try:
            for param in twins.model.parameters():
                param.sum()
        except Exception as error:
            errors.append(error)

    for late_rank in (0, 1):
        inputs, targets = next(twins.feed)
        train_step(twins.plain_model, twins.plain, inputs, targets)
        with _late(twins.opt, late_rank, 0.3):
            train_step(twins.model, twins.opt, inputs, targets)
            threads = [threading.Thread(target=use) for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    assert not errors, errors[0]
    check(twins)


class _Stop(Exception):
    pass


def _stop(*_: Any) -> None:
    raise _Stop


def _interrupt_a_wait(setup: Setup) -> bool:
    """As by Ctrl-C, after which the user saves the model."""
    signal.signal(signal.SIGALRM, _stop)
    twins = late_by()
    go_on(twins)
    inputs, targets = next(twins.feed)
    train_step(twins.plain_model, twins.plain, inputs, targets)
    has_stopped = False
    with _late(twins.opt, 1, 0.6):
        train_step(twins.model, twins.opt, inputs, targets)
        if setup.rank == 0:
            signal.setitimer(signal.ITIMER_REAL, 0.2)
        try:
            twins.model.module.state_dict()
        except _Stop:
            has_stopped = True
    check(twins)
    return has_stopped


def test_a_wait_interrupted_by_a_signal_is_repeated_at_the_next_use() -> None:
    assert run_ranks(_interrupt_a_wait, 2, group_timeout=10) == [True, False]


class Bypass(nn.Module):
    """Hands its parameters to functions that do not ask for the type of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.diagonal = nn.Parameter(torch.rand(8, 8)), nn.Parameter(torch.rand(8))
        self.out = nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.func.vmap(lambda row: inputs @ row)(self.matrix)
        scale = torch.sparse_coo_tensor(torch.arange(8).repeat(2, 1), self.diagonal, (8, 8), check_invariants=False)
        result: Tensor = self.out((scale @ hidden).T)
        return result


@case(2)
def _a_module_waits_for_its_parameters_before_functions_that_do_not_wait(setup: Setup) -> None:
    torch.manual_seed(0)
    twins = late_by(model=Bypass())
    go_on(twins)
    data = [next(twins.feed) for _ in range(4)]
    for inputs, targets in data:
        train_step(twins.plain_model, twins.plain, inputs, targets)
    for step, (inputs, targets) in enumerate(data):
        with _late(twins.opt, step % 2, 0.1):
            train_step(twins.model, twins.opt, inputs, targets)
    check(twins)


def _scripted(setup: Setup, how: str) -> None:
    """TorchScript reads parameters in C++."""
    torch._C._jit_set_profiling_executor(False)  # it rounds otherwise from its third run on, of either model
    models: list[Any] = [build_model(), build_model()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated
        for index, model in enumerate(models):
            if how == "whole":
                models[index] = torch.jit.script(model)
            else:
                model[0] = torch.jit.script(model[0])
    expected, ddp = plain(models[0]), wrapped(models[1])
    reference, opt = AdamW(expected.parameters(), **OPTIONS), sharded(ddp, MODES["stage 2, interleaved"])
    data = list(batches(setup.rank, STEPS))
    for inputs, targets in data:
        train_step(expected, reference, inputs, targets)
    for step, (inputs, targets) in enumerate(data):
        with _late(opt, step % 2, 0.05):
            train_step(ddp, opt, inputs, targets)
    opt.finish_sync()
    assert_same_values(expected.module, ddp.module, how)


@pytest.mark.parametrize("how", ["whole", "a layer"])
def test_scripted_modules_equal_ddp(how: str) -> None:
    run_ranks(_scripted, 2, how)


test_sync_forward = case.each()
