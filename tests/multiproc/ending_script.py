"""A script whose ranks end at different times, run by `test_ending`: arguments are a mode and a file."""

import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from ddp_zero import shard_optimizer


def main(mode: str, file: str) -> None:
    """Train, and end as the mode says."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    model = DistributedDataParallel(nn.Linear(4, 4), gradient_as_bucket_view=True)
    opt = shard_optimizer(model, AdamW, stage=2)
    for _ in range(2):
        model(torch.randn(2, 4)).sum().backward()
        opt.step()
        opt.zero_grad()
    if mode == "one rank trains on" and rank == 0:
        try:
            model(torch.randn(2, 4)).sum().backward()
        except RuntimeError:
            print("rank 0 has seen that rank 1 has ended")
    if mode == "the last line saves":
        time.sleep(1.5 if rank == 0 else 0)
        if rank == 0:
            torch.save(opt.state_dict(), file)


main(*sys.argv[1:])
