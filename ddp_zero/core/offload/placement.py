"""The memory of masters, optimizer state and copies of parameters: with the parameters, on the host, or in files.

`Residence` is the place beside the parameters, which does nothing; `OnHost` and `OnDisk` override it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddp_zero.core.offload.copy_pipeline import Load, Passage, transfer_for
from ddp_zero.core.offload.mapped_file import Shelf
from ddp_zero.options import Offload

_HOST = torch.device("cpu")


class Residence:
    """With the parameters: masters and states are on their devices, and nothing travels.

    Attributes:
        keeps: whether states are moved after they were created; see `keep`.
        carries: whether buckets travel to where they are stepped; see `arrive`.
    """

    keeps = False
    carries = False

    def is_away(self, device: torch.device) -> bool:
        """True if parameters on this device are stepped as copies elsewhere."""
        return False

    def new(self, value: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for a stepped tensor of a parameter on ``device``, with a copy of this value.

        Raises:
            RuntimeError: if there is no room.
        """
        return value.detach().to(device, dtype, copy=True)

    def place(self, value: Tensor, device: torch.device) -> Tensor:
        """A tensor of a state, of a parameter on ``device``, where states live; itself if it is there already."""
        return value.to(device)

    def keep(self, states: Iterable[Any]) -> int:
        """Move states, changed in place, to where they live. Returns how many bytes were moved."""
        return 0

    def reserve(self, likes: Iterable[Tensor]) -> None:
        """Make sure that there will be room for such tensors, or raise RuntimeError."""

    def check(self) -> None:
        """Before a step: check that the memory can still be reached, or raise RuntimeError."""

    # On the way: in the order of buckets, which is the same on every rank

    def arrive(
        self, bucket: int, device: torch.device, source: Any, loads: Callable[[], Sequence[Load]]
    ) -> Iterator[tuple[int, Any]]:
        """Send a bucket to where it is stepped. Yields those that can be stepped now, with sources of gradients.

        Args:
            bucket: its index.
            device: of its parameters.
            source: of its gradients, where it is stepped with the parameters.
            loads: the tensors that have to travel; asked for once, if any do.
        """
        yield bucket, source

    def drain(self) -> Iterator[tuple[int, Any]]:
        """Yields the buckets that are left, as they can be stepped."""
        return iter(())

    def show(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copy stepped tensors to parameters, rounded; pairs of a parameter's memory and its stepped tensor."""
        torch._foreach_copy_([target for target, _ in pairs], [stepped for _, stepped in pairs])

    def abandon(self) -> None:
        """Forget buckets that are on the way."""

    def fresh(self) -> "Residence":
        """One of the same kind for a copy of an optimizer."""
        return self

    def describe(self) -> list[str]:
        """Lines for ``opt.explain()``."""
        return []


class OnHost(Residence):
    """``offload="cpu"``: parameters on an accelerator are stepped on the host; those on the CPU where they are.

    Masters and states are on the host, and copies of parameters that have no master.

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
        """Forget buckets that are on the way."""
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


class OnDisk(OnHost):
    """In a file. A state is created in memory, one bucket at a time, and moved to the file right after its first step.

    Args:
        buffers: pinned buffers per device.
        folder: where the file is made.

    Raises:
        RuntimeError: if no file can be made there.
    """

    keeps = True

    def __init__(self, buffers: int, folder: Path) -> None:
        super().__init__(buffers)
        self._shelf = Shelf(folder)

    def new(self, value: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A copy in the file."""
        value = value.detach()
        return self._shelf.room(value, dtype).copy_(value)

    def place(self, value: Tensor, device: torch.device) -> Tensor:
        """The tensor in the file."""
        return value if self._shelf.has(value) else self._shelf.room(value, value.dtype).copy_(value.detach())

    def keep(self, states: Iterable[Any]) -> int:
        """Move states into the file, and let them leave memory."""
        nbytes, kept = 0, []
        for state in states:
            outside = [one.nbytes for one in tensors_in(state) if not (one.is_meta or self._shelf.has(one))]
            nbytes += sum(outside)
            if outside:
                moved(state, lambda tensor: self.place(tensor, tensor.device))
            kept += list(tensors_in(state))
        self._shelf.drop(kept)
        return nbytes

    def reserve(self, likes: Iterable[Tensor]) -> None:
        """Allocate blocks of the file for them."""
        self._shelf.reserve([like.numel() * like.element_size() for like in likes])

    def check(self) -> None:
        """Check that the file is still there."""
        self._shelf.check()

    def fresh(self) -> Residence:
        """A copy with a file of its own in the same folder."""
        return OnDisk(self._num_buffers, self._shelf.folder)

    def describe(self) -> list[str]:
        """The size of the file."""
        where = f"{self._shelf.nbytes:,} bytes in a file in {self._shelf.folder}"
        return [f"offload: state in memory-mapped memory, {where}"]


def residence_for(given: Offload | str | None) -> Residence:
    """The residence of stepped tensors with these options; RuntimeError if no file can be made in the folder."""
    offload = Offload.of(given)
    if offload is None:
        return Residence()
    if offload.folder is None:
        return OnHost(offload.buffers)
    return OnDisk(offload.buffers, Path(offload.folder))


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


def tensors_in(value: Any, *, scalars: bool = False) -> Iterator[Tensor]:
    """The tensors in a state, however nested; those without dimensions only with ``scalars``."""
    if isinstance(value, Tensor):
        if value.dim() or scalars:
            yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(item, scalars=scalars)
