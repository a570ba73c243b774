"""What newer versions of torch add to DDP: the same numbers in every mode, or refused by name."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from ddp_zero import ZeroRedundancyOptimizer, shard_optimizer
from ddp_zero.core.ddp.reducer import ddp_takes
from tests.multiproc.cases import (
    Twins,
    assert_equal_models,
    at_stage,
    batches,
    build_model,
    build_overlapped_twins,
    build_twins,
    loss_of,
    optimizer_case,
)
from tests.multiproc.harness import Cases, Setup
from tests.multiproc.overlap_loops import one_epoch

case = Cases(group_timeout=30)

ADAMW, MOMENTUM = optimizer_case("AdamW foreach"), optimizer_case("SGD momentum")
DDP_OPTIONS: list[dict[str, Any]] = [
    {name: True} for name in ("lazy_bucket_allocation", "batched_grad_copy") if ddp_takes(name)
]
if len(DDP_OPTIONS) == 2:
    DDP_OPTIONS.append(DDP_OPTIONS[0] | DDP_OPTIONS[1])
HAS_MANUAL = hasattr(DistributedDataParallel, "require_manual_backward_finalization")
GRAPHS: list[dict[str, Any]] = [{}, {"find_unused_parameters": True}, {"static_graph": True}]


def every_mode(**ddp_options: Any) -> dict[str, Callable[[], Twins]]:
    def overlapped(stage: int, **options: Any) -> Callable[[], Twins]:
        def build() -> Twins:
            with at_stage(stage):
                return build_overlapped_twins(ADAMW, 2, **options, **ddp_options)

        return build

    return {
        "stage 1, interleaved, as views": overlapped(1, interleaved=True, gradient_as_bucket_view=True),
        "stage 2": overlapped(2),
        "stage 2, interleaved": overlapped(2, interleaved=True),
        "stage 2, not overlapped": overlapped(2, overlap=False),
        "stage 2, clipped": overlapped(2, zero_options={"max_grad_norm": 1e9}),
    }


@case(2)
def _every_mode_equals_ddp_with_its_options(setup: Setup) -> None:
    for options, graph in product(DDP_OPTIONS, GRAPHS):
        for name, build in every_mode(**options, **graph).items():
            twins = build()
            try:
                twins.train(setup, 4)
                twins.assert_moved()
            except Exception as error:
                raise AssertionError(f"{name}, {options}, {graph}: {error}") from error


@case(3)
def _stage_2_at_three_ranks_equals_ddp_with_its_options(setup: Setup) -> None:
    """In stage 1 with a hook last bits differ: see docs/numerics.md."""
    for options in DDP_OPTIONS:
        for name, build in every_mode(**options).items():
            if name.startswith("stage 2"):
                twins = build()
                twins.train(setup, 4)
                twins.assert_moved()
        twins = build_twins(MOMENTUM)
        twins.wrap_again(**options)
        twins.train(setup, 4)
        twins.assert_moved()


@case(2)
def _join_with_ddp_options_equals_ddp(setup: Setup) -> None:
    for options in DDP_OPTIONS:
        for stage in (1, 2):
            with at_stage(stage):
                twins = build_overlapped_twins(MOMENTUM, 2, interleaved=True, **options)
            one_epoch(setup, twins, 3 + 2 * setup.rank, seed=0, calls_step=True, scheduled=False)
            twins.assert_equal(f"stage {stage}, {options}")
            twins.assert_moved()


@case(*([2] if HAS_MANUAL else []))
def _require_manual_backward_finalization_equals_ddp(setup: Setup) -> None:
    plain_model = DistributedDataParallel(build_model(), gradient_as_bucket_view=True)
    model = DistributedDataParallel(build_model(), gradient_as_bucket_view=True)
    before = [param.detach().clone() for param in model.parameters()]
    plain = torch.optim.AdamW(plain_model.parameters(), lr=0.1)
    opt = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    for one in (plain_model, model):
        one.require_manual_backward_finalization = True  # type: ignore[assignment]
    for inputs, targets in batches(setup.rank, 4):
        for one, optimizer in ((plain_model, plain), (model, opt)):
            optimizer.zero_grad()
            loss_of(one, inputs, targets).backward()
            one.finalize_backward()  # type: ignore[operator]
            optimizer.step()
        assert_equal_models(plain_model, model, "finalized by hand")
    assert not any(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    for stage in (1, 2):
        with pytest.raises(NotImplementedError, match="does not support require_manual_backward_finalization=True"):
            shard_optimizer(model, torch.optim.AdamW, stage=stage, lr=0.1)
        later = DistributedDataParallel(build_model(), gradient_as_bucket_view=True)
        kept = shard_optimizer(later, torch.optim.AdamW, stage=stage, lr=0.1)
        later.require_manual_backward_finalization = True  # type: ignore[assignment]
        with pytest.raises(NotImplementedError, match="does not support require_manual_backward_finalization=True"):
            loss_of(later, *next(batches(setup.rank, 1))).backward()
        del kept


test_ddp_options = case.each()
