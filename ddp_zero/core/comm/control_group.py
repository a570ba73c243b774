"""A second Gloo group over the same ranks, for control messages outside the training stream."""

import os
import time
import uuid
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroup, Store  # type: ignore[attr-defined]

from ddp_zero.core.comm.communicator import Communicator
from ddp_zero.core.comm.exchange import all_gather_by_messages
from ddp_zero.core.comm.groups import (
    NoPeers,
    Peers,
    TensorPeers,
    all_gather_text_across,
    check_process,
    next_number,
    store_of,
)
from ddp_zero.core.plan.partition import GroupRank
from ddp_zero.error_codes import coded

_GLOO_TRIES = 5


class ControlGroup(TensorPeers):
    """The ranks of a process group on separate Gloo connections, for messages outside the training stream.

    Construction is a collective of the group that sends no message on the group itself.
    """

    def __init__(self, group: ProcessGroup) -> None:
        comm = Communicator(group)  # not kept: this object must not keep the group alive
        self.group_rank, self.world_size = comm.group_rank, comm.world_size
        self._names = [comm.name(GroupRank(rank)) for rank in range(self.world_size)]
        self._process = os.getpid()
        self._time_out = comm.time_out
        self._num_gathers = 0
        # not `new_group`: it requires all ranks of the job, or names a group by the number of a rank's groups, which
        # differs by rank
        shared = dist.PrefixStore(f"ddp_zero/{next_number(group, 'beside')}", store_of(group))  # type: ignore[attr-defined]
        try:
            store = store_of_this_attempt(shared, self.group_rank, self.world_size, comm.time_out)
            # only now that every rank is here: Gloo's shorter time-out for connecting would run against a late rank.
            # Gloo tries this often to reach a rank that died after publishing its address, with a time-out for each
            # try; messages would inherit that time-out, so each wait is given the group's
            self._gloo: Any = dist.ProcessGroupGloo(
                store, self.group_rank, self.world_size, self._time_out / _GLOO_TRIES
            )
        except RuntimeError as error:
            missing = error.ranks if isinstance(error, MissingRanksError) else ()
            who = ", ".join(self._names[rank] for rank in missing) or "all ranks"
            message = f"Expected {who} to reach their first save or load within {comm.time_out}, got: {error}"
            raise RuntimeError(coded(message, "[ZERO-509]")) from error

    def name(self, group_rank: GroupRank) -> str:
        return self._names[group_rank]

    def all_gather_tensor(self, mine: Tensor) -> list[Tensor]:
        check_process(self._process)
        # part of the tags: gathers of a group match by number
        self._num_gathers += 1
        return all_gather_by_messages(self._gloo, mine, self._num_gathers, self.name, "a save or load", self._time_out)


class GridPeers:
    """All ranks of a grid on separate connections, one `ControlGroup` per dimension.

    Values are gathered along one dimension after the other, so no process group of all ranks is needed. Ranks are
    ordered by their global ranks. Construction is a collective of the whole grid.
    """

    def __init__(self, groups: Sequence[ProcessGroup]) -> None:
        self._dimensions = [ControlGroup(group) for group in groups]
        own = dist.get_rank()
        numbers = [number for (number,) in self._gather([own])]
        self._order = sorted(range(len(numbers)), key=lambda place: numbers[place])
        self._ranks = [numbers[place] for place in self._order]
        if len(set(numbers)) != len(numbers) or own not in numbers:
            raise ValueError(f"Expected process groups whose ranks make up a grid, got ranks {numbers}. [ZERO-801]")
        self.group_rank = GroupRank(self._ranks.index(own))
        self.world_size = len(numbers)

    def name(self, group_rank: GroupRank) -> str:
        return f"rank {group_rank} (global rank {self._ranks[group_rank]})"

    def all_gather_ints(self, values: Sequence[int]) -> list[list[int]]:
        return self._sort(self._gather(values))

    def all_gather_text(self, text: str) -> list[str]:
        return self._sort(all_gather_text_across(self._dimensions, text))

    def _gather(self, values: Sequence[int]) -> list[list[int]]:
        rows = [list(values)]
        for group in reversed(self._dimensions):
            flat = group.all_gather_ints([value for row in rows for value in row])
            rows = [part[start : start + len(values)] for part in flat for start in range(0, len(part), len(values))]
        return rows

    def _sort(self, gathered: list[Any]) -> list[Any]:
        return [gathered[place] for place in self._order]


def connect(groups: Sequence[ProcessGroup]) -> Peers:
    """The ranks of these groups, which make up a grid, on connections of their own. A collective of all of them."""
    larger = [group for group in groups if Communicator(group).world_size > 1]
    if not larger:
        return NoPeers()
    return ControlGroup(larger[0]) if len(larger) == 1 else GridPeers(larger)


_POLL_SECONDS = 0.001, 0.05


def store_of_this_attempt(store: Store, rank: int, world_size: int, time_out: timedelta) -> Store:
    """A part of a store that only the ranks of this attempt use. A collective of those ranks.

    torchrun keeps one store for all attempts, and each attempt's process groups write addresses there under the same
    names, so a rank may find the address of a dead process. Here the ranks agree on a prefix that no earlier attempt
    used. ``TORCHELASTIC_RESTART_COUNT`` cannot serve: each node of a job counts its own restarts.

    Each rank publishes a new ticket, and rank 0 answers each ticket with the prefix. Then every rank waits until all
    ranks have arrived. ``time_out`` bounds each wait; MissingRanksError when it has passed.
    """
    shared = PrefixStore("ddp_zero/attempt", store)
    if rank == 0:
        prefix = uuid.uuid4().hex
        part = PrefixStore(prefix, shared)
        part.set(_arrival_key(rank), "here")
        _answer_tickets(prefix, shared, part, world_size, time_out)
    else:
        ticket = uuid.uuid4().hex
        shared.set(_ticket_key(rank), ticket)
        try:
            shared.wait([_answer_key(ticket)], time_out)
        except RuntimeError as error:
            raise _missing_error([0], world_size, time_out) from error
        part = PrefixStore(shared.get(_answer_key(ticket)).decode(), shared)
        part.set(_arrival_key(rank), "here")
        try:
            part.wait([_arrival_key(other) for other in range(world_size)], time_out)
        except RuntimeError as error:
            raise _missing_error(_absent_ranks(part, range(world_size)), world_size, time_out) from error
    return part


class MissingRanksError(RuntimeError):
    """Some ranks have not arrived in time; ``ranks`` are the missing ones, as far as they are known."""

    ranks: Sequence[int] = ()


def _missing_error(ranks: Sequence[int], world_size: int, time_out: timedelta) -> MissingRanksError:
    shown = ", ".join(map(str, ranks))
    error = MissingRanksError(f"Expected {world_size} ranks within {time_out}, got all but rank {shown}. [ZERO-509]")
    error.ranks = ranks
    return error


def _absent_ranks(part: Store, ranks: Iterable[int]) -> list[int]:
    return [rank for rank in ranks if not part.check([_arrival_key(rank)])]


def _answer_tickets(prefix: str, shared: Store, part: Store, world_size: int, time_out: timedelta) -> None:
    """Answer every ticket with the prefix until all ranks have arrived."""
    deadline = time.monotonic() + time_out.total_seconds()
    answered: dict[int, str] = {}
    pause, longest = _POLL_SECONDS
    missing = list(range(1, world_size))
    while missing := _absent_ranks(part, missing):
        if time.monotonic() > deadline:
            raise _missing_error(missing, world_size, time_out)
        # tickets of earlier attempts are answered too, harmlessly: no process waits for them. A rank of this attempt
        # replaces its ticket and is answered in a later pass
        for rank in missing:
            ticket = shared.get(_ticket_key(rank)).decode() if shared.check([_ticket_key(rank)]) else ""
            if ticket != answered.get(rank, ""):
                shared.set(_answer_key(ticket), prefix)
                answered[rank] = ticket
        time.sleep(pause)
        pause = min(2 * pause, longest)


def _ticket_key(rank: int) -> str:
    return f"asks/{rank}"


def _answer_key(ticket: str) -> str:
    return f"answer/{ticket}"


def _arrival_key(rank: int) -> str:
    return f"came/{rank}"
