"""Parameters cut into equal parts: where, how evenly, and what moves when the cuts change."""

import random
from itertools import pairwise

import pytest

from ddp_zero.core.plan import elements
from ddp_zero.core.plan.elements import CutParameters, cut_evenly
from ddp_zero.core.plan.ownership import Move, Piece, Pieces, is_cut, moves, piece_of
from ddp_zero.core.plan.partition import GroupRank
from ddp_zero.core.plan.partitions import WholeParameters
from ddp_zero.core.plan.shard_plan import ParameterSpec, ShardPlan

CAP = 4 << 20


def spec(numel: int, kind: str = "cpu/float32", active: bool = True) -> ParameterSpec:
    return ParameterSpec(numel, 4 * numel, kind, active)


def pieces(*found: tuple[int, int, int]) -> Pieces:
    return tuple(Piece(GroupRank(owner), start, stop) for owner, start, stop in found)


def planned(specs: list[ParameterSpec], ranks: int, layout: list[list[int]] | None = None) -> ShardPlan:
    partition = CutParameters()
    owned = partition.assign(specs, ranks, CAP)
    if layout is not None:
        owned = partition.assign_by_bucket(owned, layout)
    return partition.plan(owned, layout, CAP)


def share(plan: ShardPlan, rank: int) -> int:
    found = (piece_of(of_one, GroupRank(rank)) for of_one in plan.pieces)
    return sum(piece.stop - piece.start for piece in found if piece is not None)


@pytest.mark.parametrize(
    ("numels", "ranks", "expected"),
    [
        ([640], 1, [pieces((0, 0, 640))]),
        ([640], 2, [pieces((0, 0, 320), (1, 320, 640))]),
        ([63], 2, [pieces((1, 0, 63))]),  # the nearest place to its middle is one of its ends
        ([64, 64], 2, [pieces((0, 0, 64)), pieces((1, 0, 64))]),
        ([100, 100], 2, [pieces((0, 0, 100)), pieces((1, 0, 100))]),
        (
            [1, 1279],
            5,
            [pieces((0, 0, 1)), pieces((0, 0, 256), (1, 256, 512), (2, 512, 768), (3, 768, 1024), (4, 1024, 1279))],
        ),
        ([0, 256, 0], 2, [pieces((0, 0, 0)), pieces((0, 0, 128), (1, 128, 256)), pieces((1, 0, 0))]),
        ([], 3, []),
    ],
)
def test_parameters_are_cut_at_the_listed_places(numels: list[int], ranks: int, expected: list[Pieces]) -> None:
    assert cut_evenly(numels, ranks) == expected


def test_parts_are_even_in_the_order_of_ranks_and_cut_at_multiples_of_the_grain() -> None:
    rng = random.Random(0)
    for _ in range(2_000):
        ranks = rng.randint(1, 9)
        numels = [rng.choice([0, 1, 5, 63, 64, 65, 200, 1_000, 5_000]) for _ in range(rng.randint(1, 12))]
        found = cut_evenly(numels, ranks)
        held = [0] * ranks
        for numel, of_one in zip(numels, found, strict=True):
            assert (of_one[0].start, of_one[-1].stop) == (0, numel)
            assert all(piece.start % elements.GRAIN == 0 for piece in of_one)
            assert all(one.stop == other.start and one.owner < other.owner for one, other in pairwise(of_one))
            for piece in of_one:
                held[piece.owner] += piece.stop - piece.start
        assert all(one[-1].owner <= other[0].owner for one, other in pairwise(found))
        assert all(abs(part - sum(numels) / ranks) <= elements.GRAIN for part in held)


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_a_parameter_of_nine_tenths_of_the_model_is_shared_within_two_percent(ranks: int) -> None:
    specs = [spec(90_000), *(spec(numel) for numel in [4_000, 40, 3_000, 960, 2_000])]
    total = sum(one.numel for one in specs)
    for plan in (planned(specs, ranks), planned(specs, ranks, [[5, 4, 3, 2, 1], [0]])):
        assert all(abs(share(plan, rank) * ranks / total - 1) < 0.02 for rank in range(ranks))
    whole_plan = WholeParameters().plan(WholeParameters().assign(specs, ranks, CAP), None, CAP)
    assert share(whole_plan, 0) * ranks / total > 1.7


def test_a_plan_follows_ddps_buckets_and_puts_the_rest_behind_them() -> None:
    specs = [spec(256), spec(512), spec(128, "cpu/bfloat16"), spec(300, active=False), spec(640)]
    plan = planned(specs, 2, [[4, 1], [2]])
    assert [sorted({p for s in bucket.segments for p in s.params}) for bucket in plan.buckets] == [[1, 4], [2], [0]]
    assert plan.buckets[0].segments[0].ranges == ((0, 512), (0, 64))
    assert plan.buckets[0].segments[1].ranges == ((64, 640),)
    assert plan.buckets[0].segments[1].offsets == (0,)


def test_parameters_that_are_added_leave_the_others_where_they_are() -> None:
    specs, partition = [spec(640), spec(640), spec(64)], CutParameters()
    before = partition.assign(specs[:1], 2, CAP).pieces
    after = partition.assign(specs, 2, CAP, before).pieces
    assert after[0] == before[0]
    assert is_cut(after[1])


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (pieces((0, 0, 9)), pieces((0, 0, 9)), []),
        (pieces((0, 0, 9)), pieces((2, 0, 9)), [(0, 2, 0, 9)]),
        (pieces((0, 0, 9)), pieces((0, 0, 4), (1, 4, 9)), [(0, 1, 4, 9)]),
        (pieces((0, 0, 4), (1, 4, 9)), pieces((1, 0, 6), (0, 6, 9)), [(0, 1, 0, 4), (1, 0, 6, 9)]),
        (pieces((0, 0, 3), (1, 3, 6), (2, 6, 9)), pieces((1, 0, 9)), [(0, 1, 0, 3), (2, 1, 6, 9)]),
        (pieces((0, 0, 0)), pieces((1, 0, 0)), [(0, 1, 0, 0)]),
    ],
)
def test_moves_lists_the_elements_that_change_owner(
    before: Pieces, after: Pieces, expected: list[tuple[int, int, int, int]]
) -> None:
    found = [move for move in moves(before, after) if move.source != move.target]
    assert found == [Move(GroupRank(s), GroupRank(t), start, stop) for s, t, start, stop in expected]


@pytest.mark.parametrize("wrong", [pieces((0, 0, 3)), pieces((0, 0, 2), (1, 3, 4)), pieces((0, 0, 2), (0, 2, 4)), ()])
def test_pieces_that_do_not_cover_their_parameter_are_refused(wrong: Pieces) -> None:
    with pytest.raises(AssertionError, match="pieces of parameter 0 with 4 elements"):
        ShardPlan(2, (spec(4, active=False),), (wrong,), ())
