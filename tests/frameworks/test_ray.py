"""Ray Train on a cluster of two nodes, next to the same job under torchrun: restarts with as many and fewer workers."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.frameworks.job import assert_equal
from tests.frameworks.run_ray import end_of, run_cases, run_example, under_torchrun

pytest.importorskip("ray.train")

from tests.frameworks.ray_job import EVERY, STEPS

FIRST = (EVERY, 2 * EVERY)
"""Where the second attempt begins: Ray may not have taken note of the last report when a worker dies."""
DDP = "DistributedDataParallel"


def test_runs_end_with_the_bits_of_torchrun(tmp_path: Path) -> None:
    cases = ["killed-1", "killed-2", "removed-2"]
    run_cases(tmp_path, cases)
    for case in cases:
        how, _, stage = case.partition("-")
        attempts = [json.loads(line) for line in (tmp_path / case / "attempts").read_text().splitlines()]
        workers = 3 if how == "killed" else 2
        assert [(ranks, model) for ranks, _, model in attempts] == [(3, DDP), (workers, DDP)]
        (begins, first) = (first for _, first, _ in attempts)
        assert begins == 0
        assert first in FIRST
        reference = tmp_path / f"torchrun-{case}"
        reference.mkdir()
        # also where as many workers go on: DDP's first buckets, after a restart, add up three ranks in another order
        under_torchrun(reference, 3, int(stage), first - 1)
        under_torchrun(reference, workers, int(stage), STEPS - 1)
        assert_equal(end_of(reference), end_of(tmp_path / case), case)
        seen: dict[str, Any] = json.loads((tmp_path / case / "result").read_text())
        assert seen["kept"] == [f"step-{step:08d}" for step in (STEPS - 1 - EVERY, STEPS - 1)]
        assert seen["checkpoint"].endswith(seen["kept"][-1])
        assert seen["metrics"]["step"] == STEPS - 1


def test_a_single_worker_has_the_bits_of_one_rank(tmp_path: Path) -> None:
    run_cases(tmp_path, ["alone-2"])
    reference = tmp_path / "torchrun"
    reference.mkdir()
    under_torchrun(reference, 1, 2, STEPS - 1)
    assert_equal(end_of(reference), end_of(tmp_path / "alone-2"), "one worker")


def test_the_example_continues_with_another_number_of_workers(tmp_path: Path) -> None:
    first = run_example(tmp_path, "--workers", "2", "--steps", "50")
    assert "'step': 49, 'first': 0" in first, first
    again = run_example(tmp_path, "--workers", "1", "--steps", "100")
    assert "'step': 99, 'first': 50" in again, again
