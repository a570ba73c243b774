"""Every schedule of torch, with one or two stages on each rank, beside the plain optimizer under the same schedule."""

from collections.abc import Mapping
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from ddp_zero.parallel import ParallelOptimizer
from tests.multiproc.cases import assert_identical, sum_in_rank_order
from tests.multiproc.harness import Cases, Setup

MICRO_BATCHES, STEPS = 4, 4
OPTIONS: dict[str, Any] = {"lr": 1e-2}
SINGLE = ("GPipe", "1F1B")
LOOPED = ("Interleaved1F1B", "LoopedBFS")
WEIGHTS_APART = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
"""Gradients of weights apart from those of inputs: DDP's reducer never starts, on some ranks or all."""
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")

case = Cases(timeout=240, group_timeout=60)


class Piped:
    """One rank's stages under a schedule.

    Args:
        mesh: with dimensions ``data`` and ``pipe``.
        name: of a schedule of torch.
        wraps: whether each stage is a DDP model.
        learns_shapes: whether the schedule runs each stage once to learn shapes, in the first step and after an
            evaluation.
    """

    def __init__(self, mesh: DeviceMesh, name: str, wraps: bool, learns_shapes: bool) -> None:
        self.mesh, self.data = mesh, mesh.get_group("data")
        place, ranks = mesh.get_local_rank("pipe"), mesh["pipe"].size()
        total = ranks * (1 if name in SINGLE else 2)
        numbers = [place] if name in SINGLE else [place, total - 1 - place if name in V_SHAPED else place + ranks]
        self.parts = nn.ModuleList(map(_part, numbers))
        wrapped: list[nn.Module] = list(self.parts)
        if wraps:
            options: dict[str, Any] = {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0002}
            wrapped = [DistributedDataParallel(one, process_group=self.data, **options) for one in self.parts]
        self.models: Any = nn.ModuleList(wrapped)
        example = torch.zeros(2, 6, requires_grad=True)
        shapes: dict[str, Any] = {} if learns_shapes else {"input_args": example, "output_args": example}
        group, cpu = mesh.get_group("pipe"), torch.device("cpu")
        stages = [
            PipelineStage(one, number, total, cpu, group=group, **shapes)
            for one, number in zip(wrapped, numbers, strict=True)
        ]
        given: Any = stages[0] if name in SINGLE else stages
        kind: Any = get_schedule_class(name)
        self.schedule = kind(given, n_microbatches=MICRO_BATCHES, loss_fn=self._loss, scale_grads=False)
        self.weight = 1.0  # of the loss
        self.is_v_shaped = name in V_SHAPED  # and cannot evaluate (torch 2.13.0)
        self._is_first, self._is_last = 0 in numbers, total - 1 in numbers

    @property
    def model(self) -> nn.Module:
        """For the optimizer: the stage, or a module of the stages."""
        found: nn.Module = self.models[0] if len(self.models) == 1 else self.models
        return found

    def groups(self) -> list[dict[str, Any]]:
        """A parameter group for each stage."""
        return [{"params": list(one.named_parameters())} for one in self.parts]

    def _loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.mse_loss(outputs, targets) / MICRO_BATCHES * self.weight

    def _arguments(self, step: int) -> tuple[list[Tensor], dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(10 * step + self.mesh.get_local_rank("data"))
        inputs, targets = (torch.randn(2 * MICRO_BATCHES, 6, generator=generator) for _ in range(2))
        return [inputs] * self._is_first, {"target": targets} if self._is_last else {}

    def run(self, step: int) -> None:
        """All micro-batches of a batch, forward and backward."""
        args, kwargs = self._arguments(step)
        self.schedule.step(*args, **kwargs)

    def evaluate(self, step: int) -> None:
        """Forward alone."""
        args, kwargs = self._arguments(step)
        with torch.no_grad():
            self.schedule.eval(*args, **kwargs)

    def average(self) -> None:
        """As a plain loop does without DDP."""
        for param in self.parts.parameters():
            assert param.grad is not None
            param.grad.mul_(1.0 / dist.get_world_size(self.data))
            dist.all_reduce(param.grad, group=self.data)


def _part(number: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(number)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh())


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


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipe"))


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
def _stages_without_ddp_under_every_schedule(setup: Setup, configurations: list[tuple[str, bool, Mode]]) -> None:
    mesh = _mesh()
    for name, learns, mode in configurations:
        ours, plain = (Piped(mesh, name, wraps=False, learns_shapes=learns) for _ in range(2))
        _train_beside_plain(ours, plain, mode)


@case(4, few=[*zip((*SINGLE, *LOOPED), GIVEN, strict=True)], every=[*product((*SINGLE, *LOOPED), GIVEN)])
def _ddp_models_with_given_shapes_under_schedules_of_whole_backward_passes(
    setup: Setup, configurations: list[tuple[str, Mode]]
) -> None:
    mesh = _mesh()
    for name, mode in configurations:
        ours, plain = (Piped(mesh, name, wraps=True, learns_shapes=False) for _ in range(2))
        _train_beside_plain(ours, plain, mode)


@case(4, few=[*zip((*SINGLE, *LOOPED), LEARNT, strict=True)], every=[*product((*SINGLE, *LOOPED), LEARNT)])
def _ddp_models_that_learn_shapes(setup: Setup, configurations: list[tuple[str, Mode]]) -> None:
    """DDP alone fails in the second step under all of these but 1F1B, so plain stages are given their shapes."""
    mesh = _mesh()
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
    plain = Piped(_mesh(), "Interleaved1F1B", wraps=True, learns_shapes=True)
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
    mesh = _mesh()
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
    piped = Piped(_mesh(), "LoopedBFS", wraps=True, learns_shapes=False)
    with pytest.raises(ValueError, match=r"one DDP model over parameter group 0, got 2: '0', '1'\. .*ZERO-202"):
        ParallelOptimizer(piped.model, AdamW, mesh=piped.mesh, data_parallel_dim="data", pipeline_dim="pipe", **OPTIONS)


test_schedules = case.each()
