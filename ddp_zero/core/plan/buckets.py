"""DDP's buckets in plain ints: their size where the library chooses it, how DDP fills them, what gradients need."""

from collections.abc import Sequence

_MIB = 1 << 20
_LARGEST_MIB, _SMALLEST_MIB, _SMALLEST_PART_MIB = 25.0, 1.0, 0.25
_LARGEST_NATIVE_MIB, _SMALLEST_NATIVE_MIB = 256.0, 25.0
_BUCKETS = 16
FIRST_CAP_BYTES, CAP_BYTES = 1 << 20, 25 << 20
"""DDP's own: of the bucket that is ready first, and of the others."""

SCRATCHES, ROOMS = 2, 1
"""Buffers of the largest bucket in stage 2: one being filled, one being reduced; one to receive into."""


def gradient_buffers(largest: int) -> int:
    """Bytes of the buffers that stage 2 needs at most for a largest bucket of so many bytes."""
    return (SCRATCHES + ROOMS) * largest


def ddp_layout(sizes: Sequence[int], kinds: Sequence[str], caps: Sequence[int]) -> list[list[int]]:
    """How DDP fills its buckets once it has seen a backward pass: from the last parameter to the first.

    A bucket is closed when it has reached its cap, so that it may be larger by up to one parameter.

    Args:
        sizes: bytes of the parameters that it reduces.
        kinds: device and dtype of each; a bucket holds one kind.
        caps: bytes of a kind's first bucket, of its second, ...; the last one holds for all that follow.

    Returns:
        Indices of the parameters of each bucket.
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


def bucket_mb(sizes: Sequence[int], world_size: int, *, cuts: bool = False, is_native: bool = False) -> float:
    """The size of DDP's buckets, in MiB, that bounds the memory of gradients without sending much more.

    A sixteenth of the parameters, so that three buckets are a fifth of them, but at least a quarter of a MiB per rank,
    since smaller messages cost more in latency than they hide. Where parameters are not cut, also at least half of
    ``world_size`` times the largest one: in a smaller bucket many ranks would own nothing. From 1 to 25 MiB.

    From 25 to 256 MiB where collectives are native: at hundreds of GB/s a collective of 25 MiB takes about as long as
    the host needs to launch it and the step of its bucket, and three buckets of 256 MiB are little beside the memory of
    an accelerator. A Llama of 7B in bf16 has 44 of them.

    Args:
        sizes: bytes of the parameters.
        world_size: number of ranks that share a bucket.
        cuts: whether parameters are cut where parts end.
        is_native: whether the backend sums and gathers equal segments in one collective, as NCCL does.
    """
    smallest, largest = (_SMALLEST_NATIVE_MIB, _LARGEST_NATIVE_MIB) if is_native else (_SMALLEST_MIB, _LARGEST_MIB)
    if not sizes:
        return largest
    wanted = max(sum(sizes) / _BUCKETS, 0 if cuts else world_size * max(sizes) / 2) / _MIB
    return min(largest, max(smallest, _SMALLEST_PART_MIB * world_size, wanted))
