"""Averages gradients that no DDP model reduces, such as those of experts that DDP was told to ignore.

It happens once per step, after the last backward pass, so that a step may follow any number of them. First the ranks
that hold the parameters exchange which of them have a gradient: one that is used on some ranks only counts as zeros on
the others, and one that no rank has used keeps none.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ddp_zero.core.backward.reducer import models_over, reduced_parameters
from ddp_zero.core.comm.agreement import StepFailedElsewhereError
from ddp_zero.core.comm.communicator import Communicator
from ddp_zero.core.comm.reduction import average_in_place
from ddp_zero.core.local.parameters import ParameterTable
from ddp_zero.core.plan.partition import GroupRank
from ddp_zero.optimizer import ZeroRedundancyOptimizer
from ddp_zero.parallel.errors import GlobalErrorCheck
from ddp_zero.parallel.members import check_can_step
from ddp_zero.parallel.shards import Shards

_HAS, _TRAINS, _REDUCED, _FAILED = 1, 2, 4, 8


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

    def take(self, error: Exception | None = None) -> None:
        """Average what is in ``param.grad``, unless that was done since the last step. A collective.

        Args:
            error: why this rank cannot step; its peers then raise instead of waiting for it.

        Raises:
            Exception: this error.
            RuntimeError: on every rank, if a parameter is frozen on some of them only, or a DDP model reduces it; if
                another rank has failed.
            NotImplementedError: for a gradient that is not dense.
        """
        if self._are_done:
            return
        self._shards.bring_gradients()
        params = self._table.params
        mine = [_FAILED] * len(params)
        try:
            if error is None:
                mine = self._statements()
        except NotImplementedError as raised:
            error = raised
        every = torch.stack(self._comm.all_gather_tensor(torch.tensor(mine, dtype=torch.uint8)))
        if error is not None:
            raise error.with_traceback(error.__traceback__)
        self._check(every)
        used = [index for index, has in enumerate((every & _HAS).any(dim=0).tolist()) if has]
        average_in_place(self._comm, [_gradient(params[index]) for index in used], self._divisor)
        self._are_done = True

    def forget(self) -> None:
        """The gradients were used or dropped: average those of the next backward passes."""
        self._are_done = False

    def _statements(self) -> list[int]:
        """What the ranks tell each other about every parameter."""
        self._table.check_gradients()
        reduced = self._reduced_by_ddp()
        return [
            _HAS * (param.grad is not None) | _TRAINS * param.requires_grad | _REDUCED * (id(param) in reduced)
            for param in self._table.params
        ]

    def _reduced_by_ddp(self) -> set[int]:
        """The parameters that DDP models reduce, by identity; looked for once."""
        if not self._is_first:
            return set()
        self._is_first = False
        params = self._table.params
        reduced = {id(param) for ddp in models_over(params) for _, param in reduced_parameters(ddp)}
        return reduced.intersection(map(id, params))

    def _check(self, every: Tensor) -> None:
        table, name = self._table, self._comm.name
        failed = [name(GroupRank(rank)) for rank, flags in enumerate(every[:, :1].tolist()) if _FAILED in flags]
        if failed:
            raise StepFailedElsewhereError(f"Expected gradients of every rank, got a failure on {', '.join(failed)}.")
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


def average_together(
    assembly: GlobalErrorCheck, members: Sequence[ZeroRedundancyOptimizer], averages: Sequence[Averages | None]
) -> None:
    """Average what no DDP model reduces, and check that all ranks can step. A collective.

    Args:
        assembly: all ranks that hold parts of the model.
        members: the optimizers.
        averages: of each member, if no DDP model reduces its gradients.

    Raises:
        RuntimeError: on every rank if one has failed; see `Averages.take` and `check_can_step`.
    """
    error: Exception | None = None
    try:
        for member in members:
            check_can_step(member)
    except Exception as raised:
        error = raised
    for average in averages:
        try:
            if average is not None:
                average.take(error)
        except Exception as raised:
            error = error or raised
    assembly.check(error, "averaging gradients")


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
