"""Stage 2 in a job of one process: what its buffers are, and when they are kept and dropped."""

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from ddp_zero import estimate, shard_optimizer
from ddp_zero.core.backward.scratch_buffers import Buffer
from ddp_zero.optimizer import shard_of
from tests.internals import buffers_of, reduce_context_of


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize("overlap", [True, False])
def test_two_scratches_serve_any_number_of_buckets_and_come_back(overlap: bool) -> None:
    layers = nn.Sequential(*[nn.Linear(32, 32, bias=False) for _ in range(8)])
    ddp = DistributedDataParallel(layers, gradient_as_bucket_view=True, bucket_cap_mb=1e-3)
    opt = shard_optimizer(ddp, SGD, stage=2, lr=0.1, overlap=overlap)
    ends: list[tuple[int, int]] = []
    for _ in range(4):
        ddp(torch.ones(2, 32)).sum().backward()
        opt.step()
        opt.zero_grad()
        context = reduce_context_of(opt)
        ends.append((context.nbytes, context.most_bytes))
    buckets = shard_of(opt).plan.buckets
    assert len(buckets) >= 4
    largest = 4 * max(bucket.segments[0].numel for bucket in buckets)
    assert all(held <= 2 * largest for held, _ in ends[1:])
    assert len(set(ends[1:])) == 1, "no buffer is lost from iteration to iteration"
    assert "at most 2 scratch buffers" in reduce_context_of(opt).describe()[0]


@pytest.mark.usefixtures("job")
def test_buffers_are_as_estimated_where_one_bucket_is_much_larger() -> None:
    widths = [32, 8, 16, 4, 16, 12]  # reduced from the last layer on: 768, 256, 256, 512 and 1,024 bytes
    layers = nn.Sequential(*[nn.Linear(*pair, bias=False) for pair in pairwise(widths)])
    estimated = estimate(layers, SGD, ranks=1, stage=2, partition="parameters", bucket_cap_mb=1e-6)
    ddp = DistributedDataParallel(layers, bucket_cap_mb=1e-6)
    opt = shard_optimizer(ddp, SGD, stage=2, lr=0.1)
    for _ in range(4):
        ddp(torch.ones(2, 32)).sum().backward()
        opt.step()
        opt.zero_grad()
    most = reduce_context_of(opt).most_bytes
    assert estimated["stage 2, inside backward"].device["buckets"] == most == 1024 + 512


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize(("num_layers", "rests"), [(8, 2), (3, 0)])
def test_pages_of_idle_buffers_go_unless_they_are_large_beside_the_model(
    num_layers: int, rests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = nn.Sequential(*[nn.Linear(32, 32, bias=False) for _ in range(num_layers)])
    ddp = DistributedDataParallel(layers, bucket_cap_mb=1e-3)
    opt = shard_optimizer(ddp, SGD, stage=2, lr=0.1, overlap=False)
    ended: list[bool] = []
    monkeypatch.setattr(Buffer, "rest", lambda _: ended.append(True))
    ddp(torch.ones(2, 32)).sum().backward()
    assert len(ended) == rests
    opt.step()


@pytest.mark.usefixtures("job")
def test_a_reset_leaves_buffers_to_peers_that_may_still_read_them() -> None:
    ddp = DistributedDataParallel(nn.Linear(4, 8), bucket_cap_mb=1e-4)
    opt = shard_optimizer(ddp, SGD, stage=2, lr=0.1, overlap=False)
    ddp(torch.ones(5, 4)).sum().backward()
    before = [buffer.memory for buffer in buffers_of(opt)]
    assert before
    opt.reset()
    opt.zero_grad()
    ddp(torch.ones(5, 4)).sum().backward()
    after = [buffer.memory for buffer in buffers_of(opt)]
    assert after
    assert not any(one is other for one in before for other in after)
