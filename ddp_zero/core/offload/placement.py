"""The memory of masters, optimizer state and copies of parameters: with the parameters, on the host, or in files.

`Residence` is the default beside the parameters, which copies nothing; `OnHost` and `OnDisk` override it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddp_zero.core.offload.copy_pipeline import CopyPipeline, Load, transfer_for
from ddp_zero.core.offload.mapped_file import MappedFile
from ddp_zero.options import Offload

_HOST = torch.device("cpu")


class Residence:
    """Masters and states on the parameters' devices; nothing is copied.

    Attributes:
        keeps: True if states are moved after their creation; see `keep`.
        carries: True if buckets are copied to the memory of their step; see `arrive`.
    """

    keeps = False
    carries = False

    def is_away(self, device: torch.device) -> bool:
        """True if parameters on this device are stepped as copies elsewhere."""
        return False

    def new(self, value: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for a stepped tensor of a parameter on ``device``, with a copy of this value; RuntimeError if full."""
        return value.detach().to(device, dtype, copy=True)

    def place(self, value: Tensor, device: torch.device) -> Tensor:
        """A state's tensor, of a parameter on ``device``, in the memory of states; the tensor itself if it is there."""
        return value.to(device)

    def keep(self, states: Iterable[Any]) -> int:
        """Move states in place to the memory of states. Returns the number of bytes moved."""
        return 0

    def reserve(self, likes: Iterable[Tensor]) -> None:
        """Make sure that there is memory for such tensors, or raise RuntimeError."""

    def check(self) -> None:
        """Before a step: check that the memory can be reached, or raise RuntimeError."""

    # Buckets in flight: in the order of buckets, which is the same on every rank

    def arrive(
        self, bucket: int, device: torch.device, source: Any, loads: Callable[[], Sequence[Load]]
    ) -> Iterator[tuple[int, Any]]:
        """Send a bucket to the memory of its step. Yields the buckets that can be stepped now, with gradient sources.

        Args:
            bucket: index of the bucket.
            device: device of its parameters.
            source: gradient source, if the bucket is stepped beside its parameters.
            loads: gives the tensors to copy; called once, if any are copied.
        """
        yield bucket, source

    def drain(self) -> Iterator[tuple[int, Any]]:
        """Yield the remaining buckets as they become ready for their step."""
        return iter(())

    def show(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copy stepped tensors to parameters, rounded; pairs of a parameter's memory and its stepped tensor."""
        torch._foreach_copy_([target for target, _ in pairs], [stepped for _, stepped in pairs])

    def abandon(self) -> None:
        """Forget buckets in flight."""

    def fresh(self) -> "Residence":
        """A residence of the same kind for a copy of an optimizer."""
        return self

    def describe(self) -> list[str]:
        """Lines for ``opt.explain()``."""
        return []


class OnHost(Residence):
    """``offload="cpu"``: parameters on an accelerator are stepped on the host, CPU parameters in place.

    Masters, states, and copies of parameters without a master are in host memory. ``buffers``: pinned buffers per
    device.
    """

    carries = True

    def __init__(self, buffers: int) -> None:
        self._num_buffers = buffers
        self._pipelines: dict[torch.device, CopyPipeline | None] = {}

    def is_away(self, device: torch.device) -> bool:
        """True for parameters on an accelerator."""
        return self._pipeline(device) is not None

    def new(self, value: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A copy in host memory."""
        return value.detach().to(_HOST, dtype, copy=True)

    def place(self, value: Tensor, device: torch.device) -> Tensor:
        """The tensor in host memory."""
        return value.to(_HOST)

    def arrive(
        self, bucket: int, device: torch.device, source: Any, loads: Callable[[], Sequence[Load]]
    ) -> Iterator[tuple[int, Any]]:
        """Send a bucket to the host, and yield the buckets whose copies are complete."""
        pipeline = self._pipeline(device)
        for other in self._all():
            # one step at a time, in bucket order: buckets in flight on other devices come before this one
            if other is not pipeline:
                yield from other.drain()
        if pipeline is None:
            yield bucket, source
        else:
            yield from pipeline.arrive(bucket, loads)

    def drain(self) -> Iterator[tuple[int, Any]]:
        """Yield all buckets in flight."""
        for pipeline in self._all():
            yield from pipeline.drain()

    def show(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copy to parameters: through the buffer of the bucket being stepped, else at once."""
        pipeline = next((one for one in self._all() if one.is_stepping), None)
        if pipeline is not None and pairs:
            pipeline.show(pairs)
        for target, stepped in pairs if pipeline is None else ():
            target.copy_(stepped)

    def abandon(self) -> None:
        """Forget buckets in flight."""
        for pipeline in self._all():
            pipeline.abandon()

    def fresh(self) -> Residence:
        """A copy with separate buffers, for a copied optimizer."""
        return OnHost(self._num_buffers)

    def describe(self) -> list[str]:
        """The pinned memory."""
        nbytes = sum(pipeline.nbytes for pipeline in self._all())
        return [f"offload: state and step on the host, {nbytes:,} bytes in {self._num_buffers} pinned buffers a device"]

    def _pipeline(self, device: torch.device) -> CopyPipeline | None:
        if device not in self._pipelines:
            transfer = transfer_for(device)
            self._pipelines[device] = None if transfer is None else CopyPipeline(transfer, self._num_buffers)
        return self._pipelines[device]

    def _all(self) -> list[CopyPipeline]:
        return [pipeline for pipeline in self._pipelines.values() if pipeline is not None]


class OnDisk(OnHost):
    """State in a file. It is created in memory, one bucket at a time, and moved right after its first step."""

    keeps = True

    def __init__(self, buffers: int, folder: Path) -> None:
        super().__init__(buffers)
        self._file = MappedFile(folder)

    def new(self, value: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A copy in the file."""
        value = value.detach()
        return self._file.room(value, dtype).copy_(value)

    def place(self, value: Tensor, device: torch.device) -> Tensor:
        """The tensor in the file."""
        return value if self._file.has(value) else self._file.room(value, value.dtype).copy_(value.detach())

    def keep(self, states: Iterable[Any]) -> int:
        """Move states into the file, and evict them from memory."""
        nbytes, kept = 0, []
        for state in states:
            outside = [one.nbytes for one in tensors_in(state) if not (one.is_meta or self._file.has(one))]
            nbytes += sum(outside)
            if outside:
                moved(state, lambda tensor: self.place(tensor, tensor.device))
            kept += list(tensors_in(state))
        self._file.drop(kept)
        return nbytes

    def reserve(self, likes: Iterable[Tensor]) -> None:
        """Allocate blocks of the file."""
        self._file.reserve([like.numel() * like.element_size() for like in likes])

    def check(self) -> None:
        """Check that the file is still complete."""
        self._file.check()

    def fresh(self) -> Residence:
        """A residence with a new file in the same folder."""
        return OnDisk(self._num_buffers, self._file.folder)

    def describe(self) -> list[str]:
        """The size of the file."""
        where = f"{self._file.nbytes:,} bytes in a file in {self._file.folder}"
        return [f"offload: state in memory-mapped memory, {where}"]


def residence_for(given: Offload | str | None) -> Residence:
    """The residence of stepped tensors for these options; RuntimeError if no file can be created in the folder."""
    offload = Offload.of(given)
    if offload is None:
        return Residence()
    if offload.folder is None:
        return OnHost(offload.buffers)
    return OnDisk(offload.buffers, Path(offload.folder))


def moved(value: Any, move: Callable[[Tensor], Tensor]) -> Any:
    """A state with its tensors moved, however nested; mappings and lists are changed in place."""
    if isinstance(value, Tensor):
        # 0-dimensional tensors, such as step counters, stay: optimizers read them on the host, and they are small
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
    """Tensors in a state, however nested; 0-dimensional ones only with ``scalars``."""
    if isinstance(value, Tensor):
        if value.dim() or scalars:
            yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(item, scalars=scalars)
