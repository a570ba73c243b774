"""A model under torch's pipeline schedules."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.nn.parallel import DistributedDataParallel

MICRO_BATCHES, STEPS = 4, 4


SINGLE = ("GPipe", "1F1B")
LOOPED = ("Interleaved1F1B", "LoopedBFS")
WEIGHTS_APART = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
"""Gradients of weights apart from those of inputs: DDP's reducer never starts, on some ranks or all."""


V_SHAPED = ("ZBVZeroBubble", "DualPipeV")


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


def mesh_of_stages() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipe"))
