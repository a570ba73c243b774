"""The same script under DeepSpeed and here: losses, rates, norms, skipped steps and loss scales of 50 steps."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("deepspeed", minversion="0.19")

import deepspeed
from deepspeed.accelerator import get_accelerator

from ddp_zero import deepspeed as ours
from tests.frameworks.job import as_a_job
from tests.multiproc.harness import Cases, Setup

case = Cases(as_a_job, timeout=900, group_timeout=300)


@pytest.fixture(autouse=True)
def _ranks_of_its_own() -> Iterator[None]:
    """DeepSpeed keeps process groups in its modules, and whether autocast was on, so ranks end with their case."""
    yield
    if Cases._pool is not None:
        Cases._pool.close()


STEPS = 50
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def build_model() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 5))


def data(rank: int, rounds: int, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(100 + rank)
    for _ in range(rounds):
        yield torch.randn(4, 12, generator=generator).to(dtype), torch.randn(4, 5, generator=generator)


@dataclass
class Run:
    """What a script shows after every step."""

    losses: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    applied: list[bool] = field(default_factory=list)
    skipped: int = 0


def script(initialize: Callable[..., Any], setup: Setup, config: dict[str, Any], overflows: tuple[int, ...]) -> Run:
    """A script as users of DeepSpeed write it."""
    dtype = FP16 if "fp16" in config else BF16 if "bf16" in config else FP32
    rounds, run, model = config.get("gradient_accumulation_steps", 1), Run(), build_model()
    engine, optimizer, _, _ = initialize(model=model, model_parameters=model.parameters(), config=config)
    for number, (inputs, targets) in enumerate(data(setup.rank, STEPS * rounds, dtype)):
        loss = (engine(inputs).float() - targets).square().mean()
        if number // rounds in overflows and setup.rank == 1:
            loss = loss * float("inf")
        engine.backward(loss)
        if engine.is_gradient_accumulation_boundary():
            run.scales.append(float(optimizer.loss_scale) if dtype is FP16 else 1.0)
            run.rates.append(engine.get_lr()[0])
        engine.step()
        if (number + 1) % rounds == 0:
            run.losses.append(loss.item())
            run.norms.append(float(engine.get_global_grad_norm() or 0.0))
            run.applied.append(engine.was_step_applied())
    assert engine.global_steps == STEPS
    run.skipped = engine.skipped_steps
    return run


def compare(
    setup: Setup, config: dict[str, Any], tolerance: float, overflows: tuple[int, ...] = (), same_norm: bool = True
) -> Run:
    """Run both and compare."""
    base = {"train_micro_batch_size_per_gpu": 4, "zero_allow_untested_optimizer": True}
    theirs = script(deepspeed.initialize, setup, {**base, **config}, overflows)
    mine = script(ours.initialize, setup, {**base, **config}, overflows)
    assert mine.applied == theirs.applied, config
    assert mine.scales == theirs.scales, config
    assert mine.skipped == theirs.skipped, config
    assert mine.skipped >= len(overflows), "overflows were forced"
    assert mine.rates == pytest.approx(theirs.rates, rel=1e-12), config
    for step, (one, other) in enumerate(zip(mine.losses, theirs.losses, strict=True)):
        assert one == pytest.approx(other, rel=tolerance), f"loss of step {step}, {config}"
    for step, (one, other) in enumerate(zip(mine.norms, theirs.norms, strict=True)):
        has_warned = same_norm and 0 < other < math.inf  # DeepSpeed tells none in stage 0 with fp32
        assert not has_warned or one == pytest.approx(other, rel=max(tolerance, 1e-5)), f"norm of step {step}, {config}"
    finite = [loss for loss in mine.losses if math.isfinite(loss)]
    assert min(finite[-10:]) < 0.8 * finite[0], "it has learned something"
    return mine


ADAMW = {"type": "AdamW", "params": {"lr": 0.003, "weight_decay": 0.1}}
TOLERANCE = 1e-6


@case(2)
def _fp32(setup: Setup) -> None:
    for stage in (0, 1, 2):
        for rounds, clip in ((1, 0.0), (2, 0.3)):
            config = {
                "optimizer": ADAMW,
                "gradient_clipping": clip,
                "gradient_accumulation_steps": rounds,
                "zero_optimization": {"stage": stage},
            }
            compare(setup, config, TOLERANCE)


@case(2)
def _each_optimizer(setup: Setup) -> None:
    for optimizer in (
        {"type": "Adam", "params": {"lr": 0.003, "weight_decay": 0.1}},
        {"type": "Adam", "params": {"lr": 0.003, "weight_decay": 0.1, "adam_w_mode": False, "torch_adam": True}},
        {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}},
        {"type": "Adagrad", "params": {"lr": 0.02}},
    ):
        compare(setup, {"optimizer": optimizer, "zero_optimization": {"stage": 1}}, TOLERANCE)


@case(2)
def _lion_and_muon_train_as_in_deepspeed(setup: Setup) -> None:
    """Lion, which DeepSpeed runs on CPUs only where its state is offloaded; Muon, which it clips otherwise."""
    type(get_accelerator()).is_fp16_supported = lambda self: True  # it is, slowly
    offload = {"device": "cpu"}
    lion = {"type": "Lion", "params": {"lr": 0.001, "betas": [0.9, 0.99], "weight_decay": 0.1}}
    for stage in (1, 2):
        zero = {"stage": stage, "offload_optimizer": offload}
        compare(setup, {"optimizer": lion, "zero_optimization": zero, "gradient_clipping": 0}, TOLERANCE)
    with torch.compiler.set_stance("force_eager"):  # compiled it rounds in different places; its norm is of updates
        for stage, method in ((0, "gram"), (1, "standard"), (2, "gram")):
            params = {"muon_lr": 0.01, "adam_lr": 0.003, "weight_decay": 0.1, "ns_method": method}
            optimizer = {"type": "Muon", "params": params}
            config = {"optimizer": optimizer, "zero_optimization": {"stage": stage}, "gradient_clipping": 0}
            compare(setup, config, 0.1, same_norm=False)


@case(2)
def _forward_passes_under_autocast(setup: Setup) -> None:
    """Losses agree to the rounding of bf16; in stage 1 DeepSpeed sends gradients of linear layers in it, too."""
    autocast = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    config = {"optimizer": ADAMW, "gradient_clipping": 0.3, **autocast}
    for stage in (0, 1):
        compare(setup, {**config, "zero_optimization": {"stage": stage}}, 0.1)


@case(2)
def _monitors_write_the_same(setup: Setup) -> None:
    found = []
    for name, initialize in (("theirs", deepspeed.initialize), ("ours", ours.initialize)):
        block = {"enabled": True, "output_path": str(setup.folder / name), "job_name": "job"}
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": ADAMW,
            "scheduler": SCHEDULES[0],
            "zero_optimization": {"stage": 1},
            "csv_monitor": block,
            **({} if find_spec("tensorboard") is None else {"tensorboard": block}),
        }
        script(initialize, setup, config, ())
        torch.distributed.barrier()
        folder = setup.folder / name / "job"
        files = {path.name: path.read_text() for path in folder.glob("*.csv")}
        found.append((files, [path.name.partition(".")[0] for path in folder.glob("events.*")]))
    assert found[0] == found[1]
    assert list(found[0][0]) == ["Train_Samples_lr.csv"]
    assert len(found[0][0]["Train_Samples_lr.csv"].splitlines()) == STEPS + 1


SCHEDULES = [
    {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": 0.003}},
    {"type": "WarmupLR", "params": {"warmup_num_steps": 1, "warmup_type": "linear", "warmup_min_lr": 0.001}},
    {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": 0.003, "total_num_steps": 40}},
    {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 10, "total_num_steps": 40, "cos_min_ratio": 0.1}},
    {
        "type": "OneCycle",
        "params": {
            "cycle_min_lr": 0.001,
            "cycle_max_lr": 0.005,
            "cycle_first_step_size": 12,
            "cycle_second_step_size": 20,
            "decay_step_size": 5,
            "decay_lr_rate": 0.1,
            "cycle_first_stair_count": 3,
        },
    },
    {"type": "LRRangeTest", "params": {"lr_range_test_min_lr": 0.001, "lr_range_test_step_size": 10}},
    {"type": "LinearLR", "params": {"start_factor": 0.5, "total_iters": 10}},
]


@case(2)
def _each_schedule(setup: Setup) -> None:
    for schedule in SCHEDULES:
        stage = 0 if schedule["type"] == "LinearLR" else 2  # torch's refuse DeepSpeed's ZeRO optimizer
        config = {"optimizer": ADAMW, "scheduler": schedule, "zero_optimization": {"stage": stage}}
        rates = compare(setup, config, TOLERANCE).rates
        assert len(set(rates)) > 2, f"{schedule} changes the rate"


OVERFLOWS = (5, 11, 12, 13, 20, 30, 32)


@case(2)
def _fp16_with_forced_overflows(setup: Setup) -> None:
    """Losses of fp16 forward passes differ by their rounding, wherever parameters differ in a last bit.

    DeepSpeed asks whether the CPU has instructions for fp16; torch computes it without, too.
    """
    type(get_accelerator()).is_fp16_supported = lambda self: True  # it is, slowly
    for stage, rounds, fp16 in (
        (1, 1, {"hysteresis": 2}),
        (1, 2, {"hysteresis": 1, "min_loss_scale": 16}),
        (2, 1, {"hysteresis": 2, "consecutive_hysteresis": True}),
        (2, 2, {"hysteresis": 3}),
        (2, 1, {"loss_scale": 128.0}),
    ):
        config = {
            "optimizer": ADAMW,
            "gradient_clipping": 0.3,
            "gradient_accumulation_steps": rounds,
            "fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 4, **fp16},
            "zero_optimization": {"stage": stage},
        }
        scales = compare(setup, config, 0.02, OVERFLOWS).scales
        assert len(set(scales)) > 1 or "loss_scale" in fp16, "the scale has moved"


@case(2)
def _bf16_with_forced_overflows(setup: Setup) -> None:
    """As for fp16, with fewer bits."""
    for stage, rounds in ((1, 1), (2, 1), (2, 2)):
        config = {
            "optimizer": ADAMW,
            "gradient_clipping": 0.3,
            "gradient_accumulation_steps": rounds,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": stage},
        }
        compare(setup, config, 0.1, OVERFLOWS)


test_the_same_script_under_deepspeed_and_here = case.each()
