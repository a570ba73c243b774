"""Flight records as they are on disk; see `ddp_zero.record.flight`."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_zero.record.flight import FIELDS, VERSION

_GLOBAL_RANK = re.compile(r"\(global rank (\d+)\)")


@dataclass(frozen=True)
class Event:
    """One event of a rank; see `ddp_zero.record.recorder.Span`. Times are seconds since the epoch.

    Attributes:
        ended: None if it had not when the record was written.
        failed: whether an error has ended it.
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
        """The rank in the job of the peer that it waits for; None if there is none, or it is every rank."""
        found = _GLOBAL_RANK.search(self.peer)
        return int(found[1]) if found else None


@dataclass(frozen=True)
class Record:
    """What one rank has left.

    Attributes:
        rank: in the job.
        members: the ranks that it works with, itself included.
        attempt: how often torchrun had restarted the job.
        host: its name.
        process: its id there.
        started, written: seconds since the epoch.
        reason: why it was written.
        error: the error, or empty.
        stacks: where threads were, by name.
        events: oldest first.
    """

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


def read_folder(folder: str | os.PathLike[str], attempt: int | None = None) -> list[Record]:
    """The records of one attempt, by rank.

    Args:
        folder: where they are.
        attempt: of torchrun; None: the last one that has left a record.

    Raises:
        ValueError: if there are none, or one cannot be read.
    """
    paths = sorted(Path(folder).glob("attempt-*-rank-*.json"))
    records = [read(path) for path in paths]
    if attempt is None:
        attempt = max((record.attempt for record in records), default=0)
    found = sorted((record for record in records if record.attempt == attempt), key=lambda record: record.rank)
    if not found:
        raise ValueError(
            f"Expected flight records of attempt {attempt} in {folder}, got none. They are written where "
            "DDP_ZERO_RECORD_DIR or ddp_zero.record_to says, when a step raises or a time-out nears."
        )
    return found


def read(path: Path) -> Record:
    """One record.

    Raises:
        ValueError: if it is none, naming the file.
    """
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        if content["version"] != VERSION or content["fields"] != list(FIELDS):
            raise ValueError(f"version {content['version']}")
        events = [Event(*row) for row in content["events"]]
        names = [name for name in Record.__dataclass_fields__ if name != "events"]
        return Record(events=events, **{name: content[name] for name in names})
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"Expected a flight record of version {VERSION} in {path}, got {type(error).__name__}: {error}."
        ) from error
