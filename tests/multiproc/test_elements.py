"""``partition="elements"``: cut parameters, the plain optimizer's numbers, state dicts and checkpoints, 1/N each."""

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

from ddp_zero import ZeroRedundancyOptimizer, checkpoint, hook_with_zero_step, shard_optimizer
from ddp_zero.checkpoint.rows import SavedCheckpoint
from ddp_zero.core.local.placement import state_bytes
from tests import internals
from tests.multiproc.cases import (
    OPTIMIZERS,
    OptimizerCase,
    ToyLAMB,
    assert_equal_models,
    assert_identical,
    assert_overlapped,
    at_stage,
    batches,
    build_overlapped_twins,
    build_twins,
    optimizer_case,
    step_on,
    sum_in_rank_order,
)
from tests.multiproc.cut_models import CAP, CUT, grow_and_train, large_model
from tests.multiproc.harness import Cases, Setup, run_ranks
from tests.multiproc.overlap_loops import one_epoch

case = Cases()

ELEMENTWISE = OPTIMIZERS[: [one.name for one in OPTIMIZERS].index("Adafactor")]
ADAMW, MOMENTUM = optimizer_case("AdamW fused"), optimizer_case("SGD momentum")


def cut_parameters(opt: ZeroRedundancyOptimizer) -> dict[int, slice]:
    """Which parameters this rank owns a part of."""
    return internals.owned_parts(opt)


def assert_state_is_shared(opt: ZeroRedundancyOptimizer, ranks: int) -> None:
    """Some parameters are cut, and no rank holds more than a little over its share of the elements."""
    params = [param for group in opt.param_groups for param in group["params"]]
    moments = [value for state in opt.optim.state.values() for value in state.values() if isinstance(value, Tensor)]
    held = sum(value.numel() for value in moments if value.dim())
    per_element = max(sum(isinstance(v, Tensor) and v.dim() > 0 for v in s.values()) for s in opt.optim.state.values())
    buckets = opt.stats()["buckets"]
    assert held <= per_element * (sum(param.numel() for param in params) / ranks + 64 * buckets)
    some = [None] * dist.get_world_size()
    dist.all_gather_object(some, len(cut_parameters(opt)))
    assert any(some)


# The same numbers


@case(2, 4, few=ELEMENTWISE[::2], every=ELEMENTWISE)
def _every_elementwise_optimizer_standalone_equals_ddp(setup: Setup, configurations: list[OptimizerCase]) -> None:
    for place, one in enumerate(configurations):
        views = bool(place % 2)
        twins = build_twins(one, 1 + place % 2, large_model(), parameters_as_bucket_view=views, **CUT)
        twins.train(setup, 4)
        twins.assert_moved()
        if one.name not in ("SGD", "SGD maximize foreach"):
            assert_state_is_shared(twins.opt, setup.world_size)
        twins.assert_same_state(one.name, to=setup.world_size - 1)


@case(
    2,
    3,
    few=[place for place in range(len(ELEMENTWISE)) if place % 8 in (0, 1, 3, 6)],  # both stages, either way of each
    every=[*range(len(ELEMENTWISE))],
)
def _every_elementwise_optimizer_inside_backward_equals_ddp(setup: Setup, configurations: list[int]) -> None:
    for place in configurations:
        one = ELEMENTWISE[place]
        with at_stage(1 + place % 2):
            twins = build_overlapped_twins(
                one,
                1 + place // 2 % 2,
                large_model(),
                interleaved=place % 3 == 0,
                as_views=place % 4 != 0,
                bucket_cap_mb=CAP,
                zero_options=CUT,
            )
        twins.train(setup, 4)
        twins.assert_moved()
        assert_overlapped(twins.opt)
        twins.assert_same_state(one.name, to=setup.world_size - 1)


@case(2, 4)
def _late_syncs_and_waiting_steps_equal_ddp(setup: Setup) -> None:
    for stage in (1, 2):
        for sync, overlap in (("forward", True), ("forward", False), ("step", False)):
            with at_stage(stage):
                twins = (
                    build_overlapped_twins(
                        ADAMW, 2, large_model(), bucket_cap_mb=CAP, overlap=overlap, zero_options={**CUT, "sync": sync}
                    )
                    if stage == 2 or overlap
                    else build_twins(ADAMW, 2, large_model(), parameters_as_bucket_view=True, sync=sync, **CUT)
                )
            twins.train(setup, 4)
            twins.assert_moved()
            assert_state_is_shared(twins.opt, setup.world_size)
            twins.assert_same_state(f"stage {stage}, sync {sync}, overlap {overlap}", to=setup.world_size - 1)


@case(2)
def _masters_of_parts_equal_an_fp32_reference(setup: Setup) -> None:
    for stage in (1, 2):
        model = large_model(dtype=torch.bfloat16)
        reference = copy.deepcopy(model).float()
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=CAP)
        own: dict[str, Any] = {"master_weights": True, "overlap": False, **CUT}
        opt = shard_optimizer(ddp, AdamW, stage=stage, lr=1e-2, fused=True, **own)
        plain = AdamW(reference.parameters(), lr=1e-2, fused=True)
        for inputs, targets in batches(setup.rank, 4):
            nn.functional.mse_loss(ddp(inputs.bfloat16()), targets.bfloat16()).backward()
            for wide, param in zip(reference.parameters(), model.parameters(), strict=True):
                grad = opt.full_grad(param)
                assert grad is not None
                wide.grad = grad.float()  # in stage 2 the step uses the sum before it is rounded to bf16
            opt.step()
            opt.zero_grad()
            plain.step()
            for wide, param in zip(reference.parameters(), model.parameters(), strict=True):
                assert stage == 2 or torch.equal(wide.bfloat16(), param)
                torch.testing.assert_close(wide, param.float(), rtol=0.02, atol=0.02)
        opt.consolidate_state_dict(to=0)
        parts = cut_parameters(opt)
        for whole, master in opt.master_weights.items():
            index = internals.index_of(opt, whole)
            run = whole.detach().reshape(-1)[parts[index]] if index in parts else whole.detach()
            assert torch.equal(master.bfloat16(), run)
        if setup.rank == 0:
            state = opt.state_dict()["state"]
            for index, param in enumerate(model.parameters()):
                assert state[index]["master_weight"].shape == state[index]["exp_avg"].shape == param.shape
                assert torch.equal(state[index]["master_weight"].bfloat16(), param)


@case(2)
def _clipped_scaled_and_skipped_steps_equal_ddp(setup: Setup) -> None:
    """Exact in stage 1, where one rank has a whole gradient; rounded part by part in stage 2."""
    for stage in (1, 2):
        for overlap in (True, False):
            with at_stage(stage):
                twins = (
                    build_overlapped_twins(
                        MOMENTUM,
                        model=large_model(),
                        bucket_cap_mb=CAP,
                        overlap=overlap,
                        zero_options={**CUT, "max_grad_norm": 0.05, "nonfinite": "skip", "loss_scale": 1024.0},
                    )
                    if stage == 2 or overlap
                    else build_twins(
                        MOMENTUM, model=large_model(), max_grad_norm=0.05, nonfinite="skip", loss_scale=1024.0, **CUT
                    )
                )
            for step, (inputs, targets) in enumerate(batches(setup.rank, 4)):
                factor = float("nan") if step == 2 and setup.rank == 1 else 1.0
                loss = nn.functional.mse_loss(twins.plain_model(inputs), targets)
                (loss * factor).backward()
                norm = nn.utils.clip_grad_norm_(twins.plain_model.parameters(), 0.05)
                if step != 2:
                    twins.plain.step()
                twins.opt.scale(nn.functional.mse_loss(twins.model(inputs), targets) * factor).backward()
                twins.opt.step()
                record = twins.opt.last_step
                assert record is not None
                assert record.stepped == (step != 2)
                if step != 2:
                    assert float(norm) > 0.05
                    torch.testing.assert_close(record.grad_norm, float(norm), rtol=1e-6, atol=0.0)
                if stage == 1:
                    assert_equal_models(twins.plain_model, twins.model, f"overlap {overlap}, step {step}")
                for one, other in zip(twins.plain_model.parameters(), twins.model.parameters(), strict=True):
                    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
                twins.zero_grad()
            twins.assert_moved()


@case(2)
def _full_grad_and_clip_grad_norm_of_cut_parameters_equal_ddp(setup: Setup) -> None:
    with at_stage(2):
        twins = build_overlapped_twins(
            MOMENTUM, model=large_model(), bucket_cap_mb=CAP, overlap=False, zero_options=CUT
        )
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for step, ((inputs, targets), (more, others)) in enumerate(
        zip(batches(setup.rank, 4), batches(setup.rank, 4, seed=7), strict=True)
    ):
        for model in (twins.plain_model, twins.model):
            scaler.scale(nn.functional.mse_loss(model(inputs), targets)).backward()
            scaler.scale(nn.functional.mse_loss(model(more), others)).backward()
        for one, other in zip(twins.plain_model.parameters(), twins.model.parameters(), strict=True):
            found = twins.opt.full_grad(other)
            assert one.grad is not None
            assert found is not None
            torch.testing.assert_close(found, one.grad, rtol=1e-4, atol=1e-4)
            one.grad.copy_(found)  # sums of two passes, averaged each or both at once
        params = list(twins.model.parameters())
        parts = cut_parameters(twins.opt)
        assert (step == 0) or parts
        for index in parts:
            with pytest.raises(RuntimeError, match=r"each a part of it, only.*opt\.clip_grad_norm_\(max_norm\)"):
                torch.linalg.vector_norm(params[index].grad)
        scaler.unscale_(twins.opt)
        for param in twins.plain_model.parameters():
            assert param.grad is not None
            param.grad.mul_(1 / 256.0)
        norm = nn.utils.clip_grad_norm_(twins.plain_model.parameters(), 0.05)
        torch.testing.assert_close(twins.opt.clip_grad_norm_(0.05), norm, rtol=1e-6, atol=0.0)
        twins.plain.step()
        scaler.step(twins.opt)
        scaler.update()
        for one, other in zip(twins.plain_model.parameters(), twins.model.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
        if step % 2:
            twins.zero_grad()
        else:
            twins.plain.zero_grad(set_to_none=False)
            twins.opt.zero_grad(set_to_none=False)
    twins.assert_moved()


@case(2, 3)
def _added_groups_freezing_and_new_wrappers_equal_ddp(setup: Setup) -> None:
    for stage in (1, 2):
        with at_stage(stage):
            twins = build_overlapped_twins(ADAMW, 2, large_model(), bucket_cap_mb=CAP, zero_options=CUT)
        twins.train(setup, 3)
        for ddp in (twins.plain_model, twins.model):
            ddp.module[3].weight.requires_grad_(False)
        twins.zero_grad()
        twins.opt.reset()
        twins.wrap_again(bucket_cap_mb=4 * CAP)
        twins.model.register_comm_hook(None, hook_with_zero_step(None, twins.model, twins.opt, True))
        twins.train(setup, 3, seed=1)
        twins.assert_same_state("after other buckets", to=setup.world_size - 1)
        for ddp in (twins.plain_model, twins.model):
            ddp.module[3].weight.requires_grad_(True)
        grow_and_train(twins, setup, 2 * CAP, f"stage {stage}")
        twins.assert_same_state("after a group was added", to=setup.world_size - 1)


@case(2, 3)
def _join_with_uneven_inputs_equals_ddp(setup: Setup) -> None:
    for stage in (1, 2):
        with at_stage(stage):
            twins = build_overlapped_twins(MOMENTUM, model=large_model(), bucket_cap_mb=CAP, zero_options=CUT)
        one_epoch(setup, twins, (5, 2, 4)[setup.rank], seed=0, calls_step=True, scheduled=False)
        assert_equal_models(twins.plain_model, twins.model, f"stage {stage}")
        twins.assert_moved()


@case(2)
def _channels_last_weights_are_cut_in_the_order_of_memory(setup: Setup) -> None:
    for stage in (1, 2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 24, 3), nn.Tanh(), nn.Conv2d(24, 17, 3), nn.Flatten(), nn.Linear(17 * 4, 3))
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        reference = copy.deepcopy(model)
        options: dict[str, Any] = {"gradient_as_bucket_view": stage == 2, "bucket_cap_mb": CAP}
        ddp, plain_ddp = DistributedDataParallel(model, **options), DistributedDataParallel(reference, **options)
        opt, plain = shard_optimizer(ddp, AdamW, stage=stage, **CUT), AdamW(plain_ddp.named_parameters())
        for step in range(4):
            inputs = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(10 * step + setup.rank))
            for one, optimizer in ((plain_ddp, plain), (ddp, opt)):
                optimizer.zero_grad()
                one(inputs).square().mean().backward()
                optimizer.step()
            assert_equal_models(plain_ddp, ddp, f"stage {stage}, step {step}")
        opt.consolidate_state_dict(to=1)
        if setup.rank == 1:
            assert_identical(plain.state_dict(), opt.state_dict(), "channels last")
            strides = [state["exp_avg"].stride() for state in opt.state_dict()["state"].values()]
            assert strides == [param.stride() for param in model.parameters()]


# State dicts and checkpoints


@case(2, 3)
def _state_dicts_are_loaded_by_either_partition_and_by_the_plain_optimizer(setup: Setup) -> None:
    for one in (ADAMW, MOMENTUM, optimizer_case("NAdam"), optimizer_case("ASGD")):
        twins = build_twins(one, 2, large_model(), **CUT)
        twins.train(setup, 3)
        for rank in range(setup.world_size):
            twins.opt.consolidate_state_dict(to=rank)
        saved = twins.opt.state_dict()
        for options in (CUT, {}):
            again = build_twins(one, 2, copy.deepcopy(twins.model.module), **options)
            again.plain.load_state_dict(copy.deepcopy(saved))
            again.opt.load_state_dict(copy.deepcopy(saved))
            again.train(setup, 2, seed=5)
            again.assert_same_state(f"{one.name}, loaded with {options}", to=setup.world_size - 1)
            again.assert_moved()


def _node(setup: Setup, ranks: int) -> dist.ProcessGroup:
    """The group of this rank's node, each of so many ranks."""
    groups: list[Any] = [
        dist.new_group(list(range(first, first + ranks))) for first in range(0, setup.world_size, ranks)
    ]
    found: dist.ProcessGroup = groups[setup.rank // ranks]
    return found


@case(2, 4)
def _parts_are_given_on_demand_and_loaded_from_one_rank(setup: Setup) -> None:
    across: dict[str, Any] = {} if setup.world_size == 2 else {"shard_group": _node(setup, 2)}
    for one in (ADAMW, MOMENTUM):
        twins = build_twins(one, 2, large_model(), **CUT, **across)
        twins.train(setup, 3)
        assert_state_is_shared(twins.opt, 2)
        if setup.rank == 1:
            assert_identical(twins.plain.state_dict(), twins.opt.state_dict(), f"{one.name}, one rank asks")
        again = build_twins(one, 2, copy.deepcopy(twins.model.module), **CUT, **across)
        saved = copy.deepcopy(twins.plain.state_dict())
        again.plain.load_state_dict(saved)
        again.opt.load_state_dict(saved if setup.rank == 0 else None)
        again.train(setup, 2, seed=5)
        again.assert_moved()
        again.assert_same_state(f"{one.name}, loaded from one rank", to=setup.world_size - 1)


def _trained(setup: Setup, folder: Path, seed: int, **options: Any) -> tuple[DistributedDataParallel, Any]:
    """Train with these options, save, and return what was trained on."""
    ddp = DistributedDataParallel(large_model(), gradient_as_bucket_view=True, bucket_cap_mb=CAP)
    opt = shard_optimizer(ddp, AdamW, lr=1e-2, **options)
    for inputs, targets in batches(setup.rank, 3, seed):
        step_on(opt, nn.functional.mse_loss(ddp(inputs), targets))
    checkpoint.save(folder, ddp, opt).wait()
    opt.consolidate_state_dict(to=0)
    return ddp, opt.state_dict() if setup.rank == 0 else None


def _save_with_elements(setup: Setup, folder: str) -> None:
    for background in (False, True):
        ddp, state = _trained(setup, Path(folder) / str(background), 0, stage=2, **CUT)
        if setup.rank == 0:
            torch.save([ddp.module.state_dict(), state], Path(folder) / f"{background}.pt")


def _load_everywhere(setup: Setup, folder: str) -> None:
    for name in ("False", "True"):
        weights, state = torch.load(Path(folder) / f"{name}.pt")
        for options in ({"stage": 2, **CUT}, {"stage": 1, **CUT}, {"stage": 2}):
            ddp = DistributedDataParallel(large_model(seed=9), gradient_as_bucket_view=True, bucket_cap_mb=CAP)
            opt = shard_optimizer(ddp, AdamW, lr=0.5, **options)
            checkpoint.load(Path(folder) / name, ddp, opt)
            assert_identical(weights, ddp.module.state_dict(), f"weights into {options}")
            opt.consolidate_state_dict(to=0)
            if setup.rank == 0:
                loaded = opt.state_dict()
                assert_identical(state["state"], loaded["state"], f"state into {options}")
                assert state["param_groups"] == loaded["param_groups"]
        plain_model = large_model(seed=9)
        ddp = DistributedDataParallel(plain_model)
        plain = AdamW(plain_model.parameters(), lr=0.5)
        checkpoint.load(Path(folder) / name, ddp, plain)
        assert_identical(state["state"], plain.state_dict()["state"], "state into the plain optimizer")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
def test_checkpoints_fit_any_partition_and_any_number_of_ranks(tmp_path: Path) -> None:
    run_ranks(_save_with_elements, 3, str(tmp_path))
    saved = SavedCheckpoint.open(tmp_path / "True")
    files = [{span.file for _, span in one.chunks} for one in saved.tensors().values()]
    assert max(map(len, files)) > 1, "a parameter in the files of several ranks"
    dcp_to_torch_save(saved.folder, tmp_path / "plain.pt")
    plain = torch.load(tmp_path / "plain.pt", weights_only=True)
    weights, state = torch.load(tmp_path / "True.pt", weights_only=True)
    assert_identical(dict(weights), {name: plain["model"][name] for name in weights}, "weights")
    assert_identical(list(state["state"].values()), list(plain["optim"]["state"].values()), "states, in their order")
    run_ranks(_load_everywhere, 2, str(tmp_path))


# One Nth each


def _nine_tenths_in_one_parameter(setup: Setup) -> tuple[int, int, int]:
    """Bytes of state and of messages of this rank, and of the model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 4_000, bias=False), nn.Tanh(), nn.Linear(4_000, 4), nn.LayerNorm(4))
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    opt = shard_optimizer(ddp, AdamW, stage=2, **CUT)
    large = next(model.parameters())
    before, sent = large.detach().clone(), 0
    for step in range(3):
        sent = int(opt.stats()["total_sent_bytes"])
        inputs = torch.randn(2, 40, generator=torch.Generator().manual_seed(10 * step + setup.rank))
        step_on(opt, ddp(inputs).square().mean())
    assert not torch.equal(before, large)
    return (
        state_bytes(opt.optim.state),
        int(opt.stats()["total_sent_bytes"]) - sent,
        sum(param.nbytes for param in model.parameters()),
    )


def test_eight_ranks_share_one_large_parameter_within_two_percent() -> None:
    found = run_ranks(_nine_tenths_in_one_parameter, 8, timeout=240)
    for state, sent, nbytes in found:
        assert abs(state * 8 / (2 * nbytes) - 1) < 0.02, found  # two moments an element
        assert abs(sent * 8 / (2 * 7 * nbytes) - 1) < 0.02, found  # gradients and parameters, to 7 peers


class Branched(nn.Module):
    """As `large_model`, with a branch that a forward pass may leave out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.branch = nn.Linear(8, 64, bias=False), nn.Linear(64, 64)
        self.middle, self.last = nn.Linear(64, 32), nn.Linear(32, 3)
        self.takes_branch = True

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(inputs))
        hidden = hidden + self.branch(hidden) if self.takes_branch else hidden
        return self.last(torch.tanh(self.middle(hidden)))  # type: ignore[no-any-return]


@case(2, 3)
def _a_branch_frozen_between_two_passes_equals_ddp(setup: Setup) -> None:
    """Its bucket then fits no longer, while owners hold what the first pass has added up."""
    models = [Branched(), Branched()]
    before = copy.deepcopy(models[0])
    plain_model, ddp = (
        DistributedDataParallel(one, gradient_as_bucket_view=True, find_unused_parameters=True) for one in models
    )
    plain_model.register_comm_hook(None, sum_in_rank_order)
    plain = AdamW(plain_model.parameters(), lr=1e-2)
    opt = shard_optimizer(ddp, AdamW, lr=1e-2, stage=2, **CUT)
    for step in range(5):
        sums: list[Tensor | None] = [None for _ in plain_model.parameters()]
        for attempt, (inputs, targets) in enumerate(batches(setup.rank, 2, seed=step)):
            for one in models:
                one.takes_branch = step < 2
                one.branch.requires_grad_(step < 3 or (step == 3 and attempt == 0))
            nn.functional.mse_loss(plain_model(inputs), targets).backward()
            for place, param in enumerate(plain_model.parameters()):  # averaged pass by pass, as in stage 2
                held, param.grad = sums[place], None if param.grad is None else param.grad.clone()
                sums[place] = param.grad if held is None else held if param.grad is None else held + param.grad
                param.grad = None if attempt == 0 else sums[place]
            with opt.accumulate() if attempt == 0 else nullcontext():
                nn.functional.mse_loss(ddp(inputs), targets).backward()
        for optimizer in (plain, opt):
            optimizer.step()
            optimizer.zero_grad()
        assert_equal_models(plain_model, ddp, f"step {step}")
    assert cut_parameters(opt)
    assert all(not torch.equal(*pair) for pair in zip(before.parameters(), ddp.module.parameters(), strict=True))


@case(2)
def _a_changed_memory_format_is_taken_before_the_first_step_and_refused_later(setup: Setup) -> None:
    """Before the first step parts follow it; later they cannot, and nothing is stepped, given or saved."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 19, 3), nn.Tanh(), nn.Conv2d(19, 11, 3), nn.Flatten(), nn.Linear(176, 3))
    images = torch.randn(6, 4, 3, 8, 8, generator=torch.Generator().manual_seed(setup.rank))
    for stage in (1, 2):
        for changes_at in (0, 3):
            models = [copy.deepcopy(model), copy.deepcopy(model)]
            plain_model, ddp = (DistributedDataParallel(one, gradient_as_bucket_view=True) for one in models)
            plain = AdamW(plain_model.parameters(), lr=1e-2)
            opt = shard_optimizer(ddp, AdamW, lr=1e-2, stage=stage, overlap=False, **CUT)
            for step, inputs in enumerate(images):
                if step == changes_at:
                    state = opt.state_dict()
                    for one in models:
                        one.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
                    if step:
                        _assert_order_is_refused(setup, ddp, opt)
                        opt.load_state_dict(state)
                for wrapped, optimizer in ((plain_model, plain), (ddp, opt)):
                    with warnings.catch_warnings():
                        warnings.filterwarnings("ignore", "Grad strides do not match")
                        wrapped(inputs).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                assert_equal_models(plain_model, ddp, f"stage {stage}, changed at {changes_at}, step {step}")
            assert 2 in cut_parameters(opt)
            assert all(not torch.equal(*pair) for pair in zip(model.parameters(), ddp.parameters(), strict=True))
            if setup.rank == 1:
                assert_identical(plain.state_dict()["state"], opt.state_dict()["state"], f"stage {stage}, {changes_at}")
            dist.barrier()  # rank 0 must not drop the optimizer before it has answered


def _assert_order_is_refused(setup: Setup, ddp: DistributedDataParallel, opt: ZeroRedundancyOptimizer) -> None:
    before = [param.detach().clone() for param in ddp.parameters()]
    calls: list[Callable[[], Any]] = [opt.step, opt.state_dict, opt.consolidate_state_dict]
    calls.append(lambda: checkpoint.save(setup.folder / "checkpoint", ddp, opt).wait())
    for call in calls:
        with pytest.raises(
            RuntimeError, match=r"parameter 2 .*by strides \[171, 9, 3, 1\], got .*rank \d.*state_dict\(\)"
        ):
            call()
    assert all(torch.equal(*pair) for pair in zip(before, ddp.parameters(), strict=True))


@case(2)
def _a_refused_group_leaves_the_optimizer_as_it_was(setup: Setup) -> None:
    """With masters too, the optimizer is then as it was."""
    for options in ({}, CUT):
        model = large_model(dtype=torch.bfloat16)
        twin = copy.deepcopy(model)
        opts = [
            ZeroRedundancyOptimizer(one.parameters(), AdamW, lr=1e-2, master_weights=True, **options)
            for one in (model, twin)
        ]
        for step in range(3):
            more = nn.Linear(40, 50, dtype=torch.bfloat16).weight
            wrong = [more, more.sum()] if setup.rank == 1 else [more]
            with pytest.raises((ValueError, RuntimeError), match="non-leaf Tensor"):
                opts[0].add_param_group({"params": wrong})
            assert len(opts[0].param_groups) == len(opts[0].optim.param_groups) == 1
            for one, optimizer in zip((model, twin), opts, strict=True):
                for param in one.parameters():
                    param.grad = torch.full_like(param, 0.1 * (step + 1))
                optimizer.step()
            assert_equal_models(twin, model, f"step {step}, {options}")
        start = large_model(dtype=torch.bfloat16)
        assert all(not torch.equal(*pair) for pair in zip(start.parameters(), model.parameters(), strict=True))


# Refusals


@case(2)
def _optimizers_options_and_parameters_that_cannot_be_cut_are_refused(setup: Setup) -> None:
    model = large_model()

    def build(build: Callable[..., Optimizer] = SGD, **options: Any) -> ZeroRedundancyOptimizer:
        return ZeroRedundancyOptimizer(model.parameters(), build, lr=0.1, **{**CUT, **options})

    for wrong in (ToyLAMB, torch.optim.Adafactor):
        with pytest.raises(TypeError, match=f"each element by itself.*got {wrong.__name__}.*ddp_zero.elementwise"):
            build(wrong)
    with pytest.raises(ValueError, match="'parameters' or 'elements', got 'rows'"):
        build(partition="rows")
    with pytest.raises(
        ValueError, match=r"the same partition on .*, got elements on rank 0 .* and parameters on rank 1"
    ):
        build(partition=("elements", "parameters")[setup.rank])
    gaps = nn.Parameter(torch.zeros(64, 80)[:, :70])
    with pytest.raises(ValueError, match=r"without gaps.*parameter 0.*partition='parameters'"):
        ZeroRedundancyOptimizer([gaps], SGD, lr=0.1, **CUT)
    opt = ZeroRedundancyOptimizer(model.named_parameters(), OptimizerCase("SGD", SGD).build, lr=0.1, **CUT)
    if cut_parameters(opt):
        with pytest.raises(
            NotImplementedError, match=r"this rank has elements \d+ to \d+ of parameter.*ddp_zero\.checkpoint"
        ):
            opt.sharded_state_dict()


test_elements = case.each()
