"""Ranks, and ends of sockets, that are threads of one process."""

import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Barrier, Thread
from typing import Any

import torch
from torch import Tensor

from ddp_zero.core.plan.partition import GroupRank
from tests import HANG


class Peer:
    """A rank whose peers are threads, with the calls of a communicator that are made here."""

    def __init__(self, rank: int, values: list[Any], barrier: Barrier) -> None:
        self.group_rank, self.world_size = GroupRank(rank), len(values)
        self.values, self.barrier = values, barrier

    def peers(self) -> list[GroupRank]:
        return [GroupRank(rank) for rank in range(self.world_size) if rank != self.group_rank]

    def name(self, rank: GroupRank) -> str:
        return f"rank {rank}"

    def all_gather_ints(self, values: Sequence[int]) -> list[list[int]]:
        return self._exchange(list(values))

    def all_gather_text(self, text: str) -> list[str]:
        return self._exchange(text)

    def all_to_all(
        self,
        sent: Mapping[GroupRank, Sequence[Tensor]],
        received: Mapping[GroupRank, Sequence[Tensor]],
        device: torch.device,
        what: str,
    ) -> None:
        every = self._exchange(sent)
        for peer, rooms in received.items():
            for one, other in zip(rooms, every[peer][self.group_rank], strict=True):
                one.copy_(other)
        self.barrier.wait()

    def _exchange(self, mine: Any) -> list[Any]:
        self.values[self.group_rank] = mine
        self.barrier.wait()
        every = list(self.values)
        self.barrier.wait()
        return every


def on_threads(ranks: int, body: Callable[[Peer], Any]) -> list[Any]:
    """Each rank's result, or its error."""
    values: list[Any] = [None] * ranks
    barrier, found = Barrier(ranks, timeout=HANG), list(values)

    def run(rank: int) -> None:
        try:
            found[rank] = body(Peer(rank, values, barrier))
        except Exception as error:
            found[rank] = error

    threads = [Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG)
    return found


@contextmanager
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a connection."""
    one, other = socket.socketpair()
    with one, other:
        for end in (one, other):
            end.settimeout(HANG)
        yield one, other


def meanwhile(talk: Callable[[], Any]) -> Callable[[], Any]:
    """Start something in a thread; returns a function that waits for it and returns its result or its error."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(talk())
        except Exception as error:
            found.append(error)

    thread = Thread(target=run)
    thread.start()

    def result() -> Any:
        thread.join(HANG)
        return found[0]

    return result


def wait_until(condition: Callable[[], bool]) -> bool:
    """True once the condition holds."""
    deadline = time.monotonic() + HANG
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return condition()
