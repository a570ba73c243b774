"""Shard groups inside a mesh: state sharded over a part of the data-parallel ranks, and replicated over the rest."""

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import AdamW

from ddp_zero import checkpoint
from ddp_zero.parallel import ParallelOptimizer
from tests import internals
from tests.multiproc.cases import assert_identical, batches
from tests.multiproc.experts import dense_and_experts
from tests.multiproc.harness import Cases, Setup
from tests.multiproc.mesh_twins import KINDS, MeshTwins, mesh_of_4
from tests.multiproc.parallel_models import CLIP, OPTIONS
from tests.multiproc.replicas import groups_of, hook_of

MODES: tuple[dict[str, Any], ...] = (
    {},
    {"stage": 2},
    {"max_grad_norm": CLIP},
    {"stage": 2, "max_grad_norm": CLIP},
    {"stage": 2, "partition": "elements"},
)

case = Cases(timeout=240, group_timeout=60)


def check_state(opt: ParallelOptimizer, member: int, sharers: ProcessGroup) -> None:
    """These ranks have each parameter's state once."""
    zero = opt.members[member]
    assert internals.ranks_of(zero).num_replicas == dist.get_world_size(zero.process_group) // dist.get_world_size(
        sharers
    )
    held = torch.tensor([float(sum(value.numel() for one in zero.state.values() for value in one.values()))])
    dist.all_reduce(held, group=sharers)
    params = [param for group in zero.param_groups for param in group["params"]]
    owners = held.item() - sum(2 * param.numel() for param in params)  # counters of steps, one for each part
    assert len(params) <= owners <= 2 * len(params)


@case(4, few=[(mode, place % 2 == 0) for place, mode in enumerate(MODES)], every=[*product(MODES, (False, True))])
def _dense_parameters_beside_experts_are_sharded_over_pairs(
    setup: Setup, configurations: list[tuple[dict[str, Any], bool]]
) -> None:
    mesh, pairs, alone = mesh_of_4(), groups_of(2), groups_of(1)
    for mode, has_own in configurations:
        of_group = {"shard_group": alone} if has_own else None
        twins = MeshTwins("experts", mesh, plain_hook=hook_of(mode), of_group=of_group, shard_group=pairs, **mode)
        twins.train_and_compare(clip=mode.get("max_grad_norm"))
        check_state(twins.opt, 0, pairs)
        assert internals.ranks_of(twins.opt.members[1]).num_replicas == (2 if has_own else 1)


@case(4)
def _parts_that_every_rank_keeps_the_state_of_equal_the_plain_optimizer(setup: Setup) -> None:
    mesh, alone = mesh_of_4(), groups_of(1)
    for kind in KINDS[1:]:
        for mode in MODES[2:4] if kind == "cut, in DDP" else MODES[:3:2]:
            twins = MeshTwins(kind, mesh, shard_group=alone, **mode)
            twins.train_and_compare(clip=mode.get("max_grad_norm"))
            check_state(twins.opt, 0, alone)


@case(8, marks=[pytest.mark.nightly])
def _two_replicas_of_two_shards_of_two_parts_equal_ddp_and_save_once(setup: Setup) -> None:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "tensor"))
    sharers = mesh.get_group("shard")
    for mode in MODES[1:4]:
        twins = MeshTwins("cut, in DDP", mesh, plain_hook=hook_of(mode), shard_group=sharers, **mode)
        assert len(twins.opt.process_groups) == 2, "all data-parallel ranks, and the ranks with other parts"
        twins.train_and_compare(clip=mode.get("max_grad_norm"))
        check_state(twins.opt, 0, sharers)
    folder = setup.folder / "of eight"
    state = twins.opt.state_dict()
    checkpoint.save(folder, twins.model, twins.opt, step=1)
    flat = init_device_mesh("cpu", (4, 2), mesh_dim_names=("data", "tensor"))
    again = MeshTwins("cut, in DDP", flat)
    checkpoint.load(folder, again.model, again.opt)
    assert_identical(state["state"], again.opt.state_dict()["state"], "without shard groups")
    dist.barrier()


@case(4)
def _a_checkpoint_of_replicas_loads_without_them_and_back(setup: Setup) -> None:
    mesh, pairs, alone = mesh_of_4(), groups_of(2), groups_of(1)
    first = MeshTwins("experts", mesh, shard_group=pairs, of_group={"shard_group": alone})
    first.train_and_compare(2)
    flat, back = MeshTwins("experts", mesh), MeshTwins("experts", mesh, shard_group=pairs)
    for number, (source, target) in enumerate(((first, flat), (flat, back))):
        checkpoint.save(setup.folder / str(number), source.model, source.opt, step=1)
        checkpoint.load(setup.folder / str(number), target.model, target.opt)
        dist.barrier()
        assert_identical(source.opt.state_dict()["state"], target.opt.state_dict()["state"], f"of {number}")
        dist.barrier()
    batch = next(batches(first.place, 1))
    for one in (flat, back):  # both new: sums of four ranks depend on DDP's buckets, which the first pass arranges
        one.backward(batch)
        one.opt.step()
    for param, other in zip(flat.model.parameters(), back.model.parameters(), strict=True):
        assert_identical(param.detach(), other.detach(), "a step later")


@case(4)
def _shard_groups_that_do_not_fit_are_refused_on_every_rank(setup: Setup) -> None:
    mesh, pairs, alone = mesh_of_4(), groups_of(2), groups_of(1)
    with pytest.raises((TypeError, RuntimeError), match="shard_group"):
        MeshTwins("experts", mesh, shard_group="tensor" if setup.rank == 1 else pairs)
    with pytest.raises(ValueError, match="a DDP model, and a shard group"):
        MeshTwins("experts", mesh, shard_group=None if setup.rank == 1 else pairs)
    twins = MeshTwins("experts", mesh)
    dense, experts = dense_and_experts(twins.plain_model, twins.same)
    named = experts["params"]
    parts = [{**experts, "params": named[::2]}, {**experts, "params": named[1::2], "shard_group": alone}]
    with pytest.raises(ValueError, match=r"shard_group of parameter groups \[1\] in parameter group 2"):
        ParallelOptimizer(twins.plain_model, AdamW, [dense, *parts], **OPTIONS)


test_parallel_replicas = case.each()
