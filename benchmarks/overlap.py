"""Step time of every mode against DDP + fused AdamW, side by side in one run.

    python benchmarks/overlap.py
    python benchmarks/overlap.py --model small --rounds 10

All modes train the same model on the same data from the same seed, on Gloo ranks of one thread each on this machine.
They take turns: each round times one step of every mode, in a random order that is the same on all ranks. A ratio is
that of a mode's step to the step of DDP + fused AdamW in the same round; the table has the median over rounds. Modes
that clip need every gradient before the step, which then waits for ``opt.step()``: beside their unclipped selves they
show what that costs.
"""

import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
import warnings
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

from train_gpt import GPT, VOCABULARY

from ddp_zero import ZeroRedundancyOptimizer, shard_optimizer

RESULTS = Path(__file__).parent / "results"
REFERENCE = "DDP + fused AdamW"
CLIPPED = "DDP + fused AdamW, bucket views, clipped"
TORCHS = "torch ZeroRedundancyOptimizer, bucket views"
MAX_NORM = 1.0
OPTIONS: dict[str, Any] = {"lr": 1e-4, "fused": True}
MODELS = {
    "26m": {"context": 64, "layers": 8, "width": 512, "heads": 8},
    "small": {"context": 32, "layers": 2, "width": 64, "heads": 2},
}
WARM_UP = 4  # DDP rebuilds its buckets in the second step


def torchs_zero(ddp: DistributedDataParallel, as_views: bool) -> Optimizer:
    """Torch's own; importing it warns about its TorchScript."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
    return TorchZero(ddp.parameters(), AdamW, parameters_as_bucket_view=as_views, **OPTIONS)


def standalone(ddp: DistributedDataParallel) -> Optimizer:
    """The step after backward."""
    return ZeroRedundancyOptimizer(ddp.parameters(), AdamW, parameters_as_bucket_view=True, **OPTIONS)


def plain(ddp: DistributedDataParallel) -> Optimizer:
    """The unsharded optimizer."""
    return AdamW(ddp.parameters(), **OPTIONS)


def in_one_line(**options: Any) -> Callable[[DistributedDataParallel], Optimizer]:
    """Ours, by `shard_optimizer`."""
    return lambda ddp: shard_optimizer(ddp, AdamW, **options, **OPTIONS)


@dataclass(frozen=True)
class Mode:
    """A way to train.

    Attributes:
        build: the optimizer.
        has_views: whether DDP's gradients are views of its buckets.
        clips: whether the loop calls ``clip_grad_norm_``.
        base: the mode that it must equal.
    """

    build: Callable[[DistributedDataParallel], Optimizer]
    has_views: bool = True
    clips: bool = False
    base: str = REFERENCE


MODES: dict[str, Mode] = {
    REFERENCE: Mode(plain, has_views=False),
    "DDP + fused AdamW, bucket views": Mode(plain),
    CLIPPED: Mode(plain, clips=True, base=CLIPPED),
    "torch ZeroRedundancyOptimizer": Mode(lambda ddp: torchs_zero(ddp, as_views=False)),
    TORCHS: Mode(lambda ddp: torchs_zero(ddp, as_views=True)),
    "ddp_zero standalone": Mode(standalone),
    "ddp_zero overlapped": Mode(in_one_line()),
    "ddp_zero overlapped, clipped": Mode(in_one_line(max_grad_norm=MAX_NORM), base=CLIPPED),
    'ddp_zero overlapped, nonfinite="skip"': Mode(in_one_line(nonfinite="skip")),
    "ddp_zero interleaved": Mode(in_one_line(interleaved=True)),
    "ddp_zero stage 2": Mode(in_one_line(stage=2)),
    "ddp_zero stage 2, clipped": Mode(in_one_line(stage=2, max_grad_norm=MAX_NORM), base=CLIPPED),
    "ddp_zero stage 2, after the last bucket": Mode(in_one_line(stage=2, interleaved=False)),
    "ddp_zero stage 2, step after backward": Mode(in_one_line(stage=2, overlap=False, nonfinite="step")),
}


class Contestant:
    """A mode with its own copy of the model."""

    def __init__(self, name: str, options: Namespace) -> None:
        self.mode = MODES[name]
        torch.manual_seed(0)
        self.context = MODELS[options.model]["context"]
        model = GPT(**MODELS[options.model])
        self.ddp = DistributedDataParallel(model, gradient_as_bucket_view=self.mode.has_views)
        self.optimizer = self.mode.build(self.ddp)
        self.data = torch.Generator().manual_seed(1 + dist.get_rank())

    def step(self, batch_size: int) -> float:
        """One training step, with the data that every mode sees; returns its seconds on this rank."""
        tokens = torch.randint(VOCABULARY, (batch_size, self.context + 1), generator=self.data)
        dist.barrier()
        started = time.perf_counter()
        self.ddp(tokens[:, :-1], tokens[:, 1:]).backward()
        if self.mode.clips:
            nn.utils.clip_grad_norm_(self.ddp.parameters(), MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - started


def race(rank: int, options: Namespace, folder: str) -> None:
    """What every rank runs; rank 0 leaves the slowest rank's seconds of every step in a file."""
    torch.set_num_threads(1)
    rendezvous = (Path(folder) / "rendezvous").as_uri()
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=options.ranks)
    contestants = {name: Contestant(name, options) for name in MODES}
    order = random.Random(0)
    seconds: dict[str, list[float]] = {name: [] for name in MODES}
    for turn in range(WARM_UP + options.rounds):
        for name in order.sample(list(MODES), k=len(MODES)):
            elapsed = torch.tensor([contestants[name].step(options.batch_size)])
            dist.all_reduce(elapsed, dist.ReduceOp.MAX)
            if turn >= WARM_UP:
                seconds[name].append(elapsed.item())
    differences = {
        name: largest_difference(contestants[one.mode.base].ddp, one.ddp) for name, one in contestants.items()
    }
    if rank == 0:
        parameters = sum(param.numel() for param in contestants[REFERENCE].ddp.parameters())
        found = {"parameters": parameters, "seconds": seconds, "differences": differences}
        (Path(folder) / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def largest_difference(one: nn.Module, other: nn.Module) -> float:
    """Of any parameter, on this rank."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((first.detach() - second.detach()).abs().max()) for first, second in pairs)


def table(found: dict[str, Any]) -> str:
    """Markdown: one row per mode."""
    rows = [
        "| mode | median ms | ratio to DDP + fused AdamW (quartiles) | ratio to torch's, bucket views | differs by |",
        "| --- | --- | --- | --- | --- |",
    ]
    every = found["seconds"]
    for name, seconds in every.items():
        to_ddp, to_torch = (quartiles_of_ratio(seconds, every[base]) for base in (REFERENCE, TORCHS))
        cells = [f"{middle:.2f} ({low:.2f} to {high:.2f})" for low, middle, high in (to_ddp, to_torch)]
        median = f"{1000 * statistics.median(seconds):.0f}"
        rows.append(f"| {name} | {median} | {' | '.join(cells)} | {found['differences'][name]} |")
    return "\n".join(rows)


def quartiles_of_ratio(seconds: list[float], base: list[float]) -> list[float]:
    """Of one mode's steps to another's, round by round."""
    return statistics.quantiles([mine / other for mine, other in zip(seconds, base, strict=True)], n=4)


def processor() -> str:
    """Its name, as Linux tells it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def main() -> None:
    """Run the race, print the table, store it with the raw seconds."""
    parser = ArgumentParser(description=__doc__.splitlines()[0], formatter_class=ArgumentDefaultsHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15, help="timed steps of each mode")
    parser.add_argument("--model", choices=MODELS, default="26m")
    parser.add_argument("--batch-size", type=int, default=4, help="per rank")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        spawn(race, args=(options, folder), nprocs=options.ranks)
        found = json.loads((Path(folder) / "found.json").read_text())
    facts = [
        f"date: {date.today()}",
        f"command: python benchmarks/overlap.py {' '.join(sys.argv[1:])}".rstrip(),
        f"versions: torch {torch.__version__}, Python {platform.python_version()}",
        f"machine: {processor()}, {os.cpu_count()} cores; load average {load:.1f} before the run",
        f"model: {options.model}, {found['parameters']:,} parameters, {options.ranks} Gloo ranks of one thread each, "
        f"{options.batch_size} x {MODELS[options.model]['context']} tokens per rank, {options.rounds} rounds",
    ]
    text = "\n".join([*(f"- {fact}" for fact in facts), "", table(found), ""])
    print(text)
    RESULTS.mkdir(exist_ok=True)
    stem = f"overlap-{options.model}-{options.ranks}ranks"
    (RESULTS / f"{stem}.md").write_text(text)
    (RESULTS / f"{stem}.json").write_text(json.dumps({"facts": facts, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
