"""How an iteration steps, and why: frozen facts in, one choice out, the same on every rank.

Facts are gathered once, when the first bucket of a backward pass arrives. The first row of `_REASONS` whose fact holds
gives the reason; whether the step is left to ``opt.step()`` or taken at the end of backward follows from the facts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum


class Regime(Enum):
    """How an iteration steps; chosen at its first bucket."""

    OVERLAPPED = "overlapped"
    """Bucket by bucket inside backward."""
    DEFERRED = "deferred"
    """At the end of backward, from gradients that the reducer has published."""
    REDUCE_ONLY = "reduce only"
    """Not at all: gradients are averaged and wait."""


@dataclass(frozen=True)
class Facts:
    """What an iteration's regime depends on.

    Attributes:
        knows_buckets: whether an earlier backward pass has shown DDP's buckets.
        fits_plan: whether the plan has the buckets that arrive.
        waits_because: why every step waits for ``opt.step()``, or None.
        accumulates: whether this pass is in ``opt.accumulate()``.
        is_local: whether this pass is in ``no_sync()``; DDP averages it if a forward pass outside was left open.
        is_first: True until the first step was taken.
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
    """How an iteration steps.

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
