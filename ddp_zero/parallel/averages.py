"""Averages gradients that no DDP model reduces, such as those of experts that DDP was told to ignore.

It happens once per step, after the last backward pass, so that a step may follow any number of them. First the ranks
that hold the parameters exchange which of them have a gradient: one that is used on some ranks only counts as zeros on
the others, and one that no rank has used keeps none.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ddp_zero.backward.reducer import models_over
from ddp_zero.comm.communicator import Communicator
from ddp_zero.comm.reduction import average_in_place
from ddp_zero.local.parameters import ParameterTable
from ddp_zero.parallel.shards import Shards
from ddp_zero.plan.partition import GroupRank

_HAS, _TRAINS, _REDUCED = 1, 2, 4


class Averages:
    """The averages of one member's gradients.

    Args:
        comm: the ranks that hold its parameters.
        table: the parameters.
        divisor: what sums of gradients are divided by: the number of ranks with inputs of their own.
        shards: where gradients of parameters that are distributed tensors are found.
    """

    def __init__(self, comm: Communicator, table: ParameterTable, divisor: int, shards: Shards) -> None:
        self._comm = comm
        self._table = table
        self._divisor = divisor
        self._shards = shards
        self._is_first = True
        self._are_done = False

    def take(self) -> None:
        """Average what is in ``param.grad``, unless that was done since the last step. A collective.

        Raises:
            RuntimeError: on every rank, if a parameter is frozen on some of them only, or a DDP model reduces it.
            NotImplementedError: for a gradient that is not dense.
        """
        if self._are_done:
            return
        self._shards.bring_gradients()
        self._table.check_gradients()
        params = self._table.params
        reduced = self._reduced_by_ddp()
        mine = [
            _HAS * (param.grad is not None) | _TRAINS * param.requires_grad | _REDUCED * (id(param) in reduced)
            for param in params
        ]
        every = torch.stack(self._comm.all_gather_tensor(torch.tensor(mine, dtype=torch.uint8)))
        self._check(every)
        used = [index for index, has in enumerate((every & _HAS).any(dim=0).tolist()) if has]
        average_in_place(self._comm, [_gradient(params[index]) for index in used], self._divisor)
        self._are_done = True

    def forget(self) -> None:
        """The gradients were used or dropped: average those of the next backward passes."""
        self._are_done = False

    def _reduced_by_ddp(self) -> set[int]:
        """The parameters that DDP models reduce, by identity; looked for once."""
        if not self._is_first:
            return set()
        self._is_first = False
        params = self._table.params
        return {id(param) for param in params if models_over([param])} if models_over(params) else set()

    def _check(self, every: Tensor) -> None:
        table, name = self._table, self._comm.name
        for index, column in enumerate(every.T.tolist()):
            if any(flags & _REDUCED for flags in column):
                raise RuntimeError(
                    f"Expected {table.label(index)} in no DDP model, since the optimizer averages its gradient, got "
                    "one that reduces it. Give the module that holds both DDP models to ParallelOptimizer(model, "
                    "...), or have DDP ignore the parameter."
                )
            trains = [bool(flags & _TRAINS) for flags in column]
            if len(set(trains)) > 1:
                frozen, trained = (name(GroupRank(trains.index(one))) for one in (False, True))
                raise RuntimeError(
                    f"Expected {table.label(index)} frozen on every rank that holds it or on none, got it frozen on "
                    f"{frozen} and trainable on {trained}. Freeze it on all ranks of its process_group."
                )


def _gradient(param: Tensor) -> Tensor:
    """The gradient, zeros where this rank has not used the parameter."""
    if param.grad is None:
        param.grad = torch.zeros_like(param)
    return param.grad


def check_same_values(comm: Communicator, tables: Sequence[ParameterTable]) -> None:
    """Check that parameters which no DDP model has sent to all ranks begin with the same values. A collective.

    Raises:
        ValueError: on every rank, naming the first that does not.
    """
    for table in tables:
        samples = [fingerprint.sample for fingerprint in table.fingerprints()]
        every = [text.split() for text in comm.all_gather_text(" ".join(samples))]
        for index, column in enumerate(zip(*every, strict=True)):
            other = next((rank for rank, sample in enumerate(column) if sample != column[0]), None)
            if other is not None:
                raise ValueError(
                    f"Expected the same values of {table.label(index)} on every rank that holds it, got different ones "
                    f"on {comm.name(GroupRank(0))} and {comm.name(GroupRank(other))}. DDP sends only what it does not "
                    "ignore: give ranks with the same expert the same seed, or broadcast its parameters within their "
                    "process_group."
                )
