"""The engine of `ZeroRedundancyOptimizer`: when a step is taken, by ``step()``, under Join or before a forward pass.

A step, on every rank alike:

1. evaluate the closure, if any; refuse sparse gradients;
2. plan and bind again if parameters were moved, frozen or unfrozen since the last step;
3. under Join, send gradients to ranks that have run out of inputs;
4. if options require it, decide whether to step and by which factors to multiply gradients;
5. for each bucket in plan order: step this rank's segment of it, start its sync;
6. finish all syncs; expose the options that the step changed.

If the step was taken inside backward, ``step()`` only confirms it.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel

from ddp_zero.core.backward.overlap_machine import Phase
from ddp_zero.core.backward.scratch_bucket import ReduceOptions
from ddp_zero.core.comm.groups import check_not_forked
from ddp_zero.core.engine.attachment import Attachment
from ddp_zero.core.engine.gradient_access import GradientAccess
from ddp_zero.core.local.inner import steps_by_scaler
from ddp_zero.core.local.parameters import GradientSource, PublishedGradients
from ddp_zero.core.local.weak_calls import weakly
from ddp_zero.core.step.clipping import Result, TwoPhase
from ddp_zero.core.step.decision import AmpState, Decision, StepContext, calling_scaler, unscale_once
from ddp_zero.core.step.join import ZeroJoinHook, borrow_gradients, refuse_join, serve_joined
from ddp_zero.core.step.rank_shard import Shard
from ddp_zero.core.step.record import StepRecord, StepRegime
from ddp_zero.core.step.runner import build_runner
from ddp_zero.options import StepOptions
from ddp_zero.values.placeholders import not_awaiting_params, on_this_rank, report_nonfinite


class Engine:
    """Takes the steps of one optimizer, in ``step()`` or inside backward.

    Args:
        optimizer: the user's optimizer, on which `Join` and `torch.amp.GradScaler` set attributes.
        shard: the shard that is stepped.
        options: the user's options of a step.
        overlaps: whether the user asked for steps inside backward.
        reduction: how gradients travel in stage 2; None in stage 1.

    Attributes:
        label: traces a step in the flight record.
        attachment: the DDP models, the hook on them, and whether their passes step.
        gradients: gradients, as they are and as users change them.
        averages_reach_joined: under Join without a hook, whether ranks that have joined get the averaged gradients, in
            ``param.grad``.
    """

    def __init__(
        self, optimizer: Joinable, shard: Shard, options: StepOptions, overlaps: bool, reduction: ReduceOptions | None
    ) -> None:
        self.shard, self.label = shard, shard.trace.label("step")
        self.runner = build_runner(shard)
        self.decision = decision = Decision(self.runner, options)
        before_forward = weakly(self._before_forward)
        self.attachment = Attachment(optimizer, self.runner, decision, overlaps, reduction, before_forward)
        self.gradients = GradientAccess(self.attachment, decision)
        self.averages_reach_joined = False
        # for the next step that a `GradScaler` calls: ranks have agreed on it
        self._scaler_state: AmpState | None = None
        self._agreed_findings: object = None  # the findings of a `GradScaler` that ranks have agreed on last

    def copy_for(self, optimizer: Joinable, shard: Shard, memo: dict[int, Any]) -> "Engine":
        """An engine with the same options for a copy of the optimizer; it has no hook and knows no model."""
        options, attachment = self.decision.options, self.attachment
        engine = Engine(optimizer, shard, options, attachment.overlaps, attachment.reduction)
        engine.attachment.waits_because = attachment.waits_because
        engine.decision.loss_scale = copy.deepcopy(self.decision.loss_scale, memo)
        return engine

    def step(self, closure: Callable[[], Any] | None, kwargs: dict[str, Any]) -> Any:
        if torch.is_inference_mode_enabled():
            # state made there could not be stepped inside a later backward pass
            with torch.inference_mode(mode=False), torch.no_grad():
                return self.step(closure, kwargs)
        if closure is not None and not callable(closure):
            if type(self.shard.inner).__module__.startswith("torch.optim."):
                kind = type(closure).__name__
                raise TypeError(f"Expected a callable closure or None, got {kind}. Pass options by name. [ZERO-126]")
            # the first argument of other classes may be something else
            closure, kwargs = None, {"closure": closure, **kwargs}
        if closure is None:
            return self.run_alone(self.step_in_phases(None, kwargs))
        with torch.enable_grad():
            loss = closure()
        return self.run_alone(self.step_in_phases(lambda: loss, kwargs))

    def run_alone(self, deciding: TwoPhase[Result]) -> Result:
        """Run a step or a clip of this optimizer by itself, not as a member of a `ParallelOptimizer`."""
        rest_of_model = self.decision.rest_of_model
        try:
            stats = next(deciding)
            while True:
                stats = deciding.send(rest_of_model.stats_of_whole_model(stats))
        except StopIteration as ended:
            result: Result = ended.value
            return result
        finally:
            deciding.close()

    def step_in_phases(self, closure: Callable[[], Any] | None, kwargs: dict[str, Any]) -> TwoPhase[Any]:
        """`step` as a generator, see `TwoPhase`; ``closure`` returns a loss that is known."""
        loss = None if closure is None else closure()
        attachment, overlaps, optimizer = self.attachment, self.attachment.overlaps, self.attachment.joinable
        scaler_state = self._scaler_state or AmpState.of(optimizer)
        self._scaler_state = None
        if scaler_state is not None:
            self._check_scaler()
        hook = attachment.required_hook()
        if hook is not None and hook.step_is_due:
            hook.machine.check_due_step()
            attachment.learn_from_first_step(hook, by_scaler=scaler_state is not None)
        if kwargs and overlaps and attachment.why_wait() is None:
            raise TypeError(
                f"With overlap_with_ddp=True opt.step() takes only a closure, got {sorted(kwargs)}. Set options in "
                "opt.param_groups before backward(). [ZERO-126]"
            )
        if hook is not None and overlaps and not (hook.machine.is_waiting or self._are_all_dropped()):
            if hook.has_nothing_to_step():
                return loss
            if hook.machine.phase is Phase.REST and self.gradients.are_all_zeros():
                yield from self._take_step(closure, scaler_state, kwargs, by_user=False)
                return loss
            if scaler_state is not None and hook.machine.phase is Phase.STEPPED:
                raise RuntimeError(
                    "opt.step() was called by a torch.amp.GradScaler, and backward has already stepped with scaled "
                    "gradients. Load a checkpoint, and use the GradScaler from the first step after it on; or build "
                    "the optimizer with loss_scale= or overlap_with_ddp=False. [ZERO-314]"
                )
            hook.confirm_step()
            return loss
        if scaler_state is not None and overlaps:
            # a scaler unscales gradients after backward: from now on steps wait for that
            self.gradients.defer_steps()
        Join.notify_join_context(optimizer)
        result = yield from self._take_step(closure, scaler_state, kwargs)
        return result if closure is None else loss

    @contextmanager
    def zeroing(self, drops: bool) -> Iterator[None]:
        """A context for ``zero_grad()``: takes a step that is due; refuses to drop a step that backward has taken."""
        self.take_due_step()
        if (hook := self.attachment.hook) is not None:
            hook.machine.check_confirmed("opt.zero_grad()")
        with not_awaiting_params() if drops else nullcontext():  # zeroing must reach `AbsentGradient`
            yield
        self._forget_gradients()

    def take_due_step(self) -> None:
        """Take a step that is due in a loop without ``step()``; RuntimeError after late changes. A collective."""
        hook = self.attachment.hook
        if hook is None or hook.machine.user_calls_step:
            return
        if hook.step_is_due and self.attachment.why_wait() is None:
            hook.late_changes.check_unstepped()
            with hook.late_changes.with_noted_state():
                self.run_alone(self._take_step(None, None, {}, by_user=False))
            hook.due_step_taken()

    def refuse_step(self, reason: str) -> None:
        """Skip a step that other ranks have decided against: drop the gradients, and record the reason.

        Parameters, state and the loss scale stay as they are. Every rank has to call it; never communicates.
        """
        hook = self.attachment.hook
        occasion = self._step_context(None)
        self.runner.record_step(
            StepRecord(stepped=False, regime=occasion.regime, reason=reason, deferred_because=occasion.deferred_because)
        )
        with not_awaiting_params():
            for param in self.shard.table.params:
                param.grad = None
        self._forget_gradients()
        if hook is not None:
            hook.machine.step_taken()
            hook.first_step_taken()

    def join_hook(self, arguments: Mapping[str, Any]) -> JoinHook:
        """See `ZeroRedundancyOptimizer.join_hook`."""
        attachment = self.attachment
        refuse_join([self.shard.ranks], attachment.takes_hook, arguments)
        attachment.install_reducer()
        return ZeroJoinHook(
            attachment.joinable, lambda: self.run_alone(self.step_joined_in_phases()), attachment.watch_shadows()
        )

    def step_joined_in_phases(self) -> TwoPhase[None]:
        """Shadow one ``step()`` of ranks that still train: without a closure, with gradients from one of them.

        As a generator, see `TwoPhase`.
        """
        if (hook := self.attachment.required_hook()) is not None:
            yield from hook.step_joined(self._take_borrowed)
            return
        self.shard.refresh(may_communicate=not self.attachment.in_join)
        params = self.shard.table.params
        averaged = {index: param.grad for index, param in enumerate(params) if param.grad is not None}
        yield from self._take_borrowed(borrow_gradients(self.shard, averaged.__getitem__, are_whole=True))

    def _forget_gradients(self) -> None:
        self.gradients.forget()
        self._scaler_state = None

    def reset(self) -> None:
        self.gradients.may_have_absent = True
        self.attachment.passes.reset()
        if (hook := self.attachment.hook) is not None:
            hook.reset()
        else:
            self.shard.abandon()

    def _take_step(
        self,
        closure: Callable[[], Any] | None,
        scaler_state: AmpState | None,
        kwargs: dict[str, Any],
        by_user: bool = True,
    ) -> TwoPhase[Any]:
        shard, attachment = self.shard, self.attachment
        check_not_forked(shard.everyone.process_group)  # its messages would break the parent's connections
        hook, in_join = attachment.hook, attachment.in_join
        attachment.find_models_of_step()
        self.runner.begin(closure)
        if hook is not None:
            hook.gradients.check_complete()
        shard.table.check_gradients()
        self.gradients.check_averaged(self.runner.next_number)
        shard.refresh(may_communicate=not in_join)
        if in_join:
            reach_joined = hook is not None and hook.gradients.reach_joined
            serve_joined(shard, gradients_are_there=reach_joined or self.averages_reach_joined)
        try:
            return (yield from self.decision.take(self._step_context(scaler_state), **kwargs))
        finally:
            attachment.passes.forget()
            if hook is not None and by_user:
                hook.machine.step_taken()
                hook.first_step_taken()
            last = self.runner.last_step
            if scaler_state is not None:
                grads = [param.grad for param in shard.table.params if param.grad is not None]
                if last is not None and not last.stepped:
                    report_nonfinite(grads)
                scaler_state.unscale([held for held in map(on_this_rank, grads) if held is not None])

    def _step_context(self, scaler_state: AmpState | None, borrowed: GradientSource | None = None) -> StepContext:
        attachment, hook = self.attachment, self.attachment.hook
        if hook is None:
            source = borrowed or self.shard.targets.narrowed_source(PublishedGradients(self.shard.table.params))
            return StepContext(StepRegime.STANDALONE, source, amp=scaler_state, may_have_joined=attachment.in_join)
        waits = attachment.why_wait() is not None or not hook.step_is_due
        source = borrowed or hook.gradients
        return StepContext(StepRegime.DEFERRED, source, hook.deferred_because, waits, scaler_state, attachment.in_join)

    def _take_borrowed(self, source: GradientSource) -> TwoPhase[None]:
        self.runner.begin()
        yield from self.decision.take(self._step_context(None, source))

    # A `GradScaler`

    @property
    def steps_by_scaler(self) -> bool:
        """True if a `GradScaler` lets the step divide and skip, as with the unsharded class, or with 16-bit parameters.

        Steps here may take gradients in fp16, which a scaler refuses to divide.
        """
        return steps_by_scaler(self.shard.inner) or any(
            param.dtype in (torch.float16, torch.bfloat16) for param in self.shard.table.params
        )

    def agree_with_scaler(self) -> None:
        """Where a `GradScaler` divides and skips by itself: make it skip on all ranks, or on none. A collective.

        Called in ``scaler.step()``, which would check this rank's gradients alone. A step that the scaler will skip is
        recorded here and no longer due. Does nothing if no scaler calls.
        """
        optimizer, decision = self.attachment.joinable, self.decision
        scaler, known = calling_scaler(optimizer) or (None, None)
        if scaler is None or known is self._agreed_findings:
            return
        self._check_scaler()
        edits = decision.owned_edits
        is_edited = edits.check_intact(self.shard.table)
        self._agreed_findings = findings = unscale_once(scaler, optimizer)
        if is_edited:
            edits.note(self.shard.table.params)
        device = self.shard.table.accelerator()
        own = [found.to(device).clamp(max=1.0) for found in findings.values()]
        largest = decision.max_over_ranks(torch.stack(own).max() if own else -1.0)
        if largest < 0.0:  # no rank has a gradient: the scaler complains
            return
        if not findings:
            findings[device] = torch.zeros((), device=device)
        for found in findings.values():
            found.fill_(largest)
        self._scaler_state = AmpState(None, torch.tensor(largest), is_agreed=True, divided_by=scaler.get_scale())
        if largest > 0.0:
            self.step(None, {})

    def _check_scaler(self) -> None:
        if self.decision.loss_scale is not None:
            raise RuntimeError(
                "The optimizer has loss_scale= and is stepped by a torch.amp.GradScaler, but gradients have one loss "
                "scale. Use one of them. [ZERO-105]"
            )
        if self.attachment.in_join:
            raise RuntimeError(
                "Join does not support torch.amp.GradScaler: a rank that has joined does not know its scale. Use "
                "loss_scale= of the optimizer instead, or bfloat16, which needs none. [ZERO-310]"
            )

    # Between backward and the step

    def check_between_steps(self) -> None:
        """RuntimeError if a step inside backward is under way or not joined, or due in a loop that may not join it.

        Where steps wait for ``opt.step()``, gradients may be there: a plain loop saves the state of its last step.
        """
        attachment, hook = self.attachment, self.attachment.hook
        if attachment.in_join:
            raise RuntimeError(
                "A save inside Join is not supported: ranks that have joined would not take part. Save after the Join "
                "context. [ZERO-310]"
            )
        self.shard.check_masters()
        attachment.check_may_save("a save")
        if hook is None or attachment.why_wait() is not None or hook.machine.phase in (Phase.REST, Phase.STEPPED):
            return
        if hook.machine.is_waiting and (
            hook.machine.user_calls_step or hook.is_accumulating or not self.shard.table.has_gradients()
        ):
            return
        found = "gradients that wait for it" if hook.machine.is_waiting else "a backward pass under way"
        raise RuntimeError(
            f"Expected to be between two steps, after opt.step(), got {found} ({hook.machine.where}). Call opt.step() "
            "before saving, or opt.zero_grad() to drop gradients. [ZERO-309]"
        )

    def _before_forward(self, ddp: DistributedDataParallel) -> None:
        """Check that this pass's gradients will be reduced, RuntimeError if not; take a step that is due."""
        self.attachment.check_pass(ddp)
        self.gradients.check_none_absent()
        self.attachment.install_reducer()
        self.take_due_step()

    def _are_all_dropped(self) -> bool:
        """True if the step waits for `step` and all gradients were dropped: then nothing is done, as in torch."""
        return self.attachment.why_wait() is not None and not self.shard.table.has_gradients()
