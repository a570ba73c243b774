"""fp16 on a GPU, two ranks of Gloo: a `GradScaler` with overflows, and norms of gradients of odd sizes, beside DDP."""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from ddp_zero import ZeroRedundancyOptimizer, shard_optimizer
from tests.multiproc.cases import assert_equal_models, assert_moved
from tests.multiproc.harness import Setup, run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

STEPS = 8


def build_model() -> nn.Module:
    """Reduced from the last bias on, of one element: what lies behind it begins between vectors of four."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 7), nn.ReLU(), nn.Linear(7, 1)).to("cuda")


def _trained(
    setup: Setup, group: Any, build: Callable[[DistributedDataParallel], Any], clip: float | None, *, views: bool
) -> tuple[DistributedDataParallel, list[Any]]:
    """The model, and norm, rate and scale of each step; schedules wait where the scaler calls no step."""
    model = DistributedDataParallel(build_model(), process_group=group, gradient_as_bucket_view=views)
    opt = build(model)
    calls: list[Any] = []
    opt.register_step_post_hook(lambda *_: calls.append(None))
    schedule = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)
    scaler, seen = torch.amp.GradScaler("cuda", init_scale=2.0**24, growth_interval=3), []
    for step in range(STEPS):
        inputs = torch.randn(6, 32, generator=torch.Generator().manual_seed(10 * step + setup.rank)).to("cuda")
        with torch.autocast("cuda", torch.float16):
            loss = model(inputs).float().square().mean()
        scaler.scale(loss).backward()
        norm = None
        if clip is not None:
            scaler.unscale_(opt)
            is_ours = isinstance(opt, ZeroRedundancyOptimizer)
            norm = opt.clip_grad_norm_(clip) if is_ours else nn.utils.clip_grad_norm_(model.parameters(), clip)
        before = len(calls)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        if len(calls) > before:
            schedule.step()
        seen.append((norm if norm is None else repr(norm.item()), schedule.get_last_lr(), scaler.get_scale()))
    return model, seen


def _plain(model: nn.Module, **options: Any) -> AdamW:
    return AdamW(model.parameters(), **options)


def _follows_the_plain_optimizer(setup: Setup) -> None:
    torch.cuda.set_device(0)
    group = dist.new_group(list(range(setup.world_size)), backend="cpu:gloo,cuda:gloo")
    for fused, clip in product((False, True), (None, 0.05)):
        options: dict[str, Any] = {"lr": 1e-2, "fused": fused}
        plain, expected = _trained(setup, group, partial(_plain, **options), clip, views=False)
        assert expected[-1][2] < 2.0**24, "no step has overflowed"
        assert_moved(build_model(), plain.module)
        for stage, overlap in product((1, 2), (True, False)):
            build = partial(shard_optimizer, optimizer_class=AdamW, stage=stage, overlap=overlap, **options)
            ours, seen = _trained(setup, group, build, clip, views=True)
            where = f"{fused=}, {clip=}, {stage=}, {overlap=}"
            assert seen == expected, where
            assert_equal_models(plain, ours, where)


def test_fp16_follows_the_plain_optimizer_on_a_gpu() -> None:
    run_ranks(_follows_the_plain_optimizer, 2)
