"""What a key of a DeepSpeed configuration does here, and the look-up of every key of a document in the table.

A key is *honoured*, has *no effect* here for a reason, which is logged once, or is *refused* with a remedy. With some
values a key asks for nothing, such as ``"enabled": false``; it is then *off* whatever it would do otherwise. A key
that is in no table is an error: nothing is ignored silently.
"""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

AUTO = "auto"
"""The value that stands for one that is filled in later."""

ANY = ("*",)
"""In ``Key.holds``: keys of any name."""


class Kind(Enum):
    """What becomes of a key."""

    HONOURED = "honoured"
    NO_EFFECT = "no effect"
    REFUSED = "refused"
    OFF = "off"


@dataclass(frozen=True)
class Case:
    """What a key does at some of its values, where that differs from the others.

    Attributes:
        values: the values, compared by ``==``; strings without regard to case.
        kind: what becomes of the key at these.
        text: what it does, why it does nothing, or the remedy.
    """

    values: tuple[object, ...]
    kind: Kind
    text: str


@dataclass(frozen=True)
class Key:
    """One row of the table.

    Attributes:
        path: names from the root, joined by dots.
        kind: what becomes of the key.
        text: what it does, why it does nothing, or the remedy.
        off: values at which it asks for nothing.
        cases: values at which something else becomes of it.
        holds: names of keys below it that share its fate; `ANY` for all.
        switch: the key below it without which, or with False as which, the block is off.
        takes_auto: whether ``"auto"`` is a value of its own.
    """

    path: str
    kind: Kind
    text: str
    off: tuple[object, ...] = ()
    cases: tuple[Case, ...] = ()
    holds: tuple[str, ...] = ()
    switch: str = ""
    takes_auto: bool = False

    def at(self, value: object) -> tuple[Kind, str]:
        """What becomes of the key at a value."""
        if any(_equal(value, one) for one in self.off):
            return Kind.OFF, "asks for nothing"
        for case in self.cases:
            if any(_equal(value, one) for one in case.values):
                return case.kind, case.text
        return self.kind, self.text


@dataclass(frozen=True)
class Finding:
    """What becomes of one key of a document.

    Attributes:
        path: names from the root, joined by dots.
        value: in the document.
        kind: what becomes of it.
        text: what it does, why it does nothing, or the remedy.
    """

    path: str
    value: Any
    kind: Kind
    text: str


class ConfigError(ValueError):
    """A configuration that cannot be used; the message lists everything that is wrong with it."""


def honoured(path: str, text: str, *cases: Case, **more: Any) -> Key:
    """A key that does here what it says."""
    return Key(path, Kind.HONOURED, text, cases=cases, **more)


def no_effect(path: str, text: str, *cases: Case, **more: Any) -> Key:
    """A key without effect here, and why."""
    return Key(path, Kind.NO_EFFECT, text, cases=cases, **more)


def refused(path: str, text: str, *cases: Case, **more: Any) -> Key:
    """A key that is refused, and what to do instead."""
    return Key(path, Kind.REFUSED, text, cases=cases, **more)


def judge(document: Mapping[str, Any], table: Mapping[str, Key]) -> list[Finding]:
    """What becomes of every key of a document, in its order.

    Args:
        document: as read from JSON.
        table: all keys by path.

    Raises:
        ConfigError: for keys that are not in the table, with the nearest name for each.
    """
    findings, unknown = list[Finding](), list[str]()
    for path, value, key in _walk(document, "", None, table):
        if key is None:
            unknown.append(_unknown(path, table))
        else:
            findings.append(Finding(path, value, *key.at(value)))
    if unknown:
        raise ConfigError("\n".join(["Unknown keys in the DeepSpeed configuration:", *unknown]))
    return findings


def _walk(
    block: Mapping[str, Any], prefix: str, owner: Key | None, table: Mapping[str, Key]
) -> Iterator[tuple[str, Any, Key | None]]:
    """Every leaf with its row; a block that is judged as a whole counts as one."""
    for name, value in block.items():
        path = f"{prefix}{name}"
        key = None if "." in name else table.get(path)
        if key is None and owner is not None and (owner.holds == ANY or name in owner.holds):
            key = Key(path, owner.kind, owner.text)
        if key is None or not isinstance(value, Mapping):
            yield path, value, key
        elif key.switch and not _is_on(value.get(key.switch)):
            yield from _unless_unknown(value, path, key, table)
        elif key.holds == ANY:
            yield path, value, key
        else:
            yield from _walk(value, f"{path}.", key, table)


def _unless_unknown(
    block: Mapping[str, Any], path: str, key: Key, table: Mapping[str, Key]
) -> Iterator[tuple[str, Any, Key | None]]:
    """A block that is switched off: one finding, and the keys in it that are in no table."""
    yield path, block, Key(path, Kind.OFF, f"asks for nothing without {key.switch!r}: true")
    for name, value in block.items():
        known = f"{path}.{name}" in table or key.holds == ANY or name in key.holds
        if not known:
            yield f"{path}.{name}", value, None


def _is_on(value: object) -> bool:
    return value not in (None, False, 0, "false", "False")


def _equal(value: object, other: object) -> bool:
    if isinstance(value, str) and isinstance(other, str):
        return value.lower() == other.lower()
    return (
        type(value) in (type(other), int, float)
        and value == other
        and isinstance(value, bool) == isinstance(other, bool)
    )


def _unknown(path: str, table: Mapping[str, Key]) -> str:
    if path in table:
        *blocks, name = path.split(".")
        return f"- {path!r}: expected {name!r} in the block {'.'.join(blocks)!r}, got a key with dots"
    near = nearest(path, table)
    return f"- {path!r}" + (f": did you mean {near!r}?" if near else ", which DeepSpeed 0.19 does not have")


def nearest(path: str, table: Mapping[str, Key]) -> str | None:
    """The key with the most similar name: among those of the same block first, then among all."""
    block, _, name = path.rpartition(".")
    siblings = {known.rpartition(".")[2]: known for known in _all_paths(table) if known.rpartition(".")[0] == block}
    anywhere: dict[str, str] = {}
    for known in _all_paths(table):
        anywhere.setdefault(known.rpartition(".")[2], known)
    for names, cutoff in ((siblings, 0.6), (anywhere, 0.75)):
        found: Sequence[str] = difflib.get_close_matches(name, names, n=1, cutoff=cutoff)
        if found:
            return names[found[0]]
    return None


def _all_paths(table: Mapping[str, Key]) -> Iterator[str]:
    for path, key in table.items():
        yield path
        yield from (f"{path}.{name}" for name in key.holds if name not in ANY)
