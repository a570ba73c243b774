"""A checkpoint on disk: a folder that appears whole or not at all, and its marker.

A checkpoint is written under a hidden name beside existing ones, synced to disk, and then renamed. The *marker*, the
last file written inside it, states that it is complete and holds the hashes of its parts; a folder without a marker is
not a checkpoint, even where renaming a folder is not atomic, as on some network file systems.
"""

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ddp_zero.tools.files import COPY_AGAIN, LOAD_EARLIER, open_regular, written

MARKER = "complete.json"
_FORMAT = "ddp_zero"
_VERSION = 4
_NAME = re.compile(r"step-(?P<step>[0-9]{8,18})(?:-(?P<save>[0-9]{1,6}))?")
_UNFINISHED = re.compile(r"\.step-[0-9]{8,18}-[0-9a-f]{16}")
LARGEST_TEXT = 1 << 28


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
    return max((step for step, _ in map(_step_and_save, complete_in(root))), default=0) + 1


def start_next(root: Path, step: int | None, keep: int | None, creates: bool) -> str:
    """Check the numbers and, if this rank ``creates``, start a checkpoint. Returns its number and name as JSON, or "".

    Raises ValueError also if the path is itself a checkpoint, or holds a checkpoint newer than this step.
    """
    for name, number, least in (("step", step, 0), ("keep", keep, 1)):
        if number is not None and (type(number) is not int or number < least):
            raise ValueError(f"Expected {name} to be an int of at least {least}, got {number!r}. [ZERO-612]")
    if not creates:
        return ""
    if (root / MARKER).exists():
        raise ValueError(f"{root} is a checkpoint, not a folder of checkpoints. Give the folder above. [ZERO-612]")
    last = next_step(root) - 1
    if step is not None and step < last:
        raise ValueError(
            f"Expected a step of at least {last}, the newest checkpoint in {root}, got {step}. Remove the checkpoints "
            "that come after it, or save into a different folder: a load would take the newest. [ZERO-612]"
        )
    step = last + 1 if step is None else step
    return json.dumps([step, start(root, step)])


def start(root: Path, step: int) -> str:
    """Create a hidden folder for a new checkpoint, and remove those left unfinished. Returns its name.

    Only one job at a time may save into a folder.
    """
    if not 0 <= step < 10**18:
        raise ValueError(f"Expected a step from 0 to 10**18 - 1, got {step}. [ZERO-612]")
    root.mkdir(parents=True, exist_ok=True)
    sync_folder(root.parent)
    for path in root.iterdir():
        if _UNFINISHED.fullmatch(path.name):
            _discard(path)
    name = _hidden_name(step)
    (root / name).mkdir()
    return name


def publish(unfinished: Path, marker: Marker, keep: int | None) -> Path:
    """Mark a hidden folder as complete, rename it to its visible name, and keep the newest ``keep`` (None: all)."""
    root = unfinished.parent
    # the marker last, then its folder, then the rename, each on disk before the next: at any crash the checkpoint is
    # complete or invisible
    write_text(unfinished / MARKER, marker_text(marker))
    sync_folder(unfinished)
    places = [_step_and_save(path) for path in root.iterdir() if _NAME.fullmatch(path.name)]
    save = 1 + max((save for step, save in places if step == marker.step), default=-1)
    name = f"step-{marker.step:08d}" + (f"-{save}" if save else "")  # a later save of the same step sorts last
    unfinished.rename(root / name)
    sync_folder(root)
    others = [path for path in complete_in(root) if path.name != name]
    # only now, with the new checkpoint on disk; hidden first: after a kill in between, the next save removes the rest
    for path in others[: max(0, len(others) - keep + 1)] if keep is not None else []:
        step, _ = _step_and_save(path)
        _discard(path.rename(root / _hidden_name(step)))
    return root / name


def marker_text(marker: Marker) -> str:
    return text_with_digest({"format": _FORMAT, "version": _VERSION, **asdict(marker)})


def digest_of(text: str) -> str:
    """SHA-256 in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def text_with_digest(content: Mapping[str, Any]) -> str:
    """The content as a line of JSON, below the digest of that line."""
    line = json.dumps(content)
    return f"{digest_of(line)}\n{line}\n"


def line_in(text: str) -> str | None:
    """The line of a `text_with_digest`; None if it does not fit its digest."""
    digest, _, rest = text.partition("\n")
    line = rest.rstrip("\n")
    return line if digest_of(line) == digest else None


def write_text(path: Path, text: str) -> None:
    """Write a new file and wait until it is on disk."""
    with written(path, "x") as file:
        file.write(text)


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _hidden_name(step: int) -> str:
    return f".step-{step:08d}-{secrets.token_hex(8)}"


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
    return sorted(found, key=_step_and_save)


def newest(path: Path) -> Path:
    """The checkpoint itself, or the newest complete checkpoint in the folder; FileNotFoundError if there is none."""
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
    place = checkpoint / MARKER
    line = line_in(read_text(place))
    if line is None:
        raise ValueError(
            f"Expected a marker that fits its checksum, got damaged bytes in {place}. {COPY_AGAIN} [ZERO-622]"
        )
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"Expected JSON in {place}, got: {error}. {LOAD_EARLIER} [ZERO-624]") from error
    shown = {key: content.get(key) for key in ("format", "version")} if isinstance(content, dict) else content
    if shown != {"format": _FORMAT, "version": _VERSION}:
        raise ValueError(
            f"Expected format {_FORMAT!r} of version {_VERSION}, got {shown} in {place}. Load it with the version of "
            "the library that wrote it, or update this one. [ZERO-614]"
        )
    step, parts = content.get("step"), content.get("parts")
    if type(step) is not int or not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        raise ValueError(
            f"Expected a step and checksums of parts, got {content!r:.200} in {place}. {LOAD_EARLIER} [ZERO-624]"
        )
    return Marker(step, tuple(parts))


def read_text(path: Path) -> str:
    """A text file of a checkpoint; ValueError unless it is a regular file of at most 256 MiB of UTF-8."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > LARGEST_TEXT:
            raise ValueError(f"Expected at most {LARGEST_TEXT} bytes, got {size} in {path}. {COPY_AGAIN} [ZERO-622]")
        raw = file.read(size)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"Expected UTF-8 text in {path}, got: {error}. {COPY_AGAIN} [ZERO-622]") from error


def _step_and_save(path: Path) -> tuple[int, int]:
    """The step in a checkpoint's name, and the index of the save among all saves of that step; its order by age."""
    match = _NAME.fullmatch(path.name)
    assert match is not None, path
    return int(match["step"]), int(match["save"] or 0)


def part_name(rank: int) -> str:
    return f"part-{rank}.json"


def tensor_file_name(rank: int) -> str:
    """Name of a rank's file of tensors, as in `torch.distributed.checkpoint`."""
    return f"__{rank}_0.distcp"
