"""Text reports on a sharded optimizer; local, so that any rank may print them at any time."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ddp_zero.core.plan.shard_plan import ShardPlan


def state_bytes(state: Mapping[Any, Any]) -> int:
    """Bytes of all tensors in an optimizer's state, however nested."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(state))


@dataclass(frozen=True)
class Share:
    """What one rank owns.

    Attributes:
        parameters: how many, whole or in part.
        elements: of these.
        nbytes: their size in bytes.
        trained: bytes of those that a step can change.
    """

    parameters: int
    elements: int
    nbytes: int
    trained: int


def share_of(plan: ShardPlan, rank: int) -> Share:
    """What one rank owns."""
    parameters = elements = nbytes = trained = 0
    for spec, pieces in zip(plan.specs, plan.pieces, strict=True):
        for piece in pieces:
            if piece.owner == rank:
                numel = piece.stop - piece.start
                size = numel * spec.nbytes // spec.numel if numel else 0
                parameters += 1
                elements += numel
                nbytes += size
                trained += size if spec.active else 0
    return Share(parameters, elements, nbytes, trained)


def imbalance(plan: ShardPlan) -> float:
    """The largest share of trainable bytes over the mean share, 1.0 if there are none."""
    trained = [share_of(plan, rank).trained for rank in range(plan.world_size)]
    return max(trained) * plan.world_size / sum(trained) if any(trained) else 1.0


def describe_shards(plan: ShardPlan, group_rank: int, own_state_bytes: int) -> str:
    """A table of what each rank owns.

    Args:
        plan: who owns what.
        group_rank: this rank, marked with a star.
        own_state_bytes: bytes of optimizer state that it holds now; those of other ranks are estimated from it.
    """
    shares = [share_of(plan, rank) for rank in range(plan.world_size)]
    trained = [share.trained for share in shares]
    lines = [f"{'rank':>6} {'parameters':>11} {'elements':>15} {'bytes':>15} {'state bytes now':>17}"]
    for rank, share in enumerate(shares):
        state = f"{own_state_bytes:,}" if rank == group_rank else _estimate(trained, group_rank, rank, own_state_bytes)
        mark = "*" if rank == group_rank else " "
        lines.append(f"{mark}{rank:>5} {share.parameters:>11,} {share.elements:>15,} {share.nbytes:>15,} {state:>17}")
    lines.append(f"imbalance: {imbalance(plan):.3f} (largest share of trainable bytes / mean share)")
    dormant = sum(not spec.active for spec in plan.specs)
    sent = trained[group_rank] * (plan.world_size - 1)
    lines.append(f"sync: {len(plan.buckets)} buckets, {sent:,} bytes sent by this rank per step")
    if dormant:
        lines.append(f"frozen: {dormant} parameters, not sent until they are trainable")
    if plan.world_size > 1:
        lines.append("* this rank; ~ estimated from this rank's state bytes per parameter byte")
    return "\n".join(lines)


def draw_buckets(plan: ShardPlan) -> str:
    """Buckets x ranks: how many elements each rank owns of each bucket, and how many parameters those are."""
    lines = ["bucket " + "".join(f"{f'rank {rank}':>20}" for rank in range(plan.world_size))]
    for bucket in plan.buckets:
        cells = [
            f"{segment.numel:,} in {len(segment.params)}" if segment.params else "-" for segment in bucket.segments
        ]
        lines.append(f"{bucket.index:>6} " + "".join(f"{cell:>20}" for cell in cells))
    return "\n".join(lines)


def _estimate(trained: list[int], group_rank: int, rank: int, own_state_bytes: int) -> str:
    if not trained[group_rank]:
        return "unknown" if trained[rank] else "0"
    return f"~{round(own_state_bytes * trained[rank] / trained[group_rank]):,}"


def tensors_in(value: Any) -> Iterable[Tensor]:
    """The tensors in nested mappings, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
