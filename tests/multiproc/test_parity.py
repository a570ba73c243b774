"""Bit for bit the numbers of DDP with the plain optimizer, at every step, with different data on every rank."""

from itertools import product

import pytest
import torch

from ddp_zero.core.step import rank_shard as binding
from tests.multiproc.cases import OPTIMIZERS, OptimizerCase, build_twins
from tests.multiproc.harness import Setup, run_ranks

SMALL_CAP = 800  # bytes: several buckets even in a small model


def _cases(is_full: bool) -> list[tuple[OptimizerCase, bool, int]]:
    """Every optimizer, in flat storage or not, in one group or two: all of them, or one of each optimizer in turn.

    The optimizer only sees its parameters and gradients, so what it computes depends neither on the number of ranks nor
    on who packs them: what it owns depends on both, which every optimizer shows alike.
    """
    kinds = list(product((False, True), (1, 2)))
    if is_full:
        return [(case, *kind) for case in OPTIMIZERS for kind in kinds]
    return [(case, *kinds[place % len(kinds)]) for place, case in enumerate(OPTIMIZERS)]


def _every_case(setup: Setup, steps: int, is_full: bool) -> int:
    cases = _cases(is_full)
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


def _assert_parity(world_size: int, is_full: bool) -> None:
    compared = run_ranks(_every_case, world_size, 16 if is_full else 6, is_full, timeout=300)
    assert compared == [len(OPTIMIZERS) * (4 if is_full else 1)] * world_size


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_optimizer_equals_ddp_with_the_plain_one(world_size: int) -> None:
    _assert_parity(world_size, is_full=False)


@pytest.mark.nightly
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_optimizer_equals_ddp_in_every_kind_of_storage_and_groups(world_size: int) -> None:
    _assert_parity(world_size, is_full=True)


def test_no_dense_optimizer_of_torch_is_left_out() -> None:
    refused = {torch.optim.Optimizer, torch.optim.LBFGS, torch.optim.SparseAdam}
    classes = {item for item in vars(torch.optim).values() if isinstance(item, type)}
    dense = {item for item in classes if issubclass(item, torch.optim.Optimizer)} - refused
    assert len(dense) >= 13
    assert dense <= {case.build for case in OPTIMIZERS}
