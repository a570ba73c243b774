"""DDP's buckets in plain ints: bucket size by default, DDP's assignment of parameters, gradient buffers of stage 2."""

from collections.abc import Sequence

_MIB = 1 << 20
_LARGEST_MIB, _SMALLEST_MIB, _SMALLEST_PART_MIB = 25.0, 1.0, 0.25
_LARGEST_NATIVE_MIB, _SMALLEST_NATIVE_MIB = 256.0, 25.0
_BUCKETS = 16
FIRST_CAP_BYTES, CAP_BYTES = 1 << 20, 25 << 20
"""DDP's default caps: for the first bucket to be ready, and for every later bucket."""

SCRATCHES, RECV_BUFFERS = 2, 1
"""Stage 2 buffers as large as the largest bucket: one being filled, one being reduced; one to receive into."""


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


def bucket_mb(
    sizes: Sequence[int],
    world_size: int,
    *,
    cuts: bool = False,
    is_native: bool = False,
    largest_whole: int | None = None,
) -> float:
    """Default bucket size in MiB: bounds the memory of gradients without adding much latency.

    A sixteenth of the parameters, so that three buckets take a fifth of their memory, but at least a quarter of a MiB
    per rank: smaller messages cost more latency than they hide. With whole parameters also at least half of
    ``world_size`` times the largest parameter; in a smaller bucket many ranks would own nothing. Clamped to 1 to 25
    MiB. ``largest_whole`` is the size of the largest parameter that stays whole, if ``cuts`` holds for some only.

    With native collectives clamped to 25 to 256 MiB: at hundreds of GB/s a collective of 25 MiB takes about as long as
    the host needs to launch it and the bucket's step, and three buckets of 256 MiB are small beside an accelerator's
    memory. A 7B Llama in bf16 has 44 such buckets.
    """
    if largest_whole is None:
        largest_whole = 0 if cuts else max(sizes, default=0)
    smallest, largest = (_SMALLEST_NATIVE_MIB, _LARGEST_NATIVE_MIB) if is_native else (_SMALLEST_MIB, _LARGEST_MIB)
    if not sizes:
        return largest
    wanted = max(sum(sizes) / _BUCKETS, world_size * largest_whole / 2) / _MIB
    return min(largest, max(smallest, _SMALLEST_PART_MIB * world_size, wanted))
