"""What stays in memory: resident bytes with the C library's default settings, and objects after a model is dropped."""

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

from ddp_zero import shard_optimizer, wrap
from ddp_zero.core.local.memory import find_trim
from tests import internals
from tests.multiproc.cases import step_on
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
        step_on(opt, ddp(torch.randn(2, WIDTH)).sum())
    return resident() - before


@pytest.mark.nightly
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
def test_memory_of_the_first_iterations_of_stage_2_is_returned_to_the_system() -> None:
    """Parameters move into flat storage: 128 MiB, of which glibc would keep nearly all."""
    plain = max(run_ranks(_grows_by, 2, 0))
    sharded = max(run_ranks(_grows_by, 2, 2))
    assert sharded < plain - 80 * MIB, f"{sharded / MIB:.0f} MiB, DDP {plain / MIB:.0f}"


def _left_in_the_heap(setup: Setup) -> int:
    """Bytes that glibc keeps after a few steps, of which the first has waited with a shard of all gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(LAYERS // 4)])
    ddp, opt = wrap(model, SGD, stage=2, lr=0.1)
    for _ in range(5):
        step_on(opt, ddp(torch.randn(2, 1024)).sum())
    before = resident()
    trim = find_trim()
    assert trim is not None, "asked first"
    trim(0)
    return before - resident()


@pytest.mark.nightly
@pytest.mark.skipif(find_trim() is None, reason="needs glibc")
def test_the_sums_of_the_first_step_do_not_stay_in_the_heap() -> None:
    """64 MiB on each rank; before they were returned, 52 to 71 MiB stayed."""
    left = sum(run_ranks(_left_in_the_heap, 2)) / 2
    assert left < 45 * MIB, f"{left / MIB:.0f} MiB"


def most_since_reset() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def _peaks(setup: Setup, build: Any) -> tuple[int, int]:
    """The peaks of resident memory in the first two steps, and after, above what there was before the model."""

    def reset_peak() -> None:
        Path("/proc/self/clear_refs").write_text("5")

    before = resident()
    reset_peak()
    torch.manual_seed(0)
    ddp, opt = build(nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS // 2)]))
    torch.manual_seed(1 + setup.rank)
    initial = [param.detach().sum().item() for param in ddp.parameters()]
    first = 0
    for step in range(4):
        if step == 2:
            first = most_since_reset() - before
            reset_peak()
        step_on(opt, ddp(torch.randn(2, WIDTH)).sum())
    later = most_since_reset() - before
    final = [param.detach().sum().item() for param in ddp.parameters()]
    assert all(now != was for now, was in zip(final, initial, strict=True)), "every parameter has moved"
    return first, later


def _wrapped(model: nn.Module) -> Any:
    return wrap(model, AdamW, stage=2, lr=1e-3, fused=True)


def _of_stock_ddp(model: nn.Module) -> Any:
    ddp = DistributedDataParallel(model)
    return ddp, shard_optimizer(ddp, AdamW, stage=2, lr=1e-3, fused=True)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
@pytest.mark.parametrize(
    "build", [pytest.param(_wrapped, id="wrap", marks=pytest.mark.nightly), pytest.param(_of_stock_ddp, id="stock DDP")]
)
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_the_first_iteration_needs_no_more_than_its_shard_of_gradients_on_top(world_size: int, build: Any) -> None:
    """64 MiB of parameters; whole gradients would be as much, a second copy of parameters as well.

    The first step waits for all sums; later steps take each bucket as its sum arrives. Peaks differ by up to 16 MiB
    from run to run, with what happens to be in flight at once.
    """
    shard = 64 * MIB // world_size
    for first, later in run_ranks(_peaks, world_size, build):
        assert first < later + shard + 16 * MIB, f"{first / MIB:.0f} MiB, later {later / MIB:.0f}"


def _leaves_nothing(setup: Setup) -> None:
    def train(stage: int, **options: Any) -> None:
        ddp = DistributedDataParallel(nn.Linear(8, 8), gradient_as_bucket_view=True)
        opt = shard_optimizer(ddp, SGD, stage=stage, lr=0.1, **options) if stage else SGD(ddp.parameters(), lr=0.1)
        for _ in range(4):
            step_on(opt, ddp(torch.randn(2, 8)).sum())

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


def _idle(opt: Any) -> tuple[int, int]:
    """Bytes of buffers that wait for the next backward pass, and how many of them are not in memory now."""
    buffers = [buffer.memory for buffer in internals.buffers_of(opt)]
    before = resident()
    for buffer in buffers:
        buffer.fill_(1)
    return sum(buffer.numel() for buffer in buffers), resident() - before


def _buffers(setup: Setup) -> list[tuple[str, tuple[int, int]]]:
    found = []
    for cap in (25, 4):
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(64)])
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=cap)
        opt = shard_optimizer(ddp, SGD, stage=2, lr=0.1)
        for _ in range(3):
            step_on(opt, ddp(torch.randn(2, WIDTH)).sum())
        found.append((next(line for line in opt.explain().splitlines() if line.startswith("gradients")), _idle(opt)))
    return found


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
def test_large_buffers_stay_in_memory_and_small_ones_leave_it_as_explain_says() -> None:
    """Of 64 MiB of gradients: buffers of 25 MiB stay in memory between iterations, those of 4 MiB do not."""
    ((large, (kept, touched_large)), (small, (idle, touched_small))), *_ = run_ranks(_buffers, 2)
    assert idle >= 2 * 4 * MIB, "two scratches wait, and what is received into"
    assert touched_small > 0.9 * idle, f"{touched_small / MIB:.1f} of {idle / MIB:.1f} MiB came back when touched"
    assert touched_large < 0.5 * kept, f"{touched_large / MIB:.1f} of {kept / MIB:.1f} MiB were not in memory"
    assert f"for buckets of at most {25 * MIB:,}" in large
    assert f"for buckets of at most {4 * MIB:,}" in small
