"""``opt.check_agreement()``: whether all ranks hold the same parameters, and if not, which rank holds which others."""

from collections import Counter
from collections.abc import Sequence

import torch

from ddp_zero.core.local.memory import digest
from ddp_zero.core.plan.partition import GroupRank
from ddp_zero.tools.insight.optimizer_parts import OptimizerParts

_SHOWN = 5


def check_agreement(running: OptimizerParts) -> None:
    """See `ZeroRedundancyOptimizer.check_agreement`. A collective: one gather of eight bytes per parameter."""
    sharded = running.sharded
    if running.joins:
        raise RuntimeError(
            "Expected to be outside Join, got opt.check_agreement() inside it: ranks that have joined would not take "
            "part. Call it after the Join context."
        )
    sharded.left.complete()
    everyone, table = sharded.everyone, sharded.table
    device = table.accelerator()
    mine = torch.stack([digest(param.detach()).to(device) for param in table.params])
    found = diverged([theirs.tolist() for theirs in everyone.all_gather_tensor(mine)])
    if not found:
        return
    shown = "; ".join(
        f"{table.label(index)} on " + ", ".join(everyone.name(GroupRank(rank)) for rank in ranks)
        for index, ranks in list(found.items())[:_SHOWN]
    )
    more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    tied = " Two ranks cannot tell which of them is right." if everyone.world_size == 2 else ""
    raise RuntimeError(
        f"Expected the same parameters on every rank, got {len(found)} of {len(table)} that differ from what most "
        f"ranks hold: {shown}{more}.{tied} Some code has changed parameters on some ranks only, or memory is faulty: "
        "load a checkpoint on all ranks."
    )


def diverged(digests: Sequence[Sequence[int]]) -> dict[int, list[int]]:
    """Which ranks hold another value than most ranks do, by parameter.

    Args:
        digests: for each rank, in rank order, a number per parameter.

    Returns:
        For each parameter on which ranks do not agree, the ranks in a minority. If there is no single majority, all
        ranks but those that agree with the lowest one.
    """
    found = {}
    for index, numbers in enumerate(zip(*digests, strict=True)):
        usual, _ = max(Counter(numbers).items(), key=lambda item: item[1])  # the first of several: the lowest rank's
        others = [rank for rank, number in enumerate(numbers) if number != usual]
        if others:
            found[index] = others
    return found
