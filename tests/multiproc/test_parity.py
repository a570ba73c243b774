"""Bit for bit the numbers of DDP with the plain optimizer, at every step, with different data on every rank."""

from itertools import product

import pytest
import torch

from ddp_zero.core.step import sharded_step as binding
from tests.multiproc.cases import OPTIMIZERS, build_twins
from tests.multiproc.harness import Setup, run_ranks

SMALL_CAP = 800  # bytes: several buckets even in a small model


def _every_case(setup: Setup, steps: int) -> int:
    cases = list(product(OPTIMIZERS, (False, True), (1, 2)))
    default_cap = binding.BUCKET_CAP_BYTES
    for case, as_views, groups in cases:
        binding.BUCKET_CAP_BYTES = SMALL_CAP if as_views is (groups == 1) else default_cap
        twins = build_twins(case, groups, parameters_as_bucket_view=as_views)
        try:
            twins.train(setup, steps)
            twins.assert_moved()
        except AssertionError as error:
            raise AssertionError(f"{case.name}, views {as_views}, {groups} groups: {error}") from error
    return len(cases)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_optimizer_equals_ddp_with_the_plain_one(world_size: int) -> None:
    compared = run_ranks(_every_case, world_size, 16, timeout=300)
    assert compared == [len(OPTIMIZERS) * 4] * world_size


def test_no_dense_optimizer_of_torch_is_left_out() -> None:
    refused = {torch.optim.Optimizer, torch.optim.LBFGS, torch.optim.SparseAdam}
    classes = {item for item in vars(torch.optim).values() if isinstance(item, type)}
    dense = {item for item in classes if issubclass(item, torch.optim.Optimizer)} - refused
    assert len(dense) >= 13
    assert dense <= {case.build for case in OPTIMIZERS}
