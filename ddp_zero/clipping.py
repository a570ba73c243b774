"""Clipping by the norm of all gradients where a rank has only its own: one small collective.

A parameter's gradient lies whole on its owner, so each owner computes the norms of its own, all ranks get all of them,
and each combines them in the order of the parameters, as `torch.nn.utils.clip_grad_norm_` does on one rank: to the same
bits where all gradients have one dtype. (Of several, torch combines them dtype by dtype.)
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ddp_zero.absent import AbsentGradient
from ddp_zero.sharded_step import ShardedStep


def clip_partitioned(
    sharded: ShardedStep, indices: Sequence[int], max_norm: float, norm_type: float, error_if_nonfinite: bool
) -> Tensor:
    """Scale the gradients that this rank owns so that the norm of all ranks' together is at most ``max_norm``.

    Args:
        sharded: knows who owns what.
        indices: the parameters to clip, the same on every rank.
        max_norm: the largest norm.
        norm_type: of the p-norm; ``inf`` for the largest absolute value.
        error_if_nonfinite: raise, on every rank, if the norm is not finite.

    Returns:
        The norm before clipping, a scalar, the same on every rank.

    Raises:
        RuntimeError: if gradients were used up by a step inside backward, or as asked for.
    """
    table, rank = sharded.table, sharded.comm.group_rank
    owned = [index for index in indices if sharded.binding.owners[index] == rank]
    grads = {index: grad for index in owned if (grad := table.params[index].grad) is not None}
    for grad in grads.values():
        if isinstance(grad, AbsentGradient):
            grad.refuse()
    norms = {index: torch.linalg.vector_norm(grad, norm_type) for index, grad in grads.items()}
    every = _gather(sharded, indices, norms)
    if not every:
        return torch.tensor(0.0)
    total: Tensor = torch.linalg.vector_norm(torch.stack(every), norm_type)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"Expected a finite norm of order {norm_type} of all gradients, got {total.item()} "
            f"({sharded.comm.name(rank)}). Pass error_if_nonfinite=False to clip by it all the same."
        )
    torch.nn.utils.clip_grads_with_norm_([table.params[index] for index in grads], max_norm, total)
    return total


def _gather(sharded: ShardedStep, indices: Sequence[int], norms: dict[int, Tensor]) -> list[Tensor]:
    """Every parameter's norm from its owner, those without a gradient left out, in the dtype that it had there."""
    device = next(iter(norms.values())).device if norms else sharded.table.accelerator()
    mine = torch.zeros(2, len(indices), dtype=torch.float64, device=device)
    for position, index in enumerate(indices):
        if index in norms:
            mine[0, position] = 1.0
            mine[1, position] = norms[index]
    gathered = sharded.comm.all_gather_tensor(mine)
    found = []
    for position, index in enumerate(indices):
        has_grad, norm = gathered[sharded.binding.owners[index]][:, position]
        if has_grad:
            found.append(norm.to(sharded.table.params[index].dtype.to_real()))
    return found
