"""The facts by which `core.plan.partitions` chooses for ``partition="auto"``."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from ddp_zero.core.comm.communicator import RING_BYTES, Communicator
from ddp_zero.core.local.inner import is_elementwise_class
from ddp_zero.core.local.mixed import classes_in
from ddp_zero.core.local.parameters import LOW_PRECISION, HintsOf
from ddp_zero.core.plan.partitions import AUTO, Exchange, Setting, choose_partition, partition_named
from ddp_zero.core.plan.shard_plan import Partition
from ddp_zero.core.plan.weighted import MAX_BYTE_IMBALANCE, WeightedParameters
from ddp_zero.values.shapes import is_dense


def partition_for(
    asked: object,
    optimizer_class: Callable[..., Optimizer],
    params: Sequence[Tensor],
    comm: Communicator,
    *,
    stage: int = 1,
    overlaps: bool = True,
    limits: Sequence[float | None] = (),
    norm_type: float = 2.0,
    master_weights: bool = False,
    offload: object = None,
    hints_of: HintsOf | None = None,
    max_byte_imbalance: float = MAX_BYTE_IMBALANCE,
) -> Partition:
    """The partition with the name ``asked``; for ``"auto"`` a choice, with the reason in ``why``.

    ValueError if ``asked`` is none of the three. ``optimizer_class`` builds the inner optimizer, ``params`` are all its
    parameters, ``limits`` is ``max_grad_norm`` of the step and of each group. Without ``hints_of`` bytes alone count.
    """
    trained = sum(param.nbytes for param in params if param.requires_grad)
    exchange = _exchange(comm, params[0].device, trained) if params and comm.world_size > 1 else "direct"
    found = partition_named(asked, exchange == "native") if asked != AUTO else None
    classes = classes_in(optimizer_class)
    can_be_cut = [*filter(is_elementwise_class, classes)]
    shown = (can_be_cut or classes)[0]
    found = found or choose_partition(
        Setting(
            optimizer=getattr(shown, "__name__", repr(shown)),
            is_elementwise=bool(can_be_cut),
            world_size=comm.world_size,
            exchange=exchange,
            is_small=exchange == "direct" and trained < RING_BYTES,
            stage=stage,
            overlaps=overlaps,
            clips=norm_type != float("inf") and any(limit is not None for limit in limits),
            are_dense=all(is_dense(param.shape, param.stride()) for param in params),
            rounds_alike=all(_rounds_alike(param, master_weights, offload) for param in params),
        )
    )
    if hints_of is None:
        return found
    return WeightedParameters.like(found, max_byte_imbalance, is_native=exchange == "native")


def _exchange(comm: Communicator, device: torch.device, nbytes: int) -> Exchange:
    if comm.has_native_collectives(device):
        return "native"
    if comm.has_rings(device, nbytes):
        return "ring"
    return "direct" if comm.has_direct_messages(device) else "broadcast"


def _rounds_alike(param: Tensor, master_weights: bool, offload: object) -> bool:
    """True if a kernel steps an element of a part as in the whole parameter, see docs/numerics.md.

    On the host, threads may cut a tensor anywhere, and the elements before a cut round differently in low precision.
    """
    if param.dtype in LOW_PRECISION:
        return master_weights or (param.device.type != "cpu" and offload is None)
    return param.dtype in (torch.float32, torch.float64)
