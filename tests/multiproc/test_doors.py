"""The doors of the library: what users pass in, in the form in which frameworks and people pass it, and what they get.

Every case runs on real ranks and compares with DDP and the plain optimizer, or says what the error must say.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from ddp_zero import checkpoint
from tests.multiproc.cases import assert_equal_models, assert_identical, batches, build_model
from tests.multiproc.harness import Setup, run_ranks
from tests.multiproc.test_sync_forward import (
    MODES,
    OPTIONS,
    assert_same_values,
    left,
    plain,
    sharded,
    train_step,
    wrapped,
)

Case = Callable[[Setup, Path], None]


def _all_cases(setup: Setup, cases: list[Case], root: Path) -> None:
    for case in cases:
        case(setup, root / case.__name__)


# sync="forward" and checkpoints


def _saved_after_every_step(setup: Setup, root: Path) -> None:
    for name in ("stage 1, standalone", "stage 1, overlapped", "stage 2, interleaved", "stage 2, after backward"):
        expected, ddp = plain(build_model()), wrapped(build_model())
        reference, opt = AdamW(expected.parameters(), **OPTIONS), sharded(ddp, MODES[name])
        before, on_their_way = copy.deepcopy(expected.module), 0
        for step, (inputs, targets) in enumerate(batches(setup.rank, 6)):
            train_step(expected, reference, inputs, targets)
            train_step(ddp, opt, inputs, targets)
            on_their_way += bool(left(opt))
            checkpoint.save(root / name, ddp, opt, background=step % 2 == 1)
        assert on_their_way >= 4, f"{name} waits at the end of a step"
        assert_same_values(expected.module, ddp.module, f"saved after every step, {name}")
        assert not any(map(torch.equal, before.parameters(), ddp.module.parameters())), "nothing moved"

        other = wrapped(build_model(1))
        resumed = sharded(other, MODES[name])
        for inputs, targets in batches(setup.rank, 4, seed=2):
            train_step(other, resumed, inputs, targets)
        assert left(resumed), "to be loaded over parameters that are on their way"
        checkpoint.load(root / name, other, resumed)
        for inputs, targets in batches(setup.rank, 3, seed=1):
            train_step(expected, reference, inputs, targets)
            train_step(other, resumed, inputs, targets)
        assert_same_values(expected.module, other.module, f"resumed, {name}")


def _whatever_is_saved_waits(setup: Setup, root: Path) -> None:
    expected, ddp = plain(build_model()), wrapped(build_model())
    reference, opt = AdamW(expected.parameters(), **OPTIONS), sharded(ddp, MODES["stage 2, interleaved"])
    data = batches(setup.rank, 100)

    def train() -> None:
        for _ in range(3):
            inputs, targets = next(data)
            train_step(expected, reference, inputs, targets)
            train_step(ddp, opt, inputs, targets)
        assert left(opt)

    for model in (ddp, ddp.module):
        train()
        checkpoint.save(root / type(model).__name__, ddp, None) if model is ddp else checkpoint.save(
            root / type(model).__name__, model, opt
        )
        fresh = build_model(1)
        checkpoint.load(root / type(model).__name__, fresh)
        assert_equal_models(expected, fresh, "the model alone")
    train()
    weights = {"average": dict(ddp.module.named_parameters()), "last": [ddp.module[-1].weight]}
    checkpoint.save(root / "extra", build_model_in_ddp(), extra=weights)
    loaded = checkpoint.load(root / "extra", build_model_in_ddp())
    assert_identical({k: v.detach() for k, v in expected.module.named_parameters()}, loaded.extra["average"], "extra")
    train()
    own = opt.sharded_state_dict(ddp)
    opt.consolidate_state_dict(to=setup.rank * 0)
    if setup.rank == 0:
        assert_identical(reference.state_dict()["state"], opt.state_dict()["state"], "consolidated")
    names = {id(param): name for name, param in ddp.module.named_parameters()}
    assert sorted(own["state"]) == sorted(names[id(param)] for param in opt.state)


def build_model_in_ddp() -> nn.Module:
    return wrapped(build_model(2))


FORWARD: list[Case] = [_saved_after_every_step, _whatever_is_saved_waits]


def test_checkpoints_wait_for_parameters_on_their_way(tmp_path: Path) -> None:
    run_ranks(_all_cases, 2, FORWARD, tmp_path)
