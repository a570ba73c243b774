"""Tensors of random bits."""

import torch
from torch import Tensor

from ddp_zero.values.tree import as_bytes


def of_random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """A tensor with any bits in it, NaNs too."""
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(shape)


def bits(tensor: Tensor) -> bytes:
    """The elements in logical order."""
    return bytes(as_bytes(tensor.detach()).tolist())
