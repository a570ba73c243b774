"""What `ddp_zero.estimate` says of a model without memory, beside the bytes that ranks then hold."""

import re
from collections.abc import Iterator
from itertools import cycle, pairwise, product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from ddp_zero import ZeroRedundancyOptimizer, estimate, shard_optimizer
from ddp_zero.values.placeholders import on_this_rank
from tests import internals
from tests.multiproc.estimated_models import KINDS
from tests.multiproc.harness import Cases, Setup
from tests.multiproc.two_memories import pipeline_of, taken_for_a_device

case = Cases()

CAP = 0.25  # MiB
MODES: dict[str, dict[str, Any]] = {
    "stage 1": {"overlap": False},
    "stage 1, inside backward": {},
    "stage 2, inside backward": {"stage": 2},
    "stage 2, after backward": {"stage": 2, "overlap": False},
}


def build(dtype: torch.dtype) -> nn.Module:
    """Layers that differ in size, 1.4 MiB in fp32."""
    torch.manual_seed(0)
    widths = (96, 160, 160, 256, 192, 320, 224, 256, 64, 8)
    return nn.Sequential(*[nn.Linear(*pair) for pair in pairwise(widths)]).to(dtype)


def trained(
    setup: Setup, dtype: torch.dtype, **options: Any
) -> tuple[DistributedDataParallel, ZeroRedundancyOptimizer]:
    """After three steps and one backward pass more, where gradients wait for the step."""
    ddp = DistributedDataParallel(build(dtype), gradient_as_bucket_view=True, bucket_cap_mb=CAP)
    opt = shard_optimizer(ddp, AdamW, lr=1e-3, **({"partition": "parameters"} | options))
    before = [param.detach().clone() for param in ddp.parameters()]
    generator = torch.Generator().manual_seed(setup.rank)
    for step in range(4):
        ddp(torch.randn(2, 96, generator=generator).to(dtype)).float().square().mean().backward()
        if step < 3 or options.get("overlap", True):
            opt.step()
            opt.zero_grad()
    assert all(not torch.equal(*pair) for pair in zip(before, ddp.parameters(), strict=True))
    return ddp, opt


def counted(ddp: DistributedDataParallel, opt: ZeroRedundancyOptimizer) -> Iterator[tuple[str, int]]:
    """Bytes that this rank holds, by part."""
    params = list(ddp.parameters())
    yield "parameters", sum(param.nbytes for param in params)
    yield "masters", sum(master.nbytes for master in opt.master_weights.values())
    states = [value for state in opt.optim.state.values() for value in state.values() if isinstance(value, Tensor)]
    yield "state", sum(value.nbytes for value in states if value.dim())  # not the number of steps
    found = [on_this_rank(param.grad) for param in params if param.grad is not None]
    yield "gradients", sum(one.nbytes for one in found if one is not None and one.numel())
    exact = internals.in_accumulation_dtype(opt, len(params))
    yield "sums in fp32", sum(one.nbytes for one in exact if one is not None)
    if match := re.search(r"to receive into, ([\d,]+) bytes in all", opt.explain()):
        yield "buckets", int(match[1].replace(",", ""))


def of_rank_with_most(counts: dict[str, int]) -> dict[str, int]:
    """The counts of the rank that holds most state and masters."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, counts)
    found: dict[str, int] = max(every, key=lambda one: (one["state"] + one.get("masters", 0), sum(one.values())))
    return found


@case(2, 3)
def _estimates_of_every_mode_are_within_five_percent(setup: Setup) -> None:
    for name, options in MODES.items():
        for partition in ("parameters", "elements"):
            ddp, opt = trained(setup, torch.float32, partition=partition, **options)
            found = of_rank_with_most(dict(counted(ddp, opt)))
            with torch.device("meta"):
                said = estimate(build(torch.float32), AdamW, ranks=setup.world_size, bucket_cap_mb=CAP, device="cpu")
            part = said[name + (", cut" if partition == "elements" else "")].device
            where = f"{name}, {partition}: {found} and {part}"
            assert found["parameters"] == part["parameters"], where
            assert found["state"] == pytest.approx(part["state"], rel=0.02), where
            if options.get("stage", 1) == 2:
                assert found["gradients"] == pytest.approx(part.get("gradients", 0), rel=0.02), where
                assert found["buckets"] == part["buckets"], where
            same = ("parameters", "state")
            total = sum(found[one] for one in same), sum(part[one] for one in same)
            assert total[0] == pytest.approx(total[1], rel=0.05), where


WAYS: list[tuple[str, dict[str, Any], torch.dtype, float]] = [
    ("stage 2, inside backward", {}, torch.float32, 25),
    ("stage 2, after backward", {"overlap": False}, torch.bfloat16, 25),
    ("stage 2, after backward", {"overlap": False, "master_weights": True}, torch.bfloat16, 0.05),
    ("stage 2, inside backward, cut", {"partition": "elements", "master_weights": True}, torch.bfloat16, 0.05),
]


@case(2, 3, few=[*zip(KINDS, cycle(WAYS), strict=False)], every=[*product(KINDS, WAYS)])
def _estimated_tensors_of_any_model_are_exact(setup: Setup, configurations: list[tuple[str, Any]]) -> None:
    """Every part of every model exactly, as bytes of tensors and of buffers that were lent."""
    parts = ("parameters", "masters", "state", "gradients", "buckets")
    for name, (mode, options, dtype, cap) in configurations:
        kind = KINDS[name]
        torch.manual_seed(0)
        model = kind.build(dtype)
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=cap)
        opt = shard_optimizer(ddp, AdamW, stage=2, lr=1e-3, **({"partition": "parameters"} | options))
        inputs = kind.batch(dtype)
        for step in range(4):
            ddp(inputs).float().square().mean().backward()
            if step < 3 or options.get("overlap", True):
                opt.step()
                opt.zero_grad()
        found = of_rank_with_most(dict(counted(ddp, opt)))
        said: dict[str, Any] = {"partition": None, "stage": 2, "ranks": setup.world_size, "bucket_cap_mb": cap}
        said |= {key: value for key, value in options.items() if key != "overlap"}
        part = estimate(model, AdamW, device="cpu", **said)[mode].device
        kept = ("sums in fp32",) if "after" in mode else ()  # elsewhere the step has dropped them
        where = f"{name}, {mode}, {dtype}, {cap} MiB: {found} and {part}"
        assert [found.get(one, 0) for one in (*parts, *kept)] == [part.get(one, 0) for one in (*parts, *kept)], where


@case(2)
def _estimated_masters_and_pinned_buffers_are_exact(setup: Setup) -> None:
    with torch.device("meta"):
        model = build(torch.bfloat16)
    said: dict[str, Any] = {"master_weights": True, "ranks": 2, "bucket_cap_mb": CAP, "partition": "parameters"}
    own: dict[str, Any] = {"master_weights": True, "stage": 2}
    ddp, opt = trained(setup, torch.bfloat16, **own)
    found = of_rank_with_most(dict(counted(ddp, opt)))
    part = estimate(model, AdamW, device="cpu", **said)["stage 2, inside backward"].device
    assert (found["masters"], found["state"]) == (part["masters"], part["state"])
    with taken_for_a_device():
        _, opt = trained(setup, torch.bfloat16, offload="cpu", **own)
    pipeline, _ = pipeline_of(opt)
    host = estimate(model, AdamW, offload="cpu", **said)["stage 2, inside backward, offload cpu"].host
    pinned = of_rank_with_most({"state": pipeline.nbytes})["state"]
    assert 0.6 * host["pinned"] <= pinned <= 1.02 * host["pinned"]


test_estimate = case.each()
