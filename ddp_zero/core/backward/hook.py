"""The DDP communication hook: reduces each bucket and drives the optimizer step.

DDP calls the hook once per bucket, in index order, from the thread that runs backward. Each call, in order:

1. bucket 0 opens an iteration: choose its regime, the same on every rank; buckets out of order are refused;
2. start the wrapped hook's reduction and return its future, so that the reducer publishes gradients as usual;
3. run the program of each bucket of the plan that is full now, see `program.py`. For each bucket that is due it waits
   for its reduction, steps, starts its sync; the machine hears of the first of these, and of the last bucket of the
   pass. Nothing runs in a future's callback.

*overlapped*: buckets are stepped inside backward, from the tensor in the reduction's future. *deferred*: DDP's reducer,
which alone knows the unused parameters, publishes the gradients first, and the step runs right after it, still inside
``backward()``. It does so in an engine callback queued by an engine callback: the reducer queues its own finalizer
after the hook for the last bucket returns, and the engine runs callbacks in the order in which they were queued.
*waiting*: the hook only reduces, and ``opt.step()`` takes the step.

The first step waits, too, and the first after state was loaded or the iteration reset: only then is it known whether a
loop clips, unscales or changes anything else between ``backward()`` and ``opt.step()``. It is *due*: taken by
``opt.step()``, or before the next forward pass of the DDP model in loops that leave ``opt.step()`` out.

Not chosen: taking the first step inside backward and undoing it where it was too early (a copy of the rank's
parameters, and options that were changed in between would be lost); leaving deferred iterations to ``opt.step()`` as
well (an update would be missing in loops that leave it out).
"""

import sys
import weakref
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.distributed.algorithms.join import Joinable
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from ddp_zero.core.backward.ddp_buckets import DdpBuckets
from ddp_zero.core.backward.gradients import Gradients
from ddp_zero.core.backward.other_optimizers import StepInside
from ddp_zero.core.backward.overlap_machine import Choice, Facts, OverlapMachine, Phase, Regime, choose
from ddp_zero.core.backward.planned_bucket import PlannedBucket
from ddp_zero.core.backward.planned_reducer import PlannedReducer
from ddp_zero.core.backward.program import describe
from ddp_zero.core.backward.scratch_buffers import SideStream
from ddp_zero.core.backward.steps_in_backward import StepsInBackward
from ddp_zero.core.comm.tracing import logger, warn
from ddp_zero.core.ddp import preconditions
from ddp_zero.core.ddp.forward_passes import ForwardPasses
from ddp_zero.core.ddp.reducer import (
    after_the_reducer,
    after_the_shadow,
    in_backward,
    is_finalized,
    is_finalized_by_hand,
    will_reduce,
)
from ddp_zero.core.ddp.registered_hook import CommHook
from ddp_zero.core.local.compiler import never_compiled
from ddp_zero.core.local.parameters import GradientSource
from ddp_zero.core.local.weak_calls import weakly
from ddp_zero.core.step.clipping import TwoPhase
from ddp_zero.core.step.decision import NonfiniteProbe
from ddp_zero.core.step.late_changes import LateChanges
from ddp_zero.core.step.record import StepRecord, StepRegime
from ddp_zero.core.step.runner import StepRunner

_REQUIRES_GRAD = attrgetter("requires_grad")
_NONE = Choice(Regime.DEFERRED, "no backward pass yet")


class OverlapHook:
    """A DDP communication hook that steps and syncs after gradients were reduced.

    Args:
        side: the stream that the step runs on.
        lag: how many buckets the step stays behind the reduction; None: until the last bucket has arrived.
        joinable: the optimizer, on which Join sets whether it is active.
        overlaps: whether the user asked for steps inside backward.
        why_wait: why the hook only reduces and the step waits for ``opt.step()``, or None; the same on every rank.

    Attributes:
        accumulates: True while backward passes only reduce, regardless of ``why_wait``.
        step_is_due: True if the first step waits for ``opt.step()`` or the next forward pass, whichever is first.
        has_dropped: True if gradients were dropped while the first step was due.
        late_changes: compares the state after a backward pass with the state at ``opt.step()``.
    """

    def __init__(
        self,
        runner: StepRunner,
        ddp: DistributedDataParallel,
        gradients: Gradients,
        side: SideStream,
        *,
        lag: int | None,
        joinable: Joinable,
        overlaps: bool,
        why_wait: Callable[[], str | None],
        watch: NonfiniteProbe,
        passes: ForwardPasses,
    ) -> None:
        self._shard = shard = runner.shard
        self._runner = runner
        self.machine = OverlapMachine(lag, shard.comm.name(shard.comm.group_rank))
        self.accumulates = self._has_accumulated = False
        self._ddp_reference = weakref.ref(ddp)  # DDP's reducer holds the hook: a cycle that nothing could collect
        self.gradients, source = gradients, gradients.source
        self._ddp_buckets = source if isinstance(source, DdpBuckets) else None
        self._take_over = source.take_over if isinstance(source, PlannedReducer) else None
        self._overlaps = overlaps
        self._why_wait = why_wait
        self._watch = watch
        self._passes = passes
        self._num_loads: int | None = None  # the shard's, once its first step was taken
        self.step_is_due = self.has_dropped = False
        self.late_changes = LateChanges(shard)
        self._in_join = in_join_of(joinable)
        self._step_inside = StepInside(joinable, shard, self.machine) if overlaps else None
        # the pass under way, or the last one
        self._choice = _NONE
        self._num_reduced = 0  # buckets given to the hook: DDP's in stage 1, the plan's in stage 2
        self._steps = StepsInBackward(runner, gradients, self.machine, side, self._in_join, weakly(self.reset))
        self._resolved: Future[Any] = Future()  # of stage 2's buckets, whose averages are not published
        self._resolved.set_result(None)
        self.may_be_replaced = False
        saved = ddp if isinstance(ddp.module, torch.jit.ScriptModule) else ddp.module  # those take no such hooks
        self._before_save = saved.register_state_dict_pre_hook(BeforeSave(self.machine))
        weakref.finalize(self, _report_unconfirmed, self.machine)

    @property
    def on_bucket(self) -> CommHook:
        """The hook that DDP calls; see the module docstring."""
        return self._on_planned if self._ddp_buckets is None else self._on_ddps

    @never_compiled
    def _on_planned(self, _: Any, bucket: Any) -> Future[Any]:
        """A bucket of the plan, which stage 2's reducer has filled."""
        if type(bucket) is not PlannedBucket:  # DDP's own reducer has
            assert self._take_over is not None, "stage 2"
            taken: Future[Any] = self._take_over(bucket)
            return taken
        index, is_last = bucket.position
        if index == 0 or index != self._num_reduced:
            self._begin_or_refuse(index, bucket)
        self._num_reduced = index + 1
        if self._watch.is_on:
            self._watch.screen(bucket.params, bucket.buffer())
        steps = self._steps
        steps.num_full = index + 1  # before it runs: an interrupted program has begun
        try:
            steps.programs[index].run()
            if is_last and self.machine.phase is Phase.STEPPED:
                steps.end()
        except BaseException:  # Ctrl-C, too
            self.machine.has_failed = True
            raise
        if is_last:
            self._end_pass()
        return self._resolved

    @never_compiled
    def _on_ddps(self, state: Any, bucket: Any) -> Future[Any]:
        """A bucket of DDP's reducer, with which any number of the plan's are full."""
        ddp_buckets, steps = self._ddp_buckets, self._steps
        assert ddp_buckets is not None, "stage 1"
        index, is_last = ddp_buckets.place_of(bucket)
        if index == 0 or index != self._num_reduced:
            self._begin_or_refuse(index, bucket)
        self._num_reduced = index + 1
        if self._watch.is_on:
            self._watch.screen(bucket.parameters(), bucket.buffer())
        # on every rank in bucket order: the reductions of two buckets must not cross
        future, full = ddp_buckets.start(state, bucket, index)
        for place in full:
            steps.num_full = place + 1
            try:
                steps.programs[place].run()
                if self.machine.phase is Phase.STEPPED:
                    steps.end()
            except BaseException:
                self.machine.has_failed = True
                raise
        # DDP's last bucket, which may hold parameters of other optimizers alone: the plan's may have come before
        if is_last:
            self._end_pass()
        return future

    def _end_pass(self) -> None:
        """The reduction of the last bucket was started."""
        self._passes.note_reduced(self._ddp)
        # not now: the reducer publishes gradients only after this hook has returned, over the top of anything that a
        # step or a placeholder had left in `param.grad`
        if in_backward():
            after_the_reducer(self._finish_backward)
        else:
            after_the_shadow(self._ddp, self.finish_joined_backward)

    def _begin_or_refuse(self, index: int, bucket: Any) -> None:
        """The first bucket of a pass, or one whose turn it is not."""
        if index or not self.machine.may_begin:
            raise self.machine.out_of_order(index, self._num_reduced)
        self._begin(bucket.parameters())

    def _begin(self, params: list[Tensor]) -> None:
        self._open_iteration()
        facts = self._facts(params)
        self._has_accumulated |= facts.is_frozen
        choice = choose(facts)
        # stage 2 copies gradients in any strides
        refusal = None if self._ddp_buckets is None else self._ddp_buckets.reason_to_refuse()
        if refusal is None and choice.regime is not Regime.REDUCE_ONLY:
            refusal = self._shard.reason_to_refuse()
        self._choice = choice if refusal is None else Choice(Regime.REDUCE_ONLY, refusal, is_refused=True)
        regime = self._choice.regime
        self._steps.begin(regime)
        self.gradients.source.steps_by_bucket = regime is Regime.OVERLAPPED
        self.machine.pass_began(regime)

    def confirm_step(self) -> None:
        """At ``opt.step()``: check that a step was taken, once, with the gradients as they are now."""
        if self.machine.phase in (Phase.REST, Phase.RUNNING):
            self._explain_unreduced()
        self.machine.step_called()
        self.late_changes.check_none()
        self._passes.forget()

    def has_nothing_to_step(self) -> bool:
        """At ``opt.step()``: True if no pass was reduced and no gradient is there, as before the first backward pass.

        Raises:
            RuntimeError: if there is none because DDP no longer sees the gradients of the model's parameters.
        """
        if self.machine.phase is not Phase.REST or any(param.grad is not None for param in self._shard.table.params):
            return False
        self._passes.models.check_none_lost(self.machine.where)
        self.machine.user_calls_step = True
        return True

    def _explain_unreduced(self) -> None:
        """Raise an error that names a gradient that was not reduced, and the cause; return if neither can be told."""
        table, where = self._shard.table, self.machine.where
        self._passes.models.check_none_lost(where)
        if not self._passes.last_is_local:
            reduced = {param for bucket in self._steps.full for param in bucket.params}
            preconditions.check_none_unused(self._ddp, table, reduced, where)
        unreduced = next((index for index, param in enumerate(table.params) if param.grad is not None), None)
        if self.machine.phase is Phase.REST and unreduced is not None:
            why = self._passes.why_not_reduced(after_a_step=self.machine.user_calls_step)
            raise RuntimeError(
                "Expected a backward pass that has stepped before opt.step(), got a gradient of "
                f"{table.label(unreduced)} that DDP has not averaged since the last step ({where}): {why} If the "
                "module was wrapped again, call opt.reset() and opt.attach(model) with the new DDP model. [ZERO-308]"
            )

    def first_step_taken(self) -> None:
        """After the first ``opt.step()``: later steps need not wait for it, unless there is a different reason."""
        self.step_is_due = self.has_dropped = False
        self._num_loads = self._shard.num_loads
        if not self.late_changes.is_at_rest:
            self.late_changes.forget()
        self._watch.is_on = self._why_wait() is not None

    def due_step_taken(self) -> None:
        """After a step that was due: treat it as taken inside the last backward pass."""
        self.first_step_taken()
        self.machine.due_step_taken()
        self.late_changes.remember()

    @property
    def deferred_because(self) -> str | None:
        """Why the last iteration was not stepped bucket by bucket, or None."""
        return self._choice.reason

    @property
    def is_accumulating(self) -> bool:
        """True if the gradients of the last pass wait for further passes, as in ``opt.accumulate()``."""
        return self.machine.is_waiting and self._has_accumulated

    def finish_joined_backward(self) -> None:
        """On a rank that has joined, after DDP's own shadow: all that other ranks do before their backward pass ends.

        A collective, as theirs.
        """
        if self.machine.phase is Phase.REDUCED:
            self._steps.finish(self._choice.regime, has_joined=True)
        self._runner.raise_errors()

    def step_joined(self, take: Callable[[GradientSource], TwoPhase[None]]) -> TwoPhase[None]:
        """On a rank that has joined, where others call ``opt.step()``: finish the iteration with a peer's gradients.

        Yields findings that all ranks decide by together: see `TwoPhase`.

        Args:
            take: takes a waiting step, from the given gradients.
        """
        if self.machine.is_waiting:
            yield from take(self._steps.borrow())
        elif self.machine.phase is Phase.STEPPED:
            self._record()
        # buffers last: peers that still train may read this rank's messages until the syncs above have ended
        self.machine.step_shadowed()
        self.gradients.close_joined()
        self._steps.num_full = 0
        self._runner.raise_errors()

    def interrupted(self) -> None:
        """An exception has ended a backward pass."""
        if self._steps.num_full:
            self.machine.has_failed = True

    def reset(self) -> None:
        """Drop the iteration, after an exception in forward or backward; the hook may be replaced then."""
        self.may_be_replaced = True
        is_half_stepped = self.machine.phase is Phase.RUNNING and self._steps.has_begun
        has_stepped = self.machine.phase is Phase.STEPPED and self._steps.has_begun and self._steps.num_full
        self._num_reduced = self._steps.num_full = 0
        if not (self.gradients.is_idle and self.machine.phase is Phase.REST and not self.machine.backwards_since_step):
            self.machine.reset()
            self.gradients.reset()
        self._watch.clear()
        self.step_is_due = False
        self._num_loads = None
        self._shard.abandon()
        if is_half_stepped or has_stepped:  # the last: a warning may be an error
            which = "some buckets and not the others" if is_half_stepped else "all buckets"
            state = "half updated" if is_half_stepped else "updated"
            warn(
                f"The interrupted backward pass has stepped {which} "
                f"({self.machine.where}): parameters and state are {state} until a checkpoint is loaded. A loop "
                "that goes on without one after such exceptions needs interleaved=False or overlap=False in "
                "shard_optimizer. [ZERO-308]"
            )

    def check_can_run(self, ddp: DistributedDataParallel) -> None:
        """Before a forward pass: check that the model is not in the middle of a backward pass that was reset."""
        if self.may_be_replaced and torch.is_grad_enabled() and not is_finalized(ddp):
            raise RuntimeError(
                f"Expected a new DDP model after an interrupted backward pass ({self.machine.where}), got the one that "
                "was interrupted, which DDP cannot run again. Wrap the module again. Then "
                f"{preconditions.WRAPPED_AGAIN} [ZERO-308]"
            )

    def drop_carried(self) -> None:
        """Forget the gradients, which the user has dropped."""
        if not self.gradients.is_idle:
            self.gradients.drop_carried()
        self._watch.clear()
        self.has_dropped |= self.step_is_due
        self.step_is_due = False
        if self.machine.phase is Phase.WAITING:
            self.machine.gradients_dropped()

    def leave(self) -> None:
        """Leave the model for good, as it would be with a plain optimizer.

        Raises:
            RuntimeError: in the middle of a backward pass, or if there are gradients that no rank has whole.
        """
        if self.machine.phase in (Phase.RUNNING, Phase.REDUCED):
            raise RuntimeError(
                f"Expected to be between two steps when an optimizer leaves its model ({self.machine.where}), got a "
                "backward pass that was interrupted. Call opt.reset() first. [ZERO-309]"
            )
        self.gradients.check_none_on_owners_alone()
        self._shard.pending_syncs.complete()
        self.detach()

    def leave_dropped(self) -> None:
        """Leave the model as a plain optimizer does that is dropped: it trains on without steps.

        Raises:
            RuntimeError: in a loop that has left ``opt.step()`` out, or not joined the last step; or as `leave`.
        """
        if self._overlaps and not self.machine.user_calls_step:
            _ = self._shard.param_groups  # raises that it was dropped
        self.machine.check_confirmed("a second backward pass")
        self.leave()

    def detach(self) -> None:
        self.gradients.detach()
        self._before_save.remove()

    def describe(self) -> list[str]:
        """The regime of the last iteration, and why; the events of its buckets; the memory of the gradients."""
        line = f"regime: {self._choice} ({self.machine.phase.name})"
        context = self.gradients.context
        return [line, *describe(self._steps.programs), *([] if context is None else context.describe())]

    # An iteration

    def _open_iteration(self) -> None:
        if is_finalized_by_hand(self._ddp):
            preconditions.check_finalizes(self._ddp)
        accumulates = self.accumulates or not will_reduce(self._ddp)
        adds_up = accumulates or self._has_accumulated
        self._has_accumulated = accumulates
        if self._overlaps and self.machine.is_waiting and not (adds_up or self.machine.user_calls_step):
            warn(
                f"The step waits for opt.step() ({self._why_wait()}), which was not called before the second backward "
                "pass. To accumulate gradients, use opt.accumulate() or ddp.no_sync(). [ZERO-305]"
            )
        if self.step_is_due and not adds_up:
            raise RuntimeError(
                "A second backward pass began before opt.step() or a forward pass of the DDP model, either of which "
                f"takes the first step of training ({self.machine.where}). Call opt.step() after backward(). [ZERO-305]"
            )
        self._choice, self._num_reduced = _NONE, 0
        self._steps.open()
        self.step_is_due = False
        if not self.late_changes.is_at_rest:
            self.late_changes.check_earlier()
            self.late_changes.forget()
        self.gradients.open(may_communicate=not self._in_join())
        self.may_be_replaced = False
        if self._in_join() and self.gradients.carried:
            raise RuntimeError(
                "Under Join, stage=2 cannot accumulate averaged gradients: a rank that has joined cannot add to its "
                f"own ({self.machine.where}). Call opt.zero_grad() before every backward pass. [ZERO-310]"
            )

    def _facts(self, params: list[Tensor]) -> Facts:
        """The facts that decide this iteration's regime; the same on every rank."""
        if not self.gradients.plan.knows_order:
            preconditions.check_bucket_of(self._ddp, params)
        return Facts(
            waits_because=self._why_wait(),
            accumulates=self.accumulates,
            is_local=not will_reduce(self._ddp),
            is_frozen=not (any(map(_REQUIRES_GRAD, self._shard.table.params)) or self._in_join()),
            # not under Join: joined ranks could not know that the first step waits
            is_first=not (self._num_loads == self._shard.num_loads or self._in_join()),
            learns_unused=self._steps.learns_unused,
            steps_whole=self._shard.local_step.steps_whole,
            not_reduced=next(map(self._shard.table.label, self._shard.binding.not_reduced), None),
        )

    @never_compiled
    def _finish_backward(self) -> None:
        """After the reducer has published the gradients."""
        try:
            if self.machine.phase is Phase.REDUCED:
                self._steps.finish(self._choice.regime)
            self.gradients.publish(was_consumed=self._steps.has_begun and self.deferred_because is None)
            self._steps.num_full = 0
            self._runner.raise_errors()  # not in the hook: the reducer would be left in the middle of an iteration
        except BaseException:
            self.machine.has_failed = True
            raise
        # parameters move here: only after errors were raised, on every rank or on none
        if not self.gradients.plan.knows_order:
            self.gradients.put_in_order(self._in_join())
        if self.machine.phase is Phase.STEPPED:
            self._record()
        self.step_is_due = self.machine.is_waiting and self._choice.is_due
        if self.step_is_due or self.machine.phase is Phase.STEPPED:
            self.late_changes.remember(self.step_is_due, self.step_is_due or self.machine.user_calls_step)
        if self._choice.is_refused:
            raise RuntimeError(self._choice.reason)

    def _record(self) -> None:
        """Record a step that was taken inside backward."""
        regime = StepRegime.OVERLAPPED if self.deferred_because is None else StepRegime.DEFERRED
        self._runner.record_step(StepRecord(stepped=True, regime=regime, deferred_because=self.deferred_because))
        self._num_loads = self._shard.num_loads
        self._watch.clear()

    @property
    def _ddp(self) -> DistributedDataParallel:
        ddp = self._ddp_reference()
        if ddp is None:
            raise preconditions.gradients_of_dropped(self.machine.where)
        return ddp


class BeforeSave:
    """A hook of the model before ``state_dict()``, which refuses parameters that a plain loop would not have yet.

    In copies of the model it does nothing.
    """

    def __init__(self, machine: OverlapMachine | None = None) -> None:
        self._machine = machine

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return BeforeSave, ()

    def __call__(self, *_: Any) -> None:
        """Check that no step is pending.

        Raises:
            RuntimeError: if backward has taken a step that ``opt.step()`` has not joined, or was interrupted in one.
        """
        if self._machine is not None:
            self._machine.check_may_save("state_dict() of the model")


def _report_unconfirmed(machine: OverlapMachine) -> None:
    """When a hook is dropped, or the process ends: report a step that a plain loop has not taken."""
    has_raised = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if machine.has_complained or has_raised:  # the loop did not end by itself
        return
    try:
        machine.check_whole("the end of training")
        machine.check_confirmed("the end of training")
    except RuntimeError as error:  # a finalizer cannot raise
        logger.error("%s", error)


def in_join_of(joinable: Joinable) -> Callable[[], bool]:
    """A function that returns whether ranks may have run out of inputs.

    It refers to nothing that holds the hook, so that no cycle keeps the process group alive.
    """
    reference = weakref.ref(joinable)

    def in_join() -> bool:
        alive = reference()
        return alive is not None and bool(alive._join_config.enable)

    return in_join
