"""A configuration as users give it, a dictionary, a JSON file or its text in base64, as one dictionary."""

import base64
import binascii
import copy
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddp_zero.dsconfig.keys import ConfigError

Source = Mapping[str, Any] | str | os.PathLike[str]
"""A configuration: a dictionary, the path of a JSON file, or its text in URL-safe base64, as launchers pass it."""


def read(source: Source) -> dict[str, Any]:
    """The configuration as a dictionary of its own.

    Raises:
        ConfigError: for a file that is missing or not JSON, keys that occur twice, or anything but an object.
        TypeError: for a source of another type.
    """
    if isinstance(source, Mapping):
        return copy.deepcopy(dict(source))
    if not isinstance(source, str | os.PathLike):
        raise TypeError(f"Expected a configuration as a dict or a path, got {type(source).__name__}.")
    path = Path(source)
    text = path.read_text() if _is_file(path) else _decoded(source)
    if text is None:
        raise ConfigError(f"Expected the path of a DeepSpeed configuration, got {str(source)!r:.200}: no such file.")
    name = str(path) if _is_file(path) else "base64"
    try:
        document = json.loads(text, object_pairs_hook=_without_repeats)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"Expected JSON in {name}, got {error}. Comments, which DeepSpeed's reader allows, must be removed."
        ) from error
    if not isinstance(document, dict):
        raise ConfigError(f"Expected a JSON object in {name}, got {type(document).__name__}.")
    return document


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # base64 may be too long for a path
        return False


def _decoded(source: str | os.PathLike[str]) -> str | None:
    try:
        return base64.urlsafe_b64decode(str(source).encode()).decode() if isinstance(source, str) else None
    except (binascii.Error, UnicodeDecodeError):
        return None


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ConfigError(f"Expected every key once, got several of {', '.join(map(repr, repeated))}.")
    return dict(pairs)


def value_at(document: Mapping[str, Any], path: str, default: Any = None) -> Any:
    """The value of a key, or the default if it, or a block around it, is missing."""
    found: Any = document
    for name in path.split("."):
        if not isinstance(found, Mapping) or name not in found:
            return default
        found = found[name]
    return found
