"""The forms in which people write the parts of a loop, as statements."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.fuzz.case import Case
from tests.fuzz.loops.case import Do

EDITS = (
    *("data_clamp", "data_clamp_gathered", "data_mul", "data_mul_gathered", "data_copy"),
    *("clamp", "clamp_gathered", "mul", "norm", "norm_gathered", "value"),
)
OWN_EDITS = ("own_norm", "own_value")
SURGERIES = ("local averaged by hand", "local never averaged", "averaged and copied", "averaged and replaced")
GANS = ("two passes", "two passes, accumulate", "one pass")
IN_MAKERS_PASS = ("free", "frozen", "no_sync")
COPIES = ("averaged", "averaged module", "deepcopy", "by hand", "pickle")
REPLACEMENTS = ("parameter", "assign", "double")
FAILURES = ("forward", "loss", "start", "backward")


@dataclass
class Style:
    """A loop's form, the same in all its iterations.

    Attributes:
        zero: who sets gradients to None or zero, and in which form.
        zero_at: ``"start"``, ``"between"`` forward and backward, ``"after"`` the step, or ``"never"``.
        edit: a change to gradients between backward and step, or None.
        edits_from: the first iteration with it.
        rate: where the learning rate is set: ``"before"``, ``"middle"``, ``"after"``, or None.
        rates_from: the first iteration with it.
        scheduler: whether that is a scheduler's step.
        logs_norm: whether the norm of gradients is looked at before the step.
        copies: a copy or an average of the model, or None.
        save: the chance of a save after an iteration, by which rank, and in which form.
        evaluates: the chance of an evaluation at each place that allows one.
        compares: the chance that models are compared after an iteration.
    """

    zero: tuple[str, str] = ("opt", "none")
    zero_at: str = "start"
    edit: str | None = None
    edits_from: int = 0
    rate: str | None = None
    rates_from: int = 0
    scheduler: bool = False
    logs_norm: bool = False
    copies: str | None = None
    save: tuple[float, int | None, str] = (0.0, None, "state_dict")
    evaluates: float = 0.0
    compares: float = 1.0


@dataclass
class Writer:
    """Writes a program down.

    Attributes:
        rng: of the case.
        style: of the loop.
        units: its models.
        labels: of the saves so far.
    """

    rng: random.Random
    style: Style
    units: tuple[Case, ...]
    labels: list[int] = field(default_factory=list)

    def chance(self, probability: float) -> bool:
        """Whether something happens that does so often."""
        return self.rng.random() < probability

    # Parts of an iteration

    def zero(self, unit: int = 0) -> Do:
        """Gradients are dropped or zeroed."""
        return Do("zero", self.style.zero, unit)

    def passes(self, number: int = 0, path: tuple[str, ...] = ("0",), units: tuple[int, ...] = (0,)) -> list[Do]:
        """Forward and backward, with whatever people put between them."""
        between: list[Do] = []
        if self.style.zero_at == "between":
            between += [self.zero(unit) for unit in units]
        if self.chance(self.style.evaluates / 2):
            between.append(self.evaluation())
        if self.chance(0.5):
            between.reverse()
        return [Do("forward", (number, path)), *between, Do("backward")]

    def evaluation(self, unit: int = 0) -> Do:
        """The model without gradients, on all ranks or on one."""
        how = self.rng.choice(["ddp", "module", "module", "module inference", "ddp inference"])
        rank = None
        if self.chance(0.4):
            how, rank = "module", self.rng.randrange(self.units[unit].ranks)
        return Do("evaluate", (how,), unit, rank)

    def middle(self, iteration: int, unit: int = 0) -> list[Do]:
        """The statements between backward and step."""
        style, found = self.style, list[Do]()
        if style.logs_norm:
            found.append(Do("grad_norm", (), unit))
        if style.edit is not None and iteration >= style.edits_from:
            found.append(Do("edit", (style.edit,), unit))
        if style.rate == "middle" and iteration >= style.rates_from:
            found.append(self.rate(unit))
        return found

    def rate(self, unit: int = 0) -> Do:
        """The learning rate is set, by hand or by a scheduler."""
        if self.style.scheduler:
            return Do("schedule", (), unit)
        return Do("set", ("lr", self.rng.choice([0.5, 0.9, 1.1])), unit)

    def save(self, unit: int = 0, catches: bool = False) -> Do:
        """A save, by one rank or by all."""
        _, rank, form = self.style.save
        self.labels.append(len(self.labels))
        form = "state_dict" if catches else form
        return Do("save", (form, catches, self.labels[-1]), unit, rank)

    def after(self, iteration: int, is_last: bool = False) -> list[Do]:
        """The statements after the step."""
        style, found = self.style, list[Do]()
        if style.rate == "after" and iteration >= style.rates_from:
            found.append(self.rate())
        if style.zero_at == "after":
            found += [self.zero(unit) for unit in range(len(self.units))]
        if style.copies not in (None, "pickle"):
            found.append(Do("average"))
        if self.chance(style.save[0]):
            saves = [self.save(self.rng.randrange(len(self.units)))]
            found = saves + found if self.chance(0.3) else found + saves
        if self.chance(style.evaluates):
            found.append(self.evaluation())
        if is_last or self.chance(style.compares):
            found.append(Do("compare"))
        return found

    def before(self, iteration: int) -> list[Do]:
        """The statements before the first pass."""
        style, found = self.style, list[Do]()
        if style.rate == "before" and iteration >= style.rates_from:
            found.append(self.rate())
        if style.zero_at == "start":
            found.append(self.zero())
        return found


Body = Callable[[Writer, int], list[Do]]
"""The statements of an iteration from its first pass up to its step."""


def supervised(writer: Writer, iteration: int) -> list[Do]:
    """The plain loop."""
    return [*writer.passes(), *writer.middle(iteration), Do("step")]


def two_forwards(writer: Writer, iteration: int) -> list[Do]:
    """Two batches, one loss."""
    return [Do("forward", (0, ("0",))), *writer.passes(1), *writer.middle(iteration), Do("step")]


def accumulating(writer: Writer, iteration: int) -> list[Do]:
    """Several passes, of which only the last is averaged, or all are inside ``opt.accumulate()``."""
    first = writer.units[0]
    kind = ("no_sync", "flag", "accumulate")[first.seed % (2 if first.mode.masters else 3)]  # averages add up in fp32
    found: list[Do] = []
    for number in range(1, writer.rng.randint(2, 3)):
        found += [Do("enter", (kind,)), Do("forward", (number, ("0",))), Do("backward"), Do("leave")]
    return [*found, *writer.passes(), *writer.middle(iteration), Do("step")]


def every_second(writer: Writer, iteration: int) -> list[Do]:
    """Every pass is averaged, every second one followed by a step: accumulation as some write it."""
    found = writer.passes()
    return [*found, *writer.middle(iteration), Do("step")] if iteration % 2 else found


def by_closure(writer: Writer, iteration: int) -> list[Do]:
    """A closure that returns the loss, forgets to, or skips."""
    kind = writer.rng.choice(["loss", "loss", "none", "skip"]) if writer.units[0].seed % 2 else "loss"
    return [Do("step_closure", (kind, 0))]


def sharpness_aware(writer: Writer, iteration: int) -> list[Do]:
    """SAM: a pass to find the worst neighbour, averaged or not, and a pass there."""
    first = [Do("forward", (1, ("0",))), Do("backward")]
    if writer.units[0].seed % 3:
        first = [Do("enter", ("no_sync",)), *first, Do("leave")]
    second = [Do("forward", (0, ("0",))), Do("backward")]
    restore = Do("restore", ("repoint" if writer.units[0].seed % 2 else "copy",))
    return [*first, Do("perturb"), writer.zero(), *second, restore, *writer.middle(iteration), Do("step")]


def surgery(writer: Writer, iteration: int) -> list[Do]:
    """The gradients of two tasks are copied out, combined, and put back."""
    kind = SURGERIES[writer.units[0].seed % len(SURGERIES)]
    tasks: list[Do] = []
    for number in range(2):
        tasks += [Do("forward", (number, ("0",))), Do("backward"), Do("copy_grads")]
        tasks += [writer.zero()] if number == 0 or kind.endswith("replaced") or kind.startswith("local") else []
    if kind.startswith("local"):
        by_hand = kind == "local averaged by hand"
        tasks = [Do("enter", ("no_sync",)), *tasks, Do("leave"), Do("put_grads", ("assign", by_hand))]
    else:
        tasks.append(Do("put_grads", ("copy_" if kind == "averaged and copied" else "assign", False)))
    return [*tasks, Do("step")]


def adversarial(writer: Writer, iteration: int) -> list[Do]:
    """A judge, model 0, and a maker, model 1, in turn."""
    judge, maker, seed = ("0",), ("1", "detach", "0"), writer.units[0].seed
    kind, way = GANS[seed % len(GANS)], IN_MAKERS_PASS[seed // 4 % len(IN_MAKERS_PASS)]
    real, fake = [Do("forward", (0, judge)), Do("backward")], [Do("forward", (1, maker)), Do("backward")]
    if kind == "one pass":
        real = [real[0]]
    elif kind == "two passes, accumulate":
        real = [Do("enter", ("accumulate",)), *real, Do("leave")]
    found = [*real, *fake, *writer.middle(iteration), Do("step")]
    made = [writer.zero(1), Do("forward", (2, ("1", "0"))), Do("backward", (), 1)]
    if way == "frozen":
        made = [Do("freeze_all", (True,)), *made, Do("freeze_all", (False,))]
    elif way == "no_sync":
        made = [Do("enter", ("no_sync",)), *made, Do("leave")]
    return [*found, *made, Do("step", (), 1)]


def chained(writer: Writer, iteration: int) -> list[Do]:
    """An encoder and a decoder, each in a DDP of its own, one loss, two optimizers."""
    steps = [Do("step"), Do("step", (), 1)]
    if writer.units[0].seed % 2:
        steps.reverse()
    first = [writer.zero(1)] if writer.style.zero_at == "start" else []
    return [*first, *writer.passes(0, ("1", "0"), (0, 1)), *writer.middle(iteration), *steps]


BODIES: dict[str, tuple[float, Body]] = {
    "supervised": (8.0, supervised),
    "two forwards": (0.6, two_forwards),
    "accumulating": (2.0, accumulating),
    "every second": (0.7, every_second),
    "closure": (1.2, by_closure),
    "SAM": (1.5, sharpness_aware),
    "surgery": (1.2, surgery),
    "GAN": (2.0, adversarial),
    "chain": (1.2, chained),
}


# Incidents: what happens in one iteration only


def drops(writer: Writer, iteration: int) -> list[Do]:
    """Early stopping, or a batch that is not finite: backward, then no step."""
    factor = writer.rng.choice([(), (), ("nan",), ("inf",)])
    drop = Do("zero", writer.rng.choice([writer.style.zero, ("opt", "none"), ("ddp", "none"), ("hand", "none")]))
    return [Do("forward", (0, ("0",), *factor)), Do("backward"), drop]


def leaves_step_out(writer: Writer, iteration: int) -> list[Do]:
    """Backward without a step; gradients stay."""
    return [Do("forward", (0, ("0",))), Do("backward")]


def steps_twice(writer: Writer, iteration: int) -> list[Do]:
    """A second step from the same gradients."""
    return [*supervised(writer, iteration), Do("step")]


def drops_before_step(writer: Writer, iteration: int) -> list[Do]:
    """Gradients are dropped between backward and step: a step without any."""
    return [Do("forward", (0, ("0",))), Do("backward"), Do("zero", ("opt", "none")), Do("step")]


def around(writer: Writer, iteration: int) -> list[Do]:
    """A training pass through the inner module."""
    return [Do("forward", (0, ("0 module",))), Do("backward"), Do("step")]


def around_first(writer: Writer, iteration: int) -> list[Do]:
    """A pass through the inner module, whose gradients the averaged pass adds to."""
    first = [Do("forward", (1, ("0 module",))), Do("backward")]
    return [*first, *supervised(writer, iteration)]


def around_after(writer: Writer, iteration: int) -> list[Do]:
    """A pass through the inner module, which adds to the averages of the pass before."""
    return [*writer.passes(), Do("forward", (1, ("0 module",))), Do("backward"), Do("step")]


def local_only(writer: Writer, iteration: int) -> list[Do]:
    """All passes under ``no_sync()``."""
    return [Do("enter", ("no_sync",)), Do("forward", (0, ("0",))), Do("backward"), Do("leave"), Do("step")]


def saves_in_between(writer: Writer, iteration: int) -> list[Do]:
    """A save between backward and step, and one after it."""
    return [*writer.passes(), writer.save(catches=True), Do("step"), writer.save()]


def saves_alone(writer: Writer, iteration: int) -> list[Do]:
    """The first rank saves, anywhere in the iteration."""
    found = supervised(writer, iteration)
    place = writer.rng.randrange(len(found) + 1)
    writer.labels.append(len(writer.labels))
    return [*found[:place], Do("save", ("state_dict", True, writer.labels[-1]), 0, 0), *found[place:]]


def interrupts(writer: Writer, iteration: int) -> list[Do]:
    """Ctrl-C between backward and step, whose handler saves as the messages say."""
    writer.labels.append(len(writer.labels))
    return [*writer.passes(), Do("interrupt", (writer.labels[-1],))]


def penalised(writer: Writer, iteration: int) -> list[Do]:
    """A penalty has a pass of its own after the averaged one, under ``no_sync()``."""
    found = [Do("enter", ("no_sync",)), Do("forward", (1, ("0",))), Do("backward"), Do("leave")]
    return [*writer.passes(), *found, Do("step")]


def late(edit: str) -> Body:
    """A change to gradients in this iteration only."""

    def body(writer: Writer, iteration: int) -> list[Do]:
        return [*writer.passes(), Do("edit", (edit,)), Do("step")]

    return body


def late_rate(writer: Writer, iteration: int) -> list[Do]:
    """The learning rate is set between backward and step in this iteration only."""
    return [*writer.passes(), Do("set", ("lr", 0.5)), Do("step")]


def late_write(writer: Writer, iteration: int) -> list[Do]:
    """A parameter is written between backward and step in this iteration only."""
    how = writer.rng.choice(["data", "in place"])
    return [*writer.passes(), Do("write", (how, writer.rng.randrange(8), 0.9)), Do("step")]


INCIDENTS: dict[str, tuple[float, Body]] = {
    "dropped": (2.5, drops),
    "step left out": (0.7, leaves_step_out),
    "two steps": (0.6, steps_twice),
    "dropped before the step": (0.5, drops_before_step),
    "around DDP": (1.2, around),
    "around DDP first": (0.5, around_first),
    "around DDP after": (1.2, around_after),
    "no_sync() only": (0.6, local_only),
    "saved in between": (1.0, saves_in_between),
    "saved alone": (2.0, saves_alone),
    "interrupted": (2.0, interrupts),
    "no_sync() after": (0.5, penalised),
    "rate set late": (0.6, late_rate),
    "parameter written late": (0.5, late_write),
    **{f"late {edit}": (0.15, late(edit)) for edit in EDITS},
    **{f"late {edit}": (0.3, late(edit)) for edit in OWN_EDITS},
}
"""In place of an iteration's body; of the plain loop only."""
