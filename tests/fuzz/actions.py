"""What a loop does besides forward, backward and step: small acts on one side."""

import copy
from typing import Any

import torch
from torch import Tensor

from ddp_zero import ZeroRedundancyOptimizer
from tests.fuzz.case import Action
from tests.fuzz.net import batch_of
from tests.fuzz.sides import Memory, Side

_EVALUATION = 900  # numbers of batches that are not trained with


def act(side: Side, action: Action, memory: Memory, sees_output: bool = True) -> None:
    """Carry out one action.

    Args:
        side: on which.
        action: its name and arguments.
        memory: the state before this operation, for those that load.
        sees_output: whether what the model computes is the same on both sides at this moment.
    """
    name, arguments = action[0], action[1:]
    if name == "set":
        _set(side, *arguments)
    elif name == "state":
        _set_state(side, *arguments)
    elif name == "options":
        _set_options(side, *arguments)
    elif name == "tensor_lr":
        for group in side.optimizer.param_groups:
            group["lr"] = torch.tensor(float(group["lr"]))
    elif name == "hooks":
        side.optimizer.register_step_pre_hook(_nothing)
        side.optimizer.register_step_post_hook(_nothing)
    elif name in ("decay", "data_decay", "write", "repoint"):
        _write(side, name, *arguments)
    elif name == "copy":
        param = side.params[arguments[0] % len(side.params)]
        side.seen.append(("copy", param.detach().clone() if sees_output else None))
    elif name == "construct":
        param = side.params[arguments[0] % len(side.params)]
        if isinstance(side.optimizer, ZeroRedundancyOptimizer):
            side.optimizer.finish_sync()  # these do not wait: see docs/limits.md
        like = torch.empty(1, dtype=param.dtype)
        made = torch.Tensor(param) if param.dtype == torch.float32 else like.new_tensor(param)
        side.seen.append(("constructed", made.detach().clone() if sees_output else None))
    elif name == "average":
        for mean, param in zip(side.average, side.params, strict=True):
            mean.lerp_(param.detach(), 0.25)
    elif name == "full_grad":
        param = side.params[arguments[0] % len(side.params)]
        side.seen.append(("full gradient", side.full_grad(param)))
    elif name == "eval":
        evaluate(side, sees_output)
    elif name == "load_optimizer":
        side.optimizer.load_state_dict(copy.deepcopy(memory.optimizer))
    elif name in ("clip_own", "clip_torch"):
        side.clip(name.removeprefix("clip_"), arguments[1])
    else:
        raise ValueError(f"Expected an action, got {name!r}.")


def _set(side: Side, position: int, option: str, factor: float) -> None:
    groups = side.optimizer.param_groups
    group = groups[position % len(groups)]
    value = group[option]
    if isinstance(value, Tensor) and position % 2:
        value.mul_(factor)
        return
    group[option] = value * factor if value else 0.01 * factor


def _set_options(side: Side, position: int, factor: float) -> None:
    """Options that a step uses besides ``lr`` and ``weight_decay``."""
    groups = side.optimizer.param_groups
    group = groups[position % len(groups)]
    if "betas" in group:
        first, *others = group["betas"]
        group["betas"] = (first * factor, *others)
    if group.get("momentum"):
        group["momentum"] *= factor
    if "eps" in group and isinstance(group["eps"], float):
        group["eps"] *= 2


def _set_state(side: Side, position: int, factor: float, how: str) -> None:
    """In place, by a new tensor, or by a new dict; only the owner has a sharded state, whole or in part."""
    params = side.params
    key, states = side.stepped(params[position % len(params)]), side.optimizer.state
    if key not in states:
        return
    state = states[key]
    for name, value in list(state.items()):
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim:
            if how == "in place":
                value.mul_(factor)
            else:
                state[name] = value * factor
    if how == "dict" and not side.case.mode.masters:  # ours shows a dict of its own then
        states[key] = dict(state)


def _nothing(*_: Any) -> None:
    pass


def _write(side: Side, name: str, position: int, factor: Any) -> None:
    params = [param for param in side.params if param.requires_grad]
    param = params[position % len(params)]
    if name == "decay":
        with torch.no_grad():
            param.mul_(factor)
    elif name == "data_decay":
        param.data.mul_(factor)
    elif name == "write":
        with torch.no_grad():
            param.copy_(param * factor + 0.001)
    else:
        param.data = param.data * factor
    side.has_written()


def evaluate(side: Side, sees_output: bool) -> None:
    """A forward pass without gradients."""
    side.net.eval()
    inputs, _ = batch_of(side.case, side.place.rank, side.op, _EVALUATION)
    if side.op % 3 == 0:
        with torch.inference_mode():
            output = side.net(inputs)
    elif side.op % 3 == 1:
        with torch.no_grad():
            output = torch.func.functional_call(side.net, dict(side.net.named_parameters()), (inputs,))
    else:
        with torch.no_grad():
            output = side.ddp.module(inputs)
    side.net.train()
    if sees_output:
        side.seen.append(("output", output.clone()))
