"""Checkpoints from DeepSpeed to here and back, with DeepSpeed itself at the other end. Some minutes."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.sgd import SGD

pytest.importorskip("deepspeed", minversion="0.17")

import deepspeed

from ddp_zero import checkpoint
from ddp_zero.checkpoint.export import export_deepspeed
from tests.deepspeed.follow_round_robin import VARIANTS
from tests.deepspeed.follow_schedules import SCHEDULES, TAGS
from tests.deepspeed.write_checkpoints import MORE, STEPS, Model, groups_of, tokens_of
from tests.unit.checkpoint.foreign.written import whole_states

REPOSITORY = Path(__file__).parents[2]
IS_MENDED = tuple(map(int, deepspeed.__version__.split(".")[:2])) >= (0, 19)
"""Before, ``safe_get_full_fp32_param`` gives a state of the optimizer after a universal checkpoint was loaded: where
DeepSpeed maps the states it points the fp32 fragment of the parameter at that of the state (`map_to_flat_opt_states`),
of each in turn, in an order that differs between ranks. What is trained, and what it saves again, are right."""


def run(program: str, *arguments: object, ranks: int = 2) -> None:
    """Run a script of this folder."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [*command, f"tests.deepspeed.{program}", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=900,
        env=environment,
        cwd=REPOSITORY,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]


@pytest.mark.parametrize("variant", ["stage1-fp32", "stage2-elastic", "stage2-sgd"])
def test_what_deepspeed_writes_now_is_read(tmp_path: Path, variant: str) -> None:
    run("write_checkpoints", tmp_path, variant)
    expected = torch.load(tmp_path / f"{variant}.expected.pt", weights_only=True)["params"]
    torch.manual_seed(1)
    model = Model()
    is_sgd = variant == "stage2-sgd"
    opt = SGD(groups_of(model), lr=9.0, momentum=0.1) if is_sgd else AdamW(groups_of(model), lr=9.0)
    checkpoint.load(tmp_path / variant, model, opt, strict=False)
    states = {} if variant in ("stage2-sgd", "stage2-elastic") else whole_states(tmp_path / variant)
    for name, param in model.named_parameters():
        if param.requires_grad:
            torch.testing.assert_close(param.detach(), expected[name], rtol=0, atol=0)
            for key in ("momentum_buffer",) if is_sgd else ("exp_avg", "exp_avg_sq"):
                assert opt.state[param][key].any()
                if states:
                    torch.testing.assert_close(opt.state[param][key], states[name][key].view_as(param), rtol=0, atol=0)
    assert opt.param_groups[0]["lr"] == (9.0 if variant == "stage2-elastic" else 0.05 * 0.9)  # it saves no options


@pytest.mark.parametrize("writers", [1, 2, 3])
def test_round_robin_files_go_on_here_as_in_deepspeed(tmp_path: Path, writers: int) -> None:
    """In both stages and three precisions: the values of ``zero_to_fp32``, and the losses that follow."""
    run("follow_round_robin", "theirs", tmp_path, ranks=writers)
    for variant in VARIANTS:
        expected = torch.load(tmp_path / f"{variant}.pt", weights_only=True)
        model = Model()
        opt = AdamW(groups_of(model), lr=9.0)
        checkpoint.load(tmp_path / variant, model, opt, strict=False)
        for name, param in model.named_parameters():
            if param.requires_grad:
                torch.testing.assert_close(param.detach(), expected[name], rtol=0, atol=0, msg=f"{variant}: {name}")
    run("follow_round_robin", "ours", tmp_path, ranks=writers)
    ours, theirs = (torch.load(tmp_path / f"{who}.pt", weights_only=True) for who in ("ours", "theirs"))
    for variant in VARIANTS:
        first, later = (1e-5, 1e-5) if "fp32" in variant else (1e-3, 5e-2)  # rounded sums differ, and that grows
        torch.testing.assert_close(ours[variant][:2], theirs[variant][:2], rtol=first, atol=0, msg=variant)
        torch.testing.assert_close(ours[variant], theirs[variant], rtol=later, atol=0, msg=variant)
        assert len(set(ours[variant])) == 4, "it trains"


def test_stage_0_is_refused(tmp_path: Path) -> None:
    run("write_checkpoints", tmp_path, "stage0-fp32")
    with pytest.raises(ValueError, match=r"Expected stage 1 or 2 in .*, got stage 0"):
        checkpoint.load(tmp_path / "stage0-fp32", Model())


def train(model: nn.Module, opt: AdamW, first: int, steps: int) -> list[float]:
    """Both ranks' batches, averaged and clipped as in a job of two ranks; the loss of rank 0."""
    losses = []
    for step in range(first, first + steps):
        opt.zero_grad()
        ranks: list[Any] = [model(tokens_of(step, rank)) for rank in range(2)]
        (sum(ranks) / 2).backward()
        nn.utils.clip_grad_norm_([param for group in opt.param_groups for param in group["params"]], 1.0)
        opt.step()
        losses.append(float(ranks[0].detach()))
    return losses


def test_deepspeed_follows_each_schedule_from_what_is_exported(tmp_path: Path) -> None:
    """Two tags in one folder; the same losses and rates."""
    run("follow_schedules", "ours", tmp_path)
    for schedule in SCHEDULES:
        for tag in TAGS:
            out = export_deepspeed(tmp_path / schedule / "saved" / tag, tmp_path / schedule / "theirs")
            assert out.name == f"{tag}_universal"
    run("follow_schedules", "theirs", tmp_path)
    ours, theirs = (torch.load(tmp_path / f"{who}.pt", weights_only=True) for who in ("ours", "theirs"))
    assert len(ours) == len(SCHEDULES) * len(TAGS)
    for name, steps in ours.items():
        for step, ((loss, rates), (its_loss, its_rates)) in enumerate(zip(steps, theirs[name], strict=True)):
            assert its_rates == pytest.approx(rates, rel=1e-9), f"{name}, step {step}"
            assert its_loss == pytest.approx(loss, rel=1e-5), f"{name}, step {step}"


@pytest.mark.parametrize(("stage", "dtype"), [(1, "fp32"), (2, "bf16"), (2, "fp32")])
def test_what_is_exported_here_deepspeed_loads_and_trains_on(tmp_path: Path, stage: int, dtype: str) -> None:
    torch.manual_seed(3)
    model = Model()
    opt = AdamW(groups_of(model), lr=0.05)
    train(model, opt, 0, STEPS)
    checkpoint.save(tmp_path / "ours", model, opt, step=STEPS).wait()
    export_deepspeed(tmp_path / "ours", tmp_path / "theirs")
    run("load_universal", tmp_path / "theirs", stage, dtype, tmp_path / "result.pt")
    found = torch.load(tmp_path / "result.pt", weights_only=True)
    assert found["steps"] == STEPS
    assert found["lrs"] == [0.05, 0.01]
    states = whole_states(tmp_path / "theirs" / "again")
    for name, param in model.named_parameters():
        if param.requires_grad:
            expected = {"fp32": param.detach(), **{key: opt.state[param][key] for key in ("exp_avg", "exp_avg_sq")}}
            for key, value in expected.items():
                torch.testing.assert_close(states[name][key].view_as(value), value, rtol=0, atol=0)
            told = found["params"][name]
            if IS_MENDED:
                torch.testing.assert_close(told, param.detach(), rtol=0, atol=0)
            else:
                assert not torch.equal(told, param), name
                assert bool(((told == expected["exp_avg"]) | (told == expected["exp_avg_sq"])).all()), name
            assert float(states[name]["step"]) == STEPS
    losses = train(model, opt, STEPS, MORE)
    assert len(found["losses"]) == len(losses) == MORE
    if dtype == "fp32":
        torch.testing.assert_close(found["losses"], losses, rtol=1e-5, atol=0)  # sums in a different order
