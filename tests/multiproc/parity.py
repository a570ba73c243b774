"""How far a training in parallel is from the plain optimizer, and from one device; gathered over the ranks."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

NORM_TOLERANCE, ONE_DEVICE_TOLERANCE = 1e-6, 5e-4


@dataclass
class Parity:
    """The largest differences so far.

    Attributes:
        plain: of a parameter from that of the same parallel model with the plain optimizer and the same reductions.
        norm: of a norm from that of one device, as a ratio; None if none was compared.
        one_device: of a parameter from that of the whole model on one device; None if none was compared.
    """

    plain: float | None = None
    norm: float | None = None
    one_device: float | None = None

    def note_plain(self, expected: Iterable[Tensor], found: Iterable[Tensor]) -> None:
        """Compare parameters with those of the plain optimizer."""
        for one, other in zip(expected, found, strict=True):
            self.plain = max(self.plain or 0.0, _difference(one, other))

    def note_norm(self, found: Tensor | float, expected: Tensor) -> None:
        """Compare a norm with that of one device; it must be equal to 1e-6."""
        ratio = abs(float(found) / float(expected) - 1)
        assert ratio <= NORM_TOLERANCE, f"norm {float(found)}, on one device {float(expected)}"
        self.norm = max(self.norm or 0.0, ratio)

    def note_one_device(self, found: Tensor, expected: Tensor) -> None:
        """Compare a parameter with that of one device, whose sums round differently."""
        difference = _difference(found, expected)
        assert difference <= ONE_DEVICE_TOLERANCE, f"{difference} from one device"
        self.one_device = max(self.one_device or 0.0, difference)


def largest(of_ranks: Iterable[Parity]) -> Parity:
    """Over ranks."""
    every = list(of_ranks)
    found = [[getattr(one, name) for one in every] for name in ("plain", "norm", "one_device")]
    return Parity(*(max((value for value in values if value is not None), default=None) for values in found))


def _difference(one: Tensor, other: Tensor) -> float:
    with torch.no_grad():
        return float((one.double() - other.double()).abs().max()) if one.numel() else 0.0
