"""The values in a file of `torch.save`: tensors as places in files, objects without their classes."""

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ddp_zero.checkpoint.foreign.archive import Record, open_archive
from ddp_zero.checkpoint.foreign.safe_pickle import Inert, Known, Name, interpret

_STORAGES = {
    **{"FloatStorage": torch.float32, "DoubleStorage": torch.float64, "HalfStorage": torch.float16},
    **{"BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32},
    **{"ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool},
}
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _STORAGES.values()}
_LARGEST = 1 << 62
_MOST_DIMENSIONS = 64
_NODES = 100_000
_NODES_PER_BYTE = 20


@dataclass(frozen=True)
class Span:
    """Elements that lie one after the other.

    Attributes:
        record: the storage that they are a part of.
        begin: in bytes from its first element.
        nbytes: how many bytes.
    """

    record: Record
    begin: int
    nbytes: int


@dataclass(frozen=True)
class RawTensor:
    """A tensor whose elements lie in files, in logical order, possibly in several places.

    Attributes:
        shape: its sizes.
        dtype: of its elements.
        spans: where they are, in order; together as many bytes as it has.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    spans: tuple[Span, ...]

    def part(self, begin: int, count: int) -> tuple[Span, ...]:
        """The places of some elements of a tensor that lies in one.

        Raises:
            ValueError: if it has fewer.
        """
        if not 0 <= begin <= begin + count <= math.prod(self.shape):
            raise ValueError(f"Expected elements {begin} to {begin + count} of {math.prod(self.shape)}, got too few.")
        if not count:
            return ()
        (span,) = self.spans
        size = self.dtype.itemsize
        return (Span(span.record, span.begin + begin * size, count * size),)


@dataclass(frozen=True)
class _Storage:
    dtype: torch.dtype | None
    record: Record
    elements: int


def load(folder: Path, name: str, digest: "hashlib._Hash", classes: Mapping[tuple[str, str], Any]) -> Any:
    """The values of a file.

    Args:
        folder: of the checkpoint.
        name: of the file, relative to it.
        digest: is updated with what the file holds.
        classes: names that may occur besides those of torch, and what calling them yields; None: an `Inert`.

    Raises:
        ValueError: if it is damaged or holds anything else.
    """
    archive = open_archive(folder, name)
    digest.update(repr((name, hashlib.sha256(archive.program).hexdigest())).encode())
    digest.update(repr(sorted((key, record.crc) for key, record in archive.storages.items())).encode())

    def storage(identifier: Any) -> _Storage:
        """The place of a storage that the pickle names."""
        kind, of, key, _, elements = identifier
        if kind != "storage" or not isinstance(of, Name) or type(elements) is not int or key not in archive.storages:
            raise ValueError(f"Expected a storage of this file, got {identifier!r:.200}.")
        record, dtype = archive.storages[key], _STORAGES.get(of.name)
        if not 0 <= elements < _LARGEST or elements * (dtype.itemsize if dtype else 1) != record.nbytes:
            raise ValueError(f"Expected {elements} elements in storage {key!r:.50}, got {record.nbytes} bytes.")
        return _Storage(dtype, record, elements)

    inert = {where: _inert(where[1]) if call is None else call for where, call in classes.items()}
    return _plain(interpret(archive.program, {**_KNOWN, **inert}, storage, folder / name), len(archive.program))


def _plain(value: Any, size: int) -> Any:
    """The value in new containers, without names; refuses one that is much larger than its pickle, or has a circle."""
    left = _NODES + _NODES_PER_BYTE * size

    def copied(one: Any) -> Any:
        """A value in new containers, counted with all that is in it."""
        nonlocal left
        left -= 1
        if left < 0:
            raise ValueError("The pickle expands to more values than its size allows: it is recursive or amplified.")
        if isinstance(one, Inert):
            return Inert(one.name, copied(one.attributes))
        if type(one) is dict:
            return {copied(key): copied(item) for key, item in one.items()}
        if type(one) in (list, set, frozenset):
            return [copied(item) for item in one]
        if type(one) is tuple:
            return tuple(copied(item) for item in one)
        if isinstance(one, Name):
            if one.module == "torch" and one.name in _DTYPES:
                return _DTYPES[one.name]
            raise ValueError(f"Expected values, got {one.module}.{one.name} itself.")
        if isinstance(one, _Storage):
            raise ValueError("Expected tensors, got a storage.")
        return one

    try:
        return copied(value)
    except (RecursionError, TypeError) as error:
        raise ValueError(f"Expected values nested some dozen levels deep, got {type(error).__name__}.") from error


def _inert(name: str) -> Callable[..., Inert]:
    def build(*arguments: Any) -> Inert:
        """An object with the arguments as its first attributes."""
        return Inert(name, dict(enumerate(arguments)))

    return build


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> RawTensor:
    """As `torch._utils._rebuild_tensor_v2`."""
    numbers = [offset, *shape, *stride]
    if not isinstance(storage, _Storage) or storage.dtype is None or len(shape) != len(stride):
        raise ValueError(f"Expected a tensor in a storage of a known dtype, got {type(storage).__name__}.")
    if len(shape) > _MOST_DIMENSIONS or not all(type(one) is int and 0 <= one < _LARGEST for one in numbers):
        raise ValueError(f"Expected an offset, sizes and strides, got {numbers!r:.200}.")
    count = math.prod(shape)
    dense = [math.prod(shape[place + 1 :]) for place in range(len(shape))]
    if count and any(size > 1 and step != want for size, step, want in zip(shape, stride, dense, strict=True)):
        raise ValueError(f"Expected a contiguous tensor, got sizes {shape} with strides {stride}.")
    if offset + count > storage.elements:
        raise ValueError(f"Expected {offset + count} elements in a storage, got {storage.elements}.")
    size = storage.dtype.itemsize
    spans = (Span(storage.record, offset * size, count * size),) if count else ()
    return RawTensor(tuple(shape), storage.dtype, spans)


def _parameter(data: Any, *_: Any) -> Any:
    return data


def _ordered(*pairs: Any) -> dict[Any, Any]:
    return dict(*pairs)


def _listed(values: Any = ()) -> list[Any]:
    return list(values)


def _device(*parts: Any) -> str:
    return ":".join(map(str, parts))


def _sizes(values: Any = ()) -> tuple[Any, ...]:
    return tuple(values)


_KNOWN: Known = {
    ("collections", "OrderedDict"): _ordered,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch", "Size"): _sizes,
    ("torch", "device"): _device,
    **{(module, kind): _listed for module in ("builtins", "__builtin__") for kind in ("set", "frozenset")},
    **{("torch", name): None for name in (*_STORAGES, *_DTYPES)},
    ("torch.storage", "UntypedStorage"): None,
}
