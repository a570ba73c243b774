"""Time and memory of saving and loading a checkpoint, against torch.save and torch.distributed.checkpoint.

    python -m benchmarks.checkpoint
    python -m benchmarks.checkpoint --ranks 4 --layers 6 --folder /mnt/shared

All ways save a model of the same shape, trained with AdamW, and load it into a new model, on Gloo ranks of one thread
each on this machine. They take turns: each round is a training step, then one save and one load of every way, in a
random order that is the same on all ranks. Nothing is left for the disk to do when a save is complete: every way waits
for it (fsync). A load reads a file that was just written, so it comes from the page cache. Freed memory is given back
to the kernel before each measurement: no way finds pages that another has left.

A time is the slowest rank's, from a barrier on; a ratio is to ``consolidate_state_dict`` and ``torch.save`` in the same
round. CPU seconds, of all ranks, depend less on other load of the machine.

Memory is measured in separate rounds: a rank's peak anonymous memory (``RssAnon``; mapped files do not count), sampled
every 2 ms, less its value right before. A new optimizer has no state yet, so loading has to add it. In these rounds
freed memory goes back to the kernel at once (glibc's ``MALLOC_MMAP_THRESHOLD_`` is 1 MiB), so that resident memory is
memory in use.
"""

import copy
import ctypes
import gc
import json
import os
import platform
import random
import shutil
import statistics
import sys
import tempfile
import threading
import time
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from benchmarks.race.models import Task, gpt
from ddp_zero import ZeroRedundancyOptimizer, checkpoint, shard_optimizer

PROGRAM = "python -m benchmarks.checkpoint"
RESULTS = Path(__file__).parent / "results"
MIB = 2**20
CONTEXT = 16
HEAD_WIDTH = 64
FIRST_STEPS = 3  # DDP rebuilds its buckets in the second step
OPTIONS: dict[str, Any] = {"lr": 1e-4, "fused": True}
SAMPLE_SECONDS = 0.002
OURS, BACKGROUND = "ddp_zero.checkpoint", "ddp_zero.checkpoint, background=True"
REFERENCE = "consolidate_state_dict + torch.save"
DCP = "torch.distributed.checkpoint, unsharded AdamW"
DISK = "nothing but write and fsync, an equal part per rank"


class Training:
    """A model and its optimizer.

    Args:
        task: its data.
        model: the model, the same on every rank.
        is_sharded: True for stage 2 of this library, False for an unsharded optimizer.
    """

    def __init__(self, task: Task, model: nn.Module, is_sharded: bool) -> None:
        self.task, self.model, self.is_sharded = task, model, is_sharded
        self.ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, init_sync=False)
        self.optimizer: Optimizer
        if is_sharded:
            self.optimizer = shard_optimizer(self.ddp, AdamW, stage=2, **OPTIONS)
        else:
            self.optimizer = AdamW(self.ddp.parameters(), **OPTIONS)

    def fresh(self) -> "Training":
        """A new training of the same shape, all zeros, that has taken no step."""
        model = copy.deepcopy(self.model)
        for param in model.parameters():
            param.detach().zero_()
        return Training(self.task, model, self.is_sharded)

    def step(self) -> None:
        """One training step, which makes consolidated state stale."""
        self.ddp(*self.task.draw(1, torch.default_generator)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def zero(self) -> ZeroRedundancyOptimizer:
        """The optimizer, where it is sharded."""
        assert isinstance(self.optimizer, ZeroRedundancyOptimizer), "asked for where it is sharded"
        return self.optimizer

    @property
    def nbytes(self) -> int:
        """Bytes of the parameters."""
        return sum(param.nbytes for param in self.model.parameters())

    def equals(self, other: "Training") -> bool:
        """True if parameters are equal, and optimizer state where both have it on this rank."""
        for mine, theirs in zip(self.model.parameters(), other.model.parameters(), strict=True):
            state, other_state = self.optimizer.state.get(mine, {}), other.optimizer.state.get(theirs, {})
            pairs = [(mine, theirs), *((state[key], other_state[key]) for key in state.keys() & other_state.keys())]
            if not all(torch.equal(one, another) for one, another in pairs):
                return False
        return True


# Ways to save and load

Rest = Callable[[], object]


def save_ours(training: Training, path: Path) -> None:
    """Every rank its share."""
    checkpoint.save(path, training.ddp, training.optimizer)


def save_in_background(training: Training, path: Path) -> Rest:
    """Training could go on before the rest is done."""
    return checkpoint.save(path, training.ddp, training.optimizer, background=True).wait


def load_ours(training: Training, path: Path) -> None:
    """Every rank the model and its share of the state."""
    checkpoint.load(path, training.ddp, training.optimizer)


def save_consolidated(training: Training, path: Path) -> None:
    """Everything through rank 0."""
    training.zero.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        content = {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}
        with path.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
    dist.barrier()


def load_consolidated(training: Training, path: Path) -> None:
    """Every rank maps the file, and reads its part."""
    content = torch.load(path, weights_only=True, mmap=True)
    training.model.load_state_dict(content["model"])
    training.optimizer.load_state_dict(content["optimizer"])


def save_dcp(training: Training, path: Path) -> None:
    """Torch's sharded checkpoint; ranks share the writing of replicated values."""
    model, optimizer = get_state_dict(training.ddp, training.optimizer)
    dcp_save({"model": model, "optimizer": optimizer}, storage_writer=FileSystemWriter(path, sync_files=True))


def load_dcp(training: Training, path: Path) -> None:
    """Everything on every rank, into tensors that get_state_dict makes."""
    model, optimizer = get_state_dict(training.ddp, training.optimizer)
    dcp_load({"model": model, "optimizer": optimizer}, storage_reader=FileSystemReader(path))
    set_state_dict(training.ddp, training.optimizer, model_state_dict=model, optim_state_dict=optimizer)


def save_nothing(training: Training, path: Path) -> None:
    """Write equally many bytes: the disk's own time."""
    path.mkdir(exist_ok=True)
    left = 3 * training.nbytes // dist.get_world_size()
    chunk = b"\1" * (4 * MIB)
    with (path / str(dist.get_rank())).open("wb", buffering=0) as file:
        while left > 0:
            left -= file.write(chunk)
        os.fsync(file.fileno())


@dataclass(frozen=True)
class Way:
    """A way to save and to load.

    Attributes:
        save: saves; returns a function that waits for the rest, if anything is left.
        load: loads the saved state; None if already measured.
        is_sharded: True if the optimizer is sharded.
    """

    save: Callable[[Training, Path], Rest | None]
    load: Callable[[Training, Path], None] | None = None
    is_sharded: bool = True


WAYS = {
    OURS: Way(save_ours, load_ours),
    BACKGROUND: Way(save_in_background),
    REFERENCE: Way(save_consolidated, load_consolidated),
    DCP: Way(save_dcp, load_dcp, is_sharded=False),
    DISK: Way(save_nothing),
}


# Measuring

Numbers = dict[str, list[float]]
"""What was measured, each of all ranks."""


def anonymous() -> int:
    """Bytes of this process's memory that no file backs."""
    with open("/proc/self/status", "rb", buffering=0) as file:
        text = file.read(8192)
    return int(text[text.index(b"RssAnon:") + 8 :].split(maxsplit=1)[0]) * 1024


class MemoryWatch:
    """Samples this process's anonymous memory in a thread while a block runs.

    Attributes:
        rise: largest sample, above the value before.
    """

    rise = 0

    def __enter__(self) -> None:
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._before = self._most = anonymous()
        self._thread.start()

    def _look(self) -> None:
        while not self._is_over.wait(SAMPLE_SECONDS):
            self._most = max(self._most, anonymous())

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        self.rise = max(self._most, anonymous()) - self._before


def measured(act: Callable[[], Rest | None], looks_at_memory: bool) -> Numbers:
    """Run it on all ranks at once: seconds until it returned and until its rest was done, CPU seconds, memory."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    if dist.get_rank() == 0:
        os.sync()  # others write to this disk, too
    dist.barrier()
    watch = MemoryWatch()
    with watch if looks_at_memory else nullcontext():
        started, started_cpu = time.perf_counter(), time.process_time()
        rest = act()
        returned = time.perf_counter() - started
        if rest is not None:
            rest()
        complete, cpu = time.perf_counter() - started, time.process_time() - started_cpu
    mine = torch.tensor([returned, complete, cpu, watch.rise], dtype=torch.float64)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    found = dict(zip(("returned", "complete", "cpu", "memory"), torch.stack(everyone).T.tolist(), strict=True))
    return {what: numbers for what, numbers in found.items() if what != "memory" or looks_at_memory}


def take_turns(rank: int, options: Namespace, folder: Path, looks_at_memory: bool) -> None:
    """The program of every rank; rank 0 writes the results to a file."""
    torch.set_num_threads(1)
    rendezvous = (folder / f"rendezvous-{looks_at_memory}").as_uri()
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=options.ranks)
    torch.manual_seed(0)
    task = gpt(context=CONTEXT, layers=options.layers, width=options.width, heads=options.width // HEAD_WIDTH)
    model = task.build()
    trainings = {True: Training(task, model, True), False: Training(task, copy.deepcopy(model), False)}
    for _ in range(FIRST_STEPS):
        step_all(trainings)
    order = random.Random(0)
    loads = [name for name, way in WAYS.items() if way.load is not None]
    found: dict[str, Any] = {"save": {name: [] for name in WAYS}, "load": {name: [] for name in loads}}
    for turn in range(-1, 1 if looks_at_memory else options.rounds):  # the first warms up
        step_all(trainings)
        for name in order.sample(list(WAYS), k=len(WAYS)):
            way = WAYS[name]
            numbers = save_and_load(way, trainings[way.is_sharded], folder / "saved", looks_at_memory)
            for kind, one in numbers.items() if turn >= 0 else ():
                found[kind][name].append(one)
    found["sizes"] = sizes(trainings[True])
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def step_all(trainings: dict[bool, Training]) -> None:
    """One step each."""
    for training in trainings.values():
        training.step()


def save_and_load(way: Way, training: Training, path: Path, looks_at_memory: bool) -> dict[str, Numbers]:
    """Save, load into a new training, compare it with what was saved, and remove the files."""
    found = {"save": measured(lambda: way.save(training, path), looks_at_memory)}
    load = way.load
    if load is not None:
        fresh = training.fresh()
        found["load"] = measured(lambda: load(fresh, path), looks_at_memory)
        if not fresh.equals(training):
            raise RuntimeError("Expected what was loaded to equal what was saved, got something else.")
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return found


def sizes(training: Training) -> dict[str, Any]:
    """Bytes that explain the results, of the rank that owns most."""
    inner = training.zero.optim
    owned = [param for group in inner.param_groups for param in group["params"]]
    state = sum(value.nbytes for values in inner.state.values() for value in values.values())
    mine = torch.tensor([sum(param.nbytes for param in owned), state])
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    return {
        "tensors": len(list(training.model.parameters())),
        "parameters": training.nbytes,
        "owned parameters": int(mine[0]),
        "owned state": int(mine[1]),
        "largest parameter": max(param.nbytes for param in training.model.parameters()),
    }


# Telling


def table(found: dict[str, Any]) -> str:
    """Markdown: saving, then loading."""
    rows: list[str] = []
    for kind in ("save", "load"):
        rows += [
            f"| {kind} | median s (quartiles) | MB/s | ratio to {REFERENCE} | CPU s | memory, MiB |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        every: dict[str, list[Numbers]] = found[kind]
        base = slowest(every[REFERENCE], "complete")
        for name, rounds in every.items():
            if name == BACKGROUND:
                rows.append(row(f"{name}: until it returns", slowest(rounds, "returned"), base, found, ["", ""]))
                name = f"{name}: until complete"
            cpu = statistics.median(sum(one["cpu"]) for one in rounds)
            memory = max(slowest(found["memory"][kind][name.removesuffix(": until complete")], "memory"))
            rows.append(row(name, slowest(rounds, "complete"), base, found, [f"{cpu:.1f}", f"{memory / MIB:.1f}"]))
        rows.append("")
    return "\n".join(rows)


def row(name: str, seconds: list[float], base: list[float], found: dict[str, Any], more: list[str]) -> str:
    """One row."""
    nbytes = 3 * found["sizes"]["parameters"]
    low, middle, high = statistics.quantiles(seconds, n=4)
    ratio = statistics.median(mine / other for mine, other in zip(seconds, base, strict=True))
    cells = [name, f"{middle:.2f} ({low:.2f} to {high:.2f})", f"{nbytes / middle / 1e6:.0f}", f"{ratio:.2f}", *more]
    return f"| {' | '.join(cells)} |"


def slowest(rounds: list[Numbers], what: str) -> list[float]:
    """The largest number of all ranks in each round."""
    return [max(one[what]) for one in rounds]


def processor() -> str:
    """Its name, as Linux tells it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def main() -> None:
    """Measure all ways, print the tables, store them with the raw numbers."""
    parser = ArgumentParser(
        prog=PROGRAM, description=__doc__.splitlines()[0], formatter_class=ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5, help="saves and loads of each way, after one to warm up")
    parser.add_argument("--layers", type=int, default=12, help="transformer blocks, of 12 x width x width parameters")
    parser.add_argument("--width", type=int, default=768, help=f"a multiple of {HEAD_WIDTH}")
    parser.add_argument(
        "--folder", type=Path, help="where to save; a temporary folder by default; it is left as it was"
    )
    options = parser.parse_args()
    if not Path("/proc/self/status").exists():
        parser.error("Expected Linux, whose /proc/self/status tells memory.")
    if options.rounds < 2 or options.width % HEAD_WIDTH:
        parser.error(f"Expected at least 2 rounds and a width that is a multiple of {HEAD_WIDTH}.")
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        found = results_of(options, Path(folder), looks_at_memory=False)
        os.environ["MALLOC_MMAP_THRESHOLD_"] = str(MIB)
        found["memory"] = results_of(options, Path(folder), looks_at_memory=True)
    text = "\n".join([*(f"- {fact}" for fact in facts(options, found["sizes"], load)), "", table(found)])
    print(text)
    RESULTS.mkdir(exist_ok=True)
    stem = f"checkpoint-{round(found['sizes']['parameters'] / 4e6)}m-{options.ranks}ranks"
    (RESULTS / f"{stem}.md").write_text(text)
    content = {"facts": facts(options, found["sizes"], load), **found}
    (RESULTS / f"{stem}.json").write_text(json.dumps(content, indent=1) + "\n")


def results_of(options: Namespace, folder: Path, looks_at_memory: bool) -> dict[str, Any]:
    """The results of rank 0."""
    spawn(take_turns, args=(options, folder, looks_at_memory), nprocs=options.ranks)
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found


def facts(options: Namespace, sizes: dict[str, Any], load: float) -> list[str]:
    """Subject, place and method of the measurement."""
    mib = {name: f"{nbytes / MIB:.1f} MiB" for name, nbytes in sizes.items()}
    return [
        f"date: {date.today()}",
        f"command: {PROGRAM} {' '.join(sys.argv[1:])}".rstrip(),
        f"versions: torch {torch.__version__}, Python {platform.python_version()}",
        f"machine: {processor()}, {os.cpu_count()} cores; load average {load:.1f} before the run",
        f"model: {sizes['parameters'] // 4:,} fp32 parameters in {sizes['tensors']} tensors, AdamW with state, "
        f"{options.ranks} Gloo ranks of one thread each, {options.rounds} rounds; a checkpoint is "
        f"{3 * sizes['parameters'] / 1e6:.0f} MB of parameters and state, by which MB/s are counted",
        f"largest shard: {mib['owned parameters']} of parameters and {mib['owned state']} of state; largest parameter: "
        f"{mib['largest parameter']}, twice that its state; state of all: {2 * sizes['parameters'] / MIB:.1f} MiB",
        "memory: the most anonymous memory of any rank, mapped files not counted, above what it had right before; the "
        "optimizers that are loaded into have no state before; CPU seconds are of all ranks together",
        "every save waits for the disk; loads read from the page cache what was written just before; every load gave "
        "the parameters bit for bit, and the state that the rank had kept before",
    ]


if __name__ == "__main__":
    main()
