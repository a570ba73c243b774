"""Watches the forward passes of DDP models: whether DDP will average the gradients, and whether a step is due before.

DDP decides in its forward pass whether the backward pass will be reduced. So a pre-hook on DDP itself, where ranks may
communicate as DDP does, notes that decision and lets the optimizer act before anything is computed. Nothing runs here
in evaluation, in copies of the model, or where `torch.compile` compiles DDP itself.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from ddp_zero.backward.reducer import count_reduced, models_over, will_reduce

BeforeForward = Callable[[DistributedDataParallel], None]


class ForwardPasses:
    """Watches the forward passes of some DDP models.

    Args:
        before: called before each forward pass with gradients; may communicate, and may raise.

    Attributes:
        last_is_local: whether the last forward pass with gradients since `forget` was under ``no_sync()``: its
            gradients are this rank's own.
    """

    def __init__(self, before: BeforeForward) -> None:
        self._before = before
        self._models: list[weakref.ref[DistributedDataParallel]] = []
        self._handles: list[RemovableHandle] = []
        self._reduces = 0  # how many parameters
        self.last_is_local = False
        self._is_expected = False
        self._misses = 0

    def find_models(self, params: Sequence[Tensor]) -> bool:
        """Find the DDP models over some parameters, unless one is known, and watch them; not at every call.

        Returns:
            True if models were found.
        """
        if not self._should_search():
            return False
        models = models_over(params)
        self.watch(models)
        return bool(models)

    def watch(self, models: Sequence[DistributedDataParallel]) -> None:
        """Watch these models and no others from now on."""
        self.stop()
        for model in models:
            self._models.append(weakref.ref(model))
            self._handles.append(model.register_forward_pre_hook(_PreHook(self), prepend=True))

    def stop(self) -> None:
        """Watch no model."""
        for handle in self._handles:
            handle.remove()
        self._models.clear()
        self._handles.clear()

    def learn_count(self) -> None:
        """Count what the models reduce, at a moment that is the same on every rank: later, garbage dies at any time."""
        self._reduces = sum(count_reduced(model) for ref in self._models if (model := ref()) is not None)

    def reduces_fewer_than(self, count: int) -> bool:
        """Whether the models of the first step, if any was known, reduce fewer parameters than this."""
        return 0 < self._reduces < count

    def forget(self) -> None:
        """Forget the last pass, after its gradients were used or dropped."""
        self.last_is_local = False

    def reduced(self) -> None:
        """Note that a backward pass was reduced."""
        self._is_expected = False

    @property
    def expect_reduction(self) -> bool:
        """Whether DDP reduces the next backward pass, even in ``no_sync()``: a forward pass outside was left open.

        DDP reduces the next backward pass, whichever forward pass that belongs to.
        """
        return self._is_expected

    def begin(self, model: DistributedDataParallel) -> None:
        """Note that a forward pass begins, and call ``before``."""
        if torch.is_grad_enabled():
            self.last_is_local = not will_reduce(model)
            self._is_expected |= not self.last_is_local
            self._before(model)

    def _should_search(self) -> bool:
        """If no model is known, True at the first, second, fourth ... call."""
        if any(reference() is not None for reference in self._models):
            return False
        self._misses += 1
        return self._misses & (self._misses - 1) == 0


class _PreHook:
    """A forward pre-hook; it does nothing in copies of the model."""

    def __init__(self, passes: ForwardPasses | None = None) -> None:
        self._passes = (lambda: None) if passes is None else weakref.ref(passes)  # a model outlives its optimizer

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return _PreHook, ()

    def __call__(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        passes = self._passes()
        if passes is not None and isinstance(module, DistributedDataParallel):
            passes.begin(module)


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls a bound method while its object lives, and then returns None.

    Hooks of a model call the engine: a model outlives its optimizer, and cycles are left to the garbage collector.
    """
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        alive = reference()
        return None if alive is None else alive(*args)

    return call
