"""``offload="cpu"``: parameters on an accelerator are stepped on the host; those on the CPU where they are."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ddp_zero.core.offload.copy_pipeline import Passage
from ddp_zero.core.offload.state_placement import Load, Residence
from ddp_zero.core.offload.transfer import transfer_for

_HOST = torch.device("cpu")


class OnHost(Residence):
    """On the host. Masters and states are there, and copies of parameters that have no master.

    Args:
        buffers: pinned buffers per device.
    """

    carries = True

    def __init__(self, buffers: int) -> None:
        self._num_buffers = buffers
        self._passages: dict[torch.device, Passage | None] = {}

    def is_away(self, device: torch.device) -> bool:
        """True for parameters on an accelerator."""
        return self._passage(device) is not None

    def new(self, value: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A copy in the host's memory."""
        return value.detach().to(_HOST, dtype, copy=True)

    def place(self, value: Tensor, device: torch.device) -> Tensor:
        """The tensor in the host's memory."""
        return value.to(_HOST)

    def arrive(
        self, bucket: int, device: torch.device, source: Any, loads: Callable[[], Sequence[Load]]
    ) -> Iterator[tuple[int, Any]]:
        """Send a bucket to the host, and yield those that have come; one that is there comes after all others."""
        passage = self._passage(device)
        for other in self._all():
            if other is not passage:
                yield from other.drain()
        if passage is None:
            yield bucket, source
        else:
            yield from passage.arrive(bucket, loads)

    def drain(self) -> Iterator[tuple[int, Any]]:
        """Yield all buckets that are on the way."""
        for passage in self._all():
            yield from passage.drain()

    def show(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copy to parameters; within the step of a bucket through its buffer, else at once."""
        passage = next((one for one in self._all() if one.is_stepping), None)
        if passage is not None and pairs:
            passage.show(pairs)
        for target, stepped in pairs if passage is None else ():
            target.copy_(stepped)

    def abandon(self) -> None:
        """Forget what is on the way."""
        for passage in self._all():
            passage.abandon()

    def fresh(self) -> Residence:
        """A copy with separate buffers, for a copied optimizer."""
        return OnHost(self._num_buffers)

    def describe(self) -> list[str]:
        """The pinned memory."""
        nbytes = sum(passage.nbytes for passage in self._all())
        return [f"offload: state and step on the host, {nbytes:,} bytes in {self._num_buffers} pinned buffers a device"]

    def _passage(self, device: torch.device) -> Passage | None:
        if device not in self._passages:
            transfer = transfer_for(device)
            self._passages[device] = None if transfer is None else Passage(transfer, self._num_buffers)
        return self._passages[device]

    def _all(self) -> list[Passage]:
        return [passage for passage in self._passages.values() if passage is not None]


def moved(value: Any, move: Callable[[Tensor], Tensor]) -> Any:
    """A state with its tensors moved, however nested; mappings and lists are changed in place.

    Tensors without dimensions, such as step counters, stay: optimizers read them on the host, and they are small.
    """
    if isinstance(value, Tensor):
        return move(value) if value.dim() else value
    if isinstance(value, dict):
        for key, item in value.items():
            value[key] = moved(item, move)
    elif isinstance(value, list):
        value[:] = [moved(item, move) for item in value]
    elif type(value) is tuple:
        return tuple(moved(item, move) for item in value)
    return value


def tensors_in(value: Any) -> Iterable[Tensor]:
    """The tensors with dimensions in a state, however nested."""
    if isinstance(value, Tensor):
        if value.dim():
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
