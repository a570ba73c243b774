from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_zero.core.plan import shard_plan as plan_module
from ddp_zero.core.plan.ownership import whole
from ddp_zero.core.plan.partition import GroupRank, partition_greedy
from ddp_zero.core.plan.partitions import WholeParameters
from ddp_zero.core.plan.shard_plan import (
    Bucket,
    ParameterSpec,
    Segment,
    ShardPlan,
    owners_by_bucket,
    plan_standalone,
    whole_parameters,
)

BYTES_PER_ELEMENT = {"cpu/float32": 4, "cpu/bfloat16": 2, "cuda/float32": 4}


def spec(numel: int, kind: str = "cpu/float32", active: bool = True) -> ParameterSpec:
    return ParameterSpec(numel, numel * BYTES_PER_ELEMENT[kind], kind, active)


def ranks(*owners: int) -> tuple[GroupRank, ...]:
    return tuple(GroupRank(owner) for owner in owners)


def plan_for_ddp(
    specs: Sequence[ParameterSpec],
    owners: Sequence[GroupRank],
    world_size: int,
    layout: Sequence[Sequence[int]],
    bucket_cap_bytes: int,
) -> ShardPlan:
    return WholeParameters().plan(whole_parameters(specs, owners, world_size), layout, bucket_cap_bytes)


@dataclass(frozen=True)
class Case:
    """What `plan_standalone` is given."""

    specs: list[ParameterSpec]
    owners: list[GroupRank]
    world_size: int
    cap: int

    def plan(self) -> ShardPlan:
        return plan_standalone(self.specs, self.owners, self.world_size, self.cap)

    def members(self, kind: str) -> list[list[int]]:
        """For each rank, its active parameters of a kind."""
        return [
            [p for p, s in enumerate(self.specs) if s.active and s.kind == kind and self.owners[p] == rank]
            for rank in range(self.world_size)
        ]

    def wanted_buckets(self, kind: str) -> int:
        """As many as the cap asks for, but no more than the longest list of parameters fills."""
        total = sum(self.specs[param].nbytes for params in self.members(kind) for param in params)
        return min(max(1, (total + self.cap - 1) // self.cap), max(len(params) for params in self.members(kind)))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kinds = st.sampled_from(sorted(BYTES_PER_ELEMENT))
    numels = st.integers(0, 40) | st.just(0) | st.integers(0, 10_000)
    specs = draw(st.lists(st.builds(spec, numels, kinds, st.booleans() | st.just(True)), max_size=30))
    world_size = draw(st.integers(1, 6))
    owner = st.integers(0, world_size - 1).map(GroupRank)
    owners = draw(st.lists(owner, min_size=len(specs), max_size=len(specs)))
    return Case(specs, owners, world_size, draw(st.integers(1, 400)))


# The plan that is built


def test_the_figure_in_the_docstring_equals_the_plan() -> None:
    elements = [8, 4, 6, 2, 4, 6, 2]
    owners = partition_greedy([4 * numel for numel in elements], 2)
    plan = plan_standalone([spec(numel) for numel in elements], owners, 2, bucket_cap_bytes=64)

    def drawn(segment: Segment) -> str:
        places = zip(segment.params, segment.offsets, strict=True)
        return "[ " + " | ".join(f"p{param}: {start}..{start + elements[param]}" for param, start in places) + " ]"

    rows = [
        ["parameter", *range(7)],
        ["elements", *elements, f"{4 * sum(elements)} bytes, so {len(plan.buckets)} buckets"],
        ["owner", *owners],
        ["rank 0", "rank 1"],
        *([f"bucket {bucket.index}", *map(drawn, bucket.segments)] for bucket in plan.buckets),
    ]
    figure = " ".join(str(cell) for row in rows for cell in row)
    assert figure in " ".join((plan_module.__doc__ or "").split())


@given(cases())
def test_each_active_parameter_is_in_one_segment_of_its_owner_and_kind(case: Case) -> None:
    plan = case.plan()
    travelling = [
        (param, segment.owner, bucket.kind)
        for bucket in plan.buckets
        for segment in bucket.segments
        for param in segment.params
    ]
    active = [(p, case.owners[p], s.kind) for p, s in enumerate(case.specs) if s.active]
    assert sorted(travelling) == active
    assert (plan.world_size, list(plan.specs), list(plan.owners)) == (case.world_size, case.specs, case.owners)


@given(cases())
def test_segments_are_laid_end_to_end_one_per_rank_in_buckets_numbered_in_order(case: Case) -> None:
    plan = case.plan()
    assert [bucket.index for bucket in plan.buckets] == list(range(len(plan.buckets)))
    for bucket in plan.buckets:
        assert [segment.owner for segment in bucket.segments] == list(range(case.world_size))
        assert any(segment.params for segment in bucket.segments), "an empty bucket is a message about nothing"
        for segment in bucket.segments:
            end = 0
            for param, offset in zip(segment.params, segment.offsets, strict=True):
                assert offset == end
                end += case.specs[param].numel
            assert segment.numel == end


@given(cases())
def test_each_rank_fills_buckets_in_order_and_evenly(case: Case) -> None:
    plan = case.plan()
    for kind in {s.kind for s in case.specs if s.active}:
        buckets = [bucket for bucket in plan.buckets if bucket.kind == kind]
        wanted = case.wanted_buckets(kind)
        assert 1 <= len(buckets) <= wanted
        for rank, members in enumerate(case.members(kind)):
            assert [p for bucket in buckets for p in bucket.segments[rank].params] == members
            share = sum(case.specs[p].nbytes for p in members) / wanted
            largest = max((case.specs[p].nbytes for p in members), default=0)
            for bucket in buckets:
                size = sum(case.specs[p].nbytes for p in bucket.segments[rank].params)
                assert share - largest <= size <= share + largest


# A plan that follows DDP


def drawn(plan: ShardPlan) -> list[tuple[str, list[tuple[int, ...]]]]:
    """Of each bucket, its kind and the parameters of each rank."""
    return [(bucket.kind, [segment.params for segment in bucket.segments]) for bucket in plan.buckets]


def test_plan_for_ddp_has_ddps_buckets_in_order_and_then_the_other_parameters() -> None:
    kinds = ["cpu/float32"] * 6 + ["cpu/bfloat16"] * 3
    specs = [spec(numel, kind) for numel, kind in zip([4, 3, 7, 5, 2, 6, 2, 8, 1], kinds, strict=True)]
    for dormant in (3, 4):  # one in a bucket of DDP, one outside
        specs[dormant] = replace(specs[dormant], active=False)
    layout = [[8, 6], [], [5, 3, 2, 0], []]
    plan = plan_for_ddp(specs, ranks(0, 1, 1, 0, 0, 0, 1, 0, 1), 2, layout, bucket_cap_bytes=1000)
    assert drawn(plan) == [
        ("cpu/bfloat16", [(), (6, 8)]),
        ("", [(), ()]),
        ("cpu/float32", [(0, 5), (2,)]),
        ("", [(), ()]),
        ("cpu/float32", [(), (1,)]),
        ("cpu/bfloat16", [(7,), ()]),
    ]
    assert plan.buckets[2].segments[0] == Segment(GroupRank(0), (0, 5), (0, 4), 10, ((0, 4), (0, 6)))
    assert [bucket.index for bucket in plan.buckets] == [0, 1, 2, 3, 4, 5]


@st.composite
def layouts(draw: st.DrawFn, kinds: Sequence[str]) -> list[list[int]]:
    """Some of the parameters, in any order, in buckets of one kind each, empty ones between."""
    buckets: list[list[int]] = [[] for _ in range(draw(st.integers(0, 2)))]
    for param in draw(st.lists(st.sampled_from(range(len(kinds))), unique=True) if kinds else st.just([])):
        if draw(st.booleans()) or not buckets or (buckets[-1] and kinds[buckets[-1][0]] != kinds[param]):
            buckets.append([])
        buckets[-1].append(param)
    return draw(st.permutations(buckets))


@given(cases(), st.data())
def test_a_plan_for_ddp_is_its_buckets_and_then_the_standalone_plan_of_the_rest(
    case: Case, data: st.DataObject
) -> None:
    layout = data.draw(layouts([s.kind for s in case.specs]))
    plan = plan_for_ddp(case.specs, case.owners, case.world_size, layout, case.cap)
    reduced = {param for params in layout for param in params}
    for (_, segments), params in zip(drawn(plan)[: len(layout)], layout, strict=True):
        for rank, found in enumerate(segments):
            assert list(found) == sorted(p for p in params if case.specs[p].active and case.owners[p] == rank)
    rest = [replace(s, active=s.active and param not in reduced) for param, s in enumerate(case.specs)]
    assert drawn(plan)[len(layout) :] == drawn(replace(case, specs=rest).plan())
    assert (list(plan.specs), list(plan.owners)) == (case.specs, case.owners)


def test_the_digest_is_that_of_an_equal_plan_and_differs_with_anything_that_travels() -> None:
    specs = [spec(4), spec(4), spec(3, active=False)]

    def digest(specs: list[ParameterSpec], owners: tuple[int, ...], layout: list[list[int]], world_size: int) -> int:
        return plan_for_ddp(specs, ranks(*owners), world_size, layout, 1000).digest()

    first = digest(specs, (0, 1, 0), [[1, 0]], 2)
    assert first == digest(list(specs), (0, 1, 0), [[0, 1]], 2)
    assert 0 <= first < 1 << 63
    others = [
        digest(specs, (1, 0, 0), [[1, 0]], 2),
        digest(specs, (0, 1, 0), [[0], [1]], 2),
        digest(specs, (0, 1, 0), [[1], [0]], 2),
        digest(specs, (0, 1, 0), [[1, 0], []], 2),
        digest(specs, (0, 1, 0), [[1, 0]], 3),
        digest([spec(4), spec(5), specs[2]], (0, 1, 0), [[1, 0]], 2),
        digest([spec(4, "cpu/bfloat16"), spec(4, "cpu/bfloat16"), specs[2]], (0, 1, 0), [[1, 0]], 2),
        digest([spec(4), spec(4), spec(3)], (0, 1, 0), [[1, 0]], 2),
    ]
    assert len({first, *others}) == 1 + len(others)


# Owners by bucket

SIZES = [8, 4, 6, 2, 4, 6, 2]
DDP_LAYOUT = [[6, 5], [4, 3, 2], [1, 0]]


@pytest.mark.parametrize(
    ("sizes", "world_size", "layout", "owners"),
    [
        pytest.param(SIZES, 2, DDP_LAYOUT, [0, 1, 1, 1, 0, 0, 1], id="loads 6 2, then 10 10, then 18 14"),
        pytest.param(SIZES, 3, DDP_LAYOUT, [1, 2, 2, 0, 1, 0, 1], id="loads 6 2 0, then 8 6 6, then 8 14 10"),
        pytest.param([5, 5, 5, 5], 2, [[3, 2], [1, 0]], [0, 1, 0, 1], id="equal sizes by index, not by place in DDP"),
        pytest.param([0, 0, 3], 2, [[0, 1, 2]], [1, 1, 0], id="nothing weighs nothing"),
        pytest.param(SIZES, 1, DDP_LAYOUT, [0] * 7, id="one rank"),
    ],
)
def test_a_bucket_is_spread_largest_first_from_the_loads_that_the_buckets_before_left(
    sizes: list[int], world_size: int, layout: list[list[int]], owners: list[int]
) -> None:
    assert owners_by_bucket(sizes, ranks(*[0] * len(sizes)), world_size, layout, split=True) == owners


@pytest.mark.parametrize(
    ("world_size", "layout", "owners"),
    [
        pytest.param(2, DDP_LAYOUT, [0, 0, 1, 1, 1, 0, 0], id="loads 8 0, then 8 12, then 20 12"),
        pytest.param(3, DDP_LAYOUT, [2, 2, 1, 1, 1, 0, 0], id="a rank each"),
        pytest.param(5, [[6, 5], [], [4, 3, 2, 1, 0]], [1, 1, 1, 1, 1, 0, 0], id="more ranks than buckets, one empty"),
    ],
)
def test_a_whole_bucket_goes_to_the_least_loaded_rank(
    world_size: int, layout: list[list[int]], owners: list[int]
) -> None:
    assert owners_by_bucket(SIZES, ranks(*[0] * 7), world_size, layout, split=False) == owners


@pytest.mark.parametrize("split", [False, True])
def test_parameters_in_no_bucket_keep_their_owner_and_weigh_nothing(split: bool) -> None:
    before = ranks(2, 2, 0, 1, 2)
    assert owners_by_bucket([3, 100, 3, 100, 3], before, 3, [[], [4], [0]], split) == [1, 2, 0, 1, 0]
    assert owners_by_bucket([3, 100, 3, 100, 3], before, 3, [], split) == list(before)
    assert before == ranks(2, 2, 0, 1, 2)


@given(
    sizes=st.lists(st.integers(0, 1 << 30) | st.integers(0, 3), max_size=40),
    world_size=st.integers(1, 8) | st.integers(1, 128),
    split=st.booleans(),
    data=st.data(),
)
def test_loads_differ_by_one_item_at_most_from_any_owners_before(
    sizes: list[int], world_size: int, split: bool, data: st.DataObject
) -> None:
    """An item is a parameter, or a whole bucket; the bound holds from the first bucket on, since loads are carried."""
    layout = data.draw(layouts(["cpu/float32"] * len(sizes)))
    owner = st.integers(0, world_size - 1).map(GroupRank)
    before = data.draw(st.lists(owner, min_size=len(sizes), max_size=len(sizes)))
    owners = owners_by_bucket(sizes, before, world_size, layout, split)
    loads, largest = [0] * world_size, 0
    for bucket in layout:
        assert split or len({owners[param] for param in bucket}) <= 1
        for param in bucket:
            loads[owners[param]] += sizes[param]
        items = [sizes[param] for param in bucket] if split else [sum(sizes[param] for param in bucket)]
        largest = max([largest, *items])
        assert max(loads) - min(loads) <= largest
    other_owners = [GroupRank(world_size - 1 - rank) for rank in before]
    again = owners_by_bucket(sizes, other_owners, world_size, [params[::-1] for params in layout], split)
    for bucket in layout:
        assert [again[param] for param in bucket] == [owners[param] for param in bucket]


# A plan that was tampered with


def good_plan() -> ShardPlan:
    """Two ranks; parameters 0, 1, 3 in bucket 0, 4 and 5 in bucket 1, 2 is dormant."""
    kinds = ["cpu/float32"] * 4 + ["cpu/bfloat16"] * 2
    specs = [spec(numel, kind) for numel, kind in zip([4, 3, 7, 5, 2, 2], kinds, strict=True)]
    specs[2] = replace(specs[2], active=False)
    return plan_standalone(specs, ranks(0, 1, 0, 0, 0, 1), 2, 1000)


def with_segment(bucket: int, rank: int, params: list[int], offsets: list[int], numel: int) -> ShardPlan:
    """The good plan with one segment replaced; raises as its constructor does."""
    plan = good_plan()
    segments = list(plan.buckets[bucket].segments)
    ranges = [(0, plan.specs[param].numel if param < len(plan.specs) else 1) for param in params]
    segments[rank] = Segment(GroupRank(rank), tuple(params), tuple(offsets), numel, tuple(ranges))
    buckets = list(plan.buckets)
    buckets[bucket] = replace(buckets[bucket], segments=tuple(segments))
    return replace(plan, buckets=tuple(buckets))


def with_owners(*owners: int) -> ShardPlan:
    """The good plan with these owners of whole parameters."""
    plan = good_plan()
    numels = [spec.numel for spec in plan.specs]
    return replace(plan, pieces=tuple(whole(one, numel) for one, numel in zip(ranks(*owners), numels, strict=False)))


def with_buckets(change: Callable[[tuple[Bucket, ...]], tuple[Bucket, ...]]) -> ShardPlan:
    return replace(good_plan(), buckets=change(good_plan().buckets))


BROKEN: dict[str, tuple[Callable[[], ShardPlan], str]] = {
    "an owner is missing": (lambda: with_owners(0, 1, 0, 0, 0), "owners of 5 of 6 parameters"),
    "owner too large": (lambda: with_owners(0, 1, 2, 0, 0, 1), r"parameter 2 has owners \[2\] of 2"),
    "owner negative": (lambda: with_owners(0, 1, -1, 0, 0, 1), r"parameter 2 has owners \[-1\] of 2"),
    "buckets out of order": (lambda: with_buckets(lambda buckets: buckets[::-1]), "bucket 1 is at position 0"),
    "a segment is missing": (
        lambda: with_buckets(lambda b: (b[0], replace(b[1], segments=b[1].segments[:1]))),
        r"bucket 1 has segments of ranks \[0\]",
    ),
    "segments out of rank order": (
        lambda: with_buckets(lambda b: (replace(b[0], segments=b[0].segments[::-1]), b[1])),
        r"bucket 0 has segments of ranks \[1, 0\]",
    ),
    "a gap": (
        lambda: with_segment(0, 0, [0, 3], [0, 5], 10),
        r"bucket 0, rank 0: parameters at \[0, 5\] to 10, not at \[0, 4, 9\]",
    ),
    "an overlap": (
        lambda: with_segment(0, 0, [0, 3], [0, 3], 9),
        r"bucket 0, rank 0: parameters at \[0, 3\] to 9, not at \[0, 4, 9\]",
    ),
    "not from the start": (
        lambda: with_segment(1, 1, [5], [1], 2),
        r"bucket 1, rank 1: parameters at \[1\] to 2, not at \[0, 2\]",
    ),
    "too long": (
        lambda: with_segment(1, 1, [5], [0], 3),
        r"bucket 1, rank 1: parameters at \[0\] to 3, not at \[0, 2\]",
    ),
    "an offset is missing": (
        lambda: with_segment(0, 0, [0, 3], [0], 9),
        r"bucket 0, rank 0: parameters at \[0\] to 9, not at \[0, 4, 9\]",
    ),
    "twice in one segment": (lambda: with_segment(0, 1, [1, 1], [0, 3], 6), "2 of 1 pieces of parameter 1 in bucket 0"),
    "in two buckets": (lambda: with_segment(1, 0, [0, 4], [0, 4], 6), "parameter 0 is in two buckets, 0 and 1"),
    "with another rank": (
        lambda: with_segment(0, 1, [1, 4], [0, 3], 5),
        r"parameter 4 in bucket 0, rank 1: \(0, 2\) of ",
    ),
    "in a bucket of another kind": (
        lambda: with_segment(0, 0, [0, 3, 4], [0, 4, 9], 11),
        "parameter 4 in bucket 0, rank 0 of cpu/float32: .*cpu/bfloat16",
    ),
    "a dormant parameter": (
        lambda: with_segment(0, 0, [0, 2, 3], [0, 4, 11], 16),
        "parameter 2 in bucket 0, rank 0 of cpu/float32: .*active=False",
    ),
    "in no bucket": (lambda: with_segment(0, 0, [0], [0], 4), "active parameter 3 is in no bucket"),
    "no such parameter": (lambda: with_segment(0, 0, [0, 3, 6], [0, 4, 9], 9), r"parameter.* 6"),
}


@pytest.mark.parametrize(("build", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_plan_is_refused_naming_the_offenders(build: Callable[[], ShardPlan], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        build()
