"""One rank of `compare`, which starts it: ``python -m benchmarks.gpu.rank FOLDER RANK``.

The folder has the job in ``job.json``; the results are written there.
"""

import ctypes
import gzip
import hashlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.contestants import modes, whole_parameters
from benchmarks.gpu.machines import Machine, choose, send_to_itself
from benchmarks.gpu.models import BUCKET_MIB, CHECKED_BUCKET_MIB, LAUNCH_BOUND, MODELS
from benchmarks.race.contestants import OPTIONS, Contestant, Mode
from benchmarks.race.models import Batch, Task

PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>
TIME_OUT = timedelta(minutes=5)
OUT_OF_MEMORY = 75
"""Exit code of a rank that has not enough."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CHECKED_STEPS = 6
CHECKED_LR = 0.01  # so that a norm's weight of 1 moves in bf16
WARM_UP = 4  # steps: DDP rebuilds its buckets in the second
WATCHED_STEPS = 2

Job = dict[str, Any]


class Trained:
    """A contestant on its device, and its data.

    Args:
        mode: the way to train.
        task: model and data.
        device: this rank's.
        batch_size: of this rank.
    """

    def __init__(self, mode: Mode, task: Task, device: torch.device, batch_size: int) -> None:
        torch.manual_seed(0)
        with device:
            model = task.build()
        self.contestant: Contestant = mode.build(model)
        self._task, self._device, self._batch_size = task, device, batch_size
        self._data = torch.Generator().manual_seed(1 + dist.get_rank())

    def batches(self, count: int) -> list[Batch]:
        """The next ones, on the device; the same for every mode."""
        drawn = [self._task.draw(self._batch_size, self._data) for _ in range(count)]
        return [tuple(part.to(self._device) for part in batch) for batch in drawn]

    def train(self, batches: list[Batch]) -> None:
        """A step with each, and all that they send."""
        for batch in batches:
            self.contestant.train(batch)
        self.contestant.settle()

    def seconds(self, batches: list[Batch]) -> float:
        """Of a step on average, until the slowest device is done."""
        torch.accelerator.synchronize()
        dist.barrier()
        started = time.perf_counter()
        self.train(batches)
        torch.accelerator.synchronize()
        return _largest((time.perf_counter() - started) / len(batches))


def check(job: Job, machine: Machine, device: torch.device) -> dict[str, Any]:
    """Every mode beside the mode that it must equal, after every step, on a small model in several buckets."""
    task, available = MODELS[job["model"]], modes(DTYPES[job["dtype"]], CHECKED_BUCKET_MIB)
    OPTIONS["lr"] = CHECKED_LR  # of all modes in this process
    steps: dict[str, list[list[Tensor]]] = {}
    found: dict[str, Any] = {}
    for name in job["modes"]:
        before = len(machine.races())
        trained = Trained(available[name], task, device, job["batch_size"])
        first = whole_parameters(trained.contestant)
        after = []
        for batch in trained.batches(CHECKED_STEPS):
            trained.train([batch])
            after.append(whole_parameters(trained.contestant))
        if available[name].base == name:
            steps[name] = after
        found[name] = {
            "difference": _largest(_difference(after, steps[available[name].base])),
            "digest": _digest(after),
            "still": sum(torch.equal(one, other) for one, other in zip(first, after[-1], strict=True)),
            "races": machine.races()[before:],
        }
    return found


def _difference(steps: list[list[Tensor]], base: list[list[Tensor]]) -> float:
    pairs = [pair for both in zip(steps, base, strict=True) for pair in zip(*both, strict=True)]
    return max((one - other).abs().max().nan_to_num(nan=float("inf")).item() for one, other in pairs)


def _digest(steps: list[list[Tensor]]) -> str:
    total = hashlib.sha256()
    for param in (param for step in steps for param in step):
        total.update(param.contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def measure(job: Job, machine: Machine, device: torch.device) -> dict[str, Any]:
    """Time, memory and host synchronisations of one mode, in processes of its own."""
    mode = modes(DTYPES[job["dtype"]], BUCKET_MIB.get(job["model"]))[job["mode"]]
    if job["model"] == LAUNCH_BOUND and job["ranks"] == 1:
        send_to_itself()  # or there would be less to start than by several
    trained = Trained(mode, MODELS[job["model"]], device, job["batch_size"])
    trained.train(trained.batches(WARM_UP))
    batches = trained.batches(job["steps"])
    torch.accelerator.synchronize()
    machine.forget_peak()
    seconds = trained.seconds(batches)
    found: dict[str, Any] = {
        "seconds": seconds,
        "peak_bytes": machine.peak_bytes(),
        "state_bytes": trained.contestant.state_bytes(),
        "parameters": sum(param.numel() for param in trained.contestant.model.parameters()),
    }
    batches = trained.batches(WATCHED_STEPS)
    with machine.syncs() as syncs:
        trained.train(batches)
    found["syncs"] = list(syncs)
    if job["timeline"] and dist.get_rank() == 0:
        with _timeline(Path(job["timeline"])):
            trained.train(batches)
    elif job["timeline"]:
        trained.train(batches)
    return found


@contextmanager
def _timeline(file: Path) -> Iterator[None]:
    """Leave a trace for chrome://tracing or Perfetto."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profile(activities=activities) as profiler:
        yield
        torch.accelerator.synchronize()
    plain = file.with_suffix("")
    profiler.export_chrome_trace(str(plain))
    with plain.open("rb") as source, gzip.open(file, "wb") as target:
        shutil.copyfileobj(source, target)
    plain.unlink()


def _largest(number: float) -> float:
    """Of all ranks."""
    mine = torch.tensor([number], dtype=torch.float64)
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    return mine.item()


def main() -> None:
    """Join the job, run it, write the results to a file."""
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # nobody would end a rank whose parent was killed
    job: Job = json.loads((folder / "job.json").read_text())
    torch.set_num_threads(1)
    machine = choose(job, folder)
    device = machine.choose(rank)
    if job["phase"] == "check":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # makes cuBLAS deterministic
        torch.use_deterministic_algorithms(True)
    rendezvous = (folder / "rendezvous").as_uri()
    dist.init_process_group(
        machine.backend, init_method=rendezvous, rank=rank, world_size=job["ranks"], timeout=TIME_OUT
    )
    try:
        found = {"check": check, "measure": measure}[job["phase"]](job, machine, device)
    except torch.OutOfMemoryError as error:
        sys.stderr.write(f"{error}\n")
        sys.stderr.flush()
        os._exit(OUT_OF_MEMORY)  # the others wait for this rank; the launcher ends them
    (folder / f"found-{rank}.json").write_text(json.dumps({**found, "device": machine.name}))
    dist.barrier()
    sys.stderr.flush()
    os._exit(0)  # threads of process groups live as long as anything refers to them


if __name__ == "__main__":
    main()
