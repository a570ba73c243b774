"""On a GPU: two Gloo ranks sharing it, and one NCCL rank. Skipped without one."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_zero import ZeroRedundancyOptimizer, shard_optimizer
from tests.multiproc.cases import assert_equal_models, assert_identical, batches, build_model
from tests.multiproc.harness import Setup, run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

OPTIONS: list[dict[str, Any]] = [{}, {"fused": True}, {"foreach": True, "capturable": True}]


def _standalone(ddp: DistributedDataParallel, **options: Any) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(
        ddp.parameters(), torch.optim.AdamW, ddp.process_group, parameters_as_bucket_view=True, **options
    )


def _packed(ddp: DistributedDataParallel, **options: Any) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, ddp.process_group, **options)


def _overlapped(ddp: DistributedDataParallel, **options: Any) -> ZeroRedundancyOptimizer:
    return shard_optimizer(ddp, torch.optim.AdamW, **options)


def _interleaved(ddp: DistributedDataParallel, **options: Any) -> ZeroRedundancyOptimizer:
    return shard_optimizer(ddp, torch.optim.AdamW, interleaved=True, **options)


def _stage_2(ddp: DistributedDataParallel, **options: Any) -> ZeroRedundancyOptimizer:
    return shard_optimizer(ddp, torch.optim.AdamW, stage=2, **options)


def _stage_2_at_the_end(ddp: DistributedDataParallel, **options: Any) -> ZeroRedundancyOptimizer:
    return shard_optimizer(ddp, torch.optim.AdamW, stage=2, interleaved=False, **options)


def _stage_2_after_backward(ddp: DistributedDataParallel, **options: Any) -> ZeroRedundancyOptimizer:
    return shard_optimizer(ddp, torch.optim.AdamW, stage=2, overlap=False, **options)


MODES: list[Callable[..., ZeroRedundancyOptimizer]] = [
    *(_standalone, _packed, _overlapped, _interleaved),
    *(_stage_2, _stage_2_at_the_end, _stage_2_after_backward),
]


def _equal_on_a_gpu(setup: Setup, backend: str) -> None:
    device = torch.device("cuda", 0)
    group = dist.new_group(list(range(setup.world_size)), backend=backend)
    for build in MODES:
        for options in OPTIONS:
            wrap = {"process_group": group, "bucket_cap_mb": 0.0015, "gradient_as_bucket_view": True}
            model = build_model().to(device)
            plain_model, ddp = (DistributedDataParallel(copy.deepcopy(model), **wrap) for _ in range(2))
            plain = torch.optim.AdamW(plain_model.parameters(), lr=0.01, **options)
            opt = build(ddp, lr=0.01, **options)
            for inputs, targets in batches(setup.rank, 10):
                for one, optimizer in ((plain_model, plain), (ddp, opt)):
                    optimizer.zero_grad()
                    nn.functional.mse_loss(one(inputs.to(device)), targets.to(device)).backward()
                    optimizer.step()
                assert_equal_models(plain_model, ddp, f"{build.__name__} {options}")
            opt.consolidate_state_dict(to=0)
            if setup.rank == 0:
                assert_identical(plain.state_dict()["state"], opt.state_dict()["state"], "state")


def _memory_of_stage_2(setup: Setup) -> None:
    """From the third step on: parameters, state, three buckets, one layer's gradient on its way."""
    group = dist.new_group([0], backend="nccl")
    layer, depth = 4 * 512 * 512, 16
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(depth))).to("cuda")
    wrap = {"process_group": group, "bucket_cap_mb": 0.9, "gradient_as_bucket_view": True}
    ddp = DistributedDataParallel(model, **wrap)
    opt = shard_optimizer(ddp, torch.optim.SGD, stage=2, lr=0.01)
    for step in range(5):
        if step == 3:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        ddp(torch.randn(1, 512, device="cuda")).sum().backward()
        opt.step()
        opt.zero_grad()
    assert torch.cuda.max_memory_allocated() <= layer * (depth + 3 + 2)


def test_stage_2_holds_three_buckets_on_a_gpu() -> None:
    run_ranks(_memory_of_stage_2, 1)


@pytest.mark.parametrize(("backend", "world_size"), [("gloo", 2), ("nccl", 1)])
def test_equal_on_a_gpu(backend: str, world_size: int) -> None:
    run_ranks(_equal_on_a_gpu, world_size, backend)
