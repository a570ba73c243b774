"""One iteration of a training loop, on either side."""

from typing import Any

from tests.fuzz.actions import act
from tests.fuzz.case import Train
from tests.fuzz.sides import Memory, Side


def train(side: Side, op: Train, memory: Memory) -> None:
    """Forward, backward, step, and whatever the case does between."""
    for action in op.before:
        act(side, action, memory)
    if op.zero != "keep":
        side.zero_grad(set_to_none=op.zero == "none")
    uses = op.uses[side.place.rank] if op.uses else True
    factor = 1.0
    if op.nonfinite is not None and op.nonfinite[0] == side.place.rank:
        factor = float(op.nonfinite[1])
    if op.closure:

        def closure() -> Any:
            side.zero_grad()
            return side.backward("last", 0, uses, factor)

        side.step(closure)
    else:
        for number, kind in enumerate(op.passes):
            side.backward(kind, number, uses, factor)
        side.passes_are_over(op.passes)
        for action in op.middle:
            act(side, action, memory, sees_output=not side.case.steps_inside)
        if op.steps and _calls_step(side):
            side.step()
    for action in op.after:
        act(side, action, memory)
    if side.scheduler is not None and op.schedules:
        side.scheduler.step()


def _calls_step(side: Side) -> bool:
    """A loop that never calls ``step()`` is one of ours alone."""
    return side.case.loop.calls_step or not side.is_ours
