"""Ray Train in the run of all tests: two workers in stage 2, next to two ranks of torchrun."""

from pathlib import Path

import pytest

from tests.frameworks.job import assert_equal
from tests.frameworks.run_ray import end_of, run_cases, under_torchrun

pytest.importorskip("ray.train")

from tests.frameworks.ray_job import SMALL_STEPS


def test_two_workers_of_ray_have_the_bits_of_two_ranks_of_torchrun(tmp_path: Path) -> None:
    run_cases(tmp_path, ["small-2"])
    reference = tmp_path / "torchrun"
    reference.mkdir()
    under_torchrun(reference, 2, 2, SMALL_STEPS - 1)
    assert_equal(end_of(reference), end_of(tmp_path / "small-2"), "two workers")
