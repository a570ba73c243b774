"""This rank's part of a snapshot: one copy into mapped memory in the loop, then checksums and a seal in a thread."""

import hashlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ddp_zero.checkpoint.folder import tensor_file_name
from ddp_zero.checkpoint.tensor_file import FileSpan, encode_part
from ddp_zero.snapshots.memory_files import Budget, PartFile
from ddp_zero.snapshots.seals import SLOTS, Seal

_ALIGNMENT = 64
_Kinds = tuple[tuple[torch.Size, torch.dtype], ...]


@dataclass(frozen=True)
class _Layout:
    """Places of tensors in a file."""

    kinds: _Kinds  # shape and dtype of each tensor
    offsets: tuple[int, ...]  # of each tensor's elements, in bytes
    nbytes: int  # size of the file

    @classmethod
    def of(cls, kinds: _Kinds) -> "_Layout":
        offsets, end = [], 0
        for shape, dtype in kinds:
            end += -end % _ALIGNMENT
            offsets.append(end)
            end += shape.numel() * dtype.itemsize
        return cls(kinds, tuple(offsets), end)

    def views(self, memory: memoryview) -> list[Tensor]:
        """The tensors in memory of `nbytes` bytes."""
        if not self.nbytes:
            return [torch.empty(shape, dtype=dtype) for shape, dtype in self.kinds]
        flat = torch.frombuffer(memory, dtype=torch.uint8)
        sizes = [shape.numel() * dtype.itemsize for shape, dtype in self.kinds]
        return [
            flat[offset : offset + size].view(dtype).view(shape) if size else torch.empty(shape, dtype=dtype)
            for (shape, dtype), offset, size in zip(self.kinds, self.offsets, sizes, strict=True)
        ]


@dataclass(frozen=True)
class Staged:
    """A part whose tensors are in the mapped file; their checksums are not known yet.

    Attributes:
        text: the part's tree as text.
        nbytes: size of the tensors in the file.
    """

    text: str
    nbytes: int
    _file: PartFile
    _memory: memoryview
    _layout: _Layout

    @property
    def memory(self) -> memoryview:
        """The file of tensors, mapped."""
        return self._memory

    def complete(self, snapshot: str, step: int, rank: int, world_size: int) -> tuple[Seal, str]:
        """Compute checksums, write the part's JSON and its seal, and return the seal and the JSON. Raises OSError."""
        name, spans = tensor_file_name(rank), []
        for (shape, dtype), begin in zip(self._layout.kinds, self._layout.offsets, strict=True):
            size = shape.numel() * dtype.itemsize
            # CRC-32, at a third of the time of SHA-256: it has to find damage, not forgery, since whoever can write to
            # this user's private folder can write checksums as well. One call per tensor, which releases Python's lock
            crc = zlib.crc32(self._memory[begin : begin + size])
            spans.append(FileSpan(name, begin, size, begin, f"{crc:08x}"))
        part = encode_part(self.text, spans)
        digest = hashlib.sha256(part.encode()).hexdigest()
        seal = Seal(snapshot, step, world_size, rank, digest, self.nbytes)
        self._file.complete(part, seal)
        return seal, part


class OwnPart:
    """The files of this rank's own part, in both slots.

    Args:
        folder: this rank's folder.
        rank: this rank.
        budget: the host's limit.
    """

    def __init__(self, folder: Path, rank: int, budget: Budget) -> None:
        self._files = {slot: PartFile(folder / slot, rank, budget) for slot in SLOTS}
        self._views: dict[str, tuple[_Layout, memoryview, list[Tensor]]] = {}

    @torch.no_grad()
    def stage(self, slot: str, text: str, tensors: Sequence[Tensor]) -> Staged:
        """Copy tensors into a slot's file. Raises NoRoomError or OSError; the slot is broken then."""
        layout = _Layout.of(tuple((tensor.shape, tensor.dtype) for tensor in tensors))
        before = self._views.pop(slot, None)
        if before is not None and before[0] != layout:
            before = None  # gives back the old mapping, before a new one is allocated
        file = self._files[slot]
        memory = file.begin(layout.nbytes)
        if before is None or before[1].obj is not memory.obj:
            before = layout, memory, layout.views(memory)
        self._views[slot] = before
        if tensors:
            torch._foreach_copy_(before[2], list(tensors))  # blocks until the copies from a device have arrived
        return Staged(text, layout.nbytes, file, before[1], before[0])
