"""How the ranks of a restarted job find each other in a store to which earlier attempts have written.

torchrun keeps one store for all attempts, and in each attempt process groups write addresses there under the same
names. So a rank may find the address of a process that is gone. Here the ranks agree on a prefix that no earlier
attempt used. ``TORCHELASTIC_RESTART_COUNT`` cannot serve as one: each node of a job counts its own restarts.

Each rank asks under a ticket of its own, new in every attempt, and rank 0 answers tickets with its prefix. It also
answers tickets of earlier attempts, for which no process waits.
"""

import time
import uuid
from datetime import timedelta

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

_POLL_SECONDS = 0.001, 0.05


def store_of_this_attempt(store: Store, rank: int, world_size: int, time_out: timedelta) -> Store:
    """A part of a store that only the ranks of this attempt use. A collective of those ranks.

    Args:
        store: a store that all ranks can reach.
        rank: from 0 to ``world_size - 1``.
        world_size: number of ranks.
        time_out: how long to wait: rank 0 for all other ranks, each of them for rank 0.

    Raises:
        RuntimeError: when the time-out has passed.
    """
    shared = PrefixStore("ddp_zero/attempt", store)
    if rank == 0:
        prefix = uuid.uuid4().hex
        _hand_out(prefix, shared, world_size, time_out)
    else:
        ticket = uuid.uuid4().hex
        shared.set(_asking(rank), ticket)
        shared.wait([_answering(ticket)], time_out)
        prefix = shared.get(_answering(ticket)).decode()
        shared.add(_counting(prefix), 1)
    return PrefixStore(prefix, shared)


def _hand_out(prefix: str, shared: Store, world_size: int, time_out: timedelta) -> None:
    """Answer every ticket until all ranks have their answer."""
    deadline = time.monotonic() + time_out.total_seconds()
    answered: dict[int, str] = {}
    pause, longest = _POLL_SECONDS
    while (came := shared.add(_counting(prefix), 0)) < world_size - 1:
        if time.monotonic() > deadline:
            raise RuntimeError(f"Expected {world_size - 1} other ranks within {time_out}, got {came}.")
        for rank in range(1, world_size):
            ticket = shared.get(_asking(rank)).decode() if shared.check([_asking(rank)]) else ""
            if ticket != answered.get(rank, ""):
                shared.set(_answering(ticket), prefix)
                answered[rank] = ticket
        time.sleep(pause)
        pause = min(2 * pause, longest)


def _asking(rank: int) -> str:
    return f"asks/{rank}"


def _answering(ticket: str) -> str:
    return f"answer/{ticket}"


def _counting(prefix: str) -> str:
    return f"came/{prefix}"
