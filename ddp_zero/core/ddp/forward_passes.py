"""Watches the passes of DDP models: whether DDP averages the gradients, and whether a step is due before the next one.

DDP decides in its forward pass whether the backward pass will be reduced. So a pre-hook on DDP itself, where ranks may
communicate as DDP does, notes that decision and lets the optimizer act before anything is computed. Nothing runs here
in evaluation, in copies of the model, or where `torch.compile` compiles DDP itself.

DDP reduces one backward pass for all forward passes since the last one that it has reduced. A second one over the same
forward pass, or over an earlier one, adds this rank's own gradients to averages, without a word. Hooks on what DDP
returns, and on one parameter, tell such a pass from one over something else, as a penalty on the weights, which may be
the same on every rank.

Pipeline schedules of torch decide differently. They run all passes of a step under ``no_sync()`` but the last backward
pass, before which they prepare DDP's reducer themselves. In the first step, and after an evaluation, they also run the
model once to learn the shapes of what it returns: not under ``no_sync()``, so that DDP would average the backward pass
of the first micro-batch, and its average once more with the last one (torch 2.13.0). Stage 1 leaves that to DDP, for
the same bits. Elsewhere averages would be mixed with a rank's own gradients: no forward pass prepares a reduction.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from ddp_zero.core.ddp.known_models import KnownModels
from ddp_zero.core.ddp.reducer import (
    backward_id,
    has_static_graph,
    models_over,
    prepare_reduction,
    reduced_parameters,
    set_will_reduce,
    will_reduce,
)
from ddp_zero.core.local.weak_calls import WeakHook, tensors_in, weakly

BeforeForward = Callable[[DistributedDataParallel], None]


class ForwardPasses:
    """Watches the forward passes of some DDP models.

    Args:
        before: called before each forward pass with gradients; may communicate, and may raise.

    Attributes:
        models: the models that are watched.
        last_is_local: whether the last forward pass with gradients since `forget` was under ``no_sync()``: its
            gradients are this rank's own.
        is_scheduled: whether a pipeline schedule runs the model, see the module docstring.
        holds_back: whether no forward pass prepares a reduction, see `follow_schedule`.
        checks: called before each forward pass with gradients; may raise.
        has_seen: whether a pass was seen since `forget`.
        has_warned: whether ranks know that they step by gradients of their own, without any DDP model.
        leave_if_dropped: called first, with the model: see `RegisteredHook.leave_if_dropped`.
    """

    def __init__(self, before: BeforeForward) -> None:
        self._before = before
        self.models = KnownModels()
        self._backwards: list[_BackwardTracker] = []
        self._handles: list[RemovableHandle] = []
        self.last_is_local = self.has_seen = self._is_pending = self.has_warned = False
        self.is_scheduled = self.holds_back = False
        self.checks: list[Callable[[], None]] = []
        self.leave_if_dropped: Callable[[DistributedDataParallel], object] = bool
        self._reduced_before: bool | None = None

    def find_models(self, params: Sequence[Tensor]) -> bool:
        """Find the DDP models over some parameters, unless one is known, and watch them; not at every call.

        Returns:
            True if models were found.
        """
        models = self.models.search(params)
        if models:  # else one that was dropped stays known: its passes are missed
            self.watch(models)
        return bool(models)

    def watch(self, models: Sequence[DistributedDataParallel]) -> None:
        """Watch these models and no others from now on."""
        self.stop()
        self.models.know(models)
        for model in models:
            self._backwards.append(_BackwardTracker(self, model))
            self._handles.append(model.register_forward_pre_hook(WeakHook(self.begin), prepend=True))
            self._handles.append(model.register_forward_hook(WeakHook(self.end), always_call=self.holds_back))

    def follow_schedule(self, holds_back: bool) -> None:
        """Expect the passes of a pipeline schedule from now on.

        Args:
            holds_back: whether no forward pass may prepare a reduction.
        """
        self.is_scheduled, self.holds_back = True, holds_back
        self.watch(self.models.alive)

    def know_any_over(self, params: Sequence[Tensor]) -> bool:
        """True if a DDP model over some parameters is known, was known, or is found now, and watched from then on."""
        if not self.models:
            self.watch(models_over(params))
        return bool(self.models)

    def stop(self) -> None:
        """Watch no model."""
        for handle in self._handles:
            handle.remove()
        for backwards in self._backwards:
            backwards.stop()
        self.models.know(())
        self._backwards.clear()
        self._handles.clear()

    def forget(self) -> None:
        """Forget the last pass, after its gradients were used or dropped; not one whose gradients are still to come."""
        self.last_is_local &= self._is_pending
        self.has_seen &= self._is_pending
        for backwards in self._backwards:
            backwards.mixes = backwards.follows = False

    def reset(self) -> None:
        """Forget the last pass, also one that an exception has interrupted before its gradients came."""
        self._is_pending = False
        self.forget()

    @property
    def mixes(self) -> bool:
        """True if a second backward pass over a forward pass has added to the averages of the first."""
        return any(backwards.mixes for backwards in self._backwards)

    @property
    def may_add_local(self) -> bool:
        """True if any backward pass that DDP did not reduce may have followed the one that it did."""
        return any(backwards.follows for backwards in self._backwards)

    def why_not_reduced(self, after_a_step: bool = False) -> str:
        """Why DDP has not averaged gradients that the last backward passes have left, and the remedy, in words.

        Args:
            after_a_step: whether a step has been taken since the model was wrapped, which may have used them.
        """
        if self.is_scheduled:
            return PASSED_BY
        if after_a_step and not (self.has_seen or self.may_add_local):
            return self.models.lost_parameter() or _TWICE
        return self.models.lost_parameter() or (_NO_PASS if self.has_seen else _AROUND)

    def note_reduced(self, model: DistributedDataParallel) -> None:
        """Note that a backward pass was reduced; the last one of a schedule reduces the sum of all."""
        self.last_is_local &= not (self.is_scheduled and will_reduce(model))

    def backward_begins(self) -> None:
        """Note that gradients of the last forward pass accumulate."""
        self._is_pending = False

    def prepare_reduction(self, model: DistributedDataParallel, loss: Tensor) -> None:
        """Have DDP reduce the next backward pass, which starts at a loss, whatever its forward pass has prepared."""
        prepare_reduction(model, loss)
        self.last_is_local = False
        for backwards in self._backwards:
            backwards.begin(model, is_reduced=True)

    def begin(self, model: DistributedDataParallel, _: Any) -> None:
        """Note that a forward pass begins, and call ``before``."""
        if torch.is_grad_enabled():
            self.leave_if_dropped(model)
            for check in self.checks:
                check()
            if self.holds_back:
                self._reduced_before = set_will_reduce(model, False)
            self.last_is_local = not will_reduce(model)
            self.has_seen = True
            self._is_pending = True
            for backwards in self._backwards:
                backwards.begin(model, is_reduced=not self.last_is_local)
            self._before(model)

    def end(self, model: DistributedDataParallel, _: Any, returned: Any) -> None:
        """Note that a forward pass has ended, or failed."""
        if self._reduced_before is not None:
            set_will_reduce(model, self._reduced_before)
            self._reduced_before = None
        if torch.is_grad_enabled():
            for backwards in self._backwards:
                backwards.end(model, returned)


class _BackwardTracker:
    """Tells which backward passes of a model DDP reduces.

    Args:
        model: the model. Passes of a static graph are not told apart.

    Attributes:
        mixes: whether the pass under way, or the last, adds gradients of this rank alone to those that DDP averages.
        follows: whether it is a further one after the same forward pass, which DDP does not reduce.
    """

    def __init__(self, passes: ForwardPasses, model: DistributedDataParallel) -> None:
        self._passes, self.model = weakref.ref(passes), weakref.ref(model)
        self._is_reduced_next = True  # unknown before the first forward pass
        self._pass_over_outputs = -1
        self.mixes = self.follows = False
        self._begins = weakly(self._begins_backward)
        params = reduced_parameters(model)
        self._handle = (
            params[-1][1].register_post_accumulate_grad_hook(weakly(self._after_accumulation)) if params else None
        )

    def begin(self, model: DistributedDataParallel, is_reduced: bool) -> None:
        self._is_reduced_next |= is_reduced and self.model() is model

    def end(self, model: DistributedDataParallel, returned: Any) -> None:
        """Note the outputs of a forward pass."""
        if self.model() is model and not has_static_graph(model):
            for output in tensors_in(returned):
                if output.grad_fn is not None:
                    output.register_hook(self._begins)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.remove()

    def _begins_backward(self, _: Tensor) -> None:
        self._pass_over_outputs = backward_id()

    def _after_accumulation(self, _: Tensor) -> None:
        passes = self._passes()
        if passes is None:
            return
        passes.backward_begins()
        self.follows = not self._is_reduced_next
        if self._is_reduced_next:
            self.mixes = False
        elif self._pass_over_outputs == backward_id() and not passes.last_is_local:
            self.mixes = passes.has_seen = True
        self._is_reduced_next = False


_NO_PASS = (
    "no backward pass since the last step was reduced. Run the last one before opt.step() outside ddp.no_sync(), or "
    "drop left-over gradients with opt.zero_grad(). If the loop averages gradients itself, average all of them, and "
    "build the optimizer with overlap_with_ddp=False (shard_optimizer(..., overlap=False))."
)
_AROUND = (
    "since the last step, or opt.zero_grad(), no forward pass has gone through DDP. Wrap the model in "
    "DistributedDataParallel and call the wrapped model, not its module. If the loop averages gradients itself, "
    "average all of them before opt.step(), and build the optimizer with overlap_with_ddp=False "
    "(shard_optimizer(..., overlap=False))."
)
_TWICE = (
    "opt.step() has taken the step of the last backward pass through DDP already. Call it once after each backward(), "
    "of a loss of the wrapped model. To step again with the same gradients, as a plain loop would, build the optimizer "
    "with overlap_with_ddp=False (shard_optimizer(..., overlap=False))."
)
PASSED_BY = (
    "the pipeline schedule has not started DDP's reducer. Schedules that compute gradients of weights apart from those "
    "of inputs, as InterleavedZeroBubble, ZBVZeroBubble and DualPipeV of torch, do not: give PipelineStage the stage "
    "without DDP, whose gradients opt.step() averages."
)
"""The remedy where a schedule passes a DDP model by."""
