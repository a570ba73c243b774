"""Model, optimizer and what else a loop has, of one of the two runs."""

import contextlib
import copy
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer, lr_scheduler

from ddp_zero.core.ddp.reducer import ddp_takes
from tests.fuzz.case import Case
from tests.fuzz.net import Net, batch_of
from tests.fuzz.toys import find_optimizer

INTERVAL = 3  # good steps after which scales grow
FIRST_SCALE = 1024.0
SCALER: dict[str, Any] = {"init_scale": FIRST_SCALE, "growth_interval": INTERVAL}
HOOKS: dict[str, Any] = {
    "allreduce": default_hooks.allreduce_hook,
    "fp16": default_hooks.fp16_compress_hook,
    "bf16": default_hooks.bf16_compress_hook,
}
_DECAY = 0.1


_Groups = weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, dist.ProcessGroup | None]]
_shard_groups, _first_ranks = _Groups(), _Groups()


def shard_group(size: int | None) -> dist.ProcessGroup | None:
    """This rank's group of neighbours, made once per job. A collective when it is made."""
    if size is None:
        return None
    known = _shard_groups.setdefault(dist.distributed_c10d._get_default_group(), {})
    for start in range(0, dist.get_world_size() if size not in known else 0, size):
        group = dist.new_group(list(range(start, start + size)))
        if start <= dist.get_rank() < start + size:
            known[size] = group
    return known[size]


def first_ranks(size: int) -> dist.ProcessGroup | None:
    """The group of the first ranks, made once per job; None elsewhere. A collective when it is made."""
    known = _first_ranks.setdefault(dist.distributed_c10d._get_default_group(), {})
    if size not in known:
        group = dist.new_group(list(range(size)))
        known[size] = group if dist.get_rank() < size else None
    return known[size]


@dataclass
class Place:
    """Which rank this is, and where ranks share files.

    Attributes:
        injects: a mistake to make on purpose, so that the fuzzer can be tested; None: none.
    """

    rank: int
    world_size: int
    folder: str
    injects: str | None = None


@dataclass
class Memory:
    """What both sides load: the state of the model and of the plain optimizers at some moment."""

    model: dict[str, Any]
    optimizer: dict[str, Any]
    second: dict[str, Any] | None = None


class Side:
    """One of the two runs.

    Attributes:
        seen: what is compared besides the models: names and values.
        op: the number of the operation that runs.
        average: of the parameters over time.
        second: the optimizer of the parameters that are held out, or None.
        inputs: of the last pass.
    """

    is_ours = False
    ddp: DistributedDataParallel
    call: Callable[..., Any]
    optimizer: Any
    second: Any = None
    inputs: Tensor

    def __init__(self, case: Case, place: Place, net: Net) -> None:
        self.case = case
        self.place = place
        self.net = net
        self.seen: list[tuple[str, Any]] = []
        self.op = 0
        self.average = [param.detach().clone() for param in net.parameters()]
        self.scaler = torch.amp.GradScaler("cpu", enabled=case.loop.scaler, **SCALER)
        self.wrap()
        self.build_optimizer()
        self.build_second()
        self.scheduler = self.build_scheduler()

    # Building

    def wrap(self) -> None:
        """Put the network into a new DDP."""
        case = self.case
        cap, options = case.ddp.bucket_cap_mb, dict[str, Any]()
        if cap is not None:
            from_the_start = case.ddp.caps_first and ddp_takes("bucket_cap_mb_list")
            options = {"bucket_cap_mb_list": [cap]} if from_the_start else {"bucket_cap_mb": cap}
        self.ddp = DistributedDataParallel(
            self.net,
            gradient_as_bucket_view=case.ddp.gradient_as_bucket_view,
            find_unused_parameters=case.ddp.find_unused_parameters,
            static_graph=case.ddp.static_graph,
            broadcast_buffers=case.ddp.broadcast_buffers,
            **options,
        )
        self.call = self.ddp
        if case.ddp.compiled is not None:
            self.call = torch.compile(self.ddp, backend=case.ddp.compiled)

    def build_optimizer(self) -> None:
        """A new optimizer over the network, registered where it needs to be."""
        raise NotImplementedError

    def build_second(self) -> None:
        """A second optimizer over what the first one leaves out, if the case has one."""
        second, params = self.case.optim.second, [self.stepped(param) for _, param in self.held_out()]
        if second is not None and params:
            one = find_optimizer(second.name)
            self.second = self.second_of(params, one.build, copy.deepcopy(one.options))

    def second_of(self, params: list[Tensor], build: Callable[..., Optimizer], options: dict[str, Any]) -> Any:
        """The second optimizer."""
        return build(params, **options)

    def stepped(self, param: Tensor) -> Tensor:
        """What the optimizer holds for a parameter."""
        return param

    def groups(self, params: list[tuple[str, Tensor]]) -> list[dict[str, Any]]:
        """Parameter groups as the case wants them."""
        case, optim = self.case, self.case.optim
        options = optimizer_options(case)
        held = {id(param) for _, param in self.held_out()}
        members = [(name, self.stepped(param)) for name, param in params if id(param) not in held]
        parts: list[tuple[list[tuple[str, Tensor]], dict[str, Any]]] = [(members, {})]
        if optim.groups == "decay":
            has_decay = "weight_decay" in _defaults_of(case)
            matrices = [pair for pair in members if pair[1].dim() >= 2]
            others = [pair for pair in members if pair[1].dim() < 2]
            own = [{"weight_decay": decay} if has_decay else {} for decay in (_DECAY, 0.0)]
            parts = [(matrices, own[0]), (others, own[1])]
        elif optim.groups == "alternate":
            lr = options.get("lr", 0.01) * 0.3
            parts = [(members[::2], {}), (members[1::2], {"lr": lr})]
        parts = [part for part in parts if part[0]]
        if case.mode.group_clip is not None and self.is_ours:
            parts[-1][1]["max_grad_norm"] = case.mode.group_clip
        if not optim.named:
            return [{"params": [param for _, param in members], **own} for members, own in parts]
        return [{"params": members, **own} for members, own in parts]

    def held_out(self) -> list[tuple[str, Tensor]]:
        """The parameters that ``add_param_group`` brings later, or that a second optimizer steps."""
        optim, trainable = self.case.optim, list[tuple[str, Tensor]](self.net.named_parameters())
        if optim.second is not None and find_optimizer(optim.name).matrices_only:
            return [(name, param) for name, param in trainable if param.dim() != 2]
        count = min(optim.held_out, len(trainable) - 1)
        return trainable[len(trainable) - count :] if count else []

    def build_scheduler(self) -> Any:
        """The scheduler of the loop."""
        kind, optimizer = self.case.loop.scheduler, self.optimizer
        if kind == "ExponentialLR":
            return lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
        if kind == "StepLR":
            return lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        if kind == "CosineAnnealingLR":
            return lr_scheduler.CosineAnnealingLR(optimizer, T_max=7)
        if kind == "OneCycleLR":
            cycles = {"momentum", "betas"} & set(_defaults_of(self.case)) != set()
            return lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=100, cycle_momentum=cycles)
        if kind == "LambdaLR":
            return lr_scheduler.LambdaLR(optimizer, warm_up)
        return None

    # A loop's parts

    @property
    def params(self) -> list[nn.Parameter]:
        """The network's parameters."""
        return list(self.net.parameters())

    def loss(self, number: int, uses: bool, factor: float = 1.0) -> Tensor:
        """The loss of a batch."""
        inputs, targets = batch_of(self.case, self.place.rank, self.op, number)
        torch.manual_seed(1000 * self.op + 10 * number + self.place.rank)
        self.inputs = inputs
        output = self.call(inputs, uses)
        loss = nn.functional.mse_loss(output.double() if output.dtype == torch.float64 else output.float(), targets)
        self.seen.append((f"loss {number}", loss.detach().clone()))
        return loss * factor if factor != 1.0 else loss

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to go backward from."""
        scaled: Tensor = self.scaler.scale(loss)
        return scaled

    def backward(self, kind: str, number: int, uses: bool, factor: float) -> Tensor:
        """One forward and backward pass; returns the loss."""
        with self.pass_context(kind):
            loss = self.loss(number, uses, factor)
            self.scale(loss).backward()
        if (inputs := self.inputs).requires_grad:
            self.seen.append(("gradient of inputs", inputs.grad))
        return loss

    def pass_context(self, kind: str) -> Any:
        """Where a pass runs."""
        return self.ddp.no_sync() if kind == "no_sync" else contextlib.nullcontext()

    def passes_are_over(self, kinds: tuple[str, ...]) -> None:
        """All backward passes of an iteration have run."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop or zero gradients, those of parameters that are in no group yet too."""
        second = self.case.optim.second
        if second is not None and second.zero == "model":
            self.net.zero_grad(set_to_none)
            return
        self.optimizer.zero_grad(set_to_none=set_to_none)
        if second is not None:
            if self.second is not None and second.zero == "each":
                self.second.zero_grad(set_to_none=set_to_none)
            return
        for _, param in self.held_out():
            if not any(param is member for group in self.optimizer.param_groups for member in group["params"]):
                param.grad = None

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Take the step as the loop does."""
        raise NotImplementedError

    def step_second(self) -> None:
        """Take the second optimizer's step, if there is one."""
        if self.second is not None:
            if self.case.loop.scaler and (self.case.loop.unscales or self.case.loop.clip is not None):
                self.scaler.unscale_(self.second)
            self.scaler.step(self.second)

    def clip(self, kind: str, limit: float) -> None:
        """Clip in the loop."""
        raise NotImplementedError

    def full_grad(self, param: Tensor) -> Tensor | None:
        """The whole averaged gradient."""
        return None if param.grad is None else param.grad.detach().clone()

    def has_written(self) -> None:
        """Somebody has written to parameters."""

    def load(self, memory: Memory) -> None:
        """Load model and optimizer."""
        self.net.load_state_dict(memory.model)
        self.has_written()
        self.optimizer.load_state_dict(copy.deepcopy(memory.optimizer))
        self.load_second(memory)

    def load_second(self, memory: Memory) -> None:
        """Load the second optimizer, if there is one."""
        if self.second is not None:
            self.second.load_state_dict(copy.deepcopy(memory.second))

    def wrap_again(self, is_new: bool) -> None:
        """After an exception: a new DDP, and a new optimizer if everything was dropped."""
        raise NotImplementedError

    def copy_all(self) -> None:
        """Go on with deep copies of network and optimizer."""
        raise NotImplementedError


def rebound(side: Side) -> Any:
    """A scheduler of a side's optimizer that goes on where the present one is."""
    if side.scheduler is None:
        return None
    state = side.scheduler.state_dict()
    options = [(group, dict(group)) for group in side.optimizer.param_groups]
    scheduler = side.build_scheduler()
    for group, before in options:
        group.update(before)
    scheduler.load_state_dict(state)
    return scheduler


def note_gradients(side: Side) -> None:
    """Averaged gradients are compared where every rank has them."""
    if side.case.mode.stage == 1 and side.case.mode.loss_scale is None:
        grads = [None if param.grad is None else param.grad.detach().clone() for param in side.params]
        side.seen.append(("gradients", grads))


def optimizer_options(case: Case) -> dict[str, Any]:
    """Options of the class, in values of their own."""
    options = copy.deepcopy(find_optimizer(case.optim.name).options)
    if options.get("nesterov") and torch.get_default_device().type != "cpu":
        options["foreach"] = False  # the default there changes gradients in place: see docs/limits.md
    return options


def _defaults_of(case: Case) -> dict[str, Any]:
    probe: Optimizer = find_optimizer(case.optim.name).build([nn.Parameter(torch.zeros(2, 2))])
    return probe.defaults


def warm_up(step: int) -> float:
    """A schedule that first rises."""
    return min(1.0, 0.2 * (step + 1))
