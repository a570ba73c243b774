"""Train a small GPT twice, with plain DDP and with ZeRO stage 2, and compare loss, step time and memory.

    python examples/quickstart.py

Each training runs in processes of its own, one per rank: on GPUs if this machine has enough of them, else on the CPU.
The two differ in the one line of `build`. Both see the same text (Python's language reference), start from the same
weights, and end with the same weights, bit for bit; with three ranks or more stage 2 adds gradients in another order
than DDP, so that last bits can differ.
"""

import sys
import tempfile
import time
import warnings
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from dataclasses import dataclass
from pathlib import Path
from statistics import median

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


@dataclass(frozen=True)
class Training:
    """The outcome of one training on rank 0; memory is of the rank that needs most.

    Attributes:
        losses: mean loss over ranks of every step, in nats per byte.
        step_ms: median time of a step in milliseconds, without the first two.
        state: bytes of optimizer state.
        gradients: bytes of gradients after backward.
        peak: peak bytes of training, above those before the model was built.
        final: parameters after the last step.
    """

    losses: list[float]
    step_ms: float
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


def train(mode: str, world: World, options: Namespace) -> Training:
    """Train from the seed. A collective."""
    corpus = Corpus.load(None, options.context)
    generator = torch.Generator().manual_seed(0)
    before = memory_in_use(world.device)
    forget_peak_memory(world.device)
    torch.manual_seed(0)
    model = GPT(options.context, options.layers, options.width, options.width // 64).to(world.device)
    ddp, optimizer = build(mode, model)

    losses, seconds, gradients = [], [], 0
    for step in range(1, options.steps + 1):
        inputs, targets = corpus.draw(options.batch_size * world.size, generator, world)
        began = time.perf_counter()
        loss = ddp(inputs, targets)
        loss.backward()
        gradients = gradient_bytes(ddp)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(world.gather(loss.detach()).mean().item())
        seconds.append(time.perf_counter() - began)
        text = f"  step {step:>3}/{options.steps}  loss {losses[-1]:.3f}  {1000 * seconds[-1]:.0f} ms"
        world.update(text, is_due=step in (1, options.steps) or step % 10 == 0)
    world.say(text) if sys.stdout.isatty() else None

    held = torch.tensor([state_bytes(optimizer), gradients, peak_memory(world.device) - before])
    state, gradients, peak = world.gather(held).amax(dim=0).tolist()
    return Training(losses, 1000 * median(seconds[2:]), state, gradients, peak, copy_parameters(model))


def state_bytes(optimizer: Optimizer) -> int:
    """Bytes of optimizer state that this rank holds."""
    local = optimizer.optim if isinstance(optimizer, ddp_zero.ZeroRedundancyOptimizer) else optimizer
    return sum(
        value.nbytes for values in local.state.values() for value in values.values() if isinstance(value, Tensor)
    )


def run_rank(rank: int, mode: str, options: Namespace, folder: str) -> None:
    """Train in this process; rank 0 leaves the outcome in the folder."""
    torch.set_num_threads(1)
    world = World.meet(rank, options.ranks, Path(folder) / "rendezvous")
    training = train(mode, world, options)
    if rank == 0:
        torch.save(vars(training), Path(folder) / "training.pt")
    world.leave()


def run(mode: str, options: Namespace) -> Training:
    """Train with one process per rank."""
    print(mode, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        spawn(run_rank, (mode, options, folder), nprocs=options.ranks)
        return Training(**torch.load(Path(folder) / "training.pt", weights_only=True))


def report(trainings: dict[str, Training]) -> str:
    """Lay out the comparison, one column per training."""
    row = "{:<34}" + "{:>18}" * len(trainings)
    columns = trainings.values()
    lines = [
        row.format("", *trainings),
        row.format("loss of the last step", *(f"{each.losses[-1]:.4f}" for each in columns)),
        row.format("ms per step, median", *(f"{each.step_ms:.0f}" for each in columns)),
        row.format("MiB of optimizer state per rank", *(f"{each.state / MIB:.1f}" for each in columns)),
        row.format("MiB of gradients after backward", *(f"{each.gradients / MIB:.1f}" for each in columns)),
        row.format("MiB at the peak of training", *(f"{each.peak / MIB:.0f}" for each in columns)),
    ]
    ours, theirs = (trainings[mode].final for mode in reversed(MODES))
    apart = max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True))
    lines.append(f"largest difference between the trained parameters: {apart}")
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
    if options.width % 64 or min(options.ranks, options.steps - 2, options.layers, options.batch_size) < 1:
        parser.error("Expected positive numbers, at least 3 steps and a width that is a multiple of 64.")
    trainings = {mode: run(mode, options) for mode in MODES}
    print(f"\n{report(trainings)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
