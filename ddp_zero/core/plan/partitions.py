"""The two ways to divide parameters among ranks, as one interface: what `Binding` asks of a partition."""

from collections.abc import Sequence
from typing import Protocol

from ddp_zero.core.plan.elements import CutParameters
from ddp_zero.core.plan.ownership import Pieces, home
from ddp_zero.core.plan.partition import GroupRank, partition_greedy
from ddp_zero.core.plan.shard_plan import (
    Bucket,
    ParameterSpec,
    ShardPlan,
    owners_by_bucket,
    plan_bucket,
    plan_for_ddp,
    plan_standalone,
    whole_pieces,
)

Layout = Sequence[Sequence[int]]
"""Parameter indices of each DDP bucket."""


class Partition(Protocol):
    """Divides parameters among ranks. Pure: every rank computes the same."""

    name: str
    """The value of ``partition=``."""

    cuts: bool
    """Whether several ranks may own parts of one parameter."""

    def assign(
        self, specs: Sequence[ParameterSpec], decided: Sequence[Pieces], world_size: int, cap: int
    ) -> list[Pieces]:
        """The pieces of all parameters; those of the first ones are decided already.

        Args:
            specs: one per parameter.
            decided: pieces of the first parameters.
            world_size: number of ranks.
            cap: bytes of a bucket.
        """

    def assign_by_bucket(
        self,
        specs: Sequence[ParameterSpec],
        pieces: Sequence[Pieces],
        world_size: int,
        layout: Layout,
        split: bool,
        decided: int,
    ) -> list[Pieces]:
        """The pieces of all parameters once DDP's buckets are known.

        Args:
            specs: one per parameter.
            pieces: as they are now; a parameter in no bucket keeps its own.
            world_size: number of ranks.
            layout: DDP's buckets.
            split: whether a bucket is spread over ranks.
            decided: number of leading buckets that keep their pieces, because their gradients are already being sent.
        """

    def plan(
        self, specs: Sequence[ParameterSpec], pieces: Sequence[Pieces], world_size: int, layout: Layout | None, cap: int
    ) -> ShardPlan:
        """The plan for DDP's buckets, or without them for buckets of about ``cap`` bytes."""

    def bucket_over(
        self,
        index: int,
        params: Sequence[int],
        specs: Sequence[ParameterSpec],
        pieces: Sequence[Pieces],
        world_size: int,
    ) -> Bucket:
        """A bucket that is in no plan."""


class WholeParameters:
    """``partition="parameters"``: each parameter has one owner, by the sorted-greedy scheme."""

    name = "parameters"
    cuts = False

    def assign(
        self, specs: Sequence[ParameterSpec], decided: Sequence[Pieces], world_size: int, cap: int
    ) -> list[Pieces]:
        """Balance bytes, those already assigned included.

        Active parameters are spread first and dormant ones after, so that state is balanced now and stays nearly so
        when more parameters are unfrozen.
        """
        loads = [0] * world_size
        owners = [*map(home, decided), *[GroupRank(0)] * (len(specs) - len(decided))]
        for spec, owner in zip(specs, owners[: len(decided)], strict=False):
            loads[owner] += spec.nbytes
        for active in (True, False):
            members = [index for index in range(len(decided), len(specs)) if specs[index].active is active]
            sizes = [specs[index].nbytes for index in members]
            for index, owner in zip(members, partition_greedy(sizes, world_size, loads), strict=True):
                owners[index] = owner
                loads[owner] += specs[index].nbytes
        return list(whole_pieces(specs, owners))

    def assign_by_bucket(
        self,
        specs: Sequence[ParameterSpec],
        pieces: Sequence[Pieces],
        world_size: int,
        layout: Layout,
        split: bool,
        decided: int,
    ) -> list[Pieces]:
        """Sorted greedy inside each bucket, or whole buckets to ranks; see `owners_by_bucket`."""
        sizes, owners = [spec.nbytes for spec in specs], list(map(home, pieces))
        return list(whole_pieces(specs, owners_by_bucket(sizes, owners, world_size, layout, split, decided)))

    def plan(
        self, specs: Sequence[ParameterSpec], pieces: Sequence[Pieces], world_size: int, layout: Layout | None, cap: int
    ) -> ShardPlan:
        """See `plan_standalone` and `plan_for_ddp`."""
        owners = list(map(home, pieces))
        if layout is None:
            return plan_standalone(specs, owners, world_size, cap)
        return plan_for_ddp(specs, owners, world_size, layout, cap)

    def bucket_over(
        self,
        index: int,
        params: Sequence[int],
        specs: Sequence[ParameterSpec],
        pieces: Sequence[Pieces],
        world_size: int,
    ) -> Bucket:
        """See `plan_bucket`."""
        return plan_bucket(index, params, specs, list(map(home, pieces)), world_size)


def partition_named(name: object) -> Partition:
    """The partition of this name.

    Raises:
        ValueError: for a different name.
    """
    for known in (WholeParameters(), CutParameters()):
        if name == known.name:
            return known
    raise ValueError(f"Expected partition to be 'parameters' or 'elements', got {name!r}.")
