"""Sums of buckets on their owners, and the places of gradients in scratches, without DDP."""

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from ddp_zero import estimate
from ddp_zero.core.backward.scratch_bucket import (
    ReduceContext,
    ReduceOptions,
    ScratchBucket,
    ScratchLayout,
    options_of_stage,
)
from ddp_zero.core.backward.scratch_buffers import SideStream
from ddp_zero.core.comm.communicator import Transport
from ddp_zero.core.local.parameters import ParameterTable
from ddp_zero.core.plan.buckets import ddp_layout
from ddp_zero.core.plan.ownership import Piece, Pieces, whole
from ddp_zero.core.plan.partition import GroupRank
from ddp_zero.core.plan.partitions import partition_named
from ddp_zero.core.plan.shard_plan import Ownership, ParameterSpec, bucket_of
from ddp_zero.core.step.rank_shard import Shard

RANK_0, RANK_1 = GroupRank(0), GroupRank(1)

# Options


@pytest.mark.parametrize(
    ("stage", "error"),
    [("2", TypeError), (2.0, TypeError), (True, TypeError), (None, TypeError), (0, ValueError), (3, ValueError)],
)
def test_a_stage_that_is_not_1_or_2_is_refused(stage: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"Expected stage .*got .*\[ZERO-103\]"):
        options_of_stage(stage, None, None)


def test_stage_2_alone_has_options_of_its_reduction() -> None:
    assert options_of_stage(1, None, None) is None
    assert options_of_stage(2, torch.bfloat16, 4) == ReduceOptions(torch.bfloat16, 4)


@pytest.mark.parametrize(("dtype", "factor"), [(torch.bfloat16, None), (None, 2.0), (torch.float16, 2.0)])
def test_options_of_stage_2_are_refused_in_stage_1(dtype: torch.dtype | None, factor: float | None) -> None:
    with pytest.raises(ValueError, match=r"need stage=2, got .* with stage=1.*\[ZERO-105\]"):
        options_of_stage(1, dtype, factor)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.complex64, "bfloat16"])
def test_a_dtype_in_which_gradients_cannot_travel_is_refused(dtype: Any) -> None:
    with pytest.raises(TypeError, match=r"grad_comm_dtype .*\[ZERO-103\]"):
        ReduceOptions(dtype)


@pytest.mark.parametrize(
    ("factor", "error"),
    [("2", TypeError), (True, TypeError), (0, ValueError), (-1.0, ValueError), (float("nan"), ValueError)],
)
def test_a_divisor_that_is_no_positive_number_is_refused(factor: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"gradient_predivide_factor .*\[ZERO-103\]"):
        ReduceOptions(None, factor)


# A rank without peers that has some pieces of its parameters


class WithoutGroup(Transport):
    def name(self, rank: GroupRank) -> str:
        return f"rank {rank}"

    def prepare_reduce_scatter(
        self, _: Tensor, parts: Sequence[Tensor], *__: object, average: bool
    ) -> tuple[None, Tensor]:
        return None, parts[RANK_0]


class Rank:
    """Parameters, the ranks that own them, and the context in which their buckets are reduced."""

    def __init__(
        self,
        params: Sequence[Tensor],
        pieces: Sequence[Pieces],
        options: ReduceOptions | None = None,
        world_size: int = 1,
        backend: str = "gloo",
    ) -> None:
        self.params, self.pieces, self.world_size = params, pieces, world_size
        comm = WithoutGroup(RANK_0, world_size, {"cpu": backend})
        sharded = SimpleNamespace(
            table=ParameterTable([{"params": list(params)}]),
            comm=comm,
            everyone=SimpleNamespace(world_size=world_size),
            ranks=SimpleNamespace(shard=comm, replicas=None),
            binding=SimpleNamespace(digest=17, cuts=False),
            trace=SimpleNamespace(label=lambda *_: nullcontext()),
        )
        self.shard = cast(Shard, sharded)
        self.context = ReduceContext(self.shard, SideStream(), options or ReduceOptions())

    def layout(self, indices: Sequence[int], stepped: Sequence[int] | None = None) -> ScratchLayout:
        """Of a bucket with these parameters, in DDP's order, of which all or some are stepped."""
        specs = [ParameterSpec(param.numel(), param.nbytes, "cpu/float32") for param in self.params]
        active = sorted(indices if stepped is None else stepped)
        bucket = bucket_of(Ownership(self.world_size, tuple(specs), tuple(self.pieces)), active, 0)
        return ScratchLayout([self.params[index] for index in indices], bucket, self.shard, SideStream())


# The buffers of all buckets


@pytest.mark.parametrize("partition", ["parameters", "elements"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("ranks", "widths"), [(2, [96, 64, 64, 64]), (3, [64, 62, 60, 58, 56]), (8, [100, 100, 7])])
def test_buffers_on_an_accelerator_are_as_estimated(
    ranks: int, widths: list[int], dtype: torch.dtype, partition: str
) -> None:
    model = nn.Sequential(*[nn.Linear(*pair, bias=False) for pair in pairwise(widths)]).to(dtype)
    params, cap = list(model.parameters()), 10_000 * dtype.itemsize
    specs = [ParameterSpec(param.numel(), param.nbytes, "cuda") for param in params]
    layout = ddp_layout([spec.nbytes for spec in specs], ["cuda"] * len(specs), [cap])
    dealing = partition_named(partition, is_native=True)
    plan = dealing.plan(dealing.assign_by_bucket(dealing.assign(specs, ranks, cap), layout), layout, cap)
    rank = Rank(params, plan.pieces, world_size=ranks, backend="nccl")
    layouts = [
        ScratchLayout([params[index] for index in members], bucket, rank.shard, SideStream())
        for members, bucket in zip(layout, plan.buckets, strict=True)
    ]
    rank.context.assign_memory([ScratchBucket(rank.context, one, bool, set()) for one in layouts])
    options: dict[str, Any] = {"partition": partition, "bucket_cap_mb": cap / (1 << 20), "lr": 0.1}
    said = estimate(model, SGD, ranks=ranks, stage=2, device="cuda", **options)
    assert said[0].device["buckets"] == rank.context.nbytes
    are_even = all(len(set(bucket.sizes)) == 1 for bucket in plan.buckets)
    assert bool(rank.context.receives) == (ranks == 3 and partition == "parameters"), "none elsewhere"
    assert are_even or partition == "parameters"


# Where gradients lie in a scratch


def test_slices_lie_in_rank_order_and_gradients_that_nobody_steps_after_them() -> None:
    params = [nn.Parameter(torch.zeros(numel)) for numel in (2, 3, 4, 5)]
    rank = Rank(params, [whole(owner, len(p)) for owner, p in zip([1, 0, 1, 0], params, strict=True)], world_size=2)  # type: ignore[arg-type]
    layout = rank.layout([3, 2, 1, 0], stepped=[0, 1, 3])
    assert [layout.windows[param].offset for param in params] == [8, 0, 10, 3]
    assert layout.ranges == [(0, 8), (8, 10)]
    assert (layout.numel, layout.nbytes) == (14, 56)
    assert list(layout.owned) == [1, 3]
    assert layout.indices == [3, 2, 1, 0], "DDP's order"
    assert list(layout.own_windows) == [1, 3]


def test_a_cut_parameter_lies_whole_across_the_slices_of_its_owners() -> None:
    params = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(4))]
    cut = (Piece(RANK_0, 0, 4), Piece(RANK_1, 4, 6))
    rank = Rank(params, [whole(RANK_0, 2), cut, whole(RANK_1, 4)], world_size=2)
    layout = rank.layout([0, 1, 2])
    assert layout.ranges == [(0, 6), (6, 12)]
    assert layout.windows[params[1]].offset == 2
    assert layout.windows[params[1]].shape == (2, 3)
    assert (layout.own_windows[1].offset, layout.own_windows[1].shape) == (2, (4,)), "1-D of this rank's part"


def test_a_gradient_has_the_strides_of_its_parameter() -> None:
    param = nn.Parameter(torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last))
    layout = Rank([param], [whole(RANK_0, param.numel())]).layout([0])
    assert layout.own_windows[0].view(torch.zeros(96)).stride() == param.stride()
