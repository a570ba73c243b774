"""The ways to train that `compare` compares: one entry of `MODES` each.

All take the fused AdamW, but for the one that is named foreach. "Bucket views" in the name of a DDP mode are its
gradients'; in the name of a mode of torch's ZeroRedundancyOptimizer they are its parameters', and both of these modes
have DDP's gradient views, as all modes of ddp_zero do. Contestants from other packages compete where those can be
imported.
"""

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

from benchmarks.race.models import Batch
from ddp_zero import ZeroRedundancyOptimizer, shard_optimizer, wrap

LR = 1e-4
OPTIONS: dict[str, Any] = {"lr": LR, "fused": True}
MAX_NORM = 1.0
REFERENCE = "DDP + fused AdamW"
NODES = "DDP_ZERO_RACE_NODES"  # of the environment: how many nodes the ranks are on
CLIPPED = "DDP + fused AdamW, bucket views, clipped"
TORCHS = "torch ZeroRedundancyOptimizer, bucket views"


class Contestant:
    """A model in training.

    Args:
        model: computes the loss of a batch.
        optimizer: optimizer of its parameters.
        clips: True if the loop calls ``clip_grad_norm_``.
    """

    def __init__(self, model: nn.Module, optimizer: Any, clips: bool = False) -> None:
        self.model, self.optimizer, self.clips = model, optimizer, clips

    def train(self, batch: Batch) -> None:
        """One step."""
        self.model(*batch).backward()
        if self.clips:
            nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def settle(self) -> None:
        """Complete all messages of previous steps."""
        if isinstance(self.optimizer, ZeroRedundancyOptimizer):
            self.optimizer.finish_sync()

    def whole_parameters(self) -> Iterator[Tensor]:
        """As they would be without sharding, one at a time. A collective."""
        for param in self.model.parameters():
            yield param.full_tensor() if isinstance(param, DTensor) else param.detach()

    def state_bytes(self) -> int:
        """Bytes of optimizer state that this rank keeps."""
        local: Any = self.optimizer
        while hasattr(local, "optim"):
            local = local.optim
        values = [value for state in local.state.values() for value in state.values() if isinstance(value, Tensor)]
        return sum((value.to_local() if isinstance(value, DTensor) else value).nbytes for value in values)


class DeepSpeedContestant(Contestant):
    """The engine of DeepSpeed runs backward and steps."""

    def train(self, batch: Batch) -> None:
        """One step."""
        self.model.backward(self.model(*batch))  # type: ignore[operator]
        self.model.step()  # type: ignore[operator]


class Alone(Contestant):
    """Forward and backward into gradients that stay, as DDP's do; nothing is sent and nothing is stepped."""

    def train(self, batch: Batch) -> None:
        """One step without a step."""
        self.model(*batch).backward()
        self.model.zero_grad(set_to_none=False)


# Memory by formula


@dataclass(frozen=True)
class Sizes:
    """Bytes that a rank's memory is made of.

    Attributes:
        parameters: of the whole model.
        state: the optimizer state that the rank keeps.
        largest_bucket: of DDP's.
        largest_block: that FSDP gathers at once.
        activations: at most, and whatever else a model needs to compute.
    """

    parameters: int
    state: int
    largest_bucket: int
    largest_block: int
    activations: int

    @property
    def owned(self) -> int:
        """Of the parameters that the rank steps: AdamW keeps two numbers for each."""
        return self.state // 2


def in_views(sizes: Sizes) -> int:
    """Gradients are DDP's buckets."""
    return sizes.parameters


def beside_buckets(sizes: Sizes) -> int:
    """Gradients and DDP's buckets."""
    return 2 * sizes.parameters


def used_up(sizes: Sizes) -> int:
    """Stage 2 that steps one bucket behind: one is filled, one is reduced, one is received into."""
    return 3 * sizes.largest_bucket


def kept_where_owned(sizes: Sizes) -> int:
    """Stage 2 that steps when all of backward's sums are there: they are kept until then."""
    return used_up(sizes) + sizes.owned


def of_fsdp(sizes: Sizes) -> int:
    """Sharded parameters and gradients beside gathered parameters; a block's gradients, and a copy to send them."""
    return 2 * sizes.owned + 2 * sizes.largest_block


# Modes


@dataclass(frozen=True)
class Mode:
    """A way to train.

    Attributes:
        build: builds the contestant, from a model of its own.
        gradients: bytes besides whole parameters, own state and activations; None if unknown.
        base: the mode that it must equal.
        needs: the package that it comes from.
        is_extra: True if it competes only if `select` finds no other mode.
    """

    build: Callable[[nn.Module], Contestant]
    gradients: Callable[[Sizes], int] | None = in_views
    base: str = REFERENCE
    needs: str = "torch"
    is_extra: bool = False

    @property
    def is_available(self) -> bool:
        """True if its package is installed."""
        return find_spec(self.needs) is not None

    def import_package(self) -> None:
        """Before memory is measured: memory of Python and the package counts for no mode."""
        import_torchs_zero()
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed reads it when it is imported
        import_module(self.needs)

    def formula(self, sizes: Sizes) -> int | None:
        """Bytes that a rank needs in the middle of training."""
        if self.gradients is None:
            return None
        return sizes.parameters + sizes.state + self.gradients(sizes) + sizes.activations


def ddp_with(
    build: Callable[[DistributedDataParallel], Optimizer],
    has_views: bool = True,
    clips: bool = False,
    bucket_mib: float | None = None,
) -> Callable[[nn.Module], Contestant]:
    """A contestant on top of DDP."""

    def contestant(model: nn.Module) -> Contestant:
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=has_views, bucket_cap_mb=bucket_mib)
        return Contestant(ddp, build(ddp), clips)

    return contestant


def adamw(ddp: DistributedDataParallel) -> Optimizer:
    """The unsharded optimizer."""
    return AdamW(ddp.parameters(), **OPTIONS)


def foreach_adamw(ddp: DistributedDataParallel) -> Optimizer:
    """The unsharded optimizer, as torch steps it by default on a GPU."""
    return AdamW(ddp.parameters(), lr=LR, foreach=True)


def import_torchs_zero() -> Any:
    """The class; importing it warns about its TorchScript."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
    return TorchZero


def torchs_zero(as_views: bool) -> Callable[[nn.Module], Contestant]:
    """Torch's own."""
    options = {"parameters_as_bucket_view": as_views, **OPTIONS}
    return ddp_with(lambda ddp: import_torchs_zero()(ddp.parameters(), AdamW, **options))


def fsdp(model: nn.Module) -> Contestant:
    """FSDP2, every block and the root; parameters stay gathered from forward to backward."""
    mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
    for block in [*model.get_submodule("blocks").children(), model]:
        fully_shard(block, mesh=mesh, reshard_after_forward=False)
    return Contestant(model, AdamW(model.parameters(), **OPTIONS))


def mesh_of_nodes() -> DeviceMesh:
    """Nodes by ranks of a node."""
    nodes = int(os.environ.get(NODES, "1"))
    return init_device_mesh("cpu", (nodes, dist.get_world_size() // nodes), mesh_dim_names=("node", "shard"))


def hybrid_fsdp(model: nn.Module) -> Contestant:
    """FSDP2 that shards within a node and replicates across nodes."""
    mesh = mesh_of_nodes()
    for block in [*model.get_submodule("blocks").children(), model]:
        fully_shard(block, mesh=mesh, reshard_after_forward=False)
    return Contestant(model, AdamW(model.parameters(), **OPTIONS))


def over_nodes(build: Callable[..., Callable[[nn.Module], Contestant]], **options: Any) -> Callable[..., Contestant]:
    """Ours, with the ranks of a node as the shard group."""
    return lambda model: build(shard_group=mesh_of_nodes().get_group("shard"), **options)(model)


def standalone(ddp: DistributedDataParallel) -> Optimizer:
    """Ours, the step after backward."""
    return ZeroRedundancyOptimizer(ddp.parameters(), AdamW, parameters_as_bucket_view=True, **OPTIONS)


def ours(bucket_mib: float | None = None, **options: Any) -> Callable[[nn.Module], Contestant]:
    """By `shard_optimizer`."""
    return ddp_with(lambda ddp: shard_optimizer(ddp, AdamW, **options, **OPTIONS), bucket_mib=bucket_mib)


def wrapped(**options: Any) -> Callable[[nn.Module], Contestant]:
    """By `wrap`, with buckets of a sixteenth of the model, from 1 to 25 MiB."""

    def build(model: nn.Module) -> Contestant:
        whole = sum(param.nbytes for param in model.parameters()) / 2**20
        return Contestant(*wrap(model, AdamW, stage=2, bucket_mb=min(25, max(1, whole / 16)), **options, **OPTIONS))

    return build


def deepspeed_zero(stage: int) -> Callable[[nn.Module], Contestant]:
    """DeepSpeed's engine in fp32, on the group that exists."""

    def contestant(model: nn.Module) -> Contestant:
        rank = str(dist.get_rank())
        os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=str(dist.get_world_size()))
        deepspeed = import_module("deepspeed")
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
        }
        optimizer = AdamW(model.parameters(), **OPTIONS)
        engine, zero, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=config, dist_init_required=False
        )
        return DeepSpeedContestant(engine, zero.optimizer)

    return contestant


def fairscale_oss(ddp: DistributedDataParallel) -> Optimizer:
    """FairScale's stage 1."""
    optimizer: Optimizer = import_module("fairscale.optim").OSS(ddp.parameters(), optim=AdamW, **OPTIONS)
    return optimizer


MODES: dict[str, Mode] = {
    REFERENCE: Mode(ddp_with(adamw, has_views=False), beside_buckets),
    "DDP + foreach AdamW": Mode(ddp_with(foreach_adamw, has_views=False), beside_buckets),
    "DDP + fused AdamW, bucket views": Mode(ddp_with(adamw)),
    "torch ZeroRedundancyOptimizer": Mode(torchs_zero(as_views=False)),
    TORCHS: Mode(torchs_zero(as_views=True)),
    "FSDP2, no reshard after forward": Mode(fsdp, of_fsdp),
    "ddp_zero stage 1, standalone": Mode(ddp_with(standalone)),
    "ddp_zero stage 1, overlapped": Mode(ours()),
    "ddp_zero stage 1, interleaved": Mode(ours(interleaved=True)),
    "ddp_zero stage 2, interleaved": Mode(ours(stage=2), used_up),
    "ddp_zero stage 2, last bucket": Mode(ours(stage=2, interleaved=False), kept_where_owned),
    # by default it would also look for gradients that are not finite, which the others do not
    "ddp_zero stage 2, after backward": Mode(ours(stage=2, overlap=False, nonfinite="step"), kept_where_owned),
    "ddp_zero stage 1, interleaved, sync in forward": Mode(ours(interleaved=True, sync="forward")),
    "ddp_zero stage 2, sync in forward": Mode(ours(stage=2, sync="forward"), used_up),
    "DeepSpeed ZeRO-1": Mode(deepspeed_zero(1), gradients=None, needs="deepspeed"),
    "DeepSpeed ZeRO-2": Mode(deepspeed_zero(2), gradients=None, needs="deepspeed"),
    "FairScale OSS": Mode(ddp_with(fairscale_oss), needs="fairscale"),
    # memory that no formula of DDP's default buckets tells
    "ddp_zero stage 2, wrap": Mode(wrapped(), gradients=None),
    "ddp_zero stage 2, wrap, sync in forward": Mode(wrapped(sync="forward"), gradients=None),
    "ddp_zero stage 2, buckets of 8 MiB": Mode(ours(8, stage=2), gradients=None, is_extra=True),
    "ddp_zero stage 2, elements": Mode(ours(stage=2, partition="elements"), used_up, is_extra=True),
    "ddp_zero stage 2, elements, sync in forward": Mode(
        ours(stage=2, partition="elements", sync="forward"), used_up, is_extra=True
    ),
    "ddp_zero stage 2, elements, wrap": Mode(wrapped(partition="elements"), gradients=None, is_extra=True),
    "ddp_zero stage 2, elements, wrap, sync in forward": Mode(
        wrapped(partition="elements", sync="forward"), gradients=None, is_extra=True
    ),
    "FSDP2 over nodes, no reshard after forward": Mode(hybrid_fsdp, of_fsdp, is_extra=True),
    "ddp_zero stage 1 over nodes, overlapped": Mode(over_nodes(ours), is_extra=True),
    "ddp_zero stage 2 over nodes, interleaved": Mode(over_nodes(ours, stage=2), used_up, is_extra=True),
    "ddp_zero stage 2 over nodes, sync in forward": Mode(
        over_nodes(ours, stage=2, sync="forward"), used_up, is_extra=True
    ),
    "ddp_zero stage 2 over nodes, wrap": Mode(over_nodes(wrapped), gradients=None, is_extra=True),
    CLIPPED: Mode(ddp_with(adamw, clips=True), base=CLIPPED, is_extra=True),
    "ddp_zero stage 1, overlapped, clipped": Mode(ours(max_grad_norm=MAX_NORM), base=CLIPPED, is_extra=True),
    'ddp_zero stage 1, overlapped, nonfinite="skip"': Mode(ours(nonfinite="skip"), is_extra=True),
    "ddp_zero stage 2, interleaved, clipped": Mode(
        ours(stage=2, max_grad_norm=MAX_NORM), kept_where_owned, base=CLIPPED, is_extra=True
    ),
}
ALONE_NAME = "model alone"
ALONE = Mode(lambda model: Alone(model, SGD(model.parameters())), gradients=None)
"""Shows what activations need; does not compete."""
FEWER = (  # of a model so large that not all fit
    REFERENCE,
    TORCHS,
    "FSDP2, no reshard after forward",
    "ddp_zero stage 1, standalone",
    "ddp_zero stage 1, overlapped",
    "ddp_zero stage 2, interleaved",
    "ddp_zero stage 2, last bucket",
    "ddp_zero stage 2, sync in forward",
)


def select(filters: Sequence[str], is_large: bool) -> list[str]:
    """The modes of a run, in the order of `MODES`: the reference, the requested modes, and their references.

    Args:
        filters: parts of names. Each chooses the modes that contain it; extra modes only if there is no other. None:
            all that are not extra.
        is_large: limit a run without filters to `FEWER`.

    Raises:
        ValueError: for a filter that matches nothing.
    """
    available = {name: mode for name, mode in MODES.items() if mode.is_available}
    usual = [name for name, mode in available.items() if not mode.is_extra]
    chosen = {REFERENCE} if filters else set(FEWER if is_large else usual)
    for part in filters:
        found = [name for name in usual if part in name] or [name for name in available if part in name]
        if not found:
            raise ValueError(f"Expected a part of the name of a mode, got {part!r}. There are: {', '.join(available)}.")
        chosen.update(found)
    chosen.update({MODES[name].base for name in chosen})
    return [name for name in available if name in chosen]
