"""The step half of `ZeroRedundancyOptimizer`: when a step is taken, by ``step()``, under Join or before a forward pass.

A step, on every rank alike:

1. evaluate the closure, if any; refuse sparse gradients;
2. plan and bind again if parameters were moved, frozen or unfrozen since the last step;
3. under Join, send gradients to ranks that have run out of inputs;
4. if options require it, decide whether to step and by which factors to multiply gradients;
5. for each bucket in plan order: step what this rank owns of it, start its sync;
6. finish all syncs; expose the options that the step changed.

If the step was taken inside backward, ``step()`` only joins the iteration.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.algorithms.join import Join, Joinable
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ddp_zero.backward.hook import OverlapHook
from ddp_zero.backward.machine import Phase
from ddp_zero.backward.reducer import has_hook
from ddp_zero.comm.communicator import Communicator
from ddp_zero.local.absent import tell_nonfinite
from ddp_zero.local.awaited import untouched
from ddp_zero.local.masters import GradientSource, PublishedGradients
from ddp_zero.reach_gradients import CHANGED, ReachesGradients
from ddp_zero.step.decision import AmpState, Occasion
from ddp_zero.step.join import borrow_gradients, serve_joined
from ddp_zero.step.record import StepRecord, StepRegime


class TakesSteps(ReachesGradients, Joinable):
    """An optimizer whose step is taken in ``step()`` or inside backward."""

    optim: Optimizer
    _comm: Communicator
    _is_first_step = True
    _step_supports_amp_scaling = True  # GradScaler calls step() even if gradients are not finite: all ranks decide

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Step this rank's parameters and receive the others from their owners. A collective.

        ``last_step`` records the outcome.

        Args:
            closure: evaluated once, with gradients enabled, before anything is stepped.
            **kwargs: handed to the local optimizer's ``step``.

        Returns:
            The closure's result, or what the local optimizer returned for the last bucket it stepped.

        Raises:
            NotImplementedError: for a gradient that is not dense, naming the parameter.
            RuntimeError: if gradients are not finite and ``nonfinite="raise"``, on every rank; or if a peer failed or
                the group's time-out passed: parameters may then be half updated.
        """
        if closure is not None and not callable(closure):
            raise TypeError(f"Expected a callable closure or None, got {type(closure).__name__}. Pass options by name.")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        amp = self._amp_state()
        hook = self._overlap() if self._takes_hook else None
        if hook is not None and hook.step_is_due:
            self._learn_from_first_step(hook, amp)
        if kwargs and self._overlaps and self._why_wait() is None:
            raise TypeError(f"Expected no arguments but the closure with overlap_with_ddp=True, got {sorted(kwargs)}.")
        if hook is not None and self._overlaps and not (hook.is_waiting or self._has_nothing()):
            self._check_unscaled(hook, amp)
            hook.check_joined()
            return loss
        if amp is not None and self._overlaps:
            self._let_gradients_wait()  # from now on
        Join.notify_join_context(self)
        result = self._take_step(None if closure is None else lambda: loss, amp, kwargs)
        return result if closure is None else loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop or zero the gradients of all parameters, including those that wait to be added to the next sum.

        A collective once, in a loop without ``step()`` that has not stepped yet: it takes the first step beforehand.
        """
        self._take_due_step()
        with untouched() if set_to_none else nullcontext():  # zeroing must reach `AbsentGradient`
            super().zero_grad(set_to_none)
        self._decision.forget()
        self._passes.forget()
        if self._hook is not None:
            self._hook.drop_carried()

    def reset(self) -> None:
        """Drop the iteration, after an exception in forward or backward of an overlapped step.

        Buckets that were stepped before the exception stay stepped; with `hook_with_zero_step` none is. If DDP itself
        cannot continue, as after an exception in the middle of backward, wrap the model again and build a new hook.
        """
        if self._hook is not None:
            self._hook.reset()
        else:
            self._sharded.binding.sync.abandon()

    def finish_sync(self) -> None:
        """Wait for all parameters that other ranks have stepped and that ``sync="forward"`` has left in flight.

        Modules wait for their own parameters, and nearly every torch function for its arguments. Call this before other
        code reads or writes parameters: pointers or views kept from before, extensions, methods of a process group,
        functions of `torch.jit.script` and ``trace``, and of torch ``torch.Tensor(param)``, ``torch.tensor(param)``,
        ``torch.as_tensor`` and ``torch.asarray`` into a different dtype, ``tensor.new_tensor(param)``,
        ``tensor.new(param)``, ``torch.autograd.Variable(param)``, ``torch.nested.nested_tensor``,
        ``torch.sparse_coo_tensor``, ``torch.func.grad`` and ``vmap`` of functions of parameters.

        Raises:
            RuntimeError: if a peer failed or the group's time-out passed.
        """
        self._sharded.binding.sync.complete()

    @property
    def last_step(self) -> StepRecord | None:
        """The record of the last step, the same on every rank; None before the first."""
        return self._sharded.last_step

    # Loss scale and masters

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the loss scale, to call ``backward()`` on; the step divides the scale out again.

        Raises:
            RuntimeError: without ``loss_scale=``.
        """
        if self.loss_scale is None:
            raise RuntimeError(
                "Expected a loss scale, got none. Build the optimizer with loss_scale=DynamicLossScale()."
            )
        return loss * self.loss_scale

    @property
    def loss_scale(self) -> float | None:
        """What `scale` multiplies by now; None without ``loss_scale=``."""
        scale = self._decision.loss_scale
        return None if scale is None else scale.value

    @property
    def master_weights(self) -> dict[Tensor, Tensor]:
        """The fp32 masters of parameters that this rank owns, by parameter; empty without ``master_weights=True``."""
        params = self._sharded.table.params
        self._sharded.stepped.follow_model()
        return {params[index]: master.detach() for index, master in self._sharded.stepped.masters.items()}

    def refresh_master_weights(self) -> None:
        """Copy the model's parameters to the masters, after writing to the model. Never communicates.

        Raises:
            RuntimeError: without ``master_weights=True``; between a backward pass that has stepped and ``opt.step()``.
        """
        if self._hook is not None:
            self._hook.check_before_step("opt.refresh_master_weights()")
        if not self._sharded.stepped.has_masters:
            raise RuntimeError("Expected master weights, got none. Build the optimizer with master_weights=True.")
        self._sharded.stepped.refresh()
        self._sharded.snapshot = None

    # Taking a step

    def _take_step(
        self,
        closure: Callable[[], Any] | None,
        amp: AmpState | None,
        kwargs: dict[str, Any],
        by_user: bool = True,
    ) -> Any:
        sharded, joins = self._sharded, self._join_config.enable
        found = self._watch_forward()
        if self._is_first_step:  # the same on every rank, unlike when a model is found again
            self._is_first_step = False
            self._passes.learn_count()
            self._passes.last_is_local |= found  # assumed, since their last passes were not seen
        sharded.begin(closure)
        if self._hook is not None:
            self._hook.check_complete()
        sharded.table.check_gradients()
        self._check_averaged()
        sharded.refresh(may_talk=not joins)
        if joins:
            reach_joined = self._reduction is not None
            serve_joined(sharded, reach_joined)
        try:
            return self._decision.take(self._occasion(amp), **kwargs)
        finally:
            self._passes.forget()
            if self._hook is not None and by_user:
                self._hook.machine.step_taken()
                self._hook.first_step_taken()
            if amp is not None and self.last_step is not None and not self.last_step.stepped:
                tell_nonfinite(param.grad for param in sharded.table.params)

    def _occasion(self, amp: AmpState | None, borrowed: GradientSource | None = None) -> Occasion:
        hook, joins = self._hook, self._join_config.enable
        if hook is None:
            source = borrowed or PublishedGradients(self._sharded.table.params)
            return Occasion(StepRegime.STANDALONE, source, amp=amp, may_have_joined=joins)
        waits = self._why_wait() is not None or not hook.step_is_due
        source = borrowed or hook.gradients
        return Occasion(StepRegime.DEFERRED, source, hook.deferred_because, waits, amp, joins)

    def _step_joined(self) -> None:
        """`step` on a rank that has run out of inputs: without a closure, with gradients from a peer."""
        sharded = self._sharded
        if self._takes_hook:
            self._overlap().step_joined(self._take_borrowed)
            return
        sharded.refresh(may_talk=not self._join_config.enable)
        nothing = dict[int, Tensor]().__getitem__
        self._take_borrowed(borrow_gradients(sharded, nothing))

    def _take_borrowed(self, source: GradientSource) -> None:
        self._sharded.begin()
        self._decision.take(self._occasion(None, source))

    # Callers that come between backward and step

    def _amp_state(self) -> AmpState | None:
        """What a `GradScaler` has set on this optimizer before it calls ``step()``; None without one."""
        found = getattr(self, "found_inf", None)
        if found is None:
            return None
        if self._decision.loss_scale is not None:
            raise RuntimeError(
                "Expected one loss scale, got loss_scale= of the optimizer and a torch.amp.GradScaler. Use one of them."
            )
        if self._join_config.enable:
            raise RuntimeError(
                "Expected no torch.amp.GradScaler under Join, got one: a rank that has joined knows nothing of its "
                "scale. Use loss_scale= of the optimizer instead, or bfloat16, which needs none."
            )
        return AmpState(getattr(self, "grad_scale", None), torch.as_tensor(found, dtype=torch.float32))

    def _has_nothing(self) -> bool:
        """True if the step waits for this call and all gradients were dropped: as in any optimizer, nothing is done."""
        params = self._sharded.table.params
        return self._why_wait() is not None and all(param.grad is None for param in params)

    def _learn_from_first_step(self, hook: OverlapHook, amp: AmpState | None) -> None:
        """At the first ``step()``: make all steps wait for it if any rank's loop changes anything after backward."""
        changes = amp is not None or hook.late.first() is not None
        if any(flag for (flag,) in self._comm.all_gather_ints([int(changes)])):
            self._waits_because = CHANGED

    def _check_unscaled(self, hook: OverlapHook, amp: AmpState | None) -> None:
        if amp is not None and hook.machine.phase is Phase.STEPPED:
            raise RuntimeError(
                "Expected unscaled gradients, got a step under torch.amp.GradScaler, and backward has stepped already "
                "with scaled ones. Use the GradScaler from the first step on, or build the optimizer with loss_scale= "
                "or overlap_with_ddp=False."
            )

    def _before_forward(self, ddp: DistributedDataParallel) -> None:
        """Before a forward pass: check that its gradients will be reduced, and take a step that is due.

        Raises:
            RuntimeError: if the hook that the optimizer needs is not registered on the model.
        """
        if not self._takes_hook:
            return
        self._overlap()
        if not has_hook(ddp):
            raise RuntimeError(
                "Expected the optimizer's communication hook on the DDP model, got a model without one. Call "
                "ddp.register_comm_hook(None, hook) with what hook_with_zero_step(...) has returned."
            )
        self._take_due_step()

    def _take_due_step(self) -> None:
        """Take the first step if it is still due, in a loop that never calls ``step()``. A collective.

        Raises:
            RuntimeError: if gradients or parameters were changed since.
        """
        hook = self._hook
        if hook is None or hook.machine.user_calls_step:
            return
        if hook.step_is_due and self._why_wait() is None:
            hook.late.check_unstepped()
            with hook.late.as_noted():
                self._take_step(None, None, {}, by_user=False)
            hook.due_step_taken()
