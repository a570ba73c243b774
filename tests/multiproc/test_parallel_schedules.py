"""Every schedule of torch, with one or two stages on each rank, beside the plain optimizer under the same schedule."""

from collections.abc import Mapping
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from ddp_zero.parallel import ParallelOptimizer
from tests.multiproc.cases import assert_identical, sum_in_rank_order
from tests.multiproc.harness import Cases, Setup
from tests.multiproc.pipelines import LOOPED, SINGLE, STEPS, WEIGHTS_APART, Piped, mesh_of_stages

OPTIONS: dict[str, Any] = {"lr": 1e-2}

case = Cases(timeout=240, group_timeout=60)


def _train_beside_plain(ours: Piped, plain: Piped, mode: Mapping[str, Any], atol: float = 0.0) -> None:
    """Train, and compare after every step."""
    what = f"{type(ours.schedule).__name__}: {mode}"
    wraps = isinstance(ours.models[0], DistributedDataParallel)
    plainly_wrapped = isinstance(plain.models[0], DistributedDataParallel)
    if mode.get("stage") == 2 and plainly_wrapped:
        for one in plain.models:
            one.register_comm_hook(plain.data, sum_in_rank_order)
    expected = AdamW(plain.parts.parameters(), **OPTIONS)
    opt = _sharded(ours, mode)
    assert [member.stage for member in opt.members] == [mode.get("stage", 1) if wraps else 1] * len(opt.members)
    assert len(opt.members) == (len(ours.parts) if wraps else 1)
    before = [param.detach().clone() for param in ours.parts.parameters()]
    for step in range(STEPS):
        opt.zero_grad()
        expected.zero_grad()
        plain.run(step)
        ours.run(step)
        if not plainly_wrapped:
            plain.average()
        opt.step()
        expected.step()
        assert opt.last_step is not None
        assert opt.last_step.stepped
        for (name, mine), other in zip(ours.parts.named_parameters(), plain.parts.parameters(), strict=True):
            if atol:
                torch.testing.assert_close(mine, other, rtol=0, atol=atol)
            else:
                assert_identical(other.detach(), mine.detach(), f"{name} after step {step}: {what}")
        if step == 1 and not ours.is_v_shaped:
            ours.evaluate(step)
            plain.evaluate(step)
    for param, old in zip(ours.parts.parameters(), before, strict=True):
        assert not torch.equal(param, old), f"a parameter has not moved: {what}"


def _sharded(piped: Piped, mode: Mapping[str, Any]) -> ParallelOptimizer:
    arguments: dict[str, Any] = {"mesh": piped.mesh, "data_parallel_dim": "data", "pipeline_dim": "pipe"}
    return ParallelOptimizer(piped.model, AdamW, piped.groups(), **arguments, **mode, **OPTIONS)


Mode = dict[str, Any]
STAGES: list[Mode] = [{}, {"stage": 2}]
GIVEN: list[Mode] = [{}, {"overlap": False}, {"stage": 2}, {"stage": 2, "overlap": False}]
LEARNT: list[Mode] = [{}, {"stage": 2}, {"accumulate_in_fp32": True}, {"overlap": False}]
REFUSED: list[Mode] = [{}, {"overlap": False}, {"stage": 2}, {"stage": 2, "max_grad_norm": 1.0}]


@case(
    4,
    few=[*zip((*SINGLE, *LOOPED, *WEIGHTS_APART), 4 * (True, False), STAGES * 3 + STAGES[:1], strict=False)],
    every=[*product((*SINGLE, *LOOPED, *WEIGHTS_APART), (True, False), STAGES)],
)
def _stages_without_ddp_under_every_schedule_equal_plain_stages(
    setup: Setup, configurations: list[tuple[str, bool, Mode]]
) -> None:
    mesh = mesh_of_stages()
    for name, learns, mode in configurations:
        ours, plain = (Piped(mesh, name, wraps=False, learns_shapes=learns) for _ in range(2))
        _train_beside_plain(ours, plain, mode)


@case(4, few=[*zip((*SINGLE, *LOOPED), GIVEN, strict=True)], every=[*product((*SINGLE, *LOOPED), GIVEN)])
def _ddp_models_with_given_shapes_under_schedules_of_whole_backward_passes(
    setup: Setup, configurations: list[tuple[str, Mode]]
) -> None:
    mesh = mesh_of_stages()
    for name, mode in configurations:
        ours, plain = (Piped(mesh, name, wraps=True, learns_shapes=False) for _ in range(2))
        _train_beside_plain(ours, plain, mode)


@case(4, few=[*zip((*SINGLE, *LOOPED), LEARNT, strict=True)], every=[*product((*SINGLE, *LOOPED), LEARNT)])
def _stages_in_ddp_that_learn_shapes_equal_plain_stages(setup: Setup, configurations: list[tuple[str, Mode]]) -> None:
    """DDP alone fails in the second step under all of these but 1F1B, so plain stages are given their shapes."""
    mesh = mesh_of_stages()
    for name, mode in configurations:
        ours = Piped(mesh, name, wraps=True, learns_shapes=True)
        averages_twice = name in SINGLE and not mode.keys() & {"stage", "accumulate_in_fp32"}
        # 1F1B's own bits are compared in test_parallel_stages
        if averages_twice and not (name == "GPipe" and mode):
            # the first micro-batch of a step that learns shapes is averaged, and its average once more
            _train_beside_plain(ours, Piped(mesh, name, wraps=True, learns_shapes=False), mode, atol=1e-6)
        elif not averages_twice:
            _train_beside_plain(ours, Piped(mesh, name, wraps=True, learns_shapes=False), mode)


@case(4, marks=[pytest.mark.nightly])
def _ddp_alone_fails_where_it_learns_shapes(setup: Setup) -> None:
    """Why such runs are compared with ones that are given their shapes."""
    plain = Piped(mesh_of_stages(), "Interleaved1F1B", wraps=True, learns_shapes=True)
    plain.run(0)
    with pytest.raises(RuntimeError):
        plain.run(1)


@case(
    4,
    few=[*zip((*WEIGHTS_APART, WEIGHTS_APART[0]), 2 * (True, False), REFUSED, strict=True)],
    every=[*product(WEIGHTS_APART, (True, False), REFUSED)],
)
def _schedules_that_pass_ddp_by_are_refused_on_all_ranks_in_the_first_step(
    setup: Setup, configurations: list[tuple[str, bool, Mode]]
) -> None:
    mesh = mesh_of_stages()
    for name, learns, mode in configurations:
        piped = Piped(mesh, name, wraps=True, learns_shapes=learns)
        opt = _sharded(piped, mode)
        before = [param.detach().clone() for param in piped.parts.parameters()]
        piped.run(0)
        with pytest.raises(RuntimeError, match=r"not started DDP's reducer.*ZERO-302"):
            opt.step()
        for param, old in zip(piped.parts.parameters(), before, strict=True):
            assert torch.equal(param, old), f"{name} with {mode}"
        dist.barrier()  # nothing is left over that it could meet


@case(4)
def _a_parameter_group_over_two_ddp_models_is_refused(setup: Setup) -> None:
    piped = Piped(mesh_of_stages(), "LoopedBFS", wraps=True, learns_shapes=False)
    with pytest.raises(ValueError, match=r"one DDP model over parameter group 0, got 2: '0', '1'\. .*ZERO-202"):
        ParallelOptimizer(piped.model, AdamW, mesh=piped.mesh, data_parallel_dim="data", pipeline_dim="pipe", **OPTIONS)


test_schedules = case.each()
