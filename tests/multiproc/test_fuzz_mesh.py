"""A handful of the fuzzer's mesh programs, and that it finds faults. Hundreds: ``python -m tests.fuzz --mesh``."""

import subprocess
import sys
from dataclasses import replace

import pytest

from tests.fuzz.__main__ import Tally, fuzz
from tests.fuzz.mesh.case import Compare, Evaluate, Freeze, How, Layer, Layout, MeshCase, Move, Net, Set, Step
from tests.fuzz.mesh.draw import OPTIMIZERS, draw_mesh
from tests.fuzz.pool import Pool

SEEDS = {4: range(8)}
MANY_SEEDS = {4: range(8, 100), 8: range(20)}
_TWO = MeshCase(
    seed=0,
    ranks=2,
    layout=Layout((2, 1, 1), stages=(2,), experts=((1, 2),)),
    net=Net((Layer("dense"), Layer("experts", experts=3))),
    how=How(clip="option"),
    program=(Step(),) * 3,
)


def _assert_equal(seeds: range, ranks: int) -> None:
    tally = fuzz(seeds, ranks, draws=draw_mesh)
    assert not tally.failures, tally.report(ranks) + "".join(outcome.text for outcome in tally.failures)
    assert tally.cases == tally.passed == len(seeds)
    assert tally.compared > 3 * tally.cases


@pytest.mark.parametrize("ranks", SEEDS)
def test_a_handful_of_mesh_cases(ranks: int) -> None:
    _assert_equal(SEEDS[ranks], ranks)


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", MANY_SEEDS)
def test_more_mesh_cases(ranks: int) -> None:
    _assert_equal(MANY_SEEDS[ranks], ranks)


def test_mesh_cases_are_drawn_without_torch_and_always_alike() -> None:
    told = [str(draw_mesh(seed, ranks)) for seed in range(50) for ranks in (4, 8)]
    script = (
        "import sys; from tests.fuzz.mesh.draw import draw_mesh\n"
        "print('\\n'.join(str(draw_mesh(seed, ranks)) for seed in range(50) for ranks in (4, 8)))\n"
        "assert 'torch' not in sys.modules"
    )
    again = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert again.stdout.strip() == "\n".join(told)
    assert len(set(told)) == len(told)


def test_every_mesh_and_option_is_drawn() -> None:
    drawn = [draw_mesh(seed, 8) for seed in range(3000)]
    assert {one.how.name for one in drawn} == set(OPTIMIZERS)
    assert {type(op) for one in drawn for op in one.program} == {Step, Set, Freeze, Evaluate, Compare, Move}
    assert {layout.sizes for one in drawn for layout in one.layouts()} >= {(4, 2, 1), (2, 1, 4), (2, 2, 2), (1, 4, 2)}
    assert {one.how.ddp for one in drawn} == {"none", "dense", "both"}
    assert {one.how.clip for one in drawn} == {None, "option", "loop", "value"}
    uneven = [counts for one in drawn for counts in one.layout.experts if len(set(counts)) > 1]
    assert {len(counts) for counts in uneven} == {2, 4}
    sizes = [{len(counts) for counts in one.layout.experts} for one in drawn]
    assert any(len(found) > 1 for found in sizes), "layers of experts over different numbers of ranks"
    assert any(one.net.starves and one.net.by_tensor and one.how.muon and one.net.frozen for one in drawn)
    moves = {(one.layout.sizes, op.layout.sizes) for one in drawn for op in one.program if isinstance(op, Move)}
    assert moves >= {((2, 2, 2), (4, 1, 2)), ((1, 4, 2), (4, 2, 1))}


def test_a_learning_rate_that_is_off_by_an_ulp_is_found_on_a_mesh() -> None:
    with Pool(2, injects="lr") as pool:
        found = [pool.run(replace(_TWO, how=replace(_TWO.how, ddp=ddp, stage=2))) for ddp in ("none", "dense")]
    assert [outcome.kind for outcome in found] == ["difference (Step)"] * 2, found


def test_a_rank_that_hangs_on_a_mesh_is_reported_by_its_case() -> None:
    with Pool(2, timeout=10.0, injects="hang 1") as pool:
        outcome = pool.run(_TWO)
    assert (outcome.verdict, outcome.kind) == ("failed", "hang")
    tally = Tally()
    tally.add(outcome)
    assert "--mesh --ranks 2 --only 0  # hang" in tally.report(2)
