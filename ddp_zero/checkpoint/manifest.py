"""One rank's part of a checkpoint: a tree of plain values, and where the bytes of its tensors are.

A *part* is JSON next to the rank's file of tensors. The input may come from an untrusted source, so everything is
checked before it is used: names of files, sizes, dtypes, and the shape of the tree. Nothing is unpickled.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ddp_zero.checkpoint.foreign.values import RawTensor
from ddp_zero.core.local.tree import TensorSpec, Tree, flatten, specs_in, unflatten
from ddp_zero.core.plan.boxes import Box
from ddp_zero.core.plan.shapes import is_dense

_FILE = re.compile(r"__[0-9]{1,9}_0\.distcp")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_LARGEST = 1 << 62
_MOST_DIMENSIONS = 64


@dataclass(frozen=True)
class FileSpan:
    """Where a tensor lies in a checkpoint.

    Attributes:
        file: the name of the file.
        begin: offset in bytes of its `torch.save` archive.
        length: length of that archive, in bytes.
        offset: offset in bytes of its elements, which lie there in logical order.
        sha256: SHA-256 of its elements.
    """

    file: str
    begin: int
    length: int
    offset: int
    sha256: str


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a checkpoint: its shape, strides, dtype and device type, and its place."""

    spec: TensorSpec
    span: FileSpan

    @property
    def nbytes(self) -> int:
        """Size of its elements, in bytes."""
        return math.prod(self.spec.shape) * self.spec.dtype.itemsize

    def describe(self) -> str:
        """Its shape and dtype, for messages."""
        return f"shape {list(self.spec.shape)} of {str(self.spec.dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class PiecedTensor(StoredTensor):
    """A tensor in a checkpoint that a different library wrote: its elements may lie in several places.

    Attributes:
        raw: the places. Their storages have a CRC-32 each; ``span`` has no checksum.
    """

    raw: RawTensor

    @classmethod
    def of(cls, raw: RawTensor) -> "PiecedTensor":
        """As a tensor of a checkpoint."""
        first = raw.spans[0].record if raw.spans else None
        span = FileSpan(first.file if first else "", 0, 0, first.offset if first else 0, "")
        return cls(TensorSpec(raw.shape, None, raw.dtype, "cpu"), span, raw)


@dataclass(frozen=True)
class Source:
    """Elements of a stored tensor, and where they go.

    Attributes:
        stored: the tensor.
        used: which of its elements.
        place: which elements of a different tensor they are.
    """

    stored: StoredTensor
    used: Box
    place: Box


@dataclass(frozen=True)
class CutTensor(StoredTensor):
    """A tensor whose elements are in several stored ones, of which ranks wrote one each; or a part of such a one.

    Attributes:
        sources: where its elements are, each once; ``span`` is without meaning.
    """

    sources: tuple[Source, ...]

    @classmethod
    def of(cls, shape: tuple[int, ...], parts: Sequence[tuple[Box, StoredTensor]]) -> "CutTensor":
        """The tensor of a shape that parts make up."""
        sources = tuple(Source(stored, Box.whole(box.sizes), box) for box, stored in parts)
        first = parts[0][1]
        return cls(TensorSpec(shape, None, first.spec.dtype, first.spec.device_type), first.span, sources)


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
    if len(found) == 1 and found[0].used == Box.whole(found[0].stored.spec.shape):
        return found[0].stored  # as it was written
    spec = TensorSpec(box.sizes, None, stored.spec.dtype, stored.spec.device_type)
    return CutTensor(spec, stored.span, tuple(found))


def as_written(tensors: Iterable[StoredTensor]) -> list[StoredTensor]:
    """The stored tensors that hold the elements of some, each once."""
    flat: dict[StoredTensor, None] = {}
    for one in tensors:
        flat.update(dict.fromkeys([source.stored for source in one.sources] if isinstance(one, CutTensor) else [one]))
    return list(flat)


def part_name(rank: int) -> str:
    """The name of a rank's part."""
    return f"part-{rank}.json"


def tensor_file_name(rank: int) -> str:
    """The name of a rank's file of tensors, as `torch.distributed.checkpoint` calls it."""
    return f"__{rank}_0.distcp"


def encode_part(text: str, spans: Sequence[FileSpan]) -> str:
    """A part as JSON.

    Args:
        text: the tree as text, from `ddp_zero.core.local.tree.flatten`.
        spans: the places of its tensors, in order.
    """
    rows = [[span.file, span.begin, span.length, span.offset, span.sha256] for span in spans]
    return f'{{"tensors": {json.dumps(rows)}, "tree": {text}}}'


def decode_part(text: str, digest: str, shown: object) -> Tree:
    """The tree of a part, with a `StoredTensor` in the place of each tensor.

    Args:
        text: from `encode_part`, or from an untrusted source.
        digest: the SHA-256 that it must have.
        shown: the name of the part in messages.

    Raises:
        ValueError: if it is damaged, or not a part of a checkpoint.
    """
    if hashlib.sha256(text.encode()).hexdigest() != digest:
        raise ValueError(f"Expected {shown} to fit its checksum, got a damaged one.")
    try:
        content = json.loads(text)
        tree = json.dumps(content["tree"])
        spans = [_span(row) for row in content["tensors"]]
        specs = [_checked(spec) for spec in specs_in(tree)]
        stored = [StoredTensor(spec, span) for spec, span in zip(specs, spans, strict=True)]
        decoded = unflatten(tree, stored)
        if len(stored_in(decoded)) != len(stored):
            raise ValueError("Expected every tensor at one place of the tree, got one at several.")
        return decoded
    except (KeyError, TypeError, IndexError, AttributeError, ValueError, RecursionError, OverflowError) as error:
        raise ValueError(f"Expected a part of a checkpoint in {shown}, got {type(error).__name__}: {error}") from error


def _span(row: Any) -> FileSpan:
    file, begin, length, offset, digest = row
    numbers_fit = all(type(number) is int and 0 <= number < _LARGEST for number in (begin, length, offset))
    if not (isinstance(file, str) and _FILE.fullmatch(file) and numbers_fit and _DIGEST.fullmatch(digest)):
        raise ValueError(f"Expected a file of this checkpoint, offsets and a SHA-256, got {row!r:.200}.")
    return FileSpan(file, begin, length, offset, digest)


def _checked(spec: TensorSpec) -> TensorSpec:
    numbers = [*spec.shape, *(spec.stride or ())]
    if len(spec.shape) > _MOST_DIMENSIONS or not all(
        type(number) is int and 0 <= number < _LARGEST for number in numbers
    ):
        raise ValueError(f"Expected sizes and strides of a tensor, got {spec.shape!r:.200} and {spec.stride!r:.200}.")
    elements = math.prod(max(size, 1) for size in spec.shape)  # torch multiplies them even if one is 0
    if spec.dtype not in _DTYPES or elements * spec.dtype.itemsize >= _LARGEST:
        raise ValueError(f"Expected a tensor that can exist, got {list(spec.shape)} of {spec.dtype}.")
    if spec.stride is not None and len(spec.stride) != len(spec.shape):
        raise ValueError(f"Expected a stride for each size, got {spec.stride} for {spec.shape}.")
    if spec.stride is not None and not is_dense(spec.shape, spec.stride):
        raise ValueError(f"Expected strides without gaps, got {spec.stride} for {spec.shape}.")
    if not isinstance(spec.device_type, str):
        raise ValueError(f"Expected a kind of device, got {spec.device_type!r:.200}.")
    return spec


_DTYPES = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64, torch.complex32),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8),
    torch.bool,
}
"""Dtypes whose elements are whole bytes and fully described by them."""


# Trees


def stored_in(tree: Tree) -> list[StoredTensor]:
    """The stored tensors of a tree."""
    found: list[StoredTensor] = []

    def note(stored: StoredTensor) -> None:
        found.append(stored)

    fill(tree, note)
    return found


def total_bytes(tensors: Iterable[StoredTensor]) -> int:
    """Bytes of the elements of stored tensors."""
    return sum(stored.nbytes for stored in tensors)


def written_in(tree: Tree) -> list[StoredTensor]:
    """The stored tensors that hold the elements of all in a tree, each once."""
    return as_written(stored_in(tree))


def fill(tree: Tree, read: Callable[[StoredTensor], Any]) -> Tree:
    """The tree with each stored tensor replaced by the result of ``read``, called one after the other."""
    if isinstance(tree, StoredTensor):
        return read(tree)
    if isinstance(tree, Mapping):
        return type(tree)({key: fill(value, read) for key, value in tree.items()})  # type: ignore[call-arg]
    if type(tree) in (list, tuple):
        return type(tree)(fill(value, read) for value in tree)
    return tree


def as_meta(stored: StoredTensor) -> Tensor:
    """A tensor without memory, of the same shape and dtype, for checks."""
    return torch.empty(stored.spec.shape, dtype=stored.spec.dtype, device="meta")


def text_and_tensors(tree: Tree, where: str) -> tuple[str, list[Tensor]]:
    """As `ddp_zero.core.local.tree.flatten`, with ``where`` as the name of the tree in messages.

    Raises:
        TypeError: for a value that cannot be in a checkpoint.
    """
    try:
        text, tensors = flatten(tree)
        for tensor in tensors:
            if tensor.dtype not in _DTYPES or tensor.dim() > _MOST_DIMENSIONS:
                raise TypeError(f"Expected tensors of whole bytes, got {tensor.dim()} dimensions of {tensor.dtype}.")
        return text, tensors
    except RecursionError as error:
        raise TypeError(f"Expected a tree of some dozen levels in {where}, got one nested too deeply.") from error
    except TypeError as error:
        raise TypeError(
            f"Expected what can be saved without pickle in {where}. {error} Turn arrays into tensors with "
            "torch.from_numpy(), other objects into their state dicts."
        ) from error
