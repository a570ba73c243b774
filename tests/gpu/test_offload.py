"""On a GPU: state and step on the host. Skipped without one."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from benchmarks.gpu.machines import share_gpus
from ddp_zero import Offload, shard_optimizer
from tests.gpu.jobs import JOBS, keep_workspaces_small
from tests.multiproc.cases import assert_equal_models, batches, build_model
from tests.multiproc.harness import Setup, run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

MODES: list[dict[str, Any]] = [
    {"stage": 1, "overlap": False},
    {"stage": 1, "interleaved": True},
    {"stage": 2, "interleaved": True},
    {"stage": 2, "overlap": False, "max_grad_norm": 0.1},
    {"stage": 2, "interleaved": True, "sync": "forward"},
]


class _SteppedByHand:
    """AdamW on the host, over gradients of the device: the arithmetic of a step that is offloaded."""

    def __init__(self, params: list[Tensor], clip: float | None) -> None:
        self._params, self._clip = params, clip
        self._on_host = [nn.Parameter(param.detach().cpu()) for param in params]
        self._inner = AdamW(self._on_host, lr=0.01, fused=True)

    @torch.no_grad()
    def step(self) -> None:
        if self._clip is not None:
            nn.utils.clip_grad_norm_(self._params, self._clip)
        for param, one in zip(self._params, self._on_host, strict=True):
            assert param.grad is not None
            one.grad = param.grad.cpu()
        self._inner.step()
        for param, one in zip(self._params, self._on_host, strict=True):
            param.copy_(one)


def _equal_to_a_step_by_hand(setup: Setup, backend: str) -> None:
    share_gpus(setup.rank, setup.world_size)
    device = torch.device("cuda", 0)
    group = dist.new_group(list(range(setup.world_size)), backend=backend)
    for options in MODES:
        for offload in ("cpu", Offload(buffers=2)):
            wrap = {"process_group": group, "bucket_cap_mb": 0.0015, "gradient_as_bucket_view": True}
            model = build_model().to(device)
            before = [param.detach().clone() for param in model.parameters()]
            plain_model, ddp = (DistributedDataParallel(copy.deepcopy(model), **wrap) for _ in range(2))
            plain = _SteppedByHand(list(plain_model.parameters()), options.get("max_grad_norm"))
            opt = shard_optimizer(ddp, AdamW, lr=0.01, offload=offload, **options)
            for step, (inputs, targets) in enumerate(batches(setup.rank, 6)):
                for one in (plain_model, ddp):
                    one.zero_grad()
                    nn.functional.mse_loss(one(inputs.to(device)), targets.to(device)).backward()
                plain.step()
                opt.step()
                opt.zero_grad()
                opt.finish_sync()
                assert_equal_models(plain_model, ddp, f"{options}, {offload}, step {step}")
            states = [one for state in opt.optim.state.values() for one in state.values()]
            assert {one.device.type for one in states} <= {"cpu"}
            assert all(not torch.equal(*pair) for pair in zip(before, ddp.parameters(), strict=True))


@pytest.mark.parametrize(("backend", "world_size"), JOBS)
def test_equal_to_a_step_on_the_host_by_hand(backend: str, world_size: int) -> None:
    run_ranks(_equal_to_a_step_by_hand, world_size, backend)


def _bytes_on_the_device(setup: Setup) -> None:
    """State is not on the device with offload, and leaves and returns on demand."""
    keep_workspaces_small()
    group = dist.new_group([0], backend="nccl")
    layer, depth = 4 * 512 * 512, 8

    def train(**options: Any) -> tuple[int, Any]:
        torch.cuda.empty_cache()
        start = torch.cuda.memory_allocated()
        model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(depth))).to("cuda")
        ddp = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
        opt = shard_optimizer(ddp, AdamW, stage=2, **options)
        for _ in range(4):
            ddp(torch.randn(1, 512, device="cuda")).sum().backward()
            opt.step()
            opt.zero_grad()
        return torch.cuda.memory_allocated() - start, (ddp, opt)

    train()  # workspaces come and stay
    away, _ = train(offload="cpu")
    beside, (ddp, opt) = train()
    assert (beside - away) / layer == pytest.approx(2 * depth, rel=0.05)
    held = torch.cuda.memory_allocated()
    opt.offload_state()
    assert (held - torch.cuda.memory_allocated()) / layer == pytest.approx(2 * depth, rel=0.05)
    opt.reload_state()
    assert torch.cuda.memory_allocated() == pytest.approx(held, rel=0.01)
    ddp(torch.randn(1, 512, device="cuda")).sum().backward()
    opt.step()


def test_bytes_on_the_device() -> None:
    run_ranks(_bytes_on_the_device, 1)


def _copies_under_backward(setup: Setup) -> None:
    """In a trace, copies to the host run while kernels of backward do."""
    group = dist.new_group([0], backend="nccl")
    model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(12))).to("cuda")
    ddp = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True, bucket_cap_mb=16)
    opt = shard_optimizer(ddp, AdamW, stage=2, offload="cpu")
    inputs = torch.randn(4096, 2048, device="cuda")
    for step in range(4):
        with torch.profiler.profile(acc_events=True) as trace:
            ddp(inputs).square().mean().backward()
            opt.step()
            opt.zero_grad()
            torch.cuda.synchronize()
        assert step < 3 or trace is not None
    spans = [
        (one.name, one.time_range.start, one.time_range.end) for one in trace.events() if one.device_type.name == "CUDA"
    ]
    copies = [span for span in spans if "Memcpy DtoH" in span[0]]
    products = [span for span in spans if "gemm" in span[0].lower()]
    assert any(start < end2 and start2 < end for _, start, end in copies for _, start2, end2 in products)


def test_copies_run_under_backward() -> None:
    run_ranks(_copies_under_backward, 1)
