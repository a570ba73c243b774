"""A parameter's value that backward reads again, perhaps after the parameter's own gradient is complete.

Where a step is taken inside backward, the value may be a new one by then. Torch notices it of tensors that were saved
for backward, and raises; of the others nothing can. Whether a pass may or must raise is told from the plain run: from
the order in which gradients are complete there, and from the moments of the reads.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

MESSAGE = "modified by an inplace operation"

Events = list[Tensor | None]
"""Parameters in the order in which their gradients are complete, and None where a value is read."""


def read_again(kind: str, rows: Tensor, param: Tensor, note: Callable[[], None] = lambda: None) -> Tensor:
    """Rows multiplied by values of a parameter that backward reads again.

    Args:
        kind: one of `tests.fuzz.case.LATE_VALUES`.
        rows: of any shape.
        param: whose values are read.
        note: called when backward is about to read.
    """
    if kind == "some ranks" and rows.detach().sum() <= 0:
        return rows
    read = _KINDS[kind](rows, param)
    if read.requires_grad:
        read.register_hook(lambda grad: note())
    return read


def _times(rows: Tensor, param: Tensor) -> Tensor:
    """Views of the parameter, which share its version counter, and of which a rank may own one part."""
    for end in (0, -1):
        value = param[(end,) * (param.dim() - 1)]
        rows = rows + rows * (value[:1] if end == 0 else value[-1:])
    return rows


def _saved(rows: Tensor, param: Tensor) -> Tensor:
    return _times(rows, param.detach())


class _Reads(torch.autograd.Function):
    """Keeps the parameter itself, without `save_for_backward`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, kept: list[Tensor]) -> Tensor:
        ctx.kept = kept
        return _saved(rows, kept[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _saved(grads[0], ctx.kept[0]), None


def _in_function(rows: Tensor, param: Tensor) -> Tensor:
    read: Tensor = _Reads.apply(rows, [param])  # type: ignore[no-untyped-call]
    return read


def _in_hook(rows: Tensor, param: Tensor) -> Tensor:
    rows = rows * 1
    if rows.requires_grad:
        rows.register_hook(lambda grad: _saved(grad, param))
    return rows


def _in_checkpoint(rows: Tensor, param: Tensor, is_reentrant: bool = False) -> Tensor:
    # torch would check a parameter among the arguments
    read: Tensor = checkpoint(lambda rows: _saved(rows, param), rows, use_reentrant=is_reentrant)
    return read


_KINDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "saved": _saved,
    "tied": _times,
    "some ranks": _saved,
    "function": _in_function,
    "hook": _in_hook,
    "checkpoint": _in_checkpoint,
    "reentrant": lambda rows, param: _in_checkpoint(rows, param, is_reentrant=True),
}


@contextmanager
def watched(net: Any) -> Iterator[Events]:
    """The events of the backward passes of a context.

    Args:
        net: a module that notes reads in its list ``noted``.
    """
    events: Events = []
    net.noted = events
    params = [param for param in net.parameters() if param.requires_grad]
    handles = [param.register_post_accumulate_grad_hook(events.append) for param in params]
    try:
        yield events
    finally:
        net.noted = None
        for handle in handles:
            handle.remove()


def may_raise(
    events: Sequence[Tensor | None], param: nn.Parameter, stepped: Sequence[Tensor], interleaved: bool
) -> bool:
    """Whether a step inside backward may change the value before a read.

    Args:
        events: of the plain run.
        param: whose value is read.
        stepped: the parameters of the optimizer.
        interleaved: whether a bucket is stepped before the last one of them is complete.
    """
    ids = set(map(id, stepped))
    return id(param) in ids and any(
        interleaved or ids.isdisjoint(map(id, events[place + 1 :])) for place in _late_reads(events, param)
    )


def must_raise(events: Sequence[Tensor | None], param: nn.Parameter) -> bool:
    """Whether every gradient is complete before a read: where a step inside backward takes them all, it is taken."""
    return any(events[place + 1 :].count(None) == len(events) - place - 1 for place in _late_reads(events, param))


def _late_reads(events: Sequence[Tensor | None], param: nn.Parameter) -> list[int]:
    return [
        place
        for place, event in enumerate(events)
        if event is None and any(before is param for before in events[:place])
    ]
