"""Shard groups: state is sharded within a group of ranks, and every other group holds the same shards."""

import copy
import re
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

import ddp_zero
from ddp_zero import ZeroRedundancyOptimizer, checkpoint, shard_optimizer
from ddp_zero.core.comm import ranks as ranks_module
from ddp_zero.core.comm import ring
from ddp_zero.core.comm.communicator import Communicator
from ddp_zero.core.comm.groups import time_out_of
from ddp_zero.core.comm.reduction import prepare_reduction
from ddp_zero.loss_scale import DynamicLossScale
from ddp_zero.values.placeholders import AbsentGradient
from tests import internals
from tests.multiproc.cases import (
    SumByGroup,
    Twins,
    assert_equal_models,
    assert_identical,
    assert_moved,
    assert_same_on_all_ranks,
    batches,
    build_model,
    loss_of,
    sharded_twins,
    step_on,
    train_step,
)
from tests.multiproc.harness import Cases, Setup, kill_this_process, run_ranks, run_ranks_to_end
from tests.multiproc.rings import rings_for_all
from tests.pairwise import Modes, every_other

STEPS = 4  # two with the final buckets of DDP
OPTIONS: dict[str, Any] = {"lr": 1e-2}
Trained = tuple[nn.Module, Any]

MODES: dict[str, dict[str, Any]] = {
    "stage 1, standalone": {"overlap": False},
    "stage 1, overlapped": {},
    "stage 1, in forward": {"sync": "forward"},
    "stage 1, clipped": {"max_grad_norm": 0.1},
    "stage 2, interleaved": {"stage": 2},
    "stage 2, last bucket": {"stage": 2, "interleaved": False},
    "stage 2, whole buckets": {"stage": 2, "shard_buckets": False},
    "stage 2, after backward": {"stage": 2, "overlap": False},
    "stage 2, clipped": {"stage": 2, "max_grad_norm": 0.1},
    "stage 2, in forward": {"stage": 2, "sync": "forward"},
    "stage 2, copied parameters": {"stage": 2, "parameters_as_bucket_view": False},
    "stage 2, divided before and after": {"stage": 2, "gradient_predivide_factor": 2.0},
}

case = Cases(timeout=180, group_timeout=30)


def by_node(ranks: range | list[int], size: int = 2) -> ProcessGroup:
    """This rank's shard group of neighbours; every rank of the job calls it."""
    mine: ProcessGroup | None = None
    members = list(ranks)
    for start in range(0, len(members), size):
        group = dist.new_group(members[start : start + size])
        if dist.get_rank() in members[start : start + size]:
            mine = group
    assert mine is not None
    return mine


def wrapped(model: nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model, bucket_cap_mb=0.0015, gradient_as_bucket_view=True, **options)


def twins(
    mode: Mapping[str, Any], group: ProcessGroup, build: Any = AdamW, model: nn.Module | None = None, **ddp: Any
) -> Twins:
    """In stage 2 both sum in the same order."""
    ddp |= {"gradient_as_bucket_view": True}
    return sharded_twins(model, build, ddp=ddp, options=OPTIONS, shard_group=group, **mode)


def train_beside_ddp(setup: Setup, pair: Twins, where: str) -> None:
    """Train both: after each step all ranks have the plain optimizer's bits, and at the end they have moved."""

    def on_all_ranks(step: int) -> None:
        assert_same_on_all_ranks(pair.model.parameters(), when=f"after step {step}: {where}")

    pair.train(setup, STEPS, after_step=on_all_ranks, where=where)
    pair.assert_moved()


def states_held(opt: ZeroRedundancyOptimizer) -> int:
    return sum(1 for state in opt.optim.state.values() if state)


@case(4, few=every_other(MODES), every=MODES)
def _every_mode_equals_ddp_with_the_plain_optimizer(setup: Setup, configurations: Modes) -> None:
    group = by_node(range(4))
    for name, mode in configurations.items():
        for build in (AdamW, SGD) if name == "stage 2, interleaved" else (AdamW,):
            pair = twins(mode, group, build)
            train_beside_ddp(setup, pair, name)
            ddp, opt = pair.model, pair.opt
            owned = internals.owned_indices(opt)
            assert 0 < len(owned) < len(list(ddp.parameters()))
            if build is AdamW:
                assert states_held(opt) == len(owned), "state of what the shard group gives this rank, and no other"
            held = torch.tensor([len(owned)])
            dist.all_reduce(held, group=group)
            assert held.item() == len(list(ddp.parameters())), "each group owns every parameter once"


@case(4)
def _sums_in_rings_within_and_across_groups_keep_ranks_equal(setup: Setup) -> None:
    group = by_node(range(4))
    pair = twins(MODES["stage 2, interleaved"], group)
    with rings_for_all() as transfers:
        for step, batch in enumerate(batches(setup.rank, STEPS)):
            train_step(pair.sides[1], batch)
            assert_same_on_all_ranks(pair.model.parameters(), when=f"after step {step}")
    assert len(transfers) > 4 * STEPS, "sums and gathers in both groups"
    pair.assert_moved()


@case(4)
def _collectives_in_place_of_direct_messages_equal_ddp_without_threads(setup: Setup) -> None:
    """As in an accelerator's memory: collectives of each group in turn, and no thread."""
    group = by_node(range(4))
    with (
        mock.patch.object(Communicator, "has_direct_messages", return_value=False),
        mock.patch.object(ranks_module.Ranks, "run_in_background", side_effect=AssertionError("a thread")),
    ):
        for mode in ("stage 2, interleaved", "stage 2, in forward", "stage 2, clipped"):
            train_beside_ddp(setup, twins(MODES[mode], group), mode)


class Breaking(torch.autograd.Function):
    """The identity, whose backward raises once it is told to."""

    breaks = False

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if Breaking.breaks:
            raise KeyboardInterrupt
        return grad


class Breakable(nn.Module):
    """Two layers with `Breaking` between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 30), nn.Linear(30, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.second(Breaking.apply(self.first(inputs)))  # type: ignore[no-any-return,no-untyped-call]


@case(4)
def _training_after_an_interrupted_backward_pass_equals_ddp(setup: Setup) -> None:
    """Sums in flight, within groups and across, are dropped; what follows is not mixed up with them."""
    group = by_node(range(4))
    torch.manual_seed(0)
    model = Breakable()
    ddp = wrapped(model)
    opt = shard_optimizer(ddp, AdamW, stage=2, shard_group=group, **OPTIONS)
    data = list(batches(setup.rank, 8))
    for batch in data[:3]:
        train_step((ddp, opt), batch)
    reference = copy.deepcopy(model)
    for to in range(4):
        opt.consolidate_state_dict(to=to)
    state = opt.state_dict()
    Breaking.breaks = True
    with pytest.raises(KeyboardInterrupt):
        loss_of(ddp, *data[3]).backward()
    Breaking.breaks = False
    opt.reset()
    opt.zero_grad()
    model.load_state_dict(reference.state_dict())  # the second layer may have been stepped
    opt.load_state_dict(state)
    ddp = wrapped(model)
    ddp.register_comm_hook(None, ddp_zero.hook_with_zero_step_interleaved(None, ddp, opt, shard_buckets=True))
    expected = wrapped(reference)
    expected.register_comm_hook(None, SumByGroup(2).average)
    plain = AdamW(expected.parameters(), **OPTIONS)
    plain.load_state_dict(state)
    for step, batch in enumerate(data[4:]):
        train_step((expected, plain), batch)
        train_step((ddp, opt), batch)
        assert_equal_models(reference, model, f"after step {step}")


@case(4)
def _a_sum_without_a_waiter_ends_and_frees_its_memory(setup: Setup) -> None:
    """As after a backward pass that was interrupted: once nothing is in flight, its memory is free."""
    ranks = ranks_module.build_ranks(None, by_node(range(4)))
    whole = torch.full((6,), float(setup.rank))
    parts = list(whole.split(3))
    out = parts[ranks.shard.group_rank]
    prepare_reduction(ranks, whole, parts, torch.empty(6), (7, 0), 6).start(out)
    deadline = time.monotonic() + 20
    while ring.unfinished and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not ring.unfinished
    assert out.tolist() == [6.0, 6.0, 6.0]
    dist.barrier()


@case(4)
def _groups_of_one_rank_and_of_all_ranks_equal_ddp(setup: Setup) -> None:
    """Groups of one rank replicate everything; a group of all ranks is no group."""
    for size in (1, 4):
        group = by_node(range(4), size)
        for mode in ("stage 1, overlapped", "stage 2, interleaved", "stage 2, clipped"):
            pair = twins(MODES[mode], group)
            assert (internals.ranks_of(pair.opt).replicas is None) == (size == 4)
            train_beside_ddp(setup, pair, f"{mode}, groups of {size}")


@case(6)
def _shard_groups_used_again_among_more_nodes_keep_ranks_equal(setup: Setup) -> None:
    """First two nodes train a model, then all three."""
    group, two_nodes = by_node(range(6)), dist.new_group([0, 1, 2, 3])
    for everyone, size in ((two_nodes, 4), (None, 6)):
        if setup.rank >= size:
            continue
        ddp = wrapped(build_model(), process_group=everyone)
        opt = shard_optimizer(ddp, AdamW, stage=2, shard_group=group, **OPTIONS)
        assert (opt.world_size, internals.ranks_of(opt).num_replicas) == (size, size // 2)
        before = copy.deepcopy(ddp.module)
        for batch in batches(setup.rank, 3):
            train_step((ddp, opt), batch)
        assert_same_on_all_ranks(ddp.parameters(), everyone)
        assert_moved(before, ddp.module)


@case(6, marks=[pytest.mark.nightly])
def _three_groups_of_two_and_two_of_three_equal_ddp(setup: Setup) -> None:
    for size in (2, 3):
        group = by_node(range(6), size)
        for mode in ("stage 1, overlapped", "stage 2, interleaved"):
            pair = twins(MODES[mode], group)
            train_beside_ddp(setup, pair, f"{mode}, groups of {size}")
            assert internals.ranks_of(pair.opt).num_replicas == 6 // size


@case(4)
def _bf16_parameters_equal_ddp_and_bf16_messages_keep_ranks_equal(setup: Setup) -> None:
    group = by_node(range(4))
    for low in (True, False):
        model = build_model().bfloat16() if low else build_model()
        options = MODES["stage 2, interleaved"] | ({} if low else {"grad_comm_dtype": torch.bfloat16})
        plain, (ddp, opt) = twins(options, group, SGD, model).sides
        before = copy.deepcopy(ddp.module)
        for optimizer in (plain[1], opt):
            optimizer.param_groups[0]["lr"] = 1.0  # less would be rounded away
        for step, (inputs, targets) in enumerate(batches(setup.rank, STEPS)):
            batch = (inputs.bfloat16(), targets.bfloat16()) if low else (inputs, targets)
            if low:
                train_step(plain, batch)
            train_step((ddp, opt), batch)
            if low:
                assert_equal_models(plain[0].module, ddp.module, f"after step {step}")
            assert_same_on_all_ranks(ddp.module.parameters(), when=f"after step {step}")
        assert_moved(before, ddp.module)


@case(4)
def _accumulated_steps_equal_ddp_and_agree_on_all_ranks(setup: Setup) -> None:
    """In `no_sync()`, or in `accumulate()`, which reduces every pass."""
    group = by_node(range(4))
    for mode in ("stage 1, overlapped", "stage 2, interleaved", "stage 2, after backward"):
        for in_no_sync in (True, False):
            plain, (ddp, opt) = twins(MODES[mode], group).sides
            before = copy.deepcopy(ddp.module)
            data = list(batches(setup.rank, 3 * STEPS))
            for step in range(STEPS):
                for number in range(3):
                    inputs, targets = data[3 * step + number]
                    is_last = number == 2
                    if is_last:
                        contexts = nullcontext(), nullcontext()
                    elif in_no_sync:
                        contexts = plain[0].no_sync(), ddp.no_sync()
                    else:
                        contexts = nullcontext(), opt.accumulate()
                    for model, context in zip((plain[0], ddp), contexts, strict=True):
                        with context:
                            loss_of(model, inputs, targets).backward()
                for optimizer in (plain[1], opt):
                    optimizer.step()
                    optimizer.zero_grad()
                assert_same_on_all_ranks(ddp.module.parameters(), when=f"after step {step}: {mode}")
                if in_no_sync:
                    assert_equal_models(plain[0].module, ddp.module, f"after step {step}: {mode}")
                else:  # DDP averages the sum so far again in every pass, `accumulate()` does not: other rounding
                    for expected, found in zip(plain[0].parameters(), ddp.parameters(), strict=True):
                        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
            assert_moved(before, ddp.module)


class Switched(nn.Module):
    """A layer that only some ranks use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.other, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, inputs: Tensor, uses_other: bool) -> Tensor:
        hidden = torch.tanh(self.first(inputs))
        return self.last(self.other(hidden) if uses_other else hidden)  # type: ignore[no-any-return]


def loss_of_switched(model: nn.Module, inputs: Tensor, targets: Tensor, uses_other: bool) -> Tensor:
    return nn.functional.mse_loss(model(inputs, uses_other), targets)


@case(4)
def _a_layer_that_one_replica_uses_equals_ddp(setup: Setup) -> None:
    """One replica alone uses a layer in some steps, and none does in others: then it is not stepped."""
    group = by_node(range(4))
    for stage in (1, 2):
        torch.manual_seed(0)
        pair = twins({"stage": stage}, group, model=Switched(), find_unused_parameters=True)
        for step, (inputs, targets) in enumerate(batches(setup.rank, 6)):
            pair.iterate(inputs, targets, step % 3 != 0 and setup.rank == step % 4, loss=loss_of_switched)
            pair.assert_equal(f"after step {step}")
        pair.assert_moved()


@case(4)
def _a_parameter_frozen_and_unfrozen_equals_ddp(setup: Setup) -> None:
    group = by_node(range(4))
    for mode in ("stage 1, standalone", "stage 1, overlapped", "stage 2, interleaved"):
        pair = twins(MODES[mode], group, find_unused_parameters=True)
        for step, batch in enumerate(batches(setup.rank, 6)):
            for model, _ in pair.sides:
                model.module[0].weight.requires_grad_(step not in (2, 3))
            pair.iterate(*batch)
            pair.assert_equal(f"after step {step}: {mode}")
        pair.assert_moved()


@case(4)
def _an_overflow_in_one_replica_skips_the_step_of_all(setup: Setup) -> None:
    group = by_node(range(4))
    for stage in (1, 2):
        ddp = wrapped(build_model())
        scale = DynamicLossScale(initial=2.0**4, growth_interval=100)
        opt = shard_optimizer(ddp, AdamW, stage=stage, shard_group=group, loss_scale=scale, **OPTIONS)
        for step, (inputs, targets) in enumerate(batches(setup.rank, 5)):
            before = [param.detach().clone() for param in ddp.parameters()]
            if step == 3 and setup.rank == 2:  # of the other group than rank 0
                inputs = inputs * float("inf")
            step_on(opt, opt.scale(loss_of(ddp, inputs, targets)))
            assert opt.last_step is not None
            assert opt.last_step.stepped == (step != 3)
            same = [torch.equal(one, other) for one, other in zip(before, ddp.parameters(), strict=True)]
            assert all(same) if step == 3 else not any(same)
            if step == 3:
                assert opt.last_step.nonfinite_rank == 2, opt.last_step
                assert "rank 2 (global rank 2)" in str(opt.last_step.reason)
            assert opt.loss_scale == (8.0 if step >= 3 else 16.0)
            assert_same_on_all_ranks(ddp.parameters(), when=f"after step {step}")


@case(4)
def _an_overflow_on_one_rank_under_a_grad_scaler_skips_the_step_of_all(setup: Setup) -> None:
    group = by_node(range(4))
    for stage in (1, 2):
        ddp = wrapped(build_model())
        opt = shard_optimizer(ddp, AdamW, stage=stage, shard_group=group, **OPTIONS)
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=100)
        for step, (inputs, targets) in enumerate(batches(setup.rank, 5)):
            before = [param.detach().clone() for param in ddp.parameters()]
            if step == 3 and setup.rank == 1:
                inputs = inputs * float("inf")
            scaler.scale(loss_of(ddp, inputs, targets)).backward()
            scaler.unscale_(opt)
            opt.clip_grad_norm_(0.1)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
            same = [torch.equal(one, other) for one, other in zip(before, ddp.parameters(), strict=True)]
            assert all(same) if step == 3 else not any(same)
            assert scaler.get_scale() == (8.0 if step >= 3 else 16.0)
            assert_same_on_all_ranks(ddp.parameters(), when=f"after step {step}")


@case(4)
def _clip_grad_norm_and_full_grad_equal_ddp(setup: Setup) -> None:
    """Norms count every parameter once, though each of them has two owners."""
    group = by_node(range(4))
    for mode in ("stage 1, standalone", "stage 2, after backward"):
        pair = twins(MODES[mode], group)
        (plain_model, _), (ddp, opt) = pair.sides
        for batch in batches(setup.rank, STEPS):
            pair.backward(*batch)
            for expected, param in zip(plain_model.parameters(), ddp.parameters(), strict=True):
                assert_identical(expected.grad, opt.full_grad(param), mode)
            norm = nn.utils.clip_grad_norm_(plain_model.parameters(), 0.05)
            assert norm.item() > 0.05
            assert_identical(norm, opt.clip_grad_norm_(0.05), mode)
            if mode.startswith("stage 2"):
                absent = [param.grad for param in ddp.parameters() if isinstance(param.grad, AbsentGradient)]
                assert 0 < len(absent) < len(list(ddp.parameters()))
            pair.step(mode)


@case(4)
def _a_standalone_optimizer_equals_the_plain_one_and_explains_its_group(setup: Setup) -> None:
    group = by_node(range(4))
    params = list(build_model().parameters())
    expected = copy.deepcopy(params)
    opt = ZeroRedundancyOptimizer(params, AdamW, shard_group=group, parameters_as_bucket_view=True, **OPTIONS)
    plain = AdamW(expected, **OPTIONS)
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        for one, other in zip(expected, params, strict=True):
            one.grad = torch.randn(one.shape, generator=generator)
            other.grad = one.grad.clone()
        plain.step()
        opt.step()
        assert_identical([p.detach() for p in expected], [p.detach() for p in params], "after a step")
    assert (opt.rank, opt.world_size) == (setup.rank, 4)
    assert (dist.get_world_size(opt.shard_group), opt.process_group) == (2, dist.group.WORLD)
    assert f"shard rank {setup.rank % 2} (global rank {setup.rank}) of group {setup.rank // 2}" in opt.explain()


@case(4)
def _added_groups_equal_ddp_and_a_copy_has_replicas(setup: Setup) -> None:
    group = by_node(range(4))
    for mode in ("stage 1, standalone", "stage 1, overlapped", "stage 2, interleaved"):
        model = build_model()
        first, rest = list(model.parameters())[:2], list(model.parameters())[2:]
        overlap, stage = "standalone" not in mode, 2 if "stage 2" in mode else 1
        for param in rest:
            param.requires_grad_(stage == 1)
        expected, ddp = wrapped(copy.deepcopy(model)), wrapped(model)
        if stage == 2:
            expected.register_comm_hook(None, SumByGroup(2).average)
        opt = shard_optimizer(ddp, AdamW, params=first, stage=stage, overlap=overlap, shard_group=group, **OPTIONS)
        plain = AdamW(
            [p for p, q in zip(expected.parameters(), model.parameters(), strict=True) if q in set(first)], **OPTIONS
        )
        before = copy.deepcopy(model)
        for step, batch in enumerate(batches(setup.rank, STEPS)):
            if step == 2 and stage == 1:
                plain.add_param_group(
                    {
                        "params": [p for p in expected.parameters() if p not in set(plain.param_groups[0]["params"])],
                        "lr": 3e-3,
                    }
                )
                opt.add_param_group({"params": rest, "lr": 3e-3})
            train_step((expected, plain), batch)
            train_step((ddp, opt), batch)
            assert_equal_models(expected.module, model, f"after step {step}: {mode}")
        if stage == 1:
            assert_moved(before, model)
    clone_model, clone = copy.deepcopy((model, opt))
    assert internals.ranks_of(clone).replicas is not None
    assert clone_model is not model


@case(4)
def _state_gathered_to_any_rank_is_the_plain_optimizers_and_loads(setup: Setup) -> None:
    group = by_node(range(4))
    pair = twins(MODES["stage 1, overlapped"], group)
    pair.train(setup, 3)
    for to in range(4):
        pair.opt.consolidate_state_dict(to=to)
    assert_identical(pair.plain.state_dict()["state"], pair.opt.state_dict()["state"], "gathered")
    with pytest.raises(ValueError, match="rank below 4, got 4"):
        pair.opt.consolidate_state_dict(to=4)
    fresh = twins({"stage": 2}, group, model=copy.deepcopy(pair.model.module))
    for _, optimizer in fresh.sides:
        optimizer.load_state_dict(pair.plain.state_dict())
    fresh.train(setup, 3, seed=1)


@case(4)
def _a_dcp_checkpoint_resumes_bit_for_bit(setup: Setup) -> None:
    group = by_node(range(4))
    in_order = SumByGroup(2).average  # the same for the first buckets of a model as for later ones
    ddp = wrapped(build_model())
    opt = shard_optimizer(ddp, AdamW, shard_group=group, hook=in_order, **OPTIONS)
    for batch in batches(setup.rank, 3):
        train_step((ddp, opt), batch)
    save({"optimizer": opt.sharded_state_dict(ddp)}, checkpoint_id=str(setup.folder / "dcp"))
    again = wrapped(copy.deepcopy(ddp.module))
    fresh = shard_optimizer(again, AdamW, shard_group=group, hook=in_order, **OPTIONS)
    state = {"optimizer": fresh.sharded_state_dict(again, init_missing=True)}
    load(state, checkpoint_id=str(setup.folder / "dcp"))
    fresh.load_sharded_state_dict(state["optimizer"], again)
    for batch in batches(setup.rank, 3, seed=1):
        for pair in ((ddp, opt), (again, fresh)):
            train_step(pair, batch)
        assert_equal_models(ddp.module, again.module, "after dcp")


def _step_and_finish(ddp: nn.Module, opt: ZeroRedundancyOptimizer, batch: tuple[Any, Any]) -> None:
    train_step((ddp, opt), batch)
    opt.finish_sync()


@case(4)
def _an_error_in_one_replica_is_raised_on_all_ranks(setup: Setup) -> None:
    class Failing(SGD):
        fails = False

        def step(self, closure: Any = None) -> Any:
            if Failing.fails:
                raise KeyError("a check of its own")
            return super().step(closure)

    group = by_node(range(4))
    for mode in ("stage 1, standalone", "stage 2, interleaved", "stage 2, in forward"):
        Failing.fails = False
        ddp = wrapped(build_model())
        opt = shard_optimizer(ddp, Failing, shard_group=group, **MODES[mode], **OPTIONS)
        data = list(batches(setup.rank, 5))
        for batch in data[:3]:
            train_step((ddp, opt), batch)
        Failing.fails = setup.rank == 3
        with pytest.raises((KeyError, RuntimeError)) as caught:
            _step_and_finish(ddp, opt, data[3])
        if setup.rank == 3:
            assert isinstance(caught.value, KeyError)
        else:
            assert re.search(r"on rank 3 \(global rank 3\) KeyError", str(caught.value)), caught.value
        Failing.fails = False
        opt.reset()


@case(4)
def _options_that_differ_between_replicas_are_refused(setup: Setup) -> None:
    group = by_node(range(4))
    ddp = wrapped(build_model())
    opt = shard_optimizer(ddp, SGD, shard_group=group, overlap=False, **OPTIONS)
    opt.param_groups[0]["lr"] = 0.1 if setup.rank < 2 else 0.2
    loss_of(ddp, *next(batches(setup.rank, 1))).backward()
    told = r"'lr' of parameter group 0 to be the same .* 0\.[12] on rank \d .* 0\.[12] on rank \d "
    with pytest.raises(RuntimeError, match=told):
        opt.step()


@case(4)
def _gradients_averaged_within_a_shard_group_alone_are_refused(setup: Setup) -> None:
    """Averages of a node differ from those of another one."""
    group = by_node(range(4))
    params = list(build_model().parameters())
    opt = ZeroRedundancyOptimizer(params, SGD, shard_group=group, **OPTIONS)
    ddp = wrapped(model := build_model())
    own = ZeroRedundancyOptimizer(model.parameters(), SGD, shard_group=group, **OPTIONS)
    with ddp.no_sync():
        loss_of(ddp, *next(batches(setup.rank, 1))).backward()
    for param in model.parameters():
        assert param.grad is not None
        dist.all_reduce(param.grad, group=group)
    with pytest.raises(RuntimeError, match="Expected averaged gradients"):
        own.step()
    assert opt.world_size == 4


def _sharded_by(group: Any) -> tuple[Any, Any]:
    ddp = wrapped(build_model())
    return ddp, shard_optimizer(ddp, SGD, shard_group=group, **OPTIONS)


@case(4)
def _shard_groups_that_do_not_partition_the_ranks_are_refused(setup: Setup) -> None:
    rank = setup.rank
    lists = {"disjoint": [[0, 1], [1, 2, 3]], "equal size": [[0], [1, 2, 3]], "one order": [[0, 3], [1, 2]]}
    for message, groups in lists.items():
        built = [dist.new_group(members) for members in groups]
        chosen = next(
            group for group, members in zip(reversed(built), reversed(groups), strict=True) if rank in members
        )
        with pytest.raises(ValueError, match=rf"Expected .*{message}.*, got .*init_device_mesh"):
            _sharded_by(chosen)
    other = dist.new_group([0, 1])
    with pytest.raises(ValueError if rank > 1 else RuntimeError, match="must contain the process that passes it"):
        _sharded_by(other)


@case(4)
def _a_mesh_as_shard_group_is_refused(setup: Setup) -> None:
    with pytest.raises(TypeError, match=r"Expected shard_group to be a torch\.distributed\.ProcessGroup or None, got"):
        _sharded_by(init_device_mesh("cpu", (2, 2)))


@case(4)
def _a_shard_group_on_some_ranks_alone_is_refused(setup: Setup) -> None:
    rank, mine = setup.rank, by_node(range(4))
    for without in ([0], [3], [0, 1], [1, 2, 3]):
        given = None if rank in without else mine
        other = next(one for one in range(4) if (one in without) != (0 in without))
        first, second = ("None", "a process group") if 0 in without else ("a process group", "None")
        message = f"the same shard_group on every rank .*, got {first} on rank 0 .* and {second} on rank {other} .*506"
        with pytest.raises(ValueError, match=message):
            _sharded_by(given)


@case(4)
def _a_shard_group_beyond_the_process_group_is_refused(setup: Setup) -> None:
    whole = dist.new_group([0, 1, 2, 3])
    smaller = dist.new_group([0, 1])
    if setup.rank < 2:
        with pytest.raises(ValueError, match=r"within the ranks that train together, .* got global rank 2"):
            ZeroRedundancyOptimizer(
                build_model().parameters(), SGD, process_group=smaller, shard_group=whole, **OPTIONS
            )


@case(4)
def _join_with_a_shard_group_is_refused(setup: Setup) -> None:
    ddp, opt = _sharded_by(by_node(range(4)))
    with pytest.raises(NotImplementedError, match="Join does not support shard_group"):
        Join([ddp, opt])


@case(4)
def _parameters_that_differ_between_shard_groups_are_refused(setup: Setup) -> None:
    different = nn.Linear(3, 3 + setup.rank // 2)
    with pytest.raises(ValueError, match=r"the same parameter 0 on every rank"):
        ZeroRedundancyOptimizer(different.parameters(), SGD, shard_group=by_node(range(4)), **OPTIONS)


@case(4)
def _a_process_group_that_is_not_that_of_ddp_is_refused(setup: Setup) -> None:
    ddp, mine = wrapped(build_model()), by_node(range(4))
    overlapped = ZeroRedundancyOptimizer(ddp.parameters(), SGD, process_group=mine, overlap_with_ddp=True, **OPTIONS)
    with pytest.raises(ValueError, match="Expected the optimizer and the DDP model on the same ranks"):
        ddp_zero.hook_with_zero_step(None, ddp, overlapped)


@case(4)
def _groups_of_a_device_mesh_build_their_replica_group_once(setup: Setup) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "shard"))
    with mock.patch.object(ranks_module, "build_replica_group", wraps=ranks_module.build_replica_group) as build:
        for _ in range(3):
            twins(MODES["stage 2, interleaved"], mesh.get_group("shard")).train(setup, 3)
    assert build.call_count == 1


@case(4)
def _wrap_takes_a_shard_group(setup: Setup) -> None:
    ddp, opt = ddp_zero.wrap(build_model(), AdamW, stage=2, shard_group=by_node(range(4)), **OPTIONS)
    before = copy.deepcopy(ddp.module)
    for batch in batches(setup.rank, 3):
        train_step((ddp, opt), batch)
        assert_same_on_all_ranks(ddp.parameters(), when="after a step")
    assert_moved(before, ddp.module)


test_groups = case.each()


# Groups of a part of the job


def _part_of_the_job(setup: Setup) -> None:
    """Ranks 1 to 4 of 5 train; rank 0 does something else."""
    trainers = dist.new_group([1, 2, 3, 4])
    pairs = [dist.new_group([1, 2]), dist.new_group([3, 4])]
    dist.new_group([1, 2])
    if setup.rank > 0:
        with pytest.raises(RuntimeError, match=r"the same number of process groups before .*\[4, 4, 3, 3\]"):
            ZeroRedundancyOptimizer(
                build_model().parameters(), SGD, trainers, shard_group=pairs[(setup.rank - 1) // 2], **OPTIONS
            )
    dist.new_group([3, 4])
    if setup.rank == 0:
        return
    ddp = DistributedDataParallel(build_model(), process_group=trainers, gradient_as_bucket_view=True)
    opt = shard_optimizer(ddp, AdamW, stage=2, shard_group=pairs[(setup.rank - 1) // 2], **OPTIONS)
    before = copy.deepcopy(ddp.module)
    for batch in batches(setup.rank, 3):
        train_step((ddp, opt), batch)
        assert_same_on_all_ranks(ddp.parameters(), trainers)
    assert_moved(before, ddp.module)


def test_groups_of_a_part_of_the_job() -> None:
    run_ranks(_part_of_the_job, 5, group_timeout=30)


# Checkpoints


def _train_and_save(setup: Setup, folder: Path, size: int | None, stage: int) -> list[list[float]]:
    """Three steps, saved, and two more."""
    group = None if size is None else by_node(range(setup.world_size), size)
    ddp = wrapped(build_model())
    opt = shard_optimizer(ddp, AdamW, stage=stage, shard_group=group, loss_scale=DynamicLossScale(16.0), **OPTIONS)
    return _go_on(ddp, opt, folder, range(3, 5), lambda: _first_steps(ddp, opt, folder))


def _first_steps(ddp: nn.Module, opt: ZeroRedundancyOptimizer, folder: Path) -> None:
    for step in range(3):
        _same_batch_step(ddp, opt, step)
    saved = checkpoint.save(folder, ddp, opt).wait()
    if dist.get_rank() == 0:
        names = [json_file.name for json_file in saved.glob("part-*.json")]
        assert len(names) == dist.get_world_size()


def _load_and_go_on(setup: Setup, folder: Path, size: int | None, stage: int) -> list[list[float]]:
    group = None if size is None else by_node(range(setup.world_size), size)
    ddp = wrapped(build_model())
    opt = shard_optimizer(ddp, AdamW, stage=stage, shard_group=group, loss_scale=DynamicLossScale(16.0), **OPTIONS)
    return _go_on(ddp, opt, folder, range(3, 5), lambda: checkpoint.load(folder, ddp, opt))


def _go_on(
    ddp: nn.Module, opt: ZeroRedundancyOptimizer, folder: Path, steps: range, before: Callable[[], Any]
) -> list[list[float]]:
    before()
    for step in steps:
        _same_batch_step(ddp, opt, step)
    assert_same_on_all_ranks(ddp.parameters(), when="at the end")
    return [param.detach().reshape(-1).tolist() for param in ddp.parameters()]


def _same_batch_step(ddp: nn.Module, opt: ZeroRedundancyOptimizer, step: int) -> None:
    """On the same data on every rank, so that the average is the same at any number of them."""
    batch = next(batches(0, 1, seed=step))
    step_on(opt, opt.scale(loss_of(ddp, *batch)))


SIZES: list[tuple[int, int | None]] = [(4, 2), (4, None), (2, None), (1, None), (2, 1)]
"""Numbers of ranks, and of groups or None."""


def test_a_checkpoint_of_groups_is_whole_and_resumes_without_groups_and_at_other_sizes(tmp_path: Path) -> None:
    _assert_resumes(tmp_path, {1: [(2, None)], 2: [(4, None), (2, 1)]})


@pytest.mark.nightly
def test_a_checkpoint_of_groups_resumes_at_all_sizes_in_full(tmp_path: Path) -> None:
    _assert_resumes(tmp_path, {1: SIZES, 2: SIZES})


def _assert_resumes(tmp_path: Path, sizes: dict[int, list[tuple[int, int | None]]]) -> None:
    for stage, resumed_at in sizes.items():
        folder = tmp_path / str(stage)
        expected = run_ranks(_train_and_save, 4, folder, 2, stage)[0]
        start = [param.detach().reshape(-1).tolist() for param in build_model().parameters()]
        assert all(one != other for one, other in zip(start, expected, strict=True)), "nothing moved"
        for ranks, size in resumed_at:
            found = run_ranks(_load_and_go_on, ranks, folder, size, stage)
            for one in found:
                assert_identical(expected, one, f"stage {stage}, {ranks} ranks, groups of {size}")
    folder = tmp_path / "without"
    expected = run_ranks(_train_and_save, 2, folder, None, 2)[0]
    assert_identical(expected, run_ranks(_load_and_go_on, 4, folder, 2, 2)[3], "into groups")


# A rank that is gone


def _lose_rank_3(setup: Setup, mode: str) -> str:
    group = by_node(range(4))
    ddp = wrapped(build_model())
    opt = shard_optimizer(ddp, AdamW, shard_group=group, **MODES[mode], **OPTIONS)
    try:
        for step, batch in enumerate(batches(setup.rank, 20)):
            if step == 4 and setup.rank == 3:
                kill_this_process()
            train_step((ddp, opt), batch)
            opt.finish_sync()
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    "mode",
    [
        "stage 2, interleaved",
        pytest.param("stage 2, in forward", marks=pytest.mark.nightly),
        pytest.param("stage 2, after backward", marks=pytest.mark.nightly),
    ],
)
def test_a_killed_rank_of_another_replica_is_told_within_the_time_out(mode: str) -> None:
    outcomes = run_ranks_to_end(_lose_rank_3, 4, mode, timeout=90, group_timeout=15)
    assert outcomes[3].killed
    told = [outcome.result for outcome in outcomes[:3]]
    for rank, message in enumerate(told):
        assert message is not None, outcomes[rank].error
        assert re.search(r"Expected .*(rank|replica) \d \(global rank [23]\).* to take part in", message), message
    assert "global rank 3" in told[1], "its replica"
    assert "global rank 3" in told[2], "of its shard group"


def _skip_a_step(setup: Setup, kind: str) -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "shard"))
    options: dict[str, Any] = {"overlap": False, "stage": 2, **OPTIONS}
    if kind == "shard group":
        group = mesh.get_group("shard")
        ddp = wrapped(build_model())
        opt = shard_optimizer(ddp, AdamW, shard_group=group, **options)
    else:
        group = dist.new_group(range(4))
        ddp = DistributedDataParallel(build_model(), process_group=group, gradient_as_bucket_view=True)
        opt = shard_optimizer(ddp, AdamW, **options)
    own = dist.new_group(range(4), timeout=timedelta(minutes=7))
    Communicator(own)
    assert time_out_of(own) == timedelta(minutes=7), "somebody has chosen it"
    try:
        for step, batch in enumerate(batches(setup.rank, 5)):
            loss_of(ddp, *batch).backward()
            if (step, setup.rank) == (3, 3):
                setup.wait_until_told(3)
                return "skipped"
            opt.step()
            opt.zero_grad()
    except RuntimeError as error:
        setup.tell()
        return str(error)
    return "no error"


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["shard group", "group of its own"])
def test_groups_without_a_time_out_of_their_own_have_that_of_the_job(kind: str) -> None:
    """Torch gives those of meshes and of `new_group` 30 minutes, whatever the job has."""
    outcomes = run_ranks_to_end(_skip_a_step, 4, kind, timeout=100, group_timeout=5)
    for outcome in outcomes[:3]:
        assert outcome.result is not None, outcome.error
        assert "to take part in" in outcome.result
