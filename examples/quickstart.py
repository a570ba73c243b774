"""Train a small GPT twice, with plain DDP and with ZeRO stage 2, and compare loss, step time and memory.

    python examples/quickstart.py

Each training runs in processes of its own, one per rank: on GPUs if this machine has enough of them, else on the CPU.
They take turns step by step, so that other load slows both alike. The two differ in the one line of `build`. Both see
the same text (Python's language reference), start from the same weights, and end with the same weights, bit for bit;
with three ranks or more stage 2 adds gradients in another order than DDP, so that last bits can differ.
"""

import sys
import tempfile
import time
import warnings
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from pathlib import Path
from statistics import median, quantiles

# torch warns when it is imported where NumPy is not installed, in each process; nothing here uses NumPy
warnings.filterwarnings("ignore", "Failed to initialize NumPy")

import torch
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

import ddp_zero
from gpt.corpus import Corpus
from gpt.measuring import copy_parameters, forget_peak_memory, gradient_bytes, memory_in_use, peak_memory
from gpt.model import GPT
from gpt.world import World

MODES = ("DDP", "ddp_zero stage 2")
MIB = 2**20
BUSY = 1.25
"""Upper by lower quartile of the steps' times, from which on they mean nothing."""


@dataclass(frozen=True)
class Training:
    """The outcome of one training on rank 0; memory is of the rank that needs most.

    Attributes:
        losses: mean loss over ranks of every step, in nats per byte.
        step_ms: time of each step in milliseconds, without the first two.
        state: bytes of optimizer state.
        gradients: bytes of gradients after backward.
        peak: peak bytes of training, above those before the model was built.
        final: parameters after the last step.
    """

    losses: list[float]
    step_ms: list[float]
    state: int
    gradients: int
    peak: int
    final: list[Tensor]


def build(mode: str, model: nn.Module) -> tuple[nn.Module, Optimizer]:
    """Wrap the model and build its optimizer; this is all that differs between the two trainings."""
    if mode == "DDP":
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
        return ddp, AdamW(ddp.parameters(), lr=1e-3)
    return ddp_zero.wrap(model, AdamW, stage=2, lr=1e-3)


def train(mode: str, world: World, options: Namespace, turns: Barrier) -> Training:
    """Train from the seed, a step whenever it is this mode's turn. A collective."""
    corpus = Corpus.load(None, options.context)
    generator = torch.Generator().manual_seed(0)
    before = memory_in_use(world.device)
    forget_peak_memory(world.device)
    torch.manual_seed(0)
    model = GPT(options.context, options.layers, options.width, options.width // 64).to(world.device)
    ddp, optimizer = build(mode, model)

    losses, step_ms, gradients = [], [], 0
    for step in range(1, options.steps + 1):
        inputs, targets = corpus.draw(options.batch_size * world.size, generator, world)
        for turn in MODES:
            turns.wait()
            if turn == mode:
                began = time.perf_counter()
                loss = ddp(inputs, targets)
                loss.backward()
                gradients = gradient_bytes(ddp)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(world.gather(loss.detach()).mean().item())
                step_ms.append(1000 * (time.perf_counter() - began))
                text = f"  step {step:>3}/{options.steps}  {mode:<16}  loss {losses[-1]:.3f}  {step_ms[-1]:.0f} ms"
                world.update(text, is_due=step in (1, options.steps) or step % 10 == 0)

    held = torch.tensor([state_bytes(optimizer), gradients, peak_memory(world.device) - before])
    state, gradients, peak = world.gather(held).amax(dim=0).tolist()
    return Training(losses, step_ms[2:], state, gradients, peak, copy_parameters(model))


def state_bytes(optimizer: Optimizer) -> int:
    """Bytes of optimizer state that this rank holds."""
    local = optimizer.optim if isinstance(optimizer, ddp_zero.ZeroRedundancyOptimizer) else optimizer
    return sum(
        value.nbytes for values in local.state.values() for value in values.values() if isinstance(value, Tensor)
    )


def run_rank(index: int, options: Namespace, folder: str, turns: Barrier) -> None:
    """Train one mode in this process; rank 0 leaves the outcome in the folder."""
    torch.set_num_threads(1)
    number, rank = divmod(index, options.ranks)
    world = World.meet(rank, options.ranks, Path(folder) / f"rendezvous-{number}")
    training = train(MODES[number], world, options, turns)
    if rank == 0:
        torch.save(vars(training), Path(folder) / f"{number}.pt")
    world.leave()


def run(options: Namespace) -> dict[str, Training]:
    """Train in both modes, with one process per rank and mode."""
    processes = len(MODES) * options.ranks
    turns = get_context("spawn").Barrier(processes)
    with tempfile.TemporaryDirectory() as folder:
        spawn(run_rank, (options, folder, turns), nprocs=processes)
        saved = [torch.load(Path(folder) / f"{number}.pt", weights_only=True) for number in range(len(MODES))]
    return {mode: Training(**one) for mode, one in zip(MODES, saved, strict=True)}


def report(trainings: dict[str, Training]) -> str:
    """Lay out the comparison, one column per training."""
    row = "{:<34}" + "{:>18}" * len(trainings)
    columns = trainings.values()
    lines = [
        row.format("", *trainings),
        row.format("loss of the last step", *(f"{each.losses[-1]:.4f}" for each in columns)),
        row.format("ms per step, median", *(f"{median(each.step_ms):.0f}" for each in columns)),
        row.format("MiB of optimizer state per rank", *(f"{each.state / MIB:.1f}" for each in columns)),
        row.format("MiB of gradients after backward", *(f"{each.gradients / MIB:.1f}" for each in columns)),
        row.format("MiB at the peak of training", *(f"{each.peak / MIB:.0f}" for each in columns)),
    ]
    ours, theirs = (trainings[mode].final for mode in reversed(MODES))
    apart = max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True))
    lines.append(f"largest difference between the trained parameters: {apart}")
    low, _, high = quantiles(trainings["DDP"].step_ms, n=4, method="inclusive")
    if high > BUSY * low:
        lines.append(f"This machine is busy: half of DDP's steps took {low:.0f} to {high:.0f} ms. Times mean nothing.")
    return "\n".join(lines)


def main() -> int:
    """Run both trainings, and print the comparison."""
    parser = ArgumentParser(description=__doc__.splitlines()[0], formatter_class=ArgumentDefaultsHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="processes that train together")
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps")
    parser.add_argument("--layers", type=int, default=6, help="transformer blocks")
    parser.add_argument("--width", type=int, default=512, help="features per position, a multiple of 64")
    parser.add_argument("--context", type=int, default=128, help="bytes that the model sees at once")
    parser.add_argument("--batch-size", type=int, default=2, help="windows of text per rank")
    options = parser.parse_args()
    if options.width % 64 or min(options.ranks, options.steps - 3, options.layers, options.batch_size) < 1:
        parser.error("Expected positive numbers, at least 4 steps and a width that is a multiple of 64.")
    print(f"\n{report(run(options))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
