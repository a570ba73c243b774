"""Hashes of the bits of a tensor: a fast one, and one that sees permutations."""

import torch
from torch import Tensor

_CHUNK = 1 << 20
"""Elements of a parameter that are hashed at a time."""


@torch.no_grad()
def digest(tensor: Tensor) -> Tensor:
    """The sum of the elements' bits, each times a number that depends on its position."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[real.element_size()]
    for start, chunk in enumerate(real.reshape(-1).split(_CHUNK)):
        place = torch.arange(len(chunk), device=tensor.device) + (start * _CHUNK + 1)
        place.mul_(-7046029254386353131)
        place.bitwise_xor_(place >> 29).mul_(-4658895280553007687)
        place.bitwise_xor_(place >> 32).bitwise_or_(1)
        total += (chunk.view(bits) * place).sum()
    return total


@torch.no_grad()
def sum_of_bits(tensor: Tensor) -> Tensor:
    """A number that differs if bits differ, except for permutations: 8 bytes at a time as integers, wrapping around.

    One reading pass at the speed of memory; `digest` takes 40 times as long on a CPU. Where the tensor starts has no
    effect.

    Returns:
        An int64 scalar on the tensor's device.
    """
    raw = tensor.contiguous().reshape(-1).view(torch.uint8)
    if raw.storage_offset() % 8:
        raw = raw.clone()  # no number of 8 bytes starts there
    whole = raw.numel() // 8 * 8
    total = raw[:whole].view(torch.int64).sum()
    return total if whole == raw.numel() else total + raw[whole:].sum()
