"""One loop on one rank: first the plain side, which leaves a trace, then the sharded side by itself."""

import copy
import gc
import random
import time
import traceback
import zlib
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.fuzz.compare import Difference, check_equal
from tests.fuzz.late_values import watched
from tests.fuzz.loops.case import Do, LoopCase
from tests.fuzz.loops.expect import Expected, Risk, expected_of, parted, raises, reads_late
from tests.fuzz.loops.statements import Loop, code_of, options_of
from tests.fuzz.net import Net
from tests.fuzz.ours import Ours
from tests.fuzz.plain import NotFinite, Plain
from tests.fuzz.run_case import BOTH_RAISED, DIFFERENCE, ERROR, FAILED, OK, REFUSED, SILENT, Ask, Report, may_raise_in
from tests.fuzz.sides import Place, Side

_CHANGES_PARAMETERS = ("step", "step_closure", "interrupt", "join")


@dataclass
class Shown:
    """What a statement of the plain side has shown, and, for a comparison, its models and optimizers."""

    seen: list[tuple[str, Any]]
    is_quiet: bool = False
    models: list[dict[str, Tensor]] = field(default_factory=list)
    options: list[list[dict[str, Any]]] = field(default_factory=list)
    states: list[dict[int, dict[str, Any]]] = field(default_factory=list)


@dataclass
class Trace:
    """What the plain side has done.

    Attributes:
        shown: by statement, up to the one that raised.
        error: the exception that ended it.
        risks: those that only the run itself shows.
    """

    shown: list[Shown] = field(default_factory=list)
    error: Exception | None = None
    risks: list[Risk] = field(default_factory=list)
    saved: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    has_moved: bool = False


def run_loop_case(case: LoopCase, place: Place, ask: Ask) -> None:
    """Run a case and free what it has held."""
    try:
        trace = _run_plain(case, place)
        if ask(Report(-1, OK)):
            ask(_Watch(case, place, trace).run())
    finally:
        gc.collect()


def _nets(case: LoopCase) -> list[Net]:
    nets = []
    for unit in case.units:
        with torch.random.fork_rng():
            torch.manual_seed(unit.seed)
            nets.append(Net(unit.model))
    return nets


def _begins(case: LoopCase, number: int, before: int = 0) -> int:
    """The first statement of the iteration of a statement, or of one so many iterations before."""
    starts, count = [], 0
    for iteration in case.program:
        starts.append(count)
        count += len(iteration)
    at = max(place for place, start in enumerate(starts) if start <= number)
    return starts[max(0, at - before)]


# The plain side


def _run_plain(case: LoopCase, place: Place) -> Trace:
    sides = [Plain(unit, place, net) for unit, net in zip(case.units, _nets(case), strict=True)]
    loop, trace = Loop(sides, place.folder), Trace()
    trace.saved = loop.saved
    start = [param.detach().clone() for side in sides for param in side.net.parameters()]
    is_parted = False
    for number, statement in enumerate(case.statements):
        try:
            with watched(sides[0].net) as events:
                loop.do(number, statement)
        except Exception as error:
            trace.error = error
            if not isinstance(error, NotFinite):
                trace.risks.append(raises(number, _begins(case, number, 1)))
            return trace
        if case.units[0].steps_inside and may_raise_in(case.units[0], sides[0], events):
            trace.risks.append(reads_late(number))
        shown = Shown(copy.deepcopy(loop.seen), loop.is_quiet)
        if statement.verb in ("compare", "finish"):
            _keep(shown, sides, loop.is_stale)
        trace.shown.append(shown)
        if statement.verb in _CHANGES_PARAMETERS and not is_parted and statement.verb != "join" and _have_parted(sides):
            is_parted = True
            trace.risks.append(parted(number, _begins(case, number)))
    now = [param for side in sides for param in side.net.parameters()]
    trace.has_moved = len(now) != len(start) or any(
        one.dtype != other.dtype or not torch.equal(one, other) for one, other in zip(start, now, strict=True)
    )
    return trace


def _keep(shown: Shown, sides: list[Plain], is_stale: bool) -> None:
    for side in sides:
        shown.models.append({name: value.detach().clone() for name, value in _values(side).items()})
        if is_stale:
            continue
        shown.options.append(copy.deepcopy(list(options_of(side))))
        found: dict[int, dict[str, Any]] = {}
        for position, param in enumerate(side.net.parameters()):
            if param in side.optimizer.state:
                found[position] = copy.deepcopy(side.optimizer.state[param])
        shown.states.append(found)


def _values(side: Side) -> dict[str, Tensor]:
    """Parameters and buffers; ``state_dict()`` is an act of the loop, which may be refused."""
    return {**dict(side.net.named_parameters()), **dict(side.net.named_buffers())}


def _have_parted(sides: list[Plain]) -> bool:
    """Whether ranks hold different parameters. A collective."""
    mine = [
        zlib.crc32(param.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes())
        for side in sides
        for param in side.net.parameters()
    ]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return any(one != every[0] for one in every)


# The sharded side


class _Watch:
    """Runs the sharded side beside the trace of the plain one.

    Args:
        case: which.
        place: which rank this is.
        trace: of the plain side.
    """

    def __init__(self, case: LoopCase, place: Place, trace: Trace) -> None:
        self._case, self._place, self._trace = case, place, trace
        self._expected: Expected = expected_of(case)
        self._expected.risks += trace.risks
        self._difference: Report | None = None
        self._compared = 0

    def run(self) -> Report:
        """The whole loop, or up to where it raises."""
        rng = random.Random(f"{self._case.seed} {self._place.rank}")
        try:
            sides = [
                Ours(unit, self._place, net) for unit, net in zip(self._case.units, _nets(self._case), strict=True)
            ]
        except Exception as error:
            return Report(-1, FAILED, f"{ERROR} (building)", _told(error), False)
        loop = Loop(sides, self._place.folder, self._trace.saved)
        for number, statement in enumerate(self._case.statements):
            if self._case.delay and rng.random() < 0.3:
                time.sleep(rng.random() * self._case.delay / 1000)
            started = time.monotonic()
            try:
                if self._place.injects == f"hang {number}" and self._place.rank == 1:
                    time.sleep(10_000)
                loop.do(number, statement)
                self._raise_late_errors(loop, number)
            except Exception as error:
                return self._judge(number, statement, error, time.monotonic() - started)
            if number == len(self._trace.shown):
                if self._goes_on(number):
                    return Report(number, OK, compared=self._compared)
                return self._ended(number, "only the reference raises", _told(self._trace.error))
            missed = [risk for risk in self._expected.risks if risk.certain and risk.last == number]
            if missed:
                return self._ended(number, f"{SILENT} ({missed[0].name})", "nothing has raised")
            self._look(number, statement, loop)
        if self._difference is not None:
            return self._difference
        if not self._trace.has_moved and not self._expected.risks:
            return Report(number, FAILED, "vacuous", "no parameter has moved", False)
        return Report(number, OK, compared=self._compared)

    def _raise_late_errors(self, loop: Loop, number: int) -> None:
        """Where the plain side raises, wait for what ours may still have to say."""
        if number == len(self._trace.shown):
            for side in loop.sides:
                side.optimizer.finish_sync()

    def _goes_on(self, number: int) -> bool:
        """Whether ours may go on with a DDP model that an exception has interrupted, which DDP's reducer cannot."""
        has_failed = any(statement.verb == "fails" for statement in self._case.statements[:number])
        cannot = "Expected to have finished reduction in the prior iteration" in str(self._trace.error)
        return has_failed and cannot and any(unit.mode.stage == 2 for unit in self._case.units)

    def _ended(self, number: int, what: str, text: str) -> Report:
        return self._difference or Report(number, FAILED, what, text, False)

    def _judge(self, number: int, statement: Do, error: Exception, seconds: float) -> Report:
        code, text = code_of(error), _told(error)
        if self._difference is not None:
            return self._difference
        if number == len(self._trace.shown):
            what = f"{type(self._trace.error).__name__}: {str(self._trace.error)[:60]}"
            if not isinstance(self._trace.error, NotFinite) or code == "ZERO-317":
                return Report(number, BOTH_RAISED, what, text, False, seconds)
        fitting = [risk for risk in self._expected.risks if risk.covers(number) and code in risk.codes]
        if fitting:
            return Report(number, REFUSED, f"{fitting[-1].name}: {code}", text, False, seconds, self._compared)
        if code == "ZERO-503" and any(risk.covers(number - 1) for risk in self._expected.risks):
            return Report(number, REFUSED, f"another rank has refused: {code}", text, False, seconds, self._compared)
        return Report(
            number, FAILED, f"{ERROR} ({statement.verb}: {code or type(error).__name__})", text, False, seconds
        )

    # Comparisons

    def _look(self, number: int, statement: Do, loop: Loop) -> None:
        if self._difference is not None or number in self._expected.quiet:
            return
        if any(risk.hides and risk.covers(number) for risk in self._expected.risks):
            return
        shown = self._trace.shown[number]
        try:
            if not (shown.is_quiet or loop.is_quiet):
                self._check_seen(shown, loop)
            if shown.models:
                self._check_models(shown, loop)
                self._compared += 1
        except Difference as difference:
            risks = [risk.name for risk in self._expected.risks if risk.covers(number)]
            what = f"{DIFFERENCE} ({risks[-1]})" if risks else f"{DIFFERENCE} ({statement.verb})"
            self._difference = Report(number, FAILED, what, str(difference), False)
        except Exception as error:
            self._difference = Report(number, FAILED, f"{ERROR} (comparison)", _told(error), False)

    def _check_seen(self, shown: Shown, loop: Loop) -> None:
        if [name for name, _ in shown.seen] != [name for name, _ in loop.seen]:
            raise Difference(f"seen {[name for name, _ in shown.seen]} and {[name for name, _ in loop.seen]}")
        for (name, one), (_, other) in zip(shown.seen, loop.seen, strict=True):
            if name != "state":
                check_equal(one, other, name)
            elif other is not None:
                check_equal(one["state"], other["state"], "state")
                here, there = ([group["params"] for group in state["param_groups"]] for state in (one, other))
                check_equal(here, there, "indices of the groups")

    def _check_models(self, shown: Shown, loop: Loop) -> None:
        for number, (side, model) in enumerate(zip(loop.sides, shown.models, strict=True)):
            check_equal(model, _values(side), f"model {number}")
            if loop.is_stale:
                continue
            found = [
                {name: group[name] for name in one}
                for one, group in zip(shown.options[number], options_of(side), strict=True)
            ]
            check_equal(shown.options[number], found, f"options of optimizer {number}")
            if not side.case.mode.masters:
                self._check_own_state(side, shown.states[number], number)

    @staticmethod
    def _check_own_state(side: Side, states: dict[int, dict[str, Any]], number: int) -> None:
        """The state of the parameters that this rank owns whole, without asking another rank."""
        params = list(side.net.parameters())
        for position, expected in states.items():
            param = params[position]
            own = side.optimizer.optim.state.get(param)
            if own is not None and all(
                not isinstance(value, Tensor) or value.shape == own[name].shape for name, value in expected.items()
            ):
                check_equal(expected, dict(own), f"state of parameter {position} of optimizer {number}")


def _told(error: BaseException | None) -> str:
    return "".join(traceback.format_exception(error))
