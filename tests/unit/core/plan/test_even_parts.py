"""Even parts: what one native collective moves in place, and what that makes of the buckets of a 7B model."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from ddp_zero.core.plan.buckets import CAP_BYTES, FIRST_CAP_BYTES, ddp_layout
from ddp_zero.core.plan.elements import GRAIN, CutParameters
from ddp_zero.core.plan.ownership import Piece
from ddp_zero.core.plan.partition import GroupRank
from ddp_zero.core.plan.partitions import WholeParameters
from ddp_zero.core.plan.shard_plan import Bucket, ParameterSpec, Partition, ShardPlan
from ddp_zero.values.shapes import padded_size

EVEN, CUT, WHOLE = CutParameters(is_native=True), CutParameters(), WholeParameters()


def specs_of(numels: Sequence[int]) -> list[ParameterSpec]:
    return [ParameterSpec(numel, 4 * numel, "cuda/dtype") for numel in numels]


def planned(partition: Partition, numels: Sequence[int], ranks: int, layout: Sequence[Sequence[int]]) -> ShardPlan:
    specs = specs_of(numels)
    owned = partition.assign_by_bucket(partition.assign(specs, ranks, CAP_BYTES), layout)
    return partition.plan(owned, layout, CAP_BYTES)


def test_even_parts_of_the_docstrings_figure_are_planned_so() -> None:
    plan = planned(EVEN, [200, 100, 500], 2, [[2, 1, 0]])
    first, second = plan.buckets[0].segments
    assert plan.pieces[2] == (Piece(GroupRank(0), 0, 64), Piece(GroupRank(1), 64, 500))
    assert (first.offsets, first.ranges, first.numel) == ((0, 256, 384), ((0, 200), (0, 100), (0, 64)), 448)
    assert (second.offsets, second.ranges, second.numel) == ((0,), ((64, 500),), 448)
    assert plan.buckets[0].starts == {0: 0, 1: 256, 2: 384}


@pytest.mark.parametrize("seed", range(40))
def test_parts_are_equal_and_cut_where_kernels_round_alike(seed: int) -> None:
    draw = random.Random(seed)
    ranks = draw.randint(2, 9)
    numels = [draw.choice((0, 1, 3, 64, 1000, draw.randint(1, 5000))) for _ in range(draw.randint(1, 12))]
    bucket = planned(EVEN, numels, ranks, [list(range(len(numels)))]).buckets[0]
    if not bucket.is_even:
        assert bucket == planned(CUT, numels, ranks, [list(range(len(numels)))]).buckets[0]
        return
    sizes = [segment.numel for segment in bucket.segments]
    assert len(set(sizes)) == 1
    assert 8 * sum(sizes) <= 9 * sum(numels)
    ends = [bucket.starts[param] + numel for param, numel in enumerate(numels)]
    assert all(end <= start for end, start in zip(ends, list(bucket.starts.values())[1:], strict=False))
    for segment in bucket.segments:
        for offset, (start, stop) in zip(segment.offsets, segment.ranges, strict=True):
            assert start == stop or start % GRAIN == offset % GRAIN == 0


def test_a_bucket_of_pieces_cut_for_another_bucket_has_no_gaps() -> None:
    """As where a parameter was frozen since: what ranks own stays."""
    specs = specs_of([6400, 6400, 6400])
    owned = EVEN.assign(specs, 2, CAP_BYTES)
    assert EVEN.plan(owned, None, CAP_BYTES).buckets[0].is_even
    bucket = EVEN.plan(owned.with_active({0, 2}), [[0, 2]], CAP_BYTES).buckets[0]
    assert [segment.numel for segment in bucket.segments] == [6400, 6400]


def test_a_plan_refuses_even_segments_that_overlap_or_differ() -> None:
    plan = planned(EVEN, [200, 100, 500], 2, [[0, 1, 2]])
    first, second = plan.buckets[0].segments
    for wrong, message in (
        (replace(first, offsets=(0, 128, 384)), "parameters from"),
        (replace(first, numel=512), "parameters from|segments of"),
    ):
        bucket = Bucket(0, plan.buckets[0].kind, (wrong, second))
        with pytest.raises(AssertionError, match=f"bucket 0, rank 0: ({message})"):
            replace(plan, buckets=(bucket,))


def test_even_and_uneven_layouts_have_different_digests() -> None:
    """Ranks that lay a bucket out in different ways must not exchange it."""
    numels = [640, 640]
    assert planned(EVEN, numels, 2, [[0, 1]]).digest() != planned(CUT, numels, 2, [[0, 1]]).digest()


HIDDEN, INNER, VOCABULARY = 4096, 11008, 32000
LLAMA_7B = [
    VOCABULARY * HIDDEN,
    *([*[HIDDEN * HIDDEN] * 4, *[HIDDEN * INNER] * 3, *[HIDDEN] * 2] * 32),
    HIDDEN,
    VOCABULARY * HIDDEN,
]
"""Elements of each parameter of Llama 7B; in bf16 on eight ranks below."""


@pytest.mark.parametrize(
    ("partition", "buckets", "count", "single_owner_buckets", "padded_buckets", "even_buckets"),
    [
        (WHOLE, "DDP's", 226, 194, 0, 0),
        (WHOLE, "of 256 MiB", 44, 0, 0, 0),
        (CUT, "DDP's", 226, 0, 226, 0),
        (EVEN, "DDP's", 226, 0, 226, 226),
        (EVEN, "of 256 MiB", 44, 0, 44, 44),
    ],
)
def test_a_7b_model_has_the_listed_collectives_and_padding(
    partition: Partition, buckets: str, count: int, single_owner_buckets: int, padded_buckets: int, even_buckets: int
) -> None:
    """Whole parameters make no bucket a reduce-scatter; even parts make each bucket one, in place, without padding."""
    sizes = [2 * numel for numel in LLAMA_7B]
    caps = [FIRST_CAP_BYTES, CAP_BYTES]
    if buckets == "of 256 MiB":
        caps = [256 << 20]
    layout = ddp_layout(sizes, ["cuda/bfloat16"] * len(sizes), caps)
    plan = planned(partition, LLAMA_7B, 8, layout)
    shares = [[segment.numel for segment in bucket.segments] for bucket in plan.buckets]
    assert len(shares) == count
    assert sum(sum(map(bool, share)) == 1 for share in shares) == single_owner_buckets
    assert sum(padded_size(share) is not None for share in shares) == padded_buckets
    assert sum(bucket.is_even for bucket in plan.buckets) == even_buckets
    if even_buckets:
        assert sum(map(sum, shares)) == sum(LLAMA_7B)
