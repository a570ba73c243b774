"""Writes one rank's file of tensors and reads it in pieces; also writes the index that DCP's tools require.

The file is a sequence of `torch.save` archives, one per tensor, which is the format of
`torch.distributed.checkpoint.FileSystemWriter`, so DCP's own tools read it. That writer itself is not used: it keeps
every tensor that it had to copy, from a GPU, until the file is complete. Reading does not unpickle: it reads the
elements directly, at the offset recorded at writing. DCP's index is written for its tools and never read here, because
reading it means unpickling it.
"""

import hashlib
import os
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from ddp_zero.checkpoint.folder import CutTensor, FileSpan, JoinedTensor, PiecedTensor, StoredTensor, as_written
from ddp_zero.core.local.parts import run_of
from ddp_zero.core.local.tree import Tree, memory_of
from ddp_zero.error_codes import coded
from ddp_zero.tools.record.progress import moved
from ddp_zero.tools.record.regular_files import open_regular

OBJECTS_FILE = "__0_1.distcp"
"""File of the values that are not tensors, each in the format of `torch.save`."""

_ALIGNMENT = 64
CHUNK_BYTES = 4 << 20
_LOCAL_HEADER_BYTES = 30
_NAMELESS: Mapping[StoredTensor, str] = MappingProxyType({})

# Writing


def write_tensors(path: Path, tensors: Iterable[Tensor]) -> list[FileSpan]:
    """Write dense tensors to a new file and wait until it is on disk. Returns the place of each tensor."""
    with path.open("xb") as file:
        # one at a time: at most one host copy of a device tensor exists
        written = [_write(file, tensor) for tensor in tensors]
        file.flush()
        # on disk before this rank agrees that its part is written: rank 0 then publishes the checkpoint
        os.fsync(file.fileno())
    # offsets are read back from the archives: a change in torch's layout is an error now, not at a load
    with path.open("rb") as file:
        return [
            FileSpan(path.name, begin, length, _offset_of_elements(file, begin, length, nbytes), digest)
            for begin, length, nbytes, digest in written
        ]


def _write(file: BinaryIO, tensor: Tensor) -> tuple[int, int, int, str]:
    """Write a tensor; returns the begin and length of its archive, the bytes of its elements, and their SHA-256."""
    plain = tensor.detach().cpu().contiguous()
    memory = memory_of(plain)
    file.write(b"\0" * (-file.tell() % _ALIGNMENT))
    begin = file.tell()
    try:
        # `torch.save` writes whole storages: a view into flat storage would write all parameters
        torch.save(_alone(plain, memory), file)
    except RuntimeError as error:  # torch reports the place in its own code, not why the write failed
        cause = error.__context__
        if isinstance(cause, OSError):
            raise OSError(cause.errno, cause.strerror, file.name) from error
        raise
    moved(plain.nbytes)
    return begin, file.tell() - begin, plain.nbytes, hashlib.sha256(memory).hexdigest()


def _alone(plain: Tensor, memory: memoryview) -> Tensor:
    """The tensor without a copy, in a storage of exactly its size: `torch.save` writes whole storages."""
    if plain.untyped_storage().nbytes() == plain.nbytes:
        return plain
    if not plain.nbytes:
        return torch.empty(plain.shape, dtype=plain.dtype, device="cpu")
    return torch.frombuffer(memory, dtype=torch.uint8).view(plain.dtype).view(plain.shape)


class _Window:
    """A part of a file, with the interface that `zipfile` needs."""

    def __init__(self, file: BinaryIO, begin: int, length: int) -> None:
        self._file, self._begin, self._length = file, begin, length
        self._at = 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._at)
        self._file.seek(self._begin + self._at)
        data = self._file.read(left if size < 0 else min(size, left))
        self._at += len(data)
        return data


def _offset_of_elements(file: BinaryIO, begin: int, length: int, nbytes: int) -> int:
    """The file offset of the elements written by one `torch.save`: the record ``data/0`` of its archive."""
    window = _Window(file, begin, length)
    with zipfile.ZipFile(window) as archive:
        (record,) = (entry for entry in archive.infolist() if entry.filename.endswith("/data/0"))
    if record.file_size != nbytes or record.compress_type != zipfile.ZIP_STORED:
        raise RuntimeError(f"Expected {nbytes} uncompressed bytes from torch.save, got {record}. [ZERO-618]")
    window.seek(record.header_offset)
    header = window.read(_LOCAL_HEADER_BYTES)
    names = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    return begin + record.header_offset + _LOCAL_HEADER_BYTES + names


# Reading

_SHA256_DIGITS = 64


class Crc32:
    """CRC-32 as in zip files, with the methods of `hashlib`'s objects."""

    def __init__(self) -> None:
        self._crc = 0

    def update(self, data: memoryview) -> None:
        """Go on with these bytes. Python's lock is released meanwhile."""
        self._crc = zlib.crc32(data, self._crc)

    def hexdigest(self) -> str:
        """The checksum of all bytes so far, 8 digits."""
        return f"{self._crc:08x}"


def verify(folder: Path, tensors: Sequence[StoredTensor], name_of: Mapping[StoredTensor, str] = _NAMELESS) -> None:
    """Check tensors of a checkpoint against their checksums, piece by piece; ValueError names file and tensor."""
    written = as_written(tensors)
    for stored in sorted(written, key=lambda stored: (stored.span.file, stored.span.offset)):
        if isinstance(stored, PiecedTensor):
            continue
        try:
            for _ in pieces(folder, stored):
                pass
        except ValueError as error:
            message = f"{error} There is {name_of[stored]}." if stored in name_of else str(error)
            raise ValueError(coded(message, "[ZERO-622]")) from error
    pieced = [stored for stored in written if isinstance(stored, PiecedTensor)]
    for record in {span.record: None for stored in pieced for span in stored.raw.spans}:
        crc = 0  # of a storage that `torch.save` wrote, which may hold several tensors
        for piece in _read_pieces(folder / record.file, record.offset, record.nbytes):
            crc = zlib.crc32(piece, crc)
        if crc != record.crc:
            where = folder / record.file
            raise ValueError(f"Expected {record.nbytes} bytes to fit their CRC-32, got damage in {where}. [ZERO-622]")


@torch.no_grad()
def read_into(folder: Path, stored: StoredTensor, target: Tensor, checks: bool = True) -> None:
    """Read a tensor into a target of its shape, device and dtype may differ; after a ValueError it may have changed.

    ``checks=False`` for a checkpoint on which `verify` was just called: its checksums are not computed again.
    """
    if isinstance(stored, CutTensor):
        for source in stored.sources:
            # one part at a time, on the CPU: at most one is in memory beside the target
            part = read(folder, source.stored, torch.device("cpu"), checks)
            target[source.place.slices].copy_(part[source.used.slices])
        return
    if isinstance(stored, JoinedTensor):
        _read_joined(folder, stored, target, checks)
        return
    is_flat = target.is_contiguous()
    whole = target if is_flat else torch.empty(stored.spec.shape, dtype=stored.spec.dtype, device="cpu")
    flat, done = whole.view(-1), 0
    for piece in pieces(folder, stored, checks):
        values = torch.frombuffer(piece, dtype=stored.spec.dtype)
        # blocking, since `pieces` reuses its memory for the next piece
        flat[done : done + values.numel()].copy_(values)
        done += values.numel()
    if not is_flat:
        target.copy_(whole)


def _read_joined(folder: Path, stored: JoinedTensor, target: Tensor, checks: bool) -> None:
    """Read pieces, which lie in the order of memory, straight into the target if its memory has that order."""
    spec = stored.spec
    whole = target
    # the run is one of memory: in a target of other strides its elements would be other ones
    if target.stride() != spec.stride:
        whole = torch.empty_strided(spec.shape, spec.stride or (), dtype=spec.dtype, device="cpu")
    run, done = run_of(whole), 0
    for piece in stored.pieces:
        read_into(folder, piece, run[done : done + piece.numel], checks)
        done += piece.numel
    if whole is not target:
        target.copy_(whole)


def read(folder: Path, stored: StoredTensor, device: torch.device, checks: bool = True) -> Tensor:
    """Read a tensor with its saved strides, to ``device`` if it was on an accelerator, else to the CPU."""
    spec = stored.spec
    place = torch.device("cpu") if spec.device_type == "cpu" else device
    if spec.stride is None:
        target = torch.empty(spec.shape, dtype=spec.dtype, device=place)
    else:
        target = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=place)
    read_into(folder, stored, target, checks)
    return target


def pieces(folder: Path, stored: StoredTensor, checks: bool = True) -> Iterator[memoryview]:
    """A tensor's bytes in pieces of whole elements, in reused memory; ValueError, possibly at the end, if damaged."""
    if isinstance(stored, CutTensor | JoinedTensor):
        whole = read(folder, stored, torch.device("cpu"), checks).contiguous()
        yield memory_of(whole)
        return
    if isinstance(stored, PiecedTensor):
        for span in stored.raw.spans:
            begin = span.record.offset + span.begin
            yield from _read_pieces(folder / span.record.file, begin, span.nbytes)
        return
    path, known = folder / stored.span.file, stored.span.checksum
    found = hashlib.sha256() if len(known) == _SHA256_DIGITS else Crc32()
    for piece in _read_pieces(path, stored.span.offset, stored.nbytes):
        # a caller without checks has called `verify` before, and nobody writes to the folder in between
        if checks:
            found.update(piece)
        yield piece
    if checks and found.hexdigest() != known:
        raise ValueError(f"Expected {stored.describe()} to fit its checksum, got damaged bytes in {path}. [ZERO-622]")


def _read_pieces(path: Path, offset: int, nbytes: int) -> Iterator[memoryview]:
    """Bytes of a file in pieces of at most 4 MiB, in reused memory; whole elements of any dtype, if all are."""
    left = nbytes
    buffer = memoryview(bytearray(min(CHUNK_BYTES, left)))
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if offset + left > size:
            raise ValueError(f"Expected at least {offset + left} bytes, got {size} in {path}. [ZERO-622]")
        file.seek(offset)
        while left:
            piece = buffer[: min(len(buffer), left)]
            if file.readinto(piece) != len(piece):
                raise ValueError(f"Expected {left} more bytes, got the end of {path}. [ZERO-622]")
            moved(len(piece))
            # the caller must be done with the piece when it asks for the next one
            yield piece
            left -= len(piece)


# The index for the tools of torch.distributed.checkpoint

_Path = tuple[str | int, ...]


def write_dcp_metadata(folder: Path, tree: Tree) -> None:
    """Write the index, and a file with the values that are not tensors, and wait until they are on disk.

    A value's key in the index is its path in the tree joined by dots; ValueError if two values have the same key.
    """
    entries: dict[str, Any] = {}
    results: list[WriteResult] = []
    paths: dict[str, _Path] = {}
    with (folder / OBJECTS_FILE).open("xb") as file:
        for path, value in _leaves(tree, ()):
            key = ".".join(map(str, path))
            if key in entries:
                raise ValueError(f"Expected keys that differ when joined by dots, got {key!r} twice. [ZERO-616]")
            paths[key] = path
            if isinstance(value, StoredTensor):
                entries[key], written = _tensor_entry(key, value)
                results += written
            else:
                begin = file.tell()
                torch.save(value, file)
                info = _StorageInfo(OBJECTS_FILE, begin, file.tell() - begin)
                entries[key] = BytesStorageMetadata()
                results.append(WriteResult(MetadataIndex(key), info.length, info))
        file.flush()
        os.fsync(file.fileno())
    # DCP's own writer of the index, so that its tools accept the file; it syncs the file to disk
    FileSystemWriter(folder).finish(Metadata(entries, planner_data=paths), [results])


def _leaves(tree: Tree, path: _Path) -> Iterator[tuple[_Path, Any]]:
    """Stored tensors, and the largest subtrees without any that are not dicts, with their paths."""
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from _leaves(value, (*path, str(key)))
    elif isinstance(tree, list | tuple) and _has_tensors(tree):
        for position, value in enumerate(tree):
            yield from _leaves(value, (*path, position))
    else:
        yield path, tree


def _has_tensors(tree: Tree) -> bool:
    if isinstance(tree, dict | list | tuple):
        return any(_has_tensors(value) for value in (tree.values() if isinstance(tree, dict) else tree))
    return isinstance(tree, StoredTensor)


def _tensor_entry(key: str, stored: StoredTensor) -> tuple[TensorStorageMetadata, list[WriteResult]]:
    size = torch.Size(stored.spec.shape)
    if isinstance(stored, CutTensor):
        sources = [(source.stored, source.place.offsets, source.place.sizes) for source in stored.sources]
    else:
        sources = [(stored, (0,) * len(size), tuple(size))]
    chunks, results = [], []
    for source, begin, sizes in sources:
        offsets, span = torch.Size(begin), source.span
        chunks.append(ChunkStorageMetadata(offsets=offsets, sizes=torch.Size(sizes)))
        info = _StorageInfo(span.file, span.begin, span.length)
        results.append(WriteResult(MetadataIndex(key, offsets), info.length, info))
    return TensorStorageMetadata(TensorProperties(dtype=stored.spec.dtype), size, chunks), results
