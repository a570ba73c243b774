"""Peak memory of every mode, each in separate processes, on a model of 256 MiB of parameters.

    python -m benchmarks.memory
    python -m benchmarks.memory --ranks 4 --layers 16

Every mode trains the same model on the same data from the same seed on Gloo ranks of this machine. The baseline is a
rank's resident memory after the group is formed and something tiny was trained in the same mode, so that code and its
one-time allocations are there. The peak is the kernel's high-water mark of resident memory, over all steps and from the
third step on, less the baseline. Beside it stands the estimate of `ddp_zero.estimate` for a meta model.

Freed memory goes back to the kernel at once (glibc's ``MALLOC_MMAP_THRESHOLD_`` is set to 1 MiB), so that resident
memory is memory in use. ``--keep-malloc`` leaves glibc unchanged; it then keeps some freed memory.
"""

import json
import os
import platform
import sys
import tempfile
import warnings
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from benchmarks.race.report import commit
from ddp_zero import ZeroRedundancyOptimizer, estimate, shard_optimizer

PROGRAM = "python -m benchmarks.memory"
RESULTS = Path(__file__).parent / "results"
WIDTH = 2048  # a layer of it is 16 MiB in fp32
MIB = 2**20
OPTIONS: dict[str, Any] = {"lr": 1e-4, "fused": True}
FIRST_STEPS = 2  # in which DDP shows its buckets


def torchs_zero(ddp: DistributedDataParallel) -> Optimizer:
    """Torch's own, with bucket views; importing it warns about its TorchScript."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
    return TorchZero(ddp.parameters(), AdamW, parameters_as_bucket_view=True, **OPTIONS)


def standalone(ddp: DistributedDataParallel) -> Optimizer:
    """Stage 1, stepped after backward."""
    return ZeroRedundancyOptimizer(ddp.parameters(), AdamW, parameters_as_bucket_view=True, **OPTIONS)


MODES: dict[str, Callable[[DistributedDataParallel], Optimizer]] = {
    "DDP + fused AdamW": lambda ddp: AdamW(ddp.parameters(), **OPTIONS),
    "torch ZeroRedundancyOptimizer, bucket views": torchs_zero,
    "ddp_zero stage 1": standalone,
    "ddp_zero stage 1, overlapped": lambda ddp: shard_optimizer(ddp, AdamW, **OPTIONS),
    "ddp_zero stage 2": lambda ddp: shard_optimizer(ddp, AdamW, stage=2, **OPTIONS),
    "ddp_zero stage 2, whole parameters": lambda ddp: shard_optimizer(
        ddp, AdamW, stage=2, partition="parameters", **OPTIONS
    ),
    "ddp_zero stage 2, step after backward": lambda ddp: shard_optimizer(ddp, AdamW, stage=2, overlap=False, **OPTIONS),
}
ESTIMATED = dict(
    zip(
        MODES,
        (
            *("DDP", "stage 1", "stage 1", "stage 1, inside backward, cut"),
            *("stage 2, inside backward, cut", "stage 2, inside backward", "stage 2, after backward"),
        ),
        strict=True,
    )
)
"""The mode of `ddp_zero.estimate` that each is; torch's own needs what stage 1 does."""


class Tower(nn.Module):
    """Wide layers and few samples: parameters, gradients and state are nearly all there is."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])

    def forward(self, inputs: Tensor) -> Tensor:
        """One layer after the other."""
        for layer in self.layers:
            inputs = torch.tanh(layer(inputs))
        return inputs


def resident(field: str) -> int:
    """Bytes of this process's resident memory: ``VmRSS`` now, ``VmHWM`` at most since `forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def forget_peak() -> None:
    """Reset the high-water mark to the present resident memory."""
    Path("/proc/self/clear_refs").write_text("5")


def measure(rank: int, mode: str, options: Namespace, folder: str) -> None:
    """The program of a rank; it writes its bytes to a file."""
    torch.set_num_threads(1)
    rendezvous = (Path(folder) / "rendezvous").as_uri()
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=options.ranks)
    warm_up(mode)
    dist.barrier()
    baseline = resident("VmRSS")
    forget_peak()
    torch.manual_seed(0)
    model = Tower(options.layers)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = MODES[mode](ddp)
    data = torch.Generator().manual_seed(rank)
    peak_at_first = 0
    for step in range(FIRST_STEPS + options.steps):
        if step == FIRST_STEPS:
            peak_at_first = resident("VmHWM")
            forget_peak()
        ddp(torch.randn(2, WIDTH, generator=data)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    peak = resident("VmHWM")
    found = {
        "whole run": max(peak, peak_at_first) - baseline,
        "from the third step": peak - baseline,
        "parameters": sum(param.nbytes for param in model.parameters()),
        "own state": state_bytes(optimizer),
        "explained": optimizer.explain().splitlines()[:3] if isinstance(optimizer, ZeroRedundancyOptimizer) else [],
        "checksum": float(torch.stack([param.detach().double().sum() for param in model.parameters()]).sum()),
    }
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def warm_up(mode: str) -> None:
    """Train something tiny, so that a mode's code and its one-time allocations are in memory."""
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), gradient_as_bucket_view=True)
    optimizer = MODES[mode](ddp)
    for _ in range(FIRST_STEPS + 1):
        torch.tanh(ddp(torch.randn(2, 8))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def state_bytes(optimizer: Optimizer) -> int:
    """Bytes of optimizer state that this rank keeps."""
    local = getattr(optimizer, "optim", optimizer)
    return sum(
        value.nbytes for values in local.state.values() for value in values.values() if isinstance(value, Tensor)
    )


def estimated(options: Namespace) -> dict[str, int]:
    """Bytes that `ddp_zero.estimate` finds for each mode, from the third step on."""
    with torch.device("meta"):
        model = Tower(options.layers)
    found = estimate(model, AdamW, ranks=options.ranks, device="cpu", **OPTIONS)
    return {mode: found[name].total for mode, name in ESTIMATED.items()}


def table(found: dict[str, list[dict[str, Any]]], expected: dict[str, int]) -> str:
    """Markdown: one row per mode; MiB of the rank that needs most."""
    rows = [
        "| mode | peak over the whole run | peak from the third step | estimated | measured / estimated |",
        "| --- | --- | --- | --- | --- |",
    ]
    for mode, ranks in found.items():
        peak = max(rank["from the third step"] for rank in ranks)
        cells = [max(rank["whole run"] for rank in ranks), peak, expected[mode]]
        shown = " | ".join(f"{cell / MIB:.0f}" for cell in cells)
        rows.append(f"| {mode} | {shown} | {peak / expected[mode]:.3f} |")
    return "\n".join(rows)


def main() -> None:
    """Measure every mode, print the table, store it with the raw bytes."""
    parser = ArgumentParser(
        prog=PROGRAM, description=__doc__.splitlines()[0], formatter_class=ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=16, help="of 16 MiB each")
    parser.add_argument("--steps", type=int, default=4, help="after the first two")
    parser.add_argument("--keep-malloc", action="store_true", help="leave glibc's allocator as it is")
    options = parser.parse_args()
    if not options.keep_malloc:
        os.environ["MALLOC_MMAP_THRESHOLD_"] = str(MIB)
    if not Path("/proc/self/clear_refs").exists():
        parser.error("Expected Linux, whose /proc/self/clear_refs resets the peak of resident memory.")
    found: dict[str, list[dict[str, Any]]] = {}
    for mode in MODES:
        with tempfile.TemporaryDirectory() as folder:
            spawn(measure, args=(mode, options, folder), nprocs=options.ranks)
            found[mode] = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(options.ranks)]
    parameters = found["DDP + fused AdamW"][0]["parameters"]
    sums = {mode: {rank["checksum"] for rank in ranks} for mode, ranks in found.items()}
    agree = "all modes and ranks end with the same parameters" if len(set.union(*sums.values())) == 1 else f"{sums}"
    facts = [
        f"date: {date.today()}",
        f"commit: {commit()}",
        f"command: {PROGRAM} {' '.join(sys.argv[1:])}".rstrip(),
        f"versions: torch {torch.__version__}, Python {platform.python_version()}; {os.cpu_count()} cores",
        f"model: {parameters / MIB:.0f} MiB of parameters in layers of 16 MiB, DDP's default buckets, {options.ranks} "
        "Gloo ranks; MiB of resident memory above a rank's own before this model is built, of the rank that needs most",
        f"sums of the parameters after the run: {agree}",
    ]
    text = "\n".join([*(f"- {fact}" for fact in facts), "", table(found, estimated(options)), ""])
    print(text)
    RESULTS.mkdir(exist_ok=True)
    stem = f"memory-{options.ranks}ranks{'-keep-malloc' if options.keep_malloc else ''}"
    (RESULTS / f"{stem}.md").write_text(text)
    (RESULTS / f"{stem}.json").write_text(json.dumps({"facts": facts, "found": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
