"""Loops as people write them: equal to DDP with the plain optimizer, or refused by a message that fits the cause.

The plain loop runs first, to its end: beside the sharded one it would make the ranks wait for each other.
"""

import copy
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from ddp_zero import ZeroRedundancyOptimizer, checkpoint, shard_optimizer
from ddp_zero.snapshots import Snapshots
from tests.multiproc.cases import assert_identical, batches, build_model, loss_of, step_on, sum_in_rank_order
from tests.multiproc.harness import Cases, Setup
from tests.pairwise import Modes, every_other, pairwise

case = Cases()

OPTIONS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
STANDALONE: dict[str, Any] = {"overlap": False}
INSIDE: dict[str, dict[str, Any]] = {
    "stage 1": {},
    "stage 1, late": {"sync": "forward"},
    "stage 2": {"stage": 2},
    "stage 2, elements": {"stage": 2, "partition": "elements"},
    "stage 2, late": {"stage": 2, "sync": "forward"},
}
WAITING: dict[str, dict[str, Any]] = {
    "stage 1, standalone": STANDALONE,
    "stage 1, clipped": {"max_grad_norm": 1e9},
    "stage 2, after backward": {"stage": 2, "overlap": False},
    "stage 2, clipped": {"stage": 2, "max_grad_norm": 1e9},
}
MODES = {**INSIDE, **WAITING}


@dataclass
class Side:
    """One model, its optimizer, and all that its loop has shown."""

    ddp: DistributedDataParallel
    opt: Any
    shown: list[Any] = field(default_factory=list)

    def show(self) -> None:
        """Note the parameters as they are now."""
        self.shown.append([param.detach().clone() for param in self.ddp.parameters()])


Loop = Callable[[Side, Setup], None]


def side_of(world_size: int, mode: dict[str, Any] | None) -> Side:
    """A model with several buckets, and the optimizer of a mode, or the plain one."""
    ddp = DistributedDataParallel(build_model(), bucket_cap_mb=0.0015, gradient_as_bucket_view=True)
    own: dict[str, Any] = {}
    if world_size > 2:  # the order of sums in stage 2
        if mode is None or "overlap" in mode:
            own = {} if mode is not None and mode.get("stage") == 2 else {"registered": True}
        elif mode.get("stage", 1) == 1:
            own = {"hook": sum_in_rank_order}
    if own.pop("registered", False):
        ddp.register_comm_hook(None, sum_in_rank_order)
    if mode is None:
        return Side(ddp, AdamW(ddp.parameters(), **OPTIONS))
    return Side(ddp, shard_optimizer(ddp, AdamW, **mode, **own, **OPTIONS))


def expected_of(loop: Loop, setup: Setup) -> list[Any]:
    """All that the plain loop shows."""
    plain = side_of(setup.world_size, None)
    loop(plain, setup)
    assert any(not torch.equal(a, b) for a, b in zip(build_model().parameters(), plain.shown[-1], strict=True))
    return plain.shown


def assert_equal_loops(loop: Loop, setup: Setup, modes: dict[str, dict[str, Any]]) -> None:
    """The loop shows the same in every mode as with the plain optimizer."""
    expected = expected_of(loop, setup)
    for name, mode in modes.items():
        side = side_of(setup.world_size, mode)
        loop(side, setup)
        assert_identical(expected, side.shown, name)


def assert_refused(loop: Loop, setup: Setup, modes: dict[str, dict[str, Any]], match: str) -> None:
    """The loop raises in every mode, and shows nothing wrong before."""
    expected = expected_of(loop, setup)
    for name, mode in modes.items():
        side = side_of(setup.world_size, mode)
        with pytest.raises(RuntimeError, match=match):
            loop(side, setup)
        assert_identical(expected[: len(side.shown)], side.shown, name)


def trained(
    side: Side, setup: Setup, steps: int, between: Callable[[int], None] = lambda _: None, seed: int = 0
) -> None:
    """Train as in the tutorials, with something between backward and step."""
    for number, batch in enumerate(batches(setup.rank, steps, seed)):
        loss_of(side.ddp, *batch).backward()
        between(number)
        side.opt.step()
        side.opt.zero_grad()
        side.show()


# State, asked for by one rank


@case(2, 3, 4, few=every_other(INSIDE), every=MODES)
def _one_rank_saves_plain_state_while_others_train(setup: Setup, configurations: Modes) -> None:
    rng = random.Random(setup.rank)

    def loop(side: Side, setup: Setup) -> None:
        is_ours = isinstance(side.opt, ZeroRedundancyOptimizer)

        def wait() -> None:
            if is_ours:
                time.sleep(rng.choice((0.0, 0.0, 0.001, 0.004)))

        for number, batch in enumerate(batches(setup.rank, 2 * setup.world_size)):
            wait()
            loss = loss_of(side.ddp, *batch)
            wait()
            loss.backward()
            wait()
            side.opt.step()
            wait()
            side.opt.zero_grad()
            if setup.rank == number % setup.world_size:
                wait()
                side.shown.append(copy.deepcopy(side.opt.state_dict()["state"]))
            side.show()

    assert_equal_loops(loop, setup, configurations)


# Changes between backward and step


def clamp_data(side: Side) -> None:
    """Clip as old code does, past autograd and its version counters."""
    for param in side.ddp.parameters():
        assert param.grad is not None
        param.grad.data.clamp_(-1e-3, 1e-3)


@case(2, 3)
def _gradients_clipped_through_data_from_the_first_step_on_equal_ddp(setup: Setup) -> None:
    def loop(side: Side, setup: Setup) -> None:
        trained(side, setup, 5, lambda _: clamp_data(side))

    assert_equal_loops(loop, setup, {"stage 1": {}, "stage 1, late": {"sync": "forward"}, "standalone": STANDALONE})
    with pytest.warns(
        UserWarning, match=r"Every step waits .* the gradient of parameter 0 .*overlap=False.*\[ZERO-324\]$"
    ) as warned:
        loop(side := side_of(setup.world_size, {}), setup)
    assert [one.filename for one in warned] == [__file__], "where the loop calls opt.step()"
    assert "the loop changes gradients, options or parameters" in side.opt.explain()


@case(2)
def _gradients_clipped_through_data_after_a_load_or_a_reset_equal_ddp(setup: Setup) -> None:
    for renew in ("load", "reset"):

        def loop(side: Side, setup: Setup, renew: str = renew) -> None:
            trained(side, setup, 4)
            if renew == "load":
                side.opt.load_state_dict(copy.deepcopy(side.opt.state_dict()))
            elif isinstance(side.opt, ZeroRedundancyOptimizer):
                side.opt.reset()
            trained(side, setup, 4, lambda _: clamp_data(side), seed=1)

        assert_equal_loops(loop, setup, {"stage 1": {}, "standalone": STANDALONE})


@case(2, few=[1, 9], every=[3, 12])
def _gradients_first_clipped_through_data_in_a_later_step_are_refused_in_that_step(
    setup: Setup, configurations: list[int]
) -> None:
    for first in configurations:

        def loop(side: Side, setup: Setup, first: int = first) -> None:
            trained(side, setup, first + 2, lambda number: clamp_data(side) if number >= first else None)

        expected = expected_of(loop, setup)
        side = side_of(2, {})
        with pytest.raises(RuntimeError, match=r"the gradient of parameter \d+ .*\[ZERO-304\]$"):
            loop(side, setup)
        assert len(side.shown) == first
        assert_identical(expected[:first], side.shown, f"from step {first} on")


@case(2, marks=[pytest.mark.nightly])
def _sharpness_aware_passes_equal_ddp_in_no_sync_and_are_refused_outside(setup: Setup) -> None:
    """SAM: a first pass moves the parameters, which are restored between the second pass and the step."""

    def loop(side: Side, setup: Setup, is_local: bool) -> None:
        params = list(side.ddp.parameters())
        for batch in batches(setup.rank, 6):
            with side.ddp.no_sync() if is_local else nullcontext():
                loss_of(side.ddp, *batch).backward()
            with torch.no_grad():
                kept = [param.clone() for param in params]
                for param in params:
                    assert param.grad is not None
                    param.add_(param.grad, alpha=0.05)
            side.opt.zero_grad()
            loss_of(side.ddp, *batch).backward()
            with torch.no_grad():
                for param, value in zip(params, kept, strict=True):
                    param.copy_(value)
            side.opt.step()
            side.opt.zero_grad()
            side.show()

    waiting = {name: mode for name, mode in WAITING.items() if name.startswith("stage 1")}
    inside = {name: mode for name, mode in INSIDE.items() if name.startswith("stage 1")}
    match = r"between backward\(\) and the next forward.*as in SAM.*no_sync.*overlap=False.*\[ZERO-304\]$"
    assert_refused(partial(loop, is_local=False), setup, inside, match)
    partitioned = {name: mode for name, mode in MODES.items() if name.startswith("stage 2")}
    match = r"SAM's first pass runs in ddp\.no_sync\(\)\..*\[ZERO-401\]$"
    assert_refused(partial(loop, is_local=False), setup, partitioned, match)
    assert_equal_loops(partial(loop, is_local=False), setup, waiting)
    assert_equal_loops(partial(loop, is_local=True), setup, MODES)


# Updates that the loop drops


@case(2, 3, few=every_other(MODES), every=MODES)
def _an_update_dropped_after_a_step_inside_backward_is_refused(setup: Setup, configurations: Modes) -> None:
    def loop(side: Side, setup: Setup) -> None:
        for number, batch in enumerate(batches(setup.rank, 8)):
            loss_of(side.ddp, *batch).backward()
            if number not in (3, 5):
                side.opt.step()
            side.opt.zero_grad()
            side.show()

    match = r"got opt\.zero_grad\(\) \(rank \d.*overlap=False.*nonfinite='skip'.*\[ZERO-307\]$"
    assert_refused(loop, setup, {name: configurations[name] for name in INSIDE if name in configurations}, match)
    assert_equal_loops(loop, setup, {name: configurations[name] for name in WAITING if name in configurations})


@case(2, few=every_other(INSIDE, 1), every=INSIDE)
def _saves_after_a_dropped_update_are_refused_until_opt_step(setup: Setup, configurations: Modes) -> None:
    for name, mode in configurations.items():
        side = side_of(2, mode)
        taken = Snapshots(side.ddp, side.opt, folder=setup.folder / name, every=1)
        taken.load()
        trained(side, setup, 3)
        loss_of(side.ddp, *next(batches(setup.rank, 1, 2))).backward()
        ways: dict[str, list[Callable[[], Any]]] = {
            "opt.state_dict": [side.opt.state_dict],
            "opt.sharded_state_dict": [partial(side.opt.sharded_state_dict, side.ddp)],
            r"state_dict\(\) of the model": [
                side.ddp.module.state_dict,
                side.ddp.state_dict,
                partial(checkpoint.save, setup.folder / f"saved, {name}", side.ddp, side.opt),
                taken.step,
            ],
        }
        for what, saves in ways.items():
            for save in saves:
                with pytest.raises(RuntimeError, match=rf"got {what}.*Call opt\.step\(\), then save.*\[ZERO-307\]$"):
                    save()
        side.opt.step()  # all is as if nothing had been asked
        side.ddp.state_dict()
        assert len(side.opt.state_dict()["state"]) == len(list(side.ddp.parameters())), name
        taken.close()
        side.opt.zero_grad()
        with mock.patch.object(AdamW, "step", interrupted), pytest.raises(KeyboardInterrupt):
            loss_of(side.ddp, *next(batches(setup.rank, 1, 4))).backward()
        for save in (side.ddp.state_dict, side.opt.state_dict, side.opt.step):
            with pytest.raises(RuntimeError, match=r"may be half updated\. Load a checkpoint.*\[ZERO-308\]$"):
                save()


def interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


SAVED_MODES = WAITING | {
    "stage 1, cut": {"overlap": False, "partition": "elements"},
    "stage 2, late": {"stage": 2, "overlap": False, "sync": "forward", "partition": "elements"},
}


@case(
    *(2, 3),
    few=[(place % 2 == 0, name) for place, name in enumerate(SAVED_MODES)],
    every=[(place % 2 == 1, name) for place, name in enumerate(SAVED_MODES)],
)
def _a_gan_saved_with_leftover_gradients_has_the_plain_state(
    setup: Setup, configurations: Sequence[tuple[bool, str]]
) -> None:
    """As in HiFi-GAN's script: the judge is stepped, then the maker's loss leaves gradients in it."""

    def save(side: Side, number: int, all_save: bool) -> Any:
        if number == 3 and isinstance(side.opt, ZeroRedundancyOptimizer):
            side.opt.consolidate_state_dict(1)
        state = side.opt.state_dict() if all_save or setup.rank == 0 else None
        options = StateDictOptions(full_state_dict=True, cpu_offload=False)
        named = get_optimizer_state_dict(side.ddp, side.opt, options=options) if all_save else None
        for one in filter(None, (state, named)):
            for group in one["param_groups"]:
                group.pop("param_names", None)
        return copy.deepcopy([state, named, side.ddp.state_dict()])

    def loop(side: Side, setup: Setup, all_save: bool) -> None:
        torch.manual_seed(5)
        maker = DistributedDataParallel(nn.Linear(3, 8))
        made_by = AdamW(maker.parameters(), lr=1e-2)
        for number, (inputs, targets) in enumerate(batches(setup.rank, 4)):
            fake = maker(targets)
            side.opt.zero_grad()
            (loss_of(side.ddp, inputs, targets) - loss_of(side.ddp, fake.detach(), targets)).backward()
            side.opt.step()
            made_by.zero_grad()
            loss_of(side.ddp, fake, targets).backward()
            made_by.step()
            side.shown.append(save(side, number, all_save))
        side.show()

    expected = {all_save: expected_of(partial(loop, all_save=all_save), setup) for all_save in (True, False)}
    for all_save, name in configurations:
        mode = SAVED_MODES[name]
        side, again = side_of(setup.world_size, mode), side_of(setup.world_size, mode)
        loop(side, setup, all_save)
        assert_identical(expected[all_save], side.shown, name)
        folder = setup.folder / f"saved, {name}"
        checkpoint.save(folder / "checkpoint", side.ddp, side.opt)
        taken = Snapshots(side.ddp, side.opt, folder=folder / "snapshots", every=1)
        taken.load()
        taken.step()
        taken.close()
        checkpoint.load(folder / "checkpoint", again.ddp, again.opt)
        assert_identical(save(side, 0, all_save), save(again, 0, all_save), name)
        dist.barrier()


# Steps without gradients


@case(2, 3, few=[False], every=[True])
def _a_step_without_any_gradient_changes_nothing(setup: Setup, configurations: list[bool]) -> None:
    (is_full,) = configurations

    def loop(side: Side, setup: Setup) -> None:
        side.opt.zero_grad()
        side.opt.step()
        for number, batch in enumerate(batches(setup.rank, 6)):

            def closure(number: int = number, batch: tuple[Tensor, Tensor] = batch) -> Tensor | None:
                if number in (0, 3):
                    return None
                loss = loss_of(side.ddp, *batch)
                loss.backward()
                return loss

            assert (side.opt.step(closure) is None) == (number in (0, 3))
            side.opt.zero_grad()
            side.show()

    def step_apart(side: Side, setup: Setup) -> None:
        for number, batch in enumerate(batches(setup.rank, 6)):
            if number not in (0, 3):
                loss_of(side.ddp, *batch).backward()
            side.opt.step()
            side.opt.zero_grad()
            side.show()

    for place, used in enumerate((loop, step_apart)):
        assert_equal_loops(used, setup, MODES if is_full else every_other(MODES, place))


@case(2, few=every_other(MODES, 1), every=MODES)
def _an_update_dropped_after_a_reset_is_refused_in_the_next_step(setup: Setup, configurations: Modes) -> None:
    """Backward is interrupted before it reaches DDP, which can go on."""

    def interrupt(grad: Tensor) -> None:
        raise KeyError("interrupted")

    def loop(side: Side, setup: Setup) -> None:
        for number, batch in enumerate(batches(setup.rank, 4)):
            loss = loss_of(side.ddp, *batch)
            if number == 1:
                loss.register_hook(interrupt)
                with pytest.raises(KeyError):
                    loss.backward()
                if isinstance(side.opt, ZeroRedundancyOptimizer):
                    side.opt.reset()
                side.opt.zero_grad()
                continue
            loss.backward()
            if number:
                side.opt.step()
            side.opt.zero_grad()
            if number:
                side.show()

    assert_equal_loops(loop, setup, {name: configurations[name] for name in WAITING if name in configurations})
    inside = {name: configurations[name] for name in INSIDE if name in configurations}
    assert_refused(loop, setup, inside, r"called once for 2 backward passes.*\[ZERO-307\]$")


# Gradients that nothing has averaged


@case(2, few=[(0, 0), (10, 1)], every=[(0, 1), (10, 0)])
def _passes_around_ddp_that_add_to_averages_are_refused(setup: Setup, configurations: list[tuple[int, int]]) -> None:
    """From a pass on, in every other mode, from one of the first two on."""
    for first, start in configurations:

        def loop(side: Side, setup: Setup, first: int = first) -> None:
            for number, batch in enumerate(batches(setup.rank, first + 2)):
                loss_of(side.ddp, *batch).backward()
                if number >= first:
                    loss_of(side.ddp.module, *batch).backward()
                side.opt.step()
                side.opt.zero_grad()
                side.show()

        modes = every_other(MODES, start)
        assert_refused(loop, setup, modes, r"\[ZERO-(30[24]|403)\]$")


@case(2, 3, marks=[pytest.mark.nightly])
def _penalties_that_are_equal_on_all_ranks_may_be_added_around_ddp(setup: Setup) -> None:
    def loop(side: Side, setup: Setup) -> None:
        params = list(side.ddp.parameters())
        for number, batch in enumerate(batches(setup.rank, 12)):
            loss_of(side.ddp, *batch).backward()
            step_on(side.opt, torch.stack([param.square().sum() for param in params[number % 2 :]]).mean())
            side.show()

    assert_equal_loops(loop, setup, MODES)


def _double(net: nn.Module) -> None:
    net.double()


def _there_and_back(net: nn.Module) -> None:
    net.double().float()


def _replace(net: nn.Module) -> None:
    net[0].weight = nn.Parameter(net[0].weight.detach() + 0.01)  # type: ignore[index]


def _assign(net: nn.Module) -> None:
    net.load_state_dict({name: one.clone() for name, one in net.state_dict().items()}, assign=True)


LOST: dict[Callable[[nn.Module], None], str] = {
    _double: "converted",
    _there_and_back: "converted",
    _replace: "replaced",
    _assign: "replaced",
}
LOSING = {"stage 1": INSIDE["stage 1"], "stage 2": INSIDE["stage 2"], "standalone": STANDALONE}


@case(2, few=pairwise(list(LOST), (0, 3, 10), list(LOSING)), every=[*product(LOST, (0, 3, 10), LOSING)])
def _converted_and_replaced_parameters_are_named(
    setup: Setup, configurations: list[tuple[Callable[[nn.Module], None], int, str]]
) -> None:
    for change, first, name in configurations:
        if change is _assign and name == "standalone":
            continue  # nothing has a gradient: nothing is stepped, as by the plain optimizer
        side = side_of(2, LOSING[name])
        trained(side, setup, first)
        change(side.ddp.module)
        dtype = next(side.ddp.parameters()).dtype
        inputs, targets = next(batches(setup.rank, 1, 1))
        loss_of(side.ddp, inputs.to(dtype), targets.to(dtype)).backward()
        with pytest.raises(RuntimeError, match=rf"'0\.weight' was {LOST[change]} .*\[ZERO-30[128]\]$"):
            side.opt.step()


@case(2)
def _a_parameter_replaced_in_the_model_is_refused_with_its_name(setup: Setup) -> None:
    side = side_of(2, INSIDE["stage 2"])
    net = side.ddp.module
    for number, batch in enumerate(batches(setup.rank, 4)):
        if number == 3:
            net[0].weight = nn.Parameter(net[0].weight.detach() + 0.01)
        for param in net.parameters():
            param.grad = None
        loss = loss_of(side.ddp, *batch)
        if number < 3:
            loss.backward()
            side.opt.step()
    with pytest.raises(RuntimeError, match=r"'0\.weight' was replaced .*\[ZERO-301\]$"):
        loss.backward()


@case(2, few=[(0, 0), (3, 1)], every=[*product(range(4), (0, 1))])
def _a_second_opt_step_after_one_backward_pass_is_refused_where_a_hook_steps(
    setup: Setup, configurations: list[tuple[int, int]]
) -> None:
    """While a late sync is under way, parameters are of a class of their own."""
    for twice, start in configurations:

        def loop(side: Side, setup: Setup, twice: int = twice) -> None:
            for number, batch in enumerate(batches(setup.rank, twice + 2)):
                loss_of(side.ddp, *batch).backward()
                side.opt.step()
                side.show()
                if number == twice:
                    side.opt.step()
                side.opt.zero_grad()

        modes = every_other(MODES, start)
        without = {name: mode for name, mode in modes.items() if mode.get("overlap") is False}
        assert_equal_loops(loop, setup, without)
        others = {name: mode for name, mode in modes.items() if name not in without}
        match = r"opt\.step\(\) has taken the step of the last backward pass .*overlap=False.*\[ZERO-308\]$"
        assert_refused(loop, setup, others, match)


@case(2, few=every_other(MODES), every=MODES)
def _steps_in_inference_mode_equal_ddp(setup: Setup, configurations: Modes) -> None:
    """State that the first step made there would be refused in the next backward pass."""

    def loop(side: Side, setup: Setup) -> None:
        for batch in batches(setup.rank, 4):
            loss_of(side.ddp, *batch).backward()
            with torch.inference_mode():
                side.opt.step()
                side.opt.zero_grad()
            side.show()

    assert_equal_loops(loop, setup, configurations)


@case(2, 3, few=[(True, 10), (False, 2)], every=[(True, 2), (False, 10)])
def _gradients_averaged_by_the_loop_equal_ddp_without_a_hook_and_are_refused_with_one(
    setup: Setup, configurations: list[tuple[bool, int]]
) -> None:
    def loop(side: Side, setup: Setup, around: bool, stops: int = 4, steps: int = 4) -> None:
        for number, batch in enumerate(batches(setup.rank, steps)):
            with nullcontext() if around else side.ddp.no_sync():
                loss_of(side.ddp.module if around else side.ddp, *batch).backward()
            for param in side.ddp.parameters() if number < stops else ():
                assert param.grad is not None
                dist.all_reduce(param.grad)
                param.grad /= setup.world_size
            side.opt.step()
            side.opt.zero_grad()
            side.show()

    for around, stops in configurations:
        assert_equal_loops(partial(loop, around=around), setup, {"standalone": STANDALONE})
        match = r"If the loop averages gradients itself.*overlap=False.*\[ZERO-308\]$"
        inside = {name: INSIDE[name] for name in ("stage 1", "stage 2")}
        assert_refused(partial(loop, around=around), setup, inside, match)
        lost = {"standalone": STANDALONE}
        assert_refused(partial(loop, around=around, stops=stops, steps=stops + 1), setup, lost, r"\[ZERO-302\]$")


test_loops = case.each()


def _often(setup: Setup, body: Callable[[Setup], None], times: int) -> None:
    for _ in range(times):
        body(setup)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("body", "times"),
    [
        (partial(_one_rank_saves_plain_state_while_others_train, configurations=MODES), 50),  # four saves in each mode
        (_gradients_clipped_through_data_from_the_first_step_on_equal_ddp, 200),
    ],
)
def test_two_idioms_200_times_under_load(body: Callable[[Setup], None], times: int) -> None:
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        Cases.pool_of(2).run(_often, body, times, timeout=3000.0, group_timeout=60.0)
    finally:
        for process in busy:
            process.kill()
            process.wait()
