"""One case on one rank: every operation on both sides, compared, reported to the parent one by one."""

import gc
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.fuzz.case import Case, Op, Train
from tests.fuzz.compare import Difference, check_equal, check_models, check_options
from tests.fuzz.late_values import MESSAGE, Events, may_raise, must_raise, watched
from tests.fuzz.net import build_net
from tests.fuzz.operations import steps_of
from tests.fuzz.ours import Ours, Pair
from tests.fuzz.plain import NotFinite, Plain
from tests.fuzz.refusals import find_refusal
from tests.fuzz.sides import Place

OK, BOTH_RAISED, REFUSED, FAILED = "ok", "both raised", "refused", "failed"
DIFFERENCE, ERROR, SILENT = "difference", "error", "silent"


@dataclass(frozen=True)
class Report:
    """What became of an operation on one rank.

    Attributes:
        op: its number; -1 for building the model.
        status: `OK`, `BOTH_RAISED`, `REFUSED` or `FAILED`.
        what: the kind of a refusal, of an error of both, or of a failure.
        text: the message or the traceback.
        goes_on: whether the case may go on after it; for the reader, the parent decides.
        seconds: what ours took.
        compared: how many steps were compared in it.
    """

    op: int
    status: str
    what: str = ""
    text: str = ""
    goes_on: bool = True
    seconds: float = 0.0
    compared: int = 0


Ask = Callable[[Report], bool]
"""Reports an operation to the parent, which knows of all ranks; whether to go on."""


class Runner:
    """Runs one case.

    Args:
        case: which.
        place: which rank this is.
        ask: reports an operation.
    """

    def __init__(self, case: Case, place: Place, ask: Ask) -> None:
        self.case = case
        self.place = place
        self._ask = ask
        self._start: list[Tensor] = []
        self._moved = False

    def run(self) -> None:
        """All operations, or as many as go well."""
        report, pair = self._build()
        if not self._ask(report) or pair is None:
            return
        self._start = [param.detach().clone() for param in pair.plain.params]
        for number, op in enumerate(self.case.program):
            if not self._ask(self._run(pair, number, op)):
                return

    def _build(self) -> tuple[Report, Pair | None]:
        plain, error = _attempt(lambda: Plain(self.case, self.place, build_net(self.case)))
        ours, own_error = _attempt(lambda: Ours(self.case, self.place, build_net(self.case)))
        if error is None and own_error is None:
            return Report(-1, OK), Pair(plain, ours)
        return _judge(self.case, self.case.program[0], -1, error, own_error, 0.0), None

    def _run(self, pair: Pair, number: int, op: Op) -> Report:
        plain, ours = pair.plain, pair.ours
        for side in (plain, ours):
            side.op = number
            side.seen.clear()
        pair.remember("before")
        before = [param.detach().clone() for param in ours.params] if op.expects is not None else []
        reference, own = steps_of(pair, op, pair.memories["before"])
        with watched(plain.net) as events:
            _, error = _attempt(reference)
        if self.place.injects == f"hang {number}" and self.place.rank == 1:
            time.sleep(10_000)
        started = time.monotonic()
        _, own_error = _attempt(own)
        if error is not None and own_error is None and self.case.mode.sync == "forward":
            _, own_error = _attempt(ours.optimizer.finish_sync)  # which raises what other ranks' steps have raised
        if error is not None and own_error is None and not self.case.loop.calls_step:
            _, own_error = _attempt(ours.optimizer.zero_grad)  # which takes the first step
        seconds = time.monotonic() - started
        if error is None and (late := self._judge_late_value(plain, number, events, own_error)) is not None:
            return late
        report = self._judge_run(pair, op, number, error, own_error, seconds)
        if report.status == REFUSED and report.what.endswith("unchanged"):
            changed = [index for index, one in enumerate(before) if not torch.equal(one, ours.params[index])]
            if changed:
                return Report(number, FAILED, "changed before raising", f"{report.text}\nparameters {changed}", False)
        return report

    def _judge_late_value(
        self, plain: Plain, number: int, events: Events, own_error: BaseException | None
    ) -> Report | None:
        """What it means that backward has read a late value, if that has raised or should have."""
        case = self.case
        if case.model.late_value is None or not case.steps_inside:
            return None
        if own_error is None:
            is_silent = _steps_all_inside(case, number) and must_raise(events, plain.net.late_param)
            return Report(number, FAILED, f"{SILENT}, late value", goes_on=False) if is_silent else None
        if MESSAGE in str(own_error) and may_raise_in(case, plain, events):
            text = "".join(traceback.format_exception(own_error))
            return Report(number, REFUSED, f"late value: {type(own_error).__name__}", text, False)
        return None

    def _judge_run(
        self,
        pair: Pair,
        op: Op,
        number: int,
        error: BaseException | None,
        own_error: BaseException | None,
        seconds: float,
    ) -> Report:
        plain, ours = pair.plain, pair.ours
        if own_error is not None or (error is not None and not isinstance(error, NotFinite)):
            if not (isinstance(error, NotFinite) and "finite gradients" in str(own_error)):
                return _judge(self.case, op, number, error, own_error, seconds)
            plain.seen.clear()
            ours.seen.clear()
        elif isinstance(error, NotFinite):
            return Report(number, FAILED, SILENT, "ours steps from gradients that are not finite", False)
        try:
            self._compare(plain, ours, op)
        except Difference as difference:
            return Report(number, FAILED, _named(self.case, DIFFERENCE, number), str(difference), False, seconds)
        if op is self.case.program[-1]:
            if not self._moved:
                return Report(number, FAILED, "vacuous", "no parameter has moved", False, seconds)
        compared = int(op.compares and (isinstance(op, Train) or op is self.case.program[-1]))
        return Report(number, OK, seconds=seconds, compared=compared)

    def _compare(self, plain: Plain, ours: Ours, op: Op) -> None:
        if [name for name, _ in plain.seen] != [name for name, _ in ours.seen]:
            raise Difference(f"seen {[name for name, _ in plain.seen]} and {[name for name, _ in ours.seen]}")
        for (name, one), (_, other) in zip(plain.seen, ours.seen, strict=True):
            check_equal(one, other, name)
        if op.compares:
            check_models(plain.net, ours.net)
            if not plain.is_stale:
                check_options(plain.optimizer, ours.optimizer)
                if plain.second is not None:
                    check_options(plain.second, ours.second)
        self._moved |= any(not torch.equal(p, s) for p, s in zip(plain.params, self._start, strict=True))


def may_raise_in(case: Case, plain: Plain, events: Events) -> bool:
    """Whether a step inside backward may come before backward reads a late value."""
    if None not in events:
        return False
    held = {id(param) for group in plain.optimizer.param_groups for param in group["params"]}
    stepped = [param for param in plain.params if id(plain.stepped(param)) in held]
    return may_raise(events, plain.net.late_param, stepped, case.mode.interleaved)


def _steps_all_inside(case: Case, number: int) -> bool:
    """Whether an iteration steps every parameter inside backward for sure."""
    before = case.program[max(0, number - 3) : number + 1]
    is_whole = not (case.model.frozen or case.optim.held_out or case.optim.name.startswith("toy"))
    is_plain = all(
        isinstance(op, Train) and op.passes == ("last",) and op.expects is None and op.steps for op in before
    )
    return is_whole and is_plain and len(before) == 4 and case.loop.calls_step


def _attempt(function: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    try:
        return function(), None
    except Exception as error:
        return None, error


def _judge(
    case: Case, op: Op, number: int, error: BaseException | None, own_error: BaseException | None, seconds: float
) -> Report:
    """What it means that one of them, or both, have raised."""
    if own_error is None:
        text = "".join(traceback.format_exception(error))
        return Report(number, FAILED, "only the reference raises", text, False, seconds)
    text = "".join(traceback.format_exception(own_error))
    if isinstance(own_error, Difference):
        return Report(number, FAILED, _named(case, DIFFERENCE, number), str(own_error), False, seconds)
    refusal = find_refusal(case, op, own_error)
    if refusal is not None and (error is None or op.expects is not None):
        what = f"{refusal.key}: {type(own_error).__name__}" + (", unchanged" if refusal.changes_nothing else "")
        return Report(number, REFUSED, what, text, False, seconds)
    if error is not None:
        return Report(number, BOTH_RAISED, f"{type(error).__name__}: {str(error)[:60]}", text, False, seconds)
    return Report(number, FAILED, _named(case, ERROR, number), text, False, seconds)


def _named(case: Case, kind: str, number: int) -> str:
    """A failure at or after an operation that may have to be refused is told by the name of the refusal."""
    keys = [op.expects for op in case.program[: number + 1] if op.expects is not None]
    return ", ".join([kind, *keys[-1:]])


def run_case(case: Case, place: Place, ask: Ask) -> None:
    """Run a case and free what it has held."""
    try:
        Runner(case, place, ask).run()
    finally:
        if case.ddp.compiled is not None:
            torch._dynamo.reset()
        gc.collect()
