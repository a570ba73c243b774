"""Per-group records of this process: who holds the connections, on which device, and how often things were built."""

import os
import warnings
import weakref
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta

import torch
from torch.distributed import ProcessGroup, Store, constants, distributed_c10d  # type: ignore[attr-defined]


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


def time_out_of(group: ProcessGroup) -> timedelta:
    """The time-out of a message; torch's default where a backend does not tell."""
    devices = dict(entry.split(":") for entry in str(distributed_c10d.get_backend_config(group)).split(","))
    device = torch.device("cpu" if "cpu" in devices else next(iter(devices)))
    options = getattr(group._get_backend(device), "options", None)
    limit: timedelta = constants.default_pg_timeout if options is None else options._timeout
    return limit


def take_time_out_of_the_job(group: ProcessGroup) -> None:
    """Give a group the time-out of the default group, if that is shorter and nobody has chosen the group's own.

    ``new_group`` and ``init_device_mesh`` give their groups torch's default, 30 minutes, whatever the job has.
    """
    default = distributed_c10d.GroupMember.WORLD
    if default is None or group is default:
        return
    mine, jobs = time_out_of(group), time_out_of(default)
    if mine in (constants.default_pg_timeout, constants.default_pg_nccl_timeout) and jobs < mine:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of backends that torch sets none of
            distributed_c10d._set_pg_timeout(jobs, group)


@dataclass
class _Record:
    process: int = field(default_factory=os.getpid)
    built: Counter[str] = field(default_factory=Counter)
    device: torch.device | None = None


_records: "weakref.WeakKeyDictionary[ProcessGroup, _Record]" = weakref.WeakKeyDictionary()


def check_not_forked(group: ProcessGroup) -> None:
    """As `check_process`, for the process that first used the group."""
    check_process(_records.setdefault(group, _Record()).process)


def remember_device(group: ProcessGroup, device: torch.device) -> None:
    """Remember the accelerator that the group's ranks train on: a backend such as NCCL has one per communicator."""
    _records.setdefault(group, _Record()).device = device


def device_of(group: ProcessGroup, device_type: str) -> torch.device:
    """The accelerator for a group's messages: as remembered, as the group is bound to, or else the current device."""
    record = _records.get(group)
    for known in (None if record is None else record.device, group.bound_device_id):
        if known is not None and known.type == device_type:
            return known
    return torch.device(device_type, torch.get_device_module(device_type).current_device())


def count_built(group: ProcessGroup, what: str) -> int:
    """The number of objects of a kind that this process has built on a group, including the one being built."""
    built = _records.setdefault(group, _Record()).built
    built[what] += 1
    return built[what]
