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


MODES: list[Callable[..., ZeroRedundancyOptimizer]] = [_standalone, _packed, _overlapped, _interleaved]


def _equal_on_a_gpu(setup: Setup, backend: str) -> None:
    device = torch.device("cuda", 0)
    group = dist.new_group(list(range(setup.world_size)), backend=backend)
    for build in MODES:
        for options in OPTIONS:
            wrap = {"process_group": group, "bucket_cap_mb": 0.0015}
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


@pytest.mark.parametrize(("backend", "world_size"), [("gloo", 2), ("nccl", 1)])
def test_equal_on_a_gpu(backend: str, world_size: int) -> None:
    run_ranks(_equal_on_a_gpu, world_size, backend)
