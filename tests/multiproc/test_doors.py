"""The doors of the library: what users pass in, in the form in which frameworks and people pass it, and what they get.

Every case runs on real ranks and compares with DDP and the plain optimizer, or says what the error must say.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from ddp_zero import DynamicLossScale, ZeroRedundancyOptimizer, checkpoint, shard_optimizer
from ddp_zero.collectives import Communicator
from tests.multiproc.cases import (
    OPTIMIZERS,
    Twins,
    assert_equal_models,
    assert_identical,
    batches,
    build_model,
    build_twins,
    loss_of,
)
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


# A state dict before the first step


def _before_the_first_step(setup: Setup, root: Path) -> None:
    for position, case in enumerate(OPTIMIZERS):
        twins = build_twins(case, groups=1 + position % 2, parameters_as_bucket_view=bool(position % 2))
        _same_at_birth(twins, case.name)
        twins.opt.load_state_dict(twins.opt.state_dict())  # as frameworks do to move it to a device
        twins.plain.load_state_dict(twins.plain.state_dict())
        if case.name != "Adagrad":
            _same_at_birth(twins, f"{case.name}, loaded")
        twins.train(setup, 2)
        twins.assert_moved()
        if case.name in ("AdamW foreach", "Adagrad"):
            with pytest.raises(RuntimeError, match=r"after the last step to be consolidated.*consolidate_state_dict"):
                twins.opt.state_dict()


def _same_at_birth(twins: Twins, what: str) -> None:
    with mock.patch.object(Communicator, "all_gather_ints", side_effect=AssertionError("communicates")):
        found = twins.opt.state_dict()
    expected = twins.plain.state_dict()
    assert_identical(expected, found, what)
    assert list(found) == list(expected)
    assert [list(group) for group in found["param_groups"]] == [list(group) for group in expected["param_groups"]]


def _a_rank_that_owns_nothing_answers_too(setup: Setup, root: Path) -> None:
    for build in (AdamW, torch.optim.Adagrad):
        model = nn.Linear(3, 3, bias=False)
        with torch.no_grad():
            model.weight.fill_(0.5)
        opt = ZeroRedundancyOptimizer(model.named_parameters(), build, lr=0.1)
        assert_identical(build(model.named_parameters(), lr=0.1).state_dict(), opt.state_dict(), str(build))
        twin = copy.deepcopy(opt)
        assert_identical(opt.state_dict(), twin.state_dict(), "of a copy")
        opt.load_state_dict({**opt.state_dict(), "state": {}})
        plain = build(model.named_parameters(), lr=0.1)
        for optimizer in (plain, twin):
            optimizer.add_param_group({"params": [("more", nn.Parameter(torch.ones(2)))], "lr": 0.2})
        if build is AdamW:
            assert opt.state_dict()["state"] == {}
            assert_identical(plain.state_dict(), twin.state_dict(), "of an added group")
        else:  # Adagrad creates states at construction, but not for what is added; nobody can tell without asking
            for changed in (opt, twin):
                with pytest.raises(RuntimeError, match="Expected the state after load_state_dict or add_param_group"):
                    changed.state_dict()


def _masters_and_loss_scale_before_the_first_step(setup: Setup, root: Path) -> None:
    for build in (AdamW, torch.optim.Adagrad):
        ddp = wrapped(build_model().to(torch.bfloat16))
        opt = shard_optimizer(ddp, build, lr=0.1, master_weights=True, loss_scale=DynamicLossScale())
        with torch.no_grad():
            ddp.module[0].weight.mul_(2)
        found = opt.state_dict()
        for index, param in enumerate(ddp.parameters()):
            assert torch.equal(found["state"][index]["master_weight"], param.detach().float())
        opt.consolidate_state_dict(to=0)
        if setup.rank == 0:
            assert_identical(opt.state_dict(), found, "masters")
        other = wrapped(build_model(1).to(torch.bfloat16))
        loaded = shard_optimizer(other, build, lr=0.1, master_weights=True, loss_scale=DynamicLossScale())
        other.load_state_dict(ddp.state_dict())
        loaded.load_state_dict(found)
        for model, optimizer in ((ddp, opt), (other, loaded)):
            for inputs, targets in batches(setup.rank, 3):
                optimizer.scale(loss_of(model, inputs.bfloat16(), targets.bfloat16())).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert_equal_models(ddp, other, "loaded from before the first step")


def _what_only_one_rank_knows_is_not_left_out(setup: Setup, root: Path) -> None:
    ddp = wrapped(build_model())
    opt = shard_optimizer(ddp, AdamW, lr=0.1, overlap=False)
    opt.load_sharded_state_dict(opt.sharded_state_dict(ddp, init_missing=setup.rank == 0), ddp)
    with pytest.raises(RuntimeError, match="consolidate"):
        opt.state_dict()


BIRTH: list[Case] = [
    _before_the_first_step,
    _a_rank_that_owns_nothing_answers_too,
    _masters_and_loss_scale_before_the_first_step,
    _what_only_one_rank_knows_is_not_left_out,
]


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_state_dict_before_the_first_step_is_the_plain_optimizers(world_size: int, tmp_path: Path) -> None:
    run_ranks(_all_cases, world_size, BIRTH, tmp_path)
