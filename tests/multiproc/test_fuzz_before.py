"""A few of the fuzzer's cases about what existed before the optimizer. More: ``python -m tests.fuzz --before``."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest

from tests.fuzz.before.case import BeforeCase
from tests.fuzz.before.draw import MODES, draw_before
from tests.fuzz.before.run_case import EVENTS
from tests.fuzz.case import LATE_VALUES
from tests.fuzz.checks import assert_drawn_alike, assert_none_fails

SEEDS, MANY_SEEDS = range(1, 9), {2: range(9, 120), 3: (*range(40), 4_100_036, 6_400_040, 6_400_068)}
FOUND = (256, 408, 409, 474, 575, 4_000_080, 5_300_090, 5_300_188, 7_100_404)
"""Seeds that have failed: reducers that were kept, static graphs, a pass that was interrupted."""


def test_drawn_and_once_failing_cases_train_as_plain_ddp() -> None:
    assert_none_fails((*SEEDS, *FOUND), 2, draw_before)


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", MANY_SEEDS)
def test_more_drawn_cases_train_as_plain_ddp(ranks: int) -> None:
    assert_none_fails(MANY_SEEDS[ranks], ranks, draw_before)


def _cases(*axes: Sequence[Any]) -> list[BeforeCase]:
    """Of how and in which mode an earlier optimizer was built, what followed, and the mode; of views and a cap."""
    return [
        BeforeCase(
            seed=seed,
            ranks=2,
            views=views,
            static=False,
            unused=False,
            events=("wrap", f"{how}:{earlier}", *events),
            mode=mode,
            door=("shard_optimizer", "attach")[seed % 2],
            zeroes="after",
            cap=cap,
        )
        for seed, (how, earlier, events, mode, views, cap) in enumerate(product(*axes))
    ]


_HOWS = "kept", "detached", "dropped"
_INTERRUPTED = ("interrupted, wrapped again",)
_LEFT = [(), _INTERRUPTED, ("reduced pass", "wrap"), ("no_sync", *_INTERRUPTED), ("reduced pass", *_INTERRUPTED)]


def test_models_of_an_earlier_optimizer_after_an_interrupted_pass_train_as_plain_ddp() -> None:
    cases = _cases(_HOWS, ["1", "1 watched", "2", "2 late"], [_INTERRUPTED], ["1"], [True], [None])
    cases += _cases(["kept"], ["1 summed", "2 waiting"], [_INTERRUPTED], ["2", "1 waiting"], [True, False], [None])
    cases += _cases(["kept", "dropped"], ["1", "2"], [("reduced pass", *_INTERRUPTED)], ["1"], [True], [None])
    assert_none_fails(range(len(cases)), 2, lambda seed, _: cases[seed])


def test_four_optimizers_one_after_the_other_train_as_plain_ones() -> None:
    cases = []
    for place, (one, other) in enumerate(zip(MODES, [*MODES][1:] + [*MODES][:1], strict=True)):
        how = ("dropped", "detached")[place % 2]
        zeros = ("zeros",) if place % 3 == 0 else ()
        cases += _cases([how], [one], [(*zeros, f"{how}:{other}", *zeros, f"{how}:{one}")], [other], [True], [None])
    assert_none_fails(range(len(cases)), 2, lambda seed, _: cases[seed], least_passed=1.0)


@pytest.mark.nightly
@pytest.mark.parametrize("cap", [None, 0.02])
@pytest.mark.parametrize("mode", MODES)
def test_models_of_an_earlier_optimizer_train_as_plain_ddp(mode: str, cap: float | None) -> None:
    cases = _cases(_HOWS, list(MODES), _LEFT, [mode], [True, False], [cap])
    if cap is not None:  # DDP gets a new reducer where stage 2 leaves: its first buckets are others
        cases = [one for one in cases if "kept" in one.events[1] or ":2" not in one.events[1]]
    assert_none_fails(range(len(cases)), 2, lambda seed, _: cases[seed])


def test_cases_are_drawn_without_torch_and_always_alike() -> None:
    assert_drawn_alike(draw_before, 2, 3)


def test_every_event_and_mode_is_drawn() -> None:
    drawn = [draw_before(seed, 2) for seed in range(1000)]
    assert {event.partition(":")[0] for one in drawn for event in one.events} == {
        *EVENTS,
        "dropped",
        "detached",
        "kept",
    }
    assert {one.mode for one in drawn} == set(MODES)
    late = [one.late_value for one in drawn if one.late_value is not None]
    assert {("saved", "input"), ("tied", "input"), *((kind, "first") for kind in LATE_VALUES)} <= set(late)
