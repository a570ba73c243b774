"""What may raise in the sharded run: where, with which error, and whether nothing may have changed before.

An error is legal only if it is listed here for its operation, and raised on every rank.
"""

import re
from dataclasses import dataclass

from tests.fuzz.case import Case, Op


@dataclass(frozen=True)
class Refusal:
    """An error that is as it should be.

    Attributes:
        key: what an operation that may raise it has in ``expects``.
        kind: the exception's class name.
        pattern: what its message matches.
        changes_nothing: whether parameters must be as they were before the operation.
    """

    key: str
    kind: str
    pattern: str
    changes_nothing: bool = False


REFUSALS = [
    # between backward and step, after a step inside backward: must act as in a plain loop, or raise
    Refusal("middle", "RuntimeError", r"(opt\.step\(\)|inside|overlap_with_ddp=False|backward).*\[ZERO-\d+\]$"),
    # gradients that nobody has averaged
    Refusal("leftover", "RuntimeError", r"(no_sync|opt\.step\(\)).*\[ZERO-\d+\]$", changes_nothing=True),
    # clipping in the loop that is not there from the first step on
    Refusal("late clip", "RuntimeError", r"\[ZERO-304\]$"),
    Refusal("late clip", "RuntimeError", r"\[ZERO-40[12]\]$"),
    # an optimizer that couples parameters
    Refusal("coupled", "RuntimeError", r"rank.*\[ZERO-\d+\]$"),
    Refusal("coupled", "ValueError", r"rank.*\[ZERO-\d+\]$"),
    # overlap or stage 2 without a hook
    Refusal("no hook", "RuntimeError", r"hook.*\[ZERO-203\]$"),
    # a norm of a part
    Refusal("absent", "RuntimeError", r"\[ZERO-40[12]\]$"),
    # a backward pass whose step was left out in a loop that calls it
    Refusal("skipped", "RuntimeError", r"\[ZERO-307\]$", changes_nothing=True),
    Refusal("skipped", "RuntimeError", r"\[ZERO-403\]$", changes_nothing=True),
    # strides that have changed since DDP, or a rank's parts, were laid out by them
    Refusal("memory format", "RuntimeError", r"\[ZERO-(114|321)\]$", changes_nothing=True),
    # gradients that a step has used up are still there
    Refusal("kept", "RuntimeError", r"\[ZERO-403\]$", changes_nothing=True),
]


def find_refusal(case: Case, op: Op, error: BaseException) -> Refusal | None:
    """The refusal that an error is, or None if it is not listed."""
    kind, message = type(error).__name__, str(error)
    for refusal in REFUSALS:
        if refusal.key == op.expects and refusal.kind == kind and re.search(refusal.pattern, message, re.DOTALL):
            return refusal
    return None
