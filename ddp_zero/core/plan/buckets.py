"""DDP's buckets in plain ints: their size by default, the assignment of parameters, gradient buffers of stage 2."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

FIRST_CAP_BYTES, CAP_BYTES = 1 << 20, 25 << 20
"""DDP's default caps: for the first bucket to be ready, and for every later bucket."""

EARLY_BYTES = 1 << 20
"""Two buckets that are received into so many bytes have a place of their own each, whatever the largest bucket needs.

A small bucket has been received by the time that the next one was sent; the host would wait for a larger one anyway.
"""

ALIGNMENT = 16
"""Bytes of which the sizes of buffers are multiples: any dtype can be laid over them."""


def ddp_layout(sizes: Sequence[int], kinds: Sequence[str], caps: Sequence[int]) -> list[list[int]]:
    """Reproduce DDP's buckets after its rebuild from a first backward pass, from the last parameter to the first.

    DDP closes a bucket once it reaches its cap, so a bucket may exceed the cap by up to one parameter. A bucket holds
    one kind (device and dtype). ``caps`` are bytes of a kind's first bucket, its second, and so on; the last cap
    applies to all further buckets.
    """
    closed: list[list[int]] = []
    filling: dict[str, list[int]] = {}
    count: dict[str, int] = {}
    for index in reversed(range(len(sizes))):
        bucket = filling.setdefault(kinds[index], [])
        bucket.append(index)
        number = count.setdefault(kinds[index], 0)
        if sum(sizes[one] for one in bucket) >= caps[min(number, len(caps) - 1)]:
            closed.append(filling.pop(kinds[index]))
            count[kinds[index]] = number + 1
    return closed + list(filling.values())


def scratch_turns(sizes: Sequence[int]) -> list[int]:
    """The number of the scratch that each bucket is written into; a scratch is as large as its largest bucket.

    A bucket is written while the one before it is reduced, from another scratch. Two take turns. Where a few buckets
    are much larger than all others, and no two of them follow one another, these have a third.
    """
    best = [place % 2 for place in range(len(sizes))]
    for limit in sorted(set(sizes), reverse=True)[1:]:
        is_large = [size > limit for size in sizes]
        if any(map(all, pairwise(is_large))):
            break
        turns, next_turn = list[int](), 0
        for large in is_large:
            turns.append(2 if large else next_turn)
            next_turn = next_turn if large else 1 - next_turn
        best = min(best, turns, key=lambda found: sum(scratch_bytes(sizes, found).values()))
    return best


def scratch_bytes(sizes: Sequence[int], turns: Sequence[int]) -> dict[int, int]:
    """The bytes of each scratch, by its number."""
    found = dict[int, int]()
    for size, turn in zip(sizes, turns, strict=True):
        found[turn] = max(found.get(turn, 0), aligned(size))
    return found


def aligned(nbytes: int) -> int:
    """Bytes of a buffer with room for so many."""
    return nbytes + -nbytes % ALIGNMENT


class BufferBytes(NamedTuple):
    """The buffers of stage 2 on a device.

    Attributes:
        turns: the number of the scratch that each bucket is written into.
        scratches: bytes of each, by its number.
        received: bytes of the one that all buckets are received into.
        received_at: the place of each bucket in it, in bytes.
        starts_early: whether a bucket has another place there than the bucket before, so that its reduction may start
            before that of the bucket before has ended. Where it starts after the end, its place may be the same.
    """

    turns: Sequence[int]
    scratches: Mapping[int, int]
    received: int
    received_at: Sequence[int]
    starts_early: Sequence[bool]

    @classmethod
    def of(cls, needs: Sequence[tuple[int, int]]) -> "BufferBytes":
        """For buckets in the order of the plan: bytes of the gradients of each, and to receive into."""
        sizes = [nbytes for nbytes, _ in needs]
        turns = scratch_turns(sizes)
        received = [aligned(nbytes) for _, nbytes in needs]
        pairs = [0, *map(sum, pairwise(received))][: len(needs)]  # of a bucket and the bucket before
        room = max([0, *received, *(pair for pair in pairs if pair <= EARLY_BYTES)])
        places = [0 if place % 2 else room - nbytes for place, nbytes in enumerate(received)]  # at either end in turn
        return cls(turns, scratch_bytes(sizes, turns), room, places, [pair <= room for pair in pairs])

    @property
    def total(self) -> int:
        return sum(self.scratches.values()) + self.received
