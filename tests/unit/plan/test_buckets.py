"""The size of buckets that `wrap` chooses."""

import pytest

from ddp_zero.plan.buckets import bucket_mb, cut

MIB = 1 << 20


@pytest.mark.parametrize(
    ("sizes", "ranks", "expected"),
    [
        ([2 * MIB] * 50, 2, 6.25),  # a sixteenth of 100 MiB
        ([2 * MIB] * 50, 8, 8.0),  # as much as 8 ranks can share
        ([MIB] * 1000, 2, 25.0),  # as DDP's own
        ([100 * MIB, MIB], 4, 25.0),
        ([MIB // 100] * 10, 2, 1.0),
        ([], 2, 25.0),
    ],
)
def test_buckets_are_small_but_every_rank_has_its_share(sizes: list[int], ranks: int, expected: float) -> None:
    assert bucket_mb(sizes, ranks) == expected


@pytest.mark.parametrize(
    ("sizes", "cap", "expected"),
    [
        ([], 4, []),
        ([1], 4, [(0, 1)]),
        ([2, 2, 2, 2, 1], 4, [(0, 2), (2, 4), (4, 5)]),
        ([3, 3, 3], 4, [(0, 2), (2, 3)]),  # overfilled by up to one item
        ([9, 1, 9], 4, [(0, 1), (1, 3)]),
        ([0, 0, 0], 4, [(0, 3)]),
    ],
)
def test_runs_are_of_about_a_size_and_items_whole(sizes: list[int], cap: int, expected: list[tuple[int, int]]) -> None:
    assert cut(sizes, cap) == expected
