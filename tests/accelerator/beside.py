"""What one rank does alone between and within steps, and what is written beside training, in every mode.

At four points of every iteration a rank, each in its turn, asks for the whole optimizer state while the others run
ahead, and one evaluates; all take snapshots and save in the background.
"""

import copy
import re
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ddp_zero import ZeroRedundancyOptimizer
from ddp_zero import checkpoint as checkpoints
from ddp_zero.core.local.parameters import MASTER_KEY
from ddp_zero.snapshots import Snapshots
from tests.multiproc.harness import Setup

POINTS = ("before forward", "after forward", "after backward", "after the step")
_AHEAD_SECONDS = 0.02
"""In which the other ranks get as far as they can before a rank asks."""

States = dict[int, dict[str, Any]]


@dataclass
class Found:
    """Of one rank.

    Attributes:
        answers: states that were given, by point.
        refusals: the codes with which they were refused, by point.
        wrong: states and losses that are not the plain side's.
    """

    answers: Counter[str] = field(default_factory=Counter)
    refusals: Counter[tuple[str, str]] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


class Reference:
    """The plain side's state and loss after every step."""

    def __init__(self) -> None:
        self.states: list[States] = [{}]
        self.losses: list[Tensor] = []

    def at(self, side: Any, point: str, step: int, inputs: Tensor) -> None:
        """Note the state after a step."""
        if point == POINTS[-1]:
            self.states.append(copy.deepcopy(side.opt.state_dict()["state"]))
            self.losses.append(_evaluated(side, inputs))


class Beside:
    """Our side: asks, evaluates, takes snapshots, saves; compares at the end.

    Args:
        setup: of this rank.
        reference: of the plain side.
        joins: whether ranks may have ended, so that nothing is done together.
    """

    def __init__(self, setup: Setup, reference: Reference, joins: bool) -> None:
        self._setup, self._reference, self._joins = setup, reference, joins
        self._asked: list[tuple[str, int, States]] = []
        self._losses: list[tuple[int, Tensor]] = []
        self._snapshots: Snapshots | None = None
        self._saving: Any = None
        self.found = Found()

    def at(self, side: Any, point: str, step: int, inputs: Tensor) -> None:
        """What is done at a point of an iteration."""
        world, place = self._setup.world_size, POINTS.index(point)
        if (step + place) % world == self._setup.rank:
            self._ask(side, point, step)
        if point != POINTS[-1]:
            return
        if isinstance(side.opt, ZeroRedundancyOptimizer):
            side.opt.stats()  # reads numbers that have arrived, waits for none
        if step % world == self._setup.rank:
            self._losses.append((step, _evaluated(side, inputs)))
        if not self._joins:
            self._write(side, step)

    def _ask(self, side: Any, point: str, step: int) -> None:
        time.sleep(_AHEAD_SECONDS)
        try:
            state = side.opt.state_dict()["state"]
        except RuntimeError as error:
            code = re.search(r"ZERO-\d+", str(error))
            if code is None:
                raise
            self.found.refusals[point, code.group()] += 1
        else:
            self.found.answers[point] += 1
            self._asked.append((point, step, copy.deepcopy(state)))

    def _write(self, side: Any, step: int) -> None:
        if self._snapshots is None:
            self._snapshots = Snapshots(side.ddp, side.opt, folder=self._setup.folder / "snapshots", every=1)
            self._snapshots.load()
        self._snapshots.step()
        if step == 1:
            folder = self._setup.folder / "in the background"
            self._saving = checkpoints.save(folder, side.ddp, side.opt, background=True)

    def end(self) -> Found:
        """Wait for what is still written, and compare."""
        if self._saving is not None:
            self._saving.wait()
        if self._snapshots is not None:
            if not self._snapshots.wait():
                self.found.wrong.append("a snapshot has failed")
            self._snapshots.close()
        for point, step, state in self._asked:
            done = step + (point == POINTS[-1])
            if not any(_equal(state, self._reference.states[count]) for count in _counts(point, done)):
                self.found.wrong.append(f"state {point} of step {step}")
        for step, loss in self._losses:
            if not torch.equal(loss.cpu(), self._reference.losses[step].cpu()):
                self.found.wrong.append(f"evaluation after step {step}")
        return self.found


def _counts(point: str, done: int) -> list[int]:
    """Steps after which the state may be; backward may have stepped."""
    return [done, done + 1] if point == "after backward" else [done]


def _evaluated(side: Any, inputs: Tensor) -> Tensor:
    model = side.ddp.module
    with torch.no_grad():
        loss: Tensor = model(inputs.to(next(model.parameters()))).float().square().mean()
    return loss


def _equal(found: States, expected: States) -> bool:
    """Of all but masters, which are ours alone."""
    rest = {index: {name: one for name, one in state.items() if name != MASTER_KEY} for index, state in found.items()}
    rest = {index: state for index, state in rest.items() if state}
    return {index: state.keys() for index, state in rest.items()} == {
        index: state.keys() for index, state in expected.items()
    } and all(
        torch.equal(torch.as_tensor(rest[index][name]).cpu(), torch.as_tensor(value).cpu())
        for index, state in expected.items()
        for name, value in state.items()
    )
