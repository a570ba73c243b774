"""The step inside backward as a pure state machine: events in, actions out.

It knows bucket indices and phases, never tensors, futures or groups; `hook.py` turns DDP's calls into events and
carries out the actions. So the order of all communication is a function of the plan and of this table alone.

    phase      event                            next phase   actions, in order
    REST       bucket_arrived(0)                RUNNING      as below
    STEPPED    bucket_arrived(0)                RUNNING      as below; an error if the user joins steps by opt.step()
    RUNNING    bucket_arrived(i)                RUNNING      StepBucket(i - lag)
    RUNNING    bucket_arrived(last)             STEPPED      StepBucket of all that are left, FinishSyncs
    RUNNING    bucket_arrived(last), deferred   REDUCED      none: the reducer must publish the gradients first
    REDUCED    backward_finished                STEPPED      StepAll
    REDUCED    backward_finished, reduce only   WAITING      none: gradients wait for opt.step(), or for more
    WAITING    bucket_arrived(0)                RUNNING      as below: more gradients
    WAITING    step_taken                       REST         none: opt.step() has used them
    WAITING    due_step_taken                   STEPPED      none: the next forward pass came before opt.step()
    WAITING    gradients_dropped                REST         none: nobody will
    STEPPED    step_called                      REST         none: the step has been taken
    any        reset                            REST         none: the iteration is dropped

If a bucket's composition is not the plan's, no bucket is stepped before the last one has arrived; AdoptLayout then
comes first and plans again. Buckets are stepped in plan order, whatever the lag. Any other event raises.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import cache


class Regime(Enum):
    """The moment at which an iteration steps; chosen at its first bucket."""

    OVERLAPPED = "overlapped"
    """Bucket by bucket inside backward."""
    DEFERRED = "deferred"
    """At the end of backward, from gradients that the reducer has published."""
    REDUCE_ONLY = "reduce only"
    """Not at all: gradients are averaged and wait."""


@dataclass(frozen=True)
class Facts:
    """The facts that decide an iteration's regime.

    Attributes:
        knows_buckets: whether an earlier backward pass has shown DDP's buckets.
        fits_plan: whether the plan has the buckets that arrive.
        waits_because: why every step waits for ``opt.step()``, or None.
        accumulates: whether this pass is in ``opt.accumulate()``.
        is_local: whether this pass is in ``no_sync()``; DDP averages it if a forward pass outside was left open.
        may_have_unused: why only the reducer knows which gradients exist, or None.
        steps_whole: whether the optimizer wraps another one, which cannot be stepped by bucket.
        not_reduced: a parameter of the optimizer that is in none of DDP's buckets, as messages name it, or None.
    """

    knows_buckets: bool = True
    fits_plan: bool = True
    waits_because: str | None = None
    accumulates: bool = False
    is_local: bool = False
    is_first: bool = False
    may_have_unused: str | None = None
    steps_whole: bool = False
    not_reduced: str | None = None


@dataclass(frozen=True)
class Choice:
    """The regime of an iteration, and the reason.

    Attributes:
        regime: bucket by bucket, at the end of backward, or not at all.
        reason: why not bucket by bucket; None if it is.
        is_due: whether the step waits only because it is the first: the next forward pass takes it, if ``opt.step()``
            has not.
        is_refused: True if the reason is an error, raised after backward: inside it, it would leave DDP unusable.
    """

    regime: Regime
    reason: str | None
    is_due: bool = False
    is_refused: bool = False

    def __str__(self) -> str:
        until = "opt.step()" if self.regime is Regime.REDUCE_ONLY else "the end of backward"
        return f"deferred to {until}: {self.reason}" if self.reason else "overlapped"


_REASONS: tuple[tuple[Callable[[Facts], bool | str | None], str | None], ...] = (
    (lambda facts: not facts.knows_buckets, "the first backward pass shows DDP's buckets"),
    (lambda facts: not facts.fits_plan, "DDP has rebuilt its buckets, or parameters were added, frozen or unfrozen"),
    (lambda facts: facts.waits_because, None),
    (lambda facts: facts.accumulates, "opt.accumulate() leaves the step to a later backward pass"),
    (lambda facts: facts.is_local, "DDP averages this pass in no_sync(), since a forward pass outside was left open"),
    (lambda facts: facts.is_first, "the first step of all waits for opt.step() or the next forward pass"),
    (lambda facts: facts.may_have_unused, None),
    (lambda facts: facts.steps_whole, "the optimizer wraps another one, which steps all its parameters at once"),
    (lambda facts: facts.not_reduced and f"{facts.not_reduced} is in none of DDP's buckets", None),
)
"""A fact that keeps an iteration from stepping bucket by bucket, and the reason; None: the fact is the reason."""


def choose(facts: Facts) -> Choice:
    """The regime of an iteration."""
    found = ((fact(facts), text) for fact, text in _REASONS)
    reason = next((text if text is not None else str(fact) for fact, text in found if fact), None)
    is_left_to_user = facts.waits_because is not None or facts.accumulates or facts.is_local
    if is_left_to_user or facts.is_first:
        return Choice(Regime.REDUCE_ONLY, reason, is_due=not is_left_to_user)
    return Choice(Regime.OVERLAPPED if reason is None else Regime.DEFERRED, reason)


class OverlapStatus(Enum):
    """The status of an overlapped optimizer's plan, in the words of `torch.distributed.optim`."""

    UNINITIALIZED = 0
    """No backward pass has shown DDP's buckets yet."""
    DDP_HAS_REBUILT_BUCKETS = 1
    """DDP's final buckets have been seen; the plan for them is about to be adopted."""
    INITIALIZED = 2
    """The plan is the final one."""


_STATUS_CHANGES = {
    (OverlapStatus.UNINITIALIZED, OverlapStatus.DDP_HAS_REBUILT_BUCKETS),
    (OverlapStatus.DDP_HAS_REBUILT_BUCKETS, OverlapStatus.INITIALIZED),
    (OverlapStatus.INITIALIZED, OverlapStatus.DDP_HAS_REBUILT_BUCKETS),
}


class Phase(Enum):
    """The progress of the current iteration."""

    REST = "rest"
    RUNNING = "running"
    REDUCED = "reduced"
    WAITING = "waiting"
    STEPPED = "stepped"


class _Event(Enum):
    """The events of an iteration; messages use the name up to a comma."""

    FIRST_BUCKET = "bucket 0"
    LAST_BUCKET = "the last bucket"
    LAST_BUCKET_DEFERRED = "the last bucket, in an iteration that is not stepped in the hook"
    BACKWARD_FINISHED = "the end of backward"
    BACKWARD_ONLY_REDUCED = "the end of backward, which leaves the step to opt.step()"
    STEP_TAKEN = "the step in opt.step()"
    DUE_STEP_TAKEN = "a step that is due"
    GRADIENTS_DROPPED = "zero_grad()"
    STEP_CALLED = "opt.step()"


_NEXT = {
    (Phase.REST, _Event.FIRST_BUCKET): Phase.RUNNING,
    (Phase.WAITING, _Event.FIRST_BUCKET): Phase.RUNNING,
    (Phase.STEPPED, _Event.FIRST_BUCKET): Phase.RUNNING,
    (Phase.RUNNING, _Event.LAST_BUCKET): Phase.STEPPED,
    (Phase.RUNNING, _Event.LAST_BUCKET_DEFERRED): Phase.REDUCED,
    (Phase.REDUCED, _Event.BACKWARD_FINISHED): Phase.STEPPED,
    (Phase.REDUCED, _Event.BACKWARD_ONLY_REDUCED): Phase.WAITING,
    (Phase.WAITING, _Event.STEP_TAKEN): Phase.REST,
    (Phase.WAITING, _Event.GRADIENTS_DROPPED): Phase.REST,
    (Phase.WAITING, _Event.DUE_STEP_TAKEN): Phase.STEPPED,
    (Phase.STEPPED, _Event.STEP_CALLED): Phase.REST,
}
"""The legal changes of phase; `OverlapMachine.reset` and `step_shadowed` lead to REST from anywhere."""

_SEVERAL_PASSES = (
    "For several backward passes before one step, as over a GAN's real and fake batches, run all but the last in "
    "opt.accumulate() or ddp.no_sync(). For gradients through this model that must not update it, as for a GAN's "
    "generator, freeze it by requires_grad_(False) before its forward pass."
)

_NO_EFFECT_ELSEWHERE = {_Event.STEP_TAKEN, _Event.GRADIENTS_DROPPED}
"""Events that the user may cause in any phase."""


@dataclass(frozen=True)
class AdoptLayout:
    """Plan for the buckets of this iteration, or those that DDP builds after it; move state to its new owners."""


@dataclass(frozen=True)
class StepBucket:
    """Wait for the reduction of a bucket, step this rank's part of it, start its sync."""

    bucket: int


_step_of = cache(StepBucket)


@dataclass(frozen=True)
class StepAll:
    """Step and sync every bucket of the plan from the gradients that the reducer has published."""


@dataclass(frozen=True)
class FinishSyncs:
    """Wait for every sync, so that no half-updated parameter is visible after backward."""


Action = AdoptLayout | StepBucket | StepAll | FinishSyncs


class OverlapMachine:
    """The phases of an iteration.

    Args:
        lag: how many buckets the step stays behind the reduction, at least 1; None: until the last bucket has arrived.
        where: this rank's name in messages, such as ``rank 1``.

    Attributes:
        user_calls_step: whether ``opt.step()`` was ever called.
        backwards_since_step: how many backward passes have stepped since the last call.
        has_complained: whether `check_joined` has raised.
    """

    def __init__(self, lag: int | None, where: str) -> None:
        assert lag is None or lag >= 1, f"a lag of {lag} buckets"
        self.phase = Phase.REST
        self.status = OverlapStatus.UNINITIALIZED
        self._lag = lag
        self.where = where
        self.user_calls_step = self.has_complained = False
        self.backwards_since_step = 0
        self._clear()

    def bucket_arrived(self, bucket: int, is_last: bool, matches_plan: bool, regime: Regime) -> tuple[Action, ...]:
        """A bucket's gradients are ready on this rank and its reduction is about to start.

        Args:
            bucket: its index; buckets arrive from 0 up.
            is_last: whether it is the last of this backward pass.
            matches_plan: whether the plan has exactly this bucket at this place.
            regime: how this iteration steps; read at bucket 0.
        """
        if bucket == 0 and (self.phase, _Event.FIRST_BUCKET) in _NEXT:
            self._start(regime)
        if self.phase is not Phase.RUNNING or bucket != self._arrived:
            turn = {Phase.RUNNING: f"bucket {self._arrived}", Phase.REDUCED: "the end of backward"}
            expected = turn.get(self.phase, "bucket 0")
            raise RuntimeError(
                f"Expected {expected} next, got bucket {bucket} ({self.where}, phase {self.phase.name}). If a backward "
                "pass was interrupted, call opt.reset(). [ZERO-308]"
            )
        self._arrived += 1
        self._matches &= matches_plan
        if self._regime is not Regime.OVERLAPPED:
            if is_last:
                self._go(_Event.LAST_BUCKET_DEFERRED)
            return ()
        if is_last:
            return self._finish()
        if self._matches and self._lag is not None and bucket >= self._lag:
            return (self._next_step(),)
        return ()

    def backward_finished(self) -> tuple[Action, ...]:
        """The reducer has published the gradients of an iteration that was not stepped in the hook."""
        only_reduces = self._regime is Regime.REDUCE_ONLY
        self._go(_Event.BACKWARD_ONLY_REDUCED if only_reduces else _Event.BACKWARD_FINISHED)
        adopt: tuple[Action, ...] = () if self._matches else (AdoptLayout(),)
        return adopt if only_reduces else (*adopt, StepAll())

    def step_taken(self) -> None:
        """The user has called ``opt.step()``, which has used any gradients that have waited for it."""
        self._go(_Event.STEP_TAKEN)
        self.user_calls_step = True

    def check_joined(self, what: str) -> None:
        """Check that ``opt.step()`` has followed the last step inside backward, if the loop calls it at all.

        Args:
            what: what comes first instead, as messages name it.

        Raises:
            RuntimeError: otherwise: a plain loop has not taken that step.
        """
        if self.phase is Phase.STEPPED and self.user_calls_step:
            self.has_complained = True
            raise RuntimeError(
                f"Expected opt.step() after backward(), got {what} ({self.where}): backward has taken this step, which "
                "a plain loop would drop here. If the loop may skip opt.step() after backward(), build the optimizer "
                "with overlap_with_ddp=False (shard_optimizer(..., overlap=False)), or with nonfinite='skip' if it "
                f"skips gradients that are not finite. {_SEVERAL_PASSES} [ZERO-307]"
            )

    def gradients_dropped(self) -> None:
        """The user has dropped all gradients, including any that have waited."""
        self._go(_Event.GRADIENTS_DROPPED)

    def due_step_taken(self) -> None:
        """The step that was due before the next forward pass was taken, as if inside the last backward pass."""
        self._go(_Event.DUE_STEP_TAKEN)
        self.backwards_since_step += 1

    def step_called(self) -> None:
        """The user calls ``opt.step()``: the iteration is joined."""
        self._go(_Event.STEP_CALLED)
        backwards, self.backwards_since_step = self.backwards_since_step, 0
        self.user_calls_step = True
        self._check_single(backwards)

    def check_due_step(self) -> None:
        """At ``opt.step()`` with a step that is due: check that none was taken before a `reset`."""
        earlier, self.backwards_since_step = self.backwards_since_step, 0
        self._check_single(earlier + 1)

    def _check_single(self, backwards: int) -> None:
        if backwards > 1:
            raise RuntimeError(
                f"opt.step() was called once for {backwards} backward passes that had already stepped ({self.where}). "
                f"{_SEVERAL_PASSES} Or leave the loop as it is, which may skip opt.step() then, and build the "
                "optimizer with overlap_with_ddp=False (shard_optimizer(..., overlap=False)). [ZERO-306]"
            )

    def step_shadowed(self) -> None:
        """A rank that has joined stands in for a call of ``opt.step()`` that the others may or may not make."""
        self.backwards_since_step = 0
        self.phase = Phase.REST

    def buckets_rebuilt(self) -> None:
        """DDP's final buckets have been seen."""
        self._change_status(OverlapStatus.DDP_HAS_REBUILT_BUCKETS)

    def layout_adopted(self) -> None:
        """The plan for DDP's final buckets is in force."""
        self._change_status(OverlapStatus.INITIALIZED)

    def reset(self) -> None:
        """Drop the iteration, whatever it was doing; the first ``opt.step()`` still hears of steps before it."""
        is_unstepped = self.phase not in (Phase.REST, Phase.STEPPED) and self._regime is not Regime.REDUCE_ONLY
        self.backwards_since_step = 0 if self.user_calls_step else self.backwards_since_step - is_unstepped
        self.phase = Phase.REST
        self._clear()

    def _start(self, regime: Regime) -> None:
        self.check_joined("a second backward pass")
        self._clear()
        self._regime = regime
        self.backwards_since_step += regime is not Regime.REDUCE_ONLY
        self._go(_Event.FIRST_BUCKET)

    def _finish(self) -> tuple[Action, ...]:
        first: tuple[Action, ...] = () if self._matches else (AdoptLayout(),)
        steps = tuple(self._next_step() for _ in range(self._arrived - self._next))
        self._go(_Event.LAST_BUCKET)
        return (*first, *steps, FinishSyncs())

    def _next_step(self) -> StepBucket:
        self._next += 1
        return _step_of(self._next - 1)

    def _clear(self) -> None:
        self._arrived = 0
        self._next = 0
        self._matches = True
        self._regime = Regime.OVERLAPPED

    def _change_status(self, status: OverlapStatus) -> None:
        assert (self.status, status) in _STATUS_CHANGES, f"{self.status.name} to {status.name} ({self.where})"
        self.status = status

    def _go(self, event: _Event) -> None:
        """Change phase."""
        following = _NEXT.get((self.phase, event))
        if following is not None:
            self.phase = following
        elif event not in _NO_EFFECT_ELSEWHERE:
            raise self._illegal(event)

    def _illegal(self, event: _Event) -> RuntimeError:
        expected = next(phase for phase, known in _NEXT if known is event)
        return RuntimeError(
            f"Expected phase {expected.name} at {event.value.split(',')[0]}, got {self.phase.name} ({self.where}). "
            + (
                "No backward pass has stepped since: was forward run through the DDP model whose hook was registered "
                "with ddp.register_comm_hook(), and backward outside ddp.no_sync() and opt.accumulate()? If the module "
                "was wrapped again, call opt.reset() and opt.attach(model) with the new DDP model."
                if self.phase is Phase.REST
                else "If a backward pass was interrupted, call opt.reset()."
            )
            + " [ZERO-308]"
        )
