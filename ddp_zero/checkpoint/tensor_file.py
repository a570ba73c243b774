"""Tensors in files: one rank's file is written, places in it are read in pieces, and an index lists them for DCP.

The places are in JSON next to the file, in a tree of plain values. It may come from an untrusted source, so everything
is checked before use: file names, sizes, dtypes, and the shape of the tree.

The file is a sequence of `torch.save` archives, one per tensor, the format of
`torch.distributed.checkpoint.FileSystemWriter`, so DCP's own tools read it. That writer itself keeps every tensor that
it had to copy, from a GPU, until the file is complete. Reading does not unpickle: the elements are read from the offset
recorded at writing. DCP's index is for its tools alone, because reading it means unpickling it.
"""

import hashlib
import io
import json
import math
import os
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
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

from ddp_zero.checkpoint.folder import digest_of
from ddp_zero.error_codes import coded
from ddp_zero.tools.files import COPY_AGAIN, LOAD_EARLIER, advance, open_regular, showing, written
from ddp_zero.values import Chunk, TensorSpec, Tree, fill, flatten, memory_of, specs_in, unflatten

OBJECTS_FILE = "__0_1.distcp"
"""File of the values that are not tensors, each in the format of `torch.save`."""

CHUNK_BYTES = 4 << 20
_ALIGNMENT = 64
_LENGTHS = 26  # offset of two lengths in the header of a record
_FILE = re.compile(r"__[0-9]{1,9}_0\.distcp")
_CHECKSUM = re.compile(r"[0-9a-f]{64}|[0-9a-f]{8}")
_LARGEST = 1 << 62
_MOST_DIMENSIONS = 64
_DTYPES = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64, torch.complex32),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8),
    torch.bool,
}
"""Dtypes whose elements are whole bytes."""


@dataclass(frozen=True)
class FileSpan:
    """The place of elements in a checkpoint."""

    file: str  # name of the file
    begin: int  # offset of the `torch.save` archive of these elements, in bytes
    length: int  # length of that archive, in bytes
    offset: int  # offset of the elements, in bytes; they lie in logical order
    checksum: str  # of the elements, in hexadecimal: SHA-256, or CRC-32 in a snapshot
    # True in another library's file: ``checksum`` is of all ``length`` bytes from ``begin`` on, which hold more tensors
    is_shared: bool = False


@dataclass(frozen=True)
class StoredTensor:
    """A tensor whose elements lie in a checkpoint, or a chunk of it."""

    spec: TensorSpec  # shape, strides, dtype and device type
    # chunks that hold each of its elements once, and where they lie; in a chunk of a tensor they may reach beyond it
    chunks: tuple[tuple[Chunk, FileSpan], ...]

    @classmethod
    def of(cls, spec: TensorSpec, span: FileSpan) -> "StoredTensor":
        return cls(spec, ((Chunk((0,) * len(spec.shape), spec.shape), span),))

    @property
    def chunk(self) -> Chunk:
        """All of its elements."""
        return Chunk((0,) * len(self.spec.shape), self.spec.shape)

    @property
    def span(self) -> FileSpan:
        """Its place, if it is in one piece."""
        ((_, span),) = self.chunks
        return span

    @property
    def numel(self) -> int:
        return math.prod(self.spec.shape)

    @property
    def nbytes(self) -> int:
        return math.prod(self.spec.shape) * self.spec.dtype.itemsize

    def describe(self) -> str:
        return f"shape {list(self.spec.shape)} of {str(self.spec.dtype).removeprefix('torch.')}"

    def within(self, chunk: Chunk) -> "StoredTensor":
        """A chunk of its elements, as a tensor."""
        if chunk.sizes == self.spec.shape:
            return self
        spec = replace(self.spec, shape=chunk.sizes, stride=None)
        overlapping = [(stored, span) for stored, span in self.chunks if stored.overlap(chunk)]
        return StoredTensor(spec, tuple((stored.seen_from(chunk.offsets), span) for stored, span in overlapping))


def as_written(tensors: Iterable[StoredTensor]) -> list[StoredTensor]:
    """Their pieces with checksums of their own, once: tensors of ranks, or records of another library's files.

    A forged place may be one of several tensors, of different sizes: these are different pieces.
    """
    found: dict[StoredTensor, None] = {}
    for stored in tensors:
        for chunk, span in stored.chunks:
            spec = TensorSpec(chunk.sizes, None, stored.spec.dtype, "cpu")
            if span.is_shared:
                spec = TensorSpec((span.length,), None, torch.uint8, "cpu")
                span = replace(span, offset=span.begin, is_shared=False)
            found[StoredTensor.of(spec, span)] = None
    return list(found)


def stored_in(tree: Tree) -> list[StoredTensor]:
    found: list[StoredTensor] = []
    fill(tree, StoredTensor, found.append)
    return found


def total_bytes(stored: Iterable[StoredTensor]) -> int:
    return sum(tensor.nbytes for tensor in stored)


# A tree as JSON, with the places of its tensors


def text_and_tensors(tree: Tree, where: str) -> tuple[str, list[Tensor]]:
    """As `ddp_zero.values.tree.flatten`; TypeError naming ``where`` for a value that no checkpoint can hold."""
    try:
        text, tensors = flatten(tree)
        for tensor in tensors:
            if tensor.dtype not in _DTYPES or tensor.dim() > _MOST_DIMENSIONS:
                raise TypeError(
                    f"Expected tensors of whole bytes, got {tensor.dim()} dimensions of {tensor.dtype}. [ZERO-611]"
                )
        return text, tensors
    except RecursionError as error:
        raise TypeError(
            f"Values in {where} are nested too deeply: a checkpoint holds some dozen levels. [ZERO-611]"
        ) from error
    except TypeError as error:
        message = (
            f"Expected values that can be saved without pickle in {where}. {error} Turn arrays into tensors with "
            "torch.from_numpy(), other objects into their state dicts, or declare their class by "
            "ddp_zero.state_class(...) on every rank."
        )
        raise TypeError(coded(message, "[ZERO-611]")) from error


def encode_part(text: str, spans: Sequence[FileSpan]) -> str:
    """A part as JSON, from the text of its tree (see `ddp_zero.values.tree.flatten`) and its tensors' places."""
    places = [[span.file, span.begin, span.length, span.offset, span.checksum] for span in spans]
    return f'{{"tensors": {json.dumps(places)}, "tree": {text}}}'


def decode_part(text: str, digest: str, shown: object, of: Callable[[Tree], Any] = lambda tree: tree) -> Any:
    """The result of ``of`` for the tree of a part, in which a `StoredTensor` is in the place of each tensor.

    The text may come from an untrusted source: ValueError, naming ``shown``, if it is damaged or malformed.
    """
    if digest_of(text) != digest:
        raise ValueError(f"Expected {shown} to fit its checksum, got damaged bytes. {COPY_AGAIN} [ZERO-622]")
    try:
        content = json.loads(text)
        tree = json.dumps(content["tree"])
        places = zip(map(check_spec, specs_in(tree)), map(_span, content["tensors"]), strict=True)
        stored = [StoredTensor.of(spec, span) for spec, span in places]
        return of(unflatten(tree, stored))
    except (KeyError, TypeError, IndexError, AttributeError, ValueError, RecursionError, OverflowError) as error:
        found = f"{type(error).__name__}: {str(error).rstrip('.')}"
        message = f"Expected a part of a checkpoint in {shown}, got {found}. {LOAD_EARLIER}"
        raise ValueError(coded(message, "[ZERO-624]")) from error


def _span(place: Any) -> FileSpan:
    file, begin, length, offset, checksum = place
    numbers_fit = all(type(number) is int and 0 <= number < _LARGEST for number in (begin, length, offset))
    if not (isinstance(file, str) and _FILE.fullmatch(file) and numbers_fit and _CHECKSUM.fullmatch(checksum)):
        raise ValueError(f"Expected a file of this checkpoint, offsets and a checksum, got {place!r:.200}.")
    return FileSpan(file, begin, length, offset, checksum)


def check_spec(spec: TensorSpec) -> TensorSpec:
    """The spec, if a tensor can have it; ValueError if not."""
    shape, stride = spec.shape, spec.stride
    are_sizes = all(type(size) is int and 0 <= size < _LARGEST for size in [*shape, *(stride or ())])
    if not are_sizes or len(shape) > _MOST_DIMENSIONS or not isinstance(spec.device_type, str):
        raise ValueError(f"Expected sizes, strides and a device of a tensor, got {spec!r:.400}.")
    elements = math.prod(max(size, 1) for size in shape)  # torch multiplies them even if a factor is 0
    if spec.dtype not in _DTYPES or elements * spec.dtype.itemsize >= _LARGEST:
        raise ValueError(f"Expected a tensor that can exist, got {list(shape)} of {spec.dtype}.")
    if stride is not None and (len(stride) != len(shape) or spec.has_gaps):
        raise ValueError(f"Expected strides without gaps, got {stride} for {shape}.")
    return spec


# Writing


def write_tensors(path: Path, tensors: Iterable[Tensor]) -> list[FileSpan]:
    """Write dense tensors to a new file and wait until it is on disk. Returns the place of each tensor."""
    # on disk before this rank agrees that its part is written: rank 0 then publishes the checkpoint
    with written(path, "x+b") as file:
        # one at a time: at most one host copy of a device tensor exists
        spans = [_write(file, path.name, tensor) for tensor in tensors]
    return spans


def _write(file: BinaryIO, name: str, tensor: Tensor) -> FileSpan:
    """Append a tensor, as ``torch.save`` writes it, and return where its elements are in the file."""
    plain = tensor.detach().cpu().contiguous()
    if plain.untyped_storage().nbytes() != plain.nbytes:
        # `torch.save` writes whole storages: a view into flat storage would write all parameters. Not a clone: it would
        # copy every one of them
        memory = memory_of(plain)
        alone = torch.frombuffer(memory, dtype=torch.uint8).view(plain.dtype) if memory.nbytes else plain.clone()
        plain = alone.view(plain.shape)
    file.write(b"\0" * (-file.tell() % _ALIGNMENT))
    begin = file.tell()
    try:
        torch.save(plain, file)
    except RuntimeError as error:  # torch reports the place in its own code, not why the write failed
        cause = error.__context__
        if isinstance(cause, OSError):
            raise OSError(cause.errno, cause.strerror, file.name) from error
        raise
    advance(plain.nbytes)
    end = file.tell()
    # read back from the archive: a change in torch's layout is an error now, not at a load
    with zipfile.ZipFile(_Archive(file, begin)) as archive:
        (record,) = (entry for entry in archive.infolist() if entry.filename.endswith("/data/0"))
    if record.file_size != plain.nbytes or record.compress_type != zipfile.ZIP_STORED:
        raise RuntimeError(f"Expected {plain.nbytes} uncompressed bytes from torch.save, got {record}. [ZERO-618]")
    place = begin + record.header_offset + _LENGTHS
    file.seek(place)
    lengths = struct.unpack("<HH", file.read(4))  # of the name and the extra field, which lie between header and data
    offset = place + 4 + sum(lengths)
    file.seek(end)
    return FileSpan(name, begin, end - begin, offset, hashlib.sha256(memory_of(plain)).hexdigest())


class _Archive(io.RawIOBase):
    """The end of a file as a file of its own.

    zipfile must not see earlier archives: Pythons since October 2025 (python/cpython#139702) take the end of one of
    the same size for the end of this one, and refuse it as corrupt.
    """

    def __init__(self, file: BinaryIO, begin: int) -> None:
        self._file, self._begin = file, begin

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._file.seek(offset + (self._begin if whence == os.SEEK_SET else 0), whence) - self._begin

    def read(self, size: int = -1) -> bytes:
        return self._file.read(size)


# Reading


def verify(
    folder: Path,
    tensors: Iterable[StoredTensor],
    name_of: Mapping[FileSpan, str] | None = None,
    share: slice = slice(None),
    shows: bool = False,
) -> None:
    """Check tensors of a checkpoint against their checksums; ValueError names the file and, if known, the tensor.

    ``share``: the pieces that this rank checks, of all from the largest on; ``shows`` shows the progress.
    """
    checked_here = sorted(as_written(tensors), key=lambda piece: -piece.nbytes)[share]
    with showing(f"checking {folder.name}", total_bytes(checked_here), shows):
        for piece in sorted(checked_here, key=lambda piece: (piece.span.file, piece.span.offset)):
            try:
                for _ in pieces(folder, piece):
                    pass
            except ValueError as error:
                if name := (name_of or {}).get(piece.span):
                    error.args = (str(error).replace(COPY_AGAIN, f"There is {name}. {COPY_AGAIN}"),)
                raise


@torch.no_grad()
def read_into(folder: Path, stored: StoredTensor, target: Tensor, checks: bool = True) -> None:
    """Read a tensor into a target of its shape, device and dtype may differ; after a ValueError it may have changed.

    ``checks=False`` for a checkpoint on which `verify` was just called: its checksums are not computed again.
    """
    spec, want = stored.spec, stored.chunk
    for chunk, span in stored.chunks:
        common = chunk if chunk == want else chunk.overlap(want)
        if common is None:
            continue
        into = target if common == want else target[common.slices]
        is_direct = common == chunk and into.is_contiguous()
        # one piece at a time, on the CPU: at most this piece is in memory beside the target
        whole = into if is_direct else torch.empty(chunk.sizes, dtype=spec.dtype, device="cpu")
        flat = whole.view(-1)
        done = 0
        for raw in pieces(folder, StoredTensor.of(replace(spec, shape=chunk.sizes), span), checks):
            values = torch.frombuffer(raw, dtype=spec.dtype)
            # blocking, since the memory is reused for the next piece
            flat[done : done + values.numel()].copy_(values)
            done += values.numel()
        if not is_direct:
            into.copy_(whole[common.seen_from(chunk.offsets).slices])


def read(folder: Path, stored: StoredTensor, device: torch.device, checks: bool = True) -> Tensor:
    """Read a tensor with its saved strides, to ``device`` if it was on an accelerator, else to the CPU."""
    spec = stored.spec
    target = torch.empty(spec.shape, dtype=spec.dtype, device="cpu" if spec.device_type == "cpu" else device)
    if spec.stride is not None:
        target = target.as_strided(spec.shape, spec.stride)  # strides of a part's JSON have no gaps
    read_into(folder, stored, target, checks)
    return target


def pieces(folder: Path, stored: StoredTensor, checks: bool = True) -> Iterator[memoryview]:
    """A tensor's bytes, in pieces of whole elements: of at most 4 MiB if it is stored contiguously, else all at once.

    The memory is reused: finish with a piece before asking for the next. Raises ValueError, possibly at the end, if the
    bytes are damaged.
    """
    if [chunk for chunk, _ in stored.chunks] != [stored.chunk]:
        yield memory_of(read(folder, stored, torch.device("cpu"), checks).contiguous())
        return
    span, left = stored.span, stored.nbytes
    path = folder / span.file
    buffer = memoryview(bytearray(min(CHUNK_BYTES, left)))
    # a record of another library's file, of which this is a part, has one checksum, which `verify` compares; a caller
    # without checks has called that before, and nobody writes to the folder in between
    checks = checks and not span.is_shared
    sha = hashlib.sha256() if len(span.checksum) == hashlib.sha256().digest_size * 2 else None
    crc = 0
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if span.offset + left > size:
            raise ValueError(
                f"Expected at least {span.offset + left} bytes, got {size} in {path}. {COPY_AGAIN} [ZERO-622]"
            )
        file.seek(span.offset)
        while left:
            piece = buffer[: min(len(buffer), left)]
            if file.readinto(piece) != len(piece):
                raise ValueError(f"Expected {left} more bytes, got the end of {path}. {COPY_AGAIN} [ZERO-622]")
            advance(len(piece))
            if checks and sha is not None:
                sha.update(piece)
            elif checks:
                crc = zlib.crc32(piece, crc)
            # the caller must be done with the piece when it asks for the next piece
            yield piece
            left -= len(piece)
    if checks and (f"{crc:08x}" if sha is None else sha.hexdigest()) != span.checksum:
        raise ValueError(
            f"Expected {stored.describe()} to fit its checksum, got damaged bytes in {path}. {COPY_AGAIN} [ZERO-622]"
        )


# The index for the tools of torch.distributed.checkpoint

_Path = tuple[str | int, ...]


def write_dcp_metadata(folder: Path, tree: Tree) -> None:
    """Write the index, and a file with the values that are not tensors, and wait until they are on disk.

    A value's key in the index is its path in the tree joined by dots; ValueError if two values have the same key.
    """
    entries: dict[str, Any] = {}
    results: list[WriteResult] = []
    paths: dict[str, _Path] = {}

    def place(index: MetadataIndex, file: str, begin: int, length: int) -> None:
        results.append(WriteResult(index, length, _StorageInfo(file, begin, length)))

    with written(folder / OBJECTS_FILE, "xb") as file:
        for path, value in _leaves(tree, ()):
            key = ".".join(map(str, path))
            if key in entries:
                raise ValueError(
                    f"Expected keys that differ when joined by dots, got {key!r} twice. Rename one of them, and save "
                    "again. [ZERO-616]"
                )
            paths[key] = path
            if isinstance(value, StoredTensor):
                properties = TensorProperties(dtype=value.spec.dtype)
                boxes = list[ChunkStorageMetadata]()
                for chunk, span in value.chunks:
                    boxes.append(ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)))
                    place(MetadataIndex(key, boxes[-1].offsets), span.file, span.begin, span.length)
                entries[key] = TensorStorageMetadata(properties, torch.Size(value.spec.shape), boxes)
            else:
                begin = file.tell()
                torch.save(value, file)
                entries[key] = BytesStorageMetadata()
                place(MetadataIndex(key), OBJECTS_FILE, begin, file.tell() - begin)
    # DCP's own writer of the index, so that its tools accept the file; it syncs the file to disk
    FileSystemWriter(folder).finish(Metadata(entries, planner_data=paths), [results])


def _leaves(tree: Tree, path: _Path) -> list[tuple[_Path, Any]]:
    """Stored tensors, and the largest subtrees without any that are not dicts, with their paths."""
    if isinstance(tree, dict) and tree:
        inside: list[tuple[_Path, Any]] = [((*path, str(key)), value) for key, value in tree.items()]
    elif isinstance(tree, list | tuple) and stored_in(tree):
        inside = [((*path, position), value) for position, value in enumerate(tree)]
    else:
        return [(path, tree)]
    return [leaf for place, value in inside for leaf in _leaves(value, place)]
