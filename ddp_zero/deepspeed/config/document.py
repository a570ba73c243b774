"""A configuration as users give it, a dictionary, a JSON file or its text in base64, as one dictionary."""

import base64
import binascii
import copy
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ddp_zero.deepspeed.config.keys import ConfigError

COMMENT = "_comment"
"""What the names of keys begin with that say nothing to anybody but readers."""
_LARGEST = 2**63 - 1

Source = Mapping[str, Any] | str | os.PathLike[str]
"""A configuration: a dictionary, the path of a JSON file, or its text in URL-safe base64, as launchers pass it."""


def read(source: Source) -> dict[str, Any]:
    """The configuration as a dictionary of its own, without the keys of comments, which begin with ``_comment``.

    Raises:
        ConfigError: for a file that is missing or not JSON in UTF-8, blocks that are nested too deeply, numbers that
            are not finite or have too many digits, keys that occur twice, or anything but an object.
        TypeError: for a source of another type.
    """
    if not isinstance(source, Mapping | str | os.PathLike):
        raise TypeError(f"Expected a configuration as a dict or a path, got {type(source).__name__}.")
    try:
        if isinstance(source, Mapping):
            document, name = copy.deepcopy(dict(source)), "the configuration"
        else:
            document, name = _loaded(source)
        return _checked(document, name)
    except RecursionError:
        raise ConfigError("Expected a configuration of a few nested blocks, got hundreds in each other.") from None


def _loaded(source: str | os.PathLike[str]) -> tuple[dict[str, Any], str]:
    """What a source holds, and its name."""
    path = Path(source)
    if str(source) and _is(path, Path.is_dir):
        raise ConfigError(f"Expected the path of a DeepSpeed configuration, got {str(source)!r:.200}: a folder.")
    name = str(path) if _is(path, Path.is_file) else "base64"
    text = _text(path) if name != "base64" else _decoded(source)
    if not text:
        what = "no such file" if text is None or not str(source) else "an empty file"
        raise ConfigError(f"Expected the path of a DeepSpeed configuration, got {str(source)!r:.200}: {what}.")
    try:
        document = json.loads(text, object_pairs_hook=_without_repeats)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"Expected JSON in {name}, got {error}. Comments, which DeepSpeed's reader allows, must be removed, or be "
            "keys that begin with _comment."
        ) from error
    except ConfigError:
        raise
    except ValueError as error:  # of Python, about an int
        raise ConfigError(f"Expected numbers in {name}, got one of thousands of digits.") from error
    except RecursionError:
        raise ConfigError(f"Expected a few nested blocks in {name}, got hundreds in each other.") from None
    if not isinstance(document, dict):
        raise ConfigError(f"Expected a JSON object in {name}, got {type(document).__name__}.")
    return document, name


_BEGINNINGS = {
    b"\xff\xfe": "text in UTF-16: save it as UTF-8",
    b"\xfe\xff": "text in UTF-16: save it as UTF-8",
    b"\x1f\x8b": "a gzip archive: unpack it first",
    b"PK\x03\x04": "a zip archive: unpack it first",
}


def _text(path: Path) -> str:
    """The content of a file in UTF-8."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"Expected a DeepSpeed configuration in {path}, got {error.strerror or error}.") from error
    found = next((text for begin, text in _BEGINNINGS.items() if content.startswith(begin)), None)
    if found is None and b"\0" in content:
        found = "binary data"
    if found is None:
        try:
            return content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            found = f"a byte that is not UTF-8 at place {error.start}: save it as UTF-8"
    raise ConfigError(f"Expected JSON in UTF-8 in {path}, got {found}.")


def _checked(document: Mapping[str, Any], name: str, prefix: str = "") -> dict[str, Any]:
    """A block without comments.

    Raises:
        ConfigError: for numbers that nothing can be set to.
    """
    kept = dict[str, Any]()
    for key, value in document.items():
        if isinstance(key, str) and key.startswith(COMMENT):
            continue
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"Expected finite numbers in {name}, got {prefix}{key} = {value}.")
        if isinstance(value, int) and abs(value) > _LARGEST:
            raise ConfigError(f"Expected ints of up to 64 bits in {name}, got a larger one for {prefix}{key}.")
        kept[key] = _checked(value, name, f"{prefix}{key}.") if isinstance(value, Mapping) else value
    return kept


def _is(path: Path, kind: Callable[[Path], bool]) -> bool:
    try:
        return kind(path)
    except (OSError, ValueError):  # base64 may be too long for a path, and a text may hold a null character
        return False


def _decoded(source: str | os.PathLike[str]) -> str | None:
    try:
        return base64.urlsafe_b64decode(str(source).encode()).decode() if isinstance(source, str) else None
    except (binascii.Error, UnicodeError):
        return None


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs if not name.startswith(COMMENT)]
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
