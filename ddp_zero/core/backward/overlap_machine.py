"""The step inside backward as a pure state machine: events in, buckets to step out.

It knows bucket indices and phases, never tensors, futures or groups; `hook.py` turns DDP's calls into events, and
programs step the buckets by their `turns`. So the order of all communication is a function of the plan, of these and of
this table alone.

    phase      event                            next phase   what the hook does
    REST       pass_began                       RUNNING      none
    STEPPED    pass_began                       RUNNING      none; an error if the user joins steps by opt.step()
    RUNNING    step_began                       RUNNING      step bucket 0, and from then on bucket i - lag
    RUNNING    last_bucket_arrived              STEPPED      step all buckets that are left, end the step
    RUNNING    last_bucket_arrived, deferred    REDUCED      none: the reducer must publish the gradients first
    REDUCED    backward_finished                STEPPED      all buckets are stepped now
    REDUCED    backward_finished, reduce only   WAITING      none: gradients wait for opt.step(), or for more
    WAITING    pass_began                       RUNNING      none: more gradients
    WAITING    step_taken                       REST         none: opt.step() has used them
    WAITING    due_step_taken                   STEPPED      none: the next forward pass came before opt.step()
    WAITING    gradients_dropped                REST         none: nobody will
    STEPPED    step_called                      REST         none: the step has been taken
    any        reset                            REST         none: the iteration is dropped

Buckets are those of the plan, and are stepped in its order, whatever the lag. Any other event raises.
"""

from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import NoReturn

INTERLEAVED_LAG = 1
"""Buckets that a step inside backward stays behind the reduction, where both take turns."""


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
        waits_because: why every step waits for ``opt.step()``, or None.
        accumulates: whether this pass is in ``opt.accumulate()``.
        is_local: whether this pass is in ``no_sync()``; DDP averages it if a forward pass outside was left open.
        is_frozen: whether the pass is for other optimizers: all parameters of this one are frozen.
        learns_unused: whether this pass of a static graph tells which parameters no rank uses.
        steps_whole: whether the optimizer wraps another one, which cannot be stepped by bucket.
        not_reduced: a parameter of the optimizer that is in none of DDP's buckets, as messages name it, or None.
    """

    waits_because: str | None = None
    accumulates: bool = False
    is_local: bool = False
    is_frozen: bool = False
    is_first: bool = False
    learns_unused: bool = False
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


def choose(facts: Facts) -> Choice:
    """The regime of an iteration."""
    reason = _why_not_by_bucket(facts)
    is_left_to_user = facts.waits_because is not None or facts.accumulates or facts.is_local or facts.is_frozen
    if is_left_to_user or facts.is_first:
        return Choice(Regime.REDUCE_ONLY, reason, is_due=not is_left_to_user)
    return Choice(Regime.OVERLAPPED if reason is None else Regime.DEFERRED, reason)


def _why_not_by_bucket(facts: Facts) -> str | None:
    if facts.waits_because:
        return facts.waits_because
    if facts.accumulates:
        return "opt.accumulate() leaves the step to a later backward pass"
    if facts.is_local:
        return "DDP averages this pass in no_sync(), since a forward pass outside was left open"
    if facts.is_frozen:
        return "all parameters of the optimizer are frozen"
    if facts.is_first:
        return "the first step of all waits for opt.step() or the next forward pass"
    if facts.learns_unused:
        return "the first pass of a static graph tells which parameters are unused"
    if facts.steps_whole:
        return "the optimizer wraps another one, which steps all its parameters at once"
    return facts.not_reduced and f"{facts.not_reduced} is in none of DDP's buckets"


def turns(regime: Regime, lag: int | None, count: int) -> list[range]:
    """For each bucket of a pass, the buckets to step once it is full; see `OverlapMachine` for the lag."""
    if regime is not Regime.OVERLAPPED:
        return [range(0)] * count
    behind = [0 if lag is None else max(0, place + 1 - lag) for place in range(count)]
    return [range(*ends) for ends in pairwise([0, *behind[:-1], count])] if count else []


class Phase(Enum):
    """The progress of the current iteration."""

    REST = "rest"
    RUNNING = "running"
    REDUCED = "reduced"
    WAITING = "waiting"
    STEPPED = "stepped"

    __hash__ = object.__hash__  # by identity: `Enum` has a method in Python


class _Event(Enum):
    """The events of an iteration; messages use the name up to a comma."""

    PASS_BEGAN = "bucket 0"
    LAST_BUCKET = "the last bucket"
    LAST_BUCKET_DEFERRED = "the last bucket, in an iteration that is not stepped in the hook"
    BACKWARD_FINISHED = "the end of backward"
    BACKWARD_ONLY_REDUCED = "the end of backward, which leaves the step to opt.step()"
    STEP_TAKEN = "the step in opt.step()"
    DUE_STEP_TAKEN = "a step that is due"
    GRADIENTS_DROPPED = "zero_grad()"
    STEP_CALLED = "opt.step()"

    __hash__ = object.__hash__


_NEXT = {
    (Phase.REST, _Event.PASS_BEGAN): Phase.RUNNING,
    (Phase.WAITING, _Event.PASS_BEGAN): Phase.RUNNING,
    (Phase.STEPPED, _Event.PASS_BEGAN): Phase.RUNNING,
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

_ADDS_UP = (
    "to which a plain loop would add. To go on, wrap the module again, and call opt.reset(), opt.zero_grad() and "
    "opt.attach(model)."
)
"""The end of `check_confirmed`'s error for a second backward pass."""

_NO_EFFECT_ELSEWHERE = {_Event.STEP_TAKEN, _Event.GRADIENTS_DROPPED}
"""Events that the user may cause in any phase."""


class OverlapMachine:
    """The phases of an iteration.

    Args:
        lag: how many buckets the step stays behind the reduction, at least 1; None: until the last bucket has arrived.
            An attribute, too.
        where: this rank's name in messages, such as ``rank 1``.

    Attributes:
        user_calls_step: whether ``opt.step()`` was ever called.
        backwards_since_step: how many backward passes have stepped since the last call.
        has_complained: whether `check_confirmed` has raised.
        has_failed: whether the step of the last backward pass was interrupted.
    """

    def __init__(self, lag: int | None, where: str) -> None:
        assert lag is None or lag >= 1, f"a lag of {lag} buckets"
        self.phase = Phase.REST
        self.lag = lag
        self.where = where
        self.user_calls_step = self.has_complained = False
        self.has_failed = False
        self.backwards_since_step = 0
        self._clear()

    @property
    def may_begin(self) -> bool:
        """True if the next event may be the first bucket of a backward pass."""
        return (self.phase, _Event.PASS_BEGAN) in _NEXT

    @property
    def is_waiting(self) -> bool:
        """True if averaged gradients wait for ``opt.step()``."""
        return self.phase is Phase.WAITING

    def pass_began(self, regime: Regime) -> None:
        """The first bucket of a backward pass is about to be reduced.

        Args:
            regime: how this iteration steps.
        """
        self.check_confirmed("a second backward pass", _ADDS_UP)
        self._go(_Event.PASS_BEGAN)
        self._clear()
        self._regime, self.has_failed = regime, False
        self.backwards_since_step += regime is not Regime.REDUCE_ONLY

    def step_began(self) -> None:
        """The first bucket that is due is about to be stepped, before the last one has arrived."""
        self._is_stepping = True

    def last_bucket_arrived(self) -> None:
        """The last bucket's gradients are ready on this rank; in phase STEPPED the step ends with it."""
        overlapped = self._regime is Regime.OVERLAPPED
        self._go(_Event.LAST_BUCKET if overlapped else _Event.LAST_BUCKET_DEFERRED)

    def out_of_order(self, bucket: int, expected: int) -> RuntimeError:
        """The error for a bucket whose turn it is not."""
        turn = {Phase.RUNNING: f"bucket {expected}", Phase.REDUCED: "the end of backward"}.get(self.phase, "bucket 0")
        return RuntimeError(
            f"Expected {turn} next, got bucket {bucket} ({self.where}, phase {self.phase.name}). If a backward pass "
            "was interrupted, wrap the module again, and call opt.reset() and opt.attach(model). [ZERO-308]"
        )

    def backward_finished(self) -> bool:
        """The reducer has published the gradients of an iteration that was not stepped in the hook.

        Returns:
            True if all buckets are to be stepped now, from these gradients.
        """
        only_reduces = self._regime is Regime.REDUCE_ONLY
        self._go(_Event.BACKWARD_ONLY_REDUCED if only_reduces else _Event.BACKWARD_FINISHED)
        return not only_reduces

    def step_taken(self) -> None:
        """The user has called ``opt.step()``, which has used any gradients that have waited for it."""
        self._go(_Event.STEP_TAKEN)
        self.user_calls_step = True

    def check_confirmed(
        self, what: str, then: str = "which a plain loop would drop here. Call opt.step() to keep it."
    ) -> None:
        """Check that ``opt.step()`` has followed the last step inside backward, if the loop calls it at all.

        Args:
            what: what comes first instead, as messages name it.
            then: why that is wrong.

        Raises:
            RuntimeError: otherwise: a plain loop has not taken that step.
        """
        if self.is_unconfirmed:
            self.has_complained = True
            raise RuntimeError(
                f"Expected opt.step() after backward(), got {what} ({self.where}): backward has taken this step, "
                f"{then} If the loop may skip opt.step() after backward(), build the optimizer with "
                "overlap_with_ddp=False (shard_optimizer(..., overlap=False)), or with nonfinite='skip' if it "
                f"skips gradients that are not finite. {_SEVERAL_PASSES} [ZERO-307]"
            )

    @property
    def is_unconfirmed(self) -> bool:
        """True if backward has taken a step, and ``opt.step()``, which the loop calls, has not followed."""
        return self.phase is Phase.STEPPED and self.user_calls_step

    def check_before_step(self, what: str) -> None:
        """Check that no step was taken inside backward that ``opt.step()`` must still join."""
        if self.is_unconfirmed:
            raise RuntimeError(
                f"{what} between backward() and opt.step() comes too late ({self.where}): the optimizer step "
                "was taken inside backward. Do it before backward() or after opt.step(), or build the optimizer with "
                "overlap_with_ddp=False. [ZERO-304]"
            )

    def refuse_other(self, found: str, kind: str) -> NoReturn:
        """Raise RuntimeError: another optimizer comes where ``opt.step()`` should follow the step of the last pass.

        Args:
            found: the step or construction of another one, as messages name it.
            kind: the name of the optimizer's class.
        """
        self.has_complained = True
        if self.is_torn:
            raise RuntimeError(
                f"Expected a whole step of an earlier {kind}, got {found} after a backward pass that was interrupted "
                f"while it stepped ({self.where}): parameters may be half updated, which they would not be with a "
                "plain optimizer. Call earlier.reset(), and load the parameters of before. [ZERO-308]"
            )
        raise RuntimeError(
            f"Expected opt.step() after backward(), got {found} ({self.where}): the hook of an earlier {kind} is still "
            "on the DDP model, and backward has taken a step of it, which a plain loop would not have. Call "
            "earlier.detach() before another optimizer trains the model. Now call earlier.reset() and "
            "earlier.detach(), and load the parameters of before. If both are to step, build the earlier one with "
            "overlap_with_ddp=False (shard_optimizer(..., overlap=False)). [ZERO-307]"
        )

    def check_may_save(self, what: str) -> None:
        """Check that a plain loop would save the same here: RuntimeError as `check_confirmed`, or after half a step."""
        self.check_whole(what)
        self.check_confirmed(
            what,
            "which a plain loop would not have taken here yet. Call opt.step(), then save, as in a handler of Ctrl-C.",
        )

    @property
    def is_torn(self) -> bool:
        """True after a backward pass that was interrupted while it stepped."""
        return (self.phase is Phase.RUNNING and self._is_stepping) or (self.phase is Phase.STEPPED and self.has_failed)

    def check_whole(self, what: str) -> None:
        """RuntimeError if `is_torn`."""
        if self.is_torn:
            raise RuntimeError(
                f"Expected a whole step, got {what} after a backward pass that was interrupted while it stepped "
                f"({self.where}): parameters and state may be half updated. Load a checkpoint, once the module is "
                "wrapped again and opt.reset() and opt.attach(model) were called; after opt.reset() alone they can be "
                "saved as they are. [ZERO-308]"
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
        if self.phase is Phase.STEPPED:
            self.check_whole("opt.step()")
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
                "optimizer with overlap_with_ddp=False (shard_optimizer(..., overlap=False)). [ZERO-307]"
            )

    def step_shadowed(self) -> None:
        """A rank that has joined stands in for a call of ``opt.step()`` that the others may or may not make."""
        self.backwards_since_step = 0
        self.phase = Phase.REST

    def reset(self) -> None:
        """Drop the iteration, whatever it was doing; the first ``opt.step()`` still hears of steps before it."""
        is_unstepped = self.phase not in (Phase.REST, Phase.STEPPED) and self._regime is not Regime.REDUCE_ONLY
        self.backwards_since_step = 0 if self.user_calls_step else self.backwards_since_step - is_unstepped
        self.phase = Phase.REST
        self._clear()

    def _clear(self) -> None:
        self._is_stepping = False
        self._regime = Regime.OVERLAPPED  # until `pass_began` sets it

    def _go(self, event: _Event) -> None:
        following = _NEXT.get((self.phase, event))
        if following is not None:
            self.phase = following
        elif event not in _NO_EFFECT_ELSEWHERE:
            expected = next(phase for phase, known in _NEXT if known is event)
            raise RuntimeError(
                f"Expected phase {expected.name} at {event.value.split(',')[0]}, got {self.phase.name} ({self.where}). "
                + (
                    "No backward pass has stepped since: was forward run through the DDP model whose hook was "
                    "registered with ddp.register_comm_hook(), and backward outside ddp.no_sync() and "
                    "opt.accumulate()? If the module was wrapped again, call opt.reset() and opt.attach(model) with "
                    "the new DDP model."
                    if self.phase is Phase.REST
                    else "If a backward pass was interrupted, wrap the module again, and opt.reset() and opt.attach() "
                    "it."
                )
                + " [ZERO-308]"
            )
