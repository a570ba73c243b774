"""Offload to a disk: masters and states in memory-mapped files, stepped on the host."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddp_zero.core.offload.host import OnHost, moved, tensors_in
from ddp_zero.core.offload.mapped_file import Shelf
from ddp_zero.core.offload.state_placement import Residence
from ddp_zero.options import Offload


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
        """Another one, with a file of its own in the same folder."""
        return OnDisk(self._num_buffers, self._shelf.folder)

    def describe(self) -> list[str]:
        """The size of the file."""
        where = f"{self._shelf.nbytes:,} bytes in a file in {self._shelf.folder}"
        return [f"offload: state in memory-mapped memory, {where}"]


def residence_for(given: Offload | str | None) -> Residence:
    """Where what is stepped lives with these options.

    Raises:
        RuntimeError: if no file can be made in the folder.
    """
    offload = Offload.of(given)
    if offload is None:
        return Residence()
    if offload.folder is None:
        return OnHost(offload.buffers)
    return OnDisk(offload.buffers, Path(offload.folder))
