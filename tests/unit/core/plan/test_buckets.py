"""The size of buckets that `wrap` chooses."""

import pytest

from ddp_zero.core.plan.buckets import bucket_mb

MIB = 1 << 20


@pytest.mark.parametrize(
    ("sizes", "ranks", "expected"),
    [
        ([2 * MIB] * 50, 2, 6.25),  # a sixteenth of 100 MiB
        ([2 * MIB] * 50, 8, 8.0),  # as much as 8 ranks can share
        ([MIB] * 1000, 2, 25.0),  # as DDP's own
        ([100 * MIB, MIB], 4, 25.0),
        ([MIB // 100] * 10, 2, 1.0),
        ([MIB // 100] * 10, 16, 4.0),  # a quarter of a MiB per rank
        ([], 2, 25.0),
    ],
)
def test_buckets_are_small_but_every_rank_has_its_share(sizes: list[int], ranks: int, expected: float) -> None:
    assert bucket_mb(sizes, ranks) == expected


@pytest.mark.parametrize(("total", "expected"), [(100, 25.0), (1600, 100.0), (13_000, 256.0), (0, 256.0)])
def test_buckets_are_large_where_a_message_costs_microseconds(total: int, expected: float) -> None:
    assert bucket_mb([MIB] * total, 8, cuts=True, is_native=True) == expected


@pytest.mark.parametrize(("ranks", "expected"), [(2, 6.25), (16, 6.25), (64, 16.0), (1000, 25.0)])
def test_parameters_that_are_cut_do_not_make_buckets_larger(ranks: int, expected: float) -> None:
    assert bucket_mb([2 * MIB] * 50, ranks, cuts=True) == expected
