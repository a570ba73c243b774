"""Flight records on disk; see `ddp_zero.insight.flight`."""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from ddp_zero.error_codes import coded
from ddp_zero.insight.record_format import FIELDS, VERSION
from ddp_zero.tools.files import open_regular

_GLOBAL_RANK = re.compile(r"\(global rank (\d+)\)")
_Row = TypeVar("_Row", "Event", "Collective")


@dataclass(frozen=True)
class Event:
    """One event of a rank, in the order of `FIELDS`; see `ddp_zero.core.comm.recorder.Span`.

    Times are seconds since the epoch. Here and below the annotations are what a file is checked by.
    """

    number: int
    optimizer: int
    step: int
    phase: str
    bucket: int
    begun: float
    ended: float | None
    sent: int = 0
    received: int = 0
    message: str = ""
    peer: str = ""
    failed: bool = False

    @property
    def peer_rank(self) -> int | None:
        """The global rank of the peer that it waits for; None if there is none, or if it waits for every rank."""
        found = _GLOBAL_RANK.search(self.peer)
        return int(found[1]) if found else None


@dataclass(frozen=True)
class Collective:
    """One collective recorded by torch, of DDP, of the script or of this library; in the order of a row of a file.

    All ranks number the collectives of a process group alike. A failed collective does not count as unfinished.
    """

    group: str
    number: int
    operation: str
    sizes: str
    begun: float
    goes_on: bool

    def __str__(self) -> str:
        return f"{self.operation} {self.sizes}, collective {self.number} of process group {self.group!r}"


@dataclass(frozen=True)
class Record:
    """One rank's record, oldest events first; ``collectives`` is None if torch has recorded none."""

    rank: int
    members: Sequence[int]
    attempt: int
    host: str
    process: int
    started: float
    written: float
    reason: str
    error: str
    stacks: Mapping[str, Sequence[str]]
    events: Sequence[Event]
    collectives: Sequence[Collective] | None = None


def read_folder(folder: str | os.PathLike[str], attempt: int | None = None) -> list[Record]:
    """The records of a torchrun attempt, by default the last, by rank; ValueError if there are none or one is bad."""
    paths = sorted(Path(folder).glob("attempt-*-rank-*.json"))
    records = [read(path) for path in paths]
    if attempt is None:
        attempt = max((record.attempt for record in records), default=0)
    found = sorted((record for record in records if record.attempt == attempt), key=lambda record: record.rank)
    if not found:
        raise ValueError(
            f"No flight records of attempt {attempt} in {folder}. They are written where DDP_ZERO_RECORD_DIR or "
            "ddp_zero.record_to says, when a step raises or a time-out nears. [ZERO-907]"
        )
    return found


def read(path: Path) -> Record:
    """One record; ValueError naming the file if it is not a record."""
    try:
        content: dict[str, Any] = json.loads(_text(path))
        if content["version"] != VERSION or content["fields"] != list(FIELDS):
            raise ValueError(f"version {content['version']!r:.20} [ZERO-907]")
        events = _of_rows(Event, content["events"])
        collectives = content["collectives"]
        if collectives is not None:
            collectives = _of_rows(Collective, collectives)
        hints = {name: hint for name, hint in get_type_hints(Record).items() if name not in ("events", "collectives")}
        rest = {name: _check(hint, name, content[name]) for name, hint in hints.items()}
        return Record(**rest, events=events, collectives=collectives)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        told = "blocks nested too deeply" if isinstance(error, RecursionError) else f"{type(error).__name__}: {error}"
        message = f"Expected a flight record of version {VERSION} in {path}, got {told:.300}."
        raise ValueError(coded(message, "[ZERO-907]")) from error


def _text(path: Path) -> str:
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > _MOST_BYTES:
            raise ValueError(f"a file of {size:,} bytes, more than any record has")
        return file.read().decode()


_MOST_BYTES = 64 * 2**20
_MOST_CHARACTERS = 10_000
_LATEST = 2.0**36
"""Largest time that can be shown, in seconds since the epoch: the year 4147."""


def _of_rows(kind: Callable[..., _Row], rows: Sequence[Sequence[Any]]) -> list[_Row]:
    hints = get_type_hints(kind).items()
    return [kind(*(_check(hint, name, one) for (name, hint), one in zip(hints, row, strict=True))) for row in rows]


def _check(hint: Any, name: str, value: Any) -> Any:
    """A value of the annotated kind, with texts free of terminal control characters; TypeError for another kind."""
    if hint == Sequence[int] and isinstance(value, list):
        return [_check(int, name, one) for one in value]
    if hint == Mapping[str, Sequence[str]] and isinstance(value, dict):
        return {_printable(key): [_check(str, name, line) for line in value[key]] for key in value}
    if hint is str and isinstance(value, str):
        return _printable(value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_time = is_number and 0 <= value < _LATEST
    fits = {
        int: isinstance(value, int) and is_number and abs(value) < 2**63,
        float: is_time,
        float | None: value is None or is_time,
        bool: isinstance(value, bool),
    }
    if not fits.get(hint, False):
        raise TypeError(f"{name} = {value!r:.40}")
    return value


def _printable(text: str) -> str:
    shown = text[:_MOST_CHARACTERS]
    return "".join(one if one.isprintable() or one in "\n\t" else repr(one)[1:-1] for one in shown)
