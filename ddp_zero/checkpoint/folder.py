"""A checkpoint on disk: a folder that appears whole or not at all, its marker, and each rank's part.

A checkpoint is written under a hidden name beside existing ones, synced to disk, and then renamed. The *marker*, the
last file written inside it, states that it is complete and holds the hashes of its parts; a folder without a marker is
not a checkpoint, even where renaming a folder is not atomic, as on some network file systems.

A *part* is JSON next to the rank's file of tensors: a tree of plain values, and the byte offsets of its tensors. It may
come from an untrusted source, so everything is checked before use: file names, sizes, dtypes, and the shape of the
tree. Nothing is unpickled.
"""

import hashlib
import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddp_zero.checkpoint.foreign.torch_file import RawTensor
from ddp_zero.core.local.tree import TensorSpec, Tree, flatten, specs_in, unflatten
from ddp_zero.core.plan.boxes import Box
from ddp_zero.core.plan.shapes import is_dense
from ddp_zero.error_codes import coded
from ddp_zero.tools.record.regular_files import open_regular

MARKER = "complete.json"
_FORMAT = "ddp_zero"
_VERSION = 1
_NAME = re.compile(r"step-([0-9]{8,18})(?:-([0-9]{1,6}))?")
_UNFINISHED = re.compile(r"\.step-[0-9]{8,18}-[0-9a-f]{16}")
LARGEST_TEXT = 1 << 28
_FILE = re.compile(r"__[0-9]{1,9}_0\.distcp")
_CHECKSUM = re.compile(r"[0-9a-f]{64}|[0-9a-f]{8}")
_LARGEST = 1 << 62
_MOST_DIMENSIONS = 64


# Folders


@dataclass(frozen=True)
class Marker:
    """The contents of a marker: the checkpoint's number, and the SHA-256 of each rank's part, in rank order."""

    step: int
    parts: tuple[str, ...]


def folder_of(path: str | os.PathLike[str]) -> Path:
    """A user's path as a `Path`. Raises ValueError for an empty path, which would mean the current folder."""
    if os.fspath(path) == "":
        raise ValueError("Expected the path of a folder, got ''. Pass '.' if the current folder is meant. [ZERO-612]")
    return Path(path)


def next_step(root: Path) -> int:
    """One more than the highest number of a complete checkpoint in the folder; 1 if it contains none."""
    return max((_order(path)[0] for path in complete_in(root)), default=0) + 1


def check_comes_last(root: Path, step: int | None) -> None:
    """Raise ValueError if the path is itself a checkpoint, or holds a newer one than this step."""
    if (root / MARKER).exists():
        raise ValueError(f"{root} is a checkpoint, not a folder of checkpoints. Give the folder above. [ZERO-612]")
    last = next_step(root) - 1
    if step is not None and step < last:
        raise ValueError(
            f"Expected a step of at least {last}, the newest checkpoint in {root}, got {step}. Remove the checkpoints "
            "that come after it, or save into a different folder: a load would take the newest. [ZERO-612]"
        )


def start(root: Path, step: int) -> str:
    """Create a hidden folder for a new checkpoint, and remove unfinished ones. Returns its name.

    Only one job at a time may save into a folder.
    """
    if not 0 <= step < 10**18:
        raise ValueError(f"Expected a step from 0 to 10**18 - 1, got {step}. [ZERO-612]")
    root.mkdir(parents=True, exist_ok=True)
    sync_folder(root.parent)
    for path in root.iterdir():
        if _UNFINISHED.fullmatch(path.name):
            _discard(path)
    name = f".step-{step:08d}-{secrets.token_hex(8)}"
    (root / name).mkdir()
    return name


def publish(unfinished: Path, marker: Marker, keep: int | None) -> Path:
    """Mark a hidden folder as complete, rename it to its visible name, and keep the newest ``keep`` (None: all)."""
    root = unfinished.parent
    # the marker last, then its folder, then the rename, each on disk before the next: at any crash the checkpoint is
    # complete or invisible
    write_text(unfinished / MARKER, marker_text(marker))
    sync_folder(unfinished)
    matches = [match for path in root.iterdir() if (match := _NAME.fullmatch(path.name))]
    again = 1 + max((int(match[2] or 0) for match in matches if int(match[1]) == marker.step), default=-1)
    name = f"step-{marker.step:08d}" + (f"-{again}" if again else "")  # a later save of the same step sorts last
    unfinished.rename(root / name)
    sync_folder(root)
    others = [path for path in complete_in(root) if path.name != name]
    # only now, with the new checkpoint on disk
    for path in others[: max(0, len(others) - keep + 1)] if keep is not None else []:
        _remove(path)
    return root / name


def marker_text(marker: Marker) -> str:
    """The contents of the file `MARKER`."""
    line = json.dumps({"format": _FORMAT, "version": _VERSION, **asdict(marker)})
    return f"{hashlib.sha256(line.encode()).hexdigest()}\n{line}\n"


def write_text(path: Path, text: str) -> None:
    """Write a new file and wait until it is on disk."""
    with path.open("x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(checkpoint: Path) -> None:
    """Hide a checkpoint, then remove it: after a kill in between, the next save removes the rest."""
    hidden = checkpoint.with_name(f".step-{_order(checkpoint)[0]:08d}-{secrets.token_hex(8)}")
    checkpoint.rename(hidden)
    _discard(hidden)


def _discard(path: Path) -> None:
    """Remove a folder, or a link or file in its place; never the target of a link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def complete_in(root: Path) -> list[Path]:
    """The complete checkpoints in a folder, from the lowest step to the highest; within a step, in order of saving."""
    if not root.is_dir():
        return []
    found = [path for path in root.iterdir() if _NAME.fullmatch(path.name) and (path / MARKER).is_file()]
    return sorted(found, key=_order)


def newest(path: Path) -> Path:
    """The checkpoint itself, or the newest complete one in the folder; FileNotFoundError if there is none."""
    if (path / MARKER).is_file():
        return path
    found = complete_in(path)
    if not found:
        raise FileNotFoundError(
            f"No complete checkpoint of ddp_zero.checkpoint.save or of DeepSpeed at {path}, nor a folder of them. "
            "Checkpoints of other libraries can be loaded with torch and given to load_state_dict(). [ZERO-613]"
        )
    return found[-1]


def read_marker(checkpoint: Path) -> Marker:
    """The marker of a checkpoint, checked. Raises ValueError if it is damaged or not of this format."""
    digest, _, rest = read_text(checkpoint / MARKER).partition("\n")
    line = rest.rstrip("\n")
    if hashlib.sha256(line.encode()).hexdigest() != digest:
        raise ValueError(
            "The marker of this checkpoint does not fit its checksum, so the checkpoint is damaged: "
            f"{checkpoint / MARKER}. [ZERO-622]"
        )
    content = parse_json(line, checkpoint / MARKER)
    if not isinstance(content, dict) or content.get("format") != _FORMAT or content.get("version") != _VERSION:
        shown = {key: content.get(key) for key in ("format", "version")} if isinstance(content, dict) else content
        raise ValueError(
            f"Expected format {_FORMAT!r} of version {_VERSION}, got {shown} in {checkpoint / MARKER}. [ZERO-614]"
        )
    step, parts = content.get("step"), content.get("parts")
    if type(step) is not int or not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        raise ValueError(
            f"Expected a step and checksums of parts, got {content!r:.200} in {checkpoint / MARKER}. [ZERO-622]"
        )
    return Marker(step, tuple(parts))


def parse_json(text: str, path: Path) -> Any:
    """JSON as Python objects; ValueError naming the file if the text is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"Expected JSON in {path}, got: {error}. [ZERO-622]") from error


def read_text(path: Path) -> str:
    """A text file of a checkpoint; ValueError unless it is a regular file of at most 256 MiB of UTF-8."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > LARGEST_TEXT:
            raise ValueError(f"Expected at most {LARGEST_TEXT} bytes, got {size} in {path}. [ZERO-622]")
        raw = file.read(size)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"Expected UTF-8 text in {path}, got: {error}. [ZERO-622]") from error


def _order(path: Path) -> tuple[int, int]:
    """The step in a name, and the index of the save among all saves of that step."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise ValueError(f"Expected a folder named step-<number>, got {path}. [ZERO-612]")
    return int(match[1]), int(match[2] or 0)


# Tensors in a checkpoint


@dataclass(frozen=True)
class FileSpan:
    """The place of a tensor in a checkpoint."""

    file: str  # name of the file
    begin: int  # offset of the tensor's `torch.save` archive, in bytes
    length: int  # length of that archive, in bytes
    offset: int  # offset of the elements, in bytes; they lie in logical order
    checksum: str  # of the elements, in hexadecimal: SHA-256, or CRC-32 in a snapshot


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a checkpoint: its shape, strides, dtype and device type, and its place."""

    spec: TensorSpec
    span: FileSpan

    @property
    def nbytes(self) -> int:
        """Size of its elements, in bytes."""
        return math.prod(self.spec.shape) * self.spec.dtype.itemsize

    @property
    def numel(self) -> int:
        """Number of its elements."""
        return math.prod(self.spec.shape)

    def describe(self) -> str:
        """Its shape and dtype, for messages."""
        return f"shape {list(self.spec.shape)} of {str(self.spec.dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class PiecedTensor(StoredTensor):
    """A tensor in another library's checkpoint, whose elements may lie in several places."""

    raw: RawTensor  # the places. Each of their storages has a CRC-32; ``span`` has no checksum.

    @classmethod
    def of(cls, raw: RawTensor) -> "PiecedTensor":
        """Convert another library's tensor."""
        first = raw.spans[0].record if raw.spans else None
        span = FileSpan(first.file if first else "", 0, 0, first.offset if first else 0, "")
        return cls(TensorSpec(raw.shape, None, raw.dtype, "cpu"), span, raw)


@dataclass(frozen=True)
class Source:
    """The elements ``used`` of a stored tensor, which are the elements ``place`` of a different tensor."""

    stored: StoredTensor
    used: Box
    place: Box


@dataclass(frozen=True)
class CutTensor(StoredTensor):
    """A tensor, or a part of one, whose elements are in several stored tensors, each written by a rank."""

    sources: tuple[Source, ...]  # the places of its elements, each element once; ``span`` has no meaning

    @classmethod
    def of(cls, shape: tuple[int, ...], parts: Sequence[tuple[Box, StoredTensor]]) -> "CutTensor":
        """The tensor of this shape that stored parts make up."""
        sources = tuple(Source(stored, Box.whole(box.sizes), box) for box, stored in parts)
        first = parts[0][1]
        return cls(TensorSpec(shape, None, first.spec.dtype, first.spec.device_type), first.span, sources)


@dataclass(frozen=True)
class JoinedTensor(StoredTensor):
    """A tensor whose elements, in the order of its memory, are those of several 1-D tensors, laid end to end."""

    pieces: tuple[StoredTensor, ...]  # each written by a rank; ``span`` has no meaning

    @classmethod
    def of(cls, shape: tuple[int, ...], stride: tuple[int, ...], pieces: Sequence[StoredTensor]) -> "JoinedTensor":
        """The tensor of this shape and these strides; ValueError if the pieces are not as many elements."""
        first = pieces[0]
        if sum(piece.numel for piece in pieces) != math.prod(shape):
            raise ValueError(f"Expected pieces of {math.prod(shape)} elements in all. [ZERO-622]")
        spec = _checked(TensorSpec(shape, stride, first.spec.dtype, first.spec.device_type))
        return cls(spec, first.span, tuple(pieces))


def within(stored: StoredTensor, box: Box) -> StoredTensor:
    """The elements of a box of a stored tensor, as a tensor of the size of the box."""
    whole = Box.whole(stored.spec.shape)
    if box == whole:
        return stored
    sources = stored.sources if isinstance(stored, CutTensor) else (Source(stored, whole, whole),)
    found = []
    for source in sources:
        common = source.place.overlap(box)
        if common is not None:
            used = common.seen_from(source.place.offsets).moved_by(source.used.offsets)
            found.append(Source(source.stored, used, common.seen_from(box.offsets)))
    written = found[0].stored if len(found) == 1 else None
    if written is not None and found[0].used == Box.whole(written.spec.shape):
        return written
    spec = TensorSpec(box.sizes, None, stored.spec.dtype, stored.spec.device_type)
    return CutTensor(spec, stored.span, tuple(found))


def as_written(tensors: Iterable[StoredTensor]) -> list[StoredTensor]:
    """The tensors that ranks wrote to store these, each once."""
    written: dict[StoredTensor, None] = {}
    for stored in tensors:
        if isinstance(stored, CutTensor):
            written.update(dict.fromkeys(as_written(source.stored for source in stored.sources)))
        else:
            written.update(dict.fromkeys(stored.pieces if isinstance(stored, JoinedTensor) else [stored]))
    return list(written)


# Parts


def part_name(rank: int) -> str:
    """File name of a rank's part."""
    return f"part-{rank}.json"


def tensor_file_name(rank: int) -> str:
    """Name of a rank's file of tensors, as in `torch.distributed.checkpoint`."""
    return f"__{rank}_0.distcp"


def encode_part(text: str, spans: Sequence[FileSpan]) -> str:
    """A part as JSON, from the text of its tree (see `ddp_zero.core.local.tree.flatten`) and its tensors' places."""
    rows = [[span.file, span.begin, span.length, span.offset, span.checksum] for span in spans]
    return f'{{"tensors": {json.dumps(rows)}, "tree": {text}}}'


def decode_part(text: str, digest: str, shown: object) -> Tree:
    """The tree of a part, with a `StoredTensor` in the place of each tensor; ValueError if damaged or malformed.

    The text may come from an untrusted source; ``shown`` names the part in messages.
    """
    if hashlib.sha256(text.encode()).hexdigest() != digest:
        raise ValueError(f"{shown} does not fit its checksum: the file is damaged. [ZERO-622]")
    try:
        content = json.loads(text)
        tree = json.dumps(content["tree"])
        spans = [_span(row) for row in content["tensors"]]
        specs = [_checked(spec) for spec in specs_in(tree)]
        stored = [StoredTensor(spec, span) for spec, span in zip(specs, spans, strict=True)]
        decoded = unflatten(tree, stored)
        if len(stored_in(decoded)) != len(stored):
            raise ValueError("A tensor is at several places of the tree. [ZERO-622]")
        return decoded
    except (KeyError, TypeError, IndexError, AttributeError, ValueError, RecursionError, OverflowError) as error:
        message = f"Expected a part of a checkpoint in {shown}, got {type(error).__name__}: {error}"
        raise ValueError(coded(message, "[ZERO-622]")) from error


def _span(row: Any) -> FileSpan:
    file, begin, length, offset, checksum = row
    numbers_fit = all(type(number) is int and 0 <= number < _LARGEST for number in (begin, length, offset))
    if not (isinstance(file, str) and _FILE.fullmatch(file) and numbers_fit and _CHECKSUM.fullmatch(checksum)):
        raise ValueError(f"Expected a file of this checkpoint, offsets and a checksum, got {row!r:.200}. [ZERO-622]")
    return FileSpan(file, begin, length, offset, checksum)


def _checked(spec: TensorSpec) -> TensorSpec:
    numbers = [*spec.shape, *(spec.stride or ())]
    if len(spec.shape) > _MOST_DIMENSIONS or not all(
        type(number) is int and 0 <= number < _LARGEST for number in numbers
    ):
        raise ValueError(
            f"Expected sizes and strides of a tensor, got {spec.shape!r:.200} and {spec.stride!r:.200}. [ZERO-622]"
        )
    elements = math.prod(max(size, 1) for size in spec.shape)  # torch multiplies them even if one is 0
    if spec.dtype not in _DTYPES or elements * spec.dtype.itemsize >= _LARGEST:
        raise ValueError(f"Expected a tensor that can exist, got {list(spec.shape)} of {spec.dtype}. [ZERO-622]")
    if spec.stride is not None and len(spec.stride) != len(spec.shape):
        raise ValueError(f"Expected a stride for each size, got {spec.stride} for {spec.shape}. [ZERO-622]")
    if spec.stride is not None and not is_dense(spec.shape, spec.stride):
        raise ValueError(f"Expected strides without gaps, got {spec.stride} for {spec.shape}. [ZERO-622]")
    if not isinstance(spec.device_type, str):
        raise ValueError(f"Expected a kind of device, got {spec.device_type!r:.200}. [ZERO-622]")
    return spec


_DTYPES = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64, torch.complex32),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8),
    torch.bool,
}
"""Dtypes whose elements are whole bytes."""


# Trees of plain values and stored tensors


def stored_in(tree: Tree) -> list[StoredTensor]:
    """The stored tensors of a tree."""
    found: list[StoredTensor] = []
    fill(tree, found.append)
    return found


def total_bytes(tensors: Iterable[StoredTensor]) -> int:
    """Bytes of the elements of stored tensors."""
    return sum(stored.nbytes for stored in tensors)


def fill(tree: Tree, read: Callable[[StoredTensor], Any]) -> Tree:
    """The tree with each stored tensor replaced by the result of ``read``, called for one after the other."""
    if isinstance(tree, StoredTensor):
        return read(tree)
    if isinstance(tree, Mapping):
        return type(tree)({key: fill(value, read) for key, value in tree.items()})  # type: ignore[call-arg]
    if type(tree) in (list, tuple):
        return type(tree)(fill(value, read) for value in tree)
    return tree


def as_meta(stored: StoredTensor) -> Tensor:
    """A meta tensor of the same shape and dtype, for checks."""
    return torch.empty(stored.spec.shape, dtype=stored.spec.dtype, device="meta")


def text_and_tensors(tree: Tree, where: str) -> tuple[str, list[Tensor]]:
    """As `ddp_zero.core.local.tree.flatten`; TypeError naming ``where`` for a value that no checkpoint can hold."""
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
            "torch.from_numpy(), other objects into their state dicts."
        )
        raise TypeError(coded(message, "[ZERO-611]")) from error
