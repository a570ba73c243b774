"""The sharded run, and both runs together."""

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_zero import (
    DynamicLossScale,
    ZeroRedundancyOptimizer,
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
    shard_optimizer,
)
from tests.fuzz.plain import Plain
from tests.fuzz.sides import (
    FIRST_SCALE,
    HOOKS,
    INTERVAL,
    Memory,
    Side,
    note_gradients,
    optimizer_options,
    rebound,
    shard_group,
)
from tests.fuzz.toys import find_optimizer
from tests.multiproc.cases import unnamed

_TAKES_GROUPS = "params" in inspect.signature(shard_optimizer).parameters


class Ours(Side):
    """The sharded run."""

    is_ours = True

    def build_optimizer(self) -> None:
        case, mode = self.case, self.case.mode
        options = optimizer_options(case)
        if self.place.injects == "lr":
            options["lr"] = options.get("lr", 0.01) * (1 + 2.0**-22)
        own: dict[str, Any] = {"stage": mode.stage, "sync": mode.sync, "parameters_as_bucket_view": mode.views}
        own["partition"] = mode.partition
        own |= {"max_grad_norm": mode.max_grad_norm, "norm_type": mode.norm_type, "nonfinite": mode.nonfinite}
        own |= {"master_weights": mode.masters, "loss_scale": loss_scale(mode.loss_scale)}
        own |= {"shard_group": shard_group(mode.shard_ranks), "accumulate_in_fp32": mode.sums_in_fp32}
        build = find_optimizer(case.optim.name).build
        hook = None if case.ddp.hook is None else unnamed(HOOKS[case.ddp.hook])
        is_bare = case.optim.groups == "one" and not case.optim.named and not case.optim.held_out
        if mode.via == "shard_optimizer" and (is_bare or _TAKES_GROUPS):
            if not is_bare:
                own["params"] = self.groups(list(self.net.named_parameters()))
            model: Any = self.call if case.seed % 2 else self.ddp
            self.optimizer = shard_optimizer(
                model,
                build,
                overlap=mode.overlap,
                hook=hook,
                interleaved=mode.interleaved if mode.overlap else None,
                shard_buckets=mode.split,
                **own,
                **options,
            )
            return
        groups = self.groups(list(self.net.named_parameters()))
        self.optimizer = ZeroRedundancyOptimizer(groups, build, overlap_with_ddp=mode.overlap, **own, **options)
        self._register()

    def second_of(self, params: list[Tensor], build: Callable[..., Optimizer], options: dict[str, Any]) -> Any:
        case, mode = self.case, self.case.mode
        assert case.optim.second is not None
        if not case.optim.second.is_sharded:
            return super().second_of(params, build, options)
        own: dict[str, Any] = {"sync": mode.sync, "parameters_as_bucket_view": mode.views, "partition": mode.partition}
        group = shard_group(mode.shard_ranks)
        return ZeroRedundancyOptimizer(params, build, shard_group=group, **own, **options)

    def _register(self) -> None:
        case, mode = self.case, self.case.mode
        if mode.forgets_hook:
            return
        hook = None if case.ddp.hook is None else unnamed(HOOKS[case.ddp.hook])
        if mode.via == "attach":
            interleaved = mode.interleaved if mode.overlap else None
            self.optimizer.attach(self.ddp, hook=hook, interleaved=interleaved, shard_buckets=mode.split)
            return
        if case.has_hook:
            build = hook_with_zero_step_interleaved if mode.interleaved else hook_with_zero_step
            hook = build(hook, self.ddp, self.optimizer, mode.split)
        if hook is not None:
            self.ddp.register_comm_hook(None, hook)

    def pass_context(self, kind: str) -> Any:
        return self.optimizer.accumulate() if kind == "accumulate" else super().pass_context(kind)

    def scale(self, loss: Tensor) -> Tensor:
        if self.case.mode.loss_scale is not None:
            scaled: Tensor = self.optimizer.scale(loss)
            return scaled
        return super().scale(loss)

    def passes_are_over(self, kinds: tuple[str, ...]) -> None:
        note_gradients(self)

    def clip(self, kind: str, limit: float) -> None:
        if kind == "own":
            norm = self.optimizer.clip_grad_norm_(limit, self.case.mode.norm_type)
        else:
            norm = nn.utils.clip_grad_norm_(self.params, limit, self.case.mode.norm_type)
        self.seen.append(("norm", norm.detach().clone()))

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        loop = self.case.loop
        if loop.scaler and (loop.unscales or loop.clip is not None):
            self.scaler.unscale_(self.optimizer)
        if loop.clip is not None:
            self.clip(loop.clip, loop.clip_norm)
        if closure is not None:
            self.optimizer.step(closure)
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        if loop.scaler:
            self.seen.append(("scale", self.scaler.get_scale()))
        if self.case.mode.loss_scale is not None:
            self.seen.append(("scale", self.optimizer.loss_scale))
        record = self.optimizer.last_step
        if self.case.mode.clips and record is not None and record.stepped:
            self.seen.append(("norm", record.grad_norm))

    def full_grad(self, param: Tensor) -> Tensor | None:
        if not any(param is member for group in self.optimizer.param_groups for member in group["params"]):
            return super().full_grad(param)
        grad: Tensor | None = self.optimizer.full_grad(param)
        return grad

    def has_written(self) -> None:
        if self.case.mode.masters:
            self.optimizer.refresh_master_weights()

    def wrap_again(self, is_new: bool) -> None:
        if not is_new:
            self.optimizer.reset()
            self.zero_grad()
            self.wrap()
            self._register()
            return
        scheduler = self.scheduler.state_dict() if self.scheduler is not None else None
        del self.optimizer, self.ddp, self.call, self.scheduler
        self.second = None
        for param in self.params:
            param.grad = None
        self.wrap()
        self.build_optimizer()
        self.build_second()
        self.scheduler = self.build_scheduler()
        if scheduler is not None:
            self.scheduler.load_state_dict(scheduler)

    def copy_all(self) -> None:
        self.net, self.optimizer, self.second = copy.deepcopy((self.net, self.optimizer, self.second))
        for param in self.params:
            param.grad = None
        self.scheduler = rebound(self)
        self.wrap()
        self._register()


def loss_scale(scale: float | str | None) -> DynamicLossScale | float | None:
    """The built-in loss scale of a case."""
    if scale == "dynamic":
        return DynamicLossScale(initial=FIRST_SCALE, growth_interval=INTERVAL)
    assert not isinstance(scale, str)
    return scale


@dataclass
class Pair:
    """Both runs, and what they remember."""

    plain: Plain
    ours: Ours
    memories: dict[str, Memory] = field(default_factory=dict)

    def remember(self, name: str) -> None:
        """Keep what both can load."""
        plain = self.plain
        model = {key: value.detach().clone() for key, value in plain.net.state_dict().items()}
        second = None if plain.second is None else copy.deepcopy(plain.second.state_dict())
        self.memories[name] = Memory(model, copy.deepcopy(plain.optimizer.state_dict()), second)
