"""Per-group records of this process: which process holds the connections, and how often things were built on it."""

import os
import weakref
from collections import Counter
from dataclasses import dataclass, field

from torch.distributed import ProcessGroup, Store, distributed_c10d  # type: ignore[attr-defined]


def check_process(process: int) -> None:
    """Check that this is the process whose connections are about to be used, not one that was forked from it.

    Args:
        process: the id of the process that has the connections.

    Raises:
        RuntimeError: in any other process, where no message would ever arrive.
    """
    if process != os.getpid():
        raise RuntimeError(
            f"Expected the process that has the connections to the other ranks (pid {process}), got one that was "
            f"forked from it (pid {os.getpid()}). Train, save and load in the parent."
        )


def store_of(group: ProcessGroup) -> Store:
    """The key-value store of a group.

    Raises:
        RuntimeError: if its backend has none.
    """
    if hasattr(group, "get_group_store"):
        store: Store = group.get_group_store()
    else:  # torch 2.8
        try:
            store = distributed_c10d._get_process_group_store(group)
        except KeyError as error:
            raise RuntimeError("Expected a process group that torch.distributed has built, got another one.") from error
    return store


@dataclass(frozen=True)
class _Record:
    process: int = field(default_factory=os.getpid)
    built: Counter[str] = field(default_factory=Counter)


_records: "weakref.WeakKeyDictionary[ProcessGroup, _Record]" = weakref.WeakKeyDictionary()


def check_not_forked(group: ProcessGroup) -> None:
    """As `check_process`, for the process that first used the group."""
    check_process(_records.setdefault(group, _Record()).process)


def count_built(group: ProcessGroup, what: str) -> int:
    """The number of objects of a kind that this process has built on a group, including the one being built."""
    built = _records.setdefault(group, _Record()).built
    built[what] += 1
    return built[what]
