"""Checkpoints that DeepSpeed wrote at two ranks, loaded into every mode at two and three, and trained on."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ddp_zero.deepspeed
from ddp_zero import DynamicLossScale, ZeroRedundancyOptimizer, checkpoint, shard_optimizer
from tests.deepspeed.write_checkpoints import BASE, MORE, STEPS, VARIANTS, Model, groups_of, tokens_of
from tests.multiproc.harness import Setup, run_ranks
from tests.unit.checkpoint.foreign.written import VERSIONS, expected, unpack, whole_states

MODES: dict[str, dict[str, Any]] = {
    "stage 1": {"stage": 1},
    "stage 1 alone": {},
    "stage 2": {"stage": 2},
    "stage 2, elements": {"stage": 2, "partition": "elements"},
}


def build(mode: str, dtype: torch.dtype) -> tuple[DistributedDataParallel, ZeroRedundancyOptimizer]:
    """A model and a sharded optimizer with other values and options than those that are saved."""
    torch.manual_seed(8)
    model = Model().to(dtype)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=0.0005)
    options: dict[str, Any] = {"lr": 9.0, "master_weights": dtype != torch.float32, "max_grad_norm": 1.0}
    if dtype == torch.float16:
        options["loss_scale"] = DynamicLossScale(initial=2.0**10, growth_interval=2)
    if mode == "stage 1 alone":
        return ddp, ZeroRedundancyOptimizer(groups_of(model), torch.optim.AdamW, **options)
    return ddp, shard_optimizer(ddp, torch.optim.AdamW, params=groups_of(model), **MODES[mode], **options)


CASES = [
    *((version, "stage2-fp16", torch.float16, "stage 2", "last") for version in VERSIONS),
    (VERSIONS[1], "stage1-bf16-fp32sum", torch.bfloat16, "stage 1", "last"),
    *((VERSIONS[-1], "stage1-bf16", torch.bfloat16, mode, "last_universal") for mode in MODES),
]
"""Every version in every format into one process: tests/unit/checkpoint/foreign."""


def into_every_mode(setup: Setup, root: Path) -> None:
    for version, variant, dtype, mode, form in CASES:
        folder = root / version / variant
        ddp, opt = build(mode, dtype)
        model = ddp.module
        assert isinstance(model, Model)
        if version.startswith("0.19"):
            model.shift = model.shift.float()  # DeepSpeed casts buffers no more
        loaded = checkpoint.load(folder / form, ddp, opt)
        assert (loaded.skipped, loaded.step) == ((), STEPS)
        states = whole_states(folder)
        names = {param: name for name, param in model.named_parameters() if param.requires_grad}
        params = [param for group in opt.param_groups for param in group["params"]]
        found = opt.state_dict()["state"]
        for index, param in enumerate(params):
            expected_state = {
                key: value.view(param.shape) for key, value in states[names[param]].items() if key != "step"
            }
            torch.testing.assert_close(param.detach(), expected_state["fp32"].to(dtype), rtol=0, atol=0)
            for key in ("exp_avg", "exp_avg_sq"):
                torch.testing.assert_close(found[index][key], expected_state[key], rtol=0, atol=0)
        assert len(params) == 5
        dist.barrier()  # until the others have their state dicts, this optimizer has to answer


def trains_on(setup: Setup, root: Path) -> None:
    """The losses that follow are those that DeepSpeed saw, with its state, rates and clipping."""
    for version in VERSIONS:
        for mode in ("stage 1", "stage 2"):
            folder = root / version / "stage1-fp32"
            ddp, opt = build(mode, torch.float32)
            checkpoint.load(folder, ddp, opt)
            schedule = torch.optim.lr_scheduler.StepLR(opt, 2, 0.9)
            schedule.load_state_dict(checkpoint.load(folder, ddp, opt).extra["lr_scheduler"])
            losses = []
            for step in range(STEPS, STEPS + MORE):
                opt.zero_grad()
                loss = ddp(tokens_of(step, setup.rank))
                loss.backward()
                opt.step()
                schedule.step()
                losses.append(loss.item())
            if setup.rank == 0:
                torch.testing.assert_close(losses, expected(folder)["losses"], rtol=1e-6, atol=0)
            assert len({round(loss, 6) for loss in losses}) == MORE


def engine_goes_on(setup: Setup, root: Path) -> None:
    """`engine.load_checkpoint` takes a folder of DeepSpeed, with its schedule, counters and client state."""
    folder = root / VERSIONS[-1] / "stage1-fp32"
    torch.manual_seed(8)
    model = Model()
    engine, _, _, schedule = ddp_zero.deepspeed.initialize(
        model=model,
        model_parameters=groups_of(model),
        config={**BASE, **VARIANTS["stage1-fp32"]},
        lr_scheduler=lambda opt: torch.optim.lr_scheduler.StepLR(opt, 2, 0.9),
    )
    with pytest.raises(ValueError, match="Expected save_dir to be a folder, got ''"):
        engine.save_checkpoint("")
    loaded, client_state = engine.load_checkpoint(folder, tag="last")
    assert loaded == str(folder / "last")
    assert client_state == {"epoch": 7, "note": ["any", 1.5]}
    assert (engine.global_steps, engine.micro_steps, schedule.last_epoch) == (STEPS, STEPS, STEPS)
    losses = []
    for step in range(STEPS, STEPS + MORE):
        loss = engine(tokens_of(step, setup.rank))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    if setup.rank == 0:
        torch.testing.assert_close(losses, expected(folder)["losses"], rtol=1e-6, atol=0)


@pytest.mark.parametrize("world_size", [2, 3])
def test_checkpoints_of_deepspeed_load_into_every_mode(world_size: int, tmp_path: Path) -> None:
    root = unpack(tmp_path)
    run_ranks(all_cases, world_size, root, timeout=240)


def all_cases(setup: Setup, root: Path) -> None:
    into_every_mode(setup, root)
    if setup.world_size == 2:
        trains_on(setup, root)
        engine_goes_on(setup, root)
