"""A file of `torch.save`: a zip archive with a pickle, and the elements of each storage as they lie in memory."""

import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ddp_zero.tools.record.regular_files import open_regular

_BAD_ZIP = zipfile.BadZipFile, NotImplementedError, RuntimeError
_LOCAL_HEADER_BYTES = 30
_LARGEST_PICKLE = 1 << 28
_MOST_RECORDS = 1 << 20


@dataclass(frozen=True)
class Record:
    """The elements of a storage in a file.

    Attributes:
        file: the file's name, relative to the folder of the checkpoint.
        offset: of the first element, in bytes.
        nbytes: how many bytes there are.
        crc: their CRC-32.
    """

    file: str
    offset: int
    nbytes: int
    crc: int


@dataclass(frozen=True)
class Archive:
    """What a file holds.

    Attributes:
        program: the pickle, which builds its values.
        storages: the elements that the program refers to, by key.
    """

    program: bytes
    storages: dict[str, Record]


def open_archive(folder: Path, name: str) -> Archive:
    """Read everything but the elements of tensors.

    Args:
        folder: of the checkpoint.
        name: of the file, relative to it.

    Raises:
        ValueError: naming the file, if it is not of this form, compressed, cut off, or of a machine that stores the
            highest byte first.
    """
    path = folder / name
    with open_regular(path) as file:
        try:
            return _read(file, name)
        except (*_BAD_ZIP, struct.error, OverflowError, ValueError, OSError, EOFError) as error:
            raise ValueError(f"Expected a file that torch.save wrote as a zip archive, got {path}: {error}") from error


def _read(file: BinaryIO, name: str) -> Archive:
    size = file.seek(0, 2)
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        if len(entries) > _MOST_RECORDS:
            raise ValueError(f"Expected at most {_MOST_RECORDS} records, got {len(entries)}.")
        root = entries[0].filename.partition("/")[0] if entries else ""
        found: dict[str, zipfile.ZipInfo] = {}
        for entry in entries:
            inner = entry.filename.removeprefix(f"{root}/")
            if inner in found or inner == entry.filename:
                raise ValueError(f"Expected records below one folder, each once, got {entry.filename!r:.200}.")
            if (
                entry.compress_type != zipfile.ZIP_STORED
                or entry.flag_bits & 1
                or entry.file_size != entry.compress_size
            ):
                raise ValueError(f"Expected records as they are, got {entry.filename!r:.200} compressed or encrypted.")
            found[inner] = entry
        if "data.pkl" not in found or found["data.pkl"].file_size > _LARGEST_PICKLE:
            raise ValueError(f"Expected a record data.pkl of at most {_LARGEST_PICKLE} bytes, got none.")
        if "byteorder" in found and (
            found["byteorder"].file_size > 16 or archive.read(found["byteorder"]) != b"little"
        ):
            raise ValueError("Expected bytes in little-endian order, got a different order.")
        program = archive.read(found["data.pkl"])
    storages = {
        inner.removeprefix("data/"): Record(name, _offset(file, entry, size), entry.file_size, entry.CRC)
        for inner, entry in found.items()
        if inner.startswith("data/")
    }
    return Archive(program, storages)


def _offset(file: BinaryIO, entry: zipfile.ZipInfo, size: int) -> int:
    """Where the bytes of a record begin: after its own header, whose length the directory does not tell."""
    file.seek(entry.header_offset)
    header = file.read(_LOCAL_HEADER_BYTES)
    if len(header) < _LOCAL_HEADER_BYTES or header[:4] != b"PK\x03\x04":
        raise ValueError(f"Expected a header in front of {entry.filename!r:.200}, got none.")
    names = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    begin = entry.header_offset + _LOCAL_HEADER_BYTES + names
    if begin + entry.file_size > size:
        raise ValueError(f"Expected {begin + entry.file_size} bytes, got {size}: the file is cut off.")
    return begin
