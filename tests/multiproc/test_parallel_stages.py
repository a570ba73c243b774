"""Pipeline stages under torch's schedules, beside the same stages with the plain optimizer and the same reductions."""

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from ddp_zero.parallel import ParallelOptimizer
from tests.multiproc.harness import Cases, Setup
from tests.multiproc.parallel_models import CLIP, OPTIONS, scale_gradients, tied_group
from tests.multiproc.stages import DDP_OPTIONS, STAGE_MODES, STEPS, Stages, check_counting, train_beside_plain

case = Cases(timeout=180, group_timeout=30)


def _scheduled() -> list[tuple[str, Any]]:
    return [*((name, Schedule1F1B) for name in STAGE_MODES), ("stage 2, clipped", ScheduleGPipe)]


@case(4, few=_scheduled()[::3], every=_scheduled())
def _stages_equal_the_plain_optimizer_under_the_same_schedule(
    setup: Setup, configurations: list[tuple[str, Any]]
) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipe"))
    tied = tied_group(mesh)
    for name, schedule in configurations:
        assert train_beside_plain(mesh, tied, schedule, STAGE_MODES[name]).plain == 0.0


@case(
    4,
    6,
    few=["stage 1 without DDP, clipped", "stage 2, scaled"],
    every=["stage 1 without DDP, clipped", "stage 1, clipped", "stage 2, clipped", "stage 2, scaled"],
)
def _three_and_four_stages_with_a_shared_embedding_clip_and_scale(setup: Setup, configurations: list[str]) -> None:
    shape = (1, 4) if setup.world_size == 4 else (2, 3)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "pipe"))
    both_ends = tied_group(mesh)
    tied = both_ends if mesh.get_local_rank("pipe") in (0, shape[1] - 1) else None
    for name in configurations:
        assert train_beside_plain(mesh, tied, Schedule1F1B, STAGE_MODES[name]).plain == 0.0


@case(
    4, few=["stage 1, sums in fp32", "stage 2, clipped"], every=["stage 1 without DDP, clipped", "stage 2, overlapped"]
)
def _several_runs_of_a_schedule_add_up_to_one_step(setup: Setup, configurations: list[str]) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipe"))
    tied = tied_group(mesh)
    for name in configurations:
        parity = train_beside_plain(mesh, tied, Schedule1F1B, STAGE_MODES[name], runs=2)
        assert parity.plain is not None
        assert parity.plain < 1e-5, (name, parity)


@case(2)
def _one_stage_is_trained_by_a_schedule_or_by_a_plain_loop(setup: Setup) -> None:
    """Only a schedule of several stages keeps forward passes from preparing reductions."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "pipe"))
    arguments: dict[str, Any] = {"mesh": mesh, "data_parallel_dim": "data", "pipeline_dim": "pipe"}
    modes: list[dict[str, Any]] = [{}, {"stage": 2}, {"stage": 2, "max_grad_norm": CLIP}]
    for mode, kind in product(modes, (None, Schedule1F1B)):
        models = [nn.Linear(4, 3) for _ in range(2)]
        models[1].load_state_dict(models[0].state_dict())
        expected, ddp = (
            DistributedDataParallel(one, process_group=mesh.get_group("data"), **DDP_OPTIONS) for one in models
        )
        plain = AdamW(expected.parameters(), **OPTIONS)
        opt = ParallelOptimizer(ddp, AdamW, **mode, **arguments, **OPTIONS)
        stage = PipelineStage(ddp, 0, 1, torch.device("cpu"), group=mesh.get_group("pipe"))
        schedule = None if kind is None else kind(stage, n_microbatches=2, loss_fn=half_of_loss, scale_grads=False)
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(2 * step + setup.rank)
            inputs, targets = (torch.randn(4, size, generator=generator) for size in (4, 3))
            for optimizer in (plain, opt):
                optimizer.zero_grad()
            half_of_loss(expected(inputs), targets).mul(2).backward()
            if schedule is None:
                with ddp.no_sync():
                    half_of_loss(ddp(inputs[:2]), targets[:2]).backward()
                half_of_loss(ddp(inputs[2:]), targets[2:]).backward()
            else:
                schedule.step(inputs, target=targets)
            opt.step()
            if "max_grad_norm" in mode:
                assert opt.last_step is not None
                scale_gradients(expected, opt.last_step.grad_norm or 0.0)
            plain.step()
            for mine, other in zip(ddp.parameters(), expected.parameters(), strict=True):
                torch.testing.assert_close(mine, other, rtol=0, atol=1e-5)  # sums of micro-batches are rounded


def half_of_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """The share of one of two micro-batches."""
    return nn.functional.mse_loss(outputs, targets) / 2


@case(4)
def _gradients_travel_once_with_the_last_micro_batch(setup: Setup) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipe"))
    tied = tied_group(mesh)
    stages = Stages(mesh, Schedule1F1B, wraps=True, learns_shapes=True)
    arguments: dict[str, Any] = {"mesh": mesh, "data_parallel_dim": "data", "pipeline_dim": "pipe"}
    opt = ParallelOptimizer(stages.model, AdamW, stages.groups(tied), stage=2, **arguments, **OPTIONS)
    nbytes = sum(param.nbytes for name, param in stages.part.named_parameters() if name != "embedding")
    for step in range(3):
        before = opt.members[0].stats()["total_sent_bytes"]
        opt.zero_grad()
        stages.run(step)
        opt.step()
        sent = torch.tensor([opt.members[0].stats()["total_sent_bytes"] - before])
        dist.all_reduce(sent, group=stages.data)
        assert sent.item() == 2 * nbytes, f"step {step}: gradients to their owners, and parameters back"


@case(4)
def _the_norm_shows_each_parameter_that_is_left_out_or_counted_twice(setup: Setup) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipe"))
    check_counting(mesh, tied_group(mesh))


@case(4)
def _static_graphs_and_shared_parameters_that_ddp_reduces_as_well_are_refused(setup: Setup) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipe"))
    tied = tied_group(mesh)
    stages = Stages(mesh, Schedule1F1B, wraps=False, learns_shapes=True)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(stages.part, ["embedding"])
    ddp = DistributedDataParallel(stages.part, process_group=stages.data)
    with pytest.raises(ValueError, match=r"(?s)or have DDP ignore these parameters.*'\.embedding'"):
        ParallelOptimizer(
            ddp, AdamW, stages.groups(tied), mesh=mesh, data_parallel_dim="data", pipeline_dim="pipe", **OPTIONS
        )
    stages = Stages(mesh, Schedule1F1B, wraps=True, learns_shapes=True, static_graph=True)
    arguments: dict[str, Any] = {"mesh": mesh, "data_parallel_dim": "data", "pipeline_dim": "pipe"}
    with pytest.raises(NotImplementedError, match="static_graph=True around a pipeline stage"):
        ParallelOptimizer(stages.model, AdamW, stages.groups(tied), stage=2, **arguments, **OPTIONS)


test_stages = case.each()
