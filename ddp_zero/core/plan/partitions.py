"""Whole parameters by the sorted-greedy scheme, the partition of a name, and the choice of ``partition="auto"``.

Active parameters are spread before dormant ones, so that state is nearly balanced after unfreezing, too. Not chosen:
group by group, as torch does (worse balance); new owners for all when groups are added (moves state for little).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from ddp_zero.core.plan.elements import CutParameters
from ddp_zero.core.plan.ownership import Pieces, home
from ddp_zero.core.plan.partition import GroupRank, partition_greedy
from ddp_zero.core.plan.shard_plan import (
    Bucket,
    Layout,
    Ownership,
    ParameterSpec,
    Partition,
    owners_by_bucket,
    standalone_buckets,
    whole_parameters,
)


class WholeParameters(Partition):
    """``partition="parameters"``: each parameter has one owner, by the sorted-greedy scheme."""

    name = "parameters"
    cuts = False

    def __init__(self, why: str = "") -> None:
        self.why = why

    def assign(
        self, specs: Sequence[ParameterSpec], world_size: int, cap: int, decided: Sequence[Pieces] = ()
    ) -> Ownership:
        """Balance bytes, including the parameters already assigned."""
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
        return whole_parameters(specs, owners, world_size)

    def assign_by_bucket(self, owned: Ownership, layout: Layout, split: bool = True) -> Ownership:
        """Sorted greedy inside each bucket, or whole buckets to ranks; see `owners_by_bucket`."""
        sizes = [spec.nbytes for spec in owned.specs]
        owners = owners_by_bucket(sizes, owned.owners, owned.world_size, layout, split)
        return whole_parameters(owned.specs, owners, owned.world_size)

    def further(self, owned: Ownership, cap: int) -> Iterable[Bucket]:
        return standalone_buckets(owned, cap)


def partition_named(name: object, is_native: bool = False) -> Partition:
    """The partition of this name, with even parts for native collectives; ValueError for an unknown name."""
    for known in (WholeParameters(), CutParameters(is_native=is_native)):
        if name == known.name:
            return known
    raise ValueError(f"Expected partition to be 'parameters' or 'elements', got {name!r}. [ZERO-103]")


AUTO = "auto"
"""Value of ``partition=`` that leaves the choice to `choose_partition`."""

Exchange = Literal["native", "ring", "direct", "broadcast"]
"""Transport of buckets: one collective over equal segments, a ring, pairwise messages, or a broadcast per owner."""


@dataclass(frozen=True)
class Setting:
    """Facts that decide ``partition="auto"``, the same on every rank."""

    optimizer: str  # name of the optimizer class
    is_elementwise: bool  # True if the class is known to step each element independently
    world_size: int  # number of ranks that share the state
    exchange: Exchange  # transport of a bucket that holds all parameters
    is_small: bool = False  # True if latency outweighs bytes, without native collectives
    stage: int = 1  # 1 or 2
    overlaps: bool = True  # True if the step runs inside backward
    clips: bool = False  # True if steps clip by a norm that sums over elements, as the largest absolute value does not
    are_dense: bool = True  # True if the elements of every parameter fill one run of memory
    rounds_alike: bool = True  # True if kernels round an element of a part as in the whole parameter


def choose_partition(setting: Setting) -> Partition:
    """The partition that ``partition="auto"`` stands for, with the reason for people.

    Parameters are cut where that shortens a step and changes no bit: a native collective needs equal segments, and on
    Gloo each bucket is as slow as its largest segment. At two ranks, in DDP's buckets of a GPT of 87M parameters, that
    segment exceeds half of the bucket by a fifth.
    """
    why_whole = next((why for applies, why in _reasons_for_whole_parameters(setting) if applies), None)
    if why_whole is not None:
        return WholeParameters(why_whole)
    gain = {
        "native": "each bucket is one reduce-scatter and one all-gather of equal segments",
        "ring": f"a ring of {setting.world_size} ranks is as slow as its largest segment",
        "direct": "no rank waits for the one that steps and sends the largest part of a bucket",
    }[setting.exchange]
    return CutParameters(
        is_native=setting.exchange == "native", why=f"{setting.optimizer} steps each element by itself, and {gain}"
    )


def _reasons_for_whole_parameters(setting: Setting) -> list[tuple[bool, str]]:
    in_stage_2 = setting.stage == 2
    return [
        (not setting.is_elementwise, f"{setting.optimizer} is not known to step each element by itself"),
        (setting.world_size == 1, "a single rank owns everything"),
        (not setting.are_dense, "a parameter has gaps or overlaps in memory"),
        (not setting.rounds_alike, "kernels may round an element of a part in another way than in the whole parameter"),
        (in_stage_2 and setting.clips, "in stage 2 the norm of a parameter that is cut differs in its last bits"),
        (in_stage_2 and not setting.overlaps, "gradients can be looked at before the step, whole on their owner"),
        (setting.is_small, "a message costs more than its bytes in a model of less than 1 MiB"),
        (setting.exchange == "broadcast", "this backend broadcasts parameters owner by owner"),
    ]
