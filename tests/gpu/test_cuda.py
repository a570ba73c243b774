"""On a GPU: two Gloo or NCCL ranks that share it, and one NCCL rank. Skipped without one."""

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.gpu.machines import share_gpus
from ddp_zero import ZeroRedundancyOptimizer, shard_optimizer
from ddp_zero.core.local.storage import with_own_storage
from tests.gpu.jobs import JOBS, keep_workspaces_small
from tests.multiproc.cases import assert_equal_models, assert_identical, batches, build_model
from tests.multiproc.harness import Setup, run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

OPTIONS: list[dict[str, Any]] = [{}, {"fused": True}, {"foreach": True, "capturable": True}]


def _standalone(ddp: DistributedDataParallel, **options: Any) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, ddp.process_group, **options)


def _in_one_line(ddp: DistributedDataParallel, **options: Any) -> ZeroRedundancyOptimizer:
    opt: ZeroRedundancyOptimizer = shard_optimizer(ddp, torch.optim.AdamW, **options)
    return opt


MODES: dict[str, Callable[..., ZeroRedundancyOptimizer]] = {
    "standalone": partial(_standalone, parameters_as_bucket_view=True),
    "packed": _standalone,
    "overlapped": _in_one_line,
    "interleaved": partial(_in_one_line, interleaved=True),
    "stage 2": partial(_in_one_line, stage=2),
    "stage 2, at the end": partial(_in_one_line, stage=2, interleaved=False),
    "stage 2, after backward": partial(_in_one_line, stage=2, overlap=False),
    "sync in forward": partial(_in_one_line, stage=2, sync="forward"),
}


def _equal_on_a_gpu(setup: Setup, backend: str) -> None:
    share_gpus(setup.rank, setup.world_size)
    device = torch.device("cuda", 0)
    group = dist.new_group(list(range(setup.world_size)), backend=backend)
    for name, build in MODES.items():
        for options in OPTIONS:
            wrap = {"process_group": group, "bucket_cap_mb": 0.0015, "gradient_as_bucket_view": True}
            model = build_model().to(device)
            plain_model, ddp = (DistributedDataParallel(copy.deepcopy(model), **wrap) for _ in range(2))
            plain = torch.optim.AdamW(plain_model.parameters(), lr=0.01, **options)
            opt = build(ddp, lr=0.01, **options)
            for step, (inputs, targets) in enumerate(batches(setup.rank, 10)):
                for one, optimizer in ((plain_model, plain), (ddp, opt)):
                    optimizer.zero_grad()
                    nn.functional.mse_loss(one(inputs.to(device)), targets.to(device)).backward()
                    optimizer.step()
                if step % 2:  # in between, the next forward pass waits for parameters, or they have come
                    opt.finish_sync()
                    assert_equal_models(plain_model, ddp, f"{name} {options}")
            opt.consolidate_state_dict(to=0)
            if setup.rank == 0:
                assert_identical(plain.state_dict()["state"], opt.state_dict()["state"], "state")


def _memory_of_stage_2(setup: Setup) -> None:
    """From the third step on: parameters, state, three buckets, one layer's gradient on its way."""
    keep_workspaces_small()
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
    layers = torch.cuda.max_memory_allocated() / layer
    assert layers <= depth + 3 + 2, f"at most {layers:.2f} layers of {depth}"


def test_stage_2_holds_three_buckets_on_a_gpu() -> None:
    run_ranks(_memory_of_stage_2, 1)


def _scale_and_clip_on_a_gpu(setup: Setup, backend: str) -> None:
    """With a GradScaler's overflows and clipping, norms, parameters and scales equal DDP's; so does each record."""
    share_gpus(setup.rank, setup.world_size)
    device = torch.device("cuda", 0)
    group = dist.new_group(list(range(setup.world_size)), backend=backend)
    wrap = {"process_group": group, "bucket_cap_mb": 0.0015, "gradient_as_bucket_view": True}
    for stage, overlap in ((1, False), (1, True), (2, False), (2, True)):
        model = build_model().to(device)
        plain_model, ddp = (DistributedDataParallel(copy.deepcopy(model), **wrap) for _ in range(2))
        plain = torch.optim.AdamW(plain_model.parameters(), lr=0.01)
        opt = shard_optimizer(ddp, torch.optim.AdamW, stage=stage, overlap=overlap, lr=0.01)
        scalers = [torch.amp.GradScaler("cuda", init_scale=2.0**10, growth_interval=3) for _ in range(2)]
        for step, (inputs, targets) in enumerate(batches(setup.rank, 10)):
            for one, optimizer, scaler in ((plain_model, plain, scalers[0]), (ddp, opt, scalers[1])):
                loss = nn.functional.mse_loss(one(inputs.to(device)), targets.to(device))
                (scaler.scale(loss) * (float("inf") if step in (0, 4) else 1.0)).backward()
                scaler.unscale_(optimizer)
                if optimizer is plain:
                    expected = nn.utils.clip_grad_norm_(plain_model.parameters(), 0.3)
                else:
                    assert_identical(expected, opt.clip_grad_norm_(0.3), f"norm of step {step}")
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            assert_equal_models(plain_model, ddp, f"stage {stage}, overlap {overlap}, step {step}")
            assert scalers[0].get_scale() == scalers[1].get_scale()
            assert opt.last_step is not None
            assert opt.last_step.stepped is (step not in (0, 4))


def _clipping_waits_for_nobody(setup: Setup) -> None:
    """Without a decision to skip, nothing in the step waits for the device."""
    group = dist.new_group([0], backend="cpu:gloo,cuda:nccl")  # without Gloo, steps that compare options wait
    ddp = DistributedDataParallel(build_model().to("cuda"), process_group=group, gradient_as_bucket_view=True)
    opt = shard_optimizer(ddp, torch.optim.AdamW, overlap=False, lr=0.01, max_grad_norm=0.1, nonfinite="step")
    for step, (inputs, targets) in enumerate(batches(setup.rank, 5)):
        nn.functional.mse_loss(ddp(inputs.cuda()), targets.cuda()).backward()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Synchronization debug mode")  # a prototype
            torch.cuda.set_sync_debug_mode("error" if step > 2 else "default")
        opt.step()
        torch.cuda.set_sync_debug_mode("default")
        opt.zero_grad()
    assert opt.last_step is not None
    assert opt.last_step.clip_coefficient is not None
    assert opt.last_step.clip_coefficient < 1


def _two_models(
    group: dist.ProcessGroup, prepare: Callable[[nn.Module], Any], cap: float | None = 0.0015
) -> list[DistributedDataParallel]:
    wrap: dict[str, Any] = {"process_group": group, "bucket_cap_mb": cap, "gradient_as_bucket_view": True}
    return [DistributedDataParallel(prepare(build_model().to("cuda")), **wrap) for _ in range(2)]


def _train_beside(
    setup: Setup, plain_model: DistributedDataParallel, ddp: DistributedDataParallel, **options: Any
) -> None:
    plain = torch.optim.AdamW(plain_model.parameters(), lr=0.01, fused=True)
    opt = shard_optimizer(ddp, torch.optim.AdamW, lr=0.01, fused=True, **options)
    for step, (inputs, targets) in enumerate(batches(setup.rank, 5)):
        for one, optimizer in ((plain_model, plain), (ddp, opt)):
            optimizer.zero_grad()
            nn.functional.mse_loss(one(inputs.cuda()), targets.cuda()).backward()
            optimizer.step()
        assert_equal_models(plain_model, ddp, f"{options}, step {step}")


def _forward_passes_may_be_graphs(setup: Setup) -> None:
    """And a captured step is refused."""
    warnings.filterwarnings("ignore", "The AccumulateGrad node's stream")  # graphs are captured on one of their own
    warnings.filterwarnings("ignore", "Attempting to run cuBLAS")  # in the thread of backward, before anything else
    group = dist.new_group([0], backend="cpu:gloo,cuda:nccl")
    inputs, _ = next(iter(batches(setup.rank, 1)))

    def as_graphs(model: nn.Module) -> Any:
        return torch.cuda.make_graphed_callables(model, (inputs.cuda(),), num_warmup_iters=11)

    stay: dict[str, Any] = {"parameters_as_bucket_view": False, "partition": "parameters"}
    for stage in (1, 2):
        _train_beside(setup, *_two_models(group, as_graphs), stage=stage, **stay)
    _, captured = _two_models(group, as_graphs)
    with pytest.raises(NotImplementedError, match="the graph reads parameters where they are"):
        shard_optimizer(captured, torch.optim.AdamW)
    _, ddp = _two_models(group, lambda model: model)
    opt = shard_optimizer(ddp, torch.optim.AdamW, overlap=False, lr=0.01)
    ddp(inputs.cuda()).sum().backward()
    with pytest.raises(NotImplementedError, match="ZERO-124"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        opt.step()


def _compiled_models(setup: Setup) -> None:
    warnings.simplefilter("default")  # those of the compiler
    group = dist.new_group([0], backend="cpu:gloo,cuda:nccl")
    for stage in (1, 2):
        # torch's compiler cuts the graph at DDP's buckets, the first of which must not be the largest
        _train_beside(setup, *_two_models(group, torch.compile, cap=None), stage=stage)


def test_forward_passes_may_be_graphs() -> None:
    run_ranks(_forward_passes_may_be_graphs, 1)


def test_models_may_be_compiled() -> None:
    run_ranks(_compiled_models, 1)


def test_windows_of_memory_have_storages_of_their_own_on_a_gpu() -> None:
    for device in range(torch.cuda.device_count()):  # also where that is not the current one
        flat = torch.zeros(1024, dtype=torch.bfloat16, device=f"cuda:{device}")
        with torch.cuda.stream(torch.cuda.Stream(device)):
            window = with_own_storage(flat[64:128])
        torch.cuda.synchronize(device)
        assert window.device == flat.device
        assert window.data_ptr() == window.untyped_storage().data_ptr() == flat[64:].data_ptr()
        assert window.untyped_storage().nbytes() == window.nbytes
        window.fill_(1.0)
        assert flat.sum().item() == 64
        del flat
        assert window.sum().item() == 64


def test_clipping_waits_for_nobody_on_a_gpu() -> None:
    run_ranks(_clipping_waits_for_nobody, 1)


@pytest.mark.parametrize(("backend", "world_size"), JOBS)
def test_loss_scaling_and_clipping_equal_ddp_on_a_gpu(backend: str, world_size: int) -> None:
    run_ranks(_scale_and_clip_on_a_gpu, world_size, backend)


@pytest.mark.parametrize(("backend", "world_size"), JOBS)
def test_equal_on_a_gpu(backend: str, world_size: int) -> None:
    run_ranks(_equal_on_a_gpu, world_size, backend)
