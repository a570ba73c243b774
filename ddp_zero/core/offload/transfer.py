"""Copies between a device and the host: started in the order of the device's current stream, awaited one by one."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

Pairs = Sequence[tuple[Tensor, Tensor]]
"""Copies: the target and the source of each, of one dtype and number of elements."""


class Copies(Protocol):
    """Copies that were started."""

    def wait(self) -> None:
        """Block the host until they are done."""


class Transfer(Protocol):
    """Copies between one device and buffers on the host."""

    def buffer(self, nbytes: int) -> Tensor:
        """Memory on the host that the device can read and write by itself, 1-D bytes."""

    def to_host(self, pairs: Pairs) -> Copies:
        """Start copies from the device into a buffer, after what the device was given so far."""

    def to_device(self, pairs: Pairs) -> Copies:
        """Start copies from a buffer to the device, before what it is given from now on."""


class AcceleratorTransfer:
    """Copies on the accelerator's current stream, through pinned memory. The step inside backward has its own stream.

    Args:
        device: the accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def buffer(self, nbytes: int) -> Tensor:
        """Pinned memory."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def to_host(self, pairs: Pairs) -> Copies:
        """Start copies; neighbours in memory travel as one."""
        return self._started(pairs)

    def to_device(self, pairs: Pairs) -> Copies:
        """Start copies; neighbours in memory travel as one."""
        return self._started(pairs)

    @torch.no_grad()
    def _started(self, pairs: Pairs) -> Copies:
        for target, source in merged(pairs):
            target.copy_(source, non_blocking=True)
        return _Recorded(torch.accelerator.current_stream(self._device).record_event())


class _Recorded:
    """Copies before an event of a stream."""

    def __init__(self, event: torch.Event) -> None:
        self._event = event

    def wait(self) -> None:
        """Block the host until the event has happened."""
        self._event.synchronize()


def merged(pairs: Pairs) -> list[tuple[Tensor, Tensor]]:
    """The same copies in fewer pieces: contiguous tensors that lie end to end on both sides are one.

    Each piece keeps the version counter of its first target only; parameters in flat storage are told of a change by
    who asks for the copy.
    """
    pieces: list[tuple[Tensor, Tensor]] = []
    for target, source in pairs:
        if not (target.is_contiguous() and source.is_contiguous()):
            pieces.append((target, source))
            continue
        one, other = _flat(target, target.numel()), _flat(source, source.numel())
        if pieces and all(_follows(a, b) for a, b in zip(pieces[-1], (one, other), strict=True)):
            numel = pieces[-1][0].numel() + one.numel()
            pieces[-1] = (_flat(pieces[-1][0], numel), _flat(pieces[-1][1], numel))
        else:
            pieces.append((one, other))
    return pieces


def _flat(tensor: Tensor, numel: int) -> Tensor:
    return tensor.as_strided((numel,), (1,))


def _follows(first: Tensor, second: Tensor) -> bool:
    """Whether the second of two 1-D tensors begins where the first ends, in the same storage."""
    return (
        first.is_contiguous()
        and first.dim() == 1
        and first.dtype == second.dtype
        and first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
        and first.storage_offset() + first.numel() == second.storage_offset()
    )


def transfer_for(device: torch.device) -> Transfer | None:
    """How to copy between the host and a device; None for the CPU, whose memory is the host's."""
    return None if device.type == "cpu" else AcceleratorTransfer(device)
