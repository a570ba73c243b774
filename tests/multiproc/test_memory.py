"""What stays in memory: resident bytes with the C library's default settings, and objects after a model is dropped."""

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from ddp_zero import shard_optimizer
from tests.multiproc.harness import Setup, run_ranks

MIB = 1 << 20
LAYERS, WIDTH = 128, 512  # 128 MiB of parameters


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _grows_by(setup: Setup, stage: int) -> int:
    """Bytes above what the model alone needs, after a few steps; stage 0 is DDP with the plain optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
    before = resident()
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=4)
    opt = shard_optimizer(ddp, SGD, stage=stage, lr=0.1) if stage else SGD(ddp.parameters(), lr=0.1)
    for _ in range(5):
        ddp(torch.randn(2, WIDTH)).sum().backward()
        opt.step()
        opt.zero_grad()
    return resident() - before


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
def test_what_the_first_iterations_of_stage_2_need_goes_back_to_the_system() -> None:
    """At first whole gradients are kept, and parameters move: 2 x 128 MiB. glibc would keep nearly all of that."""
    plain = max(run_ranks(_grows_by, 2, 0))
    sharded = max(run_ranks(_grows_by, 2, 2))
    assert sharded < plain - 80 * MIB, f"{sharded / MIB:.0f} MiB, DDP {plain / MIB:.0f}"


def _leaves_nothing(setup: Setup) -> None:
    def train(stage: int, **options: Any) -> None:
        ddp = DistributedDataParallel(nn.Linear(8, 8), gradient_as_bucket_view=True)
        opt = shard_optimizer(ddp, SGD, stage=stage, lr=0.1, **options) if stage else SGD(ddp.parameters(), lr=0.1)
        for _ in range(4):
            ddp(torch.randn(2, 8)).sum().backward()
            opt.step()
            opt.zero_grad()

    train(0)  # what torch builds once
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    waits: dict[str, Any] = {"overlap": False}
    for stage, options in ((1, {}), (2, {}), (1, waits), (2, waits), (2, {"sync": "forward"})):
        train(stage, **options)
        gc.collect()
        kinds = sorted({f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.garbage})
        assert kinds == [], f"stage {stage} {options}: left to the garbage collector"


def test_a_model_and_its_optimizer_form_no_cycle() -> None:
    """A cycle keeps the process group alive: its threads race with the end of the interpreter, and some exits abort."""
    run_ranks(_leaves_nothing, 1)


def _advice(setup: Setup) -> list[str]:
    lines = []
    for cap in (25, 4):
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(64)])
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=cap)
        opt = shard_optimizer(ddp, SGD, stage=2, lr=0.1)
        for _ in range(3):
            ddp(torch.randn(2, WIDTH)).sum().backward()
            opt.step()
            opt.zero_grad()
        lines.append(next(line for line in opt.explain().splitlines() if line.startswith("gradients")))
    return lines


def test_explain_says_what_smaller_buckets_would_save() -> None:
    (large, small), *_ = run_ranks(_advice, 2)
    saved = 3 * (25 - 4) * MIB
    assert f"by formula 3 x {25 * MIB:,}; DistributedDataParallel(bucket_cap_mb=4) would save up to {saved:,}" in large
    assert "would save" not in small
