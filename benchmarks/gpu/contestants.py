"""The ways to train that `compare` compares on accelerators, in fp32 and in bf16."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from benchmarks.race.contestants import (
    MAX_NORM,
    OPTIONS,
    Contestant,
    Mode,
    adamw,
    ddp_with,
    fsdp,
    import_torchs_zero,
    ours,
    standalone,
    wrapped,
)
from benchmarks.race.models import Batch

REFERENCE = "DDP + fused AdamW"
CLIPPED = f"{REFERENCE}, clipped"
SCALED = f"{REFERENCE}, GradScaler"
ACCUMULATED = f"{REFERENCE}, two batches"
MASTERS = f"{REFERENCE}, fp32 masters"
ON_HOST = "DDP + fused AdamW on the host"
OURS = "ddp_zero "
FSDP = "FSDP2, no reshard after forward"
SCALE = 2.0**10

Build = Callable[[nn.Module], Contestant]


class Scaled(Contestant):
    """With torch's `GradScaler`."""

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        super().__init__(model, optimizer)
        self.scaler = torch.amp.GradScaler(next(model.parameters()).device.type, init_scale=SCALE, growth_interval=2)

    def train(self, batch: Batch) -> None:
        """One step."""
        self.scaler.scale(self.model(*batch)).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


class Accumulating(Contestant):
    """Two halves of the batch, the first under ``no_sync``."""

    def train(self, batch: Batch) -> None:
        """One step."""
        halves = list(zip(*(part.chunk(2) for part in batch), strict=True))
        for number, half in enumerate(halves):
            assert isinstance(self.model, DistributedDataParallel)
            with self.model.no_sync() if number < len(halves) - 1 else nullcontext():
                (self.model(*half) / len(halves)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class WithMasters(Contestant):
    """DDP that steps fp32 copies by hand: the reference of `master_weights`, and on the host that of `offload`.

    Args:
        model: any.
        device: of the copies; None for that of the model.
        bucket_mib: size of DDP's buckets; None for its default.
    """

    def __init__(self, model: nn.Module, device: str | None = None, bucket_mib: float | None = None) -> None:
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mib)
        self.masters = [nn.Parameter(param.detach().to(device, torch.float32)) for param in ddp.parameters()]
        super().__init__(ddp, AdamW(self.masters, **OPTIONS))

    def train(self, batch: Batch) -> None:
        """One step."""
        self.model(*batch).backward()
        params: list[Any] = list(self.model.parameters())
        for param, master in zip(params, self.masters, strict=True):
            master.grad = param.grad.to(master)
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(params, [*self.masters])
        self.model.zero_grad()


def modes(dtype: torch.dtype, bucket_mib: float | None) -> dict[str, Mode]:
    """All contestants.

    Args:
        dtype: dtype of the parameters.
        bucket_mib: size of DDP's buckets; None for its default.
    """
    named = _in_bf16(bucket_mib) if dtype is torch.bfloat16 else _in_fp32(bucket_mib)
    return {name: Mode(build, gradients=None, base=base) for name, (build, base) in named.items()}


def _in_fp32(bucket_mib: float | None) -> dict[str, tuple[Build, str]]:
    own = partial(ours, bucket_mib)
    ddp = partial(ddp_with, bucket_mib=bucket_mib)
    return {
        REFERENCE: (ddp(adamw), REFERENCE),
        f"{REFERENCE}, Python hook": (_with_hook(bucket_mib), REFERENCE),
        FSDP: (fsdp, REFERENCE),
        "torch ZeroRedundancyOptimizer": (ddp(_torchs), REFERENCE),
        f"{OURS}stage 1, standalone": (ddp(standalone), REFERENCE),
        f"{OURS}stage 1, step after backward": (own(overlap=False), REFERENCE),
        f"{OURS}stage 1, overlapped": (own(), REFERENCE),
        f"{OURS}stage 1, interleaved": (own(interleaved=True), REFERENCE),
        f"{OURS}stage 1, sync in forward": (own(interleaved=True, sync="forward"), REFERENCE),
        f"{OURS}stage 2, step after backward": (own(stage=2, overlap=False), REFERENCE),
        f"{OURS}stage 2, last bucket": (own(stage=2, interleaved=False), REFERENCE),
        f"{OURS}stage 2, interleaved": (own(stage=2), REFERENCE),
        f"{OURS}stage 2, sync in forward": (own(stage=2, sync="forward"), REFERENCE),
        f"{OURS}stage 2, elements": (own(stage=2, partition="elements"), REFERENCE),
        f"{OURS}stage 2, wrap": (wrapped(), REFERENCE),
        f"{OURS}stage 2, wrap, elements, sync in forward": (
            wrapped(partition="elements", sync="forward"),
            REFERENCE,
        ),
        ON_HOST: (partial(WithMasters, device="cpu", bucket_mib=bucket_mib), ON_HOST),
        f"{OURS}stage 2, offload": (own(stage=2, offload="cpu"), ON_HOST),
        CLIPPED: (ddp(adamw, clips=True), CLIPPED),
        f"{OURS}stage 1, overlapped, clipped": (own(max_grad_norm=MAX_NORM), CLIPPED),
        f"{OURS}stage 2, interleaved, clipped": (own(stage=2, max_grad_norm=MAX_NORM), CLIPPED),
        SCALED: (_as(Scaled, ddp(adamw)), SCALED),
        f"{OURS}stage 1, GradScaler": (_as(Scaled, own(overlap=False)), SCALED),
        f"{OURS}stage 2, GradScaler": (_as(Scaled, own(stage=2, overlap=False)), SCALED),
        ACCUMULATED: (_as(Accumulating, ddp(adamw)), ACCUMULATED),
        f"{OURS}stage 1, two batches": (_as(Accumulating, own()), ACCUMULATED),
        f"{OURS}stage 2, two batches": (_as(Accumulating, own(stage=2)), ACCUMULATED),
    }


def _in_bf16(bucket_mib: float | None) -> dict[str, tuple[Build, str]]:
    def own(**options: Any) -> Build:
        return _bf16(ours(bucket_mib, **options))

    masters: dict[str, Any] = {"master_weights": True}
    return {
        REFERENCE: (_bf16(ddp_with(adamw, bucket_mib=bucket_mib)), REFERENCE),
        MASTERS: (_bf16(partial(WithMasters, bucket_mib=bucket_mib)), MASTERS),
        f"{FSDP}, fp32 masters": (_mixed_fsdp, MASTERS),
        f"{OURS}stage 1, overlapped": (own(), REFERENCE),
        f"{OURS}stage 2, interleaved": (own(stage=2), REFERENCE),
        f"{OURS}stage 1, overlapped, fp32 masters": (own(**masters), MASTERS),
        f"{OURS}stage 2, step after backward, fp32 masters": (own(stage=2, overlap=False, **masters), MASTERS),
        f"{OURS}stage 2, interleaved, fp32 masters": (own(stage=2, **masters), MASTERS),
        f"{OURS}stage 2, sync in forward, fp32 masters": (own(stage=2, sync="forward", **masters), MASTERS),
        f"{OURS}stage 2, wrap, fp32 masters": (_bf16(wrapped(**masters)), MASTERS),
    }


def _with_hook(bucket_mib: float | None) -> Build:
    """DDP whose gradients are averaged by a hook in Python."""

    def average(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        gradients = bucket.buffer().div_(dist.get_world_size())
        future = dist.all_reduce(gradients, async_op=True).get_future()
        return future.then(lambda done: done.value()[0])  # type: ignore[no-any-return]

    def contestant(model: nn.Module) -> Contestant:
        built = ddp_with(adamw, bucket_mib=bucket_mib)(model)
        assert isinstance(built.model, DistributedDataParallel)
        built.model.register_comm_hook(None, average)
        return built

    return contestant


def _torchs(ddp: DistributedDataParallel) -> Any:
    return import_torchs_zero()(ddp.parameters(), AdamW, parameters_as_bucket_view=True, **OPTIONS)


def _as(kind: Callable[[nn.Module, Any], Contestant], build: Build) -> Build:
    """Another loop around the same model and optimizer."""

    def contestant(model: nn.Module) -> Contestant:
        built = build(model)
        return kind(built.model, built.optimizer)

    return contestant


def _bf16(build: Build) -> Build:
    return lambda model: build(model.to(torch.bfloat16))


def _mixed_fsdp(model: nn.Module) -> Contestant:
    """FSDP2 that keeps fp32 shards, gathers bf16 parameters and reduces bf16 gradients."""
    mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for block in [*model.get_submodule("blocks").children(), model]:
        fully_shard(block, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
    return Contestant(model, AdamW(model.parameters(), **OPTIONS))


def select(available: dict[str, Mode], filters: Sequence[str]) -> list[str]:
    """The reference, the modes whose names match a filter, and their references; without filters, all.

    Raises:
        ValueError: for a filter that matches nothing.
    """
    for part in filters:
        if not any(part in name for name in available):
            raise ValueError(f"Expected a part of the name of a mode, got {part!r}. There are: {', '.join(available)}.")
    chosen = {name for name in available if not filters or any(part in name for part in filters)}
    needed = chosen | {available[name].base for name in chosen} | {REFERENCE}
    return [name for name in available if name in needed]


def whole_parameters(contestant: Contestant) -> list[Tensor]:
    """As they would be without sharding, on the host, in fp32. A collective."""
    return [param.detach().float().cpu() for param in contestant.whole_parameters()]
