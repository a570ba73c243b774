"""Where what is stepped lives: masters, optimizer state, and copies of parameters that are stepped elsewhere.

`Residence` is the place beside the parameters, which does nothing. `OnHost` and `OnDisk` override it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Load:
    """What has to travel for the step of one parameter.

    Attributes:
        index: the parameter.
        gradient: as reduced, in the shape of what is stepped.
        value: the parameter, or this rank's part of it, if what is stepped is a copy of it; None for a master.
        stepped: the tensor that the inner optimizer steps.
    """

    index: int
    gradient: Tensor
    value: Tensor | None
    stepped: Tensor


class Arrived:
    """Gradients that have arrived where they are stepped; a source of gradients for the step of a bucket.

    Args:
        gradients: by parameter index.
    """

    def __init__(self, gradients: dict[int, Tensor]) -> None:
        self._gradients = gradients

    def gradient(self, index: int) -> Tensor | None:
        """The gradient, in the dtype in which it was reduced; None if the parameter has none."""
        return self._gradients.get(index)

    def exact(self, index: int) -> None:
        """None: ``gradient`` is exact."""


class Residence:
    """With the parameters: masters and states are on their devices, and nothing travels.

    Attributes:
        keeps: whether states are moved after they were created; see `keep`.
        carries: whether buckets travel to where they are stepped; see `arrive`.
    """

    keeps = False
    carries = False

    def is_away(self, device: torch.device) -> bool:
        """Whether parameters on this device are stepped as copies elsewhere."""
        return False

    def new(self, value: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for a stepped tensor, with a copy of this value.

        Args:
            value: on any device.
            dtype: of the result.
            device: of the parameter.

        Raises:
            RuntimeError: if there is no room.
        """
        return value.detach().to(device, dtype, copy=True)

    def place(self, value: Tensor, device: torch.device) -> Tensor:
        """A tensor of a state where states live; the tensor itself if it is there already.

        Args:
            value: on any device.
            device: of the parameter.
        """
        return value.to(device)

    def keep(self, states: Iterable[Any]) -> int:
        """Move states, changed in place, to where they live. Returns how many bytes were moved."""
        return 0

    def reserve(self, likes: Iterable[Tensor]) -> None:
        """Make sure that there will be room for such tensors.

        Raises:
            RuntimeError: if there is none.
        """

    def check(self) -> None:
        """Before a step: check that what lives here can still be reached.

        Raises:
            RuntimeError: if not.
        """

    # On the way: in the order of buckets, which is the same on every rank

    def arrive(
        self, bucket: int, device: torch.device, source: Any, loads: Callable[[], Sequence[Load]]
    ) -> Iterator[tuple[int, Any]]:
        """Send a bucket to where it is stepped. Yields those that can be stepped now, with sources of gradients.

        Args:
            bucket: its index.
            device: of its parameters.
            source: of its gradients, where it is stepped with the parameters.
            loads: what has to travel; asked for once, if it does.
        """
        yield bucket, source

    def drain(self) -> Iterator[tuple[int, Any]]:
        """Yields the buckets that are left, as they can be stepped."""
        return iter(())

    def show(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copy stepped tensors to parameters, rounded.

        Args:
            pairs: memory of a parameter, and what was stepped for it.
        """
        torch._foreach_copy_([target for target, _ in pairs], [stepped for _, stepped in pairs])

    def abandon(self) -> None:
        """Forget what is on the way."""

    # Information

    def fresh(self) -> "Residence":
        """One of the same kind for a copy of an optimizer."""
        return self

    def describe(self) -> list[str]:
        """Lines for ``opt.explain()``."""
        return []
