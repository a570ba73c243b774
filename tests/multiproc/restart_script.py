"""A training script for torchrun: stage 2, a checkpoint after every step, and a worker that dies in the first attempt.

Arguments: a folder for checkpoints; a file for the last parameters; the step after which rank 1 dies, or -1; seconds
that rank 1 starts late in later attempts.
"""

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_zero import checkpoint, launch, shard_optimizer

STEPS = 6


def main(root: Path, result: Path, dies_after: int, late: float) -> None:
    """Train, from the last checkpoint on if there is one."""
    torch.set_num_threads(1)
    rank, attempt = int(os.environ["RANK"]), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if attempt and rank == 1:
        time.sleep(late)
    launch.init_process_group("gloo", timeout=timedelta(seconds=30))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.001, gradient_as_bucket_view=True)
    opt = shard_optimizer(ddp, torch.optim.AdamW, stage=2, lr=0.01)
    has_saved = any(root.glob("step-*/complete.json"))  # hosts count attempts of their own
    first = checkpoint.load(root, ddp, opt).step + 1 if has_saved else 0
    print(f"attempt {attempt} rank {rank} starts at step {first}", flush=True)
    for step in range(first, STEPS):
        generator = torch.Generator().manual_seed(100 * step + rank)
        opt.zero_grad()
        ddp(torch.randn(8, 16, generator=generator)).square().mean().backward()
        opt.step()
        checkpoint.save(root, ddp, opt, step=step, keep=2).wait()
        if step == dies_after and rank == 1 and not attempt:
            os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        torch.save([param.detach().clone() for param in model.parameters()], result)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
