"""This rank's part of a snapshot: one copy into mapped memory in the loop, then checksums and a seal in a thread."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ddp_zero.checkpoint.folder import digest_of, tensor_file_name
from ddp_zero.checkpoint.tensor_file import FileSpan, encode_part
from ddp_zero.snapshots.memory_files import Budget, PartFile
from ddp_zero.snapshots.seals import SLOTS, Seal

_ALIGNMENT = 64


class _Place(NamedTuple):
    """A tensor in a file: its elements are the bytes from ``begin`` to ``end``."""

    shape: torch.Size
    dtype: torch.dtype
    begin: int
    end: int

    def view(self, memory: memoryview) -> Tensor:
        if self.begin == self.end:
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.frombuffer(memory[self.begin : self.end], dtype=torch.uint8).view(self.dtype).view(self.shape)


def _places_of(tensors: Sequence[Tensor]) -> list[_Place]:
    places, end = [], 0
    for tensor in tensors:
        begin = end + -end % _ALIGNMENT
        end = begin + tensor.nbytes
        places.append(_Place(tensor.shape, tensor.dtype, begin, end))
    return places


@dataclass(frozen=True)
class Staged:
    """A part whose tensors are in the mapped file; their checksums are not known yet."""

    memory: memoryview  # the file of tensors, mapped
    _text: str  # the part's tree
    _file: PartFile
    _places: Sequence[_Place]

    def complete(self, snapshot: str, step: int, rank: int, world_size: int) -> tuple[Seal, str]:
        """Compute checksums, write the part's JSON and its seal, and return the seal and the JSON. Raises OSError."""
        name, spans = tensor_file_name(rank), []
        for place in self._places:
            # CRC-32, at a third of the time of SHA-256: it has to find damage, not forgery, since whoever can write to
            # this user's private folder can write checksums as well. One call per tensor, which releases Python's lock
            crc = zlib.crc32(self.memory[place.begin : place.end])
            spans.append(FileSpan(name, place.begin, place.end - place.begin, place.begin, f"{crc:08x}"))
        part = encode_part(self._text, spans)
        seal = Seal(snapshot, step, world_size, rank, digest_of(part), len(self.memory))
        self._file.complete(part, seal)
        return seal, part


class OwnPart:
    """The files of this rank's own part, in both slots of its folder."""

    def __init__(self, folder: Path, rank: int, budget: Budget) -> None:
        self._files = {slot: PartFile(folder / slot, rank, budget) for slot in SLOTS}
        self._views: dict[str, tuple[list[_Place], memoryview, list[Tensor]]] = {}

    @torch.no_grad()
    def stage(self, slot: str, text: str, tensors: Sequence[Tensor]) -> Staged:
        """Copy tensors into a slot's file. Raises NoRoomError or OSError; the slot is broken then."""
        places = _places_of(tensors)
        before = self._views.pop(slot, None)
        if before is not None and before[0] != places:
            before = None  # gives back the old mapping, before a new one is allocated
        file = self._files[slot]
        memory = file.begin(places[-1].end if places else 0)
        if before is None or before[1].obj is not memory.obj:
            before = places, memory, [place.view(memory) for place in places]
        self._views[slot] = before
        if tensors:
            torch._foreach_copy_(before[2], list(tensors))  # blocks until the copies from a device have arrived
        return Staged(before[1], text, file, places)
