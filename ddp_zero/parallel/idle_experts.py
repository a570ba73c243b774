"""Lets a rank whose experts received no tokens take part in DDP's reduction with zero gradients.

DDP averages parameters that some ranks have not used, but not on a rank that has used none: nothing starts its reducer
there, and the ranks that hold the same experts wait for it until their time-out (torch 2.13.0). So such a rank takes
part with zeros, as if it had run its experts on empty batches.
"""

from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from ddp_zero.core.backward.reducer import finds_unused, reduced_parameters


def take_part_with_zeros(ddp: DistributedDataParallel) -> None:
    """Have forward passes of a model that looks for unused parameters use all of them where they would use none."""
    if finds_unused(ddp):
        ddp.module.register_forward_hook(_Tie([param for _, param in reduced_parameters(ddp)]))


class _Tie:
    """A forward hook of the module in a DDP model; it does nothing in copies of the model."""

    def __init__(self, params: Collection[Tensor] = ()) -> None:
        self._params = list(params)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return _Tie, ()

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        trained = [param for param in self._params if param.requires_grad]
        if not (trained and torch.is_grad_enabled()) or torch.compiler.is_compiling():
            return output
        found = list[Tensor]()
        tree_map_only(Tensor, found.append, output)
        if not any(one.requires_grad for one in found) or not set(map(id, trained)).isdisjoint(_leaves_of(found)):
            return output
        tie: Callable[..., Tensor] = _WithZeros.apply
        return tree_map_only(Tensor, lambda one: tie(one, *trained) if one.requires_grad else one, output)


class _WithZeros(Function):
    """A tensor as it is, whose graph has parameters with zero gradients."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, *params: Tensor) -> Tensor:
        ctx.save_for_backward(*params)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], *(torch.zeros_like(param) for param in ctx.saved_tensors)


def _leaves_of(outputs: Collection[Tensor]) -> Iterator[int]:
    """The identities of the leaves that a graph reaches."""
    seen, waiting = set[Any](), [one.grad_fn for one in outputs if one.grad_fn is not None]
    while waiting:
        node = waiting.pop()
        if hasattr(node, "variable"):
            yield id(node.variable)
        following: list[Any] = [one for one, _ in node.next_functions if one is not None and one not in seen]
        seen.update(following)
        waiting += following
