"""A hash of the bits of a tensor."""

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
