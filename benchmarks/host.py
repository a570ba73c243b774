"""CPU time of a rank's main thread per bucket and per parameter, beside DDP with a hook that only all-reduces.

    python -m benchmarks.host

Two Gloo ranks of one thread each on this machine, over loopback. That thread runs backward, and on an accelerator
launches its kernels. Only the time in which it computes counts, not the time in which it waits. Every mode trains the
same model in buckets of one small layer each, in turn with the others; a bucket's time is the difference to DDP divided
by the number of buckets, and a parameter's the growth of that with the number of parameters in a bucket, between two
numbers at which both ranks own parameters of every bucket. DDP with a fused AdamW, which steps every parameter on every
rank, shows torch's part of the time per parameter.
"""

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.futures import Future
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from ddp_zero import shard_optimizer
from ddp_zero.core.comm.communicator import Communicator

RESULTS = Path(__file__).parent / "results"
RANKS, BUCKETS, WIDTH = 2, 48, 64
FEW, MANY = 8, 32  # parameters in a bucket
ROUNDS, STEPS, FIRST_STEPS = 7, 3, 10
LR = 1e-6  # the loss has no minimum

Found = dict[str, float]
Loop = Callable[[], None]


class Layer(nn.Module):
    """A matrix product and, apart from that, vectors that are added."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        # keeps the size of activations: a CPU takes many times as long for gradients below the normal numbers
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.shifts = nn.ParameterList(nn.Parameter(torch.zeros(WIDTH)) for _ in range(parameters - 1))

    def forward(self, x: Tensor) -> Tensor:
        """Shape (N, WIDTH) to the same."""
        x = x @ self.weight
        for shift in self.shifts:
            x = x + shift
        return x


def model(parameters: int) -> nn.Sequential:
    """Layers of one size."""
    torch.manual_seed(0)
    return nn.Sequential(*[Layer(parameters) for _ in range(BUCKETS)])


def ddp_model(parameters: int) -> DistributedDataParallel:
    """DDP over `model`, a bucket per layer, gradients as views of its buckets."""
    whole = model(parameters)
    cap = sum(param.nbytes for param in next(whole.children()).parameters()) / 2**20
    return DistributedDataParallel(whole, bucket_cap_mb=cap, gradient_as_bucket_view=True)


def loop(forward: nn.Module, opt: torch.optim.Optimizer | None) -> Loop:
    """One iteration; ``opt`` is None where something else steps."""
    x = torch.randn(4, WIDTH)

    def iterate() -> None:
        forward(x).sum().backward()
        if opt is not None:
            opt.step()
            opt.zero_grad()
        else:
            forward.zero_grad()

    return iterate


def all_reducing(parameters: int) -> Loop:
    """The yardstick: plain DDP, a Python hook, no optimizer at all."""
    ddp = ddp_model(parameters)

    def hook(_: object, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
        future: Future[Any] = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return future.then(lambda done: done.value()[0].div_(RANKS))

    ddp.register_comm_hook(None, hook)
    return loop(ddp, None)


def sharded(parameters: int, **options: Any) -> Loop:
    """This library."""
    ddp = ddp_model(parameters)
    return loop(ddp, shard_optimizer(ddp, AdamW, lr=LR, fused=True, **options))


def plain(parameters: int) -> Loop:
    """DDP without a hook, and the whole optimizer on every rank."""
    ddp = ddp_model(parameters)
    return loop(ddp, AdamW(ddp.parameters(), lr=LR, fused=True))


def fsdp(parameters: int) -> Loop:
    """FSDP2 without resharding, a group per layer."""
    whole = model(parameters)
    mesh = dist.device_mesh.init_device_mesh("cpu", (RANKS,))
    for layer in whole:
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    fully_shard(whole, mesh=mesh, reshard_after_forward=False)
    return loop(whole, AdamW(whole.parameters(), lr=LR, fused=True))


MODES: dict[str, Callable[[int], Loop]] = {
    "DDP, all-reduce in a hook": all_reducing,
    "DDP, fused AdamW": plain,
    "stage 1, interleaved": lambda parameters: sharded(parameters, stage=1),
    "stage 2, interleaved": lambda parameters: sharded(parameters, stage=2),
    "stage 2, cut parameters": lambda parameters: sharded(parameters, stage=2, partition="elements"),
    "stage 2, sync in forward": lambda parameters: sharded(parameters, stage=2, sync="forward"),
    "stage 2, clipped": lambda parameters: sharded(parameters, stage=2, max_grad_norm=1.0),
    "FSDP2": fsdp,
}
BASE = next(iter(MODES))


def microseconds(act: Callable[[], object], repeats: int) -> float:
    """Of this thread, for one call."""
    dist.barrier()
    started = time.thread_time_ns()
    for _ in range(repeats):
        act()
    return (time.thread_time_ns() - started) / 1e3 / repeats


def per_iteration(parameters: int, modes: list[str]) -> dict[str, list[float]]:
    """Microseconds per iteration of each mode, in rounds."""
    loops = {name: MODES[name](parameters) for name in modes}
    for iterate in loops.values():
        for _ in range(FIRST_STEPS):
            iterate()
    gc.collect()
    gc.freeze()  # or a collection would count for whoever happens to cause it
    rounds: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(ROUNDS):
        for name, iterate in loops.items():
            rounds[name].append(microseconds(iterate, STEPS))
    return rounds


def torch_calls() -> Found:
    """Microseconds of the calls that a bucket of stage 2 needs: a message each way, twice, and a fused step."""
    comm = Communicator(None)
    peer = 1 - dist.get_rank()
    sent, received, half = torch.zeros(WIDTH * WIDTH // 2), torch.empty(WIDTH * WIDTH // 2), WIDTH * WIDTH // 2
    group = comm.process_group

    def exchange() -> None:
        works = [group.recv([received], peer, 1), group.send([sent], peer, 1)]
        for work in works:
            work.wait()

    param = nn.Parameter(torch.zeros(half))
    param.grad = torch.zeros(half)
    opt = AdamW([param], fused=True)
    return {
        name: statistics.median(microseconds(act, 50) for _ in range(ROUNDS))
        for name, act in (
            ("an exchange of two messages", exchange),
            ("a fused AdamW step of one parameter", opt.step),
        )
    }


def measure(rank: int, folder: str, modes: list[str]) -> None:
    """The program of a rank; the first writes the results to a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=(Path(folder) / "rendezvous").as_uri(), rank=rank, world_size=RANKS)
    found = {
        "one": per_iteration(1, modes),
        "few": per_iteration(FEW, modes),
        "many": per_iteration(MANY, modes),
        "torch": torch_calls(),
    }
    if rank == 0:
        (Path(folder) / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def over_ddp(rounds: dict[str, list[float]], name: str) -> float:
    """Microseconds per bucket more than `BASE`, the median over rounds."""
    return statistics.median(one - base for one, base in zip(rounds[name], rounds[BASE], strict=True)) / BUCKETS


def table(found: dict[str, Any]) -> str:
    """Markdown."""
    rows = [
        f"| mode | us per bucket over DDP | us per bucket of {FEW} parameters | of {MANY} | us per parameter |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name in found["one"]:
        one, few, many = (over_ddp(found[size], name) for size in ("one", "few", "many"))
        rows.append(f"| {name} | {one:.0f} | {few:.0f} | {many:.0f} | {(many - few) / (MANY - FEW):.1f} |")
    rows += ["", "| torch's own calls | us |", "| --- | --- |"]
    rows += [f"| {name} | {us:.0f} |" for name, us in found["torch"].items()]
    return "\n".join(rows)


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host")
    parser.add_argument("--modes", nargs="*", choices=list(MODES), help="these, not all; nothing is stored")
    chosen = parser.parse_args().modes
    modes = list(MODES) if chosen is None else [BASE, *(name for name in chosen if name != BASE)]
    with tempfile.TemporaryDirectory() as folder:
        spawn(measure, args=(folder, modes), nprocs=RANKS)
        found = json.loads((Path(folder) / "found.json").read_text())
    facts = f"- date: {date.today()}\n- command: python -m benchmarks.host\n- torch {torch.__version__}\n"
    text = f"{facts}\n{table(found)}\n"
    sys.stdout.write(text)
    if chosen is None:
        (RESULTS / "host-2ranks.md").write_text(text)
        (RESULTS / "host-2ranks.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
