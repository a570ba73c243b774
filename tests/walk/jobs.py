"""What is walked: one training step in several modes, state and checkpoints, the DeepSpeed door. Two Gloo ranks."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from ddp_zero import ZeroRedundancyOptimizer, checkpoint, deepspeed, shard_optimizer
from tests import internals
from tests.multiproc.harness import Setup
from tests.walk.steps import Walk, walk

WIDTH = 32
FIRST_STEPS = 10  # the first eight compare options between ranks, and so does every power of two


def model(buckets: int, layers: int = 2) -> nn.Sequential:
    """So many equal layers per bucket, if DDP caps buckets at their bytes: each of two ranks owns half of them."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers * buckets)])


def ddp_model(buckets: int, layers: int = 2) -> DistributedDataParallel:
    """DDP over `model`."""
    cap = layers * WIDTH * WIDTH * 4 / 2**20
    return DistributedDataParallel(model(buckets, layers), bucket_cap_mb=cap, gradient_as_bucket_view=True)


def backward_and_step(buckets: int, **options: Any) -> tuple[Walk, Walk]:
    """Of one step in the steady state, which compares neither options nor ranks."""
    cuts = options.get("partition") == "elements"
    ddp = ddp_model(buckets, layers=3 if cuts else 2)  # of three the one in the middle is cut
    opt = shard_optimizer(ddp, AdamW, fused=True, **options)
    owners = [internals.owners_of_pieces(opt, param) for param in ddp.parameters()]
    assert [len(one) for one in owners] == ([1, 2, 1] if cuts else [1, 1]) * buckets, owners
    x = torch.randn(2, WIDTH)
    for _ in range(FIRST_STEPS):
        ddp(x).sum().backward()
        opt.step()
        opt.zero_grad()
    loss = ddp(x).sum()
    backward = walk(loss.backward)
    step = walk(opt.step)
    opt.zero_grad()
    return backward, step


def standalone_step() -> Walk:
    """`opt.step()` after plain DDP."""
    ddp = ddp_model(4)
    opt = ZeroRedundancyOptimizer(ddp.parameters(), AdamW, fused=True)
    x = torch.randn(2, WIDTH)
    for _ in range(FIRST_STEPS):
        ddp(x).sum().backward()
        opt.step()
        opt.zero_grad()
    ddp(x).sum().backward()
    return walk(opt.step)


def measure(setup: Setup) -> dict[str, Walk]:
    """All walks, on this rank."""
    walks: dict[str, Walk] = {}
    modes: dict[str, dict[str, Any]] = {
        "stage 2 interleaved": {"stage": 2},
        "stage 2 interleaved, clipped": {"stage": 2, "max_grad_norm": 1.0},
        "stage 2 interleaved, cut parameters": {"stage": 2, "partition": "elements"},
        "stage 2 interleaved, cut parameters, clipped": {"stage": 2, "partition": "elements", "max_grad_norm": 1.0},
        "stage 1 interleaved": {"stage": 1},
    }
    for name, options in modes.items():
        four, walks[f"{name}: `opt.step()` after it"] = backward_and_step(4, **options)
        five, _ = backward_and_step(5, **options)
        walks[f"{name}: backward of 4 buckets"] = four
        walks[f"{name}: a further bucket"] = five - four
    walks["`opt.step()` standalone"] = standalone_step()
    walks |= _states(setup)
    walks |= _deepspeed()
    return walks


def _states(setup: Setup) -> dict[str, Walk]:
    ddp = ddp_model(4)
    opt = shard_optimizer(ddp, AdamW, stage=2)
    x = torch.randn(2, WIDTH)
    for _ in range(4):
        ddp(x).sum().backward()
        opt.step()
        opt.zero_grad()
    folder = setup.folder / "saved"
    acts: dict[str, Callable[[], object]] = {
        "`state_dict()`": lambda: opt.state_dict(),
        "`checkpoint.save`": lambda: checkpoint.save(folder, ddp, opt, step=4),
        "`checkpoint.load`": lambda: checkpoint.load(folder, ddp, opt),
    }
    walks = {}
    for name, act in acts.items():
        dist.barrier()  # a rank that is still at its last step would be asked again
        walks[name] = walk(act)
    return walks


def _deepspeed() -> dict[str, Walk]:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 2},
    }
    made: list[Any] = []

    def build() -> None:
        plain = model(4)
        made.append(deepspeed.initialize(model=plain, model_parameters=plain.parameters(), config=config)[0])

    initialize = walk(build)
    engine, x = made[0], torch.randn(2, WIDTH)

    def iterate() -> None:
        engine.backward(engine(x).sum())
        engine.step()

    for _ in range(12):
        iterate()
    return {"`deepspeed.initialize`": initialize, "an iteration of its engine": walk(iterate)}
