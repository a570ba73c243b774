"""Cases in which one rank fails, dies or stops: the others must raise within the group's time-out."""

import os
import signal
import time
import traceback
from collections.abc import Callable

from tests.fuzz.case import Case, Fault, Train
from tests.fuzz.net import build_net
from tests.fuzz.ours import Ours
from tests.fuzz.run_case import FAILED, REFUSED, Ask, Report
from tests.fuzz.sides import Place

GROUP_TIMEOUT = 6.0
GRACE = 10.0
"""Seconds by which an error may come later than the time-out, for a machine that is loaded."""
NOTICED = "a rank failed"


class OwnFailure(Exception):
    """What the failing rank's own code raises."""


def run_until_a_rank_fails(case: Case, place: Place, ask: Ask) -> None:
    """Train; the chosen rank fails in the middle, the others report the error that they get."""
    fault = case.fault
    assert fault is not None
    ours = Ours(case, place, build_net(case))
    for number, op in enumerate(case.program):
        assert isinstance(op, Train)
        ours.op = number
        ours.seen.clear()
        is_ours = place.rank == fault.rank and number == fault.at
        started = time.monotonic()
        try:
            _iterate(ours, fault.where if is_ours else None, lambda: _fail(fault))
        except OwnFailure:
            ask(Report(number, REFUSED, NOTICED, goes_on=False))
            return
        except Exception as error:
            ask(_judge(number, error, time.monotonic() - started, fault))
            return
    ask(Report(len(case.program), FAILED, "never noticed", "trained to the end", False))


def _iterate(ours: Ours, where: str | None, fail: Callable[[], None]) -> None:
    """One iteration, in which this rank fails at one place, or nowhere."""
    if where == "before":
        fail()
    ours.zero_grad()
    ours.net.on_pass = (where, fail) if where in ("forward", "backward") else None
    ours.backward("last", 0, True, 1.0)
    if where == "step":
        fail()
    if ours.case.loop.calls_step:
        ours.step()


def _fail(fault: Fault) -> None:
    if fault.how == "raise":
        raise OwnFailure
    os.kill(os.getpid(), signal.SIGKILL if fault.how == "kill" else signal.SIGSTOP)


def _judge(number: int, error: Exception, seconds: float, fault: Fault) -> Report:
    """An error of the group, of ours or of torch, soon enough."""
    text = "".join(traceback.format_exception(error))
    if number < fault.at:
        return Report(number, FAILED, "before any rank failed", text, False, seconds)
    if not isinstance(error, RuntimeError):
        return Report(number, FAILED, "error", text, False, seconds)
    if seconds > GROUP_TIMEOUT + GRACE:
        return Report(number, FAILED, "late", text, False, seconds)
    return Report(number, REFUSED, NOTICED, text, False, seconds)


def is_silent(case: Case, rank: int) -> bool:
    """Whether a rank is not heard of any more, for it was killed or stopped."""
    return case.fault is not None and case.fault.rank == rank and case.fault.how in ("kill", "stop")
