"""A handful of the fuzzer's mesh programs, and that it finds faults. Hundreds: ``python -m tests.fuzz --mesh``."""

from dataclasses import replace
from functools import cache

import pytest

from tests.fuzz.case import LATE_VALUES
from tests.fuzz.checks import assert_drawn_alike, assert_hang_is_reported, assert_none_fails
from tests.fuzz.mesh.case import (
    Away,
    Compare,
    Evaluate,
    Freeze,
    How,
    Layer,
    Layout,
    MeshCase,
    Move,
    Net,
    Refuse,
    Set,
    Step,
    Uneven,
)
from tests.fuzz.mesh.draw import OPTIMIZERS, draw_mesh
from tests.fuzz.pool import Pool

SEEDS = {2: (8_200_177,), 4: range(4)}
MANY_SEEDS = {4: range(4, 100), 8: range(20)}
_TWO = MeshCase(
    seed=0,
    ranks=2,
    layout=Layout((2, 1, 1), stages=(2,), experts=((1, 2),)),
    net=Net((Layer("dense"), Layer("experts", experts=3))),
    how=How(clip="option"),
    program=(Step(),) * 3,
)


@pytest.mark.parametrize("ranks", SEEDS)
def test_random_mesh_programs_equal_plain_optimizers(ranks: int) -> None:
    assert_none_fails(SEEDS[ranks], ranks, draw_mesh, least_passed=1.0, least_compared=3)


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", MANY_SEEDS)
def test_more_random_mesh_programs_equal_plain_optimizers(ranks: int) -> None:
    assert_none_fails(MANY_SEEDS[ranks], ranks, draw_mesh, least_passed=1.0, least_compared=3)


def test_mesh_cases_are_drawn_without_torch_and_always_alike() -> None:
    assert_drawn_alike(draw_mesh, 4, 8)


@cache
def _many() -> list[MeshCase]:
    return [draw_mesh(seed, 8) for seed in range(3000)]


def test_every_mesh_and_option_is_drawn() -> None:
    drawn = _many()
    assert {one.how.name for one in drawn} == set(OPTIMIZERS)
    every = {Step, Uneven, Refuse, Away, Set, Freeze, Evaluate, Compare, Move}
    assert {type(op) for one in drawn for op in one.program} == every
    assert {layout.sizes for one in drawn for layout in one.layouts()} >= {(4, 2, 1), (2, 1, 4), (2, 2, 2), (1, 4, 2)}
    assert {one.how.ddp for one in drawn} == {"none", "dense", "both"}
    assert {one.how.clip for one in drawn} == {None, "option", "loop", "value"}
    assert {one.net.late_value for one in drawn} == {None, *LATE_VALUES} - {"some ranks"}
    assert {one.net.late_value for one in drawn if one.how.ddp != "none" and one.how.overlap} == {None, "tied"}
    uneven = [counts for one in drawn for counts in one.layout.experts if len(set(counts)) > 1]
    assert {len(counts) for counts in uneven} == {2, 4}
    sizes = [{len(counts) for counts in one.layout.experts} for one in drawn]
    assert any(len(found) > 1 for found in sizes), "layers of experts over different numbers of ranks"
    assert any(one.net.starves and one.net.by_tensor and one.how.muon and one.net.frozen for one in drawn)
    moves = {(one.layout.sizes, op.layout.sizes) for one in drawn for op in one.program if isinstance(op, Move)}
    assert moves >= {((2, 2, 2), (4, 1, 2)), ((1, 4, 2), (4, 2, 1))}


def test_options_are_drawn_where_the_library_takes_them_and_refusals_where_not() -> None:
    drawn = _many()
    assert {one.how.offload for one in drawn} == {False, True}
    assert {(one.how.clip, one.how.unscales) for one in drawn if one.how.scaler} >= {
        *((clip, False) for clip in (None, "option", "loop", "value")),
        (None, True),
    }
    assert {one.net.dtype for one in drawn if one.how.masters} == {"bfloat16", "float16"}
    assert {one.net.dtype for one in drawn if not one.how.masters} == {"float32", "float64"}
    assert any(one.how.sums_in_fp32 for one in drawn)
    assert {one.how.ddp for one in drawn if one.how.sync == "forward"} == {"none", "dense", "both"}
    layouts = [layout for one in drawn for layout in one.layouts()]
    shapes = {(layout.replicas, layout.data, layout.strides, layout.splits) for layout in layouts}
    assert shapes >= {(2, 8, True, True), (2, 4, False, True), (4, 8, True, False), (4, 4, False, False)}
    assert {1, 2, 4} == {layout.expert_replicas for layout in layouts}
    cuts = [(layer.hidden, one.layout.tensor) for one in drawn for layer in one.net.layers if layer.kind == "cut"]
    assert any(hidden % parts and hidden > parts for hidden, parts in cuts), "parts of unequal sizes"
    assert any(hidden < parts for hidden, parts in cuts), "parts without elements"
    for one in drawn:
        layout = one.layout
        for op in one.program:
            layout = op.layout if isinstance(op, Move) else layout
            if isinstance(op, Uneven):
                assert one.may_join(layout)
                assert len(op.batches) == layout.data
                assert max(op.batches) > 0
            elif isinstance(op, Refuse) and op.thing == "join":
                assert one.refuses_join(layout) is not None
    uneven = [op for one in drawn for op in one.program if isinstance(op, Uneven)]
    assert any(0 in op.batches for op in uneven)
    assert {op.counts_all for op in uneven} == {True, False}
    assert {op.thing for one in drawn for op in one.program if isinstance(op, Refuse)} == {"join", "forward"}


def test_drawn_layouts_say_which_ranks_share_a_copy_of_the_state() -> None:
    neighbours = Layout((8, 1, 1), replicas=2)
    assert [list(neighbours.sharers(rank)) for rank in (0, 3, 5)] == [[0, 1, 2, 3], [0, 1, 2, 3], [4, 5, 6, 7]]
    apart = Layout((8, 1, 1), replicas=2, strides=True)
    assert [list(apart.sharers(rank)) for rank in (0, 3)] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    experts = Layout((8, 1, 1), experts=((1, 1), (1, 1, 1, 1, 1, 1, 1, 1)), expert_replicas=2)
    found = [experts.expert_sharers(0, rank) for rank in (1, 5)]
    assert [None if ranks is None else list(ranks) for ranks in found] == [[1, 3], [5, 7]]
    assert experts.expert_sharers(1, 3) is None


@pytest.mark.nightly
def test_a_learning_rate_that_is_off_by_an_ulp_is_found_on_a_mesh() -> None:
    dense = replace(_TWO, layout=Layout((2, 1, 1)), net=Net((Layer(),)))
    joins = replace(dense, program=(Uneven((1, 2)), Step()))
    low = replace(dense, net=replace(dense.net, dtype="bfloat16"), program=(Step(), Compare(), Step()))
    mistaken = {
        "plain": (_TWO, How(clip="option", stage=2)),
        "DDP": (_TWO, How(ddp="dense", clip="option", stage=2)),
        "scaler": (_TWO, How(scaler=True, clip="loop")),
        "host": (_TWO, How(offload=True)),
        "replicas": (replace(_TWO, layout=replace(_TWO.layout, replicas=2)), How(ddp="dense", stage=2)),
        "Join": (joins, How(ddp="dense", stage=2)),
        "Join without DDP": (joins, How()),
        "masters": (low, How(masters=True, clip="option")),
    }
    with Pool(2, injects="lr") as pool:
        found = {name: pool.run(replace(case, how=how)).kind for name, (case, how) in mistaken.items()}
    expected = {name: "difference (Step)" for name in mistaken}
    joined = dict.fromkeys(("Join", "Join without DDP"), "difference (Uneven)")
    assert found == {**expected, **joined, "masters": "difference (Compare)"}


def test_a_norm_that_is_off_is_found_on_a_mesh() -> None:
    with Pool(2, injects="norm") as pool:
        found = [
            pool.run(replace(_TWO, net=replace(_TWO.net, dtype=dtype), how=How(clip=clip)))
            for dtype, clip in (("float64", "option"), ("float32", "loop"))
        ]
    assert [outcome.kind for outcome in found] == ["difference (Step)"] * 2, found
    assert all("of the plain run's gradients" in outcome.text for outcome in found)


def test_a_refusal_that_is_missing_is_found_on_a_mesh() -> None:
    with Pool(2) as pool:
        outcome = pool.run(replace(_TWO, program=(Refuse("forward"), Step())))  # without distributed tensors
        alone = replace(_TWO, layout=Layout((2, 1, 1), stages=(1,), replicas=2), net=Net((Layer("dense"),)))
        refused = pool.run(replace(alone, program=(Refuse("join"), Step())))
    assert outcome.kind == "difference (Refuse)"
    assert refused.verdict == "passed", refused.text


@pytest.mark.nightly
def test_a_rank_that_hangs_on_a_mesh_is_reported_by_its_case() -> None:
    assert_hang_is_reported(_TWO, "hang 1", "--mesh --ranks 2 --only 0  # hang")
