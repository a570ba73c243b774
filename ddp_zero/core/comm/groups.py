"""Process groups: their stores, backends, time-outs and per-group records; and `Peers` that gather small values."""

import json
import os
import warnings
import weakref
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import (  # type: ignore[attr-defined]
    ProcessGroup,
    Store,
    constants,
    distributed_c10d,
)

from ddp_zero.core.plan.partition import GroupRank


def check_process(process: int) -> None:
    """Raise RuntimeError in a process forked from the process, with this id, that has the connections."""
    if process != os.getpid():
        raise RuntimeError(
            f"This process (pid {os.getpid()}) was forked from the process that has the connections to the other ranks "
            f"(pid {process}). Train, save and load in the parent. [ZERO-504]"
        )


def store_of(group: ProcessGroup) -> Store:
    """The key-value store through which the ranks of a group met."""
    if hasattr(group, "get_group_store"):
        store: Store = group.get_group_store()
    else:  # torch 2.8
        try:
            store = distributed_c10d._get_process_group_store(group)
        except KeyError as error:
            raise RuntimeError(
                "torch.distributed does not know this process group. Build it with torch.distributed.new_group or "
                "init_device_mesh. [ZERO-502]"
            ) from error
    return store


def job_store_of(group: ProcessGroup) -> Store:
    """The store that a group shares with all others of its job. RuntimeError for a backend without a store."""
    store = store_of(group)
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def backends_of(group: ProcessGroup) -> dict[str, str]:
    """The backend of each type of device."""
    return dict(entry.split(":") for entry in str(distributed_c10d.get_backend_config(group)).split(","))


def time_out_of(group: ProcessGroup) -> timedelta:
    """The time-out of a message; torch's default where a backend does not tell."""
    devices = backends_of(group)
    device = torch.device("cpu" if "cpu" in devices else next(iter(devices)))
    options = getattr(group._get_backend(device), "options", None)
    limit: timedelta = constants.default_pg_timeout if options is None else options._timeout
    return limit


def inherit_job_time_out(group: ProcessGroup) -> None:
    """Give a group the default group's time-out if that is shorter and the group still has torch's default time-out.

    ``new_group`` and ``init_device_mesh`` give their groups torch's default, 30 minutes, whatever the job has.
    """
    default = distributed_c10d.GroupMember.WORLD
    if default is None or group is default:
        return
    mine, jobs = time_out_of(group), time_out_of(default)
    if mine in (constants.default_pg_timeout, constants.default_pg_nccl_timeout) and jobs < mine:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of backends whose time-out it cannot set
            distributed_c10d._set_pg_timeout(jobs, group)
        if "gloo" in str(distributed_c10d.get_backend_config(group)):
            _records.setdefault(group, _GroupRecord()).message_time_out = jobs


def message_time_out(group: ProcessGroup) -> timedelta | None:
    """The time-out to give to each wait for a message between two ranks, or None for the group's own.

    Gloo's messages keep the time-out with which their group was built; only its collectives follow a later time-out.
    """
    record = _records.get(group)
    return None if record is None else record.message_time_out


@dataclass
class _GroupRecord:
    process: int = field(default_factory=os.getpid)
    numbers: Counter[str] = field(default_factory=Counter)
    device: torch.device | None = None
    message_time_out: timedelta | None = None


_records: "weakref.WeakKeyDictionary[ProcessGroup, _GroupRecord]" = weakref.WeakKeyDictionary()


def check_not_forked(group: ProcessGroup) -> None:
    """Raise RuntimeError if this process was forked from the process that first used the group."""
    check_process(_records.setdefault(group, _GroupRecord()).process)


def remember_device(group: ProcessGroup, device: torch.device) -> None:
    """Remember the accelerator that the group's ranks train on: a backend such as NCCL has one per communicator."""
    _records.setdefault(group, _GroupRecord()).device = device


def device_of(group: ProcessGroup, device_type: str) -> torch.device:
    """The accelerator for a group's messages: as remembered, else the group's bound device, else the current device."""
    record = _records.get(group)
    for known in (None if record is None else record.device, group.bound_device_id):
        if known is not None and known.type == device_type:
            return known
    return torch.device(device_type, torch.get_device_module(device_type).current_device())


def next_number(group: ProcessGroup, what: str) -> int:
    """Number the next object or exchange of a kind on a group: 1, 2, ...; ranks that call in one order get the same."""
    numbers = _records.setdefault(group, _GroupRecord()).numbers
    numbers[what] += 1
    return numbers[what]


class Peers(Protocol):
    """The ranks of a group, as far as `Agreement` needs them."""

    group_rank: GroupRank
    world_size: int

    def name(self, group_rank: GroupRank) -> str:
        """A rank's name in messages."""

    def all_gather_ints(self, values: Sequence[int]) -> list[list[int]]:
        """Every rank's values, in rank order."""

    def all_gather_text(self, text: str) -> list[str]:
        """Every rank's text, in rank order."""


class TensorPeers(ABC):
    """`Peers` that all-gather tensors of one size, and through them integers and text."""

    @abstractmethod
    def all_gather_tensor(self, mine: Tensor) -> list[Tensor]:
        """Every rank's tensor, of the same shape and dtype, in rank order, on the device of ``mine``."""

    def all_gather_ints(self, values: Sequence[int]) -> list[list[int]]:
        """Every rank's values (signed 64-bit, equally many on every rank), in rank order."""
        mine = torch.tensor(list(values), dtype=torch.int64, device=self._control_device())
        return [part.tolist() for part in self.all_gather_tensor(mine)]

    def all_gather_text(self, text: str) -> list[str]:
        """Every rank's text, in rank order; compressed on the wire."""
        mine = zlib.compress(text.encode())
        lengths = [length for (length,) in self.all_gather_ints([len(mine)])]
        buffer = torch.zeros(max(lengths), dtype=torch.uint8)
        buffer[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        gathered = self.all_gather_tensor(buffer.to(self._control_device()))
        whole = [bytes(part[:length].tolist()) for part, length in zip(gathered, lengths, strict=True)]
        return [zlib.decompress(raw).decode() for raw in whole]

    def _control_device(self) -> torch.device:
        return torch.device("cpu")


class NoPeers:
    """The `Peers` of a process that has none, whether or not `torch.distributed` is initialised."""

    group_rank = GroupRank(0)
    world_size = 1

    def name(self, group_rank: GroupRank) -> str:
        return "this process"

    def all_gather_ints(self, values: Sequence[int]) -> list[list[int]]:
        return [list(values)]

    def all_gather_text(self, text: str) -> list[str]:
        return [text]


def all_gather_text_across(dimensions: Sequence[Peers], text: str) -> list[str]:
    """The text of every rank of a grid, gathered along each dimension in turn; the last dimension varies fastest."""
    texts = [text]
    for peers in reversed(dimensions):
        texts = [gathered for part in peers.all_gather_text(json.dumps(texts)) for gathered in json.loads(part)]
    return texts
