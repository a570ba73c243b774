"""torchft in the run of all tests: stage 2 in two replica groups, of which one misses steps and is healed."""

import pytest

from tests.frameworks.job import as_a_job
from tests.multiproc.harness import Setup, run_ranks

pytest.importorskip("torchft")

from tests.frameworks.replica_groups import Recipe, equal_training


def _trains(setup: Setup) -> None:
    as_a_job(setup, _compare)


def _compare(setup: Setup) -> None:
    equal_training(setup, Recipe(2, clip=0.05), "stage 2")


def test_replica_groups_have_the_bits_of_the_plain_optimizer_in_torchft() -> None:
    run_ranks(_trains, 4, timeout=120)
