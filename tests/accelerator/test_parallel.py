"""Tensor-parallel parts and experts on the simulated accelerator: no races, the numbers of the plain optimizer."""

import os
import warnings
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from ddp_zero.parallel import ParallelOptimizer
from tests.accelerator import simulation
from tests.multiproc.cases import batches
from tests.multiproc.cut_models import CutBlock, is_cut
from tests.multiproc.experts import dense_and_experts, expert_groups, wrapped_without_experts
from tests.multiproc.harness import Cases, Setup

pytestmark = pytest.mark.skipif(simulation.missing() is not None, reason=str(simulation.missing()))

STEPS = 4
CLIP = 0.05
OPTIONS: dict[str, Any] = {"lr": 1e-2, "fused": True}
WRAP: dict[str, Any] = {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0004}
BACKEND = "cpu:gloo,sim:simccl"
MODES: dict[str, dict[str, Any]] = {
    "stage 1": {},
    "stage 2": {"stage": 2},
    "stage 1, clipped": {"max_grad_norm": CLIP},
    "stage 2, clipped": {"stage": 2, "max_grad_norm": CLIP},
}

Build = Callable[[dict[str, Any]], tuple[DistributedDataParallel, DistributedDataParallel, Any, Callable[[], None]]]
"""With options: the plain side's model, ours, our optimizer, and what a plain loop does after backward."""


def _tensor_parallel(setup: Setup, device: torch.device) -> Build:
    mesh = init_device_mesh("sim", (2, 2), mesh_dim_names=("data", "tensor"), backend_override={0: BACKEND, 1: BACKEND})
    data, tensor = mesh.get_group("data"), mesh.get_group("tensor")

    def wrapped() -> DistributedDataParallel:
        model = nn.Sequential(CutBlock(tensor, seed=1), CutBlock(tensor, seed=2)).to(device)
        return DistributedDataParallel(model, process_group=data, **WRAP)

    def build(mode: dict[str, Any]) -> Any:
        expected, ddp = wrapped(), wrapped()
        named = list(ddp.named_parameters())
        groups: list[dict[str, Any]] = [
            {"params": [(name, param) for name, param in named if not is_cut(name)]},
            {"params": [(name, param) for name, param in named if is_cut(name)], "sharded_over": "tensor"},
        ]
        opt = ParallelOptimizer(ddp, AdamW, groups, mesh=mesh, data_parallel_dim="data", **mode, **OPTIONS)
        return expected, ddp, opt, lambda: None

    return build


class _Routed(nn.Module):
    """Dense layers around an expert that half of the ranks share; each keeps its tokens."""

    def __init__(self, expert: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.leave = nn.Linear(8, 16), nn.Linear(16, 3)
        torch.manual_seed(100 + expert)
        self.experts = nn.Sequential(nn.Linear(16, 16), nn.Tanh())

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.enter(inputs)
        result: Tensor = self.leave(hidden + self.experts(hidden))
        return result


def _experts(setup: Setup, device: torch.device) -> Build:
    every = dist.new_group(list(range(setup.world_size)), backend=BACKEND)
    _, same = expert_groups(setup.rank, setup.world_size, 2, BACKEND)

    def build(mode: dict[str, Any]) -> Any:
        expected, ddp = (
            wrapped_without_experts(_Routed(setup.rank % 2).to(device), process_group=every, **WRAP) for _ in range(2)
        )
        opt = ParallelOptimizer(ddp, AdamW, dense_and_experts(ddp, same), **mode, **OPTIONS)

        def average() -> None:
            for name, param in expected.named_parameters():
                if "experts." in name:
                    assert param.grad is not None
                    param.grad.mul_(1.0 / setup.world_size)
                    dist.all_reduce(param.grad, group=same)

        return expected, ddp, opt, average

    return build


def _has_no_races(setup: Setup, parts: str, is_late: bool, is_elsewhere: bool) -> None:
    warnings.filterwarnings("ignore", "Time stats are currently only collected")
    os.environ["SIMULATED_DEVICE_FOLDER"] = str(setup.folder)
    extension = simulation.load(setup.world_size, is_late)
    extension.set_device(setup.rank)
    device = torch.device("sim", (setup.rank + is_elsewhere) % setup.world_size)
    extension.train_on(device.index)
    build = {"tensor": _tensor_parallel, "experts": _experts}[parts](setup, device)
    for name, mode in MODES.items():
        extension.clear_reports()
        expected, ddp, opt, average = build(mode)
        plain = AdamW(expected.parameters(), **OPTIONS)
        before = [param.detach().cpu() for param in ddp.parameters()]
        pairs: list[tuple[list[Tensor], list[Tensor]]] = []
        for batch in batches(setup.rank if parts == "experts" else setup.rank // 2, STEPS):
            inputs = batch[0].to(device)
            for model in (expected, ddp):
                model(inputs).square().mean().backward()
            average()
            opt.step()
            if "max_grad_norm" in mode:
                _scale(expected.parameters(), _coefficient(opt))
            plain.step()
            plain.zero_grad()
            opt.zero_grad()
            pairs.append((_copies(expected), _copies(ddp)))
        extension.synchronize(device.index)
        assert not extension.races(), f"{name}: {extension.races()[:3]}"
        assert not extension.faults(), f"{name}: {extension.faults()[:3]}"
        for step, (one, other) in enumerate(pairs):
            same = [torch.equal(left.cpu(), right.cpu()) for left, right in zip(one, other, strict=True)]
            assert all(same), f"{name}, step {step}: {same}"
        moved = [not torch.equal(old, new.cpu()) for old, new in zip(before, pairs[-1][1], strict=True)]
        assert all(moved), f"{name}: {moved}"


def _coefficient(opt: ParallelOptimizer) -> float:
    found = opt.last_step
    assert found is not None
    assert found.clip_coefficient is not None
    assert found.clip_coefficient < 1
    return float(found.clip_coefficient)


def _scale(params: Iterable[nn.Parameter], factor: float) -> None:
    for param in params:
        assert param.grad is not None
        param.grad.mul_(torch.tensor(factor))


def _copies(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


@cache
def _compile() -> None:
    simulation.compiled()  # here, not by all ranks at once while their time-outs run


@pytest.mark.parametrize("is_elsewhere", [False, True], ids=["on the current device", "on another one"])
@pytest.mark.parametrize("is_late", [False, True], ids=["on time", "late"])
@pytest.mark.parametrize("parts", ["tensor", "experts"])
def test_parts_of_a_model(parts: str, is_late: bool, is_elsewhere: bool) -> None:
    _compile()
    Cases.pool_of(4, simulation.NAME).run(
        _has_no_races, parts, is_late, is_elsewhere, timeout=120.0, group_timeout=60.0
    )
