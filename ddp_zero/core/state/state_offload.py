"""State moved away between phases of a program, and back: ``opt.offload_state()`` and ``opt.reload_state()``."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ddp_zero.core.local.memory import return_freed_memory
from ddp_zero.core.offload.placement import moved, residence_for, tensors_in
from ddp_zero.core.step.sharded_step import ShardedStep
from ddp_zero.options import Offload

Move = Callable[[Tensor, torch.device], Tensor]


def offload_state(sharded: ShardedStep, to: Offload | str) -> None:
    """See `ZeroRedundancyOptimizer.offload_state`."""
    stepped, name = sharded.stepped, sharded.comm.name(sharded.comm.group_rank)
    if Offload.of(to) is None:
        raise TypeError("Expected 'cpu' or a ddp_zero.Offload in opt.offload_state(), got None.")
    if stepped.are_parked or type(stepped.residence) is not type(residence_for(None)):
        how = "an earlier opt.offload_state()" if stepped.are_parked else "offload= of the optimizer"
        raise RuntimeError(f"Expected state beside the parameters, got state that {how} has moved away ({name}).")
    sharded.left.complete()
    stepped.follow_model()
    residence = residence_for(to)
    residence.reserve(_owned(sharded))
    nbytes = sum(tensor.nbytes for tensor in _owned(sharded))
    _move(sharded, residence.place)
    residence.keep([_owned(sharded)])
    return_freed_memory(nbytes)
    stepped.are_parked = True


def reload_state(sharded: ShardedStep) -> None:
    """See `ZeroRedundancyOptimizer.reload_state`."""
    if not sharded.stepped.are_parked:
        raise RuntimeError("Expected opt.offload_state() before opt.reload_state(), got none.")
    _move(sharded, lambda tensor, device: tensor.to(device, copy=True))
    sharded.stepped.are_parked = False


def _move(sharded: ShardedStep, move: Move) -> None:
    """Move the states and masters of what this rank owns; a thread that reads them meanwhile finds either."""
    stepped, params = sharded.stepped, sharded.table.params
    for index in sharded.binding.owned():
        device = params[index].device
        state: Any = sharded.inner_state.get(stepped[index])
        moved(state, lambda tensor, device=device: move(tensor, device))  # type: ignore[misc]
        master = stepped.master(index)
        if master is not None:
            stepped.repoint(master, move(master.detach(), device))


def _owned(sharded: ShardedStep) -> list[Tensor]:
    """The tensors that move."""
    stepped, owned = sharded.stepped, sharded.binding.owned()
    states = (sharded.inner_state.get(stepped[index]) for index in owned)
    return [*(tensor for state in states for tensor in tensors_in(state)), *stepped.masters.values()]
