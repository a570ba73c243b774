"""Reads files of `torch.save` of unknown origin: tensors as places in files, objects without their classes.

Such a file is a zip archive with a pickle and the elements of each storage. A pickle is a program for a stack machine;
two of its instructions name a class or a function and call it, which is how a hostile file runs code. Here a name is
only a `Name`: a call of a *known* name yields a value of this module, and any other name is refused when it comes up,
called or not. Only the pickle is read; nothing is imported or called.

``torch.load(weights_only=True, mmap=True)`` with stand-ins for DeepSpeed's classes was tried instead (torch 2.13.0) and
lost: a file of 350 bytes makes it allocate any memory (it calls ``bytearray``, and unpacks compressed pickles), it
returns values of exponential size, follows links, waits for pipes and checks no CRC, and a file that is cut while it is
mapped ends the process. Before torch 2.10 a file can overwrite memory (GHSA-63cw-57p8-fm3p). The cases are in
``tests/unit/checkpoint/foreign/test_torch_file.py``.
"""

import hashlib
import math
import pickletools
import struct
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ddp_zero.error_codes import coded
from ddp_zero.tools.files import open_regular

_BAD_ZIP = zipfile.BadZipFile, NotImplementedError, RuntimeError
_LOCAL_HEADER_BYTES = 30
_LARGEST_PICKLE = 1 << 28
_MOST_RECORDS = 1 << 20
_LARGEST = 1 << 62
_MOST_DIMENSIONS = 64
_NODES = 100_000
_NODES_PER_BYTE = 20

_STORAGES = {
    **{"FloatStorage": torch.float32, "DoubleStorage": torch.float64, "HalfStorage": torch.float16},
    **{"BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32},
    **{"ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool},
}
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _STORAGES.values()}


@dataclass(frozen=True)
class Record:
    """The elements of a storage in a file."""

    file: str  # name of the file, relative to the folder of the checkpoint
    offset: int  # offset of the first element, in bytes
    nbytes: int  # number of bytes
    crc: int  # CRC-32 of those bytes


@dataclass(frozen=True)
class Span:
    """Consecutive bytes of a record, from its byte ``begin`` on."""

    record: Record
    begin: int
    nbytes: int


@dataclass(frozen=True)
class RawTensor:
    """A tensor whose elements lie in files, in logical order, possibly in several places."""

    shape: tuple[int, ...]  # its sizes
    dtype: torch.dtype  # dtype of its elements
    spans: tuple[Span, ...]  # places of its elements, in order; together as many bytes as the tensor

    def part(self, begin: int, count: int) -> tuple[Span, ...]:
        """The places of some elements of a tensor that lies in one place. Raises ValueError if it has fewer."""
        if not 0 <= begin <= begin + count <= math.prod(self.shape):
            raise ValueError(
                f"Expected elements {begin} to {begin + count} of {math.prod(self.shape)}, got too few. [ZERO-621]"
            )
        if not count:
            return ()
        (span,) = self.spans
        size = self.dtype.itemsize
        return (Span(span.record, span.begin + begin * size, count * size),)


@dataclass
class Inert:
    """An object of a known class: the class's name, and the attributes that the pickle sets."""

    name: str
    attributes: dict[Any, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Storage:
    dtype: torch.dtype | None
    record: Record
    elements: int


def load(folder: Path, name: str, digest: "hashlib._Hash", classes: Mapping[tuple[str, str], Any]) -> Any:
    """The values of a file, whose contents also update ``digest``; ValueError if it is damaged or holds anything else.

    ``classes`` are permitted names besides torch's, with the result of calling them; None stands for an `Inert`.
    """
    archive = open_archive(folder, name)
    digest.update(repr((name, hashlib.sha256(archive.program).hexdigest())).encode())
    digest.update(repr(sorted((key, record.crc) for key, record in archive.storages.items())).encode())

    def storage(identifier: Any) -> _Storage:
        kind, of, key, _, elements = identifier
        if kind != "storage" or not isinstance(of, Name) or type(elements) is not int or key not in archive.storages:
            raise ValueError(f"Expected a storage of this file, got {identifier!r:.200}. [ZERO-621]")
        record = archive.storages[key]
        dtype = _STORAGES.get(of.name)
        if not 0 <= elements < _LARGEST or elements * (dtype.itemsize if dtype else 1) != record.nbytes:
            raise ValueError(
                f"Expected {elements} elements in storage {key!r:.50}, got {record.nbytes} bytes. [ZERO-621]"
            )
        return _Storage(dtype, record, elements)

    inert = {where: _inert(where[1]) if call is None else call for where, call in classes.items()}
    value = interpret(archive.program, {**_KNOWN, **inert}, storage, folder / name)
    return _plain(value, folder / name, len(archive.program))


def _plain(value: Any, path: Path, size: int) -> Any:
    """The value in new containers, without names; refuses a cyclic value or one much larger than its pickle."""
    most = left = _NODES + _NODES_PER_BYTE * size

    def copy(one: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise ValueError(
                f"{path} expands to more than {most} values: its pickle is recursive or amplified. [ZERO-619]"
            )
        if isinstance(one, Inert):
            return Inert(one.name, copy(one.attributes))
        if type(one) is dict:
            return {copy(key): copy(item) for key, item in one.items()}
        if type(one) in (list, set, frozenset):
            return [copy(item) for item in one]
        if type(one) is tuple:
            return tuple(copy(item) for item in one)
        if isinstance(one, Name):
            if one.module == "torch" and one.name in _DTYPES:
                return _DTYPES[one.name]
            raise ValueError(f"Expected values, got {one.module}.{one.name} itself. [ZERO-619]")
        if isinstance(one, _Storage):
            raise ValueError("Expected tensors, got a storage. [ZERO-619]")
        return one

    try:
        return copy(value)
    except (RecursionError, TypeError) as error:
        raise ValueError(
            f"Expected values nested some dozen levels deep, got {type(error).__name__}. [ZERO-619]"
        ) from error


# The archive


@dataclass(frozen=True)
class Archive:
    """A file's pickle, and the elements that it refers to, by key."""

    program: bytes
    storages: dict[str, Record]


def open_archive(folder: Path, name: str) -> Archive:
    """Read everything but the elements of tensors; ValueError naming the file if it is not such an archive."""
    path = folder / name
    with open_regular(path) as file:
        try:
            return _read_archive(file, name)
        except (*_BAD_ZIP, struct.error, OverflowError, ValueError, OSError, EOFError) as error:
            message = f"Expected a file that torch.save wrote as a zip archive, got {path}: {error}"
            raise ValueError(coded(message, "[ZERO-621]")) from error


def _read_archive(file: BinaryIO, name: str) -> Archive:
    """Read the pickle of an archive, and the place of each storage in it; ValueError if anything is unusual."""
    size = file.seek(0, 2)
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        if len(entries) > _MOST_RECORDS:
            raise ValueError(f"Expected at most {_MOST_RECORDS} records, got {len(entries)}. [ZERO-619]")
        root = entries[0].filename.partition("/")[0] if entries else ""
        entry_of: dict[str, zipfile.ZipInfo] = {}
        for entry in entries:
            inner = entry.filename.removeprefix(f"{root}/")
            if inner in entry_of or inner == entry.filename:
                raise ValueError(
                    f"Expected records below one folder, each once, got {entry.filename!r:.200}. [ZERO-621]"
                )
            is_stored = entry.compress_type == zipfile.ZIP_STORED and entry.file_size == entry.compress_size
            if not is_stored or entry.flag_bits & 1:
                raise ValueError(
                    f"Expected records as they are, got {entry.filename!r:.200} compressed or encrypted. [ZERO-619]"
                )
            entry_of[inner] = entry
        if "data.pkl" not in entry_of or entry_of["data.pkl"].file_size > _LARGEST_PICKLE:
            raise ValueError(f"Expected a record data.pkl of at most {_LARGEST_PICKLE} bytes, got none. [ZERO-621]")
        order = entry_of.get("byteorder")
        if order is not None and (order.file_size > 16 or archive.read(order) != b"little"):
            raise ValueError("Expected bytes in little-endian order, got a different order. [ZERO-619]")
        program = archive.read(entry_of["data.pkl"])
    storages = {
        inner.removeprefix("data/"): Record(name, _offset(file, entry, size), entry.file_size, entry.CRC)
        for inner, entry in entry_of.items()
        if inner.startswith("data/")
    }
    return Archive(program, storages)


def _offset(file: BinaryIO, entry: zipfile.ZipInfo, size: int) -> int:
    """The offset of a record's bytes: after its own header, whose length the directory does not tell."""
    file.seek(entry.header_offset)
    header = file.read(_LOCAL_HEADER_BYTES)
    if len(header) < _LOCAL_HEADER_BYTES or header[:4] != b"PK\x03\x04":
        raise ValueError(f"Expected a header in front of {entry.filename!r:.200}, got none. [ZERO-621]")
    names = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    begin = entry.header_offset + _LOCAL_HEADER_BYTES + names
    if begin + entry.file_size > size:
        raise ValueError(f"Expected {begin + entry.file_size} bytes, got {size}: the file is cut off. [ZERO-621]")
    return begin


# The pickle


@dataclass(frozen=True)
class Name:
    """A class or a function that a pickle names: its module and its name in it."""

    module: str
    name: str


Call = Callable[..., Any]
Known = Mapping[tuple[str, str], Call | None]
"""Result of calling each name; None for a name that is only mentioned."""

_MARK = object()
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_LITERALS = {
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
}
_EMPTY: dict[str, Callable[[], Any]] = {"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_SET": set, "EMPTY_TUPLE": tuple}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def interpret(program: bytes, known: Known, persistent: Call, shown: object) -> Any:
    """The value that a pickle describes; ValueError for an unknown name, or any other operation.

    ``persistent`` gives the value for an identifier of an object outside the pickle, such as a storage.
    """
    machine = _Machine(known, persistent)
    try:
        for instruction, argument, _ in pickletools.genops(program):
            if instruction.name == "STOP":
                (value,) = machine.stack
                return value
            machine.step(instruction.name, argument)
        raise ValueError("the pickle does not end. [ZERO-621]")
    except _UnknownNameError as error:
        message = f"Expected only values that are known to be harmless in {shown}, got {error}"
        raise ValueError(f"{message} [ZERO-619]") from error
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, OverflowError) as error:
        message = f"Expected an undamaged pickle in {shown}, got {type(error).__name__}: {error}"
        raise ValueError(coded(message, "[ZERO-621]")) from error


class _UnknownNameError(Exception):
    """A pickle uses a forbidden name."""


class _Machine:
    """The stack and the memory of a program; see `interpret`."""

    def __init__(self, known: Known, persistent: Call) -> None:
        self.stack: list[Any] = []
        self._known = known
        self._persistent = persistent
        self._memory: dict[int, Any] = {}

    def step(self, name: str, argument: Any) -> None:
        """Carry out one instruction of a pickle; ValueError for one that is not harmless or not known."""
        stack, memory = self.stack, self._memory
        match name:
            case "FRAME":  # a hint for readers
                pass
            case "PROTO":
                if argument > 5:
                    raise ValueError(f"a protocol {argument}")
            case _ if name in _CONSTANTS:
                stack.append(_CONSTANTS[name])
            case _ if name in _LITERALS:
                stack.append(argument)
            case _ if name in _EMPTY:
                stack.append(_EMPTY[name]())
            case _ if name in _TUPLES:
                stack.append(tuple(self._pop(_TUPLES[name])))
            case "TUPLE":
                stack.append(tuple(self._pop_to_mark()))
            case "MARK":
                stack.append(_MARK)
            case "BINPUT" | "LONG_BINPUT":
                memory[argument] = stack[-1]
            case "MEMOIZE":
                memory[len(memory)] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memory[argument])
            case "APPEND" | "APPENDS":
                values = self._pop(1) if name == "APPEND" else self._pop_to_mark()
                self._top(list).extend(values)
            case "ADDITEMS":
                values = self._pop_to_mark()
                self._top(set).update(values)
            case "SETITEM" | "SETITEMS":
                values = self._pop(2) if name == "SETITEM" else self._pop_to_mark()
                self._top(dict).update(zip(values[::2], values[1::2], strict=True))
            case "GLOBAL":
                self._push_name(*argument.split(" ", 1))
            case "STACK_GLOBAL":
                self._push_name(*self._pop(2))
            case "REDUCE" | "NEWOBJ":
                self._call(*self._pop(2))
            case "BUILD":
                self._build(*self._pop(1))
            case "BINPERSID":
                stack.append(self._persistent(*self._pop(1)))
            case _:
                raise _UnknownNameError(f"the instruction {name}.")

    def _pop(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise IndexError("the stack is too short")
        values = self.stack[-count:]
        del self.stack[-count:]
        return values

    def _pop_to_mark(self) -> list[Any]:
        place = max(place for place, value in enumerate(self.stack) if value is _MARK)
        values = self.stack[place + 1 :]
        del self.stack[place:]
        return values

    def _top(self, kind: type) -> Any:
        if type(self.stack[-1]) is not kind:
            raise TypeError(f"a {type(self.stack[-1]).__name__} in the place of a {kind.__name__}")
        return self.stack[-1]

    def _push_name(self, module: Any, name: Any = "") -> None:
        if (module, name) not in self._known:
            raise _UnknownNameError(f"the name {module}.{name}. Load the file with its library, and save plain values.")
        self.stack.append(Name(module, name))

    def _call(self, called: Any, arguments: Any) -> None:
        call = self._known[called.module, called.name] if isinstance(called, Name) else None
        if call is None or type(arguments) is not tuple:
            raise _UnknownNameError(f"a call of {called!r:.200}.")
        self.stack.append(call(*arguments))

    def _build(self, state: Any) -> None:
        target = self.stack[-1]
        if isinstance(target, Inert) and type(state) is dict:
            target.attributes.update(state)
        elif type(target) is not dict:  # an OrderedDict may have attributes, which say nothing about its items
            raise _UnknownNameError(f"a state for a {type(target).__name__}.")


# Results of calling torch's names


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> RawTensor:
    """As `torch._utils._rebuild_tensor_v2`."""
    numbers = [offset, *shape, *stride]
    if not isinstance(storage, _Storage) or storage.dtype is None or len(shape) != len(stride):
        raise ValueError(f"Expected a tensor in a storage of a known dtype, got {type(storage).__name__}. [ZERO-619]")
    if len(shape) > _MOST_DIMENSIONS or not all(type(one) is int and 0 <= one < _LARGEST for one in numbers):
        raise ValueError(f"Expected an offset, sizes and strides, got {numbers!r:.200}. [ZERO-619]")
    count = math.prod(shape)
    dense = [math.prod(shape[place + 1 :]) for place in range(len(shape))]
    if count and any(size > 1 and step != want for size, step, want in zip(shape, stride, dense, strict=True)):
        raise ValueError(f"Expected a contiguous tensor, got sizes {shape} with strides {stride}. [ZERO-619]")
    if offset + count > storage.elements:
        raise ValueError(f"Expected {offset + count} elements in a storage, got {storage.elements}. [ZERO-621]")
    size = storage.dtype.itemsize
    spans = (Span(storage.record, offset * size, count * size),) if count else ()
    return RawTensor(tuple(shape), storage.dtype, spans)


def _inert(name: str) -> Callable[..., Inert]:
    return lambda *arguments: Inert(name, dict(enumerate(arguments)))


_KNOWN: Known = {
    ("collections", "OrderedDict"): dict,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_parameter"): lambda data, *_: data,
    ("torch", "Size"): tuple,
    ("torch", "device"): lambda *parts: ":".join(map(str, parts)),
    **{(module, kind): list for module in ("builtins", "__builtin__") for kind in ("set", "frozenset")},
    **{("torch", name): None for name in (*_STORAGES, *_DTYPES)},
    ("torch.storage", "UntypedStorage"): None,
}
