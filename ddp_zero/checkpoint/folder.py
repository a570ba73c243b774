"""A folder of checkpoints on disk: each appears whole or not at all, and old ones are removed.

A checkpoint is written next to the others under a hidden name, synced to disk, and then renamed. The *marker*, the last
file written inside it, states that it is complete and holds the hashes of its parts; a folder without a marker is not a
checkpoint, even where renaming a folder is not atomic, as on some network file systems.
"""

import hashlib
import json
import os
import re
import secrets
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ddp_zero.tools.record.regular_files import open_regular

MARKER = "complete.json"
_FORMAT = "ddp_zero"
_VERSION = 1
_NAME = re.compile(r"step-([0-9]{8,18})(?:-([0-9]{1,6}))?")
_UNFINISHED = re.compile(r"\.step-[0-9]{8,18}-[0-9a-f]{16}")
_LARGEST_TEXT = 1 << 28


@dataclass(frozen=True)
class Marker:
    """The contents of the marker of a complete checkpoint.

    Attributes:
        step: the number under which it was saved.
        parts: the SHA-256 of each rank's part, in rank order.
    """

    step: int
    parts: tuple[str, ...]


def folder_of(path: str | os.PathLike[str]) -> Path:
    """A user's path as a `Path`.

    Raises:
        ValueError: for an empty path, which would mean the current folder.
    """
    if os.fspath(path) == "":
        raise ValueError("Expected the path of a folder, got ''. Pass '.' if the current folder is meant.")
    return Path(path)


# Writing


def next_step(root: Path) -> int:
    """One more than the highest number of a complete checkpoint in the folder; 1 if it contains none."""
    return max((_order(path)[0] for path in complete_in(root)), default=0) + 1


def check_comes_last(root: Path, step: int | None) -> None:
    """Check that a path is not itself a checkpoint, and that a new one of this step would be the newest in it.

    Raises:
        ValueError: if not.
    """
    if (root / MARKER).exists():
        raise ValueError(f"Expected a folder of checkpoints, got one of them: {root}. Give the folder above.")
    last = next_step(root) - 1
    if step is not None and step < last:
        raise ValueError(
            f"Expected a step of at least {last}, that of the newest checkpoint in {root}, got {step}. Remove those "
            "that come after it, or save into another folder: a load would take the newest."
        )


def start(root: Path, step: int) -> str:
    """Create a hidden folder for a new checkpoint, and remove unfinished ones. Returns its name.

    Only one job at a time may save into a folder.
    """
    if not 0 <= step < 10**18:
        raise ValueError(f"Expected a step from 0 to 10**18 - 1, got {step}.")
    root.mkdir(parents=True, exist_ok=True)
    sync_folder(root.parent)
    for path in root.iterdir():
        if _UNFINISHED.fullmatch(path.name):
            _discard(path)
    name = f".step-{step:08d}-{secrets.token_hex(8)}"
    (root / name).mkdir()
    return name


def publish(unfinished: Path, marker: Marker, keep: int | None) -> Path:
    """Mark a checkpoint on disk as complete, rename it to its visible name, and remove old ones.

    Args:
        unfinished: the hidden folder.
        marker: the contents of its marker.
        keep: how many complete checkpoints to keep, this one included; None: all.

    Returns:
        The renamed folder.
    """
    root = unfinished.parent
    line = json.dumps({"format": _FORMAT, "version": _VERSION, **asdict(marker)})
    write_text(unfinished / MARKER, f"{hashlib.sha256(line.encode()).hexdigest()}\n{line}\n")
    sync_folder(unfinished)
    matches = [match for path in root.iterdir() if (match := _NAME.fullmatch(path.name))]
    again = 1 + max((int(match[2] or 0) for match in matches if int(match[1]) == marker.step), default=-1)
    name = f"step-{marker.step:08d}" + (f"-{again}" if again else "")  # a later save of the same step sorts last
    unfinished.rename(root / name)
    sync_folder(root)
    others = [path for path in complete_in(root) if path.name != name]
    for path in others[: max(0, len(others) - keep + 1)] if keep is not None else []:
        _remove(path)
    return root / name


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


# Reading


def complete_in(root: Path) -> list[Path]:
    """The complete checkpoints in a folder, from the lowest step to the highest; of the same step, as saved."""
    if not root.is_dir():
        return []
    found = [path for path in root.iterdir() if _NAME.fullmatch(path.name) and (path / MARKER).is_file()]
    return sorted(found, key=_order)


def is_complete(path: Path) -> bool:
    """Whether a path is a complete checkpoint, or a folder with one."""
    return (path / MARKER).is_file() or bool(complete_in(path))


def newest(path: Path) -> Path:
    """The checkpoint that a path names: itself, or the complete one of the highest step in it.

    Raises:
        FileNotFoundError: if there is no complete checkpoint.
    """
    if (path / MARKER).is_file():
        return path
    found = complete_in(path)
    if not found:
        raise FileNotFoundError(
            f"Expected a checkpoint of ddp_zero.checkpoint.save, or a folder of them, or one of DeepSpeed, at {path}, "
            "got no complete one. Others can be loaded with torch and given to load_state_dict()."
        )
    return found[-1]


def read_marker(checkpoint: Path) -> Marker:
    """The marker of a checkpoint, checked.

    Raises:
        ValueError: if it is damaged or not of this format.
    """
    digest, _, rest = read_text(checkpoint / MARKER).partition("\n")
    line = rest.rstrip("\n")
    if hashlib.sha256(line.encode()).hexdigest() != digest:
        raise ValueError(f"Expected a marker that fits its checksum, got a damaged one: {checkpoint / MARKER}.")
    content = parse_json(line, checkpoint / MARKER)
    if not isinstance(content, dict) or content.get("format") != _FORMAT or content.get("version") != _VERSION:
        shown = {key: content.get(key) for key in ("format", "version")} if isinstance(content, dict) else content
        raise ValueError(f"Expected format {_FORMAT!r} of version {_VERSION}, got {shown} in {checkpoint / MARKER}.")
    step, parts = content.get("step"), content.get("parts")
    if type(step) is not int or not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        raise ValueError(f"Expected a step and checksums of parts, got {content!r:.200} in {checkpoint / MARKER}.")
    return Marker(step, tuple(parts))


def parse_json(text: str, path: Path) -> Any:
    """JSON as Python objects.

    Raises:
        ValueError: naming the file, if the text is not JSON.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"Expected JSON, got something else in {path}: {error}") from error


def read_text(path: Path) -> str:
    """A text file of a checkpoint.

    Raises:
        ValueError: if it is not a regular file, is larger than 256 MiB, or is not UTF-8.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > _LARGEST_TEXT:
            raise ValueError(f"Expected at most {_LARGEST_TEXT} bytes, got {size} in {path}.")
        raw = file.read(size)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"Expected UTF-8 text, got other bytes in {path}: {error}") from error


def _order(path: Path) -> tuple[int, int]:
    """The step in a name, and the number of that save among those of the step."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise ValueError(f"Expected a folder named step-<number>, got {path}.")
    return int(match[1]), int(match[2] or 0)
