"""Measurements of one rank of `compare`: time, bytes sent, memory."""

import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from benchmarks.race.contestants import ALONE, ALONE_NAME, MODES, OPTIONS, REFERENCE, Mode
from benchmarks.race.link import INTERFACE, bytes_from_node
from benchmarks.race.models import MODELS

Job = dict[str, Any]
"""What the command line asked for: model, batch_size, ranks, rounds, steps, modes, gbit; in a memory phase mode."""

WARM_UP = 4  # steps: DDP rebuilds its buckets in the second
WIRE_STEPS = 2
FIRST_STEPS = 2  # in which DDP shows its buckets
MEMORY_STEPS = 4
PHASE_STEPS = 4
PROBE_SECONDS = 0.3


class Measured:
    """A contestant that is fed and timed.

    Args:
        mode: the way to train.
        job: model and batch size.
    """

    def __init__(self, mode: Mode, job: Job) -> None:
        self.task, self.batch_size = MODELS[job["model"]], job["batch_size"]
        torch.manual_seed(0)
        self.contestant = mode.build(self.task.build())
        self.data = torch.Generator().manual_seed(1 + dist.get_rank())

    def steps(self, count: int = 1) -> float:
        """Training steps, on the data that every mode sees, and all that they send; seconds of each on this rank."""
        batches = [self.task.draw(self.batch_size, self.data) for _ in range(count)]
        dist.barrier()
        started = time.perf_counter()
        for batch in batches:
            self.contestant.train(batch)
        self.contestant.settle()
        return (time.perf_counter() - started) / count


def slowest(seconds: float) -> float:
    """Of all ranks."""
    mine = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    return mine.item()


def of_all_ranks(number: float) -> list[float]:
    """In rank order."""
    mine = torch.tensor([number], dtype=torch.float64)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return torch.cat(everyone).tolist()


# Time and bytes


def race(job: Job) -> dict[str, Any]:
    """All modes in turns, in these processes."""
    names: list[str] = job["modes"]
    rate = probe(job["gbit"]) if job["gbit"] else None
    field = {name: Measured(MODES[name], job) for name in names}
    order = random.Random(0)
    for measured in field.values():
        measured.steps(WARM_UP)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    phases: list[dict[str, float]] = []
    for _ in range(job["rounds"]):
        for name in order.sample(names, k=len(names)):
            seconds[name].append(slowest(field[name].steps(job["steps"])))
        phases.append(time_phases(field[REFERENCE]))
    sent, crossed = {}, {}
    for name in names:
        own, of_node = sent_per_step(field[name], job["nodes"])
        sent[name] = of_all_ranks(own)
        crossed[name] = of_all_ranks(of_node)[:: job["ranks"] // max(1, len(job["nodes"]))]
    differences = compare_parameters(field, job)
    model = describe(field[REFERENCE].contestant.model)
    modes = {
        name: {
            "seconds": seconds[name],
            "sent_bytes": sent[name],
            "difference": differences[name],
            **({"bytes_between_nodes": crossed[name]} if job["nodes"] else {}),
        }
        for name in names
    }
    medians = {part: statistics.median(one[part] for one in phases) for part in phases[0]}
    return {"model": model, "modes": modes, "phases": medians, "rate": rate}


def sent_per_step(measured: Measured, nodes: Sequence[str] = ()) -> tuple[float, float]:
    """Bytes that this rank sends, and that its node sends to other nodes, on average over some steps."""
    dist.barrier()
    node = nodes[dist.get_rank() * len(nodes) // dist.get_world_size()] if nodes else None
    before = sent_bytes(), 0 if node is None else bytes_from_node(node)
    dist.barrier()  # nobody sends while counters are read
    measured.steps(WIRE_STEPS)
    dist.barrier()
    after = sent_bytes(), 0 if node is None else bytes_from_node(node)
    return (after[0] - before[0]) / WIRE_STEPS, (after[1] - before[1]) / WIRE_STEPS


def sent_bytes() -> int:
    """So far: by this rank's own interface, headers and all; without one, by this process, to whatever it writes."""
    counter = Path("/sys/class/net") / INTERFACE / "statistics" / "tx_bytes"
    if counter.exists():
        return int(counter.read_text())
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("wchar"))


def probe(gbit: float) -> float:
    """The rate in Gbit/s at which every rank sends to the next rank while it receives from the rank before."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sent = torch.zeros(int(gbit * 1e9 / 8 * PROBE_SECONDS), dtype=torch.uint8)
    received = torch.empty_like(sent)
    elapsed = 0.0
    for _ in range(2):  # the first one opens TCP's window
        dist.barrier()
        started = time.perf_counter()
        works = [dist.irecv(received, (rank - 1) % size), dist.isend(sent, (rank + 1) % size)]
        for work in works:
            assert work is not None, "this rank is in the group"
            work.wait()
        elapsed = slowest(time.perf_counter() - started)
    return 8 * sent.numel() / elapsed / 1e9


def compare_parameters(field: dict[str, Measured], job: Job) -> dict[str, float]:
    """The largest difference of each mode to its base, on any rank. Raises where a parameter has not moved."""
    torch.manual_seed(0)
    initial = [param.detach() for param in MODELS[job["model"]].build().parameters()]
    differences = {}
    for name, measured in field.items():
        base = field[MODES[name].base].contestant.whole_parameters()
        largest = torch.zeros(())
        triples = zip(initial, measured.contestant.whole_parameters(), base, strict=True)
        for number, (first, mine, other) in enumerate(triples):
            if torch.equal(first, mine):
                raise RuntimeError(f"Expected parameter {number} of {name} to move in training, got what it was.")
            largest = torch.maximum(largest, (mine - other).abs().max())
        differences[name] = slowest(largest.item())
    return differences


def describe(ddp: nn.Module) -> dict[str, Any]:
    """Numbers of the model, and DDP's final buckets in the order in which they are reduced."""
    params = list(ddp.parameters())
    return {
        "parameters": sum(param.numel() for param in params),
        "parameter_bytes": sum(param.nbytes for param in params),
        "tensors": len(params),
        "bucket_bytes": bucket_bytes(ddp),
        "block_bytes": sum_by_block(ddp),
    }


def bucket_bytes(ddp: nn.Module) -> list[int]:
    """As DDP tells them for its log."""
    assert isinstance(ddp, DistributedDataParallel), "of the reference"
    told = ddp._get_ddp_logging_data()
    return [int(size) for size in (told.get("rebuilt_bucket_sizes") or told["bucket_sizes"]).split(",")]


def sum_by_block(ddp: nn.Module) -> list[int]:
    """For each unit that FSDP shards at once: every block, and the rest."""
    blocks = [
        sum(param.nbytes for param in block.parameters()) for block in ddp.get_submodule("module.blocks").children()
    ]
    return [*blocks, sum(param.nbytes for param in ddp.parameters()) - sum(blocks)]


def time_phases(reference: Measured) -> dict[str, float]:
    """Seconds of parts of a step that send nothing, while all ranks compute at once: the best of some times.

    The first of them find memory as another mode has left it. The model stays as it was.
    """
    ddp = reference.contestant.model
    assert isinstance(ddp, DistributedDataParallel), "the reference is DDP"
    params = list(ddp.parameters())
    twins = [param.detach().clone().requires_grad_() for param in params]
    optimizer = AdamW(twins, **OPTIONS)
    batch = reference.task.draw(reference.batch_size, torch.Generator().manual_seed(0))
    loss = torch.zeros(())

    def forward() -> None:
        nonlocal loss
        loss = ddp(*batch)

    def step() -> None:
        for twin, param in zip(twins, params, strict=True):
            twin.grad = param.grad
        optimizer.step()

    seconds: dict[str, list[float]] = {"forward": [], "backward": [], "adamw": []}
    with ddp.no_sync():
        for _ in range(PHASE_STEPS):
            for name, act in (("forward", forward), ("backward", lambda: loss.backward()), ("adamw", step)):
                dist.barrier()
                started = time.perf_counter()
                act()
                seconds[name].append(slowest(time.perf_counter() - started))
            ddp.zero_grad()
    return {name: min(values) for name, values in seconds.items()}


# Memory


def resident(field: str) -> int:
    """Bytes of this process's resident memory: ``VmRSS`` now, ``VmHWM`` at most since `forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def forget_peak() -> None:
    """Reset the high-water mark to the present resident memory."""
    Path("/proc/self/clear_refs").write_text("5")


def measure_memory(job: Job) -> dict[str, int]:
    """One mode, in a separate process: peaks above the memory before the model, and the rank's own state."""
    mode = ALONE if job["mode"] == ALONE_NAME else MODES[job["mode"]]
    mode.import_package()
    dist.barrier()
    baseline = resident("VmRSS")
    forget_peak()
    measured = Measured(mode, job)
    peak_at_first = 0
    for step in range(FIRST_STEPS + MEMORY_STEPS):
        if step == FIRST_STEPS:
            peak_at_first = resident("VmHWM")
            forget_peak()
        measured.steps()
    peak = resident("VmHWM")
    return {
        "peak": peak - baseline,
        "peak_whole_run": max(peak, peak_at_first) - baseline,
        "state": measured.contestant.state_bytes(),
    }
