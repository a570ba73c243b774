"""A step follows whatever the loop changes between two steps, in every mode, in the step after the change.

Buckets are stepped over lists of tensors that are made once: see `ddp_zero.core.local.step_lists`.
"""

import copy
from collections.abc import Sequence
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW

from ddp_zero import ZeroRedundancyOptimizer, elementwise, shard_optimizer
from ddp_zero.core.local.step_lists import StepLists
from tests import HANG
from tests.multiproc.cases import assert_equal_models, assert_moved, batches, loss_of
from tests.multiproc.harness import Cases, Setup
from tests.multiproc.small_models import build_model, wrapped
from tests.multiproc.stale_steps import CHANGES, Side, class_patched, saved

case = Cases(timeout=HANG, group_timeout=HANG)

OPTIONS: dict[str, Any] = {"lr": 1e-2, "fused": True}
BEFORE, AFTER = 3, 3
MODES: dict[str, dict[str, Any]] = {
    "standalone": {"overlap": False},
    "stage 1": {},
    "stage 1 at the end of backward": {"interleaved": False},
    "stage 2": {"stage": 2},
    "cut": {"stage": 2, "partition": "elements"},
    "cut, clipped": {"stage": 2, "partition": "elements", "max_grad_norm": 0.3},
    "stage 2 without overlap": {"stage": 2, "overlap": False},
    "synced in the next forward pass": {"stage": 2, "sync": "forward"},
    "stage 1 cut, synced in the next forward pass": {"partition": "elements", "sync": "forward"},
    "offloaded": {"stage": 2, "offload": "cpu"},
}


@elementwise
class Same(AdamW):
    """Not exactly torch's class: stepped by ``optimizer.step()``."""


def _train(side: Side, rank: int, part: range, clip: float | None) -> None:
    for step, (inputs, targets) in enumerate(batches(rank, BEFORE + AFTER)):
        if step in part:
            side.optimizer.zero_grad()
            loss_of(side.model, inputs, targets).backward()
            if clip is not None:
                clip_grad_norm_(side.model.parameters(), clip)
            side.optimizer.step()
            if step == 1:
                side.saved = saved(side.optimizer.state_dict())


def _compare(setup: Setup, mode: str, change: str) -> None:
    start, options = build_model(), MODES[mode]
    plain_model, model = wrapped(copy.deepcopy(start), views=False), wrapped(copy.deepcopy(start))
    plain, opt = AdamW(plain_model.parameters(), **OPTIONS), shard_optimizer(model, AdamW, **options, **OPTIONS)
    sides = Side(plain_model, plain, plain), Side(model, opt, opt.optim)
    for part in (range(BEFORE), range(BEFORE, BEFORE + AFTER)):
        for side in sides:
            if part.start:
                CHANGES[change](side)
            _train(side, setup.rank, part, options.get("max_grad_norm") if side.optimizer is plain else None)
        opt.finish_sync()
        when = f"{mode}: {change}, after step {part.stop}"
        if mode == "cut, clipped":  # norms add up from those of parts
            for one, other in zip(plain_model.parameters(), model.parameters(), strict=True):
                torch.testing.assert_close(other, one, rtol=0, atol=1e-7, msg=when)
        else:
            assert_equal_models(plain_model, model, when)
    assert_moved(start, model)


EVERY = list(product(MODES, CHANGES))
FEW = [pair for place, pair in enumerate(EVERY) if place % 17 == 0 or (pair[0] == "cut" and place % 2)]


@case(2, few=FEW, every=EVERY)
def _a_step_after_each_listed_change_equals_ddp(setup: Setup, configurations: Sequence[tuple[str, str]]) -> None:
    for mode, change in configurations:
        _compare(setup, mode, change)


@case(2)
def _a_class_whose_step_is_replaced_steps_by_the_new_one(setup: Setup) -> None:
    start = build_model()
    plain_model, model = wrapped(copy.deepcopy(start), views=False), wrapped(copy.deepcopy(start))
    plain, opt = AdamW(plain_model.parameters(), **OPTIONS), shard_optimizer(model, AdamW, stage=2, **OPTIONS)
    sides = Side(plain_model, plain, plain), Side(model, opt, opt.optim)
    for side in sides:
        _train(side, setup.rank, range(BEFORE), None)
    with class_patched():
        for side in sides:
            _train(side, setup.rank, range(BEFORE, BEFORE + AFTER), None)
    assert_equal_models(plain_model, model, "after the class was patched")


@case(2)
def _masters_are_stepped_as_by_the_step_of_a_subclass(setup: Setup) -> None:
    """Which has no lists; over fp32 copies of parameters, whole and cut, on the device and on the host."""
    ways: list[dict[str, Any]] = [{}, {"partition": "elements"}, {"partition": "elements", "offload": "cpu"}]
    for more in ways:
        start, models = build_model().bfloat16(), []
        for kind in (AdamW, Same):
            model = wrapped(copy.deepcopy(start))
            opt = shard_optimizer(model, kind, stage=2, master_weights=True, **more, **OPTIONS)
            models.append(model)
            for inputs, targets in batches(setup.rank, 5):
                opt.zero_grad()
                loss_of(model, inputs.bfloat16(), targets.bfloat16()).backward()
                opt.step()
        assert_equal_models(models[0], models[1], f"{more}")
        assert_moved(start, models[0])


@case(2)
def _steps_of_classes_of_torch_take_kept_lists_in_every_mode(setup: Setup) -> None:
    """Or the tests above would compare ``optimizer.step()`` with itself."""
    taken: list[bool] = []
    inner_step = StepLists.step

    def noted(self: StepLists, *args: Any) -> list[int]:
        found = inner_step(self, *args)
        taken.append(bool(found))
        return found

    for mode, options in MODES.items():
        model = wrapped(build_model())
        opt = shard_optimizer(model, AdamW, **options, **OPTIONS)
        taken.clear()
        with patch.object(StepLists, "step", noted):
            for step, (inputs, targets) in enumerate(batches(setup.rank, 4)):
                taken.clear()
                opt.zero_grad()
                loss_of(model, inputs, targets).backward()
                opt.step()
                if step:
                    assert taken, f"{mode}, step {step}"
                    assert all(taken), f"{mode}, step {step}: {taken}"


@case(2)
def _parameters_without_a_gradient_now_and_then_equal_ddp(setup: Setup) -> None:
    """On and off again, and a group that was added: as DDP with the plain optimizer."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.always, self.sometimes = nn.Linear(8, 3), nn.Linear(8, 3)
            self.uses_both = True

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.always(inputs)
            return found + self.sometimes(inputs) if self.uses_both else found

    start = Branches()
    models = [
        nn.parallel.DistributedDataParallel(copy.deepcopy(start), find_unused_parameters=True, bucket_cap_mb=0.0001)
        for _ in range(2)
    ]
    params = [[*model.module.always.parameters()] for model in models]
    plain = AdamW(params[0], **OPTIONS)
    opt = ZeroRedundancyOptimizer(params[1], AdamW, **OPTIONS)
    for step, (inputs, targets) in enumerate(batches(setup.rank, 8)):
        for model, optimizer in zip(models, (plain, opt), strict=True):
            if step == 3:
                optimizer.add_param_group({"params": [*model.module.sometimes.parameters()], "lr": 3e-3})
            model.module.uses_both = step % 2 == 0
            optimizer.zero_grad()
            loss_of(model, inputs, targets).backward()
            optimizer.step()
        assert_equal_models(models[0], models[1], f"after step {step}")
    assert_moved(start, models[1].module)


test_situations = case.each()
