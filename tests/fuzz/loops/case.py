"""A training loop: frozen data without torch, which prints as a program that a reader can follow."""

from dataclasses import dataclass, field
from typing import Any

from tests.fuzz.case import Case, text


@dataclass(frozen=True)
class Do:
    """A statement.

    Attributes:
        verb: one of `tests.fuzz.loops.statements.VERBS`.
        args: its arguments.
        unit: the model, with its optimizer, that it is about.
        rank: the only rank that carries it out; None: all do.
    """

    verb: str
    args: tuple[Any, ...] = ()
    unit: int = 0
    rank: int | None = None

    def __str__(self) -> str:
        shown = " ".join(str(part) for part in (self.verb, *self.args))
        unit = f" of model {self.unit}" if self.unit else ""
        return shown + unit + (f" on rank {self.rank}" if self.rank is not None else "")


Iteration = tuple[Do, ...]


@dataclass(frozen=True)
class LoopCase:
    """A whole case. ``str()`` prints it.

    Attributes:
        seed: it was drawn from.
        ranks: of the job.
        units: models, each in a DDP of its own and with an optimizer of its own.
        program: statements by iteration.
        idioms: names of all that was drawn.
        delay: milliseconds that a rank sleeps at most before a statement.
        fault: none; cases of other kinds have it.
    """

    seed: int
    ranks: int
    units: tuple[Case, ...]
    program: tuple[Iteration, ...]
    idioms: tuple[str, ...] = ()
    delay: float = 0.0
    fault: None = field(default=None, repr=False)

    @property
    def statements(self) -> tuple[Do, ...]:
        """All statements in a row."""
        return tuple(statement for iteration in self.program for statement in iteration)

    def __str__(self) -> str:
        lines = [f"loop {self.seed} on {self.ranks} ranks, delays up to {self.delay} ms: {', '.join(self.idioms)}"]
        for number, unit in enumerate(self.units):
            parts = (unit.model, unit.ddp, unit.optim, unit.mode, unit.loop)
            lines += [f"  model {number}", *(f"    {text(part)}" for part in parts)]
        count = 0
        for number, iteration in enumerate(self.program):
            numbered = [f"{count + place}: {statement}" for place, statement in enumerate(iteration)]
            count += len(iteration)
            lines.append(f"  {number:2}. {'; '.join(numbered)}")
        return "\n".join(lines)
