"""A handful of the fuzzer's training loops, and that it finds faults. Hundreds: ``python -m tests.fuzz --loops``."""

from dataclasses import replace
from functools import cache

import pytest

from tests.fuzz.case import Case, Ddp, Loop, Mode, Model, Optim
from tests.fuzz.checks import assert_drawn_alike, assert_hang_is_reported, assert_none_fails
from tests.fuzz.loops.case import Do, LoopCase
from tests.fuzz.loops.draw import CLASSES, draw_loop
from tests.fuzz.loops.expect import expected_of
from tests.fuzz.loops.idioms import BODIES, COPIES, EDITS, FAILURES, INCIDENTS, OWN_EDITS, REPLACEMENTS
from tests.fuzz.loops.statements import VERBS
from tests.fuzz.pool import Pool

SEEDS = {2: range(540, 549)}
MANY_SEEDS = {2: range(209), 3: range(60)}

_PASS = (Do("forward", (0, ("0",))), Do("backward"))
_STEP = (*_PASS, Do("step"), Do("zero", ("opt", "none")), Do("compare"))
_INSIDE, _WAITING, _STANDALONE = Mode(overlap=True), Mode(overlap=True, max_grad_norm=1e9), Mode(via="hooks")


def _loop(mode: Mode, *iterations: tuple[Do, ...]) -> LoopCase:
    ddp = Ddp(gradient_as_bucket_view=mode.stage == 2)
    unit = Case(0, 2, Model(widths=(8, 13, 9, 3)), ddp, Optim("Adam"), mode, Loop(), ())
    return LoopCase(0, 2, (unit,), (*iterations, (Do("finish"),)))


@pytest.mark.parametrize("ranks", SEEDS)
def test_random_loops_equal_ddp_or_are_refused(ranks: int) -> None:
    assert_none_fails(SEEDS[ranks], ranks, draw_loop, least_compared=2)


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", MANY_SEEDS)
def test_more_random_loops_equal_ddp_or_are_refused(ranks: int) -> None:
    assert_none_fails(MANY_SEEDS[ranks], ranks, draw_loop, least_compared=2)


# Drawing


@cache
def _many() -> list[LoopCase]:
    return [draw_loop(seed, 2) for seed in range(4000)]


def test_loops_are_drawn_without_torch_and_always_alike() -> None:
    assert_drawn_alike(draw_loop, 2, 3)


def test_every_idiom_is_drawn() -> None:
    drawn = _many()
    idioms = {idiom for one in drawn for idiom in one.idioms}
    assert idioms >= set(BODIES)
    assert {idiom.partition(" at ")[0] for idiom in idioms} >= set(INCIDENTS)
    assert idioms >= {f"edit: {edit}" for edit in (*EDITS, *OWN_EDITS)}
    assert idioms >= {f"copy: {way}" for way in COPIES}
    assert idioms >= {f"replaces: {how}" for how in REPLACEMENTS}
    assert idioms >= {f"fails in {where}, reset" for where in FAILURES}
    assert idioms >= {"static graph", "norm logged", "late value", "Join", "step before the first backward", "thaws"}
    assert idioms >= {"rate: before", "rate: middle", "rate: after"}
    assert {statement.verb for one in drawn for statement in one.statements} == set(VERBS)


def test_every_form_and_place_of_zeroing_gradients_is_drawn() -> None:
    zeros = {idiom for one in _many() for idiom in one.idioms if idiom.startswith("zero: ")}
    forms = [(by, form) for by in ("opt", "model", "ddp") for form in ("none", "zeros")]
    forms += [("hand", form) for form in ("none", "zero_", "detach_")]
    assert zeros >= {f"zero: {by} {form} {place}" for by, form in forms for place in ("start", "between", "after")}
    assert any(zero.endswith("never") for zero in zeros)


def test_every_mode_and_optimizer_is_drawn_beside_every_body() -> None:
    drawn, units = _many(), [unit for one in _many() for unit in one.units]
    assert {(one.idioms[0], mode.stage, mode.overlap) for one in drawn for mode in [one.units[0].mode]} == {
        (name, stage, overlap) for name in BODIES for stage in (1, 2) for overlap in (False, True)
    }
    assert {unit.optim.name for unit in units} == set(CLASSES)
    for stage in (1, 2):
        modes = [unit.mode for unit in units if unit.mode.stage == stage]
        assert {mode.partition for mode in modes} == {"parameters", "elements", "auto"}
        assert {mode.sync for mode in modes} == {"step", "forward"}
        assert {mode.nonfinite for mode in modes} == {None, "skip", "raise", "step"}
        assert {mode.loss_scale for mode in modes} == {None, 1024.0, 0.25, "dynamic"}
        assert any(mode.masters for mode in modes)
        assert any(mode.clips for mode in modes)
    assert any(unit.mode.sums_in_fp32 for unit in units)
    assert {unit.mode.via for unit in units} == {"shard_optimizer", "hooks", "attach"}


def test_one_rank_saves_alone_in_every_form() -> None:
    saves = [statement for one in _many() for statement in one.statements if statement.verb == "save"]
    assert {(statement.args[0], statement.rank) for statement in saves} >= {
        *((form, rank) for form in ("state_dict", "torch.save", "deepcopy") for rank in (None, 0, 1)),
        *((form, None) for form in ("consolidate", "checkpoint")),
    }


# What is expected


def _names(mode: Mode, *iterations: tuple[Do, ...]) -> list[tuple[str, bool]]:
    return [(risk.name, risk.certain) for risk in expected_of(_loop(mode, *iterations)).risks]


_DROP = (*_PASS, Do("zero", ("opt", "none")))
_EDITED = (*_PASS, Do("edit", ("clamp",)), Do("step"), Do("zero", ("opt", "none")))


def test_a_dropped_update_must_be_refused_only_where_backward_has_stepped() -> None:
    assert _names(_INSIDE, _STEP, _DROP) == [("dropped", True)]
    assert _names(_INSIDE, _DROP) == [("dropped", False)]
    assert _names(_WAITING, _STEP, _DROP) == [("dropped", False)]
    assert _names(_STANDALONE, _STEP, _DROP) == []
    assert _names(Mode(stage=2), _STEP, _DROP) == []


def test_a_loop_that_edits_gradients_from_its_first_step_on_is_equal() -> None:
    assert _names(_INSIDE, _EDITED, _EDITED, _DROP) == [("dropped", False)]
    assert _names(_INSIDE, _STEP, _EDITED) == [("gradients edited late", False)]
    assert _names(_STANDALONE, _STEP, _EDITED) == []


def test_plain_loops_may_never_be_refused() -> None:
    zeros = (*_PASS, Do("zero", ("model", "zeros")))
    first = (Do("step"), Do("zero", ("opt", "zeros")))
    for mode in (_INSIDE, _WAITING, _STANDALONE, Mode(stage=2), Mode(stage=2, overlap=True)):
        assert _names(mode, first, _STEP, (*zeros[:2], Do("step"), zeros[2]), _STEP) == []


# Mistakes are found


def test_a_loop_whose_learning_rate_is_off_by_an_ulp_is_found() -> None:
    with Pool(2, injects="lr") as pool:
        outcome = pool.run(_loop(_INSIDE, _STEP, _STEP, _STEP))
    assert (outcome.verdict, outcome.kind) == ("failed", "difference (compare)"), outcome.text


def test_refusals_are_told_from_errors() -> None:
    late = _loop(_INSIDE, _STEP, _STEP, (*_PASS, Do("set", ("lr", 0.5)), Do("step"), Do("compare")))
    around = (Do("forward", (0, ("0 module",))), Do("backward"), Do("step"), Do("zero", ("opt", "none")), Do("compare"))
    with Pool(2) as pool:
        outcomes = [pool.run(late), pool.run(_loop(_INSIDE, _STEP, around)), pool.run(_loop(_INSIDE, *(_STEP,) * 3))]
        wrong = pool.run(_loop(_INSIDE, _STEP, (*_PASS, Do("schedule"))))  # of a scheduler that is not there
    assert [outcome.verdict for outcome in outcomes] == ["refused", "refused", "passed"], outcomes
    assert outcomes[0].kind == "options changed late: ZERO-304"
    assert wrong.verdict == "both raised"


def test_a_save_before_the_step_is_equal_where_steps_wait() -> None:
    with Pool(2) as pool:
        saves = [(*_PASS, Do("save", (form, False, place))) for place, form in enumerate(("consolidate", "state_dict"))]
        outcome = pool.run(_loop(_STANDALONE, _STEP, *((*save, *_STEP[-2:]) for save in saves)))
    assert (outcome.verdict, outcome.kind) == ("passed", ""), outcome.text


def test_a_loaded_loss_scale_goes_on_from_where_it_was_saved() -> None:
    save, load = (Do("save", ("torch.save", False, 0)),), (Do("load", (0, None)),)
    mode = Mode(stage=2, overlap=True, via="hooks", loss_scale="dynamic")
    with Pool(2) as pool:
        outcome = pool.run(_loop(mode, _STEP, save, _STEP, load, *(_STEP,) * 3))
    assert (outcome.verdict, outcome.compared) == ("passed", 6), outcome.text


@pytest.mark.nightly  # waits for the time-out
def test_a_rank_that_is_refused_alone_may_be_missed_until_the_time_out() -> None:
    first, alone = Do("save", ("state_dict", False, 0)), Do("save", ("state_dict", False, 1), rank=0)
    dropped = (*_PASS, Do("zero", ("hand", "none")), alone, Do("load", (0, 1)))
    loop = _loop(_INSIDE, _STEP, (*_STEP, first), dropped)
    with Pool(2) as pool:
        outcome = pool.run(loop)
    assert (outcome.verdict, outcome.kind) == ("refused", "dropped: ZERO-307"), outcome.text


@pytest.mark.nightly
def test_a_rank_that_hangs_in_a_loop_is_reported_by_its_case() -> None:
    assert_hang_is_reported(_loop(_INSIDE, _STEP, _STEP), "hang 6", "--loops --ranks 2 --only 0  # hang")


def test_a_subset_of_a_loop_can_be_run_again() -> None:
    case = draw_loop(7, 2)
    assert replace(case, program=case.program[:1]).statements == case.program[0]
