"""Training steps with clipping, loss scales, masters and accumulation: on DDP with torch's own parts, and on ours."""

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ddp_zero import DynamicLossScale, ZeroRedundancyOptimizer, hook_with_zero_step, hook_with_zero_step_interleaved
from tests import internals
from tests.multiproc.cases import build_model, loss_of, split_groups, sum_in_rank_order

INTERVAL = 3  # steps after which scales grow, so that they do in a test


@dataclass(frozen=True)
class Recipe:
    """What a step does with its gradients.

    Attributes:
        name: for messages.
        clip: the largest norm, or None.
        norm_type: of the norm.
        clips_inside: whether the optimizer clips by itself, not the loop.
        group_clip: the largest norm of the second of two groups, which is clipped on its own.
        scaler: ``"torch"`` for a `GradScaler`, ``"own"`` for the optimizer's, or None.
        unscales: whether the loop calls ``scaler.unscale_``.
        dtype: of the parameters but for one layer's, which stays in fp32.
        masters: whether low-precision parameters have fp32 masters.
        accumulate: how many batches a step takes.
        autocast: whether forward runs under autocast to bfloat16.
        overflows: steps in which rank 1's loss is infinite.
        optimizer: its `optimizer_case`.
        initial: the scale at first; the optimizer's own is always 1,024.
        skips: whether steps with infinite gradients are skipped.
    """

    name: str
    clip: float | None = None
    norm_type: float = 2.0
    clips_inside: bool = True
    group_clip: float | None = None
    scaler: str | None = None
    unscales: bool = False
    dtype: torch.dtype = torch.float32
    masters: bool = False
    accumulate: int = 1
    autocast: bool = False
    overflows: tuple[int, ...] = ()
    optimizer: str = "AdamW foreach"
    initial: float = 2.0**10

    @property
    def groups(self) -> int:
        """How many parameter groups there are."""
        return 2 if self.group_clip is not None else 1

    @property
    def skips(self) -> bool:
        """Whether there is anything to skip."""
        return bool(self.overflows)


@dataclass
class Outcome:
    """What a step of a recipe has shown."""

    stepped: bool
    norm: float | None
    scale: float | None
    calls: int  # of ``step()`` by a `GradScaler`: schedules of frameworks follow these


def low_precision_model(dtype: torch.dtype, is_mixed: bool = True) -> nn.Module:
    """`build_model` in a dtype, with its normalisation in fp32 if dtypes are mixed in one model."""
    model = build_model()
    if dtype is torch.float32:
        return model
    for index, layer in enumerate(model):  # type: ignore[arg-type, var-annotated]
        if is_mixed and isinstance(layer, nn.LayerNorm):
            model[index] = _InFp32(layer)  # type: ignore[operator]
        else:
            layer.to(dtype)
    return _FromFp32(model, dtype)


class _InFp32(nn.Module):
    """A layer that computes in fp32 in a low-precision model."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.layer(inputs.float())
        return output.to(inputs.dtype)


class _FromFp32(nn.Module):
    """A low-precision model with inputs and outputs in fp32."""

    def __init__(self, layers: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = layers
        self.dtype = dtype

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.layers(inputs.to(self.dtype))
        return output.float()


Batches = list[tuple[Tensor, Tensor]]


@dataclass
class Trainer:
    """What both sides share: forward and backward of a step."""

    recipe: Recipe
    model: DistributedDataParallel
    step_number: int = field(default=0, init=False)
    calls: int = field(default=0, init=False)

    def count_calls(self, optimizer: Optimizer) -> None:
        """Count those of a `GradScaler`."""

        def count(*_: Any) -> None:
            self.calls += self.recipe.scaler == "torch"

        optimizer.register_step_post_hook(count)

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of a batch, infinite on rank 1 where the recipe says so."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.recipe.autocast):
            loss = loss_of(self.model, inputs, targets)
        if self.step_number in self.recipe.overflows and dist.get_rank() == 1 % dist.get_world_size():
            loss = loss * float("inf")
        return loss

    def train(self, data: Batches) -> Outcome:
        """One step from these batches."""
        outcome = self._step(data)
        self.step_number += 1
        return outcome

    def _step(self, data: Batches) -> Outcome:
        raise NotImplementedError


class Reference(Trainer):
    """DDP with the unsharded optimizer and torch's own parts."""

    def __init__(
        self, recipe: Recipe, model: nn.Module, build: Callable[..., Optimizer], options: dict[str, Any], stage: int
    ) -> None:
        ddp = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=0.0015)
        super().__init__(recipe, ddp)
        if stage == 2 and dist.get_world_size() > 2:
            ddp.register_comm_hook(None, sum_in_rank_order)
        self.params = list(ddp.parameters())
        low = recipe.masters
        self.sums_passes = recipe.masters or stage == 2  # stage 2 adds up averages; DDP averages sums
        self.stepped = [
            nn.Parameter(param.detach().float()) if low and param.dtype is not torch.float32 else param
            for param in self.params
        ]
        stands_for = dict(zip(self.params, self.stepped, strict=True))
        groups = split_groups(ddp, recipe.groups)
        for group in groups:
            group["params"] = [stands_for[param] for param in group["params"]]
        self.groups = [group["params"] for group in groups]
        self.optimizer = build(groups, **copy.deepcopy(options))
        self.count_calls(self.optimizer)
        self.scaler = torch.amp.GradScaler(
            "cpu", enabled=recipe.scaler is not None, init_scale=recipe.initial, growth_interval=INTERVAL
        )
        self.scale = torch.tensor(recipe.initial)  # by hand
        self.growth = torch.tensor(0, dtype=torch.int32)
        self.sums: dict[int, Tensor] = {}

    def _step(self, data: Batches) -> Outcome:
        for param in [*self.params, *self.stepped]:
            param.grad = None
        by_hand = self.recipe.masters
        for number, batch in enumerate(data):
            loss = self.loss(*batch)
            scaled = loss * self.scale if by_hand and self.scaler.is_enabled() else self.scaler.scale(loss)
            scaled.backward()
            if self.sums_passes:
                self._collect(is_last=number == len(data) - 1)
        return self._step_by_hand() if by_hand else self._step_with_scaler()

    def _collect(self, is_last: bool) -> None:
        """Averages of backward passes add up, in fp32 for gradients of low precision."""
        for index, (param, stepped) in enumerate(zip(self.params, self.stepped, strict=True)):
            if param.grad is None:
                continue
            grad = param.grad.to(stepped.dtype)
            total = grad if index not in self.sums else self.sums[index] + grad
            param.grad = None
            if is_last:
                stepped.grad = total
            self.sums[index] = total
        if is_last:
            self.sums.clear()

    def _step_by_hand(self) -> Outcome:
        """What `GradScaler` does, which refuses fp16 gradients."""
        grads = [param.grad for param in self.stepped if param.grad is not None]
        scale = None
        if self.scaler.is_enabled():
            scale = self.scale.item()
            for grad in grads:
                grad.mul_(self.scale.double().reciprocal().float())
        finite = all(bool(torch.isfinite(grad).all()) for grad in grads)
        norm = self._clip()
        if finite or not self.recipe.skips:
            self.optimizer.step()
        found = torch.tensor(0.0 if finite else 1.0)
        torch._amp_update_scale_(self.scale, self.growth, found, 2.0, 0.5, INTERVAL)
        with torch.no_grad():
            for param, stepped in zip(self.params, self.stepped, strict=True):
                param.copy_(stepped)
        return Outcome(finite or not self.recipe.skips, norm, scale, self.calls)

    def _step_with_scaler(self) -> Outcome:
        scale = self.scaler.get_scale() if self.scaler.is_enabled() else None
        if self.scaler.is_enabled() and (self.recipe.unscales or self.recipe.clip is not None):
            self.scaler.unscale_(self.optimizer)
        norm = self._clip()
        finite = all(bool(torch.isfinite(p.grad).all()) for p in self.params if p.grad is not None)
        if self.scaler.is_enabled():
            self.scaler.step(self.optimizer)
            self.scaler.update()
        elif finite or not self.recipe.skips:
            self.optimizer.step()
        return Outcome(finite or not self.recipe.skips, norm, scale, self.calls)

    def _clip(self) -> float | None:
        recipe = self.recipe
        if recipe.clip is None:
            return None
        if recipe.group_clip is not None:
            grads = [param.grad for param in self.stepped if param.grad is not None]
            total = nn.utils.get_total_norm(grads, recipe.norm_type)
            for params, limit in zip(self.groups, (recipe.clip, recipe.group_clip), strict=True):
                nn.utils.clip_grad_norm_(params, limit, recipe.norm_type)
            return total.item()
        grads = [
            param.grad.float() for param in self.stepped if param.grad is not None
        ]  # torch's norms of bf16 are bf16
        norm = nn.utils.get_total_norm(grads, recipe.norm_type)
        nn.utils.clip_grads_with_norm_(self.stepped, recipe.clip, norm)
        return norm.item()


STANDALONE, WATCHED, OUTSIDE, LAST, INTERLEAVED = (
    "standalone",
    "standalone, watched",
    "in opt.step()",
    "after the last bucket",
    "interleaved",
)
MODES = {1: (STANDALONE, WATCHED, LAST, INTERLEAVED), 2: (OUTSIDE, LAST, INTERLEAVED)}


class Sharded(Trainer):
    """The same recipe with ours."""

    def __init__(
        self,
        recipe: Recipe,
        model: nn.Module,
        build: Callable[..., Optimizer],
        options: dict[str, Any],
        stage: int,
        mode: str,
        **more: Any,
    ) -> None:
        super().__init__(
            recipe, DistributedDataParallel(model, bucket_cap_mb=0.0015, gradient_as_bucket_view=stage == 2)
        )
        groups = split_groups(self.model, recipe.groups)
        if recipe.group_clip is not None:
            groups[1]["max_grad_norm"] = recipe.group_clip
        own: dict[str, Any] = {"stage": stage, "master_weights": recipe.masters, **more}
        if recipe.clip is not None and recipe.clips_inside:
            own |= {"max_grad_norm": recipe.clip, "norm_type": recipe.norm_type}
        if recipe.scaler == "own":
            own["loss_scale"] = DynamicLossScale(initial=2.0**10, growth_interval=INTERVAL)
        elif recipe.skips and recipe.scaler is None:
            own["nonfinite"] = "skip"
        overlaps = mode in (LAST, INTERLEAVED)
        self.opt = ZeroRedundancyOptimizer(
            groups, build, overlap_with_ddp=overlaps, parameters_as_bucket_view=True, **own, **copy.deepcopy(options)
        )
        if mode in (STANDALONE, WATCHED):
            internals.order_norms_as(self.opt, self.model)
        if mode == WATCHED:
            self.model.register_comm_hook(None, internals.watching_hook(self.opt, self.model))
        elif mode != STANDALONE:
            hook = hook_with_zero_step_interleaved if mode == INTERLEAVED else hook_with_zero_step
            self.model.register_comm_hook(None, hook(None, self.model, self.opt, shard_buckets=True))
        self.count_calls(self.opt)
        self.scaler = torch.amp.GradScaler(
            "cpu", enabled=recipe.scaler == "torch", init_scale=recipe.initial, growth_interval=INTERVAL
        )

    def _step(self, data: Batches) -> Outcome:
        recipe, opt = self.recipe, self.opt
        opt.zero_grad()
        for number, batch in enumerate(data):
            with self._accumulating(number < len(data) - 1):
                loss = self.loss(*batch)
                (opt.scale(loss) if recipe.scaler == "own" else self.scaler.scale(loss)).backward()
        if self.scaler.is_enabled() and (recipe.unscales or (recipe.clip is not None and not recipe.clips_inside)):
            self.scaler.unscale_(opt)
        norm = None
        if recipe.clip is not None and not recipe.clips_inside:
            if opt.stage == 1 and recipe.dtype is torch.float32:
                norm = nn.utils.clip_grad_norm_(self.model.parameters(), recipe.clip, recipe.norm_type).item()
            else:
                norm = opt.clip_grad_norm_(recipe.clip, recipe.norm_type).item()
        scale = self.scaler.get_scale() if self.scaler.is_enabled() else opt.loss_scale
        self.scaler.step(opt)
        self.scaler.update()
        record = opt.last_step
        assert record is not None
        if recipe.clips_inside and recipe.clip is not None:
            norm = record.grad_norm
        return Outcome(record.stepped, norm, scale, self.calls)

    def _accumulating(self, is_on: bool) -> contextlib.AbstractContextManager[None]:
        if not is_on:
            return contextlib.nullcontext()
        return self.opt.accumulate()


def micro_batches(rank: int, steps: int, per_step: int) -> Iterator[Batches]:
    """For every step its batches, different on every rank."""
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        yield [
            (torch.randn(6, 8, generator=generator), torch.randn(6, 3, generator=generator)) for _ in range(per_step)
        ]
