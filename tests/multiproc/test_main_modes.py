"""Every main mode once at two ranks, in one pool of processes, bit for bit beside DDP: what ``pytest -m smoke`` runs.

Other files of this folder test each mode in every situation; these cases tell within seconds whether a mode works.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW

from ddp_zero import ZeroRedundancyOptimizer, checkpoint, deepspeed, shard_optimizer, wrap
from tests import HANG
from tests.multiproc.cases import assert_equal_models, assert_identical, assert_moved, batches, loss_of
from tests.multiproc.harness import Cases, Setup
from tests.multiproc.small_models import build_model, wrapped

case = Cases(timeout=HANG, group_timeout=HANG)

STEPS = 6
CLIP = 0.3
OPTIONS: dict[str, Any] = {"lr": 1e-2, "fused": True}
DEEPSPEED_OPTIONS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}


class Plain:
    """DDP with the unsharded optimizer and torch's clipping."""

    def __init__(self, model: nn.Module, clip: float | None, options: dict[str, Any] = OPTIONS) -> None:
        self.model = wrapped(copy.deepcopy(model), views=False)
        self.optimizer = AdamW(self.model.named_parameters(), **options)
        self.clip = clip

    def train(self, inputs: Tensor, targets: Tensor) -> None:
        self.optimizer.zero_grad()
        loss_of(self.model, inputs, targets).backward()
        if self.clip is not None:
            clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()


def equal_ddp(setup: Setup, build: Callable[..., Any] = shard_optimizer, **options: Any) -> Any:
    """Train the sharded optimizer beside the plain optimizer, comparing after every step; returns the optimizer."""
    start = build_model()
    plain = Plain(start, options.get("max_grad_norm"))
    model = wrapped(copy.deepcopy(start))
    opt = build(model, AdamW, **options, **OPTIONS)
    for step, (inputs, targets) in enumerate(batches(setup.rank, STEPS)):
        plain.train(inputs, targets)
        opt.zero_grad()
        loss_of(model, inputs, targets).backward()
        opt.step()
        assert_equal_models(plain.model, model, f"after step {step}")
    assert_moved(start, model)
    opt.consolidate_state_dict(to=0)
    if setup.rank == 0:
        assert_identical(plain.optimizer.state_dict(), opt.state_dict(), "state dict")
    return opt


@case(2)
def _the_optimizer_class_over_named_parameters_equals_ddp(setup: Setup) -> None:
    equal_ddp(setup, lambda ddp, kind, **options: ZeroRedundancyOptimizer(ddp.named_parameters(), kind, **options))


@case(2)
def _an_optimizer_that_was_built_before_equals_ddp(setup: Setup) -> None:
    equal_ddp(
        setup, lambda ddp, kind, **options: shard_optimizer(ddp, kind(ddp.named_parameters(), **options), stage=2)
    )


@case(2)
def _stage_1_standalone_equals_ddp(setup: Setup) -> None:
    opt = equal_ddp(setup, overlap=False)
    assert "stage 1, standalone" in opt.explain(), opt.explain()


@case(2)
def _stage_1_inside_backward_equals_ddp(setup: Setup) -> None:
    opt = equal_ddp(setup, interleaved=False)
    assert "regime: overlapped (" in opt.explain(), opt.explain()


@case(2)
def _stage_2_interleaved_equals_ddp_and_explains_its_order(setup: Setup) -> None:
    opt = equal_ddp(setup, stage=2, interleaved=True)
    assert "regime: overlapped (" in opt.explain(), opt.explain()
    assert "bucket k = 0 is full: reduce k\n" in opt.explain(), opt.explain()
    assert " is full: reduce k, wait_reduce k - 1, " in opt.explain(), opt.explain()


@case(2)
def _stage_2_outside_of_backward_equals_ddp(setup: Setup) -> None:
    equal_ddp(setup, stage=2, overlap=False)


@case(2)
def _cut_parameters_equal_ddp(setup: Setup) -> None:
    for stage, partition in ((1, "elements"), (2, "elements"), (2, "auto")):
        equal_ddp(setup, stage=stage, partition=partition)


@case(2)
def _clipping_by_the_step_equals_ddp(setup: Setup) -> None:
    for stage in (1, 2):
        opt = equal_ddp(setup, stage=stage, max_grad_norm=CLIP)
        assert opt.last_step.grad_norm > CLIP, "nothing was clipped"


@case(2)
def _a_sync_in_the_next_forward_equals_ddp(setup: Setup) -> None:
    equal_ddp(setup, stage=2, sync="forward")


@case(2)
def _a_rank_with_infinite_gradients_makes_all_ranks_skip(setup: Setup) -> None:
    model, opt = wrap(build_model(), AdamW, stage=2, nonfinite="skip", **OPTIONS)
    for step, (inputs, targets) in enumerate(batches(setup.rank, STEPS)):
        before = copy.deepcopy(model.module)
        is_spoiled = step in (0, 3)
        opt.zero_grad()
        (loss_of(model, inputs, targets) * (float("inf") if is_spoiled and setup.rank == 1 else 1.0)).backward()
        opt.step()
        assert opt.last_step is not None
        assert opt.last_step.stepped is not is_spoiled
        if is_spoiled:
            assert_equal_models(before, model.module, f"after step {step}")
        else:
            assert_moved(before, model.module)


@case(2)
def _a_checkpoint_resumes_in_another_mode(setup: Setup) -> None:
    modes: tuple[dict[str, Any], ...] = ({"stage": 2}, {"overlap": False}, {"stage": 2, "partition": "elements"})
    for number, (before, after) in enumerate(zip(modes, modes[1:] + modes[:1], strict=True)):
        saved = _trained(setup, before, seed=1)
        folder = setup.folder / str(number)
        checkpoint.save(folder, saved[0], saved[1], step=STEPS)
        loaded = _resumed(folder, after)
        assert_equal_models(saved[0], loaded[0], "as loaded")
        for model, opt in (saved, loaded):
            _train(setup, model, opt, seed=2)
        assert_equal_models(saved[0], loaded[0], f"from {before} to {after}")


def _trained(setup: Setup, mode: dict[str, Any], seed: int) -> tuple[nn.Module, Any]:
    model = wrapped(build_model())
    opt = shard_optimizer(model, AdamW, **mode, **OPTIONS)
    _train(setup, model, opt, seed)
    return model, opt


def _train(setup: Setup, model: nn.Module, opt: Any, seed: int) -> None:
    for inputs, targets in batches(setup.rank, STEPS, seed):
        opt.zero_grad()
        loss_of(model, inputs, targets).backward()
        opt.step()


def _resumed(folder: Path, mode: dict[str, Any]) -> tuple[nn.Module, Any]:
    start = build_model()
    with torch.no_grad():
        for param in start.parameters():
            param.zero_()
    model = wrapped(start)
    opt = shard_optimizer(model, AdamW, **mode, **OPTIONS)
    assert checkpoint.load(folder, model, opt).step == STEPS
    return model, opt


@case(2)
def _the_deepspeed_engine_equals_ddp(setup: Setup) -> None:
    for stage in (1, 2):
        plain = Plain(build_model(), CLIP, DEEPSPEED_OPTIONS)
        engine, _, _, _ = deepspeed.initialize(model=build_model(), config=_deepspeed_config(stage))
        for step, (inputs, targets) in enumerate(batches(setup.rank, STEPS)):
            plain.train(inputs, targets)
            engine.backward(loss_of(engine, inputs, targets))
            engine.step()
            assert_equal_models(plain.model.module, engine.module, f"stage {stage}, step {step}")
        assert_moved(build_model(), engine.module)


def _deepspeed_config(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 6,
        "optimizer": {"type": "AdamW", "params": DEEPSPEED_OPTIONS},
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage},
    }


test_main_modes = case.each()
