"""The DDP models over an optimizer's parameters that are known, and whether they still see all gradients."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node
from torch.nn.parallel import DistributedDataParallel

from ddp_zero.core.ddp.preconditions import check_torch
from ddp_zero.core.ddp.reducer import (
    accumulator_of,
    count_reduced,
    follows_join,
    is_finalized,
    latest_join,
    missing_for_models,
    models_over,
    reduced_parameters,
    registered_hooks,
)
from ddp_zero.values.placeholders import not_awaiting_params


class KnownModels:
    """The DDP models that an optimizer knows, held weakly; none at first."""

    def __init__(self) -> None:
        self._known: list[_WrappedModel] = []
        self._reduced: int | None = None  # how many of the optimizer's parameters
        self._misses = 0
        self._ended: list[object] = []  # `latest_join` of the models

    def __bool__(self) -> bool:
        """True if any was known, alive or not."""
        return bool(self._known)

    def know(self, models: Sequence[DistributedDataParallel]) -> None:
        """Know these models alone from now on; RuntimeError if this torch lacks a name that is read of them."""
        if models:
            check_torch("an optimizer relies beside a DDP model", missing_for_models())
        self._known = [_WrappedModel(model) for model in models]
        self.note_join_ended()

    def search(self, params: Sequence[Tensor]) -> list[DistributedDataParallel]:
        """The models over some parameters, unless one is known; looked for in the first, second, fourth ... call."""
        if self.alive:
            return []
        self._misses += 1
        return [] if self._misses & (self._misses - 1) else models_over(params)

    @property
    def alive(self) -> list[DistributedDataParallel]:
        """The models that are still there."""
        return [model for one in self._known if (model := one.model()) is not None]

    @property
    def hooks(self) -> list[Callable[[Any, Any], Any]]:
        """The communication hooks that are registered on the models."""
        return [hook for model in self.alive for hook in registered_hooks(model)]

    def note_join_ended(self) -> None:
        """Note that no `Join` over the models is active."""
        self._ended = [latest_join(model) for model in self.alive]

    def in_join(self, model: DistributedDataParallel) -> bool:
        """True if a `Join` that lists a model has begun since `note_join_ended`."""
        return follows_join(model) and not any(latest_join(model) is one for one in self._ended)

    def learn_count(self, params: Sequence[Tensor]) -> None:
        """Count which of these the models reduce, at a moment that is the same on every rank: later, garbage dies.

        DDP tells how many parameters it reduces, not which: all others that it may reduce are taken to be among them.
        """
        own = set(params)
        models = self.alive
        others = [param for model in models for _, param in reduced_parameters(model) if param not in own]
        self._reduced = sum(map(count_reduced, models)) - len(others) if models else None

    def reduce_fewer_than(self, count: int) -> bool:
        """True if the models of the first step, if any was known, reduce fewer of the parameters than this."""
        return self._reduced is not None and self._reduced < count

    def find_converted(self) -> str | None:
        """Name of a parameter whose gradients DDP no longer sees: it has another dtype or device, or had meanwhile."""
        return next((name for one in self._known if (name := one.find_converted()) is not None), None)

    def lost_parameter(self) -> str | None:
        """Why DDP no longer sees the gradients of a parameter, and the remedy, in words; None if it sees all."""
        replaced = next((name for one in self._known if (name := one.find_replaced()) is not None), None)
        if replaced is not None:
            return (
                f"{replaced!r} was replaced in the model after it was wrapped, as by load_state_dict(assign=True) or "
                "module.weight = Parameter(...), and DDP and the optimizer hold the old one. Copy the values into the "
                "parameter instead, or wrap the model again and build a new optimizer."
            )
        if (name := self.find_converted()) is not None:
            return (
                f"{name!r} was converted to a different dtype or device after the model was wrapped, as by "
                "model.double(), and DDP no longer sees its gradients. Convert the model before wrapping it."
            )
        return None

    def check_none_lost(self, where: str) -> None:
        """Raise RuntimeError if DDP no longer sees the gradients of a parameter."""
        if (why := self.lost_parameter()) is not None:
            raise RuntimeError(f"Gradients were not averaged ({where}): {why} [ZERO-301]")

    def find_unfinished(self) -> DistributedDataParallel | None:
        """A model whose last backward pass has left DDP waiting for gradients; None: there is none."""
        return next((model for model in self.alive if not is_finalized(model)), None)


class _WrappedModel:
    """A model, and its parameters as they were when it became known."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self.model = weakref.ref(model)
        params = reduced_parameters(model)
        self._wrapped = {name: (weakref.ref(param), accumulator_of(param)) for name, param in params}

    def find_replaced(self) -> str | None:
        """Name of a parameter in whose place the model, if there still is one, has a different one now, or None."""
        model = self.model()
        if model is None:
            return None
        now = dict(model.module.named_parameters())
        return next((name for name, (was, _) in self._wrapped.items() if now.get(name) is not was()), None)

    def find_converted(self) -> str | None:
        """Name of a parameter that no longer accumulates gradients where DDP waits for them, or None."""
        alive = ((name, was(), node) for name, (was, node) in self._wrapped.items())
        with not_awaiting_params():
            return next((name for name, param, node in alive if _accumulates_elsewhere(param, node)), None)


def _accumulates_elsewhere(param: Tensor | None, node: Node | None) -> bool:
    if param is None or not param.requires_grad or node is None:
        return False
    return accumulator_of(param) not in (node, None)  # None: not to be asked, as while a late sync is under way
