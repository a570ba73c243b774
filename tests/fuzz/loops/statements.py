"""The statements of a loop, carried out on either side."""

import contextlib
import copy
import io
import re
import signal
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.optim.swa_utils import AveragedModel

from ddp_zero import checkpoint
from tests.fuzz.late_values import MESSAGE
from tests.fuzz.loops.case import Do
from tests.fuzz.loops.expect import SAVED, reached
from tests.fuzz.net import Blown, batch_of
from tests.fuzz.plain import Plain
from tests.fuzz.sides import Side

_EVALUATION = 900  # numbers of batches that are not trained with
_CODE = re.compile(r"\[(ZERO-\d+)\]")
_MOMENTUM = 0.75


def code_of(error: BaseException) -> str | None:
    """The code at the end of a message of the library, or what torch says of a late value."""
    found = [MESSAGE] if MESSAGE in str(error) else _CODE.findall(str(error))
    return found[-1] if found else None


class Loop:
    """One side of a loop while it runs.

    Attributes:
        sides: the models with their optimizers.
        seen: names and values that the statement has shown, which are compared.
        saved: by label, the optimizer's and the model's state of a save.
        is_quiet: whether nothing is to be compared: a step without any gradient, or a save that was refused.
        is_stale: whether other ranks have gone on alone, under Join.
    """

    def __init__(self, sides: list[Any], folder: str, saved: dict[int, tuple[Any, Any]] | None = None) -> None:
        self.sides = sides
        self.folder = folder
        self.seen: list[tuple[str, Any]] = []
        self.saved: dict[int, tuple[Any, Any]] = dict(saved or {})
        self.is_quiet = False
        self.is_stale = False
        self._number = 0
        self._losses: list[Tensor] = []
        self._inputs: list[Tensor] = []
        self._paths: list[tuple[str, ...]] = []
        self._contexts: dict[int, contextlib.ExitStack] = {}
        self._averaged = [False] * len(sides)
        self._gathered = [list(side.net.parameters()) for side in sides]
        self._copies: list[list[Tensor]] = []
        self._before: list[Tensor] = []
        self._observed: list[Tensor] = []
        self._averages: dict[int, Any] = {}

    @property
    def is_ours(self) -> bool:
        """Whether it is the sharded side."""
        return bool(self.sides[0].is_ours)

    def do(self, number: int, statement: Do) -> None:
        """Carry out a statement."""
        self._number = number
        self.seen, self.is_quiet = [], False
        side = self.sides[statement.unit]
        side.seen.clear()
        is_mine = statement.rank in (None, side.place.rank)
        if is_mine or (statement.verb == "save" and not self.is_ours):  # every rank can load what was saved
            VERBS[statement.verb](self, side, statement)
        self.seen = self.seen + side.seen if is_mine else []

    def show(self, name: str, value: Any) -> None:
        """Have a value compared with the other side's."""
        self.seen.append((name, value))

    # Gradients

    def zero(self, side: Side, statement: Do) -> None:
        by, form = statement.args
        self._averaged[statement.unit] &= form not in ("none", "zeros")
        if by == "opt":
            side.zero_grad(set_to_none=form == "none")
        elif by in ("model", "ddp"):
            model: nn.Module = side.net if by == "model" else side.ddp
            model.zero_grad(set_to_none=form == "none")
        else:
            for param in side.net.parameters():
                if form == "none":
                    param.grad = None
                elif param.grad is not None:
                    if form == "detach_":
                        param.grad.detach_()
                    param.grad.zero_()

    def edit(self, side: Side, statement: Do) -> None:
        how = statement.args[0]
        if how == "own_norm":
            self.show("norm", side.optimizer.clip_grad_norm_(0.3) if self.is_ours else _clip_by_norm(side))
        elif how == "own_value":
            if self.is_ours:
                side.optimizer.clip_grad_value_(0.02)
            else:
                nn.utils.clip_grad_value_(side.net.parameters(), 0.02)
        elif how == "norm":
            self.show("norm", nn.utils.clip_grad_norm_(side.net.parameters(), 0.3).detach().clone())
        elif how == "norm_gathered":
            self.show("norm", nn.utils.clip_grad_norm_(self._gathered[statement.unit], 0.3).detach().clone())
        elif how == "value":
            nn.utils.clip_grad_value_(side.net.parameters(), 0.02)
        else:
            for param in self._gathered[statement.unit] if how.endswith("gathered") else side.net.parameters():
                if param.grad is not None:
                    _edit(param.grad, how)

    def grad_norm(self, side: Side, statement: Do) -> None:
        grads = [param.grad for param in side.net.parameters() if param.grad is not None]
        self.show("norm", torch.stack([grad.detach().double().norm() for grad in grads]).norm())

    def copy_grads(self, side: Side, statement: Do) -> None:
        params = [param for param in side.net.parameters() if param.requires_grad]
        self._copies.append([torch.zeros_like(p) if p.grad is None else p.grad.detach().clone() for p in params])

    def put_grads(self, side: Side, statement: Do) -> None:
        """Gradient surgery: of two tasks' gradients, conflicting parts are taken out of the first."""
        how, averages = statement.args
        params = [param for param in side.net.parameters() if param.requires_grad]
        one, other = self._copies
        self._copies = []
        dot = sum(float((a * b).double().sum()) for a, b in zip(one, other, strict=True))
        square = sum(float(b.double().square().sum()) for b in other)
        for param, a, b in zip(params, one, other, strict=True):
            grad = a + b * (1 - min(0.0, dot / (square + 1e-12)))
            if averages:
                dist.all_reduce(grad)
                grad /= dist.get_world_size()
            if how == "copy_" and param.grad is not None:
                param.grad.copy_(grad)
            elif how == "data" and param.grad is not None:
                param.grad.data = grad
            else:
                param.grad = grad

    # Passes

    def enter(self, side: Side, statement: Do) -> None:
        kind = statement.args[0]
        stack = self._contexts[statement.unit] = contextlib.ExitStack()
        if kind == "no_sync":
            stack.enter_context(side.ddp.no_sync())
        elif kind == "flag":
            side.ddp.require_backward_grad_sync = False
            stack.callback(setattr, side.ddp, "require_backward_grad_sync", True)
        elif self.is_ours:
            stack.enter_context(side.optimizer.accumulate())

    def leave(self, side: Side, statement: Do) -> None:
        self._contexts.pop(statement.unit).close()

    def forward(self, side: Side, statement: Do) -> None:
        number, path, *factors = statement.args
        loss = self._loss(number, path)
        self.show("loss", loss.detach().clone())
        self._losses.append(loss * float(factors[0]) if factors else loss)
        self._paths.append(path)

    def _loss(self, number: int, path: tuple[str, ...]) -> Tensor:
        models = [int(element.partition(" ")[0]) for element in path if element != "detach"]
        first, last = self.sides[models[0]], self.sides[models[-1]]
        rank = first.place.rank
        value, _ = batch_of(first.case, rank, self._number, number)
        self._inputs.append(value)
        _, targets = batch_of(last.case, rank, self._number, number)
        torch.manual_seed(1000 * self._number + 10 * number + rank)
        for element in path:
            if element == "detach":
                value = value.detach()
                continue
            model, _, through = element.partition(" ")
            side = self.sides[int(model)]
            value = (side.net if through == "module" else side.ddp)(value)
        return nn.functional.mse_loss(value.float(), targets)

    def backward(self, side: Side, statement: Do) -> None:
        loss: Tensor = sum(self._losses[1:], self._losses[0])
        through = dict(pair for path in self._paths for pair in reached(path))
        numbers = set(through)
        inputs, self._losses, self._paths, self._inputs = self._inputs, [], [], []
        scaled = side.scale(loss)
        aside = {} if self.is_ours else self._set_averages_aside(numbers)
        scaled.backward()
        for value in filter(attrgetter("requires_grad"), inputs):
            self.show("gradient of inputs", value.grad)
        for param, kept in aside.items():
            param.grad = kept if param.grad is None else kept + param.grad
        for number in numbers:
            is_averaged = through[number] == "ddp" and self.sides[number].ddp.require_backward_grad_sync
            self._averaged[number] = bool(is_averaged)

    def _set_averages_aside(self, numbers: set[int]) -> dict[Tensor, Tensor]:
        """The plain side of a mode that adds up averages, where DDP averages a sum."""
        aside: dict[Tensor, Tensor] = {}
        for number in sorted(numbers):
            side = self.sides[number]
            if self._averaged[number] and (side.case.mode.stage == 2 or side.case.mode.sums_in_fp32):
                for param in side.net.parameters():
                    if param.grad is not None and param.requires_grad:
                        aside[param], param.grad = param.grad.clone(), None
        return aside

    def fails(self, side: Side, statement: Do) -> None:
        """An exception that the loop catches."""
        where, then = statement.args
        side.zero_grad()
        self._averaged[statement.unit] = False
        side.net.blows = where if where in ("forward", "backward") else None
        try:
            with contextlib.suppress(Blown):
                loss = self._loss(0, (str(statement.unit),))
                if where == "loss":
                    raise Blown
                if where == "start":
                    loss.register_hook(_blow)
                side.scale(loss).backward()
        finally:
            side.net.blows = None
        if then == "reset" and self.is_ours:
            side.optimizer.reset()
        side.zero_grad()

    # Steps

    def step(self, side: Side, statement: Do) -> None:
        self.is_quiet = not self.is_ours and all(param.grad is None for param in side.net.parameters())
        side.step()

    def interrupt(self, side: Side, statement: Do) -> None:
        """Ctrl-C; the handler saves, or steps before it where a message says so."""
        try:
            signal.raise_signal(signal.SIGINT)
            time.sleep(1)
        except KeyboardInterrupt:
            try:
                self._state_of(side, "state_dict")
            except RuntimeError as error:
                if "Call opt.step(), then save" not in str(error):
                    raise
        self.step(side, statement)
        self.save(side, Do("save", ("state_dict", False, statement.args[0])))

    def observe(self, side: Side, statement: Do) -> None:
        """An average of parameters in a hook of all optimizers, which steps of this one's update."""
        average = self._observed = [param.detach().clone() for param in side.net.parameters()]
        mine, params = weakref.ref(side.optimizer), list(side.net.parameters())

        def hook(optimizer: Optimizer, *_: object) -> None:
            if optimizer is mine():
                for mean, param in zip(average, params, strict=True):
                    mean.lerp_(param.detach().to(mean.dtype), 0.5)

        weakref.finalize(self, register_optimizer_step_post_hook(hook).remove)

    def step_closure(self, side: Side, statement: Do) -> None:
        kind, number = statement.args

        def closure() -> Tensor | None:
            side.zero_grad()
            self._averaged[statement.unit] = False
            if kind == "skip":
                return None
            path = (str(statement.unit),)
            loss = self._loss(number, path)
            side.scale(loss).backward()
            self._averaged[statement.unit] = True
            return loss if kind == "loss" else None

        side.step(closure)
        side.seen.clear()

    def set(self, side: Side, statement: Do) -> None:
        option, factor = statement.args
        for group in side.optimizer.param_groups:
            value = group[option] if option in group else 0.0
            group[option] = value * factor if isinstance(value, Tensor) or value else 0.01 * factor

    def schedule(self, side: Side, statement: Do) -> None:
        side.scheduler.step()

    # Parameters

    def write(self, side: Side, statement: Do) -> None:
        how, position, factor = statement.args
        params = [param for param in side.net.parameters() if param.requires_grad]
        param = params[position % len(params)]
        if how == "data":
            param.data.mul_(factor)
        else:
            with torch.no_grad():
                param.mul_(factor)

    @torch.no_grad()
    def perturb(self, side: Side, statement: Do) -> None:
        """SAM: up the gradient."""
        params = list(side.net.parameters())
        norm = torch.stack([param.grad.norm() for param in params if param.grad is not None]).norm()
        self._before = [param.detach().clone() for param in params]
        for param in params:
            if param.grad is not None:
                param.add_(param.grad * (0.05 / (norm + 1e-12)))

    @torch.no_grad()
    def restore(self, side: Side, statement: Do) -> None:
        """SAM: back, by a copy or by another memory."""
        for param, before in zip(side.net.parameters(), self._before, strict=True):
            if statement.args[0] == "repoint":
                param.data = before
            else:
                param.copy_(before)

    def freeze(self, side: Side, statement: Do) -> None:
        position, freezes = statement.args
        params = list(side.net.parameters())
        params[position % len(params)].requires_grad_(not freezes)

    def freeze_all(self, side: Side, statement: Do) -> None:
        side.net.requires_grad_(not statement.args[0])

    def replace(self, side: Side, statement: Do) -> None:
        how, position = statement.args
        if how == "double":
            side.net.double()
            side.net.model = replace(side.net.model, dtype="float64")
        elif how == "assign":
            state = {name: value.clone() for name, value in side.net.state_dict().items()}
            side.net.load_state_dict(state, assign=True)
        else:
            names = [name for name, _ in side.net.named_parameters()]
            owner, _, leaf = names[position % len(names)].rpartition(".")
            module = side.net.get_submodule(owner)
            old = getattr(module, leaf)
            setattr(module, leaf, nn.Parameter(old.detach() + 0.01))

    # Copies and averages

    def copy_ddp(self, side: Side, statement: Do) -> None:
        how = statement.args[0]
        if how == "pickle":
            torch.save(side.ddp, io.BytesIO())
        elif how == "deepcopy":
            self._averages[statement.unit] = copy.deepcopy(side.ddp)
        elif how == "averaged":
            self._averages[statement.unit] = AveragedModel(side.ddp)
        elif how == "averaged module":
            self._averages[statement.unit] = AveragedModel(side.ddp.module)
        else:
            self._averages[statement.unit] = copy.deepcopy(side.ddp.module)

    @torch.no_grad()
    def average(self, side: Side, statement: Do) -> None:
        model = self._averages[statement.unit]
        if isinstance(model, AveragedModel):
            inner = isinstance(model.module, nn.parallel.DistributedDataParallel)
            model.update_parameters(side.ddp if inner else side.ddp.module)
            return
        for mean, param in zip(model.parameters(), side.ddp.parameters(), strict=True):
            mean.mul_(_MOMENTUM).add_(param, alpha=1 - _MOMENTUM)

    def show_average(self, side: Side, statement: Do) -> None:
        model = self._averages[statement.unit]
        self.show("average", [param.detach().clone() for param in model.parameters()])

    # State

    def save(self, side: Side, statement: Do) -> None:
        form, catches, label = statement.args
        try:
            model, state = self._state_of(side, form)
        except RuntimeError as error:
            if not (self.is_ours and catches and code_of(error) in SAVED):
                raise
            self.is_quiet = True
            return
        self.show("model", model)
        if state is not None:
            # copied: a rank that is alone in its group gets live tensors, as from torch
            self.saved[label] = (model, copy.deepcopy(state))
            is_shown = form != "checkpoint" and (form != "consolidate" or side.place.rank == 0)
            if is_shown and not side.case.mode.masters:
                self.show("state", state)

    def _state_of(self, side: Side, form: str) -> tuple[dict[str, Tensor], Any]:
        model = {name: value.detach().clone() for name, value in side.ddp.module.state_dict().items()}
        return model, side.state_dict() if isinstance(side, Plain) else self._save_ours(side, form)

    def _save_ours(self, side: Side, form: str) -> Any:
        if form == "consolidate":
            side.optimizer.consolidate_state_dict(to=0)
            return side.optimizer.state_dict() if side.place.rank == 0 else None
        if form == "checkpoint":
            checkpoint.save(Path(self.folder) / f"loop {side.case.seed} {self._number}", side.ddp, side.optimizer)
            return None
        state = side.optimizer.state_dict()
        if form == "torch.save":
            file = io.BytesIO()
            torch.save({"model": side.ddp.state_dict(), "optimizer": state}, file)
            file.seek(0)
            return torch.load(file, weights_only=True)["optimizer"]
        return copy.deepcopy(state) if form == "deepcopy" else state

    def load(self, side: Side, statement: Do) -> None:
        """Model and optimizer as in a save before; the optimizer's from the rank that has it, or from every rank."""
        label, rank = statement.args
        model, state = self.saved[label]
        side.net.load_state_dict(model)
        if self.is_ours and rank is not None and side.place.rank != rank:
            side.optimizer.load_state_dict(None)
        else:
            (side if isinstance(side, Plain) else side.optimizer).load_state_dict(copy.deepcopy(state))

    def evaluate(self, side: Side, statement: Do) -> None:
        how = statement.args[0]
        inputs, _ = batch_of(side.case, side.place.rank, self._number, _EVALUATION)
        model = side.ddp.module if how.startswith("module") else side.ddp
        model.eval()
        with torch.inference_mode() if how.endswith("inference") else torch.no_grad():
            output = model(inputs)
        model.train()
        self.show("output", output.clone())

    def join(self, side: Side, statement: Do) -> None:
        counts, joined = statement.args[0], list[Any]([side.ddp])
        if self.is_ours:
            joined.append(side.optimizer)
        with Join(joined):
            for batch in range(counts[side.place.rank]):
                side.zero_grad()
                side.scale(self._loss(batch, (str(statement.unit),))).backward()
                side.step()
        side.seen.clear()
        self.is_stale = counts[side.place.rank] < max(counts)

    def compare(self, side: Side, statement: Do) -> None:
        """Show what a hook has observed; `run_case` looks at the models."""
        if self._observed and not self.is_stale:
            self.show("observed", [one.clone() for one in self._observed])

    def finish(self, side: Side, statement: Do) -> None:
        """All ranks ask for the state, as at the end of a run."""
        for one in self.sides:
            state = one.optimizer.state_dict()
            if not one.case.mode.masters and not self.is_stale:
                self.show("state", state)


def _blow(grad: Tensor) -> None:
    raise Blown


def _edit(grad: Tensor, how: str) -> None:
    if how.startswith("data_clamp"):
        grad.data.clamp_(-0.02, 0.02)
    elif how.startswith("data_mul"):
        grad.data.mul_(0.05 / (grad.data.norm() + 1e-6))
    elif how == "data_copy":
        grad.data.copy_(grad.data * 0.5)
    elif how.startswith("clamp"):
        grad.clamp_(-0.02, 0.02)
    else:
        grad.mul_(0.5)


def _clip_by_norm(side: Side) -> Tensor:
    assert isinstance(side, Plain)
    side.clip("own", 0.3)
    norm: Tensor = side.seen.pop()[1]
    return norm


def options_of(side: Side) -> Iterator[dict[str, Any]]:
    """The groups of a side's optimizer without their parameters."""
    for group in side.optimizer.param_groups:
        yield {name: value for name, value in group.items() if name not in ("params", "param_names", "max_grad_norm")}


VERBS: dict[str, Callable[[Loop, Any, Do], None]] = {
    "zero": Loop.zero,
    "edit": Loop.edit,
    "grad_norm": Loop.grad_norm,
    "copy_grads": Loop.copy_grads,
    "put_grads": Loop.put_grads,
    "enter": Loop.enter,
    "leave": Loop.leave,
    "forward": Loop.forward,
    "backward": Loop.backward,
    "fails": Loop.fails,
    "step": Loop.step,
    "step_closure": Loop.step_closure,
    "interrupt": Loop.interrupt,
    "observe": Loop.observe,
    "set": Loop.set,
    "schedule": Loop.schedule,
    "write": Loop.write,
    "perturb": Loop.perturb,
    "restore": Loop.restore,
    "freeze": Loop.freeze,
    "freeze_all": Loop.freeze_all,
    "replace": Loop.replace,
    "copy_ddp": Loop.copy_ddp,
    "average": Loop.average,
    "show_average": Loop.show_average,
    "save": Loop.save,
    "load": Loop.load,
    "evaluate": Loop.evaluate,
    "join": Loop.join,
    "compare": Loop.compare,
    "finish": Loop.finish,
}
