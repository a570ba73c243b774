"""Matrices that are cut over ranks and stepped whole."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from ddp_zero import shard_optimizer
from tests.multiproc.cases import assert_identical, batches
from tests.multiproc.cut_models import CutBlock, gather_parts

MUON: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.05}
CUTS = {"up": 0, "down": 1}
UNEVEN = {1: (16,), 2: (11, 5), 4: (7, 0, 4, 5)}
"""Sizes of the parts of 16, by the number of ranks; one of them has nothing."""


def blocks(group: dist.ProcessGroup | None, uneven: bool = False) -> nn.Module:
    sizes = UNEVEN[dist.get_world_size(group)] if uneven and group is not None else None
    return nn.Sequential(*[CutBlock(group, seed=seed, sizes=sizes) for seed in range(1, 5)])


def groups_by_hand(model: nn.Module, muon: bool, whole: bool = False) -> list[dict[str, Any]]:
    """Groups of each cut, with a class of their own if asked for; without places in the mesh for the whole model."""
    named = list(model.named_parameters())
    own: dict[str, Any] = {"optimizer_class": torch.optim.Muon, **MUON} if muon else {}
    groups: list[dict[str, Any]] = [{"params": [p for name, p in named if name.rpartition(".")[2] not in CUTS]}]
    for kind, dim in CUTS.items():
        members = [param for name, param in named if name.endswith(kind)]
        groups.append({"params": members, **({} if whole else {"sharded_over": {"tensor": dim}}), **own})
    return groups


class One:
    """The plain optimizers over the whole model on one device."""

    def __init__(self, model: nn.Module, kind: Any, muon: bool, **options: Any) -> None:
        rest, *matrices = groups_by_hand(model, False, whole=True)
        self.all: list[Any] = [kind([rest, *([] if muon else matrices)], **{"lr": 1e-2, **options})]
        if muon:
            self.all.append(torch.optim.Muon(matrices, **MUON))

    def step(self) -> None:
        for one in self.all:
            one.step()


def assembled(parts: Mapping[str, Tensor], tensor: dist.ProcessGroup) -> dict[str, Tensor]:
    """The wholes of tensors, of which every rank of the group has a part where the name says so."""
    dims = {name: CUTS[kind] for name in parts if (kind := name.rpartition(".")[2]) in CUTS}
    gathered = gather_parts([parts[name] for name in dims], tensor)
    wholes = {name: torch.cat(every, dim) for (name, dim), every in zip(dims.items(), gathered, strict=True)}
    return {name: wholes[name] if name in wholes else part.detach().clone() for name, part in parts.items()}


def assert_equal_parts(whole: nn.Module, model: nn.Module, tensor: dist.ProcessGroup, when: str) -> None:
    found = assembled(dict(model.named_parameters()), tensor)
    for name, expected in whole.named_parameters():
        assert_identical(expected.detach(), found.pop(name), f"{name} {when}")
    assert not found


def lend_gradients(model: nn.Module, whole: nn.Module, tensor: dist.ProcessGroup, data: Any = None) -> None:
    """Give the whole model the gradients of its parts, averaged over the data-parallel ranks unless they are."""
    grads = {}
    for name, param in model.named_parameters():
        assert param.grad is not None
        grads[name] = param.grad if data is None else param.grad / dist.get_world_size(data)
        if data is not None:
            dist.all_reduce(grads[name], group=data)
    for param, grad in zip(whole.parameters(), assembled(grads, tensor).values(), strict=True):
        param.grad = grad


def squared(model: nn.Module, inputs: Tensor) -> Tensor:
    loss: Tensor = model(inputs).square().mean()
    return loss


def wrapped(mesh: DeviceMesh, uneven: bool = False) -> DistributedDataParallel:
    options: Any = {"process_group": mesh.get_group("data"), "gradient_as_bucket_view": True, "bucket_cap_mb": 0.0006}
    return DistributedDataParallel(blocks(mesh.get_group("tensor"), uneven), **options)


def train(mesh: DeviceMesh, ddp: nn.Module, opt: Any, one: One, whole: nn.Module, steps: range) -> None:
    """Compare after every step; in stage 1, where every rank has all averages to lend."""
    tensor = mesh.get_group("tensor")
    for step, (inputs, _) in enumerate(batches(mesh.get_local_rank("data"), steps.stop)):
        if step not in steps:
            continue
        opt.zero_grad()
        squared(ddp, inputs).backward()
        lend_gradients(ddp, whole, tensor)
        opt.step()
        one.step()
        assert_equal_parts(whole, getattr(ddp, "module", ddp), tensor, f"after step {step}")


def options_of(mesh: DeviceMesh) -> dict[str, Any]:
    return {"mesh": mesh, "data_parallel_dim": "data", "lr": 1e-2}


def grid(data: int, tensor: int, other: int = 1) -> DeviceMesh:
    """A mesh whose model is replicated along a third dimension, if there is one."""
    shape, names = ((data, tensor), ("data", "tensor")) if other == 1 else ((other, data, tensor), tuple(MESH_OF_THREE))
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


MESH_OF_THREE = ("other", "data", "tensor")


class Cut:
    """Four blocks on a mesh and their optimizer, and the same whole on one device."""

    def __init__(self, mesh: DeviceMesh, kind: Any, muon: bool, uneven: bool = False, **options: Any) -> None:
        self.mesh = mesh
        self.ddp = wrapped(mesh, uneven)
        groups = groups_by_hand(self.ddp.module, muon)
        self.opt: Any = shard_optimizer(self.ddp, kind, groups, **options_of(mesh) | options)
        self.whole = blocks(None)
        self.one = One(self.whole, kind, muon, **options)

    def continues(self, other: "Cut") -> None:
        """Take over the other's model on one device, and its optimizers, as they are."""
        self.whole.load_state_dict(other.whole.state_dict())
        for mine, theirs in zip(self.one.all, other.one.all, strict=True):
            mine.load_state_dict(copy.deepcopy(theirs.state_dict()))

    def train(self, steps: range) -> None:
        train(self.mesh, self.ddp, self.opt, self.one, self.whole, steps)

    def forget(self) -> None:
        for param in self.ddp.module.parameters():
            param.data.zero_()
