"""On a GPU: two Gloo ranks sharing it, and one NCCL rank. Skipped without one."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_zero import ZeroRedundancyOptimizer
from tests.multiproc.cases import assert_equal_models, assert_identical, batches, build_model
from tests.multiproc.harness import Setup, run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def _equal_on_a_gpu(setup: Setup, backend: str) -> None:
    device = torch.device("cuda", 0)
    group = dist.new_group(list(range(setup.world_size)), backend=backend)
    for fused in (False, True):
        for as_views in (False, True):
            plain_model, model = (
                DistributedDataParallel(build_model().to(device), process_group=group) for _ in range(2)
            )
            plain = torch.optim.AdamW(plain_model.parameters(), lr=0.01, fused=fused)
            opt = ZeroRedundancyOptimizer(
                model.parameters(),
                torch.optim.AdamW,
                process_group=group,
                parameters_as_bucket_view=as_views,
                lr=0.01,
                fused=fused,
            )
            for inputs, targets in batches(setup.rank, 10):
                for ddp, optimizer in ((plain_model, plain), (model, opt)):
                    optimizer.zero_grad()
                    nn.functional.mse_loss(ddp(inputs.to(device)), targets.to(device)).backward()
                    optimizer.step()
                assert_equal_models(plain_model, model, f"fused {fused}, views {as_views}")
            opt.consolidate_state_dict(to=0)
            if setup.rank == 0:
                assert_identical(plain.state_dict(), opt.state_dict(), "state dict")


@pytest.mark.parametrize(("backend", "world_size"), [("gloo", 2), ("nccl", 1)])
def test_equal_on_a_gpu(backend: str, world_size: int) -> None:
    run_ranks(_equal_on_a_gpu, world_size, backend)
