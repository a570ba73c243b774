"""Gradients of parameters held by only some data-parallel ranks: averaged here, or by DDP with zeros of idle ranks.

Gradients that no DDP model reduces, such as gradients of experts that DDP was told to ignore, are averaged once per
step, after the last backward pass, so that a step may follow any number of passes. First the ranks that hold the
parameters exchange which of them have a gradient: a parameter used on some ranks only counts as zeros on all others,
and one that no rank has used keeps none.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from ddp_zero.core.comm import Communicator, StepFailedElsewhereError, average_in_place
from ddp_zero.core.ddp import finds_unused, in_buckets, models_over, reduced_parameters
from ddp_zero.core.local import ParameterTable
from ddp_zero.core.plan import GroupRank
from ddp_zero.parallel.placement import LocalParameter

_HAS, _TRAINS, _REDUCED, _FAILED = 1, 2, 4, 8


# Averages


@dataclass
class Averages:
    """Averages one member's gradients, over the ranks that hold its parameters."""

    comm: Communicator
    table: ParameterTable
    local_params: Sequence[LocalParameter]
    divisor: int  # of the sums: the number of ranks with separate inputs
    are_done: bool = field(init=False, default=False)  # True from `take` until `forget`
    _is_first: bool = field(init=False, default=True)

    def take(self, error: Exception | None = None, left_out: int = 0) -> None:
        """Average ``param.grad`` in place, once per step. A collective.

        Args:
            error: keeps this rank from stepping, and is raised; its peers then raise instead of waiting for it.
            left_out: how many ranks with separate inputs do not count in the divisor, under Join.

        Raises:
            RuntimeError: on every rank, if a parameter is frozen on some of them only, or a DDP model reduces it; if
                another rank has failed.
            NotImplementedError: for a gradient that is not dense.
        """
        if self.are_done:
            return
        # redistributes gradients of distributed tensors if needed, a collective of their mesh: ranks that return above
        # must return together
        for param in self.local_params:
            param.fetch_gradient()
        params = self.table.params
        flags = [_FAILED] * len(params)
        try:
            if error is None:
                flags = self._statements()
        except NotImplementedError as raised:
            error = raised
        # a failed rank sends its flags too: its peers wait here for them
        all_flags = torch.stack(self.comm.all_gather_tensor(torch.tensor(flags, dtype=torch.uint8)))
        if error is not None:
            raise error.with_traceback(error.__traceback__)
        self._check(all_flags)
        # from the flags of all ranks, so that all average the same parameters in the same order, whoever has used them
        used = [index for index, has in enumerate((all_flags & _HAS).any(dim=0).tolist()) if has]
        average_in_place(self.comm, [_gradient(params[index]) for index in used], self.divisor - left_out)
        self.are_done = True

    def forget(self) -> None:
        """Gradients were consumed or dropped: average again after the next backward passes."""
        self.are_done = False

    def _statements(self) -> list[int]:
        self.table.check_gradients()
        reduced = self._find_reduced()
        return [
            _HAS * (param.grad is not None) | _TRAINS * param.requires_grad | _REDUCED * (id(param) in reduced)
            for param in self.table.params
        ]

    def _find_reduced(self) -> set[int]:
        """Parameters that DDP models reduce, by identity; searched once."""
        if not self._is_first:
            return set()
        self._is_first = False
        params = self.table.params
        reduced = {id(param) for ddp in models_over(params) for _, param in in_buckets(ddp)}
        return reduced.intersection(map(id, params))

    def _check(self, all_flags: Tensor) -> None:
        """Raise on every rank if one has failed, or a parameter must not be averaged; ``all_flags`` by rank."""
        table, name = self.table, self.comm.name
        failed = [name(GroupRank(rank)) for rank, flags in enumerate(all_flags[:, :1].tolist()) if _FAILED in flags]
        if failed:
            raise StepFailedElsewhereError(
                f"Expected gradients of every rank, got a failure on {', '.join(failed)}. Treat the error there. "
                "[ZERO-505]"
            )
        for index, column in enumerate(all_flags.T.tolist()):
            if any(flags & _REDUCED for flags in column):
                raise RuntimeError(
                    f"A DDP model reduces {table.label(index)}, whose gradient the optimizer averages as well. Give "
                    "the module that holds both DDP models to ParallelOptimizer(model, ...), or have DDP ignore the "
                    "parameter. [ZERO-803]"
                )
            trains = [bool(flags & _TRAINS) for flags in column]
            if len(set(trains)) > 1:
                frozen, trained = (name(GroupRank(trains.index(flag))) for flag in (False, True))
                raise RuntimeError(
                    f"{table.label(index)} is frozen on {frozen} and trainable on {trained}, which both hold it. "
                    "Freeze it on all ranks of its process_group. [ZERO-821]"
                )


def _gradient(param: Tensor) -> Tensor:
    if param.grad is None:
        param.grad = torch.zeros_like(param)
    return param.grad


def check_same_values(comm: Communicator, table: ParameterTable) -> None:
    """Raise ValueError on every rank if parameters that DDP does not broadcast start unequal. A collective."""
    samples = [fingerprint.sample for fingerprint in table.fingerprints()]
    every = [text.split() for text in comm.all_gather_text(" ".join(samples))]
    for index, column in enumerate(zip(*every, strict=True)):
        other = next((rank for rank, sample in enumerate(column) if sample != column[0]), None)
        if other is not None:
            raise ValueError(
                f"{table.label(index)} has different values on {comm.name(GroupRank(0))} and "
                f"{comm.name(GroupRank(other))}, which both hold it. DDP sends only parameters that it does not "
                "ignore: give ranks with the same expert the same seed, or broadcast its parameters within their "
                "process_group. [ZERO-807]"
            )


# Ranks without gradients


def take_part_with_zeros(ddp: DistributedDataParallel) -> None:
    """Let a rank whose experts received no tokens take part in DDP's reduction, with zero gradients.

    Forward passes that would use no parameter then use all of them, as if the experts had run on empty batches.
    """
    # DDP averages parameters that some ranks have not used, but a rank that has used none never starts its reducer, and
    # the ranks that hold the same experts wait for it until the time-out (torch 2.13.0)
    if finds_unused(ddp):
        ddp.module.register_forward_hook(_Tie([param for _, param in reduced_parameters(ddp)]))


class _Tie:
    """A forward hook of the module in a DDP model; has no effect in copies of the model."""

    def __init__(self, params: Collection[Tensor] = ()) -> None:
        self._params = list(params)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        # without the parameters: a copied hook must not tie the copy to the original's
        return _Tie, ()

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        trained = [param for param in self._params if param.requires_grad]
        if not (trained and torch.is_grad_enabled()) or torch.compiler.is_compiling():
            return output
        outputs = list[Tensor]()
        tree_map_only(Tensor, outputs.append, output)
        if not any(tensor.requires_grad for tensor in outputs) or not set(map(id, trained)).isdisjoint(
            _leaves_of(outputs)
        ):
            return output
        tie: Callable[..., Tensor] = _WithZeros.apply
        return tree_map_only(Tensor, lambda tensor: tie(tensor, *trained) if tensor.requires_grad else tensor, output)


class _WithZeros(Function):
    """Identity whose graph gives parameters zero gradients."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, *params: Tensor) -> Tensor:
        ctx.save_for_backward(*params)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], *(torch.zeros_like(param) for param in ctx.saved_tensors)


def _leaves_of(outputs: Collection[Tensor]) -> Iterator[int]:
    """The identities of the leaf tensors that the graphs of these outputs reach."""
    seen = set[Any]()
    waiting = [output.grad_fn for output in outputs if output.grad_fn is not None]
    while waiting:
        node = waiting.pop()
        if hasattr(node, "variable"):
            yield id(node.variable)
        following: list[Any] = [
            output for output, _ in node.next_functions if output is not None and output not in seen
        ]
        seen.update(following)
        waiting += following
