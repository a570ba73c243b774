"""How far a bucket walks: bounds on files, calls and calls into another file; see `python -m tests.walk`."""

import gc
import weakref

import pytest

from ddp_zero.error_codes import coded
from tests.multiproc.harness import run_ranks
from tests.walk import calls, structure
from tests.walk.jobs import measure
from tests.walk.steps import PACKAGE, Walk, walk

BOUNDS = {
    # files, calls into another file, calls
    "stage 2 interleaved: a further bucket": (10, 18, 26),
    "stage 2 interleaved, cut parameters: a further bucket": (10, 18, 28),
    "stage 2 interleaved, cut parameters, clipped: a further bucket": (11, 20, 32),
    "stage 2 interleaved, clipped: a further bucket": (10, 19, 26),
    "stage 1 interleaved: a further bucket": (11, 18, 28),
    "stage 2 interleaved: `opt.step()` after it": (15, 26, 55),
    "stage 2 interleaved: backward of 4 buckets": (37, 217, 356),
    "`opt.step()` standalone": (28, 103, 231),
    "`state_dict()`": (16, 41, 285),
    "`checkpoint.save`": (27, 302, 1853),
    "`checkpoint.load`": (35, 577, 2570),
    "`deepspeed.initialize`": (83, 720, 1474),
    "an iteration of its engine": (45, 331, 523),
}


@pytest.fixture(scope="module")
def walks() -> dict[str, Walk]:
    found: dict[str, Walk] = run_ranks(measure, 2, timeout=100.0)[0]
    return found


@pytest.mark.parametrize("name", BOUNDS)
def test_no_way_is_longer_than_it_was(walks: dict[str, Walk], name: str) -> None:
    found = walks[name]
    now = len(found.files), found.crossings.total(), found.calls.total()
    assert all(one <= most for one, most in zip(now, BOUNDS[name], strict=True)), f"{now}: {sorted(found.calls)}"


def test_finalizers_of_what_was_dropped_before_are_not_counted() -> None:
    dropped: list[object] = [Walk()]
    weakref.finalize(dropped[0], coded, "a message", "[ZERO-101]")
    dropped.append(dropped)
    del dropped
    assert not walk(gc.collect).calls


ALL_CALLS = {"cut": (43, 112, 2200), "clipped": (41, 150, 2720), "masters": (67, 136, 2640), "stage 1": (33, 121, 2050)}
"""Of Python and C functions, by mode: for a further bucket, where ``optimizer.step()`` alone would make 90; in a whole
iteration, for each bucket. Then the instructions of the interpreter in an iteration, for each bucket."""


def test_no_bucket_makes_more_calls_than_it_did() -> None:
    found = run_ranks(calls.measure, 2, list(ALL_CALLS), False, timeout=200.0)[0]
    now = {mode: counted.per_bucket() for mode, counted in found.items()}
    assert all(one <= most for mode in ALL_CALLS for one, most in zip(now[mode], ALL_CALLS[mode], strict=True)), now


@pytest.mark.nightly
def test_few_chains_of_attributes_reach_far_and_none_into_an_engine() -> None:
    trees = structure.trees()
    chains = [chain for tree in trees.values() for chain in structure.chains(tree)]
    assert 1000 * len(chains) <= structure.lines_of(list(PACKAGE.rglob("*.py"))), chains
    assert not [use for tree in trees.values() for use in structure.private_reach(tree)]
