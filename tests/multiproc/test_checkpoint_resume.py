"""Checkpoints: training goes on bit for bit, whoever saved and whoever loads, and whenever a rank was killed."""

import hashlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from ddp_zero import ZeroRedundancyOptimizer, checkpoint, hook_with_zero_step, hook_with_zero_step_interleaved
from ddp_zero.checkpoint.folder import complete_in
from ddp_zero.optimizer import states_of
from tests.multiproc.cases import (
    assert_equal_models,
    assert_identical,
    batches,
    build_model,
    loss_of,
    split_groups,
    sum_in_rank_order,
)
from tests.multiproc.harness import Setup, kill_this_process, run_ranks, run_ranks_to_end
from tests.pairwise import pairwise

Group = dist.ProcessGroup | None
OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.99)}
STEPS = 3
_STORES: Any = dist  # whose types know no stores
_PrefixStore = _STORES.PrefixStore


@dataclass
class Run:
    """A model in training; gradients are summed in rank order, so that bits do not depend on DDP's buckets."""

    model: DistributedDataParallel
    optimizer: Optimizer
    rank: int

    def train(self, seed: int) -> None:
        """Some steps; the learning rate falls, so that a resumed one must have been saved."""
        for inputs, targets in batches(self.rank, STEPS, seed):
            self.optimizer.zero_grad()
            loss_of(self.model, inputs, targets).backward()
            self.optimizer.step()
            for group in self.optimizer.param_groups:
                group["lr"] *= 0.9

    def state(self) -> dict[int, dict[str, Any]]:
        """This rank's optimizer state, by index."""
        if isinstance(self.optimizer, ZeroRedundancyOptimizer):
            return states_of(self.optimizer).owned_state()
        state: dict[int, dict[str, Any]] = self.optimizer.state_dict()["state"]
        return state


def wrap(group: Group, *, views: bool = False) -> DistributedDataParallel:
    return DistributedDataParallel(
        build_model(), process_group=group, bucket_cap_mb=0.0015, gradient_as_bucket_view=views
    )


def plain(rank: int, group: Group) -> Run:
    model = wrap(group)
    model.register_comm_hook(group, sum_in_rank_order)
    return Run(model, AdamW(split_groups(model, 2), **OPTIONS), rank)


def standalone(rank: int, group: Group) -> Run:
    model = wrap(group)
    model.register_comm_hook(group, sum_in_rank_order)
    return Run(model, ZeroRedundancyOptimizer(split_groups(model, 2), AdamW, process_group=group, **OPTIONS), rank)


def overlapped(rank: int, group: Group, stage: int = 1) -> Run:
    model = wrap(group, views=stage == 2)
    opt = ZeroRedundancyOptimizer(
        split_groups(model, 2),
        AdamW,
        process_group=group,
        stage=stage,
        overlap_with_ddp=True,
        parameters_as_bucket_view=True,
        **OPTIONS,
    )
    if stage == 1:
        model.register_comm_hook(group, hook_with_zero_step(sum_in_rank_order, model, opt, shard_buckets=True))
    else:
        model.register_comm_hook(group, hook_with_zero_step_interleaved(None, model, opt, shard_buckets=True))
    return Run(model, opt, rank)


MODES: dict[str, Callable[[int, Group], Run]] = {
    "plain": plain,
    "standalone": standalone,
    "overlapped": overlapped,
    "stage 2": partial(overlapped, stage=2),
}


def plain_state(run: Run) -> tuple[dict[str, Any], dict[str, Any]]:
    return run.model.module.state_dict(), run.optimizer.state_dict()


# The matrix


def _resumes_bit_for_bit(
    setup: Setup, root: str, saved_at: list[int], loaded_at: list[int], resumes: list[tuple[Any, ...]]
) -> int:
    """A number of ranks and a mode resume what others saved; ends as plain training does. Returns how many."""
    groups: dict[int, Group] = {n: dist.new_group(list(range(n))) for n in {*saved_at, *loaded_at}}
    halfway: dict[int, str] = {}
    for n in saved_at:
        for mode, build in MODES.items():
            if setup.rank < n:
                run, unbroken = build(setup.rank, groups[n]), plain(setup.rank, groups[n])
                run.train(0)
                unbroken.train(0)
                if setup.rank == 0 and n not in halfway:
                    torch.save(plain_state(unbroken), f"{root}/plain-{n}.pt")
                checkpoint.save(f"{root}/{mode}-{n}", run.model, run.optimizer, step=STEPS)
                run.train(1)
                unbroken.train(1)
                assert_equal_models(unbroken.model, run.model, f"{mode} at {n} ranks, after saving")
            halfway[n] = f"{root}/plain-{n}.pt"
        dist.barrier()

    compared = 0
    for place, (n, mode) in enumerate(product(loaded_at, MODES)):
        if setup.rank >= n:
            continue
        resumed = MODES[mode](setup.rank, groups[n])
        sources = [(*saved,) for *saved, at, by in resumes if (at, by) == (n, mode)]
        start = place % max(
            1, len(sources)
        )  # the first is loaded into a fresh optimizer, the others over what was there
        for saved_n, saved_mode in sources[start:] + sources[:start]:
            expected = plain(setup.rank, groups[n])
            weights, state = torch.load(halfway[saved_n], weights_only=True)
            expected.model.module.load_state_dict(weights)
            expected.optimizer.load_state_dict(state)
            loaded = checkpoint.load(f"{root}/{saved_mode}-{saved_n}", resumed.model, resumed.optimizer)
            assert (loaded.step, loaded.skipped, loaded.notes) == (STEPS, (), ())
            expected.train(1)
            resumed.train(1)
            told = f"{mode} at {n} ranks, from {saved_mode} at {saved_n}"
            assert_equal_models(expected.model, resumed.model, told)
            whole = expected.state()
            for index, state in resumed.state().items():
                assert_identical(whole[index], state, f"state of parameter {index}, {told}")
            compared += 1
    return compared


def test_every_mode_and_world_size_resumes_every_other_bit_for_bit(tmp_path: Path) -> None:
    """4 modes x 3 numbers of ranks save, the same load: every two modes, two numbers, and one of each meet."""
    assert _resume(tmp_path, SIZES[:3], pairwise(SIZES[:3], list(MODES), SIZES[:3], list(MODES))) >= 16


@pytest.mark.nightly
def test_all_256_resumed_runs_equal_plain_ones(tmp_path: Path) -> None:
    assert _resume(tmp_path, SIZES, [*product(SIZES, MODES, SIZES, MODES)]) == 256


@pytest.mark.nightly
def test_four_ranks_resume_on_eight_and_back(tmp_path: Path) -> None:
    """A rank of eight owns at most one or two of the parameters."""
    assert _resume(tmp_path, [4, 8], [*product([4, 8], MODES, [4, 8], MODES)]) == 64


SIZES = [1, 2, 3, 4]


def _resume(folder: Path, sizes: list[int], resumes: list[tuple[Any, ...]]) -> int:
    """How many runs were resumed at the given sizes, all of them by the first rank."""
    arguments = str(folder), sizes, sizes, resumes
    counts = run_ranks(_resumes_bit_for_bit, max(sizes), *arguments, timeout=400, group_timeout=300)
    assert counts == [sum(rank < at for _, _, at, _ in resumes) for rank in range(max(sizes))]
    return len(resumes)


# Killed ranks

ROUNDS, MANY_ROUNDS = 8, 50
ROUND_STEPS = 12


def _digest(model: nn.Module) -> str:
    joined = b"".join(bytes(param.detach().view(torch.uint8).view(-1).tolist()) for param in model.parameters())
    return hashlib.sha256(joined).hexdigest()


def _one_step(run: Run, step: int) -> None:
    ((inputs, targets),) = batches(run.rank, 1, seed=step)
    run.optimizer.zero_grad()
    loss_of(run.model, inputs, targets).backward()
    run.optimizer.step()


def _unbroken_digests(setup: Setup, steps: int) -> list[str]:
    """Of the model before any step and after each, trained with the plain optimizer."""
    run = plain(setup.rank, None)
    digests = [_digest(run.model)]
    for step in range(steps):
        _one_step(run, step)
        digests.append(_digest(run.model))
    return digests


def _trains_until_it_is_killed(
    setup: Setup, root: str, mode: str, victims: list[int], delay: float, background: bool, digests: list[str]
) -> int:
    """Resume, and save after every step; a thread kills this process in the middle of it. Returns the last step."""
    run = MODES[mode](setup.rank, None)
    done = 0
    if complete_in(Path(root)):
        done = checkpoint.load(root, run.model, run.optimizer).step
        assert _digest(run.model) == digests[done], f"step {done} was not what it is in the unbroken run"
    if setup.rank in victims:

        def kill() -> None:
            begin = time.process_time()  # of the CPU: a loaded machine takes fewer steps in a second
            while time.process_time() - begin < delay:
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=kill, daemon=True).start()
    for step in range(done, done + ROUND_STEPS):
        _one_step(run, step)
        checkpoint.save(root, run.model, run.optimizer, step=step + 1, keep=2, background=background)
    checkpoint.wait()
    return done + ROUND_STEPS


class _DiesOnceItsAddressIsKnown(_STORES.Store):  # type: ignore[misc]
    """What a rank tells the others goes through; the first thing it asks for kills it."""

    def __init__(self, prefix: str, store: Any) -> None:
        super().__init__()
        self._store = _PrefixStore(prefix, store)

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        value: bytes = self._store.get(key)
        return value

    def add(self, key: str, amount: int) -> int:
        total: int = self._store.add(key, amount)
        return total

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        names = [key.removeprefix("ddp_zero/attempt/") for key in keys]
        if any(name.count("/") > 1 for name in names):  # Gloo's own, after the ranks have seen that all are there
            kill_this_process()
        self._store.wait(keys, timeout)


def _dies_while_its_first_save_connects(setup: Setup, root: str) -> float:
    run = MODES["standalone"](setup.rank, None)
    if setup.rank == 1:
        _STORES.PrefixStore = _DiesOnceItsAddressIsKnown
    begin = time.monotonic()
    # the second message where the operating system has taken the call for the rank that was about to die
    with pytest.raises(RuntimeError, match=r"reach their first save or load within|take part in a save or load"):
        checkpoint.save(root, run.model, run.optimizer)
    return time.monotonic() - begin


def test_a_rank_that_dies_while_its_first_save_connects_is_missed_in_time(tmp_path: Path) -> None:
    """Gloo tries five times to reach an address that is known; that once took five times the group's time-out."""
    survivor, victim = run_ranks_to_end(_dies_while_its_first_save_connects, 2, str(tmp_path), group_timeout=10)
    assert victim.killed
    assert survivor.result is not None, survivor.error
    assert survivor.result < 35


@pytest.mark.parametrize("rounds", [ROUNDS, pytest.param(MANY_ROUNDS, marks=pytest.mark.nightly)])
def test_a_rank_killed_at_any_moment_leaves_a_checkpoint_that_continues_as_if_nothing_had_happened(
    rounds: int, tmp_path: Path
) -> None:
    """SIGKILL to one rank or both at random moments of training that saves after every step."""
    chance = random.Random(6)
    digests = run_ranks(_unbroken_digests, 2, 1 + rounds * ROUND_STEPS)[0]
    root, steps, kills, torn = tmp_path / "run", [0], 0, 0
    while kills < rounds:
        mode, background = chance.choice(list(MODES)), chance.random() < 0.5
        victims = chance.choice([[0], [1], [0, 1]])
        delay = chance.uniform(0.0, 0.25)
        outcomes = run_ranks_to_end(
            _trains_until_it_is_killed, 2, str(root), mode, victims, delay, background, digests, group_timeout=10
        )
        for outcome in outcomes:
            told = outcome.error or ""
            assert outcome.result is not None or any(one.killed for one in outcomes), told
            assert "unbroken" not in told, told
        kills += any(outcome.killed for outcome in outcomes)
        torn += any(path.name.startswith(".step") for path in root.iterdir()) if root.is_dir() else 0
        found = complete_in(root)
        assert len(found) <= 3
        steps.append(max((int(path.name[5:13]) for path in found), default=0))
        assert steps[-1] >= steps[-2], "a checkpoint that was complete is gone"
    assert torn > rounds // 10, "the kills did not fall into saves"
    (final,) = set(run_ranks(_trains_until_it_is_killed, 2, str(root), "stage 2", [], 0.0, False, digests))
    assert final == steps[-1] + ROUND_STEPS
    assert steps[-1] > rounds // 2, "training hardly went on between the kills"
