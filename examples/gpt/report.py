"""Printed output: progress, the table of memory, and the comparison of two trainings."""

import sys
from argparse import Namespace
from dataclasses import dataclass

import torch
from torch import Tensor

from gpt.adamw import Outcome
from gpt.measuring import Usage
from gpt.position import Position
from gpt.world import World

LOG_LINES = 20
PEAK_NOTE = "peak memory: of the process in this training, Python and torch included; on a GPU, allocated there"


@dataclass(frozen=True)
class Result:
    """A finished training.

    Attributes:
        mode: mode of the optimizer.
        train_losses: loss of every step, a mean over the ranks.
        validation_losses: steps, and the loss on held-out text after each of them.
        initial: parameters before training, on the CPU.
        final: parameters after training, on the CPU.
        usages: memory of each rank.
        sample: bytes that the model wrote, on rank 0.
    """

    mode: str
    train_losses: list[float]
    validation_losses: list[tuple[int, float]]
    initial: list[Tensor]
    final: list[Tensor]
    usages: list[Usage]
    sample: bytes

    @property
    def unsharded_state(self) -> int:
        """Bytes of optimizer state for the whole model, measured: the sum over all ranks, each parameter once."""
        times_held = sum(usage.elements for usage in self.usages) // sum(param.numel() for param in self.final)
        return sum(usage.state for usage in self.usages) // times_held


def report_step(position: Position, outcome: Outcome, pace: float, options: Namespace, world: World) -> None:
    """Show step, loss, outcome, speed and remaining time, and any skipped step.

    Args:
        position: position of the training after the step.
        outcome: outcome of the step.
        pace: seconds per step.
        options: the command line.
        world: the processes.
    """
    step, loss = len(position.train_losses), position.train_losses[-1]
    speed = options.accumulate * position.windows * options.context / pace
    left = pace * (options.steps - step)
    place = f"step {step:>5}/{options.steps}"
    is_due = step == 1 or step % max(1, options.steps // LOG_LINES) == 0
    world.update(f"{place}  train loss {loss:.3f}{outcome}  {speed:,.0f} tokens/s  {left:.0f} s left", is_due)
    if outcome.skipped is not None:
        world.say(f"{place}  not stepped: {outcome.skipped}")


def table(result: Result) -> str:
    """Lay out the memory of every rank, beside its memory without sharding."""
    row = "{:>4} {:>11} {:>12} {:>14} {:>16} {:>15} {:>14}".format
    lines = [row("rank", "parameters", "elements", "state bytes", "unsharded bytes", "gradient bytes", "peak memory")]
    for rank, usage in enumerate(result.usages):
        numbers = (usage.parameters, usage.elements, usage.state, result.unsharded_state, usage.gradients, usage.peak)
        lines.append(row(rank, *(f"{number:,}" for number in numbers)))
    lines.append("parameters, elements: what the rank's optimizer owns; state bytes: what it keeps for them")
    lines.append("gradient bytes: what param.grad keeps after backward; zero2 uses the buffers named above besides")
    lines.append(PEAK_NOTE)
    return "\n".join(lines)


def printable(data: bytes) -> str:
    """Replace characters that are unsafe to print: the model can write anything, and terminals differ."""
    text = "".join(c if c.isprintable() or c == "\n" else "?" for c in data.decode(errors="replace"))
    return text.encode(sys.stdout.encoding, errors="replace").decode(sys.stdout.encoding)


def compare(result: Result, reference: Result, world: World) -> bool:
    """Report the difference between two finished trainings, over all parameters and ranks. A collective.

    Returns:
        True if they ended with equal parameters, all of which had moved.
    """
    pairs = zip(result.final, reference.final, strict=True)
    apart = torch.stack([(ours.double() - theirs).abs().max() for ours, theirs in pairs]).max()  # NaN stays NaN
    moved = sum(not torch.equal(old, new) for old, new in zip(result.initial, result.final, strict=True))
    largest = world.gather(apart).max().item()
    all_moved = int(world.gather(torch.tensor(moved)).min())
    world.say(f"parameters that moved from their initial values: {all_moved} of {len(result.initial)}")
    world.say(f"largest parameter difference to DDP + AdamW: {largest}")
    return all_moved == len(result.initial) and largest == 0.0
