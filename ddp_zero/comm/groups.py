"""What this process remembers of a process group: where its connections are, and how often things were built on it."""

import os
import weakref
from collections import Counter
from dataclasses import dataclass, field

from torch.distributed import ProcessGroup


def check_process(process: int) -> None:
    """See that this is the process whose connections are about to be used, not one that was forked from it.

    Args:
        process: the id of the one that has them.

    Raises:
        RuntimeError: if it is not: nothing would ever arrive here.
    """
    if process != os.getpid():
        raise RuntimeError(
            f"Expected the process that has the connections to the other ranks (pid {process}), got one that was "
            f"forked from it (pid {os.getpid()}). Train, save and load in the parent."
        )


@dataclass(frozen=True)
class _Record:
    process: int = field(default_factory=os.getpid)
    built: Counter[str] = field(default_factory=Counter)


_records: "weakref.WeakKeyDictionary[ProcessGroup, _Record]" = weakref.WeakKeyDictionary()


def check_not_forked(group: ProcessGroup) -> None:
    """As `check_process`, for the process in which the group was seen first."""
    check_process(_records.setdefault(group, _Record()).process)


def count_built(group: ProcessGroup, what: str) -> int:
    """How many of these this process has built on a group, with the one that it is building."""
    built = _records.setdefault(group, _Record()).built
    built[what] += 1
    return built[what]
