"""The reference: DDP, the unsharded optimizer, and torch's own parts or what they mean."""

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.fuzz.case import Case
from tests.fuzz.net import Net
from tests.fuzz.sides import FIRST_SCALE, HOOKS, INTERVAL, Place, Side, note_gradients, optimizer_options, rebound
from tests.fuzz.toys import find_optimizer
from tests.multiproc.cases import SumByGroup, sum_in_rank_order, unnamed

_LOW = (torch.float16, torch.bfloat16)


class NotFinite(RuntimeError):
    """The reference refuses gradients that are not finite, as the case asks for."""


class Plain(Side):
    """The unsharded run.

    Attributes:
        masters: by parameter, the fp32 copies that are stepped.
        sums: by the parameter's position, of averaged gradients.
        exact: by parameter, the sums before they were rounded to its dtype.
        loss_scale: the built-in one, by hand.
        is_stale: whether other ranks have stepped more often, under Join.
    """

    def __init__(self, case: Case, place: Place, net: Net) -> None:
        self.masters: dict[Tensor, nn.Parameter] = {}
        self.sums: dict[int, Tensor] = {}
        self.exact: dict[Tensor, Tensor] = {}
        scale = case.mode.loss_scale
        self.loss_scale = FIRST_SCALE if isinstance(scale, str) else scale
        self.good_steps = 0
        self.is_stale = False
        super().__init__(case, place, net)

    # Building

    def wrap(self) -> None:
        super().wrap()
        self._wrapped = self.params  # which the optimizer steps, whatever the model has later
        if (hook := self._hook()) is not None:
            self.ddp.register_comm_hook(None, hook)

    def _hook(self) -> Any:
        """The hook of the case, or the one that adds up gradients as stage 2 does; None: DDP reduces by itself."""
        case = self.case
        if case.ddp.hook is not None:
            return unnamed(HOOKS[case.ddp.hook])
        if case.mode.stage == 2 and case.mode.shard_ranks is not None:
            return SumByGroup(case.mode.shard_ranks).average
        if case.mode.stage == 2 and (self.place.world_size > 2 or case.model.has_low_precision):
            return sum_in_rank_order
        return None

    @property
    def has_hook(self) -> bool:
        """Whether DDP reduces by a hook."""
        return self._hook() is not None

    def build_optimizer(self) -> None:
        self.masters = {}
        if self.case.mode.masters:
            held = {param for _, param in self.held_out()} if self.case.optim.second is not None else set()
            low = [param for param in self.params if param.dtype in _LOW and param not in held]
            self.masters = {
                param: nn.Parameter(param.detach().float(), requires_grad=param.requires_grad) for param in low
            }
        groups = self.groups(list(self.net.named_parameters()))
        self.optimizer = find_optimizer(self.case.optim.name).build(groups, **optimizer_options(self.case))

    def stepped(self, param: Tensor) -> Tensor:
        return self.masters.get(param, param)

    # Passes

    def scale(self, loss: Tensor) -> Tensor:
        return loss * self.loss_scale if self.loss_scale is not None else super().scale(loss)

    def backward(self, kind: str, number: int, uses: bool, factor: float) -> Tensor:
        loss = super().backward(kind, number, uses, factor)
        if kind == "accumulate" and self.case.mode.stage == 2:
            self._collect()
        return loss

    def _collect(self) -> None:
        """Stage 2 adds up averages, those of low precision in fp32."""
        for index, param in enumerate(self.params):
            if param.grad is not None:
                grad = param.grad.float() if param.dtype in _LOW else param.grad.clone()
                self.sums[index] = self.sums[index] + grad if index in self.sums else grad
                param.grad = None

    def passes_are_over(self, kinds: tuple[str, ...]) -> None:
        if self.sums:
            self._collect()
            params = self.params
            for index, total in self.sums.items():
                params[index].grad = total.to(params[index].dtype)
                self.exact[params[index]] = total
            self.sums.clear()
        note_gradients(self)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        held = {id(param) for group in self.optimizer.param_groups for param in group["params"]}
        for param, master in self.masters.items():
            if param.grad is not None and id(master) in held:
                param.grad = None if set_to_none else torch.zeros_like(param.grad)

    # The step

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        if closure is not None:
            closure()
        loop = self.case.loop
        for param, master in self.masters.items():
            master.grad = None if param.grad is None else self.exact.get(param, param.grad.float())
        self.exact.clear()
        if loop.scaler and (loop.unscales or loop.clip is not None):
            self.scaler.unscale_(self.optimizer)
        if loop.clip is not None:
            self.clip(loop.clip, loop.clip_norm)
        if loop.scaler:
            self._step_with_scaler()
            return
        is_finite = self._prepare()
        norm = self._clip_inside() if is_finite else None
        if is_finite:
            self.optimizer.step()
            self._write_back()
        self._note(is_finite, norm)

    def _step_with_scaler(self) -> None:
        norm = self._clip_inside()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.seen.append(("scale", self.scaler.get_scale()))
        if norm is not None and math.isfinite(norm.item()):
            self.seen.append(("norm", norm.item()))

    def _prepare(self) -> bool:
        """Divide the loss scale out; whether the step may be taken."""
        held = [param for group in self.optimizer.param_groups for param in group["params"]]
        grads = [param.grad for param in held if param.grad is not None]
        if self.loss_scale is not None:
            inverse = torch.tensor(1.0 / self.loss_scale, dtype=torch.float32).item()
            for grad in grads:
                grad.mul_(inverse)
        return not skips(self.case) or all(bool(torch.isfinite(grad).all()) for grad in grads)

    def _note(self, is_finite: bool, norm: Tensor | None) -> None:
        if self.case.mode.loss_scale == "dynamic":
            assert self.loss_scale is not None
            self.good_steps = self.good_steps + 1 if is_finite else 0
            if not is_finite:
                self.loss_scale = max(self.loss_scale * 0.5, 1.0)
            elif self.good_steps == INTERVAL:
                self.loss_scale, self.good_steps = self.loss_scale * 2, 0
        if self.case.mode.loss_scale is not None:
            self.seen.append(("scale", self.loss_scale))
        if norm is not None:
            self.seen.append(("norm", norm.item()))
        if not is_finite and self.case.mode.nonfinite == "raise":
            raise NotFinite

    def _clip_inside(self) -> Tensor | None:
        limit, group_limit = self.case.mode.max_grad_norm, self.case.mode.group_clip
        if limit is None and group_limit is None:
            return None
        if self.case.loop.scaler and not (self.case.loop.unscales or self.case.loop.clip is not None):
            self.scaler.unscale_(self.optimizer)
        params = self._in_order()
        if group_limit is None:
            return self._clip_by(limit, params)
        norm = self._clip_by(math.inf, params)
        own = {id(param) for param in self.optimizer.param_groups[-1]["params"]}
        if limit is not None:
            self._clip_by(limit, [param for param in params if id(param) not in own])
        self._clip_by(group_limit, [param for param in params if id(param) in own])
        return norm

    def _in_order(self) -> list[Tensor]:
        """Parameters in the order in which norms are taken: the model's, where the optimizer knows the model."""
        params = [self.stepped(param) for param in self._wrapped]
        if self.case.has_hook or self.case.mode.via in ("shard_optimizer", "attach"):
            return params
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    def clip(self, kind: str, limit: float) -> None:
        if kind == "own":
            norm = self._clip_by(limit, self._in_order())
        else:
            norm = nn.utils.clip_grad_norm_(self.params, limit, self.case.mode.norm_type)
        self.seen.append(("norm", norm.detach().clone()))

    def _clip_by(self, limit: float | None, params: list[Tensor]) -> Tensor:
        held = {id(param) for group in self.optimizer.param_groups for param in group["params"]}
        params = [param for param in params if id(param) in held and param.grad is not None]
        norm_type = self.case.mode.norm_type
        if limit is None or limit == math.inf:
            return self._norm_of(params)
        if len({param.dtype for param in params}) == 1 and params[0].dtype not in _LOW:
            return nn.utils.clip_grad_norm_(params, limit, norm_type)
        total = self._norm_of(params)
        nn.utils.clip_grads_with_norm_(params, limit, total)
        return total

    def _norm_of(self, params: list[Tensor]) -> Tensor:
        """The norm of norms, in order, those of low precision in fp32."""
        norm_type, norms = self.case.mode.norm_type, []
        for param in params:
            assert param.grad is not None
            grad = param.grad.float() if param.dtype in _LOW else param.grad
            norms.append(torch.linalg.vector_norm(grad, norm_type))
        if not norms:
            return torch.tensor(0.0)
        total: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
        return total

    # State

    def state_dict(self) -> dict[str, Any]:
        """A copy of the optimizer's, with a dynamic loss scale as the sharded optimizer has it."""
        state: dict[str, Any] = copy.deepcopy(self.optimizer.state_dict())
        if self.case.mode.loss_scale == "dynamic":
            state["loss_scale"] = {"value": self.loss_scale, "good_steps": self.good_steps, "patience": 1}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over such a state."""
        if (scale := state.pop("loss_scale", None)) is not None:
            self.loss_scale, self.good_steps = scale["value"], scale["good_steps"]
        self.optimizer.load_state_dict(state)

    # Masters

    @torch.no_grad()
    def _write_back(self) -> None:
        for param, master in self.masters.items():
            param.copy_(master)

    @torch.no_grad()
    def has_written(self) -> None:
        for param, master in self.masters.items():
            master.copy_(param)

    # Anew

    def wrap_again(self, is_new: bool) -> None:
        for param in self.params:
            param.grad = None
        if not is_new:
            self.wrap()
            return
        scheduler = self.scheduler.state_dict() if self.scheduler is not None else None
        self.wrap()
        self.build_optimizer()
        self.build_second()
        self.scheduler = self.build_scheduler()
        if scheduler is not None:
            self.scheduler.load_state_dict(scheduler)

    def copy_all(self) -> None:
        kept = (self.net, self.optimizer, self.second, list(self.masters.items()))
        self.net, self.optimizer, self.second, masters = copy.deepcopy(kept)
        self.masters = dict(masters)
        for param in self.params:
            param.grad = None
        self.scheduler = rebound(self)
        self.wrap()


def skips(case: Case) -> bool:
    """Whether ours takes no step from gradients that are not finite."""
    mode = case.mode
    if mode.nonfinite is not None:
        return mode.nonfinite != "step"
    waits = case.waits or (mode.stage == 2 and not mode.overlap)
    return waits and (case.has_hook or mode.clips or mode.loss_scale is not None)
