"""Costs of stage 2 beside computing: CPU time of its messages by size of chunk, and passes over all parameters.

    python -m benchmarks.overhead

Two Gloo ranks of one thread each on this machine, over loopback. Messages: four buckets of 26 MB are reduced to their
owners, summed, and the owned halves sent back, in chunks of several sizes, beside all-reduces of the same buckets that
send as many bytes. The time is of all threads of a rank, including the kernel's work for it. Passes: with 2,000
tensors, the work of one iteration for every parameter, in a call of the communication hook or elsewhere.
"""

import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from benchmarks.race.models import MODELS
from ddp_zero import shard_optimizer
from ddp_zero.core.comm import exchange as exchange_module
from ddp_zero.core.comm.communicator import Communicator
from ddp_zero.core.comm.reduction import segment_reduction
from ddp_zero.optimizer import engine_of

RESULTS = Path(__file__).parent / "results"
RANKS, ROUNDS = 2, 5
BUCKETS, NUMEL = 4, 6_500_000
CHUNK_KIB = (128, 512, 1024, 4096, 32768)
FIRST_STEPS = 5

Found = dict[str, dict[str, float]]


def cpu_seconds() -> float:
    """Of all threads of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def median_ms(act: Callable[[], object], clock: Callable[[], float]) -> float:
    """Of one call, on average over the ranks."""
    taken = []
    for _ in range(1 + ROUNDS):  # the first warms up
        dist.barrier()
        started = clock()
        act()
        taken.append(clock() - started)
    mine = torch.tensor([1000 * statistics.median(taken[1:])])
    dist.all_reduce(mine)
    return mine.item() / dist.get_world_size()


def exchange(comm: Communicator, buckets: list[Tensor], recv_buffer: Tensor) -> None:
    """The messages of a step of stage 2."""
    for index, bucket in enumerate(buckets):
        parts = bucket.tensor_split(RANKS)
        own = parts[comm.group_rank]
        segment_reduction(comm, bucket, parts, recv_buffer, (0, index), NUMEL, 1 / RANKS).start(own).wait("a reduction")
        comm.start_all_gather(parts, (0, index)).wait("the sync")


def messages() -> dict[str, float]:
    """CPU milliseconds per rank."""
    comm, buckets, recv_buffer = Communicator(None), [torch.randn(NUMEL) for _ in range(BUCKETS)], torch.empty(NUMEL)
    found = {"all_reduce": median_ms(lambda: [dist.all_reduce(bucket) for bucket in buckets], cpu_seconds)}
    for kib in CHUNK_KIB:
        with mock.patch.object(exchange_module, "CHUNK_BYTES", kib << 10):
            found[f"chunks of {kib} KiB"] = median_ms(lambda: exchange(comm, buckets, recv_buffer), cpu_seconds)
    return found


def passes() -> dict[str, float]:
    """Milliseconds of wall time on a rank."""
    torch.manual_seed(0)
    task, data = MODELS["many"], torch.Generator().manual_seed(dist.get_rank())
    ddp = DistributedDataParallel(task.build(), gradient_as_bucket_view=True)
    opt = shard_optimizer(ddp, AdamW, stage=2, fused=True)
    for step in range(FIRST_STEPS):
        ddp(*task.draw(4, data)).backward()
        if step < FIRST_STEPS - 1:
            opt.step()
            opt.zero_grad()
    sharded, hook = engine_of(opt).shard, engine_of(opt).attachment.hook
    assert hook is not None, "stage 2 has one"
    acts: dict[str, Callable[[], object]] = {
        "first bucket: parameters moved or frozen?": lambda: sharded.binding.refresh(may_communicate=False),
        "first step of a bucket: groups edited?": lambda: sharded.table.check_groups(opt.param_groups),
        "last bucket: states created?": lambda: sharded.order.note_new(sharded.inner.state, sharded.targets.index_of),
        "after backward: what a loop may change": hook.late_changes.remember,
        "opt.step(): anything changed?": hook.late_changes.check_none,
    }
    return {name: median_ms(act, time.perf_counter) for name, act in acts.items()}


def measure(rank: int, folder: str) -> None:
    """The program of a rank; the first writes the results to a file."""
    torch.set_num_threads(1)
    rendezvous = (Path(folder) / "rendezvous").as_uri()
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=RANKS)
    found: Found = {"messages": messages(), "passes": passes()}
    if rank == 0:
        (Path(folder) / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def table(found: Found) -> str:
    """Markdown: both lists."""
    size = f"{BUCKETS * NUMEL * 4 / 1e6:.0f} MB"
    rows = [f"| {size} of gradients and parameters | CPU ms per rank |", "| --- | --- |"]
    rows += [f"| {name} | {ms:.1f} |" for name, ms in found["messages"].items()]
    rows += ["", "| pass over 2,000 tensors, stage 2 | ms |", "| --- | --- |"]
    rows += [f"| {name} | {ms:.2f} |" for name, ms in found["passes"].items()]
    return "\n".join(rows)


def main() -> None:
    """Measure, print, store."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(measure, args=(folder,), nprocs=RANKS)
        found: Found = json.loads((Path(folder) / "found.json").read_text())
    facts = f"- date: {date.today()}\n- command: python -m benchmarks.overhead\n- torch {torch.__version__}\n"
    text = f"{facts}\n{table(found)}\n"
    sys.stdout.write(text)
    (RESULTS / "overhead-2ranks.md").write_text(text)
    (RESULTS / "overhead-2ranks.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
