"""DDP with a sharded AdamW: ZeRO stage 2, gradient clipping, a checkpoint. Copy this and replace model and data.

    torchrun --standalone --nproc-per-node=2 examples/minimal.py

Run it again, with the same or a different number of ranks, and it continues from its checkpoint in runs/minimal.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_zero import checkpoint, shard_optimizer

FOLDER = "runs/minimal"
STEPS = 100  # per run


def draw_batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Inputs, and the function of them that the model learns."""
    inputs = torch.randn(32, 16, generator=generator)
    return inputs, inputs.square().mean(dim=1, keepdim=True)


def train() -> None:
    """Train for some steps, after those of earlier runs."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)  # stage 2 requires bucket views
    opt = shard_optimizer(ddp, torch.optim.AdamW, stage=2, max_grad_norm=1.0, lr=1e-2)

    done = 0
    try:
        done = checkpoint.load(FOLDER, ddp, opt).step
    except FileNotFoundError:  # the first run
        pass

    data = torch.Generator().manual_seed(1000 * done + rank)  # each rank draws its own data
    for step in range(done + 1, done + STEPS + 1):
        inputs, targets = draw_batch(data)
        loss = F.mse_loss(ddp(inputs), targets)
        loss.backward()
        opt.step()
        opt.zero_grad()
        if rank == 0 and step % 20 == 1:
            print(f"step {step} loss {loss.item():.4f} {opt.last_step}", flush=True)

    checkpoint.save(FOLDER, ddp, opt, step=done + STEPS, keep=2)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()
