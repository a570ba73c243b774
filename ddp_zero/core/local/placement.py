"""The memory of masters, optimizer state and copies of parameters: beside the parameters, or on the host.

Not chosen: stepping in a thread (locks around the inner optimizer and the groups, and syncs in an order that differs
between ranks); copies on the host that follow version counters (writes through ``param.data`` would be undone).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ddp_zero.core.local.copy_pipeline import CopyPipeline, StepInputs, transfer_for
from ddp_zero.options import Offload

_HOST = torch.device("cpu")


class StatePlacement:
    """Places masters and optimizer state on the parameters' devices; nothing is copied for a step."""

    offloads = False  # whether buckets are copied to other memory for their step; see `submit`

    def is_offloaded(self, device: torch.device) -> bool:
        """True if parameters on this device are stepped as copies elsewhere."""
        return False

    def new(self, value: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A copy of this value, in the memory where a parameter on ``device`` is stepped."""
        return value.detach().to(device, dtype, copy=True)

    def place(self, value: Tensor, device: torch.device) -> Tensor:
        """A state's tensor, moved to the memory for states of parameters on ``device``, if it is not there."""
        return value.to(device)

    # Buckets in flight: in the order of buckets, which is the same on every rank

    def submit(
        self, bucket: int, device: torch.device, source: Any, inputs: Callable[[], Sequence[StepInputs]]
    ) -> Iterator[tuple[int, Any]]:
        """Start the copies that a bucket's step needs. Yields the buckets that can be stepped now, with sources.

        ``source`` has the bucket's gradients, for a step without copies. ``inputs`` gives the tensors to copy, and is
        called once, if any are copied.
        """
        yield bucket, source

    def drain(self) -> Iterator[tuple[int, Any]]:
        """Yield the remaining buckets as they become ready for their step."""
        return iter(())

    def copy_back(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copy stepped tensors to parameters, rounded; ``pairs`` has a parameter's memory and its stepped tensor."""
        torch._foreach_copy_([target for target, _ in pairs], [stepped for _, stepped in pairs])

    def abandon(self) -> None:
        """Forget buckets in flight."""

    def for_copy(self) -> "StatePlacement":
        """A placement of the same kind for a copy of the optimizer."""
        return self

    def describe(self) -> list[str]:
        return []


class HostOffload(StatePlacement):
    """Places masters, state and copies of parameters without a master on the host, for ``offload="cpu"``.

    Parameters on an accelerator are stepped on the host, CPU parameters in place. Each device has ``buffers`` pinned
    buffers.
    """

    offloads = True

    def __init__(self, buffers: int) -> None:
        self._num_buffers = buffers
        self._pipelines: dict[torch.device, CopyPipeline | None] = {}

    def is_offloaded(self, device: torch.device) -> bool:
        return self._pipeline(device) is not None

    def new(self, value: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        return value.detach().to(_HOST, dtype, copy=True)

    def place(self, value: Tensor, device: torch.device) -> Tensor:
        return value.to(_HOST)

    def submit(
        self, bucket: int, device: torch.device, source: Any, inputs: Callable[[], Sequence[StepInputs]]
    ) -> Iterator[tuple[int, Any]]:
        pipeline = self._pipeline(device)
        for other in self._all():
            # one step at a time, in bucket order: buckets in flight on other devices come before this bucket
            if other is not pipeline:
                yield from other.drain()
        if pipeline is None:
            yield bucket, source
        else:
            yield from pipeline.submit(bucket, inputs)

    def drain(self) -> Iterator[tuple[int, Any]]:
        for pipeline in self._all():
            yield from pipeline.drain()

    def copy_back(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copy to parameters: through the buffer of the bucket being stepped, else at once."""
        pipeline = next((each for each in self._all() if each.is_stepping), None)
        if pipeline is None:
            for target, stepped in pairs:
                target.copy_(stepped)
        elif pairs:
            pipeline.copy_back(pairs)

    def abandon(self) -> None:
        for pipeline in self._all():
            pipeline.abandon()

    def for_copy(self) -> StatePlacement:
        return HostOffload(self._num_buffers)

    def describe(self) -> list[str]:
        nbytes = sum(pipeline.nbytes for pipeline in self._all())
        return [f"offload: state and step on the host, {nbytes:,} bytes in {self._num_buffers} pinned buffers a device"]

    def _pipeline(self, device: torch.device) -> CopyPipeline | None:
        if device not in self._pipelines:
            transfer = transfer_for(device)
            self._pipelines[device] = None if transfer is None else CopyPipeline(transfer, self._num_buffers)
        return self._pipelines[device]

    def _all(self) -> list[CopyPipeline]:
        return [pipeline for pipeline in self._pipelines.values() if pipeline is not None]


def placement_for(given: Offload | str | None) -> StatePlacement:
    """The placement for the option ``offload``."""
    offload = Offload.of(given)
    return StatePlacement() if offload is None else HostOffload(offload.buffers)


def move_tensors(value: Any, move: Callable[[Tensor], Tensor]) -> Any:
    """A state with its tensors moved, however nested; mappings and lists are changed in place."""
    if isinstance(value, Tensor):
        # 0-dimensional tensors, such as step counters, stay: optimizers read them on the host, and they are small
        return move(value) if value.dim() else value
    if isinstance(value, dict):
        for key, item in value.items():
            value[key] = move_tensors(item, move)
    elif isinstance(value, list):
        value[:] = [move_tensors(item, move) for item in value]
    elif type(value) is tuple:
        return tuple(move_tensors(item, move) for item in value)
    return value


def tensors_in(value: Any, *, scalars: bool = False) -> Iterator[Tensor]:
    """Tensors in a state, however nested; 0-dimensional tensors only with ``scalars``."""
    if isinstance(value, Tensor):
        if value.dim() or scalars:
            yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(item, scalars=scalars)


def state_bytes(state: Mapping[Any, Any]) -> int:
    """Bytes of all tensors in an optimizer's state, however nested."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(state, scalars=True))
