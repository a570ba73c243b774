"""A few of the fuzzer's cases about what existed before the optimizer. More: ``python -m tests.fuzz --before``."""

import pytest

from tests.fuzz.__main__ import fuzz
from tests.fuzz.before.draw import MODES, draw_before
from tests.fuzz.before.run_case import EVENTS

SEEDS, MANY_SEEDS = range(1, 9), {2: range(9, 120), 3: range(40)}


def _assert_equal(seeds: range, ranks: int) -> None:
    tally = fuzz(seeds, ranks, draws=draw_before)
    assert not tally.failures, tally.report(ranks) + "".join(outcome.text for outcome in tally.failures)
    assert tally.passed > tally.cases / 2


def test_a_handful_of_cases() -> None:
    _assert_equal(SEEDS, 2)


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", MANY_SEEDS)
def test_more_cases(ranks: int) -> None:
    _assert_equal(MANY_SEEDS[ranks], ranks)


def test_every_event_and_mode_is_drawn() -> None:
    drawn = [draw_before(seed, 2) for seed in range(1000)]
    assert {event.partition(":")[0] for one in drawn for event in one.events} == {
        *EVENTS,
        "dropped",
        "detached",
        "kept",
    }
    assert {one.mode for one in drawn} == set(MODES)
