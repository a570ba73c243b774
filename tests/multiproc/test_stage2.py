"""Stage 2: gradients kept by their owners, in every situation; always equal to DDP with the plain optimizer."""

import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, bf16_compress_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ddp_zero import ZeroRedundancyOptimizer, hook_with_zero_step, shard_optimizer
from ddp_zero.core.ddp.reducer import rebuild_buckets
from ddp_zero.values.placeholders import AbsentGradient
from tests import internals
from tests.multiproc.cases import (
    Twins,
    added,
    assert_identical,
    assert_overlapped,
    at_stage,
    batches,
    build_model,
    build_overlapped_twins,
    gathered,
    loss_of,
    optimizer_case,
    ready,
    sharded_twins,
    step_on,
)
from tests.multiproc.harness import Cases, Setup, kill_this_process, run_ranks, run_ranks_to_end
from tests.multiproc.overlap_loops import LOOPS, one_epoch
from tests.pairwise import pairwise

ADAMW = optimizer_case("AdamW foreach")
MOMENTUM = optimizer_case("SGD momentum")
BOTH = (False, True)


def _owns(opt: ZeroRedundancyOptimizer, param: Tensor) -> bool:
    return any(param is owned for group in opt.optim.param_groups for owned in group["params"])


def _at_stage_2(setup: Setup, body: Callable[[Setup], None]) -> None:
    with at_stage(2):
        body(setup)


case = Cases(_at_stage_2, group_timeout=30)
for loop, sizes in LOOPS:
    case(*sizes)(loop)


# Memory and bytes


class Tower(nn.Module):
    """Layers of the same size, one DDP bucket each: gradients dwarf activations."""

    width, depth = 128, 12

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(self.width, self.width, bias=False) for _ in range(self.depth)])

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = torch.tanh(layer(inputs))
        return inputs

    @property
    def layer_bytes(self) -> int:
        return 4 * self.width * self.width


def _live_bytes(setup: Setup, interleaved: bool) -> tuple[int, int, int]:
    """The most gradient bytes alive at any moment of a step, one layer's size, and what `explain` says."""
    torch.manual_seed(0)
    model = Tower()
    cap_mb = 0.9 * model.layer_bytes / 2**20
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=cap_mb)
    opt = shard_optimizer(ddp, torch.optim.SGD, stage=2, interleaved=interleaved, lr=0.01)

    def step() -> None:
        step_on(opt, ddp(torch.randn(1, model.width)).square().mean())

    assert internals.own_reducer_is_gone(ddp), "DDP's own buckets are without memory from the start"
    step()
    most = 0
    for iteration in range(4):
        at_start = sum(buffer.memory.nbytes for buffer in internals.buffers_of(opt))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            step()
        live = 0
        for event in profile.profiler.kineto_results.events():
            if event.name() == "[memory]":
                live += event.nbytes()
                most = max(most, at_start + live)
        assert iteration < 2 or abs(live) < model.layer_bytes / 8, "a step leaves nothing behind"
    assert internals.own_reducer_is_gone(ddp)
    buffers = sum(buffer.memory.nbytes for buffer in internals.buffers_of(opt))
    assert f"{buffers:,} bytes" in opt.explain()
    return most, buffers, model.layer_bytes


@pytest.mark.parametrize("interleaved", BOTH, ids=["after the last bucket", "interleaved"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_step_holds_three_bucket_buffers_and_its_own_shard_only_where_the_step_waits(
    world_size: int, interleaved: bool
) -> None:
    for most, buffers, layer in run_ranks(_live_bytes, world_size, interleaved):
        assert buffers <= 3 * layer  # lag + 2, between steps too
        transient = 1.2 * layer  # one layer's gradient before it is copied, and activations
        own = 0 if interleaved else Tower.depth * layer / world_size
        assert own + layer <= most <= own + 3 * layer + transient


def _wire(setup: Setup, **options: Any) -> tuple[int, int, int]:
    from tests.multiproc.written import bytes_written

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(300, 300, bias=False) for _ in range(16)))
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=1.5)
    opt = shard_optimizer(ddp, torch.optim.SGD, stage=2, lr=0.01, **options)

    def step() -> None:
        step_on(opt, ddp(torch.randn(1, 300)).square().mean())

    for _ in range(3):
        step()
    dist.barrier()
    counted, written = int(opt.stats()["total_sent_bytes"]), bytes_written()
    step()
    nbytes = sum(param.nbytes for param in model.parameters())
    return nbytes, int(opt.stats()["total_sent_bytes"]) - counted, bytes_written() - written


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_step_sends_2_n_minus_1_nths_of_the_parameter_bytes(world_size: int) -> None:
    """On average: where segments differ in size, ranks of a ring send different amounts."""
    sizes, counted, written = zip(*run_ranks(_wire, world_size), strict=True)
    bound = 2 * (world_size - 1) / world_size * sizes[0]
    assert sum(counted) / world_size == pytest.approx(bound, rel=0.001)
    assert sum(written) / world_size == pytest.approx(bound, rel=0.01)
    assert max(counted) <= 1.1 * bound


def _wire_of_torchs_own(setup: Setup) -> tuple[int, int]:
    from tests.multiproc.written import bytes_written

    warnings.simplefilter("ignore")  # importing it warns about its TorchScript
    from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(300, 300, bias=False) for _ in range(16)))
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=1.5)
    opt = TorchZero(ddp.parameters(), torch.optim.SGD, parameters_as_bucket_view=True, lr=0.01)
    for step in range(4):
        dist.barrier()
        written = bytes_written() if step == 3 else 0
        step_on(opt, ddp(torch.randn(1, 300)).square().mean())
    return sum(param.nbytes for param in model.parameters()), bytes_written() - written


def test_torchs_own_sends_half_as_much_again() -> None:
    """The other side of the comparison that the documentation makes."""
    for nbytes, written in run_ranks(_wire_of_torchs_own, 2):
        assert written == pytest.approx(1.5 * nbytes, rel=0.01)


def _wire_in_bf16(setup: Setup) -> tuple[int, int, int]:
    return _wire(setup, grad_comm_dtype=torch.bfloat16)


def test_gradients_in_bfloat16_cost_half_of_their_part() -> None:
    for nbytes, counted, written in run_ranks(_wire_in_bf16, 2):
        assert counted == pytest.approx(0.75 * nbytes, rel=0.001)
        assert written == pytest.approx(0.75 * nbytes, rel=0.01)


# Accumulation


def _add_averages(twins: Twins, data: Iterable[Any], loss: Callable[..., Tensor] = loss_of) -> None:
    """Averages each micro-batch by DDP on its own and adds the averages."""
    params = list(twins.plain_model.parameters())
    sums: list[Tensor | None] = [None] * len(params)
    for batch in data:
        twins.plain.zero_grad()
        loss(twins.plain_model, *batch).backward()
        for position, (total, param) in enumerate(zip(sums, params, strict=True)):
            if param.grad is not None:
                sums[position] = param.grad.clone() if total is None else total + param.grad
    for param, total in zip(params, sums, strict=True):
        param.grad = total


def _reference_step(twins: Twins, data: list[tuple[Tensor, Tensor]]) -> None:
    _add_averages(twins, data)
    twins.plain.step()
    twins.plain.zero_grad()


@case(2, 3, few=pairwise(BOTH, BOTH, BOTH), every=[*product(BOTH, BOTH, BOTH)])
def _accumulated_passes_equal_the_sum_of_averages(setup: Setup, configurations: list[tuple[bool, bool, bool]]) -> None:
    for overlap, interleaved, says_accumulate in configurations:
        twins = build_overlapped_twins(MOMENTUM, interleaved=interleaved, overlap=overlap)
        twins.train(setup, 3)
        data = list(batches(setup.rank, 12, seed=1))
        for first in range(0, 12, 3):
            before = twins.values()
            _reference_step(twins, data[first : first + 3])
            twins.opt.zero_grad()
            for inputs, targets in data[first : first + 2]:
                with twins.opt.accumulate() if says_accumulate or overlap else nullcontext():
                    loss_of(twins.model, inputs, targets).backward()
                assert all(map(torch.equal, before, twins.model.parameters())), "a step was taken"
                for param in twins.model.parameters():
                    assert isinstance(param.grad, AbsentGradient) is not _owns(twins.opt, param)
            loss_of(twins.model, *data[first + 2]).backward()
            twins.opt.step()
            twins.assert_equal(f"accumulated from {first}")
        twins.assert_moved()


@case(2)
def _passes_accumulated_from_the_first_iteration_on_equal_the_sum_of_their_averages(setup: Setup) -> None:
    """While DDP's layouts are not final, too, each pass is averaged on its own."""
    for overlap in BOTH:
        twins = build_overlapped_twins(MOMENTUM, overlap=overlap)
        data = list(batches(setup.rank, 6))
        for first in range(0, 6, 2):
            _reference_step(twins, data[first : first + 2])
            with twins.opt.accumulate():
                loss_of(twins.model, *data[first]).backward()
            step_on(twins.opt, loss_of(twins.model, *data[first + 1]))
            twins.assert_equal(f"accumulated from {first}")
        twins.assert_moved()


@case(2)
def _no_sync_and_accumulate_are_close_to_one_large_batch(setup: Setup) -> None:
    """To 1e-5: sums over samples associate otherwise."""
    for policy in ("no_sync", "accumulate"):
        twins = build_overlapped_twins(MOMENTUM)
        for inputs, targets in batches(setup.rank, 4):
            step_on(twins.plain, loss_of(twins.plain_model, inputs, targets))
            halves = list(zip(inputs.split(3), targets.split(3), strict=True))
            with twins.model.no_sync() if policy == "no_sync" else twins.opt.accumulate():
                (loss_of(twins.model, *halves[0]) / 2).backward()
            step_on(twins.opt, loss_of(twins.model, *halves[1]) / 2)
            for one, other in zip(twins.plain_model.parameters(), twins.model.parameters(), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        twins.assert_moved()


@case(2)
def _bf16_gradients_accumulate_in_fp32(setup: Setup) -> None:
    """Many small bf16 gradients after a large gradient: a bf16 sum would lose them, the fp32 sum does not."""
    layer = nn.Linear(4, 4, bias=False).to(torch.bfloat16)
    nn.init.ones_(layer.weight)
    ddp = DistributedDataParallel(layer, gradient_as_bucket_view=True)
    opt = shard_optimizer(ddp, torch.optim.SGD, stage=2, overlap=False, lr=1.0)
    for _ in range(3):
        ddp(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        opt.zero_grad()
    (ddp(torch.ones(1, 4, dtype=torch.bfloat16)).sum() * 256).backward()
    for _ in range(16):
        (ddp(torch.ones(1, 4, dtype=torch.bfloat16)).sum() * 0.25).backward()
    assert torch.equal(opt.full_grad(layer.weight), torch.full((4, 4), 260.0, dtype=torch.bfloat16))  # type: ignore[arg-type]


# What users see


@case(2, 3)
def _gradients_between_backward_and_a_waiting_step_are_whole_absent_or_gathered(setup: Setup) -> None:
    every_options: list[dict[str, Any]] = [{}, {"find_unused_parameters": True}, {"static_graph": True}]
    for options in every_options:
        twins = build_overlapped_twins(ADAMW, overlap=False, **options)
        for step, (inputs, targets) in enumerate(batches(setup.rank, 6)):
            twins.backward(inputs, targets)
            for one, other in zip(twins.plain_model.parameters(), twins.model.parameters(), strict=True):
                if isinstance(other.grad, AbsentGradient):
                    assert not _owns(twins.opt, other)
                    assert (other.grad.shape, other.grad.dtype) == (other.shape, other.dtype)
                else:
                    assert_identical(one.grad, other.grad, f"gradient at step {step}")
                assert_identical(one.grad, twins.opt.full_grad(other), f"full gradient at step {step}")
                assert isinstance(other.grad, AbsentGradient) or _owns(twins.opt, other) or step < 3
            for optimizer in (twins.plain, twins.opt):
                optimizer.step()
                optimizer.zero_grad(set_to_none=step != 4)
            twins.assert_equal(f"after step {step}")
            assert twins.opt.full_grad(next(twins.model.parameters())) is None or step == 4
            twins.opt.zero_grad()
            twins.plain.zero_grad()
        twins.assert_moved()
        with pytest.raises(ValueError, match="a parameter of this optimizer"):
            twins.opt.full_grad(torch.ones(1))


@case(2, 3)
def _a_partial_norm_is_refused(setup: Setup) -> None:
    for overlap in BOTH:
        twins = build_overlapped_twins(ADAMW, overlap=overlap)
        twins.train(setup, 3)
        inputs, targets = next(batches(setup.rank, 1))
        twins.opt.zero_grad()
        loss_of(twins.model, inputs, targets).backward()
        params = list(twins.model.parameters())
        remedy = "overlap_with_ddp=False" if overlap else r"keeps it on rank \d .*opt.(full_grad|clip_grad_)"
        grads = [param.grad for param in params if param.grad is not None]
        attempts: list[Callable[[], Any]] = [
            partial(nn.utils.clip_grad_norm_, params, 1.0),
            partial(nn.utils.get_total_norm, grads),
            partial(list, map(torch.norm, grads)),
        ]
        for attempt in attempts:
            with pytest.raises(RuntimeError, match=rf"gradient of parameter \d.*{remedy}"):
                attempt()
        if overlap:
            with pytest.raises(RuntimeError, match="used up the gradient"):
                twins.opt.full_grad(params[0])
        twins.opt.step()
        assert "AbsentGradient" in repr([p.grad for p in params])


@case(2, 3, marks=[pytest.mark.nightly])
def _a_model_with_absent_gradients_is_moved_copied_and_traced_as_under_ddp(setup: Setup) -> None:
    """As Lightning does at the end of ``fit``: found with loops that call ``zero_grad()`` first."""
    keeps: list[Callable[[nn.Module], Any]] = [
        lambda model: model.cpu(),
        lambda model: model.to(torch.float32),
        lambda model: model.share_memory(),
        copy.deepcopy,
        lambda model: pickle.loads(pickle.dumps(model)),
        lambda model: torch.export.export(model, (next(batches(0, 1))[0],)),
    ]
    for overlap, partition in product(BOTH, ("parameters", "elements")):
        twins = build_overlapped_twins(ADAMW, overlap=overlap, zero_options={"partition": partition})
        for number, (inputs, targets) in enumerate(batches(setup.rank, 8)):
            twins.zero_grad()
            twins.backward(inputs, targets)
            for keep in keeps if number in (0, 5) else keeps[:1]:
                keep(twins.model.module)
            twins.plain.step()
            twins.opt.step()
            for keep in keeps if number in (2, 6) else keeps[-1:]:
                keep(twins.model.module)
            twins.assert_equal(f"{overlap}, {partition}, {number}")
        twins.assert_moved()


@case(1, 2, 3)
def _clip_grad_norm_equals_ddp_for_all_norms(setup: Setup) -> None:
    for norm_type, largest in ((2.0, 0.05), (float("inf"), 0.01), (1.0, 1e6), (3, 0.1)):
        twins = build_overlapped_twins(ADAMW, overlap=False)
        for batch in batches(setup.rank, 4):
            twins.backward(*batch)
            expected = nn.utils.clip_grad_norm_(twins.plain_model.parameters(), largest, norm_type)
            assert_identical(expected, twins.opt.clip_grad_norm_(largest, norm_type), f"norm {norm_type}")
            twins.step(f"clipped by norm {norm_type}")
        twins.assert_moved()


@case(2)
def _clip_grad_norm_of_some_parameters_equals_ddp(setup: Setup) -> None:
    twins = build_overlapped_twins(ADAMW, overlap=False)
    twins.train(setup, 3)
    twins.zero_grad()
    assert twins.opt.clip_grad_norm_(1.0).item() == 0.0  # no gradients
    inputs, targets = next(batches(setup.rank, 1))
    twins.backward(inputs, targets)
    parts = [list(model.parameters())[1:4] for model in (twins.plain_model, twins.model)]
    expected = nn.utils.clip_grad_norm_(parts[0], 0.01)
    assert_identical(expected, twins.opt.clip_grad_norm_(0.01, parameters=parts[1]), "norm of a part")
    for one, other in zip(twins.plain_model.parameters(), twins.model.parameters(), strict=True):
        assert_identical(one.grad, twins.opt.full_grad(other), "clipped gradient")
    assert twins.opt.clip_grad_norm_(1.0, parameters=parts[1][0]).isfinite()


@case(2)
def _clip_grad_norm_of_infinite_gradients_or_foreign_parameters_is_refused(setup: Setup) -> None:
    twins = build_overlapped_twins(ADAMW, overlap=False)
    twins.train(setup, 3)
    twins.zero_grad()
    twins.backward(*next(batches(setup.rank, 1)))
    owned = next(p for p in twins.opt.optim.param_groups[0]["params"])
    if setup.rank == 0:
        assert owned.grad is not None
        owned.grad.fill_(float("inf"))
    with pytest.raises(RuntimeError, match=r"Expected a finite norm of order 2.0 of all gradients, got inf"):
        twins.opt.clip_grad_norm_(1.0, error_if_nonfinite=True)
    with pytest.raises(ValueError, match="parameters of this optimizer"):
        twins.opt.clip_grad_norm_(1.0, parameters=[torch.ones(1)])
    with pytest.raises(ValueError, match="parameters of this optimizer"):
        twins.opt.clip_grad_norm_(1.0, parameters=torch.ones(1))


@case(2, 3)
def _gradients_accumulated_before_a_freeze_are_stepped_after_it(setup: Setup) -> None:
    for overlap in BOTH:
        twins = build_overlapped_twins(MOMENTUM, overlap=overlap, find_unused_parameters=True)
        twins.train(setup, 3)
        data = list(batches(setup.rank, 2, seed=1))
        twins.zero_grad()

        def frozen_later(model: nn.Module, number: int, *batch: Tensor) -> Tensor:
            """Of a model in which some parameters do not train from the second pass on."""
            for position in (1, 4):
                list(model.parameters())[position].requires_grad_(number == 0)
            return loss_of(model, *batch)

        passes = [(number, *batch) for number, batch in enumerate(data)]
        _add_averages(twins, passes, frozen_later)
        with twins.opt.accumulate():
            frozen_later(twins.model, *passes[0]).backward()
        frozen_later(twins.model, *passes[1]).backward()
        twins.plain.step()
        twins.opt.step()
        twins.assert_equal("after the change")


@case(2)
def _backward_without_zero_grad_after_a_step_inside_backward_is_refused(setup: Setup) -> None:
    twins = build_overlapped_twins(ADAMW)
    twins.train(setup, 3)
    inputs, targets = next(batches(setup.rank, 1))
    with pytest.raises(
        RuntimeError, match=r"was neither dropped nor zeroed before the next backward pass.*opt.accumulate\(\)"
    ):
        loss_of(twins.model, inputs, targets).backward()


@case(1, 3)
def _passes_without_zero_grad_add_up_where_the_step_waits(setup: Setup) -> None:
    """In the regime in which gradients are seen they behave as gradients do, also when they are set to zero."""
    for set_to_none in BOTH:
        twins = build_overlapped_twins(MOMENTUM, overlap=False)
        twins.train(setup, 3)
        twins.plain.zero_grad()
        twins.opt.zero_grad()
        data = list(batches(setup.rank, 3, seed=3))
        for inputs, targets in data:
            loss_of(twins.model, inputs, targets).backward()
        _reference_step(twins, data)
        twins.opt.step()
        twins.assert_equal("three backward passes")
        twins.opt.zero_grad(set_to_none=set_to_none)
        _reference_step(twins, data[:1])
        loss_of(twins.model, *data[0]).backward()
        twins.opt.step()
        twins.assert_equal("and one more")


# Dtypes


def _mixed_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 31),
        nn.Tanh(),
        Cast(torch.bfloat16),
        nn.Linear(31, 17).to(torch.bfloat16),
        nn.Tanh(),
        Cast(torch.float64),
        nn.Linear(17, 5).to(torch.float64),
        Cast(torch.float32),
        nn.Linear(5, 3),
    )


class Cast(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.to(self.dtype)


@case(2, 3)
def _three_dtypes_in_one_model_equal_ddp(setup: Setup) -> None:
    for overlap, cap in product(BOTH, (0.0005, 25)):
        twins = build_overlapped_twins(MOMENTUM, model=_mixed_model(), overlap=overlap, bucket_cap_mb=cap)
        twins.train(setup, 4)
        twins.assert_moved()


def _rounding_hook(dtype: torch.dtype, predivide: float) -> Any:
    """The reference for options of the reduction: round, sum in rank order in fp32, divide by the rest."""

    def hook(state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        ranks = dist.get_world_size()
        parts = gathered(bucket.buffer().mul_(1.0 / predivide).to(dtype))
        total = added([part.float() for part in parts])
        return ready(total if predivide == ranks else total * (predivide / ranks))

    return hook


REDUCTIONS = (torch.bfloat16, torch.float16, torch.float32), (None, 1.5), BOTH


@case(2, 3, few=pairwise(*REDUCTIONS), every=[*product(*REDUCTIONS)])
def _grad_comm_dtype_and_predivide_equal_the_reference(
    setup: Setup, configurations: list[tuple[torch.dtype, float | None, bool]]
) -> None:
    for dtype, predivide, overlap in configurations:
        rounds = _rounding_hook(dtype, predivide or setup.world_size)
        mode: dict[str, Any] = {"grad_comm_dtype": dtype, "gradient_predivide_factor": predivide}
        twins = sharded_twins(plain_hook=rounds, stage=2, overlap=overlap, **mode)
        twins.train(setup, 4)
        twins.assert_moved()


# Unused parameters


class OptionalLayers(nn.Module):
    """Layers that are used or not as they are told; each is a DDP bucket or two."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 12)
        self.branches = nn.ModuleList([nn.Linear(12, 12) for _ in range(5)])
        self.last = nn.Linear(12, 3)

    def forward(self, inputs: Tensor, used: list[bool]) -> Tensor:
        hidden = self.first(inputs)
        for branch, is_used in zip(self.branches, used, strict=True):
            if is_used:
                hidden = hidden + torch.tanh(branch(hidden))
        output: Tensor = self.last(hidden)
        return output


def loss_of_used(model: nn.Module, inputs: Tensor, targets: Tensor, used: list[bool]) -> Tensor:
    return nn.functional.mse_loss(model(inputs, used), targets)


class NoGradient(torch.autograd.Function):
    """Takes a parameter and gives it no gradient: not unused, but undefined."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, param: Tensor) -> Tensor:
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Undefined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 3)
        self.without_gradient = nn.Parameter(torch.ones(40))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.second(torch.tanh(self.first(inputs))))
        output: Tensor = self.last(NoGradient.apply(hidden, self.without_gradient))  # type: ignore[no-untyped-call]
        return output


@case(2)
def _parameters_with_undefined_gradients_equal_ddp(setup: Setup) -> None:
    for overlap in BOTH:
        torch.manual_seed(0)
        twins = build_overlapped_twins(MOMENTUM, model=Undefined(), overlap=overlap, bucket_cap_mb=0.0003)
        twins.train(setup, 4)


@case(2, 3, few=[(False, 25), (True, 0.0003)], every=[*product(BOTH, (0.0003, 25))])
def _gradients_of_an_earlier_pass_alone_are_stepped(setup: Setup, configurations: list[tuple[bool, float]]) -> None:
    """In any bucket: a parameter that the last pass does not use, but an earlier one did, is stepped."""
    for overlap, cap in configurations:
        torch.manual_seed(0)
        twins = build_overlapped_twins(
            MOMENTUM, model=OptionalLayers(), overlap=overlap, bucket_cap_mb=cap, find_unused_parameters=True
        )
        everything, little = [True] * 5, [False, True, False, False, False]
        for step, (inputs, targets) in enumerate(batches(setup.rank, 4)):
            twins.zero_grad()
            passes = [(inputs, targets, used) for used in (everything, little)]
            _add_averages(twins, passes, loss_of_used)
            with twins.opt.accumulate():
                loss_of_used(twins.model, *passes[0]).backward()
            loss_of_used(twins.model, *passes[1]).backward()
            twins.plain.step()
            twins.opt.step()
            if step < 2:  # until DDP's layout is final, gradients add up before they are averaged
                with torch.no_grad():
                    for one, other in zip(twins.plain_model.parameters(), twins.model.parameters(), strict=True):
                        torch.testing.assert_close(one, other)
                        one.copy_(other)
                twins.plain.load_state_dict(copy.deepcopy(twins.opt.state_dict()))
            else:
                twins.assert_equal(f"step {step}, overlap {overlap}, cap {cap}")


@case(2, 3, marks=[pytest.mark.nightly])
def _a_branch_first_used_when_the_plan_changes_equals_ddp(setup: Setup) -> None:
    """By one rank that is not its owner, in the iteration after another parameter was frozen."""
    for overlap, branch in product(BOTH, range(5)):
        torch.manual_seed(0)
        twins = build_overlapped_twins(
            MOMENTUM, model=OptionalLayers(), overlap=overlap, bucket_cap_mb=0.0003, find_unused_parameters=True
        )
        for step, (inputs, targets) in enumerate(batches(setup.rank, 6)):
            used = [step > 1 and index == branch and setup.rank == step % setup.world_size for index in range(5)]
            twins.both(lambda model, _, step=step: next(model.parameters()).requires_grad_(step < 2))  # type: ignore[misc]
            twins.iterate(inputs, targets, used, loss=loss_of_used)
            twins.assert_equal(f"step {step}, branch {branch}")


class Skipped(nn.Module):
    """All layers but the first can go unused; the others' buckets are reduced before that of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.others = nn.ModuleList([nn.Linear(8, 8) for _ in range(9)])

    def forward(self, inputs: Tensor, uses_others: bool) -> Tensor:
        hidden: Tensor = self.first(inputs)
        for layer in self.others if uses_others else ():
            hidden = hidden + layer(hidden)
        return hidden


def mean_square(model: nn.Module, *inputs: Any) -> Tensor:
    found: Tensor = model(*inputs)
    return found.square().mean()


@case(2, 3, few=BOTH, every=BOTH * 3)
def _layers_unused_on_one_rank_when_the_plan_changes_equal_ddp(setup: Setup, configurations: tuple[bool, ...]) -> None:
    """Buckets are averaged while the reducer still sets others to zero."""
    for overlap in configurations:
        torch.manual_seed(0)
        twins = build_overlapped_twins(
            MOMENTUM, model=Skipped(), overlap=overlap, bucket_cap_mb=0.0002, find_unused_parameters=True
        )
        for step in range(5):
            inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + setup.rank))
            twins.both(lambda model, _, step=step: model.module.first.bias.requires_grad_(step < 3))  # type: ignore[misc]
            twins.iterate(inputs, setup.rank == 1 or step < 2, loss=mean_square)
            twins.assert_equal(f"step {step}, overlap {overlap}")


@case(2, 3)
def _local_passes_between_backward_and_step_leave_averages_as_ddp_does(setup: Setup) -> None:
    """A penalty on the parameters, or `torch.autograd.grad`: neither goes through the DDP model."""

    def penalty(model: nn.Module) -> Tensor:
        return 0.01 * torch.stack([param.square().sum() for param in model.parameters()]).sum()

    for kind in ("penalty", "autograd.grad"):
        twins = build_overlapped_twins(MOMENTUM, overlap=False)
        for inputs, targets in batches(setup.rank, 4):
            for model, optimizer in twins.sides:
                optimizer.zero_grad()
                loss_of(model, inputs, targets).backward()
                if kind == "penalty":
                    penalty(model).backward()
                else:
                    grads = torch.autograd.grad(penalty(model), list(model.parameters()))
                    assert all(torch.equal(g, 0.02 * p) for g, p in zip(grads, model.parameters(), strict=True))
                optimizer.step()
            for one, other in zip(twins.plain_model.parameters(), twins.model.parameters(), strict=True):
                if _owns(twins.opt, other):
                    assert_identical(one.grad, other.grad, "gradient")
            twins.assert_equal(kind)
        twins.zero_grad()
        buffers = internals.buffers_of(twins.opt)
        assert not any(one.is_lent for one in buffers), "scratches of passes that were not reduced are back"


# Changes while training


@case(2)
def _a_changed_memory_format_equals_ddp(setup: Setup) -> None:
    """By ``model.to(memory_format=...)`` in mid-training.

    The reference has bucket views: without them DDP itself permutes the gradient here (torch 2.13.0).
    """
    warnings.simplefilter("ignore")  # DDP says that its buckets keep the old strides
    for stage, overlap in ((1, True), (2, True), (2, False)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Conv2d(8, 4, 2), nn.Flatten(), nn.Linear(16, 3))
        with at_stage(stage):
            twins = build_overlapped_twins(
                MOMENTUM, model=model, overlap=overlap, as_views=overlap, gradient_as_bucket_view=True
            )
        data = torch.Generator().manual_seed(setup.rank)
        for step in range(6):
            inputs, targets = torch.randn(2, 3, 5, 5, generator=data), torch.randn(2, 3, generator=data)
            for one, optimizer in twins.sides:
                optimizer.zero_grad()
                if step == 4:
                    one.to(memory_format=torch.channels_last)
                loss_of(one, inputs, targets).backward()
                optimizer.step()
            twins.assert_equal(f"step {step}, overlap {overlap}")


@case(2, 3)
def _gradients_replaced_or_zeroed_by_the_loop_are_accumulated_on(setup: Setup) -> None:
    """Another tensor in ``param.grad`` of the owner, and zeros written with and without a new version of the tensor."""
    twins = build_overlapped_twins(MOMENTUM, overlap=False)
    twins.train(setup, 3)
    twins.zero_grad()
    data = list(batches(setup.rank, 2, seed=4))
    loss_of(twins.model, *data[0]).backward()
    for param in twins.model.parameters():
        if param.grad is not None and not isinstance(param.grad, AbsentGradient):
            param.grad = param.grad * 0.5
    loss_of(twins.model, *data[1]).backward()
    _add_averages(twins, zip((0.5, 1.0), data, strict=True), lambda model, part, batch: loss_of(model, *batch) * part)
    twins.step("after a replaced gradient")

    layer = nn.Linear(4, 4, bias=False).to(torch.bfloat16)
    ddp = DistributedDataParallel(layer, gradient_as_bucket_view=True)
    opt = shard_optimizer(ddp, torch.optim.SGD, stage=2, overlap=False, lr=0.0)
    for _ in range(5):
        if layer.weight.grad is not None and not isinstance(layer.weight.grad, AbsentGradient):
            layer.weight.grad.data.zero_()  # counts no version
        elif layer.weight.grad is not None:
            layer.weight.grad.zero_()
        ddp(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    assert torch.equal(opt.full_grad(layer.weight), torch.ones(4, 4, dtype=torch.bfloat16))  # type: ignore[arg-type]


UNEVEN = (MOMENTUM, ADAMW), BOTH, ((3, 0, 5), (5, 4, 1))


@case(3, few=pairwise(*UNEVEN), every=[*product(*UNEVEN)])
def _uneven_inputs_with_a_waiting_step_equal_ddp(setup: Setup, configurations: list[Any]) -> None:
    for case, finds, inputs_of_rank in configurations:
        twins = build_overlapped_twins(case, 2, overlap=False, find_unused_parameters=finds)
        steps = inputs_of_rank[setup.rank]
        one_epoch(setup, twins, steps, seed=0, calls_step=True, scheduled=True)
        twins.assert_equal(f"{case.name} {finds} {inputs_of_rank}")
        twins.assert_moved()


def _keep_gradients_under_join(setup: Setup) -> str:
    """A rank that has joined could not add to its own: told where the others would go on without it."""
    twins = build_overlapped_twins(MOMENTUM, overlap=False, stage=2)
    twins.train(setup, 3)
    try:
        with Join([twins.model, twins.opt]):
            for inputs, targets in batches(setup.rank, 2 + setup.rank, seed=1):
                loss_of(twins.model, inputs, targets).backward()
                twins.opt.step()
    except RuntimeError as error:
        return str(error)
    raise AssertionError("nobody was told")


def test_gradients_kept_under_join_are_refused() -> None:
    outcomes = run_ranks_to_end(_keep_gradients_under_join, 2, group_timeout=5, timeout=60)
    messages = [str(outcome.result or outcome.error) for outcome in outcomes]
    assert any("Under Join, stage=2 cannot accumulate averaged gradients" in m for m in messages), messages


@case(2)
def _a_local_pass_on_top_of_averages_is_refused_at_the_next_pass(setup: Setup) -> None:
    """Its gradients differ between ranks, and only the owner's would count."""
    twins = build_overlapped_twins(MOMENTUM, overlap=False)
    twins.train(setup, 3)
    twins.zero_grad()
    data = list(batches(setup.rank, 3, seed=4))
    loss_of(twins.model, *data[0]).backward()
    loss_of(twins.model.module, *data[1]).backward()
    with pytest.raises(RuntimeError, match=r"mixes a local backward pass.*add the local loss"):
        loss_of(twins.model, *data[2]).backward()


@case(1)
def _opt_step_after_an_interrupted_local_pass_is_refused(setup: Setup) -> None:
    """The pass has taken the averaged gradients out and put none back."""
    twins = build_overlapped_twins(MOMENTUM, overlap=False)
    twins.train(setup, 3)
    twins.zero_grad()
    loss_of(twins.model, *next(batches(setup.rank, 1))).backward()
    hidden = torch.ones(6, 8, requires_grad=True)
    hidden.register_hook(_interrupt)
    with pytest.raises(ValueError, match="interrupted on purpose"):
        twins.model.module(hidden.clone()).sum().backward()
    refused = r"the gradient of parameter 0.*interrupted backward pass has left.*opt.zero_grad\(\)"
    with pytest.raises(RuntimeError, match=refused):
        twins.opt.step()
    twins.zero_grad()
    twins.train(setup, 2, seed=2)


def _interrupt(grad: Tensor) -> Tensor:
    raise ValueError("interrupted on purpose")


@case(2)
def _a_hook_registered_after_reset_finds_no_gradients(setup: Setup) -> None:
    """Stand-ins for gradients must be gone before another hook is there to take them out."""
    for overlap in BOTH:
        twins = build_overlapped_twins(MOMENTUM, overlap=overlap)
        twins.train(setup, 4)
        if not overlap:
            twins.zero_grad()
            with twins.opt.accumulate():
                loss_of(twins.model, *next(batches(setup.rank, 1))).backward()
        twins.opt.reset()
        twins.wrap_again(bucket_cap_mb=0.0015)
        twins.model.register_comm_hook(None, hook_with_zero_step(None, twins.model, twins.opt, True))
        assert all(param.grad is None for param in twins.model.parameters())
        twins.train(setup, 4, seed=1)


@case(2)
def _a_module_whose_ddp_model_is_gone_has_plain_gradients(setup: Setup) -> None:
    twins = build_overlapped_twins(MOMENTUM)
    twins.train(setup, 3)
    module = twins.model.module
    assert any(isinstance(param.grad, AbsentGradient) for param in module.parameters())
    del twins.model
    gc.collect()
    loss_of(module, *next(batches(setup.rank, 1))).backward()
    assert all(param.grad is not None and param.grad.isfinite().all() for param in module.parameters())


@case(2, 3)
def _parameters_frozen_and_unfrozen_equal_ddp(setup: Setup) -> None:
    for overlap in BOTH:
        twins = build_overlapped_twins(ADAMW, overlap=overlap, find_unused_parameters=True)
        twins.train(setup, 4)
        for chosen in ([1], [0, 3], []):
            for model, _ in twins.sides:
                for position, param in enumerate(model.parameters()):
                    param.requires_grad_(position not in chosen)
            twins.train(setup, 4, seed=len(chosen))
        twins.assert_moved()


@case(2)
def _a_parameter_unfrozen_after_the_first_steps_equals_ddp(setup: Setup) -> None:
    """Its tensor hook must be there when it is trained for the first time."""
    options: dict[str, Any] = {"bucket_cap_mb": 0.0015, "gradient_as_bucket_view": True, "find_unused_parameters": True}
    plain_ddp, ddp = (DistributedDataParallel(build_model(), **options) for _ in range(2))
    plain = torch.optim.AdamW(plain_ddp.parameters(), lr=0.01)
    for one in (plain_ddp, ddp):
        list(one.parameters())[2].requires_grad_(False)
    opt = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, overlap_with_ddp=True, stage=2, lr=0.01)
    ddp.register_comm_hook(None, hook_with_zero_step(None, ddp, opt, True))
    twins = Twins(plain_ddp, ddp, plain, opt)
    twins.train(setup, 4)
    twins.both(lambda model, _: list(model.parameters())[2].requires_grad_(True))
    twins.train(setup, 4, seed=1)
    twins.assert_moved()


@case(2, 3)
def _an_added_group_that_ddp_does_not_reduce_is_stepped_with_the_loops_gradient(setup: Setup) -> None:
    for overlap in BOTH:
        twins = build_overlapped_twins(ADAMW, overlap=overlap)
        twins.train(setup, 4)
        outside = [nn.Parameter(torch.ones(5)) for _ in range(2)]
        for optimizer, param in zip((twins.plain, twins.opt), outside, strict=True):
            optimizer.add_param_group({"params": [param], "lr": 0.02})
        for batch in batches(setup.rank, 4, seed=1):
            twins.zero_grad()
            for param in outside:
                param.grad = torch.full((5,), 0.5)
            twins.backward(*batch)
            twins.step("after adding a group")
            assert_identical(outside[0], outside[1], "a parameter that DDP does not know")
        assert not torch.equal(outside[1], torch.ones(5))


# Misuse


VIEWS: dict[str, Any] = {"gradient_as_bucket_view": True}


@case(2)
def _a_communication_hook_to_wrap_is_refused(setup: Setup) -> None:
    ddp = DistributedDataParallel(build_model(), **VIEWS)
    for wrapped in (allreduce_hook, bf16_compress_hook):
        with pytest.raises(ValueError, match=r"stage=2 .* cannot wrap a communication hook.*grad_comm_dtype"):
            shard_optimizer(ddp, torch.optim.SGD, stage=2, hook=wrapped, lr=0.1)


@case(2)
def _complex_parameters_and_sparse_gradients_are_refused(setup: Setup) -> None:
    for stage in (1, 2):
        complex_model = nn.ParameterList([nn.Parameter(torch.ones(2, dtype=torch.complex64)) for _ in range(2)])
        with pytest.raises(
            NotImplementedError, match=r"does not support complex parameters.*complex64.*overlap_with_ddp=False"
        ):
            shard_optimizer(DistributedDataParallel(complex_model, **VIEWS), torch.optim.SGD, stage=stage, lr=0.1)
        sparse = DistributedDataParallel(nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 2)), **VIEWS)
        kept = shard_optimizer(sparse, torch.optim.SGD, stage=stage, lr=0.1)
        with pytest.raises(NotImplementedError, match=r"sparse gradient of parameter 0 'module.0.weight'"):
            sparse(torch.arange(8)).sum().backward()
        assert kept is not None


@case(2)
def _backward_in_no_sync_after_forward_outside_is_averaged_as_by_ddp(setup: Setup) -> None:
    twins = build_overlapped_twins(ADAMW)
    twins.train(setup, 3)
    twins.zero_grad()
    for model, _ in twins.sides:
        loss = loss_of(model, *next(batches(setup.rank, 1, seed=4)))
        with model.no_sync():
            loss.backward()
    twins.step("backward in no_sync()")


# The reducer

PLAIN_STATIC_UNUSED: list[dict[str, Any]] = [{}, {"static_graph": True}, {"find_unused_parameters": True}]


@case(2, 3)
def _the_second_step_is_taken_inside_backward(setup: Setup) -> None:
    """Buckets are those of the plan from the first pass on; only the loop decides that the first step waits."""
    every_options: list[dict[str, Any]] = [{}, {"bucket_cap_mb": 0.0001}, {"gradient_as_bucket_view": False}]
    for options in every_options:
        twins = build_overlapped_twins(MOMENTUM, **options)
        twins.train(setup, 1)
        buckets = internals.plan_of(twins.opt).buckets
        assert rebuild_buckets(twins.model) == [], "nothing is to be built"
        twins.train(setup, 1, seed=1)
        assert_overlapped(twins.opt)
        twins.train(setup, 2, seed=2)
        assert internals.plan_of(twins.opt).buckets == buckets
        twins.assert_moved()


@case(2)
def _a_model_after_detach_trains_as_under_ddp(setup: Setup) -> None:
    """When its optimizer has left, it trains as under DDP; in its place stage 2 has none."""
    for options in PLAIN_STATIC_UNUSED:
        twins = build_overlapped_twins(MOMENTUM, **options)
        twins.train(setup, 3)
        twins.opt.zero_grad()
        assert internals.own_reducer_is_gone(twins.model)
        twins.opt.detach()
        both = [MOMENTUM.build(model.parameters(), **MOMENTUM.options) for model, _ in twins.sides]
        Twins(twins.plain_model, twins.model, *both).train(setup, 3, seed=1, where=options)


class Upwards(nn.Module):
    """Layers run from the last to the first, so the bucket that DDP expects first is the last to be full."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(5)])
        self.is_checkpointed = False

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = inputs.clone().requires_grad_()
        for layer in reversed(self.layers):
            hidden = checkpoint(layer, hidden, use_reentrant=True) if self.is_checkpointed else layer(hidden)
            hidden = hidden.tanh()
        return hidden[:, :3]


@case(2, 3)
def _buckets_are_reduced_in_the_order_of_the_first_pass(setup: Setup) -> None:
    """Which parameters are in a bucket, and who owns them, never changes; only when a bucket's turn is."""
    for overlap, options in product(BOTH, PLAIN_STATIC_UNUSED):
        torch.manual_seed(0)
        twins = build_overlapped_twins(ADAMW, model=Upwards(), bucket_cap_mb=0.0001, overlap=overlap, **options)
        before, owners = internals.plan_of(twins.opt).buckets, internals.owners_of(twins.opt)
        twins.train(setup, 4)
        after = internals.plan_of(twins.opt).buckets
        members = [
            [sorted(sum((one.params for one in bucket.segments), ())) for bucket in one] for one in (before, after)
        ]
        assert members[0] == (members[1] if "find_unused_parameters" in options else members[1][::-1])
        assert internals.owners_of(twins.opt) == owners
        twins.assert_moved()


@case(2)
def _model_forward_without_module_hooks_equals_ddp(setup: Setup) -> None:
    """`forward` called directly runs no hook of the module, so the first pass finds DDP's own reducer in its place."""
    for overlap, options in product(BOTH, PLAIN_STATIC_UNUSED):
        twins = build_overlapped_twins(ADAMW, overlap=overlap, **options)
        twins.train(setup, 4, where=options, loss=lambda model, *batch: loss_of(model.forward, *batch))
        twins.assert_moved()


@case(2)
def _reentrant_checkpoints_without_a_static_graph_equal_plain_passes(setup: Setup) -> None:
    """DDP's own reducer refuses them."""
    for overlap, options in product(BOTH, PLAIN_STATIC_UNUSED[:2]):
        twins = build_overlapped_twins(ADAMW, model=Upwards(), bucket_cap_mb=0.0001, overlap=overlap, **options)
        twins.model.module.is_checkpointed = True
        twins.train(setup, 4)
        twins.assert_moved()


@case(2, 3, 4)
def _one_rank_that_owns_almost_all_elements_equals_ddp(setup: Setup) -> None:
    """What its peers send does not fit at once."""
    for numels in ([4001, 3, 2, 1], [5000], [1, 1, 1]):
        torch.manual_seed(0)
        model = Weights(numels)
        twins = build_overlapped_twins(MOMENTUM, model=model, bucket_cap_mb=25)
        for _ in range(4):
            twins.iterate(torch.randn(sum(numels)), loss=lambda model, data: model(data))
            twins.assert_equal(str(numels))
        twins.assert_moved()


class Weights(nn.Module):
    def __init__(self, numels: list[int]) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(numel)) for numel in numels])

    def forward(self, data: Tensor) -> Tensor:
        return (torch.cat([*self.weights]) * data).tanh().sum()


@case(2)
def _the_optimizer_and_its_buffers_are_freed_with_the_last_reference(setup: Setup) -> None:
    """No reference cycles: optimizer, buffers and hooks go with the last reference, without the garbage collector."""
    twins = build_overlapped_twins(ADAMW)
    twins.train(setup, 4)
    gone: list[weakref.ref[Any]] = [
        weakref.ref(twins.opt),
        weakref.ref(internals.hook_of(twins.opt)),
        weakref.ref(twins.model),
    ]
    gone.append(weakref.ref(internals.reduce_context_of(twins.opt)))
    gc.collect()
    gc.disable()
    params = list(twins.model.module.parameters())
    del twins
    assert [reference() for reference in gone] == [None] * 4
    gc.enable()
    params[0].grad = None
    params[0].sum().backward()  # its tensor hook finds nobody
    assert params[0].grad is not None


def _train_until_a_rank_dies(setup: Setup) -> str:
    twins = build_overlapped_twins(MOMENTUM, interleaved=True, stage=2)
    for step, (inputs, targets) in enumerate(batches(setup.rank, 6)):
        try:
            if setup.rank == 1 and step == 4:
                kill_this_process()
            twins.opt.zero_grad()
            loss_of(twins.model, inputs, targets).backward()
            twins.opt.step()
        except RuntimeError as error:
            return str(error)
    raise AssertionError(f"rank {setup.rank} never noticed")


def test_a_dead_rank_is_named_by_the_others() -> None:
    outcomes = run_ranks_to_end(_train_until_a_rank_dies, 3, group_timeout=5, timeout=60)
    assert outcomes[1].killed
    messages = [str(outcomes[rank].result or outcomes[rank].error) for rank in (0, 2)]
    assert any("Expected rank 1 (global rank 1) to take part in the reduction of bucket 0" in m for m in messages)


test_stage_2 = case.each()
