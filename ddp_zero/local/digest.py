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


LINES = 16
"""Of which `BitSum.take` reads one, where it is asked to."""
LARGE_BYTES = 64 << 10
"""From so many on, memory is large."""
_LINE_WORDS = 8  # a cache line of 64 bytes


class BitSum:
    """Numbers that differ if bits of some memory differ, except for permutations of 8 bytes at a time.

    One reading pass at the speed of memory; `digest` takes 40 times as long on a CPU. Where the memory starts has no
    effect.

    Args:
        memory: any tensor, which stays where it is.
    """

    @torch.no_grad()
    def __init__(self, memory: Tensor) -> None:
        raw = memory.contiguous().reshape(-1).view(torch.uint8)
        if raw.storage_offset() % 8:
            raw = raw.clone()  # no number of 8 bytes starts there
        whole = raw.numel() // 8 * 8
        self._words = raw[:whole].view(torch.int64)
        self._rest = raw[whole:] if whole < raw.numel() else None
        self._is_large = raw.numel() >= LARGE_BYTES

    def take(self, line: int | None = None) -> Tensor:
        """Read the memory as it is now.

        Args:
            line: if it is large, read only this cache line of every `LINES`; None: all. A write to 1,088 neighbouring
                bytes shows in any.

        Returns:
            The sum of numbers of 8 bytes, wrapping around: an int64 scalar on the tensor's device.
        """
        words = self._words
        if line is None or not self._is_large:
            total = words.sum()
        else:
            whole = words.numel() // (LINES * _LINE_WORDS) * (LINES * _LINE_WORDS)
            total = words[:whole].view(-1, LINES, _LINE_WORDS)[:, line].sum()
            if whole < words.numel():
                total += words[whole:].sum()
        return total if self._rest is None else total + self._rest.sum()


def sum_of_bits(tensor: Tensor) -> Tensor:
    """`BitSum` of all of a tensor, once."""
    with torch.no_grad():
        return BitSum(tensor).take()
