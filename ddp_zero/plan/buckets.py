"""The size of DDP's buckets, where the library chooses it."""

from collections.abc import Sequence

_MIB = 1 << 20
_LARGEST_MIB, _SMALLEST_MIB = 25.0, 1.0
_BUCKETS = 16


def bucket_mb(sizes: Sequence[int], world_size: int) -> float:
    """The size of DDP's buckets, in MiB, that bounds the memory of gradients without sending much more.

    A sixteenth of the parameters, so that three buckets are a fifth of them, but half of ``world_size`` times the
    largest parameter: parameters are not cut, and in a smaller bucket many ranks would own nothing. From 1 to 25 MiB.

    Args:
        sizes: bytes of the parameters.
        world_size: number of ranks among which whole parameters are divided; 1 if they are cut.
    """
    if not sizes:
        return _LARGEST_MIB
    wanted = max(sum(sizes) / _BUCKETS, world_size * max(sizes) / 2) / _MIB
    return min(_LARGEST_MIB, max(_SMALLEST_MIB, wanted))
