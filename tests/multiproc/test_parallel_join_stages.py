"""Uneven inputs of pipelines: all ranks of a pipeline leave Join together, whichever the schedule."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import cycle, product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from ddp_zero.parallel import ParallelOptimizer
from tests import internals
from tests.multiproc.cases import assert_identical, sum_in_rank_order
from tests.multiproc.harness import Cases, Setup
from tests.multiproc.joined_training import FailingAdamW
from tests.multiproc.parallel_models import CLIP, OPTIONS, scale_gradients, tied_group
from tests.multiproc.pipelines import LOOPED, WEIGHTS_APART, Piped, mesh_of_stages
from tests.multiproc.stages import Stages

UNEVEN = ((3, 1), (0, 2), (2, 5))
"""Batches of each pipeline."""
MODES: tuple[dict[str, Any], ...] = (
    {},
    {"overlap": False},
    {"stage": 2},
    {"stage": 2, "overlap": False},
    {"max_grad_norm": CLIP},
    {"stage": 2, "max_grad_norm": CLIP},
)

case = Cases(timeout=240, group_timeout=60)


def _sharded(pair: Any, groups: Any, mode: Mapping[str, Any]) -> ParallelOptimizer:
    arguments: dict[str, Any] = {"mesh": pair.mesh, "data_parallel_dim": "data", "pipeline_dim": "pipe"}
    return ParallelOptimizer(pair.model, AdamW, groups, **arguments, **mode, **OPTIONS)


def train_ours(ours: Any, opt: ParallelOptimizer, steps: int, **join_options: Any) -> list[float]:
    norms = []
    with Join([opt], **join_options):
        for step in range(steps):
            opt.zero_grad()
            for group in opt.param_groups:
                group["lr"] *= 0.9
            ours.run(step)
            opt.step()
            assert opt.last_step is not None
            assert opt.last_step.stepped
            norms.append(float(opt.last_step.grad_norm or 0.0))
    return norms


def _train_plain(
    plain: Any, params: Any, uneven: Sequence[int], norms: Sequence[float], reduce: Callable[[], None], counts_all: bool
) -> None:
    """Every pipeline goes on to the end, with losses of zero once it has no inputs."""
    place = plain.mesh.get_local_rank("data")
    last = [list(norms)]
    dist.broadcast_object_list(last, src=dist.get_global_rank(plain.data, uneven.index(max(uneven))), group=plain.data)
    expected = AdamW(params.parameters(), **OPTIONS)
    for step in range(max(uneven)):
        weight = 1.0 if step < uneven[place] else 0.0
        plain.weight, plain.scale = weight, partial(torch.mul, torch.tensor(weight))
        expected.zero_grad()
        plain.run(step)
        reduce()
        if not counts_all and any(step >= steps for steps in uneven):
            for param in params.parameters():
                param.grad.mul_(2)
        if last[0][step]:
            scale_gradients(params, last[0][step])
        expected.param_groups[0]["lr"] *= 0.9
        expected.step()


def _modes(wraps: bool, is_short: bool) -> tuple[dict[str, Any], ...]:
    without: tuple[dict[str, Any], ...] = ({}, {"max_grad_norm": CLIP})
    return without if not wraps else (MODES[2], MODES[4]) if is_short else MODES


Configuration = tuple[Any, bool, tuple[int, int], dict[str, Any], bool]
"""A schedule, whether stages are DDP models, batches, options, and whether ranks that have joined count in averages."""


def _configurations() -> list[Configuration]:
    found: list[Configuration] = []
    for schedule, wraps in product((Schedule1F1B, ScheduleGPipe), (False, True)):
        is_short = schedule is ScheduleGPipe
        for uneven, mode in product(UNEVEN[:1] if is_short else UNEVEN, _modes(wraps, is_short)):
            counting = (True,) if wraps or uneven != (3, 1) else (True, False)
            found += [(schedule, wraps, uneven, mode, counts_all) for counts_all in counting]
    return found


def _hand_over(plain: Any, mode: Mapping[str, Any]) -> None:
    """In stage 2 sums are in the order of ranks."""
    for one in getattr(plain, "models", [plain.model]):
        if mode.get("stage") == 2 and isinstance(one, DistributedDataParallel):
            one.register_comm_hook(plain.data, sum_in_rank_order)


@case(
    4,
    few=[
        (Schedule1F1B, False, UNEVEN[0], {}, False),
        (Schedule1F1B, True, UNEVEN[1], MODES[5], True),
        (Schedule1F1B, True, UNEVEN[2], MODES[1], True),
        (ScheduleGPipe, False, UNEVEN[0], {"max_grad_norm": CLIP}, True),
        (ScheduleGPipe, True, UNEVEN[0], MODES[2], True),
    ],
    every=_configurations(),
)
def _stages_with_a_shared_embedding_equal_the_plain_optimizer(
    setup: Setup, configurations: list[Configuration]
) -> None:
    mesh = mesh_of_stages()
    tied = tied_group(mesh)
    place = mesh.get_local_rank("data")
    for schedule, wraps, uneven, mode, counts_all in configurations:
        learns = not (wraps and schedule is ScheduleGPipe)
        ours = Stages(mesh, schedule, wraps, learns_shapes=learns)
        plain = Stages(mesh, schedule, wraps, learns_shapes=not wraps)
        _hand_over(plain, mode)
        opt = _sharded(ours, ours.groups(tied), mode)
        before = [param.detach().clone() for param in ours.part.parameters()]
        norms = train_ours(ours, opt, uneven[place], divide_by_initial_world_size=counts_all)
        _train_plain(plain, plain.part, uneven, norms, partial(plain.reduce_by_hand, tied), counts_all)
        what = f"{schedule.__name__} with {mode}, DDP {wraps}, {uneven} batches, all {counts_all}"
        _compare(ours.part, plain.part, before, what)


def _compare(ours: Any, plain: Any, before: Sequence[torch.Tensor], what: str) -> None:
    for (name, mine), other, old in zip(ours.named_parameters(), plain.parameters(), before, strict=True):
        assert_identical(other.detach(), mine.detach(), f"{name}: {what}")
        assert not torch.equal(mine, old), f"{name} has not moved: {what}"


@case(4, marks=[pytest.mark.nightly])
def _several_stages_on_a_rank_equal_the_plain_optimizer(setup: Setup) -> None:
    mesh = mesh_of_stages()
    place = mesh.get_local_rank("data")
    for name in (*LOOPED, *WEIGHTS_APART):
        for wraps in (False, True) if name in LOOPED else (False,):
            for uneven in UNEVEN if name == LOOPED[0] else UNEVEN[:1]:
                for mode in _modes(wraps, is_short=name != LOOPED[0]):
                    ours = Piped(mesh, name, wraps, learns_shapes=True)
                    plain = Piped(mesh, name, wraps, learns_shapes=not wraps)
                    _hand_over(plain, mode)
                    opt = _sharded(ours, ours.groups(), mode)
                    before = [param.detach().clone() for param in ours.parts.parameters()]
                    norms = train_ours(ours, opt, uneven[place])
                    reduce = (lambda: None) if wraps else plain.average
                    _train_plain(plain, plain.parts, uneven, norms, reduce, counts_all=True)
                    _compare(ours.parts, plain.parts, before, f"{name} with {mode}, DDP {wraps}, {uneven} batches")


LEAVING: list[tuple[str, bool, dict[str, Any]]] = [
    ("1F1B", True, {}),
    ("1F1B", False, {"max_grad_norm": CLIP}),
    (LOOPED[0], True, {}),
]
EARLY = (((1, 2, 2, 2), "0"), ((2, 1, 2, 2), "1"), ((1, 2, 1, 2), "0, 2"), ((2, 2, 2, 0), "3"))


@case(4, few=[*zip(cycle(LEAVING), EARLY, strict=False)], every=[*product(LEAVING, EARLY)])
def _a_stage_that_leaves_before_the_rest_of_its_pipeline_is_named_on_all_ranks(
    setup: Setup, configurations: list[tuple[Any, tuple[tuple[int, ...], str]]]
) -> None:
    """At once: stages would wait for each other until the time-out."""
    mesh = mesh_of_stages()
    for (name, wraps, mode), (counts, left) in configurations:
        ours = Piped(mesh, name, wraps, learns_shapes=False)
        opt = _sharded(ours, ours.groups(), mode)
        with pytest.raises(RuntimeError, match=f"got global ranks {left} that have joined and .*ZERO-312"):
            train_ours(ours, opt, counts[setup.rank])
        dist.barrier()


@case(4)
def _runs_of_a_schedule_add_up_to_a_step(setup: Setup) -> None:
    mesh = mesh_of_stages()
    ours, plain = (Piped(mesh, "1F1B", wraps=False, learns_shapes=False) for _ in range(2))
    opt = _sharded(ours, ours.groups(), {})
    steps = (3, 1)
    with Join([opt]):
        for step in range(steps[mesh.get_local_rank("data")]):
            opt.zero_grad()
            ours.run(2 * step)
            ours.run(2 * step + 1)
            opt.step()
    expected = AdamW(plain.parts.parameters(), **OPTIONS)
    for step in range(3):
        plain.weight = 1.0 if step < steps[mesh.get_local_rank("data")] else 0.0
        expected.zero_grad()
        plain.run(2 * step)
        plain.run(2 * step + 1)
        plain.average()
        expected.step()
    for mine, other in zip(ours.parts.parameters(), plain.parts.parameters(), strict=True):
        assert_identical(other.detach(), mine.detach(), "two runs in each step")


@case(4)
def _a_rank_that_has_joined_and_fails_fails_all(setup: Setup) -> None:
    mesh = mesh_of_stages()
    for wraps in (False, True):
        ours = Piped(mesh, "1F1B", wraps, learns_shapes=False)
        arguments: dict[str, Any] = {"mesh": mesh, "data_parallel_dim": "data", "pipeline_dim": "pipe"}
        opt = ParallelOptimizer(ours.model, FailingAdamW, ours.groups(), **arguments, **OPTIONS)
        with pytest.raises(ArithmeticError if setup.rank == 0 else RuntimeError, match="of rank 0"):
            train_ours(ours, opt, (1, 3)[mesh.get_local_rank("data")])
        dist.barrier()


@case(4)
def _nothing_is_left_on_stages_after_join_or_an_exception_in_it(setup: Setup) -> None:
    mesh = mesh_of_stages()
    ours = Piped(mesh, "1F1B", wraps=True, learns_shapes=True)
    opt = _sharded(ours, ours.groups(), {})
    stage: Any = ours.schedule._stage
    with Join([opt]):
        assert "clear_runtime_states" in vars(stage)
        ours.run(0)
        opt.step()
    assert "clear_runtime_states" not in vars(stage)
    with suppress(ArithmeticError), Join([opt]):
        assert "clear_runtime_states" in vars(stage)
        raise ArithmeticError
    assert "clear_runtime_states" not in vars(stage)
    assert not internals.is_under_join(opt)


@case(4)
def _join_is_refused_where_the_optimizer_cannot_shadow_stages(setup: Setup) -> None:
    mesh = mesh_of_stages()
    ours = Piped(mesh, "1F1B", wraps=True, learns_shapes=False)
    opt = _sharded(ours, ours.groups(), {})
    for listed in ([ours.models[0], opt], [opt, ours.models[0]]):
        with pytest.raises(ValueError, match=r"Expected Join to list the ParallelOptimizer alone .*ZERO-312"):
            Join(listed)
    with pytest.raises(NotImplementedError, match=r"divide_by_initial_world_size=False.*ZERO-310"):
        Join([opt], divide_by_initial_world_size=False)
    with Join([opt]):  # a stage has been in one before
        ours.run(0)
        opt.step()


@case(4)
def _torch_alone_hangs_under_join_with_ddp_in_stages(setup: Setup) -> None:
    """Why Join lists the optimizer alone: DDP leaves ranks that have joined out of a schedule's reduction."""
    mesh = mesh_of_stages()
    if mesh.get_local_rank("pipe"):
        return
    model = DistributedDataParallel(torch.nn.Linear(2, 2), process_group=mesh.get_group("data"))
    seen: list[Any] = []
    shadow: Any = model._match_all_reduce_for_bwd_pass
    model._match_all_reduce_for_bwd_pass = lambda: seen.append(shadow())  # type: ignore[method-assign]
    with Join([model]):
        for _ in range(setup.rank // 2):
            with model.no_sync():  # as a schedule runs its forward passes
                model(torch.ones(1, 2))
    assert not seen, "the last backward pass would wait for ranks that have joined"


test_parallel_join_stages = case.each()
