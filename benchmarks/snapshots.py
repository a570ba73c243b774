"""Cost of snapshots in the training loop, and seconds of a restart from memory beside a restart from disk.

    python -m benchmarks.snapshots
    python -m benchmarks.snapshots --model 8m --rounds 20

Two Gloo ranks of one thread each on this machine train a GPT in stage 2 with AdamW. Cost: blocks of ten steps of one
training, without snapshots, with one in its first step (``every=10``), and with one in each step (``every=1``), take
turns in a random order that is the same on both ranks; with and without copies to the other rank. A block ends when
its snapshots are written and sent. A ratio is to the block without snapshots of the same round. CPU seconds, of all
threads of both ranks, depend less on other load of the machine than seconds; where nothing is idle, they are the cost.
``--block 100`` times ``every=100`` in blocks of a hundred steps. After the blocks, snapshots are taken one after the
other without steps in between, for the CPU seconds of one.

Restarts: rank 1 of a training is killed, then both ranks start again, in turns from the snapshot in memory, from the
snapshot after one of two hosts has lost its folder (the ranks have folders of their own), and from a checkpoint on
disk, with its files in the page cache and with the cache of these files dropped. Seconds are from the kill to the end
of the first new step, and of each stage between the two, of the later rank.
"""

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from benchmarks.race.models import MODELS
from ddp_zero import shard_optimizer
from ddp_zero.snapshots import Snapshots

PROGRAM = "python -m benchmarks.snapshots"
RESULTS = Path(__file__).parent / "results"
RANKS, FIRST_STEPS, SNAPSHOTS_ALONE = 2, 4, 20
NONE = "no snapshots"
STAGES = {
    "ranks gone": "from the kill until all ranks have ended",
    "imports": "the new processes have imported torch and this library",
    "rendezvous": "the process group is there",
    "build": "model, DDP and optimizer are built",
    "load": "the state is restored",
    "first step": "the first new step has ended",
}
"""The stages of a restart, in order, and the end of each."""
KINDS = ("memory", "memory, a host lost", "disk, cached", "disk, cold")


class Training:
    """A model, its optimizer and its data."""

    def __init__(self, model: str, batch_size: int) -> None:
        torch.manual_seed(0)
        self.task, self._batch_size = MODELS[model], batch_size
        self.ddp = DistributedDataParallel(self.task.build(), gradient_as_bucket_view=True, init_sync=False)
        self.optimizer = shard_optimizer(self.ddp, AdamW, stage=2, lr=1e-4, fused=True)
        self._generator = torch.Generator().manual_seed(dist.get_rank())

    def step(self) -> None:
        """One step."""
        self.ddp(*self.task.draw(self._batch_size, self._generator)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def nbytes(self) -> int:
        """Bytes of parameters and state of the model."""
        return 3 * sum(param.nbytes for param in self.ddp.parameters())


# Cost


def modes_of(block: int) -> dict[str, tuple[str | None, int]]:
    """For each mode, which snapshots it takes, and every how many steps."""
    found: dict[str, tuple[str | None, int]] = {NONE: (None, 0)}
    for every in dict.fromkeys([block, 1] if block <= 10 else [block]):
        found[f"every={every}, copies=1"] = "copied", every
        found[f"every={every}, copies=0"] = "alone", every
    return found


def time_block(training: Training, snapshots: Snapshots | None, every: int, steps: int) -> tuple[float, float]:
    """Seconds of a block of steps, and CPU seconds of both ranks."""
    dist.barrier()
    started, started_cpu = time.perf_counter(), time.process_time()
    for step in range(steps):
        training.step()
        if snapshots is not None and step % every == 0:
            snapshots.step()
    if snapshots is not None:
        snapshots.wait()
    dist.barrier()
    seconds, used = time.perf_counter() - started, torch.tensor(time.process_time() - started_cpu)
    dist.all_reduce(used)
    return seconds, float(used)


def measure_cost(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of the blocks of each mode, in rounds."""
    training = Training(options.model, options.batch_size)
    taken = {}
    for name, copies in (("copied", 1), ("alone", 0)):
        taken[name] = Snapshots(
            training.ddp, training.optimizer, folder=f"{options.memory}/{name}", every=1, copies=copies
        )
        taken[name].load()
    for _ in range(FIRST_STEPS):
        training.step()
    order, modes = random.Random(0), modes_of(options.block)
    rounds: dict[str, list[float]] = {name: [] for name in modes}
    cpu: dict[str, list[float]] = {name: [] for name in modes}
    in_loop: dict[str, list[float]] = {name: [] for name in taken}
    for number in range(-1, options.rounds):  # the first warms up, and allocates the files
        for name in order.sample(list(modes), k=len(modes)):
            which, every = modes[name]
            snapshots = None if which is None else taken[which]
            seconds, used = time_block(training, snapshots, every, options.block)
            if number >= 0:
                rounds[name].append(seconds)
                cpu[name].append(used)
                if which is not None and every == options.block:
                    in_loop[which].append(taken[which].stats()["snapshot_s"])
    numbers = {name: one.stats() for name, one in taken.items()}
    alone = {name: cpu_of_a_snapshot(one) for name, one in taken.items()}
    for one in taken.values():
        one.close()
    found = {"rounds": rounds, "cpu": cpu, "in loop": in_loop, "cpu alone": alone, "numbers": numbers}
    return {**found, "bytes": training.nbytes, "block": options.block}


def cpu_of_a_snapshot(snapshots: Snapshots) -> float:
    """CPU seconds of a snapshot, of all threads of both ranks."""
    dist.barrier()
    started = time.process_time()
    for _ in range(SNAPSHOTS_ALONE):
        snapshots.step()
        snapshots.wait()
    dist.barrier()
    used = torch.tensor(time.process_time() - started)
    dist.all_reduce(used)
    return float(used) / SNAPSHOTS_ALONE


# Restarts


def train_for_restart(options: argparse.Namespace, times: dict[str, float]) -> None:
    """Load, and train until killed; write down times."""
    rank, kind = dist.get_rank(), options.kind
    training = Training(options.model, options.batch_size)
    folder = f"{options.memory}/host-{rank}" if kind.startswith("memory") else f"{options.memory}/none-{rank}"
    os.environ["GROUP_RANK"] = str(rank)
    snapshots = Snapshots(training.ddp, training.optimizer, folder=folder, every=4, fallback=options.disk)
    times["build"] = time.time()
    loaded = snapshots.load()
    times["load"] = time.time()
    training.step()
    snapshots.step()
    times["first step"] = time.time()
    Path(options.result).with_suffix(f".{rank}").write_text(json.dumps(times))
    while snapshots.steps < 9:  # one or two snapshots, then the checkpoint, then steps until killed
        training.step()
        snapshots.step()
        snapshots.wait()
    if loaded is None:
        snapshots.save(keep=1)
    dist.barrier()
    Path(options.result).with_suffix(f".{rank}.ready").touch()
    while True:
        training.step()


def restart(options: argparse.Namespace, kind: str, folder: Path) -> dict[str, float]:
    """Start a job, kill a rank, start again; seconds."""
    memory, disk = Path(tempfile.mkdtemp(dir="/dev/shm")), folder / "disk"
    try:
        processes = start(options, "memory", memory, disk, folder / "first")
        wait_for([folder / f"first.{rank}.ready" for rank in range(RANKS)], processes)
        killed = time.time()
        processes[1].send_signal(signal.SIGKILL)
        for process in processes:
            process.wait(60)
        if kind == "memory, a host lost":
            shutil.rmtree(memory / "host-1")
        if kind == "disk, cold":
            drop_from_cache(disk)
        gone = time.time()
        processes = start(options, kind, memory, disk, folder / "second")
        wait_for([folder / f"second.{rank}" for rank in range(RANKS)], processes)
        times = [json.loads((folder / f"second.{rank}").read_text()) for rank in range(RANKS)]
        for process in processes:
            process.kill()
            process.wait()
        ends = [killed, gone, *(max(one[stage] for one in times) for stage in list(STAGES)[1:])]
        stages = {stage: end - begin for stage, begin, end in zip(STAGES, ends[:-1], ends[1:], strict=True)}
        return {**stages, "kill to first step": ends[-1] - killed}
    finally:
        shutil.rmtree(memory, ignore_errors=True)


def start(
    options: argparse.Namespace, kind: str, memory: Path, disk: Path, result: Path
) -> list["subprocess.Popen[bytes]"]:
    """Start both ranks of a restartable job."""
    own = ["--rank-program", f"--kind={kind}", f"--memory={memory}", f"--disk={disk}", f"--result={result}"]
    given = [f"--model={options.model}", f"--batch-size={options.batch_size}"]
    rendezvous = f"--rendezvous={result}.rendezvous"
    return [
        subprocess.Popen([sys.executable, "-m", "benchmarks.snapshots", *own, *given, rendezvous, f"--rank={rank}"])
        for rank in range(RANKS)
    ]


def wait_for(paths: list[Path], processes: list["subprocess.Popen[bytes]"]) -> None:
    """Wait for files that the ranks write."""
    deadline = time.monotonic() + 300
    while not all(path.exists() and (path.suffix == ".ready" or path.stat().st_size) for path in paths):
        if time.monotonic() > deadline or any(process.poll() is not None for process in processes):
            raise RuntimeError("Expected both ranks to train, got one that has ended.")
        time.sleep(0.01)


def drop_from_cache(folder: Path) -> None:
    """Let the next reads of these files come from the disk."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


# Telling


def cost_table(cost: dict[str, Any]) -> str:
    """Markdown."""
    rows = [
        "| mode | ms per step, median | ratio to none, median (quartiles) | CPU ms per step | ratio to none |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name in cost["rounds"]:
        cells = []
        for kind in ("rounds", "cpu"):
            seconds, base = cost[kind][name], cost[kind][NONE]
            low, middle, high = statistics.quantiles([one / two for one, two in zip(seconds, base, strict=True)], n=4)
            cells.append(f"{1000 * statistics.median(seconds) / cost['block']:.0f}")
            cells.append("1" if name == NONE else f"{middle:.3f} ({low:.3f} to {high:.3f})")
        rows.append(f"| {name} | {' | '.join(cells)} |")
    rows += [
        "",
        "| one snapshot | ms in the loop, median | CPU ms of both ranks, without steps |",
        "| --- | --- | --- |",
    ]
    for name, one in cost["in loop"].items():
        rows.append(f"| {name} | {1000 * statistics.median(one):.1f} | {1000 * cost['cpu alone'][name]:.1f} |")
    late = [f"{one['late_snapshots']:.0f} {name}" for name, one in cost["numbers"].items()]
    rows += [
        "",
        f"Parameters and state: {cost['bytes'] / 1e6:.0f} MB. Left out because the one before was not written: ",
    ]
    return "\n".join(rows) + ", ".join(late) + "."


def restart_table(restarts: dict[str, list[dict[str, float]]]) -> str:
    """Markdown."""
    columns = ["kill to first step", *STAGES]
    rows = [f"| restart from | s from {' | '.join(columns)} |", "| --- " * (len(columns) + 1) + "|"]
    for kind, times in restarts.items():
        cells = [statistics.median(one[name] for one in times) for name in columns]
        rows.append(f"| {kind} | " + " | ".join(f"{cell:.2f}" for cell in cells) + " |")
    return "\n".join([*rows, "", *(f"- {stage}: {end}" for stage, end in STAGES.items())])


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", choices=list(MODELS), default="26m")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9, help="blocks of each mode, after one to warm up; 0: none")
    parser.add_argument("--block", type=int, default=10, help="steps of a block; the first one takes a snapshot")
    parser.add_argument("--restarts", type=int, default=3, help="of each kind; 0: none")
    for name in ("kind", "memory", "disk", "result", "rendezvous"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rank-program", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        run_rank(options)
        return
    parts = {
        "cost": (options.rounds, all_costs, cost_table),
        "restarts": (options.restarts, all_restarts, restart_table),
    }
    for part, (times, measure, table) in parts.items():
        if not times:
            continue
        load = os.getloadavg()[0]
        found = measure(options)
        facts = [
            f"date: {date.today()}",
            f"command: {PROGRAM} {' '.join(sys.argv[1:])}".rstrip(),
            f"torch {torch.__version__}, {os.cpu_count()} cores; load average {load:.1f} before the run",
            f"model {options.model}, batches of {options.batch_size}, {RANKS} Gloo ranks; {times} of each",
        ]
        text = "\n".join([*(f"- {fact}" for fact in facts), "", table(found), ""])
        sys.stdout.write(text)
        block = "" if part == "restarts" or options.block == 10 else f"-every{options.block}"
        stem = f"snapshots-{options.model}-{RANKS}ranks-{part}{block}"
        (RESULTS / f"{stem}.md").write_text(text)
        (RESULTS / f"{stem}.json").write_text(json.dumps({"facts": facts, part: found}, indent=1) + "\n")


def all_costs(options: argparse.Namespace) -> dict[str, Any]:
    """What rank 0 has measured of the costs."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        result = Path(folder) / "cost"
        if any(process.wait() for process in start_cost(options, Path(memory), result)):
            raise RuntimeError("Expected both ranks to end well, got a failure.")
        found: dict[str, Any] = json.loads(result.read_text())
        return found


def all_restarts(options: argparse.Namespace) -> dict[str, Any]:
    """Times of restarts of each kind."""
    found: dict[str, Any] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(options.restarts):
            for kind in KINDS:
                place = Path(folder) / f"{turn}-{KINDS.index(kind)}"
                place.mkdir()
                found[kind].append(restart(options, kind, place))
                shutil.rmtree(place)
    return found


def start_cost(options: argparse.Namespace, memory: Path, result: Path) -> list["subprocess.Popen[bytes]"]:
    """Start both ranks of the measurement of costs."""
    own = [f"--memory={memory}", f"--result={result}", f"--rendezvous={result}.rendezvous"]
    given = [f"--model={options.model}", f"--batch-size={options.batch_size}", f"--rounds={options.rounds}"]
    given.append(f"--block={options.block}")
    command = [sys.executable, "-m", "benchmarks.snapshots", *own, *given]
    return [subprocess.Popen([*command, f"--rank={rank}"]) for rank in range(RANKS)]


def run_rank(options: argparse.Namespace) -> None:
    """The program of a rank."""
    times = {"imports": time.time()}
    torch.set_num_threads(1)
    rendezvous = Path(options.rendezvous).absolute().as_uri()
    dist.init_process_group("gloo", init_method=rendezvous, rank=options.rank, world_size=RANKS)
    times["rendezvous"] = time.time()
    if options.rank_program:
        train_for_restart(options, times)
        return
    found = measure_cost(options)
    if options.rank == 0:
        Path(options.result).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
