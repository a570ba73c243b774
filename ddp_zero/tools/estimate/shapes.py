"""Bytes of optimizer state, by what a step of tensors without memory creates."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_zero.core.local.inner import state_like
from ddp_zero.core.offload.placement import tensors_in


class StateBytes:
    """Sizes of the state tensors of one optimizer class; each shape is stepped once.

    Args:
        optimizer_class: builds the optimizer.
        options: for it.

    Raises:
        TypeError: for options that the class does not accept.
    """

    def __init__(self, optimizer_class: Callable[..., Optimizer], options: dict[str, Any]) -> None:
        plain = {key: False if key in ("fused", "foreach") else value for key, value in options.items()}
        self._inner = optimizer_class([nn.Parameter(torch.empty(1, 1, device="meta"))], **plain)
        self._known: dict[Any, tuple[int, ...]] = {}

    def of(self, like: Tensor, dtype: torch.dtype, part: int | None = None) -> tuple[int, ...]:
        """Bytes of each tensor of the state of a parameter.

        Args:
            like: the parameter; only its shape counts.
            dtype: of what is stepped.
            part: how many elements a rank steps of one that is cut; None: all, in its shape.
        """
        shape = tuple(like.shape) if part is None else (part,)
        if (shape, dtype) not in self._known:
            stepped = torch.empty(shape, dtype=dtype, device="meta")
            state = state_like(self._inner, self._inner.param_groups[0], stepped)
            self._known[shape, dtype] = tuple(tensor.nbytes for tensor in tensors_in(state))
        return self._known[shape, dtype]
