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
    side.net.left_out = op.left_out[side.place.rank] if op.left_out else ()
    factor = 1.0
    if op.nonfinite is not None and op.nonfinite[0] == side.place.rank:
        factor = float(op.nonfinite[1])
    if op.closure:

        def closure() -> Any:
            side.zero_grad()
            return side.backward("last", 0, uses, factor)

        side.step(closure)
        side.step_second()
    else:
        for number, kind in enumerate(op.passes):
            side.backward(kind, number, uses, factor)
        side.passes_are_over(op.passes)
        for action in op.middle:
            act(side, action, memory, sees_output=not side.case.steps_inside)
        if op.steps:
            step_both(side)
    for action in op.after:
        act(side, action, memory)
    if side.scheduler is not None and op.schedules:
        side.scheduler.step()


def step_both(side: Side) -> None:
    """Both optimizers' steps; a loop that never calls the first one's ``step()`` is one of ours alone."""
    second = side.case.optim.second
    if second is not None and second.leads:
        side.step_second()
    if side.case.loop.calls_step or not side.is_ours:
        side.step()
    if second is not None and not second.leads:
        side.step_second()
