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
import gc
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel

from ddp_zero.core.backward.hook import OverlapHook, asks_whether_it_joins
from ddp_zero.core.backward.overlap_machine import INTERLEAVED_LAG, Phase
from ddp_zero.core.backward.partitioned import gradients_of_stage
from ddp_zero.core.backward.planned_reducer import PlannedReducer, stand_in_of
from ddp_zero.core.backward.scratch_bucket import ReduceOptions
from ddp_zero.core.backward.scratch_buffers import SideStream
from ddp_zero.core.backward.visible_gradients import is_unknown
from ddp_zero.core.comm.ranks import Agreement
from ddp_zero.core.comm.tracing import warn
from ddp_zero.core.ddp.forward_passes import ForwardPasses
from ddp_zero.core.ddp.preconditions import check_has_no_hook, check_is_free, check_keeps_parameters, check_model
from ddp_zero.core.ddp.reducer import (
    add_hook,
    gradients_are_views,
    watch_shadows_under_join,
)
from ddp_zero.core.ddp.registered_hook import (
    CommHook,
    Holder,
    RegisteredHook,
    check_averages,
    free_place,
    has_hook,
    held_hooks,
    register,
    watching,
)
from ddp_zero.core.ddp.unaveraged import check_equal, check_finalized, check_reduced
from ddp_zero.core.local.inner import is_elementwise, steps_by_scaler
from ddp_zero.core.local.parameters import GradientSource, PublishedGradients
from ddp_zero.core.local.placement import state_bytes
from ddp_zero.core.local.weak_calls import weakly
from ddp_zero.core.step.before_forward import wait_before_forward
from ddp_zero.core.step.clipping import Result, TwoPhase
from ddp_zero.core.step.decision import AmpState, Decision, StepContext, calling_scaler, unscale_once
from ddp_zero.core.step.join import ZeroJoinHook, borrow_gradients, refuse_join, serve_joined
from ddp_zero.core.step.rank_shard import Shard
from ddp_zero.core.step.record import StepRecord, StepRegime
from ddp_zero.core.step.runner import build_runner
from ddp_zero.options import StepOptions
from ddp_zero.values.placeholders import AbsentGradient, on_this_rank, report_nonfinite, without_waiting

_CHANGED = "the loop changes gradients, options or parameters between backward and opt.step()"
_DROPPED = "the loop drops gradients after backward instead of calling opt.step()"


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
        hook: the communication hook; None until it is built.
        passes: the forward passes of the DDP models over the parameters.
        waits_because: the reason, found while training, why all steps wait for ``opt.step()``, or None.
        assumes_averaged: whether a caller averages all gradients before each step.
        averages_reach_joined: under Join without a hook, whether ranks that have joined get the averaged gradients, in
            ``param.grad``.
    """

    def __init__(
        self, optimizer: Joinable, shard: Shard, options: StepOptions, overlaps: bool, reduction: ReduceOptions | None
    ) -> None:
        self.shard, self.label = shard, shard.trace.label("step")
        self.runner = build_runner(shard)
        self.decision = Decision(self.runner, options)
        self.hook: OverlapHook | None = None
        self._registered: RegisteredHook | None = None  # on the model that was attached
        self.passes = ForwardPasses(weakly(self._before_forward))
        self.passes.checks.append(self.decision.owned_edits.forget_dropped)
        self.overlaps = overlaps
        self.waits_because: str | None = None
        self.averages_reach_joined = self.assumes_averaged = False
        self._optimizer = weakref.ref(optimizer)
        self._scaler_state: AmpState | None = (
            None  # for the next step that a `GradScaler` calls: ranks have agreed on it
        )
        self._agreed_findings: object = None  # the findings of a `GradScaler` that ranks have agreed on last
        self._reduction = reduction
        self._is_first_step = True
        self._may_have_absent = True  # gradients of an interrupted pass or of an earlier optimizer

    def copy_for(self, optimizer: Joinable, shard: Shard, memo: dict[int, Any]) -> "Engine":
        """An engine with the same options for a copy of the optimizer; it has no hook and knows no model."""
        engine = Engine(optimizer, shard, self.decision.options, self.overlaps, self._reduction)
        engine.waits_because = self.waits_because
        engine.decision.loss_scale = copy.deepcopy(self.decision.loss_scale, memo)
        return engine

    # The model

    def hook_by_hand(
        self, ddp: DistributedDataParallel, wrapped: CommHook | None, split: bool, interleaved: bool
    ) -> RegisteredHook:
        """A hook for the user to register; ValueError if DDP would refuse it for an earlier optimizer's hook."""
        if isinstance(ddp, DistributedDataParallel) and free_place(ddp) is not None:  # `check_model` names others
            raise ValueError(
                "This DDP model has the communication hook of an optimizer that has left, and DDP registers one only. "
                "Call opt.attach(ddp, hook=...) instead, which takes the place of that hook; or wrap the module again. "
                "[ZERO-206]"
            )
        registered = self._build_hook(ddp, wrapped, split, interleaved)
        self.require_hook().late_changes.is_hooked_by_hand = not self.reduces_by_hook
        return self._keep_registered(ddp, registered)

    def _build_hook(
        self, ddp: DistributedDataParallel, wrapped: CommHook | None, split: bool, interleaved: bool
    ) -> RegisteredHook:
        earlier, shard, decision = self.hook, self.shard, self.decision
        check_has_no_hook(self.takes_hook, earlier is not None, earlier is not None and earlier.may_be_replaced)
        check_model(ddp, shard)
        if wrapped is not None:
            check_averages(wrapped)
        if earlier is not None:
            earlier.detach()
        if self._registered is not None:  # on a model that was wrapped before
            self._registered.free(ddp.process_group)
        side = SideStream()
        sums_in_fp32 = decision.options.accumulate_in_fp32
        joins = asks_whether_it_joins(self._joinable)
        gradients = gradients_of_stage(
            self._reduction, shard, ddp, split, wrapped, side, self.passes, joins, sums_in_fp32
        )
        self.passes.watch([ddp])
        lends_from_buckets = gradients.shares_memory or not gradients_are_views(ddp)
        self.runner.aligns_gradients = lends_from_buckets and not is_elementwise(shard.inner)
        decision.watch.is_on = decision.options.nonfinite != "step"
        self.hook = OverlapHook(
            self.runner,
            ddp,
            gradients,
            side,
            lag=INTERLEAVED_LAG if interleaved else None,
            joinable=self._joinable,
            overlaps=self.overlaps,
            why_wait=weakly(self.why_wait),
            watch=decision.watch,
            passes=self.passes,
        )
        self.hook.machine.user_calls_step = earlier is not None and earlier.machine.user_calls_step
        self.adopt_model(ddp)
        holder = Holder(self._joinable, self.hook.leave, self.hook.leave_dropped, self.hook.interrupted)
        return RegisteredHook(self.hook.on_bucket, holder=holder, averages=wrapped is None)

    def _keep_registered(self, ddp: DistributedDataParallel, registered: RegisteredHook) -> RegisteredHook:
        self._registered = registered
        registered.watch(ddp)
        self.passes.leave_if_dropped = weakly(registered.leave_if_dropped)
        return registered

    def attach(self, ddp: DistributedDataParallel, hook: CommHook | None, state: Any, lags: Any, split: bool) -> None:
        takes_any = self.takes_hook or hook is not None or self.decision.watch.is_on  # otherwise DDP reduces by itself
        self._take_over(ddp, takes_any)
        is_further = self._shares_model(ddp)
        if hook is not None:
            check_averages(hook)
            hook = RegisteredHook(hook, ddp.process_group if state is None else state)
        self.shard.table.learn_names(ddp.named_parameters())
        if self.takes_hook:
            lag = self.is_partitioned if lags is None else lags
            registered = self._build_hook(ddp, hook, split, interleaved=lag)
        else:
            check_keeps_parameters(ddp, self.decision.why_wait())
            self.adopt_model(ddp)
            self.passes.watch([ddp])  # not an earlier DDP model of the module, which may still be alive
            self._check_hooks()
            watched = watching(self.decision.watch, ddp.process_group, hook)
            holder = Holder(self._joinable, bool, bool)
            registered = RegisteredHook(watched, holder=holder, averages=takes_any and hook is None)
        if is_further:
            add_hook(ddp, registered)
        elif takes_any:
            registered = register(ddp, registered)
        self._keep_registered(ddp, registered)
        self.install_reducer()

    def _take_over(self, ddp: DistributedDataParallel, takes_hook: bool) -> None:
        """Have dropped optimizers leave the model; check that no other is in the way. A collective if there are any.

        Args:
            ddp: the model.
            takes_hook: whether this optimizer registers a hook.

        Raises:
            ValueError: on every rank, naming the optimizer in the way.
        """
        held = [(hook, hook.holder) for hook in held_hooks(ddp)]
        if held:
            gc.collect()  # or ranks would differ in which optimizers are garbage
        with Agreement(self.shard.everyone, "attaching an optimizer") if held else nullcontext():
            for hook, holder in held:
                if holder is not None and holder.is_gone:
                    holder.leave()
                    hook.free(ddp.process_group)
            shares = not takes_hook or self._shares_model(ddp)
            check_is_free(ddp, set(self.shard.table.params) if shares else None)

    def _shares_model(self, ddp: DistributedDataParallel) -> bool:
        """True if other optimizers reduce this model already, and this optimizer can do so beside them."""
        return self.is_partitioned and stand_in_of(ddp) is not None

    def detach(self) -> None:
        self.take_due_step()
        if self.hook is not None:
            self.hook.machine.check_confirmed("opt.detach()")
            self.hook.leave()
        if self._registered is not None:
            self._registered.free(self.shard.everyone.process_group)
        self.passes.stop()
        self.hook = self._registered = None

    def install_reducer(self) -> None:
        """Once the hook is registered: replace DDP's reducer, if the optimizer reduces by itself."""
        source = None if self.hook is None else self.hook.gradients.source
        if isinstance(source, PlannedReducer):
            source.install()

    def adopt_model(self, ddp: DistributedDataParallel) -> None:
        """Add up norms in the order of this model's parameters; register hooks that wait before forward passes."""
        self.shard.table.order_norms_as(ddp)
        if self.decision.options.sync == "forward":
            wait_before_forward(ddp, self.shard)

    def find_models(self) -> bool:
        """Watch the DDP models over these parameters. Returns True if an unknown model was found."""
        shard = self.shard
        if shard.everyone.world_size == 1 or not self.passes.find_models(shard.table.params):
            return False
        self._check_hooks()
        return True

    def _check_hooks(self) -> None:
        """Check that the models' own hooks, if this optimizer has none there, average gradients."""
        if not self.takes_hook:
            for hook in self.passes.models.hooks:
                check_averages(hook)

    @property
    def takes_hook(self) -> bool:
        return self.overlaps or self.reduces_by_hook

    @property
    def reduces_by_hook(self) -> bool:
        """True if gradients are reduced, or added up, otherwise than by DDP, wherever the step is taken."""
        return self.is_partitioned or self.decision.options.accumulate_in_fp32

    @property
    def needs_hook(self) -> bool:
        return self.takes_hook and (self.hook is None or self.hook.may_be_replaced)

    @property
    def stage(self) -> int:
        """1: optimizer state is sharded; 2: gradients too."""
        return 1 if self._reduction is None else 2

    @property
    def is_partitioned(self) -> bool:
        return self._reduction is not None

    @property
    def joins(self) -> bool:
        """True if ranks may have run out of inputs."""
        return bool(self._joinable._join_config.enable)

    def require_hook(self) -> OverlapHook:
        """The hook; RuntimeError if none was built."""
        if self.hook is None:
            raise RuntimeError(
                "This optimizer has no communication hook, which overlap_with_ddp=True, stage=2 and "
                "accumulate_in_fp32=True need. Call opt.attach(ddp), or build a hook with hook_with_zero_step(None, "
                "ddp, opt) and register it with ddp.register_comm_hook(None, hook). [ZERO-203]"
            )
        return self.hook

    # Taking a step

    def step(self, closure: Callable[[], Any] | None, kwargs: dict[str, Any]) -> Any:
        if torch.is_inference_mode_enabled():
            # state made there could not be stepped inside a later backward pass
            with torch.inference_mode(mode=False), torch.no_grad():
                return self.step(closure, kwargs)
        if closure is not None and not callable(closure):
            if type(self.shard.inner).__module__.startswith("torch.optim."):
                kind = type(closure).__name__
                raise TypeError(f"Expected a callable closure or None, got {kind}. Pass options by name. [ZERO-126]")
            closure, kwargs = None, {"closure": closure, **kwargs}
        if closure is None:
            return self.run_alone(self.step_in_phases(None, kwargs))
        with torch.enable_grad():
            loss = closure()
        return self.run_alone(self.step_in_phases(lambda: loss, kwargs))

    def run_alone(self, deciding: TwoPhase[Result]) -> Result:
        """Run a step or a clip where this optimizer has the whole model."""
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
        amp, self._scaler_state = self._scaler_state or AmpState.of(self._joinable), None
        if amp is not None:
            self._check_scaler()
        hook = self.require_hook() if self.takes_hook else None
        if hook is not None and hook.step_is_due:
            hook.machine.check_due_step()
            self._learn_from_first_step(hook, amp)
        if kwargs and self.overlaps and self.why_wait() is None:
            raise TypeError(
                f"With overlap_with_ddp=True opt.step() takes only a closure, got {sorted(kwargs)}. Set options in "
                "opt.param_groups before backward(). [ZERO-126]"
            )
        if hook is not None and self.overlaps and not (hook.machine.is_waiting or self._are_all_dropped()):
            if hook.has_nothing_to_step():
                return loss
            if hook.machine.phase is Phase.REST and self._are_all_zeros():
                yield from self._take_step(closure, amp, kwargs, by_user=False)
                return loss
            if amp is not None and hook.machine.phase is Phase.STEPPED:
                raise RuntimeError(
                    "opt.step() was called by a torch.amp.GradScaler, and backward has already stepped with scaled "
                    "gradients. Load a checkpoint, and use the GradScaler from the first step after it on; or build "
                    "the optimizer with loss_scale= or overlap_with_ddp=False. [ZERO-314]"
                )
            hook.confirm_step()
            return loss
        if amp is not None and self.overlaps:
            self.defer_steps()  # from now on
        Join.notify_join_context(self._joinable)
        result = yield from self._take_step(closure, amp, kwargs)
        return result if closure is None else loss

    @contextmanager
    def zeroing(self, drops: bool) -> Iterator[None]:
        """A context for ``zero_grad()``: takes a step that is due; refuses to drop a step that backward has taken."""
        self.take_due_step()
        if self.hook is not None:
            self.hook.machine.check_confirmed("opt.zero_grad()")
        with without_waiting() if drops else nullcontext():  # zeroing must reach `AbsentGradient`
            yield
        self.forget_gradients()

    def take_due_step(self) -> None:
        """Take a step that is due in a loop without ``step()``; RuntimeError after late changes. A collective."""
        hook = self.hook
        if hook is None or hook.machine.user_calls_step:
            return
        if hook.step_is_due and self.why_wait() is None:
            hook.late_changes.check_unstepped()
            with hook.late_changes.with_noted_state():
                self.run_alone(self._take_step(None, None, {}, by_user=False))
            hook.due_step_taken()

    def refuse_step(self, reason: str) -> None:
        """Skip a step that other ranks have decided against: drop the gradients, and record the reason.

        Parameters, state and the loss scale stay as they are. Every rank has to call it; never communicates.
        """
        hook, occasion = self.hook, self._step_context(None)
        self.runner.record_step(
            StepRecord(stepped=False, regime=occasion.regime, reason=reason, deferred_because=occasion.deferred_because)
        )
        with without_waiting():
            for param in self.shard.table.params:
                param.grad = None
        self.forget_gradients()
        if hook is not None:
            hook.machine.step_taken()
            hook.first_step_taken()

    def join_hook(self, arguments: Mapping[str, Any]) -> JoinHook:
        """See `ZeroRedundancyOptimizer.join_hook`."""
        refuse_join([self.shard.ranks], self.takes_hook, arguments)
        self.install_reducer()
        return ZeroJoinHook(self._joinable, self.step_joined, self.watch_shadows())

    def watch_shadows(self) -> Callable[[], object]:
        """Under Join: finish a backward pass right after DDP has shadowed it. Returns a function that ends this."""
        undo = ExitStack()
        if self.hook is not None:
            for ddp in self.passes.models.alive:
                undo.callback(watch_shadows_under_join(ddp))
        undo.callback(self.passes.models.note_join_ended)
        return undo.close

    def step_joined(self) -> None:
        """Shadow one ``step()`` of ranks that still train: without a closure, with gradients from one of them."""
        self.run_alone(self.step_joined_in_phases())

    def step_joined_in_phases(self) -> TwoPhase[None]:
        """`step_joined` as a generator, see `TwoPhase`."""
        if self.takes_hook:
            yield from self.require_hook().step_joined(self._take_borrowed)
            return
        self.shard.refresh(may_communicate=not self.joins)
        params = self.shard.table.params
        averaged = {index: param.grad for index, param in enumerate(params) if param.grad is not None}
        yield from self._take_borrowed(borrow_gradients(self.shard, averaged.__getitem__, are_whole=True))

    def forget_gradients(self) -> None:
        """Follow a user who has dropped or zeroed all gradients."""
        self.decision.forget()
        self._scaler_state = None
        self._may_have_absent = False
        if self.passes.has_seen:
            self.passes.forget()
        if self.hook is not None:
            self.hook.drop_carried()

    def memory_parts(self) -> dict[str, int]:
        """Current bytes: parameters, masters, state, gradients, and buffers that buckets share.

        Parameters count whole, gradients only their part on this rank.
        """
        shard = self.shard
        with without_waiting():
            params = list(shard.table.params)
            grads = [param.grad for param in params if param.grad is not None]
            gradients = sum(held.nbytes for held in map(on_this_rank, grads) if held is not None)
            parameters = sum(param.numel() * param.element_size() for param in params)
        context = None if self.hook is None else self.hook.gradients.context
        return {
            "parameter_bytes": parameters,
            "master_bytes": state_bytes(dict(shard.masters)),
            "state_bytes": state_bytes(shard.inner_state),
            "gradient_bytes": gradients,
            "buffer_bytes": 0 if context is None else context.nbytes,
        }

    def reset(self) -> None:
        self._may_have_absent = True
        self.passes.reset()
        if self.hook is not None:
            self.hook.reset()
        else:
            self.shard.abandon()

    def _check_none_absent(self) -> None:
        """Before the first pass, or after `reset`: RuntimeError if some gradient is a placeholder without a value."""
        with without_waiting():
            grads = [param.grad for param in self.shard.table.params]
            wrong = next((index for index, grad in enumerate(grads) if is_unknown(grad)), None)
        if wrong is not None:
            raise RuntimeError(
                "Expected gradients of earlier passes, or none, got an absent one: of "
                f"{self.shard.table.label(wrong)} ({self.shard.comm.name(self.shard.comm.group_rank)}). An interrupted "
                "backward pass or an earlier optimizer has sent it to its owner, and the next pass would add to it. "
                "Call opt.zero_grad(). [ZERO-308]"
            )
        self._may_have_absent = False

    def _take_step(
        self, closure: Callable[[], Any] | None, amp: AmpState | None, kwargs: dict[str, Any], by_user: bool = True
    ) -> TwoPhase[Any]:
        shard, hook, joins = self.shard, self.hook, self.joins
        found = self.find_models()
        if self._is_first_step:  # the same on every rank, unlike when a model is found again
            self._is_first_step = False
            self.passes.models.learn_count(shard.table.params)
            self._check_hooks()
            if found:  # their last passes were not seen, and are assumed to be local
                self.passes.last_is_local = self.passes.has_seen = True
        self.runner.begin(closure)
        if hook is not None:
            hook.gradients.check_complete()
        shard.table.check_gradients()
        self.check_averaged(in_step=True)
        shard.refresh(may_communicate=not joins)
        if joins:
            reach_joined = hook is not None and hook.gradients.reach_joined
            serve_joined(shard, gradients_are_there=reach_joined or self.averages_reach_joined)
        try:
            return (yield from self.decision.take(self._step_context(amp), **kwargs))
        finally:
            self.passes.forget()
            if hook is not None and by_user:
                hook.machine.step_taken()
                hook.first_step_taken()
            last = self.runner.last_step
            if amp is not None:
                grads = [param.grad for param in shard.table.params if param.grad is not None]
                if last is not None and not last.stepped:
                    report_nonfinite(grads)
                amp.unscale([held for held in map(on_this_rank, grads) if held is not None])

    def _step_context(self, amp: AmpState | None, borrowed: GradientSource | None = None) -> StepContext:
        hook = self.hook
        if hook is None:
            source = borrowed or self.shard.targets.own_elements(PublishedGradients(self.shard.table.params))
            return StepContext(StepRegime.STANDALONE, source, amp=amp, may_have_joined=self.joins)
        waits = self.why_wait() is not None or not hook.step_is_due
        source = borrowed or hook.gradients
        return StepContext(StepRegime.DEFERRED, source, hook.deferred_because, waits, amp, self.joins)

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
        optimizer, decision = self._joinable, self.decision
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
        if self.joins:
            raise RuntimeError(
                "Join does not support torch.amp.GradScaler: a rank that has joined does not know its scale. Use "
                "loss_scale= of the optimizer instead, or bfloat16, which needs none. [ZERO-310]"
            )

    # Between backward and the step

    def why_wait(self) -> str | None:
        """Why backward passes only reduce and ``opt.step()`` takes the step, or None."""
        if not self.overlaps:
            return "overlap_with_ddp=False"
        return self.waits_because or self.decision.why_wait()

    def defer_steps(self) -> None:
        """Before gradients are changed: make later steps wait; RuntimeError if a step has used them, or no averages."""
        hook = self.hook
        if self.is_partitioned:
            self.check_averaged()
        if hook is None or not self.overlaps:
            return
        if hook.machine.phase is Phase.STEPPED:
            raise RuntimeError(
                "A step inside backward has used up the gradients, so they cannot be clipped or changed now "
                f"({hook.machine.where}). Clip from the first step on, or build the optimizer with max_grad_norm= or "
                "overlap_with_ddp=False. To go on now, call opt.step(), opt.zero_grad() and opt.reset(), and clip in "
                "every iteration from then on. [ZERO-304]"
            )
        if hook.machine.is_waiting:
            self.waits_because = self.waits_because or _CHANGED

    def check_averaged(self, in_step: bool = False) -> None:
        """Check that gradients are averages, see `check_reduced` and `check_equal`; not under Join."""
        if self.joins or self.decision.owned_edits.check_intact(self.shard.table):
            return
        check_finalized(self.shard, self.passes)
        if self.is_partitioned:
            hook = self.hook
            is_local, marks = (False, {}) if hook is None else hook.gradients.left_local()
            # whether no gradient was reduced since the last step, but a backward pass has left local ones
            is_local = is_local and hook is not None and not hook.machine.is_waiting
            check_reduced(self.shard, self.passes, is_local=is_local, marks=dict(marks))
        elif not self.assumes_averaged and self.shard.everyone.world_size > 1:
            edited = self.decision.owned_edits.edited_indices(self.shard.table)
            step = self.runner.next_number if in_step else None
            check_equal(self.shard, self.passes, step=step, edited=edited)

    def check_before_step(self, what: str) -> None:
        """RuntimeError if backward has taken a step that ``opt.step()`` must join before the user's call."""
        if self.hook is not None:
            self.hook.machine.check_before_step(what)

    def check_may_save(self, what: str) -> None:
        """RuntimeError if, in a loop that calls it, ``opt.step()`` has not joined a step inside backward yet."""
        if self.hook is not None:
            self.hook.machine.check_may_save(what)

    def others_may_step(self) -> bool:
        """True if there are gradients with which other ranks may step without this rank."""
        waits = self.hook is None or self.hook.machine.is_waiting
        return waits and self._has_gradients() and not self.joins

    def check_between_steps(self) -> None:
        """RuntimeError if a step inside backward is under way or not joined, or due in a loop that may not join it.

        Where steps wait for ``opt.step()``, gradients may be there: a plain loop saves the state of its last step.
        """
        if self.joins:
            raise RuntimeError(
                "A save inside Join is not supported: ranks that have joined would not take part. Save after the Join "
                "context. [ZERO-310]"
            )
        self.shard.check_masters()
        self.check_may_save("a save")
        hook = self.hook
        if hook is None or self.why_wait() is not None or hook.machine.phase in (Phase.REST, Phase.STEPPED):
            return
        if hook.machine.is_waiting and (
            hook.machine.user_calls_step or hook.is_accumulating or not self._has_gradients()
        ):
            return
        found = "gradients that wait for it" if hook.machine.is_waiting else "a backward pass under way"
        raise RuntimeError(
            f"Expected to be between two steps, after opt.step(), got {found} ({hook.machine.where}). Call opt.step() "
            "before saving, or opt.zero_grad() to drop gradients. [ZERO-309]"
        )

    def _has_gradients(self) -> bool:
        return any(param.grad is not None for param in self.shard.table.params)

    def _before_forward(self, ddp: DistributedDataParallel) -> None:
        """Check that this pass's gradients will be reduced, RuntimeError if not; take a step that is due."""
        if self.passes.models.in_join(ddp) and not self.joins:
            where = self.shard.comm.name(self.shard.comm.group_rank)
            raise RuntimeError(
                f"Expected Join to list the optimizer, too, got its DDP model without it ({where}): ranks that still "
                "train would wait for one that has run out of inputs. Use Join([ddp, opt]), also in place of "
                "ddp.join(). [ZERO-312]"
            )
        hook = self.require_hook() if self.takes_hook else None
        if hook is not None and not has_hook(ddp):
            raise RuntimeError(
                "The DDP model does not have the optimizer's communication hook. Call ddp.register_comm_hook(None, "
                "hook) with the hook that hook_with_zero_step(...) has returned; if the module was wrapped again, "
                "opt.reset() and opt.attach(ddp). [ZERO-203]"
            )
        if hook is not None:
            hook.check_can_run(ddp)
            # raised in backward, it would leave DDP in the middle of a pass, which it cannot run again
            self.shard.table.check_sizes(self.shard.param_groups)
        if self._may_have_absent:
            self._check_none_absent()
        if hook is not None:
            self.install_reducer()
            self.take_due_step()

    def _are_all_dropped(self) -> bool:
        """True if the step waits for `step` and all gradients were dropped: then nothing is done, as in torch."""
        params = self.shard.table.params
        return self.why_wait() is not None and all(param.grad is None for param in params)

    def _are_all_zeros(self) -> bool:
        """True if all gradients are zeros set without a pass: torch.distributed.checkpoint steps so to create state."""
        with without_waiting():
            grads = [param.grad for param in self.shard.table.params if param.grad is not None]
            return not self.passes.has_seen and not any(
                not grad.zeroed if isinstance(grad, AbsentGradient) else bool(grad.any()) for grad in grads
            )

    def _learn_from_first_step(self, hook: OverlapHook, amp: AmpState | None) -> None:
        """At the first ``step()``: make all steps wait for it if any rank's loop changes anything after backward."""
        changed, dropped = hook.late_changes.first_change(), hook.has_dropped
        statement = [int(amp is not None or changed is not None), int(dropped)]
        changes, drops = (any(column) for column in zip(*self.shard.everyone.all_gather_ints(statement), strict=True))
        if self.why_wait() is None and (changes or drops):
            self.waits_because = _CHANGED if changes else _DROPPED
            if amp is None:
                seen = f": {changed}" if changed is not None else ""
                warn(
                    f"Every step waits for opt.step() from now on, because {self.waits_because}{seen}. State it, and "
                    "this warning goes: clip with opt.clip_grad_norm_() or max_grad_norm=, or build the optimizer with "
                    "overlap_with_ddp=False (shard_optimizer(..., overlap=False)). [ZERO-324]"
                )

    @property
    def _joinable(self) -> Joinable:
        optimizer = self._optimizer()
        assert optimizer is not None, "the optimizer holds its engine"
        return optimizer
