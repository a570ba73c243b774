"""A handful of fuzzed cases, and that the fuzzer finds what is wrong. Thousands: ``python -m tests.fuzz``."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.fuzz.__main__ import Tally
from tests.fuzz.case import LATE_VALUES, Case, Ddp, Do, Fault, Loop, Mode, Model, Optim, Train
from tests.fuzz.checks import assert_drawn_alike, assert_none_fails
from tests.fuzz.draw import MATRICES_ONLY, OPTIMIZERS, draw
from tests.fuzz.late_values import may_raise, must_raise
from tests.fuzz.operations import OPERATIONS
from tests.fuzz.pool import Pool
from tests.multiproc import cases

SEEDS = {2: range(8), 3: range(3)}
MANY_SEEDS = {2: range(8, 200), 3: range(3, 60)}
_SIMPLE = replace(draw(7, 2), mode=Mode(overlap=True), program=(Train(),) * 5)


@pytest.mark.parametrize("ranks", SEEDS)
def test_random_programs_equal_ddp(ranks: int) -> None:
    assert_none_fails(SEEDS[ranks], ranks, least_compared=4)


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", MANY_SEEDS)
def test_more_random_programs_equal_ddp(ranks: int) -> None:
    assert_none_fails(MANY_SEEDS[ranks], ranks, least_compared=4)


@pytest.mark.nightly
def test_parts_compiled_while_parameters_are_on_their_way_equal_ddp() -> None:
    assert_none_fails([3_100_103], 3, least_passed=1.0)


def test_cases_are_drawn_without_torch_and_always_alike() -> None:
    assert_drawn_alike(draw, 2, 3)


def test_every_optimizer_is_drawn() -> None:
    assert set(OPTIMIZERS) == {case.name for case in cases.OPTIMIZERS}
    assert set(MATRICES_ONLY) == {case.name for case in cases.OPTIMIZERS if case.matrices_only}
    assert {draw(seed, 2).optim.name for seed in range(2000)} >= set(OPTIMIZERS)


def test_every_operation_and_option_is_drawn() -> None:
    drawn, partitions = [draw(seed, 4) for seed in range(3000)], ("parameters", "elements", "auto")
    names = {op.name for one in drawn for op in one.program if isinstance(op, Do)}
    assert names == OPERATIONS
    restarts = {op.args for one in drawn for op in one.program if isinstance(op, Do) and op.name == "restart"}
    assert restarts >= {
        (partition, ranks) for partition in ("parameters", "elements", "auto") for ranks in (1, 2, 3, 4)
    }
    assert {one.mode.via for one in drawn} == {"shard_optimizer", "hooks", "attach"}
    in_groups = {(one.mode.stage, one.mode.partition) for one in drawn if one.mode.shard_ranks in (1, 2)}
    assert in_groups == {(stage, name) for stage in (1, 2) for name in partitions}
    seconds = [one.optim.second for one in drawn if one.optim.second is not None]
    assert {(second.is_sharded, second.zero) for second in seconds} >= {
        (True, "each"),
        (True, "first"),
        (False, "model"),
    }
    assert any(one.mode.masters and one.mode.stage == 2 and _accumulates(one) for one in drawn)
    uneven = {(one.mode.stage, one.mode.overlap) for one in drawn if _leaves_out_under_join(one)}
    assert uneven == {(stage, overlap) for stage in (1, 2) for overlap in (False, True)}
    unused = [op for one in drawn if one.ddp.find_unused_parameters for op in one.program if isinstance(op, Train)]
    assert all(op.steps for op in unused if op.passes[-1] == "no_sync"), "DDP would fail in a later pass on some ranks"
    late = [one.model.late_value for one in drawn if one.model.late_value is not None]
    assert set(late) == {(kind, place) for kind in LATE_VALUES for place in ("input", "first")}
    assert 0.05 < len(late) / len(drawn) < 0.12


def _accumulates(one: Case) -> bool:
    return any(isinstance(op, Train) and "accumulate" in op.passes for op in one.program)


def _leaves_out_under_join(one: Case) -> bool:
    return any(isinstance(op, Do) and op.name == "join_unused" for op in one.program)


def test_a_learning_rate_that_is_off_by_an_ulp_is_found() -> None:
    tally = Tally()
    with Pool(2, injects="lr") as pool:
        tally.add(pool.run(_SIMPLE))
        tally.add(pool.run(replace(_SIMPLE, mode=Mode(stage=2, overlap=True), ddp=_views(_SIMPLE))))
    assert [outcome.kind for outcome in tally.failures] == ["difference", "difference"]
    assert "differences: 2" in tally.report(2)


@pytest.mark.parametrize("overlap", [False, True])
def test_norms_of_stage_2_after_a_change_of_memory_format_equal_ddp(overlap: bool) -> None:
    """Found at seed 602136: plain DDP's views keep the old strides, in which norms add up otherwise."""
    model = Model(kind="conv", widths=(3, 5, 7, 3), norm="batch")
    program = (*(Train(),) * 3, Do("memory_format", (0,)), *(Train(),) * 6)
    case = replace(_SIMPLE, model=model, ddp=_views(_SIMPLE), optim=Optim("AdamW foreach"), program=program)
    with Pool(2) as pool:
        for mode, loop in ((Mode(max_grad_norm=0.3), Loop()), (Mode(), Loop(clip="own", clip_norm=0.3))):
            outcome = pool.run(replace(case, mode=replace(mode, stage=2, overlap=overlap), loop=loop))
            assert outcome.verdict == "passed", outcome.text


_MODES = [Mode(stage=stage, overlap=True, interleaved=interleaved) for stage in (1, 2) for interleaved in (False, True)]
_REFUSED = ("refused", "late value: RuntimeError")


def _with_late_value(kind: str, place: str, mode: Mode) -> Case:
    ddp = Ddp(bucket_cap_mb=0.0001, caps_first=True, gradient_as_bucket_view=True)
    model = Model(widths=(8, 9, 9, 9, 9, 3), late_value=(kind, place))
    return replace(_SIMPLE, model=model, ddp=ddp, mode=mode)


def test_late_values_raise_only_where_a_step_comes_before() -> None:
    with Pool(2) as pool:
        inner = [pool.run(_with_late_value("saved", "first", mode)) for mode in _MODES]
        asked = [pool.run(_with_late_value("saved", "input", mode)) for mode in (*_MODES, Mode(), Mode(stage=2))]
        others = [pool.run(_with_late_value(kind, "first", _MODES[2])) for kind in LATE_VALUES]
    by_mode = [("passed", ""), _REFUSED] * 2
    assert [(one.verdict, one.kind) for one in inner] == by_mode, inner
    assert [(one.verdict, one.kind) for one in asked] == [_REFUSED] * 4 + [("passed", "")] * 2, asked
    assert [one.verdict for one in others] == ["passed"] * len(LATE_VALUES), others


def test_a_late_value_that_torch_does_not_check_is_found() -> None:
    with Pool(2) as pool:
        found = [pool.run(_with_late_value(kind, "first", _MODES[3])) for kind in ("hook", "reentrant")]
    assert [(one.verdict, one.kind) for one in found] == [("failed", "difference")] * 2, found


def test_the_order_of_a_plain_pass_tells_whether_a_late_value_raises() -> None:
    first, last, other = (nn.Parameter(torch.zeros(1)) for _ in range(3))
    before, inner, after = [other, None, last, first], [last, other, None, first], [last, other, first, None]
    for events, may in ((before, (False, False)), (inner, (True, False)), (after, (True, True))):
        told = [may_raise(events, last, [first, last], interleaved) for interleaved in (True, False)]
        assert (*told, must_raise(events, last)) == (*may, events is after)
    assert may_raise([last, None, other], last, [first, last], interleaved=False), "of another optimizer"
    assert not may_raise(after, last, [first, other], interleaved=True), "no optimizer steps it"


@pytest.mark.nightly
def test_a_rank_that_hangs_is_reported_and_replaced() -> None:
    with Pool(2, timeout=10.0, injects="hang 2") as pool:
        outcome = pool.run(_SIMPLE)
        assert (outcome.verdict, outcome.kind) == ("failed", "hang")
        assert "in _run" in outcome.text  # the stacks of the ranks
        tally = Tally()
        tally.add(outcome)
        assert "hangs: 1" in tally.report(2)
        assert pool.run(replace(_SIMPLE, program=(Train(),) * 2)).verdict == "passed"


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["raise", "kill", "stop"])
def test_a_rank_that_fails_is_noticed_by_the_others(how: str) -> None:
    fault = Fault(how=how, rank=1, at=3, where="backward")
    with Pool(2) as pool:
        outcome = pool.run(replace(_SIMPLE, program=(Train(),) * 6, fault=fault))
    assert (outcome.verdict, outcome.kind) == ("refused", "a rank failed"), outcome.text


def _views(case: Case) -> Ddp:
    return replace(case.ddp, gradient_as_bucket_view=True)
