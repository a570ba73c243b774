"""A part of a parameter: consecutive elements in the order of its memory, as a 1-D tensor.

Parameters that are cut are dense, so this order is a function of shape and strides: the same on every rank.
"""

import torch
from torch import Tensor

from ddp_zero.core.plan.shapes import is_dense


def run_of(tensor: Tensor) -> Tensor:
    """All elements of a dense tensor, 1-D, in the order of its memory; a view."""
    return tensor.as_strided((tensor.numel(),), (1,))


@torch.no_grad()
def part_of(value: Tensor, param: Tensor, part: slice) -> Tensor:
    """The elements of a part, 1-D; a view if the value's strides are those of the parameter.

    Args:
        value: of the parameter's shape.
        param: determines the order of elements.
        part: which of them.
    """
    if value.stride() != param.stride():
        value = torch.empty_like(param, dtype=value.dtype, device=value.device).copy_(value)
    return run_of(value.detach())[part]


def whole_of(run: Tensor, param: Tensor) -> Tensor:
    """All elements of a parameter, 1-D and contiguous, in its shape and strides; a view."""
    return run.as_strided(param.shape, param.stride())


def check_can_be_cut(param: Tensor, label: str) -> None:
    """Check that a parameter's elements fill one run of memory.

    Raises:
        ValueError: naming the parameter.
    """
    if not is_dense(param.shape, param.stride()):
        raise ValueError(
            f"Expected parameters without gaps or overlaps in memory with partition='elements', got {label} with "
            f"strides {list(param.stride())}. Use partition='parameters'."
        )
