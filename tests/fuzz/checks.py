"""What the tests of all fuzzers ask: that cases pass, are drawn alike, and that a rank that hangs is reported."""

import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from tests.fuzz.__main__ import Tally, fuzz
from tests.fuzz.draw import draw
from tests.fuzz.pool import Pool


def assert_none_fails(
    seeds: Sequence[int], ranks: int, draws: Any = draw, *, least_passed: float = 0.5, least_compared: int = 0
) -> None:
    """No case of these seeds fails; this share of them passes, and each compares so many steps on average."""
    tally = fuzz(seeds, ranks, draws=draws)
    assert not tally.failures, tally.report(ranks) + "".join(outcome.text for outcome in tally.failures)
    assert tally.cases == len(seeds)
    assert tally.passed >= least_passed * tally.cases
    assert tally.compared >= least_compared * tally.cases


def assert_drawn_alike(draws: Any, *ranks: int) -> None:
    """Cases differ, and another process draws the same without torch."""
    told = [str(draws(seed, size)) for seed in range(50) for size in ranks]
    script = (
        f"import sys; from {draws.__module__} import {draws.__name__} as draws\n"
        f"print('\\0'.join(str(draws(seed, size)) for seed in range(50) for size in {ranks}), end='')\n"
        "assert 'torch' not in sys.modules"
    )
    again = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert again.stdout.split("\0") == told
    assert len(set(told)) == len(told)


def assert_hang_is_reported(case: Any, injects: str, told: str) -> None:
    """A rank of two that hangs, as told to, is a failure, and the report says how to run the case again."""
    with Pool(2, timeout=10.0, injects=injects) as pool:
        outcome = pool.run(case)
    assert (outcome.verdict, outcome.kind) == ("failed", "hang")
    tally = Tally()
    tally.add(outcome)
    assert told in tally.report(2)
