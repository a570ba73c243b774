"""Where a loop may be refused, where it must be, and by which codes: from the promise, not from the implementation.

The promise is that a loop has the numbers of DDP with the plain optimizer, or raises. A `Risk` is a statement from
which on a mode may raise (docs/limits.md says so). Everywhere else every number must be equal, and nothing may raise.

After some statements the numbers cannot be equal: a step inside backward has been taken that the loop then drops, or
the ranks of the plain loop themselves part. There the risk is `certain`: comparisons rest until its last statement, by
which it must have raised. The first step waits for the loop, but is taken before a second forward pass of a loop that
has not asked for it: until the loop then steps, comparisons rest as well.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tests.fuzz.case import Case
from tests.fuzz.late_values import MESSAGE
from tests.fuzz.loops.case import Do, LoopCase


def _codes(*numbers: int) -> frozenset[str]:
    return frozenset(f"ZERO-{number}" for number in numbers)


CHANGED = _codes(304, 314)
"""Something changed after a step inside backward."""
DROPPED = _codes(304, 305, 307, 308, 309)
"""Averaged gradients were dropped, or a step left out, where backward has stepped."""
SECOND = _codes(304, 305, 307, 308)
"""A second averaged pass before the step."""
UNAVERAGED = _codes(301, 302, 308, 404)
"""Gradients that nothing has averaged, or that the loop has averaged by hand where DDP's are expected."""
ABSENT = _codes(320, 401, 402)
"""A gradient that is on another rank, or used up."""
KEPT = _codes(402, 403, 404)
"""The gradients of the last step are still there."""
TWICE = _codes(304, 305, 307, 308, 402, 403)
"""A second step from the same gradients."""
REPLACED = UNAVERAGED | _codes(109, 117, 119, 304, 604, 632)
"""Parameters that DDP and the optimizer do not know."""
INTERRUPTED = _codes(301, 302, 307, 308)
"""An exception has left a backward pass half done."""
SAVED = _codes(307, 309, 513, 602)
"""A save between backward and a step that backward has taken, or may have."""
ALONE = _codes(513, 602)
"""A rank asks for the state between backward and ``opt.step()``, which others may have come to."""


@dataclass
class Risk:
    """Statements in which a mode may raise.

    Attributes:
        name: for the tally.
        first: the number of the first one.
        codes: of the messages.
        certain: whether one of them must raise.
        last: the number of the last one; None: the loop's.
        hides: whether comparisons rest up to the last one.
    """

    name: str
    first: int
    codes: frozenset[str]
    certain: bool = False
    last: int | None = None
    hides: bool = False

    def covers(self, number: int) -> bool:
        """Whether a statement is one of them."""
        return self.first <= number and (self.last is None or number <= self.last)


@dataclass
class Expected:
    """All that a loop may come to.

    Attributes:
        risks: in the order of their first statements.
        quiet: numbers of statements whose outputs are those of other parameters than the plain loop's, by design.
    """

    risks: list[Risk]
    quiet: set[int]


class _Unit:
    """What is known of one model while its statements are read."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.overlaps = case.mode.overlap
        self.is_stage_2 = case.mode.stage == 2
        self.has_hook = case.has_hook or case.mode.sums_in_fp32
        self.waits: bool | None = case.waits if case.mode.overlap else True  # None: not known before the first step
        if self.waits is False:
            self.waits = None
        self.context: str | None = None
        self.is_accumulating = False  # the last averaged pass was in opt.accumulate()
        self.is_trainable = True
        self.averaged = 0  # averaged passes since the last step
        self.is_local = False  # gradients hold a pass that nothing averaged
        self.by_hand = False
        self.kept = False  # gradients of the last step are there
        self.touched = False
        self.drops_first = False  # gradients that its first step waited for: its steps wait from then on
        self.open: list[Risk] = []  # certain, and their last statement is not found yet

    @property
    def is_inside(self) -> bool:
        """Whether the steps are taken inside backward."""
        return self.overlaps and self.waits is False

    @property
    def has_placeholders(self) -> bool:
        return self.is_stage_2 and (self.averaged > 0 or self.kept)

    @property
    def reads_new_values(self) -> bool:
        """Whether parameters are those after the step, though the loop has not called it."""
        return self.overlaps and self.waits is not True and self.averaged > 0


class _Reader:
    """Reads a loop statement by statement."""

    def __init__(self, case: LoopCase) -> None:
        self.units = [_Unit(unit) for unit in case.units]
        self.risks: list[Risk] = []
        self.quiet: set[int] = set()
        self.path: tuple[str, ...] = ()
        self.paths: list[tuple[str, ...]] = []
        self.number = 0

    def read(self, number: int, statement: Do) -> None:
        self.number = number
        unit = self.units[statement.unit]
        read = _READERS.get(statement.verb)
        if read is not None:
            read(self, unit, statement)

    def risk(self, name: str, codes: frozenset[str], lost: _Unit | None = None) -> None:
        """Note one from this statement on.

        Args:
            name: for the tally.
            codes: of the messages.
            lost: the model whose loop drops a step, or takes one too many. Where that step is taken inside backward,
                the risk is certain, and ends where the optimizer sees the loop next.
        """
        risk = Risk(name, self.number, codes)
        self.risks.append(risk)
        if lost is not None and lost.overlaps and lost.waits is not True:
            risk.certain, risk.hides = lost.is_inside, True
            lost.open.append(risk)

    def close(self, units: Iterable[_Unit], steps: bool = False) -> None:
        """The optimizer sees what the loop has done; a loop that drops its very first gradients in its next step."""
        for unit in units:
            for risk in unit.open:
                if risk.first < self.number and (risk.certain or steps):
                    risk.last = self.number
            unit.open = [risk for risk in unit.open if risk.last is None]

    # Statements

    def zero(self, unit: _Unit, statement: Do) -> None:
        by, form = statement.args
        if by == "opt":  # nothing sees the other ways
            self.close([unit])
        if by == "hand" and form != "none" and unit.has_placeholders:
            self.risk("gradients zeroed by hand", ABSENT)
        if unit.averaged and unit.overlaps:
            self.risk("dropped", DROPPED, unit)
            unit.drops_first |= by == "opt" and unit.waits is None and not unit.is_accumulating
        unit.averaged, unit.is_local, unit.by_hand, unit.kept, unit.touched = 0, False, False, False, False

    def enter(self, unit: _Unit, statement: Do) -> None:
        unit.context = statement.args[0]

    def leave(self, unit: _Unit, statement: Do) -> None:
        unit.context = None

    def forward(self, unit: _Unit, statement: Do) -> None:
        path = statement.args[1]
        self.paths.append(path)
        models = {int(element.partition(" ")[0]) for element in path if element != "detach"}
        if any(self.units[model].reads_new_values for model in models):
            self.quiet.add(self.number)
        if any(self.units[model].reads_new_values and self.units[model].touched for model in models):
            self.risk("changed before a second pass", CHANGED)

    def backward(self, unit: _Unit, statement: Do) -> None:
        averaged, local = set[int](), set[int]()
        for path in self.paths:
            for number, through in reached(path):
                (local if through == "module" else averaged).add(number)
        self.paths = []
        for number in sorted(averaged | local):
            self.reach(self.units[number], number in averaged)

    def reach(self, unit: _Unit, through_ddp: bool) -> None:
        """Gradients of a pass come to a model."""
        if not unit.is_trainable:
            return
        if not through_ddp:
            self.risk("around DDP", UNAVERAGED | SECOND | (KEPT if unit.kept or unit.averaged else frozenset()))
            unit.is_local = True
            return
        if unit.context in ("no_sync", "flag"):
            keeps_sums = unit.kept and unit.case.mode.sums_in_fp32
            if (unit.averaged and unit.has_hook) or unit.has_placeholders or keeps_sums:
                self.risk("no_sync() after an average", KEPT | SECOND)
            unit.is_local = True
            return
        self.close([unit])
        if unit.overlaps and unit.averaged and not unit.is_accumulating:
            self.risk("second pass", SECOND | (KEPT if unit.is_stage_2 else frozenset()), unit)
        if unit.is_stage_2 and unit.kept:
            self.risk("kept gradients", KEPT)
        unit.averaged += 1
        unit.is_accumulating = unit.context == "accumulate"
        unit.is_local = False

    def step(self, unit: _Unit, statement: Do) -> None:
        self.close([unit], steps=True)
        if not (unit.averaged or unit.is_local or unit.by_hand or unit.kept):
            return
        if unit.is_local:
            self.risk("not averaged", UNAVERAGED)
        elif unit.by_hand:
            if unit.has_hook:
                self.risk("averaged by hand", UNAVERAGED | SECOND)
        elif not unit.averaged and (unit.has_hook):
            self.risk("a second step", TWICE)
        if unit.waits is None:
            unit.waits = unit.touched or unit.drops_first
        unit.kept, unit.averaged, unit.is_local, unit.by_hand, unit.touched = True, 0, False, False, False

    def step_closure(self, unit: _Unit, statement: Do) -> None:
        kind, number = statement.args
        self.zero(unit, Do("zero", ("opt", "none")))
        if kind != "skip":
            self.forward(unit, Do("forward", (number, (str(statement.unit),))))
            self.backward(unit, statement)
        self.step(unit, statement)

    def touch(self, unit: _Unit, codes: frozenset[str], name: str) -> None:
        """Something that a step uses is changed."""
        if not unit.averaged:
            return
        if unit.is_inside:
            self.risk(name, codes)
        unit.touched = True

    def edit(self, unit: _Unit, statement: Do) -> None:
        how = statement.args[0]
        if not how.startswith("own") and unit.has_placeholders:
            self.risk("a gradient of another rank", ABSENT | CHANGED)
        self.touch(unit, CHANGED | ABSENT, "gradients edited late")

    def copy_grads(self, unit: _Unit, statement: Do) -> None:
        if unit.has_placeholders:
            self.risk("a gradient of another rank", ABSENT)

    def put_grads(self, unit: _Unit, statement: Do) -> None:
        how, averages = statement.args
        if unit.has_placeholders and how == "copy_":
            self.risk("a gradient of another rank", ABSENT)
        self.touch(unit, CHANGED | UNAVERAGED, "gradients edited late")
        if averages or not unit.averaged:
            unit.by_hand = True

    def set_option(self, unit: _Unit, statement: Do) -> None:
        self.touch(unit, CHANGED, "options changed late")

    def schedule(self, unit: _Unit, statement: Do) -> None:
        was_touched = unit.touched
        self.touch(unit, CHANGED, "options changed late")
        # whose first call changes no number; a tensor is written all the same
        if unit.case.loop.scheduler == "StepLR" and "tensor" not in unit.case.optim.name:
            unit.touched = was_touched

    def write(self, unit: _Unit, statement: Do) -> None:
        self.touch(unit, CHANGED, "parameters changed late")

    def perturb(self, unit: _Unit, statement: Do) -> None:
        self.copy_grads(unit, statement)
        self.write(unit, statement)

    def save(self, unit: _Unit, statement: Do) -> None:
        if statement.rank is None:
            self.close([unit])
        if not statement.args[1]:
            self._saves_before_step(unit, statement.rank)

    def _saves_before_step(self, unit: _Unit, rank: int | None) -> None:
        if not unit.averaged:
            return
        if unit.overlaps and unit.waits is not True:
            self.risk("saved before the step", DROPPED | SAVED, unit)
        elif rank is not None:
            self.risk("saved before the step", ALONE)

    def compare(self, unit: _Unit, statement: Do) -> None:
        if any(one.reads_new_values for one in self.units):
            self.quiet.add(self.number)

    def finish(self, unit: _Unit, statement: Do) -> None:
        self.close(self.units, steps=True)
        for one in self.units:
            known = len(self.risks)
            self._saves_before_step(one, None)
            for risk in self.risks[known:]:
                risk.last = self.number

    def evaluate(self, unit: _Unit, statement: Do) -> None:
        if unit.reads_new_values:
            self.quiet.add(self.number)

    def freeze_all(self, unit: _Unit, statement: Do) -> None:
        unit.is_trainable = not statement.args[0]

    def fails(self, unit: _Unit, statement: Do) -> None:
        where, then = statement.args
        self.zero(unit, Do("zero", ("opt", "none")))
        if where in ("start", "backward") and then != "reset":
            self.risk("interrupted", INTERRUPTED)

    def replace(self, unit: _Unit, statement: Do) -> None:
        self.risk("replaced parameters", REPLACED)

    def join(self, unit: _Unit, statement: Do) -> None:
        self.close(self.units, steps=True)


def reached(path: Sequence[str]) -> list[tuple[int, str]]:
    """The models that a backward pass comes to, and whether through DDP or its module: all behind the last cut."""
    cut = max((place for place, element in enumerate(path) if element == "detach"), default=-1)
    found = []
    for element in path[cut + 1 :]:
        number, _, through = element.partition(" ")
        found.append((int(number), through or "ddp"))
    return found


_READERS: dict[str, Callable[[_Reader, _Unit, Do], None]] = {
    "zero": _Reader.zero,
    "enter": _Reader.enter,
    "leave": _Reader.leave,
    "forward": _Reader.forward,
    "backward": _Reader.backward,
    "step": _Reader.step,
    "step_closure": _Reader.step_closure,
    "interrupt": _Reader.step,
    "edit": _Reader.edit,
    "copy_grads": _Reader.copy_grads,
    "grad_norm": _Reader.copy_grads,
    "put_grads": _Reader.put_grads,
    "set": _Reader.set_option,
    "schedule": _Reader.schedule,
    "write": _Reader.write,
    "perturb": _Reader.perturb,
    "restore": _Reader.write,
    "save": _Reader.save,
    "compare": _Reader.compare,
    "finish": _Reader.finish,
    "evaluate": _Reader.evaluate,
    "freeze_all": _Reader.freeze_all,
    "fails": _Reader.fails,
    "replace": _Reader.replace,
    "join": _Reader.join,
}


def expected_of(case: LoopCase) -> Expected:
    """Read a loop."""
    reader = _Reader(case)
    for number, statement in enumerate(case.statements):
        reader.read(number, statement)
    return Expected(reader.risks, reader.quiet)


def parted(number: int, begins: int) -> Risk:
    """The ranks of the plain loop hold different parameters after a step: it must be refused by then.

    Args:
        number: of the step.
        begins: number of the first statement of its iteration.
    """
    return Risk(
        "ranks of plain DDP part", begins, UNAVERAGED | SECOND | CHANGED | REPLACED | ABSENT, True, number, True
    )


def reads_late(number: int) -> Risk:
    """Backward reads a parameter's value after a step inside it may have changed that, in this statement."""
    return Risk("late value", number, frozenset([MESSAGE]), last=number)


def raises(number: int, begins: int) -> Risk:
    """The plain loop itself raises: a refusal may come a little earlier.

    Args:
        number: of the statement that raises.
        begins: number of the first statement of the iteration before.
    """
    return Risk("plain DDP raises", begins, UNAVERAGED | INTERRUPTED | KEPT | DROPPED, False, number)
