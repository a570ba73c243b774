"""A script whose two ranks end at different times, run by `test_ending`: arguments are a folder and modes.

The ranks of each mode write to a file of its name.
"""

import os
import sys
import time
from datetime import timedelta
from itertools import product

import torch
import torch._dynamo  # what a first step imports, before ranks are forked
import torch.distributed as dist
from torch import nn
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from ddp_zero import ZeroRedundancyOptimizer, shard_optimizer


def _trained() -> tuple[DistributedDataParallel, ZeroRedundancyOptimizer]:
    model = DistributedDataParallel(nn.Linear(4, 4), gradient_as_bucket_view=True)
    opt = shard_optimizer(model, AdamW, stage=2)
    for _ in range(2):
        model(torch.randn(2, 4)).sum().backward()
        opt.step()
        opt.zero_grad()
    return model, opt


def main(folder: str, mode: str, rank: int) -> None:
    """Train, and end as the mode says."""
    store = FileStore(f"{folder}/{mode}.store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    model, opt = _trained()
    if mode == "one rank trains on" and rank == 0:
        try:
            model(torch.randn(2, 4)).sum().backward()
        except RuntimeError:
            print("rank 0 has seen that rank 1 has ended")
    if mode == "the last update is dropped":
        model(torch.randn(2, 4)).sum().backward()
    if mode == "the last line saves":
        time.sleep(1.5 if rank == 0 else 0)
        if rank == 0:
            torch.save(opt.state_dict(), f"{folder}/state.pt")


def fail_as_worker(rank: int, folder: str, how: str) -> None:
    """Train; rank 1 ends, and rank 0 fails afterwards."""
    store = FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(hours=1))
    kept.extend(_trained())
    dist.barrier()
    if rank == 0:
        time.sleep(1.5)
        if how == "exits":
            sys.exit(3)
        raise ValueError("rank 0 fails when rank 1 has ended")


kept: list[object] = []
"""The model and the optimizer of a worker, which outlive its function, as those of a script do."""

if __name__ == "__main__":
    ranks = []
    for mode, number in product(sys.argv[2:], range(2)):
        process = os.fork()
        if process == 0:
            output = os.open(f"{sys.argv[1]}/{mode}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(output, 1)
            os.dup2(output, 2)
            main(sys.argv[1], mode, number)
            break  # a rank goes on to the end of its interpreter
        ranks.append(process)
    else:
        sys.exit(any([os.waitpid(process, 0)[1] for process in ranks]))
