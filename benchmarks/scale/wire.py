"""Collectives as bytes, rounds and messages, with their cost for the link of a rank.

    time on a link = bytes / rate + messages * cost of a message, and a latency for each round

A ring moves all ranks together, at the pace of the busiest; an all-reduce has 2 (N - 1) rounds. A direct exchange has
one round, in which a rank sends its segment N - 1 times (the sync) or receives it N - 1 times (the reduction): N - 1
messages for everyone, and many bytes for the owner of a large segment. `Transport` says which is assumed. Contention of
N - 1 flows at each link is not in the model.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import torch
from torch import Tensor

from ddp_zero.core.comm.communicator import RING_BYTES, RING_RANKS

GOODPUT = 1448 / 1514  # payload of an Ethernet frame of TCP with time stamps, over its bytes
CHUNK_BYTES = 4 << 20  # of a direct exchange, see ddp_zero/core/comm/communicator.py


@dataclass(frozen=True)
class Link:
    """The connection of a rank with all other ranks.

    Attributes:
        gbit: its rate in each direction, in Gbit/s.
        latency: seconds until a message arrives, paid once per round.
        message: seconds that each message costs a rank besides its bytes.
    """

    gbit: float
    latency: float
    message: float

    @property
    def bytes_per_second(self) -> float:
        """Of payload, in one direction."""
        return self.gbit * 1e9 / 8 * GOODPUT


class Transport(Enum):
    """Transport of collectives."""

    GLOO = "Gloo"
    """Ring all-reduce; for ddp_zero rings of large buckets of many ranks, else a direct exchange; a binomial tree per
    broadcast, one broadcast after the other; FSDP2's collectives block, and its reduce-scatter sends as much as an
    all-reduce."""
    RING = "rings"
    """Rings for everything, of unequal parts where they are unequal, and nothing blocks."""


@dataclass(frozen=True, eq=False)
class Cut:
    """A bucket as cut into one segment per rank; ``segments`` are their bytes."""

    segments: Tensor

    @classmethod
    def of(cls, segments: Sequence[int]) -> "Cut":
        """The segments of all ranks."""
        return cls(torch.tensor(segments, dtype=torch.float64))

    @classmethod
    def evenly(cls, nbytes: float, ranks: int) -> "Cut":
        """Elements are cut at any place."""
        return cls(torch.full((ranks,), nbytes / ranks, dtype=torch.float64))

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.segments)

    @cached_property
    def total(self) -> float:
        """Bytes of all segments."""
        return float(self.segments.sum())

    @cached_property
    def largest(self) -> float:
        """Bytes of the largest segment."""
        return float(self.segments.max())

    @cached_property
    def chunks(self) -> Tensor:
        """Messages that it takes to send each segment once."""
        return (self.segments / CHUNK_BYTES).ceil()


@dataclass(frozen=True)
class Together:
    """A collective in which all ranks keep pace.

    Attributes:
        busiest: bytes over the busiest link.
        sent: bytes that a rank sends, on average.
        rounds: messages that wait for each other.
    """

    busiest: float
    sent: float
    rounds: int

    def seconds(self, link: Link) -> float:
        """Duration from the arrival of the last rank."""
        return self.busiest / link.bytes_per_second + self.rounds * (link.latency + link.message)


@dataclass(frozen=True, eq=False)
class Direct:
    """Messages from every rank to every other; bytes and messages of each rank."""

    sent_bytes: Tensor
    received_bytes: Tensor
    sends: Tensor
    receives: Tensor

    @property
    def sent(self) -> float:
        """Bytes that a rank sends, on average."""
        return float(self.sent_bytes.mean())


Transfer = Together | Direct


def all_reduce(nbytes: float, ranks: int) -> Together:
    """A ring: reduce-scatter, then all-gather."""
    sent = 2 * (ranks - 1) / ranks * nbytes
    return Together(sent, sent, 2 * (ranks - 1))


def ring(cut: Cut) -> Together:
    """Half of it, of parts that may be unequal."""
    others = cut.ranks - 1
    busiest = cut.total - float(cut.segments.min()) if others else 0.0
    return Together(busiest, others / cut.ranks * cut.total, others)


def sync(cut: Cut, transport: Transport) -> Transfer:
    """Every rank gets every segment from its owner."""
    if transport is Transport.RING or (cut.ranks >= RING_RANKS and cut.total >= RING_BYTES):
        return ring(cut)
    others = cut.ranks - 1
    chunks = cut.chunks
    return Direct(others * cut.segments, cut.total - cut.segments, others * chunks, chunks.sum() - chunks)


def reduction(cut: Cut, transport: Transport) -> Transfer:
    """Every owner receives its segment from all other ranks: a sync backwards."""
    transfer = sync(cut, transport)
    if isinstance(transfer, Together):
        return transfer
    return Direct(transfer.received_bytes, transfer.sent_bytes, transfer.receives, transfer.sends)


def broadcasts(cut: Cut, transport: Transport) -> Together:
    """One per owner. On Gloo each waits for the one before, and each round of a tree sends the whole segment on.

    Measured at 2 ranks and 1 Gbit/s, 51 MB from each: right after all-reduces mostly 0.85 s, alone often 0.42.
    """
    if transport is Transport.RING:
        return ring(cut)
    rounds = math.ceil(math.log2(cut.ranks))
    owners = int(cut.segments.count_nonzero())
    return Together(rounds * cut.total, (cut.ranks - 1) / cut.ranks * cut.total, rounds * owners)
