"""Takes back the very first step inside backward, where the user turns out to need gradients before the step.

Whether a loop clips or unscales gradients between ``backward()`` and ``opt.step()``, as with `torch.amp.GradScaler`,
shows only after the first backward pass, which has stepped already. So what that step changes is remembered until the
next call tells; if it was too early, it is undone, and from then on the step waits for ``opt.step()``.
"""

import copy
from enum import Enum
from types import ModuleType
from typing import Any
from weakref import ReferenceType

import torch
from torch import Tensor
from torch.optim import Optimizer

from ddp_zero.local_step import ParamGroup, options_of
from ddp_zero.sharded_step import ShardedStep

_ELSEWHERE = ("param_groups", "state")  # what is remembered in other ways
_HOOKS = "_optimizer_"  # what torch.optim calls dicts of hooks; a bound method is not to be copied with its object
_DATA = (Tensor, dict, list, set, tuple)
_FIXED = (type(None), bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device, ModuleType, ReferenceType)


class StepMemory:
    """What a step is about to change on this rank: made right before it.

    Costs the memory of this rank's parameters, and of their state if they have any yet.
    """

    def __init__(self, sharded: ShardedStep) -> None:
        self._sharded = sharded
        stepped = sharded.stepped
        stepped.follow_model()
        owned = sharded.binding.owned()
        self._params = {index: sharded.table.params[index].detach().clone() for index in owned}
        self._masters = {index: master.detach().clone() for index, master in stepped.masters.items()}
        kept: list[Any] = [*sharded.table.params, *stepped.masters.values(), *_optimizers_in(sharded.inner)]
        memo = {id(one): one for one in kept}
        self._optimizers = [OptimizerMemory(one, memo) for one in _optimizers_in(sharded.inner)]
        self._order = copy.copy(sharded.order)
        self._options_left: list[ParamGroup] = []
        self._counts_left: list[Tensor] = []

    def step_was_taken(self) -> None:
        """From now on, options that differ from what the step has left were set by the user, and stay."""
        self._options_left = [options_of(group) for group in self._sharded.param_groups]
        self._counts_left = self._sharded.local_step.counts()

    @torch.no_grad()
    def take_back(self) -> None:
        """Undo the step, on every rank. A collective: owners send what their parameters were.

        Raises:
            RuntimeError: if the optimizer keeps data in objects that cannot be restored, naming the first.
        """
        sharded = self._sharded
        opaque = [name for optimizer in self._optimizers for name in optimizer.opaque]
        if opaque:
            raise RuntimeError(
                "Expected an optimizer whose first step can be taken back, since gradients are changed between "
                f"backward and opt.step(), got {opaque[0]}, which may keep anything. Build it with max_grad_norm= or "
                "loss_scale= instead of clipping or scaling in the loop, or with overlap_with_ddp=False."
            )
        for index, value in self._params.items():
            sharded.table.params[index].copy_(value)
        for index, value in self._masters.items():
            sharded.stepped[index].copy_(value)
        for optimizer in self._optimizers:
            optimizer.restore()
        sharded.order = self._order
        sharded.last_step = None
        sharded.has_stepped_inside = False
        sharded.local_step.take_back(self._options_left, self._counts_left)
        for bucket in sharded.binding.plan.buckets:
            sharded.binding.sync.start(bucket)
        sharded.end_syncs()
        sharded.stepped.note_versions()


class OptimizerMemory:
    """State, attributes and groups of one optimizer.

    Args:
        optimizer: whose.
        memo: what must not be copied, by `id`, as for `copy.deepcopy`: parameters, and other optimizers.

    Attributes:
        opaque: attributes whose values cannot be remembered, as text.
    """

    def __init__(self, optimizer: Optimizer, memo: dict[int, Any]) -> None:
        self._optimizer = optimizer
        self.opaque: list[str] = []
        self._state = self._copied("state", dict(optimizer.state), memo)
        self._groups = [(group, dict(group)) for group in optimizer.param_groups]
        attributes = {name: value for name, value in vars(optimizer).items() if name not in _ELSEWHERE}
        self._attributes = {
            name: (value, value if name.startswith(_HOOKS) else self._copied(name, value, memo))
            for name, value in attributes.items()
        }

    def _copied(self, name: str, value: Any, memo: dict[int, Any]) -> Any:
        """A copy of data; functions and the like as they are; what else there is, is noted."""
        if id(value) in memo or isinstance(value, _FIXED) or callable(value):
            return value
        try:
            if isinstance(value, _DATA):
                return copy.deepcopy(value, memo)
        except Exception:  # whatever a class raises that cannot be copied
            pass
        self.opaque.append(f"{type(self._optimizer).__name__}.{name} of type {type(value).__name__}")
        return value

    def restore(self) -> None:
        """Make all of it what it was."""
        optimizer, attributes = self._optimizer, vars(self._optimizer)
        optimizer.state.clear()
        optimizer.state.update(self._state)
        for group, options in self._groups:
            group.clear()
            group.update(options)
        for name in [name for name in attributes if name not in self._attributes and name not in _ELSEWHERE]:
            del attributes[name]
        for name, (value, copied) in self._attributes.items():
            if isinstance(value, Tensor) and value is not copied:
                value.copy_(copied)  # whoever else holds it sees it
                attributes[name] = value
            else:
                attributes[name] = copied


def _optimizers_in(optimizer: Optimizer) -> list[Optimizer]:
    """An optimizer and those that it wraps, each once."""
    found = [optimizer]
    for one in found:
        found += [value for value in vars(one).values() if isinstance(value, Optimizer) and value not in found]
    return found
