"""The plan by cost: balance, the limit on bytes, and layouts in which cut parameters are one run of memory."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_zero.core.plan.buckets import ddp_layout
from ddp_zero.core.plan.elements import GRAIN, CutParameters
from ddp_zero.core.plan.ownership import Pieces, home, is_cut
from ddp_zero.core.plan.partition import GroupRank, Item, Loads, partition_by_cost, partition_greedy
from ddp_zero.core.plan.shard_plan import Ownership, ParameterSpec, ShardPlan
from ddp_zero.core.plan.weighted import WeightedParameters, byte_limit

CAP = 25 << 20
ELEMENT = 256


def matrix(rows: int, columns: int) -> ParameterSpec:
    """A matrix stepped by five Newton-Schulz iterations."""
    small, large = sorted((rows, columns))
    numel = rows * columns
    return ParameterSpec(numel, 4 * numel, "cpu/float32", cost=5 * (2 * small**2 * large + small**3), may_be_cut=False)


def vector(numel: int) -> ParameterSpec:
    """A parameter stepped element by element."""
    return ParameterSpec(numel, 4 * numel, "cpu/float32", cost=ELEMENT * numel)


def gpt(layers: int, width: int, vocabulary: int) -> list[ParameterSpec]:
    """The parameters of a GPT in the order of the model."""
    block = [
        *(vector(width), vector(width), matrix(3 * width, width), vector(3 * width), matrix(width, width)),
        *(vector(width), vector(width), vector(width), matrix(4 * width, width), vector(4 * width)),
        *(matrix(width, 4 * width), vector(width)),
    ]
    return [vector(vocabulary * width), vector(1024 * width), *block * layers, vector(width), vector(width)]


SMALL, LARGE = gpt(8, 512, 256), gpt(12, 768, 50_304)


def nbytes_of(specs: Sequence[ParameterSpec], pieces: Sequence[Pieces], ranks: int) -> list[int]:
    loads = [0] * ranks
    for spec, held in zip(specs, pieces, strict=True):
        for piece in held:
            loads[piece.owner] += spec.nbytes * (piece.stop - piece.start) // max(spec.numel, 1)
    return loads


def layout_of(specs: Sequence[ParameterSpec], cap: int = CAP) -> list[list[int]]:
    active = [index for index, spec in enumerate(specs) if spec.active]
    sizes, kinds = [specs[index].nbytes for index in active], [specs[index].kind for index in active]
    return [[active[place] for place in bucket] for bucket in ddp_layout(sizes, kinds, [min(cap, 1 << 20), cap])]


def planned(
    part: WeightedParameters, specs: list[ParameterSpec], ranks: int, cap: int = CAP
) -> tuple[ShardPlan, ShardPlan]:
    """The plan without DDP and the plan for its buckets."""
    owned = part.assign(specs, ranks, cap)
    layout = layout_of(specs, cap)
    return part.plan(owned, None, cap), part.plan(part.assign_by_bucket(owned, layout), layout, cap)


def slowest(plan: ShardPlan) -> float:
    costs = plan.cost_loads()
    return max(costs) * plan.world_size / sum(costs)


def assert_cut_parameters_are_one_run(plan: ShardPlan) -> None:
    """In each bucket a parameter's elements lie one after the other where segments do."""
    for bucket in plan.buckets:
        begin, place = 0, dict[int, int]()
        for segment in bucket.segments:
            for param, offset, (first, _) in zip(segment.params, segment.offsets, segment.ranges, strict=True):
                assert place.setdefault(param, begin + offset - first) == begin + offset - first, (bucket.index, param)
            begin += segment.numel


# One deal


def test_the_least_loaded_rank_by_cost_takes_the_costliest_item() -> None:
    loads = Loads(2)
    owners = partition_by_cost([Item(1, 1), Item(5, 1), Item(3, 1), Item(3, 1)], loads, 100)
    assert (owners, loads.costs) == ([0, 0, 1, 1], [6, 6])


def test_partition_by_cost_passes_over_ranks_at_the_limit_on_bytes() -> None:
    loads = Loads(3)
    loads.add(1, Item(4, 0))
    loads.add(2, Item(9, 0))
    loads.add(0, Item(0, 90))
    assert partition_by_cost([Item(7, 20)], loads, 100) == [1]
    assert (loads.costs, loads.nbytes) == ([0, 11, 9], [90, 20, 0])


def test_items_without_cost_are_dealt_by_bytes() -> None:
    sizes = [5, 9, 1, 1, 7, 2]
    assert partition_by_cost([Item(0, size) for size in sizes], Loads(3), 0) == partition_greedy(sizes, 3)
    loads = Loads(2)
    partition_by_cost([Item(10, 4), Item(0, 4), Item(0, 4), Item(0, 4)], loads, 100)
    assert loads.nbytes == [8, 8]


items = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 1000)).map(lambda one: Item(*one)), max_size=30)


@given(items, st.integers(1, 9), st.integers(0, 2000))
def test_loads_are_the_sums_of_the_items_of_each_rank(given_items: list[Item], ranks: int, limit: int) -> None:
    loads = Loads(ranks)
    owners = partition_by_cost(given_items, loads, limit)
    for rank in range(ranks):
        mine = [one for one, owner in zip(given_items, owners, strict=True) if owner == rank]
        assert loads.costs[rank] == sum(one.cost for one in mine)
        assert loads.nbytes[rank] == sum(one.nbytes for one in mine)


# Models


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(("specs", "largest"), [(SMALL, 1.01), (LARGE, 1.05)])
def test_the_slowest_rank_has_its_share_of_the_cost(specs: list[ParameterSpec], largest: float, ranks: int) -> None:
    for plan in planned(WeightedParameters(1.25, cuts=True), specs, ranks):
        assert slowest(plan) <= largest
        nbytes = nbytes_of(specs, plan.pieces, ranks)
        assert max(nbytes) * ranks <= 1.1 * sum(nbytes)
        assert_cut_parameters_are_one_run(plan)


@pytest.mark.parametrize("bound", [1.0, 1.1, 1.5, 3.0])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_bytes_stay_within_the_bound_or_those_of_the_plan_by_bytes(bound: float, ranks: int) -> None:
    without_cost = [ParameterSpec(spec.numel, spec.nbytes, spec.kind, may_be_cut=False) for spec in LARGE]
    by_bytes = planned(WeightedParameters(bound), without_cost, ranks)
    slowest_before = math.inf
    for plan, reference in zip(planned(WeightedParameters(bound), LARGE, ranks), by_bytes, strict=True):
        limit = byte_limit(nbytes_of(LARGE, reference.pieces, ranks), bound)
        assert max(nbytes_of(LARGE, plan.pieces, ranks)) <= limit
        slowest_before = min(slowest_before, slowest(plan))
    if bound == 3.0:
        assert slowest_before < 1.1


def test_an_added_parameter_changes_no_owner_and_goes_to_the_rank_with_the_least_load() -> None:
    part = WeightedParameters(1.25)
    before = part.assign([matrix(64, 64)] * 3, 4, CAP).pieces
    after = part.assign([matrix(64, 64)] * 4, 4, CAP, before).pieces
    assert after[:3] == before
    assert {home(pieces) for pieces in after} == {0, 1, 2, 3}


def test_a_bucket_of_parameters_that_may_be_cut_is_cut_as_without_weights() -> None:
    specs = [vector(n) for n in (300, 50, 1000, 700)]
    layout = [[2, 3], [0, 1]]
    for native in (False, True):
        part, cutter = WeightedParameters(1.25, cuts=True, is_native=native), CutParameters(is_native=native)
        start = cutter.assign(specs, 3, CAP)
        owned = part.assign_by_bucket(start, layout)
        assert owned == cutter.assign_by_bucket(start, layout)
        assert part.plan(owned, layout, CAP).buckets == cutter.plan(owned, layout, CAP).buckets


def test_a_bucket_with_a_large_embedding_is_cut_into_level_ordered_segments() -> None:
    specs = [vector(400 * GRAIN), *[matrix(2 * GRAIN, GRAIN)] * 4, vector(GRAIN)]
    part = WeightedParameters(1.25, cuts=True)
    layout = [list(range(6))]
    plan = part.plan(part.assign_by_bucket(part.assign(specs, 4, CAP), layout), layout, CAP)
    assert_cut_parameters_are_one_run(plan)
    assert is_cut(plan.pieces[0])
    assert not any(map(is_cut, plan.pieces[1:]))
    sizes = [segment.numel for segment in plan.buckets[0].segments]
    assert max(sizes) - min(sizes) <= 2 * GRAIN * GRAIN  # a matrix
    cut_in = [segment.params for segment in plan.buckets[0].segments if 0 in segment.params]
    assert cut_in[0][-1] == cut_in[-1][0] == 0
    assert any(len(params) > 1 for params in cut_in)


kinds = st.sampled_from(["cpu/float32", "cpu/bfloat16"])
spec = st.builds(
    lambda numel, kind, active, cost, cut: ParameterSpec(numel, 4 * numel, kind, active, cost, cut),
    st.integers(0, 5000),
    kinds,
    st.booleans(),
    st.integers(0, 10**6),
    st.booleans(),
)


@given(st.lists(spec, min_size=1, max_size=14), st.integers(1, 9), st.booleans(), st.booleans(), st.data())
def test_plans_of_any_parameters_are_valid_and_cut_only_where_allowed(
    specs: list[ParameterSpec], ranks: int, cuts: bool, native: bool, data: st.DataObject
) -> None:
    part = WeightedParameters(1.25, cuts=cuts, is_native=native)
    alone, for_ddp = planned(part, specs, ranks, data.draw(st.integers(1000, 60_000)))
    assert_cut_parameters_are_one_run(for_ddp)
    for plan in (alone, for_ddp):
        assert not any(
            is_cut(held) for one, held in zip(specs, plan.pieces, strict=True) if not (cuts and one.may_be_cut)
        )
    woken = [ParameterSpec(one.numel, one.nbytes, one.kind, True, one.cost, one.may_be_cut) for one in specs]
    part.plan(Ownership(ranks, tuple(woken), alone.pieces), None, 10_000)


def test_a_stated_owner_is_kept_at_all_sizes_and_buckets() -> None:
    """As the ranks of a tensor-parallel group state it, whose parts of a matrix differ in size."""
    for scale in (1, 5):
        specs = [replace(matrix(8 * scale, 8), owner=GroupRank(place % 3)) for place in range(7)]
        specs[4] = replace(specs[4], active=False)
        specs += [vector(100 * scale) for _ in range(6)]
        for split in (True, False):
            part = WeightedParameters(1.25)
            owned = part.assign(specs, 3, CAP)
            followed = part.assign_by_bucket(owned, layout_of(specs, 256), split)
            for plan in (owned, followed):
                assert plan.owners[:7] == (0, 1, 2, 0, 1, 2, 0)
            assert len(set(followed.owners[7:])) == 3, "others are dealt around them"
        extended = part.assign([*specs, replace(matrix(8, 8), owner=GroupRank(2))], 3, CAP, owned.pieces)
        assert extended.owners == (*owned.owners, 2)
