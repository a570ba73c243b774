"""Sealed parts: each rank's part of a snapshot in a folder, and the few facts that say which snapshot it belongs to.

A part is as in a checkpoint, `ddp_zero.checkpoint.rows`: a JSON file with the tree of values, and a file of tensors,
here without archives around them. The *seal*, written last, names the snapshot, its step and its number of ranks, and
holds the SHA-256 of the JSON, which holds a CRC-32 of every tensor. A part without a seal is unfinished. The parts of
all ranks with seals of one snapshot are a complete checkpoint, wherever they lie.

Files may be damaged or hostile: everything is checked before use, and nothing is unpickled.
"""

import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import NamedTuple

from ddp_zero.checkpoint.folder import line_in, part_name, read_text, tensor_file_name, text_with_digest
from ddp_zero.checkpoint.tensor_file import decode_part, stored_in, verify
from ddp_zero.core.comm import logger
from ddp_zero.error_codes import uncoded
from ddp_zero.tools.files import COPY_AGAIN, LOAD_EARLIER, is_of, open_regular

SLOTS = ("a", "b")
"""Names of a rank's two folders: the last complete snapshot is in one while the next is written to the other."""

RESTORED = "restored-"
"""Beginning of the name of a folder with all parts of the snapshot that a job has been restored from."""

GIVEN_UP = ".given-up-"
"""Beginning of the name of a folder that is being removed."""

_FORMAT, _VERSION = "ddp_zero snapshot", 3
_RANK_FOLDER = re.compile(r"rank-[0-9]{5,9}")
_SEAL = re.compile(r"seal-([0-9]{1,9})\.json")
_SNAPSHOT = re.compile(r"[0-9a-f]{32}-[0-9]{1,18}")
_RESTORED = re.compile(RESTORED + _SNAPSHOT.pattern)
_GIVEN_UP = re.compile(re.escape(GIVEN_UP) + r"[0-9a-f]{16}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_LARGEST = 1 << 62


@dataclass(frozen=True)
class Seal:
    """Facts about one rank's complete part of a snapshot."""

    snapshot: str  # name of the snapshot, the same on all of its ranks and never used again
    step: int  # number of steps that the training had done
    world_size: int  # number of ranks that make up the snapshot
    rank: int  # the rank whose part it is
    part: str  # SHA-256 of the part's JSON
    nbytes: int  # least size of the file of tensors

    def as_text(self) -> str:
        return text_with_digest({"format": _FORMAT, "version": _VERSION, **asdict(self)})

    @classmethod
    def of_text(cls, text: str, shown: object) -> "Seal":
        """The inverse of `as_text`; ValueError naming ``shown`` if the text is damaged or of a different format."""
        line = line_in(text)
        if line is None:
            raise ValueError(f"The seal does not fit its checksum: {shown}. [ZERO-644]")
        try:
            content = json.loads(line)
            known = (content.pop("format"), content.pop("version"))
            seal = cls(**content)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"Expected the seal of a part in {shown}, got {error!r:.200}. [ZERO-644]") from error
        are_typed = all(is_of(getattr(seal, one.name), one.type) for one in fields(cls))
        numbers = (seal.step, seal.world_size, seal.rank, seal.nbytes)
        if (
            known != (_FORMAT, _VERSION)
            or not are_typed
            or not all(0 <= number < _LARGEST for number in numbers)
            or not (_SNAPSHOT.fullmatch(seal.snapshot) and _DIGEST.fullmatch(seal.part))
            or not seal.rank < seal.world_size
        ):
            raise ValueError(f"Expected the seal of a part in {shown}, got {line:.200}. [ZERO-644]")
        return seal


def seal_name(rank: int) -> str:
    return f"seal-{rank}.json"


def names_of_part(rank: int) -> tuple[str, str, str]:
    """File names of a part: tensors, JSON, seal; a part is complete when the last file is there."""
    return tensor_file_name(rank), part_name(rank), seal_name(rank)


def rank_folder(root: Path, rank: int) -> Path:
    """The folder in which a rank keeps its own parts, and copies of parts of other ranks."""
    return root / f"rank-{rank:05d}"


def write_privately(path: Path, text: str) -> None:
    """Write a text that appears whole or not at all, readable by this user alone."""
    unfinished = path.with_name(f".{path.name}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_NOFOLLOW", 0)
    with os.fdopen(os.open(unfinished, flags, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
    unfinished.replace(path)


class Holding(NamedTuple):
    """A sealed part in a folder of this host."""

    seal: Seal
    folder: Path


def holdings(root: Path) -> Iterator[Holding]:
    """Every sealed part below the folder of a run; parts with damaged seals are left out, with a line in the log."""
    for folder in folders_of_snapshots(root):
        for path in sorted(folder.iterdir()):
            match = _SEAL.fullmatch(path.name)
            if match is None:
                continue
            try:
                yield Holding(_seal_in(folder, int(match[1])), folder)
            except ValueError as error:
                logger.warning(f"A part of a snapshot is left out: {_fault(error)} [ZERO-644]")


def folders_of_snapshots(root: Path) -> list[Path]:
    """The folders with parts below the folder of a run, by their names: whatever else is there is somebody's own."""
    above = _folders_in(root)
    ranks = [one for one in above if _RANK_FOLDER.fullmatch(one.name)]
    slots = [slot for one in ranks for slot in _folders_in(one) if slot.name in SLOTS]
    return [*slots, *(one for one in above if _RESTORED.fullmatch(one.name))]


def folders_given_up(root: Path) -> list[Path]:
    return [one for one in _folders_in(root) if _GIVEN_UP.fullmatch(one.name)]


def _folders_in(root: Path) -> list[Path]:
    return sorted(path for path in root.iterdir() if path.is_dir() and not path.is_symlink())


def _seal_in(folder: Path, rank: int) -> Seal:
    path = folder / seal_name(rank)
    seal = Seal.of_text(read_text(path), path)
    if seal.rank != rank:
        raise ValueError(f"Expected the seal of rank {rank}, got the seal of rank {seal.rank}: {path}. [ZERO-644]")
    tensors = folder / tensor_file_name(rank)
    with open_regular(tensors) as file:
        size = os.fstat(file.fileno()).st_size
    if size < seal.nbytes:
        raise ValueError(f"Expected at least {seal.nbytes} bytes, got {size} in {tensors}. [ZERO-644]")
    return seal


def verify_part(folder: Path, seal: Seal) -> None:
    """Check a part against its seal, and all its tensors against their checksums; ValueError if anything differs."""
    path = folder / part_name(seal.rank)
    try:
        tree = decode_part(read_text(path), seal.part, path)
        stored = stored_in(tree)
        own = tensor_file_name(seal.rank)
        if any(one.span.file != own or one.span.offset + one.nbytes > seal.nbytes for one in stored):
            raise ValueError(f"Expected tensors within {seal.nbytes} bytes of {own}: {path}. [ZERO-644]")
        verify(folder, stored)
    except ValueError as error:
        message = f"Expected the part of rank {seal.rank} of snapshot {seal.snapshot} to be whole, got: {_fault(error)}"
        raise ValueError(f"{message} [ZERO-644]") from error


def _fault(error: ValueError) -> str:
    """The fault of a part in words, without the remedy for checkpoints: another copy or snapshot takes its place."""
    return uncoded(str(error)).removesuffix(f" {COPY_AGAIN}").removesuffix(f" {LOAD_EARLIER}")
