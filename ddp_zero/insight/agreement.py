"""`ZeroRedundancyOptimizer.check_agreement`: whether all ranks hold the same parameters."""

from collections import Counter
from collections.abc import Sequence

import torch

from ddp_zero.core.engine import Engine
from ddp_zero.core.local import digest
from ddp_zero.core.plan import GroupRank

_SHOWN = 5  # parameters that differ, in a message


def check_agreement(engine: Engine) -> None:
    """Raise on every rank if any parameter differs between ranks. A collective."""
    shard = engine.shard
    if engine.attachment.in_join:
        raise RuntimeError(
            "opt.check_agreement() is not supported inside Join: ranks that have joined would not take part. Call "
            "it after the Join context. [ZERO-310]"
        )
    shard.pending_syncs.complete()
    everyone, table = shard.everyone, shard.table
    device = table.accelerator()
    mine = torch.stack([digest(param.detach()).to(device) for param in table.params])
    found = find_diverging([theirs.tolist() for theirs in everyone.all_gather_tensor(mine)])
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
        f"ranks hold: {shown}{more}.{tied} Some code has changed parameters on some ranks only, or memory is "
        "faulty: load a checkpoint on all ranks. [ZERO-512]"
    )


def find_diverging(digests: Sequence[Sequence[int]]) -> dict[int, list[int]]:
    """For each parameter on which ranks disagree, the ranks in a minority; ``digests`` has each rank's numbers.

    Without a single majority, all ranks that disagree with the lowest one.
    """
    found = {}
    for index, numbers in enumerate(zip(*digests, strict=True)):
        usual, _ = max(Counter(numbers).items(), key=lambda item: item[1])  # the first of several: the lowest rank's
        minority = [rank for rank, number in enumerate(numbers) if number != usual]
        if minority:
            found[index] = minority
    return found
